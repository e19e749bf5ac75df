from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import safari
from report.made_up import record
from safari.errors import RunError
from safari.report.gallery import draw_all
from safari.report.gather import (
    dense_bytes,
    message_bytes,
    read_run,
    run_names,
    series,
)
from safari.runs import ClientStatus, RunFolder, read_lines
from safari.runs.similarity import from_line


def test_a_real_run(tiny):
    data = read_run(tiny)
    assert [arm.name for arm in data.arms] == ["perfect", "drop", "safari"]
    for line in series([data], "top1"):
        assert line.rounds.tolist() == [1, 2, 3, 4]
        assert line.values.shape == (2, 4)
    records = tiny.trials()[2].records()
    drop = data.arms[1]
    for t, one in enumerate(records):
        assert np.flatnonzero(drop.status[:, t] == ClientStatus.ARRIVED).tolist() == one["arrived"]
    assert drop.similarity is None
    assert data.arms[2].similarity.shape == (4, 4)
    assert drop.size > 0


def test_rounds_without_evaluation_are_left_out_of_scores_only(synthetic):
    unseen = {"top1": None, "top5": None, "loss": None}
    records = [
        record(1, **unseen),
        record(2, top1=0.25),
        record(3, **unseen),
        record(4, top1=0.75, loss=None),
    ]
    data = read_run(synthetic({("drop", 0): records}))
    (top1,), (loss,), (support,) = (series([data], name) for name in ("top1", "loss", "support"))
    assert top1.rounds.tolist() == [2, 4]
    assert top1.mean.tolist() == [0.25, 0.75]
    # A loss that was not finite is null in the record: a gap, at a round that was evaluated.
    assert loss.rounds.tolist() == [2, 4]
    assert np.isnan(loss.mean).tolist() == [False, True]
    assert support.rounds.tolist() == [1, 2, 3, 4]


def test_seeds_that_are_behind_wait(synthetic):
    whole = [record(i, top1=0.5) for i in range(1, 5)]
    run = synthetic({("drop", 0): whole, ("drop", 1): whole[:2], ("safari", 0): []}, {"seeds": 3})
    (line,) = series([read_run(run)], "top1")
    assert line.values.shape == (1, 4)
    assert line.seeds == 3
    assert line.std.tolist() == [0, 0, 0, 0]


def test_mean_and_deviation_by_hand(synthetic):
    run = synthetic({("drop", s): [record(1, top1=0.2 + 0.2 * s)] for s in range(3)}, {"seeds": 3})
    (line,) = series([read_run(run)], "top1")
    np.testing.assert_allclose(line.mean, [0.4])
    np.testing.assert_allclose(line.std, [0.2])


def test_status_by_hand(synthetic):
    records = [
        record(1),
        record(2, arrived=[1], missing=[2], stand_ins={}),
        record(
            3, arrived=[0], missing=[1, 2], stand_ins={"1": [0], "2": [0]}, refused={"1": "NaN", "7": "who?"}
        ),
    ]
    (arm,) = read_run(synthetic({("drop", 0): records})).arms
    arrived, up = ClientStatus.ARRIVED, ClientStatus.LOST_UP
    assert arm.status.T.tolist() == [
        [arrived, arrived, up],
        [ClientStatus.NOT_ASKED, arrived, up],
        [arrived, ClientStatus.REFUSED, up],
    ]
    assert arm.stood_in.T.tolist() == [[False, False, True], [False] * 3, [False, False, True]]


def test_bytes_of_a_message_where_they_were_counted(synthetic):
    counted = [{"up": 10.5, "down": 3}, {"up": None, "down": None}, {"up": None, "down": 4}]
    records = [record(t, bytes=sizes) for t, sizes in enumerate(counted, 1)]
    run = synthetic({("drop", 0): records, ("safari", 0): records}, tensors={"model": torch.zeros(100)})
    data = [read_run(run)]
    up, down = message_bytes(data, "up"), message_bytes(data, "down")
    assert [(line.rounds.tolist(), line.mean.tolist()) for line in up] == [([1], [10.5])] * 2
    assert [(line.rounds.tolist(), line.mean.tolist()) for line in down] == [([1, 3], [3, 4])] * 2
    # Both arms' models are of the same size, which is given once.
    assert dense_bytes(data) == [400]


def test_no_bytes_counted_and_no_checkpoint(synthetic):
    data = [read_run(synthetic({("drop", 0): [record(1)]}))]
    assert message_bytes(data, "up") == []
    assert dense_bytes(data) == []


def test_names_of_runs(synthetic):
    a = synthetic({}, {"name": "a"}, folder="x")
    b = synthetic({}, {"name": "b"}, folder="y")
    other_a = synthetic({}, {"name": "a"}, folder="z")
    assert run_names([a, b]) == ["a", "b"]
    assert run_names([a, other_a]) == ["x", "z"]
    assert run_names([a, a]) == ["x #1", "x #2"]


def test_labels_carry_the_run_when_there_are_several(synthetic):
    data = [read_run(synthetic({("drop", 0): [record(1)]}, folder=name), name) for name in ("x", "y")]
    assert [line.label for line in series(data, "top1")] == ["x/drop", "y/drop"]
    assert [line.label for line in series(data[:1], "top1")] == ["drop"]


def test_optional_files(synthetic):
    run = synthetic({})
    assert read_run(run).label_counts is None
    (run.path / "clients.json").write_text(
        json.dumps({"label_counts": [[1, 2], [3, 4], [0, 9]], "samples": []})
    )
    data = read_run(run)
    assert data.label_counts.tolist() == [[1, 2], [3, 4], [0, 9]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not readable JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"label_counts": [[1], [2, 3]]}', "must be a table of whole numbers"),
        ('{"label_counts": [1, 2]}', r"must be clients × classes, got shape \(2,\)"),
    ],
)
def test_broken_clients_file_is_named(synthetic, text, problem):
    run = synthetic({})
    (run.path / "clients.json").write_text(text)
    with pytest.raises(RunError, match=problem) as caught:
        read_run(run)
    assert "clients.json" in str(caught.value)


@pytest.mark.parametrize(
    "broken", [{"arrived": [9]}, {"bytes": 3}, {"loss": "high"}, {"stand_ins": {"x": []}}]
)
def test_a_damaged_record_is_left_out_and_named(synthetic, broken):
    run = synthetic({("drop", 0): [record(1), record(2, **broken), record(3, top1=0.75)]})
    data = read_run(run)
    (problem,) = data.skipped
    assert problem.startswith("drop, seed 0: rounds.jsonl, line 2 is not a round's record: ")
    (line,) = series([data], "support")
    assert line.rounds.tolist() == [1, 3]


def test_a_round_that_is_damaged_in_one_seed_is_left_out_of_the_mean(synthetic):
    one, other = ([record(t, top1=0.1 * t) for t in (1, 2, 3)] for _ in range(2))
    other[1]["loss"] = "high"
    run = synthetic({("drop", 0): one, ("drop", 1): other}, {"seeds": 2})
    (line,) = series([read_run(run)], "top1")
    assert (line.rounds.tolist(), line.values.shape) == ([1, 3], (2, 2))
    np.testing.assert_allclose(line.mean, [0.1, 0.3])


@pytest.mark.parametrize("rule", ["safari", "fdms", "safari+"])
def test_the_similarity_is_that_of_the_page(tmp_path, rule):
    """Means, also for rules that keep sums (fdms) or call the matrix otherwise (safari+)."""
    small = {"rounds": 6, "clients": 4, "arms": [rule], "uplink": {"name": "bernoulli", "p": 0.7}}
    safari.run({**small, "model": {"name": "mlp", "hidden": [4]}, "local": {"steps": 1}}, tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    (arm,) = read_run(run).arms
    *_, newest = read_lines(run.trials()[0].similarity)
    assert newest["round"] == 6
    np.testing.assert_array_equal(arm.similarity, from_line(newest))
    assert np.nanmax(np.abs(from_line(newest))) > 0


@pytest.mark.parametrize(("clients", "drawn"), [(256, True), (257, False)])
def test_similarities_of_more_clients_than_can_be_told_apart_are_not_read(synthetic, clients, drawn):
    matrix = torch.rand(clients, clients)
    run = synthetic(
        {("safari", 0): [record(1)]},
        {"clients": clients},
        tensors={"model": torch.zeros(3), "rule.similarity": matrix},
    )
    data = read_run(run)
    (arm,) = data.arms
    assert (arm.similarity is not None, arm.size) == (drawn, 3)
    assert any(figure.name.startswith("similarity") for figure in draw_all([data])) == drawn
