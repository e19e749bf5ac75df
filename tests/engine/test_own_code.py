"""Links, rules and pruners that are wrong: each is one line with its field and name, before a folder is made
where a first round would show it, and as soon as it shows where not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import safari
from engine.kit import SMALL, world_of
from safari.config import parse
from safari.engine import ENGINES, check
from safari.errors import ConfigError, DataError
from safari.hosting import sheltered
from safari.plugins import check_call
from safari.runs import RunFolder

BAD = """
import numpy as np
import torch
import safari
from safari.errors import ConfigError, PruneError
from dataclasses import replace
from safari.links import Link, from_probability
from safari.tasks import classification, with_metric
from safari.training import ClientAlgorithm, ServerHalf

def _link(apply, state=None):
    return Link(lambda setting: {} if state is None else state, apply)

def _all(state, t, rng):
    return np.ones(5, bool), state

def short():
    return _link(lambda state, t, rng: (np.ones(3, bool), state))

def halves():
    return _link(lambda state, t, rng: (np.ones(5) * 0.5, state))

def listed():
    return _link(lambda state, t, rng: ([True] * 5, state))

def alone():
    return _link(lambda state, t, rng: np.ones(5, bool))

def nothing():
    return _link(lambda state, t, rng: None)

def stateless():
    return _link(lambda state, t, rng: (np.ones(5, bool), None))

def raises():
    return _link(lambda state, t, rng: (state["nix"], state))

def first_state():
    return _link(_all, [1])

def scalar_state():
    return _link(_all, {"n": 1.0})

def word_state():
    return _link(_all, {"n": np.array(["a"])})

def positional(p):
    return _link(_all)

def at_once():
    raise ValueError("on\\ntwo lines")

def twice():
    return from_probability(lambda setting: np.full(setting.clients, 2.0))

def polite():
    raise ConfigError("p must be nice, got 3")

def late():
    def apply(state, t, rng):
        if t == 2:
            raise LookupError("too late")
        return np.ones(5, bool), state
    return _link(apply)

def late_halves():
    return _link(lambda state, t, rng: (np.ones(5) * 0.5 if t == 2 else np.ones(5, bool), state))

def backwards():
    return _link(lambda state, t, rng: (np.ones(5, bool), {"n": state["n"][::-1]}), {"n": np.arange(3)})

def _rule(apply, state=None):
    return safari.Compensation(lambda clients, size, device: {} if state is None else state, apply)

def _mean(state, round):
    return safari.Decision(round.weights[round.present]), state

def rule_long():
    return _rule(lambda state, round: (safari.Decision(torch.ones(77)), state))

def rule_nan():
    return _rule(lambda state, round: (safari.Decision(round.weights[round.present] * float("nan")), state))

def rule_none():
    return _rule(lambda state, round: None)

def rule_raises():
    return _rule(lambda state, round: 1 / 0)

def rule_refuses():
    def apply(state, round):
        raise safari.SafariError("no such round")
    return _rule(apply)

def rule_state():
    return _rule(_mean, {"a": 1})

def rule_init():
    return safari.Compensation(lambda clients: {}, _mean)

def rule_late():
    def apply(state, round):
        weights = round.weights[round.present]
        return safari.Decision(weights * float("inf") if round.number == 2 else weights), state
    return _rule(apply)

def rule_tensor_ids():
    def apply(state, round):
        names = {np.int64(j): (round.arrived[0],) for j in round.missing.tolist()}
        return safari.Decision(round.weights[round.present], stand_ins=names), state
    return _rule(apply)

def _server(apply):
    return ClientAlgorithm(server=ServerHalf(lambda clients, size, device: {"c": torch.zeros(size)}, dict, apply))

def _keeping(finish):
    return ClientAlgorithm(init=lambda clients, size, device: {"c": torch.zeros(clients, size)}, finish=finish)

def client_short():
    return ClientAlgorithm(direction=lambda gradient, local: (gradient[:, :3], local.state))

def client_alone():
    return ClientAlgorithm(direction=lambda gradient, local: gradient)

def client_raises():
    return ClientAlgorithm(direction=lambda gradient, local: 2 / 0)

def client_begin():
    return ClientAlgorithm(begin=lambda start, state, down: None)

def client_loss():
    return ClientAlgorithm(loss=lambda outputs, labels, known, task: 3)

def client_finish():
    return ClientAlgorithm(finish=lambda local: None)

def client_up():
    return ClientAlgorithm(finish=lambda local: ({}, {"v": torch.zeros(len(local.model))}))

def client_send():
    return ClientAlgorithm(send=lambda local: local.model[0])

def client_scaled():
    return ClientAlgorithm(scaled=lambda down: 1.0)

def client_init():
    return ClientAlgorithm(init=lambda clients, size, device: {"c": torch.zeros(size)})

def client_labels():
    def finish(local):
        common = local.known.label_counts.argmax(1, keepdim=True)
        return {**local.state, "step": torch.zeros(())}, {"label": common.float()}
    return ClientAlgorithm(finish=finish, sends=lambda parameters: {"label": 1}, counts_labels=True)

def client_sends():
    return ClientAlgorithm(finish=lambda local: (local.state, {"v": local.model[:, :2]}))

def client_sizes():
    return ClientAlgorithm(finish=lambda local: (local.state, {}), sends=lambda parameters: ["v"])

def client_forgets():
    return _keeping(lambda local: ({}, {}))

def client_shrinks():
    return _keeping(lambda local: ({"c": local.state["c"][:, :2]}, {}))

def client_server():
    return _server(lambda state, step, up, round: (step[:3], state))

def client_server_up():
    return _server(lambda state, step, up, round: (step + up["c"], state))

def _task(**parts):
    return replace(classification(), **parts)

def _metric(values):
    return with_metric(classification(), "sure", values)

def task_loss():
    return _task(loss=lambda outputs, labels: torch.zeros(()))

def task_loss_raises():
    return _task(loss=lambda outputs, labels: outputs.loss)

def task_measure():
    return _task(measure=lambda outputs, labels: outputs.argmax(1) == labels)

def task_measure_row():
    return _task(measure=lambda outputs, labels: {"top1": outputs.argmax(1) == labels})

def task_score():
    return _task(measure=lambda outputs, labels: {"top5": 1.0})

def task_metric():
    return _metric(lambda outputs, labels: outputs.softmax(1))

def task_metric_list():
    return _metric(lambda outputs, labels: [1.0])

def task_plain_numbers():
    return _task(measure=lambda outputs, labels: {"top1": 1, "loss": np.float32(2)})

def scores_none(module, batch, generator):
    pass

def scores_few(module, batch, generator):
    return {}

def scores_raise(module, batch, generator):
    raise KeyError("no")

def scores_refuse(module, batch, generator):
    raise PruneError("too hard")

def scores_two(module, batch):
    return {}
"""


def at(code):
    """Where a message says that this line of the file is."""
    (line,) = [number for number, text in enumerate(BAD.splitlines(), 1) if code in text]
    return f"(bad.py, line {line})"


DELIVERED = (
    ": apply must return (delivered, state), delivered being a bool array with an entry "
    "for each of the 5 clients"
)
ARRAYS = ": the state that init returns must hold numpy arrays of numbers by name"
LINKS = {
    "short": f"{DELIVERED}; got an array of bool and shape [3]",
    "halves": f"{DELIVERED}; got an array of float64 and shape [5]",
    "listed": f"{DELIVERED}; got a list",
    "alone": f"{DELIVERED}; got an array of bool and shape [5], not a pair",
    "nothing": f"{DELIVERED}; got None, not a pair",
    "stateless": ": the state that apply returns must be a dict, got None",
    "raises": f" raised KeyError: 'nix' {at('nix')}",
    "first_state": ": the state that init returns must be a dict, got a list",
    "scalar_state": f"{ARRAYS}, got a float as 'n'",
    "word_state": f"{ARRAYS}, got an array of <U1 and shape [1] as 'n'",
    "positional": " must take no arguments by position, and options by name alone, "
    "as in def positional(*, p); missing a required argument: 'p'",
    "at_once": f" raised ValueError: on two lines {at('two lines')}",
    "twice": ": the probability of client 0 must lie between 0 and 1, got 2.0 at the start",
    "polite": ": p must be nice, got 3",
}
RULES = {
    "rule_long": "arms: bad.py:rule_long: a must be a tensor on cpu with a weight for each of the 5 "
    "arrivals, got a tensor of shape [77], torch.float32 on cpu",
    "rule_nan": "arms: bad.py:rule_nan: weights a must be finite, got 5 numbers NaN or infinite in round 0",
    "rule_none": "arms: bad.py:rule_none: apply must return (Decision, state), got None",
    "rule_raises": f"arms: bad.py:rule_raises raised ZeroDivisionError: division by zero {at('1 / 0')}",
    "rule_refuses": "arms: bad.py:rule_refuses: no such round",
    "rule_state": "arms: bad.py:rule_state: the state that init returns must hold tensors by name, "
    "got an int as 'a'",
}
PRUNERS = {
    "scores_none": ": the pruner must return a dict of scores by parameter, got None",
    "scores_few": ": the pruner gave no score for 1.weight",
    "scores_raise": f" raised KeyError: 'no' {at('KeyError')}",
    "scores_refuse": ": too hard",
}
CLIENTS = {
    "client_short": ": direction must return a tensor of shape [1, 610], got a tensor of shape [1, 3]",
    "client_alone": ": direction must return (direction, state), got a tensor of shape [1, 610]",
    "client_raises": f" raised ZeroDivisionError: division by zero {at('2 / 0')}",
    "client_begin": ": begin must return a tensor of shape [1, 610], got None",
    "client_loss": ": loss must return a tensor of shape [1, 8], got an int",
    "client_finish": ": finish must return (state, up), got None",
    "client_up": ": what finish sends up must have a row of numbers for each client that it is called for, 1 here, "
    "got a tensor of shape [1] as 'v'",
    "client_send": ": send must return a tensor of shape [1, 610], got a tensor of shape [610]",
    "client_sends": ": sends must declare the vectors that finish sends up, {'v': 2}, got none",
    "client_sizes": ": sends must return the sizes of vectors by name, got ['v']",
    "client_scaled": ": scaled must return a Scaled, got a float",
    "client_init": ": the state that init returns must have a row for each client that it is called for, 1 here, "
    "got a tensor of shape [610] as 'c'",
    "client_forgets": " must give back the state 'c' of shape [1, 610], a row for each client, left it out",
    "client_shrinks": " must give back the state 'c' of shape [1, 610], a row for each client, "
    "gave it a shape of [1, 2]",
    "client_server": ": the server's apply must return a tensor of shape [610], got a tensor of shape [3]",
    "client_server_up": f" raised KeyError: 'c' {at('step + up')}",
}

TASKS = {
    "task_loss": ": loss must return a number a sample, a tensor of shape [2], got a tensor of shape []",
    "task_loss_raises": " raised AttributeError: 'Tensor' object has no attribute 'loss' "
    + at("outputs.loss"),
    "task_measure": ": measure must return a dict of sums over the batch, got a tensor of shape [2]",
    "task_measure_row": ": measure must return one number a name, the sum over the batch, "
    "got a tensor of shape [2] as 'top1'",
    "task_metric": ": metric sure must be a tensor with a number a sample, shape [2], or their sum; "
    "got shape [2, 10]",
    "task_metric_list": ": metric sure must be a tensor with a number a sample, shape [2], or their sum; "
    "got list",
}


@pytest.fixture
def bad(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    return {**SMALL, "rounds": 3, "arms": ["drop"], "uplink": {"name": "perfect"}}


def told(config, message):
    """By `validate` and by `run`, which makes no folder."""
    parsed = parse(config)
    assert check(parsed) == [message]
    with pytest.raises(ConfigError) as error:
        safari.run(parsed, "run")
    assert str(error.value) == message
    assert not Path("run").exists()


@pytest.mark.parametrize("direction", ["uplink", "downlink"])
@pytest.mark.parametrize("name", LINKS)
def test_a_wrong_link(bad, direction, name):
    told({**bad, direction: {"name": f"bad.py:{name}"}}, f"{direction}.name: bad.py:{name}{LINKS[name]}")


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_rule(bad, name):
    told({**bad, "arms": ["drop", f"bad.py:{name}"]}, RULES[name])


@pytest.mark.parametrize("name", PRUNERS)
def test_a_wrong_pruner(bad, name):
    told({**bad, "pruning": {"pruner": f"bad.py:{name}"}}, f"pruning.pruner: bad.py:{name}{PRUNERS[name]}")


@pytest.mark.parametrize("name", CLIENTS)
def test_a_wrong_client_algorithm(bad, name):
    told({**bad, "client": {"name": f"bad.py:{name}"}}, f"client.name: bad.py:{name}{CLIENTS[name]}")


@pytest.mark.parametrize("packets", ["none", "lossy"])
def test_what_a_client_sends_up_may_depend_on_its_labels(bad, packets):
    world = {**bad, "client": {"name": "bad.py:client_labels"}, "packets": {"name": packets}}
    refused = "packets.name must be 'none' where clients send something beside their model, got 'lossy'"
    found = [problem.split(":")[0] for problem in check(parse(world))]
    assert found == ([] if packets == "none" else [refused])
    if packets == "none":
        assert dict(world_of(world).client.sends(9)) == {"label": 1}


@pytest.mark.parametrize("name", TASKS)
def test_a_wrong_task(bad, name):
    told({**bad, "task": {"name": f"bad.py:{name}"}}, f"task.name: bad.py:{name}{TASKS[name]}")


def test_a_task_whose_tests_do_not_find_its_score(bad):
    message = "task.name: classification: a test must find the score top1, got {'top5': 0.5}"
    told({**bad, "task": {"name": "bad.py:task_score"}}, message)


def test_a_task_may_measure_plain_numbers(bad):
    world = world_of({**bad, "task": {"name": "bad.py:task_plain_numbers"}, "evaluation": {"batch": 360}})
    assert world.scores(world.start, 0) == {"top1": 1 / 360, "loss": 2 / 360}


def test_functions_of_other_arguments(bad):
    (problem,) = check(parse({**bad, "arms": [{"name": "mine", "rule": "bad.py:rule_init"}]}))
    assert problem.startswith("arms: mine: bad.py:rule_init raised TypeError: ")
    assert "takes 1 positional argument but 3 were given" in problem
    (problem,) = check(parse({**bad, "pruning": {"pruner": "bad.py:scores_two"}}))
    assert problem.startswith("pruning.pruner: bad.py:scores_two raised TypeError: scores_two() takes 2 ")
    (problem,) = check(parse({**bad, "model": {"name": "bad.py:short"}}))
    assert problem == (
        "model.name: bad.py:short must take the arguments (shape, classes) by position, and options by name "
        "alone, as in def short(shape, classes, *, p=0.3); too many positional arguments"
    )
    (problem,) = check(parse({**bad, "uplink": {"name": "builtins:int"}}))
    assert problem.startswith("uplink.name: builtins:int raised ValueError: no signature found")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"uplink": {"name": "bad.py:late"}},
            f"uplink.name: bad.py:late raised LookupError: too late {at('LookupError')}",
        ),
        (
            {"downlink": {"name": "bad.py:late_halves"}},
            f"downlink.name: bad.py:late_halves{DELIVERED}; got an array of float64 and shape [5]",
        ),
        (
            {"arms": ["bad.py:rule_late"]},
            "arms: bad.py:rule_late: weights a must be finite, got 5 numbers NaN or infinite in round 2",
        ),
    ],
)
def test_errors_in_later_rounds_are_reported_when_they_occur(bad, engine, change, message):
    config = parse({**bad, **change, "engine": {**SMALL["engine"], "name": engine}})
    assert check(config) == []
    with pytest.raises(ConfigError) as error:
        safari.run(config, "run")
    assert str(error.value) == message
    arm = config.arms[0].name
    assert [r["round"] for r in RunFolder.open(Path("run")).trial(arm, 0).records()] == [1, 2]


def test_a_state_that_runs_backwards_can_be_saved(bad):
    safari.run({**bad, "uplink": {"name": "bad.py:backwards"}}, "run")
    saved = RunFolder.open(Path("run")).trial("drop", 0).load()
    assert saved is not None
    assert saved.tensors["uplink.n"].tolist() == [2, 1, 0]


def test_stand_ins_named_by_other_libraries_numbers_can_be_recorded(bad):
    safari.run({**bad, "arms": ["bad.py:rule_tensor_ids"], "uplink": {"name": "bernoulli", "p": 0.5}}, "run")
    text = (Path("run") / "trials/rule_tensor_ids/seed-0/rounds.jsonl").read_text()
    first = json.loads(text.splitlines()[0])
    assert first["stand_ins"] == {str(j): [first["arrived"][0]] for j in first["missing"]}


def test_rehearsing_changes_nothing_and_our_own_parts_are_not_wrapped(bad):
    plain = world_of(bad)
    assert plain.uplink.apply.__module__ == "safari.links.link"
    worlds = [world_of({**bad, "pruning": {"pruner": "safari.pruning.scores:snip"}}) for _ in range(2)]
    assert torch.equal(worlds[0].start, plain.start)
    assert torch.equal(worlds[0].mask(plain.start, 1, 1), worlds[1].mask(plain.start, 1, 1))
    assert np.array_equal(worlds[0].training_draw(0, 0)[0], plain.training_draw(0, 0)[0])


def test_what_a_shelter_lets_through():
    """An engine tries again with fewer clients when memory is short, and a data set's error is its own."""
    for error in (
        torch.cuda.OutOfMemoryError("full"),
        MemoryError(),
        DataError("no file"),
        KeyboardInterrupt(),
    ):

        def fail(error=error):
            raise error

        with pytest.raises(type(error)) as found:
            sheltered("here", fail)
        assert found.value is error


def test_a_call_that_fits_is_accepted():
    def model(shape, classes, *, width: int = 1): ...

    check_call("model.name: x", model, ("shape", "classes"), {"width": 2})
