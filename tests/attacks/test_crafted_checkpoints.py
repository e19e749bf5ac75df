"""A checkpoint whose digest is right and whose tensors are not: refused in words, or harmless, never a traceback.

The sender of a run can make any checkpoint, digest included. So every tensor of every built-in part is replaced:
by nothing, by other types and shapes, and by numbers that no run would have written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import safari
from aggregation.test_contract import OPTIONS as RULE_OPTIONS
from engine.kit import SMALL, StopAfter, world_of, write_trace
from links.test_contract import OPTIONS as LINK_OPTIONS
from safari.engine import World, engine_of
from safari.engine.state import from_saved, initial, to_saved
from safari.errors import RunError, SafariError
from safari.federation import State
from safari.runs import RunFolder, Saved, Trial

# Crafted probabilities overflow in a division or two, with a warning and no harm.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Two hidden numbers: what is looked at does not depend on the model.
TINY: dict[str, Any] = {
    **SMALL,
    "rounds": 8,
    "model": {"name": "mlp", "hidden": [2]},
    "local": {"steps": 1, "batch": 4},
    "evaluation": {"every": 100},
    "wire": {"every": 0},
}
LARGEST = {True: torch.finfo(torch.float32).max, False: 2**62}


def form_changes(tensor: Tensor) -> Iterator[Tensor | None]:
    """What has another form than the state."""
    yield None
    yield tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.float32)
    yield tensor.reshape(-1).repeat(2)
    yield tensor[None]
    yield torch.tensor(1, dtype=tensor.dtype) if tensor.ndim else tensor.repeat(2)


def value_changes(tensor: Tensor) -> Iterator[Tensor]:
    """What has the same form, and numbers that nobody computed."""
    if tensor.dtype == torch.bool:
        yield ~tensor
        return
    floating = tensor.is_floating_point()
    yield torch.full_like(tensor, -3)
    yield torch.full_like(tensor, LARGEST[floating])
    yield torch.full_like(tensor, -LARGEST[floating])
    for value in (torch.nan, torch.inf) if floating else ():
        yield torch.full_like(tensor, value)


def trial_of(arm: str) -> Trial:
    return Trial(arm, 0, Path("trial"))


def goes_on(world: World, saved: Saved, arm: str) -> State:
    """One more round from a checkpoint."""
    fed = world.federation(world.rules[arm])
    return engine_of(world.config)(world)(fed, from_saved(saved, world, fed, trial_of(arm)))[0]


def attack(world: World, saved: Saved, arm: str, prefix: str) -> int:
    """Every change of every tensor of a part; how many tensors there were."""
    goes_on(world, saved, arm)
    names = [name for name in saved.tensors if name.startswith(prefix)]
    for name in names:
        good = saved.tensors[name]
        for wrong in form_changes(good):
            tensors = {n: t for n, t in {**saved.tensors, name: wrong}.items() if t is not None}
            with pytest.raises(RunError, match=rf"^trial/checkpoint.* is damaged: {name} must be .*, got "):
                goes_on(world, replace(saved, tensors=tensors), arm)
        for wrong in value_changes(good):
            # Harmless, or an error in words.
            with contextlib.suppress(SafariError):
                goes_on(world, replace(saved, tensors={**saved.tensors, name: wrong}), arm)
    return len(names)


@cache
def rules_world() -> World:
    arms = [{"name": name, "rule": name, **options} for name, options in RULE_OPTIONS.items()]
    return world_of({**TINY, "arms": arms, "uplink": {"name": "bernoulli", "p": 0.6}})


@cache
def advanced(rule: str) -> Saved:
    """A checkpoint after three rounds."""
    world = rules_world()
    fed = world.federation(world.rules[rule])
    engine, state = engine_of(world.config)(world), initial(world, fed)
    for _ in range(3):
        state, _, _ = engine(fed, state)
    return to_saved(state, world, trial_of(rule))


@pytest.mark.parametrize("rule", RULE_OPTIONS)
def test_the_state_of_every_rule(rule: str) -> None:
    world, saved = rules_world(), advanced(rule)
    first = initial(world, world.federation(world.rules[rule]))["rule"]
    assert attack(world, saved, rule, "rule.") == len(first)


def test_the_state_of_a_rule_that_weighs_blocks() -> None:
    packets = {"name": "lossy", "loss": 0.3, "size": 100}
    arms = [{"name": "cluster-fedvarp", "rule": "cluster-fedvarp", "clusters": 2}]
    world = world_of({**TINY, "arms": arms, "packets": packets, "uplink": {"name": "perfect"}})
    fed = world.federation(world.rules["cluster-fedvarp"])
    engine, state = engine_of(world.config)(world), initial(world, fed)
    for _ in range(2):
        state, _, _ = engine(fed, state)
    saved = to_saved(state, world, trial_of("cluster-fedvarp"))
    assert attack(world, saved, "cluster-fedvarp", "rule.") == 4


@pytest.mark.parametrize("link", LINK_OPTIONS)
def test_the_state_of_every_link(link: str, tmp_path: Path) -> None:
    options = dict(LINK_OPTIONS[link])
    if link == "trace":
        options["file"] = write_trace(tmp_path / "trace.csv", ["10110", "01101", "11111", "00110"])
    if link == "silence":
        options["start"] = 2
    world = world_of(
        {**TINY, "arms": ["drop"], "uplink": {"name": link, **options}, "downlink": {"name": link, **options}}
    )
    fed = world.federation(world.rules["drop"])
    state = initial(world, fed)
    saved = to_saved(state, world, trial_of("drop"))
    for direction in ("uplink", "downlink"):
        assert len(state[direction]) == attack_link(world, saved, f"{direction}.")


def attack_link(world: World, saved: Saved, prefix: str) -> int:
    if world.config.uplink.name != "trace":
        return attack(world, saved, "drop", prefix)
    # A trace that has become longer since goes on as it was; one without rounds has nothing to replay.
    name = f"{prefix}table"
    table = saved.tensors[name]
    goes_on(world, replace(saved, tensors={**saved.tensors, name: table[:2]}), "drop")
    for wrong in (table[:0], table[:, 1:], table.int(), table[0]):
        with pytest.raises(RunError, match=rf"is damaged: {name} must be bool of shape \[4, 5\], got "):
            goes_on(world, replace(saved, tensors={**saved.tensors, name: wrong}), "drop")
    return 1


def test_what_packets_remember() -> None:
    world = world_of({**TINY, "arms": ["drop"], "packets": {"name": "lossy", "loss": 0.3, "size": 100}})
    fed = world.federation(world.rules["drop"])
    engine, state = engine_of(world.config)(world), initial(world, fed)
    for _ in range(2):
        state, _, _ = engine(fed, state)
    saved = to_saved(state, world, trial_of("drop"))
    name = "packets.measured"
    for wrong in (
        torch.full((4,), torch.nan, dtype=torch.float64),
        torch.tensor([-1.0, 0.1, 0.1, 100.0], dtype=torch.float64),
        torch.tensor([1e300, 0.1, 0.1, 100.0], dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(4),
    ):
        with pytest.raises(RunError, match=rf"is damaged: {name} must "):
            goes_on(world, replace(saved, tensors={**saved.tensors, name: wrong}), "drop")
    attack_count = attack(
        world,
        replace(saved, tensors={n: t for n, t in saved.tensors.items() if n != name}),
        "drop",
        "packets.",
    )
    assert attack_count == len(state["packets"]) - 1


@pytest.mark.parametrize("shape", [(), (0,), (1,), "double", "stacked"])
def test_the_model_itself(shape: Any) -> None:
    world, saved = rules_world(), advanced("drop")
    model = saved.tensors["model"]
    wrong = (
        {"double": model.double(), "stacked": model[:, None]}.get(shape) if isinstance(shape, str) else None
    )
    tensors = {**saved.tensors, "model": torch.zeros(shape) if wrong is None else wrong}
    with pytest.raises(RunError, match=r"is of another model|is damaged: model must be float32 of shape"):
        goes_on(world, replace(saved, tensors=tensors), "drop")


def test_what_a_sampling_knows() -> None:
    sampling = {"name": "clustered-similarity"}
    world = world_of({**TINY, "arms": ["drop"], "cohort": 3, "sampling": sampling})
    fed = world.federation(world.rules["drop"])
    engine, state = engine_of(world.config)(world), initial(world, fed)
    for _ in range(2):
        state, _, _ = engine(fed, state)
    assert attack(world, to_saved(state, world, trial_of("drop")), "drop", "sampling.") == 2


def test_gates_and_steps() -> None:
    config = {**TINY, "arms": ["drop"], "client": {"name": "scaffold"}}
    world = world_of({**config, "aggregation": {"steps": ["fedavgm", "fedadam"], "average": 0.5}})
    fed = world.federation(world.rules["drop"])
    engine, state = engine_of(world.config)(world), initial(world, fed)
    for _ in range(2):
        state, _, _ = engine(fed, state)
    saved = to_saved(state, world, trial_of("drop"))
    names = [n for n in saved.tensors if n.startswith(("gate.", "step.", "average"))]
    assert len([n for n in names if n.startswith("gate.beside.")]) == 1
    for name in names:
        good = saved.tensors[name]
        for wrong in form_changes(good):
            tensors = {n: t for n, t in {**saved.tensors, name: wrong}.items() if t is not None}
            if name.startswith("gate."):
                # It starts anew.
                goes_on(world, replace(saved, tensors=tensors), "drop")
                continue
            with pytest.raises(RunError, match=r"does not fit aggregation\.steps|holds no average"):
                goes_on(world, replace(saved, tensors=tensors), "drop")


def test_a_folder_with_such_a_checkpoint_is_refused_and_stays(tmp_path: Path) -> None:
    """The same through `safari.resume`, with the digest that belongs to it."""
    config = {**TINY, "arms": ["safari"], "checkpoint": {"every": 1}}
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, tmp_path / "run", [StopAfter(3)], progress=False)
    (trial,) = RunFolder.open(tmp_path / "run").trials()
    good = trial.load()
    assert good is not None
    for name in ("uplink.p", "rule.similarity"):
        trial.save(replace(good, tensors={**good.tensors, name: torch.zeros(2, 2)}))
        before = trial.checkpoint.read_bytes()
        with pytest.raises(RunError, match=rf"is damaged: {name} must be .*, got float32 of shape \[2, 2\]$"):
            safari.resume(tmp_path / "run", progress=False)
        assert trial.checkpoint.read_bytes() == before
    trial.save(good)
    safari.resume(tmp_path / "run", progress=False)


POLICY = """
import torch
from safari.pruning import MaskPolicy, Masks

def growing():
    def apply(state, round):
        seen = state.get("seen", torch.zeros(0))
        mask = torch.ones_like(round.model, dtype=torch.bool)
        mask[round.prunable] = False
        mask[torch.nonzero(round.prunable).flatten()[len(seen) : len(seen) + round.budget.total]] = True
        return Masks(shared=mask, announced=True), {"seen": torch.cat([seen, torch.ones(1)])}

    return MaskPolicy(lambda layout, device: {"gone": torch.zeros(1)}, apply)
"""


def test_what_a_policy_of_ones_own_adds_to_its_state_is_there_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(POLICY)
    config = {**TINY, "arms": ["drop"], "policy": {"name": "mine.py:growing"}, "checkpoint": {"every": 1}}
    config["pruning"] = {"allow_dead_layers": True}
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, "stopped", [StopAfter(4)], progress=False)
    safari.resume("stopped", progress=False)
    safari.run(config, "whole", progress=False)
    both = []
    for run in ("stopped", "whole"):
        (trial,) = RunFolder.open(Path(run)).trials()
        saved = trial.load()
        assert saved is not None
        assert len(saved.tensors["policy.seen"]) == 8
        both.append({name: np.asarray(tensor) for name, tensor in saved.tensors.items()})
    assert both[0].keys() == both[1].keys()
    assert all(np.array_equal(both[0][name], both[1][name], equal_nan=True) for name in both[0])
