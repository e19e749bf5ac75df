"""The stacked optimisers against torch's own, and what must hold whatever the module does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import by_layers
from safari.engine.stack.masked_optimiser import MaskedStep
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.train import _in_the_step, adam_, train_stacked
from safari.models import Layout
from safari.training import ClientAlgorithm, Scaled, train_local

CPU = torch.device("cpu")


def steps_of_torch(start: Tensor, gradients: list[Tensor], kept: Tensor, lr: float) -> Tensor:
    p = nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([p], lr=lr)
    for g in gradients:
        p.grad = g.masked_fill(~kept, 0.0)
        optimizer.step()
    return p.detach()


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 12),
    scale=st.sampled_from([1e-12, 1e-6, 1e-2, 1.0, 1e6]),
    lr=st.sampled_from([1e-4, 1e-3, 0.1]),
)
def test_adam_is_torchs_own_to_the_last_bits(seed, steps, scale, lr):
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(40, generator=draw)
    gradients = [scale * torch.randn(40, generator=draw) for _ in range(steps)]
    kept = torch.rand(40, generator=draw) < 0.6
    p, first, second = start.clone(), torch.zeros(40), torch.zeros(40)
    counted, moments = start.clone(), (torch.zeros(40), torch.zeros(40))
    alone = start.clone()
    step_kept = MaskedStep(alone, kept.nonzero().squeeze(1), optimiser="adam", lr=lr, steps=steps)
    for step, g in enumerate(gradients, 1):
        adam_(p, g.clone(), first, second, kept, step, lr)
        # As a recording has it, in which the same kernels count on.
        adam_(counted, g.clone(), *moments, kept, torch.tensor(float(step), dtype=torch.float64), lr)
        step_kept(g)
    expected = steps_of_torch(start, gradients, kept, lr)
    for found in (p, counted, alone):
        # Eight units in the last place of numbers around 1.
        torch.testing.assert_close(found, expected, rtol=0, atol=8 * 2**-23)
        assert torch.equal(found[~kept], start[~kept])


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_steps_of_the_kept_weights_are_those_of_torch(optimiser, share):
    draw = torch.Generator().manual_seed(0)
    start, kept = torch.randn(30, generator=draw), torch.rand(30, generator=draw) < share
    gradients = [torch.randn(30, generator=draw) for _ in range(4)]
    p = nn.Parameter(start.clone())
    theirs = torch.optim.Adam([p], lr=0.1) if optimiser == "adam" else torch.optim.SGD([p], lr=0.1 / 4)
    ours = start.clone()
    step = MaskedStep(ours, kept.nonzero().squeeze(1), optimiser=optimiser, lr=0.1, steps=4)
    for g in gradients:
        p.grad = g.masked_fill(~kept, 0.0)
        theirs.step()
        step(g.masked_fill(~kept, torch.nan))
    torch.testing.assert_close(ours, p.detach(), rtol=0, atol=8 * 2**-23)
    assert torch.equal(ours[~kept], start[~kept]), "what is cut was touched"


def clients(seed: int = 0, steps: int = 4) -> tuple[nn.Module, Layout, Tensor, Tensor, list]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    layout = Layout.of(net)
    masks = (torch.rand(3, layout.size) < 0.5) | ~layout.prunable
    batches = [(torch.randn(3 * 4, 6), torch.randint(0, 3, (3 * 4,))) for _ in range(steps)]
    return net, layout, layout.read(net), masks, batches


def together(net, layout, start, masks, batches, **options) -> tuple[Tensor, Tensor]:
    flat = Flat(layout, len(masks))
    found, losses, *_ = train_stacked(
        by_layers(net, True), flat, start, masks, batches, len(batches),
        random_state=RandomState(range(len(masks)), CPU), **options,
    )  # fmt: skip
    return flat.to_rows(found), losses


@pytest.fixture(autouse=True)
def _own_random_state():
    with torch.random.fork_rng([]):
        yield


def test_what_a_steps_kernel_reads_of_a_scaled_direction():
    """It reads one number a parameter, one after the other; whatever is not so takes the way of any direction."""

    def of(shift: Tensor, scale: Tensor) -> Scaled | None:
        return _in_the_step(ClientAlgorithm(scaled=lambda down: Scaled(1.0, shift, scale, 5.0)), {}, 4)

    assert _in_the_step(ClientAlgorithm(), {}, 4) is None
    assert of(torch.zeros(1), torch.ones(4)) is None
    assert of(torch.zeros(4), torch.tensor(1.0)) is None
    assert of(torch.zeros(3, 4), torch.ones(4)) is None
    found = of(torch.arange(8.0)[::2], torch.ones(4, dtype=torch.float64))
    assert found.shift.is_contiguous()
    assert found.shift.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert found.scale.dtype == torch.float32


@pytest.mark.parametrize(("optimiser", "lr"), [("sgd", 0.5), ("adam", 0.01)])
def test_several_steps_of_several_clients(optimiser, lr):
    net, layout, start, masks, batches = clients()
    rows, losses = together(net, layout, start, masks, batches, optimiser=optimiser, lr=lr)
    for client in range(3):
        own = [(x[4 * client : 4 * client + 4], y[4 * client : 4 * client + 4]) for x, y in batches]
        alone, loss, *_ = train_local(
            net, layout, start, masks[client], own, optimiser=optimiser, lr=lr, seed=0
        )
        torch.testing.assert_close(rows[client], alone, rtol=0, atol=32 * 2**-23)
        assert float(losses[client]) == pytest.approx(loss, rel=1e-6)
        assert bool((rows[client][~masks[client]] == 0).all())


def test_a_cut_weight_is_0_and_not_minus_0_or_nan():
    net, layout, start, masks, batches = clients()
    start[0], masks[0, 0] = -torch.inf, False
    start[1], masks[0, 1] = -1.0, False
    rows, _ = together(
        net, layout, start, masks[:1], [(x[:4], y[:4]) for x, y in batches], optimiser="sgd", lr=0.1
    )
    assert rows[0, :2].tolist() == [0.0, 0.0]
    assert not bool(torch.signbit(rows[0, :2]).any())
    assert bool(rows.isfinite().all())


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_client_that_overflows_keeps_its_cut_weights_at_0_and_does_not_affect_others(optimiser):
    net, layout, start, masks, batches = clients()
    good, _ = together(net, layout, start, masks, batches, optimiser=optimiser, lr=0.1)
    bad = [(x.clone(), y) for x, y in batches]
    bad[1][0][:4] = torch.inf
    rows, losses = together(net, layout, start, masks, bad, optimiser=optimiser, lr=0.1)
    assert bool((rows[0][~masks[0]] == 0).all()), "a masked gradient of NaN became a weight"
    assert not bool(rows[0].isfinite().all())
    assert not bool(losses[0].isfinite())
    assert torch.equal(rows[1:], good[1:])


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_frozen_parameters_stay_to_the_bit(optimiser):
    net, layout, start, masks, batches = clients()
    rows, _ = together(
        net,
        layout,
        start,
        torch.ones_like(masks),
        batches,
        optimiser=optimiser,
        lr=0.1,
        frozen={"0.weight", "2.bias"},
    )
    for client in range(3):
        for name, tensor in layout.split(rows[client]).items():
            same = torch.equal(tensor, layout.split(start)[name])
            assert same == (name in {"0.weight", "2.bias"}), name
