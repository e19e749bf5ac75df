"""What a lossy upload costs the simulator: rounded on tensors, by `roundtrip` in numpy, or through bytes.

    python benchmarks/wire_roundtrip.py --json results/wire/roundtrip.json

ResNet-20 at 80% and dense, ten clients with one mask, changes as Adam makes them. Medians over the
repetitions of the processor seconds for all ten clients, on one thread (torch is told so).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from safari.engine.lossy import seen
from safari.models import Layout, resnet20
from safari.rounds.beside import wire_layout
from safari.wire import Lossy, Shared, decode, encode, roundtrip

CLIENTS = 10
TENSOR_MODES = ("bf16", "int8", "qsgd", "step")
OTHER_MODES = ("sign", "top-k", "unbiased", "threshold")


def models(sparsity, seed=0):
    """(layout, x, mask, models) of a round."""
    rng = np.random.default_rng(seed)
    wire = wire_layout(Layout.of(resnet20((3, 32, 32), 10)))
    x = rng.normal(0, 0.1, wire.d).astype(np.float32)
    mask = (rng.random(wire.d) >= sparsity) | np.repeat(~np.array(wire.prunable), wire.sizes)
    x *= mask
    change = rng.uniform(-5e-3, 5e-3, (CLIENTS, wire.d)).astype(np.float32)
    return wire, x, mask, np.where(mask, x + change, np.float32(0)).astype(np.float32)


def lossy(client):
    return Lossy(rng=np.random.default_rng(client))


def seconds(function, repeat):
    function()
    taken = []
    for _ in range(repeat):
        start = time.thread_time()
        function()
        taken.append(time.thread_time() - start)
    return statistics.median(taken)


def measure(sparsity, repeat):
    wire, x, mask, several = models(sparsity)
    shared = Shared(wire, x, mask)
    tensors = [torch.from_numpy(a) for a in (several, mask[None], x)]
    rows = []
    for values in (*TENSOR_MODES, *OTHER_MODES):
        row = {"sparsity": sparsity, "values": values}
        if values in TENSOR_MODES:
            choices = lambda: [lossy(c) for c in range(CLIENTS)]
            row["tensors"] = seconds(lambda: seen(*tensors, wire, values, choices(), tensors[1]), repeat)
        row["roundtrip"] = seconds(
            lambda: [roundtrip(v, mask, shared, values, lossy(c)) for c, v in enumerate(several)], repeat
        )
        row["bytes"] = seconds(
            lambda: [
                decode(encode(v, mask, shared, values=values, lossy=lossy(c)), shared)
                for c, v in enumerate(several)
            ],
            repeat,
        )
        row["upload"] = len(encode(several[0], mask, shared, values=values, lossy=lossy(0)))
        rows.append(row)
    return rows


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for sparsity in (0.8, 0.0) for row in measure(sparsity, arguments.repeat)]
    for row in rows:
        times = " ".join(
            f"{name} {1e3 * row[name]:7.1f} ms" if name in row else f"{name}       –   "
            for name in ("tensors", "roundtrip", "bytes")
        )
        print(f"{row['sparsity']:.0%} cut {row['values']:<10} {times}  upload {row['upload']:>9,} bytes")
    if arguments.json:
        facts = {
            "machine": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "clients": CLIENTS,
            "repeat": arguments.repeat,
        }
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
