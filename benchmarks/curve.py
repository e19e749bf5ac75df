"""What a round costs against the number of clients, next to what the device allows at best.

    python benchmarks/curve.py measure --out results/engine/curve.json      # on a GPU
    python benchmarks/curve.py draw results/engine/curve.json results/engine/curve.svg

The training part of a round: ResNet-20, τ 5, batch 64, Adam, crop and flip, SynFlow's mask at 80%. Two limits
are counted from the model's layers and the layout, not measured: *bytes*, when every tensor that must pass
through memory does so once, and *operations*, when every multiplication runs at the peak of the matrix units.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from engine import random_pictures, timed, world_of
from safari.engine.vectorised import Vectorised
from safari.engine.world import World


@dataclass(frozen=True)
class Device:
    """What a device's maker promises."""

    name: str
    bytes_per_second: float
    operations_per_second: float


H200 = Device("H200: 4.8 TB/s, 989 TFLOP/s in bfloat16, dense", 4.8e12, 989e12)


@dataclass(frozen=True)
class Cost:
    """What one local step of one client moves and computes at least."""

    activation_bytes: int
    weight_bytes: int
    operations: int

    def seconds(self, steps: int, clients: int, device: Device) -> tuple[float, float]:
        """The two limits, bytes and operations, of a round."""
        times = steps * clients
        moved = times * (self.activation_bytes + self.weight_bytes)
        return moved / device.bytes_per_second, times * self.operations / device.operations_per_second


def cost_of(world: World, activation: int = 2) -> Cost:
    """Counted from a pass of one sample: what each convolution and linear layer reads, writes and multiplies.

    Activations have `activation` bytes a number. Of a layer (convolution or linear, with the norm, shortcut
    and ReLU behind it as one step) a training step must read the input and write the output; read the
    output's gradient and the input, for the weights' gradient; and write the input's gradient. Norms must
    see their input before they can scale it, so that a layer's output is written and read once more each way.
    Weights are float32: parameter, gradient and two moments are read, the first and the last two written.
    """
    read = written = operations = 0

    def count(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal read, written, operations
        read += inputs[0].numel()
        written += output.numel()
        weight = layer.weight
        # A multiplication and an addition, for the output and for each of the two gradients.
        operations += 6 * output.numel() * weight[0].numel()

    layers = [layer for layer in world.module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad():
            world.module.eval()(world.data.train_x[:1].to(world.device))
    finally:
        for hook in hooks:
            hook.remove()
    batch = world.config.local.batch
    # Forward: x in, y out, y in, out out. Backward: its gradient and y in, dy out, dy and x in, dx out.
    numbers = batch * ((read + 3 * written) + (2 * written + written + written + 2 * read))
    return Cost(activation * numbers, 4 * 7 * world.layout.parameters, batch * operations)


def measure(clients: int, repeats: int, device: str, precision: str) -> dict[str, object]:
    """Seconds and peak memory of the training part; what does not fit goes in chunks."""
    world = world_of(
        clients, random_pictures(50_000, 1_000), device, engine={"device": device, "precision": precision}
    )
    engine = Vectorised(world)
    x = world.start
    mask = world.mask(x, 0, 0).unsqueeze(0)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def one_round(t: int) -> None:
        models = x.new_empty((clients, world.layout.size))
        for group, (sent, _) in engine._in_groups(
            range(clients), lambda group: engine._train(x, mask, group, t)
        ):
            models[list(group)] = sent

    start = time.perf_counter()
    one_round(0)
    first = time.perf_counter() - start
    found = timed(one_round, device, 1, repeats)
    by_bytes, by_operations = cost_of(world).seconds(world.config.local.steps, clients, H200)
    return {
        "clients": clients,
        "chunk": min(engine.chunk, clients),
        "seconds": found,
        "first": first,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "data_bytes": sum(t.nbytes for t in (world.data.train_x, world.data.test_x)),
        "limit_bytes": by_bytes,
        "limit_operations": by_operations,
        "note": engine.note,
    }


def draw(source: Path, target: Path) -> None:
    """The figure: time with its two limits, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = json.loads(source.read_text())
    rows = found["rows"]
    clients = [row["clients"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    middle = [1e3 * row["seconds"]["median"] for row in rows]
    left.plot(clients, middle, "o-", color="#0b7285", label="measured")
    for row, value in zip(rows, middle, strict=True):
        words = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        left.annotate(words, (row["clients"], value), (-4, 7), textcoords="offset points", fontsize=8)
    left.plot(clients, [1e3 * row["limit_bytes"] for row in rows], "--", color="#868e96", label="bytes")
    left.plot(clients, [1e3 * row["limit_operations"] for row in rows], ":", color="#868e96", label="FLOP")
    left.set_ylabel("training part of a round, ms")
    memory = [row["peak_bytes"] for row in rows]
    if all(memory):
        right.plot(clients, [value / 2**30 for value in memory], "o-", color="#0b7285")
        for row in rows:
            chunked = f" in chunks of {row['chunk']}" if row["chunk"] < row["clients"] else ""
            label = f"{row['peak_bytes'] / 2**30:.3g}{chunked}"
            at = (row["clients"], row["peak_bytes"] / 2**30)
            right.annotate(label, at, (-4, 7), textcoords="offset points", fontsize=8)
    right.set_ylabel("peak memory, GiB")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.margins(x=0.12, y=0.12)
        axis.set_yscale("log")
        axis.set_xlabel("clients")
        axis.set_xticks(clients, [f"{n:,}" for n in clients])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    setting = f"ResNet-20, τ 5, batch 64, {found['precision']}, {found['device']}"
    figure.suptitle(f"{setting}; limits of {found['limits']['name']}", fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    measuring.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    measuring.add_argument("--clients", type=int, nargs="+", default=[1, 10, 100, 1000])
    measuring.add_argument("--repeats", type=int, default=10)
    measuring.add_argument("--out", type=Path, required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("source", type=Path)
    drawing.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.command == "draw":
        draw(args.source, args.target)
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    result = {
        "device": name,
        "torch": torch.__version__,
        "precision": args.precision,
        "limits": asdict(H200),
        "rows": [],
    }
    for clients in args.clients:
        row = measure(clients, args.repeats if clients <= 100 else 3, args.device, args.precision)
        result["rows"].append(row)
        peak = f", {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else ""
        print(
            f"{clients} clients in chunks of {row['chunk']}: {row['seconds']['median'] * 1e3:.2f} ms{peak}; "
            f"at least {row['limit_bytes'] * 1e3:.2f} ms by bytes, {row['limit_operations'] * 1e3:.2f} ms by "
            f"operations {row['note']}",
            flush=True,
        )
        # After each, so that what was measured outlives what fails.
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
