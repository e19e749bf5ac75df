"""Short runs whose records were kept: what a later version computes must be the same, bit for bit.

Processors round sums in different orders, so a digest holds for one kind of machine, and the file has one for each that
was at hand. `python tests/engine/recorded_runs.py --add` adds this machine's: run it with a version whose digests are
known to be right on another machine. Without `--add` it writes `recorded/runs.json` anew; do that only for a change
that is meant to change the numbers, and say so in the changelog.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
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


def machine() -> str:
    """What the bits depend on besides the code: torch, its instruction set, and whose processor its libraries see."""
    vendor, flags = platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(
            line.split(":", 1) for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if ":" in line
        )
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        vendor, flags = fields.get("vendor_id", vendor), fields.get("flags", "")
    matrices = " AMX" if "amx_tile" in flags.split() else ""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}{matrices}, {vendor}"


def main() -> None:
    """Write the record, or add this machine's digests to it."""
    parser = argparse.ArgumentParser(description="Keep the records of short runs.")
    parser.add_argument("--add", action="store_true", help="keep the digests of other machines")
    known = json.loads(RECORDED.read_text()) if parser.parse_args().add else {}
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs():
            for arm, lines in records_of(config, Path(folder) / name).items():
                kept = known.get(name, {}).get(arm, {"loss": [line["loss"] for line in lines], "digests": {}})
                digests = {**kept["digests"], machine(): digest(lines)}
                table.setdefault(name, {})[arm] = {"loss": kept["loss"], "digests": digests}
    RECORDED.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
