"""Checks of a config and of what its plug-ins return, made before a run relies on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from safari.config import Evaluation, Local
from safari.data import Augmentation, Data
from safari.errors import ConfigError
from safari.tasks import Task

# Distances between tests that are tried to find one that sees a whole period; tests in the last rounds of which each is
# looked at.
_MOST_TRIED, _MOST_TESTS = 100, 10_000
# A round's samples are drawn at once, 8 bytes each, for every client.
MOST_DRAWN = 10**9


def check_parts(parts: object, clients: int, samples: int) -> None:
    """Does a partition give every client a list of sample numbers?"""
    if not isinstance(parts, list | tuple) or len(parts) != clients:
        raise ConfigError(f"partition must return a list with one array for each of the {clients} clients")
    arrays = [np.asarray(part) for part in parts]
    for client, index in enumerate(arrays):
        # Masks of booleans would pass for the samples 0 and 1.
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise ConfigError(
                f"partition: client {client} must get a list of whole numbers, "
                f"got {index.dtype} of shape {[*index.shape]}"
            )
    # All at once: a hundred thousand clients should not take seconds.
    sizes = np.array([len(index) for index in arrays])
    held = np.concatenate(arrays)
    outside = np.repeat(np.arange(clients), sizes)[(held < 0) | (held >= samples)]
    wrong = np.concatenate([np.flatnonzero(sizes == 0), outside])
    if len(wrong):
        client = int(wrong.min())
        numbers = arrays[client][(arrays[client] < 0) | (arrays[client] >= samples)]
        held_by = (
            f"sample {numbers[0]}" if len(numbers) else f"none, with {clients} clients and {samples} samples"
        )
        raise ConfigError(
            f"partition: client {client} must hold at least one sample, each between 0 and {samples - 1}; "
            f"got {held_by}"
        )


def unseen_phases(direction: str, period: int | None, evaluation: Evaluation, rounds: int) -> str:
    """Warning where the tests that count leave out over half of a link's period in one stretch; else empty.

    >>> print(unseen_phases("uplink", 8, Evaluation(every=8, last=24), 48))
    the tests that count, those in the last 24 rounds, leave out 7 rounds in a row of the uplink's period of 8;
    evaluation.last_every = 6 would spread them over it
    >>> unseen_phases("uplink", 8, Evaluation(every=4, last=24), 48)
    ''
    """
    if period is None or not 2 <= period <= rounds:
        return ""
    gap = _longest_gap(period, evaluation, rounds)
    if gap <= period / 2:
        return ""
    told = (
        f"the tests that count, those in the last {evaluation.last} rounds, leave out {gap - 1} rounds in a row of the "
        f"{direction}'s period of {period}"
    )
    every = range(min(evaluation.final_every, period) - 1, 0, -1)[:_MOST_TRIED]
    for enough in (period / 4, period / 2):
        for fewer in every:
            if _longest_gap(period, replace(evaluation, last_every=fewer), rounds) <= enough:
                return f"{told}; evaluation.last_every = {fewer} would spread them over it"
    return f"{told}; evaluation.last must be at least {period} to see all of it"


def _longest_gap(period: int, evaluation: Evaluation, rounds: int) -> int:
    """From one phase that is tested to the next one, in rounds."""
    first, every = max(1, rounds - evaluation.last + 1), evaluation.final_every
    tested = range(-(-first // every) * every, rounds + 1, every)
    step = math.gcd(every, period)
    if len(tested) >= period // step:
        # They go through all multiples of the step, over and over.
        if step < period:
            return step
        tested = tested[-1:]
    elif len(tested) > _MOST_TESTS:
        # This many tests are close together; they miss only what the last rounds do not reach.
        return max(every, period - (rounds - first))
    due = {*tested, rounds}
    if evaluation.pairs:
        due |= {done - 1 for done in due if done > first}
    phases = sorted({done % period for done in due})
    following = [*phases[1:], phases[0] + period]
    longest: int = max(after - before for before, after in zip(phases, following, strict=True))
    return longest


def shared_samples(parts: Sequence[np.ndarray]) -> str:
    """Warning about samples that the division assigns more than once; empty where there are none.

    >>> shared_samples([np.array([0, 1, 2]), np.array([2, 3]), np.array([4])])
    'partition: 1 sample is held more than once, such as sample 2 by clients 0 and 1'
    """
    held = np.concatenate([np.asarray(part) for part in parts])
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    order = np.argsort(held, kind="stable")
    again = np.flatnonzero(held[order][1:] == held[order][:-1])
    if not len(again):
        return ""
    count, first = len(np.unique(held[order][again])), order[again[0] : again[0] + 2]
    one, other = sorted(owners[first].tolist())
    whom = f"clients {one} and {other}" if one != other else f"client {one} alone"
    many = "1 sample is" if count == 1 else f"{count} samples are"
    return f"partition: {many} held more than once, such as sample {held[first[0]]} by {whom}"


def labels_from_1(data: Data) -> str:
    """Warning about data in which every class but 0 has samples; empty otherwise.

    Classes without samples are legal, and a class 0 that is only in the test set is no mistake of counting.

    >>> x, y = torch.zeros(6, 2), torch.arange(6) % 3
    >>> labels_from_1(Data("toy", x, y, x, y, classes=3))
    ''
    >>> labels_from_1(Data("toy", x, y + 1, x, y + 1, classes=4))
    'data: no training sample has class 0; labels count from 0 (where yours begin at 1, give y - 1)'
    """
    if data.label_kind != "class":
        return ""
    used = torch.bincount(data.train_y, minlength=data.classes) > 0
    if bool(used[0]) or not bool(used[1:].all()) or bool((data.test_y == 0).any()):
        return ""
    return "data: no training sample has class 0; labels count from 0 (where yours begin at 1, give y - 1)"


def unseen_classes(data: Data) -> str:
    """Warning about classes of the test set that the training set lacks; empty where there are none.

    >>> x, y = torch.zeros(6, 2), torch.arange(6) % 3
    >>> unseen_classes(Data("toy", x, y, x, y, classes=3))
    ''
    >>> unseen_classes(Data("toy", x, y, x, y + 2, classes=5))
    'data: 2 classes of the test set have no training sample, such as class 3'
    """
    if data.label_kind != "class":
        return ""
    tested = data.test_y.unique()
    unseen = tested[~torch.isin(tested, data.train_y)]
    if not len(unseen):
        return ""
    many = (
        "1 class of the test set has" if len(unseen) == 1 else f"{len(unseen)} classes of the test set have"
    )
    return f"data: {many} no training sample, such as class {unseen[0]}"


def check_draws(local: Local, samples: int) -> None:
    """Can a round of a client with this many samples be drawn?

    >>> check_draws(Local(steps=10**9), samples=144)
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: local.steps must be at most 31250000 for batches of 32, got 1000000000
    """
    # A step draws a whole batch, however few the epochs.
    _at_most("batch", local.batch, MOST_DRAWN, "")
    if local.epochs > 0:
        _at_most("epochs", local.epochs, MOST_DRAWN // samples, f" for a client with {samples} samples")
    else:
        _at_most("steps", local.steps, MOST_DRAWN // local.batch, f" for batches of {local.batch}")


def _at_most(name: str, value: float, limit: int, whose: str) -> None:
    if value > limit:
        raise ConfigError(f"local.{name} must be at most {limit}{whose}, got {value}")


def check_augmentation(augmentation: Augmentation, data: Data, rng: np.random.Generator) -> None:
    """Can a sample be augmented?"""
    draws = augmentation.draw(rng, 1, data.input_shape)
    augmentation.apply(data.train_x[:1], *map(torch.from_numpy, draws))


_LABELS = {
    "class": "one class a sample",
    "tokens": "a class for each token",
    "multi-hot": "0 or 1 for each label",
    "numbers": "numbers",
}


def check_task(task: Task, data: Data) -> None:
    """Are the data's labels what the task learns from?"""
    numbers = task.labels in ("multi-hot", "numbers")
    if task.labels == "class" and data.label_kind == "tokens" and data.train_y.shape[1] == 1:
        raise ConfigError(
            f"task.name: {task.name} needs {_LABELS[task.labels]}, shape [n], and {data.name} has labels "
            f"of shape {[*data.train_y.shape]}; give y.ravel()"
        )
    if data.label_kind != ("numbers" if numbers else task.labels):
        fitting = {"class": "classification", "tokens": "tokens", "numbers": "regression or multilabel"}
        raise ConfigError(
            f"task.name: {task.name} needs {_LABELS[task.labels]}, and {data.name} has "
            f"{_LABELS[data.label_kind]}; that is for {fitting[data.label_kind]}"
        )
    if task.labels == "multi-hot":
        for split, y in (("train", data.train_y), ("test", data.test_y)):
            if not bool(((y == 0) | (y == 1)).all()):
                raise ConfigError(
                    f"task.name: {task.name} needs {_LABELS[task.labels]}, and {data.name}'s {split}_y "
                    "holds other numbers; that is for regression"
                )


def check_output(module: nn.Module, name: str, data: Data, device: torch.device, task: Task) -> None:
    """Can the model read a sample, and does it answer as the task expects?"""
    # A copy: a module may write into its inputs.
    x, y = (t[:2].to(device, copy=True) for t in (data.train_x, data.train_y))
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            out = module(x)
    except Exception as error:
        raise ConfigError(
            f"model: {name} cannot read {_samples(data)}: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.train(was_training)
    try:
        task.check(out, y, data.classes)
    except ConfigError as error:
        raise ConfigError(f"model: {name} {error}") from error


def _samples(data: Data) -> str:
    shape = [*data.input_shape]
    return f"samples of shape {shape}" if data.train_x.is_floating_point() else f"tokens of shape {shape}"
