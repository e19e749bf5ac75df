"""Models of the library transformers, whole or with peft's adapters (extra `transformers`).

No code that comes with a model is ever run, and weights are read from safetensors files alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from safari.errors import ConfigError, MissingExtraError
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
    small one unless they say otherwise. `path` is a folder that `save_pretrained` wrote, or a name on the hub.
    Next-token prediction takes the causal model, a class a sample the one for sequence classification. `rank`
    above 0 puts LoRA adapters of the library peft on the layers `targets` (by default all linear ones): only they
    are trained and travel.
    """
    need_tokens("transformers", shape, tokens)
    library = _library("transformers")
    every = labels == "tokens"
    auto = library.AutoModelForCausalLM if every else library.AutoModelForSequenceClassification
    given = dict(settings or {})
    try:
        if path:
            model = auto.from_pretrained(path, trust_remote_code=False, use_safetensors=True, **given)
        else:
            fields = {**_SMALL, "vocab_size": tokens, "max_position_embeddings": shape[0], **given}
            fields |= {} if every else {"num_labels": classes}
            model = auto.from_config(library.AutoConfig.for_model(kind, **fields), trust_remote_code=False)
    except Exception as error:  # whatever a library of many architectures raises
        source = f"path: {path}" if path else f"kind: {kind}"
        raise ConfigError(
            f"{source}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    size = model.get_input_embeddings().num_embeddings
    if size < tokens:
        raise ConfigError(f"vocab_size must be at least the {tokens} tokens of the data, got {size}")
    model.config.use_cache = False
    return Logits(_with_adapters(model, every, rank, alpha, targets) if rank else model, masked=not every)


def _with_adapters(model: Any, every: bool, rank: int, alpha: float, targets: Sequence[str]) -> nn.Module:
    peft = _library("peft")
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


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(name, "transformers", "models of transformers") from error
