"""What every sampling must keep to, alone and in both engines; uniform draws what it always drew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safari
from engine.kit import SMALL, StopAfter, play, world_of
from safari.engine import engine_of
from safari.engine.reference import train
from safari.engine.state import initial
from safari.errors import ConfigError
from safari.federation import State
from safari.federation import cohort as cohort_of
from safari.runs import RunFolder
from safari.sampling import SAMPLINGS, SamplingRound
from safari.seeds import generator

CPU = torch.device("cpu")
# name -> options; a new sampling has to be put here.
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "multinomial": {},
    "clustered-size": {},
    "clustered-similarity": {"distance": "l2"},
}
WITH_SHARES = [name for name in OPTIONS if name != "uniform"]
TABLE: dict[str, Any] = {
    **SMALL,
    "rounds": 6,
    "clients": 12,
    "cohort": 4,
    "partition": {"name": "dirichlet", "alpha": 0.3},
    "aggregation": {"weights": "samples"},
    "uplink": {"name": "bernoulli", "p": 0.6},
    "evaluation": {"every": 100},
    "wire": {"every": 0},
}


def table(name: str, **more: Any) -> dict[str, Any]:
    return {**TABLE, "sampling": {"name": name, **OPTIONS[name]}, **more}


def test_the_table_is_complete() -> None:
    assert list(OPTIONS) == list(SAMPLINGS)


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_are_of_those_that_can_be_asked(name: str) -> None:
    sampling = SAMPLINGS[name](**OPTIONS[name])
    state = sampling.init(9, 5, CPU)
    weights = np.array([3.0, 0.0, 1.0, 1.0, 7.0, 2.0, 0.0, 1.0, 1.0])
    for t in range(20):
        draw, state = sampling.apply(state, SamplingRound(t, 3, weights, np.random.default_rng(t)))
        assert 1 <= len(draw.clients) <= 3
        assert all(weights[client] > 0 for client in draw.clients)
        if sampling.learn is not None:
            updates = torch.randn(len(draw.clients), 5, generator=torch.Generator().manual_seed(t))
            state = sampling.learn(state, torch.tensor(draw.clients), updates)
    assert (draw.shares is None) == (name == "uniform")


def test_uniform_draws_what_was_always_drawn() -> None:
    world = world_of({**TABLE, "cohort": 5})
    for t in range(20):
        expected = sorted(generator(world.seed, "cohort", t).choice(12, 5, replace=False).tolist())
        draw, _ = cohort_of(world.federation(), State(t, {}))
        assert list(draw.clients) == expected
        assert draw.shares is None
        assert world.cohort(t) == expected
    for cohort in (0, 12):
        assert world_of({**TABLE, "cohort": cohort}).cohort(3) == list(range(12))


@pytest.mark.parametrize("name", WITH_SHARES)
def test_the_next_model_is_the_mean_over_the_draws(name: str) -> None:
    """A client that is drawn twice trains once, and counts twice."""
    config = table(name, arms=["drop"], uplink={"name": "perfect"}, cohort=12, rounds=3)
    config["pruning"] = {"sparsity": 0.0}
    world, doubles = world_of(config), 0
    fed = world.federation(world.rules["drop"])
    state = initial(world, fed)
    engine = engine_of(world.config)(world)
    for t in range(3):
        draw, _ = cohort_of(fed, state)
        x = state.model
        models = {c: train(world, x, torch.ones_like(x, dtype=torch.bool), c, t).model for c in draw.clients}
        assert draw.shares is not None
        expected = sum(share * models[c].double() for c, share in zip(draw.clients, draw.shares, strict=True))
        doubles += sum(share > 1.5 / 12 for share in draw.shares)
        state, record, _ = engine(fed, state)
        torch.testing.assert_close(state.model.double(), expected, rtol=1e-5, atol=1e-6)
        assert record["arrived"] == list(draw.clients)
        shares = {int(client): share for client, share in record["shares"].items()}
        assert shares == dict(zip(draw.clients, draw.shares, strict=True))
    assert doubles, "no client was drawn twice: the test shows nothing"


@pytest.mark.parametrize("name", OPTIONS)
def test_both_engines_ask_the_same_clients(name: str) -> None:
    first, second = (
        list(play({**table(name), "engine": {"name": engine, "device": "cpu", "threads": 1}}))
        for engine in ("reference", "vectorised")
    )
    for (_, one, a), (_, two, b) in zip(first, second, strict=True):
        for field in ("arrived", "missing", "trained", "stand_ins"):
            assert a[field] == b[field]
        torch.testing.assert_close(one.model, two.model, rtol=1e-4, atol=1e-5)
    assert any(record["missing"] for *_, record in first)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize("name", ["clustered-similarity", "multinomial"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(name: str, engine: str, tmp_path: Path) -> None:
    config = table(name, arms=["safari"], checkpoint={"every": 1})
    config["engine"] = {"name": engine, "device": "cpu", "threads": 1}
    safari.run(config, tmp_path / "whole", progress=False, report=False)
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, tmp_path / "stopped", [StopAfter(4)], progress=False, report=False)
    safari.resume(tmp_path / "stopped", progress=False, report=False)
    saved = []
    for run in ("whole", "stopped"):
        (trial,) = RunFolder.open(tmp_path / run).trials()
        found = trial.load()
        assert found is not None
        saved.append(found.tensors)
    assert saved[0].keys() == saved[1].keys()
    assert ("sampling.updates" in saved[0]) == (name == "clustered-similarity")
    for key, tensor in saved[0].items():
        assert torch.equal(tensor.nan_to_num(), saved[1][key].nan_to_num()), key


def test_what_is_lost_leaves_the_last_update_as_it_was() -> None:
    heard: set[int] = set()
    for before, after, record in play(table("clustered-similarity")):
        arrived = set(record["arrived"])
        heard |= arrived
        old, new = before["sampling"]["updates"], after["sampling"]["updates"]
        for client in range(12):
            if client not in arrived:
                assert torch.equal(old[client], new[client])
            if client not in heard:
                assert not new[client].any()
        for client in arrived:
            assert new[client].any()
            assert not torch.equal(old[client], new[client])
    assert len(heard) < 12, "all were heard: the test shows less than it says"


def test_arms_with_samplings_of_their_own_run_side_by_side(tmp_path: Path) -> None:
    arms = [{"name": name, "rule": "drop", "set": {"sampling": {"name": name}}} for name in OPTIONS]
    both = {**TABLE, "arms": arms, "rounds": 2}
    safari.run(both, tmp_path / "all", progress=False, report=False)
    alone = {**TABLE, "arms": ["drop"], "sampling": {"name": "clustered-size"}, "rounds": 2}
    safari.run(alone, tmp_path / "alone", progress=False, report=False)
    lines = [
        (tmp_path / run / "trials" / arm / "seed-0" / "rounds.jsonl").read_text()
        for run, arm in (("all", "clustered-size"), ("alone", "drop"))
    ]
    assert lines[0] == lines[1]


OWN = '''
import torch
from safari.sampling import Draw, Sampling

def turns(*, step: int = 1):
    """In turn."""
    def apply(state, round):
        first = int(state["next"])
        there = [(first + k) % len(round.weights) for k in range(round.cohort)]
        return Draw(tuple(sorted(there))), {"next": state["next"] + step * round.cohort}
    return Sampling(apply, lambda clients, parameters, device: {"next": torch.tensor(0)})

def wrong(*, what: str = ""):
    answers = {
        "twice": Draw((1, 1)), "beyond": Draw((0, 99)), "nobody": Draw(()), "shares": Draw((0, 1), (0.9, 0.3)),
        "few": Draw((0, 1), (1.0,)),
    }
    def apply(state, round):
        if what == "raise":
            raise KeyError("oh")
        return (answers[what], {}) if what in answers else what
    return Sampling(apply)

def none():
    return None
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)


def test_a_sampling_of_ones_own(own: None) -> None:
    config = {**TABLE, "sampling": {"name": "mine.py:turns"}, "rounds": 4, "uplink": {"name": "perfect"}}
    asked = [record["arrived"] for *_, record in play(config)]
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("twice", r"clients must ascend and lie between 0 and 11, got \[1, 1\]"),
        ("beyond", r"clients must ascend and lie between 0 and 11, got \[0, 99\]"),
        ("nobody", r"clients must ascend and lie between 0 and 11, got \[\]"),
        (
            "shares",
            r"shares must be above 0, one for each of its 2 clients, and sum to 1, got \[0\.9, 0\.3\]",
        ),
        ("few", r"shares must be above 0, one for each of its 2 clients"),
        ("text", r"apply must return \(Draw, state\), got a str"),
        ("raise", r"raised KeyError: 'oh' \(mine.py, line \d+\)"),
    ],
)
def test_what_a_sampling_of_ones_own_may_not_answer(own: None, what: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sampling.name: mine.py:wrong:? .*{words}"):
        world_of({**TABLE, "sampling": {"name": "mine.py:wrong", "what": what}})


def test_what_is_no_sampling_is_named(own: None) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.name: mine\.py:none must return a Sampling, got None"):
        world_of({**TABLE, "sampling": {"name": "mine.py:none"}})
    with pytest.raises(ConfigError, match=r"sampling\.name must be one of .*did you mean 'clustered-size'"):
        world_of({**TABLE, "sampling": {"name": "clusterd-size"}})
    with pytest.raises(ConfigError, match=r"sampling\.distance must be one of arccos, l2, got 'l1'"):
        world_of({**TABLE, "sampling": {"name": "clustered-similarity", "distance": "l1"}})
