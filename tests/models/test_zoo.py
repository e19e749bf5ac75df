"""The models that come with the package: sizes, shapes, and ResNet-20 block by block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.errors import ConfigError
from safari.models import MODELS, Layout, cnn, fedawe_cnn, mlp, pfl_cnn, resnet18, resnet20


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_resnet20_by_hand() -> None:
    """A stem; six convolutions in each of three widths, the first of a stage from half the width; a head."""
    stem = 3 * 16 * 9
    stages = 6 * 16 * 16 * 9 + (16 * 32 + 5 * 32 * 32) * 9 + (32 * 64 + 5 * 64 * 64) * 9
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    head = 64 * 10 + 10
    assert stem + stages + norms + head == 269_722
    module = resnet20((3, 32, 32), 10)
    assert count(module) == 269_722
    layout = Layout.of(module)
    assert layout.parameters == 269_722
    assert layout.prunable_count == stem + stages + 64 * 10 == 268_336
    assert layout.size == 269_722 + norms  # a mean and a variance for each channel
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 19
    assert all(c.kernel_size == (3, 3) and c.bias is None for c in convolutions)  # so no 1x1 shortcut
    assert sum(isinstance(m, nn.Linear) for m in module.modules()) == 1


def test_pfl_cnn_by_hand() -> None:
    """32x32 loses 2 to each convolution without padding, and half to the pooling: 14x14 of 64 channels."""
    convolutions = (3 * 9 + 1) * 32 + (32 * 9 + 1) * 64
    dense = (64 * 14 * 14 + 1) * 128 + (128 + 1) * 10
    torch.manual_seed(0)
    module = pfl_cnn((3, 32, 32), 10)
    assert count(module) == convolutions + dense == 1_626_442
    assert [layer.p for layer in module if isinstance(layer, nn.Dropout)] == [0.25, 0.5]
    weights = [layer.weight for layer in module if isinstance(layer, nn.Conv2d | nn.Linear)]
    for weight in weights:  # Glorot's bound, and nearly reached
        field = weight[0, 0].numel() if weight.ndim == 4 else 1
        bound = (6 / ((weight.shape[0] + weight.shape[1]) * field)) ** 0.5
        assert 0.95 * bound < float(weight.detach().abs().max()) <= bound
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_fedawe_cnn_by_hand() -> None:
    """Padded convolutions and two poolings leave 8x8 of 32 channels of 32x32."""
    convolutions = (3 * 9 + 1) * 32 + (32 * 9 + 1) * 32
    dense = (32 * 8 * 8 + 1) * 256 + (256 + 1) * 64 + (64 + 1) * 10
    module = fedawe_cnn((3, 32, 32), 10)
    assert count(module) == convolutions + dense == 551_786
    layers = [layer for layer in module if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers[:-1]:  # He's standard deviation for ReLU, and no bias
        wanted = (2 / layer.weight[0].numel()) ** 0.5
        assert float(layer.weight.detach().std()) == pytest.approx(wanted, rel=0.15)
        assert not layer.bias.detach().any()
    assert layers[-1].bias.detach().any()


def test_the_shortcuts_subsample_and_pad_with_zeros() -> None:
    """With the last batch norm of a block at 0 nothing but the shortcut is left: option A of He et al."""
    module = resnet20((3, 32, 32), 10).eval()
    x = torch.rand(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    for index, (inner, outer, stride) in {0: (16, 16, 1), 3: (16, 32, 2), 6: (32, 64, 2)}.items():
        block = module.blocks[index]
        nn.init.zeros_(block.bn2.weight)
        given = x.repeat(1, inner // 16, 1, 1)
        with torch.no_grad():
            out = block(given)
        pad = (outer - inner) // 2
        expected = torch.zeros(2, outer, 8 // stride, 8 // stride)
        expected[:, pad : pad + inner] = given[:, :, ::stride, ::stride]
        assert torch.equal(out, expected)


def test_resnet20_forward_written_out() -> None:
    """The whole network again with plain functions, from its state_dict."""
    torch.manual_seed(0)
    module = resnet20((3, 16, 16), 10, width=4).eval()
    state = module.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"])

    x = torch.randn(3, 3, 16, 16)
    h = F.relu(norm(F.conv2d(x, state["conv.weight"], padding=1), "bn"))
    for block in range(9):
        stride = 2 if block in (3, 6) else 1
        name = f"blocks.{block}"
        y = F.relu(norm(F.conv2d(h, state[f"{name}.conv1.weight"], stride=stride, padding=1), f"{name}.bn1"))
        y = norm(F.conv2d(y, state[f"{name}.conv2.weight"], padding=1), f"{name}.bn2")
        short = h[:, :, ::stride, ::stride]
        if stride == 2:
            zeros = torch.zeros(3, short.shape[1] // 2, *short.shape[2:])
            short = torch.cat([zeros, short, zeros], dim=1)
        h = F.relu(y + short)
    expected = F.linear(h.mean((2, 3)), state["head.weight"], state["head.bias"])
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", ["cnn", "mlp", "pfl_cnn", "resnet20", "resnet18"])
@pytest.mark.parametrize(
    ("shape", "classes"), [((1, 8, 8), 10), ((3, 32, 32), 10), ((2, 5, 7), 1), ((1, 4, 4), 100)]
)
def test_every_model_takes_any_picture(name: str, shape: tuple[int, ...], classes: int) -> None:
    if name == "pfl_cnn":  # it does not pad, and so needs two pixels more
        shape = (shape[0], shape[1] + 2, shape[2] + 2)
    module = MODELS[name](shape, classes)
    assert module(torch.zeros(2, *shape)).shape == (2, classes)
    assert Layout.of(module).prunable_count > 0


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet18_forward_written_out(norm: str) -> None:
    """The whole network again with plain functions, from its state_dict."""
    torch.manual_seed(0)
    module = resnet18((3, 16, 16), 10, width=4, norm=norm).eval()  # type: ignore[arg-type]
    state = module.state_dict()
    for name, tensor in state.items():
        if "norm" in name and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)

    def normed(x: Tensor, name: str) -> Tensor:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        if norm == "group":
            return F.group_norm(x, 2, weight, bias)
        return F.batch_norm(x, state[f"{name}.running_mean"], state[f"{name}.running_var"], weight, bias)

    x = torch.randn(3, 3, 16, 16)
    h = F.relu(normed(F.conv2d(x, state["conv.weight"], padding=1), "norm"))
    for block in range(8):
        stride, name = 2 if block in (2, 4, 6) else 1, f"blocks.{block}"
        y = F.relu(normed(F.conv2d(h, state[f"{name}.conv1.weight"], None, stride, 1), f"{name}.norm1"))
        y = normed(F.conv2d(y, state[f"{name}.conv2.weight"], padding=1), f"{name}.norm2")
        if stride == 2:
            h = normed(F.conv2d(h, state[f"{name}.shortcut.0.weight"], None, 2), f"{name}.shortcut.1")
        h = F.relu(y + h)
    expected = F.linear(h.mean((2, 3)), state["head.weight"], state["head.bias"])
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)


def test_small_models_by_hand() -> None:
    assert count(cnn((1, 8, 8), 10)) == (9 * 16 + 16) + (16 * 32 * 9 + 32) + (32 * 16 * 64 + 64) + (640 + 10)
    assert count(cnn((1, 8, 8), 10, width=1)) == (9 + 1) + (18 + 2) + (2 * 16 * 4 + 4) + (40 + 10)
    assert count(mlp((1, 8, 8), 10)) == 64 * 64 + 64 + 640 + 10
    assert count(mlp((6,), 2, hidden=[])) == 14
    assert mlp((6,), 2)(torch.zeros(3, 6)).shape == (3, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: resnet20((64,), 10),
            "resnet20 needs pictures (channels, height, width) of at least 4x4; got (64,); "
            "text is for gru, lstm and transformer, features for mlp",
        ),
        (
            lambda: cnn((1, 8, 3), 10),
            "cnn needs pictures (channels, height, width) of at least 4x4; got (1, 8, 3)",
        ),
        (lambda: resnet20((3, 32, 32), 10, width=0), "width must be at least 1, got 0"),
        (lambda: cnn((3, 32, 32), 10, width=-1), "width must be at least 1, got -1"),
        (
            lambda: resnet18((3, 32, 32), 10, norm="group", groups=7),
            "groups must divide width (64), got 7",
        ),
        (lambda: mlp((3, 32, 32), 10, hidden=[4, 0]), "hidden must be at least 1, got 0"),
        (lambda: cnn((3, 32, 32), 10, width=10**9), "width must be at most 1000000, got 1000000000"),
        (
            lambda: mlp((3, 32, 32), 10, hidden=[10**30]),
            f"hidden must be at most 1000000, got {10**30}",
        ),
        (lambda: mlp((3, 32, 32), 10, hidden=[8] * 1001), "hidden must name at most 1000 layers, got 1001"),
    ],
)
def test_what_cannot_be_built(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == text
