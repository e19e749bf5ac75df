"""A grid that calls real ClientApps in this process, with real messages that cross as bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from safari.flower import SafariStrategy, sparse
from safari.runs import RunFolder

NODES = [70, 30, 50]


@dataclass(frozen=True)
class Raw:
    """A reply as the objects of a node that speaks Flower's protocol by itself: whatever bytes it likes."""

    object_id: str
    objects: dict[str, bytes]


App = Callable[[Message, Context], Message | Raw | None]


class WithoutSuperLink(Grid):
    """What Flower's runtime asks of a Grid, and neither a strategy nor these tests do."""

    def __init__(self) -> None:
        # Messages get their sender from it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run) -> None:
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        """As a strategy does that knows nothing of ours."""
        return self.pull_messages(self.push_messages(messages))


class Loopback(WithoutSuperLink):
    """Nodes by id, each with an app and a node config; a node without an app never answers."""

    def __init__(self, apps: Mapping[int, App | None], configs: Mapping[int, dict] | None = None):
        super().__init__()
        self.apps = dict(apps)
        self.configs = configs or {n: {"partition-id": i} for i, n in enumerate(sorted(self.apps))}
        self.online = sorted(self.apps)
        self.sent: list[Message] = []
        # A node's own state lasts as long as its run.
        self.states: dict[int, RecordDict] = {}
        self._replies: dict[str, Raw] = {}
        self._ids = itertools.count()

    def get_node_ids(self) -> Iterable[int]:
        # In no order, as from a real SuperLink.
        return list(reversed(self.online))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{next(self._ids)}"
            ids.append(message.metadata.message_id)
            self.sent.append(message)
            app = self.apps.get(message.metadata.dst_node_id)
            if app is None:
                continue
            copy = through_bytes(message)
            copy.metadata.__dict__["_message_id"] = message.metadata.message_id
            node = message.metadata.dst_node_id
            state = self.states.setdefault(node, RecordDict())
            context = Context(1, node, self.configs.get(node, {}), state, {})
            try:
                reply = app(copy, context)
            except Exception as error:
                # As Flower does when an app raises.
                reply = Message(Error(2, f"Traceback\n{type(error).__name__}: {error}"), reply_to=copy)
            if reply is not None:
                found = reply if isinstance(reply, Raw) else Raw(reply.object_id, objects(reply))
                self._replies[message.metadata.message_id] = found
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        # Taken first: a real SuperLink delivers a reply once, whether it can be read or not.
        found = [self._replies.pop(i) for i in list(message_ids) if i in self._replies]
        return [inflate_object_from_contents(raw.object_id, dict(raw.objects)) for raw in found]


def objects(message: Message) -> dict[str, bytes]:
    """A message's objects as Flower stores and moves them."""
    return {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}


def through_bytes(message: Message) -> Message:
    """A message after a journey."""
    return inflate_object_from_contents(message.object_id, objects(message))


class Net(nn.Module):
    """Two layers and a norm: weights, biases, buffers, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.two = nn.Linear(8, 3)

    def forward(self, x):
        return self.two(torch.relu(self.norm(self.one(x))))


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return Net()


def train_a_bit(model: nn.Module, message: Message, context: Context) -> dict[str, float]:
    """A user's loop: knows no mask."""
    client = int(context.node_config.get("partition-id", context.node_id))
    g = torch.Generator().manual_seed(1000 * message.content["config"]["server-round"] + client)
    x, y = torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return {"num-examples": 16 + client, "train_loss": float(loss.detach())}


def good_app() -> ClientApp:
    app = ClientApp()
    app.train()(sparse(Net)(train_a_bit))
    app.evaluate()(sparse(Net)(lambda model, message, context: {"num-examples": 4, "accuracy": 0.25}))
    return app


def lines_of(path) -> list[dict]:
    return RunFolder.open(path).trials()[0].records()


def play(tmp_path, apps, rounds=1, clients=3, configs=None, grid=None, **options) -> list[dict]:
    strategy = SafariStrategy(net(), clients, run=tmp_path / "run", **options)
    strategy.start(grid or Loopback(apps, configs), num_rounds=rounds, timeout=0.1)
    return lines_of(tmp_path / "run")
