"""Lossy downloads: all clients hold the same numbers, whichever frames they got; nothing is lost for good."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import numpy as np
import torch
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from flower.kit import Loopback, Net, net, train_a_bit
from safari.errors import SafariError
from safari.flower import SafariStrategy, sparse
from safari.flower.chain import LONGEST, Chain, follow
from safari.flower.protocol import UPLINK_LOST
from safari.models import Layout
from safari.runs import RunFolder
from safari.wire import Lossy, WireLayout, reference_digest

WIRE = WireLayout(["w", "b"], [40, 8], [True, False])
PRUNABLE = torch.arange(48) < 40
WITH_BUFFER = WireLayout(["w", "b", "variance"], [40, 8, 4], [True, False, False])


def walk(seed: int, steps: int, values: str) -> tuple[list[Chain], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(48, generator=g)
    chains, targets = [Chain.start(x, 0, 48)], [x]
    for t in range(steps):
        x = chains[-1].model + 0.01 * torch.randn(48, generator=g)
        if t == 0:
            x = torch.where(PRUNABLE & (x.abs() < 0.5), 0.0, x)
        else:
            x = torch.where(chains[-1].model == 0, 0.0, x)
        lossy = Lossy(4, 1.0, np.random.default_rng(seed + t))
        targets.append(x)
        chains.append(chains[-1].advance(x, WIRE, PRUNABLE, values, lossy))
    return chains, targets


@settings(max_examples=10)
@given(st.integers(0, 999), st.sampled_from(["step", "qsgd", "int8", "bf16"]), st.integers(1, LONGEST))
def test_all_who_follow_the_chain_have_the_same_model(seed, values, age):
    chains, _ = walk(seed, LONGEST + 1, values)
    last, held = chains[-1], chains[-1 - age]
    target = reference_digest(last.model.numpy())
    found = follow(last.since(held.round), WIRE, held.model.numpy(), target)
    assert np.array_equal(found, last.model.numpy())
    # One that is further than the server knows, because its reply was lost.
    for ahead in chains[-1 - age :]:
        found = follow(last.since(held.round), WIRE, ahead.model.numpy(), target)
        assert np.array_equal(found, last.model.numpy())


def test_what_a_frame_leaves_out_goes_into_the_next():
    chains, targets = walk(3, 6, "step")
    for before, now, x in zip(chains[:-1], chains[1:], targets[1:], strict=True):
        kept = x != 0
        assert torch.allclose((now.model + now.residual)[kept], (x + before.residual)[kept], atol=1e-6)
        assert bool((now.model[PRUNABLE & ~kept] == 0).all())


@settings(max_examples=8)
@given(st.integers(0, 999), st.sampled_from(["step", "qsgd", "int8", "bf16", "fp16"]))
def test_variances_that_fall_to_zero_go_no_further(seed, values):
    g = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.randn(48, generator=g), 0.1 * torch.rand(4, generator=g)])
    chain = Chain.start(x, 0, 48)
    for t in range(20):
        x = chain.model + 0.01 * torch.randn(52, generator=g)
        x[48:] = 0.6 * chain.model[48:]
        lossy = Lossy(4, 1.0, np.random.default_rng(seed + t))
        chain = chain.advance(x, WITH_BUFFER, torch.arange(52) < 40, values, lossy)
        assert bool((chain.model[48:] >= 0).all())
        assert chain.residual.shape == (48,)
    assert bool(chain.residual.any())


def test_a_chain_reaches_only_so_far_back():
    chains, _ = walk(0, LONGEST + 2, "step")
    last = chains[-1]
    assert last.since(None) is None
    assert last.since(last.round) == ()
    assert last.since(last.round + 1) is None
    assert last.since(last.round - LONGEST - 1) is None
    assert len(last.since(last.round - 2)) == 2


def test_a_client_without_memory_says_so():
    with pytest.raises(SafariError, match="builds on a model that this client does not hold"):
        follow([b""], WIRE, None, b"")
    chains, _ = walk(0, 4, "step")
    older, last = chains[0].model.numpy(), chains[-1]
    with pytest.raises(SafariError, match="builds on a model that this client does not hold"):
        follow(last.since(2), WIRE, older, reference_digest(last.model.numpy()))


def test_rounds_by_frames_with_a_late_and_a_forgetful_client(tmp_path):
    app = ClientApp()
    seen = []

    def train(model, message, context):
        seen.append(len(message.content["arrays"]))
        return train_a_bit(model, message, context)

    app.train()(sparse(Net)(train))
    nodes = {1: app, 2: app, 3: app}
    grid = Loopback(nodes)
    strategy = SafariStrategy(
        net(), 3, download="step", run=tmp_path / "run", config={"wire": {"values": "step"}}
    )

    def play(rounds, deaf=()):
        grid.apps = {node: None if node in deaf else app for node in nodes}
        strategy.start(grid, num_rounds=rounds, timeout=0.05)
        return RunFolder.open(tmp_path / "run").trials()[0].records()[-1]

    # One process: `start` opens the folder again, but the strategy is the same.
    first = play(1)
    second = play(2)
    assert second["arrived"] == [0, 1, 2]
    assert second["bytes"]["down"] < first["bytes"]["down"]
    assert play(4, deaf=[3])["arrived"] == [0, 1]
    seen.clear()
    assert play(5)["arrived"] == [0, 1, 2]
    # The one that missed two rounds got three frames.
    assert sorted(seen) == [1, 1, 3]
    grid.states[2] = RecordDict()
    forgetful = play(6)
    assert forgetful["arrived"] == [0, 2]
    assert "builds on a model that this client does not hold" in forgetful["reasons"]["1"]
    assert play(7)["arrived"] == [0, 1, 2]


def test_lossy_downloads_train_as_well_as_exact_ones():
    layout, ends = Layout.of(net()), {}
    for download in ("frame", "step"):
        app = ClientApp()
        app.train()(sparse(Net)(train_a_bit))
        strategy = SafariStrategy(net(), 2, download=download)
        result = strategy.start(Loopback({1: app, 2: app}), num_rounds=12, timeout=0.05)
        ends[download] = strategy.server.model
        assert len(result.train_metrics_clientapp) == 12
    moved = torch.linalg.vector_norm(ends["frame"] - layout.read(net()))
    assert torch.linalg.vector_norm(ends["frame"] - ends["step"]) < 0.5 * moved


def test_a_lost_upload_costs_its_round_and_no_other(tmp_path):
    """The client then holds a newer model than the server knows of."""

    def app_of(lost):
        app = ClientApp(mods=[lambda m, c, go: answer(m, go(m, c))])
        app.train()(sparse(Net)(train_a_bit))

        def answer(message, reply):
            if message.content["config"]["server-round"] in lost:
                return Message(Error(UPLINK_LOST, "lost on the uplink"), reply_to=message)
            return reply

        return app

    grid = Loopback({1: app_of(()), 2: app_of((2, 4, 5))})
    strategy = SafariStrategy(net(), 2, download="step", run=tmp_path)
    strategy.start(grid, num_rounds=7, timeout=0.05)
    lines = RunFolder.open(tmp_path).trials()[0].records()
    assert [line["round"] for line in lines if line["arrived"] != [0, 1]] == [2, 4, 5]
    # And nobody needed the model in full again.
    assert all(line["bytes"]["down"] < 200 for line in lines[1:])
