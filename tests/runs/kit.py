"""What the tests of run folders share: a setting that is done in a blink, and real processes to kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

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

RUN = "import json, sys, safari; safari.run(json.loads(sys.argv[1]), sys.argv[2])"
RESUME = "import sys, safari; safari.resume(sys.argv[1])"


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
    files = [*run.glob("trials/*/*/rounds.jsonl"), run / "summary.json", run / "config.toml"]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def checkpoints(run: Path) -> dict[str, dict[str, Any]]:
    """Every checkpoint's metadata and tensors (as dtype, shape and bytes), by file."""
    found = {}
    for file in sorted(run.glob("trials/*/*/checkpoint.safetensors")):
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name).numpy() for name in handle.keys()}  # noqa: SIM118
            found[str(file.relative_to(run))] = {"metadata": handle.metadata()} | {
                name: (str(array.dtype), array.shape, array.tobytes()) for name, array in tensors.items()
            }
    return found


def leftovers(run: Path) -> list[str]:
    """Temporary files that a run should not leave behind."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*.tmp"))
