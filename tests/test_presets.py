"""Presets: every one is a config that can run, and `--set` comes after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from safari.cli import cli
from safari.cli.options import read_config
from safari.config import Config, parse
from safari.data import from_tensors
from safari.engine import assemble, check
from safari.presets import PRESETS
from safari.runs import RunFolder
from safari.toml import read_toml, to_toml
from safari.view.page import freeze


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_run(name: str) -> None:
    assert check(read_config(None, (), presets=[name])) == []


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
    demo, best = read_config(None, (), presets=["demo"]), read_config(None, (), presets=["best"])
    assert [arm.name for arm in demo.arms] == [arm.name for arm in Config().arms] + ["recipe"]
    own = demo.for_arm(demo.arms[-1])
    assert (own.pruning, own.local, own.client) == (best.pruning, best.local, best.client)
    assert demo.arms[-1].rule == best.arms[0].rule


X = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
LABELS = {
    "classification": np.arange(40) % 3,
    "regression": 1000 * X[:, :1],
    "multilabel": X[:, :3] > 0,
}


@pytest.mark.parametrize("arms", ["best", "recipe"])
@pytest.mark.parametrize("task", LABELS)
def test_the_recipe_fits_every_task(task: str, arms: str) -> None:
    """Losses are calibrated by counts of classes: there are none to count elsewhere."""
    own = [f"task.name={task}", "model.name=mlp", "partition.name=iid", "clients=5"]
    if arms == "recipe":
        own.append('arms=["recipe"]')
    config = read_config(None, own, presets=["best"] if arms == "best" else [])
    data = from_tensors("toy", (X, LABELS[task]), (X, LABELS[task]))
    (group,) = config.arm_groups()
    world = assemble(group, 0, data)
    assert world.config.client.name == "mime"
    assert world.config.client.options.get("strength") == (1.0 if task == "classification" else None)


@pytest.mark.parametrize(("cohort", "few"), [(0, False), (26, False), (25, True), (1, True)])
def test_best_where_few_of_many_clients_are_asked(cohort: int, few: bool) -> None:
    """Perplexity on text, 10 of 100 asked: 4.9 with feedback and an 80th, 3.1 with a 20th and without."""
    wire = read_config(None, ["clients=100", f"cohort={cohort}", "uplink.p=0.3"], presets=["best"]).wire
    assert (wire.feeds_back, wire.ratio) == ((False, 20.0) if few else (True, 80.0))
    mine = read_config(None, ["clients=100", f"cohort={cohort}", "wire.feedback=true"], presets=["best"]).wire
    assert mine.feeds_back


def test_another_plug_in_than_a_presets_does_not_get_its_options() -> None:
    config = read_config(None, ["client.name=fedprox"], presets=["best"])
    assert (config.client.name, dict(config.client.options)) == ("fedprox", {})


def test_recipe_is_an_arm_everywhere(tmp_path: Path) -> None:
    demo = read_config(None, (), presets=["demo"])
    wanted = (demo.arms[1], demo.arms[-1])
    assert parse({"arms": ["drop", "recipe"]}).arms == wanted
    assert read_config(None, ["arms=drop,recipe"]).arms == wanted
    file = tmp_path / "mine.toml"
    file.write_text('arms = ["drop", "recipe"]\n')
    assert read_config(file, ()).arms == wanted
    # A run's folder names every setting of it, so that a later recipe does not change what a run was.
    file.write_text(to_toml(read_config(file, ())))
    assert "recipe" in file.read_text()
    assert parse(read_toml(file)).arms == wanted
    assert parse(read_toml(file)).to_dict()["arms"][1]["set"]["client"]["name"] == "mime"


def test_the_page_says_what_an_arm_changes(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", parse({"arms": ["safari+", "recipe"]}))
    (described,) = freeze([run], {"safari+": "Ours."})["runs"]["runs"]
    plain, recipe = described["arms"]
    assert (plain["about"], plain["changes"]) == ("Ours.", [])
    assert (recipe["rule"], recipe["about"]) == ("safari+", "Ours.")
    assert {"client.name = mime", "pruning.scope = erk", "local.lr = 0.015"} <= set(recipe["changes"])
