"""All runs that the page was given: what they are, how far they are, what is new since last asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from functools import partial
from threading import Lock
from typing import Any

from safari.config import Config
from safari.errors import RunError
from safari.report import cells, explain, rows_of, warnings_of
from safari.report.gather import arm_looks, run_names
from safari.report.track import shareable
from safari.runs import CLASSIFICATION, RunFolder, RunMetrics, Trial, model_size, seeds_of, summarise_trial
from safari.runs.elsewhere import decided
from safari.runs.files import is_alive
from safari.runs.metrics import LONGEST_LABEL
from safari.runs.record import MOST_BY_CLASS
from safari.runs.soundness import Course, course_of
from safari.runs.summary import whole
from safari.text import visible
from safari.toml import to_toml
from safari.view.arrays import encode_array
from safari.view.follow import without_folder
from safari.view.trial import Cursor, TrialLog, drawn_clients

Cursors = dict[str, Cursor]
# Arms × seeds that are followed: each holds some memory and is looked at twice a second.
MOST_TRIALS = 2000
CONFIG = "the newest config.toml"
# What a page can count up to without rounding.
_LARGEST_COUNT = 2**53


class Monitor:
    """Follows runs. Every method may be called from any thread, and none fails because of what a file holds:
    what cannot be read is left out and named among the run's problems.

    Parameters
    ----------
    runs: the runs to show.
    rules: what each rule does, in a line, by the rule's name.
    """

    def __init__(self, runs: Sequence[RunFolder], rules: Mapping[str, str] | None = None):
        self._lock = Lock()
        self._rules = dict(rules or {})
        self._names = run_names(runs)
        self._runs = list(runs)
        self._configs = [_stamp(run) for run in runs]
        self._logs: dict[str, TrialLog] = {}
        # By run and part, so that a part that can be read again is no longer named.
        self._failed: dict[tuple[int, str], str] = {}
        self.version = 0

    def poll(self) -> bool:
        """Read what is new on the disk; True when anything is."""
        with self._lock:
            before = dict(self._failed)
            changed = False
            for number in range(len(self._runs)):
                changed |= self._reread_config(number)
                for trial in self._trials(number):
                    key = f"{number}/{trial.arm}/{trial.seed}"
                    part = f"{trial.arm}, seed {trial.seed}"
                    changed |= self._attempt(number, part, partial(self._poll_trial, key, trial), False)
            changed |= self._failed != before
            self.version += changed
            return changed

    def describe(self) -> dict[str, Any]:
        """Description of each run: the facts that stay constant while it trains, and its status."""
        with self._lock:
            return {"runs": [self._describe(number) for number in range(len(self._runs))]}

    def since(self, have: Cursors) -> tuple[dict[str, dict[str, Any]], Cursors]:
        """New data of each trial that has grown, and the cursors after it."""
        with self._lock:
            news, now = {}, {}
            for key, log in self._logs.items():
                now[key] = log.cursor
                if have.get(key) != log.cursor:
                    place = {"run": _run_of(key), "arm": log.trial.arm, "seed": log.trial.seed}
                    news[key] = place | log.since(have.get(key))
            return news, now

    def detail(self, key: str) -> dict[str, Any]:
        """Every client and layer of a trial."""
        with self._lock:
            return self._log(key).detail()

    def snapshot(self, key: str, round: int) -> dict[str, Any]:
        """The similarity matrix of a trial after a round."""
        with self._lock:
            matrix = self._log(key).snapshots.read(round)
        return {"round": round, "clients": len(matrix), "matrix": encode_array(matrix, "f4")}

    def snapshot_rounds(self, key: str) -> list[int]:
        """The rounds of a trial that have one."""
        with self._lock:
            return self._log(key).snapshots.rounds

    def table(self) -> dict[str, Any]:
        """The table of results, as texts."""
        with self._lock:
            found = {
                name: self._attempt(number, "the table", partial(self._summary, number), None)
                for number, name in enumerate(self._names)
            }
            summaries = {name: summary for name, summary in found.items() if summary is not None}
        header, body = cells(rows_of(summaries))
        return {
            "header": header,
            "rows": body,
            "note": explain(summaries),
            "warnings": warnings_of(summaries),
        }

    def _attempt(self, number: int, part: str, work: Callable[[], Any], otherwise: Any) -> Any:
        """Result of `work`; if it fails, list the part among the run's problems and return `otherwise`.

        A run's files may hold anything, and one that was not thought of must not end the page.
        """
        try:
            result = work()
        except Exception as error:
            words = without_folder(error, self._runs[number].path)
            self._failed[number, part] = f"{part} cannot be shown ({type(error).__name__}: {words})"[:300]
            return otherwise
        self._failed.pop((number, part), None)
        return result

    def _log(self, key: str) -> TrialLog:
        if key not in self._logs:
            raise RunError(f"there is no trial {key!r} here")
        return self._logs[key]

    def _trials(self, number: int) -> list[Trial]:
        trials: list[Trial] = self._attempt(number, "the trials", self._runs[number].trials, [])
        if len(trials) > MOST_TRIALS:
            self._failed[number, "more trials"] = (
                f"{len(trials)} arms and seeds have begun; the first {MOST_TRIALS} are shown"
            )
        return trials[:MOST_TRIALS]

    def _poll_trial(self, key: str, trial: Trial) -> bool:
        if key not in self._logs:
            number = _run_of(key)
            self._logs[key] = TrialLog(trial, self._runs[number].config.clients, self._metrics(number))
        return self._logs[key].poll()

    def _metrics(self, number: int) -> RunMetrics:
        run = self._runs[number]
        found: RunMetrics = self._attempt(number, "task.json", lambda: run.metrics, CLASSIFICATION)
        return found

    def _reread_config(self, number: int) -> bool:
        """A resumed run may have more rounds, seeds or arms than before."""
        run, stamp = self._runs[number], _stamp(self._runs[number])
        if stamp == self._configs[number]:
            return False
        self._configs[number] = stamp
        self._runs[number] = self._attempt(number, CONFIG, lambda: RunFolder.open(run.path), run)
        if self._runs[number].config.clients != run.config.clients:
            self._logs = {k: log for k, log in self._logs.items() if _run_of(k) != number}
        return True

    def _describe(self, number: int) -> dict[str, Any]:
        run, problems = self._runs[number], list[str]()
        config = shareable(run.config)
        looks = arm_looks([(name, run.config) for name, run in zip(self._names, self._runs, strict=True)])
        clients, environment, model, data = (
            _read_json(run, name, problems)
            for name in ("clients.json", "environment.json", "model.json", "data.json")
        )
        found = {
            "name": self._names[number],
            "rounds": config.rounds,
            "clients": config.clients,
            "drawn_clients": drawn_clients(config.clients),
            "seeds": {"first": config.seed, "count": config.seeds},
            "target": config.evaluation.goal(self._metrics(number).main.percent),
            "metrics": self._metrics(number).to_json(),
            "arms": [
                _arm(arm, self._rules) | {"look": looks[self._names[number], arm.name]} for arm in config.arms
            ],
            "setting": setting(config),
            "fields": self._attempt(number, "the table of fields", lambda: _flat(decided(config)), []),
            "toml": self._attempt(
                number, "the text of the config", lambda: to_toml(config, values=decided(config)), ""
            ),
            "environment": [[str(key), str(value)] for key, value in environment.items()],
            "label_counts": _counts(clients.get("label_counts"), drawn_clients(config.clients)),
            "class_names": _texts(data.get("class_names")),
            "numbers": self._numbers(number, model),
            "state": self._state(number),
        }
        problems += [text for (whose, _), text in self._failed.items() if whose == number]
        return found | {"problems": problems}

    def _numbers(self, number: int, model: Mapping[str, Any]) -> int | None:
        size: Any = model.get("numbers")
        if _whole(size):
            return int(size)
        logs = (log for key, log in self._logs.items() if _run_of(key) == number)
        sizes = (model_size(log.trial.checkpoint, log.trial.root) for log in logs)
        return next((size for size in sizes if size is not None), None)

    def _state(self, number: int) -> str:
        """finished, running or stopped."""
        run = self._runs[number]
        done = sum(min(log.length, run.config.rounds) for log in self._logs_of(number).values())
        if done >= run.config.rounds * run.config.seeds * len(run.config.arms):
            return "finished"
        return "running" if _has_writer(run) else "stopped"

    def _logs_of(self, number: int) -> dict[tuple[str, int], TrialLog]:
        """The logs of what a run's config asks for now, by arm and seed."""
        config = self._runs[number].config
        arms, seeds = {arm.name for arm in config.arms}, seeds_of(config)
        return {
            (log.trial.arm, log.trial.seed): log
            for key, log in self._logs.items()
            if _run_of(key) == number and log.trial.arm in arms and log.trial.seed in seeds
        }

    def _summary(self, number: int) -> dict[str, Any]:
        config, metrics, logs = self._runs[number].config, self._metrics(number), self._logs_of(number)
        by_seed = sorted(logs.items(), key=lambda item: item[0][1])
        trials: dict[str, dict[str, Any]] = {arm.name: {} for arm in config.arms}
        courses: dict[str, list[Course]] = {arm.name: [] for arm in config.arms}
        for (arm, seed), log in by_seed:
            records = _records(log)
            trials[arm][str(seed)] = summarise_trial(records, config, log.metrics)
            complete = log.length >= config.rounds
            courses[arm].append(course_of(records, log.metrics, complete=complete))
        return whole(config, metrics, trials, courses)


def _run_of(key: str) -> int:
    return int(key.partition("/")[0])


def setting(config: Config) -> str:
    """A run in a line; of parts that most runs leave alone, those that are not the default.

    >>> from safari.config import parse
    >>> setting(parse({"cohort": 3, "sampling": {"name": "multinomial"}, "client": {"name": "fedprox"}}))
    '10 clients, 3 asked in a round · sampling multinomial · digits (groups) · cnn · mag at 80 % sparsity · client \
fedprox · uplink bernoulli · 150 rounds · 1 seed'
    """
    clients = f"{config.clients} clients"
    if config.cohort:
        clients += f", {config.cohort} asked in a round"
    first = Config()

    def unless_default(*names: str) -> list[str]:
        return [
            f"{name} {getattr(config, name).name}"
            for name in names
            if getattr(config, name).name != getattr(first, name).name
        ]

    parts = [
        clients,
        *unless_default("sampling"),
        f"{config.data.name} ({config.partition.name})",
        config.model.name,
        f"{config.pruning.pruner} at {100 * config.pruning.sparsity:.4g} % sparsity",
        *unless_default("policy", "client"),
        f"uplink {config.uplink.name}",
        *unless_default("packets", "downlink"),
        f"{config.rounds} rounds",
        f"{config.seeds} seed" + "s" * (config.seeds > 1),
    ]
    return " · ".join(parts)


def _arm(arm: Any, rules: Mapping[str, str]) -> dict[str, Any]:
    options = ", ".join(f"{key} = {value!r}" for key, value in arm.rule.options.items())
    return {
        "name": arm.name,
        "rule": arm.rule.name,
        "options": options,
        "about": rules.get(arm.rule.name, ""),
        "changes": [" = ".join(row) for row in _flat(arm.set)],
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """Every field of a config with its value, as texts.

    >>> _flat({"rounds": 3, "uplink": {"name": "lost"}})
    [['rounds', '3'], ['uplink.name', 'lost']]
    """
    rows = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append([f"{prefix}{key}", _text(value)])
    return rows


def _text(value: Any) -> str:
    # TOML has dates, and JSON has none.
    if isinstance(value, str | date | time):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _records(log: TrialLog) -> list[dict[str, Any]]:
    """Fields of each record that a summary needs; layers for the last record only."""
    names = log.metrics.names
    records: list[dict[str, Any]] = [
        {
            **{name: row[name] for name in ("round", *names)},
            "average": None
            if row[f"average_{log.metrics.score}"] is None
            else {name: row[f"average_{name}"] for name in names},
            "bytes": {"up": row["bytes_up"], "down": row["bytes_down"]},
            **{name: range(int(row[name] or 0)) for name in ("arrived", "missing", "refused")},
        }
        for values in zip(*log.columns.values(), strict=True)
        for row in [dict(zip(log.columns, values, strict=True))]
    ]
    if records:
        records[-1]["layers"] = dict.fromkeys(log.dead_layers(), 0.0)
    return records


def _counts(value: Any, clients: int) -> list[list[int]] | None:
    """Label counts, when they are a table of whole numbers for these clients."""
    if not isinstance(value, list) or len(value) != clients or not value:
        return None
    widths = {len(row) if isinstance(row, list) else 0 for row in value}
    if len(widths) != 1 or 0 in widths or not all(_whole(n) for row in value for n in row):
        return None
    return value


def _texts(value: Any) -> list[str]:
    """The first of a list of texts, each cut to a limited length; none where it is no list."""
    return (
        [visible(str(each), LONGEST_LABEL) for each in value[:MOST_BY_CLASS]]
        if isinstance(value, list)
        else []
    )


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _read_json(run: RunFolder, name: str, problems: list[str]) -> dict[str, Any]:
    try:
        return run.read(name)
    except RunError as error:
        problems.append(without_folder(error, run.path))
        return {}


def _stamp(run: RunFolder) -> tuple[int, int]:
    try:
        about = (run.path / "config.toml").stat()
    except OSError:
        return 0, 0
    return about.st_mtime_ns, about.st_size


def _has_writer(run: RunFolder) -> bool:
    """Is a process at work on the folder? The lock itself is left alone: even a short hold would refuse
    a run that is just about to begin."""
    pid = run.writer()
    # Elsewhere it cannot be found out whether it still lives.
    return pid is not None and (os.name != "posix" or is_alive(pid))
