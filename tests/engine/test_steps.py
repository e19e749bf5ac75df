"""Server steps in a run: named in the config, the same in both engines, back after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import safari
from engine.kit import SMALL, bit_equal_in_halves, play, world_of
from safari.config import Plug, parse
from safari.engine import check
from safari.runs import RunFolder
from safari.toml import parse_setting, to_toml

STEPS = {"aggregation": {"average": 0.75, "steps": ["fedavgm", {"name": "fedadam", "lr": 0.003}]}}
OWN = """
import torch
from safari.aggregation import ServerStep

def clipped(*, most: float = 0.01):
    "No number moves by more than `most`."
    def apply(state, step, round):
        return step.clamp(-most, most), {"rounds": state["rounds"] + 1}
    return ServerStep(lambda model: {"rounds": torch.zeros(1)}, apply)

def wrong():
    return ServerStep(lambda model: {}, lambda state, step, round: (step[:-1], state))

def broken():
    return ServerStep(lambda model: {}, lambda state, step, round: 1 / 0)

def nothing():
    return None
"""


def with_steps(*steps: Any, **more: Any) -> dict[str, Any]:
    return {**SMALL, "aggregation": {"steps": list(steps)}, **more}


def test_a_config_names_steps_and_comes_back_from_toml(tmp_path: Path) -> None:
    config = parse({**SMALL, **STEPS})
    assert config.aggregation.steps == (Plug("fedavgm"), Plug("fedadam", {"lr": 0.003}))
    assert parse(config.to_dict()) == config
    assert 'steps = ["fedavgm", {name = "fedadam", lr = 0.003}]' in to_toml(config)
    assert parse_setting("aggregation.steps=fedavgm,lr") == ("aggregation.steps", ["fedavgm", "lr"])
    assert parse({}).aggregation.steps == ()


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("fedadam", "aggregation.steps must be a list of names and tables, got 'fedadam'"),
        ([3], 'aggregation.steps[0] must be a name or a table with "name", got 3'),
        (["lr", {"lr": 1}], "aggregation.steps[1] must be a name or a table with \"name\", got {'lr': 1}"),
    ],
)
def test_what_is_no_list_of_steps(steps: Any, text: str) -> None:
    with pytest.raises(safari.SafariError) as error:
        parse({"aggregation": {"steps": steps}})
    assert str(error.value) == text


def test_every_problem_of_a_step_has_its_field() -> None:
    problems = check(
        parse(
            with_steps(
                "fedadm",
                {"name": "fedadam", "lr": "fast"},
                {"name": "fedavgm", "beta": 0.5},
                {"name": "lr", "lr": 0.0},
            )
        )
    )
    assert problems == [
        "aggregation.steps[0] must be one of fedadagrad, fedadam, fedavgm, fedyogi, ghbm, lr; got 'fedadm' (did "
        "you mean 'fedadam'?); your own goes in as file.py:name or package.module:name",
        "aggregation.steps[1].lr must be a number, got 'fast'",
        "aggregation.steps[2].beta is not an option (allowed: momentum, lr, nesterov)",
        "aggregation.steps[3]: lr must be a finite number above 0, got 0.0",
    ]


def test_both_engines_take_the_same_steps() -> None:
    local = {"local": {**SMALL.get("local", {}), "optimiser": "sgd", "lr": 0.1}}
    ends = [
        list(play({**SMALL, **STEPS, **local, "engine": {"name": name, "device": "cpu"}}))[-1]
        for name in ("reference", "vectorised")
    ]
    (_, one, _), (_, two, _) = ends
    assert one["step"].keys() == two["step"].keys()
    assert float((one.model - two.model).norm() / one.model.norm()) < 1e-3


def test_steps_change_the_run_and_come_back_after_a_stop(tmp_path: Path) -> None:
    config = {**SMALL, **STEPS, "rounds": 6, "checkpoint": {"every": 2}}
    _, records = bit_equal_in_halves(config, tmp_path, 5)
    safari.run({**config, "aggregation": {}}, tmp_path / "plain")
    plain = RunFolder.open(tmp_path / "plain").trials()[0].records()
    assert [r["loss"] for r in records] != [r["loss"] for r in plain]


def test_steps_cannot_be_changed_on_the_way(tmp_path: Path) -> None:
    safari.run({**with_steps("lr"), "rounds": 2}, tmp_path / "run")
    file = tmp_path / "run/config.toml"
    file.write_text(file.read_text().replace('steps = ["lr"]', 'steps = [{name = "lr", lr = 0.5}]'))
    with pytest.raises(safari.SafariError, match=r"aggregation\.steps was \['lr'\] and is \[\{'name': 'lr'"):
        safari.resume(tmp_path / "run")


def test_a_step_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    path = f"{tmp_path}/mine.py"
    config = with_steps({"name": f"{path}:clipped", "most": 0.002})
    layout = world_of(config).layout
    for before, after, _ in play(config):
        moved = (after.model - before.model)[: layout.parameters].abs()
        kept = after.model[: layout.parameters] != 0
        assert float(moved[kept].max()) <= 0.0021
        assert after["step"]["0.rounds"].item() == after.round
    found = [check(parse(with_steps(f"{path}:{name}"))) for name in ("wrong", "broken", "nothing")]
    size = layout.size
    assert found == [
        [
            f"aggregation.steps[0]: {path}:wrong: the step must be a tensor of shape [{size}], torch."
            f"float32 on cpu, got a tensor of shape [{size - 1}], torch.float32 on cpu"
        ],
        [
            f"aggregation.steps[0]: {path}:broken raised ZeroDivisionError: division by zero (mine.py, "
            "line 15)"
        ],
        [f"aggregation.steps[0]: {path}:nothing must return a ServerStep, got None"],
    ]
