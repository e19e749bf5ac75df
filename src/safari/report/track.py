"""Trackers: watchers that pass a run's numbers on to TensorBoard or MLflow, through their own libraries.

A resumed run replays its earlier rounds to every watcher. Each tracker first reads what it has logged
already and adds only what is not there, so that no number is logged twice and none is left out, however
the process before came to its end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safari.config import Config
from safari.errors import MissingExtraError, RunError, SafariError
from safari.runs import RoundRecord, RunFolder, Trial
from safari.runs.files import is_there, making, open_plain, read_object, write_atomically
from safari.toml import to_toml
from safari.trust import contact

# How many rounds of a trial are sent to MLflow at once: a request takes milliseconds.
ROUNDS_AT_ONCE = 20
# MLflow refuses longer values, and more numbers or parameters in one call.
MLFLOW_LONGEST_VALUE = 6000
MLFLOW_MOST_METRICS = 1000
MLFLOW_MOST_PARAMS = 100
# How long MLflow is waited for, unless the user's environment says otherwise: less than a minute a request.
# Its own values add up to 20 minutes, and a server may ask for any time it likes before the next attempt.
MLFLOW_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
# MLflow 3 asks for this word before it opens a folder; naming a folder in the config says it.
MLFLOW_FOLDERS = {"MLFLOW_ALLOW_FILE_STORE": "true"}

Logged = dict[str, set[int]]


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Numbers of a round that both trackers log, by name; those that the round lacks are left out.

    >>> numbers_of(RoundRecord(1, (0, 2), (1,), {"top1": 0.5, "loss": None}, bytes={"up": 7}))
    {'test/top1': 0.5, 'network/arrived': 2.0, 'network/missing': 1.0, 'network/refused': 0.0,
     'bytes/up': 7.0}
    """
    columns: dict[str, float | None] = {f"test/{name}": value for name, value in record.metrics.items()}
    columns["train/loss"] = record.train_loss
    columns |= {f"mask/{name}": record[name] for name in ("density", "agreement", "support", "churn")}
    columns |= {f"average/{name}": value for name, value in (record.average or {}).items()}
    columns |= {f"network/{name}": len(record[name]) for name in ("arrived", "missing", "refused")}
    columns |= {f"bytes/{direction}": size for direction, size in record.bytes.items()}
    return {name: float(value) for name, value in columns.items() if value is not None}


class TensorBoard:
    """Event files in RUN/tensorboard/ARM/seed-N: look with `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard", "TensorBoard event files") from error
        self._run: RunFolder | None = None
        self._logged: dict[Trial, Logged] = {}
        self._writers: dict[Trial, Any] = {}

    def start(self, run: RunFolder) -> None:
        """Remember the run whose folder receives the files."""
        self._run = run

    def round(self, trial: Trial, record: RoundRecord) -> None:
        """Log the numbers of this round that are not logged yet."""
        run = _begun(self._run)
        if trial not in self._logged:
            self._logged[trial] = _read_events(self._folder(trial), run.path)
        step = record.round
        for name, value in _new(numbers_of(record), step, self._logged[trial]):
            self._writer(trial).add_scalar(name, value, step)
        if step >= run.config.rounds and trial in self._writers:
            self._writers.pop(trial).close()

    def stop(self) -> None:
        """Put everything on the disk."""
        while self._writers:
            self._writers.popitem()[1].close()
        self._logged.clear()

    def _folder(self, trial: Trial) -> Path:
        return _begun(self._run).path / "tensorboard" / trial.arm / f"seed-{trial.seed}"

    def _writer(self, trial: Trial) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if trial not in self._writers:
            with making(self._folder(trial), _begun(self._run).path) as folder:
                first = not any(folder.iterdir())
                writer = SummaryWriter(log_dir=str(folder), flush_secs=10)
            if first:
                # Four spaces: how Markdown, which TensorBoard renders, marks a text to be shown as it is.
                lines = to_toml(shareable(_begun(self._run).config)).splitlines()
                writer.add_text("config", "".join(f"    {line}\n" for line in lines), 0)
            self._writers[trial] = writer
        return self._writers[trial]


@dataclass
class _MLflowRun:
    """A trial's run at MLflow, while this process follows it."""

    id: str
    logged: Logged
    running: bool
    done: int = 0
    waiting: list[Any] = field(default_factory=list)


class MLflow:
    """One MLflow run for each arm and seed, in an experiment of the config's name.

    `where` is a tracking URI or a folder. `http://...` is a server; `sqlite:///mlflow.db` is the database that
    `mlflow ui` shows by default. A folder is MLflow's file store, which MLflow 3 still reads and writes but asks
    about, so that looking at it takes `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri FOLDER`.

    Ids of the runs are kept in RUN/mlflow.json, so that a resumed run goes on in the same ones. Everything
    goes through a client of its own: an active run of the caller's is neither used nor touched. When MLflow
    fails, or a server does not answer (`MLFLOW_PATIENCE`), the run stops with a RunError and can be resumed.
    """

    def __init__(self, where: str) -> None:
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("mlflow", "mlflow", "MLflow runs") from error
        self.uri = tracking_uri(where)
        self._client: Any = None
        self._experiment = ""
        self._run: RunFolder | None = None
        self._ids: dict[str, str] = {}
        self._trials: dict[Trial, _MLflowRun] = {}
        self._given_up = False

    def start(self, run: RunFolder) -> None:
        """Find the experiment, or make it."""
        from mlflow import MlflowClient

        self._run, self._given_up = run, False
        with self._named(), _environment(MLFLOW_FOLDERS):
            self._client = MlflowClient(tracking_uri=self.uri)
            found = self._client.get_experiment_by_name(run.config.name)
            self._experiment = (
                self._client.create_experiment(run.config.name) if found is None else found.experiment_id
            )
        self._ids = self._read_ids()

    def round(self, trial: Trial, record: RoundRecord) -> None:
        """Queue the numbers of this round that are not logged yet; several rounds are sent together."""
        from mlflow.entities import Metric

        rounds = _begun(self._run).config.rounds
        if trial not in self._trials:
            self._trials[trial] = self._open(trial)
        here = self._trials[trial]
        here.done, now = record.round, int(1000 * time.time())
        here.waiting += [
            Metric(name, value, now, here.done)
            for name, value in _new(numbers_of(record), here.done, here.logged)
        ]
        if len({metric.step for metric in here.waiting}) >= ROUNDS_AT_ONCE:
            self._send(here)
        if here.done >= rounds:
            self._end(here)

    def stop(self) -> None:
        """Send the rest; a trial that is whole is finished, any other was killed.

        Not to an MLflow that has failed, or that the user did not want to wait for any longer.
        """
        if self._given_up:
            self._trials.clear()
        while self._trials:
            self._end(self._trials.popitem()[1])

    def _open(self, trial: Trial) -> _MLflowRun:
        key = f"{trial.arm}/seed-{trial.seed}"
        with self._named():
            if key not in self._ids:
                made = self._client.create_run(self._experiment, run_name=key)
                self._ids[key] = made.info.run_id
                self._write_ids()
            run = self._client.get_run(self._ids[key])
            if not run.data.params:
                self._log_parameters(run.info.run_id, trial)
            logged = {
                name: {metric.step for metric in self._client.get_metric_history(run.info.run_id, name)}
                for name in run.data.metrics
            }
        return _MLflowRun(run.info.run_id, logged, running=run.info.status == "RUNNING")

    def _log_parameters(self, run_id: str, trial: Trial) -> None:
        from mlflow.entities import Param

        config = parameters_of(shareable(_begun(self._run).config))
        params = {"arm": trial.arm, "trial_seed": str(trial.seed), **config}
        entities = [Param(name, value[:MLFLOW_LONGEST_VALUE]) for name, value in params.items()]
        for at in range(0, len(entities), MLFLOW_MOST_PARAMS):
            self._client.log_batch(run_id, params=entities[at : at + MLFLOW_MOST_PARAMS])

    def _send(self, here: _MLflowRun) -> None:
        with self._named():
            if here.waiting and not here.running:
                self._client.update_run(here.id, status="RUNNING")
                here.running = True
            while here.waiting:
                self._client.log_batch(here.id, metrics=here.waiting[:MLFLOW_MOST_METRICS])
                del here.waiting[:MLFLOW_MOST_METRICS]

    def _end(self, here: _MLflowRun) -> None:
        self._send(here)
        whole = here.done >= _begun(self._run).config.rounds
        if here.running:
            with self._named():
                self._client.set_terminated(here.id, "FINISHED" if whole else "KILLED")
            here.running = False

    def _ids_path(self) -> Path:
        return _begun(self._run).path / "mlflow.json"

    def _write_ids(self) -> None:
        text = json.dumps({"uri": without_password(self.uri), "runs": self._ids}, indent=2)
        write_atomically(self._ids_path(), f"{text}\n".encode())

    def _read_ids(self) -> dict[str, str]:
        """The ids from earlier processes, unless they belong to another tracking URI."""
        path = self._ids_path()
        if not is_there(path):
            return {}
        try:
            saved = read_object(path)
            here = saved["uri"] == without_password(self.uri)
            return {str(key): str(value) for key, value in saved["runs"].items()} if here else {}
        except (RunError, KeyError, AttributeError) as error:
            raise RunError(
                f"{path} does not hold MLflow's run ids; remove it to log into new runs ({error!r})"
            ) from error

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            with _environment(MLFLOW_PATIENCE):
                yield
        except BaseException as error:
            self._given_up = True
            # Not all that MLflow raises is an exception of its own.
            if isinstance(error, SafariError) or not isinstance(error, Exception):
                raise
            words = str(error).rstrip(".")
            raise RunError(
                f"track.mlflow: MLflow at {without_password(self.uri)} says: {words}; "
                "the run can be resumed, also with another track.mlflow in its config.toml"
            ) from error


def watchers_for(config: Config) -> list[TensorBoard | MLflow]:
    """The trackers that a config asks for; MissingExtraError when a library is not installed, and TrustError for an
    address of somebody else's choice.

    >>> watchers_for(Config())
    []
    """
    trackers: list[TensorBoard | MLflow] = []
    if config.track.tensorboard:
        trackers.append(TensorBoard())
    if config.track.mlflow:
        contact(config.track.mlflow, "in track.mlflow is an address or a folder to write to")
        trackers.append(MLflow(config.track.mlflow))
    return trackers


def tracking_uri(where: str) -> str:
    """A tracking URI as it is; a folder as the URI of a file store.

    >>> tracking_uri("http://localhost:5000"), tracking_uri("sqlite:///runs.db"), tracking_uri("databricks")
    ('http://localhost:5000', 'sqlite:///runs.db', 'databricks')
    >>> tracking_uri("/data/runs of mine")
    'file:///data/runs%20of%20mine'
    """
    # A scheme of one letter is a Windows drive.
    if len(urlsplit(where).scheme) > 1 or where == "databricks":
        return where
    return Path(where).expanduser().resolve().as_uri()


def without_password(uri: str) -> str:
    """The URI without a user's name and password, for everything that may be passed on.

    >>> without_password("https://me:secret@host:5000/x"), without_password("sqlite:///runs.db")
    ('https://host:5000/x', 'sqlite:///runs.db')
    """
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return uri.replace(f"//{parts.netloc}", f"//{host}", 1) if host != parts.netloc else uri


def shareable(config: Config) -> Config:
    """The config as it may be shown to others."""
    return replace(config, track=replace(config.track, mlflow=without_password(config.track.mlflow)))


def parameters_of(config: Config) -> dict[str, str]:
    """The config as dotted names and texts.

    >>> parameters_of(Config())["pruning.sparsity"], parameters_of(Config())["partition.groups"]
    ('0.8', '2')
    """
    flat: dict[str, str] = {}
    for name, value in config.to_dict().items():
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, entry in entries:
            text = entry if isinstance(entry, str) else json.dumps(entry)
            flat[f"{name}.{key}" if key else name] = text
    return flat


def _begun(run: RunFolder | None) -> RunFolder:
    if run is None:
        raise RunError("a tracker must be started with a run before it is given rounds")
    return run


def _new(numbers: Mapping[str, float], step: int, logged: Logged) -> Iterator[tuple[str, float]]:
    """The numbers that are not logged at this step yet; they count as logged from here on."""
    for name, value in numbers.items():
        steps = logged.setdefault(name, set())
        if step not in steps:
            steps.add(step)
            yield name, value


def _read_events(folder: Path, root: Path) -> Logged:
    """Which steps TensorBoard's files hold, by name; a last record that was torn is passed over."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    if not is_there(folder, root) or not folder.is_dir():
        return {}
    # TensorBoard opens whatever has such a name.
    for path in folder.glob("*tfevents*"):
        open_plain(path, root).close()
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    try:
        events.Reload()
        return {name: {event.step for event in events.Scalars(name)} for name in events.Tags()[SCALARS]}
    # Not all that is wrong with a file has an error of its own there.
    except Exception as error:
        raise RunError(
            f"{folder} holds no events that TensorBoard can read; remove it ({error!r})"
        ) from error


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables in the context, for a library that reads nothing else; the user's own take precedence."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
