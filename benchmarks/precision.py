"""Is final accuracy in bfloat16 that of float32, within the spread of the seeds? From finished runs.

    python benchmarks/precision.py F32 BF16 [F32 BF16 ...] --out results/engine/precision.md

Runs come in pairs of one setting, float32 first (`experiments/base/precision.toml`). An arm's accuracies are
equal when their means differ by no more than the larger of the two standard deviations over the seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safari.runs import RunFolder, summarise

HEAD = """\
| pruner | arm | rounds | float32 | bfloat16 | difference | seeds' spread | equal within it |
|---|---|---|---|---|---|---|---|
"""


def rows(exact: Path, rough: Path) -> list[str]:
    runs = [RunFolder.open(path) for path in (exact, rough)]
    found = [summarise(run) for run in runs]
    precisions = [run.config.engine.precision for run in runs]
    if precisions != ["float32", "bfloat16"]:
        raise SystemExit(f"{exact} and {rough} must be float32 and bfloat16, got {' and '.join(precisions)}")
    pruner = runs[0].config.pruning.pruner
    lines = []
    for arm in found[0]["arms"]:
        one, other = (summary["arms"][arm]["top1"] for summary in found)
        difference = other["mean"] - one["mean"]
        spread = max(one["std"] or 0.0, other["std"] or 0.0)
        cells = [
            pruner,
            arm,
            f"{found[0]['rounds']:,}",
            *(f"{v['mean']:.2%} ± {v['std'] or 0:.2%} (n={v['n']})" for v in (one, other)),
            f"{difference:+.2%}",
            f"{spread:.2%}",
            "yes" if abs(difference) <= spread else "**no**",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if len(args.runs) % 2:
        parser.error(f"runs come in pairs, got {len(args.runs)}")
    pairs = zip(args.runs[::2], args.runs[1::2], strict=True)
    table = HEAD + "\n".join(line for pair in pairs for line in rows(*pair)) + "\n"
    print(table, end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table)


if __name__ == "__main__":
    main()
