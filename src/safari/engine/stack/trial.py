"""Is a way of stacking right for a module? Two clients on a few samples, against the module itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from safari.engine.stack.random_state import Forward, RandomState
from safari.models import Layout, frozen_tensors

# Rounding stays far below these, and a wrong way is off by much more.
_OUTPUT_TOLERANCE = 1e-3
# Gradients jump where the input of a ReLU is 0 up to rounding.
_GRADIENT_TOLERANCE = 1e-2
# No such jump is larger than this.
_JUMP = 0.5
# Rounding in float64 is too small to be seen here.
_EXACT = 1e-6


class CannotStack(Exception):  # noqa: N818 - a reason to try the next way, not an error
    """A module cannot be stacked in one way, with the reason."""


def is_random(alone: Forward, module: nn.Module, layout: Layout, example: Tensor) -> bool:
    """Does a pass in training draw random numbers?"""
    random_state = RandomState([0], example.device, layout.counters(module))
    before, host = random_state.generators[0].get_state(), torch.get_rng_state()
    with torch.no_grad(), torch.random.fork_rng([]):
        alone(some_clients(module, layout, 1), example.clone(), random_state)
        return not torch.equal(random_state.generators[0].get_state(), before) or _moved([host])


def compare(
    stacked: Forward, alone: Forward, module: nn.Module, layout: Layout, example: Tensor, same: bool = False
) -> None:
    """CannotStack unless outputs, gradients and buffers of two clients are those of the module itself.

    `same`: both have the same weights, and only the prunable ones' gradients count.

    Where gradients alone differ, and not by much, float64 has the last word: of many ReLUs one may have an
    input so near to 0 that rounding decides, and then a layer's gradient is another one.
    """
    theirs, ours = (_pass(forward, module, layout, example, same) for forward in (alone, stacked))
    _check_outputs(ours[0], theirs[0], _OUTPUT_TOLERANCE)
    try:
        _check_gradients(ours[1], theirs[1], _GRADIENT_TOLERANCE)
    except CannotStack as problem:
        _check_gradients(ours[1], theirs[1], _JUMP)
        try:
            wide = torch.float64
            theirs, ours = (_pass(f, module, layout, example, same, wide) for f in (alone, stacked))
            _check_outputs(ours[0], theirs[0], _EXACT)
            _check_gradients(ours[1], theirs[1], _EXACT)
        except Exception:  # or the module is for float32 alone
            raise problem from None


def runs_in_bfloat16(forward: Forward, module: nn.Module, layout: Layout, example: Tensor) -> None:
    """Raises what a pass and its gradients raise under autocast, if anything: torch cannot do all it can in
    float32, such as the gradients of a batch norm under vmap on a GPU."""
    with torch.autocast(example.device.type, torch.bfloat16, cache_enabled=False):
        _pass(forward, module, layout, example, same=False)


def _check_outputs(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> None:
    for name, expected in theirs.items():
        _check(name, ours[name], expected, tolerance * float(expected.norm()))


def _check_gradients(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> None:
    # A gradient that is 0 but for rounding (a bias before batch norm) is judged by the size of the others.
    largest = max((float(g.norm()) for g in theirs.values()), default=0.0)
    for name, expected in theirs.items():
        near = tolerance * max(float(expected.norm()), 0.1 * largest)
        _check(f"the gradient of {name}", ours[name], expected, near)


def distances(
    one: Forward, other: Forward, module: nn.Module, layout: Layout, example: Tensor, same: bool = False
) -> tuple[float, float]:
    """Distances of two ways of stacking, relative to `other`: of outputs, and of all gradients together."""
    passes = (_pass(forward, module, layout, example, same) for forward in (one, other))
    pairs = zip(*passes, strict=True)
    output, gradient = (
        [torch.cat([tensor.flatten().float() for tensor in found.values()]) for found in pair]
        for pair in pairs
    )
    return _distance(*output), _distance(*gradient)


def picture_format(module: nn.Module, example: Tensor) -> torch.memory_format:
    """Memory format of images in tests of a model: channels last on a GPU, where the module can read it."""
    if not example.is_cuda or example.ndim != 4:
        return torch.preserve_format
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([example.device]):
            expected = module(example.clone())
            found = module(example.clone(memory_format=torch.channels_last))
        # Sums are made in another order, and in TF32 where torch uses it.
        right = bool(torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())))
    except Exception:  # `view` refuses what lies otherwise, and a module may do anything
        right = False
    finally:
        module.train(was_training)
    return torch.channels_last if right else torch.preserve_format


def some_clients(module: nn.Module, layout: Layout, clients: int) -> dict[str, Tensor]:
    """The module's tensors for this many clients, each a little different.

    No number is 0 that would hide a mistake (a last layer often begins as 0), and none changes its sign (a
    variance must stay positive).
    """
    draw = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in layout.split(layout.read(module)).items():
        noise = torch.rand((clients, *tensor.shape), generator=draw).to(tensor.device)
        found[name] = tensor * (1 + 0.25 * noise) + (tensor == 0) * 0.05 * noise
    return found


def _pass(
    forward: Forward,
    module: nn.Module,
    layout: Layout,
    example: Tensor,
    same: bool,
    dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and buffers of two clients after a pass, and the gradients of their parameters.

    `dtype`: what all is cast to, but inputs that are whole numbers, which a module may look up.
    """
    tensors, counters = some_clients(module, layout, 1 if same else 2), layout.counters(module)
    used = counters
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        used = {name: c.to(dtype) if c.is_floating_point() else c for name, c in counters.items()}
        example = example.to(dtype) if example.is_floating_point() else example
    if same:
        tensors = {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items()}
    names = [e.name for e in layout.entries if e.kind == "weight" or (e.kind == "parameter" and not same)]
    wanted = [tensors[name].requires_grad_() for name in names]
    cuda = [example.device] if example.is_cuda else []
    with (
        _frozen_as(module, dtype),
        torch.enable_grad(),
        torch.random.fork_rng(cuda),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]
        out = forward(tensors, example.clone(), RandomState([0, 1], example.device, used))
        if _moved(states):
            raise CannotStack("it draws random numbers outside of dropout layers")
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)
        found = _gradients((out * probe).sum(), wanted)
    if any(not torch.equal(value, counters[name]) for name, value in layout.counters(module).items()):
        raise CannotStack("it changes a buffer that is not part of its state")
    gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
    kept = {e.name for e in layout.entries if e.kind == "buffer"}
    buffers = {name: tensor for name, tensor in tensors.items() if name in kept}
    return {"its output": out.detach(), **buffers}, dict(zip(names, gradients, strict=True))


@contextmanager
def _frozen_as(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the frozen tensors, which stay in the module, and restore them at the end of the context."""
    before = [] if dtype is None else [(t, t.data) for t in frozen_tensors(module).values()]
    try:
        for tensor, data in before:
            tensor.data = data.to(dtype) if data.is_floating_point() else data
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _gradients(value: Tensor, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not wanted or not value.requires_grad:
        return (None,) * len(wanted)
    return torch.autograd.grad(value, wanted, allow_unused=True)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _moved(states: list[Tensor]) -> bool:
    """Have the global generators, of the host and perhaps of a device, other states than these?"""
    now = [torch.get_rng_state(), *(torch.cuda.get_rng_state() for _ in states[1:])]
    return any(not torch.equal(a, b) for a, b in zip(states, now, strict=True))


def _check(name: str, found: Tensor, expected: Tensor, near: float) -> None:
    if found.shape != expected.shape:
        raise CannotStack(f"{name} has another shape than the module's own")
    if not float((found - expected).norm()) <= near:  # NaN fails this too
        raise CannotStack(f"{name} differs from the module's own")
