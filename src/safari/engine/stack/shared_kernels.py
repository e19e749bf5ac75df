"""The Triton kernels as a `Convolution` for clients with the same weights, in bfloat16 (CUDA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from safari.engine.stack import kernels as k
from safari.engine.stack.served import padded, serves
from safari.engine.stack.shared import Plain


@dataclass(frozen=True)
class Kernels:
    """A 3x3 convolution with padding 1. The kernels read each client's weights anyway: that they are the
    same makes no difference to them."""

    stride: int
    inner: int
    outer: int

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def forward(self, x: Tensor, weight: Tensor, same: bool) -> Tensor:
        """The convolution."""
        x = self._pixels(x)
        w, _ = k.weights_for(weight.contiguous(), x.shape[-1], x.dtype)
        y, _ = k.conv(x, w, self.outer, len(weight), self.stride, stats=False)
        return y.permute(0, 3, 1, 2)

    def input_gradient(self, dy: Tensor, weight: Tensor, shape: torch.Size, same: bool) -> Tensor:
        """Gradient with respect to x."""
        dy, cin = self._pixels(dy), padded(self.inner)
        _, turned = k.weights_for(weight.contiguous(), cin, dy.dtype)
        dx = k.conv_input_gradient(dy, turned, cin, len(weight), self.stride, shape[2], shape[3])
        return dx[..., : self.inner].permute(0, 3, 1, 2)

    def weight_gradient(self, x: Tensor, dy: Tensor, clients: int) -> Tensor:
        """Gradient with respect to each client's weights, in float32."""
        return k.conv_weight_gradient(self._pixels(x), self._pixels(dy), self.inner, clients, self.stride)

    def _pixels(self, x: Tensor) -> Tensor:
        """`[clients · n, h, w, channels]`, with as many channels as the kernels want at least."""
        x = x.permute(0, 2, 3, 1)
        missing = padded(x.shape[-1]) - x.shape[-1]
        return (F.pad(x, (0, missing)) if missing else x).contiguous()


def kernels_for(conv: Plain, inner: int, outer: int) -> Kernels | None:
    """The kernels for this convolution, or None where they do not serve."""
    plain = Plain((3, 3), conv.stride, (1, 1), (1, 1), 1)
    if conv != plain or conv.stride not in ((1, 1), (2, 2)) or not serves(inner, outer):
        return None
    return Kernels(conv.stride[0], inner, outer)
