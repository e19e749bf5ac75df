"""Layers over many clients at once. A value holds all clients' activations in one of two layouts.

`by batch`: `[clients · n, ...]`, client after client; everything that treats samples alike works on it as
it stands. `by channel`: `[n, clients · channels, h, w]`; there a convolution is one grouped convolution,
and batch norm, pooling and whatever works element by element need no change either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Value:
    """Activations of all clients."""

    tensor: Tensor
    clients: int
    by_channel: bool = False

    def batch(self) -> Tensor:
        """`[clients · n, ...]`."""
        if not self.by_channel:
            return self.tensor
        if self.tensor.ndim != 4:
            return _split(self.tensor, 1, self.clients).transpose(0, 1).flatten(0, 1)
        # Through pixels, so that the gradient comes back by pixel after a single copy. Otherwise pooling goes
        # back through it in an order that costs two copies of the whole input.
        pixels = _split(self.tensor.permute(0, 2, 3, 1), 3, self.clients)
        return pixels.permute(3, 0, 4, 1, 2).flatten(0, 1)

    def channel(self) -> Tensor:
        """`[n, clients · channels, ...]`."""
        if self.by_channel:
            return self.tensor
        x = _split(self.tensor, 0, self.clients).transpose(0, 1).flatten(1, 2)
        return by_pixel(x) if x.ndim == 4 else x

    @property
    def channels(self) -> int:
        """Number of channels of a client."""
        return self.tensor.shape[1] // (self.clients if self.by_channel else 1)

    def like(self, tensor: Tensor) -> Value:
        """Another tensor in the same layout."""
        return Value(tensor, self.clients, self.by_channel)

    def client_first(self) -> Tensor:
        """`[clients, n, ...]`."""
        return _split(self.batch(), 0, self.clients)


def by_pixel(x: Tensor) -> Tensor:
    """Pictures by pixel. With one channel both orders are the same, and torch takes the other one, in which
    pooling is slow, unless the strides say it."""
    _, channels, height, width = x.shape
    if channels > 1:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    return x.view(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])


def linear(layer: nn.Linear, name: str, x: Value, p: Tensors) -> Value:
    """A linear layer for each client: one batched matrix product."""
    inputs = x.client_first()
    flat = inputs.flatten(1, -2) if inputs.ndim > 2 else inputs.unsqueeze(1)
    weight, turned = p[f"{name}weight"], flat.transpose(1, 2)
    # The weight first: so its gradient, which is larger than the outputs, comes in its own order.
    out = (
        torch.bmm(weight, turned)
        if layer.bias is None
        else torch.baddbmm(p[f"{name}bias"].unsqueeze(2), weight, turned)
    ).transpose(1, 2)
    if inputs.ndim != 3:
        out = out.unflatten(1, inputs.shape[1:-1]) if inputs.ndim > 3 else out.squeeze(1)
    return Value(out.flatten(0, 1), x.clients)


def conv2d(layer: nn.Conv2d, name: str, x: Value, p: Tensors) -> Value:
    """A convolution for each client: one convolution with clients as groups."""
    inputs, padding = x.channel(), layer.padding
    if layer.padding_mode != "zeros":
        inputs = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = (0, 0)
    out = F.conv2d(
        inputs,
        p[f"{name}weight"].flatten(0, 1),
        None if layer.bias is None else p[f"{name}bias"].flatten(),
        layer.stride,
        padding,
        layer.dilation,
        layer.groups * x.clients,
    )
    return Value(out, x.clients, by_channel=True)


def conv1d(layer: nn.Conv1d, name: str, x: Value, p: Tensors) -> Value:
    """A one-dimensional convolution for each client: one convolution with clients as groups."""
    out = F.conv1d(
        x.channel(),
        p[f"{name}weight"].flatten(0, 1),
        None if layer.bias is None else p[f"{name}bias"].flatten(),
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups * x.clients,
    )
    return Value(out, x.clients, by_channel=True)


def batch_norm(layer: nn.modules.batchnorm._BatchNorm, name: str, x: Value, p: Tensors) -> Value:
    """Batch norm with each client's own statistics, parameters and buffers."""
    tracked = layer.running_mean is not None
    out = F.batch_norm(
        x.channel(),
        p[f"{name}running_mean"].flatten() if tracked else None,
        p[f"{name}running_var"].flatten() if tracked else None,
        p[f"{name}weight"].flatten() if layer.affine else None,
        p[f"{name}bias"].flatten() if layer.affine else None,
        layer.training or not tracked,
        layer.momentum if layer.momentum is not None else 0.0,
        layer.eps,
    )
    return Value(out, x.clients, by_channel=True)


def layer_norm(layer: nn.LayerNorm, name: str, x: Value, p: Tensors) -> Value:
    """Layer norm looks at one sample at a time: only its parameters differ between clients."""
    out = F.layer_norm(x.client_first(), layer.normalized_shape, None, None, layer.eps)
    dims = out.ndim - 1 - len(layer.normalized_shape)
    if layer.elementwise_affine:
        out = out * p[f"{name}weight"].unflatten(0, (x.clients, *[1] * dims))
        if layer.bias is not None:
            out = out + p[f"{name}bias"].unflatten(0, (x.clients, *[1] * dims))
    return Value(out.flatten(0, 1), x.clients)


def group_norm(layer: nn.GroupNorm, name: str, x: Value, p: Tensors) -> Value:
    """Group norm likewise."""
    out = F.group_norm(x.batch(), layer.num_groups, None, None, layer.eps)
    if layer.affine:
        out = out.unflatten(0, (x.clients, -1))
        shape = (x.clients, 1, layer.num_channels, *[1] * (out.ndim - 3))
        out = (out * p[f"{name}weight"].view(shape) + p[f"{name}bias"].view(shape)).flatten(0, 1)
    return Value(out, x.clients)


def embedding(layer: nn.Embedding, name: str, x: Value, p: Tensors) -> Value:
    """One table for all: client i's rows begin at i · rows."""
    tokens = x.client_first()
    shift = torch.arange(x.clients, device=tokens.device).view(-1, *[1] * (tokens.ndim - 1))
    out = F.embedding(tokens + shift * layer.num_embeddings, p[f"{name}weight"].flatten(0, 1))
    if layer.padding_idx is not None:  # its row is read and never trained
        out = torch.where((tokens == layer.padding_idx).unsqueeze(-1), out.detach(), out)
    return Value(out.flatten(0, 1), x.clients)


Stacked = Callable[..., Value]

# Layers with parameters, by exact type: a subclass may do anything in its forward.
LAYERS: dict[type[nn.Module], Stacked] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.Conv1d: conv1d,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.Embedding: embedding,
}


def refuses(layer: nn.Module) -> str | None:
    """Why a layer of a known type cannot be stacked, or None."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
        return "a batch norm with momentum=None, which counts its batches"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return "an embedding with max_norm or scale_grad_by_freq"
    if isinstance(layer, nn.Conv1d) and layer.padding_mode != "zeros":
        return f"a one-dimensional convolution with padding_mode={layer.padding_mode!r}"
    return None
