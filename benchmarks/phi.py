"""Lemma 2, measured: how does φ fall as more stand-ins are of the right group, and does it bound a round's error?

    python benchmarks/phi.py --out results/phi.json

φ is the distance between what stand-ins send and what the missing would have sent, relative to the latter:

    φ = Σ_j w_j ‖Δ_j' − Δ_j‖² / Σ_j w_j ‖Δ_j‖²    over the missing j with stand-ins j'

A round's error is ‖x' − x*‖² / ‖x* − x‖², with x* what a perfect network would have given. The square of a mean is at
most the mean of the squares, so with W the missing clients' share of all weights

    error ≤ W · φ · Σ_missing w_j ‖Δ_j‖² / ‖x* − x‖² ≤ W · φ · (1 + dissimilarity)

with dissimilarity = Σ_i w_i ‖Δ_i − Δ̄‖² / ‖Δ̄‖². Here an oracle that knows the two groups picks a stand-in of the right
group with a given probability, and one of the other group otherwise; beside it the paper's rule. Digits in two
groups, the paper's links, masks by magnitude (80 % cut); the missing are trained, too, for the diagnosis.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from safari.aggregation import Compensation, Decision, Round
from safari.aggregation.compensation import State
from safari.aggregation.rules import share, stand_in
from safari.config import parse
from safari.engine import assemble, engine_of, load_data, rule_of
from safari.engine.state import initial
from safari.stats import mean_interval
from safari.version import code_version

RIGHT = (0.0, 0.25, 0.5, 0.75, 1.0)
LAST = 20


def oracle(right: float, group: Sequence[int], seed: int) -> Compensation:
    """A stand-in of the right group with probability `right`; of the other group otherwise, or whoever arrived."""

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        if not round.arrived_ids:
            return Decision(share(round)), state
        mixture = torch.zeros(len(round.missing_ids), len(round.arrived_ids), dtype=torch.float64)
        for row, client in enumerate(round.missing_ids):
            draw = random.Random(f"{seed} {round.number} {client}")
            wanted = draw.random() < right
            fits = [k for k, i in enumerate(round.arrived_ids) if (group[i] == group[client]) == wanted]
            mixture[row, draw.choice(fits or range(len(round.arrived_ids)))] = 1.0
        return stand_in(round, mixture), state

    return Compensation(lambda clients, size, device: {}, apply, name="oracle")


def run(rule: Compensation, rounds: int, seed: int) -> dict[str, float]:
    """Means over the diagnosed rounds with missing clients, and top-1 over the last ones."""
    config = parse(config_of(rounds))
    world = assemble(config, seed, load_data(config))
    engine, state = engine_of(config)(world), initial(world, rule)
    found: list[dict[str, float]] = []
    scores = []
    for t in range(rounds):
        state, record, _ = engine(state)
        if t >= rounds - LAST:
            scores.append(record.metrics["top1"])
        seen = record["diagnosis"]
        if seen and seen["phi"] is not None:
            missing = len(record["missing"]) / config.clients
            bound = missing * seen["phi"] * (1 + seen["dissimilarity"])
            found.append({"phi": seen["phi"], "error": seen["error"], "bound": bound})
    means = {name: statistics.fmean(row[name] for row in found) for name in found[0]}
    held = sum(row["error"] <= row["bound"] * (1 + 1e-6) for row in found)
    return {**means, "rounds": len(found), "held": held, "top1": statistics.fmean(scores)}


def config_of(rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "clients": 10,
        "arms": ["safari"],
        "model": {"name": "cnn", "width": 8},
        "pruning": {"pruner": "mag", "sparsity": 0.8},
        "partition": {"name": "groups", "groups": 2},
        "local": {"steps": 5, "batch": 32, "lr": 0.004},
        "uplink": {"name": "bernoulli", "p": [1, 0.3, 0.3, 0.3, 0.3]},
        "diagnostics": {"every": 2},
        "evaluation": {"every": 1},
        "wire": {"every": 0},
        "engine": {"device": "cpu", "threads": 1},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Clients 0 to 4 hold one half of the labels, 5 to 9 the other.
    group = [client // 5 for client in range(10)]
    rows: list[dict[str, Any]] = []
    for arm in (*RIGHT, "safari"):
        own = []
        for seed in range(args.seeds):
            rule = rule_of(parse(config_of(args.rounds)).arms[0].rule) if arm == "safari" else None
            own.append(run(rule or oracle(float(arm), group, seed), args.rounds, seed))
        rows.append({"right": arm, "seeds": own})
        name = "the paper's rule" if arm == "safari" else f"right with probability {arm:.2f}"
        columns = "  ".join(f"{c} {_with_interval([s[c] for s in own])}" for c in ("phi", "error", "bound"))
        held, rounds = (sum(s[c] for s in own) for c in ("held", "rounds"))
        top1 = _with_interval([100 * s["top1"] for s in own], 1)
        print(
            f"{name:28} {columns}  bound held in {held:.0f} of {rounds:.0f} rounds  top-1 {top1}", flush=True
        )
    if args.out:
        about = {"code": code_version(), "torch": torch.__version__, "python": platform.python_version()}
        table = {"rounds": args.rounds, "environment": about, "rows": rows}
        args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _with_interval(values: Sequence[float], digits: int = 2) -> str:
    found = mean_interval(values)
    around = f" ± {(found.high - found.low) / 2:.{digits}f}" if found else ""
    return f"{statistics.fmean(values):.{digits}f}{around}"


if __name__ == "__main__":
    main()
