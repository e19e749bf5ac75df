"""The page's lines, applied to an app like Flower's quickstart-pytorch: as many as it says, and it runs."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import importlib
import re
import sys
from pathlib import Path

import torch
from flwr.app import Context, RecordDict

from flower.kit import Loopback

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-flower.md"

# An app for FedAvg: three files, the optimiser made in task.py, as in most of Flower's examples.
APP = {
    "task.py": """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(24, 16)
        self.two = nn.Linear(16, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def load_data(partition_id):
    g = torch.Generator().manual_seed(partition_id)
    x = torch.randn(64, 24, generator=g)
    return [(x, x[:, :3].argmax(1))]


def train(net, trainloader, epochs, lr, device):
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for x, y in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
    return float(loss.detach())
""",
    "client_app.py": """
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data
from task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = "cpu"
    trainloader = load_data(context.node_config["partition-id"])
    train_loss = train_fn(
        model,
        trainloader,
        5,
        msg.content["config"]["lr"],
        device,
    )
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": 64})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"eval_acc": 0.5, "num-examples": 64})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
""",
    "server_app.py": """
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import Net

app = ServerApp()
results = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_evaluate = 0.5
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_evaluate=fraction_evaluate)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=3,
        timeout=0.1,
    )
    results.append((strategy, result))
""",
}


def diffs(version: str) -> list[tuple[str, str]]:
    """The page's diffs of one way: file and lines."""
    found = re.findall(rf"^```diff {version} (\S+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert found
    return found


def applied(version: str | None) -> tuple[dict[str, str], int]:
    """The app after these diffs, and how many lines they write."""
    files, written = dict(APP), 0
    for name, diff in diffs(version) if version else []:
        lines = diff.splitlines()
        before = "\n".join(line[1:] for line in lines if line[0] in " -")
        after = "\n".join(line[1:] for line in lines if line[0] in " +")
        assert files[name].count(f"\n{before}\n") == 1, (name, before)
        files[name] = files[name].replace(f"\n{before}\n", f"\n{after}\n")
        written += sum(line[0] == "+" for line in lines)
    return files, written


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run an app with five nodes, of which one never answers."""

    def go(files: dict[str, str], silent: bool = True):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("task", "client_app", "server_app"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        torch.manual_seed(0)
        server, client = (importlib.import_module(name) for name in ("server_app", "client_app"))
        apps = dict.fromkeys((11, 22, 33, 44, 55), client.app) | ({55: None} if silent else {})
        grid = Loopback(apps)
        server.app(grid, Context(1, 1, {}, RecordDict(), {}))
        return (*server.results[0], grid)

    yield go
    for name in ("task", "client_app", "server_app"):
        sys.modules.pop(name, None)


def test_the_app_is_one_for_fedavg(run):
    _, result, grid = run(applied(None)[0])
    assert result.train_metrics_clientapp[3]["train_loss"] < result.train_metrics_clientapp[1]["train_loss"]
    assert {m.metadata.message_type for m in grid.sent} == {"train", "evaluate"}


def test_two_lines_and_the_clients_stay_as_they_are(run):
    files, written = applied("two-lines")
    assert written == 2
    assert [name for name in APP if files[name] != APP[name]] == ["server_app.py"]
    strategy, result, _ = run(files)
    assert (strategy.config.arms[0].name, strategy.server.round) == ("safari+", 3)
    line = strategy._line
    assert (len(line["arrived"]), len(line["missing"]), line["density"]) == (4, 1, 1.0)
    assert line["modes"] == {"dense": 4}
    assert result.train_metrics_clientapp[3]["train_loss"] < result.train_metrics_clientapp[1]["train_loss"]
    assert list(result.arrays) == ["one.weight", "one.bias", "two.weight", "two.bias"]


def test_eight_lines_in_three_files(run):
    files, written = applied("eight-lines")
    assert written == 8
    assert [name for name in APP if files[name] != APP[name]] == list(APP)
    strategy, result, _ = run(files)
    line = strategy._line
    assert (line["arrived"], line["density"]) == ([0, 1, 2, 3], pytest.approx(0.2, abs=0.01))
    assert "dense" not in line["modes"]
    assert result.train_metrics_clientapp[3]["train_loss"] < result.train_metrics_clientapp[1]["train_loss"]


def test_four_lines_with_remask(run):
    server, _ = applied("eight-lines")
    client = APP["client_app.py"].replace(
        "app = ClientApp()", "app = ClientApp(mods=[sparse_mod(Net, remask=True)])"
    )
    files = APP | {
        "server_app.py": server["server_app.py"],
        "client_app.py": client.replace(
            "import ClientApp\n", "import ClientApp\nfrom safari.flower import sparse_mod\n"
        ),
    }
    strategy, _, _ = run(files)
    assert strategy._line["arrived"] == [0, 1, 2, 3]
    assert strategy._line["density"] == pytest.approx(0.2, abs=0.01)
