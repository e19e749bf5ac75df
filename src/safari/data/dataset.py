"""A data set as tensors, and the ways to make one from what people have at hand."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from safari.errors import ConfigError, DataError, brief

Split: TypeAlias = "tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]]"
"""Inputs and labels of one split, sample by sample along the first dimension."""


LabelKind = Literal["class", "tokens", "numbers"]

IGNORED = -100
"""The label of a token that does not count, such as padding; torch's own default."""

# A model has an output for each, and the vocabularies of large language models are smaller.
MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class Scaling:
    """Mean and scale by which inputs were standardised: `(raw - mean) / scale`.

    Parameters
    ----------
    mean, scale: one number for all inputs, or one for each channel of pictures, or one for each column.
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]

    @classmethod
    def of(cls, mean: npt.NDArray[Any], scale: npt.NDArray[Any]) -> Scaling:
        """From arrays of one sample's shape, or that broadcast to it: one number a channel, or a column."""
        rows = [
            np.asarray(a, np.float64).reshape(len(a), -1) if np.ndim(a) else np.atleast_2d(a)
            for a in (mean, scale)
        ]
        return cls(*(tuple(map(float, row[:, 0])) for row in rows))


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: inputs and labels to train on and to test on, sample by sample along the first dimension.

    Parameters
    ----------
    name: for messages and records.
    train_x, test_x: float32, or int64 for models that read tokens. They may be memory-mapped.
    train_y, test_y: int64 `[n]`, one class a sample; int64 `[n, length]`, a class for each token (`IGNORED`
        where there is none); or float32 `[n, d]`, numbers, or 0 and 1 for several labels.
    classes: how many classes (of a sample or a token) there are; for float labels, their number `d`.
    owners: int64 `[n]`, whose each training sample is, where the data say so: writers, speakers, devices. The
        partition `natural` gives each owner a client.
    vocabulary: the text of each token, where inputs are tokens.
    class_names: what the classes are called, where the data say so.
    scaling: what raw inputs were scaled with (pixels from 0 to 1, columns as they are), where they were.

    >>> x, y = torch.zeros(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> data = Data("toy", x, y, x, y, classes=3)
    >>> data.input_shape, data.label_kind
    ((3,), 'class')
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    owners: Tensor | None = None
    vocabulary: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or self.classes < 1:
            raise DataError(f"{self.name}: classes must be an integer of at least 1, got {self.classes!r}")
        if self.classes > MOST_CLASSES:
            raise DataError(
                f"{self.name}: classes must be at most {MOST_CLASSES}, got {brief(self.classes)}; "
                "labels count from 0 (np.unique(y, return_inverse=True)[1] numbers any labels so)"
            )
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            _check_tensor(f"{self.name}: {split}_x", x, (torch.float32, torch.int64))
            _check_tensor(f"{self.name}: {split}_y", y, (torch.int64, torch.float32))
            _check_inputs(self.name, split, x, y)
            _check_labels(f"{self.name}: {split}_y", y, self.classes)
        for field, train, test in (
            ("x", self.train_x, self.test_x),
            ("y", self.train_y, self.test_y),
        ):
            if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
                kind = "samples" if field == "x" else "labels"
                raise DataError(
                    f"{self.name}: test_{field} must hold {kind} like those of train_{field} "
                    f"({_kind(train)}), got {_kind(test)}"
                )
        if self.owners is not None:
            _check_tensor(f"{self.name}: owners", self.owners, (torch.int64,))
            if self.owners.shape != self.train_y.shape[:1]:
                raise DataError(
                    f"{self.name}: owners must name one for each of the {len(self.train_y)} samples, "
                    f"got shape {[*self.owners.shape]}"
                )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch dimension."""
        return tuple(self.train_x.shape[1:])

    @property
    def label_kind(self) -> LabelKind:
        """Kind of a label: one class, a class for each token, or numbers (0 and 1 for several labels)."""
        if self.train_y.is_floating_point():
            return "numbers"
        return "class" if self.train_y.ndim == 1 else "tokens"

    @cached_property
    def tokens(self) -> int:
        """Number of different tokens that the inputs may hold; 0 where they are no tokens."""
        if self.train_x.is_floating_point():
            return 0
        return len(self.vocabulary) or 1 + max(int(self.train_x.max()), int(self.test_x.max()))

    def to(self, device: torch.device) -> Data:
        """Copy with the tensors on another device; `owners` stays on the host."""
        return replace(
            self,
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
        )


def hold_out(data: Data, fraction: float, rng: np.random.Generator) -> Data:
    """A validation split: a random `fraction` of the training samples takes the place of the test set.

    Settings that were chosen on it have not seen the test set. At least one sample is held out, and at least
    one is left.

    >>> x, y = torch.arange(10.0)[:, None], torch.arange(10) % 2
    >>> split = hold_out(Data("toy", x, y, x, y, classes=2), 0.3, np.random.default_rng(0))
    >>> split.test_x.flatten().tolist(), len(split.train_x)
    ([5.0, 6.0, 9.0], 7)
    """
    samples = len(data.train_y)
    if samples < 2:
        raise DataError(f"{data.name}: a validation split needs at least 2 training samples, got {samples}")
    count = min(max(1, round(fraction * samples)), samples - 1)
    held = np.zeros(samples, bool)
    held[rng.choice(samples, count, replace=False)] = True
    out, rest = torch.from_numpy(np.flatnonzero(held)), torch.from_numpy(np.flatnonzero(~held))
    return replace(
        data,
        train_x=data.train_x[rest],
        train_y=data.train_y[rest],
        test_x=data.train_x[out],
        test_y=data.train_y[out],
        owners=None if data.owners is None else data.owners[rest],
    )


def hold_out_of_each(
    parts: Sequence[np.ndarray], fraction: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's samples into those to train on and a random `fraction`, at least one, to hold out.

    >>> hold_out_of_each([np.arange(4), np.arange(4, 6)], 0.5, np.random.default_rng(0))
    ([array([0, 1]), array([5])], [array([2, 3]), array([4])])
    """
    left, held = [], []
    for client, part in enumerate(parts):
        if len(part) < 2:
            raise ConfigError(
                f"evaluation.clients needs at least 2 samples of each client; client {client} has {len(part)}"
            )
        count = min(max(1, round(fraction * len(part))), len(part) - 1)
        out = np.zeros(len(part), bool)
        out[rng.choice(len(part), count, replace=False)] = True
        left.append(part[~out])
        held.append(part[out])
    return left, held


def from_tensors(
    name: str,
    train: Split,
    test: Split,
    classes: int | None = None,
    owners: Tensor | np.ndarray[Any, Any] | None = None,
) -> Data:
    """A data set from (inputs, labels) of tensors or arrays.

    Parameters
    ----------
    name: for messages and records.
    train, test: inputs and labels. Inputs are floats, or signed integers (tokens). Labels are integers
        `[n]` (a class) or `[n, length]` (a class for each token), floats `[n]` or `[n, d]` (numbers), or
        booleans `[n, d]` (several labels).
    classes: the number of classes; by default the largest label + 1, or the `d` of floats and booleans.
    owners: integers, whose each training sample is.

    >>> x, y = np.zeros((4, 1, 8, 8)), np.array([0, 1, 1, 0])
    >>> data = from_tensors("toy", train=(x, y), test=(x, y))
    >>> data.input_shape, data.train_x.dtype, data.classes
    ((1, 8, 8), torch.float32, 2)
    >>> from_tensors("toy", train=(x, y / 2), test=(x, y / 2)).train_y.shape
    torch.Size([4, 1])
    """
    train_x, train_y = _inputs(f"{name}: train_x", train[0]), _labels(f"{name}: train_y", train[1])
    test_x, test_y = _inputs(f"{name}: test_x", test[0]), _labels(f"{name}: test_y", test[1])
    whose = None if owners is None else _tensor(f"{name}: owners", owners).to(torch.int64)
    if classes is None:
        classes = _count_classes(train_y, test_y)
    return Data(name, train_x, train_y, test_x, test_y, classes, whose)


def _count_classes(*labels: Tensor) -> int:
    if labels[0].is_floating_point():
        return max(1, labels[0].shape[-1])
    return max(1, *(1 + int(y.max()) for y in labels if y.numel()), 1)


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
    """Convert what a user's function returned to `Data`.

    Accepted: a `Data`; a pair (train, test) whose members are each a map-style `Dataset` or a pair
    (inputs, labels) of tensors or arrays; a `DatasetDict` or `Dataset` of the library `datasets`.

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
    if type(obj).__module__.split(".")[0] == "datasets":
        from safari.data.huggingface import from_hf

        return from_hf(obj, name)
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
        pixels = "; for pixels give x / 255.0, as float32" if x.dtype == torch.uint8 else ""
        raise DataError(
            f"{field} must be float (images, features) or signed integers (tokens), got {x.dtype}{pixels}"
        )
    return x.to(torch.int64).contiguous()


def _labels(field: str, array: object) -> Tensor:
    y = _tensor(field, array)
    if y.dtype == torch.bool and y.ndim == 2:
        return y.to(torch.float32)
    if y.is_complex() or y.dtype == torch.bool:
        raise DataError(
            f"{field} must hold integers (classes), floats (numbers) or rows of booleans, got {y.dtype}"
        )
    if y.is_floating_point():
        return (y[:, None] if y.ndim == 1 else y).to(torch.float32).contiguous()
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


def _check_inputs(name: str, split: str, x: Tensor, y: Tensor) -> None:
    if x.ndim < 2:
        raise DataError(f"{name}: {split}_x must have two dimensions or more, got shape {[*x.shape]}")
    if len(x) != len(y):
        raise DataError(f"{name}: {split}_x and {split}_y must be equally long, got {len(x)} and {len(y)}")
    if x.numel() == 0:
        raise DataError(f"{name}: {split}_x must not be empty, got shape {[*x.shape]}")
    if x.is_floating_point():
        _check_finite(f"{name}: {split}_x", x)


def _check_labels(field: str, y: Tensor, classes: int) -> None:
    if y.is_floating_point():
        if y.ndim != 2 or y.shape[1] != classes:
            raise DataError(f"{field} must have shape [n, {classes}] (classes), got shape {[*y.shape]}")
        _check_finite(field, y)
        return
    if y.ndim not in (1, 2):
        raise DataError(f"{field} must have one dimension, or two for tokens, got shape {[*y.shape]}")
    outside = (y < 0) | (y >= classes)
    if y.ndim == 2:
        outside &= y != IGNORED
    if outside.any():
        place = outside.nonzero()[0]
        allowed = f"0..{classes - 1}" + (f" or be {IGNORED}" if y.ndim == 2 else "")
        raise DataError(f"{field} must lie in {allowed}, got {int(y[tuple(place)])} (sample {int(place[0])})")


def _check_finite(field: str, values: Tensor) -> None:
    # Two numbers a sample, so that a check of 60,000 images needs no second copy of them.
    low, high = values.flatten(1).aminmax(dim=1)
    strange = ~(torch.isfinite(low) & torch.isfinite(high))
    if strange.any():
        i = int(strange.nonzero()[0])
        raise DataError(f"{field} must be finite, got NaN or infinity in sample {i}")


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
    first = _sample(field, dataset, 0)
    columns = [torch.empty((size, *part.shape), dtype=part.dtype) for part in first]
    for i in range(size):
        for what, column, part, like in zip(
            ("sample", "label"), columns, _sample(field, dataset, i), first, strict=True
        ):
            if part.shape != like.shape or part.dtype != like.dtype:
                raise DataError(
                    f"{field}: {what} {i} must be like {what} 0 ({like.dtype} of shape {[*like.shape]}), "
                    f"got {part.dtype} of shape {[*part.shape]}"
                )
            column[i] = part
    return columns[0], columns[1]


def _sample(field: str, dataset: Any, index: int) -> tuple[Tensor, Tensor]:
    pair = dataset[index]
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(f"{field}: sample {index} must be a pair (input, label), got {type(pair).__name__}")
    x, y = pair
    if not isinstance(x, (Tensor, np.ndarray)):
        raise DataError(
            f"{field}: sample {index} must be a tensor or an array, got {type(x).__name__} "
            "(give the Dataset a transform that makes tensors)"
        )
    if isinstance(y, (int, float, np.generic)) and not isinstance(y, bool):
        y = torch.as_tensor(y)
    label = _tensor(f"{field}: label {index}", y)
    # Checked and cast as a batch of one: a single number is `[1]` then, and a row of labels `[1, d]`.
    batch = label.reshape(1) if label.numel() == 1 else label[None]
    return _tensor(f"{field}: sample {index}", x), _labels(f"{field}: label {index}", batch)[0]
