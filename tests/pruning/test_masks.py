"""Exact counts, ties by index, the rule of the support, and what a module looks like afterwards."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pruning import oracle
from safari.errors import PruneError
from safari.models import Layout
from safari.pruning import PRUNERS, Pruner, as_pruner, compute_mask, density, kept_count, prune, top_k

BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.tensor([0, 1, 2]))


def small(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3, bias=False)
        )


def never(module: nn.Module, batch: object, generator: torch.Generator) -> dict[str, Tensor]:
    raise AssertionError("was scored")


# --- counts


@settings(deadline=None)
@given(total=st.integers(1, 10**9), thousandths=st.integers(0, 999_999))
def test_kept_count_is_the_rounded_exact_product(total: int, thousandths: int) -> None:
    text = f"0.{thousandths:06d}"
    expected = oracle.kept(total, text)
    if expected == 0:
        with pytest.raises(PruneError, match="keeps none"):
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
        (0.99, "sparsity 0.99 keeps none of 35 weights; use a smaller one"),
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
@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(4), nn.Embedding(3, 4), nn.Linear(4, 3).requires_grad_(False)]
)
def test_a_module_with_nothing_to_prune(pruner: str, module: nn.Module) -> None:
    with pytest.raises(PruneError) as error:
        prune(module, pruner=pruner, sparsity=0.5, batch=BATCH)
    assert str(error.value) == (
        "there is nothing to prune: the module has no weights in convolution or linear layers"
    )


# --- top-k

# Few distinct values, so that ties are the rule; both zeros and both infinities among them.
SCORES = st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, math.inf]), min_size=1, max_size=40)


@settings(deadline=None)
@given(data=st.data(), scores=SCORES)
def test_top_k_sorts_by_score_and_then_by_index(data: st.DataObject, scores: list[float]) -> None:
    keep = data.draw(st.integers(0, len(scores)))
    winners = {i for _, i in sorted((-s, i) for i, s in enumerate(scores))[:keep]}
    mask = top_k(torch.tensor(scores, dtype=torch.float64), keep)
    assert mask.dtype == torch.bool
    assert {i for i, kept in enumerate(mask.tolist()) if kept} == winners


@settings(deadline=None)
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


# --- by hand: one linear layer, logits (w0·x, w1·x)


def test_scores_by_hand() -> None:
    """x = 1 and label 0: the loss is log(1 + e^(w1 - w0)), its gradient (-q, q) with q = σ(w1 - w0)."""
    module = nn.Linear(1, 2, bias=False)
    module.weight.data = torch.tensor([[2.0], [1.0]])
    batch = (torch.ones(1, 1), torch.tensor([0]))
    q = 1 / (1 + math.exp(1.0))
    generator = torch.Generator()
    snip = PRUNERS["snip"].score(module, batch, generator)["weight"]
    assert snip.flatten().tolist() == pytest.approx([2 * q, q])
    # At temperature T: g = (-r, r)/T, H = r(1-r)/T² [[1, -1], [-1, 1]], so Hg = 2 r²(1-r)/T³ (-1, 1).
    r = 1 / (1 + math.exp(1 / 200))
    hg = 2 * r * r * (1 - r) / 200**3
    grasp = PRUNERS["grasp"].score(module, batch, generator)["weight"]
    assert grasp.flatten().tolist() == pytest.approx([-2 * hg, hg], rel=1e-4)
    # R = |w0| + |w1| on an input of ones.
    module.weight.data = torch.tensor([[-2.0], [1.0]])
    synflow = PRUNERS["synflow"].score(module, batch, generator)["weight"]
    assert synflow.flatten().tolist() == [2.0, 1.0]


def test_a_weight_that_the_output_ignores_scores_zero() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    torch.manual_seed(0)
    for pruner in ("snip", "grasp", "synflow"):
        found = PRUNERS[pruner].score(Unused(), BATCH, torch.Generator())
        assert found["used.weight"].abs().sum() > 0
        assert found["idle.weight"].abs().sum() == 0


# --- names and user's scores


def test_an_unknown_pruner_is_named_with_the_nearest() -> None:
    with pytest.raises(PruneError) as error:
        prune(small(), pruner="synflo")
    assert str(error.value) == (
        "pruner must be one of grasp, mag, rand, snip, synflow; got 'synflo' (did you mean 'synflow'?)"
    )
    with pytest.raises(PruneError, match=r"^pruner must be a name, a Pruner or a score function, got 3$"):
        as_pruner(3)
    with pytest.raises(PruneError, match=r"^iterations must be at least 1, got 0$"):
        Pruner(never, iterations=0)


@pytest.mark.parametrize("pruner", ["snip", "grasp", "synflow"])
def test_a_pruner_that_needs_a_batch_says_so(pruner: str) -> None:
    with pytest.raises(PruneError) as error:
        prune(small(), pruner=pruner)
    assert str(error.value) == f"{pruner} needs batch=(inputs, labels), got None"


def test_synflow_needs_real_inputs() -> None:
    with pytest.raises(PruneError) as error:
        prune(small(), pruner="synflow", batch=(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0])))
    assert str(error.value) == (
        "synflow feeds an input of ones, so inputs must be real numbers; got torch.int64"
    )


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ({"0.weight": torch.ones(5, 4)}, "the pruner gave no score for 4.weight"),
        (
            {"0.weight": torch.ones(4, 5), "4.weight": torch.ones(3, 5)},
            "the score of 0.weight must have shape (5, 4), got (4, 5)",
        ),
        (
            {"0.weight": torch.full((5, 4), math.nan), "4.weight": torch.ones(3, 5)},
            "the pruner gave NaN as a score; does the model's output overflow?",
        ),
    ],
)
def test_a_users_scores_are_checked(scores: dict[str, Tensor], text: str) -> None:
    module = small().train()
    module[1].eval()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(PruneError) as error:
        prune(module, pruner=lambda m, b, g: scores)
    assert str(error.value) == text
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert [part.training for part in module] == [True, False, True, True, True]


def test_a_users_score_is_used() -> None:
    def last_first(module: nn.Module, batch: object, generator: torch.Generator) -> dict[str, Tensor]:
        assert not module.training
        return {
            "0.weight": torch.arange(20.0).reshape(5, 4),
            "4.weight": torch.arange(20.0, 35.0).reshape(3, 5),
        }

    masks = prune(small(), pruner=last_first, sparsity=0.6)  # 14 of 35
    assert not masks["0.weight"].any()
    assert masks["4.weight"].flatten().tolist() == [False] + [True] * 14


def test_an_iterated_pruner_scores_what_is_left_and_never_brings_back() -> None:
    """Each time the weakest of those left scores best of all: had it been cut it must stay cut."""
    seen: list[int] = []

    def inverted(module: nn.Module, batch: object, generator: torch.Generator) -> dict[str, Tensor]:
        weight = module.weight.detach()
        seen.append(int((weight != 0).sum()))
        return {"weight": torch.where(weight == 0, math.inf, weight.abs())}

    module = nn.Linear(16, 1, bias=False)
    module.weight.data = torch.arange(1.0, 17.0)[None]
    masks = prune(module, pruner=Pruner(inverted, iterations=4), sparsity=0.9375)  # 1 of 16
    # On the exponential schedule 16 · (1/16)^(k/4): 8, 4, 2, 1 stay.
    assert seen == [16, 8, 4, 2]
    assert masks["weight"].flatten().tolist() == [False] * 15 + [True]


# --- what pruning leaves behind


@pytest.mark.parametrize("pruner", PRUNERS)
def test_the_module_is_left_as_it_was(pruner: str) -> None:
    module = small().train()
    module[1].eval()  # a user may have frozen the batch norm
    module[1](torch.randn(8, 5))
    module[0].bias.requires_grad_(False)
    module(BATCH[0]).sum().backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    before, same = copy.deepcopy(module.state_dict()), dict(module.named_parameters())
    random = torch.random.get_rng_state()
    prune(module, pruner=pruner, sparsity=0.7, batch=BATCH)
    assert torch.equal(random, torch.random.get_rng_state())
    assert [part.training for part in module] == [True, False, True, True, True]
    assert module.training
    for name, value in module.state_dict().items():
        assert torch.equal(before[name], value), name
    for name, parameter in module.named_parameters():
        assert parameter is same[name]
        assert parameter.requires_grad == (name != "0.bias")
        grad = grads[name]
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("pruner", PRUNERS)
def test_the_same_seed_gives_the_same_masks_even_without_gradients(pruner: str) -> None:
    first = prune(small(), pruner=pruner, batch=BATCH, seed=4)
    with torch.no_grad():
        again = prune(small(), pruner=pruner, batch=BATCH, seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_only_rand_depends_on_the_seed() -> None:
    for pruner in PRUNERS:
        one, two = (prune(small(), pruner=pruner, batch=BATCH, seed=seed) for seed in (0, 1))
        same = all(torch.equal(one[name], two[name]) for name in one)
        assert same == (pruner != "rand")


def test_pruners_without_data_give_every_client_the_same_mask() -> None:
    other = (BATCH[0].flip(0) * 3, BATCH[1].flip(0) * 0)
    for name, pruner in PRUNERS.items():
        one, two = (prune(small(), pruner=name, batch=b, sparsity=0.5) for b in (BATCH, other))
        same = all(torch.equal(one[key], two[key]) for key in one)
        assert same == (not pruner.needs_data), name


@pytest.mark.parametrize("pruner", PRUNERS)
def test_odd_modules_can_be_pruned(pruner: str) -> None:
    """Bool and integer buffers, extra state that is no tensor, half precision, tied weights."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("index", torch.tensor([-1, 2], dtype=torch.int16))
            self.register_buffer("shift", -torch.ones(4), persistent=False)
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

        def set_extra_state(self, state: object) -> None: ...

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x + self.shift)))

    torch.manual_seed(0)
    module = Odd()
    masks = prune(module, pruner=pruner, sparsity=0.5, batch=BATCH)
    assert list(masks) == ["one.weight"]
    assert int(masks["one.weight"].sum()) == 8
    assert module.shift.tolist() == [-1.0] * 4


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


@settings(deadline=None, max_examples=40)
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
@settings(deadline=None, max_examples=5)
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
