"""Recurrent layers and attention over many clients at once.

What a layer does with the inputs of all steps is one batched matrix product; a recurrent one then has one
product a step for all clients together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.engine.stack.ops import Tensors, Value

State = tuple[Tensor, ...]
# (what the inputs add to the gates, state, recurrent weights, their bias) -> the next state, output first
Cell = Callable[[Tensor, State, Tensor, Tensor | None], State]


def lstm(
    layer: nn.LSTM, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], p: Tensors
) -> tuple[Value, tuple[Value, Value]]:
    """An LSTM for each client, batch first."""
    out, (h, c) = _recurrent(layer, name, args, kwargs, p, _lstm_cell, states=2)
    return out, (h, c)


def gru(
    layer: nn.GRU, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], p: Tensors
) -> tuple[Value, Value]:
    """A GRU for each client, batch first."""
    out, (h,) = _recurrent(layer, name, args, kwargs, p, _gru_cell, states=1)
    return out, h


def attention(
    layer: nn.MultiheadAttention, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], p: Tensors
) -> tuple[Value, Value | None]:
    """Multi-head attention for each client, batch first: three projections, scores, a fourth projection."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("key_padding_mask") is not None or isinstance(given.get("attn_mask"), Value):
        raise NotImplementedError("attention with a mask for each sample")
    mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
    query, key, value = (given[n] for n in names[:3])
    weights = p[f"{name}in_proj_weight"].chunk(3, dim=1)
    biases = [None] * 3 if layer.in_proj_bias is None else p[f"{name}in_proj_bias"].chunk(3, dim=1)
    q, k, v = (
        _project(x, weight, bias).unflatten(-1, (layer.num_heads, -1)).transpose(-2, -3)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    found = None
    if mask is not None and mask.dtype == torch.bool:
        # Here True means: not to be looked at; for the function below the other way round.
        mask = ~mask
    if given.get("need_weights", True):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        shares = scores.softmax(-1)
        seen = shares @ v
        average = given.get("average_attn_weights", True)
        found = Value((shares.mean(-3) if average else shares).flatten(0, 1), query.clients)
    else:
        only_causal = causal and mask is not None
        seen = F.scaled_dot_product_attention(q, k, v, None if only_causal else mask, is_causal=only_causal)
    joined = Value(seen.transpose(-2, -3).flatten(-2).flatten(0, 1), query.clients)
    bias = None if layer.out_proj.bias is None else p[f"{name}out_proj.bias"]
    return Value(_project(joined, p[f"{name}out_proj.weight"], bias).flatten(0, 1), query.clients), found


# Layers that take or give several values: `(layer, name, args, kwargs, tensors) -> what the layer gives`.
CALLS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.LSTM: lstm,
    nn.GRU: gru,
    nn.MultiheadAttention: attention,
}


def refuses(layer: nn.Module) -> str | None:
    """Why a layer of these cannot be stacked, or None."""
    if not isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return None
    kind = type(layer).__name__
    if not layer.batch_first:
        return f"a {kind} without batch_first"
    if isinstance(layer, nn.MultiheadAttention):
        if not layer._qkv_same_embed_dim or layer.bias_k is not None or layer.add_zero_attn:
            return f"a {kind} with kdim, vdim, add_bias_kv or add_zero_attn"
        return f"a {kind} with dropout" if layer.dropout else None
    if layer.bidirectional or layer.proj_size:
        return f"a {kind} that is bidirectional or has proj_size"
    return f"a {kind} with dropout" if layer.dropout else None


def _project(x: Value, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[clients, n, length, out]`: a linear map for each client."""
    inputs = x.client_first()
    out: Tensor = _linear(inputs.flatten(1, 2), weight, bias).unflatten(1, inputs.shape[1:3])
    return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def _recurrent(
    layer: nn.RNNBase,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    p: Tensors,
    cell: Cell,
    states: int,
) -> tuple[Value, tuple[Value, ...]]:
    if kwargs or len(args) != 1 or args[0].tensor.ndim != 3:
        raise NotImplementedError(f"a {type(layer).__name__} with a state of its own, or without a batch")
    x: Value = args[0]
    hidden = x.client_first()
    last: list[State] = []
    for k in range(layer.num_layers):
        biases = [p[f"{name}bias_{part}_l{k}"] if layer.bias else None for part in ("ih", "hh")]
        gates = _linear(hidden.flatten(1, 2), p[f"{name}weight_ih_l{k}"], biases[0])
        # Unbound, not indexed: the gradient is then put together once, and not a whole one for each step.
        steps = gates.unflatten(1, hidden.shape[1:3]).unbind(2)
        state: State = (gates.new_zeros(*hidden.shape[:2], layer.hidden_size),) * states
        outputs = []
        for step in steps:
            state = cell(step, state, p[f"{name}weight_hh_l{k}"], biases[1])
            outputs.append(state[0])
        hidden = torch.stack(outputs, dim=2)
        last.append(state)
    ends = tuple(Value(torch.stack(part).flatten(1, 2), x.clients) for part in zip(*last, strict=True))
    return Value(hidden.flatten(0, 1), x.clients), ends


def _lstm_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    """c' = σ(f) c + σ(i) tanh(g),  h' = σ(o) tanh(c')"""
    h, c = state
    i, f, g, o = (gates + _linear(h, weight, bias)).chunk(4, dim=2)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    """n = tanh(x_n + σ(r) h_n),  h' = (1 - σ(z)) n + σ(z) h"""
    (h,) = state
    r_x, z_x, n_x = gates.chunk(3, dim=2)
    r_h, z_h, n_h = _linear(h, weight, bias).chunk(3, dim=2)
    n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return (torch.lerp(n, h, (z_x + z_h).sigmoid()),)
