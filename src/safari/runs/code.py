"""The plug-in code that a run was made with: digests in `plugins.json`, copies in `plugins/`.

The numbers of a run follow from the code of its plug-ins as they do from its config, so a run does not go on
with other code. The copies are for people: nothing is ever loaded from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from safari import loading
from safari.errors import RunError
from safari.loading import Source
from safari.runs import files
from safari.runs.folder import RunFolder
from safari.trust import names_in, remember

NAME = "plugins.json"
_FOLDER = "plugins"


def refuse_changed_code(run: RunFolder) -> None:
    """RunError when a file that the run was made with is another one now; nothing is loaded to find out."""
    for name, entry in _entries(run).items():
        found = loading.find(name)
        if found is not None:
            _compare(run, found, entry)


def keep_code(run: RunFolder, about: Mapping[str, str] | None = None) -> None:
    """Note what the plug-ins of a run were loaded from, with copies; RunError when that has changed.

    The run is the user's own from now on, as long as its config and this code stay as they are.

    Args:
        run: whose config names them; they are loaded already.
        about: what plug-ins say of themselves in a line, by their name in the config.
    """
    entries, lines = _entries(run), _about(run)
    names = names_in(run.config.to_dict().items())
    code = sorted({name.rpartition(":")[0] for name in names if ":" in name})
    loaded = [each for name in code for each in loading.sources_of(name)]
    now = dict(entries)
    for source, contents in loaded:
        if source.name in entries:
            _compare(run, source, entries[source.name])
            continue
        now[source.name] = {"sha256": source.digest, "copy": _copy(run, source, contents)}
    said = lines | dict(about or {})
    if (now, said) != (entries, lines):
        run.write(NAME, json.dumps({"files": now, "about": said}, indent=2) + "\n")
    remember(run.path / "config.toml", names, {source.digest: source.name for source, _ in loaded})


def described(run: RunFolder) -> dict[str, str]:
    """Descriptions of the run's own plug-ins, as recorded when it was made, by their name in the config.

    Empty where they cannot be read: a page does without them.
    """
    try:
        return _about(run)
    except RunError:
        return {}


def _compare(run: RunFolder, source: Source, entry: Mapping[str, Any]) -> None:
    before = entry["sha256"]
    if source.digest != before:
        copy = entry.get("copy")
        kept = f"; the run's own copy is {run.path / copy}" if isinstance(copy, str) else ""
        raise RunError(
            f"{source.name} has changed since {run.path} was made with it (sha256 {str(before)[:16]} then, "
            f"{source.digest[:16]} now){kept}. Put it back, or begin a new run"
        )


def _copy(run: RunFolder, source: Source, contents: bytes | None) -> str | None:
    if contents is None:
        return None
    plain = re.sub(r"[^\w+-]", "_", PurePath(source.name).stem)
    name = f"{_FOLDER}/{source.digest[:12]}-{plain}.py"
    with files.making(run.path / _FOLDER, run.path):
        if not files.is_there(run.path / name, run.path):
            files.write_atomically(run.path / name, contents, run.path)
    return name


def _entries(run: RunFolder) -> dict[str, Mapping[str, Any]]:
    found = run.read(NAME).get("files", {})
    if not isinstance(found, dict) or not all(_is_entry(entry) for entry in found.values()):
        raise RunError(f'{run.path / NAME} must hold a digest ("sha256") for each of its files')
    return found


def _about(run: RunFolder) -> dict[str, str]:
    found = run.read(NAME).get("about", {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise RunError(f'{run.path / NAME} must hold texts in "about"')
    return found


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
