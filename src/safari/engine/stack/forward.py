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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from safari.engine.stack.fusion import AnyFusion, find_fusions, find_in_place, pool_first
from safari.engine.stack.ops import LAYERS, Stacked, Tensors, Value, refuses
from safari.engine.stack.random_state import Forward, RandomState, seeded_by
from safari.engine.stack.sequences import CALLS
from safari.engine.stack.sequences import refuses as refuses_sequence
from safari.engine.stack.shared import Folded, find_folded, shared_layers
from safari.engine.stack.trial import CannotStack, compare, distances, is_random, runs_in_bfloat16
from safari.models import Layout, frozen_tensors

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
# Random, so that each client goes through it with a generator of its own.
_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
}  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """A module's forward pass over many clients, and how it is done: `train` in training, each client with
    weights of its own, `eval` in eval mode, where all must have the same."""

    train: Forward
    eval: Forward
    way: Way
    why: str
    random: bool


def stack(
    module: nn.Module, layout: Layout, example: Tensor, *, bfloat16: bool = False, fuse: bool = False
) -> Stack:
    """The fastest way that is right for this module, tried on `example` inputs (an even number).

    `bfloat16`: it must also run under autocast, without an error; numbers are compared in float32. `fuse`:
    compile kernels in bfloat16, where there are any for this device.
    """
    alone = {training: by_loop(module, training) for training in (True, False)}
    counters = layout.counters(module)
    try:
        return _first_right(alone, module, layout, example, bfloat16, fuse)
    finally:
        # Tracing runs what does not depend on the inputs: a count of batches, say.
        layout.put_back(module, counters)


def _first_right(
    alone: Mapping[bool, Forward],
    module: nn.Module,
    layout: Layout,
    example: Tensor,
    bfloat16: bool,
    fuse: bool,
) -> Stack:
    random, reasons = True, []
    try:
        _check_module(module)
        random = is_random(alone[True], module, layout, example)
        makers: dict[Way, Callable[[nn.Module, bool], Forward]] = {"layers": by_layers, "vmap": by_vmap}
        if random:
            del makers["vmap"]
    except Exception as error:  # whatever a user's module does
        reasons, makers = [_reason(error)], {}
    for way, make in makers.items():
        try:
            found = Stack(make(module, True), make(module, False), way, "; ".join(reasons), random)
            for training in (True, False):
                forward = found.train if training else found.eval
                compare(forward, alone[training], module, layout, example, same=not training)
            if bfloat16:
                runs_in_bfloat16(found.train, module, layout, example)
            return _fused(found, module, layout, example) if fuse and way == "layers" else found
        except Exception as error:  # under tracing it may do anything, too
            reasons.append(f"{way}: {_reason(error)}")
    if random and makers:
        reasons.append("vmap: the module draws random numbers")
    return Stack(alone[True], alone[False], "loop", "; ".join(reasons), random)


def _fused(plain: Stack, module: nn.Module, layout: Layout, example: Tensor) -> Stack:
    """The stack with fused kernels, if they run here and agree with `plain`; otherwise `plain`."""
    if example.device.type != "cuda" or find_spec("triton") is None:
        return plain
    try:
        fused = replace(plain, train=by_layers(module, True, fuse=True), eval=by_layers(module, False, True))
        with torch.autocast("cuda", torch.bfloat16):
            found = [distances(fused.train, plain.train, module, layout, example)]
        found.append(distances(fused.eval, plain.eval, module, layout, example, same=True))
        output, gradient = (max(column) for column in zip(*found, strict=True))
    except Exception as error:  # a compiler that is not there, a device that it does not know
        return replace(plain, why=f"no fused kernels: {_reason(error)}")
    # bfloat16 has 8 bits, and ReLUs near 0 add up to some 30% of a deep net's gradient; a gradient that has
    # nothing to do with the true one is off by 1 or more.
    good = output < 0.1 and gradient < 0.9
    return fused if good else replace(plain, why=f"fused kernels are off by {output:.2g}, {gradient:.2g}")


def by_layers(module: nn.Module, training: bool, fuse: bool = False) -> Forward:
    """The module's graph with stacked layers; CannotStack names the obstacle.

    In eval mode all clients must have the same weights (`shared`). `fuse`: in bfloat16 through the kernels,
    where they serve (CUDA); in training convolution, batch norm, shortcut and ReLU are then one step, and so
    are convolution and ReLU, with or without max pooling.
    """
    with _mode(module, training):
        graph = fx.Tracer().trace(module)
        modules = dict(module.named_modules())
        _check_graph(graph, module, modules)
        if not fuse:
            pool_first(graph, modules)
        frozen = frozen_tensors(module)
        # The kernels read each client's own weights.
        fusions: Mapping[fx.Node, AnyFusion | Folded] = (
            find_fusions(graph, modules) if fuse and training and not frozen else {}
        )
        if not training:
            fusions = find_folded(graph, modules, fuse)
        unstacked = _unstacked(modules)
        # Copies stay in this mode, whatever another thread does; a module may keep some layers in eval mode.
        modules = {name: copy(layer) for name, layer in modules.items()}
    inner = {node for fusion in fusions.values() for node in fusion.inner}
    nodes = [node for node in graph.nodes if node not in inner]
    tied = _tied(module)
    # A convolution that is folded into the norm behind it is read by name.
    alone = unstacked - {fusion.conv_name for fusion in fusions.values()}
    shared = {name: t for name, t in frozen.items() if name.rpartition(".")[0] not in alone}
    # Most take one value and nothing else; looking for more takes as long as a small layer.
    chained = {n for n in graph.nodes if len(n.args) == 1 and isinstance(n.args[0], fx.Node) and not n.kwargs}
    in_place = find_in_place(graph, modules)
    layers = LAYERS if training else shared_layers(fuse)

    def forward(tensors: Tensors, x: Tensor, random_state: RandomState) -> Tensor:
        clients = next(iter(tensors.values())).shape[0]
        # A layer of which a part is frozen reads that part for every client, without a copy.
        tensors = {**tensors, **{name: t.expand(clients, *t.shape) for name, t in shared.items()}}
        tensors |= {name: tensors[first] for name, first in tied.items() if first in tensors}
        values: dict[fx.Node, Any] = {}
        for node in nodes:
            if node in fusions:
                values[node] = fusions[node].run(values, tensors)
                continue
            if node in chained:
                args, kwargs = (values[node.args[0]],), {}
            else:
                args = fx.node.map_arg(node.args, values.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            if node.op == "placeholder":
                values[node] = Value(x, clients)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(module)
            elif node in in_place and args[0].tensor._base is None:
                values[node] = args[0].like(args[0].tensor.relu_())
            elif node.op == "output":
                return _unwrap(args[0])  # type: ignore[no-any-return]
            elif node.op == "call_module":
                stacked = {} if node.target in unstacked else layers
                values[node] = _call_module(
                    modules[node.target], node.target, args, kwargs, tensors, random_state, stacked
                )
            else:
                values[node] = _call(node, args, kwargs, clients, random_state)
        raise CannotStack("the graph has no output")

    return forward


def by_vmap(module: nn.Module, training: bool) -> Forward:
    """`torch.func.vmap` over the clients."""

    def one(tensors: Tensors, x: Tensor) -> Any:
        return functional_call(module, dict(tensors), (x,))

    def forward(tensors: Tensors, x: Tensor, random_state: RandomState) -> Tensor:
        module.train(training)
        clients = next(iter(tensors.values())).shape[0]
        with _differentiable_attention():
            out: Tensor = torch.vmap(one)({**tensors, **random_state.counters}, x.unflatten(0, (clients, -1)))
        return out.flatten(0, 1)

    return forward


def by_loop(module: nn.Module, training: bool) -> Forward:
    """One client after the other."""

    def forward(tensors: Tensors, x: Tensor, random_state: RandomState) -> Tensor:
        module.train(training)
        clients = next(iter(tensors.values())).shape[0]
        outputs = []
        for i, part in enumerate(x.chunk(clients)):
            with seeded_by(random_state.generators[i]):
                own = {name: tensor[i] for name, tensor in {**tensors, **random_state.counters}.items()}
                # A copy: were a module to write into its part, all the others would count as changed, too.
                outputs.append(functional_call(module, own, (part.clone(),)))
        return torch.cat(outputs)

    return forward


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """In eval mode attention has a fast path without gradients, and vmap hides that they are wanted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or eval mode; each part's own comes back."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _check_module(module: nn.Module) -> None:
    """Refuse what only the module's own parameters, in its own backward pass, can do."""
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise CannotStack(f"{name} is {parameter.dtype}")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CannotStack(f"{name} has a hook on its gradient")
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise CannotStack(f"{name or 'the module'} has a backward hook")


def _unstacked(modules: Mapping[str, nn.Module]) -> set[str]:
    """Layers that are frozen as a whole and treat samples alike: one pass with the one weight serves all."""
    norms = nn.modules.batchnorm._BatchNorm
    return {
        name
        for name, layer in modules.items()
        if any(True for _ in layer.parameters())
        and not any(p.requires_grad for p in layer.parameters())
        and not any(isinstance(part, norms) for part in layer.modules())
    }


def _tied(module: nn.Module) -> dict[str, str]:
    """Other names of parameters that have several, and the first name, which the layout knows."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


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
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise CannotStack(f"{node.target} has a hook")
        if type(layer) in LAYERS or type(layer) in CALLS:
            reason = refuses(layer) or refuses_sequence(layer)
            if reason:
                raise CannotStack(f"{node.target} is {reason}")
        elif any(p.requires_grad for p in layer.parameters()) or _statistics(layer):
            raise CannotStack(f"{node.target} is a {type(layer).__name__}, which has no stacked form")


def _statistics(layer: nn.Module) -> bool:
    """Does it hold state that a pass may change?"""
    return any(True for _ in layer.buffers()) and bool(
        layer.state_dict().keys() - dict(layer.named_parameters())
    )


def _call_module(
    layer: nn.Module,
    target: str,
    args: Any,
    kwargs: Any,
    tensors: Tensors,
    random_state: RandomState,
    layers: Mapping[type[nn.Module], Stacked],
) -> Any:
    x = args[0]
    if type(layer) in layers:
        return layers[type(layer)](layer, f"{target}.", x, tensors)
    if layers and type(layer) in CALLS:
        return CALLS[type(layer)](layer, f"{target}.", args, kwargs, tensors)
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return random_state.each(layer, x) if layer.training else x
    if isinstance(layer, _BY_CHANNEL_MODULES):
        return x.like(layer.forward(x.tensor))
    return _wrap(layer(*_unwrap(args), **_unwrap(kwargs)), x.clients)


def _call(node: fx.Node, args: Any, kwargs: Any, clients: int, random_state: RandomState) -> Any:
    if node.target in _DROPOUTS:
        return random_state.each(lambda part: node.target(part, *args[1:], **kwargs), args[0])  # type: ignore[operator]
    known = node.target in (_BY_CHANNEL_FUNCTIONS if node.op == "call_function" else _BY_CHANNEL_METHODS)
    by_channel = known and _channels_agree(args, kwargs)
    if by_channel:
        args = tuple(a.channel() if isinstance(a, Value) else a for a in args)
    args, kwargs = _unwrap(args), _unwrap(kwargs)
    if node.op == "call_method":
        out = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        out = node.target(*args, **kwargs)  # type: ignore[operator]
    return _wrap(out, clients, by_channel)


def _channels_agree(args: Any, kwargs: Any) -> bool:
    """Can pictures stay by channel? Not when channels are broadcast, or tensors of the module's own join."""
    values = [a for a in args if isinstance(a, Value)]
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.ndim]
    return (
        any(v.by_channel for v in values)
        and all(v.tensor.ndim == 4 for v in values)
        and len({v.channels for v in values}) == 1
        and not others
        and not any(isinstance(a, Value) for a in kwargs.values())
    )


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


def _reason(error: Exception) -> str:
    text = (str(error).strip() or "no message").split("\n", 1)[0][:120]
    return text if isinstance(error, CannotStack) else f"{type(error).__name__}: {text}"
