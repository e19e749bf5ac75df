"""The forms of a round: what a federation is, what lasts from round to round, what goes out and what comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from safari.aggregation import Compensation, Gate, Server, ServerStep
from safari.aggregation.steps.average import AVERAGE
from safari.federation.algorithm import algorithm_step
from safari.models import Layout
from safari.pruning import Budget, MaskPolicy, Masks
from safari.sampling import Draw, Sampling
from safari.training import ClientAlgorithm

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class State:
    """A federation between two rounds: named tensors of each part that lasts.

    The server's parts are `model` (`model`, `average` where one is kept, and `mask`, the one announced last, where
    masks travel), `clients` (`weight`), `rule`, `gate`, `step`, `algorithm`, `policy`, `sampling` and `wire`. A
    simulator keeps its network and what clients remember under names of its own.

    >>> import torch
    >>> State(3, {"model": {"model": torch.zeros(2)}}).put("policy", {"age": torch.ones(1)})["policy"]
    {'age': tensor([1.])}

    Attributes
    ----------
    round: how many rounds are done.
    parts: the tensors of each part, by its name and theirs.
    """

    round: int
    parts: Mapping[str, Tensors]

    def __getitem__(self, part: str) -> dict[str, Tensor]:
        """A part's tensors; none where it keeps nothing."""
        return dict(self.parts.get(part, {}))

    def put(self, part: str, tensors: Tensors) -> State:
        """The state with other tensors for a part."""
        return replace(self, parts={**self.parts, part: tensors})

    @property
    def model(self) -> Tensor:
        """The global model."""
        return self.parts["model"]["model"]

    @property
    def average(self) -> Tensor | None:
        """The running average of the global models, where one is kept."""
        return self.parts["model"].get("average")

    @property
    def mask(self) -> Tensor | None:
        """The mask that was announced in the last round, where one was."""
        return self.parts["model"].get("mask")


@dataclass(frozen=True)
class Federation:
    """All parts of a federation that the server has a say in, and what does not change from round to round.

    Attributes
    ----------
    model: the first global model.
    clients: how many there are.
    layout: which numbers of a model are what.
    rounds: how many the run has.
    seed: what the draws of policy and sampling follow from.
    rule: what is done about the missing.
    gate: which updates the rule gets to see.
    steps: what is done with the change that the weighted sum gave.
    algorithm: the client algorithm, of which the server runs its side.
    policy: which weights are trained; None where clients work their masks out from the model alone.
    sampling: who is asked.
    cohort: how many are asked; 0: all.
    weights: what each client counts for; None: the same.
    lr: a round's learning rate.
    budget: how many weights masks keep in a round.
    score: `(model, round, support) -> mask`, the configured score; None where it looks at a client's data.
    levels: from the losses that were reported, how many levels uploads are rounded to; None where that is fixed.
    """

    model: Tensor
    clients: int
    layout: Layout
    rounds: int
    seed: int
    rule: Compensation
    gate: Gate | str
    steps: Sequence[ServerStep]
    algorithm: ClientAlgorithm
    policy: MaskPolicy | None
    sampling: Sampling
    cohort: int
    weights: Sequence[float] | None
    lr: Callable[[int], float]
    budget: Callable[[int], Budget]
    score: Callable[[Tensor, int, Tensor | None], Tensor] | None = None
    levels: Callable[[Tensor], int] | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters in a model; they come before the buffers."""
        return min(self.layout.parameters, len(self.model))

    @cached_property
    def _first(self) -> Server:
        return self._start()

    def _start(self) -> Server:
        return Server.start(
            self.model,
            self.clients,
            self.rule,
            weights=self.weights,
            parameters=self.parameters,
            steps=self.steps,
            gate=self.gate,
            algorithm=algorithm_step(self.algorithm, self.clients, self.parameters),
        )

    def server(self, state: State | None = None) -> Server:
        """The aggregating server as of a state; by default before the first round."""
        if state is None:
            # Of its own, because a round writes into the memory of the rule.
            return self._start()
        average = {} if state.average is None else {AVERAGE: state.average}
        return replace(
            self._first,
            model=state.model,
            round=state.round,
            weights=state["clients"].get("weight", self._first.weights),
            state=state["rule"],
            gate_state=state["gate"],
            step_state=_named(state["step"], average, self._first.step_state),
            algorithm_state=_named(state["algorithm"], average, self._first.algorithm_state),
        )

    def after(self, state: State, server: Server) -> State:
        """The state with what the server has become."""
        model = {**state["model"], "model": server.model}
        if server.average is not None:
            model["average"] = server.average
        parts = {
            **state.parts,
            "model": model,
            "rule": server.state,
            "gate": server.gate_state,
            "step": _without_average(server.step_state),
            "algorithm": _without_average(server.algorithm_state),
        }
        return State(server.round, parts)


def _is_average(name: str) -> bool:
    return name.rpartition(".")[2] == AVERAGE


def _without_average(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not _is_average(name)}


def _named(tensors: dict[str, Tensor], average: Tensors, first: Tensors) -> dict[str, Tensor]:
    """A chain's state with the average at its place in it."""
    return {**tensors, **{name: average[AVERAGE] for name in first if _is_average(name)}}


@dataclass(frozen=True)
class Broadcast:
    """The server's broadcast in a round.

    Attributes
    ----------
    round: its number, from 0.
    lr: the learning rate of the clients' steps.
    model: the global model as every client holds it: 0 outside an announced mask.
    masks: the policy's answer.
    along: the vectors that travel beside the model: `[n]` for all clients, or `[clients, n]`.
    draw: who is asked, and with which share.
    levels: how many levels uploads are rounded to, where the server says so.
    """

    round: int
    lr: float
    model: Tensor
    masks: Masks
    along: Tensors
    draw: Draw
    levels: int | None = None

    @property
    def announced(self) -> Tensor | None:
        """The mask that travels with the model."""
        return self.masks.base if self.masks.announced else None


@dataclass(frozen=True)
class Uploads:
    """Uploads that arrived in a round, by any transport: a row for each of `ids`.

    Attributes
    ----------
    asked: the clients that were asked.
    ids: the clients whose upload arrived, ascending.
    models: `float32[n, size]`, as decoded.
    masks: `bool[n, size]`, what was kept; one row may stand for all.
    received: `bool[n, size]`, which numbers arrived; None where models arrived whole.
    along: the vectors that arrived beside the models, a row each.
    votes: what clients reported to the mask policy, `float32[n, size]`.
    losses: mean training losses, `float[n]`; None where clients only claim them.
    same_mask: whether every client has the same mask, those who are missing included.
    shares: what each of those asked counts for in this round; None: as drawn.
    weights: what each client counts for from this round on; None: as before.
    trained: the clients known to have received the broadcast.
    refused: clients whose upload arrived and cannot be used, with the reason.
    new: ids that belong to another client than before.
    """

    asked: Sequence[int]
    ids: Sequence[int]
    models: Tensor
    masks: Tensor
    received: Tensor | None = None
    along: Tensors = field(default_factory=dict)
    votes: Tensor | None = None
    losses: Tensor | None = None
    same_mask: bool = False
    shares: Mapping[int, float] | None = None
    weights: Sequence[float] | None = None
    trained: Sequence[int] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    new: Sequence[int] = ()

    def rows(self, some: Sequence[int]) -> slice | list[int]:
        """The rows of these clients, as an index."""
        row = {client: k for k, client in enumerate(self.ids)}
        return index_of([row[client] for client in some])


def index_of(rows: Sequence[int]) -> slice | list[int]:
    """An index for these rows: a slice where they follow each other, which is a view and sends nothing to a device.

    >>> index_of([2, 3, 4]), index_of([0, 2])
    (slice(2, 5, None), [0, 2])
    """
    first = rows[0] if rows else 0
    neighbours = all(row == first + k for k, row in enumerate(rows))
    return slice(first, first + len(rows)) if neighbours else list(rows)
