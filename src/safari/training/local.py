"""Local sparse training (Algorithm 2): τ steps inside a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from safari.errors import ConfigError, brief
from safari.models import Entry, Layout
from safari.pruning import Batch
from safari.tasks import Task, classification
from safari.training.algorithm import ClientAlgorithm, Known, LocalRound, State, vectors_beside

Optimiser = Callable[[Iterable[nn.Parameter], float, int], torch.optim.Optimizer]

OPTIMISERS: dict[str, Optimiser] = {
    "sgd": lambda parameters, lr, steps: torch.optim.SGD(parameters, lr=lr / steps),
    "adam": lambda parameters, lr, steps: torch.optim.Adam(parameters, lr=lr),
}


class Trained(NamedTuple):
    """A client after its local steps: its model, the mean loss, and what its algorithm keeps and sends beside
    the model, stacked as `ClientAlgorithm` has it."""

    model: Tensor
    loss: float
    state: State
    up: State


@dataclass(frozen=True)
class ClientSide:
    """Inputs of clients beside the model: their state, the broadcast's vectors, facts of their own data.

    All tensors are stacked, a row a client, as in `ClientAlgorithm`.
    """

    state: State
    down: State
    known: Known

    def rows(self, rows: list[int]) -> ClientSide:
        """Select the rows of some of these clients."""
        state = {name: tensor[rows] for name, tensor in self.state.items()}
        # What has one dimension is the same for all.
        down = {name: tensor[rows] if tensor.ndim > 1 else tensor for name, tensor in self.down.items()}
        return ClientSide(state, down, self.known.rows(rows))

    def begin(self, algorithm: ClientAlgorithm, start: Tensor, parameters: int) -> Tensor:
        """Start of these clients' local steps: the algorithm's, or `start` (one for all or a row each)."""
        if algorithm.begin is None:
            return start
        rows = start.expand(len(self.known.samples), -1)
        own = algorithm.begin(rows[:, :parameters], self.state, self.down)
        return torch.cat([own, rows[:, parameters:]], dim=1)


def train_local(
    module: nn.Module,
    layout: Layout,
    start: Tensor,
    mask: Tensor,
    batches: Sequence[Batch],
    *,
    optimiser: str,
    lr: float,
    seed: int,
    task: Task | None = None,
    algorithm: ClientAlgorithm | None = None,
    side: ClientSide | None = None,
) -> Trained:
    """One client's round: from `start ⊙ mask`, a step a batch, gradients masked.

    The module is scratch. Optimiser state is fresh; `sgd` steps with lr/τ, as in the paper; `seed` serves
    what is random inside the module (dropout). A pruned weight is exactly 0 at the end. `task` is
    classification and `algorithm` plain FedAvg by default; `side` is the client's own side of the algorithm
    (by default none).

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> layout = Layout.of(layer)
    >>> mask = torch.tensor([True, False, False, True])
    >>> batch = (torch.ones(1, 2), torch.tensor([0]))
    >>> train_local(layer, layout, torch.ones(4), mask, [batch], optimiser="sgd", lr=1.0, seed=0).model
    tensor([1.5000, 0.0000, 0.0000, 0.5000])

    The logits are (1, 1), so the gradient of the loss is (-1/2, 1/2).
    """
    task, algorithm = task or classification(), algorithm or ClientAlgorithm()
    side = side or ClientSide({}, {}, Known(start.new_zeros(1, 0), start.new_zeros(1)))
    # Filled, not multiplied: 0 · inf is NaN, and 0 · -1 is -0.
    begin = side.begin(algorithm, start, layout.parameters).view(-1).masked_fill(~mask, 0.0)
    layout.write(module, begin)
    masks = layout.split(mask)
    # Only what is prunable can be masked: for the rest the mask is all True.
    pruned = [
        (p, ~masks[name]) for name, p in module.named_parameters() if name in masks and not masks[name].all()
    ]
    optimizer = OPTIMISERS[optimiser](
        (p for p in module.parameters() if p.requires_grad), lr, max(1, len(batches))
    )
    steps = _Steps(module, layout, begin, mask, task, algorithm, side, len(batches), lr)
    losses = []
    module.train()
    devices = [start.device] if start.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = steps.loss(x, y)
            loss.backward()
            for parameter, cut in pruned:
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(cut, 0.0)
            steps.redirect(x, y)
            optimizer.step()
            losses.append(loss.detach())
    model, state, up = steps.finish()
    return Trained(model, float(torch.stack(losses).mean()) if losses else float("nan"), state, up)


def no_gradient(at: Tensor) -> Tensor:
    """Refuse a gradient after the last step, where there is no mini-batch to take it on."""
    raise ValueError("there is no mini-batch after the last step")


class _Steps:
    """A client algorithm around the steps of an ordinary module: a stack of one client."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        begin: Tensor,
        mask: Tensor,
        task: Task,
        algorithm: ClientAlgorithm,
        side: ClientSide,
        count: int,
        lr: float,
    ):
        self._module, self._layout, self._task, self._algorithm = module, layout, task, algorithm
        self._start = begin[None, : layout.parameters]
        self._mask = mask[None, : layout.parameters]
        self._side, self._state = side, side.state
        self._count, self._lr, self._done = count, lr, 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean training loss of a batch."""
        outputs = self._module(x)
        if self._algorithm.loss is None:
            return self._task.mean_loss(outputs, y)
        return self._algorithm.loss(outputs[None], y[None], self._side.known, self._task).mean()

    def redirect(self, x: Tensor, y: Tensor) -> None:
        """Replace the gradient by the algorithm's direction."""
        if self._algorithm.direction is not None:
            gradient = self._gradient()
            with torch.no_grad():
                found, self._state = self._algorithm.direction(
                    gradient, self._local(partial(self._gradient_at, x, y))
                )
                found = found.masked_fill(~self._mask, 0.0)
            parameters = dict(self._module.named_parameters())
            for entry in self._entries():
                if parameters[entry.name].requires_grad:
                    parameters[entry.name].grad = found[0, entry.offset : entry.end].view(entry.shape)
        self._done += 1

    def finish(self) -> tuple[Tensor, State, State]:
        """The model to send, the state that stays, and the vectors that travel beside the model."""
        model, local = self._layout.read(self._module), self._local(no_gradient)
        if self._algorithm.send is not None:
            sent = self._algorithm.send(local)[0].masked_fill(~self._mask[0], 0.0)
            model = torch.cat([sent, model[self._layout.parameters :]])
        state, up = vectors_beside(self._algorithm, local)
        return model, state, up

    def _local(self, gradient: Callable[[Tensor], Tensor]) -> LocalRound:
        model = self._layout.read(self._module)[None, : self._layout.parameters]
        side = self._side
        return LocalRound(
            model, self._start, self._mask, self._state, side.down, side.known, self._done, self._count,
            self._lr, gradient,
        )  # fmt: skip

    def _entries(self) -> list[Entry]:
        return [e for e in self._layout.entries if e.kind != "buffer"]

    def _gradient(self) -> Tensor:
        """The parameters' gradients as one row; 0 where there is none."""
        parameters = dict(self._module.named_parameters())
        parts = []
        for entry in self._entries():
            found = parameters[entry.name].grad
            zeros = torch.zeros_like(parameters[entry.name])
            parts.append((zeros if found is None else found).detach().reshape(-1))
        return torch.cat(parts)[None]

    def _gradient_at(self, x: Tensor, y: Tensor, at: Tensor) -> Tensor:
        """The gradient of a batch's loss at other parameters; the module is then as it was."""
        held = self._layout.read(self._module)
        self._layout.write(self._module, torch.cat([at[0], held[self._layout.parameters :]]))
        counters = self._layout.counters(self._module)
        self._module.zero_grad(set_to_none=True)
        with torch.enable_grad():
            self.loss(x, y).backward()
        found = self._gradient().masked_fill(~self._mask, 0.0)
        self._layout.write(self._module, held)
        self._layout.put_back(self._module, counters)
        return found


def draw_batches(rng: np.random.Generator, samples: int, batch: int, steps: int) -> np.ndarray:
    """Sample indices of each step, `int64[steps, batch]`: passes over the data, each shuffled anew.

    >>> draw_batches(np.random.default_rng(0), samples=4, batch=2, steps=2).shape
    (2, 2)
    """
    wanted = steps * batch
    if wanted <= samples:
        return rng.choice(samples, wanted, replace=False).reshape(steps, batch)
    passes = [rng.permutation(samples) for _ in range(-(-wanted // samples))]
    return np.concatenate(passes)[:wanted].reshape(steps, batch)


class Scores(dict[str, float]):
    """Results of a model's test: metrics by name, and in `by_class` the accuracy of each class."""

    by_class: tuple[float, ...] = ()


@torch.no_grad()
def evaluate(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    batch: int,
    memory_format: torch.memory_format = torch.preserve_format,
    *,
    task: Task | None = None,
    classes: int = 0,
) -> Scores:
    """The task's metrics of the module as it stands, in eval mode.

    Parameters
    ----------
    module: the model to test; its parameters say on which device.
    x, y: inputs and labels; they may be on another device.
    batch: samples in one forward pass.
    memory_format: the layout in memory in which the module gets its inputs.
    task: what to measure; classification where none is given: loss, top-1 and top-5 accuracy (fractions).
    classes: measure the accuracy of each of so many classes as well, where the task knows of such; 0: do not.
    """
    task = task or classification()
    module.eval()
    device = next((p.device for p in module.parameters()), x.device)
    # Summed where the module is, so that the host waits once and not after every batch.
    totals: dict[str, Tensor] = {}
    right = torch.zeros(classes, dtype=torch.int64, device=device)
    for start in range(0, len(y), batch):
        labels = y[start : start + batch].to(device, non_blocking=True)
        # A copy: a module may write into its inputs, and must find them as they are the next time.
        part = x[start : start + batch].to(device, copy=True, memory_format=memory_format)
        outputs = module(part)
        for name, value in task.measure(outputs, labels).items():
            totals[name] = totals[name] + value.double() if name in totals else value.double()
        if classes and task.by_class is not None:
            right += task.by_class(outputs, labels, classes)
    sums = torch.stack(list(totals.values())).tolist()
    scores = task.finish({name: value / len(y) for name, value in zip(totals, sums, strict=True)})
    if task.score not in scores:
        raise ConfigError(
            f"task.name: {task.name}: a test must find the score {task.score}, got {brief(dict(scores))}"
        )
    tested = Scores(scores)
    if classes and task.by_class is not None:
        there = y.bincount(minlength=classes).tolist()
        tested.by_class = tuple(r / n if n else math.nan for r, n in zip(right.tolist(), there, strict=True))
    return tested
