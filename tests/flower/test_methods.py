"""Mask policies, client algorithms and server steps: the same records on Flower as in the reference engine."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from engine.kit import world_of
from flower.kit import Loopback, Net
from flower.test_equality import SAME, TABLE
from flower.twin import grid_of, on_flower, our_loop, own_loop
from safari.config import parse
from safari.engine.reference import run_round
from safari.engine.state import State, initial
from safari.engine.world import World
from safari.errors import ConfigError, RunError, SafariError
from safari.federation import cleared, init, masks_of
from safari.flower import SafariStrategy, local_training, sparse
from safari.flower.arrays import frame_of, frame_record, with_beside
from safari.flower.protocol import DOWNLINK_LOST, UPLINK_LOST
from safari.flower.rule_state import grown_half
from safari.models import Layout
from safari.rounds.beside import wire_layout
from safari.rounds.rate import learning_rate
from safari.runs.elsewhere import decided
from safari.training.algorithms import scaffold
from safari.wire import Identity, Shared, decode, encode, reference_digest

ROUNDS = 5
POLICIES = [
    {"name": "set", "interval": 2},
    {"name": "rigl", "interval": 2},
    {"name": "sparse-momentum", "interval": 1},
    {"name": "feddst", "interval": 1},
    {"name": "fedrts", "interval": 2, "stop": 1.0},
]


def small(**tables) -> World:
    """Five rounds of six clients, of which some hear nothing and some are not heard."""
    return world_of({**TABLE, "rounds": ROUNDS, "model": {"name": "mlp", "hidden": [8]}, **tables})


def assert_same(world: World, strategy, lines, models, *, bytes_down: bool = True) -> State:
    """Flower's records, models and the server's state against the reference engine's."""
    fed = world.federation()
    state = initial(world, fed)
    for t, line in enumerate(lines):
        state, record, _ = run_round(world, fed, state)
        assert torch.equal(models[t + 1], state.model), f"round {t + 1}"
        assert {name: line[name] for name in SAME} == {name: record[name] for name in SAME}
        assert line["train_loss"] == record["train_loss"]
        assert line["bytes"]["down"] == pytest.approx(record["bytes"]["down"], abs=1e-6)
        up = record["bytes"]["up"]
        # On Flower a frame states its client, round and model, in 20 bytes. In the first round a server that has
        # no data expects another mask where clients work it out.
        worked_out = t == 0 and world.config.policy.name == "static"
        assert worked_out or line["bytes"]["up"] == (up if up is None else pytest.approx(up + 20, abs=1e-6))
    server = world.federation().server(state)
    for ours, theirs in (
        (server.step_state, strategy.server.step_state),
        (server.algorithm_state, strategy.server.algorithm_state),
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    for name, tensor in state["policy"].items():
        assert torch.equal(strategy.state["policy"][name], tensor), name
    assert 0 < sum(len(line["missing"]) for line in lines) < ROUNDS * world.config.clients
    return state


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_a_policy_gives_the_same_records_as_in_the_engine(policy, tmp_path):
    world = small(policy=policy, pruning={"pruner": "mag", "scope": "erk"}, arms=["safari"])
    strategy, lines, models = on_flower(world, own_loop(world), tmp_path / "run")
    assert_same(world, strategy, lines, models)
    assert sum(line["churn"] > 0 for line in lines) > 1
    assert len({line["density"] for line in lines if line["arrived"]}) == 1


@pytest.mark.parametrize(
    "client",
    [
        {"name": "fedprox", "mu": 0.5},
        {"name": "scaffold"},
        {"name": "calibrated"},
        {"name": "masked-loss"},
        {"name": "feddyn"},
        {"name": "fednova"},
        {"name": "dane"},
        {"name": "bvr-l-sgd"},
        {"name": "fedawe"},
        {"name": "fedpbc"},
        {"name": "mime", "strength": 1.0},
    ],
    ids=lambda client: client["name"],
)
def test_a_client_algorithm_gives_the_same_records_as_in_the_engine(client, tmp_path):
    sgd = {"optimiser": "sgd", "lr": 0.05, "schedule": "cosine"} if client["name"] == "mime" else {}
    world = small(client=client, arms=["drop"], local=TABLE["local"] | sgd)
    strategy, lines, models = on_flower(world, our_loop(world), tmp_path / "run")
    assert_same(world, strategy, lines, models)


def test_an_algorithms_own_average_is_the_engines(tmp_path):
    world = small(
        client={"name": "fedawe", "clip": 0.2, "mean": True}, arms=["drop"], aggregation={"average": 0.5}
    )
    strategy, lines, models = on_flower(world, our_loop(world), tmp_path / "run")
    state = assert_same(world, strategy, lines, models)
    assert torch.equal(strategy.server.average, state.average)
    assert not torch.equal(state.average, state.model)


def test_early_bird_waits_with_the_cut_as_in_the_engine(tmp_path):
    policy = {"name": "early-bird", "window": 2, "tolerance": 0.2}
    world = small(policy=policy, pruning={"pruner": "mag", "scope": "erk"}, arms=["safari"])
    strategy, lines, models = on_flower(world, own_loop(world), tmp_path / "run")
    assert_same(world, strategy, lines, models)
    densities = [line["density"] for line in lines if line["arrived"]]
    assert densities[0] == 1.0
    assert densities[-1] < 0.3


EVERYTHING = {
    "policy": {"name": "rigl", "interval": 1, "stop": 1.0},
    "client": {"name": "scaffold"},
    "checkpoint": {"every": 1},
    "aggregation": {"steps": [{"name": "fedadam", "lr": 0.01}], "average": 0.5},
}


class CrashError(Exception):
    """The end of a process."""


class Crashing(Loopback):
    """A grid that ends its process instead of sending the n-th round."""

    after = 3

    def push_messages(self, messages):
        messages = list(messages)
        self.after -= bool(messages)
        if not self.after:
            self.after = -1
            raise CrashError
        return super().push_messages(messages)


def test_policy_algorithm_and_server_step_together_and_after_a_crash(tmp_path):
    world = small(**EVERYTHING, arms=["safari+"])
    grid = grid_of(world, our_loop(world), Crashing)
    with pytest.raises(CrashError):
        on_flower(world, our_loop(world), tmp_path / "run", grid=grid)
    # A new process with nothing but the folder; the clients keep what they have.
    strategy, lines, models = on_flower(world, our_loop(world), tmp_path / "run", grid=grid)
    assert [line["resumed"] for line in lines] == [False, False, True, False, False]
    whole, expected, all_models = on_flower(world, our_loop(world), tmp_path / "whole")
    state = assert_same(world, whole, expected, all_models)
    assert torch.equal(strategy.server.model, state.model)
    assert torch.equal(models[ROUNDS], all_models[ROUNDS])
    for name, tensor in whole.server.step_state.items():
        assert torch.equal(strategy.server.step_state[name], tensor), name
    for name in (*SAME, "bytes"):
        assert [line[name] for line in lines] == [line[name] for line in expected]
    # Another policy is another run.
    policy = {**EVERYTHING["policy"], "interval": 3}
    other = small(**{**EVERYTHING, "policy": policy}, arms=["safari+"])
    with pytest.raises(RunError, match=r"policy\.interval was 1 and is 3"):
        on_flower(other, our_loop(other), tmp_path / "run")


@pytest.mark.parametrize("schedule", ["cubic", "wait"])
def test_schedules_and_scopes_are_worked_out_by_the_clients(schedule, tmp_path):
    pruning = {
        "pruner": "mag", "scope": "uniform", "dense": ["last"], "schedule": schedule,
        "initial": 0.2, "begin": 1, "end": 3,
    }  # fmt: skip
    world = small(pruning=pruning, arms=["mifa"])
    strategy, lines, models = on_flower(world, own_loop(world), tmp_path / "run")
    assert_same(world, strategy, lines, models)
    densities = [round(line["density"], 2) for line in lines]
    assert (densities[0], densities[-1]) == (0.8, 0.2)


def test_a_mask_travels_beside_lossy_downloads(tmp_path):
    world = small(policy={"name": "rigl", "interval": 1, "stop": 1.0}, arms=["drop"])
    _, lines, _ = on_flower(world, own_loop(world), tmp_path / "run", download="step", evaluate=True)
    assert not any(line["refused"] for line in lines)
    assert all(line["churn"] > 0 for line in lines)
    kept = {line["density"] for line in lines if line["arrived"]}
    assert len(kept) == 1
    assert lines[-1]["bytes"]["down"] < 0.4 * lines[0]["bytes"]["down"]


# --- messages that are lost on the way down, and replies made with an old mask

PERFECT = {"uplink": {"name": "perfect"}, "downlink": {"name": "perfect"}}
MOVING = {"policy": {"name": "set", "interval": 1, "stop": 1.0}}


def attacked(world, tmp_path, change, app):
    """Records and models of a run in which one client's replies are changed."""
    nodes = grid_of(world, app).apps

    def hostile(message, context):
        return change(message, nodes[17](message, context))

    grid = grid_of(world, app)
    grid.apps[17] = hostile
    return on_flower(world, app, tmp_path / "run", grid=grid)[1:]


def late(rounds, instead):
    """A client whose replies in these rounds (from 1) are others: `instead(message, its own, its last)`."""
    kept = {}

    def change(message, reply):
        number = message.content["config"]["server-round"]
        found = instead(message, reply, kept.get("last")) if number in rounds else reply
        kept["last"] = reply
        return found

    return change


def lost(message, reply, last):
    return Message(Error(UPLINK_LOST, "lost"), reply_to=message)


def again(message, reply, last):
    """The reply of the round before, which came late."""
    return Message(last.content, reply_to=message)


def test_who_missed_a_mask_gets_the_next_one_whole(tmp_path):
    world = small(**MOVING, **PERFECT, arms=["drop"])
    deaf = {node: own_loop(world) for node in grid_of(world, None).apps}
    masks = []

    def hard_of_hearing(message, context):
        number = message.content["config"]["server-round"]
        if number in (2, 3):
            return Message(Error(DOWNLINK_LOST, "lost"), reply_to=message)
        if number == 4:
            masks.append(masks_in(message, world))
        return own_loop(world)(message, context)

    grid = grid_of(world, None)
    grid.apps = {**deaf, 17: hard_of_hearing}
    _, lines, _ = on_flower(world, None, tmp_path / "run", grid=grid)
    assert [1 in line["arrived"] for line in lines] == [True, False, False, True, True]
    assert not any(line["refused"] for line in lines)
    fed = world.federation()
    state = initial(world, fed)
    assert len(masks) == 1
    assert not torch.equal(masks[0], masks_of(world.federation(), state, world.start)[0].shared)


def test_where_all_have_answered_a_mask_travels_as_what_changed(tmp_path):
    world = small(**MOVING, **PERFECT, arms=["drop"])
    forgets = []

    def forgetful(message, context):
        if message.content["config"]["server-round"] == 4:
            context.state.clear()
            forgets.append(1)
        return own_loop(world)(message, context)

    grid = grid_of(world, own_loop(world))
    _, lines, _ = on_flower(world, None, tmp_path / "run", grid=grid)
    fed = world.federation()
    state = initial(world, fed)
    for line in lines:
        state, record, _ = run_round(world, fed, state)
        assert line["bytes"]["down"] == record["bytes"]["down"]
    # A client without a memory says so once, and then gets the mask in full.
    grid = grid_of(world, own_loop(world))
    grid.apps[17] = forgetful
    _, others, _ = on_flower(world, None, tmp_path / "forgets", grid=grid)
    assert [1 in line["arrived"] for line in others] == [True, True, True, False, True]
    assert "it will get it in full" in others[3]["reasons"]["1"]
    assert others[4]["bytes"]["down"] > lines[4]["bytes"]["down"]


def masks_in(message, world) -> torch.Tensor:
    """The mask that a message announces: it needs nothing that an earlier one held."""
    return torch.from_numpy(decode(frame_of(message.content["arrays"]), wire_layout(world.layout)).mask)


@pytest.mark.parametrize("policy", ["set", "feddst"])
def test_a_reply_made_with_an_old_mask_is_as_if_it_were_lost(policy, tmp_path):
    world = small(policy={**MOVING["policy"], "name": policy}, **PERFECT, arms=["safari"])
    lines, models = attacked(world, tmp_path / "late", late((2, 4), again), own_loop(world))
    without, expected = attacked(world, tmp_path / "lost", late((2, 4), lost), own_loop(world))
    for number, (line, other) in enumerate(zip(lines, without, strict=True), 1):
        assert ("1" in line["refused"]) == (number in (2, 4))
        assert {n: line[n] for n in SAME} == {n: other[n] for n in SAME}
        assert torch.equal(models[number], expected[number])
    assert lines[1]["refused"]["1"].startswith("round must be 1, got 0")


def test_a_mask_that_was_not_announced_is_refused(tmp_path):
    world = small(**MOVING, **PERFECT, arms=["drop"])

    def other_mask(message, reply):
        """An honest reply in all but its mask, which drops a weight and keeps another."""
        config = message.content["config"]
        x = decode(frame_of(message.content["arrays"]), wire_layout(world.layout))
        mask = x.mask.copy()
        mask[np.flatnonzero(mask)[0]], mask[np.flatnonzero(~mask)[0]] = False, True
        whose = Identity("1", config["safari.round"], reference_digest(x.vector))
        shared = Shared(wire_layout(world.layout), x.vector, x.mask)
        frame = encode(np.where(mask, x.vector, np.float32(0)), mask, shared, identity=whose)
        return Message(RecordDict({**reply.content, "arrays": frame_record(frame)}), reply_to=message)

    lines, _ = attacked(world, tmp_path, other_mask, own_loop(world))
    words = "the mask must be the one that was announced, 2 weights differ"
    assert [line["refused"] for line in lines] == [{"1": words}] * ROUNDS


# --- what cannot be used is refused


def beside(**more):
    """A reply with other records beside its model; None takes one away."""

    def change(message, reply):
        if not reply.has_content():
            return reply
        arrays = {n: a for n, a in reply.content["arrays"].items() if n not in more}
        given = {n: d for n, d in more.items() if d is not None}
        record = with_beside(ArrayRecord(arrays), given)
        return Message(RecordDict({**reply.content, "arrays": record}), reply_to=message)

    return change


NAN = np.full(2, np.nan, "<f4").tobytes()


@pytest.mark.parametrize(
    ("tables", "change", "words"),
    [
        ({"policy": POLICIES[2]}, {"votes": None}, "the reply must hold votes beside its model, got none"),
        ({"policy": POLICIES[2]}, {"votes": b"abc"}, "the votes cannot be read: "),
        ({"policy": POLICIES[0]}, {"votes": b"abc"}, "the reply holds votes, and none were asked for"),
        ({}, {"vector.variate": b"abc"}, "the reply must hold nothing beside its model, got variate"),
        (
            {"client": {"name": "scaffold"}},
            {"vector.variate": None},
            "must hold variate beside its model, got nothing",
        ),
        (
            {"client": {"name": "scaffold"}},
            {"vector.variate": b""},
            "variate, beside the model, cannot be read: ",
        ),
        ({"client": {"name": "fednova"}}, {"vector.steps": b"abc"}, "1 numbers must have 4 bytes, got 3"),
        (
            {"client": {"name": "fednova"}},
            {"vector.steps": NAN[:4]},
            "1 numbers of steps are NaN or infinite",
        ),
    ],
)
def test_what_travels_beside_a_model_is_checked(tables, change, words, tmp_path):
    world = small(**{**PERFECT, "rounds": 2}, **tables, arms=["drop"])
    lines, _ = attacked(world, tmp_path, beside(**change), our_loop(world))
    assert words in lines[0]["refused"]["1"]
    assert lines[0]["arrived"] == [0, 2, 3, 4, 5]


def test_a_loop_of_ones_own_cannot_be_another_algorithm(tmp_path):
    world = small(client={"name": "scaffold"}, **PERFECT, arms=["drop"])
    with pytest.raises(
        SafariError, match=r"use safari\.flower\.local_training in the place of sparse or sparse_mod"
    ):
        on_flower(world, own_loop(world), tmp_path / "run", give_up=1)


def test_a_client_without_data_says_so(tmp_path):
    world = small(policy={"name": "feddst", "interval": 1}, **PERFECT, arms=["drop"])
    app = ClientApp()
    app.train()(
        sparse(lambda context: world.fresh_module())(lambda model, message, context: {"num-examples": 1})
    )
    lines = on_flower(world, app, tmp_path / "run", rounds=2)[1]
    assert "give inputs and labels by batch=" in lines[1]["reasons"]["0"]


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (
            {"policy": {"name": "set"}},
            {"download": "dense"},
            "policy.name must be 'static' with download='dense'",
        ),
        (
            {"client": {"name": "fedprox"}},
            {"download": "dense"},
            "client.name must be 'fedavg' with download='dense'",
        ),
        (
            {"policy": {"name": "rigl"}},
            {"upload": "dense"},
            "policy.name must be one of static, set, feddst, early-bird with",
        ),
        (
            {"client": {"name": "scaffold"}},
            {"upload": "dense"},
            "an algorithm whose clients send nothing beside their model with upload='dense', got 'scaffold', whose "
            "clients send variate",
        ),
        ({"policy": {"name": "rigl", "interval": 0}}, {}, "interval must be at least 1, got 0"),
        ({"client": {"name": "scafold"}}, {}, "did you mean 'scaffold'?"),
        (
            {"client": {"name": "mime"}, "local": {"lr": 0.03}},
            {},
            "local.optimiser must be 'sgd' for client.name mime",
        ),
        (
            {"client": {"name": "fedprox"}, "local": {"lr": 0.03}},
            {},
            "config.local has no effect here for client.name fedprox",
        ),
        ({"local": {"steps": 3}}, {}, "config.local.steps has no effect here"),
        ({"pruning": {"masks_gradient": False}}, {}, "config.pruning.masks_gradient has no effect here"),
        (
            {"wire": {"values": "qsgd", "adapt": "loss"}},
            {},
            "config.wire.adapt has no effect here: it is for the simulator: a loss that a client states is for the "
            "record, and decides nothing",
        ),
        (
            parse({"wire": {"values": "qsgd", "adapt": "loss"}}),
            {},
            "wire.adapt must be 'none' on Flower, got 'loss': a loss that a client states",
        ),
    ],
)
def test_what_cannot_travel_is_refused_before_the_first_round(config, options, words):
    with pytest.raises(ConfigError) as told:
        SafariStrategy(Net(), 3, config=config, **options)
    assert words in str(told.value)


def test_a_server_that_reads_gradients_states_the_learning_rate():
    sgd = {"optimiser": "sgd", "lr": 0.05, "schedule": "cosine"}
    told = SafariStrategy(Net(), 3, config={"client": {"name": "mime"}, "local": sgd}).config
    assert learning_rate(replace(told, rounds=10), 5) == 0.025
    # The run's own config holds that, and nothing that only the clients know.
    assert decided(told)["local"].items() >= sgd.items()
    assert "steps" not in decided(told)["local"]
    assert "local" not in decided(SafariStrategy(Net(), 3).config)


def rates_of(lr, table=None, rounds=2, **options):
    """The reasons why clients with this `lr` in local_training are missing, by round."""
    local = {"optimiser": "sgd", "lr": 0.05, "schedule": "cosine"}
    tables = table or {"client": {"name": "mime"}, "local": TABLE["local"] | local}
    world = small(**{**PERFECT, "rounds": rounds, **tables}, arms=["drop"])
    app = ClientApp()
    train = local_training(
        lambda context: world.fresh_module(),
        lambda m, c: world.training_batches(
            c.node_config["partition-id"], m.content["config"]["safari.round"]
        ),
        optimiser="sgd",
        **({} if lr is None else {"lr": lr}),
    )
    app.train()(train)
    return [line["reasons"] for line in on_flower(world, app, options["run"], give_up=None)[1]]


def test_a_client_whose_learning_rate_is_not_the_servers_says_so(tmp_path):
    words = (
        "lr must be 0.025 in round 2, which the server's config states (local.lr, local.schedule) and its client "
        "algorithm 'mime' relies on, got 0.05: leave lr out of local_training"
    )
    first, second = rates_of(0.05, run=tmp_path / "constant")
    assert first == {}
    assert len(second) == 6
    assert all(words in reason for reason in second.values())
    # Without one of its own a client takes the server's; where the server has no use for it, it may have any.
    assert rates_of(None, run=tmp_path / "none") == [{}, {}]
    free = {"client": {"name": "fedprox"}, "local": TABLE["local"] | {"optimiser": "sgd"}}
    assert rates_of(0.7, free, run=tmp_path / "free") == [{}, {}]


def test_the_recipe_with_plain_arrays_up_is_the_one_with_frames(tmp_path):
    sgd = {"optimiser": "sgd", "lr": 0.05, "schedule": "cosine"}
    world = small(client={"name": "mime"}, arms=["safari"], local=TABLE["local"] | sgd)
    frames, expected, _ = on_flower(world, our_loop(world), tmp_path / "frames")
    dense, lines, _ = on_flower(world, our_loop(world), tmp_path / "dense", upload="dense")
    assert torch.equal(dense.server.model, frames.server.model)
    for name, tensor in frames.server.step_state.items():
        assert torch.equal(dense.server.step_state[name], tensor), name
    assert [{n: line[n] for n in SAME} for line in lines] == [{n: line[n] for n in SAME} for line in expected]


def test_a_schedule_that_ends_inside_another_strategy_is_refused_where_the_server_reads_gradients():
    local = {"optimiser": "sgd", "lr": 0.05, "schedule": "cosine"}
    strategy = SafariStrategy(Net(), 3, config={"client": {"name": "mime"}, "local": local})
    with pytest.raises(
        ConfigError, match=r"local\.schedule must be 'constant' or 'inverse-sqrt' inside another"
    ):
        strategy.configure_train(1, strategy_arrays(), ConfigRecord(), Loopback({30: None}))


def test_a_moving_mask_inside_another_strategy_is_refused():
    strategy = SafariStrategy(Net(), 3, config={"policy": {"name": "set"}})
    with pytest.raises(ConfigError, match=r"policy\.name must be 'static' inside another strategy"):
        strategy.configure_train(1, strategy_arrays(), ConfigRecord(), Loopback({30: None}))


def strategy_arrays() -> ArrayRecord:
    return ArrayRecord(dict(Net().state_dict()))


def test_a_new_client_in_a_seat_starts_without_the_old_ones_variate(tmp_path):
    layout, half = Layout.of(Net()), scaffold().server
    fed = SafariStrategy(Net(), 3, "drop", config={"client": {"name": "scaffold"}})._fed
    state = init(fed).put("algorithm", {"variate": torch.ones(3, layout.parameters)})
    found = cleared(fed, state, [1])["algorithm"]["variate"]
    assert found.sum(1).tolist() == [layout.parameters, 0, layout.parameters]
    wide = grown_half({"algorithm.variate": found, "model": state.model}, half, 5, layout.parameters)
    assert wide["algorithm.variate"].sum(1).tolist() == [layout.parameters, 0, layout.parameters, 0, 0]
