"""Scores by hand, a user's own scores, and what a module looks like after pruning."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruning.samples import BATCH, never, small
from safari.errors import PruneError
from safari.pruning import PRUNERS, Pruner, as_pruner, prune

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


@pytest.mark.parametrize("pruner", ["snip", "grasp", "synflow"])
@pytest.mark.parametrize(
    ("batch", "got"),
    [
        (torch.zeros(2, 4), "a tensor of shape [2, 4]"),
        ((torch.zeros(2, 4),), "a tuple of Tensor"),
        ([torch.zeros(2, 4), [0, 1]], "a list of Tensor, list"),
        ((), "a tuple of nothing"),
        ("xy", "str"),
    ],
)
def test_a_batch_that_is_not_a_pair_is_refused(pruner: str, batch: Any, got: str) -> None:
    with pytest.raises(PruneError) as error:
        prune(small(), pruner=pruner, batch=batch)
    assert str(error.value) == f"{pruner} needs batch=(inputs, labels), got {got}"


def test_a_batch_may_be_a_list_as_a_loader_gives_it() -> None:
    listed, paired = (prune(small(), pruner="snip", batch=batch) for batch in ([*BATCH], BATCH))
    assert all(torch.equal(listed[name], mask) for name, mask in paired.items())


def test_synflow_needs_real_inputs() -> None:
    with pytest.raises(PruneError) as error:
        prune(small(), pruner="synflow", batch=(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0])))
    assert str(error.value) == (
        "synflow feeds an input of ones, so inputs must be real numbers; got torch.int64"
    )


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        (None, "the pruner must return a dict of scores by parameter, got None"),
        (
            {"0.weight": [1.0], "4.weight": torch.ones(3, 5)},
            "the score of 0.weight must be a tensor of shape (5, 4), got list",
        ),
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
