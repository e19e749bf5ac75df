"""Loss on demand draws what our own engines draw, whoever asks and in whatever order."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower.kit import Loopback
from safari.errors import ConfigError, SafariError
from safari.flower import lossy
from safari.flower.link_mod import LinkSchedule
from safari.flower.protocol import DOWNLINK_LOST, UPLINK_LOST
from safari.links import LINKS, Link, Setting
from safari.seeds import generator

CLIENTS = 4


def truth(name: str, options: dict, direction: str, rounds: int, counts=None) -> list[list[bool]]:
    """What an engine would draw."""
    link = LINKS[name](**options)
    counts = np.zeros((CLIENTS, 1), int) if counts is None else counts
    state = link.init(Setting(CLIENTS, counts, generator(7, direction)))
    found = []
    for t in range(rounds):
        delivered, state = link.apply(state, t, generator(7, direction, t))
        found.append(delivered.tolist())
    return found


def ask(mod, client: int, round: int, kind: str = "train") -> tuple[Message, bool]:
    """The mod's answer, and whether the app was called."""
    Loopback({})
    called = []

    def app(message, context):
        called.append(True)
        return Message(RecordDict(), reply_to=message)

    content = RecordDict({"config": ConfigRecord({"server-round": round})})
    context = Context(1, 5, {"partition-id": client, "num-partitions": CLIENTS}, RecordDict(), {})
    return mod(Message(content, 5, kind), context, app), bool(called)


@pytest.mark.parametrize(
    ("name", "options"), [("bernoulli", {"p": [0.2, 0.8]}), ("gilbert-elliott", {"p": 0.5, "burst": 3.0})]
)
def test_arrivals_are_those_of_the_engine(name, options):
    up, down = truth(name, options, "uplink", 12), truth("bernoulli", {"p": 0.7}, "downlink", 12)
    mod = lossy(name, "bernoulli", seed=7, uplink_options=options, downlink_options={"p": 0.7})
    for t in (11, 0, 5, 3):
        for client in range(CLIENTS):
            reply, called = ask(mod, client, t + 1)
            assert called == down[t][client]
            code = reply.error.code if reply.has_error() else None
            assert code == (DOWNLINK_LOST if not down[t][client] else None if up[t][client] else UPLINK_LOST)


def test_rounds_in_order_cost_one_step_each():
    steps = []
    inner = LINKS["gilbert-elliott"](p=0.5, burst=3.0)

    def apply(state, t, rng):
        steps.append(t)
        return inner.apply(state, t, rng)

    expected = truth("gilbert-elliott", {"p": 0.5, "burst": 3.0}, "uplink", 40)
    schedule = LinkSchedule(Link(inner.init, apply), "uplink", CLIENTS, 7)
    for t in range(40):
        for _ in range(CLIENTS):
            found = schedule.delivered(t)
            assert found.tolist() == expected[t]
            found[:] = False  # the caller's own copy
    assert steps == list(range(40))
    assert schedule.delivered(7).tolist() == expected[7]
    assert steps[40:] == list(range(8))
    # What was asked before is no part of what a schedule is.
    assert schedule == LinkSchedule(schedule.link, "uplink", CLIENTS, 7)


def test_a_mod_can_be_sent_to_another_process_after_use():
    cloudpickle = pytest.importorskip("cloudpickle")
    mod = lossy("gilbert-elliott", seed=7, uplink_options={"p": 0.5, "burst": 3.0})
    ask(mod, 0, 4)
    other = cloudpickle.loads(cloudpickle.dumps(mod))
    for client in range(CLIENTS):
        for t in (6, 9):
            assert ask(mod, client, t)[0].has_error() == ask(other, client, t)[0].has_error()


def test_other_messages_are_never_lost():
    reply, called = ask(lossy("lost", "lost"), 0, 1, "evaluate")
    assert called
    assert not reply.has_error()


def test_a_link_by_labels_gets_its_counts():
    counts = np.array([[9, 1], [1, 9], [5, 5], [0, 9]])
    mod = lossy("labels", seed=7, uplink_options={"p": [0.0, 1.0]}, label_counts=counts)
    assert [not ask(mod, client, 1)[0].has_error() for client in range(CLIENTS)] == truth(
        "labels", {"p": [0.0, 1.0]}, "uplink", 1, counts
    )[0]
    with pytest.raises(SafariError, match="uplink: the link labels needs label_counts"):
        lossy("labels")


def test_what_is_wrong_is_named():
    with pytest.raises(SafariError, match="did you mean 'bernoulli'"):
        lossy("bernouli")
    with pytest.raises(SafariError, match=r"uplink\.q is not an option"):
        lossy("bernoulli", uplink_options={"q": 1})
    context = Context(1, 5, {}, RecordDict(), {})
    Loopback({})
    with pytest.raises(SafariError, match="needs whole numbers partition-id and num-partitions"):
        lossy()(Message(RecordDict(), 5, "train"), context, None)
    context.node_config = {"partition-id": 0, "num-partitions": 2}
    with pytest.raises(SafariError, match="lossy needs server-round in the message's config"):
        lossy()(Message(RecordDict(), 5, "train"), context, None)


def test_a_link_of_the_users_that_says_something_else_than_who_got_through_is_named():
    """Probabilities instead of bools would deliver everything."""
    link = Link(lambda setting: {}, lambda state, t, rng: (np.full(CLIENTS, 0.3), state))
    with pytest.raises(ConfigError, match=r"^uplink: apply must return .* a bool array .* 4 clients; got"):
        ask(lossy(link), 0, 1)
