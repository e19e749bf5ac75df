"""A link that replays what was recorded: a CSV or Parquet file, one row a client and round."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import numpy as np

from safari.bounds import path_of
from safari.errors import ConfigError, DataError, MissingExtraError, one_of
from safari.links.link import Bools, Link, Setting, State

After = Literal["repeat", "lost", "error"]
COLUMNS = ("round", "client", "delivered")
_TRUE, _FALSE = {"1", "true", "yes"}, {"0", "false", "no"}
# While it is read a trace takes 19 bytes a row, so this bounds what a file can ask for; then 1 byte.
MOST_ROWS = 2**26
# A row has three short cells, whatever else its line may hold.
MOST_LETTERS = 200_000
# What a row may take in a Parquet file before it is compressed; a column of 64-bit numbers takes 8 a row.
PARQUET_ROW_BYTES, PARQUET_GROUP_BYTES = 64, 1 << 20
BATCH = 1 << 16


def trace(*, file: str = "", after: After = "repeat") -> Link:
    """Replay a CSV or Parquet file with columns round, client (both from 0) and delivered (0 or 1).

    `after` says what happens when the run is longer than the trace: start again, lose everything, or stop.
    """
    if not file:
        raise ConfigError("file must name a CSV or Parquet file, got ''")
    if after not in get_args(After):
        raise ConfigError(one_of("after", after, get_args(After)))

    path = path_of("file", file)

    def init(setting: Setting) -> State:
        table = read_trace(path)
        if table.shape[1] != setting.clients:
            raise DataError(f"{file}: holds {table.shape[1]} clients, the run has {setting.clients}")
        return {"table": table}

    def apply(state: State, t: int, rng: np.random.Generator) -> tuple[Bools, State]:
        table = state["table"]
        if t >= len(table) and after == "error":
            raise DataError(f"{file}: ends after {len(table)} rounds, and round {t} was asked for")
        if t >= len(table) and after == "lost":
            return np.zeros(table.shape[1], dtype=bool), state
        return table[t % len(table)].copy(), state

    return Link(init, apply, (lambda state: len(state["table"])) if after == "error" else None)


def read_trace(path: Path) -> Bools:
    """The file as `bool[rounds, clients]`; every pair must be there exactly once.

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
    return _table(path, *rows.columns())


@dataclass(frozen=True)
class _Rows:
    """Rows as they come: 17 bytes each."""

    path: Path
    rounds: array[int]
    clients: array[int]
    delivered: bytearray

    @classmethod
    def none(cls, path: Path) -> _Rows:
        return cls(path, array("q"), array("q"), bytearray())

    def check(self, more: int) -> None:
        """Raise if there would be too many."""
        if len(self.delivered) + more > MOST_ROWS:
            raise DataError(f"{self.path}: a trace must have at most {MOST_ROWS} rows, found more")

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rounds, clients = (np.frombuffer(column, np.int64) for column in (self.rounds, self.clients))
        return rounds, clients, np.frombuffer(self.delivered, np.bool_)


def _table(path: Path, rounds: np.ndarray, clients: np.ndarray, delivered: np.ndarray) -> Bools:
    if len(rounds) == 0:
        raise DataError(f"{path}: holds no rows")
    if min(rounds.min(), clients.min()) < 0:
        raise DataError(f"{path}: round and client count from 0, got {min(rounds.min(), clients.min())}")
    shape = (int(rounds.max()) + 1, int(clients.max()) + 1)
    cells = shape[0] * shape[1]
    if cells != len(rounds):
        raise DataError(
            f"{path}: {shape[0]} rounds of {shape[1]} clients need {cells} rows, got {len(rounds)}"
        )
    seen = np.zeros(shape, dtype=bool)
    seen[rounds, clients] = True
    if not seen.all():
        t, client = np.unravel_index(int(seen.argmin()), shape)
        raise DataError(f"{path}: no row for round {t} and client {client}, and another one twice")
    table = np.zeros(shape, dtype=bool)
    table[rounds, clients] = delivered
    return table


def _read_csv(path: Path) -> _Rows:
    rows = _Rows.none(path)
    try:
        # Spreadsheets put a byte order mark in front of the first column's name: "-sig" takes it away.
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(_lines(path, handle))
            _need_columns(path, reader.fieldnames or [])
            for row in reader:
                cells = _cells(row)
                if cells is None:
                    found = ",".join(str(value) for value in row.values())
                    raise DataError(
                        f"{path}, line {reader.line_num}: "
                        f"expected two whole numbers and 0 or 1, got {found[:100]!r}"
                    )
                rows.check(1)
                rows.rounds.append(cells[0])
                rows.clients.append(cells[1])
                rows.delivered.append(cells[2])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV trace: {error}") from error
    return rows


def _lines(path: Path, handle: TextIO) -> Iterator[str]:
    """The lines of a file, none of them longer than a row can be."""
    while line := handle.readline(MOST_LETTERS + 1):
        if len(line) > MOST_LETTERS:
            raise DataError(f"{path}: a line must have at most {MOST_LETTERS} letters, found more")
        yield line


def _cells(row: Mapping[str, str | None]) -> tuple[int, int, bool] | None:
    texts = [(row[column] or "").strip().lower() for column in COLUMNS]
    try:
        t, client = (int(text) for text in texts[:2])
    except ValueError:
        return None
    if texts[2] not in _TRUE | _FALSE or max(abs(t), abs(client)) >= 2**63:
        return None
    return t, client, texts[2] in _TRUE


def _read_parquet(path: Path) -> _Rows:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "Parquet traces") from error
    rows = _Rows.none(path)
    try:
        with parquet.ParquetFile(path) as file:
            _need_columns(path, file.schema_arrow.names)
            _check_footer(path, file.metadata)
            for batch in file.iter_batches(BATCH, columns=list(COLUMNS), use_threads=False):
                rows.check(batch.num_rows)
                columns = {name: batch.column(name) for name in COLUMNS}
                for name, column in columns.items():
                    if column.null_count:
                        raise DataError(f"{path}: column {name} has {column.null_count} empty cells")
                rounds, clients = (columns[name].cast(pyarrow.int64()) for name in COLUMNS[:2])
                rows.rounds.frombytes(rounds.to_numpy(zero_copy_only=False).tobytes())
                rows.clients.frombytes(clients.to_numpy(zero_copy_only=False).tobytes())
                rows.delivered.extend(_delivered(path, columns["delivered"], pyarrow.bool_()).tobytes())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet trace: {error}") from error
    return rows


def _check_footer(path: Path, footer: Any) -> None:
    """Raise where the file says of itself that it holds more than a trace can."""
    if footer.num_rows > MOST_ROWS:
        raise DataError(f"{path}: a trace must have at most {MOST_ROWS} rows, got {footer.num_rows}")
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        chunks = [group.column(i) for i in range(group.num_columns)]
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in COLUMNS)
        most = PARQUET_GROUP_BYTES + PARQUET_ROW_BYTES * group.num_rows
        if size > most:
            problem = f"{group.num_rows} rows must take at most {most} bytes uncompressed, got {size}"
            raise DataError(f"{path}: {problem}")


def _delivered(path: Path, column: Any, kind: Any) -> np.ndarray:
    raw = column.to_numpy(zero_copy_only=False)
    if raw.dtype.kind in "iuf" and not np.isin(raw, (0, 1)).all():
        raise DataError(f"{path}: delivered must be 0 or 1, got {raw[~np.isin(raw, (0, 1))][0]}")
    return np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))


def _need_columns(path: Path, found: object) -> None:
    names = list(found)  # type: ignore[call-overload]
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        raise DataError(f"{path}: needs columns {', '.join(COLUMNS)}; missing {', '.join(missing)}")
