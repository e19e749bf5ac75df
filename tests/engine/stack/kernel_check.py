"""The Triton kernels against float64: on a GPU, or on the CPU when Triton interprets them.

TRITON_INTERPRET must be set before Triton is imported, so that the tests run this file as a process:
`TRITON_INTERPRET=1 python kernel_check.py` checks everything in float32 on the CPU. Triton is imported late,
because this file is read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MOMENTUM, EPS = 0.1, 1e-5


@dataclass(frozen=True)
class Case:
    inner: int
    outer: int
    height: int
    width: int
    stride: int
    residual: bool = False
    relu: bool = True
    clients: int = 2
    n: int = 2
    side: int = 3


CASES = {
    "first layer, 3 channels": Case(3, 16, 6, 6, 1),
    "block with a shortcut": Case(16, 16, 5, 7, 1, residual=True),
    "without ReLU": Case(16, 16, 5, 5, 1, relu=False),
    "stride 2, even": Case(16, 32, 8, 6, 2),
    "stride 2, odd": Case(16, 32, 7, 5, 2, clients=3),
    "stride 2, shortcut, without ReLU before": Case(32, 32, 5, 4, 2, residual=True),
    "wide": Case(64, 128, 3, 3, 1, clients=1),
    "wide, stride 2, even": Case(64, 128, 4, 4, 2),
    "many pixels, so that the weights' gradient is split": Case(16, 16, 16, 16, 1, clients=2, n=3),
    "one client of one picture": Case(16, 16, 4, 4, 1, clients=1, n=1),
}
# Not for shared convolutions: four times the work, which an interpreter takes long for, and no other kernels.
WIDE_CASES = {
    "wide, stride 2, odd, shortcut": Case(128, 256, 5, 3, 2, residual=True),
    "wide, several blocks of channels": Case(256, 128, 4, 3, 1, residual=True),
    "widest": Case(256, 512, 2, 2, 1, clients=1, n=3),
    "3 channels to wide": Case(3, 256, 4, 4, 1, relu=False),
    "wide to narrow": Case(256, 32, 3, 3, 2),
    "wide, so many pixels that they are split": Case(64, 128, 8, 8, 1, clients=1, n=5),
    "1x1, stride 2, even": Case(64, 128, 6, 4, 2, relu=False, side=1),
    "1x1, stride 2, odd": Case(128, 64, 5, 3, 2, residual=True, side=1),
    "1x1, stride 1": Case(256, 512, 3, 3, 1, clients=1, side=1),
}


@dataclass(frozen=True)
class PoolCase:
    inner: int
    outer: int
    height: int
    width: int
    bias: bool = True
    clients: int = 2
    n: int = 2


POOL_CASES = {
    "first layer, 3 channels": PoolCase(3, 32, 8, 8, clients=3),
    "one channel, without bias": PoolCase(1, 16, 6, 4, bias=False),
    "the next layer": PoolCase(32, 32, 4, 4),
    "odd height and width": PoolCase(16, 16, 5, 7),
    "odd width": PoolCase(5, 16, 4, 3),
    "smallest picture": PoolCase(3, 16, 2, 2),
    "a line that no window reaches": PoolCase(4, 16, 3, 2, bias=False),
    "widest": PoolCase(32, 64, 3, 5, clients=1),
    "3 channels to widest": PoolCase(3, 64, 4, 6),
    "many pixels, so that the weights' gradient is split": PoolCase(3, 16, 16, 16, n=9),
    "one client of one picture": PoolCase(8, 16, 6, 6, clients=1, n=1),
}


def conv_pool_results(
    case: PoolCase, device: str, dtype: torch.dtype, whole: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and gradients of the step, and of torch in float64 from the same numbers.

    `whole`: everything is a small whole number, so that no sum is rounded, and windows are full of ties and zeros.
    """
    from safari.engine.stack.fused import ConvPool

    draw = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-1, 2, shape, generator=draw).float()
        return torch.randn(shape, generator=draw)

    k, n, (h, w) = case.clients, case.n, (case.height, case.width)
    x = numbers(k * n, case.inner, h, w)
    weight = numbers(k, case.outer, case.inner, 3, 3)
    inputs = {"x": x, "weight": weight if whole else weight / (3 * case.inner**0.5)}
    inputs |= {"bias": numbers(k, case.outer)} if case.bias else {}
    # Rounded first, so that both sides begin with the same numbers.
    inputs = {name: value.to(dtype).float() for name, value in inputs.items()}
    theirs = {name: value.double().requires_grad_() for name, value in inputs.items()}
    own = zip(theirs["x"].chunk(k), theirs["weight"], theirs.get("bias", [None] * k), strict=True)
    before = torch.cat([F.conv2d(*each, padding=1) for each in own])
    oracle = F.max_pool2d(F.relu(before), 2)
    probe = numbers(*oracle.shape)
    if not whole:
        # Where two pixels, or a pixel and 0, are near, rounding decides about the whole gradient: left out.
        windows = F.unfold(before.detach(), 2, stride=2).view(k * n, case.outer, 4, *oracle.shape[2:])
        first, second = windows.topk(2, dim=2).values.unbind(2)
        probe = (probe * ((first - second > 0.05) & (first.abs() > 0.05))).to(dtype).float()
    oracle.backward(probe.double())

    ours = {name: value.to(device).requires_grad_() for name, value in inputs.items()}
    out = ConvPool.apply(ours["x"].permute(0, 2, 3, 1), ours["weight"], ours.get("bias"), dtype)
    out = out.permute(0, 3, 1, 2)
    out.backward(probe.to(device, dtype))
    expected = {"out": oracle.detach()} | {f"d{name}": value.grad for name, value in theirs.items()}
    found = {"out": out.detach()} | {f"d{name}": value.grad for name, value in ours.items()}
    return {name: value.cpu().double() for name, value in found.items()}, expected


def check_conv_pool(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Whole numbers to the last bit, others up to rounding, and what is no number as torch has it."""
    from safari.engine.stack import pool_kernels

    for name, case in POOL_CASES.items():
        found, expected = conv_pool_results(case, device, dtype, whole=True)
        for what, value in expected.items():
            assert torch.equal(found[what], value), f"{name}: {what} is wrong"
        found, expected = conv_pool_results(case, device, dtype, whole=False)
        for what, value in expected.items():
            error = _error(found[what], value)
            assert error < tolerance, f"{name}: {what} is off by {error:.2g}"
    x, weight = torch.ones(2, 3, 6, 6), -torch.ones(1, 16, 3, 3, 3)
    x[0, 0, 2, 3] = torch.nan
    expected = F.max_pool2d(F.relu(F.conv2d(x, weight[0], padding=1)), 2)
    ours = pool_kernels.packed(x.permute(0, 2, 3, 1).to(device), 4, dtype)
    w = pool_kernels.weights_for(weight.to(device), 4, dtype)
    found, _ = pool_kernels.conv_pool(ours, w, None, 16, 1)
    found = found.permute(0, 3, 1, 2).float().cpu()
    assert bool(found.isnan().any())
    assert torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))


def conv_relu_errors(case: Case, device: str, dtype: torch.dtype, bias: bool = True) -> dict[str, float]:
    """How far `relu(conv(x) + bias)` and its gradients are from torch in float64, relative to their size."""
    from safari.engine.stack.fused import ConvRelu

    draw = torch.Generator().manual_seed(9)
    k, side = case.clients, case.side
    x = torch.randn(k * case.n, case.inner, case.height, case.width, generator=draw)
    weight = torch.randn(k, case.outer, case.inner, side, side, generator=draw) / (side * case.inner**0.5)
    inputs = {"x": x, "weight": weight} | (
        {"bias": torch.randn(k, case.outer, generator=draw)} if bias else {}
    )
    # Rounded first, so that both sides begin with the same numbers.
    inputs = {name: value.to(dtype).float() for name, value in inputs.items()}
    theirs = {name: value.double().requires_grad_() for name, value in inputs.items()}
    own = zip(theirs["x"].chunk(k), theirs["weight"], theirs.get("bias", [None] * k), strict=True)
    before = torch.cat([F.conv2d(*each, case.stride, side // 2) for each in own])
    # At the kink of the ReLU rounding decides about the whole gradient: leave those numbers out.
    probe = torch.randn(before.shape, generator=draw) * (before.detach().abs() > 0.05)
    probe = probe.to(dtype).float()
    F.relu(before).backward(probe.double())

    ours = {name: value.to(device).requires_grad_() for name, value in inputs.items()}
    pixels = ours["x"].permute(0, 2, 3, 1)
    out = ConvRelu.apply(pixels, ours["weight"], ours.get("bias"), case.stride, dtype).permute(0, 3, 1, 2)
    out.backward(probe.to(device, dtype))
    expected = {"out": F.relu(before)} | {f"d{name}": value.grad for name, value in theirs.items()}
    found = {"out": out} | {f"d{name}": value.grad for name, value in ours.items()}
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in expected.items()}
    return {name: _error(found[name], expected[name]) for name in expected}


def check_conv_relu(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Every convolution that there is a kernel for, and one without a bias; what is no number stays none."""
    from safari.engine.stack.fused import ConvRelu

    cases = {name: (case, True) for name, case in (CASES | WIDE_CASES).items()}
    for name, (case, bias) in (cases | {"without bias": (Case(3, 16, 6, 6, 1), False)}).items():
        for what, error in conv_relu_errors(case, device, dtype, bias).items():
            assert error < tolerance, f"{name}: {what} is off by {error:.2g}"
    x, weight = torch.ones(1, 4, 4, 3, device=device), torch.ones(1, 16, 3, 3, 3, device=device)
    x[0, 0, 0, 0] = torch.nan
    found = ConvRelu.apply(x, weight, None, 1, dtype).isnan().any(-1)[0]
    assert found.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def check_nan(device: str, dtype: torch.dtype) -> None:
    """What is no number goes through a norm with a shortcut, forwards and back, as torch has it."""
    from safari.engine.stack.fused import ConvNorm

    draw = torch.Generator().manual_seed(10)
    x, weight = torch.randn(2, 4, 4, 16, generator=draw), torch.randn(1, 16, 16, 3, 3, generator=draw) / 12
    residual, probe = torch.randn(2, 2, 4, 4, 16, generator=draw).unbind()
    residual[1, 2, 3, 4] = torch.nan
    inputs = [x.to(device, dtype), weight.to(device), *torch.ones(2, 1, 16, device=device).unbind()]
    shortcut = residual.to(device, dtype).requires_grad_()
    out = ConvNorm.apply(
        *inputs, shortcut, *torch.ones(2, 1, 16, device=device).unbind(), 1, True, MOMENTUM, EPS
    )
    out.backward(probe.to(device, dtype))
    where = (1, 2, 3, 4)
    assert out.isnan().nonzero().tolist() == [list(where)]
    assert shortcut.grad is not None
    assert float(shortcut.grad[where]) == float(probe.to(dtype)[where])
    # Of weights that are none, nothing is a number.
    inputs[1] = inputs[1].masked_fill(inputs[1] == inputs[1].max(), torch.nan)
    mean, var = torch.ones(2, 1, 16, device=device).unbind()
    out = ConvNorm.apply(*inputs, None, mean, var, 1, True, MOMENTUM, EPS)
    lost = out.isnan().flatten(0, 2).all(0).cpu()
    assert int(lost.sum()) == 1
    assert mean[0].isnan().cpu().equal(lost)
    assert var[0].isnan().cpu().equal(lost)


class Plain(torch.nn.Module):
    """Convolutions without norms, one after the other, with one ReLU for all."""

    def __init__(self) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.layers = torch.nn.ModuleList(
            [conv(3, 16, 3, padding=1), conv(16, 32, 3, 2, 1, bias=False), conv(32, 16, 3, padding=1)]
        )
        self.relu, self.last = torch.nn.ReLU(), torch.nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.relu(layer(x))
        return self.last(x.mean((2, 3)))


def check_fused_net(device: str, name: str = "fedawe_cnn") -> tuple[float, float]:
    """How far a whole net through the fused steps, outputs and gradients, is from the same without them."""
    from safari import models
    from safari.engine.stack.forward import by_layers
    from safari.engine.stack.trial import distances
    from safari.models import Layout

    shape = (3, 32, 32) if device == "cuda" else (3, 9, 8)
    torch.manual_seed(0)
    module = (Plain() if name == "plain" else getattr(models, name)(shape, 10)).to(device)
    example = torch.randn(8 if device == "cuda" else 4, *shape, generator=torch.Generator().manual_seed(5))
    ways = (by_layers(module, True, fuse=fuse) for fuse in (True, False))
    return distances(*ways, module, Layout.of(module), example.to(device))


def check_crops(device: str) -> None:
    """Every shift, both ways round, to the last bit; samples more than once, and in another order."""
    from safari.data.augment import crop_and_flip, padding
    from safari.engine.stack.compile_policy import crops_run, kernels_run
    from safari.engine.stack.fused import crops

    assert kernels_run(torch.device(device))
    for shape in ((3, 8, 8), (1, 5, 9), (3, 24, 16)):
        draw = torch.Generator().manual_seed(7)
        data, pad = torch.randn(6, *shape, generator=draw), padding(shape)
        every = torch.cartesian_prod(torch.arange(2 * pad + 1), torch.arange(2 * pad + 1))
        shift, flip = every.repeat(2, 1), torch.arange(2 * len(every)) >= len(every)
        index = torch.randint(6, (len(shift),), generator=draw)
        expected = crop_and_flip(data[index], shift, flip, pad)
        found = crops(data.to(device), index.to(device), shift.to(device), flip.to(device), pad)
        assert torch.equal(found.cpu(), expected)
        assert crops_run(data.to(device))
    assert not crops_run(torch.zeros(6, 3, 8, 8, device=device).transpose(2, 3))
    assert not crops_run(torch.zeros(6, 4, device=device))


def sgd_error(device: str, size: int, rate: float | Tensor) -> float:
    """How far a masked step is from torch's; masked numbers must stay, whatever their gradient is."""
    from safari.engine.stack import fused

    draw = torch.Generator().manual_seed(6)
    start, gradient = torch.randn(2, size, generator=draw)
    kept = torch.rand(size, generator=draw) < 0.6
    kept[0], gradient[0] = False, torch.nan
    p = start.clone().to(device)
    size_of_step = rate.to(device) if isinstance(rate, Tensor) else rate
    fused.sgd_(p, gradient.to(device), kept.to(device), size_of_step)
    # In parts, of which some are large: the same.
    before, fused.LARGE = fused.LARGE, 500
    for sizes in ([size], [7, 500, 600, 3, 4, size - 1114], [600, 20, size - 620], [20, size - 20]):
        again = start.clone().to(device)
        fused.sgd_in_parts_(again, gradient.to(device).split(sizes), kept.to(device), size_of_step)
        assert torch.equal(again, p)
    fused.LARGE = before
    assert torch.equal(p.cpu()[~kept], start[~kept])
    return _error(p, start.double() - gradient.masked_fill(~kept, 0.0).double() * float(rate))


def scaled_sgd_error(device: str, rate: float | Tensor) -> float:
    """The same with a direction that is scaled, number by number, against `Scaled.of` in float64."""
    from safari.engine.stack import fused
    from safari.training import Scaled

    draw, clients, sizes = torch.Generator().manual_seed(7), 3, (5, 1500, 1, 2048)
    each = sum(sizes)
    start, gradient = torch.randn(2, clients, each, generator=draw)
    shift, scale = torch.randn(each, generator=draw), 0.1 + torch.rand(each, generator=draw)
    kept = torch.rand(clients, each, generator=draw) < 0.6
    kept[0, 0], gradient[0, 0], scale[7] = False, torch.nan, 1e-6
    wide = Scaled(0.2, shift.double(), scale.double(), 5.0)
    expected = start.double() - (wide.of(gradient.double()) * float(rate)).masked_fill(~kept, 0.0)
    assert bool((wide.of(gradient.double()).abs() == 5.0).any())

    def by_tensor(rows: Tensor) -> Tensor:
        return torch.cat([part.reshape(-1) for part in rows.split(sizes, dim=1)])

    p = by_tensor(start).to(device)
    parts = [part.reshape(-1).to(device) for part in gradient.split(sizes, dim=1)]
    size_of_step = rate.to(device) if isinstance(rate, Tensor) else rate
    there = Scaled(0.2, shift.to(device), scale.to(device), 5.0)
    fused.scaled_sgd_in_parts_(p, parts, by_tensor(kept).to(device), size_of_step, there, clients)
    assert torch.equal(p.cpu()[~by_tensor(kept)], by_tensor(start)[~by_tensor(kept)])
    # What is no number stays none where it is kept.
    lost = torch.zeros(2, device=device)
    nothing = Scaled(1.0, torch.zeros(1, device=device), torch.ones(1, device=device), 5.0)
    broken = [torch.full((2,), torch.nan, device=device)]
    fused.scaled_sgd_in_parts_(lost, broken, lost == 0, 0.5, nothing, 2)
    assert bool(lost.isnan().all())
    return _error(p, by_tensor(expected))


def conv_norm_errors(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """How far each result is from float64, relative to its size."""
    from safari.engine.stack.fused import ConvNorm

    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    k, total = case.clients, case.clients * case.n
    # Rounded first, so that both sides begin with the same numbers.
    x = normal(total, case.height, case.width, case.inner).to(dtype)
    weight = (
        (normal(k, case.outer, case.inner, case.side, case.side) / (case.side * case.inner**0.5))
        .to(dtype)
        .float()
    )
    gamma, beta = 1 + 0.3 * normal(k, case.outer), 0.5 * normal(k, case.outer)
    high, wide = (case.height - 1) // case.stride + 1, (case.width - 1) // case.stride + 1
    residual = normal(total, high, wide, case.outer).to(dtype) if case.residual else None
    statistics = normal(k, case.outer), 1 + normal(k, case.outer).abs()
    probe = normal(total, high, wide, case.outer).to(dtype)

    inputs = {"x": x, "weight": weight, "gamma": gamma, "beta": beta}
    inputs |= {"residual": residual} if residual is not None else {}
    theirs = {name: v.double().requires_grad_() for name, v in inputs.items()}
    outputs, means, variances = [], [], []
    for c in range(k):
        own = slice(c * case.n, (c + 1) * case.n)
        pictures = theirs["x"][own].permute(0, 3, 1, 2)
        y = F.conv2d(pictures, theirs["weight"][c], None, case.stride, case.side // 2)
        m, v = (s[c].double() for s in statistics)
        y = F.batch_norm(y, m, v, theirs["gamma"][c], theirs["beta"][c], True, MOMENTUM, EPS)
        y = y.permute(0, 2, 3, 1)
        y = y + theirs["residual"][own] if residual is not None else y
        outputs.append(y)
        means.append(m)
        variances.append(v)
    before = torch.cat(outputs)
    # At the kink of the ReLU rounding decides about the whole gradient: leave those numbers out.
    probe = probe * (before.detach().abs() > 0.05)
    oracle = F.relu(before) if case.relu else before
    oracle.backward(probe.double())
    expected = {"out": oracle, "mean": torch.stack(means), "var": torch.stack(variances)}
    expected |= {f"d{n}": v.grad for n, v in theirs.items()}

    ours = {name: v.detach().clone().to(device).requires_grad_() for name, v in inputs.items()}
    mean, var = (s.clone().to(device) for s in statistics)
    out = ConvNorm.apply(
        ours["x"], ours["weight"], ours["gamma"], ours["beta"], ours.get("residual"), mean, var,
        case.stride, case.relu, MOMENTUM, EPS,
    )  # fmt: skip
    out.backward(probe.to(device))
    found = {"out": out, "mean": mean, "var": var} | {f"d{n}": v.grad for n, v in ours.items()}
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in expected.items()}
    return {n: _error(found[n], expected[n]) for n in expected}


def tile_errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """How far every tile's results are from float64: most layers are computed with one of many tiles."""
    from safari.engine.stack import wide_kernels as wide

    draw, found = torch.Generator().manual_seed(3), {}
    clients, n, h, wd = 2, 2, 5, 4
    for side, stride, inner, outer in ((3, 1, 64, 256), (3, 2, 64, 256), (1, 2, 256, 128)):
        x = torch.randn(clients * n, inner, h, wd, generator=draw).to(dtype)
        weight = torch.randn(clients, outer, inner, side, side, generator=draw).to(dtype).float()
        ours, w = x.permute(0, 2, 3, 1).contiguous().to(device), weight.to(device)
        theirs = x.double().requires_grad_(), weight.double().requires_grad_()
        parts = zip(theirs[0].chunk(clients), theirs[1], strict=True)
        y = torch.cat([F.conv2d(part, own, None, stride, side // 2) for part, own in parts])
        dy = torch.randn(y.shape, generator=draw).to(dtype)
        dx, dw = torch.autograd.grad(y, theirs, dy.double())
        y, dx = (t.detach().permute(0, 2, 3, 1) for t in (y, dx))
        each = y.unflatten(0, (clients, n))
        sums = torch.stack([each.sum((1, 2, 3)), each.square().sum((1, 2, 3))], 1)
        grad, ready = dy.permute(0, 2, 3, 1).contiguous().to(device), wide.weights_for(w, inner, dtype)
        for tile in wide.CONV_TILES:
            if tile.columns <= outer:
                out, partial = wide.conv(ours, ready, stride, stats=True, tile=tile)
                found[f"out {side} {stride} {tile}"] = _error(out, y)
                found[f"sums {side} {stride} {tile}"] = _error(partial.sum(1), sums)
            if tile.columns <= inner:
                back = wide.conv_input_gradient(grad, ready, stride, h, wd, tile)
                found[f"dx {side} {stride} {tile}"] = _error(back, dx)
        for tile in wide.WEIGHT_TILES:
            if tile.rows <= outer and tile.columns <= inner:
                change = wide.conv_weight_gradient(ours, grad, inner, clients, stride, side, tile)
                found[f"dw {side} {stride} {tile}"] = _error(change, dw)
    return found


def shared_conv_errors(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """How far a convolution that all clients share, its gradients and theirs are from float64."""
    from safari.engine.stack.shared import Convolution, Plain, SharedConv
    from safari.engine.stack.shared_kernels import kernels_for

    plain = Plain((3, 3), (case.stride, case.stride), (1, 1), (1, 1), 1)
    kernels = kernels_for(plain, case.inner, case.outer)
    assert kernels is not None
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(case.clients * case.n, case.inner, case.height, case.width, generator=draw).to(dtype)
    one = torch.randn(1, case.outer, case.inner, 3, 3, generator=draw) / (3 * case.inner**0.5)
    weight = one.to(dtype).float().expand(case.clients, -1, -1, -1, -1)

    def passes(conv: Convolution, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        x, weight = x.requires_grad_(), weight.detach().requires_grad_()
        out = SharedConv.apply(x, weight, conv)
        # Not linear, so that the second gradient has all its parts.
        dx, dw = torch.autograd.grad(out.square().sum(), (x, weight), create_graph=True)
        flow = (dw * dw.detach()).sum() + (dx * dx.detach()).sum()
        ddx, ddw = torch.autograd.grad(flow, (x, weight))
        return {"out": out, "dx": dx, "dw": dw, "ddx": ddx, "ddw": ddw}

    expected = passes(plain, x.double(), weight.double())
    found = passes(kernels, x.to(device), weight.to(device))
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in expected.items()}
    return {n: _error(found[n], expected[n]) for n in expected}


def adam_errors(device: str, size: int = 3000, steps: int = 7) -> dict[str, float]:
    """How far parameters and moments are from torch.optim.Adam in float64 after several steps."""
    from safari.engine.stack.fused import adam_

    draw = torch.Generator().manual_seed(2)
    start, kept = torch.randn(size, generator=draw), torch.rand(size, generator=draw) < 0.6
    gradients = [torch.randn(size, generator=draw) * 10.0 ** -(i % 5) for i in range(steps)]
    gradients[0][0], kept[0] = torch.nan, False
    ours = [start.clone(), torch.zeros(size), torch.zeros(size), kept]
    p, first, second, mask = (t.to(device) for t in ours)
    reference = torch.nn.Parameter(start.double())
    optimizer = torch.optim.Adam([reference], lr=0.01)
    for step, g in enumerate(gradients, 1):
        adam_(p, g.to(device), first, second, mask, step, 0.01, 0.9, 0.999, 1e-8)
        reference.grad = g.masked_fill(~kept, 0.0).double()
        optimizer.step()
    assert torch.equal(p.cpu()[~kept], start[~kept])
    state = optimizer.state[reference]
    return {
        "the parameters": _error(p, reference),
        "the first moment": _error(first, state["exp_avg"]),
        "the second moment": _error(second, state["exp_avg_sq"]),
    }


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().cpu().double() - expected.detach()).norm() / expected.detach().norm())


def main() -> None:
    from safari.engine.stack import fusion

    for name, case in (CASES | WIDE_CASES).items():
        for what, error in conv_norm_errors(case, "cpu", torch.float32).items():
            assert error < 1e-5, f"{name}: {what} is off by {error:.2g}"
    for what, error in tile_errors("cpu", torch.float32).items():
        assert error < 1e-5, f"{what} is off by {error:.2g}"
    check_conv_pool("cpu", torch.float32, 1e-5)
    # The interpreter knows no products of bfloat16; these are rounded, too.
    check_conv_pool("cpu", torch.float16, 3e-3)
    check_conv_relu("cpu", torch.float32, 1e-5)
    check_nan("cpu", torch.float32)
    fusion.DTYPE = torch.float32
    assert max(check_fused_net("cpu")) < 1e-5
    assert max(check_fused_net("cpu", "cnn")) < 1e-5
    assert max(check_fused_net("cpu", "plain")) < 1e-5
    for size, rate in ((3000, 0.1), (3001, 0.1), (3000, torch.tensor(0.1))):
        assert sgd_error("cpu", size, rate) < 1e-6
    for rate in (0.1, torch.tensor(0.1)):
        assert scaled_sgd_error("cpu", rate) < 1e-6
    check_crops("cpu")
    for name, case in CASES.items():
        for what, error in shared_conv_errors(case, "cpu", torch.float32).items():
            assert error < 1e-5, f"{name}, shared: {what} is off by {error:.2g}"
    for what, error in adam_errors("cpu").items():
        assert error < 1e-6, f"adam_: {what} is off by {error:.2g}"
    print("all right")


if __name__ == "__main__":
    main()
