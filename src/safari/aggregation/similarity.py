"""How alike are two clients? Known only for pairs that arrived together at least once."""

from __future__ import annotations

import torch
from torch import Tensor


def unknown(clients: int, device: torch.device | None = None) -> Tensor:
    """A similarity matrix in which no pair has been seen: all NaN."""
    return torch.full((clients, clients), torch.nan, dtype=torch.float32, device=device)


def observe(similarity: Tensor, ids: Tensor, models: Tensor) -> Tensor:
    """The matrix after these clients arrived together: -‖x_u - x_v‖ for every pair of them.

    >>> observe(unknown(3), torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[-0.,  nan, -5.],
            [nan,  nan, nan],
            [-5.,  nan, -0.]])
    """
    distance = torch.stack([torch.linalg.vector_norm(models - model, dim=1) for model in models])
    out = similarity.clone()
    out[ids[:, None], ids[None, :]] = -distance.to(out.dtype)
    return out
