"""Masks of many clients in one pass: those that `compute_mask` gives client by client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import Stack, stack
from safari.engine.stack.masks import score_clients, stacked_masks, stacked_score
from safari.errors import PruneError
from safari.models import Layout
from safari.pruning import PRUNERS, budget_for, compute_mask
from safari.tasks import classification

CLIENTS, BATCH = 3, 6


def nets() -> dict[str, nn.Module]:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return {
            "vectors": nn.Sequential(nn.Flatten(), nn.Linear(32, 9), nn.Tanh(), nn.Linear(9, 3)),
            "pictures": nn.Sequential(
                nn.Conv2d(2, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Flatten(),
                nn.Linear(16, 3),
            ),
            "by vmap": nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(16, 3)),
        }


def samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    n = CLIENTS * BATCH
    return torch.randn(n, 2, 4, 4, generator=draw), torch.randint(0, 3, (n,), generator=draw)


def both(
    net: nn.Module, pruner: str, vector: Tensor, sparsity: float, t: int, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    layout = Layout.of(net)
    x, y = batch
    found: Stack = stack(net, layout, samples()[0][:8])
    flat = Flat(layout, CLIENTS)
    scoring = score_clients(
        stacked_score(PRUNERS[pruner].score), found.eval, flat, vector.device, classification()
    )
    support = None if t == 0 else vector != 0
    together = stacked_masks(flat, vector, x, y, budget_for(layout, sparsity), support, scoring)
    alone = [
        compute_mask(
            net, layout, vector, PRUNERS[pruner], sparsity,
            (x[c * BATCH : (c + 1) * BATCH], y[c * BATCH : (c + 1) * BATCH]),
            torch.Generator(), support=None if t == 0 else vector != 0,
        )
        for c in range(CLIENTS)
    ]  # fmt: skip
    return together, torch.stack(alone)


@pytest.mark.parametrize("name", nets())
@pytest.mark.parametrize("pruner", ["snip", "grasp"])
@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.97])
def test_client_by_client(name, pruner, sparsity):
    net = nets()[name]
    vector = Layout.of(net).read(net)
    together, alone = both(net, pruner, vector, sparsity, 0, samples())
    assert torch.equal(together, alone)
    assert not torch.equal(alone[0], alone[1]), "the clients' data made no difference"


@pytest.mark.parametrize("pruner", ["snip", "grasp"])
@pytest.mark.parametrize("name", nets())
def test_in_later_rounds_only_the_support_is_ranked(name, pruner):
    net = nets()[name]
    layout = Layout.of(net)
    cut = (torch.rand(layout.size, generator=torch.Generator().manual_seed(1)) < 0.4) & layout.prunable
    vector = layout.read(net).masked_fill(cut, 0.0)
    together, alone = both(net, pruner, vector, 0.8, 1, samples())
    assert torch.equal(together, alone)
    assert not bool((together & cut).any())
    within, expected = both(net, pruner, vector, 0.2, 1, samples())  # the budget does not bind
    assert torch.equal(within, expected)
    assert torch.equal(within, (~cut).expand(CLIENTS, -1))


@pytest.mark.parametrize("pruner", ["snip", "grasp"])
def test_ties_go_to_the_lower_index(pruner):
    net = nets()["vectors"]
    layout = Layout.of(net)
    x, y = samples()
    # No input, no gradient: every weight of the first layer has the score 0, and so have many of the last.
    together, alone = both(net, pruner, layout.read(net), 0.3, 0, (torch.zeros_like(x), y))
    assert torch.equal(together, alone)
    first = layout.split(together[0])["1.weight"].flatten()
    kept = int(first.sum())
    assert 0 < kept < first.numel()
    assert bool(first[:kept].all())


@pytest.mark.parametrize("t", [0, 3])
def test_when_nothing_is_cut_zeros_are_trained_too(t):
    net = nets()["vectors"]
    layout = Layout.of(net)
    vector = layout.read(net)
    vector[:5] = 0.0
    together, alone = both(net, "snip", vector, 0.0, t, samples())
    assert torch.equal(together, alone)
    assert bool(together.all())


def test_scores_of_nan_are_refused_in_the_same_words():
    net = nets()["vectors"]
    vector = Layout.of(net).read(net)
    x, y = samples()
    x[0] = torch.inf
    words = "the pruner gave NaN as a score; does the model's output overflow?"
    layout = Layout.of(net)
    flat, found = Flat(layout, CLIENTS), stack(net, layout, samples()[0][:8])
    scoring = score_clients(
        stacked_score(PRUNERS["snip"].score), found.eval, flat, vector.device, classification()
    )
    for t in (0, 1):
        with pytest.raises(PruneError) as error:
            stacked_masks(
                flat, vector, x, y, budget_for(layout, 0.5), None if t == 0 else vector != 0, scoring
            )
        assert str(error.value) == words
    with pytest.raises(PruneError, match="the pruner gave NaN"):
        compute_mask(net, layout, vector, PRUNERS["snip"], 0.5, (x, y), torch.Generator())


@pytest.mark.parametrize("pruner", ["snip", "grasp"])
def test_weights_that_do_not_matter_score_0(pruner):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.bias = nn.Linear(4, 3), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x.flatten(1)[:, :3] + self.bias

    net = Idle()
    together, alone = both(net, pruner, Layout.of(net).read(net), 0.5, 0, samples())
    assert torch.equal(together, alone)
    assert together[0, Layout.of(net).prunable].tolist() == [True] * 6 + [False] * 6
