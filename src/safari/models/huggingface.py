"""Models of the library transformers, whole or with peft's adapters (extra `transformers`).

No code that comes with a model is ever run, weights are read from safetensors files alone, and what lies here is read
without asking the hub.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from safari.bounds import path_of
from safari.errors import ConfigError, did_you_mean, not_there
from safari.hub import is_path, library, offline, permit_hub
from safari.models.checks import need_tokens

PADDING = 0
# Instead of the library's defaults, which are those of the largest models.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "pad_token_id": PADDING,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Logits(nn.Module):
    """A model of transformers as a function of tokens that gives its logits."""

    def __init__(self, model: nn.Module, masked: bool):
        super().__init__()
        self.model = model
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of sequences; where `masked`, nothing looks at padding."""
        mask = {"attention_mask": (x != PADDING).long()} if self.masked else {}
        return self.model(input_ids=x, **mask).logits  # type: ignore[no-any-return]


def transformers(
    shape: tuple[int, ...],
    classes: int,
    tokens: int = 0,
    labels: str = "tokens",
    *,
    kind: str = "llama",
    settings: Mapping[str, Any] | None = None,
    path: str = "",
    rank: int = 0,
    alpha: float = 16.0,
    targets: Sequence[str] = (),
) -> nn.Module:
    """Any text model of the library transformers, from a config or a folder (extra transformers).

    `kind` names an architecture, and `settings` are fields of its config: a new model, without a download, and a
    small one unless they say otherwise; other settings of the library are not among them. `path` is a folder that
    `save_pretrained` wrote, or a name on the hub.
    Next-token prediction takes the causal model, a class a sample the one for sequence classification. `rank`
    above 0 puts LoRA adapters of the library peft on the layers `targets` (by default all linear ones): only they
    are trained and travel.
    """
    need_tokens("transformers", shape, tokens)
    hf = library("transformers", "transformers", "models of transformers")
    peft = library("peft", "transformers", "models of transformers") if rank else None
    every = labels == "tokens"
    auto = hf.AutoModelForCausalLM if every else hf.AutoModelForSequenceClassification
    given = dict(settings or {})
    local = not path or is_path("path", path)
    if path and local:
        path = str(_folder(path))
    elif path:
        permit_hub(path)
    try:
        with offline() if local else contextlib.nullcontext():
            if path:
                options = {"trust_remote_code": False, "local_files_only": local}
                config = _with_settings(hf, hf.AutoConfig.from_pretrained(path, **options), given)
                model = auto.from_pretrained(path, config=config, use_safetensors=True, **options)
            else:
                fields = {**_SMALL, "vocab_size": tokens, "max_position_embeddings": shape[0]}
                fields |= {} if every else {"num_labels": classes}
                _check_settings(hf, hf.AutoConfig.for_model(kind), given)
                config = hf.AutoConfig.for_model(kind, **{**fields, **given})
                model = auto.from_config(config, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # whatever a library of many architectures raises
        source = f"path: {path}" if path else f"kind: {kind}"
        raise ConfigError(
            f"{source}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    size = model.get_input_embeddings().num_embeddings
    if size < tokens:
        raise ConfigError(f"vocab_size must be at least the {tokens} tokens of the data, got {size}")
    model.config.use_cache = False
    if peft is not None:
        with offline():
            model = _with_adapters(peft, model, every, rank, alpha, targets)
    return Logits(model, masked=not every)


def _folder(path: str) -> Path:
    folder = path_of("path", path)
    if not folder.is_dir():
        raise ConfigError(f"path: no such folder: {path}")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"path: {path} holds adapters (adapter_config.json), which name a model that is elsewhere; "
            "it must hold a whole model"
        )
    return folder


def _with_settings(hf: Any, config: Any, settings: Mapping[str, Any]) -> Any:
    """A config that was read, with settings put in, and without a choice of kernels, which is for this machine."""
    _check_settings(hf, config, settings)
    for name, value in settings.items():
        setattr(config, name, value)
    for choice in ("_attn_implementation", "_experts_implementation"):
        if hasattr(config, choice):
            setattr(config, choice, None)
    return config


def _check_settings(hf: Any, config: Any, settings: Mapping[str, Any]) -> None:
    """ConfigError for what is no field of the architecture itself: the library takes much else by the same way."""
    own = inspect.signature(type(config)).parameters.keys() | config.attribute_map.keys()
    own -= inspect.signature(hf.PretrainedConfig).parameters.keys() | {*getattr(config, "sub_configs", ())}
    own = (own - {"args", "kwargs"}) | _SMALL.keys()
    problems = not_there(
        "settings",
        [f"settings.{name}" for name in settings if name not in own],
        lambda name: f"is no field of {config.model_type}{did_you_mean(name.partition('.')[2], own)}",
    )
    if problems:
        raise ConfigError(problems)


def _with_adapters(
    peft: Any, model: Any, every: bool, rank: int, alpha: float, targets: Sequence[str]
) -> nn.Module:
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM" if every else "SEQ_CLS",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=list(targets) or "all-linear",
    )
    try:
        found: nn.Module = peft.get_peft_model(model, adapters)
    except ValueError as error:
        raise ConfigError(f"targets: {' '.join(str(error).split())[:300]}") from error
    return found
