"""Doing the work: nothing twice, interrupted work goes on, processes or none, failures stay alone."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from safari.aggregation import RULES, Compensation
from safari.cli import cli
from safari.errors import RunError
from safari.runs import RunFolder
from safari.sweep import (
    Outcome,
    Results,
    Sweep,
    Unit,
    execute,
    read,
    split_for,
    units_of,
    without_duplicates,
)
from safari.sweep.numbers import maker_of
from sweep.kit import TINY, Listener, write


def tiny(folder: Path, text: str = TINY, **settings: object) -> Sweep:
    (sweep,) = read([write(folder, tiny=text) / "tiny.toml"], list(settings.items()))
    return sweep


def todo(sweep: Sweep, out: Path, results: Results | None = None) -> list[Unit]:
    return [u for c in sweep.cases for u in units_of(c, out, results or Results({}, []), weight=1.0)]


def done(sweep: Sweep, out: Path) -> Results:
    results = Results.open(out)
    results.gather(sweep, out)
    results.save(out)
    return results


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_trials_are_done_once_and_into_runs(tmp_path: Path, jobs: int) -> None:
    sweep, out, heard = tiny(tmp_path), tmp_path / "out", Listener()
    units = todo(sweep, out)
    assert [(u.label, u.rounds) for u in units] == [
        ("tiny/mag seed 0", 12), ("tiny/mag seed 1", 12), ("tiny/rand seed 0", 12), ("tiny/rand seed 1", 12)
    ]  # fmt: skip
    assert execute(units, out, heard, jobs=jobs) == Outcome({}, False)
    assert sorted(heard.ended) == [(u.label, "") for u in units]
    assert heard.rounds == {u.label: 12 for u in units}
    assert todo(sweep, out) == []
    for case in sweep.cases:
        run = RunFolder.open(out / "tiny" / case.folder)
        assert run.config == case.config
        summary = json.loads((run.path / "summary.json").read_text())
        assert all(arm["seeds"]["1"]["finished"] for arm in summary["arms"].values())
    results = done(sweep, out)
    assert execute(todo(sweep, out), out, heard, jobs=jobs) == Outcome({}, False)
    case = sweep.cases[0]
    for arm in case.config.arms:
        records = RunFolder.open(out / "tiny" / case.folder).trial(arm.name, 1).records()
        numbers = results.arm(case, arm)[1]
        assert numbers["top1"] == pytest.approx((records[2]["top1"] + records[3]["top1"]) / 2)
        assert numbers["curve"]["round"] == [1, 2, 3, 4]


def test_processes_and_none_come_to_the_same(tmp_path: Path) -> None:
    sweep = tiny(tmp_path)
    for jobs in (1, 2):
        execute(todo(sweep, tmp_path / str(jobs)), tmp_path / str(jobs), Listener(), jobs=jobs)
    one, two = (sorted((tmp_path / str(jobs)).rglob("rounds.jsonl")) for jobs in (1, 2))
    assert [p.read_text() for p in one] == [p.read_text() for p in two]
    assert len(one) == 12


def test_where_processes_are_idle_arms_go_apart_and_come_to_the_same(tmp_path: Path) -> None:
    sweep, out, heard = tiny(tmp_path, seeds=1), tmp_path / "apart", Listener()
    assert [u.label for u in split_for(todo(sweep, out), 2)] == ["tiny/mag seed 0", "tiny/rand seed 0"]
    # With one unit whole, its process would still have a third of its work to do when the other two had finished.
    pieces = split_for(todo(sweep, out), 3)
    assert [(u.label, dict(u.done), u.rounds) for u in pieces] == [
        (f"tiny/{case} seed 0 {arm}", {arm: 0}, 4)
        for case in ("mag", "rand")
        for arm in ("perfect", "drop", "safari")
    ]
    assert len(split_for(todo(sweep, out), 99)) == 6
    assert split_for([], 3) == []
    assert execute(pieces, out, heard, jobs=2) == Outcome({}, False)
    assert sorted(heard.ended) == sorted((u.label, "") for u in pieces)
    together = tmp_path / "together"
    execute(todo(sweep, together), together, Listener())
    one, two = (sorted(folder.rglob("rounds.jsonl")) for folder in (out, together))
    assert [p.read_text() for p in one] == [p.read_text() for p in two]
    assert len(one) == 6
    assert todo(sweep, out) == []


def test_what_was_begun_goes_on_before_anything_new(tmp_path: Path) -> None:
    first, begun, nearly, last = todo(tiny(tmp_path), tmp_path / "out")
    begun = dataclasses.replace(begun, done={"perfect": 0, "drop": 1, "safari": 0})
    nearly = dataclasses.replace(nearly, done={"safari": 3})
    order = split_for([first, begun, nearly, last], 1)
    assert [u.rounds for u in order] == [11, 1, 12, 12]
    assert order == [begun, nearly, first, last]


def test_units_are_split_where_one_process_would_work_long_after_the_others(tmp_path: Path) -> None:
    """Three units of 12 rounds: two processes have 18 rounds each, and with whole units one would have 24."""
    units = todo(tiny(tmp_path), tmp_path / "out")[:3]
    assert [unit.rounds for unit in split_for(units, 2)] == [12, 12, 4, 4, 4]
    # Four of them are even for two processes, and one process is never idle.
    four = todo(tiny(tmp_path), tmp_path / "out")
    assert [unit.rounds for unit in split_for(four, 2)] == [12] * 4
    assert [unit.rounds for unit in split_for(units, 1)] == [12] * 3
    # A trial that takes longer than all else together: splitting the others would end nothing sooner.
    long = dataclasses.replace(units[0], done={"drop": 0}, weight=100 * units[0].weight)
    assert [unit.rounds for unit in split_for([long, *units[1:]], 2)] == [4, 12, 12]


def test_the_results_alone_is_enough(tmp_path: Path) -> None:
    sweep, out = tiny(tmp_path), tmp_path / "out"
    execute(todo(sweep, out), out, Listener())
    done(sweep, out)
    new = tmp_path / "new"
    new.mkdir()
    (new / "results.json").write_text((out / "results.json").read_text())
    assert todo(sweep, new, Results.open(new)) == []
    more = tiny(tmp_path, seeds=3)
    assert [(u.label, sorted(u.done)) for u in todo(more, new, Results.open(new))] == [
        (f"tiny/{name} seed 2", ["drop", "perfect", "safari"]) for name in ("mag", "rand")
    ]


def test_what_another_sweep_has_run_need_not_run_again(tmp_path: Path) -> None:
    """The same setting under another name, and the same rule under another: one of two cases is known."""
    sweep, out = tiny(tmp_path, seeds=1, arms=["safari"]), tmp_path / "out"
    execute(todo(sweep, out), out, Listener())
    results = done(sweep, out)
    other = TINY.replace("rand =", "sparse =").replace('pruner = "rand"', "sparsity = 0.9")
    write(tmp_path / "two", other=other)
    arms = [{"name": "mine", "rule": "safari"}, "perfect"]
    (second,) = read([tmp_path / "two/other.toml"], [("seeds", 1), ("arms", arms)])
    assert [(u.label, sorted(u.done)) for u in todo(second, tmp_path / "new", results)] == [
        ("other/mag seed 0", ["perfect"]),
        ("other/sparse seed 0", ["mine", "perfect"]),
    ]
    seeds = results.entries["tiny"]["cases"]["mag"]["arms"]["safari"]["seeds"]
    assert results.trial(second.cases[0], second.cases[0].config.arms[0], 0) == seeds["0"]


def test_what_two_sweeps_ask_for_is_run_once_in_one_command(tmp_path: Path) -> None:
    """The same setting in two files, in one of them under another name and with another arm."""
    other = TINY.replace("rand =", "sparse =").replace('pruner = "rand"', "sparsity = 0.9")
    other = other.replace("[axes.pruner]", '[set]\narms = ["perfect", "stale"]\n\n[axes.pruner]')
    other = other.replace("mag =", "same =")
    folder, out = write(tmp_path / "two", tiny=TINY, other=other), tmp_path / "out"
    both = read(sorted(folder.glob("*.toml")), [("seeds", 1)])
    asked = [unit for sweep in both for unit in todo(sweep, out)]
    assert [(u.label, sorted(u.done)) for u in without_duplicates(asked)] == [
        ("other/same seed 0", ["perfect", "stale"]),
        ("other/sparse seed 0", ["perfect", "stale"]),
        ("tiny/mag seed 0", ["drop", "safari"]),
        ("tiny/rand seed 0", ["drop", "perfect", "safari"]),
    ]
    files = [str(path) for path in sorted(folder.glob("*.toml"))]
    done = CliRunner().invoke(cli, ["sweep", *files, "--out", str(out), "--seeds", "1"])
    assert done.exit_code == 0, done.output
    assert "4/4 pieces" in done.stderr
    assert "9 of 9 trials are finished" in done.stderr
    assert Results.open(out).progress(both) == (9, 9)
    assert [Results.open(out).progress([e]) for e in both] == [(4, 4), (6, 6)]
    assert not (out / "tiny" / both[1].cases[0].folder / "trials/perfect").exists()


def test_another_arm_is_added_and_the_others_stay(tmp_path: Path) -> None:
    out, first = tmp_path / "out", tiny(tmp_path, arms=["drop"], seeds=1)
    execute(todo(first, out), out, Listener())
    before = {p: p.stat().st_mtime_ns for p in out.rglob("drop/**/rounds.jsonl")}
    both = tiny(tmp_path, arms=["drop", "safari"], seeds=1)
    assert [dict(unit.done) for unit in todo(both, out)] == [{"safari": 0}] * 2
    execute(todo(both, out), out, Listener())
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("drop/**/rounds.jsonl")}
    assert todo(both, out) == []


def test_an_arm_with_other_options_is_not_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from safari.aggregation import RULES\ndef rule(*, k: int = 1): return RULES['drop']()\n"
    )
    out = tmp_path / "out"

    def arm(k: int) -> Sweep:
        return tiny(tmp_path, arms=[{"name": "mine", "rule": f"{tmp_path}/mine.py:rule", "k": k}], seeds=1)

    execute(todo(arm(1), out), out, Listener())
    assert todo(arm(1), out) == []
    assert len(todo(arm(2), out)) == 2
    heard = Listener()
    failed = execute(todo(arm(2), out), out, heard).failed
    assert "was made under another config: rule.k was 1 and is 2" in failed["tiny/mag seed 0"]


def test_a_rule_whose_default_has_changed_is_not_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(k: int) -> Callable[..., Compensation]:
        def rule(*, k: int = k) -> Compensation:
            return RULES["drop"]()

        return rule

    monkeypatch.setitem(RULES.builtin, "mine", version(1))
    sweep, out = tiny(tmp_path, arms=["mine"], seeds=1), tmp_path / "out"
    execute(todo(sweep, out), out, Listener())
    results = done(sweep, out)
    assert results.entries["tiny"]["cases"]["mag"]["arms"]["mine"]["defaults"] == {"k": 1}
    assert todo(sweep, out) == todo(sweep, tmp_path / "elsewhere", results) == []

    monkeypatch.setitem(RULES.builtin, "mine", version(2))
    assert len(todo(sweep, tmp_path / "elsewhere", results)) == 2
    # Where its rounds lie they are not taken for the new rule's.
    failed = execute(todo(sweep, out), out, Listener()).failed
    assert "was made under another config: defaults.k was 1 and is 2" in failed["tiny/mag seed 0"]
    assert todo(sweep, out) != []

    # Results from before defaults were noted are believed, and noted when more of them come in.
    for case in results.entries["tiny"]["cases"].values():
        del case["arms"]["mine"]["defaults"]
    assert todo(sweep, tmp_path / "elsewhere", results) == []
    more = tiny(tmp_path, arms=["mine"], seeds=2)
    execute(todo(more, tmp_path / "new", results), tmp_path / "new", Listener())
    results.gather(more, tmp_path / "new")
    entry = results.entries["tiny"]["cases"]["mag"]["arms"]["mine"]
    assert (sorted(entry["seeds"]), entry["defaults"]) == (["0", "1"], {"k": 2})


def test_the_time_is_up_and_the_same_call_goes_on(tmp_path: Path) -> None:
    """Also where no checkpoint is due: what has been done when the time is up is saved."""
    sweep, out = tiny(tmp_path, seeds=1, **{"checkpoint.every": 100}), tmp_path / "out"
    ticks = iter(range(10**6))
    # A look at the clock at the start, before each case and before each round.
    ending = execute(todo(sweep, out), out, Listener(), within=10, clock=lambda: next(ticks))
    assert ending == Outcome({}, True)
    left = todo(sweep, out)
    assert [(unit.label, dict(unit.done)) for unit in left] == [
        ("tiny/rand seed 0", {"perfect": 2, "drop": 2, "safari": 2})
    ]
    assert execute(left, out, Listener()) == Outcome({}, False)
    straight = tmp_path / "straight"
    execute(todo(sweep, straight), straight, Listener())
    for path in straight.rglob("rounds.jsonl"):
        assert (out / path.relative_to(straight)).read_text() == path.read_text()


def test_only_folders_in_which_something_was_begun_are_summarised(tmp_path: Path) -> None:
    sweep, out = tiny(tmp_path, seeds=1), tmp_path / "out"
    ticks = iter(range(10**6))
    # The time is up in the first case.
    ending = execute(todo(sweep, out), out, Listener(), within=4, clock=lambda: next(ticks))
    assert ending.stopped
    first, second = (out / "tiny" / case.folder for case in sweep.cases)
    assert (first / "summary.json").exists()
    assert not (second / "summary.json").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_case_that_fails_leaves_the_others_alone(tmp_path: Path, jobs: int) -> None:
    (tmp_path / "bad.py").write_text(
        "from safari.aggregation import Compensation\n"
        "def rule():\n"
        "    def apply(state, round):\n"
        "        raise ValueError('boom')\n"
        "    return Compensation(lambda clients, size, device: {}, apply)\n"
    )
    text = TINY.replace("rand = {", f'rand = {{ arms = ["{tmp_path}/bad.py:rule"],')
    sweep, out = tiny(tmp_path, text, seeds=1), tmp_path / "out"
    heard = Listener()
    ending = execute(todo(sweep, out), out, heard, jobs=jobs)
    assert list(ending.failed) == ["tiny/rand seed 0"]
    assert "ValueError: boom" in ending.failed["tiny/rand seed 0"]
    assert ("tiny/mag seed 0", "") in heard.ended
    assert [unit.label for unit in todo(sweep, out)] == ["tiny/rand seed 0"]


def test_a_folder_that_is_being_written_is_refused(tmp_path: Path) -> None:
    sweep, out = tiny(tmp_path), tmp_path / "out"
    path = out / "tiny" / sweep.cases[0].folder
    busy = RunFolder.create(path, sweep.cases[0].config).writing()
    with busy, pytest.raises(RunError, match="is being written by another process"):
        execute(todo(sweep, out), out, Listener())


def test_an_arm_with_settings_of_its_own_is_told_from_others(tmp_path: Path) -> None:
    own = {"name": "mine", "rule": "drop", "set": {"pruning": {"sparsity": 0.5}}}
    out, sweep = tmp_path / "out", tiny(tmp_path, arms=["drop", own], seeds=1, rounds=2)
    execute(todo(sweep, out), out, Listener())
    results = done(sweep, out)
    case = sweep.cases[0]
    plain, mine = (results.arm(case, arm)[0] for arm in case.config.arms)
    assert mine["rule"] == {"name": "drop", "set": {"pruning": {"sparsity": 0.5}}}
    assert plain["loss"] != mine["loss"]
    # Another setting under the same name is not taken for it, neither from the results nor from the folder.
    other = tiny(tmp_path, arms=["drop", {**own, "set": {"pruning": {"sparsity": 0.6}}}], seeds=1, rounds=2)
    assert [sorted(u.done) for u in todo(other, tmp_path / "new", results)] == [["mine"], ["mine"]]
    assert [sorted(u.done) for u in todo(other, out)] == [["mine"], ["mine"]]


def test_seeds_by_the_hundred_thousand_are_looked_through_at_once(tmp_path: Path) -> None:
    """Each was looked for by itself, in the folder and in all results."""
    case = tiny(tmp_path, seeds=100_000).cases[0]
    drop = case.config.arms[1]
    entry = {"setting": case.setting, "arms": {"drop": {**maker_of(drop), "seeds": {}}}}
    entry["arms"]["drop"]["seeds"] = {str(seed): {"top1": 0.5} for seed in range(50_000)}
    results = Results({"tiny": {"cases": {"mag": entry}}}, [])
    begin = time.monotonic()
    units = units_of(case, tmp_path / "out", results, weight=1.0)
    assert [dict(units[k].done) for k in (49_999, 50_000)] == [
        {"perfect": 0, "safari": 0}, {"perfect": 0, "drop": 0, "safari": 0}
    ]  # fmt: skip
    assert len(units) == 100_000
    assert time.monotonic() - begin < 20
