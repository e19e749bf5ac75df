"""Files that somebody else is writing: half lines, nonsense, cuts; and what the page is sent about them."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import safari
from safari.config import Config, Track, parse
from safari.runs import RunFolder, Saved, Trial, summarise
from safari.runs.similarity import to_line
from safari.toml import to_toml
from safari.view.arrays import decode_array
from safari.view.follow import MOST_PROBLEMS, LineFollower
from safari.view.monitor import Monitor
from safari.view.trial import Cursor, TrialLog
from view.conftest import SMALL
from view.made_up import record


def numbers(lines):
    return [value["n"] for _, value in lines]


def test_only_whole_lines_are_read_and_each_once(tmp_path):
    tail, path = LineFollower(tmp_path / "x.jsonl"), tmp_path / "x.jsonl"
    assert tail.read() == []
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n"')
    assert tail.read() == [(1, {"n": 1}), (2, {"n": 2})]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b": 3}\n")
    assert tail.read() == [(3, {"n": 3})]
    assert tail.skipped.count == 0


@given(st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wherever_the_writer_pauses_nothing_is_lost_or_doubled(tmp_path, pauses):
    path = tmp_path / "x.jsonl"
    path.unlink(missing_ok=True)
    data = b"".join(b'{"n": %d}\n' % n for n in range(8))
    tail, found = LineFollower(path), []
    for end in [*sorted(pauses), len(data)]:
        path.write_bytes(data[:end]) if not path.exists() else os.truncate(path, 0) or path.write_bytes(
            data[:end]
        )
        found += numbers(tail.read())
    assert found == list(range(8))
    assert tail.generation == 0


def test_nonsense_is_skipped_and_reported(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"n": 1}\nnonsense\n[1]\n\xff\n{"n": 2}\n' + b"[" * 100_000 + b"\n")
    tail = LineFollower(path)
    assert numbers(tail.read()) == [1, 2]
    assert tail.skipped.problems == [
        "rounds.jsonl, line 2 was skipped: not JSON (JSONDecodeError)",
        "rounds.jsonl, line 3 was skipped: not a record but list",
        "rounds.jsonl, line 4 was skipped: not JSON (UnicodeDecodeError)",
        "rounds.jsonl, line 6 was skipped: not JSON (RecursionError)",
    ]
    with path.open("ab") as file:
        file.write(b"x\n" * 100)
    assert tail.read() == []
    assert (tail.skipped.count, len(tail.skipped.problems)) == (104, MOST_PROBLEMS)


@pytest.mark.parametrize(
    "after", [b"", b'{"n": 1}\n', b'{"n": 1}\n{"n": 22222222222}\n', b'{"n": 100}\n{"n": 200}\n']
)
def test_a_file_that_was_cut_back_is_read_again(tmp_path, after):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    tail = LineFollower(path)
    tail.read()
    path.write_bytes(after)
    expected = [json.loads(line)["n"] for line in after.splitlines()]
    assert numbers(tail.read()) == expected
    assert tail.generation == 1


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n')
    tail = LineFollower(path)
    tail.read()
    (tmp_path / "new").write_bytes(b'{"n": 7}\n{"n": 8}\n')
    (tmp_path / "new").replace(path)
    assert numbers(tail.read()) == [7, 8]


def made(tmp_path, *records_, clients=3):
    trial = Trial("safari", 0, tmp_path)
    for one in records_:
        trial.append(one, {"train": 0.5})
    log = TrialLog(trial, clients)
    log.poll()
    return trial, log


def test_a_record_as_columns_and_codes(tmp_path):
    _, log = made(
        tmp_path, record(1), record(2, arrived=[1], missing=[0], stand_ins={"0": [1, 2]}, refused={"0": "x"})
    )
    assert log.columns["top1"] == [0.5, 0.5]
    assert log.columns["average_top1"] == [None, None]
    assert log.columns["bytes_up"] == [100.0, 100.0]
    assert log.columns["bytes_down"] == [None, None]
    assert (log.columns["arrived"], log.columns["missing"], log.columns["refused"]) == (
        [2, 1],
        [1, 1],
        [0, 1],
    )
    # not asked 0, arrived 1, lost on the way up 3, refused 5
    assert list(log.status) == [1, 1, 3, 5, 1, 0]
    assert list(log.stand_in) == [0, 0, 1, 0, 0, 0], "client 0 is written as 1; who was refused, is refused"
    assert list(log.stand_ins) == [0, 0, 1, 0, 0, 0]
    assert list(log.part) == [255] * 6
    assert log.layers == ["1.weight", "3.weight"]
    assert list(log.layer_churn) == [0.0, 0.5] * 2
    assert log.seconds == {"round": [1, 2], "train": [0.5, 0.5]}


def test_models_that_came_in_part_have_their_share(tmp_path):
    _, log = made(tmp_path, record(1, parts={"1": 0.5}), record(2, parts={"0": 0.0, "1": 0.999}))
    assert list(log.part) == [255, 127, 255, 0, 254, 255]
    assert decode_array(log.detail(1)["part"]).tolist() == [0, 254, 255]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"round": 1}, "round 1 after 1"),
        ({"round": "2"}, "round must be a whole number from 1 to 1000000000, got '2'"),
        ({"round": 10**400}, "round must be a whole number from 1 to 1000000000, got 1000"),
        ({"arrived": [9]}, "arrived: a client must lie between 0 and 2, got 9"),
        ({"arrived": "all"}, "arrived must be a list of client numbers, got 'all'"),
        ({"missing": [True]}, "missing must be a list of client numbers, got [True]"),
        ({"stand_ins": {"2": [7]}}, "stand_ins.2: a client must lie between 0 and 2, got 7"),
        ({"stand_ins": {"-1": [0]}}, "stand_ins must be by client, got '-1'"),
        ({"stand_ins": {"7": [0]}}, "stand_ins: a client must lie between 0 and 2, got 7"),
        ({"stand_ins": [1]}, "stand_ins must be a table, got [1]"),
        ({"top1": "high"}, "top1 must be a number, got 'high'"),
        ({"loss": 10**400}, "loss must be a number that fits into a float, got 1000"),
        ({"bytes": 3}, "bytes must be a table, got 3"),
        ({"layers": {"1.weight": "x"}}, "layers.1.weight must be a number, got 'x'"),
    ],
)
def test_what_is_no_record_is_left_out_whole(tmp_path, change, problem):
    trial, log = made(tmp_path, record(1))
    trial.append(record(2, **change), {})
    trial.append(record(3), {})
    assert log.poll()
    assert log.columns["round"] == [1, 3]
    assert len(log.status) == len(log.stand_in) == len(log.stand_ins) == 6
    assert len(log.layer_density) == len(log.layer_churn) == 4
    (told,) = [p for p in log.problems if p.startswith("rounds.jsonl")]
    assert told.startswith("rounds.jsonl, line 2 was skipped: not a round's record (" + problem)


def test_numbers_that_are_none_in_json_are_none_here(tmp_path):
    trial, log = made(tmp_path)
    trial.rounds.write_text(json.dumps(record(1, loss=float("nan"), top1=float("inf"))) + "\n")
    log.poll()
    assert (log.columns["loss"], log.columns["top1"]) == ([None], [None])


def test_increments_add_up_to_the_whole(tmp_path):
    trial, log = made(tmp_path, record(1), record(2))
    have, told = log.cursor, log.since(None)
    assert told["detail"] is None
    trial.append(record(3, top1=0.75), {"train": 0.25, "wire": 0.125})
    assert log.poll()
    assert not log.poll()
    news = log.since(have)
    assert (news["from"], news["columns"]["top1"]) == (2, [0.75])
    assert news["seconds"] == {"round": [3], "train": [0.25], "wire": [0.125]}
    assert decode_array(news["detail"]["status"]).tolist() == [1, 1, 3]
    assert decode_array(log.detail()["status"]).tolist() == [1, 1, 3] * 3
    assert log.seconds["wire"] == [None, None, 0.125]


def test_a_resumed_run_is_sent_from_its_beginning(tmp_path):
    trial, log = made(tmp_path, record(1), record(2), record(3))
    have = log.cursor
    trial.save(Saved(1, {}, {}))
    os.truncate(trial.rounds, len(trial.rounds.read_bytes().splitlines(keepends=True)[0]))
    os.truncate(trial.timings, len(trial.timings.read_bytes().splitlines(keepends=True)[0]))
    trial.append(record(2, top1=0.9), {})
    log.poll()
    news = log.since(have)
    assert news["generation"] > have.generation
    assert (news["from"], news["columns"]["top1"], news["detail"]) == (0, [0.5, 0.9], None)
    assert log.seconds["round"] == [1, 2]


def test_records_of_before_there_was_churn_by_layer_do_not_say_0(tmp_path):
    old = record(1)
    del old["layer_churn"]
    _, log = made(tmp_path, old)
    assert np.isnan(log.layer_churn).all()


def test_snapshots_are_found_and_cut_back(tmp_path):
    trial = Trial("safari", 0, tmp_path)
    matrices = [np.full((3, 3), float(k), np.float32) for k in range(3)]
    for k, matrix in enumerate(matrices):
        trial.append(record(k + 1), {}, to_line(k + 1, matrix))
    with trial.similarity.open("ab") as file:
        file.write(b'{"round": 9, "clients": 99999, "pairs": ""}\nnonsense\n{"round": 10, "cli')
    log = TrialLog(trial, 3)
    log.poll()
    assert log.snapshots.rounds == [1, 2, 3]
    assert log.snapshots.note == ""
    assert log.snapshots.read(2)[0, 1] == 1.0
    with pytest.raises(safari.SafariError, match="no similarity matrix of round 9"):
        log.snapshots.read(9)
    assert log.problems == [
        f"similarity.jsonl, line {n} was skipped: not a similarity matrix" for n in (4, 5)
    ]
    os.truncate(trial.similarity, 60)
    log.poll()
    assert log.snapshots.rounds == [1]


def test_a_run_without_snapshots_shows_its_checkpoint_or_says_so(copy):
    for arm in ("drop", "safari"):
        (copy.path / f"trials/{arm}/seed-0/similarity.jsonl").unlink(missing_ok=True)
    monitor = Monitor([copy])
    monitor.poll()
    told = monitor.since({})[0]
    assert told["0/safari/0"]["snapshots"] == [40]
    assert told["0/safari/0"]["snapshots_note"].startswith("Only the last checkpoint is known")
    assert monitor.snapshot("0/safari/0", 40)["clients"] == 6
    assert told["0/drop/0"]["snapshots"] == []
    assert (
        told["0/drop/0"]["snapshots_note"] == "This rule keeps no similarity matrix, or none was written yet."
    )


def test_the_table_is_that_of_the_summary(small):
    from safari.report import cells, rows_of

    monitor = Monitor([small])
    monitor.poll()
    header, body = cells(rows_of({"small": summarise(small)}))
    assert (monitor.table()["header"], monitor.table()["rows"]) == (header, body)


def test_the_average_is_followed_and_in_the_table(tmp_path):
    from safari.report import cells, rows_of

    config = {"rounds": 3, "clients": 3, "arms": ["drop"], "aggregation": {"average": 0.5}}
    run = RunFolder.create(tmp_path / "run", parse(config))
    trial = run.trial("drop", 0)
    for number, top1 in enumerate((0.25, 0.5, 0.75), 1):
        trial.append(record(number, average={"top1": top1, "top5": 1.0, "loss": None}), {})
    monitor = Monitor([run])
    monitor.poll()
    news, _ = monitor.since({})
    assert news["0/drop/0"]["columns"]["average_top1"] == [0.25, 0.5, 0.75]
    header, body = cells(rows_of({"run": summarise(run)}))
    assert (monitor.table()["header"], monitor.table()["rows"]) == (header, body)
    assert body[0][header.index("average %")] == "50.0"


def test_the_description_of_a_run(small):
    monitor = Monitor([small], {"safari": "The paper's rule."})
    monitor.poll()
    (run,) = monitor.describe()["runs"]
    assert run["arms"][1] == {
        "name": "safari", "rule": "safari", "options": "", "about": "The paper's rule.", "changes": [],
        "look": 2,
    }  # fmt: skip
    assert dict(run["fields"])["pruning.sparsity"] == "0.8"
    assert run["toml"] == to_toml(small.config)
    assert run["setting"].startswith("6 clients · digits (groups) · mlp · mag at 80 % sparsity")
    assert len(run["label_counts"]) == 6
    assert dict(run["environment"])["python"]


def test_side_files_that_are_spoilt_are_said(copy):
    (copy.path / "clients.json").write_text("{")
    (copy.path / "environment.json").write_text("[]")
    (copy.path / "model.json").unlink()
    monitor = Monitor([copy])
    monitor.poll()
    (run,) = monitor.describe()["runs"]
    assert run["label_counts"] is None
    assert [p.split(":")[0] for p in run["problems"]] == [
        "clients.json is not readable JSON", "environment.json must hold a JSON object, got list",
    ]  # fmt: skip
    assert run["numbers"] == 610, "the checkpoint knows how large the model is"


@pytest.mark.parametrize("counts", [[], [[1]], "x", [[1], [2, 3]] * 3, [["<b>"]] * 6, [[]] * 6])
def test_label_counts_that_are_no_table_are_left_out(copy, counts):
    (copy.path / "clients.json").write_text(json.dumps({"label_counts": counts}))
    assert Monitor([copy]).describe()["runs"][0]["label_counts"] is None


def test_passwords_stay_at_home(tmp_path):
    config = Config(rounds=4, clients=3, track=Track(mlflow="https://me:secret@host:5000"))
    told = json.dumps(Monitor([RunFolder.create(tmp_path / "run", config)]).describe())
    assert "secret" not in told
    assert "https://host:5000" in told


def test_a_longer_config_is_seen(copy):
    monitor = Monitor([copy])
    monitor.poll()
    assert monitor.describe()["runs"][0]["state"] == "finished"
    (copy.path / "config.toml").write_text(to_toml(parse({**SMALL, "rounds": 50, "seeds": 3})))
    assert monitor.poll()
    (run,) = monitor.describe()["runs"]
    assert (run["rounds"], run["seeds"], run["state"]) == (50, {"first": 0, "count": 3}, "stopped")
    (copy.path / "config.toml").write_text("ronuds = 1\n")
    assert monitor.poll()
    (problem,) = monitor.describe()["runs"][0]["problems"]
    assert problem.startswith("the newest config.toml cannot be shown (ConfigError: ")


def test_a_writer_that_lives_is_running(copy):
    (copy.path / "config.toml").write_text(to_toml(parse({**SMALL, "rounds": 50})))
    monitor = Monitor([RunFolder.open(copy.path)])
    monitor.poll()
    for pid, state in [(os.getpid(), "running"), (2**22 + 1, "stopped"), ("x", "stopped")]:
        (copy.path / ".writer").write_text(f"{pid}\n")
        assert monitor.describe()["runs"][0]["state"] == state


def test_a_run_that_has_not_begun(tmp_path):
    run = RunFolder.create(tmp_path / "run", parse(SMALL))
    monitor = Monitor([run])
    assert not monitor.poll()
    assert monitor.since({}) == ({}, {})
    assert monitor.table()["rows"][0] == ["drop", "0", "not begun"]
    assert monitor.describe()["runs"][0]["numbers"] is None


def test_a_cursor_from_before_a_restart_gets_everything(tmp_path):
    _, log = made(tmp_path, record(1))
    assert log.since(Cursor(generation=7, rounds=1))["columns"]["round"] == [1]
