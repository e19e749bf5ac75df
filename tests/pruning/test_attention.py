"""Attention by its formula: the same numbers as torch's kernels, and a second derivative."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from safari.models import transformer
from safari.pruning.attention import TwiceDifferentiable
from safari.pruning.scores import grasp

MASK = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) < 0.7
MASK.fill_diagonal_(True)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": MASK}, {"attn_mask": MASK * 2.0}, {"scale": 0.2}],
)
def test_the_formula_is_what_the_kernels_compute(options: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 6, generator=draw) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    with TwiceDifferentiable():
        found = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected)


def test_groups_of_queries_share_a_key() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 5, 6, generator=draw), torch.randn(2, 2, 5, 6, generator=draw)
    expected = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    with TwiceDifferentiable():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, enable_gqa=True), expected)


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_grasp_scores_models_with_attention(kind: str) -> None:
    """w · Hg against a difference of gradients: Hg ≈ (g(w + ε g) − g(w − ε g)) / 2ε, in float64."""
    torch.manual_seed(0)
    if kind == "ours":
        module = transformer((4,), 3, 7, "class", width=8, heads=2, layers=1).double().eval()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.4)
    else:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        module = nn.Sequential(nn.Embedding(7, 8), layer, nn.Flatten(), nn.Linear(32, 3)).double().eval()
    x, y = torch.randint(0, 7, (6, 4)), torch.randint(0, 3, (6,))
    scores = grasp(module, (x, y), torch.Generator())
    weights = {name: module.get_parameter(name) for name in scores}

    def gradient() -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(module(x) / 200.0, y)
        return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))

    start, g, step = {n: w.detach().clone() for n, w in weights.items()}, gradient(), 1.0
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(start[name] + sign * step * g[name])
        sides.append(gradient())
    for name in scores:
        expected = start[name] * (sides[0][name] - sides[1][name]) / (2 * step)
        torch.testing.assert_close(scores[name], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
