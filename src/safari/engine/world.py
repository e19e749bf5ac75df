"""From a config to the things it names: data, clients, model, links. All that stays the same in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from safari.aggregation import RULES, Compensation
from safari.config import Config, Plug
from safari.data import (
    AUGMENTATIONS,
    DATASETS,
    PARTITIONS,
    Augmentation,
    Data,
    as_data,
    label_counts,
)
from safari.errors import ConfigError, DataError, PruneError, SafariError
from safari.links import LINKS, Link, Setting
from safari.models import MODELS, Layout
from safari.plugins import check_options, resolve
from safari.pruning import PRUNERS, Batch, Pruner, as_pruner, kept_count
from safari.seeds import derive, generator
from safari.training import draw_batches

T = TypeVar("T")

# kind -> (built-ins, where a config names one)
KINDS: dict[str, tuple[Mapping[str, Any], str]] = {
    "data": (DATASETS, "data.name"),
    "partition": (PARTITIONS, "partition.name"),
    "model": (MODELS, "model.name"),
    "pruner": (PRUNERS, "pruning.pruner"),
    "link": (LINKS, "uplink.name, downlink.name"),
    "rule": (RULES, "arms"),
}


@dataclass(frozen=True)
class World:
    """Everything that does not change while a run goes on. `module` is scratch space for one client;
    `counters` are its buffers that no vector holds, as it was built with them."""

    config: Config
    seed: int
    device: torch.device
    data: Data
    parts: tuple[Tensor, ...]
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

    def fresh_module(self) -> nn.Module:
        """The scratch module without what the last client's training counted in it.

        A norm without momentum hangs on such counts: left alone, they would carry over from client to
        client and from arm to arm, and a resumed run would miss them.
        """
        buffers = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, value in self.counters.items():
                buffers[name].copy_(value)
        return self.module

    def steps(self, client: int) -> int:
        """How many local steps a client makes in a round."""
        local = self.config.local
        if local.epochs > 0:
            return max(1, round(local.epochs * len(self.parts[client]) / local.batch))
        return local.steps

    def cohort(self, t: int) -> list[int]:
        """Who is asked in round t, ascending."""
        clients = len(self.parts)
        if self.config.cohort in (0, clients):
            return list(range(clients))
        rng = generator(self.seed, "cohort", t)
        return sorted(rng.choice(clients, self.config.cohort, replace=False).tolist())

    def training_batches(self, client: int, t: int) -> list[Batch]:
        """What a client trains on in round t."""
        rng = generator(self.seed, "batches", client, t)
        part = self.parts[client]
        picks = draw_batches(rng, len(part), self.config.local.batch, self.steps(client))
        batches = []
        for pick in picks:
            index = part[torch.from_numpy(pick).to(part.device)]
            x, y = self.data.train_x[index], self.data.train_y[index]
            draws = self.augmentation.draw(rng, len(index), self.data.input_shape)
            batches.append(
                (self.augmentation.apply(x, *(torch.from_numpy(d).to(x.device) for d in draws)), y)
            )
        return batches

    def pruning_batch(self, client: int, t: int) -> Batch:
        """What a client's pruner looks at in round t; only its shape matters to pruners without data."""
        if not self.pruner.needs_data:
            return self.data.train_x[:1], self.data.train_y[:1]
        part = self.parts[client]
        rng = generator(self.seed, "pruning", client, t)
        pick = rng.choice(len(part), min(self.config.pruning.batch, len(part)), replace=False)
        index = part[torch.from_numpy(pick).to(part.device)]
        return self.data.train_x[index], self.data.train_y[index]


def load_data(config: Config) -> Data:
    """The data set that a config names, on the CPU."""
    return as_data(_build("data", "data", config.data), config.data.name)


def check(config: Config) -> list[str]:
    """Everything that would stop a run before its first round, a line each: what `safari validate` prints."""
    problems = _Problems()
    _check_names(config, problems)
    try:
        data = problems.attempt(lambda: load_data(config))
    except SafariError as error:
        return [*problems.lines, f"data: {error}"]
    if data is not None:
        problems.attempt(lambda: assemble(config, config.seed, data))
    return list(dict.fromkeys(problems.lines))


def assemble(config: Config, seed: int, data: Data) -> World:
    """The world of one seed. ConfigError lists every problem at once."""
    problems = _Problems()
    _check_names(config, problems)
    problems.raise_if_any()
    labels = data.train_y.numpy()
    parts = problems.attempt(lambda: _partition(config, seed, labels))
    module = problems.attempt(lambda: _module(config, seed, data))
    device = problems.attempt(lambda: device_of(config))
    uplink, downlink = _link("uplink", config.uplink), _link("downlink", config.downlink)
    if parts is not None and module is not None and device is not None:
        layout = Layout.of(module)
        world = World(
            config=config,
            seed=seed,
            device=device,
            data=data.to(device),
            parts=tuple(torch.from_numpy(part).to(device) for part in parts),
            label_counts=label_counts(labels, parts, data.classes),
            module=module.to(device),
            layout=layout,
            counters=_counters(module.to(device), layout),
            start=layout.read(module),
            pruner=as_pruner(resolve("pruner", "pruning.pruner", config.pruning.pruner, PRUNERS)),
            augmentation=AUGMENTATIONS[config.local.augment],
            uplink=uplink,
            downlink=downlink,
        )
        # What can only be seen with everything in hand.
        problems.attempt(lambda: kept_count(layout.prunable_count, config.pruning.sparsity))
        problems.attempt(lambda: _named("local.augment", lambda: world.training_batches(0, 0)))
        for direction, link in (("uplink", uplink), ("downlink", downlink)):
            setting = world.setting(direction)
            problems.attempt(partial(_named, direction, partial(link.init, setting)))
        problems.raise_if_any()
        return world
    raise ConfigError(problems.lines)


def rule_of(plug: Plug) -> Compensation:
    """The compensation that an arm names."""
    rule = _build("rule", "arms", plug)
    if not isinstance(rule, Compensation):
        raise ConfigError(f"arms: {plug.name} must return a Compensation, got {rule!r}")
    return rule


def device_of(config: Config) -> torch.device:
    """Where the run computes."""
    wanted = config.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch sees no CUDA device; use cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _factory(kind: str, field: str, plug: Plug) -> Callable[..., Any]:
    factory: Callable[..., Any] = resolve(kind, f"{field}.name", plug.name, KINDS[kind][0])
    if not callable(factory):
        raise ConfigError(f"{field}.name: {plug.name} is not a function, got {factory!r}")
    problems = check_options(field, factory, plug.options)
    if problems:
        raise ConfigError(problems)
    return factory


def _build(kind: str, field: str, plug: Plug) -> Any:
    factory = _factory(kind, field, plug)
    return _named(field, lambda: factory(**dict(plug.options)))


def _named(field: str, make: Callable[[], Any]) -> Any:
    """Run a plug-in's own checks, and say in which table its problem lies."""
    try:
        return make()
    except ConfigError as error:
        raise ConfigError([f"{field}: {problem}" for problem in error.problems]) from error


class _Problems:
    """Collects what is wrong, so that a user sees all of it at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def attempt(self, make: Callable[[], T]) -> T | None:
        """The value, or None with its problems noted."""
        try:
            return make()
        except ConfigError as error:
            self.lines += error.problems
        except (PruneError, DataError) as error:
            self.lines.append(str(error))
        return None

    def raise_if_any(self) -> None:
        if self.lines:
            raise ConfigError(self.lines)


def _check_names(config: Config, problems: _Problems) -> None:
    for kind in ("data", "partition", "model"):
        plug = getattr(config, kind)
        problems.attempt(partial(_factory, kind, kind, plug))
    problems.attempt(lambda: as_pruner(resolve("pruner", "pruning.pruner", config.pruning.pruner, PRUNERS)))
    for direction in ("uplink", "downlink"):
        problems.attempt(partial(_link, direction, getattr(config, direction)))
    for arm in config.arms:
        problems.attempt(partial(rule_of, arm.rule))
    problems.attempt(lambda: device_of(config))


def _link(direction: str, plug: Plug) -> Link:
    link = _build("link", direction, plug)
    if not isinstance(link, Link):
        raise ConfigError(f"{direction}.name: {plug.name} must return a Link, got {link!r}")
    return link


def _partition(config: Config, seed: int, labels: np.ndarray) -> list[np.ndarray]:
    partition = _factory("partition", "partition", config.partition)
    rng, options = generator(seed, "partition"), dict(config.partition.options)
    parts = _named("partition", lambda: partition(labels, config.clients, rng, **options))
    _check_parts(parts, config.clients, len(labels))
    return [np.asarray(part, dtype=np.int64) for part in parts]


def _module(config: Config, seed: int, data: Data) -> nn.Module:
    build, options = _factory("model", "model", config.model), dict(config.model.options)
    with torch.random.fork_rng([]):
        torch.manual_seed(derive(seed, "model") >> 1)
        module = _named("model", lambda: build(data.input_shape, data.classes, **options))
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name: {config.model.name} must return a torch.nn.Module, got {module!r}")
    return module


def _counters(module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    held = {entry.name for entry in layout.entries}
    return {name: buffer.clone() for name, buffer in module.named_buffers() if name not in held}


def _check_parts(parts: object, clients: int, samples: int) -> None:
    if not isinstance(parts, list | tuple) or len(parts) != clients:
        raise ConfigError(f"partition must return a list with one array for each of the {clients} clients")
    for client, part in enumerate(parts):
        index = np.asarray(part)
        if index.ndim != 1 or not len(index) or index.min() < 0 or index.max() >= samples:
            raise ConfigError(
                f"partition: client {client} must hold at least one sample, each between 0 and {samples - 1}"
            )
