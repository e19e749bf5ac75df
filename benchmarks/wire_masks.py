"""Bytes for a mask that exchanged some weights for others, beside the entropy of the exchange.

    python benchmarks/wire_masks.py --json results/wire/masks.json

ResNet-20's weights at 80%, one density for all layers or those of an Erdős–Rényi kernel. In each layer a
share of the kept weights is cut and as many others come in, all chosen at random. The entropy is that of both
choices when the numbers of weights are known: the sum over layers of log2 C(kept, m) + log2 C(cut, m).
"""

from __future__ import annotations

import argparse
import json
from math import lgamma, log
from pathlib import Path

import numpy as np

from safari.models import Layout, resnet20
from safari.rounds.beside import wire_layout
from safari.wire import encode_mask, encode_votes

HEAD = 26
SPARSITY = 0.8


def choices_bytes(n, k):
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2) / 8


def erk(shapes, sparsity):
    """Densities in proportion to the sum of a layer's dimensions over their product, none above 1."""
    sizes = np.array([np.prod(shape) for shape in shapes], float)
    raw = np.array([sum(shape) / np.prod(shape) for shape in shapes])
    full = np.zeros(sizes.size, bool)
    while True:
        left = (1 - sparsity) * sizes.sum() - sizes[full].sum()
        density = np.where(full, 1.0, raw * left / (raw * sizes)[~full].sum())
        if (density <= 1).all():
            return density
        full |= density > 1


def exchanged(wire, densities, share, rng):
    """(held mask, new mask, entropy)."""
    held, new = np.ones((2, wire.d), bool)
    entropy, start, found = 0.0, 0, iter(densities)
    for size, prunable in zip(wire.sizes, wire.prunable, strict=True):
        if prunable:
            here = rng.permutation(size) < round(size * next(found))
            kept, cut = np.flatnonzero(here), np.flatnonzero(~here)
            count = min(round(share * kept.size), cut.size)
            after = here.copy()
            after[rng.choice(kept, count, replace=False)] = False
            after[rng.choice(cut, count, replace=False)] = True
            held[start : start + size], new[start : start + size] = here, after
            entropy += choices_bytes(kept.size, count) + choices_bytes(cut.size, count)
        start += size
    return held, new, entropy


def rows():
    layout = Layout.of(resnet20((3, 32, 32), 10))
    wire = wire_layout(layout)
    shapes = [entry.shape for entry in layout.entries if entry.kind == "weight"]
    rng = np.random.default_rng(0)
    for name, densities in (("uniform", [1 - SPARSITY] * len(shapes)), ("erk", erk(shapes, SPARSITY))):
        for share in (0.01, 0.03, 0.06):
            held, new, entropy = exchanged(wire, densities, share, rng)
            row = {"densities": name, "share": share, "entropy": entropy}
            for mode in ("swaps", "flips"):
                row[mode] = len(encode_mask(new, wire, held, mask_mode=mode)) - HEAD
            row["coded"] = len(encode_mask(new, wire, mask_mode="coded")) - HEAD + 8
            yield row


def votes(k, n=216_000):
    places = np.random.default_rng(0).choice(n, k, replace=False)
    return {"k": k, "n": n, "entropy": choices_bytes(n, k), "bytes": len(encode_votes(places, None, n)) - 18}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table, ballots = list(rows()), [votes(k) for k in (300, 3_000, 30_000)]
    for row in table:
        sizes = ", ".join(
            f"{mode} {row[mode]:,} ({row[mode] / row['entropy']:.3f})" for mode in ("swaps", "flips", "coded")
        )
        print(f"{row['densities']:<8} {row['share']:.0%}: entropy {row['entropy']:,.0f}, {sizes}")
    for row in ballots:
        print(
            f"votes {row['k']:,} of {row['n']:,}: entropy {row['entropy']:,.0f}, {row['bytes']:,} "
            f"({row['bytes'] / row['entropy']:.3f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"masks": table, "votes": ballots}, indent=1) + "\n")


if __name__ == "__main__":
    main()
