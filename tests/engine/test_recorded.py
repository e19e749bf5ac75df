"""Records of short runs, as earlier versions computed them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import short_runs
from engine.recorded_runs import RECORDED, configs, digest, machine, records_of

TABLE = json.loads(RECORDED.read_text())
SHORT = json.loads(short_runs.RECORDED.read_text())
# Of the longer runs, what the short ones do not cover; all of them take 14 seconds.
DEFAULT = ("demo", "grasp-vectorised", "synflow-vectorised")


def _case(name: str, config: dict) -> object:
    return pytest.param(name, config, id=name, marks=() if name in DEFAULT else pytest.mark.slow)


@pytest.mark.parametrize(("name", "config"), [_case(*each) for each in configs()])
def test_records_are_as_they_were(name: str, config: dict, tmp_path: Path) -> None:
    found = records_of(config, tmp_path / "run")
    kept = TABLE[name]
    assert found.keys() == kept.keys()
    for arm, lines in found.items():
        # On other hardware sums are rounded in another order.
        assert [line["loss"] for line in lines] == pytest.approx(kept[arm]["loss"], rel=0.02)
    digests = {
        arm: entry["digests"][machine()] for arm, entry in kept.items() if machine() in entry["digests"]
    }
    assert {arm: digest(lines) for arm, lines in found.items() if arm in digests} == digests


@pytest.mark.parametrize(("name", "config"), [pytest.param(n, c, id=n) for n, c in short_runs.configs()])
def test_short_runs_are_as_they_were(name: str, config: dict) -> None:
    check_short(name, *short_runs.play(config))


@pytest.mark.parametrize("name", short_runs.FEDERATIONS)
def test_short_federations_are_as_they_were(name: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")
    check_short(name, *short_runs.federate(name, tmp_path / "run"))


def check_short(name: str, lines: list, models: list) -> None:
    kept = SHORT[name]
    if machine() in kept["digests"]:
        assert short_runs.digest(lines, models) == kept["digests"][machine()]
        return
    # On other hardware sums are rounded in another order, and lossy values break ties in another way.
    losses = [line["train_loss"] for line in lines]
    assert [loss is None for loss in losses] == [loss is None for loss in kept["losses"]]
    known = [loss for loss in losses if loss is not None]
    assert known == pytest.approx([loss for loss in kept["losses"] if loss is not None], rel=0.1)
