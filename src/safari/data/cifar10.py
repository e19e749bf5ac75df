"""CIFAR-10 from the binary version of its official archive, with the download for those who have a network."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from safari.bounds import path_of
from safari.data.dataset import Data, Scaling, from_tensors
from safari.data.download import Progress, fetch_folder
from safari.errors import DataError
from safari.trust import contact

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORDS = 10_000
PIXELS = 3 * 32 * 32
FOLDER, OTHER_FOLDER = "cifar-10-batches-bin", "cifar-10-batches-py"
TRAIN_FILES, TEST_FILE = [f"data_batch_{number}.bin" for number in range(1, 6)], "test_batch.bin"

Batch: TypeAlias = "tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]"


def cifar10(*, root: str = "data", download: bool = False) -> Data:
    """60,000 colour photographs of 32x32 pixels in 10 classes, from `root` or downloaded (170 MB).

    `root` holds (or is) `cifar-10-batches-bin`, as the official binary archive unpacks.
    Channels are normalised with the usual means and standard deviations. Source: A. Krizhevsky, Learning
    Multiple Layers of Features from Tiny Images (2009), https://www.cs.toronto.edu/~kriz/cifar.html.
    """
    place = path_of("root", root)
    if download and find_folder(place) is None:
        contact("data.download", f"fetches {URL}")
        fetch_cifar10(place, progress=_show_progress if sys.stderr.isatty() else None)
    folder = find_folder(place)
    if folder is None:
        other = (
            f" ({OTHER_FOLDER} holds pickles, which are not read)" if (place / OTHER_FOLDER).is_dir() else ""
        )
        raise DataError(
            f"cifar10: expected {place / FOLDER}, found none{other}. "
            f"Fetch {URL} (binary version, md5 {MD5}) and unpack it in {place}, "
            "point data.root to where the folder is, or let it be downloaded: data.download = true"
        )
    return read_folder(folder)


def fetch_cifar10(root: Path, *, url: str = URL, md5: str = MD5, progress: Progress | None = None) -> None:
    """Downloads, verifies and unpacks the official binary archive into `root`."""
    fetch_folder(url, md5, root / FOLDER, progress=progress)


def find_folder(root: Path) -> Path | None:
    """The folder of the binary version: in `root`, or `root` itself; None where there is neither."""
    places = [root / FOLDER, *([root] if (root / TRAIN_FILES[0]).is_file() else [])]
    return next((place for place in places if place.is_dir()), None)


def read_folder(folder: Path, records: int = RECORDS) -> Data:
    """Reads all six files, each with `records` images."""
    images, labels = zip(*(read_binary(folder / name, records) for name in TRAIN_FILES), strict=True)
    test_images, test_labels = read_binary(folder / TEST_FILE, records)
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
    pixels, labels = table[:, 1:], table[:, 0]
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


def _normalised(images: npt.NDArray[np.uint8]) -> Tensor:
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    # In place: as float32 the training split alone takes 600 MB.
    return torch.from_numpy(images.astype(np.float32)).div_(255).sub_(mean).div_(std)


def _show_progress(received: int, total: int | None) -> None:
    share = f" of {total / 1e6:.0f}" if total else ""
    end = "\n" if received == total else ""
    print(f"\rcifar10: {received / 1e6:.0f}{share} MB", end=end, file=sys.stderr, flush=True)
