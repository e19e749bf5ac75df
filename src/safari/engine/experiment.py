"""A whole experiment: every arm and every seed, side by side, into a run's folder that can be resumed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, Protocol

import torch

from safari.aggregation import RULES
from safari.config import Config, override, parse
from safari.data import Data
from safari.engine import reference, vectorised
from safari.engine.assembly import assemble, check_rest, notes_of
from safari.engine.measure import Round
from safari.engine.parts import Parts, Problems, load_data, parts_of
from safari.engine.state import from_saved, initial, similarity_picture, to_saved
from safari.engine.world import World
from safari.errors import ConfigError, DataError, RunError, SafariError, brief, one_of
from safari.federation import Federation, State
from safari.plugins import first_line, known
from safari.rounds.resume import refuse_changes
from safari.runs import RunFolder, Saved, Trial, best_score, done_records, seeds_of, spacing, summarise
from safari.runs.code import keep_code, refuse_changed_code
from safari.runs.environment import environment
from safari.runs.metrics import FILE as TASK_FILE
from safari.runs.metrics import RunMetrics, metrics_text
from safari.runs.record import RoundRecord
from safari.runs.versions import note_version
from safari.toml import read_toml, to_toml
from safari.trust import using

# Names of classes, and tokens, that a run's folder lists.
MOST_NAMES = 10_000
# Rounds between two checkpoints, where the config does not say and they are not large.
_USUAL = 10

RoundFunction = Callable[[Federation, State], Round]

# An engine is prepared once for a world and then runs rounds; see `reference` for what a round is.
ENGINES: dict[str, Callable[[World], RoundFunction]] = {
    "reference": reference.prepare,
    "vectorised": vectorised.prepare,
}


class Watcher(Protocol):
    """An observer of a run: a progress bar, a tracker.

    One that also has `note(text)` is told what the engine wants a user to know: each thing once a run.
    """

    def start(self, run: RunFolder) -> None:
        """Called once, when the run has its folder."""

    def round(self, trial: Trial, record: RoundRecord) -> None:
        """Called after each round, and for rounds that an earlier process had done."""

    def stop(self) -> None:
        """Called once at the end, also after an error."""


def run(
    config: Config | Mapping[str, Any] | str | Path,
    out: str | Path,
    watchers: Sequence[Watcher] = (),
    *,
    overwrite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Run an experiment, as tables or from a TOML file, into a new folder; returns its summary.

    Args:
        config: the experiment.
        out: the run's folder, new or empty.
        watchers: told of every round.
        overwrite: replace a run that the folder holds.
        trust: use the code and the addresses that a TOML file names, although somebody else may have written it;
            tables are the caller's own.

    >>> import tempfile
    >>> small = {"rounds": 2, "arms": ["drop"], "clients": 5, "model": {"name": "mlp"}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run(small, f"{folder}/first")
    >>> summary["arms"]["drop"]["seeds"]["0"]["rounds"]
    2
    """
    with using(Path(config) if isinstance(config, str | Path) else None, trust):
        wanted = as_config(config)
        found = ready(wanted)
        return _go(RunFolder.create(Path(out), wanted, overwrite=overwrite), watchers, found)


def as_config(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """A config from tables or from a TOML file."""
    if isinstance(config, str | Path):
        config = read_toml(Path(config))
    if isinstance(config, Config):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(f"config must be a Config, a table or the path of a TOML file, got {brief(config)}")
    return parse(config)


def resume(
    path: str | Path,
    watchers: Sequence[Watcher] = (),
    *,
    from_round: int | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Go on with a run that was interrupted; a finished one is only summarised again.

    Args:
        path: the run's folder.
        watchers: told of every round, also of those that are done.
        from_round: go back to the state after this round first; it must have a checkpoint
            (`checkpoint.keep`). What is later is kept in `cut-N` beside the records.
        trust: use the code and the addresses that the folder's config names; TrustError otherwise, unless this user
            has made the run, and its files have not changed since (`safari.trust`).
    """
    run = RunFolder.open(Path(path))
    if from_round is None and finished(run):
        return _show(run, watchers)
    if run.is_federation:
        raise RunError(
            f"{run.path} was made by a Flower federation, and goes on when that is started again with this folder"
        )
    # First, because trust would not help.
    refuse_changed_code(run)
    with using(run.path / "config.toml", trust):
        if from_round is None:
            return _go(run, watchers)
        # Nothing is set aside for a run that could not go on.
        found = ready(run.config)
        with run.writing():
            aside = run.rewind(from_round)
        words = f"back to round {from_round}; what came after it is in"
        return _go(run, watchers, found, [f"{words} {place}" for place in aside])


def changed(run: RunFolder, settings: Sequence[tuple[str, Any]]) -> RunFolder:
    """The run with other settings, such as more rounds; RunError where what is done does not follow from them.

    Args:
        run: a run that no process is writing.
        settings: fields and values, as `safari.config.override` takes them.
    """
    config = parse(override(run.config.to_dict(), settings))
    for trial in run.trials():
        if trial.arm not in {arm.name for arm in config.arms}:
            raise RunError(
                f"arms must keep {trial.arm}, which has rounds, got {', '.join(a.name for a in config.arms)}"
            )
        if done := trial.done():
            refuse_changes(trial.about(), config, trial)
            if done > config.rounds:
                raise RunError(
                    f"rounds must be at least {done}, which {trial.arm} has done, got {config.rounds}"
                )
    with run.writing():
        run.write("config.toml", to_toml(config))
    return RunFolder.open(run.path)


def finished(run: RunFolder) -> bool:
    """Are all rounds of every arm and seed done? RunError when they were done under another config."""
    rounds, trials = run.config.rounds, run.trials()
    if len(trials) < len(run.config.arms) * run.config.seeds:
        return False
    if any(trial.done() < rounds or len(done_records(trial, rounds)) < rounds for trial in trials):
        return False
    for trial in trials:
        refuse_changes(trial.about(), run.config, trial)
    return True


@dataclass(frozen=True)
class Ready:
    """A run that can start: its data, the parts of each group of arms, and their worlds of the first seed."""

    data: Data
    parts: tuple[Parts, ...]
    worlds: tuple[World, ...]


def ready(config: Config) -> Ready:
    """Build all that a run needs and check it, so that errors show before a folder is made.

    ConfigError lists everything that would stop the run before its first round; a DataError comes as it is
    when it is alone.
    """
    problems = Problems()
    problems.attempt(lambda: engine_of(config))
    groups = config.arm_groups()
    parts = [problems.attempt(partial(parts_of, group)) for group in groups]
    built = tuple(found for found in parts if found is not None)
    try:
        data = load_data(config, built[0] if built else None)
    except SafariError as error:
        if isinstance(error, DataError) and not problems.lines:
            raise
        problems.note(error)
        raise problems.error() from error
    worlds = [problems.attempt(partial(assemble, p.config, config.seed, data, p)) for p in built]
    if len(built) < len(groups):
        # Some part is missing; what can be made without it may be wrong as well.
        check_rest(config, config.seed, data, problems)
    problems.raise_if_any()
    return Ready(data, built, tuple(world for world in worlds if world is not None))


def check(config: Config) -> list[str]:
    """Everything that would stop a run before its first round, a line each: what `safari validate` prints."""
    return check_and_note(config)[0]


def check_and_note(config: Config) -> tuple[list[str], list[str]]:
    """Problems that would stop a run before its first round, and warnings about one that can start."""
    problems = Problems()
    found = problems.attempt(lambda: ready(config))
    worlds = () if found is None else found.worlds
    return problems.lines, _distinct(note for world in worlds for note in notes_of(world))


def _distinct(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def engine_of(config: Config) -> Callable[[World], RoundFunction]:
    """The engine that a config names."""
    if config.engine.name not in ENGINES:
        raise ConfigError(one_of("engine.name", config.engine.name, ENGINES))
    return ENGINES[config.engine.name]


def _go(
    run: RunFolder, watchers: Sequence[Watcher], found: Ready | None = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    config = run.config
    with run.writing(), _threads(config.engine.threads), _watched(run, watchers):
        for note in notes:
            _tell(watchers, note)
        parts = found.parts if found else tuple(parts_of(group) for group in config.arm_groups())
        data = found.data if found else load_data(config, parts[0])
        for seed in seeds_of(config):
            worlds = found.worlds if found and seed == config.seed else None
            run_seed(run, seed, data, watchers, parts=parts, worlds=worlds)
        return _summarised(run)


def _show(run: RunFolder, watchers: Sequence[Watcher]) -> dict[str, Any]:
    """Show a finished run to the watchers again. Nothing is computed, and nothing that it names is loaded."""
    with run.writing(), _watched(run, watchers):
        for trial in run.trials():
            trial.load()
            for record in done_records(trial, run.config.rounds):
                for watcher in watchers:
                    watcher.round(trial, record)
        return _summarised(run)


@contextlib.contextmanager
def _watched(run: RunFolder, watchers: Sequence[Watcher]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for watcher in watchers:
            watcher.start(run)
            stack.callback(watcher.stop)
        yield


def _summarised(run: RunFolder) -> dict[str, Any]:
    summary = summarise(run)
    run.write("summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def run_seed(
    run: RunFolder,
    seed: int,
    data: Data,
    watchers: Sequence[Watcher] = (),
    *,
    parts: Sequence[Parts] | None = None,
    worlds: Sequence[World] | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """All rounds of one seed that are not done, into a folder that the caller holds (`RunFolder.writing`).

    Seeds share nothing, nor do arms: several processes may each do one of a run, or some arms of one. `parts`
    and `worlds` are those of the config's groups of arms, where they have been made before. Once `stop` says so,
    every arm is saved where it stands.
    """
    if worlds is None:
        built = parts or [parts_of(group) for group in run.config.arm_groups()]
        worlds = [assemble(p.config, seed, data, p) for p in built]
    keep_code(run, _descriptions(run.config))
    prepare, first = engine_of(run.config), seed == run.config.seed
    if first and prepare is vectorised.prepare:
        _tell(watchers, vectorised.forecast(worlds[0]))
    engines = [prepare(world) for world in worlds]
    if first:
        _describe(run, worlds[0])
        told = [getattr(engine, "note", "") for engine in engines]
        for note in _distinct([*told, *(note for world in worlds for note in notes_of(world))]):
            _tell(watchers, note)
    _run_arms(run, list(zip(worlds, engines, strict=True)), watchers, stop)


def _descriptions(config: Config) -> dict[str, str]:
    """Docstring's first line of each of the user's own rules, for pages that must not import them."""
    own = [arm.rule.name for arm in config.arms if arm.rule.name not in RULES]
    return {name: first_line(rule) for name in own if (rule := known("rule", name, RULES)) is not None}


def _describe(run: RunFolder, world: World) -> None:
    """Write a run's facts for the report, once: division of the data, model, labels, metrics, machine."""
    if not (run.path / "clients.json").exists():
        clients = {"label_counts": world.label_counts.tolist(), "samples": [len(p) for p in world.parts]}
        run.write("clients.json", json.dumps(clients) + "\n")
    if not (run.path / "model.json").exists():
        layers = {e.name: e.size for e in world.layout.entries if e.kind == "weight"}
        model = {"numbers": world.layout.size, "prunable": world.layout.prunable_count, "layers": layers}
        run.write("model.json", json.dumps(model) + "\n")
    if not (run.path / "data.json").exists():
        run.write("data.json", json.dumps(_facts(world)) + "\n")
    if not (run.path / TASK_FILE).exists():
        run.write(TASK_FILE, metrics_text(RunMetrics.of(world.task)))
    if not (run.path / "environment.json").exists():
        run.write("environment.json", json.dumps(environment(world.device), indent=2) + "\n")


def _facts(world: World) -> dict[str, Any]:
    """Facts about the training data that a user of the model needs."""
    data = world.data
    facts: dict[str, Any] = {
        "input_shape": [*data.input_shape],
        "tokens": data.tokens,
        "label_kind": data.label_kind,
        "classes": data.classes,
    }
    if data.scaling is not None:
        facts["inputs"] = {"mean": data.scaling.mean, "scale": data.scaling.scale}
    if world.units is not None:
        facts["labels"] = {"mean": world.units.mean.tolist(), "scale": world.units.scale.tolist()}
    for name, texts in (("class_names", data.class_names), ("vocabulary", data.vocabulary)):
        if 0 < len(texts) <= MOST_NAMES:
            facts[name] = texts
    return facts


def _tell(watchers: Sequence[Watcher], text: str) -> None:
    for watcher in watchers if text else ():
        note = getattr(watcher, "note", None)
        if note is not None:
            note(text)


def _run_arms(
    run: RunFolder,
    groups: Sequence[tuple[World, RoundFunction]],
    watchers: Sequence[Watcher],
    stop: Callable[[], bool] | None,
) -> None:
    """All arms side by side, a round of each in turn."""
    tracks = [_Track(run, world, engine, watchers) for world, engine in groups]
    while going := [track for track in tracks if not track.done]:
        for track in going:
            if stop is not None and stop():
                for each in tracks:
                    each.save()
                return
            track.round()


class _Track:
    """The arms that share a world: where each stands."""

    def __init__(self, run: RunFolder, world: World, engine: RoundFunction, watchers: Sequence[Watcher]):
        self._config, self._world, self._engine, self._watchers = run.config, world, engine, watchers
        self._arms: list[tuple[Trial, Federation, State]] = []
        self._best: dict[tuple[str, int], float] = {}
        self._every: dict[str, int] = {}
        for arm in world.config.arms:
            trial = run.trial(arm.name, world.seed)
            fed, saved = world.federation(world.rules[arm.name]), trial.load()
            state = initial(world, fed) if saved is None else from_saved(saved, world, fed, trial)
            done = done_records(trial, run.config.rounds)
            for record in done:
                for watcher in watchers:
                    watcher.round(trial, record)
            best = best_score(done, RunMetrics.of(world.task)) if trial.has_best() else None
            if best is not None:
                self._best[trial.arm, trial.seed] = best
            if state.round < run.config.rounds:
                note_version(trial, state.round + 1)
            self._every[arm.name] = every = spacing(
                run.config.checkpoint.every, _USUAL, to_saved(state, world, trial)
            )
            if every > max(_USUAL, run.config.checkpoint.every) and world.seed == run.config.seed:
                _tell(
                    watchers,
                    f"checkpoints of {arm.name} are large: one every {every} rounds (checkpoint.every)",
                )
            self._arms.append((trial, fed, state))

    @property
    def done(self) -> bool:
        """Are all rounds of every arm done?"""
        return all(state.round >= self._config.rounds for *_, state in self._arms)

    def save(self) -> None:
        """Save every arm where it stands, unless it is saved there already."""
        for trial, _, state in self._arms:
            if state.round > trial.done():
                trial.save(to_saved(state, self._world, trial), self._config.checkpoint.keep)

    def round(self) -> None:
        """One round of each arm that is not done."""
        rounds, checkpoint = self._config.rounds, self._config.checkpoint
        arms = [arm for arm in self._arms if arm[2].round < rounds]
        following = []
        with contextlib.closing(
            side_by_side(self._engine, [(fed, state) for _, fed, state in arms])
        ) as results:
            for (trial, fed, _), (state, record, seconds) in zip(arms, results, strict=True):
                trial.append(record, seconds, similarity_picture(state, fed.clients))
                if checkpoint.best:
                    self._keep_best(trial, state, record)
                if state.round % self._every[trial.arm] == 0 or state.round == rounds:
                    trial.save(to_saved(state, self._world, trial), checkpoint.keep)
                for watcher in self._watchers:
                    watcher.round(trial, record)
                following.append((trial, fed, state))
        self._arms = following

    def _keep_best(self, trial: Trial, state: State, record: RoundRecord) -> None:
        """Save the model where its score is better than all before it; an equal one does not replace it."""
        metric = RunMetrics.of(self._world.task).main
        score = record.metrics[metric.name]
        if score is None:
            return
        before = self._best.get((trial.arm, trial.seed))
        if before is None or (score > before if metric.higher else score < before):
            self._best[trial.arm, trial.seed] = score
            tensors = {"model": state.model}
            if state.average is not None:
                tensors["average"] = state.average
            facts = {"layout": self._world.layout.digest, "metrics": dict(record.metrics)}
            trial.save_best(Saved(record.round, tensors, facts))


def side_by_side(
    engine: RoundFunction, arms: Sequence[tuple[Federation, State]]
) -> Generator[Round, None, None]:
    """A round of each, as far as the engine can at the same time."""
    yield from getattr(engine, "side_by_side", partial(starmap, engine))(arms)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
