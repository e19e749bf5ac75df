"""τ local steps for many clients at once (Algorithm 2, stacked)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from safari.engine.stack.flat import Flat
from safari.engine.stack.masked_optimiser import BETA1, BETA2, EPS, MaskedStep
from safari.engine.stack.random_state import Forward, RandomState
from safari.pruning import Batch
from safari.tasks import Task, classification
from safari.training import ClientAlgorithm, ClientSide, Known, LocalRound, Scaled
from safari.training.algorithm import State, vectors_beside
from safari.training.local import no_gradient

# (outputs, labels) of all clients, sample after sample -> the loss of each sample.
StackedLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class StackedTraining(NamedTuple):
    """Clients after their local steps: models in the order of `Flat`, mean losses, and what their algorithm keeps
    and sends, a row a client."""

    models: Tensor
    losses: Tensor
    state: State
    up: State


def train_stacked(
    forward: Forward,
    flat: Flat,
    start: Tensor,
    masks: Tensor,
    batches: Iterable[Batch],
    steps: int,
    *,
    optimiser: str,
    lr: float | Tensor,
    random_state: RandomState,
    task: Task | None = None,
    algorithm: ClientAlgorithm | None = None,
    side: ClientSide | None = None,
    frozen: Collection[str] = (),
    compiled: bool = False,
) -> StackedTraining:
    """From `start ⊙ mask`, a step a batch; the arguments are those of `LocalSteps`."""
    local = LocalSteps(
        forward, flat, start, masks, steps, optimiser=optimiser, lr=lr, random_state=random_state, task=task,
        algorithm=algorithm, side=side, frozen=frozen, compiled=compiled,
    )  # fmt: skip
    losses = [local.step(x, y) for x, y in batches]
    return local.finish(torch.stack(losses).mean(0))


class LocalSteps:
    """Stacked clients in the middle of a round; inputs of a step are `[clients · n, ...]`.

    `start` is one model or a row a client, `masks` are `bool[clients, size]`, or one row for all. Parameters
    named in `frozen` stay as they are; `compiled` takes a step of the optimiser in one kernel (CUDA). `task` is
    classification and `algorithm` plain FedAvg by default. A learning rate that changes from round to round is a
    tensor, so that a recorded round can be replayed with another; so is `steps`, the number of steps in all, where
    steps are recorded one by one.
    """

    def __init__(
        self,
        forward: Forward,
        flat: Flat,
        start: Tensor,
        masks: Tensor,
        steps: int | Tensor,
        *,
        optimiser: str,
        lr: float | Tensor,
        random_state: RandomState,
        task: Task | None = None,
        algorithm: ClientAlgorithm | None = None,
        side: ClientSide | None = None,
        frozen: Collection[str] = (),
        compiled: bool = False,
    ):
        task, algorithm = task or classification(), algorithm or ClientAlgorithm()
        nothing = Known(start.new_zeros(flat.clients, 0), start.new_zeros(flat.clients))
        side = side or ClientSide({}, {}, nothing)
        start = side.begin(algorithm, start, flat.layout.parameters)
        # Filled, not multiplied, here and below: 0 · inf is NaN, and 0 · -1 is -0.
        self._models = flat.from_rows(start.masked_fill(~masks, 0.0).expand(flat.clients, -1))
        # Apart, because a pass writes to the buffers while the parameters wait for their gradients.
        parameters, self._buffers = self._models[: flat.parameters], self._models[flat.parameters :].clone()
        self._forward, self._flat, self._random_state = forward, flat, random_state
        scaled = None
        if compiled and optimiser == "sgd" and parameters.is_cuda:
            scaled = _in_the_step(algorithm, side.down, flat.layout.parameters)
        if scaled is not None:
            algorithm = replace(algorithm, direction=None, scaled=None)
        self._descend = _optimiser(flat, parameters, masks, optimiser, lr, steps, compiled, scaled)
        self._tensors, self._wanted = _leaves(flat, parameters, self._buffers, frozen)
        self._loss = _stacked_loss(flat, task, algorithm, side.known)
        self._local = _Local(
            forward, flat, parameters, self._buffers, masks, algorithm, side, self._loss, random_state, steps, lr,
            frozen,
        )  # fmt: skip

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """A step on a batch; the mean loss of each client before it."""
        parts, mean = _gradient_parts(
            self._forward, self._flat, self._tensors, self._wanted, x, y, self._random_state, self._loss
        )
        self._descend(self._local.redirect(parts, x, y))
        return mean

    def step_in_place(self, x: Tensor, y: Tensor) -> Tensor:
        """A step that can be replayed: the second or a later one, with all state in the places where the first step
        left it. Client algorithms of this package tell the first step from the others, and no more."""
        places = self._local.state
        mean = self.step(x, y)
        for name, tensor in self._local.state.items():
            if tensor is not places[name]:
                places[name].copy_(tensor)
        self._local.state = places
        return mean

    def finish(self, losses: Tensor) -> StackedTraining:
        """The end of the round, with the clients' mean losses."""
        self._models[self._flat.parameters :] = self._buffers
        state, up = self._local.finish()
        return StackedTraining(self._models, losses, state, up)


def _optimiser(
    flat: Flat,
    parameters: Tensor,
    masks: Tensor,
    optimiser: str,
    lr: float | Tensor,
    steps: int | Tensor,
    compiled: bool,
    scaled: Scaled | None,
) -> Callable[[Sequence[Tensor]], None]:
    """An optimiser's in-place step as a function of the full gradient, in parts; masked weights stay.

    `scaled`: what a compiled step of SGD follows instead of the gradient.
    """
    if parameters.device.type == "cpu":
        step = MaskedStep(parameters, flat.places(masks), optimiser=optimiser, lr=float(lr), steps=int(steps))
        return lambda parts: step(_whole(parts))
    kept = flat.from_rows(masks.expand(flat.clients, -1))[: flat.parameters]
    if optimiser == "sgd":

        def descend(parts: Sequence[Tensor]) -> None:
            size = lr / steps
            if compiled:
                from safari.engine.stack import fused

                if scaled is None:
                    fused.sgd_in_parts_(parameters, parts, kept, size)
                else:
                    fused.scaled_sgd_in_parts_(parameters, parts, kept, size, scaled, flat.clients)
                return
            gradient = _whole(parts).masked_fill(~kept, 0.0)
            if isinstance(size, Tensor):
                parameters.sub_(gradient * size)
            else:
                parameters.add_(gradient, alpha=-size)

        return descend
    moments = (torch.zeros_like(parameters), torch.zeros_like(parameters))
    # On the device where steps are replayed: the recording counts on. In float64, as a number would be.
    count: int | Tensor = parameters.new_zeros((), dtype=torch.float64) if isinstance(steps, Tensor) else 0

    def adam(parts: Sequence[Tensor]) -> None:
        nonlocal count
        count += 1
        adam_(parameters, _whole(parts), *moments, kept, count, lr, compiled)

    return adam


def _in_the_step(algorithm: ClientAlgorithm, down: State, parameters: int) -> Scaled | None:
    """The algorithm's direction, where it has a form that a step's kernel reads."""
    if algorithm.scaled is None:
        return None
    found = algorithm.scaled(down)
    if any(vector.shape != (parameters,) for vector in (found.shift, found.scale)):
        return None
    return replace(found, shift=found.shift.float().contiguous(), scale=found.scale.float().contiguous())


class _Local:
    """A client algorithm around stacked steps. Algorithms see rows, a client each; the steps see `Flat`'s order."""

    def __init__(
        self,
        forward: Forward,
        flat: Flat,
        parameters: Tensor,
        buffers: Tensor,
        masks: Tensor,
        algorithm: ClientAlgorithm,
        side: ClientSide,
        loss: StackedLoss,
        random_state: RandomState,
        steps: int | Tensor,
        lr: float | Tensor,
        frozen: Collection[str],
    ):
        self._forward, self._flat, self._loss = forward, flat, loss
        self._random_state, self._frozen = random_state, frozen
        self._parameters, self._buffers, self._algorithm = parameters, buffers, algorithm
        self._side, self.state, self._steps, self._lr, self._done = side, side.state, steps, lr, 0
        self._mask = masks[:, : flat.layout.parameters]
        used = algorithm.direction or algorithm.finish or algorithm.send
        self._start = self._rows(parameters).clone() if used else parameters

    def redirect(self, parts: Sequence[Tensor], x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """The algorithm's direction for this gradient, in parts; the gradient itself if it has none."""
        if self._algorithm.direction is not None:
            rows = torch.cat([part.view(self._flat.clients, -1) for part in parts], dim=1)
            rows = rows.masked_fill(~self._mask, 0.0)
            found, self.state = self._algorithm.direction(rows, self._round(partial(self._gradient_at, x, y)))
            parts = [self._flat.from_parameter_rows(found)]
        self._done += 1
        return parts

    def finish(self) -> tuple[State, State]:
        """The state that stays, and what travels beside the model; what is sent as the model is in place."""
        if not (self._algorithm.finish or self._algorithm.send):
            return self.state, {}
        local = self._round(no_gradient)
        state, up = vectors_beside(self._algorithm, local)
        if self._algorithm.send is not None:
            sent = self._algorithm.send(local).masked_fill(~self._mask, 0.0)
            self._parameters.copy_(self._flat.from_parameter_rows(sent))
        return state, up

    def _rows(self, flat: Tensor) -> Tensor:
        return self._flat.parameter_rows(flat)

    def _round(self, gradient: Callable[[Tensor], Tensor]) -> LocalRound:
        side = self._side
        return LocalRound(
            self._rows(self._parameters.detach()), self._start, self._mask, self.state, side.down, side.known,
            self._done, self._steps, self._lr, gradient,
        )  # fmt: skip

    def _gradient_at(self, x: Tensor, y: Tensor, at: Tensor) -> Tensor:
        elsewhere = self._flat.from_parameter_rows(at)
        # A pass writes to the buffers: this one to a copy, for it is no step.
        tensors, wanted = _leaves(self._flat, elsewhere, self._buffers.clone(), self._frozen)
        parts, _ = _gradient_parts(
            self._forward, self._flat, tensors, wanted, x, y, self._random_state, self._loss
        )
        return self._rows(_whole(parts)).masked_fill(~self._mask, 0.0)


def _stacked_loss(flat: Flat, task: Task, algorithm: ClientAlgorithm, known: Known) -> StackedLoss:
    """`(outputs, labels) -> float[clients · n]`, the training loss of every sample."""
    own = algorithm.loss
    if own is None:
        return task.loss

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        outputs, labels = (t.unflatten(0, (flat.clients, -1)) for t in (outputs, labels))
        return own(outputs, labels, known, task).flatten()

    return loss


def gradients(
    forward: Forward,
    flat: Flat,
    parameters: Tensor,
    buffers: Tensor,
    x: Tensor,
    y: Tensor,
    random_state: RandomState,
    frozen: Collection[str] = (),
    loss: StackedLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """Every client's gradient of its own mean loss, in the order of `flat`, and the losses.

    The gradient of what is frozen, or does not matter to the loss, is 0. `loss` is cross-entropy by default.
    """
    leaves = _leaves(flat, parameters, buffers, frozen)
    parts, mean = _gradient_parts(forward, flat, *leaves, x, y, random_state, loss or classification().loss)
    return _whole(parts), mean


def _leaves(
    flat: Flat, parameters: Tensor, buffers: Tensor, frozen: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every tensor of the clients as a view that follows all steps, and those whose gradients are wanted."""
    tensors = flat.views(parameters.detach(), buffers)
    names = [e.name for e in flat.layout.entries if e.kind != "buffer" and e.name not in frozen]
    return tensors, {name: tensors[name].requires_grad_() for name in names}


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """The gradient of all parameters from its parts."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _gradient_parts(
    forward: Forward,
    flat: Flat,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    random_state: RandomState,
    loss: StackedLoss,
) -> tuple[list[Tensor], Tensor]:
    """Every client's gradient, tensor by tensor in the order of `flat`, and the losses."""
    with torch.enable_grad():
        each = loss(forward(tensors, x, random_state).float(), y)
    # The gradient of each client's mean.
    share = torch.full_like(each, flat.clients / len(y))
    found = torch.autograd.grad(each, list(wanted.values()), share, allow_unused=True)
    known = dict(zip(wanted, found, strict=True))
    parts = []
    for e in flat.layout.entries:
        if e.kind != "buffer":
            gradient = known.get(e.name)
            parts.append((torch.zeros_like(tensors[e.name]) if gradient is None else gradient).reshape(-1))
    return parts, each.detach().view(flat.clients, -1).mean(1)


def adam_(
    parameters: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    kept: Tensor,
    step: int | Tensor,
    lr: float | Tensor,
    compiled: bool = False,
) -> None:
    """One step of Adam in place, as torch.optim.Adam does it, with the gradient masked.

    The compiled kernel takes a step and a learning rate that are numbers; tensors take the plain way.
    """
    if compiled and not isinstance(lr, Tensor) and not isinstance(step, Tensor):
        from safari.engine.stack import fused

        fused.adam_(parameters, gradient, first, second, kept, step, lr, BETA1, BETA2, EPS)
        return
    gradient.masked_fill_(~kept, 0.0)
    first.lerp_(gradient, 1 - BETA1)
    second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    size = lr / (1 - BETA1**step)
    correction = 1 - BETA2**step
    root = correction.sqrt() if isinstance(correction, Tensor) else math.sqrt(correction)
    denominator = (second.sqrt() / root).add_(EPS)
    if isinstance(size, Tensor):
        parameters.sub_(first / denominator * size)
    else:
        parameters.addcdiv_(first, denominator, value=-size)
