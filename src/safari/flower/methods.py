"""Server side of a run's mask policy and client algorithm: all that it does beyond FedAvg.

A policy is asked at the start of a round. Its answer travels as data: the mask inside the model's frame (or
beside a lossy download), and, in the instructions, how many weights of each layer clients move or vote for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from safari.config import Config
from safari.errors import ConfigError
from safari.federation import Federation, State, masks_of
from safari.federation.algorithm import vectors_along
from safari.flower.protocol import OWN, SCORED, SHARED, WORKED_OUT
from safari.models import Layout
from safari.pruning import (
    POLICIES,
    Budget,
    MaskPolicy,
    Masks,
)
from safari.pruning.policies.regrow import GradientVotes, OwnMask, Steepest
from safari.rounds.masks import as_received, budget_of, sparsity_of
from safari.runs.elsewhere import decided, undecided
from safari.training import CLIENTS, ClientAlgorithm

STATIC, PLAIN = "static", "fedavg"
# Built-in policies to which clients report nothing but their model.
_SILENT = (STATIC, "set", "feddst", "early-bird")


@dataclass(frozen=True)
class Plan:
    """A round as it was planned: the policy's answer as clients are told it (None: they work their masks out from
    the model alone), and the vectors that travel down beside the model.

    `each`: those of which every client gets a row of its own, `[clients, n]`, and `fresh` the row of a client
    that has no seat yet. `up`: the vectors that come up beside each model, by name, and how many numbers each has.
    `lr`: the learning rate that clients have to step with; 0 where it is theirs to choose.
    """

    number: int
    budget: Budget
    masks: Masks | None = None
    down: Mapping[str, Tensor] = field(default_factory=dict)
    each: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: Mapping[str, Tensor] = field(default_factory=dict)
    up: Mapping[str, int] = field(default_factory=dict)
    lr: float = 0.0

    @property
    def base(self) -> Tensor | None:
        """The mask that travels with the model."""
        return None if self.masks is None else self.masks.base

    @property
    def shared(self) -> Tensor | None:
        """The mask that every client has to use."""
        return None if self.masks is None else self.masks.shared

    def received(self, x: Tensor) -> Tensor:
        """The global model as clients hold it."""
        return x if self.masks is None else as_received(x, self.masks)

    @property
    def kind(self) -> str:
        """Source of a client's mask: one of `protocol.MASKS`."""
        if self.masks is None:
            return WORKED_OUT
        if self.masks.shared is not None:
            return SHARED
        return SCORED if self.masks.own is None else OWN

    @property
    def moves(self) -> str:
        """Number of weights of each layer that a client moves by itself, as JSON."""
        own = None if self.masks is None else self.masks.own
        return json.dumps(list(own.choose.counts) if isinstance(own, OwnMask) else [])

    @property
    def votes(self) -> str:
        """Number of weights of each layer that a client votes for, as JSON."""
        votes = None if self.masks is None else self.masks.votes
        return json.dumps(list(votes.choose.counts) if isinstance(votes, GradientVotes) else [])


@dataclass(frozen=True)
class Methods:
    """A run's mask policy and client algorithm. `up`: as in `Plan`."""

    config: Config
    layout: Layout
    policy: MaskPolicy
    client: ClientAlgorithm
    up: Mapping[str, int]

    @classmethod
    def of(cls, config: Config, layout: Layout) -> Methods:
        """The parts that a config names; ConfigError where one does not exist or cannot be had."""
        policy, client = config.policy, config.client
        chosen = CLIENTS.build(client.name, client.options)
        up = dict(chosen.sends(layout.parameters))
        return cls(
            config,
            layout,
            POLICIES.build(policy.name, policy.options),
            chosen,
            up,
        )

    def check(self, download: str, upload: str, datagrams: bool) -> None:
        """ConfigError for what cannot travel in the way that messages do."""
        policy, client = self.config.policy.name, self.config.client.name
        if not self.config.pruning.masks_gradient:
            raise ConfigError("pruning.masks_gradient must be true on Flower, got false")
        if self.client.plain_steps and self.config.local.optimiser != "sgd":
            raise ConfigError(
                f"local.optimiser must be 'sgd' for client.name {client}, and local.lr and local.schedule what clients "
                f"step with: the server reads gradients off the updates; got {self.config.local.optimiser!r}"
            )
        if not self.client.plain_steps and "local" in decided(self.config) and undecided(self.config):
            raise ConfigError(
                f"config.local has no effect here for client.name {client}: clients say how they step in local_training"
            )
        if download == "dense":
            what = "clients without our side would not hear of it"
            if policy != STATIC:
                raise ConfigError(
                    f"policy.name must be {STATIC!r} with download='dense', got {policy!r}: {what}"
                )
            if client != PLAIN:
                raise ConfigError(
                    f"client.name must be {PLAIN!r} with download='dense', got {client!r}: {what}"
                )
        how = "datagrams" if datagrams else "upload='dense'"
        if datagrams or upload == "dense":
            if policy not in _SILENT:
                raise ConfigError(
                    f"policy.name must be one of {', '.join(_SILENT)} with {how}, got {policy!r}: votes travel in "
                    "one record with the model"
                )
            if self.up:
                raise ConfigError(
                    f"client.name must be an algorithm whose clients send nothing beside their model with {how}, got "
                    f"{client!r}, whose clients send {', '.join(self.up)}"
                )

    def alone(self, number: int) -> Plan:
        """A round in which nothing travels but the model."""
        pruning = self.config.pruning
        return Plan(number, budget_of(self.layout, pruning, sparsity_of(pruning, number)))

    def plan(self, fed: Federation, state: State) -> tuple[Plan, State]:
        """The round that comes next, and the state with what the policy has decided."""
        t = state.round
        rate = fed.lr(t) if self.client.plain_steps else 0.0
        plan = Plan(t, fed.budget(t), None, *self._down(state), self.up, rate)
        if fed.policy is None:
            return plan, state
        masks, state = masks_of(fed, state, state.model)
        return replace(plan, masks=self._told(masks, state.model)), state

    def _down(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """The vectors that travel down: the same for all, a row for each client, and the row of a newcomer."""
        half = self.client.server
        if half is None:
            return {}, {}, {}
        found = vectors_along(self.client, state["algorithm"])
        first = half.down(half.init(1, self.layout.parameters, state.model.device))
        each = {name: rows for name, rows in found.items() if rows.ndim > 1}
        same = {name: vector for name, vector in found.items() if vector.ndim == 1}
        return same, each, {name: first[name][0] for name in each}

    def _told(self, masks: Masks, x: Tensor) -> Masks:
        """The policy's answer as it is sent to clients; ConfigError where it cannot be."""
        base = torch.ones_like(x, dtype=torch.bool) if masks.base is None else masks.base
        for name, given, kind, maker in (
            ("votes", masks.votes, GradientVotes, "votes_for"),
            ("own", masks.own, OwnMask, "OwnMask"),
        ):
            if given is None:
                continue
            choose = getattr(given, "choose", None)
            if not isinstance(given, kind) or not isinstance(choose, Steepest):
                raise ConfigError(
                    f"policy.name: {self.config.policy.name}: {name} must be made by {maker} "
                    "(safari.pruning.policies.regrow) on Flower: another function cannot travel to the clients"
                )
            if not torch.equal(choose.mask, base):
                raise ConfigError(
                    f"policy.name: {self.config.policy.name}: {name} must choose from the mask that is announced"
                )
        return Masks(masks.shared, None if masks.shared is not None else base, masks.own, masks.votes, True)
