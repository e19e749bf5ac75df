"""When kernels are compiled, and that this is announced before it happens."""

from __future__ import annotations

from typing import Any

import pytest

import safari
from engine.kit import SMALL, world_of
from safari.config import parse
from safari.engine import experiment, vectorised
from safari.engine.stack import compile_policy as effort
from safari.engine.stack.compile_policy import compiles

FAST = {"precision": "bfloat16"}


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setattr(effort, "find_spec", lambda name: name)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("rounds", "arms", "engine", "device", "expected"),
    [
        (99, ["drop", "safari"], FAST, "cuda", False),
        (100, ["drop", "safari"], FAST, "cuda", True),
        (99, ["drop"], FAST, "cuda", False),
        (100, ["drop"], FAST, "cuda", True),
        (1, ["drop"], {**FAST, "compile": "always"}, "cuda", True),
        (9999, ["drop"], {**FAST, "compile": "never"}, "cuda", False),
        (9999, ["drop"], {}, "cuda", False),
        (9999, ["drop"], {**FAST, "compile": "always"}, "cpu", False),
    ],
)
def test_only_where_it_pays(rounds, arms, engine, device, expected):
    config = parse({"rounds": rounds, "arms": arms, "engine": engine})
    assert compiles(config, device) is expected


def test_not_without_triton(monkeypatch):
    monkeypatch.setattr(effort, "find_spec", lambda name: None)
    assert not compiles(parse({"rounds": 9999, "engine": FAST}), "cuda")


def test_the_forecast_is_shown_before_the_engine_is_prepared(monkeypatch, tmp_path):
    order: list[Any] = []
    real = vectorised.prepare

    def prepare(world):
        order.append("prepared")
        return real(world)

    class Watcher:
        def start(self, run): ...
        def stop(self): ...
        def round(self, trial, record):
            order.append(record["round"])

        def note(self, text):
            order.append(text)

    monkeypatch.setattr(vectorised, "prepare", prepare)
    monkeypatch.setitem(experiment.ENGINES, "vectorised", prepare)
    monkeypatch.setattr(vectorised, "compiles", lambda config, device: True)
    # Nothing is compiled on a CPU, whatever the forecast: the stack finds no device for it.
    config = {**SMALL, "rounds": 1, "seeds": 2, "engine": {"device": "cpu", "threads": 1}}
    config["local"] = {"optimiser": "sgd", "steps": 1, "lr": 0.1}
    safari.run(config, tmp_path / "run", [Watcher()])
    assert order == [effort.FORECAST, "prepared", 1, "prepared", 1]


def test_nothing_is_forecast_on_a_cpu():
    assert vectorised.forecast(world_of({**SMALL, "rounds": 9999, "engine": {"device": "cpu", **FAST}})) == ""
