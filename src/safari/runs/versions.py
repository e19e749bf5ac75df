"""Which version of the code computed which rounds of a trial: code.json, an entry for each change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safari.errors import RunError
from safari.runs.files import read_json, write_atomically
from safari.runs.folder import Trial
from safari.version import code_version


def note_version(trial: Trial, first: int) -> None:
    """Note that this version computes the rounds from `first` on (counted from 1)."""
    before = _entries(trial)
    # Rounds that no checkpoint kept are computed again, so what was noted of them is void.
    kept = [entry for entry in before if entry["round"] < first]
    if not kept or kept[-1]["code"] != code_version():
        kept.append({"round": first, "code": code_version()})
    if kept != before:
        write_atomically(_path(trial), (json.dumps(kept) + "\n").encode(), trial.root)


def versions_of(trial: Trial) -> list[str]:
    """The versions that computed a trial's rounds, the first one first; none where that was not noted yet."""
    return list(dict.fromkeys(entry["code"] for entry in _entries(trial)))


def _entries(trial: Trial) -> list[dict[str, Any]]:
    path = _path(trial)
    try:
        found = read_json(path, trial.root)
        return [{"round": int(entry["round"]), "code": str(entry["code"])} for entry in found]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RunError(f"{path} does not say which code made which rounds: {error!r}; remove it") from error


def _path(trial: Trial) -> Path:
    return trial.path / "code.json"
