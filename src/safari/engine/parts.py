"""Every plug-in that a config names, resolved and built once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from safari.aggregation import GATES, RULES, STEPS, Compensation, Gate, ServerStep
from safari.aggregation.steps import steps_of
from safari.config import Config, Plug
from safari.data import DATASETS, PARTITIONS, Data, as_data, hf
from safari.engine.device import device_of
from safari.errors import ConfigError, PruneError, SafariError, TrustError, brief
from safari.federation.algorithm import running_average_of
from safari.kinds import Kind
from safari.links import LINKS, PACKET_LINKS, Link, PacketLink, link_contract
from safari.models import MODELS
from safari.plugins import check_options
from safari.pruning import POLICIES, PRUNERS, MaskPolicy, Pruner, as_pruner, for_task
from safari.sampling import SAMPLINGS, Sampling
from safari.tasks import TASKS, Task
from safari.training import CLIENTS, ClientAlgorithm

T = TypeVar("T")

_ALL: tuple[Kind[Any], ...] = (
    DATASETS,
    PARTITIONS,
    MODELS,
    TASKS,
    PRUNERS,
    POLICIES,
    CLIENTS,
    SAMPLINGS,
    LINKS,
    PACKET_LINKS,
    RULES,
    STEPS,
    GATES,
)
KINDS: dict[str, Kind[Any]] = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True)
class Parts:
    """Parts that a config names.

    `rules` are by the arm's name; `data`, `partition` and `model` are functions that still have to be called.
    """

    config: Config
    data: Callable[..., Any]
    partition: Callable[..., Any]
    model: Callable[..., nn.Module]
    task: Task
    pruner: Pruner
    policy: MaskPolicy
    client: ClientAlgorithm
    sampling: Sampling
    uplink: Link
    downlink: Link
    packets: PacketLink
    rules: Mapping[str, Compensation]
    steps: Sequence[ServerStep]
    gate: Gate


class Problems:
    """Collects what is wrong, so that a user sees all of it at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._kind: type[ConfigError] = ConfigError

    def attempt(self, make: Callable[[], T]) -> T | None:
        """The value, or None with its problems noted, each once."""
        try:
            return make()
        except SafariError as error:
            self.note(error)
        return None

    def note(self, error: SafariError) -> None:
        """Add an error's problems."""
        lines = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
        self.lines += [line for line in lines if line not in self.lines]
        if isinstance(error, TrustError):
            self._kind = TrustError

    def error(self) -> ConfigError:
        """An error with all of them: a TrustError when one of them is."""
        return self._kind(self.lines)

    def raise_if_any(self) -> None:
        """Raise `error` if any problem was noted."""
        if self.lines:
            raise self.error()


def parts_of(config: Config) -> Parts:
    """Every part that a config names; ConfigError lists all that do not exist or do not take their options."""
    problems = Problems()
    attempt = problems.attempt
    found: dict[str, Any] = {
        "data": attempt(partial(DATASETS.factory, config.data.name, config.data.options)),
        "partition": attempt(partial(PARTITIONS.factory, config.partition.name, config.partition.options)),
        "model": attempt(partial(_model, config.model)),
    }
    for kind in (TASKS, POLICIES, CLIENTS, SAMPLINGS, PACKET_LINKS):
        plug: Plug = getattr(config, kind.name)
        found[kind.name] = attempt(partial(kind.build, plug.name, plug.options))
    task = found["task"]
    found["pruner"] = attempt(partial(_pruner, config, task))
    for table in LINKS.tables:
        plug = getattr(config, table)
        contract = link_contract(config.clients)
        found[table] = attempt(partial(LINKS.build, plug.name, plug.options, table, contract))
    rules = {arm.name: attempt(partial(rule_of, arm.rule, f"arms: {arm.name}")) for arm in config.arms}
    plugs = [(plug.name, plug.options) for plug in config.aggregation.steps]
    average = running_average_of(found["client"] or ClientAlgorithm(), config.aggregation.average)
    found["steps"] = attempt(lambda: steps_of(plugs, average))
    gate = config.aggregation.gate
    found["gate"] = attempt(lambda: GATES.build(gate.name, gate.options))
    attempt(lambda: device_of(config))
    if found["client"] is not None and task is not None:
        attempt(lambda: found["client"].check(task))
    if found["client"] is not None:
        attempt(partial(_check_client, found["client"], config))
    problems.raise_if_any()
    return Parts(config=config, rules={name: rule for name, rule in rules.items() if rule}, **found)


def _check_client(client: ClientAlgorithm, config: Config) -> None:
    """ConfigError for an algorithm that chooses where clients begin, where only their start would be masked, and for
    one that needs SGD's steps without them."""
    if client.begin is not None and not config.pruning.masks_gradient:
        raise ConfigError(
            f"client.name: {config.client.name} begins at models of its own, which needs "
            "pruning.masks_gradient = true, got false"
        )
    if client.plain_steps and config.local.optimiser != "sgd":
        raise ConfigError(
            f"local.optimiser must be 'sgd' for client.name {config.client.name}, whose server reads gradients off "
            f"the updates; got {config.local.optimiser!r}"
        )


def check_names(config: Config, problems: Problems) -> None:
    """Note every plug-in that does not exist or does not take its options: what can be said without data."""
    problems.attempt(lambda: parts_of(config))


def rule_of(plug: Plug, where: str = "arms") -> Compensation:
    """The rule that an arm names; `where` is what messages about it begin with."""
    return RULES.build(plug.name, plug.options, where)


def load_data(config: Config, parts: Parts | None = None) -> Data:
    """The data set that a config names, on the CPU."""
    name, options = config.data.name, dict(config.data.options)
    factory = DATASETS.factory(name, options) if parts is None else parts.data
    if parts is not None and parts.task.labels == "numbers" and factory is hf:
        options = {"numbers": True, **options}
    return as_data(DATASETS.call(name, lambda: factory(**options)), name)


def _model(plug: Plug) -> Callable[..., nn.Module]:
    found = MODELS.factory(plug.name, plug.options)
    if isinstance(found, nn.Module):
        # A module can be called as well, but with a batch: every seed needs a model of its own, built for the data.
        raise ConfigError(
            f"model.name: {plug.name} must be a function or a class that builds a module, as in "
            f"def model(shape, classes), got a module itself: {brief(found)}"
        )
    return found


def _pruner(config: Config, task: Task | None) -> Pruner:
    name = config.pruning.pruner
    found = PRUNERS.find(name)
    try:
        pruner = as_pruner(found)
    except PruneError as error:
        raise ConfigError(f"pruning.pruner: {error}") from error
    options = dict(config.pruning.options)
    if name in PRUNERS and options:
        raise ConfigError(f"pruning.options: {name} has none, got {', '.join(options)}")
    if name not in PRUNERS:
        problems = check_options("pruning.options", pruner.score, options, ("module", "batch", "generator"))
        if problems:
            raise ConfigError(problems)
        pruner = replace(pruner, score=partial(pruner.score, **options)) if options else pruner
    if task is not None:
        pruner = for_task(pruner, task)
    return pruner
