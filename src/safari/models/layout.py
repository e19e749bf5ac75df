"""A module as one flat vector, and back.

Parameters come first, float buffers after them, so that `vector[:layout.parameters]` is all that was
trained. The server needs this table and never the module.

What is frozen (`requires_grad=False`) is no part of the vector: it never changes, so it neither travels nor
is averaged, and one module holds it for all clients. The same goes for the buffers of a layer that is frozen
as a whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from safari.errors import SafariError

Kind = Literal["weight", "parameter", "buffer"]

_PRUNABLE_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
# The parts of attention that are linear maps but not layers of their own.
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the vector; `kind` is "weight" where it may be pruned."""

    name: str
    shape: tuple[int, ...]
    offset: int
    kind: Kind

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Offset at which the next entry begins."""
        return self.offset + self.size


@dataclass(frozen=True)
class Layout:
    """Names, shapes and kinds of all the numbers of a module, in a fixed order.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.size, layout.parameters, layout.prunable_count
    (8, 8, 6)
    >>> [(entry.name, entry.kind) for entry in layout.entries]
    [('weight', 'weight'), ('bias', 'parameter')]

    `base` is a hash of what is frozen, empty where nothing is: a vector means something only beside the same
    frozen numbers.
    """

    entries: tuple[Entry, ...]
    base: str = ""

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of any module; names the tensor when one cannot be held exactly in float32."""
        prunable = _prunable_ids(module)
        persistent = module.state_dict(keep_vars=True).keys()
        frozen = frozen_tensors(module)
        found: list[tuple[str, Tensor, Kind]] = [
            (name, p, "weight" if id(p) in prunable else "parameter")
            for name, p in module.named_parameters()
            if name not in frozen
        ]
        if frozen and not found:
            raise SafariError(f"{type(module).__name__} has no parameters that are trained: all are frozen")
        found += [
            (name, b, "buffer")
            for name, b in module.named_buffers()
            if name in persistent and b.is_floating_point() and name not in frozen
        ]
        entries = []
        offset = 0
        for name, tensor, kind in found:
            if nn.parameter.is_lazy(tensor):
                raise SafariError(f"{name} has no shape yet: run a batch through the lazy module first")
            if tensor.dtype not in _EXACT_IN_FLOAT32:
                raise SafariError(f"{name} must be float32, float16 or bfloat16; got {tensor.dtype}")
            entries.append(Entry(name, tuple(tensor.shape), offset, kind))
            offset = entries[-1].end
        if not entries:
            raise SafariError(f"{type(module).__name__} has no parameters")
        # Parameters alone: a buffer may change while a layer is used, and the module is scratch.
        return cls(tuple(entries), _digest({n: p for n, p in frozen.items() if isinstance(p, nn.Parameter)}))

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.entries[-1].end

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; they come first in the vector, before the buffers."""
        return sum(entry.size for entry in self.entries if entry.kind != "buffer")

    @cached_property
    def prunable(self) -> Tensor:
        """A bool vector: True where a weight may be pruned."""
        return torch.cat([torch.full((e.size,), e.kind == "weight") for e in self.entries])

    @cached_property
    def prunable_count(self) -> int:
        """Number of weights that may be pruned."""
        return int(self.prunable.sum())

    def prunable_on(self, device: torch.device) -> Tensor:
        """`prunable` on a device, sent there once. It is shared: do not write to it."""
        return self._sent("prunable", device, lambda: self.prunable)

    def weights_in(self, *masks: Tensor) -> list[list[int]]:
        """Number of weights that each mask keeps in each prunable tensor, in the order of the layout.

        All masks are on one device; the counts are copied from it once.

        >>> layout = Layout.of(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)))
        >>> layout.weights_in(torch.tensor([True, False, True, True, False]))
        [[1, 1]]
        """
        weights = [e for e in self.entries if e.kind == "weight"]
        device = masks[0].device
        if device.type == "cpu":
            arrays = [mask.numpy() for mask in masks]
            return [[int(np.count_nonzero(mask[e.offset : e.end])) for e in weights] for mask in arrays]
        return self._weights_from_sums(masks, weights)

    def _weights_from_sums(self, masks: Sequence[Tensor], weights: Sequence[Entry]) -> list[list[int]]:
        """Count kept weights by running sums: a few kernels a mask, however many tensors there are."""
        places = self._sent(
            "edges",
            masks[0].device,
            lambda: torch.tensor(
                [max(at - 1, 0) for e in weights for at in (e.offset, e.end)], dtype=torch.int64
            ),
        )
        sums = torch.stack([mask.cumsum(0)[places] for mask in masks]).tolist()
        return [
            [
                (end - (begin if e.offset else 0)) if e.size else 0
                for e, begin, end in zip(weights, row[::2], row[1::2], strict=True)
            ]
            for row in sums
        ]

    def _sent(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        if (name, device) not in self._constants:
            self._constants[name, device] = make().to(device)
        return self._constants[name, device]

    @cached_property
    def _constants(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    @cached_property
    def homes(self) -> tuple[Tensor, Tensor]:
        """For each parameter, the size and the offset of the tensor that it is a part of.

        >>> Layout.of(nn.Linear(2, 1)).homes
        (tensor([2, 2, 1]), tensor([0, 0, 2]))
        """
        held = [e for e in self.entries if e.kind != "buffer"]
        sizes = torch.tensor([e.size for e in held])
        return sizes.repeat_interleave(sizes), torch.tensor([e.offset for e in held]).repeat_interleave(sizes)

    @cached_property
    def digest(self) -> str:
        """A hash of names, shapes and kinds, and of what is frozen: two sides with the same digest mean the
        same vector."""
        table: list[object] = [(e.name, e.shape, e.kind) for e in self.entries]
        table += [self.base] if self.base else []
        return hashlib.sha256(json.dumps(table).encode()).hexdigest()

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector (or a mask) by name, in each tensor's own shape.

        >>> Layout.of(nn.Linear(2, 1)).split(torch.tensor([1.0, 2.0, 3.0]))
        {'weight': tensor([[1., 2.]]), 'bias': tensor([3.])}
        """
        self.check(vector)
        return {e.name: vector[e.offset : e.end].view(e.shape) for e in self.entries}

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector from tensors by name: the inverse of `split`."""
        return torch.cat([tensors[e.name].reshape(-1) for e in self.entries])

    def read(self, module: nn.Module) -> Tensor:
        """The module's numbers as a new float32 vector."""
        state = module.state_dict(keep_vars=True)
        return self.join({e.name: state[e.name].detach().to(torch.float32) for e in self.entries})

    @torch.no_grad()
    def write(self, module: nn.Module, vector: Tensor) -> None:
        """Put a vector into the module, in place; integer buffers are left alone."""
        state = cast(Mapping[str, Tensor], module.state_dict(keep_vars=True))
        for name, value in self.split(vector).items():
            state[name].copy_(value)

    def counters(self, module: nn.Module) -> dict[str, Tensor]:
        """A copy of the buffers that the vector does not hold: counts, and what is no part of the state.

        >>> norm = nn.BatchNorm1d(2)
        >>> Layout.of(norm).counters(norm)
        {'num_batches_tracked': tensor(0)}
        """
        held = {entry.name for entry in self.entries}
        return {name: buffer.clone() for name, buffer in module.named_buffers() if name not in held}

    @torch.no_grad()
    def put_back(self, module: nn.Module, counters: Mapping[str, Tensor]) -> None:
        """Write a copy made by `counters` into the module."""
        buffers = dict(module.named_buffers())
        for name, value in counters.items():
            buffers[name].copy_(value)

    def check(self, vector: Tensor) -> None:
        """Raise unless the vector has this layout's length."""
        if vector.shape != (self.size,):
            raise SafariError(f"vector must have shape ({self.size},), got {tuple(vector.shape)}")


def prunable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable weights of convolution, linear, attention and recurrent layers, by name."""
    ids = _prunable_ids(module)
    return {name: p for name, p in module.named_parameters() if id(p) in ids}


def frozen_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that are not trained, and buffers of layers without any trained parameter, by name."""
    found: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    for path, layer in module.named_modules():
        own = list(layer.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            prefix = f"{path}." if path else ""
            found |= {f"{prefix}{name}": b for name, b in layer.named_buffers(recurse=False)}
    return found


def _is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is the linear layer of GPT-2 in transformers, a library that may not be installed."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of tensors by name, empty for none."""
    if not tensors:
        return ""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _prunable_ids(module: nn.Module) -> set[int]:
    found = set()
    for layer in module.modules():
        names: tuple[str, ...] = ()
        if isinstance(layer, _PRUNABLE_LAYERS) or _is_conv1d(layer):
            names = ("weight",)
        elif isinstance(layer, nn.MultiheadAttention):
            names = _ATTENTION_WEIGHTS
        elif isinstance(layer, nn.RNNBase):
            names = tuple(name for name, _ in layer.named_parameters() if name.startswith("weight_"))
        weights = (getattr(layer, name, None) for name in names)
        found |= {id(w) for w in weights if isinstance(w, nn.Parameter) and w.requires_grad}
    return found
