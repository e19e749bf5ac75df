"""Regression on targets of any size: learned standardised, reported in the units of the table."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import safari
from safari.config import parse
from safari.data import from_tensors
from safari.engine import assemble
from safari.errors import ConfigError, SafariError
from safari.report import cells, rows_of
from safari.tasks import Metric, Task

RNG = np.random.default_rng(7)
COLUMNS = RNG.uniform(0, 1, (400, 3))
NOISE = RNG.normal(0, 5_000, 400)
# House prices: 385,000 on average.
PRICES = 150_000 + COLUMNS @ [300_000.0, 120_000.0, 50_000.0] + NOISE


def least_squares_error(x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> float:
    solution = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    return float(np.abs(np.column_stack([test_x, np.ones(len(test_x))]) @ solution - test_y).mean())


def settings(**more: Any) -> dict[str, Any]:
    return {
        "rounds": 60,
        "clients": 4,
        "arms": ["drop"],
        "partition": {"name": "iid"},
        "task": {"name": "regression"},
        "model": {"name": "mlp", "hidden": []},
        "pruning": {"sparsity": 0.0},
        "local": {"lr": 0.02, "steps": 10},
        "uplink": {"name": "bernoulli", "p": 0.7},
        "evaluation": {"every": 20, "last": 1},
        "checkpoint": {"every": 60},
        **more,
    }


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
def test_prices_from_a_file_are_learned_almost_as_well_as_by_least_squares(tmp_path, engine) -> None:
    for name, rows in (("train", slice(0, 300)), ("test", slice(300, 400))):
        table = np.column_stack([COLUMNS[rows], PRICES[rows]])
        np.savetxt(
            tmp_path / f"{name}.csv", table, delimiter=",", header="a,b,c,price", comments="", fmt="%.6f"
        )
    data = {"name": "hf", "source": str(tmp_path), "label": "price"}
    summary = safari.run(
        settings(data=data, engine={"name": engine}), tmp_path / "run", progress=False, report=False
    )
    error = summary["arms"]["drop"]["mae"]["mean"]
    train, test = (COLUMNS[:300], PRICES[:300]), (COLUMNS[300:], PRICES[300:])
    mean_predictor = float(np.abs(test[1] - train[1].mean()).mean())
    best = least_squares_error(*train, *test)
    assert best < error < 1.5 * best < 0.1 * mean_predictor
    labels = json.loads((tmp_path / "run" / "data.json").read_text())["labels"]
    assert (labels["mean"], labels["scale"]) == (
        pytest.approx([train[1].mean()], rel=1e-5),
        pytest.approx([train[1].std()], rel=1e-5),
    )
    # Nobody said which error is small enough.
    assert summary["target"] is None
    assert not any(heading.startswith("rounds to") for heading in cells(rows_of({"run": summary}))[0])


def test_other_units_scale_the_errors_and_change_nothing_else(tmp_path) -> None:
    """A price in thousands: the same models, errors of a thousandth."""
    found = []
    for factor in (1.0, 1024.0):
        y = (PRICES[:80] / factor)[:, None].astype(np.float32)
        x = COLUMNS[:80].astype(np.float32)
        world = assemble(parse(settings()), 0, from_tensors("toy", (x[:60], y[:60]), (x[60:], y[60:])))
        found.append((world.data.train_y, world.scores(world.start, 59)))
    (one, errors), (other, smaller) = found
    assert torch.equal(one, other)
    assert {
        name: value / 1024.0 ** (2 if name == "loss" else 1) for name, value in errors.items()
    } == pytest.approx(smaller)
    assert float(one.mean()) == pytest.approx(0, abs=1e-5)
    assert float(one.std(correction=0)) == pytest.approx(1, rel=1e-5)


def test_several_numbers_one_of_them_constant() -> None:
    y = np.stack([PRICES[:40], np.full(40, 7.0)], 1).astype(np.float32)
    x = COLUMNS[:40].astype(np.float32)
    world = assemble(parse(settings()), 0, from_tensors("toy", (x, y), (x, y)))
    assert torch.isfinite(world.data.train_y).all()
    zeros = torch.zeros_like(world.data.test_y)
    # An output of 0 is the mean: errors are distances from that, averaged over both numbers.
    mae = float(world.task.measure(zeros, world.data.test_y)["mae"]) / 40
    assert mae == pytest.approx(np.abs(PRICES[:40] - PRICES[:40].mean()).mean() / 2, rel=1e-4)


def test_as_they_are_where_that_is_wanted() -> None:
    x, y = COLUMNS[:40].astype(np.float32), PRICES[:40, None].astype(np.float32)
    task = {"name": "regression", "standardise": False}
    world = assemble(parse(settings(task=task)), 0, from_tensors("toy", (x, y), (x, y)))
    assert torch.equal(world.data.train_y, torch.from_numpy(y))


def test_only_numbers_have_units() -> None:
    with pytest.raises(ConfigError, match="standardise needs labels that are numbers, got 'class'"):
        Task(
            "mine", "class", lambda o, y: o, lambda o, y: {}, (Metric("mae", "error"),), "mae", lambda o, y, c: None,
            standardise=True,
        )  # fmt: skip


def test_whole_numbers_are_prices_for_regression_and_classes_for_classification(tmp_path) -> None:
    rows = ["a,b,price"] + [f"{i % 7},{i % 5},{200_000 + 1000 * (i % 7) + i}" for i in range(200)]
    (tmp_path / "houses.csv").write_text("\n".join(rows) + "\n")
    data = {"name": f"hf:{tmp_path / 'houses.csv'}", "label": "price"}
    summary = safari.run(settings(data=data), tmp_path / "run", progress=False, report=False)
    assert summary["arms"]["drop"]["mae"]["mean"] < 50_000
    wrong = {**settings(data=data), "task": {"name": "classification"}}
    with pytest.raises(SafariError, match="reads whole numbers as numbers"):
        safari.run(wrong, tmp_path / "wrong", progress=False, report=False)
