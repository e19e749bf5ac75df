"""A round's training as one CUDA graph: recorded once for each number of clients, then replayed.

A small net's kernels are shorter than the time Python needs to start them. Replaying a recording takes
that time away; it wants all inputs at fixed places, which are filled before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]


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
        side = torch.cuda.Stream()
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
            # A recording that breaks off complains about that, and hides that memory was short.
            if isinstance(error.__context__, torch.cuda.OutOfMemoryError):
                raise error.__context__ from None
            raise

    @property
    def pool(self) -> Any:
        """The memory of this recording, which others that never run at the same time can share."""
        return self._graph.pool()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The work on these inputs."""
        for place, tensor in zip(self._inputs, inputs, strict=True):
            place.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._outputs
