"""Fusion of a graph's nodes into single steps.

A step is convolution, batch norm, and perhaps a shortcut and a ReLU; convolution and ReLU; or convolution,
ReLU and max pooling.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from safari.engine.stack.ops import Tensors, Value
from safari.engine.stack.served import serves, serves_pool

_ADDITIONS = {operator.add, operator.iadd, torch.add}
_RELUS = {F.relu, torch.relu}
_POOLS = {F.max_pool2d, torch.max_pool2d}
# What the fused steps compute in; interpreted on a CPU they know float32 alone.
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Fusion:
    """One fused step: `inner` are the nodes that it makes superfluous, `source` and `residual` its inputs."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    conv_name: str
    norm_name: str
    source: fx.Node
    residual: fx.Node | None
    relu: bool
    inner: tuple[fx.Node, ...]

    def run(self, values: Mapping[fx.Node, Value], tensors: Tensors) -> Value:
        """The step for all clients."""
        from safari.engine.stack.fused import ConvNorm

        x = values[self.source]
        residual = None
        if self.residual is not None:
            residual = values[self.residual].batch().permute(0, 2, 3, 1).to(DTYPE)
        out = ConvNorm.apply(  # type: ignore[no-untyped-call]
            x.batch().permute(0, 2, 3, 1).to(DTYPE),
            tensors[f"{self.conv_name}.weight"],
            tensors[f"{self.norm_name}.weight"],
            tensors[f"{self.norm_name}.bias"],
            residual,
            tensors[f"{self.norm_name}.running_mean"],
            tensors[f"{self.norm_name}.running_var"],
            self.conv.stride[0],
            self.relu,
            self.norm.momentum,
            self.norm.eps,
        )
        return Value(out.permute(0, 3, 1, 2), x.clients)


@dataclass(frozen=True)
class ReluFusion:
    """A convolution and the ReLU behind it as one step; `pooled`: with 2x2 max pooling, too, before the ReLU or after
    it, which gives the same."""

    conv: nn.Conv2d
    conv_name: str
    source: fx.Node
    inner: tuple[fx.Node, ...]
    pooled: bool = False

    def run(self, values: Mapping[fx.Node, Value], tensors: Tensors) -> Value:
        """The step for all clients."""
        from safari.engine.stack.fused import ConvPool, ConvRelu

        x = values[self.source]
        pixels, weight = x.batch().permute(0, 2, 3, 1), tensors[f"{self.conv_name}.weight"]
        bias = None if self.conv.bias is None else tensors[f"{self.conv_name}.bias"]
        if self.pooled:
            out = ConvPool.apply(pixels, weight, bias, DTYPE)  # type: ignore[no-untyped-call]
        else:
            out = ConvRelu.apply(pixels, weight, bias, self.conv.stride[0], DTYPE)  # type: ignore[no-untyped-call]
        return Value(out.permute(0, 3, 1, 2), x.clients)


AnyFusion: TypeAlias = Fusion | ReluFusion


def find_fusions(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, AnyFusion]:
    """The fusions of a graph, each under the node that its result replaces."""
    found: dict[fx.Node, AnyFusion] = {}
    for node in graph.nodes:
        fusion = (
            _fusion_at(node, modules, found)
            or _pool_fusion_at(node, modules)
            or _relu_fusion_at(node, modules)
        )
        if fusion is not None:
            found[fusion[0]] = fusion[1]
    return found


def _relu_fusion_at(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[fx.Node, ReluFusion] | None:
    conv = modules.get(str(node.target)) if node.op == "call_module" else None
    if type(conv) is not nn.Conv2d or not _plain(conv):
        return None
    after, source = _only_user(node), node.args[0] if node.args else None
    if after is None or not _is_relu(after, modules) or not isinstance(source, fx.Node):
        return None
    if not serves(conv.in_channels, conv.out_channels, conv.kernel_size[0]):
        return None
    return after, ReluFusion(conv, str(node.target), source, (node,))


def _pool_fusion_at(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[fx.Node, ReluFusion] | None:
    conv = modules.get(str(node.target)) if node.op == "call_module" else None
    if type(conv) is not nn.Conv2d or not _plain(conv) or (conv.kernel_size, conv.stride) != ((3, 3), (1, 1)):
        return None
    after = _only_user(node)
    last = None if after is None else _only_user(after)
    if after is None or last is None or not serves_pool(conv.in_channels, conv.out_channels):
        return None
    either = (_is_relu(after, modules) and _is_halving(last, modules)) or (
        _is_halving(after, modules) and _is_relu(last, modules)
    )
    chained = after.args[:1] == (node,) and last.args[:1] == (after,)
    source = node.args[0] if node.args else None
    if not either or not chained or not isinstance(source, fx.Node):
        return None
    return last, ReluFusion(conv, str(node.target), source, (node, after), pooled=True)


def _is_halving(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Max pooling of 2x2 pixels without overlap, padding or anything else?"""
    layer = modules.get(str(node.target)) if node.op == "call_module" else None
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    plain: dict[str, Any] = {
        "stride": None,
        "padding": 0,
        "dilation": 1,
        "ceil_mode": False,
        "return_indices": False,
    }
    if type(layer) is nn.MaxPool2d:
        given = {name: getattr(layer, name) for name in names}
    elif node.op == "call_function" and node.target in _POOLS:
        given = plain | dict(zip(names, node.args[1:], strict=False)) | node.kwargs
    else:
        return False
    size, stride = _pair(given["kernel_size"]), _pair(given["stride"] or given["kernel_size"])
    alone = not given["ceil_mode"] and not given["return_indices"]
    spread = (_pair(given["padding"]), _pair(given["dilation"])) == ((0, 0), (1, 1))
    return size == stride == (2, 2) and spread and alone


def _pair(value: Any) -> tuple[Any, ...]:
    """Both sides of what torch takes as one number or as two."""
    if not isinstance(value, tuple | list):
        return (value, value)
    return tuple(value) * 2 if len(value) == 1 else tuple(value)


def _fusion_at(
    node: fx.Node, modules: Mapping[str, nn.Module], found: Mapping[fx.Node, AnyFusion]
) -> tuple[fx.Node, Fusion] | None:
    conv = modules.get(str(node.target)) if node.op == "call_module" else None
    if type(conv) is not nn.Conv2d or not _plain(conv) or conv.bias is not None:
        return None
    if not serves(conv.in_channels, conv.out_channels, conv.kernel_size[0]):
        return None
    after = _only_user(node)
    norm = modules.get(str(after.target)) if after is not None and after.op == "call_module" else None
    if after is None or type(norm) is not nn.BatchNorm2d or not norm.training:
        return None
    if not norm.affine or norm.running_mean is None:
        return None
    inner, last, residual, relu = [node], after, None, False
    following = _only_user(last)
    if following is not None and following.target in _ADDITIONS and not following.kwargs:
        other = [a for a in following.args if a is not last]
        then = _only_user(following)
        # `shortcut += x` changes the shortcut, which another layer may read.
        if following.target is operator.iadd and following.args[0] is not last:
            other = []
        # A shortcut with a convolution of its own may also end in this sum: it belongs to whichever comes first.
        free = then is not None and then not in found and _is_relu(then, modules)
        if len(other) == 1 and isinstance(other[0], fx.Node) and then is not None and free:
            inner, last, residual, relu = [*inner, last, following], then, other[0], True
    elif following is not None and _is_relu(following, modules):
        inner, last, relu = [*inner, last], following, True
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    return last, Fusion(conv, norm, str(node.target), str(after.target), source, residual, relu, tuple(inner))


def pool_first(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Swap a ReLU with the max pooling behind it, which gives the same numbers and gradients to the last bit:
    the largest of several, cut at 0, is the largest of them cut at 0. The ReLU then has less to do.
    """
    for pool in list(graph.nodes):
        layer = modules[str(pool.target)] if pool.op == "call_module" else None
        if type(layer) is not nn.MaxPool2d or layer.return_indices:
            continue
        relu = pool.args[0]
        # Nobody else may read what either of them reads: it may be done in place.
        if not _is_relu(relu, modules) or any(len(node.users) > 1 for node in (relu, relu.args[0])):
            continue
        pool.replace_input_with(relu, relu.args[0])
        with graph.inserting_after(pool):
            after = graph.call_function(F.relu, (pool,))
        pool.replace_all_uses_with(after, delete_user_cb=lambda user, after=after: user is not after)
        graph.erase_node(relu)


def find_in_place(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> set[fx.Node]:
    """The ReLUs that may write over their input: made by a layer that does not need it again, and read by
    nobody else."""
    return {node for node in graph.nodes if _is_relu(node, modules) and _is_free(node.args[0], modules)}


def _is_free(node: object, modules: Mapping[str, nn.Module]) -> bool:
    if not isinstance(node, fx.Node) or len(node.users) > 1:
        return False
    if node.op == "call_module":
        return type(modules[str(node.target)]) in (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d)
    return node.op == "call_function" and node.target is operator.add


def _plain(conv: nn.Conv2d) -> bool:
    return (
        (conv.kernel_size, conv.padding) in (((3, 3), (1, 1)), ((1, 1), (0, 0)))
        and conv.dilation == (1, 1)
        and conv.stride in ((1, 1), (2, 2))
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_relu(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), nn.ReLU)
    return node.target in _RELUS
