"""Mask policies, client algorithms and server steps in runs: both engines agree, and a run can be interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import safari
from safari.errors import ConfigError, RunError
from safari.pruning import POLICIES
from safari.runs import RunFolder
from safari.training import CLIENTS

ARMS = ["drop", "safari+"]
BASE: dict[str, Any] = {
    "rounds": 6,
    "arms": ARMS,
    "model": {"name": "mlp"},
    "pruning": {"pruner": "rand", "scope": "erk"},
    "engine": {"threads": 1},
    "wire": {"every": 3},
}
MOVING = {"interval": 2}
OPTIONS: dict[str, dict[str, Any]] = {"static": {}, "early-bird": {"window": 2}}


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    lines = {
        arm: (folder / "trials" / arm / "seed-0" / "rounds.jsonl").read_text().splitlines() for arm in ARMS
    }
    return {arm: [json.loads(line) for line in found] for arm, found in lines.items()}


@pytest.mark.parametrize(
    "part",
    [
        *({"policy": {"name": name, **OPTIONS.get(name, MOVING)}} for name in POLICIES),
        *({"client": {"name": name}} for name in CLIENTS if name not in ("fedavg", "mime")),
        {"client": {"name": "mime", "strength": 1.0}, "local": {"optimiser": "sgd", "lr": 0.03}},
    ],
    ids=lambda part: next(iter(part.values()))["name"],
)
def test_both_engines_agree(part: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for engine in ("reference", "vectorised"):
        safari.run({**BASE, **part, "engine": {"name": engine, "threads": 1}}, tmp_path / engine)
        found.append(records(tmp_path / engine))
    for arm in ARMS:
        for ours, theirs in zip(*(run[arm] for run in found), strict=True):
            # Both engines round in another order; nothing else may differ.
            for name in ("loss", "train_loss"):
                assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=1e-3)
            for name in ("top1", "top5"):
                assert ours.pop(name) == pytest.approx(theirs.pop(name), abs=0.01)
            up, other = (record["bytes"].pop("up") for record in (ours, theirs))
            assert (up is None) == (other is None)
            if up is not None:
                assert up == pytest.approx(other, rel=0.02)
            ours["bytes"].pop("down"), theirs["bytes"].pop("down")
            # Who speaks loudest may depend on rounding where two are nearly the same.
            for record in (ours, theirs):
                record["stand_ins"] = {j: sorted(who) for j, who in record["stand_ins"].items()}
            assert ours == theirs


class StoppedError(Exception):
    """The process is killed."""


class Plug:
    def __init__(self, after: int):
        self.left = after

    def start(self, run: Any) -> None: ...

    def round(self, trial: Any, record: Any) -> None:
        self.left -= 1
        if not self.left:
            raise StoppedError

    def stop(self) -> None: ...


@pytest.mark.parametrize("after", [3, 6, 7])
def test_an_interrupted_run_goes_on_bit_for_bit(after: int, tmp_path: Path) -> None:
    config = {
        **BASE,
        "client": {"name": "scaffold", "memory": "stand-in"},
        "policy": {"name": "rigl", **MOVING},
        "local": {"schedule": "cosine"},
        "aggregation": {"steps": [{"name": "fedadam", "lr": 0.01}], "average": 0.5},
        "checkpoint": {"every": 2},
    }
    safari.run(config, tmp_path / "whole")
    with pytest.raises(StoppedError):
        safari.run(config, tmp_path / "parts", [Plug(after)])
    safari.resume(tmp_path / "parts")
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    for arm in ARMS:
        one, other = (
            load_file(tmp_path / name / "trials" / arm / "seed-0" / "checkpoint.safetensors")
            for name in ("whole", "parts")
        )
        assert {"client.variate", "policy.mask"} <= one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)


def test_masks_that_move_are_bound_to_the_length_of_the_run(tmp_path: Path) -> None:
    safari.run({**BASE, "policy": {"name": "set", **MOVING}, "rounds": 2}, tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 4"))
    with pytest.raises(RunError, match="rounds was 2 and is 4"):
        safari.resume(tmp_path / "run")


def test_regrowth_is_seen_in_the_records(tmp_path: Path) -> None:
    safari.run({**BASE, "rounds": 8, "policy": {"name": "rigl", **MOVING}}, tmp_path / "run")
    for lines in records(tmp_path / "run").values():
        churn = [line["churn"] for line in lines]
        assert [c > 0 for c in churn] == [True, False, True, False, True, False, False, False]
        assert len({line["support"] for line in lines}) == 1


def test_arms_with_settings_of_their_own_are_as_if_they_ran_alone(tmp_path: Path) -> None:
    own = {"client": {"name": "calibrated"}, "pruning": {"pruner": "mag", "scope": "uniform"}}
    safari.run(
        {**BASE, "arms": ["drop", {"name": "safari+", "rule": "safari+", "set": own}]}, tmp_path / "both"
    )
    safari.run({**BASE, **own, "arms": ARMS}, tmp_path / "alone")
    assert records(tmp_path / "both")["safari+"] == records(tmp_path / "alone")["safari+"]
    assert records(tmp_path / "both")["drop"] != records(tmp_path / "alone")["drop"]


@pytest.mark.parametrize("name", ["fedawe", "fedpbc"])
def test_clients_that_begin_elsewhere_need_masked_gradients(name: str, tmp_path: Path) -> None:
    table = {**BASE, "client": {"name": name}, "pruning": {"masks_gradient": False}}
    with pytest.raises(ConfigError, match=f"client.name: {name} begins at models of its own, which needs"):
        safari.run(table, tmp_path / "run")


def test_a_checkpoint_whose_tensors_do_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    config = {
        **BASE,
        "arms": ["drop"],
        "rounds": 3,
        "client": {"name": "scaffold"},
        "policy": {"name": "rigl", **MOVING},
        "wire": {"values": "step", "every": 0},
        "checkpoint": {"every": 1},
    }
    with pytest.raises(StoppedError):
        safari.run(config, tmp_path / "run", [Plug(2)])
    (trial,) = RunFolder.open(tmp_path / "run").trials()
    good = trial.load()
    assert good is not None
    for name in (
        "client.variate",
        "policy.gradient",
        "policy.mask",
        "policy.reported",
        "mask",
        "wire.residual",
    ):
        right = good.tensors[name]
        wrong = [right.double(), right.reshape(-1).repeat(2)]
        if name.startswith(("client.", "policy.")):
            trial.save(replace(good, tensors={n: t for n, t in good.tensors.items() if n != name}))
            with pytest.raises(RunError, match=rf"is damaged: {name} must be .*, got nothing"):
                safari.resume(tmp_path / "run")
        for tensor in wrong:
            trial.save(replace(good, tensors={**good.tensors, name: tensor}))
            with pytest.raises(RunError, match=rf"is damaged: {name} must be .*, got "):
                safari.resume(tmp_path / "run")
    trial.save(good)
    safari.resume(tmp_path / "run")


def test_a_client_whose_updates_are_read_as_gradients_needs_sgd(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"local.optimiser must be 'sgd' for client.name mime.*; got 'adam'"
    ):
        safari.run({**BASE, "client": {"name": "mime"}}, tmp_path / "run")
