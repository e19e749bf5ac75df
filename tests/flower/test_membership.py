"""Clients that come, go, come back as others, and are more than before; and those who claim to be others."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

from dataclasses import replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flower.kit import Loopback, good_app, lines_of, net, train_a_bit
from safari.aggregation import RULES, Server
from safari.config import Plug
from safari.engine.parts import rule_of
from safari.errors import RunError
from safari.federation import cleared, init
from safari.flower import SafariStrategy
from safari.flower.roster import Roster
from safari.flower.rule_state import grown
from safari.flower.selection import select
from safari.seeds import generator


def plain_app(message, context) -> Message:
    """A client of FedAvg, which gives no name."""
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    metrics = train_a_bit(model, message, context)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


def start(folder, nodes: dict[int, object], rounds: int, clients: int = 4, **options) -> SafariStrategy:
    """A process of its own, as far as the strategy can tell; nodes with their names."""
    app = options.pop("app", None) or good_app()
    grid = Loopback(dict.fromkeys(nodes, app), {n: {"safari-id": name} for n, name in nodes.items()})
    strategy = SafariStrategy(net(), clients, run=folder, **options)
    strategy.start(grid, num_rounds=rounds, timeout=0.1)
    return strategy


NAMES = {10: "a", 20: "b", 30: "c", 40: "d"}


# --- a cohort


def test_a_restart_with_new_ids_goes_on_with_its_cohort(tmp_path):
    config = {"cohort": 2}
    start(tmp_path, NAMES, 4, config=config)
    start(tmp_path, {node + 1000: name for node, name in NAMES.items()}, 9, config=config)
    lines = lines_of(tmp_path)
    assert [len(line["arrived"]) for line in lines] == [2] * 9
    assert all(not line["missing"] and not line["lost"] for line in lines)
    assert {seat for line in lines[4:] for seat in line["arrived"]} == {0, 1, 2, 3}


def test_a_client_that_comes_back_with_another_id_is_drawn_again(tmp_path):
    config = {"cohort": 2}
    first = start(tmp_path, NAMES, 4, config=config)
    seat = first.roster.names["d"]
    start(tmp_path, {10: "a", 20: "b", 30: "c", 77: "d"}, 10, config=config)
    later = lines_of(tmp_path)[4:]
    assert any(line["nodes"].get(str(seat)) == "77" and seat in line["arrived"] for line in later)
    assert all(len(line["arrived"]) == 2 for line in later)


def test_as_many_as_wanted_are_asked_however_many_are_away():
    roster = Roster(100)
    for i in range(100):
        roster = roster.admit(i, f"{i}", 0)
    away = 0
    for t in range(1, 40):
        found = select(roster, range(10), t, cohort=5, rng=generator(0, "cohort", t))
        assert len(found.nodes) == 5
        assert set(found.absent) <= set(range(10, 100))
        away += len(found.absent)
    # Nine of ten are away: of each ten that are drawn, nine are missing.
    assert 6 < away / (39 * 5) < 12
    later = select(roster, range(10), 40, cohort=5, patience=20, rng=generator(0, "cohort", 40))
    assert (len(later.nodes), later.absent) == (5, ())


# --- seats


def test_a_replaced_device_gets_the_seat_after_patience(tmp_path):
    start(tmp_path, {10: "a", 20: "b", 30: "c"}, 3, clients=3, patience=2)
    strategy = start(tmp_path, {10: "a", 20: "b", 99: "new"}, 7, clients=3, patience=2)
    lines = lines_of(tmp_path)
    assert [line["arrived"] for line in lines[3:]] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert "client 'new' is one too many: clients is 3" in lines[3]["ignored"][0]
    assert strategy.roster.names == {"a": 0, "b": 1, "new": 2}
    assert lines[5]["nodes"]["2"] == "99"


def test_what_the_rule_learnt_of_a_seats_former_owner_is_forgotten():
    config = {"pruning": {"sparsity": 0.0}}
    strategy = SafariStrategy(net(), 2, "safari", config=config, patience=0)
    apps = dict.fromkeys((10, 20), good_app())
    strategy.start(
        Loopback(apps, {10: {"safari-id": "a"}, 20: {"safari-id": "b"}}), num_rounds=1, timeout=0.1
    )
    assert bool(strategy.server.state["similarity"].isfinite().all())
    grid = Loopback({20: good_app(), 99: lambda message, context: None}, {20: {"safari-id": "renamed"}})
    messages = list(strategy.configure_train(2, ArrayRecord(), ConfigRecord(), grid))
    grid.push_messages(messages)
    replies = [r for m in messages for r in grid.pull_messages([m.metadata.message_id])]
    strategy.aggregate_train(2, replies)
    assert strategy.roster.names == {"a": 0, "renamed": 1}
    assert strategy.server.state["similarity"].isnan().tolist() == [[False, True], [True, False]]


def test_clients_may_become_more_when_a_run_goes_on(tmp_path):
    start(tmp_path, {10: "a", 20: "b", 30: "c"}, 2, clients=3)
    strategy = start(tmp_path, NAMES, 4, clients=4)
    lines = lines_of(tmp_path)
    assert [line["arrived"] for line in lines] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert strategy.server.state["similarity"].shape == (4, 4)
    assert start(tmp_path, NAMES, 5, clients=4).config.clients == 4
    with pytest.raises(RunError, match=r"clients was 4 and is 3: a run's clients can become more, not fewer"):
        start(tmp_path, NAMES, 6, clients=3)


CHANGING = [name for name in RULES if not rule_of(Plug(name)).overrides_network]


@pytest.mark.parametrize("rule", CHANGING)
def test_every_rules_state_grows_and_forgets(rule):
    def played(clients: int, rounds: int, seats: int) -> Server:
        server = Server.start(torch.zeros(6), clients, rule_of(Plug(rule)))
        g = torch.Generator().manual_seed(1)
        for _ in range(rounds):
            server, _ = server.step({i: torch.randn(6, generator=g) for i in range(seats)}, range(seats))
        return server

    small, large = played(3, 4, 3), Server.start(torch.zeros(6), 5, rule_of(Plug(rule)))
    wide = grown(Server(**{**vars(large), "state": small.state, "model": small.model, "round": 4}), 5)
    for name, tensor in large.state.items():
        assert wide.state[name].shape == tensor.shape
    # As if the two new ones had been there from the start, and never asked.
    never_asked = played(5, 4, 3)
    for name, tensor in never_asked.state.items():
        # Which cluster a client is in depends on how many clients there are; products of matrices may be rounded
        # differently where one has more rows.
        if rule != "cluster-fedvarp":
            torch.testing.assert_close(wide.state[name], tensor, rtol=1e-5, atol=1e-6, equal_nan=True)
    step = {i: torch.ones(6) for i in range(5)}
    assert bool(torch.isfinite(wide.step(step)[0].model).all())
    fed = replace(SafariStrategy(net(), 3, rule)._fed, model=torch.zeros(6))
    known = fed.after(init(fed), small)
    known = known.put("gate", {**known["gate"], "beside.variate": torch.ones(3)})
    empty = cleared(fed, known, [1])
    for name, tensor in init(fed)["rule"].items():
        if tensor.ndim and tensor.shape[0] == 3:
            assert torch.equal(empty["rule"][name][1].nan_to_num(-9), tensor[1].nan_to_num(-9)), name
            assert torch.equal(empty["rule"][name][0].reshape(-1)[:1], small.state[name][0].reshape(-1)[:1])
    # What is usual of a client, as the update filter knows it, is not the next one's.
    for norms in empty["gate"].values():
        assert norms.reshape(3, -1).isnan().any(1).tolist() == [False, True, False]
    assert cleared(fed, known, []) is known


def test_clients_without_names_that_are_started_twice_are_refused_with_a_reason(tmp_path):
    options = {"download": "dense", "clients": 3, "app": plain_app, "rule": "safari+"}
    start(tmp_path, {1: "-", 2: "-", 3: "-"}, 2, **options)
    before = {p: p.read_bytes() for p in tmp_path.rglob("rounds.jsonl")}
    again = {101: "-", 102: "-", 103: "-"}
    with pytest.raises(RunError) as told:
        start(tmp_path, again, 4, **options)
    assert str(told.value) == (
        f"{tmp_path} is a run of the clients 'node-1', 'node-2', 'node-3', of whom none has answered. "
        "'node-101', 'node-102', 'node-103' have, and there is no seat for them. Names last where nodes have "
        "a safari-id or a partition-id. Choose another run, raise clients, or give the seats away with "
        "patience=0"
    )
    assert {p: p.read_bytes() for p in tmp_path.rglob("rounds.jsonl")} == before
    start(tmp_path, again, 4, patience=0, **options)
    assert [line["arrived"] for line in lines_of(tmp_path)] == [[0, 1, 2]] * 4


# --- names


def test_a_known_node_cannot_take_anothers_name(tmp_path):
    grid = Loopback(dict.fromkeys(NAMES, good_app()), {n: {"safari-id": name} for n, name in NAMES.items()})
    strategy = SafariStrategy(net(), 4, run=tmp_path)
    strategy.start(grid, num_rounds=1, timeout=0.1)
    # b claims to be a, whether a answers or not.
    grid.configs[20] = {"safari-id": "a"}
    strategy.start(grid, num_rounds=2, timeout=0.1)
    grid.apps[10] = None
    strategy.start(grid, num_rounds=3, timeout=0.1)
    grid.online = [20, 30, 40]
    strategy.start(grid, num_rounds=4, timeout=0.1)
    lines = lines_of(tmp_path)
    assert [line["arrived"] for line in lines] == [[0, 1, 2, 3], [0, 2, 3], [2, 3], [2, 3]]
    words = "client 'a' is node 10; this node is client 'b'"
    assert [line["refused"] for line in lines[1:]] == [{"1": words}] * 3
    assert strategy.roster.nodes == NAMES


def test_a_client_that_changes_its_name_fills_no_seats(tmp_path):
    grid = Loopback(dict.fromkeys([10, 20], good_app()), {10: {"safari-id": "a"}, 20: {"safari-id": "b"}})
    strategy = SafariStrategy(net(), 4, run=tmp_path)
    for t in range(6):
        grid.configs[20] = {"safari-id": f"name {t}"}
        strategy.start(grid, num_rounds=t + 1, timeout=0.1)
    assert strategy.roster.names == {"a": 0, "name 2": 1}
    lines = lines_of(tmp_path)
    assert [line["arrived"] for line in lines] == [[0, 1]] * 3 + [[0]] * 3
    assert lines[3]["reasons"] == {"1": "client 'name 3': the node has had 3 names and stays 'name 2'"}
    # A newcomer finds room.
    start(tmp_path, {10: "a", 30: "c", 40: "d"}, 7)
    assert len(lines_of(tmp_path)[-1]["arrived"]) == 3
