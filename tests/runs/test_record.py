"""A round's record: its line, its reader, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import safari
from safari.errors import ConfigError, RunError
from safari.runs import CLASSIFICATION, ClientStatus, RoundRecord, RunFolder, RunMetrics
from safari.runs.metrics import RESERVED, metrics_text, read_metrics
from safari.runs.record import RecordError, number_names, read_records
from safari.tasks import Metric, classification, tokens, with_metric
from view.conftest import SMALL
from view.made_up import record

# As version 0.1 wrote it: without modes, diagnosis, an average or churn by layer.
OLD = {
    "round": 1, "loss": 2.0, "top1": 0.5, "top5": 0.75, "train_loss": 1.0, "trained": [0, 1, 2],
    "arrived": [0, 1], "missing": [2], "refused": {}, "stand_ins": {"2": [0]}, "lost": False, "density": 0.2,
    "agreement": 1.0, "support": 0.2, "churn": 0.0, "layers": {"1.weight": 0.25},
    "bytes": {"up": 7, "down": None},
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    safari.run({**SMALL, "rounds": 5}, path)
    return RunFolder.open(path)


def test_the_line_of_an_engine_comes_back_letter_by_letter(small):
    """Also the order of its fields: records of equal runs are equal files."""
    for trial in small.trials():
        lines = trial.rounds.read_text().splitlines()
        assert len(lines) == 5
        for line, found in zip(lines, trial.records(), strict=True):
            assert json.dumps(found.to_json()) == line
            assert list(found) == list(json.loads(line))
            assert found["top1"] == found.metrics["top1"] == json.loads(line)["top1"]


LONG = f"1{'0' * 36}..."


def test_the_line_of_a_real_network_comes_back():
    line = record(1, average=None, modes={"step": 2}, diagnosis=None) | {
        "reasons": {"2": "no answer"}, "nodes": {"0": "77"}, "ignored": ["of nobody"], "resumed": True,
        "of_tomorrow": {"a": [1]},
    }  # fmt: skip
    found = RoundRecord.from_json(line)
    assert found.to_json() == line
    assert found.extra == {"of_tomorrow": {"a": [1]}}
    assert found.reasons == {2: "no answer"}


def test_a_record_of_an_earlier_version_is_read():
    found = RoundRecord.from_json(OLD, clients=3)
    assert (found.average, found.modes, found.diagnosis, found.layer_churn, found.reasons) == (None,) * 5
    assert found.stand_ins == {2: (0,)}


def test_every_field_is_reserved_or_a_metric():
    names = {f.name for f in fields(RoundRecord)} - {"metrics", "extra"}
    names |= set(number_names(CLASSIFICATION)) - {*CLASSIFICATION.names}
    assert {name for name in names if not name.startswith("average_")} <= RESERVED


def status(**changes):
    return RoundRecord.from_json(record(1, **changes)).status(4).tolist()


def test_what_became_of_each_client():
    asked, arrived, lost = ClientStatus.NOT_ASKED, ClientStatus.ARRIVED, ClientStatus.LOST
    up, down, refused = ClientStatus.LOST_UP, ClientStatus.LOST_DOWN, ClientStatus.REFUSED
    assert status() == [arrived, arrived, up, asked]
    assert status(trained=[0, 1]) == [arrived, arrived, down, asked]
    assert status(trained=None) == [arrived, arrived, lost, asked]
    assert status(trained=[0, 1], reasons={"2": "no answer"}) == [arrived, arrived, lost, asked]
    assert status(refused={"2": "NaN", "9": "a stranger"}) == [arrived, arrived, refused, asked]
    assert [code.label for code in ClientStatus][:2] == ["not asked", "arrived"]


def test_the_page_has_the_same_codes():
    """The scripts cannot import the enum."""
    import re

    from safari.view.page import read_file

    text = read_file("strip.js").decode()
    codes = dict(re.findall(r"(\w+): (\d)", re.search(r"const STATUS = \{(.*?)\}", text)[1]))
    assert {name: int(code) for name, code in codes.items()} == {code.name: code for code in ClientStatus}
    words = json.loads(re.search(r"const WORDS = (\[.*?\]);", text)[1])
    assert words == [code.label for code in ClientStatus]


def test_parts_of_models_are_by_client_and_left_out_where_there_are_none():
    found = RoundRecord.from_json(record(1, parts={"1": 0.25}))
    assert found.parts == {1: 0.25}
    assert found["parts"] == {"1": 0.25}
    assert "parts" not in RoundRecord.from_json(record(1))


def test_refused_clients_have_no_stand_in():
    found = RoundRecord.from_json(record(1, refused={"2": "NaN"}))
    assert (found.stand_ins, found.stood_in) == ({2: (0,)}, {})
    assert found.numbers()["refused"] == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"round": 0}, "round must be a whole number from 1 to 1000000000, got 0"),
        ({"round": True}, "round must be a whole number from 1 to 1000000000, got True"),
        ({"arrived": None}, "arrived must be a list of client numbers, got None"),
        ({"arrived": [0.0]}, "arrived must be a list of client numbers, got [0.0]"),
        ({"missing": [-1]}, "missing: a client must lie between 0 and 999999999, got -1"),
        ({"lost": 1}, "lost must be true or false, got 1"),
        ({"parts": {"0": 1.5}}, "parts.0 must lie between 0 and 1, got 1.5"),
        ({"parts": {"all": 0.5}}, "parts must be by client, got 'all'"),
        ({"average": [1]}, "average must be a table, got [1]"),
        ({"average": {"top1": "x"}}, "average.top1 must be a number, got 'x'"),
        ({"ignored": "x"}, "ignored must be a list of texts, got 'x'"),
        ({"nodes": {"one": "1"}}, "nodes must be by client, got 'one'"),
        (
            {"modes": {"step": 10**400}},
            f"modes.step must be a number that fits into a float, got {LONG}",
        ),
    ],
)
def test_what_is_no_record_is_named_by_field(change, problem):
    with pytest.raises(RecordError) as error:
        RoundRecord.from_json(record(1, **change))
    assert str(error.value) == problem


@given(st.dictionaries(st.sampled_from([*record(1), "average", "modes", "x"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)))  # fmt: skip
def test_any_object_is_a_record_or_refused_in_words(changes):
    try:
        found = RoundRecord.from_json(record(1, **changes), clients=3)
    except RecordError:
        return
    json.dumps(found.numbers(), allow_nan=False)
    found.status(3)


def made(tmp_path, *lines):
    path = tmp_path / "rounds.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]
    path.write_bytes(b"".join(texts))
    return path


def test_damaged_lines_are_skipped_and_named(tmp_path):
    damaged = [b"nonsense\n", b"[1]\n", record(1), record(3, top1="x")]
    path = made(tmp_path, record(1), *damaged, record(4), b'{"round": 5')
    skipped = []
    assert [r.round for r in read_records(path, skipped=skipped)] == [1, 4]
    assert skipped == [
        "rounds.jsonl, line 2 is not a round's record: not JSON (Expecting value: line 1 column 1 (char 0))",
        "rounds.jsonl, line 3 is not a round's record: not a JSON object but list",
        "rounds.jsonl, line 4 is not a round's record: round 1 after 1",
        "rounds.jsonl, line 5 is not a round's record: top1 must be a number, got 'x'",
    ]


def test_without_a_place_to_name_them_the_first_is_an_error(tmp_path):
    path = made(tmp_path, record(1), b"[" * 100_000 + b"\n")
    with pytest.raises(RunError) as error:
        read_records(path)
    assert str(error.value) == f"{path}, line 2 is not a round's record: not JSON (nested too deeply)"


def test_a_line_that_is_too_long_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("safari.runs.record.LONGEST_LINE", 1000)
    path = made(tmp_path, record(1), b"x" * 2500 + b"\n", record(2))
    skipped = []
    assert [r.round for r in read_records(path, skipped=skipped)] == [1, 2]
    assert skipped == ["rounds.jsonl, line 2 is not a round's record: it is longer than 1,000 bytes"]


# --- metrics


def test_metrics_of_a_task_come_back(tmp_path):
    bits = Metric("bits", "bits a token", higher=False, short="bits")
    task = with_metric(tokens(), bits, lambda outputs, labels: outputs, score=True)
    metrics = RunMetrics.of(task)
    (tmp_path / "task.json").write_text(metrics_text(metrics))
    assert read_metrics(tmp_path) == metrics
    assert (metrics.names[0], metrics.main.short, metrics.main.higher) == ("loss", "bits", False)


def test_without_a_file_it_is_classification(tmp_path):
    assert read_metrics(tmp_path) == CLASSIFICATION
    assert CLASSIFICATION.main == Metric("top1", "top-1 accuracy", percent=True, short="top-1")


def test_a_metric_must_not_be_called_like_a_field():
    task = with_metric(classification(), Metric("density", "density"), lambda o, y: o)
    with pytest.raises(ConfigError) as error:
        RunMetrics.of(task)
    assert str(error.value) == (
        "classification: a metric must not be called 'density': records have a field of that name"
    )


TOP = {"name": "top1", "label": "top-1"}


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ([], "metrics must be a list of 1 to 32 metrics"),
        ([TOP] * 33, "metrics must be a list of 1 to 32 metrics"),
        ([TOP, TOP], "metrics must have different names, got top1, top1"),
        ([TOP | {"name": "f1"}], "score must be one of f1; got 'top1'"),
        (["top1"], "a metric must be a table, got str"),
        ([TOP | {"label": "x" * 81}], "a metric's label must be a text of at most 80 characters"),
        ([TOP | {"percent": 1}], "a metric's percent must be true or false, got int"),
        ([TOP | {"name": "a b"}], "a metric's name must be an identifier, got 'a b'"),
        ([TOP | {"name": "round"}], "a metric must not be called 'round'"),
        ([TOP | {"name": "rounds"}], "a metric must not be called 'rounds'"),
    ],
)
def test_a_damaged_description_is_named(tmp_path, metrics, problem):
    (tmp_path / "task.json").write_text(json.dumps({"score": "top1", "metrics": metrics}))
    with pytest.raises(RunError) as error:
        read_metrics(tmp_path)
    assert str(error.value) == f"task.json: {problem}"


def test_a_label_cannot_act_on_a_terminal(tmp_path):
    sent = TOP | {"label": "top\x1b[2J", "short": "\x1b[8m"}
    (tmp_path / "task.json").write_text(json.dumps({"score": "top1", "metrics": [sent]}))
    main = read_metrics(tmp_path).main
    assert (main.label, main.short) == (r"top\x1b[2J", r"\x1b[8m")


def test_a_run_says_which_metrics_it_has(small):
    assert json.loads((small.path / "task.json").read_text())["score"] == "top1"
    assert RunFolder.open(small.path).metrics == CLASSIFICATION
