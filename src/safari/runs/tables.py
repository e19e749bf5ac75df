"""A run's records as tables: plain columns, a list each, that any library of data frames takes as they are.

A number that does not exist is None. Nothing that the run names is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from safari.errors import RunError, one_of
from safari.runs.folder import RunFolder, Trial, read_lines
from safari.runs.record import OVER_CLIENTS, ClientStatus, RoundRecord
from safari.runs.summary import summarise

Columns = dict[str, list[Any]]

# Seconds, about 30,000 years: nothing longer was measured.
_LONGEST = 1e12
# Every row has a cell in every column, so one line with many fields would multiply the size of the table.
MOST_COLUMNS = 2_000
# The columns that hold texts; all others hold numbers.
TEXTS = ("arm", "layer", "status", "reason", "name")
_COUNTED = (ClientStatus.ARRIVED, ClientStatus.LOST, ClientStatus.LOST_UP, ClientStatus.LOST_DOWN)


def columns(run: RunFolder, name: str, skipped: list[str] | None = None) -> Columns:
    """One table of a run by its name, one of `TABLES`; RunError names them all.

    Args:
        run: the run, finished or not.
        name: the table's name.
        skipped: where damaged lines of the records are named. Without it, the first one raises a RunError.
    """
    if name not in TABLES:
        raise RunError(one_of("table", name, TABLES))
    return TABLES[name](run, skipped)


def rounds(run: RunFolder, skipped: list[str] | None = None) -> Columns:
    """A row for each arm, seed and round: the numbers of its record, the diagnosis, and the seconds it took."""
    return _table(_round_rows(run, skipped), ("arm", "seed", "round"))


def clients(run: RunFolder, skipped: list[str] | None = None) -> Columns:
    """A row for each arm, seed and client that was ever asked: how often what became of it, and its last score."""
    return _table(_client_rows(run, skipped), ("arm", "seed", "client"))


def arrivals(run: RunFolder, skipped: list[str] | None = None) -> Columns:
    """A row for each arm, seed, round and client that was asked in it: what became of it, who stood in."""
    return _table(_arrival_rows(run, skipped), ("arm", "seed", "round", "client"))


def layers(run: RunFolder, skipped: list[str] | None = None) -> Columns:
    """A row for each arm, seed, round and prunable tensor: how much of it is kept, how much changed."""
    return _table(_layer_rows(run, skipped), ("arm", "seed", "round", "layer"))


def summary(run: RunFolder, skipped: list[str] | None = None) -> Columns:
    """A row for each arm and seed: the numbers of `summary.json`, as the run stands now."""
    arms = summarise(run, skipped)["arms"]
    rows = (
        {"arm": arm, "seed": int(seed), **numbers}
        for arm, entry in arms.items()
        for seed, numbers in entry["seeds"].items()
    )
    return _table(rows, ("arm", "seed"))


TABLES: Mapping[str, Callable[[RunFolder, list[str] | None], Columns]] = {
    "rounds": rounds,
    "clients": clients,
    "arrivals": arrivals,
    "layers": layers,
    "summary": summary,
}


def _round_rows(run: RunFolder, skipped: list[str] | None) -> Iterator[dict[str, Any]]:
    for trial, records in _trials(run, skipped):
        seconds = _seconds(trial, skipped)
        for record in records:
            diagnosis = {f"diagnosis_{name}": value for name, value in (record.diagnosis or {}).items()}
            parts = seconds.get(record.round, {})
            took = {f"seconds_{name}": value for name, value in parts.items()}
            total = {"seconds": sum(parts.values())} if parts else {}
            over = (
                {f"clients_{name}": record.clients[name] for name in OVER_CLIENTS} if record.clients else {}
            )
            own = {**record.numbers(), **over, **_extra(record), **diagnosis}
            # The key again, last: a further field of the record may be called `arm` or `seed`.
            yield {**_key(trial), **own, **total, **took, **_key(trial)}


def _extra(record: RoundRecord) -> dict[str, Any]:
    """Further fields of a record that are one number; a table of numbers goes column by column."""
    found: dict[str, Any] = {}
    for name, value in record.extra.items():
        entries = {f"{name}_{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {}
        for column, entry in {name: value, **entries}.items():
            if isinstance(entry, bool | int | float):
                found[column] = entry
    return found


def _client_rows(run: RunFolder, skipped: list[str] | None) -> Iterator[dict[str, Any]]:
    held = run.read("clients.json").get("samples")
    samples = held if isinstance(held, list) else []
    for trial, records in _trials(run, skipped):
        counts: dict[int, dict[str, int]] = {}
        names: dict[int, str] = {}
        scores: list[Any] = []
        for record in records:
            scores = record.clients["scores"] if record.clients else scores
            names |= record.names or {}
            for client, status in record.outcomes.items():
                own = counts.setdefault(client, dict.fromkeys(_COUNT_NAMES, 0))
                own["asked"] += 1
                own[_word(status)] += 1
                own["stood_in"] += client in record.stood_in
        for client in sorted(counts):
            # The division of the data is that of the first seed.
            known = trial.seed == run.config.seed and client < len(samples)
            held_by = samples[client] if known else None
            score = {"score": scores[client] if client < len(scores) else None} if scores else {}
            name = {"name": names.get(client)} if names else {}
            yield {**_key(trial), "client": client, **name, "samples": held_by, **counts[client], **score}


def _arrival_rows(run: RunFolder, skipped: list[str] | None) -> Iterator[dict[str, Any]]:
    for trial, records in _trials(run, skipped):
        for record in records:
            for client, status in record.outcomes.items():
                others = record.stood_in.get(client, ())
                yield {
                    **_key(trial),
                    "round": record.round,
                    "client": client,
                    **({"name": record.names.get(client)} if record.names else {}),
                    "status": _word(status),
                    "stand_in": others[0] if others else None,
                    "stand_ins": len(others),
                    "share": _share(record, client, status),
                    "reason": record.refused.get(client, (record.reasons or {}).get(client)),
                }


def _share(record: RoundRecord, client: int, status: ClientStatus) -> float:
    """Fraction of a client's model that arrived: 0, 1, or between where packets are lost one by one."""
    part = (record.parts or {}).get(client)
    return float(status is ClientStatus.ARRIVED) if part is None else float(part)


def _layer_rows(run: RunFolder, skipped: list[str] | None) -> Iterator[dict[str, Any]]:
    for trial, records in _trials(run, skipped):
        for record in records:
            for name, density in record.layers.items():
                churn = None if record.layer_churn is None else record.layer_churn.get(name, 0.0)
                age = (record.mask_age or {}).get(name)
                yield {
                    **_key(trial),
                    "round": record.round,
                    "layer": name,
                    "density": density,
                    "churn": churn,
                    "age": age,
                }


def _word(status: ClientStatus) -> str:
    return status.name.lower()


_COUNT_NAMES = ("asked", *map(_word, _COUNTED), _word(ClientStatus.REFUSED), "stood_in")


def _trials(run: RunFolder, skipped: list[str] | None) -> Iterator[tuple[Trial, Sequence[RoundRecord]]]:
    for trial in run.trials():
        problems: list[str] | None = None if skipped is None else []
        yield trial, trial.records(run.config.clients, problems)
        if skipped is not None:
            skipped += [f"{trial.arm}, seed {trial.seed}: {problem}" for problem in problems or ()]


def _seconds(trial: Trial, skipped: list[str] | None) -> dict[int, dict[str, float]]:
    """The seconds of each round, by part; lines that are damaged end them where that may be."""
    found: dict[int, dict[str, float]] = {}
    try:
        for line in read_lines(trial.timings, trial.root):
            number = line.get("round")
            if isinstance(number, int):
                found[number] = {
                    name: float(value)
                    for name, value in line.items()
                    if name != "round" and is_seconds(value)
                }
    except RunError as error:
        if skipped is None:
            raise
        skipped.append(str(error))
    return found


def is_seconds(value: object) -> bool:
    """A number of seconds; an integer of hundreds of digits is no float, and NaN is in no range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST


def _key(trial: Trial) -> dict[str, Any]:
    return {"arm": trial.arm, "seed": trial.seed}


def _table(rows: Iterable[Mapping[str, Any]], key: Sequence[str]) -> Columns:
    """Rows as columns; a row that lacks one has None there. The key is there also without rows.

    RunError where there are more than `MOST_COLUMNS`.
    """
    found: Columns = {name: [] for name in key}
    for count, row in enumerate(rows):
        for name in row:
            if name not in found:
                if len(found) == MOST_COLUMNS:
                    raise RunError(
                        f"a table may have at most {MOST_COLUMNS:,} columns; the records have more"
                    )
                found[name] = [None] * count
        for name, values in found.items():
            values.append(row.get(name))
    return found
