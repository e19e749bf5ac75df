"""Trust in configs: a run that somebody else may have written runs no code and contacts nobody.

What was typed, or written in Python, is the user's own. A config file may come from anybody: code and addresses that
it names are refused where code is loaded (`safari.loading`) and where a network would be used, unless the user says
`--trust`, or has run the very same file before. The digests of those files are kept outside of any run's folder, in
`$XDG_STATE_HOME/safari/trusted` (`~/.local/state/safari`; on Windows below `%LOCALAPPDATA%`), one small file each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safari.errors import TrustError

# No config file is longer.
_LARGEST = 64 * 2**20


@dataclass
class Session:
    """Code and addresses that may be used while one config is used, and those that were.

    Args:
        config: the file that may be somebody else's; None for the user's own tables.
        trusted: everything may be used.
        names: the code and addresses that may be used otherwise; of code, files that the user has run before.
        typed: those that the user has named on the command line, whatever is in the files.
        used: names that were used so far.
        pinned: plug-in files as they were at their first use.
        unchecked: files are being loaded by a name that was typed.
    """

    config: Path | None = None
    trusted: bool = True
    names: frozenset[str] = frozenset()
    typed: frozenset[str] = frozenset()
    used: dict[str, None] = field(default_factory=dict)
    pinned: dict[Path, Any] = field(default_factory=dict)
    unchecked: bool = False

    def permit(self, name: str, what: str) -> None:
        """TrustError when a name in the config may not be used; `what` says what it is."""
        if not (self.trusted or name in self.names or name in self.typed):
            raise TrustError(
                f"{name!r} {what}, which {self.config} names, and somebody else may have written that: "
                "look at it first; with --trust (in Python trust=True) everything that it names is used"
            )
        self.used[name] = None

    def permit_file(self, shown: str, digest: str) -> None:
        """TrustError for a plug-in file that the user has not run, by its digest; `shown` names it."""
        if not (self.trusted or self.unchecked or known(digest) is not None):
            raise TrustError(
                f"{shown} is not what you have run with {self.config} before: "
                "look at it first; with --trust (in Python trust=True) it is loaded"
            )

    @contextlib.contextmanager
    def code(self, name: str) -> Iterator[None]:
        """Load a plug-in inside; TrustError when it may not be."""
        self.permit(name, "is code")
        before, self.unchecked = self.unchecked, self.unchecked or name in self.typed
        try:
            yield
        finally:
            self.unchecked = before


_session: ContextVar[Session | None] = ContextVar("safari_session", default=None)


def session() -> Session:
    """The session in force; without one everything is the user's own Python, and nothing is kept."""
    return _session.get() or Session()


@contextlib.contextmanager
def using(config: Path | None, trust: bool = False, typed: Iterable[str] = ()) -> Iterator[None]:
    """Run a config inside, with what it may load and contact.

    Args:
        config: the file that it comes from, which may be somebody else's; None for the user's own tables.
        trust: use everything that it names.
        typed: names that the user gave beside it.

    Inside of a session that trusts not everything, that one stays in force.
    """
    outer = session()
    if not outer.trusted:
        yield
        return
    names = frozenset() if config is None else known(digest_of(config)) or frozenset()
    here = Session(config, trust or config is None, names, frozenset(typed), pinned=outer.pinned)
    token = _session.set(here)
    try:
        yield
    finally:
        _session.reset(token)


@contextlib.contextmanager
def inherited(here: Session) -> Iterator[None]:
    """Go on inside with the session of the process that started this one."""
    token = _session.set(here)
    try:
        yield
    finally:
        _session.reset(token)


def contact(name: str, what: str) -> None:
    """TrustError when a network must not be used for what a config names."""
    session().permit(name, what)


def names_in(settings: Iterable[tuple[str, Any]]) -> set[str]:
    """Code, addresses and fields that settings name, as `Session.typed` has them.

    >>> sorted(names_in([("arms", [{"rule": "my.py:stale"}]), ("data", {"name": "hf:a/b", "download": True})]))
    ['a/b', 'arms', 'data', 'data.download', 'data.name', 'hf:a/b', 'my.py', 'my.py:stale']
    """
    names: set[str] = set()
    todo = list(settings)
    while todo:
        key, value = todo.pop()
        names |= {key} if key else set()
        if isinstance(value, Mapping):
            todo += [(f"{key}.{inner}" if key else "", held) for inner, held in value.items()]
        elif isinstance(value, list | tuple):
            todo += [("", held) for held in value]
        elif isinstance(value, str):
            names |= {value, value[3:] if value.startswith("hf:") else value.rpartition(":")[0] or value}
    return names


def remember(config: Path, names: Iterable[str], files: Mapping[str, str]) -> None:
    """Note what the user has run; a store that cannot be written is left as it is.

    Args:
        config: the run's own copy of the session's config.
        names: all that it names, of which what was used counts.
        files: names of the plug-in files that were loaded, by digest.
    """
    here = session()
    used = here.used.keys() & set(names)
    if not used:
        return
    configs = {digest_of(each) for each in (config, here.config) if each is not None}
    with contextlib.suppress(OSError):
        folder = store()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for digest in configs - {""}:
            _write(folder / digest, sorted(used | (known(digest) or frozenset())))
        for digest, name in files.items():
            _write(folder / digest, [name])


def known(digest: str) -> frozenset[str] | None:
    """Names that the user has used with a file of this digest; None where the file was never run.

    None, too, where others could have written the store.
    """
    try:
        folder = store()
        if not digest or not _is_private(folder.stat()):
            return None
        names = json.loads((folder / digest).read_bytes())
        return frozenset(map(str, names)) if isinstance(names, list) else None
    except (OSError, ValueError, RecursionError):
        return None


def digest_of(path: Path) -> str:
    """SHA-256 of a config file in hexadecimal; empty where there is no plain file of that name, or a giant one."""
    try:
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= _LARGEST else b""
    except (OSError, ValueError):
        data = b""
    return hashlib.sha256(data).hexdigest() if data else ""


def state_folder() -> Path:
    """Folder in which this package keeps what belongs to the user rather than to a run."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_STATE_HOME", "")
        if not base.startswith("/"):
            base = str(Path.home() / ".local" / "state")
    return Path(base) / "safari"


def store() -> Path:
    """The folder of digests."""
    return state_folder() / "trusted"


def _write(path: Path, names: list[str]) -> None:
    # Cut short by a crash it is no JSON, and so is not believed.
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        json.dump(names, file)


def _is_private(about: os.stat_result) -> bool:
    """Can nobody but this user have written there?"""
    if not hasattr(os, "geteuid"):
        return True
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
