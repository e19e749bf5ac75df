"""Local training against hand calculations and a plain PyTorch loop; batches; evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from safari.models import Layout, cnn, resnet20
from safari.pruning import Batch, prune
from safari.training import OPTIMISERS, draw_batches, evaluate, train_local


def net(dropout: float = 0.5) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(4 * 4, 3),
        )


def batches(steps: int, shape: tuple[int, ...] = (1, 4, 4), classes: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn((5, *shape), generator=generator), torch.randint(classes, (5,), generator=generator))
        for _ in range(steps)
    ]


def mask_of(module: nn.Module, layout: Layout, sparsity: float = 0.6) -> Tensor:
    masks = prune(module, pruner="rand", sparsity=sparsity)
    ones = {e.name: torch.ones(e.shape, dtype=torch.bool) for e in layout.entries}
    return layout.join({**ones, **masks})


# --- by hand


def test_sgd_by_hand_steps_with_lr_over_tau() -> None:
    """One input x = 1 and label 0: the gradient of (w0, w1) is (-q, q), q = 1/(1 + e^(w0 - w1))."""
    layer = nn.Linear(1, 2, bias=False)
    layout = Layout.of(layer)
    batch = (torch.ones(1, 1), torch.tensor([0]))
    trained, loss, *_ = train_local(
        layer, layout, torch.zeros(2), torch.ones(2, dtype=torch.bool), [batch, batch],
        optimiser="sgd", lr=0.8, seed=0,
    )  # fmt: skip
    step = 0.8 / 2
    first = step * 0.5
    q = 1 / (1 + math.exp(2 * first))
    w = first + step * q
    assert trained.tolist() == pytest.approx([w, -w], rel=1e-6)
    assert loss == pytest.approx((math.log(2) + math.log(1 + math.exp(-2 * first))) / 2, rel=1e-6)


def test_adam_by_hand_steps_with_lr() -> None:
    """Adam's first step is lr · g/(|g| + ε): lr in the direction of the sign, however many steps follow."""
    layer = nn.Linear(1, 2, bias=False)
    layout = Layout.of(layer)
    everything = torch.ones(2, dtype=torch.bool)
    batch = (torch.ones(1, 1), torch.tensor([0]))
    trained, *_ = train_local(
        layer, layout, torch.zeros(2), everything, [batch], optimiser="adam", lr=0.01, seed=0
    )
    assert trained.tolist() == pytest.approx([0.01, -0.01], rel=1e-5)
    # Optimiser state is fresh: the next round's first step is of the same size.
    again, *_ = train_local(layer, layout, trained, everything, [batch], optimiser="adam", lr=0.01, seed=0)
    assert again.tolist() == pytest.approx([0.02, -0.02], rel=1e-5)


def test_without_batches_nothing_moves() -> None:
    layer = nn.Linear(1, 2)
    layout = Layout.of(layer)
    mask = torch.tensor([True, False, True, True])
    for optimiser in OPTIMISERS:
        trained, loss, *_ = train_local(
            layer, layout, torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, [], optimiser=optimiser, lr=1.0, seed=0
        )
        assert trained.tolist() == [1.0, 0.0, 3.0, 4.0]
        assert math.isnan(loss)


# --- against a plain loop


def plain_loop(
    module: nn.Module, masks: dict[str, Tensor], data: list[Batch], optimiser: str, lr: float, seed: int
) -> float:
    """The same from PyTorch's own parts: weights multiplied back by the mask after every step."""
    with torch.no_grad():
        for name, mask in masks.items():
            module.get_parameter(name).mul_(mask)
    if optimiser == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=lr / len(data))
    else:
        optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    losses = []
    module.train()
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        for x, y in data:
            module.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            for name, mask in masks.items():
                grad = module.get_parameter(name).grad
                assert grad is not None
                grad[~mask] = 0
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_as_a_plain_loop_bit_by_bit(optimiser: str, steps: int, sparsity: float) -> None:
    module, reference = net(), net()
    layout = Layout.of(module)
    start, mask = layout.read(module), mask_of(module, layout, sparsity)
    before = start.clone()
    nn.init.constant_(module[0].weight, 77.0)  # the module is scratch: what is in it must not matter
    trained, loss, *_ = train_local(
        module, layout, start, mask, batches(steps), optimiser=optimiser, lr=0.05, seed=3
    )
    masks = {n: m for n, m in layout.split(mask).items() if not m.all()}
    expected = plain_loop(reference, masks, batches(steps), optimiser, 0.05, 3)
    assert torch.equal(trained, layout.read(reference))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert torch.equal(start, before)
    assert not torch.equal(trained, start)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("build", [cnn, resnet20])
def test_pruned_weights_are_exactly_zero(optimiser: str, build: object) -> None:
    torch.manual_seed(0)
    module = build((1, 8, 8), 3, width=4)  # type: ignore[operator]
    layout = Layout.of(module)
    start = layout.read(module)
    mask = mask_of(module, layout, 0.8)
    trained, *_ = train_local(
        module, layout, start, mask, batches(4, (1, 8, 8)), optimiser=optimiser, lr=0.1, seed=0
    )
    assert (trained[~mask] == 0).all()
    assert not torch.signbit(trained[~mask]).any()
    assert (trained != start)[mask & layout.prunable].any()


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_infinite_gradient_of_a_cut_weight_does_no_harm(optimiser: str) -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            w = self.layer.weight
            return x @ w.t() + w[0, 0].abs().sqrt()  # infinitely steep at 0

    module = Steep()
    layout = Layout.of(module)
    mask = torch.tensor([False, True, True, True])
    trained, *_ = train_local(
        module, layout, torch.ones(4), mask, [(torch.ones(1, 2), torch.tensor([0]))] * 2,
        optimiser=optimiser, lr=0.1, seed=0,
    )  # fmt: skip
    assert trained.isfinite().all()
    assert trained[0] == 0


def test_buffers_travel_and_frozen_parameters_stay() -> None:
    module = net(dropout=0.0)
    module[1].bias.requires_grad_(False)
    layout = Layout.of(module)
    start = layout.read(module)
    everything = torch.ones(layout.size, dtype=torch.bool)
    trained, *_ = train_local(module, layout, start, everything, batches(2), optimiser="sgd", lr=0.1, seed=0)
    before, after = layout.split(start), layout.split(trained)
    assert "1.bias" not in after
    assert torch.equal(module[1].bias, torch.zeros_like(module[1].bias))
    assert not torch.equal(before["1.weight"], after["1.weight"])
    assert not torch.equal(before["1.running_mean"], after["1.running_mean"])
    # The running mean after one batch is 0.9 · 0 + 0.1 · the batch's mean of the first layer's output.
    module = net(dropout=0.0)
    module[1].bias.requires_grad_(False)
    x, _ = batches(1)[0]
    with torch.no_grad():
        mean = module[0](x).mean((0, 2, 3))
    one, *_ = train_local(module, layout, start, everything, batches(1), optimiser="sgd", lr=0.1, seed=0)
    torch.testing.assert_close(layout.split(one)["1.running_mean"], 0.1 * mean)


def test_dropout_follows_the_seed_and_the_global_generator_is_left_alone() -> None:
    module = net()
    layout = Layout.of(module)
    start, everything = layout.read(module), torch.ones(layout.size, dtype=torch.bool)

    def trained(seed: int) -> Tensor:
        return train_local(module, layout, start, everything, batches(3), optimiser="sgd", lr=0.1, seed=seed)[
            0
        ]

    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    first = trained(5)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(999)
    assert torch.equal(first, trained(5))
    assert not torch.equal(first, trained(6))


def test_training_works_where_gradients_are_off() -> None:
    layer = nn.Linear(2, 2)
    layout = Layout.of(layer)
    batch = (torch.ones(1, 2), torch.tensor([0]))
    with torch.no_grad():
        trained, *_ = train_local(
            layer, layout, torch.zeros(6), torch.ones(6, dtype=torch.bool), [batch],
            optimiser="sgd", lr=1.0, seed=0,
        )  # fmt: skip
    assert trained.tolist() == [0.5, 0.5, -0.5, -0.5, 0.5, -0.5]
    assert not trained.requires_grad


# --- batches


@given(
    seed=st.integers(0, 2**32), samples=st.integers(1, 40), batch=st.integers(1, 20), steps=st.integers(1, 10)
)
def test_batches_go_over_the_data_pass_after_pass(seed: int, samples: int, batch: int, steps: int) -> None:
    picks = draw_batches(np.random.default_rng(seed), samples, batch, steps)
    assert picks.shape == (steps, batch)
    assert picks.dtype == np.int64
    flat = picks.flatten()
    assert flat.min() >= 0
    assert flat.max() < samples
    for start in range(0, len(flat), samples):
        one_pass = flat[start : start + samples].tolist()
        assert len(set(one_pass)) == len(one_pass)
    again = draw_batches(np.random.default_rng(seed), samples, batch, steps)
    assert np.array_equal(picks, again)


def test_passes_are_shuffled_anew_and_seeds_differ() -> None:
    picks = draw_batches(np.random.default_rng(0), samples=50, batch=50, steps=2)
    assert sorted(picks[0]) == sorted(picks[1]) == list(range(50))
    assert picks[0].tolist() != picks[1].tolist()
    other = draw_batches(np.random.default_rng(1), samples=50, batch=50, steps=2)
    assert picks.tolist() != other.tolist()


def test_every_sample_is_as_likely() -> None:
    """4,000 draws of 3 out of 10: each sample 1,200 times on average, and within 5 standard deviations."""
    rng = np.random.default_rng(0)
    counts = np.bincount(
        np.concatenate([draw_batches(rng, 10, 3, 1).flatten() for _ in range(4000)]), minlength=10
    )
    assert counts.sum() == 12_000
    assert np.abs(counts - 1200).max() < 5 * math.sqrt(4000 * 0.3 * 0.7)


# --- evaluation


class Fixed(nn.Module):
    """Its logits are its inputs; random in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x) if self.training else x


def test_evaluate_by_hand() -> None:
    logits = torch.tensor(
        [
            [9.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],  # label 0: first
            [9.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],  # label 4: fifth
            [9.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],  # label 5: sixth
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0],  # label 6: first
        ]
    )
    labels = torch.tensor([0, 4, 5, 6])
    total = math.log(sum(math.exp(v) for v in (9, 5, 4, 3, 2, 1, 0)))
    loss = (4 * total - 9 - 2 - 1 - 9) / 4
    for batch in (1, 3, 4, 100):
        found = evaluate(Fixed().train(), logits, labels, batch)
        assert found == {"loss": pytest.approx(loss, rel=1e-6), "top1": 0.5, "top5": 0.75}


def test_evaluate_changes_no_number_and_needs_no_gradient() -> None:
    module = net()
    layout = Layout.of(module)
    before = layout.read(module)
    state = torch.random.get_rng_state()
    evaluate(module, batches(1)[0][0], batches(1)[0][1], batch=2)
    assert torch.equal(layout.read(module), before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in module.parameters())


def test_a_diverged_model_has_a_loss_that_is_not_a_number_and_no_error() -> None:
    found = evaluate(Fixed(), torch.full((2, 6), math.nan), torch.tensor([0, 1]), batch=2)
    assert math.isnan(found["loss"])
