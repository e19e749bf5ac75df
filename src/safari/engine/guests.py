"""A user's code in our house: what it raises or returns wrongly becomes one line with its field and name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from safari.aggregation import Compensation, Decision, Round, ServerStep
from safari.errors import ConfigError, DataError, SafariError
from safari.links import Link
from safari.seeds import generator, torch_generator

if TYPE_CHECKING:
    from safari.engine.world import World

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent.parent
# As many numbers as a rule is tried on, so that trying one costs next to nothing.
_MOST_TRIED = 20_000_000


def sheltered(where: str, call: Callable[[], T]) -> T:
    """Run a user's code; whatever goes wrong in it is a ConfigError that says where."""
    try:
        return call()
    except (ConfigError, DataError, MemoryError, torch.cuda.OutOfMemoryError):
        # Memory is no mistake of the plug-in: an engine may try again with fewer clients at once.
        raise
    except SafariError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise ConfigError(f"{where} raised {text}{_place(error)}") from error


def named(field: str, make: Callable[[], T]) -> T:
    """Run a plug-in's own checks, and say in which table its problem lies."""
    try:
        return make()
    except ConfigError as error:
        raise ConfigError([f"{field}: {problem}" for problem in error.problems]) from error


def hosted(where: str, call: Callable[[], T]) -> T:
    """Both: run a user's code, and let every problem in it begin with the same words."""
    return sheltered(where, lambda: named(where, call))


def checked_link(link: Link, where: str, clients: int) -> Link:
    """A user's link of which every answer is looked at before a round is built on it."""

    def apply(
        state: dict[str, np.ndarray], t: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        found: Any = hosted(where, lambda: link.apply(state, t, rng))
        fits = isinstance(found, tuple) and len(found) == 2
        delivered = found[0] if fits else found
        if not fits or not _is_bools(delivered, clients):
            raise ConfigError(
                f"{where}: apply must return (delivered, state), delivered being a bool array with an entry "
                f"for each of the {clients} clients; got {_spelt(delivered)}{'' if fits else ', not a pair'}"
            )
        return delivered, check_arrays(where, "apply", found[1])

    return replace(link, apply=apply)


def check_arrays(where: str, function: str, state: Any) -> dict[str, np.ndarray]:
    """A link's state, when a checkpoint can hold it."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"{where}: the state that {function} returns must be a dict, got {_spelt(state)}")
    for name, value in state.items():
        numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
        if not isinstance(name, str) or not numeric:
            raise ConfigError(
                f"{where}: the state that {function} returns must hold numpy arrays of numbers by name, "
                f"got {_spelt(value)} as {name!r}"
            )
    return dict(state)


def checked_rule(rule: Compensation, where: str) -> Compensation:
    """A user's rule by its name; the server looks at its decisions."""

    def apply(state: dict[str, Tensor], round: Round) -> tuple[Decision, dict[str, Tensor]]:
        found: tuple[Decision, dict[str, Tensor]] = hosted(
            where, lambda: _with_plain_ids(rule.apply(state, round))
        )
        return found

    def learn(state: dict[str, Tensor], round: Round) -> dict[str, Tensor]:
        found: dict[str, Tensor] = hosted(where, lambda: rule.learn(state, round))  # type: ignore[misc]
        return found

    def respond(state: dict[str, Tensor], round: Round) -> tuple[Decision, dict[str, Tensor]]:
        given = rule.respond or rule.apply
        found: tuple[Decision, dict[str, Tensor]] = hosted(
            where, lambda: _with_plain_ids(given(state, round))
        )
        return found

    checked = replace(rule, apply=apply, name=where)
    return checked if rule.learn is None else replace(checked, learn=learn, respond=respond)


def checked_step(step: ServerStep, where: str) -> ServerStep:
    """A user's server step by its name; the server looks at what it returns."""
    return ServerStep(
        init=lambda model: hosted(where, lambda: step.init(model)),
        apply=lambda state, change, round: hosted(where, lambda: step.apply(state, change, round)),
        observe=lambda state, model, round: hosted(where, lambda: step.observe(state, model, round)),
        name=where,
    )


def rehearse(world: World, rule: Compensation) -> None:
    """What a rule will be asked first, asked now: the arrivals of round 0, with models made up."""
    cohort = world.cohort(0)
    arrived = cohort if rule.overrides_network else _first_arrivals(world, cohort)
    ids = arrived[: max(1, _MOST_TRIED // world.layout.size)]
    noise = torch.randn(len(ids), world.layout.size, generator=torch_generator(world.seed, "rehearsal"))
    world.server(rule).step_stacked(ids, world.start + 0.01 * noise.to(world.device), cohort)


def _first_arrivals(world: World, cohort: Sequence[int]) -> list[int]:
    through = np.ones(len(world.parts), dtype=bool)
    for direction, link in (("uplink", world.uplink), ("downlink", world.downlink)):
        state = link.init(world.setting(direction))
        through &= link.apply(state, 0, generator(world.seed, direction, 0))[0]
    return [client for client in cohort if through[client]]


def _with_plain_ids(found: Any) -> Any:
    """The answer with stand-ins by Python's whole numbers, which records can hold; else as it is."""
    decision: Any = found[0] if isinstance(found, tuple) and found else None
    if not isinstance(decision, Decision) or not isinstance(decision.stand_ins, dict):
        return found
    names = {int(j): tuple(int(i) for i in who) for j, who in decision.stand_ins.items()}
    return replace(decision, stand_ins=names), *found[1:]


def _is_bools(found: Any, clients: int) -> bool:
    return isinstance(found, np.ndarray) and found.dtype == np.bool_ and found.shape == (clients,)


def _spelt(found: Any) -> str:
    if isinstance(found, np.ndarray | Tensor):
        return f"{type(found).__name__} of {found.dtype} and shape {[*found.shape]}"
    return "None" if found is None else type(found).__name__


def _place(error: Exception) -> str:
    """Where in the user's file it happened: the line to look at, without the page of frames around it."""
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if line
    ]
    theirs = [frame for frame in frames if _PACKAGE not in Path(frame[0]).parents]
    if not theirs:
        return ""
    file, line = [frame for frame in theirs if frame[0] == theirs[0][0]][-1]
    return f" ({Path(file).name}, line {line})"
