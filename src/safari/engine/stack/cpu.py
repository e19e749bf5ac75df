"""CPU specifics: the number of clients in a stack, threads, memory, and the test of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from safari.engine.stack.forward import Stack
from safari.engine.stack.ops import by_pixel
from safari.engine.stack.thread_pool import ThreadPool

# What is stacked at most, in clients and in numbers of one step's inputs: beyond that activations leave the
# cache, and it no longer matters how long Python takes to start a kernel.
MOST_CLIENTS, MOST_INPUTS = 16, 1 << 16
# How many shares a thread of the pool gets before all wait for each other.
TURNS = 8
# The largest block from which glibc learns, less what it adds.
_LESSON = 31 << 20


def stacked_at_once(inputs: int) -> int:
    """Number of clients that a thread trains at once, given the size of one client's inputs in a step.

    >>> stacked_at_once(32 * 64), stacked_at_once(64 * 3 * 32 * 32)  # the demo; ResNet-20 on CIFAR-10
    (16, 1)
    """
    return min(MOST_CLIENTS, max(1, MOST_INPUTS // inputs))


def pool_for(stack: Stack) -> ThreadPool | None:
    """Threads that share the clients, where a pass has nothing in common with another's.

    Other ways than by layers put a client's numbers into the module, and what is random uses the one
    generator that torch has.
    """
    size = torch.get_num_threads()
    return ThreadPool(size) if size > 1 and stack.way == "layers" and not stack.random else None


def keep_freed_memory() -> None:
    """Let activations reuse the memory of those of the step before.

    glibc hands freed blocks back to the system, which clears each page when it is touched again: a quarter
    of a small net's round. It stops doing so for blocks up to the largest that was ever freed, so that
    freeing one is enough. Elsewhere this does nothing.
    """
    torch.empty(_LESSON, dtype=torch.uint8)


class Tester(nn.Module):
    """A module in eval mode: samples shared by the thread pool, and pictures by pixel where it can read that."""

    def __init__(self, module: nn.Module, pool: ThreadPool | None, example: Tensor):
        super().__init__()
        self._module, self._pool = module, pool
        self._by_pixel = example.ndim == 4 and _reads_by_pixel(module, example)

    def forward(self, x: Tensor) -> Tensor:
        """The module's outputs."""
        if self._by_pixel:
            x = by_pixel(x)
        if self._pool is None:
            return self._part(x)
        return torch.cat(self._pool.map(self._part, x.tensor_split(min(self._pool.size, len(x)))))

    @torch.no_grad()
    def _part(self, x: Tensor) -> Tensor:
        out: Tensor = self._module(x)
        return out


def _reads_by_pixel(module: nn.Module, example: Tensor) -> bool:
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            expected, found = module(example.clone()), module(by_pixel(example.clone()))
        return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())))
    except Exception:  # `view` refuses what lies otherwise, and a module may do anything
        return False
    finally:
        module.train(was_training)
