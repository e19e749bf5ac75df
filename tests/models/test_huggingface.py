"""Models of transformers, made from a config: no download, and adapters of peft."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from safari.engine.stack.forward import stack
from safari.errors import ConfigError, MissingExtraError
from safari.models import Layout, transformers

library = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

TINY = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}


def make(labels: str = "tokens", **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers((12,), 9 if labels == "tokens" else 3, 9, labels, **{"settings": TINY, **options})


def test_a_model_from_a_config() -> None:
    x = torch.randint(1, 9, (4, 12))
    module = make()
    assert module(x).shape == (4, 12, 9)
    assert torch.equal(module(x), module.model(input_ids=x).logits)  # type: ignore[operator]
    assert make("class")(x).shape == (4, 3)
    layout = Layout.of(module)
    assert layout.prunable_count > 0.8 * layout.parameters


def test_padding_does_not_matter_to_a_class() -> None:
    module, x = make("class").eval(), torch.randint(1, 9, (4, 12))
    x[:, 8:] = 0
    with torch.no_grad():
        short = transformers((12,), 3, 9, "class", settings=TINY).eval()
        short.load_state_dict(module.state_dict())
        torch.testing.assert_close(module(x), short(x[:, :8]), rtol=1e-4, atol=1e-5)


def test_adapters_of_peft_alone_are_trained_and_the_base_is_shared() -> None:
    module = make(rank=2, targets=["q_proj", "v_proj"])
    layout = Layout.of(module)
    assert {e.name.rsplit(".", 3)[-3] for e in layout.entries} == {"lora_A", "lora_B"}
    assert layout.size == 2 * 2 * (2 * 16)
    assert layout.base
    found = stack(module, layout, torch.randint(1, 9, (8, 12)))
    assert found.way == "vmap", found.why


def test_gpt2_s_linear_layers_may_be_pruned() -> None:
    module = make(kind="gpt2")
    names = {e.name for e in Layout.of(module).entries if e.kind == "weight"}
    assert {name.rsplit(".", 2)[-2] for name in names} == {"c_attn", "c_proj", "c_fc", "wte"}


def test_a_model_from_a_folder(tmp_path: Path) -> None:
    module, x = make(), torch.randint(1, 9, (2, 12))
    module.model.save_pretrained(tmp_path / "saved")  # type: ignore[union-attr, operator]
    again = transformers((12,), 9, 9, path=str(tmp_path / "saved"))
    assert torch.equal(again(x), module(x))
    with pytest.raises(ConfigError, match="vocab_size must be at least the 20 tokens of the data, got 9"):
        transformers((12,), 20, 20, path=str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lama"}, "kind: lama: "),
        ({"settings": {"hidden_size": 15}}, "kind: llama: "),
        (
            {"settings": {"attn_implementation": "somebody/kernel", "allow_all_kernels": True}},
            r"settings\.attn_implementation is no field of llama.*\nsettings\.allow_all_kernels is no field",
        ),
        ({"settings": {"trust_remote_code": True}}, r"settings\.trust_remote_code is no field of llama"),
        ({"settings": {"_attn_implementation": "x/y"}}, r"settings\._attn_implementation is no field"),
        ({"path": "./nowhere"}, "path: no such folder: ./nowhere"),
        ({"rank": 2, "targets": ["nothing"]}, "targets: Target modules .*nothing.* not found"),
    ],
)
def test_what_cannot_be_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_settings_of_a_folder_s_model_are_its_own_fields(tmp_path: Path) -> None:
    make().model.save_pretrained(tmp_path / "saved")  # type: ignore[union-attr, operator]
    path = str(tmp_path / "saved")
    again = make(path=path, settings={"attention_dropout": 0.5})
    assert again.model.config.attention_dropout == 0.5  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"settings\.allow_all_kernels is no field of llama"):
        make(path=path, settings={"allow_all_kernels": True})


def test_a_folder_s_config_chooses_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make().model.save_pretrained(tmp_path / "saved")  # type: ignore[union-attr, operator]
    config = tmp_path / "saved" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attn_implementation": "somebody/kernel"}))
    asked: list[Any] = []
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    monkeypatch.setattr(hub, "load_and_register_attn_kernel", lambda *a, **k: asked.append(a))
    make(path=str(tmp_path / "saved"), settings={})
    assert not asked


def test_a_base_model_that_adapters_name_is_not_followed(tmp_path: Path) -> None:
    base = {"base_model_name_or_path": "somebody/somewhere", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    with pytest.raises(ConfigError, match=r"^path: .* holds adapters \(adapter_config\.json\), which name"):
        make(path=str(tmp_path))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'safari-fl\[transformers\]'"):
        make()
