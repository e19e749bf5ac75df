"""What safari.testing lets pass, every built-in part, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safari
from safari import testing
from safari.aggregation import RULES, Gate, Ruling
from safari.engine import KINDS
from safari.errors import ConfigError
from safari.links import Link
from safari.models import MODELS, prunable_parameters
from safari.pruning import MaskPolicy, Masks
from safari.sampling import Draw, Sampling
from safari.tasks import TASKS, classification
from safari.training import CLIENTS, ClientAlgorithm, ServerHalf

OPTIONS: dict[str, dict[str, Any]] = {
    "cluster-fedvarp": {"clusters": 2},
    "few": {"heard": 5, "clusters": 2},
}
# early-bird trains dense until its mask settles, which the budget forbids to others; recordings need a file, and
# natural partitions need data with owners. Partitions of flwr-datasets have tests of their own.
LEFT_OUT = ("early-bird", "recorded", "natural", *(name for name in KINDS["partition"] if "flwr" in name))
PARTS = [
    (kind, name)
    for kind, builtin in KINDS.items()
    if kind not in ("data", "model")
    for name in builtin
    if name not in LEFT_OUT
]


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_built_in_part_keeps_the_contract(kind: str, name: str, tmp_path: Path) -> None:
    made, options = KINDS[kind][name], OPTIONS.get(name, {})
    if name == "trace":
        rows = [f"{t},{client},{(t + client) % 3 == 0:d}" for t in range(5) for client in range(5)]
        (tmp_path / "trace.csv").write_text("\n".join(["round,client,delivered", *rows]))
        options = {"file": str(tmp_path / "trace.csv")}
    getattr(testing, f"check_{kind}")(made if kind in ("partition", "pruner") else made(**options))


def test_models_and_data() -> None:
    testing.check_model(MODELS["mlp"])
    testing.check_data(lambda: ((np.ones((9, 2)), np.arange(9) % 3), (np.ones((9, 2)), np.arange(9) % 3)))


NOTHING: Callable[..., dict[str, Any]] = lambda *given: {}


def rule(apply: Callable[..., Any], **parts: Any) -> safari.Compensation:
    return safari.Compensation(NOTHING, apply, **parts)


def counting(clients: int, size: int, device: torch.device) -> dict[str, Any]:
    return {"n": torch.zeros(clients, device=device)}


def in_place(state: Any, round: Any) -> Any:
    state["n"] += 1
    return safari.Decision(a=round.own), state


calls: list[int] = []


def remembering(state: Any, round: Any) -> Any:
    calls.append(1)
    return safari.Decision(a=round.own * len(calls)), state


def noisy(state: Any, round: Any) -> Any:
    return safari.Decision(a=round.own * torch.rand(())), state


def numpy_noise(state: Any, t: int, rng: Any) -> Any:
    return np.random.rand(5) < 2, state


def scaffold(sends_change: bool) -> ClientAlgorithm:
    """A control variate that goes up as it is, or as its change."""

    def init(clients: int, parameters: int, device: torch.device) -> dict[str, Any]:
        return {"c": torch.zeros(clients, parameters, device=device)}

    def finish(local: Any) -> Any:
        c = (local.start - local.model) + 0.5 * local.state["c"]
        return {"c": c}, {"c": c - local.state["c"] if sends_change else c}

    def serve(state: Any, step: Any, up: Any, round: Any) -> Any:
        return step, {"c": state["c"].index_copy(0, round.arrived, up["c"])}

    server = ServerHalf(init, lambda state: {"c": state["c"].mean(0)}, serve)
    return ClientAlgorithm(
        init=init, finish=finish, sends=lambda parameters: {"c": parameters}, server=server
    )


def mean_alone(state: Any, round: Any) -> Any:
    return safari.Decision(a=round.own / len(round.arrived) * float(1 / len(round.arrived))), state


def upset(module: nn.Module, batch: Any, generator: Any) -> Any:
    return {name: torch.rand(w.shape) for name, w in prunable_parameters(module).items()}


def whole(state: Any, round: Any) -> Any:
    return Masks(shared=torch.ones(len(round.model), dtype=torch.bool)), state


WRONG: dict[str, tuple[str, Any, str]] = {
    "state in place": ("rule", safari.Compensation(counting, in_place), "apply changes `state` in place"),
    "torch's generator": ("rule", rule(noisy), "draws from a global generator"),
    "numpy's generator": ("link", Link(NOTHING, numpy_noise), "draws from a global generator"),
    "kept outside": ("rule", rule(remembering), "answers differently when it is asked twice"),
    "no pair": (
        "rule",
        rule(lambda s, r: safari.Decision(a=r.own)),
        r"must return \(Decision, state\), got a Dec",
    ),
    "nobody arrived": ("rule", rule(mean_alone), "ZeroDivisionError: .*test_testing.py, line"),
    "shape": (
        "rule",
        rule(lambda s, r: (safari.Decision(a=r.own[:1]), s)),
        "a weight for each of the 5 arrivals",
    ),
    "not finite": ("rule", rule(lambda s, r: (safari.Decision(a=r.own / 0), s)), "weights a must be finite"),
    "not made": ("rule", RULES["drop"], r"check_rule takes a Compensation, as in check_rule\(drop\(\)\)"),
    "gate": ("gate", Gate(NOTHING, lambda s, r: (None, s)), r"must return \(Ruling, state\)"),
    "gate of parts": (
        "gate",
        Gate(NOTHING, lambda s, r: (Ruling(models=r.models[:, 1:]), s)),
        "models must be a tensor of shape",
    ),
    "step": (
        "step",
        safari.ServerStep(NOTHING, lambda s, step, r: (step[1:], s)),
        "the step must be a tensor of",
    ),
    "change sent": ("client", scaffold(sends_change=True), "finish sends as 'c' the change of the state 'c'"),
    "not declared": ("client", replace(scaffold(False), sends=lambda n: {}), "sends must declare"),
    "policy": (
        "policy",
        MaskPolicy(NOTHING, whole),
        "a mask must keep at most 84 weights in round 0, got 168",
    ),
    "sampling": ("sampling", Sampling(lambda s, r: (Draw((1, 0)), s)), "clients must ascend"),
    "task": (
        "task",
        replace(classification(), loss=lambda o, y: o.sum()),
        "loss must return a number a sample",
    ),
    "pruner": ("pruner", upset, "draws from a global generator"),
    "partition": ("partition", lambda labels, clients, rng: [np.arange(3)] * 2, "each of the 5 clients"),
    "model": ("model", lambda shape, classes: 3, "must return a torch.nn.Module, got 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_contract_is_one_line(name: str) -> None:
    kind, part, words = WRONG[name]
    with pytest.raises(ConfigError, match=words) as error:
        getattr(testing, f"check_{kind}")(part)
    assert "\n" not in str(error.value)


def test_the_state_itself_may_be_sent() -> None:
    testing.check_client(scaffold(sends_change=False))


def test_a_rule_is_also_tried_where_models_arrive_in_part() -> None:
    seen: list[bool] = []

    def apply(state: Any, round: Any) -> Any:
        seen.append(round.came is not None)
        return safari.Decision(a=round.own), state

    testing.check_rule(rule(apply))
    assert any(seen)
    assert not all(seen)


def test_each_kind_has_a_check() -> None:
    assert {f"check_{kind}" for kind in KINDS} == {
        name for name in vars(testing) if name.startswith("check_")
    }
    assert set(CLIENTS) <= {name for _, name in PARTS}
    assert set(TASKS) <= {name for _, name in PARTS}
