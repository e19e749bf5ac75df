"""Exact counts, ties by index, and the rule of the support."""

from __future__ import annotations

import copy
import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pruning import oracle
from pruning.samples import BATCH, never, small
from safari.errors import PruneError, SafariError
from safari.models import Layout
from safari.pruning import (
    PRUNERS,
    Pruner,
    budget_for,
    compute_mask,
    density,
    kept_count,
    prune,
    settled_mask,
    top_k,
)

# --- counts


@given(total=st.integers(1, 10**9), thousandths=st.integers(0, 999_999))
def test_kept_count_is_the_rounded_exact_product(total: int, thousandths: int) -> None:
    text = f"0.{thousandths:06d}"
    expected = oracle.kept(total, text)
    if expected == 0:
        with pytest.raises(PruneError, match="to keep any of"):
            kept_count(total, float(text))
    else:
        assert kept_count(total, float(text)) == expected


@given(total=st.integers(1, 10**6), sparsity=st.floats(0, 1, exclude_max=True))
def test_kept_count_never_misses_by_more_than_half(total: int, sparsity: float) -> None:
    exact = (1 - Fraction(sparsity)) * total
    try:
        kept = kept_count(total, sparsity)
    except PruneError:
        assert exact <= Fraction(1, 2) + Fraction(1, 10**6)
    else:
        assert 1 <= kept <= total
        assert abs(kept - exact) <= Fraction(1, 2) + Fraction(1, 10**6)


@pytest.mark.parametrize(
    ("total", "sparsity", "kept"),
    [
        (268_336, 0.0, 268_336),
        (268_336, 0.5, 134_168),
        (268_336, 0.8, 53_667),
        (268_336, 0.95, 13_417),
        (268_336, 0.99, 2_683),
        (15, 0.9, 2),  # 1.5, which floats see as 1.4999999999999998
        (5, 0.5, 2),  # 2.5: a half goes to the even number
        (7, 0.5, 4),  # 3.5
        (1, 0.5, None),  # 0.5 rounds to 0
        (1, 0.49, 1),
    ],
)
def test_kept_count_by_hand(total: int, sparsity: float, kept: int | None) -> None:
    if kept is None:
        with pytest.raises(PruneError):
            kept_count(total, sparsity)
    else:
        assert kept_count(total, sparsity) == kept


@pytest.mark.parametrize(
    ("sparsity", "text"),
    [
        (1.0, "sparsity must be at least 0 and below 1, got 1.0"),
        (1, "sparsity must be at least 0 and below 1, got 1"),
        (-0.1, "sparsity must be at least 0 and below 1, got -0.1"),
        (math.nan, "sparsity must be at least 0 and below 1, got nan"),
        (math.inf, "sparsity must be at least 0 and below 1, got inf"),
        (0.99, "sparsity must be at most 0.9857 to keep any of 35 weights, got 0.99"),
        ("0.5", "sparsity must be a number, at least 0 and below 1, got '0.5'"),
        (None, "sparsity must be a number, at least 0 and below 1, got None"),
        (True, "sparsity must be a number, at least 0 and below 1, got True"),
    ],
)
@pytest.mark.parametrize("pruner", PRUNERS)
def test_a_sparsity_that_cannot_be(pruner: str, sparsity: float, text: str) -> None:
    module = small()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(PruneError) as error:
        prune(module, pruner=pruner, sparsity=sparsity, batch=BATCH)
    assert str(error.value) == text
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("module", [nn.BatchNorm1d(4), nn.Embedding(3, 4)])
def test_a_module_with_nothing_to_prune(pruner: str, module: nn.Module) -> None:
    with pytest.raises(PruneError) as error:
        prune(module, pruner=pruner, sparsity=0.5, batch=BATCH)
    assert str(error.value) == (
        "there is nothing to prune: the module has no weights in convolution or linear layers"
    )


def test_a_module_that_is_frozen_has_nothing_that_travels() -> None:
    with pytest.raises(SafariError, match="Linear has no parameters that are trained: all are frozen"):
        prune(nn.Linear(4, 3).requires_grad_(False), sparsity=0.5)


@given(total=st.integers(1, 10**9))
def test_the_largest_sparsity_that_is_named_works_and_little_more_does_not(total: int) -> None:
    with pytest.raises(PruneError) as error:
        kept_count(total, 1 - 1e-12, "pruning.sparsity")
    text = re.fullmatch(
        rf"pruning\.sparsity must be at most (0\.\d+) to keep any of {total} weights, got 0\.9+",
        str(error.value),
    )
    assert text is not None
    assert kept_count(total, float(text[1])) == 1
    digits = len(text[1]) - 2
    with pytest.raises(PruneError):
        kept_count(total, round(float(text[1]) + 10**-digits, digits))


def test_the_largest_sparsity_by_hand() -> None:
    """Half a weight is rounded to none: below 1 - 1/(2·1), 1 - 1/(2·5), 1 - 1/(2·12)."""
    for total, text in ((1, "0.499"), (5, "0.899"), (12, "0.9583")):
        with pytest.raises(PruneError, match=rf"at most {text} to keep any of {total} weights, got 0.999$"):
            kept_count(total, 0.999)


# --- top-k

# Few distinct values, so that ties are the rule; both zeros and both infinities among them.
SCORES = st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, math.inf]), min_size=1, max_size=40)


@given(data=st.data(), scores=SCORES)
def test_top_k_sorts_by_score_and_then_by_index(data: st.DataObject, scores: list[float]) -> None:
    keep = data.draw(st.integers(0, len(scores)))
    winners = {i for _, i in sorted((-s, i) for i, s in enumerate(scores))[:keep]}
    mask = top_k(torch.tensor(scores, dtype=torch.float64), keep)
    assert mask.dtype == torch.bool
    assert {i for i, kept in enumerate(mask.tolist()) if kept} == winners


@given(data=st.data(), scores=SCORES)
def test_top_k_among_looks_only_there(data: st.DataObject, scores: list[float]) -> None:
    n = len(scores)
    among = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    keep = data.draw(st.integers(0, n))
    ranked = sorted((-s, i) for i, s in enumerate(scores) if among[i])
    allowed = torch.tensor(among)
    mask = top_k(torch.tensor(scores), keep, among=allowed)
    assert {i for i, kept in enumerate(mask.tolist()) if kept} == {i for _, i in ranked[:keep]}
    assert allowed.tolist() == among


def test_equal_weights_are_kept_from_the_front() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in module.parameters():
        nn.init.constant_(parameter, -3.0)
    masks = prune(module, pruner="mag", sparsity=0.375)  # 5 of 8
    assert masks["0.weight"].tolist() == [[True, True], [True, True]]
    assert masks["1.weight"].tolist() == [[True, False], [False, False]]


# --- the support


def setting(seed: int = 0) -> tuple[nn.Sequential, Layout, Tensor]:
    module = small(seed)
    layout = Layout.of(module)
    return module, layout, layout.read(module)


def test_what_is_not_prunable_is_always_kept() -> None:
    module, layout, vector = setting()
    support = torch.zeros(layout.size, dtype=torch.bool)
    mask = compute_mask(module, layout, vector, PRUNERS["mag"], 0.8, None, torch.Generator(), support)
    assert torch.equal(mask, ~layout.prunable)
    assert density(mask, layout) == 0.0


@settings(max_examples=40)
@given(data=st.data())
def test_a_support_within_the_budget_is_the_mask_and_nothing_is_scored(data: st.DataObject) -> None:
    module, layout, vector = setting()
    within = data.draw(st.sets(st.integers(0, 34), max_size=7))  # 20% of 35
    support = torch.zeros(layout.size, dtype=torch.bool)
    support[layout.prunable.nonzero().flatten()[list(within)]] = True
    mask = compute_mask(module, layout, vector, Pruner(never), 0.8, None, torch.Generator(), support)
    assert torch.equal(mask[layout.prunable], support[layout.prunable])
    assert mask[~layout.prunable].all()


@pytest.mark.parametrize("pruner", PRUNERS)
@settings(max_examples=5)
@given(data=st.data())
def test_a_larger_support_holds_the_mask(pruner: str, data: st.DataObject) -> None:
    module, layout, vector = setting()
    places = data.draw(st.sets(st.integers(0, 34), min_size=8))
    support = torch.zeros(layout.size, dtype=torch.bool)
    support[layout.prunable.nonzero().flatten()[list(places)]] = True
    mask = compute_mask(module, layout, vector, PRUNERS[pruner], 0.8, BATCH, torch.Generator(), support)
    kept = mask & layout.prunable
    assert int(kept.sum()) == 7
    assert not (kept & ~support).any()
    assert density(mask, layout) == 0.2


def test_a_larger_support_is_ranked_by_score() -> None:
    module, layout, vector = setting()
    support = torch.zeros(layout.size, dtype=torch.bool)
    weights = layout.prunable.nonzero().flatten()
    support[weights[:10]] = True
    mask = compute_mask(module, layout, vector, PRUNERS["mag"], 0.8, None, torch.Generator(), support)
    sizes = vector[weights[:10]].abs().tolist()
    best = sorted(range(10), key=lambda i: (-sizes[i], i))[:7]
    assert (mask & layout.prunable).nonzero().flatten().tolist() == sorted(weights[best].tolist())


def test_a_dense_run_keeps_everything_even_what_is_zero() -> None:
    """At sparsity 0 a weight that happens to be 0 must be free to move again."""
    module, layout, vector = setting()
    support = torch.zeros(layout.size, dtype=torch.bool)
    mask = compute_mask(module, layout, vector, Pruner(never), 0.0, None, torch.Generator(), support)
    assert mask.all()


def test_compute_mask_does_not_change_its_arguments() -> None:
    module, layout, vector = setting()
    before = vector.clone()
    support = torch.ones(layout.size, dtype=torch.bool)
    compute_mask(module, layout, vector, PRUNERS["synflow"], 0.8, BATCH, torch.Generator(), support)
    assert torch.equal(vector, before)
    assert support.all()


def test_rand_keeps_its_rank_when_the_support_shrinks() -> None:
    """The rank is drawn for all weights, so that a cut elsewhere does not change who is next."""
    module, layout, vector = setting()
    weights = layout.prunable.nonzero().flatten()
    rank = torch.rand(35, generator=torch.Generator().manual_seed(9)).tolist()
    support = torch.ones(layout.size, dtype=torch.bool)
    support[weights[::2]] = False
    generator = torch.Generator().manual_seed(9)
    mask = compute_mask(module, layout, vector, PRUNERS["rand"], 0.8, None, generator, support)
    left = [i for i in range(35) if i % 2]
    best = sorted(left, key=lambda i: (-rank[i], i))[:7]
    assert (mask & layout.prunable).nonzero().flatten().tolist() == sorted(weights[best].tolist())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("scope", ["global", "uniform"])
def test_a_settled_mask_is_the_one_that_would_be_computed(share: float, sparsity: float, scope: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    layout = Layout.of(module)
    budget = budget_for(layout, sparsity, scope)
    support = torch.rand(layout.size, generator=torch.Generator().manual_seed(1)) < share

    def score(module: nn.Module, batch: object, generator: torch.Generator) -> dict[str, torch.Tensor]:
        raise AssertionError("scored")

    settled = settled_mask(layout, budget, support)
    vector = layout.read(module)
    arguments = module, layout, vector, Pruner(score), budget, None, torch.Generator(), support
    if settled is None:
        with pytest.raises(AssertionError, match="scored"):
            compute_mask(*arguments)
    else:
        assert torch.equal(settled, compute_mask(*arguments))
        assert settled[~layout.prunable].all()
