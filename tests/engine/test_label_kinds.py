"""What a config's data, partition, model and task must have in common, said before the first round."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from safari.config import parse
from safari.data import digits, from_tensors
from safari.engine import assemble
from safari.errors import ConfigError

N = 40
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 6)).astype(np.float32)
TOKENS = RNG.integers(0, 9, (N, 5))


def toy(x: Any, y: Any, **more: Any) -> Any:
    return from_tensors("toy", (x, y), (x, y), **more)


def config(**changes: Any) -> Any:
    base = {
        "clients": 4,
        "uplink": {"name": "perfect"},
        "partition": {"name": "iid"},
        "pruning": {"scope": "erk"},
    }
    return parse({**base, **changes})


@pytest.mark.parametrize(
    ("data", "task", "message"),
    [
        (
            toy(X, np.arange(N) / 7),
            "classification",
            "task.name: classification needs one class a sample, and toy has numbers; "
            "that is for regression or multilabel",
        ),
        (
            toy(TOKENS, TOKENS),
            "classification",
            "task.name: classification needs one class a sample, and toy has a class for each token; "
            "that is for tokens",
        ),
        (
            toy(X, np.arange(N)[:, None] % 2),
            "classification",
            "task.name: classification needs one class a sample, shape [n], and toy has labels "
            "of shape [40, 1]; give y.ravel()",
        ),
        (
            toy(X, np.arange(N) % 2),
            "tokens",
            "task.name: tokens needs a class for each token, and toy has one class a sample; "
            "that is for classification",
        ),
        (
            toy(X, X),
            "multilabel",
            "task.name: multilabel needs 0 or 1 for each label, and toy's train_y holds other numbers; "
            "that is for regression",
        ),
    ],
)
def test_labels_that_are_not_the_task_s(data: Any, task: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        assemble(config(task={"name": task}, model={"name": "mlp"}), 0, data)
    assert message in error.value.problems


@pytest.mark.parametrize(
    ("data", "task"),
    [
        (toy(X, X[:, :1]), "regression"),
        (toy(X, X[:, :3] > 0), "multilabel"),
        (toy(X, np.arange(N) % 3), "classification"),
    ],
)
def test_labels_that_are(data: Any, task: str) -> None:
    world = assemble(config(task={"name": task}, model={"name": "mlp"}), 0, data)
    assert world.label_counts.shape == (4, {"regression": 1, "multilabel": 3, "classification": 3}[task])
    assert set(world.scores(world.start, 0) or {}) >= {"loss", world.task.score}


def test_a_partition_by_class_of_labels_that_are_none() -> None:
    wanted = config(
        task={"name": "regression"}, model={"name": "mlp"}, partition={"name": "dirichlet", "alpha": 0.3}
    )
    with pytest.raises(
        ConfigError, match="partition: it needs one class a sample, and these labels are numbers"
    ):
        assemble(wanted, 0, toy(X, X[:, :1]))


def test_a_natural_division() -> None:
    data = toy(X, np.arange(N) % 3, owners=np.arange(N) % 8)
    world = assemble(config(partition={"name": "natural"}, model={"name": "mlp"}), 0, data)
    assert all(len(part) == 5 and len(set(part % 8)) == 1 for part in world.parts)
    with pytest.raises(ConfigError, match=r"clients must be at most the number of owners \(8\), got 9"):
        assemble(config(clients=9, partition={"name": "natural"}, model={"name": "mlp"}), 0, data)


def test_a_model_gets_tokens_and_labels_where_it_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    class Each(nn.Module):
        def __init__(self, tokens: int, classes: int):
            super().__init__()
            self.table = nn.Embedding(tokens, 4)
            self.head = nn.Linear(4, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x))  # type: ignore[no-any-return]

    def model(shape: Any, classes: int, tokens: int = 0, labels: str = "", *, width: int = 3) -> nn.Module:
        told.update(shape=shape, classes=classes, tokens=tokens, labels=labels, width=width)
        return Each(tokens, classes)

    module = ModuleType("made_up_models")
    module.model = model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_models", module)
    wanted = config(task={"name": "tokens"}, model={"name": "made_up_models:model", "width": 5})
    assemble(wanted, 0, toy(TOKENS, TOKENS, classes=12))
    assert told == {"shape": (5,), "classes": 12, "tokens": 9, "labels": "tokens", "width": 5}


def test_text_for_a_model_of_pictures_or_numbers() -> None:
    data = toy(TOKENS, np.arange(N) % 3)
    with pytest.raises(ConfigError, match=r"model: cnn needs pictures .*; got \(5,\)"):
        assemble(config(), 0, data)
    with pytest.raises(ConfigError, match=r"model: mlp cannot read tokens of shape \[5\]: RuntimeError"):
        assemble(config(model={"name": "mlp"}), 0, data)


def test_a_validation_split_follows_from_the_seed_and_leaves_the_test_set_alone() -> None:
    data = digits()
    plain = assemble(config(), 0, data)
    held = [assemble(config(evaluation={"validation": 0.2}), seed, data) for seed in (0, 0, 1)]
    assert len(held[0].data.test_y) == round(0.2 * len(data.train_y))
    assert sum(map(len, held[0].parts)) == len(data.train_y) - len(held[0].data.test_y)
    assert torch.equal(held[0].data.test_x, held[1].data.test_x)
    assert not torch.equal(held[0].data.test_x, held[2].data.test_x)
    assert torch.equal(plain.data.test_x, data.test_x)
