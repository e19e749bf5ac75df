"""Checkpoints and records that are corrupt, foreign or out of step: clear errors, nothing destroyed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

import safari
from runs.kit import TINY, checkpoints, results
from safari.errors import RunError
from safari.runs import RunFolder, Saved, Trial, checkpoint, read_checkpoint, read_lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    safari.run(TINY, path)
    return path


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def trial(run) -> Trial:
    return RunFolder.open(run).trial("drop", 0)


def change(run: Path, before: str, after: str) -> None:
    text = (run / "config.toml").read_text()
    assert text.count(before) == 1
    (run / "config.toml").write_text(text.replace(before, after))


def saved(round: int) -> Saved:
    return Saved(round, {"model": torch.arange(3.0)}, {"layout": "abc", "pair": [1, 2]})


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    trial = Trial("drop", 0, tmp_path)
    trial.append({"round": 1}, {})
    odd = {
        "model": torch.tensor([0.1, -0.0, float("inf"), 1e-45]),
        "rule.similarity": torch.full((2, 2), torch.nan),
        "uplink.up": torch.tensor([True, False]),
        "uplink.p": torch.tensor([0.1], dtype=torch.float64),
        "rule.count": torch.tensor(3),
    }
    trial.save(Saved(1, odd, {"layout": "abc"}))
    loaded = trial.load()
    assert (loaded.round, loaded.facts) == (1, {"layout": "abc"})
    assert {n: (t.dtype, t.shape, t.numpy().tobytes()) for n, t in loaded.tensors.items()} == {
        n: (t.dtype, t.shape, t.numpy().tobytes()) for n, t in odd.items()
    }


@pytest.mark.parametrize("dtype", checkpoint._TYPES)
def test_the_file_is_what_safetensors_reads(dtype):
    """Of each type: none, one and several numbers, a part of a tensor, and one across pieces."""
    whole = torch.arange(60).reshape(3, 20).to(dtype)
    tensors = {"é": whole, "turned": whole.T, "empty": whole[:0], "one": whole[0, 1], "z": whole[1:, 3:9]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_PIECE", 64)
        data = b"".join(checkpoint.to_chunks(Saved(1, tensors | {"flag": torch.tensor(True)}, {}), 0))
    found = load(data)
    assert found.pop("flag").item() is True
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)


def test_a_large_state_is_written_from_where_it_is():
    large = torch.zeros(2, 3 * checkpoint._PIECE // 8)
    pieces = [
        np.frombuffer(p, np.uint8) for p in checkpoint.to_chunks(Saved(1, {"rule.updates": large}, {}), 0)
    ]
    assert [len(p) for p in pieces[2:]] == [checkpoint._PIECE] * 3
    assert all(np.shares_memory(p, large.numpy()) for p in pieces[2:])


def test_large_checkpoints_are_fewer_unless_the_config_says_how_often(tmp_path, monkeypatch):
    config = {**TINY, "rounds": 7, "arms": ["drop", "mifa"], "checkpoint": {"keep": 9}}
    safari.run({**config, "rounds": 1}, tmp_path / "one")
    size = (tmp_path / "one/trials/mifa/seed-0/checkpoint.safetensors").stat().st_size
    monkeypatch.setattr("safari.engine.experiment._USUAL", 1)
    monkeypatch.setattr(checkpoint, "_A_ROUND", size // 2)
    safari.run(config, tmp_path / "auto")
    often = {"checkpoint": {"keep": 9, "every": 2}}
    safari.run(config | often, tmp_path / "said")
    made = {
        (name, trial.arm): trial.checkpoints()
        for name in ("auto", "said")
        for trial in RunFolder.open(tmp_path / name).trials()
    }
    assert made == {
        ("auto", "drop"): [1, 2, 3, 4, 5, 6, 7],
        ("auto", "mifa"): [2, 4, 6, 7],
        ("said", "drop"): [2, 4, 6, 7],
        ("said", "mifa"): [2, 4, 6, 7],
    }


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path):
    trial = Trial("drop", 0, tmp_path)
    trial.append({"round": 1}, {})
    with pytest.raises(
        RunError, match=r"rule.z must be a tensor that a checkpoint can hold, got one of torch.compl"
    ):
        trial.save(Saved(1, {"rule.z": torch.zeros(2, dtype=torch.complex128)}, {}))
    assert not list(tmp_path.glob("*checkpoint*"))


def test_tensors_come_back_aligned_as_torch_allocates_them(tmp_path):
    # Where a tensor begins decides how torch groups its sums: mapped from the file, a resumed run rounds otherwise.
    trial = Trial("drop", 0, tmp_path)
    trial.append({"round": 1}, {})
    odd = {f"rule.{k}": torch.arange(float(k)) for k in range(1, 12)}
    trial.save(Saved(1, odd, {}))
    assert {t.data_ptr() % 64 for t in read_checkpoint(trial.checkpoint).tensors.values()} == {0}


def test_tensors_that_share_memory_can_be_saved(tmp_path):
    # A rule may keep a whole and a view of it, or one tensor under two names.
    trial = Trial("drop", 0, tmp_path)
    trial.append({"round": 1}, {})
    whole = torch.arange(6.0).view(2, 3)
    shared = {"rule.all": whole, "rule.first": whole[0], "rule.turned": whole.T, "rule.again": whole}
    trial.save(Saved(1, shared, {}))
    for name, tensor in read_checkpoint(trial.checkpoint).tensors.items():
        assert torch.equal(tensor, shared[name])


def test_loading_cuts_the_records_back_to_the_checkpoint(tmp_path):
    trial = Trial("drop", 0, tmp_path)
    for number in range(1, 6):
        trial.append({"round": number}, {"train": 0.1})
        if number == 3:
            trial.save(saved(3))
    assert trial.load().round == 3
    assert [line["round"] for line in read_lines(trial.rounds)] == [1, 2, 3]
    assert [line["round"] for line in read_lines(trial.timings)] == [1, 2, 3]


def test_without_a_checkpoint_the_records_begin_again(tmp_path):
    trial = Trial("drop", 0, tmp_path)
    trial.append({"round": 1}, {})
    assert trial.load() is None
    assert trial.records() == []
    assert trial.timings.read_bytes() == b""


@pytest.mark.parametrize("tail", [b'{"round": 8, "lo', b"\x00\xff\x00", b"{}"])
def test_a_half_line_is_left_out_when_read_and_cut_off_when_resumed(run, finished, trial, tail):
    with trial.rounds.open("ab") as file:
        file.write(tail)
    assert [line["round"] for line in read_lines(trial.rounds)] == [1, 2, 3, 4, 5, 6, 7]
    safari.resume(run)
    assert results(run) == results(finished)


def test_garbage_among_the_records_names_the_line_and_stays(run, trial):
    lines = trial.rounds.read_bytes().splitlines(keepends=True)
    for garbage, problem in [
        (b"\xff\xfe\n", "line 4 is not a round's record: not JSON ("),
        (b'{"round": 4,\n', "line 4 is not a round's record: not JSON ("),
        (b"[1, 2]\n", "line 4 is not a round's record: not a JSON object but list"),
    ]:
        spoilt = b"".join([*lines[:3], garbage, *lines[4:]])
        trial.rounds.write_bytes(spoilt)
        for use in (trial.records, lambda: safari.resume(run)):
            with pytest.raises(RunError) as error:
                use()
            assert str(error.value).startswith(f"{trial.rounds}, {problem}")
        assert trial.rounds.read_bytes() == spoilt


def test_records_that_are_shorter_than_the_checkpoint(run, trial):
    lines = trial.rounds.read_bytes().splitlines(keepends=True)
    trial.rounds.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    with pytest.raises(RunError) as error:
        safari.resume(run)
    assert str(error.value) == f"{trial.path}: the checkpoint is of round 7, the records end at 5"
    trial.rounds.unlink()
    with pytest.raises(RunError, match="the checkpoint is of round 7, the records end at 0"):
        safari.resume(run)


def test_a_corrupt_checkpoint_is_named_and_the_records_are_kept(run, trial):
    whole, records = trial.checkpoint.read_bytes(), trial.rounds.read_bytes()
    flipped = bytearray(whole)
    flipped[3] ^= 0xFF
    for spoilt in (b"", whole[:7], whole[:100], whole[:-1], whole + b"x", bytes(flipped), b"garbage" * 999):
        trial.checkpoint.write_bytes(spoilt)
        with pytest.raises(RunError) as error:
            safari.resume(run)
        assert str(error.value).startswith(f"{trial.checkpoint} is not a readable checkpoint: ")
        assert trial.rounds.read_bytes() == records
        assert trial.checkpoint.read_bytes() == spoilt


def test_a_folder_where_the_checkpoint_should_be(run, trial):
    trial.checkpoint.unlink()
    trial.checkpoint.mkdir()
    with pytest.raises(RunError, match=r"checkpoint.safetensors is a folder; only plain files are used"):
        safari.resume(run)


def test_a_checkpoint_of_another_format(run, trial):
    unreadable = " is not a readable checkpoint: "
    for about, problem in [
        (None, ": format must be safari-run-1, got None"),
        ('{"format": "safari-run-2"}', ": format must be safari-run-1, got 'safari-run-2'"),
        ('{"format": "safari-run-1"}', ": round must be a whole number of at least 0, got None"),
        ('{"format": "safari-run-1", "round": 7}', ": seed must be a whole number of at least 0, got None"),
        ('{"format": "safari-run-1", "round": 7, "seed": 0}', ": digest must be a text, got None"),
        *(
            (
                f'{{"format": "safari-run-1", {fields}, "facts": {{}}}}',
                f": {name} must be a whole number of at least 0, got {shown}",
            )
            for fields, name, shown in [
                ('"round": "x"', "round", "'x'"),
                ('"round": -1', "round", "-1"),
                ('"round": 1e999', "round", "inf"),
                ('"round": 2, "seed": Infinity', "seed", "inf"),
            ]
        ),
        (
            '{"format": "safari-run-1", "round": 7, "seed": 0, "digest": "", "facts": 3}',
            unreadable + "'int' object",
        ),
        ("[]", unreadable + "'list' object"),
        ("{", unreadable + "Expecting"),
    ]:
        save_file({"model": torch.zeros(3)}, trial.checkpoint, None if about is None else {"safari": about})
        with pytest.raises(RunError) as error:
            safari.resume(run)
        assert str(error.value).startswith(f"{trial.checkpoint}{problem}")


def test_a_checkpoint_of_another_model_is_refused_by_name(run, trial, tmp_path):
    safari.run({**TINY, "model": {"name": "mlp", "hidden": [9]}}, tmp_path / "other")
    shutil.copy(tmp_path / "other/trials/drop/seed-0/checkpoint.safetensors", trial.checkpoint)
    with pytest.raises(RunError, match=r"another config: model.hidden was \[9\] and is \[8\]"):
        safari.resume(run)
    change(run, "rounds = 7", "rounds = 8")
    with pytest.raises(RunError) as error:
        safari.resume(run)
    assert str(error.value) == (
        f"{trial.checkpoint} is of another model: names, shapes or kinds of its tensors differ"
    )


def test_a_checkpoint_whose_tensors_are_missing_or_cut_is_refused(run, trial):
    change(run, "rounds = 7", "rounds = 8")
    good = read_checkpoint(trial.checkpoint)
    for tensors in ({}, {"model": good.tensors["model"][:-1]}):
        trial.save(Saved(good.round, tensors, good.facts))
        with pytest.raises(RunError, match=r"checkpoint.safetensors is of another model: "):
            safari.resume(run)


def test_one_bad_trial_does_not_touch_the_others(run, finished, trial):
    trial.checkpoint.write_bytes(b"garbage")
    with pytest.raises(RunError):
        safari.resume(run)
    mended = finished / "trials/drop/seed-0/checkpoint.safetensors"
    shutil.copy(mended, trial.checkpoint)
    safari.resume(run)
    assert results(run) == results(finished)
    assert checkpoints(run) == checkpoints(finished)


def test_resuming_a_finished_run_changes_nothing(run, finished):
    first = json.loads((run / "summary.json").read_text())
    assert safari.resume(run) == first
    assert results(run) == results(finished)
    assert checkpoints(run) == checkpoints(finished)


def test_a_config_that_was_changed_after_the_start_is_refused_field_by_field(run, trial):
    change(run, "lr = 0.001", "lr = 0.1")
    change(run, "burst = 3.0", "burst = 4.0\ngood = 0.9")
    with pytest.raises(RunError) as error:
        safari.resume(run)
    assert str(error.value) == (
        f"{trial.checkpoint} was made under another config: local.lr was 0.001 and is 0.1; "
        "uplink.burst was 3.0 and is 4.0; uplink.good was None and is 0.9. "
        "Put that back, or begin a new run"
    )


def test_an_arm_whose_rule_was_changed_is_refused(run):
    change(run, 'arms = ["drop", "safari"]', 'arms = [{name = "drop", rule = "safari"}]')
    with pytest.raises(RunError, match=r"another config: rule.name was 'drop' and is 'safari'. Put"):
        safari.resume(run)


def test_more_arms_seeds_and_rounds_can_be_asked_for_later(run, tmp_path):
    change(run, "rounds = 7", "rounds = 9")
    change(run, "seeds = 1", "seeds = 2")
    change(run, 'arms = ["drop", "safari"]', 'arms = ["drop", "safari", "perfect"]')
    change(run, "every = 2", "every = 1")
    safari.resume(run)
    bigger = {**TINY, "rounds": 9, "seeds": 2, "arms": ["drop", "safari", "perfect"]}
    safari.run({**bigger, "evaluation": {"every": 1, "last": 4}}, tmp_path / "at once")
    assert checkpoints(run) == checkpoints(tmp_path / "at once")
