"""Mask policies, one file a paper."""

from safari.pruning.policies.early_bird import early_bird
from safari.pruning.policies.feddst import feddst
from safari.pruning.policies.fedrts import fedrts
from safari.pruning.policies.rigl import rigl
from safari.pruning.policies.set import set_
from safari.pruning.policies.sparse_momentum import sparse_momentum
from safari.pruning.policies.static import static

__all__ = ["early_bird", "feddst", "fedrts", "rigl", "set_", "sparse_momentum", "static"]
