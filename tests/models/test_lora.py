"""Adapters: what is trained and travels, what the frozen base is, and how many bytes they take."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.kit import play, records
from safari.config import parse
from safari.engine import assemble, load_data
from safari.errors import ConfigError, DataError
from safari.models import Layout, LoRALinear, add_lora, load_weights, lora, transformer

TALK: dict[str, Any] = {
    "rounds": 2,
    "clients": 4,
    "arms": ["drop"],
    "data": {"name": "dialogue", "speakers": 4, "sentences": 8, "length": 16},
    "partition": {"name": "natural"},
    "task": {"name": "tokens"},
    "pruning": {"pruner": "rand", "sparsity": 0.5, "scope": "uniform"},
    "local": {"steps": 2, "batch": 4, "lr": 0.01},
    "uplink": {"name": "bernoulli", "p": 0.7},
    "wire": {"every": 1},
}
SMALL = {"width": 16, "heads": 2, "layers": 1}


def test_an_adapter_adds_a_product_of_two_small_matrices() -> None:
    torch.manual_seed(0)
    base = nn.Linear(5, 3)
    layer, x = LoRALinear(base, rank=2, alpha=6.0), torch.randn(4, 5)
    assert torch.equal(layer(x), base(x))
    nn.init.normal_(layer.b.weight)
    expected = x @ (base.weight + 3.0 * layer.b.weight @ layer.a.weight).T + base.bias
    torch.testing.assert_close(layer(x), expected)


def test_torchs_own_transformer_layer_takes_adapters_in_training_and_in_its_fast_path() -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    adapted, x = add_lora(deepcopy(plain), rank=2, alpha=4.0), torch.randn(3, 5, 8)
    for name in ("linear1", "linear2"):
        layer = adapted.get_submodule(name)
        nn.init.normal_(layer.b.weight, std=0.1)
        with torch.no_grad():  # the same by hand: the product added to the layer's own matrix
            plain.get_submodule(name).weight += 2.0 * layer.b.weight @ layer.a.weight
    torch.testing.assert_close(adapted.train()(x), plain.train()(x))
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(x), plain.eval()(x))


def test_only_adapters_are_trained_and_travel() -> None:
    torch.manual_seed(0)
    module = add_lora(transformer((16,), 9, 9, **SMALL), rank=2, targets=["blocks.*.qkv", "blocks.*.up"])
    layout = Layout.of(module)
    names = ["blocks.0.attention.qkv", "blocks.0.up"]
    assert [e.name for e in layout.entries] == [f"{name}.{m}.weight" for name in names for m in "ab"]
    assert layout.size == 2 * (16 + 48) + 2 * (16 + 64)
    assert layout.prunable_count == layout.size
    kept = add_lora(transformer((16,), 9, 9, **SMALL), rank=1, targets=["head"], keep=["head.bias", "*norm*"])
    free = {e.name for e in Layout.of(kept).entries if e.kind != "weight"}
    norms = {f"{n}.{p}" for n in ("blocks.0.norm1", "blocks.0.norm2", "norm") for p in ("weight", "bias")}
    assert free == norms | {"head.base.bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 10**30}, "rank must be at most 1000000, got 1"),
        (
            {"targets": ["haed"]},
            r"targets: 'haed' names no linear layer \(there are: .*head.*\) \(did you mean 'head'",
        ),
        ({"keep": ["head.bais"]}, r"keep: 'head.bais' names no parameter \(did you mean 'head.bias'\?\)"),
        ({"base": "transfomer"}, "base must be one of .*; got 'transfomer' \\(did you mean 'transformer'"),
        ({"options": {"witdh": 8}}, r"options.witdh is not an option .* \(did you mean 'width'\?\)"),
        ({"base": "lora"}, "base must be one of"),
    ],
)
def test_what_cannot_be_adapted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora((16,), 9, 9, "tokens", **{"options": SMALL, **options})


def test_the_base_is_read_from_a_checkpoint_or_a_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = transformer((16,), 9, 9, **SMALL)
    save_file({"model": Layout.of(trained).read(trained)}, tmp_path / "checkpoint.safetensors")
    save_file(trained.state_dict(), tmp_path / "state.safetensors")
    for name in ("checkpoint", "state"):
        path = str(tmp_path / f"{name}.safetensors")
        adapted = lora((16,), 9, 9, "tokens", options=SMALL, weights=path, targets=["head"])
        x = torch.randint(0, 9, (2, 16))
        assert torch.equal(adapted(x), trained(x))
    with pytest.raises(DataError, match=r"weights: .* does not fit the base: vector must have shape"):
        load_weights(transformer((16,), 9, 9, width=8, heads=2), tmp_path / "checkpoint.safetensors")
    with pytest.raises(DataError, match="size mismatch"):
        load_weights(transformer((16,), 9, 9, width=8, heads=2, layers=1), tmp_path / "state.safetensors")
    with pytest.raises(DataError, match="weights: no such file"):
        load_weights(trained, tmp_path / "none.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(DataError, match=r"weights: .*broken\.safetensors: "):
        load_weights(trained, tmp_path / "broken.safetensors")


def test_both_engines_train_adapters_alike_and_send_little(tmp_path: Path) -> None:
    dense = list(play({**TALK, "model": {"name": "transformer", **SMALL}, "pruning": {"sparsity": 0.0}}))
    weights = str(tmp_path / "base.safetensors")
    save_file({"model": dense[-1][1].model}, weights)
    model = {"name": "lora", "options": SMALL, "weights": weights, "rank": 2}
    found = [records({**TALK, "model": model, "engine": {"name": e}}) for e in ("reference", "vectorised")]
    for one, other in zip(*found, strict=True):
        assert one["perplexity"] == pytest.approx(other["perplexity"], rel=1e-4)
        assert one["density"] == other["density"] == pytest.approx(0.5, abs=0.01)
    # What was learned before is where adapters begin, and only they travel.
    last = dense[-1][2]
    assert found[0][-1]["perplexity"] < last["perplexity"]
    assert found[0][-1]["bytes"]["up"] < 0.35 * last["bytes"]["up"]


def test_a_checkpoint_beside_another_base_is_refused(tmp_path: Path) -> None:
    config = parse({**TALK, "model": {"name": "lora", "options": SMALL}})
    data = load_data(config)
    one, other = (assemble(config, seed, data) for seed in (0, 1))
    assert [e.name for e in one.layout.entries] == [e.name for e in other.layout.entries]
    assert one.layout.digest != other.layout.digest
