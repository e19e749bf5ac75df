"""A data set as four tensors, and the ways to make one from what people have at hand."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from safari.errors import DataError

Split: TypeAlias = "tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]]"
"""Inputs and labels of one split, sample by sample along the first dimension."""


@dataclass(frozen=True, eq=False)
class Data:
    """A classification data set: inputs and labels to train on and to test on.

    Inputs are float32, or int64 for models that read tokens; labels are int64 in 0..classes-1.

    >>> x, y = torch.zeros(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> Data("toy", x, y, x, y, classes=3).input_shape
    (3,)
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or self.classes < 1:
            raise DataError(f"{self.name}: classes must be an integer of at least 1, got {self.classes!r}")
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            _check_tensor(f"{self.name}: {split}_x", x, (torch.float32, torch.int64))
            _check_tensor(f"{self.name}: {split}_y", y, (torch.int64,))
            _check_split(self.name, split, x, y, self.classes)
        if self.train_x.shape[1:] != self.test_x.shape[1:] or self.train_x.dtype != self.test_x.dtype:
            raise DataError(
                f"{self.name}: test_x must hold samples like those of train_x "
                f"({_kind(self.train_x)}), got {_kind(self.test_x)}"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch dimension."""
        return tuple(self.train_x.shape[1:])

    def to(self, device: torch.device) -> Data:
        """The same data set with its tensors on another device."""
        return replace(
            self,
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
        )


def from_tensors(name: str, train: Split, test: Split, classes: int | None = None) -> Data:
    """A data set from (inputs, labels) of tensors or arrays; by default `classes` is the largest label + 1.

    >>> x, y = np.zeros((4, 1, 8, 8)), np.array([0, 1, 1, 0])
    >>> data = from_tensors("toy", train=(x, y), test=(x, y))
    >>> data.input_shape, data.train_x.dtype, data.classes
    ((1, 8, 8), torch.float32, 2)
    """
    train_x, train_y = _inputs(f"{name}: train_x", train[0]), _labels(f"{name}: train_y", train[1])
    test_x, test_y = _inputs(f"{name}: test_x", test[0]), _labels(f"{name}: test_y", test[1])
    if classes is None:
        classes = 1 + max((int(y.max()) for y in (train_y, test_y) if y.numel()), default=0)
        classes = max(classes, 1)
    return Data(name, train_x, train_y, test_x, test_y, classes)


def from_datasets(name: str, train: Dataset[Any], test: Dataset[Any], classes: int | None = None) -> Data:
    """A data set from two map-style `Dataset`s of (input, label), read once into memory.

    >>> from torch.utils.data import TensorDataset
    >>> pairs = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]))
    >>> from_datasets("toy", pairs, pairs).classes
    3
    """
    return from_tensors(
        name,
        train=_materialise(f"{name}: train", train),
        test=_materialise(f"{name}: test", test),
        classes=classes,
    )


def as_data(obj: object, name: str) -> Data:
    """What a user's function returned, as `Data`.

    Accepted: a `Data`; a pair (train, test) whose members are each a map-style `Dataset` or a pair
    (inputs, labels) of tensors or arrays.

    >>> x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    >>> as_data(((x, y), (x, y)), "mine").classes
    2
    >>> as_data(42, "mine")
    Traceback (most recent call last):
    safari.errors.DataError: mine: must be a Data, a pair (train, test) of Datasets, or a pair of
    (inputs, labels) pairs of tensors or arrays; got int
    """
    if isinstance(obj, Data):
        return obj
    if not isinstance(obj, (tuple, list)) or len(obj) != 2:
        raise _not_data(name, obj)
    train, test = _as_split(f"{name}: train", obj[0]), _as_split(f"{name}: test", obj[1])
    if train is None or test is None:
        raise _not_data(name, obj)
    return from_tensors(name, train=train, test=test)


def _as_split(field: str, part: object) -> Split | None:
    if isinstance(part, (tuple, list)):
        pair = tuple(part)
        if len(pair) == 2 and all(isinstance(array, (Tensor, np.ndarray)) for array in pair):
            return pair
        return None
    return _materialise(field, part) if isinstance(part, Dataset) else None


def _not_data(name: str, obj: object) -> DataError:
    found = type(obj).__name__
    if isinstance(obj, (tuple, list)):
        kinds = [type(part).__name__ for part in obj]
        found += f" of {len(obj)} ({', '.join(kinds[:3] + ['...'] * (len(obj) > 3))})"
    return DataError(
        f"{name}: must be a Data, a pair (train, test) of Datasets, or a pair of (inputs, labels) pairs "
        f"of tensors or arrays; got {found}"
    )


def _inputs(field: str, array: object) -> Tensor:
    x = _tensor(field, array)
    if x.is_floating_point():
        return x.to(torch.float32).contiguous()
    if x.dtype in (torch.uint8, torch.bool) or x.is_complex():
        # Bytes may be pixels or characters: guessing would fail later, inside the model, and less clearly.
        raise DataError(
            f"{field} must be float (images, features) or signed integers (tokens), got {x.dtype}"
        )
    return x.to(torch.int64).contiguous()


def _labels(field: str, array: object) -> Tensor:
    y = _tensor(field, array)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"{field} must hold integers, got {y.dtype}")
    return y.to(torch.int64).contiguous()


def _tensor(field: str, array: object) -> Tensor:
    if not isinstance(array, (Tensor, np.ndarray)):
        raise DataError(f"{field} must be a tensor or an array, got {type(array).__name__}")
    if isinstance(array, Tensor):
        return array.detach()
    try:
        # torch refuses arrays with negative strides, and warns of those that are read-only.
        return torch.from_numpy(np.require(array, None, ["C", "W"]))
    except (TypeError, ValueError) as error:
        raise DataError(f"{field} must be an array of numbers, got dtype {array.dtype}") from error


def _check_tensor(field: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    allowed = " or ".join(str(dtype) for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise DataError(f"{field} must be a tensor of {allowed}, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise DataError(f"{field} must be {allowed}, got {value.dtype}")


def _check_split(name: str, split: str, x: Tensor, y: Tensor, classes: int) -> None:
    if x.ndim < 2:
        raise DataError(f"{name}: {split}_x must have two dimensions or more, got shape {[*x.shape]}")
    if y.ndim != 1:
        raise DataError(f"{name}: {split}_y must have one dimension, got shape {[*y.shape]}")
    if len(x) != len(y):
        raise DataError(f"{name}: {split}_x and {split}_y must be equally long, got {len(x)} and {len(y)}")
    if x.numel() == 0:
        raise DataError(f"{name}: {split}_x must not be empty, got shape {[*x.shape]}")
    outside = (y < 0) | (y >= classes)
    if outside.any():
        i = int(outside.nonzero()[0])
        raise DataError(f"{name}: {split}_y must lie in 0..{classes - 1}, got {int(y[i])} (sample {i})")
    if x.is_floating_point():
        # Two numbers a sample, so that a check of 60,000 images needs no second copy of them.
        low, high = x.flatten(1).aminmax(dim=1)
        strange = ~(torch.isfinite(low) & torch.isfinite(high))
        if strange.any():
            i = int(strange.nonzero()[0])
            raise DataError(f"{name}: {split}_x must be finite, got NaN or infinity in sample {i}")


def _kind(x: Tensor) -> str:
    return f"{x.dtype} of shape {[*x.shape[1:]]}"


def _materialise(field: str, dataset: object) -> tuple[Tensor, Tensor]:
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not indexed or not isinstance(dataset, Sized):
        raise DataError(
            f"{field} must be a map-style Dataset, with a length and an index, got {type(dataset).__name__}"
        )
    size = len(dataset)
    if size == 0:
        raise DataError(f"{field} must not be empty, got a {type(dataset).__name__} of length 0")
    first, _ = _sample(field, dataset, 0)
    x = torch.empty((size, *first.shape), dtype=first.dtype)
    y = torch.empty(size, dtype=torch.int64)
    for i in range(size):
        sample, label = _sample(field, dataset, i)
        if sample.shape != first.shape or sample.dtype != first.dtype:
            raise DataError(
                f"{field}: sample {i} must be like sample 0 ({first.dtype} of shape {[*first.shape]}), "
                f"got {sample.dtype} of shape {[*sample.shape]}"
            )
        x[i], y[i] = sample, label
    return x, y


def _sample(field: str, dataset: Any, index: int) -> tuple[Tensor, int]:
    pair = dataset[index]
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(f"{field}: sample {index} must be a pair (input, label), got {type(pair).__name__}")
    x, y = pair
    if not isinstance(x, (Tensor, np.ndarray)):
        raise DataError(
            f"{field}: sample {index} must be a tensor or an array, got {type(x).__name__} "
            "(give the Dataset a transform that makes tensors)"
        )
    label = _labels(f"{field}: label {index}", torch.as_tensor(y) if isinstance(y, (int, np.generic)) else y)
    if label.numel() != 1:
        raise DataError(f"{field}: label {index} must be one integer, got shape {[*label.shape]}")
    return _tensor(f"{field}: sample {index}", x), int(label)
