"""The server (Algorithm 3): models in, the next model out. It sees vectors and ids, never a module or a link.

This is all that another framework needs of SAFARI.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isfunction
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from safari.aggregation.blocks import aggregate, remembered
from safari.aggregation.checks import check_state, first_state, whole, whole_ids
from safari.aggregation.compensation import (
    Compensation,
    Decision,
    NotFiniteError,
    OnHost,
    Round,
    State,
    on_device,
)
from safari.aggregation.gates import GATES, Gate, admitted, judge, without
from safari.aggregation.registry import RULES
from safari.aggregation.steps import STEPS, UNCHANGED, ServerStep, advance, chain
from safari.aggregation.steps.average import AVERAGE
from safari.contracts import describe
from safari.errors import SafariError, one_of

Vector = Tensor | np.ndarray

# Numbers of this size have squares that are infinite in float32, and are no weights of a model.
_HUGE = 1e25


@dataclass(frozen=True)
class Outcome:
    """Outcome of a round: who arrived, who was missing, whose update was refused and why, and who stood in
    for whom.

    `shares` are the weights of the arrivals in the sum, those of the clients they stood in for included;
    `own` are their shares without these.
    """

    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    refused: Mapping[int, str]
    stand_ins: Mapping[int, tuple[int, ...]]
    # For clients whose model came in part: the share that came, and who stood in for the rest, largest part first.
    parts: Mapping[int, float] = field(default_factory=dict)
    part_stand_ins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # Whose update arrived and was made smaller by the gate, and why.
    clipped: Mapping[int, str] = field(default_factory=dict)
    shares: Tensor | None = field(default=None, compare=False, repr=False)
    own: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def lost(self) -> bool:
        """Nobody arrived, so that the model stayed as it was (unless the rule steps from memory)."""
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
    steps: ServerStep | None = None
    step_state: State = field(default_factory=dict)
    algorithm: ServerStep | None = None
    algorithm_state: State = field(default_factory=dict)
    gate: Gate = field(default_factory=GATES["off"])
    gate_state: State = field(default_factory=dict)

    @property
    def average(self) -> Tensor | None:
        """The running average of the models so far, or what a client algorithm has in its place; None where no step
        keeps one (`steps.average`)."""
        found = (t for name, t in self.step_state.items() if name.rpartition(".")[2] == AVERAGE)
        return self.algorithm_state.get(AVERAGE, next(found, None))

    @classmethod
    def start(
        cls,
        model: Vector,
        clients: int,
        rule: str | Compensation = "safari",
        *,
        weights: Sequence[float] | None = None,
        parameters: int | None = None,
        steps: Sequence[str | ServerStep] = (),
        gate: str | Gate = "norm",
        algorithm: ServerStep | None = None,
    ) -> Server:
        """A server before its first round.

        `model`: the first global model. `clients`: how many there are. `rule`: what to do about the missing,
        a name or a Compensation; no name of an oracle such as `perfect`, which only the simulator can have.
        `weights`: one positive number a client (say, its sample count); equal by default. `parameters`: how
        many numbers, from the front, are parameters (all by default): similarity looks at them alone.
        `steps`: what is done with the change that the weighted sum gave, in this order: names or ServerSteps.
        `gate`: which updates the rule gets to see, a name or a Gate; by default all but absurdly large ones.
        `algorithm`: the server's side of a client algorithm, which gets the change before `steps` do.
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
        links = _steps(steps)
        following = chain(*links) if links else None
        gate = _gate(gate)
        return cls(
            model=vector,
            round=0,
            weights=_shares(weights, clients),
            parameters=len(vector) if parameters is None else parameters,
            rule=rule,
            state=first_state(rule, clients, len(vector), vector.device),
            steps=following,
            step_state=following.init(vector) if following else {},
            algorithm=algorithm,
            algorithm_state=check_state(algorithm.name, "init", algorithm.init(vector)) if algorithm else {},
            gate=gate,
            gate_state=check_state(gate.name, "init", gate.init(clients, len(vector), vector.device)),
        )

    def step(
        self,
        received: Mapping[int, Vector],
        cohort: Sequence[int] | None = None,
        masks: Mapping[int, Vector] | None = None,
        came: Mapping[int, Vector] | None = None,
        most_kept: int | None = None,
        shares: Mapping[int, float] | None = None,
    ) -> tuple[Server, Outcome]:
        """Run one round; return the next server and the outcome.

        `received`: the models that arrived, by client id. `cohort`: who was asked (all by default). `masks`:
        the mask that a client trained with, by client id: bools, True where a number is kept. A client
        without one cut nothing. `came`: which numbers of a model arrived, by client id: bools; a model
        without an entry arrived whole. Numbers that did not arrive are not looked at. `most_kept`: how many
        numbers a mask may keep, those that are never pruned included. `shares`: what each of the cohort counts for
        in this round, by client id, such as how often it was drawn; by default the server's `weights`.

        A model of the wrong length, with a NaN or infinity in it, or not of numbers at all is refused, and so
        is one whose mask does not fit or keeps too much, that is not 0 where its mask cuts, or that the gate
        does not let through. Its client is then missing.
        """
        if not isinstance(received, Mapping):
            raise SafariError(f"received must map client ids to models, got {describe(received)}")
        if not isinstance(masks, Mapping | None):
            raise SafariError(f"masks must map client ids to masks, got {describe(masks)}")
        if not isinstance(came, Mapping | None):
            raise SafariError(f"came must map client ids to bools, got {describe(came)}")
        given = {} if masks is None else dict(zip(whole_ids("masks", masks), masks.values(), strict=True))
        parts = {} if came is None else dict(zip(whole_ids("came", came), came.values(), strict=True))
        asked = set(self._cohort(cohort))
        fitting: dict[int, Tensor] = {}
        refused: dict[int, str] = {}
        for client, raw in zip(whole_ids("received", received), received.values(), strict=True):
            vector, mask, part = _real_vector(raw), given.get(client), parts.get(client)
            if client not in asked:
                refused[client] = "was not asked in this round"
            elif vector is None:
                refused[client] = "is not an array of real numbers"
            elif vector.shape != self.model.shape:
                refused[client] = f"expected {len(self.model)} numbers, got shape {tuple(vector.shape)}"
            elif mask is not None and not _is_mask(mask, self.model.shape):
                refused[client] = f"expected a mask of {len(self.model)} bools, got {_form(mask)}"
            elif part is not None and not _is_mask(part, self.model.shape):
                refused[client] = f"expected {len(self.model)} bools of what came, got {_form(part)}"
            else:
                fitting[client] = vector.to(self.model.device)
        ids = sorted(fitting)
        models = torch.stack([fitting[i] for i in ids]) if ids else self.model.new_empty((0, len(self.model)))
        stacked = self._stack_masks([given.get(i) for i in ids])
        arrived = self._stack_masks([parts.get(i) for i in ids])
        server, outcome = self.step_stacked(
            ids, models, cohort, stacked, arrived, most_kept=most_kept, shares=shares
        )
        return server, replace(outcome, refused=refused | dict(outcome.refused))

    def step_stacked(
        self,
        ids: Sequence[int],
        models: Tensor,
        cohort: Sequence[int] | None = None,
        masks: Tensor | None = None,
        came: Tensor | None = None,
        *,
        same_mask: bool = False,
        up: Mapping[str, Tensor] | None = None,
        most_kept: int | None = None,
        lr: float = 0.0,
        shares: Mapping[int, float] | None = None,
        in_place: bool = False,
    ) -> tuple[Server, Outcome]:
        """Run one round on models given as one matrix: row i is the model of client `ids[i]`; ids ascend.

        `masks`: `bool[len(ids), size]`, or one row for all; None: nothing was cut. `came`: `bool[len(ids),
        size]`, True where a number arrived; None: all of them did. A client from which nothing arrived is missing.
        `same_mask`: every client has the same mask, those who are missing included. `up`: what clients sent
        beside their models, by name, a row for each id. `most_kept`: how many numbers a mask may keep. `shares`: see
        `step`. `lr`: the learning rate of the clients' steps, for client algorithms that ask for it (`Round.lr`).
        `in_place`: a rule's memory of clients is not copied; it goes over to the next server, and this one must not be
        used again.
        """
        asked = self._cohort(cohort)
        ids = whole_ids("ids", ids)
        self._check_stacked(ids, models, masks, asked)
        self._check_came(came, len(ids))
        parts = {} if came is None else _shares_that_came(ids, came)
        if came is not None and not any(0 < share < 1 for share in parts.values()):
            came = None
        if came is not None:
            models = torch.where(came, models, 0.0)
        refused = _unusable(ids, models, masks, most_kept) | _unusable_beside(ids, up)
        empty = {client for client, share in parts.items() if not share}
        if refused or empty:
            good = [i for i, client in enumerate(ids) if client not in refused and client not in empty]
            ids, models = [ids[i] for i in good], models[good]
            up = {name: rows[good] for name, rows in (up or {}).items()}
            masks = masks if masks is None or len(masks) == 1 else masks[good]
            came = None if came is None else came[good]
        if masks is None:
            masks = torch.ones((1, len(self.model)), dtype=torch.bool, device=models.device)
        device = self.model.device
        everybody = len(asked) == len(self.weights)
        cohort_ids = torch.arange(len(asked), device=device) if everybody else on_device(asked, device)
        arrived_ids = cohort_ids if ids == asked else on_device(ids, device)
        if shares is not None:
            weights = _cohort_shares(shares, asked)
        else:
            weights = self.weights if everybody else self.weights[asked]
        weights = weights / weights.sum()
        there = weights.to(device, non_blocking=True)
        view = Round(
            number=self.round,
            global_model=self.model,
            cohort=cohort_ids,
            arrived=arrived_ids,
            models=models,
            masks=masks.expand(len(ids), -1),
            weights=there,
            parameters=self.parameters,
            same_mask=same_mask,
            up=up or {},
            came=came,
            lr=lr,
            on_host=OnHost((cohort_ids, arrived_ids, there), asked, ids, weights),
        )
        ruling, gate_state = judge(self.gate, self.gate_state, view)
        following, view, decision, more = replace(self, gate_state=gate_state)._follow(
            admitted(view, ruling), in_place
        )
        arrived = tuple(view.arrived_ids)
        outcome = Outcome(
            arrived=arrived,
            missing=tuple(client for client in asked if client not in set(arrived)),
            refused=refused | dict(ruling.refused) | more,
            stand_ins={client: who for client, who in decision.stand_ins.items() if client not in arrived},
            part_stand_ins={client: who for client, who in decision.stand_ins.items() if client in arrived},
            shares=decision.a if decision.shares is None else decision.shares,
            own=view.own,
            parts={client: share for client, share in parts.items() if client in arrived and share < 1},
            clipped=dict(ruling.clipped),
        )
        return following, outcome

    def _follow(self, view: Round, in_place: bool) -> tuple[Server, Round, Decision, dict[int, str]]:
        """The next server, the round as it was aggregated, the decision, and who was refused on the way.

        Finite numbers may have an infinite sum. Then the arrivals that cause it are left out: what a gate that
        is off lets through must not end a training either.
        """
        try:
            return *self._next(view, in_place), {}
        except NotFiniteError:
            huge = _huge(view)
            if huge:
                server, view, decision, more = self._follow(without(view, huge), in_place)
                return server, view, decision, huge | more
            largest = max((_largest(t) for t in (self.model, *self.state.values())), default=0.0)
            if largest < _HUGE:
                # Then the rule or a step is at fault.
                raise
            reason = f"its sum with what the server holds, numbers up to {largest:.0e}, is not finite"
            refused = dict.fromkeys(view.arrived_ids, reason)
            lost = without(view, refused)
            if refused:
                # As a round in which nobody arrived: what the rule remembers grows older.
                return *self._follow(lost, in_place)[:3], refused
            return replace(self, round=self.round + 1), lost, Decision(lost.weights[:0]), refused

    def _next(self, view: Round, in_place: bool) -> tuple[Server, Round, Decision]:
        decision, model, state = aggregate(self.rule, self.state, view)
        states = [self.algorithm_state, self.step_state]
        if self.algorithm is not None or self.steps is not None:
            updated = len(view.arrived) > 0 or decision.b is not None
            model, states = advance(
                [self.algorithm or UNCHANGED, self.steps or UNCHANGED],
                states,
                replace(view, stand_ins=decision.stand_ins),
                model,
                updated=updated,
            )
        # Last: what was written in place could not be tried again with fewer arrivals.
        state = remembered(self.rule, state, view, in_place)
        following = replace(
            self,
            model=model,
            round=self.round + 1,
            state=state,
            algorithm_state=states[0],
            step_state=states[1],
        )
        return following, view, decision

    def _cohort(self, cohort: Sequence[int] | None) -> list[int]:
        clients = len(self.weights)
        asked = list(range(clients)) if cohort is None else sorted(whole_ids("cohort", cohort))
        if len(set(asked)) != len(asked):
            raise SafariError("cohort must name each client once")
        if not asked or asked[0] < 0 or asked[-1] >= clients:
            raise SafariError(f"cohort must hold ids from 0 to {clients - 1}, got {asked}")
        return asked

    def _check_came(self, came: Tensor | None, count: int) -> None:
        shape = torch.Size((count, len(self.model)))
        if came is not None and not _is_mask(came, shape):
            raise SafariError(f"came must be a tensor of bools of shape {[*shape]}, got {_form(came)}")

    def _stack_masks(self, masks: Sequence[Vector | None]) -> Tensor | None:
        """One row a client; None where no client cut anything."""
        if all(mask is None for mask in masks):
            return None
        out = torch.ones((len(masks), len(self.model)), dtype=torch.bool, device=self.model.device)
        for row, mask in zip(out, masks, strict=True):
            if mask is not None:
                row.copy_(torch.tensor(mask) if isinstance(mask, np.ndarray) else mask)
        return out

    def _check_stacked(
        self, ids: Sequence[int], models: Tensor, masks: Tensor | None, asked: Sequence[int]
    ) -> None:
        if any(i >= j for i, j in pairwise(ids)) or not set(ids) <= set(asked):
            raise SafariError(f"ids must ascend and be of clients that were asked, got {list(ids)}")
        shape = (len(ids), len(self.model))
        if not isinstance(models, Tensor) or models.shape != shape:
            raise SafariError(
                f"models must be a tensor of shape {[*shape]}, a row for each id, got {describe(models)}"
            )
        if masks is None:
            return
        rows = {len(ids), 1}
        if not any(_is_mask(masks, torch.Size((row, len(self.model)))) for row in rows):
            raise SafariError(
                f"masks must be a tensor of bools of shape {[*shape]}, a row for each id, or with one row "
                f"for all, got {_form(masks)}"
            )


def _shares_that_came(ids: Sequence[int], came: Tensor) -> dict[int, float]:
    return dict(zip(ids, came.double().mean(1).tolist(), strict=True))


def _start_vector(model: Vector) -> Tensor:
    try:
        # A copy without a graph: the caller goes on using theirs.
        return torch.as_tensor(model).detach().to(torch.float32, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SafariError(f"model must be one vector of finite numbers, got {describe(model)}") from error


def _rule(rule: object) -> Compensation:
    if isinstance(rule, str):
        return _named_rule(rule)
    if not isinstance(rule, Compensation):
        hint = f"; call it: rule={rule.__name__}()" if isfunction(rule) else ""
        if isinstance(rule, Mapping):
            hint = "; with options: rule=safari.aggregation.RULES[name](option=value)"
        raise SafariError(f"rule must be a name or a Compensation, got {describe(rule)}{hint}")
    return rule


def _named_rule(name: str) -> Compensation:
    if name not in RULES:
        usable = [known for known, make in RULES.items() if not make().overrides_network]
        file, colon, own = name.rpartition(":")
        # As a config names it; a server loads no files.
        hint = f"; import {own} from {file} and pass what it returns: rule={own}()" if colon else ""
        raise SafariError(one_of("rule", name, usable) + hint)
    rule = RULES[name]()
    if rule.overrides_network:
        raise SafariError(
            f"rule {name} is an oracle of the simulator, which trains everybody whatever the links do; "
            "a server has nothing but what arrived: use drop, which averages that, or safari, "
            "which has others stand in"
        )
    return replace(rule, name=f"rule {name}")


def _steps(steps: object) -> list[ServerStep]:
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise SafariError(f"steps must be a list of names and ServerSteps, got {describe(steps)}")
    return [_step(step) for step in steps]


def _step(step: object) -> ServerStep:
    if isinstance(step, str):
        if step not in STEPS:
            raise SafariError(one_of("steps", step, STEPS))
        return replace(STEPS[step](), name=f"step {step}")
    if not isinstance(step, ServerStep):
        hint = f"; call it: steps=[{step.__name__}()]" if isfunction(step) else ""
        raise SafariError(f"steps must hold names and ServerSteps, got {describe(step)}{hint}")
    return step


def _gate(gate: object) -> Gate:
    if isinstance(gate, str):
        if gate not in GATES:
            raise SafariError(one_of("gate", gate, GATES))
        return replace(GATES[gate](), name=f"gate {gate}")
    if not isinstance(gate, Gate):
        hint = f"; call it: gate={gate.__name__}()" if isfunction(gate) else ""
        raise SafariError(f"gate must be a name or a Gate, got {describe(gate)}{hint}")
    return gate


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


def _cohort_shares(shares: Mapping[int, float], asked: Sequence[int]) -> Tensor:
    found = [float(shares.get(client, 0.0)) for client in asked]
    if not all(math.isfinite(share) and share > 0 for share in found):
        raise SafariError(
            f"shares must hold a positive, finite number for each of the cohort, got {dict(shares)}"
        )
    return torch.tensor(found, dtype=torch.float64)


def _is_mask(mask: object, shape: torch.Size) -> bool:
    bools = (isinstance(mask, Tensor) and mask.dtype == torch.bool) or (
        isinstance(mask, np.ndarray) and mask.dtype == np.bool_
    )
    return bools and tuple(mask.shape) == tuple(shape)  # type: ignore[attr-defined]


def _form(thing: object) -> str:
    """An array by its dtype and shape; anything else by its type."""
    if isinstance(thing, Tensor | np.ndarray):
        return f"{str(thing.dtype).removeprefix('torch.')} of shape {[*thing.shape]}"
    return describe(thing)


def _huge(view: Round) -> dict[int, str]:
    """Clients whose numbers are too large to be averaged, with the reason."""
    found = {}
    for row, client in enumerate(view.arrived_ids):
        sent = [view.models[row], *(rows[row] for rows in view.up.values())]
        if (largest := max(map(_largest, sent))) >= _HUGE:
            found[client] = f"its numbers, up to {largest:.0e}, are too large to be averaged"
    return found


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.is_floating_point() and numbers.numel() else 0.0


def _unusable(
    ids: Sequence[int], models: Tensor, masks: Tensor | None, most_kept: int | None
) -> dict[int, str]:
    """Clients whose model cannot be averaged, with the reason."""
    refused = {} if most_kept is None else _too_dense(ids, models.shape[1], masks, most_kept)
    # A sum is finite only if all of its terms are; the numbers are looked at one by one only where it is not.
    total = models.sum()
    if masks is not None:
        # Not 0 > kept: a number where there should be none. Divided by 0 the sum is not finite either.
        inside = models.bool() <= masks
        total = total / inside.all()
    # The only transfer from the device.
    if math.isfinite(total.item()):
        return refused
    infinite = (~torch.isfinite(models)).sum(1).tolist()
    grown = [0] * len(ids) if masks is None else (~inside).sum(1).tolist()
    for client, bad, beyond in zip(ids, infinite, grown, strict=True):
        if bad:
            refused[client] = f"{bad} numbers are NaN or infinite"
        elif beyond:
            refused[client] = f"{beyond} numbers that its mask cuts are not 0"
    return refused


def _unusable_beside(ids: Sequence[int], up: Mapping[str, Tensor] | None) -> dict[int, str]:
    """Clients that sent a vector beside the model that is not finite, with the reason."""
    refused: dict[int, str] = {}
    for name, rows in (up or {}).items():
        if not bool(torch.isfinite(rows).all()):
            bad = (~torch.isfinite(rows)).flatten(1).sum(1).tolist()
            refused |= {
                client: f"{count} numbers of {name}, beside its model, are NaN or infinite"
                for client, count in zip(ids, bad, strict=True)
                if count
            }
    return refused


def _too_dense(ids: Sequence[int], size: int, masks: Tensor | None, most: int) -> dict[int, str]:
    kept = [size] if masks is None else masks.sum(1).tolist()
    counts = kept * len(ids) if len(kept) == 1 else kept
    return {
        client: f"its mask keeps {count} numbers, at most {most} were asked for"
        for client, count in zip(ids, counts, strict=True)
        if count > most
    }


def _real_vector(raw: Vector) -> Tensor | None:
    """Convert a received vector to float32 (infinite where too large); None if it cannot be converted."""
    try:
        # A copy, because arrays made from received bytes are read-only, and without its graph.
        vector = torch.tensor(raw) if isinstance(raw, np.ndarray) else torch.as_tensor(raw).detach()
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if vector.is_complex() else vector.to(torch.float32)
