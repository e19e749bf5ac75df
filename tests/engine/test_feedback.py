"""Error feedback through the training loop, against a loop written by hand on numpy and real bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import safari
from engine.kit import StopAfter, bit_equal_in_halves
from engine.own_parts import NORMED
from safari.config import parse
from safari.engine import reference, vectorised
from safari.engine.assembly import assemble
from safari.engine.network import deliver
from safari.engine.parts import load_data
from safari.engine.reference import train
from safari.engine.state import initial
from safari.errors import ConfigError, RunError
from safari.rounds.beside import wire_layout
from safari.seeds import generator
from safari.wire import Lossy, Shared, decode, encode, settle, with_residual

SMALL = {
    "rounds": 6,
    "clients": 5,
    "arms": ["safari"],
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"steps": 2, "batch": 8},
    "uplink": {"name": "bernoulli", "p": 0.6},
    "downlink": {"name": "bernoulli", "p": 0.8},
    "wire": {"values": "step", "every": 0},
    "checkpoint": {"every": 2},
}


def world_of(**changes):
    config = parse(SMALL | changes)
    return assemble(config, 0, load_data(config))


def start(world):
    return initial(world, world.federation())


def by_hand(world, rounds):
    """The states after each round: clients settle when their next broadcast brings the news."""
    wire, layout = world.config.wire, wire_layout(world.layout)
    state, clients = start(world), range(len(world.parts))
    residual = {client: np.zeros(world.layout.parameters, np.float32) for client in clients}
    letters = {}
    states = []
    for t in range(rounds):
        x = state.model
        shared = Shared(layout, x.numpy())
        delivery, following = deliver(world, state, world.federation().rule, world.cohort(0))
        received, masks = {}, {}
        for client in clients:
            if client not in delivery.hear:
                continue
            if client in letters:
                residual[client] = settle(residual[client], *letters.pop(client))
            mask = world.mask(x, client, t)
            model = train(world, x, mask, client, t).model
            target = with_residual(model.numpy(), mask.numpy(), residual[client])
            lossy = Lossy(wire.bits, wire.step, generator(world.seed, "wire", client, t))
            got = decode(encode(target, mask.numpy(), shared, values=wire.values, lossy=lossy), shared)
            letters[client] = target, got.vector, mask.numpy(), client in delivery.arriving
            if client in delivery.arriving:
                received[client], masks[client] = torch.from_numpy(got.vector), mask
        fed = world.federation()
        server, _ = fed.server(following).step(received, list(clients), masks)
        state = fed.after(following, server)
        told = [settle(residual[c], *letters[c]) if c in letters else residual[c] for c in clients]
        states.append((server.model, np.stack(told)))
    return states


@pytest.mark.parametrize("values", ["step", "int8", "qsgd", "fp16"])
@pytest.mark.parametrize("pruner", ["mag", "snip"])
def test_the_reference_does_what_the_loop_by_hand_does(values, pruner):
    wire = SMALL["wire"] | {"values": values, "feedback": True}
    world = world_of(wire=wire, pruning={"pruner": pruner})
    state = start(world)
    for model, residual in by_hand(world, 5):
        state, *_ = reference.run_round(world, world.federation(), state)
        assert torch.equal(state.model, model)
        assert np.array_equal(state["wire"]["residual"].numpy(), residual)
    assert np.count_nonzero(residual) > 100


def test_buffers_travel_without_a_residual(tmp_path):
    (tmp_path / "parts.py").write_text(NORMED)
    data, model = ({"name": f"{tmp_path}/parts.py:{name}"} for name in ("pictures", "normed"))
    world = world_of(data=data, model=model, partition={"name": "iid"}, arms=["drop"])
    state = start(world)
    for model, residual in by_hand(world, 5):
        state, *_ = reference.run_round(world, world.federation(), state)
        assert torch.equal(state.model, model)
        assert np.array_equal(state["wire"]["residual"].numpy(), residual)
    assert residual.shape == (5, world.layout.size - 16)


def test_the_vectorised_engine_keeps_the_same_residual():
    world = world_of()
    one, other = start(world), start(world)
    engine = vectorised.prepare(world)
    for _ in range(4):
        one, *_ = reference.run_round(world, world.federation(), one)
        other, *_ = engine(world.federation(), other)
        # A number that lies between two steps may fall to either side when models differ in their last bits.
        close = (one["wire"]["residual"] - other["wire"]["residual"]).abs() < 1e-6
        assert close.float().mean() > 0.999
        assert one["wire"]["residual"].count_nonzero() > 100


def test_a_lost_upload_leaves_the_residual_and_feedback_changes_the_run():
    world = world_of(uplink={"name": "lost"}, downlink={"name": "perfect"}, arms=["drop"])
    state, *_ = reference.run_round(world, world.federation(), start(world))
    assert not state["wire"]["residual"].any()
    with_it, without = world_of(), world_of(wire=SMALL["wire"] | {"feedback": False})
    states = [start(world) for world in (with_it, without)]
    assert "residual" not in states[1]["wire"]
    for _ in range(4):
        states = [
            reference.run_round(w, w.federation(), s)[0]
            for w, s in zip((with_it, without), states, strict=True)
        ]
    assert not torch.equal(*(s.model for s in states))


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_resumed_run_is_bit_equal(tmp_path, engine):
    config = SMALL | {"engine": {"name": engine}}
    saved, _ = bit_equal_in_halves(config, tmp_path, 3)
    assert saved["wire.residual"].any()


@pytest.mark.parametrize("values", ["auto", "difference", "int8", "qsgd", "bf16", "step"])
def test_by_default_what_steps_leave_out_is_kept_and_nothing_else(values):
    wire = SMALL["wire"] | {"values": values}
    assert ("residual" in start(world_of(wire=wire))["wire"]) == (values == "step")
    assert "residual" not in start(world_of(wire=wire | {"feedback": False}))["wire"]


def test_a_run_may_be_told_what_it_does_anyway(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        safari.run(SMALL, tmp_path / "run", [StopAfter(3)])
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    assert 'feedback = "auto"' in text
    file.write_text(text.replace('feedback = "auto"', "feedback = false"))
    with pytest.raises(RunError, match=r"wire\.feedback was True and is False"):
        safari.resume(tmp_path / "run")
    file.write_text(text.replace('feedback = "auto"', "feedback = true"))
    safari.resume(tmp_path / "run")


def test_feedback_needs_something_to_feed_back():
    with pytest.raises(ConfigError, match=r"^wire.feedback needs lossy wire.values, got 'auto'$"):
        parse({"wire": {"feedback": True}})
    with pytest.raises(ConfigError, match=r"^wire.feedback must be auto or true or false, got 'on'$"):
        parse({"wire": {"feedback": "on"}})


@pytest.mark.parametrize("values", ["step", "top-k", "qsgd"])
def test_rounds_in_which_clients_train_and_nobody_arrives(values):
    # Clients of SCAFFOLD keep a state, so that they train although their uploads are lost.
    changes = {
        "clients": 3,
        "arms": ["drop"],
        "client": {"name": "scaffold"},
        "uplink": {"name": "bernoulli", "p": 0.2},
        "downlink": {"name": "perfect"},
        "wire": {"values": values, "every": 1},
    }
    world = world_of(**changes)
    engine, states, lost = vectorised.prepare(world), [start(world), start(world)], 0
    for _ in range(6):
        plain, record, _ = reference.run_round(world, world.federation(), states[0])
        states = [plain, engine(world.federation(), states[1])[0]]
        lost += record["lost"]
        assert torch.allclose(states[0].model, states[1].model, rtol=1e-4, atol=1e-5)
    assert lost
