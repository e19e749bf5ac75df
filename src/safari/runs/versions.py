"""Which version of the code computed which rounds of a trial: code.jsonl, a line from each change on."""

from __future__ import annotations

import json
from pathlib import Path

from safari.runs.files import append_line, keep_lines
from safari.runs.folder import Trial, read_lines
from safari.version import code_version


def note_version(trial: Trial, first: int) -> None:
    """Note that this version computes the rounds from `first` on (counted from 1)."""
    path = _path(trial)
    kept = [line for line in read_lines(path) if line.get("round", 0) < first]
    keep_lines(path, len(kept))
    if not kept or kept[-1].get("code") != code_version():
        append_line(path, json.dumps({"round": first, "code": code_version()}))


def versions_of(trial: Trial) -> list[str]:
    """The versions that computed a trial's rounds, the first one first; none where that was not noted yet."""
    return list(dict.fromkeys(str(line["code"]) for line in read_lines(_path(trial)) if "code" in line))


def _path(trial: Trial) -> Path:
    return trial.path / "code.jsonl"
