"""Attention that can be differentiated twice, for scores that need a gradient of a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class TwiceDifferentiable(TorchFunctionMode):
    """Inside this context `scaled_dot_product_attention` is its plain formula: torch's fast kernels have no second
    derivative. It holds for this thread alone, unlike torch's own switch between kernels.

    >>> q = torch.randn(1, 3, 2, requires_grad=True)
    >>> with TwiceDifferentiable():
    ...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    >>> torch.autograd.grad(first.square().sum(), q)[0].shape
    torch.Size([1, 3, 2])
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        # The function behind nn.MultiheadAttention, which takes the kernels where nobody wants to see the weights.
        if func is F.multi_head_attention_forward and kwargs.get("need_weights") is False:
            return func(*args, **{**kwargs, "need_weights": True})[0], None
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v"""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value
