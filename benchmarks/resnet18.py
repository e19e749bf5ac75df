"""A ResNet-18's training step and each of its convolutions, ours against cuDNN; see benchmarks/kernels.py.

Parts, in this order, as long as the time lasts:

- `step`: a step of all clients: our engine with its kernels, a plain loop over clients in bfloat16 by pixel (as it
  is, and recorded as a CUDA graph), our engine without kernels;
- `layers`: forward, input and weight gradient of every shape: ours, one grouped convolution for all clients, and
  a loop of one convolution a client;
- `tiles`: the same with other tiles. What wins belongs into the tables of `wide_kernels.py`.

`--tiny` runs all of it on a CPU with sizes that mean nothing (TRITON_INTERPRET=1), to see that it runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import random_pictures, timed, training_part
from safari.engine.stack import kernels as k
from safari.engine.stack import wide_kernels as wide
from safari.engine.stack.served import is_wide, padded
from safari.models import resnet18

PARTS = ("step", "layers", "tiles")
PASSES = ("forward", "dx", "dw")


@dataclass(frozen=True)
class Layer:
    """A convolution of the net: channels in and out, the side of its pictures, stride, its own side, and how often."""

    inner: int
    outer: int
    picture: int
    stride: int
    side: int
    times: int

    def __str__(self) -> str:
        return f"{self.inner}->{self.outer} {self.side}x{self.side}/{self.stride} at {self.picture}"

    @property
    def out(self) -> int:
        return (self.picture - 1) // self.stride + 1

    def operations(self, samples: int) -> float:
        return 2.0 * samples * self.out**2 * self.inner * self.outer * self.side**2


LAYERS = [
    Layer(3, 64, 32, 1, 3, 1),
    Layer(64, 64, 32, 1, 3, 4),
    Layer(64, 128, 32, 2, 3, 1),
    Layer(128, 128, 16, 1, 3, 3),
    Layer(128, 256, 16, 2, 3, 1),
    Layer(256, 256, 8, 1, 3, 3),
    Layer(256, 512, 8, 2, 3, 1),
    Layer(512, 512, 4, 1, 3, 3),
    Layer(64, 128, 32, 2, 1, 1),
    Layer(128, 256, 16, 2, 1, 1),
    Layer(256, 512, 8, 2, 1, 1),
]
TINY = [
    Layer(3, 64, 4, 1, 3, 1),
    Layer(64, 64, 4, 1, 3, 1),
    Layer(64, 128, 4, 2, 3, 1),
    Layer(64, 128, 4, 2, 1, 1),
]
# Tried beside those of the tables.
MORE_CONV_TILES = [
    wide.Tile(128, 256, 64, 8, 4, 1.0),
    wide.Tile(128, 128, 64, 4, 3, 1.0),
    wide.Tile(128, 128, 64, 8, 4, 1.0),
    wide.Tile(256, 128, 64, 8, 4, 1.0),
    wide.Tile(128, 64, 64, 4, 3, 1.0),
    wide.Tile(256, 64, 64, 4, 3, 1.0),
]
MORE_WEIGHT_TILES = [
    wide.Tile(128, 256, 64, 8, 4, 1.0),
    wide.Tile(128, 128, 64, 4, 3, 1.0),
    wide.Tile(256, 128, 64, 8, 3, 1.0),
]


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cohorts", type=int, nargs="+", default=[10, 3], metavar="CLIENTS")
    group.add_argument("--batch", type=int, default=64)
    group.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    group.add_argument("--seconds", type=float, default=55.0, help="begin nothing more after so long")
    group.add_argument("--tiny", action="store_true", help="on a CPU, with sizes that mean nothing")


def milliseconds(work: Callable[[], object], enough: float = 10.0) -> float:
    """Of one call, from recorded calls that take `enough` together; the first call compiles and is not counted."""
    work()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    once = _between(work)
    if once > enough:
        return once
    calls = max(1, min(20, int(enough / max(once, 0.01))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    return statistics.median(_between(graph.replay) for _ in range(3)) / calls


def _between(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Bench:
    """One layer for this many clients: the same pass in several ways, on the same numbers."""

    def __init__(self, layer: Layer, clients: int, batch: int, device: str):
        # Triton's interpreter multiplies in float32 alone.
        self.layer, self.clients, dtype = (
            layer,
            clients,
            torch.bfloat16 if device == "cuda" else torch.float32,
        )
        total, out = clients * batch, layer.out
        draw = torch.Generator(device).manual_seed(0)
        normal = lambda *shape: torch.randn(shape, generator=draw, device=device)
        x = normal(total, layer.picture, layer.picture, layer.inner).to(dtype)
        self.dy = normal(total, out, out, layer.outer).to(dtype)
        weight = normal(clients, layer.outer, layer.inner, layer.side, layer.side) / layer.inner**0.5
        self.cin = padded(layer.inner)
        self.x = F.pad(x, (0, self.cin - layer.inner)).contiguous()
        self.w, self.turned = k.weights_for(weight, self.cin, dtype)
        self.wide_w = wide.weights_for(weight, self.cin, dtype)
        by_pixel = torch.channels_last
        # One batch a client, and all of them by channel.
        self.loop_x, self.loop_dy = (list(t.permute(0, 3, 1, 2).chunk(clients)) for t in (x, self.dy))
        self.loop_w = [one.to(dtype).contiguous(memory_format=by_pixel) for one in weight]
        self.group_x, self.group_dy = (
            torch.cat(parts, 1).contiguous(memory_format=by_pixel) for parts in (self.loop_x, self.loop_dy)
        )
        self.group_w = weight.flatten(0, 1).to(dtype).contiguous(memory_format=by_pixel)

    def ours(self, name: str) -> Tensor:
        layer, clients = self.layer, self.clients
        if name == "forward":
            return k.conv(self.x, self.w, layer.outer, clients, layer.stride, stats=True, side=layer.side)[0]
        if name == "dx":
            size = layer.picture, layer.picture
            return k.conv_input_gradient(
                self.dy, self.turned, self.cin, clients, layer.stride, *size, layer.side
            )
        return k.conv_weight_gradient(self.x, self.dy, layer.inner, clients, layer.stride, side=layer.side)

    def with_tile(self, name: str, tile: wide.Tile) -> Tensor:
        layer = self.layer
        if name == "forward":
            return wide.conv(self.x, self.wide_w, layer.stride, stats=True, tile=tile)[0]
        if name == "dx":
            size = layer.picture, layer.picture
            return wide.conv_input_gradient(self.dy, self.wide_w, layer.stride, *size, tile)
        return wide.conv_weight_gradient(
            self.x, self.dy, layer.inner, self.clients, layer.stride, layer.side, tile
        )

    def grouped(self, name: str) -> Tensor:
        return self._cudnn(name, self.group_x, self.group_dy, self.group_w, self.clients)

    def loop(self, name: str) -> list[Tensor]:
        parts = zip(self.loop_x, self.loop_dy, self.loop_w, strict=True)
        return [self._cudnn(name, x, dy, w, 1) for x, dy, w in parts]

    def _cudnn(self, name: str, x: Tensor, dy: Tensor, w: Tensor, groups: int) -> Tensor:
        stride, padding = [self.layer.stride] * 2, [self.layer.side // 2] * 2
        if name == "forward":
            return F.conv2d(x, w, None, stride, padding, 1, groups)
        wanted = [name == "dx", name == "dw", False]
        found = torch.ops.aten.convolution_backward(
            dy, x, w, None, stride, padding, [1, 1], False, [0, 0], groups, wanted
        )
        return found[0] if name == "dx" else found[1]

    def error(self, name: str, found: Tensor) -> float:
        """How far from the loop's."""
        if name == "dw":
            expected = torch.stack(self.loop(name))
        else:
            expected = torch.cat(self.loop(name)).permute(0, 2, 3, 1)
        found = found[..., : self.layer.inner] if name == "dx" else found
        return float((found.float() - expected.float()).norm() / expected.float().norm())

    def tiles(self, name: str, few: int) -> list[wide.Tile]:
        """The first few by the model, the one taken left out, and others beside those of the tables."""
        layer, pixels = self.layer, len(self.dy) // self.clients * self.layer.out**2
        cin, cout = self.cin, layer.outer
        if name == "dw":
            known = [t for t, _ in wide.weight_tiles(pixels, layer.side**2 * self.clients, cin, cout)]
            more = [t for t in MORE_WEIGHT_TILES if t.rows <= cout and t.columns <= cin]
        else:
            cin, cout = (cin, cout) if name == "forward" else (cout, cin)
            groups = 1 if name == "forward" or layer.stride == 1 else 4
            known = wide.conv_tiles(pixels, self.clients * groups, cin, cout)
            # Narrower tiles than they must be lose.
            more = [t for t in MORE_CONV_TILES if min(cout, 128) <= t.columns <= cout]
        first = 1 if is_wide(self.cin, layer.outer, layer.side) else 0
        return known[first : first + few] + more


def passes_of(layer: Layer) -> Iterator[str]:
    """The net's input needs no gradient."""
    return (name for name in PASSES if name != "dx" or layer.inner > 3)


def measured(bench: Bench, name: str, work: Callable[[], object], label: str) -> float | None:
    """Milliseconds, or None where it is wrong or fails, which is said."""
    try:
        found = work()
        if isinstance(found, Tensor) and (error := bench.error(name, found)) > 0.01:
            print(f"    WRONG by {error:.2g}: {bench.layer} {name} {label}", flush=True)
            return None
        return milliseconds(work)
    except Exception as error:  # too much shared memory, say
        print(
            f"    failed: {bench.layer} {name} {label}: {type(error).__name__} {str(error)[:100]}", flush=True
        )
        return None


def layers(
    shapes: list[Layer], clients: int, batch: int, device: str, late: Callable[[], bool]
) -> list[dict]:
    """Ours, grouped and in a loop; at the end, what a step of the whole net spends in each."""
    rows = []
    for layer in shapes:
        if late():
            break
        bench = Bench(layer, clients, batch, device)
        operations = layer.operations(clients * batch)
        for name in passes_of(layer):
            row: dict[str, object] = {"layer": asdict(layer), "clients": clients, "pass": name}
            row["ours"] = measured(bench, name, lambda: bench.ours(name), "ours")
            for label, work in (("grouped", bench.grouped), ("loop", bench.loop)):
                row[label] = measured(bench, name, lambda work=work: [work(name)], label)
            rows.append(row)
            told = "  ".join(f"{way} {_speed(row[way], operations)}" for way in ("ours", "grouped", "loop"))
            print(f"{clients:3} x {layer!s:22} {name:7} {told}", flush=True)
    if len(rows) == sum(1 for layer in shapes for _ in passes_of(layer)):
        for way in ("ours", "grouped", "loop"):
            total = sum((row[way] or float("nan")) * row["layer"]["times"] for row in rows)
            print(f"{clients} clients: all convolutions of a step, {way}: {total:.2f} ms", flush=True)
    return rows


def other_tiles(
    shapes: list[Layer], clients: int, batch: int, device: str, late: Callable[[], bool]
) -> list[dict]:
    """The passes of 3x3 layers with other tiles than those that are taken."""
    rows = []
    for layer in (s for s in shapes if s.side == 3 and s.inner > 3):
        bench = Bench(layer, clients, batch, device)
        operations = layer.operations(clients * batch)
        for name in passes_of(layer):
            if late():
                return rows
            taken = measured(bench, name, lambda: bench.ours(name), "ours")
            print(f"{clients:3} x {layer!s:22} {name:7} as taken: {_speed(taken, operations)}", flush=True)
            for tile in bench.tiles(name, few=2):
                label = f"{tile.rows}x{tile.columns}x{tile.depth} warps {tile.warps} stages {tile.stages}"
                ms = measured(bench, name, lambda tile=tile: bench.with_tile(name, tile), label)
                rows.append(
                    {"layer": asdict(layer), "clients": clients, "pass": name, "taken": taken, "ms": ms,
                     "tile": asdict(tile)}
                )  # fmt: skip
                better = "  <-- better" if ms and taken and ms < 0.97 * taken else ""
                print(f"      {_speed(ms, operations)}  {label}{better}", flush=True)
    return rows


def _speed(ms: float | None, operations: float) -> str:
    return "        -        " if ms is None else f"{ms:7.3f} ms {operations / ms / 1e9:5.0f} TF"


def plain_loop(clients: int, batch: int, device: str, recorded: bool, width: int, repeats: int) -> float:
    """Milliseconds of a step of every client, one after the other, in bfloat16 by pixel, with Adam."""
    shape = (3, 32, 32)
    one = resnet18(shape, 10, width=width).to(device, memory_format=torch.channels_last).train()
    models = [copy.deepcopy(one) for _ in range(clients)]
    fast = {"fused": True, "capturable": True} if device == "cuda" else {}
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3, **fast) for m in models]
    x = torch.randn(batch, *shape, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device)

    def step(_: int = 0) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, cache_enabled=not recorded):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()

    if not recorded:
        return timed(step, device, 2, repeats)["median"] * 1e3
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return timed(lambda _: graph.replay(), device, 1, repeats)["median"] * 1e3


def steps(clients: int, batch: int, device: str, late: Callable[[], bool], tiny: bool) -> list[dict]:
    """A whole training step: ours with kernels, loops, ours without kernels."""
    width, count, repeats = (8, 1, 1) if tiny else (64, 4, 5)
    tables = {
        "model": {"name": "resnet18", "width": width},
        "local": {"batch": batch, "steps": count, "augment": "crop-flip"},
    }
    data = random_pictures(max(2000 // (50 if tiny else 1), 4 * clients), 10)

    def engine(kernels: str) -> tuple[float, str]:
        row = training_part(clients, data, device, "bfloat16", repeats, kernels, **tables)
        return row["seconds"]["median"] * 1e3 / count, row["note"]

    ways: dict[str, Callable[[], tuple[float, str]]] = {
        "ours, with kernels": lambda: engine("always"),
        "loop over clients": lambda: (plain_loop(clients, batch, device, False, width, repeats), ""),
        "loop, recorded": lambda: (plain_loop(clients, batch, device, True, width, repeats), ""),
        "ours, without kernels": lambda: engine("never"),
    }
    if device == "cpu":
        del ways["loop, recorded"]
    rows = []
    for way, work in ways.items():
        if late():
            break
        start = time.perf_counter()
        try:
            ms, note = work()
        except Exception as error:
            print(f"{clients} clients, {way}: failed: {type(error).__name__} {str(error)[:200]}", flush=True)
            continue
        # Three passes of 0.556 G multiplications and additions for a sample.
        speed = 6 * 0.556e9 * clients * batch / ms / 1e9
        took = time.perf_counter() - start
        print(
            f"{clients} clients, a step, {way}: {ms:.2f} ms, {speed:.0f} TF {note} (took {took:.0f} s)",
            flush=True,
        )
        rows.append({"clients": clients, "way": way, "ms": ms, "note": note})
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def benchmark(args: argparse.Namespace) -> None:
    begun = time.perf_counter()
    late = lambda: time.perf_counter() - begun > args.seconds
    device = "cpu" if args.tiny else "cuda"
    shapes, batch, cohorts = (TINY, 2, [2]) if args.tiny else (LAYERS, args.batch, args.cohorts)
    result: dict[str, object] = {
        "device": "cpu" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "batch": batch,
    }
    works = {
        "step": lambda clients: steps(clients, batch, device, late, args.tiny),
        "layers": lambda clients: layers(shapes, clients, batch, device, late),
        "tiles": lambda clients: other_tiles(shapes, clients, batch, device, late),
    }
    for part in args.parts:
        rows: list[dict] = []
        for clients in cohorts:
            if not late():
                rows += works[part](clients)
        result[part] = rows
        print(
            f"-- {part}: {time.perf_counter() - begun:.0f} s so far{', out of time' if late() else ''}",
            flush=True,
        )
        if args.out:
            write(args.out, result)


def write(path: Path, result: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
