"""Modules of all sorts, with the way that each should be stacked and the reason for a slow one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.stack.modules import (
    Attention,
    Block,
    Counting,
    Fn,
    Own,
    Standardised,
    Stubborn,
    Tied,
    between,
    centred,
    clipped,
    conv,
    frozen,
    hidden,
    hooked,
    mixing_gradient,
    normed,
    on_pictures,
    on_vectors,
    zero_head,
)  # fmt: skip
from safari.models import gru, lstm, transformer

CLASSES = 3
PICTURE, VECTOR, SERIES, TOKENS = (2, 6, 6), (5,), (2, 9), (4,)
DIFFERS = "layers: its output differs from the module's own"


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = PICTURE
    way: str = "layers"
    why: str = ""

    def inputs(self, n: int, draw: torch.Generator) -> Tensor:
        if self.shape == TOKENS:
            return torch.randint(0, 7, (n, *self.shape), generator=draw)
        return torch.randn(n, *self.shape, generator=draw)


ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Identity,
)  # fmt: skip
FUNCTIONS = (
    F.relu, torch.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, torch.sigmoid, torch.tanh, F.hardtanh,
)  # fmt: skip
ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "x + x": lambda x: x + x,
    "x - 1": lambda x: x - 1,
    "1 - x": lambda x: 1 - x,
    "x * x": lambda x: x * x,
    "torch.mul": lambda x: torch.mul(x, x),
    "torch.add alpha": lambda x: torch.add(x, x.tanh(), alpha=0.5),
    "add_": lambda x: x.add_(1.0),
    "relu_": lambda x: x.relu_(),
    "x.add(other=)": lambda x: x.add(other=x.sigmoid()),
    "x / norm": lambda x: x / (1 + x.square().mean((1, 2, 3), keepdim=True)),
    "one map for all channels": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
    "squeeze and excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "cat": lambda x: torch.cat([x[:, :2], x[:, 2:] * 2], 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "unpacked shape": lambda x: x.view(x.shape[0], x.shape[1], -1).view(x.size()),
    "not contiguous": lambda x: x.permute(0, 1, 3, 2),
    "softmax": lambda x: x.softmax(1),
    "relu, and what it was made of": lambda x: F.relu(x) - x,
    "relu of a sum, and its parts": lambda x: torch.relu(x + x.tanh()) * x,
    "relu of a sum, and the sum": lambda x: (lambda y: F.relu(y) * y)(x + 1),
}

CASES: dict[str, Case] = {
    # Convolutions
    **{
        f"conv {name}": Case(make)
        for name, make in {
            "plain": conv(3),
            "without bias": conv(3, bias=False),
            "stride": conv(3, stride=2, padding=1),
            "dilation": conv(3, dilation=2),
            "groups": conv(3, groups=2, padding=1),
            "same": conv(3, padding="same"),
            "reflect": conv(3, padding=1, padding_mode="reflect"),
            "circular": conv(3, padding=(1, 2), padding_mode="circular"),
            "replicate in groups": conv(3, padding=1, padding_mode="replicate", groups=2),
            "not square": conv((1, 3), padding=(0, 1)),
        }.items()
    },
    "depthwise": Case(between(lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Tanh)),
    "two convolutions": Case(between(nn.Tanh, lambda: nn.Conv2d(4, 4, 1), nn.Tanh)),
    "conv1d": Case(
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, groups=2),
            nn.ReLU(),
            nn.BatchNorm1d(4),
            nn.MaxPool1d(2),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        SERIES,
    ),
    "conv1d reflect": Case(
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(36, 3)
        ),
        SERIES,
        "vmap",
        "layers: 0 is a one-dimensional convolution with padding_mode='reflect'",
    ),
    "transposed": Case(
        between(lambda: nn.ConvTranspose2d(4, 4, 2)),
        PICTURE,
        "vmap",
        "layers: 1 is a ConvTranspose2d, which has no stacked form",
    ),
    # Linear
    "linear": Case(hidden(nn.Tanh), VECTOR),
    "linear without bias": Case(hidden(lambda: nn.Linear(6, 6, bias=False)), VECTOR),
    "linear on rows": Case(
        lambda: nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)), SERIES
    ),
    "linear on pictures": Case(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))
    ),
    "linear after a convolution": Case(between(lambda: nn.Linear(6, 5))),
    # Norms
    "batch norm": Case(between(lambda: nn.BatchNorm2d(4), nn.ReLU)),
    "batch norm untracked": Case(between(lambda: nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU)),
    "batch norm without parameters": Case(between(lambda: nn.BatchNorm2d(4, affine=False))),
    "batch norm first": Case(lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)), VECTOR),
    "batch norm on vectors": Case(hidden(lambda: nn.BatchNorm1d(6), nn.Tanh), VECTOR),
    "batch norm that counts": Case(
        hidden(lambda: nn.BatchNorm1d(6, momentum=None)),
        VECTOR,
        "loop",
        "layers: 1 is a batch norm with momentum=None, which counts its batches",
    ),
    "batch norm kept in eval mode": Case(Stubborn, VECTOR),
    "layer norm": Case(hidden(lambda: nn.LayerNorm(6)), VECTOR),
    "layer norm without bias": Case(hidden(lambda: nn.LayerNorm(6, bias=False)), VECTOR),
    "layer norm without parameters": Case(hidden(lambda: nn.LayerNorm(6, elementwise_affine=False)), VECTOR),
    "layer norm on pictures": Case(between(lambda: nn.LayerNorm((4, 6, 6)))),
    "layer norm on rows": Case(between(lambda: nn.LayerNorm(6))),
    "group norm": Case(between(lambda: nn.GroupNorm(2, 4), nn.ReLU)),
    "group norm without parameters": Case(between(lambda: nn.GroupNorm(2, 4, affine=False))),
    "group norm on vectors": Case(hidden(lambda: nn.GroupNorm(2, 6)), VECTOR),
    "instance norm": Case(between(lambda: nn.InstanceNorm2d(4))),
    # Embeddings and attention
    "tokens": Case(lambda: nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 3)), TOKENS),
    "tokens with padding": Case(
        lambda: nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)),
        TOKENS,
    ),
    "tokens by frequency": Case(
        lambda: nn.Sequential(nn.Embedding(7, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, 3)),
        TOKENS,
        "vmap",
        "layers: 0 is an embedding with max_norm or scale_grad_by_freq",
    ),
    "attention": Case(Attention, TOKENS),
    "attention with its weights and a mask": Case(
        lambda: Fn(
            lambda m, x: (
                lambda h: m.head(m.look(h, h, h, attn_mask=m.mask)[0][:, -1]) + m.look(h, h, h)[1][:, 0, :3]
            )(m.words(x)),
            words=nn.Embedding(7, 4),
            look=nn.MultiheadAttention(4, 2, batch_first=True, bias=False),
            head=nn.Linear(4, 3),
            mask=torch.ones(4, 4).triu(1).bool(),
        ),
        TOKENS,
    ),
    "attention, causal": Case(
        lambda: Fn(
            lambda m, x: m.head(
                m.look(m.words(x), m.words(x), m.words(x), None, False, m.mask, is_causal=True)[0][:, 2]
            ),
            words=nn.Embedding(7, 4),
            look=nn.MultiheadAttention(4, 2, batch_first=True),
            head=nn.Linear(4, 3),
            mask=torch.full((4, 4), -torch.inf).triu(1),
        ),
        TOKENS,
    ),
    "attention with dropout": Case(
        lambda: Attention(0.1),
        TOKENS,
        "loop",
        "layers: look is a MultiheadAttention with dropout; vmap: the module draws random numbers",
    ),
    "recurrent": Case(
        lambda: Fn(
            lambda m, x: m.head(m.lstm(m.words(x))[0][:, -1]),
            words=nn.Embedding(7, 4),
            lstm=nn.LSTM(4, 4, batch_first=True),
            head=nn.Linear(4, 3),
        ),
        TOKENS,
    ),
    "recurrent, both directions": Case(
        lambda: Fn(
            lambda m, x: m.head(m.lstm(m.words(x))[0][:, -1]),
            words=nn.Embedding(7, 4),
            lstm=nn.LSTM(4, 4, batch_first=True, bidirectional=True),
            head=nn.Linear(8, 3),
        ),
        TOKENS,
        "loop",
        "layers: lstm is a LSTM that is bidirectional or has proj_size; vmap: ",
    ),
    "recurrent, its last state": Case(
        lambda: Fn(
            lambda m, x: m.head(m.lstm(m.words(x))[1][0][-1] + m.gru(m.words(x))[1][0]),
            words=nn.Embedding(7, 4),
            lstm=nn.LSTM(4, 4, 2, batch_first=True, bias=False),
            gru=nn.GRU(4, 4, batch_first=True),
            head=nn.Linear(4, 3),
        ),
        TOKENS,
    ),
    "gru": Case(lambda: gru((4,), 3, 7, "class", embed=4, hidden=5, layers=2), TOKENS),
    "lstm": Case(lambda: lstm((4,), 3, 7, "class", embed=4, hidden=5), TOKENS),
    "transformer": Case(lambda: transformer((4,), 3, 7, "class", width=8, heads=2), TOKENS),
    # Pooling and activations
    "max pool": Case(between(lambda: nn.MaxPool2d(2))),
    "average pool": Case(between(lambda: nn.AvgPool2d(2, 1))),
    "adaptive pools": Case(between(lambda: nn.AdaptiveMaxPool2d(4), lambda: nn.AdaptiveAvgPool2d((4, 3)))),
    **{
        f"F.{pool.__name__}": Case(on_pictures(lambda x, pool=pool: pool(x, 3)))
        for pool in (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d)
    },
    **{f"nn.{a.__name__}": Case(between(a)) for a in ACTIVATIONS},
    **{f"{f.__name__}()": Case(on_pictures(f)) for f in FUNCTIONS},
    "nn.ReLU in place": Case(between(lambda: nn.ReLU(inplace=True))),
    "nn.PReLU": Case(between(nn.PReLU), PICTURE, "vmap", "layers: 1 is a PReLU, which has no stacked form"),
    "nn.Softmax2d": Case(between(nn.Softmax2d)),
    **{name: Case(on_pictures(function)) for name, function in ARITHMETIC.items()},
    # Dropout
    **{
        f"nn.{d.__name__}": Case(between(d))
        for d in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    },
    "dropout of little": Case(between(lambda: nn.Dropout2d(0.001))),
    "dropout of nothing, then of something": Case(hidden(lambda: nn.Dropout(0.0), nn.Dropout), VECTOR),
    "dropout of everything": Case(hidden(lambda: nn.Dropout(1.0)), VECTOR),
    "dropout in place": Case(hidden(lambda: nn.Dropout(0.3, inplace=True), nn.Tanh), VECTOR),
    "two dropouts": Case(between(nn.Dropout, nn.ReLU, lambda: nn.Dropout(0.2))),
    "F.dropout": Case(
        lambda: Fn(
            lambda m, x: m.head(F.dropout(m.a(x), 0.3, m.training)), a=nn.Linear(5, 6), head=nn.Linear(6, 3)
        ),
        VECTOR,
    ),
    "F.dropout by name": Case(
        lambda: Fn(
            lambda m, x: m.head(F.dropout(m.a(x), training=m.training, p=0.3)),
            a=nn.Linear(5, 6),
            head=nn.Linear(6, 3),
        ),
        VECTOR,
    ),
    "dropout after vmap's layers": Case(
        hidden(nn.PReLU, nn.Dropout),
        VECTOR,
        "loop",
        "layers: 1 is a PReLU, which has no stacked form; vmap: the module draws random numbers",
    ),
    "noise": Case(
        on_vectors(lambda m, x: m.head(x + 0.001 * torch.rand_like(x) * m.training)),
        VECTOR,
        "loop",
        "layers: it draws random numbers outside of dropout layers; vmap: the module draws random",
    ),
    # Shapes of nets
    **{f"residual by {where}": Case(lambda where=where: Block(where)) for where in ("add", "iadd", "method")},
    "residual into the shortcut": Case(lambda: Block("into the shortcut"), PICTURE, "vmap", DIFFERS),
    "tied weights": Case(Tied, VECTOR),
    "a layer used twice": Case(
        on_vectors(lambda m, x: m.head(m.a(torch.tanh(m.a(x)))), a=nn.Linear(5, 5)), VECTOR
    ),
    "an unused layer": Case(on_vectors(lambda m, x: m.head(x), spare=nn.Linear(5, 5)), VECTOR),
    "a parameter of its own": Case(Own, VECTOR, "vmap", "layers: forward uses the parameter scale itself"),
    "a constant of its own": Case(Standardised),
    "dict and tuple inside": Case(
        lambda: Fn(
            lambda m, x: m.head(torch.cat([*{"a": (m.a(x), x)}["a"]], 1)),
            a=nn.Linear(5, 5),
            head=nn.Linear(10, 3),
        ),
        VECTOR,
    ),
    "frozen": Case(frozen, VECTOR),
    "frozen layers": Case(
        lambda: nn.Sequential(
            nn.Linear(5, 6).requires_grad_(False),
            nn.LayerNorm(6).requires_grad_(False),
            nn.Tanh(),
            nn.Linear(6, 3),
        ),
        VECTOR,
    ),
    "a frozen convolution and its norm": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3).requires_grad_(False),
            nn.BatchNorm2d(4).requires_grad_(False),
            nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(64, 3),
        )
    ),
    "a frozen layer of its own sort": Case(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU().requires_grad_(False), nn.Linear(6, 3)), VECTOR
    ),
    "writes into its input": Case(on_vectors(lambda m, x: m.head(x.mul_(2).sub_(1))), VECTOR),
    "an output that is not contiguous": Case(
        on_vectors(lambda m, x: m.head(x.T.contiguous().T).T.contiguous().T),
        VECTOR,
    ),
    # What mixes samples, branches, counts or listens
    "mixes samples": Case(on_vectors(centred), VECTOR, "vmap", DIFFERS),
    "mixes samples before a head of zeros": Case(
        lambda: zero_head(nn.Sequential(on_vectors(centred)(), nn.Linear(3, 3))),
        VECTOR,
        "vmap",
        DIFFERS,
    ),
    "mixes samples in the gradient alone": Case(
        on_vectors(lambda m, x: m.head(x) + mixing_gradient(m.head(x))),
        VECTOR,
        "vmap",
        "layers: the gradient of head.weight differs from the module's own",
    ),
    "divides by the batch": Case(
        on_vectors(lambda m, x: m.head(x) / x.shape[0]),
        VECTOR,
        "vmap",
        DIFFERS,
    ),
    "last sample first": Case(on_vectors(lambda m, x: m.head(x.flip(0))), VECTOR, "vmap", DIFFERS),
    "branches on data": Case(
        on_vectors(lambda m, x: m.head(x) if x.sum() > 0 else -m.head(x)),
        VECTOR,
        "loop",
        "layers: TraceError: symbolically traced variables cannot be used as inputs to control flow; vmap: ",
    ),
    "branches on the batch": Case(
        on_vectors(lambda m, x: m.head(x) if x.shape[0] > 2 else -m.head(x)),
        VECTOR,
        "vmap",
        "layers: TraceError",
    ),
    "counts in its state": Case(
        lambda: Counting(True), VECTOR, "vmap", "layers: forward uses the parameter seen itself"
    ),
    "counts beside its state": Case(
        lambda: Counting(False), VECTOR, "vmap", "layers: it changes a buffer that is not part of its state"
    ),
    "clips a gradient": Case(clipped, VECTOR, "loop", "0.weight has a hook on its gradient"),
    "has a hook": Case(hooked, VECTOR, "vmap", "layers: 0 has a hook"),
    "weight norm": Case(
        normed, VECTOR, "vmap", "layers: 0 is a ParametrizedLinear, which has no stacked form"
    ),
}
