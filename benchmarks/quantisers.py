"""signSGD's majority vote against the mean of the arrivals, and AdaQuantFL against fixed levels, on digits.

    python benchmarks/quantisers.py

Ten clients, the paper's links, an MLP with 80% of its weights cut (MAG), 150 rounds; labels in two groups, and IID.
Accuracy is the mean of the last ten rounds, bytes those of an upload that arrived: mean and standard deviation over
seeds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from safari.config import parse
from safari.engine import assemble, engine_of, load_data, rule_of
from safari.engine.state import initial

LAST = 10
SIGN: dict[str, Any] = {"values": "sign"}
# name -> rule, wire, and what the mean of the arrivals is multiplied with
ARMS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "drop, exact": ("drop", {}, 1.0),
    "drop, sign": ("drop", SIGN, 1.0),
    "drop, sign, lr 2": ("drop", SIGN, 2.0),
    "vote, exact": ("majority-vote", {}, 1.0),
    "vote, sign": ("majority-vote", SIGN, 1.0),
    "vote, sign, no feedback": ("majority-vote", SIGN | {"feedback": False}, 1.0),
    "vote, sign, lr 0.5": ({"rule": "majority-vote", "lr": 0.5}, SIGN, 1.0),
    "vote, sign, lr 2": ({"rule": "majority-vote", "lr": 2.0}, SIGN, 1.0),
}
ARMS |= {
    f"drop, qsgd, {bits} bits{', adapt' if adapt == 'loss' else ''}": (
        "drop",
        {"values": "qsgd", "bits": bits, "adapt": adapt},
        1.0,
    )
    for bits in (2, 3, 4)
    for adapt in ("none", "loss")
}


def measure(
    arm: Any, wire: dict[str, Any], lr: float, partition: str, seed: int, rounds: int
) -> tuple[float, float]:
    """Top-1 of the last rounds in %, and the mean bytes of an upload."""
    config = parse(
        {
            "rounds": rounds,
            "arms": [{"name": "arm", **arm} if isinstance(arm, dict) else arm],
            "partition": {"name": partition},
            "model": {"name": "mlp"},
            "wire": wire,
            "aggregation": {"steps": [] if lr == 1 else [{"name": "lr", "lr": lr}]},
            "engine": {"device": "cpu", "threads": 1},
        }
    )
    world = assemble(config, seed, load_data(config))
    engine, state = engine_of(config)(world), initial(world, rule_of(config.arms[0].rule))
    scores, sizes = [], []
    for _ in range(rounds):
        state, record, _ = engine(state)
        scores.append(100 * record["top1"])
        if record["bytes"]["up"] is not None:
            sizes.append(record["bytes"]["up"])
    return statistics.fmean(scores[-LAST:]), statistics.fmean(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for partition in ("groups", "iid"):
        for name, how in ARMS.items():
            found = [measure(*how, partition, seed, options.rounds) for seed in range(options.seeds)]
            scores, sizes = zip(*found, strict=True)
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            print(f"{partition:8} {name:26} {statistics.fmean(scores):5.1f} ± {spread:4.1f} %", end="")
            print(f" {statistics.fmean(sizes):8.0f} bytes", flush=True)


if __name__ == "__main__":
    main()
