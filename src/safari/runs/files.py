"""Files of a run's folder: only plain files inside it are opened, and none is ever half-written.

A folder may have been sent by somebody else. A symbolic link, a device or a FIFO in it could make us read or
overwrite a file outside of it, or wait for ever, so every path below the folder (`root`) is walked one
component at a time without following links, and a file is used only when it is a regular one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from safari.errors import RunError

# A file that is read whole, and a line of one that is read by lines. Records of 100,000 clients have 2 MB.
LARGEST_WHOLE = 64 * 2**20
LONGEST_LINE = 64 * 2**20

_CHUNK = 2**20
# Windows has neither; there, a component is looked at before it is used, which leaves a race.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_BLOCK = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_DIR_FDS = {os.open, os.stat, os.unlink, os.rename, os.mkdir} <= os.supports_dir_fd

# Temporary files of this package: `.NAME.PID-TOKEN.tmp`, without the token in version 0.1.
_TEMPORARY = re.compile(
    r"\.(?:config\.toml|(?:summary|clients|model|environment|plugins|mlflow|numbers|code|task|results)\.json"
    r"|report\.(?:html|md)|\.writer|(?:checkpoint(?:-\d+)?|best)\.safetensors|[\w.+-]+\.(?:png|svg|py))"
    r"\.(?P<pid>\d+)(?:-[0-9a-f]{8})?\.tmp"
)
# Seconds after which no process is still writing one.
_LONG_AGO = 3600.0
# Those that this process is writing at the moment.
_unfinished: set[str] = set()


def open_plain(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a file of a run's folder for reading.

    Args:
        path: the file.
        root: the run's folder; no component of `path` below it may be a link. By default the file's parent.

    FileNotFoundError when there is none; RunError when it is anything but a plain file, or cannot be read.
    """
    return os.fdopen(_open(path, root, os.O_RDONLY), "rb")


def read_plain(path: Path, root: Path | None = None, *, limit: int | None = LARGEST_WHOLE) -> bytes:
    """The bytes of a file of a run's folder; RunError when there are more than `limit`."""
    with open_plain(path, root) as handle:
        size = os.fstat(handle.fileno()).st_size
        if limit is not None and size > limit:
            raise RunError(f"{path} is larger than the {limit:,} bytes that such a file may have")
        return handle.read(size)


def read_json(path: Path, root: Path | None = None) -> Any:
    """Read a JSON file of a run's folder; RunError when it is not JSON.

    FileNotFoundError when there is none.
    """
    try:
        return json.loads(read_plain(path, root))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not readable JSON: {_words(error)}") from error


def read_object(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Read a JSON object from a file of a run's folder; an empty one where there is no file."""
    try:
        value = read_json(path, root)
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise RunError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def is_there(path: Path, root: Path | None = None) -> bool:
    """Is there anything by this name? A link counts, wherever it points; RunError for a link on the way."""
    try:
        with _parent(path, root) as (name, folder):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _cannot("read", path, error) from error
    return True


def write_atomically(
    path: Path, data: bytes | Iterable[bytes | memoryview], root: Path | None = None
) -> None:
    """Put `data`, whole or in pieces, at `path`: afterwards the file is either the old one or the new one, whole.

    RunError when the disk is full or the folder cannot be written; the old file stays. A link by this name is
    replaced, never followed.
    """
    temporary = f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    _unfinished.add(temporary)
    try:
        with _parent(path, root) as (name, folder):
            made = temporary if folder is not None else str(path.with_name(temporary))
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _BINARY
                with os.fdopen(os.open(made, flags, 0o666, dir_fd=folder), "wb") as handle:
                    handle.writelines([data] if isinstance(data, bytes) else data)
                    handle.flush()
                    os.fsync(handle.fileno())
                os.replace(made, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(made, dir_fd=folder)
                raise
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        _unfinished.discard(temporary)


def append_line(path: Path, line: str, root: Path | None = None) -> None:
    """Append one line, or nothing at all: after a failed write the file has its old length."""
    fd = _open(path, root, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(fd, "ab", buffering=0) as handle:
        length = os.fstat(fd).st_size
        data = memoryview(line.encode() + b"\n")
        try:
            while data:
                data = data[handle.write(data) :]
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, length)
            if isinstance(error, OSError):
                raise _cannot_write(path, error) from error
            raise


def keep_lines(path: Path, count: int, root: Path | None = None) -> int:
    """Cut a file back to its first `count` whole lines; returns how many there are then."""
    if not is_there(path, root):
        return 0
    with os.fdopen(_open(path, root, os.O_RDWR), "r+b") as handle:
        kept, length = _whole_lines(handle, count)
        try:
            if length < os.fstat(handle.fileno()).st_size:
                os.ftruncate(handle.fileno(), length)
        except OSError as error:
            raise _cannot_write(path, error) from error
    return kept


def lines_after(path: Path, count: int, root: Path | None = None) -> bytes:
    """Bytes that `keep_lines` would cut off."""
    if not is_there(path, root):
        return b""
    with open_plain(path, root) as handle:
        _, length = _whole_lines(handle, count)
        handle.seek(length)
        return handle.read()


def sync(path: Path, root: Path | None = None) -> None:
    """Wait until a file is on the disk."""
    fd = _open(path, root, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        os.close(fd)


@contextlib.contextmanager
def making(path: Path, root: Path | None = None) -> Iterator[Path]:
    """Make a folder where there is none; RunError says which one when that fails.

    Args:
        path: the folder.
        root: the run's folder: no component below it may be a link. None: `path` itself may be one.
    """
    try:
        (path if root is None else root).mkdir(parents=True, exist_ok=True)
        for folder in [] if root is None else [*reversed(path.parents), path]:
            if root in folder.parents:
                with _parent(folder, root) as (name, above), contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=above)
        with _parent(path / "inside", root):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from error
    yield path


def rename(old: Path, new: Path, root: Path | None = None) -> None:
    """Give a file of a run's folder another name in the same folder, replacing what has that name."""
    try:
        with _parent(old, root) as (name, folder):
            target = new.name if folder is not None else str(new)
            os.replace(name, target, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise _cannot_write(new, error) from error


def duplicate(old: Path, new: Path, root: Path | None = None) -> None:
    """Give a file that is never written in place a second name; a copy where there are no hard links."""
    remove(new, root)
    try:
        with _parent(old, root) as (source, above), _parent(new, root) as (target, below):
            os.link(source, target, src_dir_fd=above, dst_dir_fd=below, follow_symlinks=False)
    except (OSError, NotImplementedError):
        write_atomically(new, read_plain(old, root, limit=None), root)


def remove(path: Path, root: Path | None = None) -> None:
    """Remove a file of a run's folder, or a link itself; nothing happens where there is none."""
    try:
        with _parent(path, root) as (name, folder), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    except OSError as error:
        raise _cannot_write(path, error) from error


def temporaries(root: Path, *, abandoned: bool = False) -> list[Path]:
    """Temporary files of `write_atomically` in a run's folder, and no other file, however it is called.

    Args:
        root: the run's folder, or one of `safari reproduce`, in which runs clean up after themselves.
        abandoned: only those whose process was killed, not what this one or another is writing at the moment.
    """
    folders = [root, root / "figures", root / "plugins", *_subfolders(root / "trials", depth=2)]
    found = (file for folder in folders for file in _plain_files(folder) if _TEMPORARY.fullmatch(file.name))
    return [file for file in found if not abandoned or _is_abandoned(file)]


def _is_abandoned(file: Path) -> bool:
    match = _TEMPORARY.fullmatch(file.name)
    if match is None or file.name in _unfinished:
        return False
    # In a container, the process that was killed may have had the same number as this one, or as any other.
    if int(match["pid"]) == os.getpid() or not is_alive(int(match["pid"])):
        return True
    with contextlib.suppress(FileNotFoundError):  # finished meanwhile
        return time.time() - file.stat().st_mtime > _LONG_AGO
    return False


def is_alive(pid: int) -> bool:
    """Is there a process of this number on this machine? False where that cannot be found out."""
    if os.name != "posix":
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _subfolders(folder: Path, depth: int) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    return [below for entry in found for below in _subfolders(entry, depth - 1)] if depth > 0 else [folder]


def _plain_files(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [entry for entry in folder.iterdir() if _is_plain(entry)]


def _is_plain(entry: Path) -> bool:
    try:
        return stat.S_ISREG(entry.lstat().st_mode)
    except FileNotFoundError:  # a temporary file of another process, which has it finished meanwhile
        return False


def _whole_lines(handle: BinaryIO, most: int) -> tuple[int, int]:
    """Count whole lines, at most `most`, and their bytes; no line is held in memory."""
    lines = end = offset = 0
    while lines < most and (chunk := handle.read(_CHUNK)):
        at = -1
        while lines < most and (at := chunk.find(b"\n", at + 1)) >= 0:
            lines, end = lines + 1, offset + at + 1
        offset += len(chunk)
    return lines, end


def _open(path: Path, root: Path | None, flags: int) -> int:
    """A descriptor of a plain file. One that is written must have no other name outside of the folder."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        with _parent(path, root) as (name, folder):
            with contextlib.suppress(FileNotFoundError):
                # Looked at before it is opened: opening a device may do something already.
                _refuse_unless_plain(path, os.stat(name, dir_fd=folder, follow_symlinks=False), writes)
            fd = os.open(name, flags | _NO_FOLLOW | _NO_BLOCK | _BINARY, 0o666, dir_fd=folder)
            try:
                _refuse_unless_plain(path, os.fstat(fd), writes)
            except BaseException:
                os.close(fd)
                raise
            return fd
    except OSError as error:
        if writes:
            raise _cannot_write(path, error) from error
        if isinstance(error, FileNotFoundError):
            raise
        raise _cannot("read", path, error) from error


def _refuse_unless_plain(path: Path, about: os.stat_result, writes: int) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise RunError(f"{path} is {_kind(about.st_mode)}; only plain files are used")
    if writes and about.st_nlink > 1:
        raise RunError(
            f"{path} has {about.st_nlink} names (hard links): writing it would change another file, too; "
            "copy the folder first"
        )


@contextlib.contextmanager
def _parent(path: Path, root: Path | None) -> Iterator[tuple[str, int | None]]:
    """File name and descriptor of its folder, reached without links, as functions of `os` take them.

    Where the system has no such descriptors: the whole path and None.
    """
    root = path.parent if root is None else root
    parts = path.relative_to(root).parts
    if not _DIR_FDS:
        for folder in [root.joinpath(*parts[:count]) for count in range(1, len(parts))]:
            _refuse_unless_folder(folder, os.lstat(folder))
        yield str(path), None
        return
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        here = root
        for part in parts[:-1]:
            here = here / part
            _refuse_unless_folder(here, os.stat(part, dir_fd=fd, follow_symlinks=False))
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
        yield parts[-1], fd
    finally:
        os.close(fd)


def _refuse_unless_folder(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISDIR(about.st_mode):
        raise RunError(f"{path} is {_kind(about.st_mode)}; only folders inside of a run's folder are used")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: "a file",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no plain file")


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"{_cannot('write', path, error)}; what was there before is untouched")


def _cannot(do: str, path: Path, error: OSError) -> RunError:
    return RunError(f"cannot {do} {path}: {error.strerror or error}")


def _words(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
