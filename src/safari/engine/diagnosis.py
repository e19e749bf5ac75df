"""The quantities of the theory, which only a simulation can see: it can train the clients that are missing.

Nothing here affects the run: models are trained again from the same draws, for the diagnosis alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from safari.engine.world import World
from safari.runs.record import RoundRecord
from safari.sampling import Draw

# Models `[clients, size]` and masks `[clients or 1, size]` of these clients, as an engine trains them.
Everyone = Callable[[Sequence[int]], tuple[Tensor, Tensor]]

Diagnosis = dict[str, float | None]


def due(world: World, t: int) -> bool:
    """Does the config ask for a diagnosis of round t?"""
    every = world.config.diagnostics.every
    return every > 0 and (t + 1) % every == 0


def diagnose(
    world: World, x: Tensor, after: Tensor, draw: Draw, record: RoundRecord, everyone: Everyone
) -> Diagnosis:
    """Compare a round with what it would have been had everything arrived. Parameters only, no buffers.

    error: ‖x' − x*‖² / ‖x* − x‖², with x' the new model and x* the one that a perfect network would have
    given. phi: Σ_j w_j ‖ŷ_j − Δ_j‖² / Σ_j w_j ‖Δ_j‖² over the missing for whom the rule named stand-ins (the
    term φ of Lemma 2, relative), with ŷ_j = (1/|S_j|) Σ_{k ∈ S_j} Δ_k over the named ones S_j that arrived:
    the paper's rule names one; of several, each counts the same, because rules name stand-ins and not their
    shares (what a mixture comes to is seen in error). delta: ‖x − x ⊙ M_i‖ / ‖x‖, mean over the
    clients. dissimilarity: Σ_i w_i ‖Δ_i − Δ̄‖² / ‖Δ̄‖². A quantity that is not defined is None.
    """
    parameters, cohort = world.layout.parameters, draw.clients
    models, masks = everyone(cohort)
    before = x[:parameters].double()
    updates = models[:, :parameters].double() - before
    weights = _weights(world, draw).to(x.device)
    full = weights @ updates
    step = after[:parameters].double() - before
    cut = torch.where(masks[:, :parameters], 0.0, before)
    return {
        "error": _ratio((step - full).square().sum(), full.square().sum()),
        "phi": _phi(updates, weights, cohort, record),
        "delta": _finite(cut.norm(dim=1).mean() / before.norm()),
        "dissimilarity": _ratio(weights @ (updates - full).square().sum(1), full.square().sum()),
    }


def _weights(world: World, draw: Draw) -> Tensor:
    if draw.shares is not None:
        return torch.tensor(draw.shares, dtype=torch.float64)
    everybody = world.client_weights or [1.0] * len(world.parts)
    found = torch.tensor([everybody[client] for client in draw.clients], dtype=torch.float64)
    return found / found.sum()


def _phi(updates: Tensor, weights: Tensor, cohort: Sequence[int], record: RoundRecord) -> float | None:
    row = {client: k for k, client in enumerate(cohort)}
    wrong, right = updates.new_zeros(()), updates.new_zeros(())
    for missing, named in record.stand_ins.items():
        # A rule may also name what it remembers of a client: that is no update of this round.
        who = [row[client] for client in named if client in record.arrived]
        if who:
            k = row[missing]
            given = updates[who].mean(0)
            wrong = wrong + weights[k] * (given - updates[k]).square().sum()
            right = right + weights[k] * updates[k].square().sum()
    return _ratio(wrong, right)


def _ratio(above: Tensor, below: Tensor) -> float | None:
    return _finite(above / below)


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
