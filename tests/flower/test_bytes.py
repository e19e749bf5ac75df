"""Bytes of whole Flower messages, ours against FedAvg's: every object that Flower stores and moves counts."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower.kit import Loopback, objects
from safari.flower import SafariStrategy, sparse
from safari.models import MODELS

SHAPE = (3, 32, 32)


def resnet() -> torch.nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return MODELS["resnet20"](SHAPE, 10)


def train(model, message, context) -> dict[str, float]:
    """Five steps of Adam, as in the paper's setting, on made-up pictures."""
    g = torch.Generator().manual_seed(context.node_id)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    model.train()
    for _ in range(5):
        x, y = torch.randn(4, *SHAPE, generator=g), torch.randint(0, 10, (4,), generator=g)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return {"num-examples": 20, "train_loss": float(loss.detach())}


class Counted(Loopback):
    """Also remembers the size of each message, both ways."""

    def __init__(self, apps):
        super().__init__(apps)
        self.down: list[int] = []
        self.up: list[int] = []

    def push_messages(self, messages):
        messages = list(messages)
        self.down += [size(message) for message in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        self.up += [size(message) for message in found]
        return found


def size(message: Message) -> int:
    return sum(map(len, objects(message).values()))


def fedavg() -> tuple[int, int]:
    """Bytes down and up of one client in one round of FedAvg, as Flower's own template writes it."""
    app = ClientApp()

    @app.train()
    def answer(message, context):
        model = resnet()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord(train(model, message, context))
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
        )

    grid = Counted({1: app, 2: app})
    arrays = ArrayRecord(resnet().state_dict())
    grid.push_messages(FedAvg().configure_train(1, arrays, ConfigRecord(), grid))
    list(grid.pull_messages(["m0"]))
    return grid.down[0], grid.up[0]


def ours(rounds: int, download: str = "frame", **wire) -> tuple[list[int], list[int]]:
    app = ClientApp()
    app.train()(sparse(lambda context: resnet())(train))
    grid = Counted({1: app})
    config = {"pruning": {"sparsity": 0.8}, "wire": wire}
    strategy = SafariStrategy(resnet(), 1, config=config, download=download)
    strategy.start(grid, num_rounds=rounds, timeout=0)
    return grid.down, grid.up


def test_messages_are_much_smaller_than_fedavgs():
    dense_down, dense_up = fedavg()
    assert dense_down > 1_090_000
    down, up = ours(3)
    # The first broadcast is of a dense model; from then on both ways are sparse.
    assert dense_up / max(up) >= 4.3
    assert dense_down / max(down[1:]) >= 4.3
    assert (dense_up + dense_down) / (up[-1] + down[-1]) >= 4.3
    lossy_down, lossy_up = ours(3, "step", values="step")
    assert dense_up / max(lossy_up) >= 40
    assert dense_down / lossy_down[-1] >= 40
    assert (dense_up + dense_down) / (lossy_up[-1] + lossy_down[-1]) >= 40
    print(f"FedAvg {dense_down} down, {dense_up} up")
    print(f"exact {down} down, {up} up; step {lossy_down} down, {lossy_up} up")
