"""A module as one flat vector: what is in it, in which order, and that nothing is lost on the way."""

from __future__ import annotations

import hashlib
import json
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from safari.errors import SafariError
from safari.models import Entry, Layout, cnn, mlp, prunable_parameters, resnet20


class Tied(nn.Module):
    """An embedding whose table is also the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


class Mixed(nn.Module):
    """Every kind of tensor that a module can hold, some of which must not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(1, 2))])
        self.named = nn.ParameterDict({"only": nn.Parameter(torch.ones(1))})
        self.layer = nn.Linear(2, 2)
        self.layer.weight = nn.Parameter(torch.arange(4.0).reshape(2, 2).t())  # not contiguous
        self.register_buffer("mean", torch.tensor([0.25]))
        self.register_buffer("steps", torch.tensor([7]))
        self.register_buffer("flag", torch.tensor([True]))
        self.register_buffer("cache", torch.tensor([1.5]), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)


MODULES = {
    "linear": lambda: nn.Linear(3, 2),
    "conv1d": lambda: nn.Conv1d(2, 3, 2),
    "conv3d": lambda: nn.Conv3d(1, 2, 2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 2),
    "bilinear": lambda: nn.Bilinear(2, 3, 2),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.PReLU()),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "attention with its own widths": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "lstm": lambda: nn.LSTM(2, 3),
    "tied": Tied,
    "mixed": Mixed,
    "half": lambda: nn.Linear(3, 2).half(),
    "bfloat16": lambda: nn.Sequential(nn.Linear(3, 2).bfloat16(), nn.Linear(2, 1)),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1)),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "cnn": lambda: cnn((1, 8, 8), 10),
    "mlp": lambda: mlp((1, 4, 4), 3),
    "resnet": lambda: resnet20((3, 8, 8), 10, width=2),
}


def table(layout: Layout) -> list[tuple[str, tuple[int, ...], str]]:
    return [(e.name, e.shape, e.kind) for e in layout.entries]


def bits(tensor: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().contiguous().view(integers)


@pytest.mark.parametrize("kind", MODULES)
def test_there_and_back_again(kind: str) -> None:
    """Write one module's vector into another of the same make: all their travelling numbers are equal."""
    torch.manual_seed(0)
    source, target = MODULES[kind](), MODULES[kind]()
    layout = Layout.of(source)
    assert table(layout) == table(Layout.of(target))
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            if tensor.is_floating_point():
                tensor.normal_()
    vector = layout.read(source)
    assert vector.dtype == torch.float32
    assert vector.shape == (layout.size,)
    integers = {n: b.clone() for n, b in target.named_buffers() if not b.is_floating_point()}
    layout.write(target, vector)
    assert torch.equal(layout.read(target), vector)
    persistent = target.state_dict().keys()
    for name, value in source.named_parameters():
        # What is frozen stays with its module.
        same = torch.equal(bits(value), bits(target.get_parameter(name)))
        assert same == value.requires_grad, name
        assert target.get_parameter(name).requires_grad == value.requires_grad
    for name, value in source.named_buffers():
        if name in persistent and value.is_floating_point():
            assert torch.equal(bits(value), bits(target.get_buffer(name))), name
    assert all(torch.equal(target.get_buffer(n), b) for n, b in integers.items())


@pytest.mark.parametrize("kind", MODULES)
def test_entries_fill_the_vector_parameters_first(kind: str) -> None:
    module = MODULES[kind]()
    layout = Layout.of(module)
    offset = 0
    for entry in layout.entries:
        assert entry.offset == offset
        assert entry.size == math.prod(entry.shape)
        offset = entry.end
    assert layout.size == offset
    kinds = [e.kind == "buffer" for e in layout.entries]
    assert kinds == sorted(kinds)
    assert layout.parameters == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert layout.prunable_count == sum(p.numel() for p in prunable_parameters(module).values())
    assert int(layout.prunable.sum()) == layout.prunable_count
    assert layout.prunable.shape == (layout.size,)


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8))
def test_every_bit_pattern_survives(words: list[int]) -> None:
    """Whatever the 32 bits of a number are: NaNs with a payload, denormals, both zeros."""
    patterns = torch.tensor([struct.unpack("<i", struct.pack("<I", w))[0] for w in words], dtype=torch.int32)
    layer = nn.Linear(3, 2)
    layout = Layout.of(layer)
    layout.write(layer, patterns.view(torch.float32))
    assert torch.equal(layout.read(layer).view(torch.int32), patterns)
    assert torch.equal(layer.weight.detach().view(torch.int32).flatten(), patterns[:6])


def test_odd_numbers_by_name() -> None:
    words = [0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x00000001, 0x7F800000, 0xFF800000, 0x3F800000]
    signed = [w - 2**32 if w >= 2**31 else w for w in words]
    vector = torch.tensor(signed, dtype=torch.int32).view(torch.float32)
    layer = nn.Linear(3, 2)
    layout = Layout.of(layer)
    layout.write(layer, vector)
    assert layout.read(layer).view(torch.int32).tolist() == signed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_number_survives(dtype: torch.dtype) -> None:
    """All 65,536 patterns but the signalling NaNs, which a conversion is allowed to make quiet."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    module = nn.ParameterList([nn.Parameter(patterns.view(dtype))])
    layout = Layout.of(module)
    vector = layout.read(module)
    with torch.no_grad():
        module[0].zero_()
    layout.write(module, vector)
    same = bits(module[0]) == patterns
    assert same[~patterns.view(dtype).isnan()].all()
    assert torch.equal(module[0].isnan(), patterns.view(dtype).isnan())


def test_the_vector_is_a_copy() -> None:
    layer = nn.Linear(2, 1)
    layout = Layout.of(layer)
    vector = layout.read(layer)
    assert not vector.requires_grad
    before = vector.clone()
    nn.init.constant_(layer.weight, 9.0)
    assert torch.equal(vector, before)
    layout.write(layer, vector)
    vector.zero_()
    assert torch.equal(layout.read(layer), before)


def test_what_is_in_a_mixed_module() -> None:
    layout = Layout.of(Mixed())
    assert table(layout) == [
        ("scale", (), "parameter"),
        ("empty", (0, 3), "parameter"),
        ("parts.0", (2,), "parameter"),
        ("parts.1", (1, 2), "parameter"),
        ("named.only", (1,), "parameter"),
        ("layer.weight", (2, 2), "weight"),
        ("layer.bias", (2,), "parameter"),
        ("mean", (1,), "buffer"),
    ]
    assert (layout.size, layout.parameters, layout.prunable_count) == (13, 12, 4)
    assert layout.read(Mixed())[:6].tolist() == [2.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert layout.read(Mixed())[6:10].tolist() == [0.0, 2.0, 1.0, 3.0]  # row by row, whatever the strides
    assert layout.read(Mixed())[12] == 0.25


def test_tied_weights_travel_once_and_may_be_pruned() -> None:
    module = Tied()
    layout = Layout.of(module)
    assert table(layout) == [("table.weight", (5, 3), "weight")]
    layout.write(module, torch.arange(15.0))
    assert module.head.weight is module.table.weight
    assert torch.equal(module.head.weight.flatten(), torch.arange(15.0))


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("linear", ["weight"]),
        ("conv1d", ["weight"]),
        ("conv3d", ["weight"]),
        ("transposed", ["weight"]),
        ("bilinear", ["weight"]),
        ("batch norm", ["0.weight"]),
        ("norms", []),
        ("lstm", ["weight_ih_l0", "weight_hh_l0"]),
        ("attention", ["in_proj_weight", "out_proj.weight"]),
        (
            "attention with its own widths",
            ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
        ),
        ("frozen", ["1.weight"]),
        ("mlp", ["1.weight", "3.weight"]),
        ("cnn", ["0.weight", "2.weight", "6.weight", "8.weight"]),
    ],
)
def test_what_may_be_pruned(kind: str, weights: list[str]) -> None:
    module = MODULES[kind]()
    assert [e.name for e in Layout.of(module).entries if e.kind == "weight"] == weights
    assert list(prunable_parameters(module)) == weights


def test_what_is_frozen_is_no_part_of_the_vector_and_has_a_hash_of_its_own() -> None:
    def make(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        module[0].requires_grad_(False)
        module[1].requires_grad_(False)  # as a whole: its statistics stay, too
        module[2].weight.requires_grad_(False)
        return module

    module = make()
    layout = Layout.of(module)
    names = ["2.bias", "3.weight", "3.bias", "2.running_mean", "2.running_var"]
    assert [e.name for e in layout.entries] == names
    assert layout.prunable_count == 8
    assert set(layout.counters(module)) == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.num_batches_tracked"
    }  # fmt: skip
    # Two vectors mean the same only beside the same frozen numbers; what is used changes nothing of that.
    assert layout.digest == Layout.of(make()).digest != Layout.of(make(seed=1)).digest
    module(torch.randn(5, 3))
    assert Layout.of(module).digest == layout.digest
    assert Layout.of(nn.Linear(2, 1)).base == ""
    with pytest.raises(SafariError, match="Linear has no parameters that are trained: all are frozen"):
        Layout.of(nn.Linear(2, 1).requires_grad_(False))


def test_batch_norm_statistics_are_buffers_and_their_counter_stays() -> None:
    layout = Layout.of(nn.BatchNorm2d(2))
    assert table(layout) == [
        ("weight", (2,), "parameter"),
        ("bias", (2,), "parameter"),
        ("running_mean", (2,), "buffer"),
        ("running_var", (2,), "buffer"),
    ]
    assert (layout.size, layout.parameters, layout.prunable_count) == (8, 4, 0)


def test_split_and_join_are_inverse_and_split_gives_views() -> None:
    layout = Layout.of(MODULES["batch norm"]())
    vector = torch.arange(float(layout.size))
    parts = layout.split(vector)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        e.name: e.shape for e in layout.entries
    }
    assert torch.equal(layout.join(parts), vector)
    parts["0.weight"].zero_()
    assert vector[:18].eq(0).all()
    assert layout.split(torch.ones(layout.size, dtype=torch.bool))["0.weight"].dtype == torch.bool


@pytest.mark.parametrize("shape", [(7,), (9,), (), (8, 1), (0,)])
def test_a_vector_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(3, 2)
    layout = Layout.of(layer)
    before = layout.read(layer)
    for use in (lambda v: layout.write(layer, v), layout.split, layout.check):
        with pytest.raises(SafariError) as error:
            use(torch.zeros(shape))
        assert str(error.value) == f"vector must have shape (8,), got {shape}"
    assert torch.equal(layout.read(layer), before)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Linear(2, 1).double(), "weight must be float32, float16 or bfloat16; got torch.float64"),
        (
            nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1).double()),
            "1.weight must be float32, float16 or bfloat16; got torch.float64",
        ),
        (
            nn.Linear(2, 1, dtype=torch.complex64),
            "weight must be float32, float16 or bfloat16; got torch.complex64",
        ),
        (nn.ReLU(), "ReLU has no parameters"),
        (nn.Sequential(), "Sequential has no parameters"),
        (
            nn.Sequential(nn.LazyLinear(3)),
            "0.weight has no shape yet: run a batch through the lazy module first",
        ),
        (
            nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d(affine=False)),
            "1.running_mean has no shape yet: run a batch through the lazy module first",
        ),
    ],
)
def test_what_cannot_be_a_vector(module: nn.Module, text: str) -> None:
    with pytest.raises(SafariError) as error:
        Layout.of(module)
    assert str(error.value) == text


def test_a_float64_buffer_is_refused_by_name() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(SafariError, match=r"^mean must be float32, float16 or bfloat16; got torch\.float64$"):
        Layout.of(module)


def test_a_lazy_module_has_a_layout_after_its_first_batch() -> None:
    module = nn.Sequential(nn.LazyLinear(3))
    module(torch.zeros(1, 2))
    assert table(Layout.of(module)) == [("0.weight", (3, 2), "weight"), ("0.bias", (3,), "parameter")]


def test_the_digest_follows_names_shapes_kinds_and_order() -> None:
    base = (Entry("a", (2, 3), 0, "weight"), Entry("b", (3,), 6, "parameter"))
    digest = Layout(base).digest
    assert digest == Layout(tuple(base)).digest
    variants = [
        (Entry("A", (2, 3), 0, "weight"), base[1]),
        (Entry("a", (3, 2), 0, "weight"), base[1]),
        (Entry("a", (6,), 0, "weight"), base[1]),
        (Entry("a", (2, 3), 0, "parameter"), base[1]),
        (base[0], Entry("b", (3,), 6, "buffer")),
        (Entry("b", (3,), 0, "parameter"), Entry("a", (2, 3), 3, "weight")),
        base[:1],
    ]
    digests = {Layout(entries).digest for entries in variants}
    assert len(digests) == len(variants)
    assert digest not in digests


def test_the_digest_does_not_depend_on_numbers_and_is_stable() -> None:
    assert Layout.of(nn.Linear(3, 2)).digest == Layout.of(nn.Linear(3, 2)).digest
    table = [["weight", [2, 3], "weight"], ["bias", [2], "parameter"]]
    assert Layout.of(nn.Linear(3, 2)).digest == hashlib.sha256(json.dumps(table).encode()).hexdigest()


def test_weights_are_counted_the_same_from_running_sums() -> None:
    """What a device counts with a few kernels is what the host counts tensor by tensor."""
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(2, 5)
    )
    layout = Layout.of(module)
    weights = [e for e in layout.entries if e.kind == "weight"]
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(layout.size, generator=generator) < share for share in (0.0, 0.3, 1.0)]
    expected = [[int(mask[e.offset : e.end].sum()) for e in weights] for mask in masks]
    assert layout.weights_in(*masks) == expected
    assert layout._weights_from_sums(masks, weights) == expected
