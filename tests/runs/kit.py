"""What the tests of run folders share: a setting that takes a moment, and real processes to kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Both links keep a state, some rounds are not evaluated, and rounds is no multiple of checkpoint.every:
# all that a resume could get wrong.
TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 7,
    "clients": 4,
    "arms": ["drop", "safari"],
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 1, "batch": 8},
    "uplink": {"name": "gilbert-elliott", "p": 0.5, "burst": 3.0},
    "downlink": {"name": "gilbert-elliott", "p": 0.9, "burst": 1.5},
    "evaluation": {"every": 2, "last": 4},
    "checkpoint": {"every": 3},
    "engine": {"device": "cpu", "threads": 1},
}

RUN = "import json, sys, safari; safari.run(json.loads(sys.argv[1]), sys.argv[2], progress=False)"
RESUME = "import sys, safari; safari.resume(sys.argv[1], progress=False)"


def environment() -> dict[str, str]:
    """A child's environment: the same packages as here, and one thread."""
    paths = [str(Path(__import__("safari").__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **{"env": environment()} | options,
    )


def results(run: Path) -> dict[str, bytes]:
    """The bytes of every record file and of the summary, by name."""
    files = [
        *run.glob("trials/*/*/rounds.jsonl"),
        *run.glob("trials/*/*/similarity.jsonl"),
        run / "summary.json",
        run / "config.toml",
    ]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def checkpoints(run: Path) -> dict[str, bytes]:
    """The bytes of every checkpoint, by name: tensors, round and facts."""
    files = sorted(run.glob("trials/*/*/checkpoint.safetensors"))
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def leftovers(run: Path) -> list[str]:
    """Temporary files that a run should not leave behind."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*.tmp"))
