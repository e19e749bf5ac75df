"""Presets: every one is a config that can run, and `--set` comes after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from safari.cli import cli
from safari.cli.options import read_config
from safari.config import Config
from safari.engine import check
from safari.presets import PRESETS, preset
from safari.toml import read_toml


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_run(name: str) -> None:
    assert check(read_config(None, preset(name))) == []


def test_best_is_the_recipe_and_set_has_the_last_word(tmp_path: Path) -> None:
    words = [
        "run",
        "--preset",
        "best",
        "--set",
        "rounds=2",
        "--set",
        "model.name=mlp",
        "--set",
        "local.lr=0.02",
    ]
    found = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "run"), "-q"])
    assert found.exit_code == 0, found.output
    table = read_toml(tmp_path / "run" / "config.toml")
    assert table["client"] == {"name": "mime", "momentum": 0.8, "second": 0.999, "strength": 1.0}
    assert table["pruning"]["scope"] == "erk"
    assert table["local"]["lr"] == 0.02
    assert table["arms"] == [{"name": "recipe", "rule": "safari+"}]


def test_a_misspelt_preset_is_one_line() -> None:
    found = CliRunner().invoke(cli, ["run", "--preset", "bset"])
    assert (
        str(found.exception) == "preset must be one of best, demo, paper; got 'bset' (did you mean 'best'?)"
    )


def test_the_demos_fifth_arm_has_the_clients_of_the_recipe() -> None:
    demo, best = read_config(None, preset("demo")), read_config(None, preset("best"))
    assert [arm.name for arm in demo.arms] == [arm.name for arm in Config().arms] + ["recipe"]
    own = demo.for_arm(demo.arms[-1])
    assert (own.pruning, own.local, own.client) == (best.pruning, best.local, best.client)
    assert demo.arms[-1].rule == best.arms[0].rule
