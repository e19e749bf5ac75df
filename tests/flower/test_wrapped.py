"""A strategy of Flower's around ours, Flower's mods around our client side, and arrays as they want them."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from torch import nn

from flower.kit import Loopback, Net, lines_of, net
from safari.errors import ConfigError, SafariError
from safari.flower import SafariStrategy, masked, masks_of, sparse, sparse_mod
from safari.flower.arrays import dense_vector
from safari.models import Layout

CLIENTS, NORM = 3, 0.05


def build() -> nn.Module:
    """Without batch norm: Flower's clipping cannot scale its counters, which are whole numbers."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def steps(model: nn.Module, message: Message, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    g = torch.Generator().manual_seed(message.content["config"]["server-round"])
    for _ in range(3):
        x, y = torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return {"num-examples": 16, "train_loss": float(loss.detach())}


def train(model, message, context) -> dict[str, float]:
    return steps(model, message, torch.optim.SGD(model.parameters(), lr=0.5))


def function(wrap: bool):
    """A ClientApp's own function, as in Flower's template."""

    def answer(message: Message, context) -> Message:
        model = build()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if wrap:
            optimizer = masked(optimizer, model, masks_of(message))
        metrics = MetricRecord(steps(model, message, optimizer))
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return answer


def app_of(function, *mods) -> ClientApp:
    app = ClientApp(mods=list(mods))
    app.train()(function)
    return app


def grid_of(app) -> Loopback:
    return Loopback(dict.fromkeys([10, 20, 30], app))


PLAIN = app_of(function(wrap=False))
SPARSE = app_of(sparse(lambda context: build())(train))
WITH_MOD = sparse_mod(lambda context: build(), remask=True)
# At the default of 80% the largest weights are all in the first layer.
HALF = {"pruning": {"sparsity": 0.5}}


class Seen:
    """The models that a strategy's evaluate_fn was given: those that it goes on with."""

    def __init__(self) -> None:
        self.models: dict[int, torch.Tensor] = {}

    def __call__(self, number: int, arrays: ArrayRecord) -> None:
        self.models[number] = dense_vector(arrays, Layout.of(build()))


def play(wrapper, app, rounds: int = 3, **options) -> tuple[Seen, Loopback, SafariStrategy]:
    inner = SafariStrategy(build(), CLIENTS, **options)
    strategy = inner if wrapper is None else wrapper(inner, 2.0, NORM, CLIENTS)
    grid, seen = grid_of(app), Seen()
    first = ArrayRecord(dict(build().state_dict()))
    strategy.start(grid, first, num_rounds=rounds, timeout=0.1, evaluate_fn=seen)
    return seen, grid, inner


def spread(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).std())


@pytest.mark.parametrize(("app", "sparsity"), [(PLAIN, 0.0), (SPARSE, 0.0), (SPARSE, 0.5)])
def test_noise_and_clipping_of_a_strategy_around_ours_reach_the_broadcast(app, sparsity):
    np.random.seed(0)
    options = {"download": "dense", "upload": "dense", "config": {"pruning": {"sparsity": sparsity}}}
    seen, grid, inner = play(DifferentialPrivacyServerSideFixedClipping, app, **options)
    sent = {m.content["config"]["server-round"]: m.content["arrays"] for m in grid.sent}
    layout = Layout.of(build())
    for number in (1, 2, 3):
        # What the strategy around it goes on with is what the clients get.
        assert torch.equal(dense_vector(sent[number], layout), seen.models[number - 1])
    # Noise of 2 · 0.05 / 3 on every number, and a clipped step of at most 0.05 in all.
    assert spread(seen.models[2], seen.models[1]) == pytest.approx(2 * NORM / CLIENTS, rel=0.4)
    assert inner.server.round == 3
    assert torch.linalg.vector_norm(inner.server.model - seen.models[2]) <= NORM * 1.001


def test_clipping_at_the_clients_works_with_frames_too():
    np.random.seed(0)
    app = app_of(function(wrap=True), WITH_MOD, fixedclipping_mod)
    config = {"pruning": {"sparsity": 0.5}}
    seen, grid, inner = play(DifferentialPrivacyClientSideFixedClipping, app, config=config)
    assert inner.server.round == 3
    assert spread(seen.models[3], seen.models[2]) > 0.5 * 2 * NORM / CLIENTS
    # Frames: far less than the 348 bytes of the numbers alone, with Flower's own around them.
    assert all(sum(len(a.data) for a in m.content["arrays"].values()) < 400 for m in grid.sent)


def test_evaluation_on_clients_tests_the_model_with_the_noise():
    np.random.seed(0)
    tested = []
    app = app_of(function(wrap=False))

    @app.evaluate()
    def test(message, context):
        tested.append(dense_vector(message.content["arrays"], Layout.of(build())))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    seen, *_ = play(
        DifferentialPrivacyServerSideFixedClipping, app, 1, download="dense", upload="dense", evaluate=True
    )
    assert len(tested) == CLIENTS
    assert all(torch.equal(model, seen.models[1]) for model in tested)


def test_a_strategy_around_ours_cannot_have_a_run(tmp_path):
    with pytest.raises(ConfigError, match=f"^run must be None inside another strategy, got {tmp_path}/run: "):
        play(DifferentialPrivacyServerSideFixedClipping, PLAIN, download="dense", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_frames_inside_a_strategy_that_reads_arrays_are_warned_of(caplog):
    with pytest.raises(TypeError, match=r"safari\.frame"):
        play(DifferentialPrivacyServerSideFixedClipping, SPARSE, config=HALF)
    assert "it needs SafariStrategy(..., download='dense', upload='dense')" in caplog.text


# --- mods


def test_local_differential_privacy_inside_our_mod_adds_noise_inside_the_mask(tmp_path):
    np.random.seed(0)
    config = {"pruning": {"sparsity": 0.5}}
    noise = LocalDpMod(clipping_norm=NORM, sensitivity=0.01, epsilon=1.0, delta=0.01)
    seen, *_ = play(None, app_of(function(wrap=True), WITH_MOD, noise), config=config, run=tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert all(line["arrived"] == [0, 1, 2] and line["density"] == 0.5 for line in lines)
    plain, *_ = play(None, app_of(function(wrap=True), WITH_MOD), config=config)
    assert not torch.equal(seen.models[1], plain.models[1])
    # Without remask the noise is outside of the mask, and that is told.
    strict = sparse_mod(lambda context: build())
    with pytest.raises(SafariError, match="weights that the mask cuts are not 0 after training"):
        play(None, app_of(function(wrap=True), strict, noise), config=config, rounds=1)


@pytest.mark.parametrize("answer", [sparse(lambda context: build())(train), function(wrap=False)])
def test_local_differential_privacy_around_our_side_needs_plain_arrays(answer):
    noise = LocalDpMod(clipping_norm=NORM, sensitivity=0.01, epsilon=1.0, delta=0.01)
    app = app_of(answer, noise)
    seen, _, inner = play(None, app, download="dense", upload="dense")
    assert inner.server.round == 3
    assert spread(seen.models[1], seen.models[0]) > 0.01


def test_around_frames_it_fails_by_name():
    noise = LocalDpMod(clipping_norm=NORM, sensitivity=0.01, epsilon=1.0, delta=0.01)
    app = app_of(sparse(lambda context: build())(train), noise)
    with pytest.raises(
        SafariError, match=r"Unsupported serialization type for numpy conversion: 'safari\.frame"
    ):
        play(None, app, rounds=1, config=HALF)


def test_records_of_the_clients_own_travel_untouched():
    app = ClientApp(mods=[WITH_MOD])
    inner = function(wrap=True)

    @app.train()
    def answer(message, context):
        reply = inner(message, context)
        reply.content["moments"] = ArrayRecord([np.arange(3.0)])
        reply.content["notes"] = ConfigRecord({"word": "yes"})
        reply.content["more"] = MetricRecord({"seconds": 2.5})
        return reply

    def decorated(model, message, context):
        return RecordDict({"metrics": MetricRecord(train(model, message, context)), "notes": ConfigRecord()})

    heard = []

    class Listening(SafariStrategy):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            heard.extend(reply.content for reply in replies)
            return super().aggregate_train(server_round, replies)

    other = app_of(sparse(lambda context: build())(decorated))
    strategy = Listening(build(), 2, config=HALF)
    strategy.start(Loopback({10: app, 20: other}), num_rounds=1, timeout=0.1)
    assert strategy._line["arrived"] == [0, 1]
    first, second = heard
    assert first["moments"].to_numpy_ndarrays()[0].tolist() == [0, 1, 2]
    assert (first["notes"]["word"], first["more"]["seconds"]) == ("yes", 2.5)
    assert set(first) == {"arrays", "metrics", "moments", "notes", "more", "safari"}
    assert set(second) == {"arrays", "metrics", "notes", "safari"}


def test_a_mask_travels_beside_plain_arrays(tmp_path):
    config = {"pruning": {"sparsity": 0.5}}
    play(None, SPARSE, download="dense", upload="dense", config=config, run=tmp_path / "run")
    assert [line["density"] for line in lines_of(tmp_path / "run")] == [0.5] * 3
    play(None, PLAIN, download="dense", config=config, run=tmp_path / "plain")
    assert [line["density"] for line in lines_of(tmp_path / "plain")] == [1.0] * 3


# --- arrays


class Tied(nn.Module):
    """Weights of two names, and buffers before parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(self.norm(x)))


def test_arrays_have_the_order_of_the_state_dict_and_both_names_of_tied_weights():
    strategy = SafariStrategy(Tied(), 1, download="dense")
    first = ArrayRecord(dict(Tied().state_dict()))
    list(strategy.configure_train(1, first, ConfigRecord(), Loopback({1: None})))
    state = strategy.arrays.to_torch_state_dict()
    assert list(state) == list(Tied().state_dict())
    assert torch.equal(state["two.weight"], state["one.weight"])
    assert torch.equal(state["one.weight"], first.to_torch_state_dict()["one.weight"])
    assert list(SafariStrategy(net(), 1)._names) == list(Net().state_dict())
