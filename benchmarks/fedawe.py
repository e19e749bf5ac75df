"""A training step of FedAWE's small CNN, with the fused kernels and without; see benchmarks/kernels.py.

Parts, in this order, as long as the time lasts:

- `step`: a step of all clients on the device (forward, backward, SGD), recorded as a CUDA graph, both ways, and their
  ratio;
- `round`: the local steps of a round as the engine does them, draws and augmentation included, both ways;
- `kernels`: what a step consists of, each for itself, beside the time that its bytes take at least;
- `tiles`: the kernels of convolution and pooling with other tiles. What wins belongs into `pool_kernels.py`.

`--tiny` runs all of it on a CPU with sizes that mean nothing (TRITON_INTERPRET=1), to see that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from resnet18 import milliseconds, write
from torch import Tensor

from engine import random_pictures, training_part
from safari.data.augment import crop_and_flip
from safari.engine.stack import fused, fusion
from safari.engine.stack import pool_kernels as pk
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import by_layers
from safari.engine.stack.kernels import Tile
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.served import pool_padded
from safari.engine.stack.train import LocalSteps
from safari.models import Layout, fedawe_cnn

PARTS = ("step", "round", "kernels", "tiles")
# Bytes that pass through an H200's memory in a millisecond.
BYTES = 4.8e9
CONV_TILES = [Tile(r, w, 1) for r, w in ((64, 4), (64, 8), (128, 4), (128, 8), (256, 8))]
WEIGHT_TILES = [
    Tile(r, w, s)
    for r, w, s in (
        (32, 4, 2),
        (32, 8, 2),
        (32, 8, 3),
        (64, 4, 1),
        (64, 4, 2),
        (64, 8, 1),
        (64, 8, 2),
        (64, 8, 3),
        (128, 8, 2),
    )
]
PROGRAMS = (264, 528, 1056)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fedawe", type=int, nargs="?", const=50, metavar="CLIENTS", help="50 by default")
    group.add_argument("--fedawe-parts", nargs="+", choices=PARTS, default=list(PARTS))


@dataclass(frozen=True)
class Setting:
    """How many clients, samples of each, and the side of their pictures."""

    device: str
    clients: int
    batch: int
    side: int

    @property
    def dtype(self) -> torch.dtype:
        # Triton's interpreter multiplies in float32 alone.
        return torch.bfloat16 if self.device == "cuda" else torch.float32


class Layer:
    """One of the net's two convolutions with its pooling, with inputs and gradients of the right shapes."""

    def __init__(self, setting: Setting, inner: int, outer: int, side: int):
        self.clients, self.inner, self.outer, self.side = setting.clients, inner, outer, side
        total, device, dtype = setting.clients * setting.batch, setting.device, setting.dtype
        draw = torch.Generator(device).manual_seed(0)
        normal = lambda *shape: torch.randn(shape, generator=draw, device=device)
        self.cin = pool_padded(inner)
        # The first layer reads pictures by channel in float32, as the data are; the next, what the first one made.
        self.raw = normal(total, inner, side, side).permute(0, 2, 3, 1)
        self.x = pk.packed(self.raw, self.cin, dtype)
        self.weight = normal(self.clients, outer, inner, 3, 3) / (3 * inner**0.5)
        self.bias = normal(self.clients, outer)
        self.w, self.turned = (pk.weights_for(self.weight, self.cin, dtype, t) for t in (False, True))
        self.out, self.winner = pk.conv_pool(self.x, self.w, self.bias, outer, self.clients)
        self.grad = normal(*self.out.shape).to(dtype)

    def __str__(self) -> str:
        return f"{self.inner}->{self.outer} at {self.side}"

    def forward(self, tile: Tile | None = None) -> Tensor:
        return pk.conv_pool(self.x, self.w, self.bias, self.outer, self.clients, tile)[0]

    def dx(self, tile: Tile | None = None) -> Tensor:
        return pk.input_gradient(
            self.grad, self.winner, self.turned, self.cin, self.clients, self.side, self.side, tile
        )

    def dw(self, tile: Tile | None = None, programs: int = pk.PROGRAMS) -> Tensor:
        return pk.weight_gradient(self.x, self.grad, self.winner, self.inner, self.clients, tile, programs)[0]


def bytes_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def steps(setting: Setting) -> list[dict]:
    """A step of all clients with kernels and without."""
    shape, device = (3, setting.side, setting.side), setting.device
    torch.manual_seed(0)
    module = fedawe_cnn(shape, 10).to(device)
    layout = Layout.of(module)
    flat, start = Flat(layout, setting.clients), layout.read(module)
    masks = torch.ones(1, layout.size, dtype=torch.bool, device=device)
    x = torch.randn(setting.clients * setting.batch, *shape, device=device)
    y = torch.randint(10, (len(x),), device=device)
    rows = []
    for way in ("fused", "plain"):
        random_state = RandomState(range(setting.clients), torch.device(device), layout.counters(module))
        local = LocalSteps(
            by_layers(module, True, fuse=way == "fused"), flat, start, masks, 10, optimiser="sgd", lr=0.01,
            random_state=random_state, compiled=way == "fused",
        )  # fmt: skip

        def step(local: LocalSteps = local) -> None:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
                local.step(x, y)

        ms = milliseconds(step, enough=20.0)
        print(f"{setting.clients} clients, a step, {way}: {ms:.3f} ms", flush=True)
        rows.append({"clients": setting.clients, "way": way, "ms": ms})
    print(f"plain / fused: {rows[1]['ms'] / rows[0]['ms']:.2f}", flush=True)
    return rows


def rounds(setting: Setting, repeats: int = 10) -> list[dict]:
    """The local steps of a round in the engine."""
    tiny = setting.device == "cpu"
    count = 1 if tiny else 10
    tables = {
        "model": {"name": "fedawe_cnn"},
        "pruning": {"sparsity": 0},
        "local": {
            "batch": setting.batch,
            "steps": count,
            "optimiser": "sgd",
            "lr": 0.1,
            "augment": "crop-flip",
        },
    }
    data = random_pictures(max(20 if tiny else 20_000, 4 * setting.clients), 10)
    rows = []
    for way, kernels in (("fused", "always"), ("plain", "never")):
        row = training_part(
            setting.clients, data, setting.device, "bfloat16", 1 if tiny else repeats, kernels, **tables
        )
        ms = row["seconds"]["median"] * 1e3
        print(
            f"{setting.clients} clients, {count} steps in the engine, {way}: {ms:.2f} ms, of which the host's draws "
            f"{row['draws'] * 1e3:.2f} {row['note']}",
            flush=True,
        )
        rows.append({"clients": setting.clients, "way": way, "steps": count, "ms": ms, **row})
    print(f"plain / fused: {rows[1]['ms'] / rows[0]['ms']:.2f}", flush=True)
    return rows


def pieces(setting: Setting, layers: list[Layer]) -> list[dict]:
    """Each kernel of a step, and what torch does beside them."""
    device, dtype = setting.device, setting.dtype
    first, second = layers
    total, side = setting.clients * setting.batch, setting.side
    size = Layout.of(fedawe_cnn((3, side, side), 10)).parameters * setting.clients
    p, g = torch.randn(2, size, device=device)
    kept = torch.ones(size, dtype=torch.bool, device=device)
    pictures, order = first.raw.permute(0, 3, 1, 2), torch.randperm(total, device=device)
    shift = torch.randint(0, 9, (total, 2), device=device)
    flip = torch.rand(total, device=device) < 0.5
    features = 32 * (side // 4) ** 2
    weight = torch.randn(setting.clients, 256, features, device=device)
    inputs = torch.randn(setting.clients, features, setting.batch, device=device).to(dtype)
    hidden = torch.randn(setting.clients, 256, setting.batch, device=device).to(dtype)
    small = weight.to(dtype)
    works: dict[str, tuple[Callable[[], object], int]] = {
        "crops and flips": (lambda: crop_and_flip(pictures[order], shift, flip, 4), 2 * bytes_of(pictures)),
        "crops and flips, one kernel": (
            lambda: fused.crops(pictures, order, shift, flip, 4),
            2 * bytes_of(pictures),
        ),
        "pictures by pixel": (lambda: pk.packed(first.raw, first.cin, dtype), bytes_of(first.raw, first.x)),
        **{
            f"{layer} {name}": (work, bytes_of(*moved))
            for layer in layers
            for name, work, moved in (
                (
                    "weights",
                    lambda layer=layer: pk.weights_for(layer.weight, layer.cin, dtype),
                    (layer.weight, layer.w),
                ),
                ("forward", layer.forward, (layer.x, layer.out, layer.winner)),
                ("dw", layer.dw, (layer.x, layer.grad, layer.winner)),
                *((("dx", layer.dx, (layer.x, layer.grad, layer.winner)),) if layer is second else ()),
            )
        },
        "first linear layer: weights cast": (lambda: weight.to(dtype), bytes_of(weight, small)),
        "first linear layer: forward": (lambda: torch.bmm(small, inputs), bytes_of(small, inputs, hidden)),
        "first linear layer: dx": (
            lambda: torch.bmm(small.transpose(1, 2), hidden),
            bytes_of(small, inputs, hidden),
        ),
        "first linear layer: dw": (
            lambda: torch.bmm(hidden, inputs.transpose(1, 2)),
            bytes_of(small, inputs, hidden),
        ),
        "first linear layer: dw cast": (lambda: small.float(), bytes_of(weight, small)),
        "gradients side by side": (lambda: torch.cat([g[: size // 2], g[size // 2 :]]), 2 * bytes_of(g)),
        "sgd": (lambda: fused.sgd_(p, g, kept, 1e-9), 2 * bytes_of(p) + bytes_of(g, kept)),
        "sgd, plain": (
            lambda: p.add_(g.masked_fill(~kept, 0.0), alpha=-1e-9),
            2 * bytes_of(p) + bytes_of(g, kept),
        ),
    }
    rows = []
    for name, (work, moved) in works.items():
        ms = milliseconds(work)
        print(f"  {name:34} {ms:7.3f} ms, at least {moved / BYTES:6.3f} by its bytes", flush=True)
        rows.append({"name": name, "ms": ms, "bytes": moved})
    return rows


def tiles(layers: list[Layer], late: Callable[[], bool]) -> list[dict]:
    """Every tile that works, the best first; results must be those of the default."""
    rows = []
    for layer in layers:
        names = ["forward", "dw"] + (["dx"] if layer is layers[1] else [])
        for name in names:
            work = getattr(layer, name)
            expected, taken = work().float(), milliseconds(work)
            print(f"{layer} {name}: {taken:.3f} ms as taken", flush=True)
            found = []
            choices = [(tile, {}) for tile in CONV_TILES]
            if name == "dw":
                choices = [(tile, {"programs": n}) for tile in WEIGHT_TILES for n in PROGRAMS]
            for tile, more in choices:
                if late():
                    return rows
                try:
                    ours = work(tile, **more).float()
                    error = float((ours - expected).norm() / expected.norm())
                    if not error < 0.01:
                        print(f"    WRONG by {error:.2g}: {tile} {more}", flush=True)
                        continue
                    found.append(
                        (milliseconds(lambda tile=tile, more=more: work(tile, **more), 3.0), tile, more)
                    )
                except Exception as error:  # too much shared memory, say
                    print(f"    failed: {tile} {more}: {type(error).__name__} {str(error)[:100]}", flush=True)
            for ms, tile, more in sorted(found, key=lambda row: row[0])[:4]:
                print(f"    {ms:.3f} ms  {tile} {more or ''}", flush=True)
            rows += [
                {"layer": str(layer), "pass": name, "ms": ms, **asdict(t), **more} for ms, t, more in found
            ]
    return rows


def benchmark(args: argparse.Namespace) -> None:
    begun = time.perf_counter()
    late = lambda: time.perf_counter() - begun > args.seconds
    setting = Setting("cuda", args.fedawe, 128, 32)
    if args.tiny:
        setting, fusion.DTYPE = Setting("cpu", 2, 2, 8), torch.float32
    layers: list[Layer] = []

    def both() -> list[Layer]:
        if not layers:
            layers.extend((Layer(setting, 3, 32, setting.side), Layer(setting, 32, 32, setting.side // 2)))
        return layers

    works: dict[str, Callable[[], list[dict]]] = {
        "step": lambda: steps(setting),
        "round": lambda: rounds(setting),
        "kernels": lambda: pieces(setting, both()),
        "tiles": lambda: tiles(both(), late),
    }
    result: dict[str, object] = {
        "device": "cpu" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "clients": setting.clients,
        "batch": setting.batch,
    }
    for part in args.fedawe_parts:
        if late():
            break
        result[part] = works[part]()
        print(f"-- {part}: {time.perf_counter() - begun:.0f} s so far", flush=True)
        if args.out:
            write(args.out, result)
