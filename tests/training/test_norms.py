"""Static batch norm: statistics of the samples, whatever the running ones were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safari
from safari.training import gather_norms

NORMED = """
from torch import nn

def normed(input_shape, classes):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))
"""


def test_statistics_are_the_means_over_batches() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1), nn.Dropout(0.5), nn.BatchNorm2d(2))
    x = torch.randn(7, 3, 4, 4)
    net[0].running_mean.fill_(9.0)
    net[3].running_var.fill_(9.0)
    gather_norms(net, x.split(3))  # Batches of 3, 3 and 1: the last has no variance between samples.

    def means(values: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        over = (0, 2, 3)
        return np.mean([v.mean(over) for v in values], 0), np.mean([v.var(over, ddof=1) for v in values], 0)

    first = [x[:3].double().numpy(), x[3:6].double().numpy()]
    w, b = (p.detach().double().numpy() for p in (net[1].weight, net[1].bias))
    second = []
    for v in first:
        scaled = (v - v.mean((0, 2, 3), keepdims=True)) / np.sqrt(v.var((0, 2, 3), keepdims=True) + 1e-5)
        second.append(np.einsum("oi,nihw->nohw", w[:, :, 0, 0], scaled) + b[:, None, None])
    for norm, values in ((net[0], first), (net[3], second)):
        mean, var = means(values)
        np.testing.assert_allclose(norm.running_mean, mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(norm.running_var, var, rtol=1e-5)
        assert norm.momentum == 0.1
    assert net.training


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_run_tests_with_gathered_statistics_and_trains_as_before(engine: str, tmp_path: Path) -> None:
    plug_in = tmp_path / "nets.py"
    plug_in.write_text(NORMED)
    config: dict[str, Any] = {
        "rounds": 3,
        "arms": ["drop"],
        "model": {"name": f"{plug_in}:normed"},
        "engine": {"name": engine, "threads": 1},
    }
    found = {}
    for norms in ("averaged", "gathered"):
        safari.run({**config, "evaluation": {"norms": norms}}, tmp_path / norms, progress=False)
        lines = (tmp_path / norms / "trials" / "drop" / "seed-0" / "rounds.jsonl").read_text().splitlines()
        found[norms] = [json.loads(line) for line in lines]
    for plain, gathered in zip(*found.values(), strict=True):
        assert plain["train_loss"] == gathered["train_loss"], "a test must not change what clients train"
        assert plain["loss"] != gathered["loss"]
