"""Writes src/safari/data/digits.npz again from scikit-learn's copy: `python tests/data/make_digits.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TARGET = Path(__file__).parents[2] / "src/safari/data/digits.npz"


def main() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez_compressed(
        TARGET, images=images.reshape(-1, 8, 8).astype(np.uint8), labels=labels.astype(np.uint8)
    )


if __name__ == "__main__":
    main()
