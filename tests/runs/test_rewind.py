"""Several checkpoints, and the way back to one: what is cut off is kept, what follows is bit-equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import safari
from runs.kit import TINY, checkpoints, leftovers, results
from safari.cli import cli
from safari.errors import RunError
from safari.runs import RunFolder, Saved, Trial, files, read_checkpoint, read_lines

# Checkpoints after rounds 3, 6, 9, 12 and 14.
LONGER = {**TINY, "rounds": 14, "checkpoint": {"every": 3, "keep": 3}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    safari.run(LONGER, path)
    return path


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def trial(run) -> Trial:
    return RunFolder.open(run).trial("safari", 0)


def everything(run: Path) -> dict[str, bytes]:
    """Records and all checkpoints, older ones too."""
    older = sorted(run.glob("trials/*/*/checkpoint-*.safetensors"))
    return results(run) | checkpoints(run) | {str(p.relative_to(run)): p.read_bytes() for p in older}


def names(trial: Trial) -> list[str]:
    return sorted(path.name for path in trial.path.glob("checkpoint*"))


def test_the_last_few_are_kept_and_the_newest_has_the_plain_name(trial):
    assert names(trial) == [
        "checkpoint-000009.safetensors",
        "checkpoint-000012.safetensors",
        "checkpoint.safetensors",
    ]
    assert trial.checkpoints() == [9, 12, 14]
    assert read_checkpoint(trial.checkpoint).round == trial.done() == 14


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_as_many_are_kept_as_were_asked_for(tmp_path, keep):
    trial = Trial("drop", 0, tmp_path)
    for number in range(1, 5):
        trial.append({"round": number}, {})
        trial.save(Saved(number, {"model": torch.full((2,), float(number))}, {}), keep)
    assert trial.checkpoints() == [1, 2, 3, 4][-keep:]
    for number, path in {
        n: tmp_path / f"checkpoint-{n:06d}.safetensors" for n in trial.checkpoints()[:-1]
    }.items():
        assert read_checkpoint(path).tensors["model"].tolist() == [number, number]
    # Fewer from now on.
    trial.append({"round": 5}, {})
    trial.save(Saved(5, {}, {}), 1)
    assert names(trial) == ["checkpoint.safetensors"]


@pytest.mark.parametrize("target", [0, 9, 12, 14])
def test_what_follows_is_bit_equal_and_what_was_cut_off_is_kept(run, finished, target):
    safari.resume(run, from_round=target)
    assert everything(run) == everything(finished)
    assert leftovers(run) == []
    for arm in ("drop", "safari"):
        place = f"trials/{arm}/seed-0"
        if target == 14:
            assert not (run / place / "cut-1").exists()
            continue
        for name in ("rounds.jsonl", "timings.jsonl", "similarity.jsonl"):
            if name == "similarity.jsonl" and arm == "drop":
                continue
            lines = (finished / place / name).read_bytes().splitlines(keepends=True)
            assert (run / place / "cut-1" / name).read_bytes() == b"".join(lines[target:])
        later = [n for n in (9, 12, 14) if n > target]
        kept = sorted((run / place / "cut-1").glob("*.safetensors"))
        assert [path.name for path in kept] == [f"checkpoint-{n:06d}.safetensors" for n in later]
        assert kept[-1].read_bytes() == (finished / place / "checkpoint.safetensors").read_bytes()


def test_going_back_twice_keeps_both(run, trial):
    safari.resume(run, from_round=12)
    safari.resume(run, from_round=9)
    kept = {n: [line["round"] for line in read_lines(trial.path / f"cut-{n}/rounds.jsonl")] for n in (1, 2)}
    assert kept == {1: [13, 14], 2: [10, 11, 12, 13, 14]}


def test_a_trial_that_is_not_so_far_is_left_alone(run, finished):
    behind = run / "trials/drop/seed-0"
    shutil.rmtree(behind)
    safari.resume(run, from_round=12)
    assert results(run) == results(finished)
    assert not (behind / "cut-1").exists()


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (3, "has no checkpoint of round 3; it has those of 0, 9, 12, 14"),
        (13, "has no checkpoint of round 13; it has those of 0, 9, 12, 14"),
        (-1, "the round to go back to must be at least 0, got -1"),
    ],
)
def test_a_round_without_a_checkpoint_is_refused_and_nothing_changes(run, target, problem):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(RunError) as error:
        safari.resume(run, from_round=target)
    assert problem in str(error.value)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_all_trials_are_looked_at_before_one_goes_back(run):
    (run / "trials/safari/seed-0/checkpoint-000009.safetensors").unlink()
    before = everything(run)
    with pytest.raises(RunError, match="no checkpoint of round 9; it has those of 0, 12, 14"):
        safari.resume(run, from_round=9)
    assert everything(run) == before
    assert list(run.rglob("cut-*")) == []


@pytest.mark.parametrize("step", range(14))
def test_a_stop_at_any_step_of_the_way_back_loses_nothing(run, finished, monkeypatch, step):
    """Each thing that is done to a file, in turn, is where the process is stopped."""
    left = step

    def stopping(do):
        def act(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return do(*arguments, **options)

        return act

    folder = RunFolder.open(run)
    with monkeypatch.context() as patch, folder.writing():
        for name in ("remove", "rename", "duplicate", "write_atomically", "keep_lines"):
            patch.setattr(files, name, stopping(getattr(files, name)))
        with pytest.raises(KeyboardInterrupt):
            folder.rewind(9)
    safari.resume(run)
    assert {k: v for k, v in everything(run).items() if "checkpoint-" not in k} == {
        k: v for k, v in everything(finished).items() if "checkpoint-" not in k
    }
    for arm in ("drop", "safari"):
        text = (run / f"trials/{arm}/seed-0/rounds.jsonl").read_bytes()
        for kept in run.glob(f"trials/{arm}/seed-0/cut-*/rounds.jsonl"):
            assert text.endswith(kept.read_bytes())


def test_a_round_that_the_run_never_has_is_refused(run):
    rounds, before = RunFolder.open(run).config.rounds, everything(run)
    with pytest.raises(RunError, match=f"has {rounds} rounds: it cannot go back to round {rounds + 1}$"):
        safari.resume(run, from_round=rounds + 1)
    assert everything(run) == before


def test_the_run_of_a_federation_goes_back_but_not_on(run, finished, trial):
    """Only the federation can go on with it."""
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({**environment, "flwr": "1.41"}))
    done = CliRunner().invoke(cli, ["resume", str(run), "--from", "9"])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1] == "start the federation again to go on from there"
    assert trial.done() == len(trial.records()) == 9
    for use in (lambda: safari.resume(run), lambda: safari.resume(run, from_round=9)):
        with pytest.raises(
            RunError, match="was made by a Flower federation, and goes on when that is started"
        ):
            use()


def test_without_hard_links_copies_do(run, finished, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    safari.resume(run, from_round=0)
    assert everything(run) == everything(finished)


# --- what a checkpoint says of itself


def rewritten(path: Path, about: dict | None = None, **tensors: torch.Tensor) -> None:
    """The file with other facts or tensors, as a mistake or a stranger would leave it."""
    table = json.loads(_head(path))
    save_file(load_file(path) | tensors, path, {"safari": json.dumps(table | (about or {}))})


def _head(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as handle:
        return handle.metadata()["safari"]


def test_a_flipped_bit_is_noticed_and_the_way_back_is_named(run, finished, trial):
    data = bytearray(trial.checkpoint.read_bytes())
    data[-3] ^= 1
    trial.checkpoint.write_bytes(data)
    records = trial.rounds.read_bytes()
    with pytest.raises(RunError) as error:
        safari.resume(run)
    assert str(error.value) == (
        f"{trial.checkpoint} is damaged: its digest is not that of its contents "
        "(there are older ones, of rounds 9, 12: see safari resume --from)"
    )
    assert trial.rounds.read_bytes() == records
    safari.resume(run, from_round=12)
    assert everything(run) == everything(finished)


@pytest.mark.parametrize("kept", [0, 5, 100])
@pytest.mark.parametrize("lines", [14, 12])
def test_there_is_a_way_back_from_a_checkpoint_that_ends_early(run, finished, trial, kept, lines):
    damaged = trial.checkpoint.read_bytes()[:kept]
    trial.checkpoint.write_bytes(damaged)
    files.keep_lines(trial.rounds, lines, run)
    records = trial.rounds.read_bytes()
    with pytest.raises(RunError) as error:
        safari.resume(run)
    assert str(error.value).startswith(f"{trial.checkpoint} is not a readable checkpoint: ")
    assert str(error.value).endswith(" (there are older ones, of rounds 9, 12: see safari resume --from)")
    assert (trial.rounds.read_bytes(), trial.checkpoint.read_bytes()) == (records, damaged)
    with pytest.raises(RunError, match=r"has no checkpoint of round 10; it has those of 0, 9, 12$"):
        trial.can_rewind(10)
    trial.best.write_bytes(damaged)
    safari.resume(run, from_round=12)
    assert everything(run) == everything(finished)
    for path in (trial.checkpoint, trial.best):
        assert (trial.path / "cut-1" / path.name).read_bytes() == damaged
    assert not trial.best.exists()


@pytest.mark.parametrize("about", [{"round": 12}, {"seed": 3}, {"facts": {}}, {"digest": "0" * 64}])
def test_round_seed_facts_and_digest_belong_together(run, trial, about):
    rewritten(trial.checkpoint, about)
    with pytest.raises(RunError, match=r"is damaged: its digest is not|is of seed 3, not of seed 0"):
        safari.resume(run)


def test_a_checkpoint_of_another_seed_is_refused(run, trial, tmp_path):
    safari.run({**LONGER, "seed": 1}, tmp_path / "other")
    shutil.copy(tmp_path / "other/trials/safari/seed-1/checkpoint.safetensors", trial.checkpoint)
    with pytest.raises(RunError, match=r"checkpoint.safetensors is of seed 1, not of seed 0"):
        safari.resume(run)


def test_an_older_checkpoint_under_another_round_s_name_is_refused(run, trial):
    shutil.copy(trial.checkpoint, trial.path / "checkpoint-000012.safetensors")
    with pytest.raises(RunError, match=r"checkpoint-000012.safetensors is of round 14, not of round 12"):
        safari.resume(run, from_round=12)
