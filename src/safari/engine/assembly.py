"""From a config to a world: parts built, data divided, the model made, and everything checked before round 1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from safari.aggregation import GATES, RULES, STEPS
from safari.config import Arm, Config, Plug, Pruning
from safari.data import (
    AUGMENTATIONS,
    DATASETS,
    PARTITIONS,
    Data,
    divide,
    hold_out,
    hold_out_of_each,
    label_counts,
)
from safari.engine.checks import (
    check_augmentation,
    check_draws,
    check_output,
    check_parts,
    check_task,
    labels_from_1,
    shared_samples,
    unseen_classes,
    unseen_phases,
)
from safari.engine.device import device_of, placed
from safari.engine.network import check_packets
from safari.engine.parts import Parts, Problems, parts_of
from safari.engine.rehearsal import rehearse, rehearse_client, rehearse_task
from safari.engine.world import World
from safari.errors import ConfigError, SafariError, brief
from safari.hosting import named
from safari.links import LINKS, Setting, check_length
from safari.models import MODELS, Layout
from safari.plugins import named_arguments
from safari.pruning import budget_for
from safari.rounds.masks import refuse_dead_layers
from safari.runs.metrics import RunMetrics
from safari.seeds import derive, generator
from safari.tasks import TASKS, Units
from safari.training import CLIENTS, Known


def assemble(config: Config, seed: int, data: Data, parts: Parts | None = None) -> World:
    """The world of one seed, from parts that were built before (or are built now).

    ConfigError lists every problem at once.
    """
    problems = Problems()
    if config.evaluation.validation > 0:
        data = hold_out(data, config.evaluation.validation, generator(seed, "validation"))
    built = parts or problems.attempt(lambda: parts_of(config))
    if built is None:
        raise problems.error()
    problems.attempt(lambda: check_task(built.task, data))
    problems.attempt(partial(_check_metrics, built))
    shares = problems.attempt(lambda: _divide(built, seed, data))
    held: list[np.ndarray] = []
    if shares is not None and config.evaluation.clients > 0:
        rng = generator(seed, "held")
        split = problems.attempt(partial(hold_out_of_each, shares, config.evaluation.clients, rng))
        shares, held = split or (None, [])
    module = problems.attempt(lambda: _module(built, seed, data))
    if module is not None:
        problems.attempt(partial(_check_budgets, config, module))
    if shares is not None:
        problems.attempt(partial(check_draws, config.local, max(map(len, shares))))
        counts = label_counts(data.train_y.numpy(), shares, data.classes)
        for direction in ("uplink", "downlink"):
            problems.attempt(partial(_start_link, built, direction, seed, counts))
    if problems.lines or shares is None or module is None:
        raise problems.error()
    world = _world(built, seed, data, shares, held, module)
    # What can only be seen with everything in hand.
    augment = partial(check_augmentation, world.augmentation, data, generator(seed, "batches", 0, 0))
    problems.attempt(lambda: named("local.augment", augment))
    problems.attempt(
        lambda: check_output(world.module, config.model.name, world.data, world.device, world.task)
    )
    if not problems.lines:
        problems.attempt(partial(_start_task, world))
        problems.attempt(lambda: _try_masks(world))
    problems.attempt(lambda: check_packets(world))
    problems.attempt(lambda: _start_sampling(world))
    if problems.lines:
        # Rules are tried on the cohort of the first round.
        raise problems.error()
    problems.attempt(lambda: _start_client(world))
    for arm in config.arms:
        problems.attempt(partial(_start_rule, arm, world))
    own_steps = any(plug.name not in STEPS for plug in config.aggregation.steps)
    if own_steps or config.aggregation.gate.name not in GATES:
        problems.attempt(lambda: rehearse(world, RULES["drop"]()))
    problems.raise_if_any()
    return world


def check_rest(config: Config, seed: int, data: Data, problems: Problems) -> None:
    """Note what is wrong with the division of the data, the model and the links, where another part is missing."""
    plain = replace(
        config, arms=(Arm("drop", Plug("drop")),), pruning=Pruning(sparsity=0.0), policy=Plug("static")
    )
    plain = replace(plain, sampling=Plug("uniform"))
    fedavg, perfect = Plug("fedavg"), Plug("perfect")
    for up, down in ((perfect, perfect), (config.uplink, perfect), (perfect, config.downlink)):
        made = replace(plain, client=fedavg, uplink=up, downlink=down)
        problems.attempt(partial(assemble, made, seed, data))


def notes_of(world: World) -> list[str]:
    """Warnings for the user before the run.

    About labels that begin at 1, classes that only the test set has, samples with several owners, and tests
    that see only part of a link's period.
    """
    own, config = world.config.data.name not in DATASETS, world.config
    found = [
        labels_from_1(world.data) if own else "",
        unseen_classes(world.data) if own else "",
        shared_samples(world.parts),
        *(
            unseen_phases(direction, link.period, config.evaluation, config.rounds)
            for direction, link in (("uplink", world.uplink), ("downlink", world.downlink))
        ),
    ]
    return [note for note in found if note]


def _world(
    built: Parts,
    seed: int,
    data: Data,
    shares: list[np.ndarray],
    held: list[np.ndarray],
    module: nn.Module,
) -> World:
    config, device = built.config, device_of(built.config)
    module.to(device)
    layout = _layout(config, module)
    counts = label_counts(data.train_y.numpy(), shares, data.classes)
    classes = counts if built.task.labels == "class" else counts[:, :0]
    data = placed(data, device)
    units = Units.of(data.train_y) if built.task.standardise else None
    return World(
        config=config,
        seed=seed,
        device=device,
        data=data if units is None else _standardised(data, units),
        task=built.task if units is None else units.tested(built.task),
        units=units,
        parts=tuple(shares),
        label_counts=counts,
        module=module,
        layout=layout,
        counters=layout.counters(module),
        start=layout.read(module),
        pruner=built.pruner,
        policy=built.policy,
        client=built.client,
        sampling=built.sampling,
        known=Known(
            torch.tensor(classes, dtype=torch.float32, device=device),
            torch.tensor([len(share) for share in shares], dtype=torch.float32, device=device),
        ),
        augmentation=AUGMENTATIONS[config.local.augment],
        uplink=built.uplink,
        downlink=built.downlink,
        packets=built.packets,
        rules=built.rules,
        server_steps=tuple(built.steps),
        gate=built.gate,
        held=tuple(held),
    )


def _standardised(data: Data, units: Units) -> Data:
    return replace(data, train_y=units.standardised(data.train_y), test_y=units.standardised(data.test_y))


def _check_metrics(built: Parts) -> None:
    """Check that the metrics can be recorded, and that the target can be reached."""
    RunMetrics.of(built.task)
    score = built.task.metric(built.task.score)
    target = built.config.evaluation.goal(score.percent)
    if score.percent and target is not None and target > 1:
        raise ConfigError(
            f"evaluation.target must be at most 1, because {score.label} is a fraction (0.85 is 85%), got {target}"
        )


def _layout(config: Config, module: nn.Module) -> Layout:
    try:
        return Layout.of(module)
    except SafariError as error:
        raise ConfigError(f"model.name: {config.model.name}: {error}") from error


def _check_budgets(config: Config, module: nn.Module) -> None:
    """Check that the sparsity can be reached, at the start of its schedule and at the end."""
    p, layout = config.pruning, _layout(config, module)
    sparsities = {p.sparsity} if p.schedule == "constant" else {p.initial, p.sparsity}
    for sparsity in sorted(sparsities):
        budget_for(layout, sparsity, p.scope, dense=p.dense, least=p.least, prefix="pruning.")


def _start_task(world: World) -> None:
    if world.config.task.name not in TASKS:
        rehearse_task(world)


def _try_masks(world: World) -> None:
    """Compute the first mask of one client, so that an error in it shows before the run."""
    masks = world.first_masks(world.start, 0)
    mask = world.client_mask(masks, world.start, 0, 0)[0]
    whose = "the first mask" if masks.shared is not None else "client 0's first mask"
    refuse_dead_layers(mask, world.layout, world.config.pruning, whose)


def _start_link(built: Parts, direction: str, seed: int, counts: np.ndarray) -> None:
    plug, link = getattr(built.config, direction), getattr(built, direction)
    setting = Setting(len(counts), counts, generator(seed, direction))
    try:
        state = link.init(setting)
    except ConfigError as error:
        if plug != getattr(Config(), direction):
            raise
        # The user did not write these options, so they are told where they come from.
        options = ", ".join(f"{name} = {brief(value)}" for name, value in plug.options.items())
        raise ConfigError(
            [
                f"{problem}, the default ({options}); {direction}.p = 0.3 fits any number"
                for problem in error.problems
            ]
        ) from error
    check_length(direction, link, state, built.config.rounds)
    if plug.name not in LINKS:
        link.apply(state, 0, generator(seed, direction, 0))


def _start_sampling(world: World) -> None:
    """Draw the first cohort, so that an error in it shows before the run."""
    world.cohort(0)


def _start_client(world: World) -> None:
    if world.config.client.name not in CLIENTS:
        rehearse_client(world)


def _start_rule(arm: Arm, world: World) -> None:
    rule = world.rules[arm.name]
    rule.init(len(world.parts), world.layout.size, world.device)
    if arm.rule.name not in RULES:
        rehearse(world, rule)


def _divide(built: Parts, seed: int, data: Data) -> list[np.ndarray]:
    config = built.config
    rng, options = generator(seed, "partition"), dict(config.partition.options)
    shares = PARTITIONS.call(
        config.partition.name, lambda: divide(built.partition, data, config.clients, rng, options)
    )
    check_parts(shares, config.clients, len(data.train_y))
    return [np.asarray(share, dtype=np.int64) for share in shares]


def _module(built: Parts, seed: int, data: Data) -> nn.Module:
    plug = built.config.model
    with torch.random.fork_rng([]):
        torch.manual_seed(derive(seed, "model") >> 1)
        extra = named_arguments(built.model, tokens=data.tokens, labels=data.label_kind)
        module = MODELS.call(
            plug.name, lambda: built.model(data.input_shape, data.classes, **extra, **plug.options)
        )
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name: {plug.name} must return a torch.nn.Module, got {brief(module)}")
    return module
