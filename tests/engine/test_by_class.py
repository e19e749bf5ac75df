"""Accuracy by class: which classes a model has learned, and which it has forgotten."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import safari
from safari.runs.record import MOST_BY_CLASS, RecordError, RoundRecord
from safari.training import evaluate


class Told(nn.Module):
    """Predicts the class that its input states."""

    def forward(self, x):
        return nn.functional.one_hot(x[:, 0].long(), 4).float()


def test_each_class_has_the_share_of_its_samples_that_are_right():
    x, y = torch.tensor([[0.0], [1.0], [0.0], [2.0], [2.0]]), torch.tensor([0, 0, 0, 2, 1])
    scores = evaluate(Told(), x, y, batch=2, classes=4)
    assert scores.by_class[:3] == (2 / 3, 0.0, 1.0)
    assert scores.by_class[3] != scores.by_class[3], "no sample of class 3: not a number"
    assert evaluate(Told(), x, y, batch=2).by_class == ()


def test_records_and_figure_show_the_labels_that_are_forgotten(tmp_path):
    config = {
        "rounds": 30,
        "arms": ["drop"],
        "model": {"name": "mlp"},
        "pruning": {"sparsity": 0.0},
        # The clients of labels 5 to 9 are never heard from.
        "uplink": {"name": "bernoulli", "p": [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]},
        "evaluation": {"every": 10, "last": 10},
    }
    safari.run(config, tmp_path / "run", progress=False, report=False)
    lines = (tmp_path / "run/trials/drop/seed-0/rounds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert "by_class" not in records[0]
    row = records[-1]["by_class"]
    assert min(row[:5]) > 0.5
    assert row[5:] == [0.0] * 5
    # Test samples of a class differ by a few, so the mean over classes is near top-1 and not equal to it.
    assert sum(row) / 10 == pytest.approx(records[-1]["top1"], abs=0.03)
    assert "classes" in safari.load(tmp_path / "run").figures()


@pytest.mark.parametrize("row", ["half", [0.5, "half"], [0.5] * (MOST_BY_CLASS + 1)])
def test_a_damaged_row_is_named(row):
    good = RoundRecord(1, (0,), (), {"loss": 0.5, "top1": 0.5, "top5": 0.5}).to_json()
    with pytest.raises(RecordError, match="by_class"):
        RoundRecord.from_json({**good, "by_class": row})
