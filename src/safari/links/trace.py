"""A link that replays what was recorded: a CSV or Parquet file of who was reachable when."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import numpy as np

from safari.bounds import above, path_of
from safari.errors import ConfigError, DataError, MissingExtraError, one_of
from safari.links.link import Bools, Link, Setting, State

After = Literal["repeat", "lost", "error"]
# What a row may say, the most telling form first; each is a set of columns that must be there.
FORMS = (
    ("round", "client", "delivered"),
    ("round", "client"),
    ("start", "end", "client"),
    ("time", "client"),
)
_WHOLE, _BIT, _WHEN = ("round", "client"), ("delivered",), ("start", "end", "time")
_TRUE, _FALSE = {"1", "true", "yes"}, {"0", "false", "no"}
# Whole numbers up to here are exact as floats.
_LARGEST = 2**53
# While it is read a trace takes up to 24 bytes a row, so this bounds what a file can ask for; then 1 byte a cell.
MOST_ROWS = 2**26
# A row has three short cells, whatever else its line may hold.
MOST_LETTERS = 200_000
# What a row may take in a Parquet file before it is compressed; a column of 64-bit numbers takes 8 a row.
PARQUET_ROW_BYTES, PARQUET_GROUP_BYTES = 64, 1 << 20
BATCH = 1 << 16


def trace(*, file: str = "", after: After = "repeat", seconds: float = 60.0) -> Link:
    """Replay a CSV or Parquet file of who was reachable when; what it does not list is lost.

    Its columns are `round, client` (both count from 0), with `delivered` (0 or 1) if lost messages are listed, too; or
    `time, client`, where rounds last `seconds` from the earliest time on; or `start, end, client`: reachable in each
    round that the interval touches. Times are seconds, or dates in ISO 8601. `after` says what happens when the run is
    longer than the trace: start again, lose everything, or stop.
    """
    if not file:
        raise ConfigError("file must name a CSV or Parquet file, got ''")
    if after not in get_args(After):
        raise ConfigError(one_of("after", after, get_args(After)))
    above("seconds", seconds, 0)

    path = path_of("file", file)

    def init(setting: Setting) -> State:
        table = read_trace(path, seconds)
        clients = table.shape[1]
        if clients > setting.clients:
            raise DataError(
                f"{file}: holds client {clients - 1}, and the run's clients are 0 to {setting.clients - 1}: "
                "they count from 0"
            )
        return {"table": np.pad(table, ((0, 0), (0, setting.clients - clients)))}

    def apply(state: State, t: int, rng: np.random.Generator) -> tuple[Bools, State]:
        table = state["table"]
        if t >= len(table) and after == "error":
            raise DataError(f"{file}: ends after {len(table)} rounds, and round {t} was asked for")
        if t >= len(table) and after == "lost":
            return np.zeros(table.shape[1], dtype=bool), state
        return table[t % len(table)].copy(), state

    return Link(init, apply, (lambda state: len(state["table"])) if after == "error" else None)


def read_trace(path: Path, seconds: float = 60.0) -> Bools:
    """The file as `bool[rounds, clients]`, False where it lists nothing.

    Rows are read a few at a time, and no more than `MOST_ROWS` of them.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such trace file")
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif path.suffix == ".csv":
        rows = _read_csv(path)
    else:
        raise DataError(f"{path}: a trace must end in .csv or .parquet, got {path.suffix!r}")
    return _table(rows, seconds)


@dataclass(frozen=True)
class _Rows:
    """Rows as they come, by column: 8 bytes a cell."""

    path: Path
    cells: dict[str, array[float]]

    @classmethod
    def of(cls, path: Path, names: Sequence[str]) -> _Rows:
        form = next((form for form in FORMS if set(form) <= set(names)), None)
        if form is None:
            known = "; or ".join(", ".join(form) for form in FORMS)
            raise DataError(
                f"{path}: needs columns {known}; got {', '.join(map(str, names))[:100] or 'none'}"
            )
        return cls(path, {name: array("d") for name in form})

    def __len__(self) -> int:
        return len(self.cells["client"])

    def check(self, more: int) -> None:
        """Raise if there would be too many."""
        if len(self) + more > MOST_ROWS:
            raise DataError(f"{self.path}: a trace must have at most {MOST_ROWS} rows, found more")

    def column(self, name: str) -> np.ndarray:
        return np.frombuffer(self.cells[name], np.float64)


def _table(rows: _Rows, seconds: float) -> Bools:
    path = rows.path
    if not len(rows):
        raise DataError(f"{path}: holds no rows")
    first, last = _rounds(rows, seconds)
    clients = rows.column("client").astype(np.int64)
    lowest = int(min(first.min(), clients.min()))
    if lowest < 0:
        raise DataError(f"{path}: round and client count from 0, got {lowest}")
    shape = (int(last.max()) + 1, int(clients.max()) + 1)
    if shape[0] * shape[1] > MOST_ROWS:
        raise DataError(
            f"{path}: rounds times clients must be at most {MOST_ROWS}, got {shape[0]} rounds of {shape[1]} clients"
        )
    reachable = np.zeros((shape[0] + 1, shape[1]), dtype=np.int32)
    if "delivered" in rows.cells:
        delivered = rows.column("delivered") > 0
        np.add.at(reachable, (first, clients), 1)
        if (reachable > 1).any():
            t, client = np.unravel_index(int((reachable > 1).argmax()), reachable.shape)
            raise DataError(f"{path}: round {t} and client {client} stand there more than once")
        table = np.zeros(shape, dtype=bool)
        table[first, clients] = delivered
        return table
    # One more from the first round on, one fewer after the last: intervals of any length cost the same.
    np.add.at(reachable, (first, clients), 1)
    np.add.at(reachable, (last + 1, clients), -1)
    return reachable[:-1].cumsum(0) > 0


def _rounds(rows: _Rows, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last round of each row."""
    if "round" in rows.cells:
        rounds = rows.column("round").astype(np.int64)
        return rounds, rounds
    start = rows.column("start" if "start" in rows.cells else "time")
    end = rows.column("end") if "end" in rows.cells else start
    if (end < start).any():
        row = int((end < start).argmax())
        raise DataError(f"{rows.path}: end must not be before start, got {end[row]:g} after {start[row]:g}")
    first = np.floor((start - start.min()) / seconds)
    # An interval that ends as a round begins does not reach into that round.
    last = np.maximum(first, np.ceil((end - start.min()) / seconds) - 1)
    if last.max() > MOST_ROWS:
        raise DataError(
            f"{rows.path}: must have at most {MOST_ROWS} rounds of {seconds:g} seconds, got {last.max():.0f}"
        )
    return first.astype(np.int64), last.astype(np.int64)


def _read_csv(path: Path) -> _Rows:
    try:
        # Spreadsheets put a byte order mark in front of the first column's name: "-sig" takes it away.
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(_lines(path, handle))
            rows = _Rows.of(path, list(reader.fieldnames or []))
            for row in reader:
                numbers = [_number(name, row[name]) for name in rows.cells]
                if None in numbers:
                    found = ",".join(str(value) for value in row.values())
                    wanted = ", ".join(f"{name}: {_MEANING[name]}" for name in rows.cells)
                    raise DataError(f"{path}, line {reader.line_num}: expected {wanted}; got {found[:100]!r}")
                rows.check(1)
                for cell, number in zip(rows.cells.values(), numbers, strict=True):
                    cell.append(number)  # type: ignore[arg-type]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV trace: {error}") from error
    return rows


def _lines(path: Path, handle: TextIO) -> Iterator[str]:
    """The lines of a file, none of them longer than a row can be."""
    while line := handle.readline(MOST_LETTERS + 1):
        if len(line) > MOST_LETTERS:
            raise DataError(f"{path}: a line must have at most {MOST_LETTERS} letters, found more")
        yield line


_MEANING = {
    **dict.fromkeys(_WHOLE, "a whole number"),
    **dict.fromkeys(_BIT, "0 or 1"),
    **dict.fromkeys(_WHEN, "seconds or a date"),
}


def _number(name: str, text: str | None) -> float | None:
    """A cell as a number; None where it is none of its column's kind."""
    text = (text or "").strip().lower()
    if name in _BIT:
        return float(text in _TRUE) if text in _TRUE | _FALSE else None
    try:
        if name in _WHOLE:
            return float(int(text)) if abs(int(text)) < _LARGEST else None
        number = float(text) if text.replace(".", "", 1).isdigit() else _seconds(text)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < _LARGEST else None


def _seconds(text: str) -> float:
    """A date as seconds; one that names no time zone is in UTC."""
    when = datetime.fromisoformat(text.upper())
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _read_parquet(path: Path) -> _Rows:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "Parquet traces") from error
    try:
        with parquet.ParquetFile(path) as file:
            rows = _Rows.of(path, file.schema_arrow.names)
            _check_footer(path, file.metadata, list(rows.cells))
            for batch in file.iter_batches(BATCH, columns=list(rows.cells), use_threads=False):
                rows.check(batch.num_rows)
                for name, cell in rows.cells.items():
                    column = batch.column(name)
                    if column.null_count:
                        raise DataError(f"{path}: column {name} has {column.null_count} empty cells")
                    cell.frombytes(_numbers(path, name, column, pyarrow).astype(np.float64).tobytes())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet trace: {error}") from error
    return rows


def _numbers(path: Path, name: str, column: Any, pyarrow: Any) -> np.ndarray:
    """A column's cells as numbers."""
    if name in _BIT:
        return _delivered(path, column, pyarrow.bool_())
    if name in _WHOLE:
        return np.asarray(column.cast(pyarrow.int64()).to_numpy(zero_copy_only=False))
    if pyarrow.types.is_timestamp(column.type):
        column = column.cast(pyarrow.timestamp("us", column.type.tz)).cast(pyarrow.int64())
        return np.asarray(column.to_numpy(zero_copy_only=False)) / 1e6
    numbers = np.asarray(column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False))
    if not (np.abs(numbers) < _LARGEST).all():
        raise DataError(
            f"{path}: column {name} must hold seconds or dates, got {numbers[~(np.abs(numbers) < _LARGEST)][0]}"
        )
    return numbers


def _check_footer(path: Path, footer: Any, names: Sequence[str]) -> None:
    """Raise where the file says of itself that it holds more than a trace can."""
    if footer.num_rows > MOST_ROWS:
        raise DataError(f"{path}: a trace must have at most {MOST_ROWS} rows, got {footer.num_rows}")
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        chunks = [group.column(i) for i in range(group.num_columns)]
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in names)
        most = PARQUET_GROUP_BYTES + PARQUET_ROW_BYTES * group.num_rows
        if size > most:
            problem = f"{group.num_rows} rows must take at most {most} bytes uncompressed, got {size}"
            raise DataError(f"{path}: {problem}")


def _delivered(path: Path, column: Any, kind: Any) -> np.ndarray:
    raw = column.to_numpy(zero_copy_only=False)
    if raw.dtype.kind in "iuf" and not np.isin(raw, (0, 1)).all():
        raise DataError(f"{path}: delivered must be 0 or 1, got {raw[~np.isin(raw, (0, 1))][0]}")
    return np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))
