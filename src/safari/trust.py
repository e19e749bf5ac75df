"""What a run's folder may make us run: code that this user has run before, or approves now.

A folder may have been sent by anybody, so nothing in it can say that its code is safe. What the user has run
is remembered outside of it, by file and digest, in `$XDG_STATE_HOME/safari/trusted.json`
(`~/.local/state/safari`; on Windows below `%LOCALAPPDATA%`).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safari.errors import TrustError
from safari.loading import Source, find, loading

# True: load everything. A function: is shown what is new and says yes or no. False: only what is remembered.
Trust = bool | Callable[[Sequence[Source]], bool]

FORMAT = "safari-trust-1"
# The newest are kept: more files than anybody has plug-ins, and versions of one.
MOST_FILES, MOST_VERSIONS = 2000, 50
_OF_A_RUN = ("trials", "plugins.json", "summary.json", "environment.json", "clients.json")


def plugin_names(table: Mapping[str, Any]) -> list[str]:
    """The code that a config's tables name, wherever in them: `file.py` and `package.module`, each once.

    >>> plugin_names({"arms": ["drop", {"rule": "my_rule.py:stale"}], "model": {"name": "lab.nets:wide"}})
    ['lab.nets', 'my_rule.py']
    """
    found: dict[str, None] = {}
    todo: list[Any] = [table]
    while todo:
        value = todo.pop(0)
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, str) and ":" in value:
            source, _, attribute = value.rpartition(":")
            if attribute.isidentifier() and (source.endswith(".py") or _is_module(source)):
                found[source] = None
    return list(found)


def needs(table: Mapping[str, Any]) -> list[Source]:
    """The code that running a config would load, as far as it is there; nothing is run to find out."""
    return [source for name in plugin_names(table) if (source := find(name)) is not None]


def contacts(table: Mapping[str, Any]) -> list[Source]:
    """The machines that running a config would talk to: those of its trackers and of its downloads."""
    return [*trackers(table), *downloads(table)]


def trackers(table: Mapping[str, Any]) -> list[Source]:
    """The addresses that the trackers of a config would send to."""
    address = _inner(table, "track").get("mlflow")
    return [Source(f"track.mlflow = {address!r}", None, "")] if address else []


def downloads(table: Mapping[str, Any]) -> list[Source]:
    """What a config would fetch: from the Hugging Face hub, which also tells it who runs this, or a data set's site.

    A name that is a file or a folder here is read from there, and nothing is fetched.

    >>> [str(source) for source in downloads({"data": {"name": "hf:ylecun/mnist"}})]
    ["data.name = 'hf:ylecun/mnist', from the Hugging Face hub (no file)"]
    >>> downloads({"data": {"name": "hf", "source": "./mnist.csv"}})
    []
    """
    data, model = _inner(table, "data"), _inner(table, "model")
    found, name = [], data.get("name")
    if isinstance(name, str) and (name == "hf" or name.startswith("hf:")):
        source = name[3:] or data.get("source", "")
        if not _is_local(source):
            found.append(f"data.name = {f'hf:{source}'!r}, from the Hugging Face hub")
    if data.get("download"):
        found.append(f"data.download = true, {name} from its own site")
    if model.get("name") == "transformers" and model.get("path") and not _is_local(model["path"]):
        found.append(f"model.path = {model['path']!r}, from the Hugging Face hub")
    return [Source(what, None, "") for what in found]


def _inner(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_local(source: Any) -> bool:
    """Is it a path, there or not, rather than a name on the hub? What is no text at all is refused elsewhere."""
    if not isinstance(source, str) or not source or source.startswith((".", "/", "~")):
        return True
    # A name that no file can have is not one.
    with contextlib.suppress(OSError, ValueError):
        return Path(source).exists()
    return False


@contextlib.contextmanager
def trusting(sources: Sequence[Source], trust: Trust, what: str) -> Iterator[None]:
    """Approve what a config from a folder names, and let nothing else be loaded inside.

    Args:
        sources: what it names (`needs`, `contacts`).
        trust: see `Trust`.
        what: whose config it is, for the error.

    TrustError names all that is new, with its path and digest, when it is not approved.
    """
    store = Store.read()
    new = [source for source in sources if not store.knows(source)]
    approved = not new or trust is True or (callable(trust) and trust(new))
    if not approved:
        raise TrustError(
            [f"{what} names what you have not run or approved before: {source}" for source in new]
        )
    everything = trust is True or bool(new)
    with loading((lambda source: True) if everything else store.knows):
        yield


def is_of_a_run(config: Path) -> bool:
    """Is a config file that of a run's folder, which anybody may have sent, not one that a user wrote?"""
    folder = config.parent
    return config.name == "config.toml" and any((folder / name).exists() for name in _OF_A_RUN)


def remember(sources: Iterable[Source]) -> None:
    """Note that the user has run this; a store that cannot be written is left as it is."""
    store = Store.read()
    new = [source for source in sources if not store.knows(source)]
    if new:
        with contextlib.suppress(OSError):
            store.with_sources(new).write()


@dataclass(frozen=True)
class Store:
    """Digests of what was run, by file, the newest last."""

    files: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls) -> Store:
        """The user's store; an empty one where there is none, or where others could have written it."""
        try:
            path = store_path()
            with path.open("rb") as handle:
                about = os.fstat(handle.fileno())
                if not _is_private(about) or not _is_private(path.parent.stat()):
                    return cls({})
                table = json.loads(handle.read())
            if table["format"] != FORMAT:
                return cls({})
            return cls({str(key): [str(digest) for digest in found] for key, found in table["files"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls({})

    def knows(self, source: Source) -> bool:
        """Was this very file, with these contents, run before?"""
        return source.digest in self.files.get(source.key, ())

    def with_sources(self, sources: Iterable[Source]) -> Store:
        """The store with more in it."""
        files = {key: list(found) for key, found in self.files.items()}
        for source in sources:
            before = [digest for digest in files.pop(source.key, []) if digest != source.digest]
            files[source.key] = [*before, source.digest][-MOST_VERSIONS:]
        return Store(dict(list(files.items())[-MOST_FILES:]))

    def write(self) -> None:
        """Replace the old file with it atomically, readable by the user alone."""
        path = store_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "files": self.files}, file, indent=1)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def store_path() -> Path:
    """Where the user's store lies."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_STATE_HOME", "")
        if not base.startswith("/"):
            base = str(Path.home() / ".local" / "state")
    return Path(base) / "safari" / "trusted.json"


def _is_private(about: os.stat_result) -> bool:
    """Can nobody but this user have written it?"""
    if not hasattr(os, "geteuid"):
        return True
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_module(name: str) -> bool:
    return bool(name) and all(part.isidentifier() for part in name.split(".")) and name != "__main__"
