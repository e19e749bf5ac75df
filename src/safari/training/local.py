"""Local sparse training (Algorithm 2): τ steps inside a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.models import Layout
from safari.pruning import Batch
from safari.tasks import Task, classification

Optimiser = Callable[[Iterable[nn.Parameter], float, int], torch.optim.Optimizer]

OPTIMISERS: dict[str, Optimiser] = {
    "sgd": lambda parameters, lr, steps: torch.optim.SGD(parameters, lr=lr / steps),
    "adam": lambda parameters, lr, steps: torch.optim.Adam(parameters, lr=lr),
}


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
) -> tuple[Tensor, float]:
    """One client's round: from `start ⊙ mask`, a step a batch, gradients masked. Returns model and mean loss.

    The module is scratch. Optimiser state is fresh; `sgd` steps with lr/τ, as in the paper; `seed` serves
    what is random inside the module (dropout). A pruned weight is exactly 0 at the end.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> layout = Layout.of(layer)
    >>> mask = torch.tensor([True, False, False, True])
    >>> batch = (torch.ones(1, 2), torch.tensor([0]))
    >>> trained, loss = train_local(
    ...     layer, layout, torch.ones(4), mask, [batch], optimiser="sgd", lr=1.0, seed=0)
    >>> trained  # logits (1, 1), so the gradient of the loss is (-1/2, 1/2)
    tensor([1.5000, 0.0000, 0.0000, 0.5000])
    """
    # Filled, not multiplied: 0 · inf is NaN, and 0 · -1 is -0.
    layout.write(module, start.masked_fill(~mask, 0.0))
    masks = layout.split(mask)
    # Only what is prunable can be masked: for the rest the mask is all True.
    pruned = [(p, ~masks[name]) for name, p in module.named_parameters() if not masks[name].all()]
    optimizer = OPTIMISERS[optimiser](
        (p for p in module.parameters() if p.requires_grad), lr, max(1, len(batches))
    )
    losses = []
    module.train()
    devices = [start.device] if start.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            for parameter, cut in pruned:
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(cut, 0.0)
            optimizer.step()
            losses.append(loss.detach())
    return layout.read(module), float(torch.stack(losses).mean()) if losses else float("nan")


def draw_batches(rng: np.random.Generator, samples: int, batch: int, steps: int) -> np.ndarray:
    """Which samples each step sees, `int64[steps, batch]`: pass after pass over the data, each shuffled anew.

    >>> draw_batches(np.random.default_rng(0), samples=4, batch=2, steps=2).shape
    (2, 2)
    """
    wanted = steps * batch
    if wanted <= samples:
        return rng.choice(samples, wanted, replace=False).reshape(steps, batch)
    passes = [rng.permutation(samples) for _ in range(-(-wanted // samples))]
    return np.concatenate(passes)[:wanted].reshape(steps, batch)


@torch.no_grad()
def evaluate(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    batch: int,
    memory_format: torch.memory_format = torch.preserve_format,
    *,
    task: Task | None = None,
) -> dict[str, float]:
    """The task's metrics of the module as it stands, in eval mode.

    Parameters
    ----------
    module: the model to test; its parameters say on which device.
    x, y: inputs and labels; they may be on another device.
    batch: samples in one forward pass.
    memory_format: the layout in memory in which the module gets its inputs.
    task: what to measure; classification where none is given: loss, top-1 and top-5 accuracy (fractions).
    """
    task = task or classification()
    module.eval()
    device = next((p.device for p in module.parameters()), x.device)
    # Summed where the module is, so that the host waits once and not after every batch.
    totals: dict[str, Tensor] = {}
    for start in range(0, len(y), batch):
        labels = y[start : start + batch].to(device, non_blocking=True)
        # A copy: a module may write into its inputs, and must find them as they are the next time.
        part = x[start : start + batch].to(device, copy=True, memory_format=memory_format)
        for name, value in task.measure(module(part), labels).items():
            totals[name] = totals[name] + value.double() if name in totals else value.double()
    sums = torch.stack(list(totals.values())).tolist()
    return dict(task.finish({name: value / len(y) for name, value in zip(totals, sums, strict=True)}))
