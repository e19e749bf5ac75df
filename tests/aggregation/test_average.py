"""The running average of models: by hand, and what must hold for any models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safari.aggregation import kept_share, running_average

START = torch.tensor([1000.0])


def averages(values: list[float], most: float) -> list[float]:
    found, out = START, []
    for done, value in enumerate(values):
        found = running_average(found, torch.tensor([value]), done, most)
        out.append(found.item())
    return out


def test_first_the_plain_mean_then_the_past_keeps_its_weight() -> None:
    # Means of 4; 4 and 8; 4, 8 and 0. Then 3/4 of the past: 3 + 8/4 = 5, 3.75 + 1/4 = 4.
    assert averages([4.0, 8.0, 0.0, 8.0, 1.0], 0.75) == pytest.approx([4.0, 6.0, 4.0, 5.0, 4.0])


def test_a_weight_of_nearly_1_is_the_mean_of_all_models() -> None:
    values = [float(v * v % 17) for v in range(50)]
    assert averages(values, 0.99)[-1] == pytest.approx(sum(values) / 50, rel=1e-5)


def test_the_weights_of_old_models_fall_by_the_same_factor() -> None:
    # The plain mean of two, then halves: a model that was in the mean has a quarter, an eighth, ...
    assert averages([1.0, 0.0, 0.0, 0.0], 0.5) == [1.0, 0.5, 0.25, 0.125]
    assert [kept_share(done, 0.5) for done in range(4)] == [0.0, 0.5, 0.5, 0.5]


def test_a_tiny_weight_is_kept_from_the_second_model_on() -> None:
    assert [kept_share(done, 0.1) for done in range(3)] == [0.0, 0.1, 0.1]


def test_nothing_that_came_in_is_changed() -> None:
    past, model = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    assert running_average(past, model, 1, 0.9).tolist() == [2.0, 4.0]
    assert (past.tolist(), model.tolist()) == ([1.0, 2.0], [3.0, 6.0])


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=30),
    st.floats(0.001, 0.999),
)
def test_each_number_stays_between_the_smallest_and_the_largest_of_the_models(
    models: list[list[float]], most: float
) -> None:
    found = torch.full((3,), 1e9)  # a start that would be seen in whatever it has a part in
    for done, model in enumerate(models):
        found = running_average(found, torch.tensor(model), done, most)
    table = torch.tensor(models, dtype=torch.float64)
    slack = 1e-5 * table.abs().max(0).values
    assert bool((found >= table.min(0).values - slack).all())
    assert bool((found <= table.max(0).values + slack).all())


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5), st.floats(0.001, 0.999))
def test_a_model_that_rests_is_its_own_average(model: list[float], most: float) -> None:
    x = torch.tensor(model)
    found = torch.zeros(len(model))
    for done in range(10):
        found = running_average(found, x, done, most)
    assert torch.equal(found, x)
