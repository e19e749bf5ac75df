"""The layout of LEAF (Caldas et al., 2018): JSON files in which every user has samples of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from safari.bounds import path_of
from safari.data.dataset import Data
from safari.data.text import Vocabulary
from safari.errors import DataError, brief
from safari.text import visible


def leaf(*, root: str, every: bool = False) -> Data:
    """FEMNIST, Shakespeare or another set in LEAF's layout: `root/train/*.json`, `root/test/*.json`.

    A file has `user_data`, which maps a user to `x` and `y`. Where `x` holds lists of numbers (FEMNIST) they
    are features, or a square picture of one channel where their number is a square; `y` holds classes. Where
    `x` holds texts of one length (Shakespeare) they are characters, and `y` the character that follows: one
    class a sample, or with `every` the next character at every position, for the task `tokens`. Users are
    clients with the partition `natural`.
    """
    folder = path_of("root", root)
    train, test = (_read(path_of("root", str(folder / split))) for split in ("train", "test"))
    # By name, so that an owner's number does not depend on the order of the files.
    numbers = {user: number for number, user in enumerate(sorted({user for user, _, _ in train}))}
    owners = torch.tensor([numbers[user] for user, _, _ in train])
    if isinstance(train[0][1], str):
        return _text(train, test, owners, every)
    if every:
        raise DataError(f"{root}: every needs texts, and these samples are {type(train[0][1]).__name__}s")
    (train_x, train_y), (test_x, test_y) = (
        _numbers(folder / s, f) for s, f in (("train", train), ("test", test))
    )
    classes = 1 + int(max(train_y.max(), test_y.max()))
    return Data("leaf", train_x, train_y, test_x, test_y, classes, owners)


Sample = tuple[str, Any, Any]


def _read(folder: Path) -> list[Sample]:
    """Every sample with its user, file by file."""
    # A pipe would be waited for.
    files = sorted(file for file in folder.glob("*.json") if file.is_file())
    if not files:
        raise DataError(f"{folder}: no .json files here; LEAF's layout has them in train/ and in test/")
    found = [sample for file in files for sample in _samples(file)]
    if not found:
        raise DataError(f"{folder}: no samples in {len(files)} files")
    return found


def _samples(file: Path) -> Iterator[Sample]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        users = table["user_data"].items()
        for user, data in users:
            if len(data["x"]) != len(data["y"]):
                raise DataError(
                    f"{file}: user {brief(user)} must have as many y as x, "
                    f"got {len(data['y'])} and {len(data['x'])}"
                )
            for x, y in zip(data["x"], data["y"], strict=True):
                yield str(user), x, y
    except RecursionError as error:
        raise DataError(f"{file}: not a file in LEAF's layout: it is nested too deeply") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {visible(str(error))}"
        raise DataError(f"{file}: not a file in LEAF's layout: {why}") from error


def _numbers(folder: Path, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    lengths = sorted({len(sample) for _, sample, _ in samples if isinstance(sample, list)})
    if len(lengths) > 1:
        raise DataError(
            f"{folder}: samples must be lists of the same length, got {lengths[0]} and {lengths[-1]} numbers"
        )
    try:
        x = torch.from_numpy(np.array([sample for _, sample, _ in samples], np.float32))
        y = torch.tensor([_whole(label) for _, _, label in samples])
    # OverflowError: an infinite label; RuntimeError: one that torch has no room for.
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        why = visible(str(error))
        raise DataError(f"{folder}: samples must be lists of numbers, labels whole numbers: {why}") from error
    if x.ndim != 2:
        raise DataError(f"{folder}: a sample must be a list of numbers, got shape {[*x.shape[1:]]}")
    side = math.isqrt(x.shape[1])
    return (x.view(len(x), 1, side, side) if side > 1 and side * side == x.shape[1] else x), y


def _whole(label: Any) -> int:
    if isinstance(label, float) and not label.is_integer():
        raise ValueError(f"got {label} as a label")
    return int(label)


def _text(train: list[Sample], test: list[Sample], owners: Tensor, every: bool) -> Data:
    length = len(train[0][1])
    for _, x, y in (*train, *test):
        if not isinstance(x, str) or not isinstance(y, str) or len(x) != length or len(y) != 1:
            raise DataError(
                f"leaf: x must be texts of {length} characters and y the one that follows, "
                f"got {x!r:.40} and {y!r:.40}"
            )
    vocabulary = Vocabulary.of([x + y for _, x, y in train], "characters")
    whole = [
        torch.from_numpy(np.stack([vocabulary.encode(x + y) for _, x, y in found])) for found in (train, test)
    ]
    labels = [found[:, 1:] if every else found[:, -1] for found in whole]
    return Data(
        "leaf",
        whole[0][:, :-1],
        labels[0],
        whole[1][:, :-1],
        labels[1],
        len(vocabulary.tokens),
        owners,
        vocabulary.tokens,
    )
