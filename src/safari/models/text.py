"""Models that read tokens: recurrent ones and a small transformer.

Each predicts the next token at every position (`labels="tokens"`, outputs `[n, length, classes]`), or a class
for each sample from what it knows at the last token that is no padding (otherwise, outputs `[n, classes]`).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.errors import ConfigError
from safari.models.checks import MOST_LAYERS, need_positive, need_tokens

PADDING = 0


def last_token(hidden: Tensor, x: Tensor) -> Tensor:
    """The rows of `[n, length, width]` at each sample's last token; padding comes after all others.

    >>> hidden = torch.arange(6.0).view(2, 3, 1)
    >>> last_token(hidden, torch.tensor([[5, 4, 0], [5, 4, 3]])).flatten()
    tensor([1., 5.])
    """
    place = ((x != PADDING).sum(1) - 1).clamp(min=0)
    return hidden.gather(1, place.view(-1, 1, 1).expand(-1, 1, hidden.size(2))).squeeze(1)


class Recurrent(nn.Module):
    """Embedding, recurrent layers, a linear head."""

    def __init__(
        self, kind: type[nn.LSTM | nn.GRU], tokens: int, classes: int, embed: int, hidden: int, layers: int,
        every: bool,
    ):  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(tokens, embed)
        self.rnn = kind(embed, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of sequences."""
        hidden = self.rnn(self.embed(x))[0]
        return self.head(hidden if self.every else last_token(hidden, x))  # type: ignore[no-any-return]


def gru(
    shape: tuple[int, ...],
    classes: int,
    tokens: int = 0,
    labels: str = "tokens",
    *,
    embed: int = 16,
    hidden: int = 128,
    layers: int = 1,
) -> nn.Module:
    """A small GRU for text: an embedding, recurrent layers, a linear head.

    >>> gru((80,), 65, 65)(torch.zeros(2, 80, dtype=torch.int64)).shape
    torch.Size([2, 80, 65])
    """
    return _recurrent("gru", nn.GRU, shape, classes, tokens, labels, embed, hidden, layers)


def lstm(
    shape: tuple[int, ...],
    classes: int,
    tokens: int = 0,
    labels: str = "tokens",
    *,
    embed: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """The character LSTM of LEAF's Shakespeare: an embedding of 8, two layers of 256, a linear head.

    >>> sum(p.numel() for p in lstm((80,), 80, 80).parameters())
    819920
    """
    return _recurrent("lstm", nn.LSTM, shape, classes, tokens, labels, embed, hidden, layers)


def _recurrent(
    name: str,
    kind: type[nn.LSTM | nn.GRU],
    shape: tuple[int, ...],
    classes: int,
    tokens: int,
    labels: str,
    embed: int,
    hidden: int,
    layers: int,
) -> nn.Module:
    need_tokens(name, shape, tokens)
    need_positive("layers", layers, MOST_LAYERS)
    for field, value in (("embed", embed), ("hidden", hidden)):
        need_positive(field, value)
    return Recurrent(kind, tokens, classes, embed, hidden, layers, labels == "tokens")


class _Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., 2021).

    Nothing in it but linear layers is learned, so that pruning and stacking reach all of it.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.heads, self.size = heads, width // heads
        rate = 10_000 ** (-torch.arange(0, self.size, 2) / self.size)
        angle = torch.outer(torch.arange(length), rate).repeat(1, 2)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # [n, length, 3 · width] -> q, k, v of [n, heads, length, size]
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(self._turn(q), self._turn(k), v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _turn(self, x: Tensor) -> Tensor:
        """Each pair of numbers turned by an angle that grows with the position."""
        one, other = x.chunk(2, dim=3)
        return x * self.cosine + torch.cat((-other, one), dim=3) * self.sine


class _Block(nn.Module):
    """Attention and a hidden layer, each behind a norm and with a residual connection."""

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, length)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder: embedding, blocks of causal attention, norm, a linear head."""

    def __init__(
        self, tokens: int, classes: int, length: int, width: int, heads: int, layers: int, every: bool
    ):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, length) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.every = every
        # As GPT-2: small weights, and smaller ones where blocks add up.
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                summed = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if summed else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of sequences."""
        hidden = self.norm(self.blocks(self.embed(x)))
        return self.head(hidden if self.every else last_token(hidden, x))  # type: ignore[no-any-return]


def transformer(
    shape: tuple[int, ...],
    classes: int,
    tokens: int = 0,
    labels: str = "tokens",
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
) -> nn.Module:
    """A small causal transformer for text: rotary positions, pre-norm, GELU, four times the width inside.

    >>> sum(p.numel() for p in transformer((64,), 40, 40).parameters())
    104744
    """
    need_tokens("transformer", shape, tokens)
    need_positive("layers", layers, MOST_LAYERS)
    for field, value in (("width", width), ("heads", heads)):
        need_positive(field, value)
    if width % (2 * heads):
        raise ConfigError(f"width must be a multiple of 2 · heads ({2 * heads}), got {width}")
    return Transformer(tokens, classes, shape[0], width, heads, layers, labels == "tokens")
