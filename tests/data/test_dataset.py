from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from safari.data import DATASETS, Data, as_data, digits, from_datasets, from_tensors, hold_out
from safari.errors import DataError

X, Y = torch.arange(12, dtype=torch.float32).view(4, 3), torch.tensor([0, 1, 2, 1])


def make(**changes) -> Data:
    fields = {"name": "toy", "train_x": X, "train_y": Y, "test_x": X, "test_y": Y, "classes": 3}
    return Data(**(fields | changes))


class Pairs(Dataset):
    def __init__(self, *pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])


def nan_at(index: int, value: float) -> torch.Tensor:
    x = X.clone()
    x[index, 1] = value
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": X[:3]}, "toy: train_x and train_y must be equally long, got 3 and 4"),
        ({"test_y": Y[:1]}, "toy: test_x and test_y must be equally long, got 4 and 1"),
        ({"train_y": torch.tensor([0, 1, 3, 5])}, "toy: train_y must lie in 0..2, got 3 (sample 2)"),
        ({"test_y": torch.tensor([0, -1, 2, 1])}, "toy: test_y must lie in 0..2, got -1 (sample 1)"),
        ({"train_x": X[:0], "train_y": Y[:0]}, "toy: train_x must not be empty, got shape [0, 3]"),
        ({"test_x": X[:, :0]}, "toy: test_x must not be empty, got shape [4, 0]"),
        ({"train_x": nan_at(2, math.nan)}, "toy: train_x must be finite, got NaN or infinity in sample 2"),
        ({"test_x": nan_at(3, -math.inf)}, "toy: test_x must be finite, got NaN or infinity in sample 3"),
        ({"train_x": X.double()}, "toy: train_x must be torch.float32 or torch.int64, got torch.float64"),
        ({"train_x": [1.0]}, "toy: train_x must be a tensor of torch.float32 or torch.int64, got list"),
        ({"train_y": Y.int()}, "toy: train_y must be torch.int64 or torch.float32, got torch.int32"),
        ({"train_x": X[:, 0]}, "toy: train_x must have two dimensions or more, got shape [4]"),
        (
            {"train_y": Y[:, None, None]},
            "toy: train_y must have one dimension, or two for tokens, got shape [4, 1, 1]",
        ),
        (
            {"train_y": Y[:, None]},
            "toy: test_y must hold labels like those of train_y (torch.int64 of shape [1]), "
            "got torch.int64 of shape []",
        ),
        (
            {"train_y": torch.tensor([[0, 1], [2, -100], [1, 4], [0, 0]])},
            "toy: train_y must lie in 0..2 or be -100, got 4 (sample 2)",
        ),
        ({"train_y": X[:, :2]}, "toy: train_y must have shape [n, 3] (classes), got shape [4, 2]"),
        ({"train_y": X[:, 0]}, "toy: train_y must have shape [n, 3] (classes), got shape [4]"),
        ({"train_y": nan_at(2, math.nan)}, "toy: train_y must be finite, got NaN or infinity in sample 2"),
        (
            {"train_y": X},
            "toy: test_y must hold labels like those of train_y (torch.float32 of shape [3]), "
            "got torch.int64 of shape []",
        ),
        (
            {"owners": Y[:3]},
            "toy: owners must name one for each of the 4 samples, got shape [3]",
        ),
        ({"owners": X[:, 0]}, "toy: owners must be torch.int64, got torch.float32"),
        (
            {"test_x": X[:, :2]},
            "toy: test_x must hold samples like those of train_x (torch.float32 of shape [3]), "
            "got torch.float32 of shape [2]",
        ),
        (
            {"test_x": X.long()},
            "toy: test_x must hold samples like those of train_x (torch.float32 of shape [3]), "
            "got torch.int64 of shape [3]",
        ),
        ({"classes": 0}, "toy: classes must be an integer of at least 1, got 0"),
        ({"classes": True}, "toy: classes must be an integer of at least 1, got True"),
        ({"classes": 3.0}, "toy: classes must be an integer of at least 1, got 3.0"),
        (
            {"classes": 2 * 10**9},
            "toy: classes must be at most 1000000, got 2000000000; labels count from 0 "
            "(np.unique(y, return_inverse=True)[1] numbers any labels so)",
        ),
    ],
)
def test_every_field_is_checked(changes, message):
    with pytest.raises(DataError) as error:
        make(**changes)
    assert str(error.value) == message


def test_input_shape_is_that_of_one_sample():
    assert make().input_shape == (3,)
    assert make(train_x=X.view(4, 1, 3, 1), test_x=X.view(4, 1, 3, 1)).input_shape == (1, 3, 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_become_float32(dtype):
    data = from_tensors("toy", train=(X.numpy().astype(dtype), Y.numpy()), test=(X, Y))
    assert data.train_x.dtype == torch.float32
    assert torch.equal(data.train_x, X)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_tokens_stay_integers(dtype):
    tokens = X.numpy().astype(dtype)
    data = from_tensors("toy", train=(tokens, Y.numpy().astype(np.uint8)), test=(tokens, Y.int()))
    assert data.train_x.dtype == data.train_y.dtype == torch.int64
    assert torch.equal(data.test_x, X.long())


@pytest.mark.filterwarnings("error")
def test_arrays_that_torch_dislikes():
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    assert torch.equal(from_tensors("toy", train=(frozen, Y), test=(X, Y)).train_x, X)
    backwards = X.numpy()[::-1]
    assert torch.equal(from_tensors("toy", train=(backwards, Y), test=(X, Y)).train_x, X.flip(0))


def test_gradients_stay_behind():
    assert not from_tensors("toy", train=(X.clone().requires_grad_(), Y), test=(X, Y)).train_x.requires_grad


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            (X.byte(), Y),
            "toy: train_x must be float (images, features) or signed integers (tokens), got torch.uint8; "
            "for pixels give x / 255.0, as float32",
        ),
        (
            (X.bool(), Y),
            "toy: train_x must be float (images, features) or signed integers (tokens), got torch.bool",
        ),
        (
            (X, Y.bool()),
            "toy: train_y must hold integers (classes), floats (numbers) or rows of booleans, got torch.bool",
        ),
        ((np.array([["a"]] * 4), Y), "toy: train_x must be an array of numbers, got dtype <U1"),
        (([1, 2], Y), "toy: train_x must be a tensor or an array, got list"),
    ],
)
def test_tensors_that_cannot_be_data(train, message):
    with pytest.raises(DataError) as error:
        from_tensors("toy", train=train, test=(X, Y))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("labels", "kind", "shape", "classes"),
    [
        (Y, "class", (4,), 3),
        (torch.tensor([[0, 5], [1, -100], [2, 2], [0, 1]]), "tokens", (4, 2), 6),
        (Y.float() / 4, "numbers", (4, 1), 1),
        (X.double().numpy(), "numbers", (4, 3), 3),
        (X > 5, "numbers", (4, 3), 3),
    ],
)
def test_labels_of_every_kind(labels, kind, shape, classes):
    rows = Pairs(*zip(X, labels, strict=True))
    for data in (
        from_tensors("toy", train=(X, labels), test=(X, labels)),
        as_data(((X, labels), (X, labels)), "toy"),
        from_datasets("toy", rows, rows) if not isinstance(labels, np.ndarray) else None,
    ):
        if data is not None:
            assert data.label_kind == kind
            assert data.train_y.shape == data.test_y.shape == shape
            assert data.classes == classes
            assert torch.equal(data.train_y.flatten(), torch.as_tensor(labels).to(data.train_y).flatten())


def test_tokens_are_counted_where_no_vocabulary_names_them():
    tokens = torch.tensor([[0, 7], [2, 3], [1, 1], [0, 0]])
    assert make(train_x=tokens, test_x=tokens).tokens == 8
    assert make(train_x=tokens, test_x=tokens, vocabulary=tuple("abcdefghij")).tokens == 10
    assert make().tokens == 0


def test_a_validation_split_takes_from_what_is_trained_on_alone():
    x = torch.arange(100.0)[:, None]
    data = make(train_x=x, train_y=torch.arange(100) % 3, test_x=-x, test_y=torch.arange(100) % 3)
    data = replace(data, owners=torch.arange(100) // 10)
    split = hold_out(data, 0.2, np.random.default_rng(1))
    assert (len(split.train_x), len(split.test_x)) == (80, 20)
    together = torch.cat([split.train_x, split.test_x]).flatten()
    assert torch.equal(together.sort().values, x.flatten())
    assert split.owners is not None
    assert torch.equal(split.owners, (split.train_x.flatten() // 10).long())
    assert torch.equal(split.test_y, split.test_x.flatten().long() % 3)
    again, other = (hold_out(data, 0.2, np.random.default_rng(seed)) for seed in (1, 2))
    assert torch.equal(split.test_x, again.test_x)
    assert not torch.equal(split.test_x, other.test_x)
    assert len(hold_out(data, 1e-9, np.random.default_rng(1)).test_x) == 1
    assert len(hold_out(data, 0.9999, np.random.default_rng(1)).train_x) == 1
    with pytest.raises(DataError, match="toy: a validation split needs at least 2 training samples, got 1"):
        hold_out(make(train_x=X[:1], train_y=Y[:1]), 0.5, np.random.default_rng(1))


def test_classes_are_counted_over_both_splits():
    assert from_tensors("toy", train=(X, Y), test=(X, Y + 4)).classes == 7
    assert from_tensors("toy", train=(X, Y), test=(X, Y), classes=10).classes == 10


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X, Y),
        Pairs(*((row.numpy(), int(label)) for row, label in zip(X, Y, strict=True))),
        Pairs(*([row, label.numpy()[()]] for row, label in zip(X, Y, strict=True))),
        Pairs(*((row, label[None]) for row, label in zip(X, Y, strict=True))),
    ],
)
def test_any_map_style_dataset(dataset):
    data = from_datasets("toy", dataset, dataset)
    assert torch.equal(data.train_x, X)
    assert torch.equal(data.test_y, Y)
    assert data.classes == 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            Pairs((X[0], 0), (X[0], 1), (X[0, :2], 0)),
            "toy: train: sample 2 must be like sample 0 (torch.float32 of shape [3]), "
            "got torch.float32 of shape [2]",
        ),
        (
            Pairs((X[0], 0), (X[0].long(), 1)),
            "toy: train: sample 1 must be like sample 0 (torch.float32 of shape [3]), "
            "got torch.int64 of shape [3]",
        ),
        (Pairs((X[0], 0), X[0]), "toy: train: sample 1 must be a pair (input, label), got Tensor"),
        (
            Pairs(("text", 0)),
            "toy: train: sample 0 must be a tensor or an array, got str "
            "(give the Dataset a transform that makes tensors)",
        ),
        (
            Pairs((X[0], 0), (X[0], 1.5)),
            "toy: train: label 1 must be like label 0 (torch.int64 of shape []), "
            "got torch.float32 of shape [1]",
        ),
        (
            Pairs((X[0], Y), (X[0], Y[:2])),
            "toy: train: label 1 must be like label 0 (torch.int64 of shape [4]), "
            "got torch.int64 of shape [2]",
        ),
        (Pairs((X[0], "cat")), "toy: train: label 0 must be a tensor or an array, got str"),
        (Pairs(), "toy: train must not be empty, got a Pairs of length 0"),
        (Stream(), "toy: train must be a map-style Dataset, with a length and an index, got Stream"),
    ],
)
def test_datasets_that_cannot_be_data(dataset, message):
    with pytest.raises(DataError) as error:
        from_datasets("toy", dataset, TensorDataset(X, Y))
    assert str(error.value) == message


@pytest.mark.parametrize(
    "returned",
    [
        make(),
        ((X, Y), (X, Y)),
        [[X, Y], [X, Y]],
        ((X.numpy(), Y.numpy()), (X, Y)),
        (TensorDataset(X, Y), TensorDataset(X, Y)),
        (TensorDataset(X, Y), (X, Y)),
    ],
)
def test_as_data_takes_what_people_return(returned):
    data = as_data(returned, "toy")
    assert torch.equal(data.train_x, X)
    assert torch.equal(data.test_y, Y)
    assert data.name == "toy"


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "NoneType"),
        ({"train": 1}, "dict"),
        ((X, Y), "tuple of 2 (Tensor, Tensor)"),
        ((X, Y, X, Y), "tuple of 4 (Tensor, Tensor, Tensor, ...)"),
        (TensorDataset(X, Y), "TensorDataset"),
        (((X, Y), (X, Y, Y)), "tuple of 2 (tuple, tuple)"),
    ],
)
def test_as_data_says_what_it_wanted(returned, found):
    with pytest.raises(DataError) as error:
        as_data(returned, "mine")
    assert str(error.value) == (
        "mine: must be a Data, a pair (train, test) of Datasets, or a pair of (inputs, labels) pairs "
        f"of tensors or arrays; got {found}"
    )


def test_digits_are_scikit_learn_s():
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    data = digits()
    test = np.arange(1797) % 5 == 0
    scaled = images.reshape(-1, 1, 8, 8) / 16
    expected = (scaled - scaled[~test].mean()) / scaled[~test].std()
    np.testing.assert_allclose(data.train_x.numpy(), expected[~test], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(data.test_x.numpy(), expected[test], rtol=1e-6, atol=1e-7)
    assert data.train_y.tolist() == labels[~test].tolist()
    assert data.test_y.tolist() == labels[test].tolist()


def test_digits_are_normalised_on_what_is_trained_on():
    data = digits()
    assert float(data.train_x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train_x.std()) == pytest.approx(1, abs=1e-4)
    assert torch.bincount(data.test_y, minlength=10).min() >= 25


def test_each_says_what_it_is_in_one_line():
    for function in DATASETS.values():
        first = (function.__doc__ or "").splitlines()[0]
        assert first.endswith(".")
        assert len(first) < 110
