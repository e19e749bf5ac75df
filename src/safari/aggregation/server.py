"""The server (Algorithm 3): models in, the next model out. It sees vectors and ids, never a module or a link.

This is all that another framework needs of SAFARI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isfunction
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from safari.aggregation.checks import begin, decide, describe, whole, whole_ids
from safari.aggregation.compensation import Compensation, Round, State, combine
from safari.aggregation.registry import RULES
from safari.errors import SafariError, one_of

Vector = Tensor | np.ndarray


@dataclass(frozen=True)
class Outcome:
    """What happened in a round: who arrived, who was missing, whose update was refused and why,
    and who stood in for whom."""

    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    refused: Mapping[int, str]
    stand_ins: Mapping[int, tuple[int, ...]]

    @property
    def lost(self) -> bool:
        """Nobody arrived, so that the model stayed as it was."""
        return not self.arrived


@dataclass(frozen=True)
class Server:
    """A server's whole state; `step` returns the next one.

    >>> server = Server.start(torch.zeros(2), clients=3, rule="safari")
    >>> near, far = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 9.0])
    >>> server, _ = server.step({0: near, 1: near, 2: far})   # 0 and 1 turn out to be alike
    >>> server, outcome = server.step({0: near, 2: far})      # 1 is missing
    >>> outcome.stand_ins
    {1: (0,)}
    >>> server.model                                          # (near + near + far) / 3
    tensor([0.6667, 3.0000])
    """

    model: Tensor
    round: int
    weights: Tensor
    parameters: int
    rule: Compensation
    state: State

    @classmethod
    def start(
        cls,
        model: Vector,
        clients: int,
        rule: str | Compensation = "safari",
        *,
        weights: Sequence[float] | None = None,
        parameters: int | None = None,
    ) -> Server:
        """A server before its first round.

        `weights`: one positive number a client (say, its sample count); equal by default. `parameters`:
        how many numbers, from the front, are parameters (all by default): similarity looks at them alone.
        """
        vector = _start_vector(model)
        if vector.ndim != 1 or not len(vector) or not bool(torch.isfinite(vector).all()):
            raise SafariError(
                f"model must be one vector of finite numbers, got shape {tuple(vector.shape)}"
                f" with {int((~torch.isfinite(vector)).sum())} numbers NaN or infinite"
            )
        clients = whole("clients", clients)
        parameters = None if parameters is None else whole("parameters", parameters)
        if parameters is not None and not 1 <= parameters <= len(vector):
            raise SafariError(
                f"parameters must lie between 1 and the model's {len(vector)} numbers, got {parameters}"
            )
        if clients < 1:
            raise SafariError(f"clients must be at least 1, got {clients}")
        rule = _rule(rule)
        return cls(
            model=vector,
            round=0,
            weights=_shares(weights, clients).to(vector.device),
            parameters=len(vector) if parameters is None else parameters,
            rule=rule,
            state=begin(rule, clients, len(vector), vector.device),
        )

    def step(
        self, received: Mapping[int, Vector], cohort: Sequence[int] | None = None
    ) -> tuple[Server, Outcome]:
        """One round: `received` maps client ids to models; `cohort` is who was asked (all by default).

        A model of the wrong length, with a NaN or infinity in it, or not of numbers at all is refused,
        and its client is missing.
        """
        if not isinstance(received, Mapping):
            raise SafariError(f"received must map client ids to models, got {describe(received)}")
        asked = set(self._cohort(cohort))
        fitting: dict[int, Tensor] = {}
        refused: dict[int, str] = {}
        for client, raw in zip(whole_ids("received", received), received.values(), strict=True):
            vector = _real_vector(raw)
            if client not in asked:
                refused[client] = "was not asked in this round"
            elif vector is None:
                refused[client] = "is not an array of real numbers"
            elif vector.shape != self.model.shape:
                refused[client] = f"expected {len(self.model)} numbers, got shape {tuple(vector.shape)}"
            else:
                fitting[client] = vector.to(self.model.device)
        ids = sorted(fitting)
        models = torch.stack([fitting[i] for i in ids]) if ids else self.model.new_empty((0, len(self.model)))
        server, outcome = self.step_stacked(ids, models, cohort)
        return server, replace(outcome, refused=refused | dict(outcome.refused))

    def step_stacked(
        self, ids: Sequence[int], models: Tensor, cohort: Sequence[int] | None = None
    ) -> tuple[Server, Outcome]:
        """The same for models in one matrix: row i is the model of client `ids[i]`; ids ascend."""
        asked = self._cohort(cohort)
        ids = whole_ids("ids", ids)
        self._check_stacked(ids, models, asked)
        refused = {}
        # A sum is finite only if all that is in it is; the numbers are looked at one by one only where not.
        if not bool(torch.isfinite(models.sum(1)).all()):
            bad = (~torch.isfinite(models)).sum(1).tolist()
            refused = {
                client: f"{count} numbers are NaN or infinite"
                for client, count in zip(ids, bad, strict=True)
                if count
            }
            good = [i for i, count in enumerate(bad) if not count]
            ids, models = [ids[i] for i in good], models[good]
        device = self.model.device
        cohort_ids = torch.tensor(asked, dtype=torch.int64, device=device)
        weights = self.weights[cohort_ids]
        view = Round(
            number=self.round,
            global_model=self.model,
            cohort=cohort_ids,
            arrived=torch.tensor(list(ids), dtype=torch.int64, device=device),
            models=models,
            weights=weights / weights.sum(),
            parameters=self.parameters,
        )
        decision, state = decide(self.rule, self.state, view)
        model = combine(view, decision, self.rule.name)
        following = replace(self, model=model, round=self.round + 1, state=state)
        arrived = set(ids)
        outcome = Outcome(
            arrived=tuple(ids),
            missing=tuple(client for client in asked if client not in arrived),
            refused=refused,
            stand_ins=dict(decision.stand_ins),
        )
        return following, outcome

    def _cohort(self, cohort: Sequence[int] | None) -> list[int]:
        clients = len(self.weights)
        asked = list(range(clients)) if cohort is None else sorted(whole_ids("cohort", cohort))
        if len(set(asked)) != len(asked):
            raise SafariError("cohort must name each client once")
        if not asked or asked[0] < 0 or asked[-1] >= clients:
            raise SafariError(f"cohort must hold ids from 0 to {clients - 1}, got {asked}")
        return asked

    def _check_stacked(self, ids: Sequence[int], models: Tensor, asked: Sequence[int]) -> None:
        if any(i >= j for i, j in pairwise(ids)) or not set(ids) <= set(asked):
            raise SafariError(f"ids must ascend and be of clients that were asked, got {list(ids)}")
        shape = (len(ids), len(self.model))
        if not isinstance(models, Tensor) or models.shape != shape:
            raise SafariError(
                f"models must be a tensor of shape {[*shape]}, a row for each id, got {describe(models)}"
            )


def _start_vector(model: Vector) -> Tensor:
    try:
        # A copy without a graph: the caller goes on using theirs.
        return torch.as_tensor(model).detach().to(torch.float32, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SafariError(f"model must be one vector of finite numbers, got {describe(model)}") from error


def _rule(rule: object) -> Compensation:
    if isinstance(rule, str):
        if rule not in RULES:
            raise SafariError(one_of("rule", rule, RULES))
        return replace(RULES[rule](), name=f"rule {rule}")
    if not isinstance(rule, Compensation):
        hint = f"; call it: rule={rule.__name__}()" if isfunction(rule) else ""
        raise SafariError(f"rule must be a name or a Compensation, got {describe(rule)}{hint}")
    return rule


def _shares(weights: Sequence[float] | None, clients: int) -> Tensor:
    expected = f"weights must hold a positive, finite number for each of the {clients} clients"
    try:
        shares = torch.as_tensor(np.ones(clients) if weights is None else np.asarray(weights, np.float64))
    except (TypeError, ValueError) as error:
        raise SafariError(f"{expected}, got {weights!r}") from error
    if shares.shape != (clients,):
        raise SafariError(f"{expected}, got shape {[*shares.shape]}")
    wrong = (~((shares > 0) & shares.isfinite())).nonzero().flatten()
    if len(wrong):
        client = int(wrong[0])
        raise SafariError(f"{expected}, got {shares[client].item()} for client {client}")
    return shares


def _real_vector(raw: Vector) -> Tensor | None:
    """What came in, as float32 (infinite where too large for that); None when it has no such form."""
    try:
        # A copy, because arrays made from received bytes are read-only, and without its graph.
        vector = torch.tensor(raw) if isinstance(raw, np.ndarray) else torch.as_tensor(raw).detach()
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if vector.is_complex() else vector.to(torch.float32)
