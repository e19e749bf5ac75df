"""Traces from CSV and Parquet: what is read, what comes after the end, and what is refused in which words."""

from __future__ import annotations

import sys
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safari.errors import ConfigError, DataError, MissingExtraError
from safari.links import LINKS, Setting, read_trace

HEAD = "round,client,delivered\n"
TABLE = [[True, False, True], [False, False, True]]


def rows_of(table: list[list[bool]]) -> list[tuple[int, int, bool]]:
    return [(t, c, through) for t, row in enumerate(table) for c, through in enumerate(row)]


def csv(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def parquet(folder: Path, **columns: Any) -> Path:
    path = folder / "trace.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(DataError) as error:
        read_trace(path)
    text = str(error.value)
    assert text.startswith(str(path))
    return text.removeprefix(str(path))


# --- reading


@settings(max_examples=30)
@given(data=st.data())
def test_rows_in_any_order_from_both_formats(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rounds, clients = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    flat = data.draw(st.lists(st.booleans(), min_size=rounds * clients, max_size=rounds * clients))
    table = np.array(flat).reshape(rounds, clients)
    rows = data.draw(st.permutations(rows_of(table.tolist())))
    folder = tmp_path_factory.mktemp("trace")
    text = HEAD + "\n".join(f"{t},{c},{through:d}" for t, c, through in rows)
    assert np.array_equal(read_trace(csv(folder, text)), table)
    t, c, through = (list(column) for column in zip(*rows, strict=True))
    assert np.array_equal(read_trace(parquet(folder, round=t, client=c, delivered=through)), table)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + "0,0,1\n0,1,0\n", [[True, False]]),
        (HEAD + "0,0,TRUE\r\n0,1,No\r\n", [[True, False]]),
        (HEAD + " 0 , 0 , yes \n\n0,1,false", [[True, False]]),
        ("delivered,note,client,round\n1,x,0,0\n0,y,1,0\n", [[True, False]]),
        ("\ufeff" + HEAD + "0,0,1\n", [[True]]),  # as spreadsheets write it
        ('"round","client","delivered"\n"0","0","1"\n', [[True]]),
    ],
)
def test_how_a_csv_may_look(tmp_path: Path, text: str, expected: list[list[bool]]) -> None:
    table = read_trace(csv(tmp_path, text))
    assert table.tolist() == expected
    assert table.dtype == np.bool_


@pytest.mark.parametrize("delivered", [[1, 0], [1.0, 0.0], [True, False], ["1", "0"], ["true", "false"]])
def test_how_a_parquet_may_look(tmp_path: Path, delivered: list[Any]) -> None:
    path = parquet(tmp_path, client=[0, 1], round=[0.0, 0.0], delivered=delivered, note=["a", "b"])
    assert read_trace(path).tolist() == [[True, False]]


# --- refusing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["needs columns", "got none"]),
        ("round,delivered\n0,1\n", ["needs columns", "round, client", "got round, delivered"]),
        ("Round;client;delivered\n", ["needs columns", "got Round;client;delivered"]),
        (HEAD, ["holds no rows"]),
        (HEAD + "0,0,1\n0,one,1\n", ["line 3", "client: a whole number", "'0,one,1'"]),
        (HEAD + "0.5,0,1\n", ["line 2", "round: a whole number", "'0.5,0,1'"]),
        (HEAD + "0,0,2\n", ["line 2", "delivered: 0 or 1", "'0,0,2'"]),
        (HEAD + "0,0,\n", ["line 2", "delivered: 0 or 1"]),
        (HEAD + "0,0\n", ["line 2", "delivered: 0 or 1"]),
        (HEAD + ",0,1\n", ["line 2", "round: a whole number"]),
        (HEAD + f"{2**63},0,1\n", ["line 2", str(2**63)]),
        (HEAD + "0,-1,1\n", ["count from 0", "-1"]),
        (HEAD + "-2,0,1\n", ["count from 0", "-2"]),
        (HEAD + "0,0,1\n0,0,0\n", ["round 0 and client 0", "more than once"]),
        (HEAD + f"{2**30},{2**30},1\n", ["at most", f"{2**30 + 1} rounds of {2**30 + 1} clients"]),
        (HEAD + "0,0," + "1" * 180_000, ["not a readable CSV", "field larger than field limit"]),
        ("time,client\nsoon,0\n", ["line 2", "time: seconds or a date", "soon"]),
        ("time,client\nnan,0\n", ["line 2", "time: seconds or a date"]),
        ("start,end,client\n5,4,0\n", ["end must not be before start", "4 after 5"]),
        ("time,client\n0,0\n9e15,0\n", ["line 3", "9e15"]),
        ("time,client\n0,0\n9000000000000,0\n", ["at most", "rounds of 60 seconds"]),
    ],
)
def test_what_a_csv_may_not_hold(tmp_path: Path, text: str, words: list[str]) -> None:
    problem = error_of(csv(tmp_path, text))
    assert [word for word in words if word not in problem] == []


# --- lists of who was reachable


def test_what_is_not_listed_is_lost(tmp_path: Path) -> None:
    assert read_trace(csv(tmp_path, HEAD + "0,0,1\n1,2,1\n1,0,0\n")).tolist() == [
        [True, False, False],
        [False, False, True],
    ]
    assert read_trace(csv(tmp_path, "client,round\n0,0\n2,1\n2,1\n")).tolist() == [
        [True, False, False],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    "times",
    [
        ("100", "159.9", "160", "229"),
        ("2026-03-01T12:00:00", "2026-03-01 12:00:59", "2026-03-01T13:01:00+01:00", "2026-03-01T12:02:09Z"),
    ],
)
def test_times_become_rounds_of_so_many_seconds(tmp_path: Path, times: tuple[str, ...]) -> None:
    lines = "".join(f"{time},{client}\n" for client, time in enumerate(times))
    by_minute = [[True, True, False, False], [False, False, True, False], [False, False, False, True]]
    assert read_trace(csv(tmp_path, "time,client\n" + lines)).tolist() == by_minute
    assert len(read_trace(csv(tmp_path, "time,client\n" + lines), seconds=130)) == 1


def test_an_interval_reaches_every_round_that_it_touches(tmp_path: Path) -> None:
    text = "start,end,client\n0,60,0\n59,61,1\n61,61,0\n120,240,1\n130,140,1\n"
    table = read_trace(csv(tmp_path, text))
    assert table.T.tolist() == [[True, True, False, False], [True, True, True, True]]


def test_dates_in_a_parquet(tmp_path: Path) -> None:
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    times = [begin, begin + timedelta(seconds=90)]
    assert read_trace(parquet(tmp_path, time=times, client=[0, 1])).tolist() == [[True, False], [False, True]]
    assert error_of(parquet(tmp_path, time=[0.0, float("nan")], client=[0, 1])).endswith("got nan")


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 200), st.integers(0, 3)), min_size=1, max_size=9
    )
)
def test_intervals_against_a_loop(
    rows: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = "".join(f"{start},{start + length},{client}\n" for start, length, client in rows)
    table = read_trace(csv(tmp_path_factory.mktemp("trace"), "start,end,client\n" + text))
    begin = min(start for start, _, _ in rows)
    for t in range(len(table)):
        low, high = begin + 60 * t, begin + 60 * (t + 1)
        for client in range(table.shape[1]):
            touches = [
                start < high and (start + length > low or start == start + length >= low)
                for start, length, who in rows
                if who == client
            ]
            assert table[t, client] == any(touches)


def test_a_csv_that_is_no_text(tmp_path: Path) -> None:
    problem = error_of(csv(tmp_path, HEAD.encode() + b"0,0,\xff\n"))
    assert problem.startswith(": not a readable CSV trace: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"round": [0, None], "client": [0, 1], "delivered": [1, 1]},
            ": column round has 1 empty cells",
        ),
        (
            {"round": [0, 0], "client": [0, 1], "delivered": [True, None]},
            ": column delivered has 1 empty cells",
        ),
        ({"round": [0, 0], "client": [0, 1], "delivered": [1, 2]}, ": delivered must be 0 or 1, got 2"),
        ({"round": [0, 0], "client": [0, 1], "delivered": [1, 0.5]}, ": delivered must be 0 or 1, got 0.5"),
        (
            {"round": [0], "client": [0], "delivered": [float("nan")]},
            ": delivered must be 0 or 1, got nan",
        ),
        ({"round": [0], "client": [-3], "delivered": [1]}, ": round and client count from 0, got -3"),
    ],
)
def test_what_a_parquet_may_not_hold(tmp_path: Path, columns: dict[str, Any], problem: str) -> None:
    assert error_of(parquet(tmp_path, **columns)) == problem


@pytest.mark.parametrize(
    "columns",
    [
        {"round": [0.5], "client": [0], "delivered": [1]},
        {"round": ["zero"], "client": [0], "delivered": [1]},
        {"round": [0], "client": [0], "delivered": ["perhaps"]},
        {"round": [[0]], "client": [0], "delivered": [1]},
    ],
)
def test_columns_of_another_kind(tmp_path: Path, columns: dict[str, Any]) -> None:
    assert error_of(parquet(tmp_path, **columns)).startswith(": not a readable Parquet trace: ")


@pytest.mark.parametrize("raw", [b"", b"PAR1", b"not parquet at all", b"PAR1" + b"\x00" * 64 + b"PAR1"])
def test_garbage_for_a_parquet(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(raw)
    assert error_of(path).startswith(": not a readable Parquet trace: ")


def test_a_truncated_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path, round=[0, 0], client=[0, 1], delivered=[1, 0])
    path.write_bytes(path.read_bytes()[:-20])
    assert error_of(path).startswith(": not a readable Parquet trace: ")


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    assert error_of(tmp_path / "absent.csv") == ": no such trace file"
    (tmp_path / "folder.csv").mkdir()
    assert error_of(tmp_path / "folder.csv") == ": no such trace file"
    (tmp_path / "trace.txt").write_text(HEAD)
    assert error_of(tmp_path / "trace.txt") == ": a trace must end in .csv or .parquet, got '.txt'"


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path, round=[0], client=[0], delivered=[1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError) as error:
        read_trace(path)
    assert str(error.value) == "Parquet traces need pyarrow: pip install 'safari-fl[parquet]'"


# --- in bounded memory


def constant(rows: int) -> pyarrow.Table:
    """This many rows that say the same: a few kilobytes on disk."""
    zeros = pyarrow.array(np.zeros(rows, np.int64))
    return pyarrow.table({"round": zeros, "client": zeros, "delivered": zeros, "note": zeros})


def test_a_small_file_with_many_rows_is_read_a_few_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    pyarrow.parquet.write_table(constant(2_000_000), path, row_group_size=2_000_000)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        assert error_of(path) == ": round 0 and client 0 stand there more than once"
        assert tracemalloc.get_traced_memory()[1] < 60 * 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_more_rows_than_a_trace_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(sys.modules["safari.links.trace"], "MOST_ROWS", 3)
    text = HEAD + "0,0,1\n0,1,1\n0,2,1\n"
    assert read_trace(csv(tmp_path, text)).shape == (1, 3)
    if kind == "csv":
        assert error_of(csv(tmp_path, text + "0,3,1\n")) == ": a trace must have at most 3 rows, found more"
    else:
        path = parquet(tmp_path, round=[0] * 4, client=[0, 1, 2, 3], delivered=[1] * 4)
        assert error_of(path) == ": a trace must have at most 3 rows, got 4"


def test_cells_that_are_too_large(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    long = pyarrow.table({"round": [0], "client": [0], "delivered": ["1" * 3_000_000]})
    pyarrow.parquet.write_table(long, path, compression="zstd")
    assert path.stat().st_size < 3_000
    problem = error_of(path)
    assert problem.startswith(": 1 rows must take at most 1048640 bytes uncompressed, got ")


def test_a_csv_without_an_end_of_line(tmp_path: Path) -> None:
    path = csv(tmp_path, HEAD + "0,0,1" + " " * 2_000_000)
    tracemalloc.start()
    try:
        assert error_of(path) == ": a line must have at most 200000 letters, found more"
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_csv_takes_few_bytes_a_row(tmp_path: Path) -> None:
    rows = 30_000
    path = csv(tmp_path, HEAD + "".join(f"{t},0,{t % 2}\n" for t in range(rows)))
    tracemalloc.start()
    try:
        assert read_trace(path).sum() == rows // 2
        assert tracemalloc.get_traced_memory()[1] < 40 * rows + 300_000
    finally:
        tracemalloc.stop()


# --- replaying


def replay(path: Path, rounds: int, **options: Any) -> list[list[bool]]:
    link = LINKS["trace"](file=str(path), **options)
    state = link.init(Setting(3, np.zeros((3, 1), dtype=np.int64), np.random.default_rng(0)))
    out = []
    for t in range(rounds):
        delivered, state = link.apply(state, t, np.random.default_rng(t))
        out.append(delivered.tolist())
    return out


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return csv(tmp_path, HEAD + "".join(f"{t},{c},{through:d}\n" for t, c, through in rows_of(TABLE)))


def test_the_trace_starts_again(short: Path) -> None:
    assert replay(short, 5) == [TABLE[0], TABLE[1], TABLE[0], TABLE[1], TABLE[0]]
    assert replay(short, 5, after="repeat") == replay(short, 5)


def test_the_trace_ends_and_everything_is_lost(short: Path) -> None:
    assert replay(short, 4, after="lost") == [*TABLE, [False] * 3, [False] * 3]


def test_the_trace_ends_and_so_does_the_run(short: Path) -> None:
    assert replay(short, 2, after="error") == TABLE
    with pytest.raises(DataError) as error:
        replay(short, 3, after="error")
    assert str(error.value) == f"{short}: ends after 2 rounds, and round 2 was asked for"


def test_clients_that_the_trace_does_not_know_are_never_reached(short: Path) -> None:
    link = LINKS["trace"](file=str(short))
    state = link.init(Setting(4, np.zeros((4, 1), dtype=np.int64), np.random.default_rng(0)))
    assert link.apply(state, 1, np.random.default_rng(0))[0].tolist() == [*TABLE[1], False]
    with pytest.raises(
        DataError, match="holds client 2, and the run's clients are 0 to 1: they count from 0"
    ):
        link.init(Setting(2, np.zeros((2, 1), dtype=np.int64), np.random.default_rng(0)))


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError) as error:
        LINKS["trace"]()
    assert str(error.value) == "file must name a CSV or Parquet file, got ''"
    with pytest.raises(ConfigError) as error:
        LINKS["trace"](file="x.csv", after="loose")
    assert str(error.value) == (
        "after must be one of error, lost, repeat; got 'loose' (did you mean 'lost'?)"
    )
