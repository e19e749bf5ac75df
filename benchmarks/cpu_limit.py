"""What ResNet-20's kernels alone take on one CPU core: about the limit of an engine that is built on them.

    python benchmarks/cpu_limit.py --out FILE

Every convolution, and every batch norm with its ReLU and addition, by itself: forward and backward, batch 64,
warm caches, nothing in between. The ratio is that of two cores which do nothing else to a plain step in
float32 with two threads, in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.models import resnet20

BATCH, CORES = 64, 2


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def inputs_of(module: nn.Module) -> list[tuple[str, nn.Module, torch.Size]]:
    """Every convolution and batch norm by name, with the shape of its input."""
    found: list[tuple[str, nn.Module, torch.Size]] = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d):
            layer.register_forward_pre_hook(
                lambda layer, args, name=name: found.append((name, layer, args[0].shape))
            )
    module(torch.zeros(BATCH, 3, 32, 32))
    return found


def kernel(name: str, layer: nn.Module, shape: torch.Size, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of one layer; the pictures themselves need no gradient."""
    x = torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_(name != "conv")
    if isinstance(layer, nn.Conv2d):
        weight = layer.weight.detach().to(dtype).requires_grad_()

        def forward() -> Tensor:
            return F.conv2d(x, weight, None, layer.stride, layer.padding)
    else:
        mean, var = torch.zeros(shape[1]), torch.ones(shape[1])
        scale, shift = (torch.ones(shape[1]).requires_grad_() for _ in range(2))
        shortcut = torch.randn_like(x) if name.endswith("bn2") else 0.0

        def forward() -> Tensor:
            return F.relu(F.batch_norm(x, mean, var, scale, shift, training=True) + shortcut)

    down = torch.randn_like(forward())
    return lambda: forward().backward(down)


def plain_step(module: nn.Module) -> Callable[[], None]:
    x, y = torch.randn(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.int64)
    adam = torch.optim.Adam(module.parameters())

    def step() -> None:
        adam.zero_grad()
        F.cross_entropy(module(x), y).backward()
        adam.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="timings of each kernel; medians count")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(CORES)
    plain = milliseconds(plain_step(resnet20((3, 32, 32), 10)), arguments.repeats)
    torch.set_num_threads(1)
    rows = {}
    for dtype in (torch.float32, torch.bfloat16):
        sums = {"convolutions": 0.0, "the rest": 0.0}
        for name, layer, shape in inputs_of(resnet20((3, 32, 32), 10)):
            part = "convolutions" if isinstance(layer, nn.Conv2d) else "the rest"
            sums[part] += milliseconds(kernel(name, layer, shape, dtype), arguments.repeats)
        limit = plain / (sum(sums.values()) / CORES)
        rows[str(dtype).removeprefix("torch.")] = {"ms": sums, "most": limit}
        print(
            f"{dtype}: " + ", ".join(f"{k} {v:.1f} ms" for k, v in sums.items()) + f"; at most {limit:.2f}x"
        )
    about = {"plain_ms": plain, "n": arguments.repeats, "cores": CORES, "torch": torch.__version__}
    if arguments.out:
        text = json.dumps(about | {"python": platform.python_version(), "rows": rows}, indent=1)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
