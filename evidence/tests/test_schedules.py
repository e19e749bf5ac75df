"""Tests of a model that fall on one phase of the links say nothing about the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from claims import write
from safari.cli import cli
from safari.config import Evaluation
from safari.engine.checks import unseen_phases
from safari.errors import ConfigError
from safari.links import LINKS, from_probability
from safari.sweep import partial_tests
from safari_evidence.experiments import find, read
from safari_evidence.folder import shipped


@pytest.mark.parametrize("quick", [False, True])
def test_the_experiments_see_all_of_their_links(quick: bool) -> None:
    experiments = read(find(shipped()), [], quick=quick)
    assert [e.name for e in experiments if partial_tests(e)] == []


def test_which_links_have_a_period() -> None:
    found = {name: LINKS[name]().period for name in LINKS if name != "trace"}
    assert {name: period for name, period in found.items() if period} == {
        "staircase": 100, "sine": 100, "interleaved": 100, "fedawe": 20,
    }  # fmt: skip
    assert LINKS["staircase"](levels=[1.0, 0.5, 0.2], every=7).period == 21
    assert LINKS["staircase"](levels=[0.5, 0.5], every=7).period is None
    assert LINKS["staircase"](every=np.int64(20)).period == 40
    assert LINKS["fedawe"](dynamics="stationary").period is None
    assert LINKS["silence"](every=150).period == 150


@pytest.mark.parametrize("period", [0, -3, 2.5, True, "4"])
def test_a_period_is_a_number_of_rounds(period: object) -> None:
    with pytest.raises(ConfigError, match=r"^period must be a whole number of rounds, at least 1, got "):
        from_probability(lambda setting: np.ones(setting.clients), period=period)


# By hand, for a period of 40: every 40 rounds sees one phase, every 20 two that are half a period apart; tests in the
# last 20 rounds leave a stretch of 21 between the last phase and the first, those in the last 21 one of 20.
@pytest.mark.parametrize(
    ("every", "pairs", "last", "seen"),
    [
        (40, False, 100, False),
        (40, True, 100, False),
        (20, False, 100, True),
        (20, False, 20, False),
        (10, True, 20, False),
        (10, True, 31, True),
        (25, True, 100, True),
        (1, False, 20, False),
        (1, False, 21, True),
    ],
)
def test_which_schedules_see_a_whole_period(every: int, pairs: bool, last: int, seen: bool) -> None:
    note = unseen_phases("uplink", 40, Evaluation(every=every, pairs=pairs, last=last), 400)
    assert (note == "") == seen
    assert unseen_phases("uplink", None, Evaluation(every=every), 400) == ""
    # In a run that is shorter than the period nothing could be done about it.
    assert unseen_phases("uplink", 40, Evaluation(every=every), 39) == ""


@given(
    period=st.integers(1, 60),
    every=st.integers(1, 50),
    last=st.integers(1, 200),
    last_every=st.integers(0, 50),
    rounds=st.integers(1, 300),
    pairs=st.booleans(),
)
# One test is enough, the one before it of its pair included.
@example(period=4, every=12, last=22, last_every=0, rounds=93, pairs=True)
def test_no_two_tested_phases_are_more_than_half_a_period_apart(
    period: int, every: int, last: int, last_every: int, rounds: int, pairs: bool
) -> None:
    """Against a look at every round."""
    evaluation = Evaluation(every=every, pairs=pairs, last=last, last_every=last_every)
    counted = range(max(1, rounds - last + 1), rounds + 1)
    phases = {done % period for done in counted if evaluation.is_due(done, rounds)}
    gaps = [next(d for d in range(1, period + 1) if (phase + d) % period in phases) for phase in phases]
    expected = 2 <= period <= rounds and max(gaps) > period / 2
    assert bool(unseen_phases("uplink", period, evaluation, rounds)) == expected


def test_long_runs_are_judged_at_once() -> None:
    """Every round of a billion would take minutes."""
    huge = 10**9
    assert unseen_phases("uplink", 40, Evaluation(every=40, last=huge), huge) != ""
    assert unseen_phases("uplink", 40, Evaluation(every=3, last=huge), huge) == ""
    assert unseen_phases("uplink", huge - 1, Evaluation(every=1, last=huge), huge) == ""
    assert unseen_phases("uplink", huge - 1, Evaluation(every=10**6, last=100), huge) != ""
    assert unseen_phases("uplink", 10**6, Evaluation(every=1, last=20_000), 10**7) != ""


def test_the_remedy_that_is_named_helps() -> None:
    note = unseen_phases("downlink", 20, Evaluation(every=20, pairs=True, last=100), 2000)
    assert note == (
        "the tests that count, those in the last 100 rounds, leave out 18 rounds in a row "
        "of the downlink's period of 20; "
        "evaluation.last_every = 17 would spread them over it"
    )
    assert (
        unseen_phases("downlink", 20, Evaluation(every=20, pairs=True, last=100, last_every=17), 2000) == ""
    )
    short = unseen_phases("uplink", 40, Evaluation(every=10, last=10), 60)
    assert short.endswith("; evaluation.last must be at least 40 to see all of it")
    assert unseen_phases("uplink", 40, Evaluation(every=10, last=40), 60) == ""
    # Tests that are further apart than the period is long.
    assert unseen_phases("uplink", 4, Evaluation(every=1000, last=8), 8).endswith(
        "evaluation.last_every = 1 would spread them over it"
    )


def test_reproduce_tells_which_cases(tmp_path: Path) -> None:
    waves = "[set]\nrounds = 8\nevaluation = { every = 8, last = 8 }\n\n[axes.link]\nstill = {}\n"
    waves += 'wave = { uplink = { name = "sine", period = 4 } }\n'
    folder = write(tmp_path / "files", mine=f'title = "t"\nclaim = "c"\nbase = "base.toml"\n{waves}')
    (folder / "base.toml").write_text(
        'clients = 5\narms = ["drop"]\n[model]\nname = "mlp"\nhidden = [4]\n[engine]\ndevice = "cpu"\n'
    )
    command = ["reproduce", "mine", "--from", str(folder), "--out", str(tmp_path / "out"), "--seeds", "1"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert (
        "note: mine (wave): the tests that count, those in the last 8 rounds, leave out 3 rounds in a row of "
        "the uplink's period of 4; " in done.stderr
    )
