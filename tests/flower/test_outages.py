"""Rounds while nodes are away: they wait, do not count, and leave no trace in the model; and why a run ended."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import inspect
import re

import torch
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg

from flower.kit import NODES, Loopback, good_app, lines_of, net
from safari.errors import ConfigError, SafariError
from safari.flower import SafariStrategy
from safari.flower import strategy as module

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "


class Leaving(Loopback):
    """Nodes that are connected as often as `days` says, one entry a look; afterwards all of them."""

    def __init__(self, days: list[list[int]]):
        super().__init__(dict.fromkeys(NODES, good_app()))
        self.days = iter(days)

    def get_node_ids(self):
        return next(self.days, NODES)


def silent(rounds: dict[int, int], answer=lambda message: None):
    """An app that answers the first messages of some rounds with `answer`: how many, by round."""
    left = {(node, number): count for node in NODES for number, count in rounds.items()}
    app = good_app()

    def respond(message, context):
        key = context.node_id, message.content["config"]["server-round"]
        if left.get(key, 0) > 0:
            left[key] -= 1
            return answer(message)
        return app(message, context)

    return respond


def unavailable(message):
    return Message(Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable"), reply_to=message)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.01)


def test_a_round_waits_until_a_quorum_is_connected(tmp_path, caplog):
    """After the first round two of three are needed: nobody, then one, then all."""
    caplog.set_level("INFO")
    grid = Leaving([NODES, [], [], NODES[:1], NODES])
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run", quorum=2)
    strategy.start(grid, num_rounds=3, timeout=0.1)
    assert [line["arrived"] for line in lines_of(tmp_path / "run")] == [[0, 1, 2]] * 3
    assert re.search(TIME + r"waiting for 2 nodes, 0 are connected; without end", caplog.text)


@pytest.mark.parametrize(
    "answer", [lambda message: None, unavailable], ids=["silence", "the SuperLink's error"]
)
def test_a_round_in_which_no_node_answers_does_not_count(answer, tmp_path, caplog):
    apps = dict.fromkeys(NODES, silent({2: 3}, answer))
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run")
    strategy.start(Loopback(apps), num_rounds=4, timeout=0.05)
    calm = SafariStrategy(net(), 3, run=tmp_path / "calm")
    calm.start(Loopback(dict.fromkeys(NODES, good_app())), num_rounds=4, timeout=0.05)
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "calm")
    assert torch.equal(strategy.server.model, calm.server.model)
    assert len(re.findall(TIME + "round 2 does not count: none of 3 nodes answered", caplog.text)) == 3


def test_a_round_that_is_begun_again_asks_others(tmp_path):
    """The draw of its number alone would ask the one client that is away, for ever."""
    cohort = {"config": {"cohort": 1}, "give_up": 20}
    everybody = dict.fromkeys(NODES, good_app())
    SafariStrategy(net(), 3, run=tmp_path / "calm", **cohort).start(
        Loopback(everybody), num_rounds=1, timeout=0.05
    )
    (first,) = lines_of(tmp_path / "calm")[0]["nodes"].values()
    grid = Loopback({**everybody, int(first): None})
    SafariStrategy(net(), 3, run=tmp_path / "run", **cohort).start(grid, num_rounds=1, timeout=0.05)
    (line,) = lines_of(tmp_path / "run")
    assert len(line["arrived"]) == 1
    assert first not in line["nodes"].values()


def test_nodes_that_are_connected_and_never_answer_end_the_run_with_a_reason(tmp_path):
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run", give_up=3)
    grid = Loopback(dict.fromkeys(NODES, silent({2: 99})))
    with pytest.raises(SafariError) as error:
        strategy.start(grid, num_rounds=9, timeout=0.05)
    words = "3 rounds in a row brought no reply. In the last one: no reply within 0.05 s (3×)"
    assert str(error.value) == words
    assert len(lines_of(tmp_path / "run")) == 1
    failure = (tmp_path / "run" / "failure.txt").read_text()
    assert re.fullmatch(TIME[:-1] + f", after round 1: {re.escape(words)}\n", failure)
    # It is of the last process alone.
    SafariStrategy(net(), 3, run=tmp_path / "run").start(Leaving([]), num_rounds=2, timeout=0.05)
    assert not (tmp_path / "run" / "failure.txt").exists()


def test_any_other_error_is_told_in_the_run(tmp_path):
    def broken(number, arrays):
        raise ZeroDivisionError("in the \x1b[31mapp")

    with pytest.raises(ZeroDivisionError):
        SafariStrategy(net(), 3, run=tmp_path).start(Leaving([]), num_rounds=1, evaluate_fn=broken)
    assert (
        (tmp_path / "failure.txt")
        .read_text()
        .endswith(r"after round 0: ZeroDivisionError: in the \x1b[31mapp" + "\n")
    )


def test_a_run_that_goes_on_begins_with_those_that_are_there(tmp_path):
    first = SafariStrategy(net(), 3, run=tmp_path, min_nodes=3)
    first.start(Leaving([]), num_rounds=1, timeout=0.05)
    again = SafariStrategy(net(), 3, run=tmp_path, min_nodes=3, wait=0.0)
    again.start(Leaving([NODES[:2], []] + [NODES[:2]] * 3), num_rounds=2, timeout=0.05)
    assert [line["arrived"] for line in lines_of(tmp_path)] == [[0, 1, 2], [0, 2]]


def test_fedavgs_arguments_name_what_takes_their_place():
    for name in inspect.signature(FedAvg.__init__).parameters.keys() - {"self"}:
        with pytest.raises(ConfigError, match=rf"{name} is an argument of FedAvg; here: \w"):
            SafariStrategy(net(), 3, **{name: 0.5})
    with pytest.raises(ConfigError, match="there is no argument nonsense"):
        SafariStrategy(net(), 3, nonsense=1)


def test_a_quorum_lies_within_the_clients():
    with pytest.raises(ConfigError, match=r"quorum must lie between 1 and clients \(3\), got 4"):
        SafariStrategy(net(), 3, quorum=4)
