"""Short runs whose records were kept: what a later version computes must be the same, bit for bit.

`python tests/engine/recorded_runs.py` writes `recorded/runs.json` anew; do that only for a change that is
meant to change the numbers, and say so in the changelog.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import safari

PRUNERS = ("rand", "mag", "snip", "grasp", "synflow")
ENGINES = ("reference", "vectorised")
RULES = ("drop", "safari", "safari+")
RECORDED = Path(__file__).parent / "recorded" / "runs.json"
# What later versions may add to a record.
FIELDS = (
    "round", "loss", "top1", "top5", "average", "train_loss", "trained", "arrived", "missing", "refused",
    "stand_ins", "lost", "density", "agreement", "support", "churn", "layers", "layer_churn", "bytes",
    "modes", "diagnosis",
)  # fmt: skip


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The demo, cut short, and every pruner in both engines with three rules."""
    threads = {"threads": 1}
    yield "demo", {"rounds": 12, "engine": threads}
    for pruner in PRUNERS:
        for engine in ENGINES:
            yield (
                f"{pruner}-{engine}",
                {
                    "rounds": 4,
                    "arms": list(RULES),
                    "pruning": {"pruner": pruner},
                    "engine": {"name": engine, **threads},
                    "wire": {"every": 2},
                },
            )


def records_of(config: dict[str, Any], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every arm's records of a run."""
    safari.run(config, folder)
    found = {}
    for path in sorted(folder.glob("trials/*/seed-0/rounds.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.parent.name] = [{name: line[name] for name in FIELDS} for line in lines]
    return found


def digest(records: list[dict[str, Any]]) -> str:
    """A hash of an arm's records: floats as JSON has them, to the last bit."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def machine() -> dict[str, str]:
    """What the bits depend on besides the code."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def main() -> None:
    """Write the record."""
    table: dict[str, Any] = {"machine": machine(), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs():
            found = records_of(config, Path(folder) / name)
            table["runs"][name] = {
                arm: {"digest": digest(lines), "loss": [line["loss"] for line in lines]}
                for arm, lines in found.items()
            }
    RECORDED.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
