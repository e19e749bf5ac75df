from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from safari.data import cifar10
from safari.data.cifar10 import MD5, URL, find_folder, read_binary, read_folder
from safari.errors import DataError

RECORDS = 7


def batch(number: int, records: int = RECORDS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (records, 3072), np.uint8), rng.integers(0, 10, records)


def write_file(path: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """One file, written as the official page describes it."""
    with path.open("wb") as out:
        for label, image in zip(labels, pixels, strict=True):
            out.write(bytes([label]) + image.tobytes())


def write_folder(folder: Path, records: int = RECORDS) -> Path:
    folder.mkdir(parents=True)
    for number in range(1, 7):
        name = f"data_batch_{number}" if number < 6 else "test_batch"
        write_file(folder / f"{name}.bin", *batch(number, records))
    return folder


def test_the_images_are_read_plane_by_plane(tmp_path):
    data = read_folder(write_folder(tmp_path / "c"), RECORDS)
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


def test_the_folder_is_found_in_root_or_is_root(tmp_path):
    assert find_folder(tmp_path) is None
    folder = write_folder(tmp_path / "cifar-10-batches-bin", 1)
    assert find_folder(tmp_path) == find_folder(folder) == folder
    renamed = folder.rename(tmp_path / "elsewhere")
    assert find_folder(renamed) == renamed
    assert find_folder(tmp_path) is None


@pytest.mark.parametrize("pickles", [False, True])
def test_nothing_there_says_what_to_put_where(tmp_path, pickles):
    if pickles:
        (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError) as error:
        cifar10(root=str(tmp_path))
    for words in (f"{tmp_path}/cifar-10-batches-bin", URL, MD5, "data.root", "data.download = true"):
        assert words in str(error.value)
    assert ("cifar-10-batches-py holds pickles, which are not read" in str(error.value)) == pickles


def test_a_missing_file_is_named(tmp_path):
    folder = write_folder(tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(DataError) as error:
        read_folder(folder, RECORDS)
    assert str(error.value) == (
        f"{folder / 'data_batch_4.bin'}: expected a file of CIFAR-10, found none; complete the folder, "
        "or remove it and download again: data.download = true"
    )


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "data_batch_1.bin")
    with pytest.raises(DataError, match=r"expected a plain file, found a pipe or a device$"):
        read_binary(tmp_path / "data_batch_1.bin", RECORDS)


def test_a_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(DataError, match="could not be read: Is a directory"):
        read_binary(tmp_path)


@pytest.mark.parametrize(("change", "found"), [(-1, 30_729_999), (1, 30_730_001), (-30_730_000, 0)])
def test_the_official_size_of_the_binary_version(change, found, tmp_path):
    path = write_folder(tmp_path / "cifar-10-batches-bin", 1) / "data_batch_1.bin"
    with path.open("wb") as out:
        out.truncate(30_730_000 + change)
    with pytest.raises(DataError) as error:
        cifar10(root=str(tmp_path))
    assert str(error.value) == f"{path}: expected 30730000 bytes (10000 records of 3073), found {found}"


def test_files_of_the_official_size_are_read(tmp_path):
    path = tmp_path / "data_batch_1.bin"
    with path.open("wb") as out:
        out.truncate(30_730_000)
    pixels, labels = read_binary(path)
    assert (pixels.shape, labels.shape) == ((10_000, 3, 32, 32), (10_000,))


def test_a_label_out_of_range_is_named(tmp_path):
    path, (pixels, labels) = tmp_path / "file", batch(1)
    labels[3] = 10
    write_file(path, pixels, labels)
    with pytest.raises(DataError) as error:
        read_binary(path, RECORDS)
    assert str(error.value) == f"{path}: expected labels in 0..9, found 10 in record 3"


@pytest.mark.filterwarnings("error")
def test_the_result_can_be_written_to(tmp_path):
    data = read_folder(write_folder(tmp_path / "c", 1), 1)
    data.train_x.add_(1)
    assert torch.isfinite(data.train_x).all()
