"""Mask policies: exact counts in every round, moves as an independently written loop makes them, and purity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from safari.errors import ConfigError
from safari.models import Layout
from safari.pruning import POLICIES, PRUNERS, Arrivals, MaskRound, budget_for, compute_mask
from safari.pruning.scope import SCOPES, weight_entries

with torch.random.fork_rng(
    devices=[]
):  # The moves below are those of this model: it must not change with the process.
    torch.manual_seed(0)
    NET = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))
LAYOUT = Layout.of(NET)
ROUNDS = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "static": {},
    "set": {"interval": 2},
    "rigl": {"interval": 2},
    "sparse-momentum": {"interval": 2},
    "feddst": {"interval": 3},
    "fedrts": {"interval": 2},
    "early-bird": {"window": 2, "latest": 0.4},
}


def view(model: torch.Tensor, t: int, sparsity: float = 0.7, scope: str = "erk") -> MaskRound:
    def by_score(support: torch.Tensor | None) -> torch.Tensor:
        draws = torch.Generator().manual_seed(0)
        return compute_mask(NET, LAYOUT, model, PRUNERS["rand"], budget, None, draws, support)

    budget = budget_for(LAYOUT, sparsity, scope)
    return MaskRound(t, ROUNDS, model, LAYOUT, budget, np.random.default_rng(t), by_score)


def play(name: str, rounds: int = ROUNDS, sparsity: float = 0.7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(mask, model) of each round: three clients train at random inside their masks; all arrive."""
    policy = POLICIES[name](**OPTIONS[name])
    draw = torch.Generator().manual_seed(7)
    model, state, found = LAYOUT.read(NET), policy.init(LAYOUT, torch.device("cpu")), []
    for t in range(rounds):
        masks, after = policy.apply(state, view(model, t, sparsity))
        gradient = torch.randn(3, LAYOUT.size, generator=draw)
        own = masks.shared.expand(3, -1) if masks.own is None else masks.own(gradient)
        models = (model + 0.1 * torch.randn(3, LAYOUT.size, generator=draw)) * own
        votes = None if masks.votes is None else masks.votes(gradient)
        model = models.mean(0)
        third = torch.full((3,), 1 / 3, dtype=torch.float64)
        state = policy.learn(after, Arrivals(t, ROUNDS, model, LAYOUT, models, third, third, votes))
        found.append((masks.base, model, own, gradient, votes))
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_counts_are_exact_in_every_round(name: str) -> None:
    budget = budget_for(LAYOUT, 0.7, "erk")
    for t, (base, _, own, *_) in enumerate(play(name)):
        for mask in (base, *own):
            if name == "early-bird" and t < 1:
                assert bool(mask.all()), "nothing is cut before a second mask can be compared with the first"
                continue
            kept = [int(mask[e.offset : e.end].sum()) for e in weight_entries(LAYOUT)]
            assert kept == list(budget.layers)
            assert bool(mask[~LAYOUT.prunable].all()), "what cannot be pruned is kept"


@pytest.mark.parametrize("name", ["set", "rigl", "sparse-momentum", "fedrts"])
def test_the_mask_moves_in_every_adjustment_round_and_rests_in_between(name: str) -> None:
    masks = [base for base, *_ in play(name)]
    stop = {"fedrts": 0.6}.get(name, 0.75) * ROUNDS
    for t in range(1, ROUNDS):
        moved = not torch.equal(masks[t], masks[t - 1])
        # In round 8 the cosine is so near its end that less than half a weight would move.
        assert moved == (t % 2 == 0 and t < stop and t != 8), t


def oracle_move(mask, model, gradient, part):
    """RigL's move in plain Python: drop the smallest, grow the largest gradients, layer by layer."""
    out = mask.tolist()
    for e in weight_entries(LAYOUT):
        inside = [i for i in range(e.offset, e.end) if mask[i]]
        outside = [i for i in range(e.offset, e.end) if not mask[i]]
        move = min(math.floor(part * len(inside) + 0.5), len(outside))
        for i in sorted(inside, key=lambda i: (abs(float(model[i])), -i))[:move]:
            out[i] = False
        for i in sorted(outside, key=lambda i: (-abs(float(gradient[i])), i))[:move]:
            out[i] = True
    return torch.tensor(out)


def test_rigl_moves_as_the_plain_loop() -> None:
    found = play("rigl")
    for t in (2, 4, 6, 8):
        mask, model, _, _, votes = found[t - 1]
        part = 0.15 * (1 + math.cos(math.pi * t / 9))
        expected = oracle_move(mask, model, votes.mean(0), part)
        assert torch.equal(found[t][0], expected)


def test_votes_are_the_steepest_cut_weights() -> None:
    mask, _, _, gradient, votes = play("rigl")[1]
    for row, vote in zip(gradient, votes, strict=True):
        assert not bool((vote != 0)[mask].any())
        for e in weight_entries(LAYOUT):
            part = slice(e.offset, e.end)
            chosen = vote[part] != 0
            left = ~mask[part] & ~chosen
            if bool(chosen.any()) and bool(left.any()):
                assert float(row[part][chosen].abs().min()) >= float(row[part][left].abs().max())
        assert torch.equal(vote[vote != 0], row[vote != 0])


def test_feddst_cuts_the_mean_back_by_magnitude() -> None:
    found = play("feddst")
    mask, model = found[4][0], found[3][1]  # clients moved their masks in round 3
    for e in weight_entries(LAYOUT):
        size = model[e.offset : e.end].abs()
        count = int(mask[e.offset : e.end].sum())
        expected = set(sorted(range(e.size), key=lambda i: (-float(size[i]), i))[:count])
        assert {i for i in range(e.size) if mask[e.offset + i]} == expected


def test_fedrts_beliefs_by_hand() -> None:
    """One layer of four weights, two kept; two clients agree with the mean on the first."""
    net = nn.Linear(4, 1, bias=False)
    layout = Layout.of(net)
    policy = POLICIES["fedrts"](interval=2, gamma=0.5, strength=10.0, fraction=1.0, stop=1.0)
    state = {**policy.init(layout, torch.device("cpu")), "mask": torch.tensor([True, True, False, False])}
    models = torch.tensor([[3.0, 1.0, 0, 0], [1.0, 2.0, 0, 0]])
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    votes = torch.tensor([[0, 0, 0.3, 0], [0, 0, 0.1, 0]])
    # t = 1 of 4: half of the two kept weights times (1 + cos(π/4)) = 1.7, so one of two moves; κ = 0 or 1.
    after = policy.learn(state, Arrivals(0, 4, models.mean(0), layout, models, half, half, votes))
    move = math.floor(0.5 * (1 + math.cos(math.pi / 4)) * 2 + 0.5)
    core = 2 - min(move, 2)
    mean = [1.0 if core else 0.0, 0.0]
    each = [0.5 * core, 0.5 * core]
    outcome = [0.5 * mean[0] + 0.5 * each[0], 0.5 * mean[1] + 0.5 * each[1], 0.25 + 0.5, 0.25]
    assert after["alpha"].tolist() == pytest.approx([1 + 10 * x for x in outcome])
    assert after["beta"].tolist() == pytest.approx([1 + 10 * (1 - x) for x in outcome])


@pytest.mark.parametrize("name", ["set", "rigl", "feddst", "fedrts"])
def test_a_score_that_needs_data_is_refused(name: str) -> None:
    policy = POLICIES[name]()
    blind = MaskRound(0, 5, LAYOUT.read(NET), LAYOUT, budget_for(LAYOUT, 0.5), np.random.default_rng(0), None)
    with pytest.raises(ConfigError, match=r"pruning\.pruner must be a score without data"):
        policy.apply(policy.init(LAYOUT, torch.device("cpu")), blind)


def test_without_a_report_the_mask_does_not_move() -> None:
    policy = POLICIES["rigl"](interval=2)
    model, state = LAYOUT.read(NET), policy.init(LAYOUT, torch.device("cpu"))
    for t in range(2):
        masks, state = policy.apply(state, view(model, t))
    again, _ = policy.apply(state, view(model, 2))  # the votes of round 1 were lost
    assert torch.equal(masks.shared, again.shared)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5),
    sparsity=st.floats(0, 0.9),
    scope=st.sampled_from(list(SCOPES)),
)
def test_a_budget_is_exact_whatever_the_scope(sizes, sparsity, scope) -> None:
    layers = [nn.Linear(a, b, bias=False) for a, b in sizes]
    layout = Layout.of(nn.ModuleList(layers))
    total = sum(a * b for a, b in sizes)
    if round((1 - sparsity) * total) < 1:
        return
    budget = budget_for(layout, sparsity, scope)
    if budget.layers is not None:
        assert sum(budget.layers) == budget.total
        assert all(0 <= k <= a * b for k, (a, b) in zip(budget.layers, sizes, strict=True))
    mask = compute_mask(
        nn.ModuleList(layers), layout, torch.randn(layout.size), PRUNERS["rand"], budget, None,
        torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert int(mask.sum()) == budget.total


def cut_by_magnitude(model: torch.Tensor, kept: int) -> set[int]:
    prunable = [i for i in range(LAYOUT.size) if LAYOUT.prunable[i]]
    return set(sorted(prunable, key=lambda i: (-abs(float(model[i])), i))[:kept])


@pytest.mark.parametrize(("tolerance", "window", "latest"), [(0.1, 3, 1.0), (0.02, 2, 1.0), (0.0, 4, 0.5)])
def test_early_bird_cuts_as_the_plain_loop(tolerance: float, window: int, latest: float) -> None:
    """A model that moves less and less: the masks it would have come to rest."""
    policy = POLICIES["early-bird"](tolerance=tolerance, window=window, latest=latest)
    state, draw = policy.init(LAYOUT, torch.device("cpu")), torch.Generator().manual_seed(3)
    model, history, cut, rounds = torch.randn(LAYOUT.size, generator=draw), [], None, 20
    budget = budget_for(LAYOUT, 0.7, "global")
    for t in range(rounds):
        model = model + torch.randn(LAYOUT.size, generator=draw) * 0.6**t

        def by_score(support: torch.Tensor | None, model: torch.Tensor = model) -> torch.Tensor:
            return compute_mask(NET, LAYOUT, model, PRUNERS["mag"], budget, None, torch.Generator(), support)

        round = MaskRound(t, rounds, model, LAYOUT, budget, np.random.default_rng(t), by_score)
        masks, state = policy.apply(state, round)
        history.append(cut_by_magnitude(model, budget.total))
        if cut is None:
            recent = history[-window:]
            rests = len(recent) == window and all(
                len(history[-1] - other) / budget.total <= tolerance for other in recent
            )
            cut = history[-1] if rests or t >= latest * rounds else None
        kept = {i for i in range(LAYOUT.size) if LAYOUT.prunable[i] and masks.shared[i]}
        everything = {i for i in range(LAYOUT.size) if LAYOUT.prunable[i]}
        assert kept == (everything if cut is None else cut)
    assert cut is not None
    assert history[0] != cut


def test_early_bird_does_not_take_disjoint_masks_for_one_at_any_sparsity() -> None:
    policy = POLICIES["early-bird"](window=2, latest=1.0)
    state, budget = policy.init(LAYOUT, torch.device("cpu")), budget_for(LAYOUT, 0.95, "global")
    ids = [i for i in range(LAYOUT.size) if LAYOUT.prunable[i]]
    for t in range(6):
        here = torch.zeros(LAYOUT.size, dtype=torch.bool)
        here[ids[t * budget.total : (t + 1) * budget.total]] = True
        round = MaskRound(
            t,
            20,
            torch.ones(LAYOUT.size),
            LAYOUT,
            budget,
            np.random.default_rng(t),
            lambda *_, here=here: here,
        )
        masks, state = policy.apply(state, round)
        assert bool(masks.shared.all())


@pytest.mark.parametrize("strength", [0.0, 1e-7, 1e300, float("nan")])
def test_beliefs_are_neither_lost_in_rounding_nor_infinite(strength: float) -> None:
    with pytest.raises(ConfigError) as error:
        POLICIES["fedrts"](strength=strength)
    assert str(error.value) == f"strength must lie between 1e-06 and 1e+06, got {strength}"
