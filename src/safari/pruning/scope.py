"""Number of weights that each layer keeps: one ranking over all layers, or a density of its own for each.

With n_l weights in layer l, N = Σ n_l and K = round((1 - sparsity) · N) weights kept in all:

    global    the K best of one ranking over all layers (the paper)
    uniform   the same density everywhere: k_l = n_l · K / N
    erk       the density of a layer is ε · (sum of its dimensions) / (product of its dimensions), at most 1
              (Erdős–Rényi-kernel; Mocanu et al. 2018, Evci et al. 2020)

Whatever the scope, exactly K weights are kept. Layers that stay dense count towards K, and the others give up
what these take: so a message has the same size whichever layers are dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from safari.errors import ConfigError, did_you_mean, one_of
from safari.models import Entry, Layout
from safari.pruning.budget import Budget, kept_count

# Where a rule for the densities lists a layer's share: its weights' count times its relative density.
Densities = Callable[[Entry], Fraction]


def uniform(entry: Entry) -> Fraction:
    """Every layer has the same density."""
    return Fraction(1)


def erk(entry: Entry) -> Fraction:
    """The sum of a layer's dimensions over their product: small layers are denser than large ones.

    >>> erk(Entry("conv", (32, 16, 3, 3), 0, "weight"))     # (32 + 16 + 3 + 3) / (32 · 16 · 3 · 3)
    Fraction(3, 256)
    """
    return Fraction(sum(entry.shape), max(1, entry.size))


SCOPES: dict[str, Densities | None] = {"global": None, "uniform": uniform, "erk": erk}


def weight_entries(layout: Layout) -> list[Entry]:
    """The prunable tensors of a layout, in order."""
    return [e for e in layout.entries if e.kind == "weight"]


def budget_for(
    layout: Layout,
    sparsity: float,
    scope: str = "global",
    *,
    dense: Sequence[str] = (),
    least: float = 0.0,
    prefix: str = "",
) -> Budget:
    """The budget of a model.

    `sparsity` is the fraction of all prunable weights that is cut. `scope` is one of `SCOPES`. `dense` names
    layers of which nothing is cut: "first", "last", or a parameter's name. `least` is the smallest density
    that any layer may have. `prefix` stands before the names of these arguments in error messages.

    >>> from torch import nn
    >>> layout = Layout.of(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))    # 128 and 64 weights
    >>> budget_for(layout, 0.75)
    Budget(total=48, layers=None, least=None)
    >>> budget_for(layout, 0.75, "uniform").layers, budget_for(layout, 0.75, "erk").layers
    ((32, 16), (26, 22))
    >>> budget_for(layout, 0.75, "uniform", dense=["last"])
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: sparsity must be lower for dense: those layers alone hold 64 weights, and 48 of
    192 are kept
    """
    entries = weight_entries(layout)
    total = kept_count(layout.prunable_count, sparsity, f"{prefix}sparsity")
    sizes = [e.size for e in entries]
    fixed = _dense_layers(entries, dense, f"{prefix}dense")
    if scope not in SCOPES:
        raise ConfigError(one_of(f"{prefix}scope", scope, SCOPES))
    held = sum(sizes[i] for i in fixed)
    if held > total:
        raise ConfigError(
            f"{prefix}sparsity must be lower for {prefix}dense: those layers alone hold {held} weights, "
            f"and {total} of {sum(sizes)} are kept"
        )
    floors = [size if i in fixed else math.ceil(Fraction(repr(least)) * size) for i, size in enumerate(sizes)]
    if sum(floors) > total:
        raise ConfigError(
            f"{prefix}least must be lower for {prefix}sparsity {sparsity}: layers would keep {sum(floors)} "
            f"weights at least, and {total} of {sum(sizes)} are kept; got {least}"
        )
    density = SCOPES[scope]
    if density is None:
        return Budget(total, least=tuple(floors) if any(floors) else None)
    return Budget(total, layers=_shared_out(total, sizes, floors, [density(e) * e.size for e in entries]))


def _dense_layers(entries: Sequence[Entry], names: Sequence[str], field: str) -> set[int]:
    """The positions of the layers that stay dense; for "first" and "last" the order of the module counts."""
    ends = {"first": 0, "last": len(entries) - 1}
    known = {e.name: i for i, e in enumerate(entries)} | ends
    found = set()
    for name in names:
        # A layer may go by its own name or by its weight's.
        place = known.get(name, known.get(f"{name}.weight"))
        if place is None:
            raise ConfigError(
                f"{field}: {name!r} is no prunable layer; there are first, last, "
                f"{', '.join(e.name for e in entries)}{did_you_mean(name, known)}"
            )
        found.add(place)
    return found


def _shared_out(
    total: int, sizes: Sequence[int], floors: Sequence[int], shares: Sequence[Fraction]
) -> tuple[int, ...]:
    """`total` weights divided in proportion to the shares, each layer between its floor and its size.

    A layer that meets a bound is fixed there, and the rest is divided among the others; what rounding leaves
    over goes to the largest fractions, the earlier layer first among equals.
    """
    counts: dict[int, int] = {}
    while True:
        free = [i for i in range(len(sizes)) if i not in counts]
        left = total - sum(counts.values())
        whole = sum((shares[i] for i in free), Fraction(0))
        if not free:
            break
        wanted = {i: shares[i] * left / whole if whole else Fraction(left, len(free)) for i in free}
        over = {i: sizes[i] for i in free if wanted[i] >= sizes[i]}
        under = {i: floors[i] for i in free if wanted[i] < floors[i]}
        # One kind at a time: fixing layers at their sizes leaves less for the others, and the reverse.
        bound = over or under
        if not bound:
            counts |= _rounded(wanted, left)
            break
        counts |= bound
    return tuple(counts[i] for i in range(len(sizes)))


def _rounded(wanted: dict[int, Fraction], total: int) -> dict[int, int]:
    counts = {i: int(w) for i, w in wanted.items()}
    order = sorted(wanted, key=lambda i: (counts[i] - wanted[i], i))
    for i in order[: total - sum(counts.values())]:
        counts[i] += 1
    return counts
