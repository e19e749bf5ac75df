"""A round's training as CUDA graphs, recorded once and then replayed.

A small net's kernels are shorter than the time Python needs to start them. Replaying a recording takes
that time away; it wants all inputs at fixed places, which are filled before each replay.

Where all clients make equally many steps, a round is one recording for each number of clients. Where they do not,
that would be one for each number of steps, too, and recording takes as long as several rounds: then steps are
recorded one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One stream for the trial runs of all recordings on a device. torch keeps the memory that a stream has freed for
    that stream alone: with a stream for each recording the working memory of a round would be held many times over.
    """
    return torch.cuda.Stream(device)


class Recorded:
    """`work(*inputs)` recorded; call it with inputs of the same shapes.

    The outputs are overwritten by the next call. Each call draws from `generators` as they then are.
    """

    def __init__(
        self,
        work: Work,
        inputs: Sequence[Tensor],
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
    ):
        self._inputs = [tensor.clone() for tensor in inputs]
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Kernels are compiled and libraries pick their algorithms here, outside the recording.
            work(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(self._graph, pool=pool):
                self._outputs = work(*self._inputs)
        except RuntimeError as error:
            # The error of a recording that breaks off would hide that memory was short.
            if isinstance(error.__context__, torch.cuda.OutOfMemoryError):
                raise error.__context__ from None
            raise

    @property
    def pool(self) -> Any:
        """The memory of this recording, which others that never run at the same time can share."""
        return self._graph.pool()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The work on these inputs; those with fewer rows than at first fill the first rows."""
        for place, tensor in zip(self._inputs, inputs, strict=True):
            part = place if place.shape == tensor.shape else place[: len(tensor)]
            part.copy_(tensor, non_blocking=True)
        return self.replay()

    def replay(self) -> tuple[Tensor, ...]:
        """The work on what lies in the places of the inputs."""
        self._graph.replay()
        return self._outputs


class Repeated(Protocol):
    """Work that has begun: a part that can be repeated any number of times, and an end.

    Tensors that pass from one to the next stay in their place in memory.
    """

    def again(self) -> None:
        """Do the repeated part once more."""

    def end(self) -> tuple[Tensor, ...]:
        """The outputs."""


class RecordedSteps:
    """`begin(*inputs)`, then `again()` any number of times, then `end()`, each recorded; see `Recorded`."""

    def __init__(
        self,
        begin: Callable[..., Repeated],
        inputs: Sequence[Tensor],
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
    ):
        def start(*places: Tensor) -> tuple[Tensor, ...]:
            # Called twice: what stays is what was recorded.
            self._begun = begin(*places)
            return ()

        def again() -> tuple[Tensor, ...]:
            self._begun.again()
            return ()

        self._start = Recorded(start, inputs, pool, generators)
        # Recording runs nothing, and the rest works on what the start leaves behind.
        self._start.replay()
        self._again = Recorded(again, (), self.pool, generators)
        self._end = Recorded(lambda: self._begun.end(), (), self.pool)

    @property
    def pool(self) -> Any:
        """See `Recorded.pool`."""
        return self._start.pool

    def __call__(self, times: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The beginning with these inputs, `times` repetitions, and the end."""
        self._start(*inputs)
        for _ in range(times):
            self._again.replay()
        return self._end.replay()
