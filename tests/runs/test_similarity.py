"""Pictures of the similarity matrix: when, how large, and what a reader makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import safari
from runs.kit import TINY
from safari.errors import RunError
from safari.runs import RunFolder, Saved, Trial, read_checkpoint, read_lines
from safari.runs.similarity import MOST_CLIENTS, due, from_line, matrix_of, to_line


def test_pictures_are_taken_ever_more_rarely():
    rounds = [t for t in range(1, 5001) if due(t)]
    assert rounds[:34] == [*range(1, 33), 34, 36]
    assert rounds[-3:] == [4352, 4608, 4864]
    assert len(rounds) == 147


@given(st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_a_matrix_comes_back_bit_by_bit(clients, seed):
    matrix = np.random.default_rng(seed).normal(size=(clients, clients)).astype(np.float32)
    matrix = np.triu(matrix, 1) + np.triu(matrix, 1).T
    matrix[0, 1] = matrix[1, 0] = np.nan
    np.fill_diagonal(matrix, np.nan)
    line = json.loads(json.dumps(to_line(5, matrix)))
    assert from_line(line).tobytes() == matrix.tobytes()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({}, "a similarity line needs clients (2 to 256) and pairs, got None"),
        ({"clients": 10**9, "pairs": ""}, "needs clients (2 to 256) and pairs, got 1000000000"),
        ({"clients": 3, "pairs": "AACAPw=="}, "3 clients have 3 pairs, got 4 bytes"),
        ({"clients": 2, "pairs": "<script>"}, "pairs must be base64: "),
    ],
)
def test_what_is_no_such_line_is_refused(line, problem):
    with pytest.raises(RunError) as error:
        from_line(line)
    assert problem in str(error.value)


def test_a_run_takes_pictures_of_what_its_checkpoint_holds(tmp_path):
    safari.run(TINY, tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    drop, kept = run.trial("drop", 0), run.trial("safari", 0)
    assert not drop.similarity.exists(), "a rule without a matrix has no pictures"
    pictures = list(read_lines(kept.similarity))
    assert [p["round"] for p in pictures] == [1, 2, 3, 4, 5, 6, 7]
    last = read_checkpoint(kept.checkpoint).tensors["rule.similarity"].numpy().copy()
    np.fill_diagonal(last, np.nan)
    assert from_line(pictures[-1]).tobytes() == last.tobytes()


def test_many_clients_have_no_pictures(tmp_path):
    config = {**TINY, "clients": MOST_CLIENTS + 1, "rounds": 1, "arms": ["safari"]}
    safari.run(config, tmp_path / "run")
    assert not RunFolder.open(tmp_path / "run").trial("safari", 0).similarity.exists()


def test_loading_cuts_the_pictures_back_to_the_checkpoint(tmp_path):
    trial = Trial("safari", 0, tmp_path)
    for number in range(1, 6):
        trial.append({"round": number}, {}, to_line(number, np.zeros((2, 2))) if number != 2 else None)
        if number == 4:
            trial.save(Saved(4, {}, {}))
    assert trial.load().round == 4
    assert [line["round"] for line in read_lines(trial.similarity)] == [1, 3, 4]
    trial.checkpoint.unlink()
    assert trial.load() is None
    assert trial.similarity.read_bytes() == b""


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, None),
        ({"similarity": np.zeros((3, 3))}, None),
        ({"similarity": np.full((2, 2), -1.5)}, [[-1.5, -1.5]] * 2),
        ({"similarity": np.full((2, 2), 6.0), "met": np.full((2, 2), 4.0)}, [[1.5, 1.5]] * 2),
        ({"alike": np.full((2, 2), 1.0), "met": np.zeros((2, 2))}, [[None, None]] * 2),
    ],
)
def test_a_rule_says_by_name_how_alike_it_holds_clients_for(state, expected):
    found = matrix_of(state, 2)
    if expected is None:
        assert found is None
    else:
        assert [[None if np.isnan(v) else float(v) for v in row] for row in found] == expected


@pytest.mark.parametrize(("rule", "name"), [("fdms", "similarity"), ("safari+", "alike")])
def test_rules_that_keep_running_sums_have_pictures_of_means(tmp_path, rule, name):
    safari.run({**TINY, "rounds": 20, "arms": [{"name": "mean", "rule": rule}]}, tmp_path / "run")
    trial = RunFolder.open(tmp_path / "run").trial("mean", 0)
    last = from_line(list(read_lines(trial.similarity))[-1])
    known = read_checkpoint(trial.checkpoint).tensors
    sums, met = known[f"rule.{name}"].numpy(), known["rule.met"].numpy()
    pairs = ~np.eye(4, dtype=bool) & (met > 0)
    assert pairs.any()
    assert last[pairs] == pytest.approx(sums[pairs] / met[pairs], rel=1e-6)
