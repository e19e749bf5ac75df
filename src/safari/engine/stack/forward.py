"""One forward pass for many clients, each with weights of its own, for any module.

There are three ways, tried in this order; all have the same signature, so that the rest of the engine need
not know which one it got:

- *layers*: the module's graph (torch.fx) with every layer replaced by its stacked form (`ops`);
- *vmap*: `torch.func` over the clients, for modules with parameters in places of their own;
- *loop*: one client after the other, for what neither can do.

A way is taken only after its outputs agreed with the module's own on a trial batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from safari.engine.stack.fusion import find_fusions
from safari.engine.stack.ops import LAYERS, Tensors, Value, refuses
from safari.models import Layout

Way = Literal["layers", "vmap", "loop"]

_BY_CHANNEL_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Identity,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_BY_CHANNEL_FUNCTIONS = {
    F.relu, torch.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, torch.sigmoid, torch.tanh, F.hardtanh,
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
    operator.add, operator.iadd, torch.add, operator.sub, operator.mul, torch.mul,
}  # fmt: skip
_BY_CHANNEL_METHODS = {"relu", "relu_", "sigmoid", "tanh", "add", "add_", "mul"}


class CannotStack(Exception):  # noqa: N818 - a reason to try the next way, not an error
    """Why the layers of a module cannot be stacked."""


class Luck:
    """What clients' modules hold besides their vector, for each client its own: a generator for what is
    random (dropout), and integer buffers that count (`counters`, by name, as a new module has them)."""

    def __init__(
        self, seeds: Sequence[int], device: torch.device, counters: Mapping[str, Tensor] | None = None
    ):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.counters = {
            name: torch.stack([count] * len(seeds)).to(device) for name, count in (counters or {}).items()
        }

    def dropout(self, x: Value, p: float) -> Value:
        """Dropout with each client's own draws."""
        inputs = x.client_first()
        if p >= 1:
            return x.like(x.tensor * 0)
        noise = torch.stack(
            [
                torch.empty_like(part).bernoulli_(1 - p, generator=g)
                for part, g in zip(inputs.detach(), self.generators, strict=True)
            ]
        )
        return Value((inputs * noise.div_(1 - p)).flatten(0, 1), x.clients)


Forward = Callable[[Tensors, Tensor, Luck], Tensor]
"""(tensors by name `[clients, *shape]`, inputs `[clients · n, ...]`, luck) -> outputs, likewise."""


@dataclass(frozen=True)
class Stack:
    """A module's forward pass over many clients, in training and in eval mode, and how it is done."""

    train: Forward
    eval: Forward
    way: Way
    why: str
    random: bool


def stack(module: nn.Module, layout: Layout, example: Tensor, *, bfloat16: bool = False) -> Stack:
    """The fastest way that is right for this module, tried on `example` inputs (an even number)."""
    reasons = []
    random = _is_random(module, layout, example)
    makers: dict[Way, Callable[[nn.Module, bool], Forward]] = {"layers": by_layers, "vmap": by_vmap}
    for way, make in makers.items():
        if way == "vmap" and random:
            reasons.append("vmap: the module draws random numbers")
            continue
        try:
            found = Stack(make(module, True), make(module, False), way, "; ".join(reasons), random)
            _compare(found, module, layout, example)
            return _fused(found, module, layout, example) if bfloat16 and way == "layers" else found
        except CannotStack as error:
            reasons.append(f"{way}: {error}")
        except Exception as error:  # whatever a user's module does under tracing
            reasons.append(f"{way}: {type(error).__name__}: {_first_line(error)}")
    return Stack(by_loop(module, True), by_loop(module, False), "loop", "; ".join(reasons), random)


def _fused(plain: Stack, module: nn.Module, layout: Layout, example: Tensor) -> Stack:
    """The same with fused kernels, where there are any for this device and they give the same."""
    if example.device.type != "cuda" or find_spec("triton") is None:
        return plain
    fused = replace(plain, train=by_layers(module, True, fuse=True))
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        outs = [
            way.train(_two_clients(module, layout), example, Luck([0, 1], example.device)).float()
            for way in (fused, plain)
        ]
    error = float((outs[0] - outs[1]).norm() / outs[1].norm())
    # bfloat16 has 8 bits; a wrong kernel would be off by about 1.
    return fused if error < 0.1 else replace(plain, why=f"fused kernels are off by {error:.2g}")


def by_layers(module: nn.Module, training: bool, fuse: bool = False) -> Forward:
    """The module's graph with stacked layers; CannotStack says what stands in the way.

    `fuse`: convolution, batch norm, shortcut and ReLU become one step where the kernels serve (CUDA).
    """
    was = module.training
    module.train(training)
    try:
        graph = fx.Tracer().trace(module)
    finally:
        module.train(was)
    modules = dict(module.named_modules())
    _check_graph(graph, module, modules)
    fusions = find_fusions(graph, modules) if fuse and training else {}
    inner = {node for fusion in fusions.values() for node in fusion.inner}

    def forward(tensors: Tensors, x: Tensor, luck: Luck) -> Tensor:
        clients = next(iter(tensors.values())).shape[0]
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node in inner:
                continue
            if node in fusions:
                values[node] = fusions[node].run(values, tensors)
                continue
            args = fx.node.map_arg(node.args, values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            if node.op == "placeholder":
                values[node] = Value(x, clients)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(module)
            elif node.op == "output":
                return _unwrap(args[0])  # type: ignore[no-any-return]
            elif node.op == "call_module":
                values[node] = _call_module(
                    modules[node.target], node.target, args, kwargs, tensors, luck, training
                )
            else:
                values[node] = _call(node, args, kwargs, clients, luck)
        raise CannotStack("the graph has no output")

    return forward


def by_vmap(module: nn.Module, training: bool) -> Forward:
    """`torch.func.vmap` over the clients."""

    def one(tensors: Tensors, x: Tensor) -> Any:
        return functional_call(module, dict(tensors), (x,))

    def forward(tensors: Tensors, x: Tensor, luck: Luck) -> Tensor:
        module.train(training)
        clients = next(iter(tensors.values())).shape[0]
        out: Tensor = torch.vmap(one)({**tensors, **luck.counters}, x.unflatten(0, (clients, -1)))
        return out.flatten(0, 1)

    return forward


def by_loop(module: nn.Module, training: bool) -> Forward:
    """One client after the other."""

    def forward(tensors: Tensors, x: Tensor, luck: Luck) -> Tensor:
        module.train(training)
        clients = next(iter(tensors.values())).shape[0]
        outputs = []
        for i, part in enumerate(x.chunk(clients)):
            with _seeded_by(luck.generators[i]):
                own = {name: tensor[i] for name, tensor in {**tensors, **luck.counters}.items()}
                outputs.append(functional_call(module, own, (part,)))
        return torch.cat(outputs)

    return forward


class _seeded_by:  # noqa: N801 - reads as a verb at its one use
    """The global generator runs on a client's own state, and gives it back."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._cuda = generator.device.type == "cuda"

    def __enter__(self) -> None:
        self._before = torch.cuda.get_rng_state() if self._cuda else torch.get_rng_state()
        self._set(self._generator.get_state())

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(torch.cuda.get_rng_state() if self._cuda else torch.get_rng_state())
        self._set(self._before)

    def _set(self, state: Tensor) -> None:
        if self._cuda:
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def _check_graph(graph: fx.Graph, module: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)} | set(module.state_dict())
    if len([n for n in graph.nodes if n.op == "placeholder"]) != 1:
        raise CannotStack("forward takes more than one argument")
    for node in graph.nodes:
        if node.op == "get_attr" and node.target in held:
            raise CannotStack(f"forward uses the parameter {node.target} itself")
        if node.op != "call_module":
            continue
        layer = modules[node.target]
        if type(layer) in LAYERS:
            reason = refuses(layer)
            if reason:
                raise CannotStack(f"{node.target} is {reason}")
        elif any(True for _ in layer.parameters()) or layer.state_dict():
            raise CannotStack(f"{node.target} is a {type(layer).__name__}, which has no stacked form")


def _call_module(
    layer: nn.Module, target: str, args: Any, kwargs: Any, tensors: Tensors, luck: Luck, training: bool
) -> Any:
    x = args[0]
    if type(layer) in LAYERS:
        # The graph was traced in this mode; layers that are both look at their own flag.
        layer.training = training
        return LAYERS[type(layer)](layer, f"{target}.", x, tensors)
    if isinstance(layer, nn.Dropout):
        return luck.dropout(x, layer.p) if training else x
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        raise CannotStack(f"{target} is a {type(layer).__name__}, which has no stacked form")
    if isinstance(layer, _BY_CHANNEL_MODULES):
        return x.like(layer(x.tensor))
    return _wrap(layer(*_unwrap(args), **_unwrap(kwargs)), x.clients)


def _call(node: fx.Node, args: Any, kwargs: Any, clients: int, luck: Luck) -> Any:
    if node.target is F.dropout:
        bound = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
        drop = bound.get("training", True)
        return luck.dropout(args[0], bound.get("p", 0.5)) if drop else args[0]
    known = node.target in (_BY_CHANNEL_FUNCTIONS if node.op == "call_function" else _BY_CHANNEL_METHODS)
    values = [a for a in args if isinstance(a, Value)]
    by_channel = known and any(v.by_channel for v in values) and all(v.tensor.ndim == 4 for v in values)
    if by_channel:
        args = tuple(a.channel() if isinstance(a, Value) else a for a in args)
    args, kwargs = _unwrap(args), _unwrap(kwargs)
    if node.op == "call_method":
        out = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        out = node.target(*args, **kwargs)  # type: ignore[operator]
    return _wrap(out, clients, by_channel)


def _wrap(out: Any, clients: int, by_channel: bool = False) -> Any:
    if isinstance(out, Tensor):
        return Value(out, clients, by_channel)
    if isinstance(out, tuple | list):
        return type(out)(_wrap(item, clients, by_channel) for item in out)
    return out


def _unwrap(thing: Any) -> Any:
    if isinstance(thing, Value):
        return thing.batch()
    if isinstance(thing, tuple | list):
        return type(thing)(_unwrap(item) for item in thing)
    if isinstance(thing, dict):
        return {key: _unwrap(item) for key, item in thing.items()}
    return thing


def _compare(found: Stack, module: nn.Module, layout: Layout, example: Tensor) -> None:
    """Two clients with different weights and samples, against the loop: outputs and buffers in both modes."""
    for training in (True, False):
        ours: dict[str, Tensor] = {}
        theirs: dict[str, Tensor] = {}
        for name, way in (
            ("ours", found.train if training else found.eval),
            ("theirs", by_loop(module, training)),
        ):
            tensors = _two_clients(module, layout)
            with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
                out = way(tensors, example, Luck([0, 1], example.device))
            (ours if name == "ours" else theirs).update({"its output": out, **tensors})
        for name, expected in theirs.items():
            if not torch.allclose(ours[name], expected, rtol=1e-3, atol=1e-4):
                raise CannotStack(f"{name} differs from the module's own")


def _two_clients(module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    # Buffers such as a running variance must stay positive, so the other client's numbers are scaled.
    tensors = layout.split(layout.read(module))
    return {name: torch.stack([tensor, tensor * 1.25]) for name, tensor in tensors.items()}


def _is_random(module: nn.Module, layout: Layout, example: Tensor) -> bool:
    forward = by_loop(module, True)
    vector = layout.read(module)
    outputs = []
    for seed in (1, 2):
        tensors = {name: t.clone().unsqueeze(0) for name, t in layout.split(vector).items()}
        with torch.no_grad():
            outputs.append(forward(tensors, example, Luck([seed], example.device)))
    return not torch.equal(*outputs)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").split("\n", 1)[0][:120]
