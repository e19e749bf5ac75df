"""Records of short runs, as they were before masks, clients and server steps became parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.recorded_runs import RECORDED, configs, digest, machine, records_of

TABLE = json.loads(RECORDED.read_text())


@pytest.mark.parametrize(("name", "config"), [pytest.param(n, c, id=n) for n, c in configs()])
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
