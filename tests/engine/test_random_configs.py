"""Both engines on random combinations of parts: a round from the same state must come out the same.

Round by round from one state, so that rounding does not add up: what is left are ties that rounding breaks, such as a
number between two levels of a lossy upload. They are few numbers in a model; a mistake changes most of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.kit import world_of
from safari.engine import World, engine_of
from safari.engine.experiment import RoundFunction
from safari.engine.state import State, initial, to_saved
from safari.errors import SafariError
from safari.runs import Trial

RULES = [
    "drop", "safari", "safari+", "mifa", "fedvarp", "cluster-fedvarp", "fedau", "stale", "fdms", "trimmed-mean",
    "geometric-median", "majority-vote",
]  # fmt: skip
CLIENTS = [
    "calibrated", "dane", "feddyn", "fednova", "fedpbc", "fedprox", "masked-loss", "mime", "scaffold", "fedawe",
    "bvr-l-sgd",
]  # fmt: skip
# Clients that send nothing beside their model, as lossy packets need it.
ALONE = ["fedavg", "calibrated", "fedprox", "masked-loss"]
VALUES = ["difference", "bf16", "int8", "qsgd", "step", "sign", "top-k", "unbiased", "threshold"]
POLICIES = ["set", "rigl", "sparse-momentum", "feddst", "fedrts"]
STEPS = ["fedavgm", "fedadam", "fedyogi", "fedadagrad", "ghbm"]
SAMPLINGS = ["uniform", "multinomial", "clustered-size", "clustered-similarity"]


def draw(rng: random.Random) -> dict[str, Any]:
    """Any combination, also one that is refused; plain parts more often, so that most are not."""
    config: dict[str, Any] = {
        "rounds": 4,
        "clients": rng.choice([4, 6, 9]),
        "arms": [rng.choice(RULES)],
        "engine": {"device": "cpu", "threads": 1},
        "model": rng.choice([{"name": "mlp", "hidden": [16]}, {"name": "cnn", "width": 4}]),
        "local": {
            "steps": rng.choice([1, 2, 3]),
            "batch": rng.choice([8, 16]),
            "optimiser": "sgd",
            "lr": rng.choice([0.05, 0.2]),
            "epochs": rng.choice([0.0] * 4 + [0.2]),
        },
        "pruning": {
            "pruner": rng.choice(["rand", "mag", "snip", "grasp", "synflow"]),
            "sparsity": rng.choice([0.5, 0.8, 0.9]),
            "scope": rng.choice(["global", "uniform", "erk"]),
            "masks_gradient": rng.random() < 0.8,
        },
        "client": {"name": rng.choice(["fedavg"] * 6 + CLIENTS)},
        "uplink": rng.choice(
            [{"name": "bernoulli", "p": 0.5}, {"name": "gilbert-elliott", "p": 0.4}, {"name": "perfect"}]
        ),
        "downlink": rng.choice([{"name": "perfect"}] * 3 + [{"name": "bernoulli", "p": 0.7}]),
        "partition": rng.choice(
            [{"name": "groups", "groups": 2}, {"name": "dirichlet", "alpha": 0.3}, {"name": "iid"}]
        ),
        "wire": {"every": 1, "values": rng.choice(["auto"] * 4 + VALUES)},
        "evaluation": {"every": 4},
    }
    if rng.random() < 0.4:
        config["policy"] = {"name": rng.choice(POLICIES), "interval": rng.choice([1, 2])}
    if rng.random() < 0.4 and config["client"]["name"] in ALONE and "policy" not in config:
        config["packets"] = {"name": "lossy"}
    if rng.random() < 0.3:
        config["aggregation"] = {"steps": [rng.choice(STEPS)]}
    if rng.random() < 0.2:
        config |= {"sampling": {"name": rng.choice(SAMPLINGS)}, "cohort": 3}
    return config


class RefusedError(Exception):
    """A combination that both engines refuse."""


def both(config: dict[str, Any], seed: int) -> tuple[list[World], list[RoundFunction], State]:
    """The engines, and the state that they begin with. Refused where the reference refuses, and then both must."""
    worlds = []
    for name in ("reference", "vectorised"):
        engine = {**config["engine"], "name": name}
        try:
            world = world_of(config | {"engine": engine}, seed)
            fed = world.federation()
            state = initial(world, fed)
            # Some combinations are found to be impossible by the first messages.
            engine_of(world.config)(world)(fed, state)
            worlds.append(world)
        except SafariError:
            continue
    if not worlds:
        raise RefusedError
    assert len(worlds) == 2, f"one engine refuses what the other takes: {config}"
    engines = [engine_of(world.config)(world) for world in worlds]
    return worlds, engines, initial(worlds[0], worlds[0].federation())


def differences(config: dict[str, Any], seed: int) -> Iterator[str]:
    """What differs after a round of each engine from the same state; the reference's state goes on.

    Each has a state of its own: a rule's memory is written in place.
    """
    (world, _), engines, state = both(config, seed)
    trial, fed = Trial(world.config.arms[0].name, seed, Path()), world.federation()
    entries = {e.name: slice(e.offset, e.end) for e in world.layout.entries}
    for t in range(config["rounds"]):
        (expected, record, _), (found, other, _) = (engine(fed, deepcopy(state)) for engine in engines)
        for name in ("arrived", "trained", "stand_ins"):
            one, another = (_in_order(r[name]) for r in (record, other))
            if one != another:
                yield f"round {t}: {name} {one} and {another}"
        if not bool(expected.model.isfinite().all()):
            return
        ours, theirs, before = (to_saved(s, world, trial).tensors for s in (expected, found, state))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            parts = entries if name == "model" else {"": ...}
            for part, where in parts.items():
                old = before.get(name)
                old = old[where] if old is not None and old.shape == tensor.shape else None
                far = _far(tensor[where], theirs[name][where], old)
                if far > max(2, 0.01 * tensor[where].numel()):
                    yield f"round {t}: {far} of {tensor[where].numel()} numbers of {name} {part}"
        state = expected


def _far(ours: Tensor, theirs: Tensor, before: Tensor | None) -> int:
    """How many numbers differ by more than rounding explains: a thousandth of the largest change, or what is left of
    float32 after sums."""
    if not ours.is_floating_point():
        return int((ours != theirs).sum())
    ours, theirs = ours.double(), theirs.double()
    change = ours if before is None else ours - before.double()
    close = (ours - theirs).abs() <= 1e-3 * _largest(change) + 1e-5 * _largest(ours)
    # Of clients that were never heard, a rule knows nothing, or that they are infinitely far.
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return int((~(close | same)).sum())


def _largest(tensor: Tensor) -> float:
    known = tensor[tensor.isfinite()]
    return float(known.abs().max()) if known.numel() else 0.0


def _in_order(found: Any) -> Any:
    """Stand-ins by their ids: those with equal shares come in any order."""
    return {who: sorted(ids) for who, ids in found.items()} if isinstance(found, dict) else found


def compare(first: int, count: int) -> None:
    """This many combinations that are not refused, from this seed on."""
    accepted = 0
    for seed in range(first, first + 4 * count):
        config = draw(random.Random(seed))
        try:
            found = list(differences(config, seed))
        except RefusedError:
            continue
        assert not found, f"seed {seed}: {found[:3]}: {config}"
        accepted += 1
        if accepted == count:
            return
    pytest.fail(f"only {accepted} of {4 * count} combinations were taken")


@pytest.mark.parametrize("chunk", range(4))
def test_random_combinations(chunk: int) -> None:
    compare(1000 * chunk, 5)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(8))
def test_many_random_combinations(chunk: int) -> None:
    compare(100_000 + 1000 * chunk, 100)
