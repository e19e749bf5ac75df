"""Models that read tokens: written out again, what they may look at, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.errors import ConfigError
from safari.models import Layout, gru, lstm, transformer

LENGTH, TOKENS, CLASSES = 7, 11, 5
SMALL = {
    "gru": lambda labels: gru((LENGTH,), CLASSES, TOKENS, labels, embed=4, hidden=6, layers=2),
    "lstm": lambda labels: lstm((LENGTH,), CLASSES, TOKENS, labels, embed=4, hidden=6),
    "transformer": lambda labels: transformer((LENGTH,), CLASSES, TOKENS, labels, width=16, heads=2),
}


def sentences(n: int = 3) -> Tensor:
    return torch.randint(1, TOKENS, (n, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=SMALL)
def make(request: pytest.FixtureRequest) -> Callable[[str], nn.Module]:
    torch.manual_seed(0)
    return SMALL[request.param]


def test_outputs_have_the_task_s_shape(make: Callable[[str], nn.Module]) -> None:
    assert make("tokens")(sentences()).shape == (3, LENGTH, CLASSES)
    assert make("class")(sentences()).shape == (3, CLASSES)
    assert make("numbers")(sentences()).shape == (3, CLASSES)


def test_no_position_looks_ahead(make: Callable[[str], nn.Module]) -> None:
    module, x = make("tokens").eval(), sentences()
    changed = x.clone()
    changed[:, 4] = x[:, 4] % (TOKENS - 1) + 1
    with torch.no_grad():
        before, after = module(x), module(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().amax((0, 2)).min() > 0


def test_padding_at_the_end_does_not_matter_to_a_class(make: Callable[[str], nn.Module]) -> None:
    module, x = make("class").eval(), sentences()
    x[:, 5:] = 0
    longer = x.clone()
    longer[:, 5] = 3
    with torch.no_grad():
        found, other = module(x), module(longer)
        module.every = True  # type: ignore[assignment]
        torch.testing.assert_close(found, module(x)[:, 4])
        torch.testing.assert_close(other, module(longer)[:, 5])


def test_all_but_tables_norms_and_biases_may_be_pruned(make: Callable[[str], nn.Module]) -> None:
    layout = Layout.of(make("tokens"))
    free = {e.name for e in layout.entries if e.kind != "weight"}
    assert all("bias" in name or "norm" in name or name.startswith("embed") for name in free)
    assert layout.prunable_count > 0.7 * layout.parameters


def test_the_transformer_written_out() -> None:
    torch.manual_seed(0)
    module = transformer((LENGTH,), CLASSES, TOKENS, width=16, heads=2, layers=2).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    state, x = module.state_dict(), sentences()

    def norm(h: Tensor, name: str) -> Tensor:
        return F.layer_norm(h, (16,), state[f"{name}.weight"], state[f"{name}.bias"])

    def turned(h: Tensor) -> Tensor:
        """Numbers j and j + 4 of a head of 8 are a point in the plane, turned by position / 10000^(2j/8)."""
        out = torch.empty_like(h)
        for place in range(LENGTH):
            for j in range(4):
                angle = place / 10_000 ** (2 * j / 8)
                a, b = h[:, place, j], h[:, place, j + 4]
                out[:, place, j] = a * math.cos(angle) - b * math.sin(angle)
                out[:, place, j + 4] = b * math.cos(angle) + a * math.sin(angle)
        return out

    h = state["embed.weight"][x]
    for block in range(2):
        name = f"blocks.{block}"
        q, k, v = (norm(h, f"{name}.norm1") @ state[f"{name}.attention.qkv.weight"].T).split(16, dim=2)
        heads = []
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            scores = turned(q[..., part]) @ turned(k[..., part]).transpose(1, 2) / math.sqrt(8)
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(2) @ v[..., part])
        h = h + torch.cat(heads, 2) @ state[f"{name}.attention.out.weight"].T
        inner = F.gelu(
            F.linear(norm(h, f"{name}.norm2"), state[f"{name}.up.weight"], state[f"{name}.up.bias"])
        )
        h = h + F.linear(inner, state[f"{name}.down.weight"], state[f"{name}.down.bias"])
    expected = F.linear(norm(h, "norm"), state["head.weight"], state["head.bias"])
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: gru((3, 8, 8), 10, 0),
            "gru reads sequences of tokens (int64 of shape [length]); "
            "these samples are numbers of shape (3, 8, 8)",
        ),
        (
            lambda: transformer((20,), 10),
            "transformer reads sequences of tokens (int64 of shape [length]); "
            "these samples are numbers of shape (20,)",
        ),
        (lambda: lstm((20,), 10, 10, hidden=0), "hidden must be at least 1, got 0"),
        (lambda: gru((20,), 10, 10, layers=10**6), "layers must be at most 1000, got 1000000"),
        (lambda: transformer((20,), 10, 10, layers=10**6), "layers must be at most 1000, got 1000000"),
        (
            lambda: transformer((20,), 10, 10, width=20, heads=4),
            "width must be a multiple of 2 · heads (8), got 20",
        ),
    ],
)
def test_what_cannot_be_built(build: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert str(error.value) == text
