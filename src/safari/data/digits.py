"""The embedded data set: small enough to travel with the package, real enough to show the effect."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import numpy as np

from safari.data.dataset import Data, Scaling, from_tensors


def digits() -> Data:
    """1,797 handwritten digits of 8x8 pixels, embedded in the package.

    Every fifth sample is for testing (1,437 to train on, 360 to test on). Pixels, counts from 0 to 16, are
    scaled to 0..1 and normalised with the mean and the standard deviation of the training split.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository (1998), https://doi.org/10.24432/C50P49, licence CC BY 4.0; its test part, as scikit-learn
    ships it. `python tests/data/make_digits.py` writes the embedded file again from scikit-learn.

    >>> data = digits()
    >>> data.input_shape, len(data.train_x), len(data.test_x), data.classes
    ((1, 8, 8), 1437, 360, 10)
    """
    with files("safari.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        x, y = stored["images"][:, None] / 16, stored["labels"].astype(np.int64)
    test = np.arange(len(y)) % 5 == 0
    mean, std = x[~test].mean(), x[~test].std()
    x = (x - mean) / std
    data = from_tensors("digits", train=(x[~test], y[~test]), test=(x[test], y[test]), classes=10)
    return replace(data, class_names=tuple("0123456789"), scaling=Scaling((float(mean),), (float(std),)))
