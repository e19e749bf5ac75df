"""Layout of a model, known to both ends before any bytes travel: the names and sizes of its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from safari.errors import SafariError

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

Kind = TypeVar("Kind", bound=np.generic)

LAYOUT_DIGEST_BYTES = 8
MAX_NUMBERS = 1 << 31


@dataclass(frozen=True)
class WireLayout:
    """A flat vector of `d` numbers as named entries; a mask may cut numbers of the prunable ones only.

    On the wire the prunable entries come first and the dense ones after them, each group in the order
    of the layout: neighbours are then alike, and every mask bit belongs to the first `prunable_total`.

    >>> layout = WireLayout(["conv.weight", "conv.bias", "fc.weight"], [6, 2, 4], [True, False, True])
    >>> layout.d, layout.prunable_total
    (12, 10)
    >>> layout.to_wire(np.arange(12)).tolist()
    [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 6, 7]
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    prunable: tuple[bool, ...]

    def __init__(self, names: Sequence[str], sizes: Sequence[int], prunable: Sequence[bool]):
        object.__setattr__(self, "names", tuple(str(name) for name in names))
        object.__setattr__(self, "sizes", tuple(int(size) for size in sizes))
        object.__setattr__(self, "prunable", tuple(bool(flag) for flag in prunable))
        if not len(self.names) == len(self.sizes) == len(self.prunable):
            raise SafariError(
                "names, sizes and prunable must be equally long, "
                f"got {len(self.names)}, {len(self.sizes)} and {len(self.prunable)}"
            )
        if any(size < 0 for size in self.sizes):
            raise SafariError(f"sizes must be at least 0, got {min(self.sizes)}")
        if self.d >= MAX_NUMBERS:
            raise SafariError(f"a layout must hold fewer than {MAX_NUMBERS} numbers, got {self.d}")

    @cached_property
    def d(self) -> int:
        """Number of values in the vector."""
        return sum(self.sizes)

    @cached_property
    def prunable_total(self) -> int:
        """Number of values that a mask may cut: the first ones in wire order."""
        return sum(size for size, flag in zip(self.sizes, self.prunable, strict=True) if flag)

    @cached_property
    def digest(self) -> bytes:
        """The first 8 bytes of the SHA-256 of names, sizes and flags: stands for the shapes on the wire."""
        text = "".join(
            f"{len(name.encode())}:{name},{size},{int(flag)};"
            for name, size, flag in zip(self.names, self.sizes, self.prunable, strict=True)
        )
        return hashlib.sha256(text.encode()).digest()[:LAYOUT_DIGEST_BYTES]

    @cached_property
    def wire_entries(self) -> tuple[int, ...]:
        """The indices of the entries in the order in which they travel."""
        order = range(len(self.names))
        return tuple([i for i in order if self.prunable[i]] + [i for i in order if not self.prunable[i]])

    @cached_property
    def wire_sizes(self) -> Ints:
        """The sizes of the entries in the order in which they travel."""
        return np.array([self.sizes[i] for i in self.wire_entries], np.int64)

    @cached_property
    def wire_starts(self) -> Ints:
        """Start of each entry in wire order; one more at the end, for `d`."""
        return np.concatenate([[0], np.cumsum(self.wire_sizes)]).astype(np.int64)

    @cached_property
    def wire_edges(self) -> Ints:
        """Starts in wire order without the repetitions that empty entries make."""
        return np.unique(self.wire_starts)

    @cached_property
    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        """Maximal pieces (start in the vector, start on the wire, length) that move as one."""
        starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(int).tolist()
        runs: list[tuple[int, int, int]] = []
        wire = 0
        for i in self.wire_entries:
            size = self.sizes[i]
            if runs and runs[-1][0] + runs[-1][2] == starts[i]:
                source, target, length = runs.pop()
                runs.append((source, target, length + size))
            else:
                runs.append((starts[i], wire, size))
            wire += size
        return tuple(runs)

    def to_wire(self, vector: npt.NDArray[Kind]) -> npt.NDArray[Kind]:
        """A vector of `d` items in wire order."""
        if len(self._runs) == 1:
            return vector
        return np.concatenate([vector[a : a + size] for a, _, size in self._runs] or [vector])

    def from_wire(self, vector: npt.NDArray[Kind]) -> npt.NDArray[Kind]:
        """The inverse of `to_wire`."""
        if len(self._runs) == 1:
            return vector
        out = np.empty_like(vector)
        for a, b, size in self._runs:
            out[a : a + size] = vector[b : b + size]
        return out

    def places(self, coordinates: Ints) -> Ints:
        """The places in the vector of ascending wire coordinates."""
        if len(self._runs) <= 1:
            return coordinates
        starts = [b for _, b, _ in self._runs]
        edges = np.searchsorted(coordinates, [*starts, self.d])
        shifts = np.array([a - b for a, b, _ in self._runs], np.int64)
        return coordinates + np.repeat(shifts, np.diff(edges))

    def positions(self, first: int, span: int) -> Ints:
        """The places in the vector of the wire coordinates `first` to `first + span`."""
        pieces = [
            np.arange(a + max(first - b, 0), a + min(first + span - b, size), dtype=np.int64)
            for a, b, size in self._runs
            if b < first + span and first < b + size
        ]
        return np.concatenate([np.empty(0, np.int64), *pieces])
