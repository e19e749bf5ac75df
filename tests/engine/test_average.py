"""The running average in a run: it changes nothing, both engines agree, and it comes back after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import safari
from engine.kit import SMALL, bit_equal_in_halves, play, world_of
from engine.test_vectorised import BASE, CNN, put
from safari.engine import rule_of, side_by_side
from safari.engine.state import initial
from safari.engine.vectorised import Vectorised
from safari.runs import RunFolder, read_checkpoint
from safari.training import evaluate

ON = {"aggregation": {"average": 0.75}}
ENGINES = ("reference", "vectorised")
# Some rounds are not evaluated.
SETTING: dict[str, Any] = put(BASE, CNN, {"rounds": 6, "evaluation": {"every": 2}})


def using(engine: str, *changes: dict[str, Any]) -> dict[str, Any]:
    return put(SETTING, {"engine": {"name": engine, "device": "cpu", "threads": 1}}, *changes)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", [{}, {"pruning": {"pruner": "snip"}}, {"wire": {"values": "step"}}])
def test_it_changes_nothing_else(engine, change):
    without, beside = (list(play(using(engine, change, more))) for more in ({}, ON))
    for (_, state, record), (_, other, told) in zip(without, beside, strict=True):
        assert torch.equal(state.model, other.model)
        assert state.average is None
        assert record["average"] is None
        assert record == {**told, "average": None}


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_the_average_of_the_models_and_the_start_has_no_part_in_it(engine):
    # Batch norm has buffers, which are averaged, too.
    found = list(play(using(engine, ON, {"model": {"name": "resnet20", "width": 2}})))
    models = [state.model.double() for _, state, _ in found]
    # The plain mean of up to 4 models; then 3/4 of the past.
    expected = torch.stack(models[:4]).mean(0)
    assert not torch.equal(models[0][-4:], models[1][-4:]), "running statistics stand at the end and move"
    for model in models[4:]:
        expected = 0.75 * expected + 0.25 * model
    average = found[-1][1].average
    assert average.shape == models[0].shape
    torch.testing.assert_close(average.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(found[0][1].average, found[0][1].model)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_record_says_is_the_test_of_that_average(engine):
    world = world_of(using(engine, ON))
    for _, state, record in play(using(engine, ON)):
        if record["round"] % 2:
            assert record["average"] is None
            continue
        world.layout.write(world.module, state.average)
        data = world.data
        expected = evaluate(world.module, data.test_x, data.test_y, 1000)
        assert set(record["average"]) == {"loss", "top1", "top5"}
        assert record["average"]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert record["average"]["top1"] == pytest.approx(expected["top1"], abs=0.003)


def test_both_engines_have_the_same_average():
    ends = [list(play(using(engine, ON, {"local": {"optimiser": "sgd"}})))[-1] for engine in ENGINES]
    (one, told), (other, also) = ((state.average, record["average"]) for _, state, record in ends)
    assert float((one - other).norm() / one.norm()) < 1e-5
    assert told == pytest.approx(also, rel=1e-3)


def test_arms_side_by_side_keep_their_own(two_threads):
    config = using("vectorised", ON, {"arms": ["perfect", "drop", "safari"]})
    engine = Vectorised(world_of(config))
    alone = []
    for arm in engine.world.config.arms:
        fed = engine.world.federation(rule_of(arm.rule))
        state = initial(engine.world, fed)
        for _ in range(3):
            state, record, _ = engine(fed, state)
        alone.append((state.average, record))
    feds = [engine.world.federation(rule_of(arm.rule)) for arm in engine.world.config.arms]
    states = [initial(engine.world, fed) for fed in feds]
    for _ in range(3):
        rounds = list(side_by_side(engine, list(zip(feds, states, strict=True))))
        states = [state for state, _, _ in rounds]
    for (average, record), (state, told, _) in zip(alone, rounds, strict=True):
        assert torch.equal(state.average, average)
        assert told == record
    assert not torch.equal(alone[0][0], alone[1][0])


def test_it_comes_back_after_a_stop_and_can_be_taken_away(tmp_path: Path):
    config = {**SMALL, **ON, "rounds": 7, "checkpoint": {"every": 3}}
    saved, records = bit_equal_in_halves(config, tmp_path, 5)
    last = [state for _, state, _ in play(config)][-1]
    assert torch.equal(saved["average"], last.average)
    assert torch.equal(saved["model"], last.model)
    assert records[-1]["average"]["top1"] is not None


def test_it_cannot_be_turned_on_or_changed_on_the_way(tmp_path: Path):
    config = {**SMALL, "rounds": 2}
    safari.run(config, tmp_path / "run")
    file = tmp_path / "run/config.toml"
    text = file.read_text()
    file.write_text(text.replace("average = 0.0", "average = 0.9"))
    with pytest.raises(
        safari.SafariError, match=r"aggregation\.average was 0\.0 and is 0\.9\. Put that back"
    ):
        safari.resume(tmp_path / "run")


def test_a_checkpoint_from_before_there_was_one_says_so(tmp_path: Path):
    safari.run({**SMALL, "rounds": 2}, tmp_path / "run")
    (trial,) = RunFolder.open(tmp_path / "run").trials()
    saved = read_checkpoint(trial.checkpoint)
    del saved.facts["config"]["aggregation"]["average"]
    trial.save(saved)
    file = tmp_path / "run/config.toml"
    safari.resume(tmp_path / "run")
    text = file.read_text().replace("rounds = 2", "rounds = 3")
    file.write_text(text.replace("average = 0.0", "average = 0.9"))
    with pytest.raises(safari.SafariError) as error:
        safari.resume(tmp_path / "run")
    assert str(error.value) == (
        f"{trial.checkpoint} holds no average of the models, and aggregation.average is 0.9. "
        "Put 0 there, or begin a new run"
    )


EVERYBODY = {
    "client": {"name": "fedawe", "mean": True},
    "arms": ["drop"],
    "local": {"optimiser": "sgd", "lr": 0.5},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("beside", [{}, ON])
def test_an_algorithm_may_have_an_average_of_its_own(engine, beside):
    """FedAWE's: the mean of what all clients hold, also where a running average is asked for."""
    config = using(engine, EVERYBODY, beside, {"model": {"name": "resnet20", "width": 2}})
    world = world_of(config)
    held = [world.start] * len(world.parts)
    parameters = world.layout.parameters
    seen = set()
    for _, state, record in play(config):
        model = state.model
        held = [model if k in record["arrived"] else old for k, old in enumerate(held)]
        seen.add(len(record["arrived"]))
        mean = torch.stack(held).double().mean(0)[:parameters]
        torch.testing.assert_close(state.average.double()[:parameters], mean, rtol=0, atol=1e-5)
        # Statistics of batch norm are no client's own.
        assert torch.equal(state.average[parameters:], model[parameters:])
        assert (record["average"] is None) == (record["top1"] is None)
    assert len(seen) > 1, "the same number arrived in every round"


@pytest.mark.parametrize("beside", [{}, ON])
def test_an_algorithms_own_average_comes_back_after_a_stop(tmp_path: Path, beside):
    config = {**SMALL, **EVERYBODY, **beside, "rounds": 7, "checkpoint": {"every": 3}}
    saved, _ = bit_equal_in_halves(config, tmp_path, 5)
    last = [state for _, state, _ in play(config)][-1]
    assert torch.equal(saved["average"], last.average)
