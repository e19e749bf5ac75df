"""Mask policies by name, and what the answers of a user's own must be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from safari.contracts import pair, tensors
from safari.errors import ConfigError
from safari.kinds import Kind
from safari.pruning.policies import early_bird, feddst, fedrts, rigl, set_, sparse_momentum, static
from safari.pruning.policy import MaskPolicy, MaskRound, Masks, State


def _state(function: str, found: Any, *given: Any) -> State:
    return tensors(f"the state that {function} returns", found)


def _masks(found: Any, state: State, view: MaskRound) -> tuple[Masks, State]:
    """The masks of a round, when engines can use them and they are within the budget."""
    masks, after = pair("apply", "(Masks, state)", found, Masks)
    for name in ("shared", "support"):
        mask = getattr(masks, name)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != view.model.shape):
            raise ConfigError(
                f"{name} must be a bool vector of {len(view.model)} numbers, got {mask.dtype} of shape "
                f"{[*mask.shape]}"
            )
    if masks.shared is not None:
        kept, most = int((masks.shared & view.prunable).sum()), view.budget.total
        if kept > most:
            raise ConfigError(f"a mask must keep at most {most} weights in round {view.number}, got {kept}")
        if not bool((masks.shared | view.prunable).all()):
            raise ConfigError("a mask must keep everything that cannot be pruned: biases, norms, buffers")
    return masks, _state("apply", after)


POLICIES: Kind[Callable[..., MaskPolicy]] = Kind(
    "policy",
    MaskPolicy,
    {
        "static": static,
        "set": set_,
        "rigl": rigl,
        "sparse-momentum": sparse_momentum,
        "feddst": feddst,
        "fedrts": fedrts,
        "early-bird": early_bird,
    },
    tables=("policy",),
    contract={"init": partial(_state, "init"), "apply": _masks, "learn": partial(_state, "learn")},
)
