"""From a config to the things it names: data, clients, model, links. All that stays the same in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from safari.aggregation import RULES, STEPS, Compensation, Server, ServerStep, average
from safari.config import Arm, Config, Plug
from safari.data import (
    AUGMENTATIONS,
    DATASETS,
    PARTITIONS,
    Augmentation,
    Data,
    as_data,
    divide,
    hold_out,
    label_counts,
)
from safari.engine.checks import check_augmentation, check_draws, check_output, check_parts, check_task
from safari.engine.device import device_of, placed
from safari.engine.guests import (
    check_arrays,
    checked_link,
    checked_rule,
    checked_step,
    hosted,
    named,
    rehearse,
)
from safari.errors import ConfigError, PruneError, SafariError
from safari.links import LINKS, Link, Setting
from safari.models import MODELS, Layout
from safari.plugins import check_call, check_options, named_arguments, resolve
from safari.pruning import PRUNERS, Batch, Pruner, as_pruner, compute_mask, kept_count
from safari.runs.metrics import RunMetrics
from safari.seeds import derive, generator, torch_generator
from safari.tasks import TASKS, Task
from safari.training import draw_batches, evaluate

T = TypeVar("T")

# kind -> (built-ins, where a config names one)
KINDS: dict[str, tuple[Mapping[str, Any], str]] = {
    "data": (DATASETS, "data.name"),
    "partition": (PARTITIONS, "partition.name"),
    "model": (MODELS, "model.name"),
    "task": (TASKS, "task.name"),
    "pruner": (PRUNERS, "pruning.pruner"),
    "link": (LINKS, "uplink.name, downlink.name"),
    "rule": (RULES, "arms"),
    "step": (STEPS, "aggregation.steps"),
}
# What a factory is given by position; all else are its options.
POSITIONAL = {"partition": ("labels", "clients", "rng"), "model": ("shape", "classes")}


@dataclass(frozen=True)
class World:
    """Everything that does not change while a run goes on. `module` is scratch space for one client;
    `counters` are its buffers that no vector holds, as it was built with them."""

    config: Config
    seed: int
    device: torch.device
    data: Data
    task: Task
    parts: tuple[np.ndarray, ...]
    label_counts: np.ndarray
    module: nn.Module
    layout: Layout
    counters: Mapping[str, Tensor]
    start: Tensor
    pruner: Pruner
    augmentation: Augmentation
    uplink: Link
    downlink: Link

    def setting(self, direction: str) -> Setting:
        """What a link may know."""
        return Setting(len(self.parts), self.label_counts, generator(self.seed, direction))

    @property
    def client_weights(self) -> list[float] | None:
        """What each client counts for in the average; None: all the same."""
        if self.config.aggregation.weights == "samples":
            return [float(len(part)) for part in self.parts]
        return None

    def mask(self, x: Tensor, client: int, t: int, pruner: Pruner | None = None) -> Tensor:
        """A client's mask on the global model x of round t (by another pruner, where one is given)."""
        # Before anything was trained, all clients and arms have the same mask when it needs no data.
        if t == 0 and pruner is None and not self.pruner.needs_data:
            return self._first_mask
        return self._mask(x, client, t, pruner or self.pruner)

    @cached_property
    def _first_mask(self) -> Tensor:
        return self._mask(self.start, 0, 0, self.pruner)

    def _mask(self, x: Tensor, client: int, t: int, pruner: Pruner) -> Tensor:
        make = partial(
            compute_mask,
            self.fresh_module(),
            self.layout,
            x,
            pruner,
            self.config.pruning.sparsity,
            self.pruning_batch(client, t),
            torch_generator(self.seed, "pruner"),
            # After the first round, what is 0 stays cut.
            support=None if t == 0 else x != 0,
        )
        name = self.config.pruning.pruner
        own = pruner is self.pruner and _is_own("pruner", name)
        return hosted(f"pruning.pruner: {name}", make) if own else make()

    def server(self, rule: Compensation) -> Server:
        """The server before the first round."""
        return Server.start(
            self.start,
            len(self.parts),
            rule,
            weights=self.client_weights,
            parameters=self.layout.parameters,
            steps=steps_of(self.config),
        )

    def fresh_module(self) -> nn.Module:
        """The scratch module without what the last client's training counted in it.

        A norm without momentum hangs on such counts: left alone, they would carry over from client to
        client and from arm to arm, and a resumed run would miss them.
        """
        self.layout.put_back(self.module, self.counters)
        return self.module

    def module_seed(self, client: int, t: int) -> int:
        """The seed of what is random inside a client's module in round t."""
        return derive(self.seed, "module", client, t) >> 1

    def steps(self, client: int) -> int:
        """How many local steps a client makes in a round."""
        local = self.config.local
        if local.epochs > 0:
            return max(1, round(local.epochs * len(self.parts[client]) / local.batch))
        return local.steps

    def scores(
        self,
        model: Tensor,
        t: int,
        memory_format: torch.memory_format = torch.preserve_format,
        tester: nn.Module | None = None,
    ) -> dict[str, float] | None:
        """The test of a model after round t, or None where the config asks for none.

        `tester`: what runs the module in a way of its own.
        """
        evaluation = self.config.evaluation
        if not evaluation.is_due(t + 1, self.config.rounds):
            return None
        self.layout.write(self.module, model)
        module = self.fresh_module()
        return evaluate(
            module if tester is None else tester,
            self.data.test_x,
            self.data.test_y,
            evaluation.batch,
            memory_format,
            task=self.task,
        )

    def cohort(self, t: int) -> list[int]:
        """Who is asked in round t, ascending."""
        clients = len(self.parts)
        if self.config.cohort in (0, clients):
            return list(range(clients))
        rng = generator(self.seed, "cohort", t)
        return sorted(rng.choice(clients, self.config.cohort, replace=False).tolist())

    def training_draw(self, client: int, t: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Which samples a client sees in round t, `int64[steps, batch]`, and the draws of its augmentation,
        which have a row a sample, in the same order."""
        rng = generator(self.seed, "batches", client, t)
        part = self.parts[client]
        index = part[draw_batches(rng, len(part), self.config.local.batch, self.steps(client))]
        return index, self.augmentation.draw(rng, index.size, self.data.input_shape)

    def batch(self, index: np.ndarray, draws: Sequence[np.ndarray]) -> Batch:
        """Those samples, augmented, on the run's device."""
        return self.gather(torch.from_numpy(index), *(torch.from_numpy(d) for d in draws))

    def gather(self, index: Tensor, *draws: Tensor) -> Batch:
        """The same with indices and draws as tensors, wherever they are."""
        pick = index.to(self.data.train_x.device)
        return self.augmented(self.data.train_x[pick], self.data.train_y[pick], *draws)

    def augmented(self, x: Tensor, y: Tensor, *draws: Tensor) -> Batch:
        """Samples that are in hand, augmented, on the run's device."""
        x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
        return self.augmentation.apply(x, *(d.to(self.device) for d in draws)), y

    def training_batches(self, client: int, t: int) -> list[Batch]:
        """What a client trains on in round t."""
        index, draws = self.training_draw(client, t)
        size = index.shape[1]
        return [
            self.batch(pick, [d[s * size : (s + 1) * size] for d in draws]) for s, pick in enumerate(index)
        ]

    def pruning_draw(self, client: int, t: int) -> np.ndarray:
        """Which samples a client's pruner looks at in round t."""
        part = self.parts[client]
        rng = generator(self.seed, "pruning", client, t)
        return part[rng.choice(len(part), min(self.config.pruning.batch, len(part)), replace=False)]

    def pruning_batch(self, client: int, t: int) -> Batch:
        """Those samples; only their shape matters to pruners without data."""
        if not self.pruner.needs_data:
            return self.data.train_x[:1].to(self.device), self.data.train_y[:1].to(self.device)
        pick = torch.from_numpy(self.pruning_draw(client, t)).to(self.data.train_x.device)
        return self.data.train_x[pick].to(self.device), self.data.train_y[pick].to(self.device)


def load_data(config: Config) -> Data:
    """The data set that a config names, on the CPU."""
    return as_data(_build("data", "data", config.data), config.data.name)


def assemble(config: Config, seed: int, data: Data) -> World:
    """The world of one seed. ConfigError lists every problem at once."""
    problems = Problems()
    if config.evaluation.validation > 0:
        data = hold_out(data, config.evaluation.validation, generator(seed, "validation"))
    labels = data.train_y.numpy()
    parts = problems.attempt(lambda: _partition(config, seed, data))
    module = problems.attempt(lambda: _module(config, seed, data))
    check_names(config, problems)
    task = problems.attempt(partial(task_of, config))
    if task is not None:
        problems.attempt(partial(check_task, task, data))
        problems.attempt(partial(RunMetrics.of, task))
    if module is not None:
        sizes = problems.attempt(partial(Layout.of, module))
        if sizes is not None:
            problems.attempt(
                lambda: kept_count(sizes.prunable_count, config.pruning.sparsity, "pruning.sparsity")
            )
    if parts is not None:
        problems.attempt(partial(check_draws, config.local, max(map(len, parts))))
        counts = label_counts(labels, parts, data.classes)
        for direction in ("uplink", "downlink"):
            problems.attempt(partial(_start_link, config, direction, seed, counts))
    if problems.lines or parts is None or module is None or task is None:
        raise ConfigError(problems.lines)
    device = device_of(config)
    module.to(device)
    layout = Layout.of(module)
    world = World(
        config=config,
        seed=seed,
        device=device,
        data=placed(data, device),
        task=task,
        parts=tuple(parts),
        label_counts=label_counts(labels, parts, data.classes),
        module=module,
        layout=layout,
        counters=layout.counters(module),
        start=layout.read(module),
        pruner=_pruner(config),
        augmentation=AUGMENTATIONS[config.local.augment],
        uplink=_link(config, "uplink"),
        downlink=_link(config, "downlink"),
    )
    # What can only be seen with everything in hand.
    augment = partial(check_augmentation, world.augmentation, data, generator(seed, "batches", 0, 0))
    problems.attempt(lambda: named("local.augment", augment))
    problems.attempt(lambda: check_output(world.module, config.model.name, world.data, device, task))
    if _is_own("pruner", config.pruning.pruner):
        problems.attempt(lambda: world.mask(world.start, 0, 0))
    for arm in config.arms:
        problems.attempt(partial(_start_rule, arm, world))
    if any(_is_own("step", plug.name) for plug in config.aggregation.steps):
        problems.attempt(lambda: rehearse(world, RULES["drop"]()))
    problems.raise_if_any()
    return world


def check_names(config: Config, problems: Problems) -> None:
    """Note every plug-in that does not exist or does not take its options: what can be said without data."""
    for kind in ("data", "partition", "model", "task"):
        problems.attempt(partial(_factory, kind, kind, getattr(config, kind)))
    problems.attempt(lambda: _pruner(config))
    for direction in ("uplink", "downlink"):
        problems.attempt(partial(_link, config, direction))
    for arm in config.arms:
        problems.attempt(partial(rule_of, arm.rule))
    for k, plug in enumerate(config.aggregation.steps):
        problems.attempt(partial(_step, k, plug))
    problems.attempt(lambda: device_of(config))


class Problems:
    """Collects what is wrong, so that a user sees all of it at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def attempt(self, make: Callable[[], T]) -> T | None:
        """The value, or None with its problems noted, each once."""
        try:
            return make()
        except SafariError as error:
            found = error.problems if isinstance(error, ConfigError) else [str(error)]
            self.lines += [line for line in found if line not in self.lines]
        return None

    def raise_if_any(self) -> None:
        """ConfigError with all of them."""
        if self.lines:
            raise ConfigError(self.lines)


def rule_of(plug: Plug) -> Compensation:
    """The compensation that an arm names."""
    rule = _build("rule", "arms", plug)
    if not isinstance(rule, Compensation):
        raise ConfigError(f"arms: {plug.name} must return a Compensation, got {rule!r}")
    return checked_rule(rule, f"arms: {plug.name}") if _is_own("rule", plug.name) else rule


def task_of(config: Config) -> Task:
    """The task that a config names."""
    task = _build("task", "task", config.task)
    if not isinstance(task, Task):
        raise ConfigError(f"task.name: {config.task.name} must return a Task, got {task!r}")
    return task


def steps_of(config: Config) -> list[ServerStep]:
    """The server steps that a config names, and the running average where it asks for one."""
    links = [_step(k, plug) for k, plug in enumerate(config.aggregation.steps)]
    most = config.aggregation.average
    return [*links, average(most=most)] if most else links


def _step(k: int, plug: Plug) -> ServerStep:
    field = f"aggregation.steps[{k}]"
    where, step = f"{field}: {plug.name}", _build("step", field, plug)
    if not isinstance(step, ServerStep):
        raise ConfigError(f"{where} must return a ServerStep, got {step!r}")
    return checked_step(step, where) if _is_own("step", plug.name) else replace(step, name=where)


def _is_own(kind: str, name: str) -> bool:
    """Is it a user's? Their code is looked after; a mistake in ours keeps its frames."""
    return name not in KINDS[kind][0]


def _name_field(kind: str, field: str) -> str:
    # An arm's `name` is its own, what it plugs in is the rule; a step may be a bare name.
    return field if kind in ("rule", "step") else f"{field}.name"


def _factory(kind: str, field: str, plug: Plug) -> Callable[..., Any]:
    where = f"{_name_field(kind, field)}: {plug.name}"
    factory: Callable[..., Any] = resolve(kind, _name_field(kind, field), plug.name, KINDS[kind][0])
    if not callable(factory):
        raise ConfigError(f"{where} is not a function, got {factory!r}")
    problems = hosted(where, partial(check_options, field, factory, plug.options))
    if problems:
        raise ConfigError(problems)
    check_call(where, factory, POSITIONAL.get(kind, ()), plug.options)
    return factory


def _build(kind: str, field: str, plug: Plug) -> Any:
    factory = _factory(kind, field, plug)
    return _made(kind, field, plug, lambda: factory(**dict(plug.options)))


def _made(kind: str, field: str, plug: Plug, make: Callable[[], Any]) -> Any:
    """Run a plug-in's code, and say what went wrong in which table."""
    if _is_own(kind, plug.name):
        return hosted(f"{_name_field(kind, field)}: {plug.name}", make)
    return named(field, make)


def _link(config: Config, direction: str) -> Link:
    plug: Plug = getattr(config, direction)
    link, where = _build("link", direction, plug), f"{direction}.name: {plug.name}"
    if not isinstance(link, Link):
        raise ConfigError(f"{where} must return a Link, got {link!r}")
    return checked_link(link, where, config.clients) if _is_own("link", plug.name) else link


def _pruner(config: Config) -> Pruner:
    found = resolve("pruner", "pruning.pruner", config.pruning.pruner, PRUNERS)
    try:
        return as_pruner(found)
    except PruneError as error:
        raise ConfigError(f"pruning.pruner: {error}") from error


def _start_link(config: Config, direction: str, seed: int, counts: np.ndarray) -> None:
    plug, link = getattr(config, direction), _link(config, direction)
    setting = Setting(len(counts), counts, generator(seed, direction))
    state = _made("link", direction, plug, lambda: link.init(setting))
    if _is_own("link", plug.name):
        check_arrays(f"{direction}.name: {plug.name}", "init", state)
        link.apply(state, 0, generator(seed, direction, 0))


def _start_rule(arm: Arm, world: World) -> None:
    rule = rule_of(arm.rule)
    size = len(world.parts), world.layout.size, world.device
    _made("rule", f"arms: {arm.name}", arm.rule, partial(rule.init, *size))
    if _is_own("rule", arm.rule.name):
        rehearse(world, rule)


def _partition(config: Config, seed: int, data: Data) -> list[np.ndarray]:
    partition = _factory("partition", "partition", config.partition)
    rng, options = generator(seed, "partition"), dict(config.partition.options)
    parts = _made(
        "partition",
        "partition",
        config.partition,
        lambda: divide(partition, data, config.clients, rng, options),
    )
    check_parts(parts, config.clients, len(data.train_y))
    return [np.asarray(part, dtype=np.int64) for part in parts]


def _module(config: Config, seed: int, data: Data) -> nn.Module:
    make, options = _factory("model", "model", config.model), dict(config.model.options)
    with torch.random.fork_rng([]):
        torch.manual_seed(derive(seed, "model") >> 1)
        extra = named_arguments(make, tokens=data.tokens, labels=data.label_kind)
        module = _made(
            "model",
            "model",
            config.model,
            lambda: make(data.input_shape, data.classes, **extra, **options),
        )
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name: {config.model.name} must return a torch.nn.Module, got {module!r}")
    return module
