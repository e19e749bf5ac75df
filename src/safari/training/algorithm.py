"""Client algorithms: what clients do besides plain local steps, written once against stacked tensors.

All tensors are stacked, a row a client; a single client is a stack of one. So the same few lines serve the
reference engine, all clients at once, and one client on a device.

    begin       where the local steps begin, instead of at the broadcast
    loss        the training loss of each sample, from outputs, labels and what the client knows of its own data
    direction   what a local step follows, from the gradient:  FedProx: g + μ (w - x);  SCAFFOLD: g - c_i + c
    finish      after the last step: the state that stays with the client, and vectors that travel beside the model
    sends       which vectors those are, and how many numbers each has
    server      what the server does with those of the clients that arrived, and what it sends along next time

When a message is lost, each side acts on what it knows:

- A client that did not receive the broadcast does nothing in that round; its state stays.
- A client that did trains and keeps the state that `finish` gave it. It does not learn whether its upload
  arrived.
- The server acts as if a lost upload had never been sent. What must agree on both sides is therefore sent as it
  *is* (SCAFFOLD: the control variate), never as a change of what the other side may not have.
- A client that missed broadcasts gets what it needs with the next one: what travels down is a state, not a
  change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.errors import ConfigError
from safari.tasks import Task

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Known:
    """Facts that clients know of their own data, a row each.

    `label_counts` is `float32[clients, classes]`, without columns for a task that has no classes; `samples` is
    `float32[clients]`.
    """

    label_counts: Tensor
    samples: Tensor

    def rows(self, clients: list[int]) -> Known:
        """Select the rows of some clients."""
        if clients == list(range(len(self.samples))):
            return self
        return Known(self.label_counts[clients], self.samples[clients])


@dataclass(frozen=True)
class LocalRound:
    """Some clients in the middle of a round.

    model, start: `float32[clients, parameters]`, where they stand and where they began, masked.
    mask: what they keep.
    state: each client's own tensors.
    down: the vectors that came with the broadcast, one for all or a row a client.
    known: what the clients know of their own data.
    step, steps: the local steps done, and those of the round in all. `steps` is a tensor of one number where the steps
        of this package's own algorithms are recorded for replay.
    lr: the learning rate.
    gradient: `gradient(at)`, the gradient of the current mini-batch's loss at other models; it costs as much as
        a step.
    """

    model: Tensor
    start: Tensor
    mask: Tensor
    state: State
    down: State
    known: Known
    step: int
    steps: int | Tensor
    lr: float | Tensor
    gradient: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ServerHalf:
    """The server's side of a client algorithm.

    init: `(clients, parameters, device) -> state`, a dict of tensors that checkpoints can hold.
    down: `(state) -> vectors` that travel with the next broadcast: of one dimension where all clients get the
        same (`float32[parameters]`), of two where each gets a row of its own (`float32[clients, n]`).
    apply: `(state, step, up, round) -> (step, state)`, after the weighted sum. `step` is the change of the
        parameters that the sum gave, `up` what the arrivals sent beside their models, a row each in the order
        of `round.arrived`. It is not called when nobody arrived.
    average: `(state, model) -> parameters` that are tested and given away beside the newest model, instead of the
        running average (`aggregation.average`). `state` is the one after the round, `model` the newest parameters.
    """

    init: Callable[[int, int, torch.device], State]
    down: Callable[[State], State]
    apply: Callable[[State, Tensor, State, Round], tuple[Tensor, State]]
    average: Callable[[State, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Scaled:
    """A direction that is elementwise in the gradient g: (weight · g + shift) / scale, clipped at ±limit.

    `shift` and `scale` are `float32[parameters]`, the same for all clients and all steps of a round. Other shapes
    broadcast, and take the way of any other direction.
    """

    weight: float
    shift: Tensor
    scale: Tensor
    limit: float

    def of(self, gradient: Tensor) -> Tensor:
        """The direction.

        >>> Scaled(0.5, torch.tensor([1.0, -9.0]), torch.tensor([2.0, 1.0]), limit=5.0).of(torch.tensor([[4.0, 4.0]]))
        tensor([[ 1.5000, -5.0000]])
        """
        return ((self.weight * gradient + self.shift) / self.scale).clamp(-self.limit, self.limit)


def _nothing(clients: int, parameters: int, device: torch.device) -> State:
    return {}


def _alone(parameters: int) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True)
class _Along:
    """`ClientAlgorithm.scaled` as a direction."""

    scaled: Callable[[State], Scaled]

    def __call__(self, gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        return self.scaled(local.down).of(gradient), local.state


@dataclass(frozen=True)
class ClientAlgorithm:
    """A client algorithm; every part that is None is plain FedAvg's.

    init: `(clients, parameters, device) -> state` that stays with the clients, a row each.
    begin: `(start, state, down) -> models` at which their local steps begin, in place of the broadcast, which is
        `start` (`float32[clients, parameters]`). Masks are still computed on the broadcast, and applied to these.
    loss: `(outputs, labels, known, task) -> losses`; outputs and labels are `[clients, n, ...]`, losses
        `[clients, n]`.
    direction: `(gradient, local) -> (direction, state)`, for every local step.
    scaled: `(down) -> Scaled`, instead of `direction`, where that is elementwise in the gradient and leaves the
        state as it is: an engine can put it into its step, without a pass over memory of its own.
    finish: `(local) -> (state, up)`, after the last one. What `direction` put into the state and `finish` does
        not return is gone.
    sends: `(parameters) -> sizes`: the vectors that `finish` sends up, by name, and how many numbers each has;
        `{"variate": parameters}`, for example. None by default.
    send: `(local) -> parameters` that go up in place of the trained ones.
    server: the server's side.
    check: `(task) -> None`; raises ConfigError where a task cannot be trained this way.
    counts_labels: whether the loss looks at `known.label_counts`.
    plain_steps: whether local steps have to be SGD's, because the server reads gradients off the updates.
    name: what messages begin with.
    """

    init: Callable[[int, int, torch.device], State] = _nothing
    begin: Callable[[Tensor, State, State], Tensor] | None = None
    loss: Callable[[Tensor, Tensor, Known, Task], Tensor] | None = None
    direction: Callable[[Tensor, LocalRound], tuple[Tensor, State]] | None = None
    scaled: Callable[[State], Scaled] | None = None
    finish: Callable[[LocalRound], tuple[State, State]] | None = None
    sends: Callable[[int], Mapping[str, int]] = _alone
    send: Callable[[LocalRound], Tensor] | None = None
    server: ServerHalf | None = None
    check: Callable[[Task], None] = field(default=lambda task: None)
    counts_labels: bool = False
    plain_steps: bool = False
    name: str = "the client algorithm"

    def __post_init__(self) -> None:
        """Give `direction` from `scaled`, for code that does not know `scaled`."""
        if self.scaled is None:
            return
        if not isinstance(self.direction, _Along | None):
            raise ConfigError(
                f"{self.name} has both a direction and `scaled`, which is one; it can follow one alone"
            )
        object.__setattr__(self, "direction", _Along(self.scaled))

    @property
    def keeps_state(self) -> bool:
        """Does a client keep state from a round, even if its upload is lost?"""
        return self.init is not _nothing


def vectors_beside(algorithm: ClientAlgorithm, local: LocalRound) -> tuple[State, State]:
    """State and vectors from `finish`, the vectors in the order of `sends`; ConfigError if they differ."""
    if algorithm.finish is None:
        return local.state, {}
    state, vectors = algorithm.finish(local)
    declared = algorithm.sends(local.model.shape[1])
    sizes = {name: rows.shape[1] for name, rows in vectors.items()}
    if sizes != dict(declared):
        raise ConfigError(
            f"{algorithm.name}: sends must declare the vectors that finish sends up, {sizes or 'none'}, "
            f"got {dict(declared) or 'none'}"
        )
    return state, {name: vectors[name] for name in declared}


def per_sample(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """The task's loss of stacked outputs: `[clients, n]`."""
    found = task.loss(outputs.flatten(0, 1), labels.flatten(0, 1))
    return found.view(outputs.shape[0], -1)


def needs_classes(name: str) -> Callable[[Task], None]:
    """A check for algorithms that count labels."""

    def check(task: Task) -> None:
        if task.labels != "class":
            raise ConfigError(
                f"client.name: {name} counts each client's labels, so the task must have one class a sample; "
                f"task {task.name} has none"
            )

    return check
