"""Tests on what each client holds out, the best model so far, and score functions with options."""

from __future__ import annotations

import json
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch

import safari
from runs.kit import TINY
from safari.data import digits
from safari.engine import check
from safari.engine.assembly import assemble
from safari.models import mlp
from safari.runs import RunFolder
from safari.training import evaluate

HELD = {**TINY, "evaluation": {"every": 2, "last": 4, "clients": 0.25}}


def test_clients_hold_samples_out_and_train_on_the_others():
    config = safari.parse(HELD)
    whole = assemble(safari.parse(TINY), 0, digits())
    world = assemble(config, 0, digits())
    for before, left, held in zip(whole.parts, world.parts, world.held, strict=True):
        assert len(held) == round(0.25 * len(before))
        assert np.array_equal(np.sort(np.concatenate([left, held])), np.sort(before))
    again = assemble(config, 0, digits())
    assert all(np.array_equal(a, b) for a, b in zip(world.held, again.held, strict=True))


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_records_have_the_score_of_each_client(tmp_path, engine):
    config = {**HELD, "engine": {**TINY["engine"], "name": engine}}
    summary = safari.run(config, tmp_path / "run", progress=False, report=False)
    run = safari.load(tmp_path / "run")
    world = assemble(run.config, 0, digits())
    record = RunFolder.open(tmp_path / "run").trial("safari", 0).records(4)[-1]
    module = mlp(digits().input_shape, 10, hidden=[8])
    safari.Layout.of(module).write(module, run.model("safari"))
    scores = []
    for held in world.held:
        x, y = world.samples(held)
        scores.append(evaluate(module, x, y, 1000)["top1"])
    assert record.clients["scores"] == pytest.approx(scores)
    assert record.clients["mean"] == pytest.approx(fmean(scores))
    assert record.clients["worst"] == pytest.approx(min(scores))
    assert record.clients["spread"] == pytest.approx(pstdev(scores))
    records = RunFolder.open(tmp_path / "run").trial("safari", 0).records(4)
    assert [r.clients is None for r in records] == [r["top1"] is None for r in records]
    arm = summary["arms"]["safari"]
    last = [r.clients["worst"] for r in records if r.round > 3 and r.clients]
    assert arm["clients_worst"]["mean"] == pytest.approx(fmean(last))
    rounds, clients = run.rounds(), run.clients()
    assert rounds["clients_worst"].notna().sum() == 2 * 4
    assert clients.query("arm == 'safari'")["score"].tolist() == pytest.approx(scores)
    assert "worst client" in repr(run)


def test_of_a_loss_the_largest_is_the_worst(tmp_path):
    from safari.engine.measure import client_spread
    from safari.runs.metrics import RunMetrics
    from safari.tasks import tokens

    found = client_spread([2.0, 5.0, float("nan")], RunMetrics.of(tokens()))
    assert found["mean"] == 3.5
    assert found["worst"] is None, "a score that is not finite cannot be ranked"
    assert client_spread([2.0, 5.0], RunMetrics.of(tokens()))["worst"] == 5.0


def test_without_it_nothing_is_recorded(tmp_path):
    summary = safari.run(TINY, tmp_path / "run", progress=False, report=False)
    line = (tmp_path / "run/trials/drop/seed-0/rounds.jsonl").read_text().splitlines()[-1]
    assert "clients" not in json.loads(line)
    assert not [name for name in summary["arms"]["drop"] if name.startswith("clients")]


def test_a_client_with_one_sample_can_hold_nothing_out(tmp_path):
    (tmp_path / "cut.py").write_text(
        "import numpy as np\n"
        "def lonely(labels, clients, rng):\n"
        "    return [np.array([0]), *np.array_split(np.arange(1, len(labels)), clients - 1)]\n"
    )
    config = safari.parse({**HELD, "partition": {"name": f"{tmp_path}/cut.py:lonely"}})
    assert check(config) == ["evaluation.clients needs at least 2 samples of each client; client 0 has 1"]


BEST = {**TINY, "evaluation": {"every": 1, "last": 4}, "checkpoint": {"every": 3, "best": True}}


def test_the_best_model_is_kept(tmp_path):
    safari.run(BEST, tmp_path / "run", progress=False, report=False)
    run = safari.load(tmp_path / "run")
    trial = RunFolder.open(tmp_path / "run").trial("drop", 0)
    records = trial.records()
    best = max(records, key=lambda record: record["top1"])
    saved = trial.read_best()
    assert (saved.round, saved.facts["metrics"]["top1"]) == (best.round, best["top1"])
    module = mlp(digits().input_shape, 10, hidden=[8])
    safari.Layout.of(module).write(module, run.model("drop", best=True))
    assert evaluate(module, digits().test_x, digits().test_y, 1000)["top1"] == pytest.approx(best["top1"])


def test_it_is_the_same_after_a_resume_and_gone_after_a_rewind(tmp_path):
    safari.run(BEST, tmp_path / "whole", progress=False, report=False)
    safari.run({**BEST, "rounds": 4}, tmp_path / "run", progress=False, report=False)
    path = tmp_path / "run/config.toml"
    path.write_text(path.read_text().replace("rounds = 4", "rounds = 7"))
    safari.resume(tmp_path / "run", progress=False, report=False)
    for arm in ("drop", "safari"):
        files = [tmp_path / name / f"trials/{arm}/seed-0/best.safetensors" for name in ("whole", "run")]
        assert files[0].read_bytes() == files[1].read_bytes()
    trial = RunFolder.open(tmp_path / "whole").trial("safari", 0)
    found = trial.read_best().round
    trial.rewind(3)
    assert trial.has_best() == (found <= 3)
    assert (trial.path / "cut-1/best.safetensors").exists()


def test_none_is_kept_unless_asked(tmp_path):
    safari.run({**TINY, "rounds": 2}, tmp_path / "run", progress=False, report=False)
    with pytest.raises(safari.SafariError, match=r"keeps no best model: checkpoint\.best is off"):
        safari.load(tmp_path / "run").model("drop", best=True)


PRUNER = '''
import safari
from safari.models import prunable_parameters

def powered(module, batch, generator, *, power: float = 1.0, sign: int = 1):
    """Magnitude to a power, the largest or the smallest first."""
    return {name: sign * w.detach().abs() ** power for name, w in prunable_parameters(module).items()}

shared = safari.Pruner(powered, needs_data=False)
'''


def test_a_score_function_gets_its_options(tmp_path):
    (tmp_path / "mine.py").write_text(PRUNER)

    def mask(**pruning):
        config = {**TINY, "pruning": {"pruner": f"{tmp_path}/mine.py:shared", **pruning}}
        world = assemble(safari.parse(config), 0, digits())
        return world.mask(world.start, 0, 0)

    plain = mask()
    assert torch.equal(plain, mask(options={"power": 2.0}))
    smallest = mask(options={"sign": -1})
    assert not torch.equal(plain, smallest)
    mag = assemble(safari.parse(TINY), 0, digits())
    assert torch.equal(plain, mag.mask(mag.start, 0, 0))


@pytest.mark.parametrize(
    ("pruning", "problem"),
    [
        (
            {"options": {"powr": 2.0}},
            "pruning.options.powr is not an option (allowed: power, sign) (did you mean 'power'?)",
        ),
        ({"options": {"power": "two"}}, "pruning.options.power must be a number, got 'two'"),
        ({"pruner": "mag", "options": {"power": 2.0}}, "pruning.options: mag has none, got power"),
    ],
)  # fmt: skip
def test_wrong_options_of_a_score_function_are_reported(tmp_path, pruning, problem):
    (tmp_path / "mine.py").write_text(PRUNER)
    config = {**TINY, "pruning": {"pruner": f"{tmp_path}/mine.py:shared", **pruning}}
    assert check(safari.parse(config)) == [problem]


def test_options_must_be_a_table_and_stay():
    with pytest.raises(safari.ConfigError, match=r"pruning\.options must be a table, got 3"):
        safari.parse({"pruning": {"options": 3}})
