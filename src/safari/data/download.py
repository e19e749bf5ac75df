"""Fetches an archive over HTTP: complete, verified and in place, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from safari.errors import DataError

Progress: TypeAlias = "Callable[[int, int | None], None]"
"""Called with the bytes received so far and, where the server told it, the bytes to come in all."""


def fetch_folder(
    url: str, md5: str, target: Path, *, progress: Progress | None = None, timeout: float = 30.0
) -> None:
    """Downloads the tar archive at `url` and puts the folder in it that has `target`'s name at `target`.

    What exists at `target` stays as it is. Everything happens in a temporary folder next to `target`, renamed
    at the end, so that an interrupted download leaves nothing that could be taken for a complete one.
    """
    if target.exists():
        return
    advice = f"By hand: fetch {url} and unpack it in {target.parent}, so that {target} exists"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as temporary:
            archive, unpacked = Path(temporary, "archive"), Path(temporary, target.name)
            digest, received = hashlib.md5(usedforsecurity=False), 0
            with archive.open("wb") as out:
                for chunk, total in _chunks(url, timeout, advice):
                    out.write(chunk)
                    digest.update(chunk)
                    received += len(chunk)
                    if progress is not None:
                        progress(received, total)
            if digest.hexdigest() != md5:
                raise DataError(
                    f"{url}: expected an archive with md5 {md5}, found {digest.hexdigest()} "
                    f"({received} bytes); nothing was kept. {advice}"
                )
            _unpack(archive, unpacked, url)
            # Another process may have been faster; its copy has the same checksum.
            if not target.exists():
                unpacked.rename(target)
    except OSError as error:
        raise DataError(f"{target}: could not be written: {error.strerror or error}") from error


def _chunks(url: str, timeout: float, advice: str, size: int = 1 << 18) -> Iterator[tuple[bytes, int | None]]:
    """The body at `url` piece by piece, with its length; every way a network fails becomes a DataError."""
    received, total = 0, None
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            length = answer.headers.get("Content-Length") or ""
            total = int(length) if length.isdecimal() else None
            while chunk := answer.read(size):
                received += len(chunk)
                yield chunk, total
    except urllib.error.HTTPError as error:
        raise DataError(f"{url}: the server answered {error.code} {error.reason}. {advice}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url}: the download failed after {received} bytes: {reason or type(error).__name__}. {advice}"
        ) from error
    # http.client reports a body that ends early only to those who read it in one go.
    if total is not None and received < total:
        raise DataError(
            f"{url}: the connection was cut: expected {total} bytes, found {received}; "
            f"nothing was kept. {advice}"
        )


def _unpack(archive: Path, folder: Path, url: str) -> None:
    """Copies the plain files directly inside the archive's folder of that name: no links, no other places."""
    folder.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                source = tar.extractfile(member) if member.isfile() else None
                if source is not None and path.parts == (folder.name, path.name):
                    with source, (folder / path.name).open("xb") as out:
                        shutil.copyfileobj(source, out)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{url}: expected a tar archive, found something else: {error}") from error
    if not any(folder.iterdir()):
        raise DataError(f"{url}: expected a folder {folder.name} with files in the archive, found none")
