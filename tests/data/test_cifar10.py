from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from safari.data import cifar10
from safari.data.cifar10 import BINARY, MD5, PYTHON, URL, find_format, read_binary, read_format, read_python
from safari.errors import DataError

RECORDS = 7
KINDS = {"bin": BINARY, "py": PYTHON}


def batch(number: int, records: int = RECORDS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (records, 3072), np.uint8), rng.integers(0, 10, records)


def write_file(kind: str, path: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """One file of either version, written as the official page describes it."""
    if kind == "bin":
        with path.open("wb") as out:
            for label, image in zip(labels, pixels, strict=True):
                out.write(bytes([label]) + image.tobytes())
    else:
        names = [f"{i}.png".encode() for i in range(len(labels))]
        content = {b"labels": labels.tolist(), b"data": pixels, b"filenames": names}
        path.write_bytes(pickle.dumps(content, protocol=2))


def write_folder(kind: str, folder: Path, records: int = RECORDS) -> Path:
    folder.mkdir(parents=True)
    suffix = ".bin" if kind == "bin" else ""
    for number in range(1, 7):
        name = f"data_batch_{number}" if number < 6 else "test_batch"
        write_file(kind, folder / (name + suffix), *batch(number, records))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_both_versions_read_the_same(kind, tmp_path):
    data = read_format(KINDS[kind], write_folder(kind, tmp_path / "c"), RECORDS)
    pixels, labels = zip(*(batch(number) for number in range(1, 6)), strict=True)
    # One image at a time, as the description says: red, green and blue planes, each row by row.
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    expected = [[plane.reshape(32, 32) for plane in np.split(image, 3)] for image in np.concatenate(pixels)]
    expected = (np.array(expected) / 255 - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(data.train_x.numpy(), expected, atol=1e-5)
    assert data.train_y.tolist() == np.concatenate(labels).tolist()
    assert data.test_y.tolist() == batch(6)[1].tolist()
    assert (data.name, data.classes) == ("cifar10", 10)
    assert data.test_x.shape == (RECORDS, 3, 32, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_found_in_root_or_is_root(kind, tmp_path):
    assert find_format(tmp_path) is None
    folder = write_folder(kind, tmp_path / f"cifar-10-batches-{kind}", 1)
    assert find_format(tmp_path) == (KINDS[kind], folder)
    assert find_format(folder) == (KINDS[kind], folder)
    renamed = folder.rename(tmp_path / "elsewhere")
    assert find_format(renamed) == (KINDS[kind], renamed)
    assert find_format(tmp_path) is None


def test_a_complete_folder_wins_over_one_with_files_missing(tmp_path):
    binary = write_folder("bin", tmp_path / "cifar-10-batches-bin", 1)
    python = write_folder("py", tmp_path / "cifar-10-batches-py", 1)
    assert find_format(tmp_path) == (BINARY, binary)
    (binary / "test_batch.bin").unlink()
    assert find_format(tmp_path) == (PYTHON, python)
    (python / "data_batch_3").unlink()
    assert find_format(tmp_path) == (BINARY, binary)


def test_nothing_there_says_what_to_put_where(tmp_path):
    with pytest.raises(DataError) as error:
        cifar10(root=str(tmp_path))
    assert str(error.value) == (
        f"cifar10: expected {tmp_path}/cifar-10-batches-bin or {tmp_path}/cifar-10-batches-py, "
        "found neither. "
        f"Fetch {URL} (binary version, md5 {MD5}) and unpack it in {tmp_path}, "
        "point data.root to where the folder is, or let it be downloaded: data.download = true"
    )


def test_a_missing_file_is_named(tmp_path):
    folder = write_folder("bin", tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(DataError) as error:
        read_format(BINARY, folder, RECORDS)
    assert str(error.value) == (
        f"{folder / 'data_batch_4.bin'}: expected a file of CIFAR-10, found none; complete the folder, "
        "or remove it and download again: data.download = true"
    )


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "data_batch_1")
    for read in (read_binary, read_python):
        with pytest.raises(DataError, match=r"expected a plain file, found a pipe or a device$"):
            read(tmp_path / "data_batch_1", RECORDS)


def test_a_pickle_that_never_ends_is_not_read(tmp_path):
    path = tmp_path / "data_batch_1"
    with path.open("wb") as out:
        out.truncate(1 << 36)
    with pytest.raises(DataError, match=r"expected at most 1091584 bytes, found 68719476736$"):
        read_python(path, RECORDS)


def test_a_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(DataError, match="could not be read: Is a directory"):
        read_binary(tmp_path)


@pytest.mark.parametrize(("change", "found"), [(-1, 30_729_999), (1, 30_730_001), (-30_730_000, 0)])
def test_the_official_size_of_the_binary_version(change, found, tmp_path):
    path = write_folder("bin", tmp_path / "cifar-10-batches-bin", 1) / "data_batch_1.bin"
    with path.open("wb") as out:
        out.truncate(30_730_000 + change)
    with pytest.raises(DataError) as error:
        cifar10(root=str(tmp_path))
    assert str(error.value) == f"{path}: expected 30730000 bytes (10000 records of 3073), found {found}"


def test_the_official_size_of_the_python_version(tmp_path):
    path = write_folder("py", tmp_path / "cifar-10-batches-py", 9) / "data_batch_1"
    with pytest.raises(DataError) as error:
        cifar10(root=str(tmp_path))
    assert str(error.value) == f"{path}: expected 'data' of uint8 [10000, 3072], found uint8 [9, 3072]"


def test_files_of_the_official_size_are_read(tmp_path):
    path = tmp_path / "data_batch_1.bin"
    with path.open("wb") as out:
        out.truncate(30_730_000)
    pixels, labels = read_binary(path)
    assert (pixels.shape, labels.shape) == ((10_000, 3, 32, 32), (10_000,))
    pickled = tmp_path / "data_batch_1"
    pickled.write_bytes(pickle.dumps({b"data": pixels.reshape(10_000, 3072), b"labels": labels.tolist()}, 2))
    assert read_python(pickled)[0].shape == (10_000, 3, 32, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_out_of_range_is_named(kind, tmp_path):
    path, (pixels, labels) = tmp_path / "file", batch(1)
    labels[3] = 10
    write_file(kind, path, pixels, labels)
    with pytest.raises(DataError) as error:
        KINDS[kind].read(path, RECORDS)
    assert str(error.value) == f"{path}: expected labels in 0..9, found 10 in record 3"


PIXELS, LABELS = batch(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"labels": LABELS.tolist()}, "expected 'data' of uint8 [7, 3072], found NoneType"),
        (
            {b"data": PIXELS[:, :5], b"labels": LABELS.tolist()},
            "expected 'data' of uint8 [7, 3072], found uint8 [7, 5]",
        ),
        ({b"data": PIXELS}, "expected 'labels' with 7 integers, found NoneType"),
        ({b"data": PIXELS, b"labels": [1, 2]}, "expected 'labels' with 7 integers, found a list of 2"),
        ({b"data": PIXELS, b"labels": [1.5] * 7}, "expected 'labels' to be integers in 0..9, found others"),
        ({b"data": PIXELS, b"labels": [-1] * 7}, "expected 'labels' to be integers in 0..9, found others"),
        (
            {b"data": PIXELS, b"labels": [10**15] * 7},
            "expected 'labels' to be integers in 0..9, found others",
        ),
    ],
)
def test_a_pickle_with_other_contents(content, message, tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError) as error:
        read_python(path, RECORDS)
    assert str(error.value) == f"{path}: {message}"


def test_a_truncated_pickle(tmp_path):
    path = tmp_path / "data_batch_1"
    write_file("py", path, PIXELS, LABELS)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="data_batch_1: not a pickle of plain values and uint8 arrays: "):
        read_python(path, RECORDS)


@pytest.mark.filterwarnings("error")
def test_the_result_can_be_written_to(tmp_path):
    data = read_format(BINARY, write_folder("bin", tmp_path / "c", 1), 1)
    data.train_x.add_(1)
    assert torch.isfinite(data.train_x).all()
