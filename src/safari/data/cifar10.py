"""CIFAR-10 from either of its official layouts, with the download for those who have a network."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from safari.bounds import path_of
from safari.data.dataset import Data, Scaling, from_tensors
from safari.data.download import Progress, fetch_folder
from safari.data.pickles import load_arrays
from safari.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORDS = 10_000
PIXELS = 3 * 32 * 32
# What a file of the Python version may have beside twice its pixels: labels and names of images.
PICKLE_BYTES = 1 << 20

Batch: TypeAlias = "tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]"


def cifar10(*, root: str = "data", download: bool = False) -> Data:
    """60,000 colour photographs of 32x32 pixels in 10 classes, from `root` or downloaded (170 MB).

    `root` holds (or is) `cifar-10-batches-bin` or `cifar-10-batches-py`, as the official archives unpack.
    Channels are normalised with the usual means and standard deviations. Source: A. Krizhevsky, Learning
    Multiple Layers of Features from Tiny Images (2009), https://www.cs.toronto.edu/~kriz/cifar.html.
    """
    place = path_of("root", root)
    if download and find_format(place) is None:
        fetch_cifar10(place, progress=_show_progress if sys.stderr.isatty() else None)
    found = find_format(place)
    if found is None:
        raise DataError(
            f"cifar10: expected {place / BINARY.folder} or {place / PYTHON.folder}, found neither. "
            f"Fetch {URL} (binary version, md5 {MD5}) and unpack it in {place}, "
            "point data.root to where the folder is, or let it be downloaded: data.download = true"
        )
    return read_format(*found)


def fetch_cifar10(root: Path, *, url: str = URL, md5: str = MD5, progress: Progress | None = None) -> None:
    """Downloads, verifies and unpacks the official binary archive into `root`."""
    fetch_folder(url, md5, root / BINARY.folder, progress=progress)


class DiskFormat(NamedTuple):
    """One official way to lay CIFAR-10 out on disk: a folder's name, its files, and how to read one."""

    folder: str
    suffix: str
    read: Callable[[Path, int], Batch]

    @property
    def train_files(self) -> list[str]:
        """The five files of the training split, in order."""
        return [f"data_batch_{number}{self.suffix}" for number in range(1, 6)]

    @property
    def test_file(self) -> str:
        """The file of the test split."""
        return f"test_batch{self.suffix}"


def find_format(root: Path) -> tuple[DiskFormat, Path] | None:
    """Which version lies in `root`, and where; a complete one wins over one with files missing."""
    places = [(kind, root / kind.folder) for kind in (BINARY, PYTHON)]
    places += [(kind, root) for kind in (BINARY, PYTHON) if (root / kind.train_files[0]).is_file()]
    present = [(kind, folder) for kind, folder in places if folder.is_dir()]
    complete = [
        (kind, folder)
        for kind, folder in present
        if all((folder / name).is_file() for name in [*kind.train_files, kind.test_file])
    ]
    return next(iter(complete + present), None)


def read_format(kind: DiskFormat, folder: Path, records: int = RECORDS) -> Data:
    """Reads all six files, each with `records` images."""
    images, labels = zip(*(kind.read(folder / name, records) for name in kind.train_files), strict=True)
    test_images, test_labels = kind.read(folder / kind.test_file, records)
    data = from_tensors(
        "cifar10",
        train=(_normalised(np.concatenate(images)), np.concatenate(labels).astype(np.int64)),
        test=(_normalised(test_images), test_labels.astype(np.int64)),
        classes=10,
    )
    return replace(data, class_names=CLASSES, scaling=Scaling(MEAN, STD))


def read_binary(path: Path, records: int = RECORDS) -> Batch:
    """Images uint8[n, 3, 32, 32] and labels of one file of the binary version, which has no header."""
    expected = records * (1 + PIXELS)
    raw, size = _bytes(path, expected)
    if size != expected:
        raise DataError(
            f"{path}: expected {expected} bytes ({records} records of {1 + PIXELS}), found {size}"
        )
    table = np.frombuffer(raw, np.uint8).reshape(records, 1 + PIXELS)
    return _checked(path, table[:, 1:], table[:, 0])


def read_python(path: Path, records: int = RECORDS) -> Batch:
    """Images uint8[n, 3, 32, 32] and labels of one file of the Python version, read without trusting it."""
    most = PICKLE_BYTES + 2 * records * PIXELS
    raw, size = _bytes(path, most)
    if size > most:
        raise DataError(f"{path}: expected at most {most} bytes, found {size}")
    batch = load_arrays(raw, str(path))
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, np.ndarray) or data.shape != (records, PIXELS):
        raise DataError(f"{path}: expected 'data' of uint8 [{records}, {PIXELS}], found {_shown(data)}")
    if not isinstance(labels, list) or len(labels) != records:
        raise DataError(f"{path}: expected 'labels' with {records} integers, found {_shown(labels)}")
    if not all(type(label) is int and 0 <= label <= 255 for label in labels):
        raise DataError(f"{path}: expected 'labels' to be integers in 0..9, found others")
    return _checked(path, data, np.array(labels, np.uint8))


BINARY = DiskFormat("cifar-10-batches-bin", ".bin", read_binary)
PYTHON = DiskFormat("cifar-10-batches-py", "", read_python)


def _checked(path: Path, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> Batch:
    if labels.max() > 9:
        record = int(np.argmax(labels > 9))
        raise DataError(f"{path}: expected labels in 0..9, found {labels[record]} in record {record}")
    return pixels.reshape(-1, 3, 32, 32), labels


def _bytes(path: Path, most: int) -> tuple[bytes, int]:
    """Up to `most` bytes of a plain file, and how many it has."""
    try:
        status = path.stat()
        # Opening a pipe would wait for a writer, and a device has no end.
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise DataError(f"{path}: expected a plain file, found a pipe or a device")
        with path.open("rb") as file:
            return file.read(most), status.st_size
    except FileNotFoundError:
        raise DataError(
            f"{path}: expected a file of CIFAR-10, found none; complete the folder, "
            "or remove it and download again: data.download = true"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: could not be read: {error.strerror or error}") from error


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {[*value.shape]}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


def _normalised(images: npt.NDArray[np.uint8]) -> Tensor:
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    # In place: as float32 the training split alone takes 600 MB.
    return torch.from_numpy(images.astype(np.float32)).div_(255).sub_(mean).div_(std)


def _show_progress(received: int, total: int | None) -> None:
    share = f" of {total / 1e6:.0f}" if total else ""
    end = "\n" if received == total else ""
    print(f"\rcifar10: {received / 1e6:.0f}{share} MB", end=end, file=sys.stderr, flush=True)
