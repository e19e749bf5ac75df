"""State of clients' modules besides their vector: a random generator each, and counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from safari.engine.stack.ops import Tensors, Value


class RandomState:
    """For each client its own: a generator for what is random (dropout), and buffers that no vector holds
    (`counters`, by name, as a new module has them)."""

    def __init__(
        self, seeds: Sequence[int], device: torch.device, counters: Mapping[str, Tensor] | None = None
    ):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.counters = {
            name: torch.stack([count] * len(seeds)).to(device) for name, count in (counters or {}).items()
        }

    def begin(self, seeds: Sequence[int]) -> None:
        """Every generator as it was new, with another seed: a recording holds on to the generators."""
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)

    def each(self, work: Callable[[Tensor], Tensor], x: Value) -> Value:
        """A random operation, client by client: the same draws that each would make alone."""
        outputs = []
        # Unbound, not indexed: the gradient is then put together once, and not a whole one for each client.
        for generator, part in zip(self.generators, x.client_first().unbind(), strict=True):
            # Contiguous, as a client's activations are when it is alone: draws follow the memory's order. And
            # a copy, for the work may be done in place.
            with seeded_by(generator):
                outputs.append(work(part.clone(memory_format=torch.contiguous_format)))
        return Value(torch.cat(outputs), x.clients)


Forward = Callable[[Tensors, Tensor, RandomState], Tensor]
"""(tensors by name `[clients, *shape]`, inputs `[clients · n, ...]`, random_state) -> outputs, likewise."""


class seeded_by:  # noqa: N801 - reads as a verb at its uses
    """The global generator runs on a client's own state, and gives it back."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._cuda = generator.device.type == "cuda"

    def __enter__(self) -> None:
        if self._cuda:
            # The state itself changes hands, without a copy: that can be recorded in a graph, too.
            self._global = torch.cuda.default_generators[self._generator.device.index or 0]
            self._own = self._global.graphsafe_get_state()
            self._global.graphsafe_set_state(self._generator)
        else:
            self._before = torch.get_rng_state()
            torch.set_rng_state(self._generator.get_state())

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._global.graphsafe_set_state(self._own)
        else:
            self._generator.set_state(torch.get_rng_state())
            torch.set_rng_state(self._before)
