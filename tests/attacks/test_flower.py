"""Hostile replies against every rule on Flower: refused in words or accepted, and the round goes on."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import json
import logging
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from flower.hostile import attacks, giants
from flower.kit import Loopback, Net, Raw, net, objects
from safari.aggregation import RULES
from safari.config import Plug
from safari.engine.parts import rule_of
from safari.flower import SafariStrategy, sparse

RULES_ON_FLOWER = [name for name in RULES if not rule_of(Plug(name)).overrides_network]
ATTACKS = attacks()
NAMES = list(ATTACKS)
HONEST, HOSTILE = (30, 70), 50
# Each rule meets one reply in this many by default, and every single one with `-m slow`.
SAMPLE = 5


def honest(message: Message, context: Context) -> Message:
    """A client without our side, which moves the model a little; without torch's training, to be fast."""
    arrays = message.content["arrays"].to_torch_state_dict()
    step = 0.01 * context.node_config["partition-id"] + 0.01
    moved = {n: t * 0.99 + step if t.is_floating_point() else t for n, t in arrays.items()}
    metrics = MetricRecord(
        {"num-examples": 16, "train_loss": 0.5, "partition-id": context.node_config["partition-id"]}
    )
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


class Hostile:
    """A node that answers as it is told, with an honest reply of our client's side to begin with."""

    def __init__(self) -> None:
        self.attack = None
        self._app = ClientApp()
        self._app.train()(
            sparse(Net)(lambda model, message, context: {"num-examples": 17, "train_loss": 1.0})
        )

    def __call__(self, message: Message, context: Context):
        return self.attack(message, self._app(message, context))


class Recording(Loopback):
    """Remembers every reply, by round and node. Only the hostile one crosses as bytes: the way of honest ones
    is tested elsewhere, and takes longer than all else."""

    def __init__(self, hostile: Hostile):
        super().__init__(dict.fromkeys(HONEST, honest) | {HOSTILE: hostile})
        self.heard: dict[tuple[int, int], tuple[str, Raw | Message]] = {}
        self.waiting: dict[str, Raw | Message] = {}

    def push_messages(self, messages):
        for message in messages:
            number, node = message.content["config"]["server-round"], message.metadata.dst_node_id
            name = f"m{len(self.heard)}"
            message.metadata.__dict__["_message_id"] = name
            self.heard[number, node] = name, self.answer(message, node)
            self.waiting[name] = self.heard[number, node][1]
        return [message.metadata.message_id for message in messages]

    def answer(self, message: Message, node: int) -> Raw | Message:
        reply = self.apps[node](message, Context(1, node, self.configs[node], RecordDict(), {}))
        if node in HONEST or isinstance(reply, Raw):
            return reply
        return Raw(reply.object_id, objects(reply))

    def pull_messages(self, message_ids):
        found = [self.waiting.pop(i) for i in list(message_ids) if i in self.waiting]
        return [
            inflate_object_from_contents(r.object_id, dict(r.objects)) if isinstance(r, Raw) else r
            for r in found
        ]


class Replaying(Recording):
    """Answers with what was recorded, which spares the clients."""

    def __init__(self, heard: dict[tuple[int, int], tuple[str, Raw | Message]]):
        super().__init__(Hostile())
        self.heard = heard

    def push_messages(self, messages):
        for message in messages:
            number = message.content["config"]["server-round"]
            name, reply = self.heard[number, message.metadata.dst_node_id]
            message.metadata.__dict__["_message_id"] = name
            self.waiting[name] = reply
        return [message.metadata.message_id for message in messages]


def play(rule: str, names: list[str], grid: Loopback, hostile: Hostile | None = None) -> dict[str, dict]:
    """A round for each attack, each from the same model and the same state of the rule; their records."""
    config = {"aggregation": {"weights": "samples"}, "pruning": {"sparsity": 0.5}}
    strategy = SafariStrategy(net(), 3, rule, config=config, download="dense")
    numbers = {name: number for number, name in enumerate(ATTACKS)}
    queue, records, first = iter(names), {}, []

    def between(number, arrays):
        if number:
            # As a run's folder would hold it.
            records[NAMES[number - 1]] = json.loads(json.dumps(dict(strategy._line), allow_nan=False))
            assert bool(torch.isfinite(strategy.server.model).all())
        else:
            first.append(strategy.state)
        following = next(queue, None)
        strategy._state = replace(first[0], round=numbers.get(following, len(numbers)))
        if hostile is not None:
            hostile.attack = ATTACKS.get(following)

    strategy.start(grid, num_rounds=len(numbers), timeout=0.01, evaluate_fn=between)
    return records


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Two hundred tracebacks a rule take longer to print than all else."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.fixture(scope="module")
def recorded(quiet) -> tuple[dict[str, dict], dict]:
    hostile = Hostile()
    grid = Recording(hostile)
    return play("safari", NAMES, grid, hostile), grid.heard


def check(records: dict[str, dict]) -> None:
    for name, record in records.items():
        seats = {int(node): int(seat) for seat, node in record["nodes"].items()}
        assert {seats[node] for node in HONEST} <= set(record["arrived"]), name
        told = [*record["reasons"].values(), *record["ignored"]]
        assert seats.get(HOSTILE) in record["arrived"] or told, name
        assert all(text and text.isprintable() and len(text) < 500 for text in told), (name, told)
        assert record["train_loss"] is None or 0 <= record["train_loss"] <= 1e12, name


def test_every_hostile_reply_is_refused_in_words_or_accepted(recorded):
    records, _ = recorded
    assert list(records) == NAMES
    check(records)


@pytest.mark.parametrize("number", range(len(RULES_ON_FLOWER)), ids=RULES_ON_FLOWER)
def test_and_so_it_is_with_every_rule(number, recorded):
    """A sample for each rule; together they are all of them, several times over."""
    chosen = NAMES[number % SAMPLE :: SAMPLE]
    records = play(RULES_ON_FLOWER[number], chosen, Replaying(recorded[1]))
    assert list(records) == chosen
    check(records)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES_ON_FLOWER)
def test_all_of_them_with_every_rule(rule, recorded):
    assert len(NAMES) >= 100
    records = play(rule, NAMES, Replaying(recorded[1]))
    assert list(records) == NAMES
    check(records)


@pytest.mark.parametrize("rule", RULES_ON_FLOWER)
def test_huge_finite_updates_stop_no_server_with_any_rule(rule):
    hostile = Hostile()
    grid = Loopback(dict.fromkeys(HONEST, honest) | {HOSTILE: hostile})
    strategy = SafariStrategy(net(), 3, rule, download="dense")
    queue = iter([*giants().values(), None])

    def between(number, arrays):
        hostile.attack = next(queue)
        assert bool(torch.isfinite(strategy.server.model).all())

    strategy.start(grid, num_rounds=len(giants()), timeout=0.01, evaluate_fn=between)


# What is accepted, by name: everything else is refused or ignored in words.
ACCEPTED = {
    "npy: a bad scalar",
    "npy: a counter of text",
    "records: many more arrays",
    "metrics: a partition below 0",
    "metrics: lists",
    "metrics: two records",
    # The reply of an honest client, of which a server looks at the content and at what it answers.
    "metadata: another node",
    "metadata: the server",
    "metadata: another kind",
    "metadata: a strange run",
}


def test_what_is_accepted_is_known(recorded):
    records, _ = recorded
    found = {
        name for name, record in records.items() if len(record["arrived"]) == 3 and not record["ignored"]
    }
    assert {name for name in found if not name.startswith("frame: flipped")} == ACCEPTED
