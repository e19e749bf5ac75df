"""Code that a config names: found, digested, and imported.

`find` says where a plug-in's code lies and what its digest is without running any of it. `load` imports it, when the
session in force permits it (`safari.trust`): a file is compiled from the very bytes that were digested (never from a
cached `.pyc`), and may import modules that lie beside it. Within a session it stays what it was at its first use,
however it is edited meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from types import ModuleType

from safari.errors import ConfigError
from safari.text import visible
from safari.trust import session

# No source file of a plug-in is longer.
LARGEST_SOURCE = 16 * 2**20
MAIN = "__main__"
# A name and its absolute path: twice what Linux allows for one.
_LONGEST_NAME = 2 * 4096 + 100


@dataclass(frozen=True)
class Source:
    """A piece of code by the name that a config has for it.

    Args:
        name: `my_rule.py`, `package.module`, or a file beside a plug-in by its path.
        path: the file; None where there is none, as for modules that are compiled into Python.
        digest: SHA-256 of the file in hexadecimal; empty without a file.
    """

    name: str
    path: Path | None
    digest: str

    def __str__(self) -> str:
        """Name, path and digest as an error shows them.

        >>> print(Source("my_rule.py", Path("/home/me/my_rule.py"), 16 * "0123"))
        my_rule.py (/home/me/my_rule.py, sha256 0123012301230123)
        """
        where = "no file" if self.path is None else f"{self.path}, sha256 {self.digest[:16]}"
        # The name of a file that somebody sent could make a terminal show another one.
        return visible(f"{self.name} ({where})", _LONGEST_NAME)


@dataclass(frozen=True)
class _Loaded:
    """A module that was imported, with all files of the user's that it was made from."""

    module: ModuleType
    sources: tuple[Source, ...]
    contents: dict[Path | None, bytes]


_lock = RLock()
_files: dict[Path, _Loaded] = {}
# Modules in the folders of plug-ins, by file: two plug-ins that import the same one share it.
_neighbours: dict[Path, _Neighbour] = {}


def is_file_name(name: str) -> bool:
    """Does a config mean a file by this name, not a module?"""
    return name.endswith(".py")


def find(name: str) -> Source | None:
    """Locate the source of code by name, without running any; None where there is none by this name."""
    if is_file_name(name):
        path = Path(name)
        if not path.is_file():
            return None
        return Source(name, path.resolve(), _digest(_read(path)))
    if name == MAIN:
        return None
    spec = _spec_of(name)
    if spec is None:
        return None
    if spec.origin is None or not spec.has_location or not Path(spec.origin).is_file():
        return Source(name, None, "")
    path = Path(spec.origin).resolve()
    return Source(name, path, _digest(path.read_bytes()))


def load(name: str) -> ModuleType:
    """Import a file or a module; TrustError where it may not be, and what goes wrong in it comes as it is."""
    with session().code(name):
        if is_file_name(name):
            return _load_file(name).module
        if name == MAIN:
            return sys.modules[MAIN]
        found = find(name)
        if found is not None and found.path is not None:
            _permit(found)
        return importlib.import_module(name)


def loaded(name: str) -> ModuleType | None:
    """The module of a name, if it was imported before; nothing is run."""
    if is_file_name(name):
        there = _files.get(Path(name).resolve())
        return None if there is None else there.module
    return sys.modules.get(name)


def sources_of(name: str) -> Sequence[tuple[Source, bytes | None]]:
    """The code that a name was loaded from, a file with those beside it that it imported; with contents.

    Empty for what was not loaded. The contents of a module that is not a plug-in file are left out: it
    belongs to an installed package.
    """
    if is_file_name(name):
        path = Path(name).resolve()
        there = session().pinned.get(path) or _files.get(path)
        return [] if there is None else [(source, there.contents[source.path]) for source in there.sources]
    found = find(name) if name in sys.modules else None
    return [] if found is None else [(found, None)]


def _load_file(name: str) -> _Loaded:
    given, path = Path(name), Path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"no such file: {name} (paths are relative to the current folder)")
    with _lock:
        pinned = session().pinned
        found: _Loaded | None = pinned.get(path)
        if found is None:
            found = _files.get(path)
            if found is None or not all(map(_is_as_it_was, found.sources)):
                found = _files[path] = _import_file(given, path)
            pinned[path] = found
        for source in found.sources:
            _permit(source)
        return found


def _import_file(given: Path, path: Path) -> _Loaded:
    name = "safari_plugin_" + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    finder = _Beside(given.parent, path.parent)
    module = ModuleType(name)
    loader = _Loader(finder, given, path)
    module.__file__, module.__loader__ = str(path), loader
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader, origin=str(path))
    before = sys.modules.get(name)
    # Dataclasses and type hints look their module up by its name.
    sys.modules[name] = module
    try:
        with finder:
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return _Loaded(module, tuple(finder.noted.values()), finder.contents)


class _Loader(importlib.abc.InspectLoader):
    """Runs a file from the bytes that were digested, unless it was run before."""

    def __init__(self, finder: _Beside, given: Path, path: Path):
        self._finder, self._given, self._path = finder, given, path
        self._known = finder.known(path)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module of before, where there is one."""
        return None if self._known is None else self._known.module

    def exec_module(self, module: ModuleType) -> None:
        """Run the file in a module."""
        if self._known is not None:
            self._finder.note(self._known)
            return
        data = _read(self._path)
        source = Source(str(self._given), self._path, _digest(data))
        _permit(source)
        with self._finder.running(source, data, module):
            exec(compile(data, str(self._path), "exec", dont_inherit=True), module.__dict__)

    def get_source(self, fullname: str) -> str:
        """Its text, for tracebacks and for `inspect`."""
        return importlib.util.decode_source(_read(self._path))


@dataclass(frozen=True)
class _Neighbour:
    """A module beside a plug-in, with the paths of those beside it that it needs in turn."""

    module: ModuleType
    source: Source
    contents: bytes
    needs: list[Path] = field(default_factory=list)


class _Beside(importlib.abc.MetaPathFinder):
    """Lets a plug-in import what lies beside it while it is imported itself, and notes every file used.

    What is installed comes first: no package is shadowed, and `sys.path` stays as it is. Afterwards the
    modules are no longer in `sys.modules`: two plug-ins may each have a `helper.py` of their own.
    """

    def __init__(self, given: Path, folder: Path):
        self._given, self._folder = given, folder
        self._names: set[str] = set()
        self._running: list[_Neighbour] = []
        self.noted: dict[Path, Source] = {}
        self.contents: dict[Path | None, bytes] = {}

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in self._names:
            sys.modules.pop(name, None)

    def known(self, path: Path) -> _Neighbour | None:
        """A file that was run before, when neither it nor what it needs has changed since."""
        found = _neighbours.get(path)
        return found if found and all(_is_as_it_was(each.source) for each in _with_needs(found)) else None

    def note(self, known: _Neighbour) -> None:
        """Count a file, and what it needs, to those that the plug-in is made from."""
        for each in _with_needs(known):
            _permit(each.source)
            self._add(each)

    @contextlib.contextmanager
    def running(self, source: Source, contents: bytes, module: ModuleType) -> Iterator[None]:
        """Note a file while it is run, and what it imports as needed by it."""
        here = _Neighbour(module, source, contents)
        self._add(here)
        self._running.append(here)
        try:
            yield
        finally:
            self._running.pop()
        if self._running:
            assert source.path is not None
            _neighbours[source.path] = here

    def _add(self, each: _Neighbour) -> None:
        assert each.source.path is not None
        self.noted[each.source.path] = each.source
        self.contents[each.source.path] = each.contents

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The file beside the plug-in, or in a package beside it, that has this name."""
        parent, _, name = fullname.rpartition(".")
        if parent and parent not in self._names:
            return None
        folder = self._folder.joinpath(*parent.split(".")) if parent else self._folder
        for file, is_package in ((folder / name / "__init__.py", True), (folder / f"{name}.py", False)):
            if file.is_file() and (parent or not self._is_installed(fullname, file)):
                self._names.add(fullname)
                if self._running:
                    self._running[-1].needs.append(file)
                given = self._given / file.relative_to(self._folder)
                places = [str(file.parent)] if is_package else None
                return importlib.util.spec_from_file_location(
                    fullname, file, loader=_Loader(self, given, file), submodule_search_locations=places
                )
        return None

    def _is_installed(self, name: str, file: Path) -> bool:
        """Would the name be found without us, and not as this very file (the folder may be on `sys.path`)?"""
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec(name, None) if find_spec else None
            # A folder of that name on the path is a namespace without origin; Python, too, prefers a file.
            if spec is not None and spec.origin is not None:
                return Path(spec.origin).resolve() != file
        return False


def _with_needs(start: _Neighbour) -> list[_Neighbour]:
    found, todo = dict[Path | None, _Neighbour](), [start]
    while todo:
        each = todo.pop()
        if each.source.path not in found:
            found[each.source.path] = each
            todo += [_neighbours[path] for path in each.needs if path in _neighbours]
    return list(found.values())


def _permit(source: Source) -> None:
    session().permit_file(str(source), source.digest)


def _is_as_it_was(source: Source) -> bool:
    try:
        return source.path is not None and _digest(_read(source.path)) == source.digest
    except (OSError, ConfigError):
        return False


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module's spec. `importlib.util.find_spec` would import the packages that it is in."""
    places: Sequence[str] | None = None
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        spec = None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            with contextlib.suppress(Exception):
                spec = find_spec(full, places) if find_spec else None
            if spec is not None:
                break
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return spec


def _read(path: Path) -> bytes:
    if path.stat().st_size > LARGEST_SOURCE:
        raise ConfigError(f"{path} is larger than the {LARGEST_SOURCE:,} bytes that a plug-in may have")
    return path.read_bytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
