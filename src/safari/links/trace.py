"""A link that replays what was recorded: a CSV or Parquet file, one row a client and round."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from safari.errors import ConfigError, DataError, MissingExtraError, one_of
from safari.links.link import Bools, Link, Setting, State

After = Literal["repeat", "lost", "error"]
COLUMNS = ("round", "client", "delivered")
_TRUE, _FALSE = {"1", "true", "yes"}, {"0", "false", "no"}
# A trace is held as one bool a client and round; this bounds what a typing error in a file can ask for.
MOST_CELLS = 2**31


def trace(*, file: str = "", after: After = "repeat") -> Link:
    """Replay a CSV or Parquet file with columns round, client (both from 0) and delivered (0 or 1).

    `after` says what happens when the run is longer than the trace: start again, lose everything, or stop.
    """
    if not file:
        raise ConfigError("file must name a CSV or Parquet file, got ''")
    if after not in get_args(After):
        raise ConfigError(one_of("after", after, get_args(After)))

    def init(setting: Setting) -> State:
        table = read_trace(Path(file))
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

    return Link(init, apply)


def read_trace(path: Path) -> Bools:
    """The file as `bool[rounds, clients]`; every pair must be there exactly once."""
    if not path.is_file():
        raise DataError(f"{path}: no such trace file")
    if path.suffix == ".parquet":
        rounds, clients, delivered = _read_parquet(path)
    elif path.suffix == ".csv":
        rounds, clients, delivered = _read_csv(path)
    else:
        raise DataError(f"{path}: a trace must end in .csv or .parquet, got {path.suffix!r}")
    if len(rounds) == 0:
        raise DataError(f"{path}: holds no rows")
    if min(rounds.min(), clients.min()) < 0:
        raise DataError(f"{path}: round and client count from 0, got {min(rounds.min(), clients.min())}")
    shape = (int(rounds.max()) + 1, int(clients.max()) + 1)
    cells = shape[0] * shape[1]
    if cells != len(rounds) or cells > MOST_CELLS:
        raise DataError(
            f"{path}: {shape[0]} rounds of {shape[1]} clients need {cells} rows, got {len(rounds)}"
        )
    seen = np.zeros(shape, dtype=bool)
    seen[rounds, clients] = True
    if not seen.all():
        t, client = np.argwhere(~seen)[0]
        raise DataError(f"{path}: no row for round {t} and client {client}, and another one twice")
    table = np.zeros(shape, dtype=bool)
    table[rounds, clients] = delivered
    return table


def _read_csv(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows: list[tuple[np.int64, np.int64, bool]] = []
    try:
        # Spreadsheets put a byte order mark in front of the first column's name: "-sig" takes it away.
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle)
            _need_columns(path, reader.fieldnames or [])
            for row in reader:
                cells = _cells(row)
                if cells is None:
                    found = ",".join(str(value) for value in row.values())
                    raise DataError(
                        f"{path}, line {reader.line_num}: "
                        f"expected two whole numbers and 0 or 1, got {found!r}"
                    )
                rows.append(cells)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV trace: {error}") from error
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2].astype(bool)


def _cells(row: Mapping[str, str | None]) -> tuple[np.int64, np.int64, bool] | None:
    texts = [(row[column] or "").strip().lower() for column in COLUMNS]
    try:
        t, client = (np.int64(int(text)) for text in texts[:2])
    except (ValueError, OverflowError):
        return None
    if texts[2] not in _TRUE | _FALSE:
        return None
    return t, client, texts[2] in _TRUE


def _read_parquet(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "Parquet traces") from error
    try:
        table = parquet.read_table(path)
        _need_columns(path, table.column_names)
        for name in COLUMNS:
            if table[name].null_count:
                raise DataError(f"{path}: column {name} has {table[name].null_count} empty cells")
        rounds, clients = (table[name].cast(pyarrow.int64()).to_numpy() for name in COLUMNS[:2])
        raw = table["delivered"].to_numpy()
        if raw.dtype.kind in "iuf" and not np.isin(raw, (0, 1)).all():
            raise DataError(f"{path}: delivered must be 0 or 1, got {raw[~np.isin(raw, (0, 1))][0]}")
        delivered = table["delivered"].cast(pyarrow.bool_()).to_numpy()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet trace: {error}") from error
    return rounds, clients, delivered


def _need_columns(path: Path, found: object) -> None:
    names = list(found)  # type: ignore[call-overload]
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        raise DataError(f"{path}: needs columns {', '.join(COLUMNS)}; missing {', '.join(missing)}")
