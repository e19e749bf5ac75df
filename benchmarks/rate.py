"""Theorem 1's claim, measured: does the gradient of the common loss fall at the same rate when updates are lost?

    python benchmarks/rate.py --out results/rate.json

For runs of T = 25 to 800 rounds with a step of c / √T (SGD), as the theory has it: the mean over the rounds of

    ‖∇f(x_t)‖²,    f = the mean over clients of the mean loss on all samples of a client,

over the weights that masks keep, with the paper's links and masks by magnitude (80 % cut), an MLP on the embedded
digits. FedAvg on a perfect network converges like 1/√T or faster: a slope of -0.5 or less in a plot of logarithms.
"The same rate" means that the ratio to the perfect network does not grow with T; it may well be above 1.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from safari.config import parse
from safari.engine import World, assemble, engine_of, load_data, rule_of
from safari.engine.state import initial
from safari.stats import mean_interval
from safari.version import code_version

LENGTHS = (25, 50, 100, 200, 400, 800)
ARMS = ("perfect", "drop", "safari", "safari+")
# Gradients of all data cost as much as a round.
LOOKS = 40


def config_of(arm: str, rounds: int, step: float) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "clients": 10,
        "arms": [arm],
        "model": {"name": "mlp", "hidden": [64]},
        "pruning": {"pruner": "mag", "sparsity": 0.8},
        "local": {"steps": 5, "batch": 32, "optimiser": "sgd", "lr": step / math.sqrt(rounds)},
        "uplink": {"name": "bernoulli", "p": [1, 0.3, 0.3, 0.3, 0.3]},
        "evaluation": {"every": rounds},
        "wire": {"every": 0},
        "engine": {"device": "cpu", "threads": 1},
    }


def squared_gradient(world: World, x: torch.Tensor) -> float:
    """‖∇f(x)‖² over the parameters that are not cut."""
    module, layout = world.fresh_module(), world.layout
    layout.write(module, x)
    module.eval()
    total = [torch.zeros_like(p) for p in module.parameters()]
    for part in world.parts:
        inputs, labels = world.samples(part)
        loss = cross_entropy(module(inputs), labels)
        for whole, own in zip(total, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            whole += own / len(world.parts)
    kept = [~((p == 0) & (p.ndim > 1)) for p in module.parameters()]
    return sum(float(g[k].double().square().sum()) for g, k in zip(total, kept, strict=True))


def mean_gradient(arm: str, rounds: int, seed: int, step: float) -> float:
    """The mean of the squared gradient over a run's rounds, of those that are looked at."""
    config = parse(config_of(arm, rounds, step))
    world = assemble(config, seed, load_data(config))
    engine, state = engine_of(config)(world), initial(world, rule_of(config.arms[0].rule))
    looks, found = max(1, rounds // LOOKS), []
    for t in range(rounds):
        state, _, _ = engine(state)
        # From the second model on: the first is dense, and its mask is not yet applied.
        if (t + 1) % looks == 0:
            found.append(squared_gradient(world, state.server.model))
    return statistics.fmean(found)


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Of log(value) against log(length), by least squares.

    >>> round(slope([1, 4, 16], [3.0, 1.5, 0.75]), 6)
    -0.5
    """
    return statistics.linear_regression([math.log(t) for t in lengths], [math.log(v) for v in values]).slope


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="T")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--step", type=float, default=10.0, help="c; the step of a round is c / √T")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for arm in args.arms:
        for seed in range(args.seeds):
            values = [mean_gradient(arm, rounds, seed, args.step) for rounds in args.lengths]
            rows.append({"arm": arm, "seed": seed, "values": values, "slope": slope(args.lengths, values)})
            print(
                f"{arm:8} seed {seed}  {'  '.join(f'{v:.4f}' for v in values)}  slope {rows[-1]['slope']:.2f}"
            )
    exact = {row["seed"]: row["values"] for row in rows if row["arm"] == "perfect"}
    print(f"\n{'':8} slope, and times the perfect network's at T = {', '.join(map(str, args.lengths))}")
    for arm in args.arms:
        own = [row for row in rows if row["arm"] == arm]
        text = _with_interval([row["slope"] for row in own])
        ratios = [
            statistics.geometric_mean([row["values"][k] / exact[row["seed"]][k] for row in own])
            for k in range(len(args.lengths) if exact else 0)
        ]
        print(f"{arm:8} {text}   {'  '.join(f'{r:.2f}' for r in ratios)}")
    if args.out:
        about = {"code": code_version(), "torch": torch.__version__, "python": platform.python_version()}
        table = {"step": args.step, "lengths": args.lengths, "environment": about, "rows": rows}
        args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _with_interval(values: Sequence[float]) -> str:
    found = mean_interval(values)
    return f"{statistics.fmean(values):.2f}" + (f" [{found.low:.2f}, {found.high:.2f}]" if found else "")


if __name__ == "__main__":
    main()
