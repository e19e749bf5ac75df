"""LEAF's layout from made-up samples of its two best-known sets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safari.config import parse
from safari.data import leaf
from safari.engine import assemble, load_data
from safari.errors import DataError

RNG = np.random.default_rng(0)


def write(folder: Path, files: dict[str, dict[str, tuple[list[Any], list[Any]]]]) -> Path:
    for name, users in files.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {
            "users": list(users),
            "num_samples": [len(x) for x, _ in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        path.write_text(json.dumps(table))
    return folder


def drawings(count: int, label: int) -> tuple[list[Any], list[Any]]:
    return RNG.random((count, 784)).round(4).tolist(), [(label + i) % 62 for i in range(count)]


@pytest.fixture
def femnist(tmp_path: Path) -> Path:
    return write(
        tmp_path / "femnist",
        {
            "train/all_data_0_niid_0_keep_0_train_9": {"f0002": drawings(5, 1), "f0001": drawings(3, 2)},
            "train/all_data_1_niid_0_keep_0_train_9": {"f0000": drawings(4, 61)},
            "test/all_data_0_niid_0_keep_0_test_9": {"f0002": drawings(2, 5)},
        },
    )


def test_femnist(femnist: Path) -> None:
    data = leaf(root=str(femnist))
    assert (data.input_shape, data.classes, len(data.train_y), len(data.test_y)) == ((1, 28, 28), 62, 12, 2)
    assert data.owners is not None
    # Files and users in the order of their names in the folder; an owner's number is by the user's name.
    assert data.owners.tolist() == [2] * 5 + [1] * 3 + [0] * 4
    assert data.train_y[:5].tolist() == [1, 2, 3, 4, 5]
    config = parse({
        "data": {"name": "leaf", "root": str(femnist)}, "clients": 3, "partition": {"name": "natural"},
        "uplink": {"name": "perfect"},
    })  # fmt: skip
    assert [len(part) for part in assemble(config, 0, load_data(config)).parts] == [4, 3, 5]


def test_shakespeare(tmp_path: Path) -> None:
    text = "to be or not to be that is the question"
    play = ([text[i : i + 8] for i in range(9)], [text[i + 8] for i in range(9)])
    root = write(tmp_path / "shakespeare", {"train/a": {"HAMLET": play}, "test/a": {"HAMLET": play}})
    data = leaf(root=str(root))
    assert (data.input_shape, data.label_kind) == ((8,), "class")
    assert "".join(data.vocabulary[i] for i in data.train_x[2]) == text[2:10]
    assert [data.vocabulary[int(i)] for i in data.train_y] == play[1]
    every = leaf(root=str(root), every=True)
    assert every.label_kind == "tokens"
    assert torch.equal(every.train_y[:, :-1], every.train_x[:, 1:])
    assert torch.equal(every.train_y[:, -1], data.train_y)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"a": ([[0.0, 1.0]], [0, 1])}, "user 'a' must have as many y as x, got 2 and 1"),
        (
            {"a": ([[0.0, 1.0], [0.0]], [0, 1])},
            "samples must be lists of the same length, got 1 and 2 numbers",
        ),
        ({"a": ([[0.0], [0.0]], [0, 1.5])}, "labels whole numbers: got 1.5 as a label"),
        ({"a": (["abc", "ab"], ["d", "c"])}, "x must be texts of 3 characters and y the one that follows"),
        ({}, "no samples in 1 files"),
    ],
)
def test_what_is_not_in_that_layout(tmp_path: Path, train: Any, message: str) -> None:
    root = write(tmp_path, {"train/a": train, "test/a": train})
    with pytest.raises(DataError, match=message):
        leaf(root=str(root))


def test_folders_and_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train: no \.json files here; LEAF's layout has them in train/"):
        leaf(root=str(tmp_path))
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"a\.json: not a file in LEAF's layout: TypeError"):
        leaf(root=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "a.json: not a file in LEAF's layout: it is nested too deeply"),
        ('{"user_data": {"a": {"x": [[1, 2]], "y": [Infinity]}}}', "whole numbers: got inf as a label"),
        ('{"user_data": {"a": {"x": [[1, 2]], "y": [1e30]}}}', "labels whole numbers: Overflow"),
        ('{"user_data": {"a": {"x": [[1' + "0" * 400 + ', 2]], "y": [1]}}}', "labels whole numbers: int too large"),
        ('{"user_data": {"a": {"x": [["' + "x" * 9000 + '", 2]], "y": [1]}}}', "not convert string to float: 'xx"),
    ],
    ids=["deep", "infinite", "large label", "large number", "text"],
)  # fmt: skip
def test_crafted_files_are_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.json").write_text(text)
    with pytest.raises(DataError) as error:
        leaf(root=str(tmp_path))
    assert problem in str(error.value)
    assert len(str(error.value)) < 800


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_among_the_files_is_not_waited_for(femnist: Path) -> None:
    before = leaf(root=str(femnist))
    os.mkfifo(femnist / "train" / "pipe.json")
    assert torch.equal(leaf(root=str(femnist)).train_x, before.train_x)
