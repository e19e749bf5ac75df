"""Lossy uploads and rules leave variances what they are: the server tests with their roots."""

from __future__ import annotations

import pytest
import torch

from engine.kit import play
from engine.own_parts import NORMED
from safari.aggregation import RULES

# A convolution's 8·27, a norm's 2·8, and 4·32 + 4; the norm's means and variances come after them.
PARAMETERS, BUFFERS = 364, 16


def config_of(folder, engine="reference", **wire):
    plugins = folder / "parts.py"
    plugins.write_text(NORMED)
    return {
        "rounds": 20,
        "clients": 4,
        "arms": ["drop"],
        "data": {"name": f"{plugins}:pictures"},
        "model": {"name": f"{plugins}:normed"},
        "partition": {"name": "iid"},
        "pruning": {"pruner": "mag", "sparsity": 0.5},
        "local": {"steps": 8, "batch": 16},
        "uplink": {"name": "bernoulli", "p": 0.7},
        "wire": {"every": 0, **wire},
        "engine": {"name": engine, "device": "cpu", "threads": 1},
    }


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(
    ("values", "feedback"), [("step", True), ("int8", True), ("qsgd", True), ("qsgd", False)]
)
def test_all_tests_are_finite(tmp_path, engine, values, feedback):
    rounds = list(play(config_of(tmp_path, engine, values=values, feedback=feedback)))
    assert len(rounds) == 20
    # A loss that is no number is recorded as None.
    assert [record["round"] for _, _, record in rounds if record["loss"] is None] == []
    variances = torch.stack([after.model[-8:] for _, after, _ in rounds])
    assert variances.min() >= 0
    # It did fall as far as one step or so.
    assert variances[-1, 0] < 0.02 < variances[0, 0]


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_go_beyond_a_mean_leave_them_so_too(tmp_path, rule):
    config = config_of(tmp_path, "vectorised") | {"arms": [rule], "uplink": {"name": "bernoulli", "p": 0.4}}
    rounds = list(play(config))
    assert [record["round"] for _, _, record in rounds if record["loss"] is None] == []
    assert all(after.model[-8:].min() >= 0 for _, after, _ in rounds)


def test_what_waits_is_about_parameters_alone(tmp_path):
    for _, after, _ in play(config_of(tmp_path, values="step") | {"rounds": 2}):
        assert after["wire"]["residual"].shape == (4, PARAMETERS)
        assert after.model.shape == (PARAMETERS + BUFFERS,)
