"""Does a lossy wire cost accuracy? The same experiment with exact uploads and with lossy ones, over seeds.

    python benchmarks/wire_lossy.py OUT --set data.root=WHERE-CIFAR-10-IS

Writes two runs, OUT/exact and OUT/<values>, and OUT/wire-lossy.json: for each arm the final accuracies by
seed, and whether the means differ by no more than the seeds' spread (their standard deviation with exact
uploads). Both runs have the same seeds, batches and losses. On one H200 about four minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

import safari
from safari.cli.options import read_config

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "wire-lossy.toml"


def compare(exact: dict, lossy: dict) -> dict:
    """One arm's two summaries side by side."""
    seeds = sorted(exact["seeds"])
    pairs = [(exact["seeds"][s]["top1"], lossy["seeds"][s]["top1"]) for s in seeds]
    spread = stdev(a for a, _ in pairs) if len(pairs) > 1 else float("nan")
    difference = fmean(b - a for a, b in pairs)
    return {
        "exact": [a for a, _ in pairs],
        "lossy": [b for _, b in pairs],
        "mean_difference": difference,
        "spread_of_exact": spread,
        "within_spread": abs(difference) <= spread,
        "bytes_up": [run["bytes_up"]["mean"] for run in (exact, lossy)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=EXPERIMENT)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the config")
    arguments = parser.parse_args()
    lossy = read_config(arguments.config, arguments.set)
    exact = read_config(arguments.config, [*arguments.set, "wire.values=auto", "wire.feedback=false"])
    runs = {"exact": exact, lossy.wire.values: lossy}
    summaries = [safari.run(config, arguments.out / name)["arms"] for name, config in runs.items()]
    table = {arm: compare(summaries[0][arm], summaries[1][arm]) for arm in summaries[0]}
    for arm, row in table.items():
        verdict = "met   " if row["within_spread"] else "MISSED"
        means = f"exact {fmean(row['exact']):.4f}, {lossy.wire.values} {fmean(row['lossy']):.4f}"
        gap = f"difference {row['mean_difference']:+.4f}, spread {row['spread_of_exact']:.4f}"
        print(f"{verdict} {arm}: {means}, {gap}")
    (arguments.out / "wire-lossy.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
