"""LoRA (Hu et al., 2022): low-rank adapters beside linear layers that are frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from safari.bounds import path_of
from safari.errors import ConfigError, DataError, did_you_mean
from safari.models.checks import need_positive
from safari.models.layout import Layout
from safari.plugins import check_options, named_arguments, resolve


class LoRALinear(nn.Module):
    """y = W x + b + (alpha / rank) · B A x: W and b are frozen, A is random and B is 0 at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
        self.scale = alpha / rank

    @property
    def weight(self) -> Tensor:
        """The matrix that the layer amounts to. Torch's transformer layers read it instead of calling the layer."""
        return self.base.weight + self.scale * self.b.weight @ self.a.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias, which torch's transformer layers read in the same way."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer, and what the adapter adds."""
        return self.base(x) + self.scale * self.b(self.a(x))  # type: ignore[no-any-return]


def add_lora(
    module: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("*",),
    keep: Sequence[str] = (),
) -> nn.Module:
    """Freeze a module and put adapters beside its linear layers, in place. Returns the module.

    Only the adapters' matrices are trained then, travel and are averaged; everything else is held once.

    Parameters
    ----------
    module: any module with `nn.Linear` layers.
    rank, alpha: an adapter adds (alpha / rank) · B A x, with A of `rank` rows.
    targets: names of linear layers, with `*` for anything: `"blocks.*.qkv"`. By default all.
    keep: names of parameters that are trained as they are, with `*`: `"head.*"`.

    >>> net = add_lora(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), rank=1, targets=["0"])
    >>> [(entry.name, entry.size) for entry in Layout.of(net).entries]
    [('0.a.weight', 4), ('0.b.weight', 4)]
    """
    need_positive("rank", rank)
    # By exact type: a subclass may be read by its owner in a way of its own, as attention reads its last layer.
    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in layers):
            known = ", ".join(sorted(layers)) or "none"
            raise ConfigError(
                f"targets: {pattern!r} names no linear layer (there are: {known}){did_you_mean(pattern, layers)}"
            )
    names = [name for name, _ in module.named_parameters()]
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"keep: {pattern!r} names no parameter{did_you_mean(pattern, names)}")
    module.requires_grad_(False)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in keep))
    for name, layer in layers.items():
        if any(fnmatchcase(name, pattern) for pattern in targets):
            kept = [p.requires_grad for p in layer.parameters()]
            adapter = LoRALinear(layer, rank, alpha)
            for parameter, trained in zip(layer.parameters(), kept, strict=True):
                parameter.requires_grad_(trained)
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, adapter)
    return module


def lora(
    shape: tuple[int, ...],
    classes: int,
    tokens: int = 0,
    labels: str = "class",
    *,
    base: str = "transformer",
    options: Mapping[str, Any] | None = None,
    weights: str = "",
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("*",),
    keep: Sequence[str] = (),
) -> nn.Module:
    """LoRA adapters on another model (`base`, with its `options`): only they are trained, travel and are averaged.

    `weights`: a safetensors file with the base's numbers: a run's checkpoint, or a state dict; without one the
    base is as it is made. `rank`, `alpha`: an adapter adds (alpha / rank) · B A x. `targets`: the linear layers
    that get one, with `*` for anything; `keep`: parameters that are trained as they are.
    """
    from safari.models import MODELS

    given = dict(options or {})
    factory = resolve("model", "base", base, {name: make for name, make in MODELS.items() if name != "lora"})
    problems = check_options("options", factory, given)
    if problems:
        raise ConfigError(problems)
    module: nn.Module = factory(
        shape, classes, **named_arguments(factory, tokens=tokens, labels=labels), **given
    )
    if weights:
        load_weights(module, path_of("weights", weights))
    return add_lora(module, rank=rank, alpha=alpha, targets=targets, keep=keep)


def load_weights(module: nn.Module, path: Path) -> None:
    """Put the numbers of a safetensors file into a module: a run's checkpoint, or a state dict by name."""
    if not path.is_file():
        raise DataError(f"weights: no such file: {path}")
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if "model" in names and len(file.get_slice("model").get_shape()) == 1:
                Layout.of(module).write(module, file.get_tensor("model"))
                return
            state = {name: file.get_tensor(name) for name in names}
        with torch.no_grad():
            module.load_state_dict(state)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise DataError(f"weights: {path}: {' '.join(str(error).split())[:300]}") from error
    except Exception as error:
        raise DataError(f"weights: {path} does not fit the base: {error}") from error
