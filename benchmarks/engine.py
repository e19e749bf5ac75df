"""How fast is a round? Ratios to the plain sequential PyTorch loop, measured in one run.

    python benchmarks/engine.py --out results/engine-gpu.json            # on a GPU
    python benchmarks/engine.py --cpu --out results/engine/cpu-2core.json   # the demo and ResNet-20

The data are random pictures of CIFAR-10's size: speed does not depend on what they show.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from safari.config import parse
from safari.data import Data
from safari.data.augment import crop_and_flip
from safari.engine.assembly import assemble
from safari.engine.state import initial
from safari.engine.vectorised import Vectorised
from safari.engine.world import World
from safari.training import evaluate


def random_pictures(samples: int, test: int) -> Data:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((samples + test, 3, 32, 32), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 10, samples + test))
    return Data("random", x[:samples], y[:samples], x[samples:], y[samples:], 10)


def world_of(clients: int, data: Data, device: str, **tables: object) -> World:
    config = parse(
        {
            "rounds": 10_000,
            "clients": clients,
            "arms": ["perfect"],
            "partition": {"name": "iid"},
            "model": {"name": "resnet20"},
            "uplink": {"name": "perfect"},
            "local": {"batch": 64, "augment": "crop-flip"},
            "evaluation": {"every": 10},
            "engine": {"device": device},
        }
        | tables
    )
    return assemble(config, 0, data)


def sequential_round(world: World, x: torch.Tensor, t: int) -> torch.Tensor:
    """The training part of a round as any researcher would write it: client after client, float32."""
    local, data = world.config.local, world.data
    model, total = world.module, torch.zeros_like(x)
    rng = np.random.default_rng(t)
    mask = world.mask(x, 0, t)
    masks = world.layout.split(mask)
    start = {name: v.clone() for name, v in world.layout.split(x * mask).items()}
    for part in world.parts:
        model.load_state_dict(start, strict=False)
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=local.lr)
        for _ in range(local.steps):
            pick = torch.from_numpy(rng.choice(part, local.batch)).to(x.device)
            shift = torch.from_numpy(rng.integers(0, 9, (local.batch, 2))).to(x.device)
            flip = torch.from_numpy(rng.random(local.batch) < 0.5).to(x.device)
            images = crop_and_flip(data.train_x[pick], shift, flip, 4)
            optimizer.zero_grad()
            F.cross_entropy(model(images), data.train_y[pick]).backward()
            for name, p in model.named_parameters():
                p.grad.mul_(masks[name])
            optimizer.step()
        total += world.layout.read(model)
    return total / len(world.parts)


def timed(work: Callable[[int], object], device: str, warm: int, repeats: int) -> dict[str, float]:
    seconds = []
    for i in range(warm + repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work(i)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    seconds = seconds[warm:]
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {"median": middle, "q1": low, "q3": high, "n": len(seconds)}


def training_part(
    clients: int, data: Data, device: str, precision: str, repeats: int, kernels: str, **tables: object
) -> dict[str, object]:
    engine_table = {"device": device, "precision": precision, "compile": kernels}
    world = world_of(clients, data, device, engine=engine_table, **tables)
    engine = Vectorised(world)
    x = world.start
    mask = world.mask(x, 0, 0).unsqueeze(0)
    group = list(range(clients))
    found = timed(lambda t: engine._train(x, mask, group, t), device, 3, repeats)
    note = engine.note
    draw = timed(lambda t: [world.training_draw(c, t) for c in group], "cpu", 1, 5)
    return {"seconds": found, "draws": draw["median"], "note": note}


def whole_round(
    pruner: str, data: Data, device: str, precision: str, rounds: int, kernels: str
) -> dict[str, object]:
    """A round with masks, training, aggregation, record and, every tenth time, evaluation."""
    tables = {"pruning": {"pruner": pruner}, "wire": {"every": 0}}
    engine_table = {"device": device, "precision": precision, "compile": kernels}
    world = world_of(10, data, device, engine=engine_table, **tables)
    engine = Vectorised(world)
    fed = world.federation()
    state = initial(world, fed)
    seconds: list[float] = []
    parts: dict[str, float] = {}
    for t in range(rounds + 10):
        start = time.perf_counter()
        state, _, laps = engine(fed, state)
        # The first rounds compile, record graphs and (without data) find the mask for good.
        if t >= 10:
            seconds.append(time.perf_counter() - start)
            parts = {name: parts.get(name, 0) + lap for name, lap in laps.items()}
    plain = [_plain_round(world, state.model, t) for t in range(10, 13)]
    evaluation = timed(lambda t: _evaluate(world, state.model), device, 1, 3)["median"]
    sequential = statistics.median(plain) + evaluation / 10
    mean = statistics.fmean(seconds)
    return {
        "pruner": pruner,
        "precision": precision,
        "sequential": sequential,
        "seconds": {"mean": mean, "median": statistics.median(seconds), "n": rounds},
        "parts": {name: lap / rounds for name, lap in parts.items()},
        "ratio": sequential / mean,
        "mask_agreement": _mask_agreement(engine, state.model, data, device, **tables),
        "note": engine.note,
    }


def _mask_agreement(engine: Vectorised, x: torch.Tensor, data: Data, device: str, **tables: object) -> object:
    """The share of kept weights that the same pruner keeps in float32, from the first model and from x: what
    the faster arithmetic changes about the masks. None where the pruner sees no data."""
    if not engine.world.pruner.needs_data:
        return None
    exact = Vectorised(world_of(10, data, device, engine={"device": device, "graph": False}, **tables))
    found = []
    # As in a first round both times: later ones keep what is left of the support, whatever the scores.
    for model in (engine.world.start, x):
        ours, theirs = (
            e._masks(e.world.first_masks(model, 0), model, range(10), 0)[0][:, engine.world.layout.prunable]
            for e in (engine, exact)
        )
        found.append(float(((ours & theirs).sum(1) / theirs.sum(1)).mean()))
    return found


def _plain_round(world: World, x: torch.Tensor, t: int) -> float:
    start = time.perf_counter()
    if world.pruner.needs_data:
        for client in range(10):
            world.mask(x, client, t)
    sequential_round(world, x, t)
    torch.cuda.synchronize() if x.is_cuda else None
    return time.perf_counter() - start


def _evaluate(world: World, x: torch.Tensor) -> None:
    world.layout.write(world.module, x)
    evaluate(world.module, world.data.test_x, world.data.test_y, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--pruners", nargs="*", default=["rand", "mag", "snip", "grasp", "synflow"])
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each pruner")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--compile", default="auto", choices=("auto", "never"), help="never: without Triton's kernels"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", nargs="*", metavar="SETTING", help="demo and resnet20 on the CPU, in turns")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each contestant")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for an idle machine")
    args = parser.parse_args()
    if args.cpu is not None:
        import cpu

        found = cpu.benchmark(args.cpu or list(cpu.SETTINGS), args.threads, args.repeats, args.patience)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=2) + "\n")
        return
    data = random_pictures(50_000, 10_000)
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    result: dict[str, object] = {"device": name, "torch": torch.__version__, "compile": args.compile,
                                 "rows": [], "rounds": []}  # fmt: skip
    for clients in args.clients:
        world = world_of(clients, data, args.device)
        few = max(3, args.repeats // (4 if clients > 10 else 1))
        base = timed(lambda t: sequential_round(world, world.start, t), args.device, 1, min(few, 5))
        print(f"{clients} clients: sequential {base['median'] * 1e3:.1f} ms", flush=True)
        for precision in args.precision:
            try:
                row = training_part(clients, data, args.device, precision, args.repeats, args.compile)
            except Exception as error:
                print("  failed", precision, type(error).__name__, str(error)[:2000], flush=True)
                continue
            ratio = base["median"] / row["seconds"]["median"]
            low, middle, high = (row["seconds"][key] * 1e3 for key in ("q1", "median", "q3"))
            print(
                f"  {precision}: {middle:.2f} ms [{low:.2f}, {high:.2f}], {ratio:.1f}x {row['note']}",
                flush=True,
            )
            result["rows"].append(
                {"clients": clients, "precision": precision, "sequential": base, "ratio": ratio, **row}
            )
    for pruner in args.pruners:
        row = whole_round(pruner, data, args.device, args.precision[-1], args.rounds, args.compile)
        result["rounds"].append(row)
        laps = "  ".join(f"{name} {lap * 1e3:.1f}" for name, lap in row["parts"].items())
        print(
            f"{pruner:8} sequential {row['sequential'] * 1e3:.0f} ms, "
            f"ours {row['seconds']['mean'] * 1e3:.1f} ms "
            f"(median {row['seconds']['median'] * 1e3:.1f}), {row['ratio']:.1f}x | {laps} "
            f"| masks as in float32: {row['mask_agreement']} {row['note']}",
            flush=True,
        )
    if args.profile:
        profile(data, args.device)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2))


def profile(data: Data, device: str) -> None:
    world = world_of(10, data, device, engine={"device": device, "precision": "bfloat16", "graph": False})
    engine = Vectorised(world)
    mask = world.mask(world.start, 0, 0).unsqueeze(0)
    run = lambda t: engine._train(world.start, mask, list(range(10)), t)
    run(0)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as p:
        run(1)
        torch.cuda.synchronize()
    print(p.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))


if __name__ == "__main__":
    main()
