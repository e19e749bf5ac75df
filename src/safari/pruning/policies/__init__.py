"""Mask policies, one file a paper, by the name that a config gives them."""

from collections.abc import Callable

from safari.pruning.policies.early_bird import early_bird
from safari.pruning.policies.feddst import feddst
from safari.pruning.policies.fedrts import fedrts
from safari.pruning.policies.rigl import rigl
from safari.pruning.policies.set import set_
from safari.pruning.policies.sparse_momentum import sparse_momentum
from safari.pruning.policies.static import static
from safari.pruning.policy import MaskPolicy

POLICIES: dict[str, Callable[..., MaskPolicy]] = {
    "static": static,
    "set": set_,
    "rigl": rigl,
    "sparse-momentum": sparse_momentum,
    "feddst": feddst,
    "fedrts": fedrts,
    "early-bird": early_bird,
}

__all__ = ["POLICIES", "early_bird", "feddst", "fedrts", "rigl", "set_", "sparse_momentum", "static"]
