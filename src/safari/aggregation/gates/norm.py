"""A bound on the norm of updates, learned from what is usual.

The gate remembers the norm of every client's latest update, refused or not. Their median m is what is usual:
it is that of honest clients as long as fewer than half of the clients heard so far are hostile, however often
these arrive, and it follows when the updates of most clients grow. An update Δ = x_i - x, inside its client's
mask, passes while

    ‖Δ‖ ≤ factor · max(m, floor · ‖x‖)

and is refused otherwise, or scaled down to that norm (clipping, as in Sun et al., "Can You Really Backdoor
Federated Learning?", 2019). Parameters and buffers are on different scales and have a bound each, and so has
every vector that a client algorithm sends beside the model, such as SCAFFOLD's control variate: with its own norm
instead of ‖Δ‖. Updates of 0 say nothing about what is usual and are left out of the median.

In the first round the median is that of the arrivals themselves. Until three clients were heard there is no
majority that could say what is usual, and updates are compared with the model alone: one passes unless it is
a million times as large as the model (and as a model of ones).

By default (factor 100, floor 0.01) only absurd updates are refused: a hundred times as long as usual, and
longer than the model itself. That costs an honest run nothing, and stops the huge updates with which a single
client ends a training. It does not stop a hostile client that sends updates of the usual length in a wrong
direction: nothing that looks at norms alone can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safari.aggregation.compensation import Round, State
from safari.aggregation.gates.gate import Gate, Ruling
from safari.bounds import at_least
from safari.errors import ConfigError

Floats = NDArray[np.float64]

# Numbers whose differences are made at once: 256 MB.
_AT_ONCE = 64_000_000
# How many times as large as the model an update may be before there is a majority.
_BEYOND_THE_MODEL = 1e6
_MAJORITY = 3
# What the state of a vector that comes beside the models is called.
_BESIDE = "beside."


def norm(*, factor: float = 100.0, action: Literal["refuse", "clip"] = "refuse", floor: float = 0.01) -> Gate:
    """Refuse or clip updates that are much longer than usual: ‖Δ‖ > factor · max(median, floor · ‖x‖).

    `factor`: how many times as long as the median over all clients' latest updates one may be. `action`:
    refuse what is longer, or clip it to that length. `floor`: no update is compared with less than this part
    of the model's own norm.
    """
    at_least("factor", factor, 1, finite=True)
    if action not in ("refuse", "clip"):
        raise ConfigError(f"action must be one of clip, refuse; got {action!r}")
    at_least("floor", floor, 0, finite=True)

    def init(clients: int, size: int, device: torch.device) -> State:
        # Of parameters and of buffers; NaN: never heard. Small, and so always on the host.
        return {"norms": torch.full((clients, 2), math.nan, dtype=torch.float64)}

    def apply(state: State, round: Round) -> tuple[Ruling, State]:
        known = state["norms"].cpu()
        if not len(round.arrived):
            return Ruling(), {**state, "norms": known}
        norms = _norms(round)
        found = norms.updates
        if not np.isfinite(found).all():
            # Squares of large numbers are beyond float32.
            found = _norms(replace(round, models=round.models.double(), up={})).updates
        # In numpy, which takes a fraction of torch's time for so few numbers.
        ids, latest = round.arrived_ids, known.numpy().copy()
        latest[ids] = found
        counts = (round.parameters, len(round.global_model) - round.parameters)
        bounds = [
            _bound(latest[:, group], norms.model[group], count, factor, floor)
            for group, count in enumerate(counts)
        ]
        over = found > bounds
        ruling = _ruling(round, found, over, bounds, action) if over.any() else Ruling()
        following = {"norms": torch.from_numpy(latest)}
        for name in sorted(round.up):
            key = f"{_BESIDE}{name}"
            beside = np.full(len(known), math.nan)
            heard = state.get(key, known[:0, 0]).cpu()
            if heard.ndim == 1 and len(heard) <= len(beside):
                # A checkpoint may be of fewer clients; one of another form says nothing.
                beside[: len(heard)] = heard.double().numpy()
            beside[ids] = norms.beside[name]
            count = round.up[name].flatten(1).shape[1]
            bound = _bound(beside, norms.model[0], count, factor, floor)
            ruling = _judge_beside(ruling, norms.beside[name], bound, round, name, action)
            following[key] = torch.from_numpy(beside)
        return ruling, following

    return Gate(init, apply)


@dataclass(frozen=True)
class _Norms:
    """A round's norms, all of which come from the device at once.

    Args:
        updates: `float64[arrived, 2]`, the norm of each update inside its mask, of parameters and of buffers.
        model: Those of the global model.
        beside: `float64[arrived]`, those of the vectors beside the models, by name.
    """

    updates: Floats
    model: tuple[float, float]
    beside: dict[str, Floats]


def _norms(round: Round) -> _Norms:
    x, models, masks, split = round.global_model, round.models, round.masks, round.parameters
    groups = (slice(split), slice(split, None))
    rows = max(1, _AT_ONCE // max(1, len(x)))
    updates: list[list[Tensor]] = [[], []]
    for start in range(0, len(models), rows):
        some = slice(start, start + rows)
        # A model is 0 where its mask cuts. An expanded view is one mask.
        kept = masks[:1] if masks.stride(0) == 0 else masks[some]
        update = models[some] - x * kept
        if round.came is not None:
            update = torch.where(round.came[some], update, 0.0)
        for group, part in zip(updates, groups, strict=True):
            group.append(torch.linalg.vector_norm(update[:, part], dim=1))
    model = [torch.linalg.vector_norm(x[part], dtype=torch.float64)[None] for part in groups]
    names = sorted(round.up)
    beside = [
        torch.linalg.vector_norm(round.up[name].flatten(1), dim=1, dtype=torch.float64) for name in names
    ]
    # The only transfer from the device. In float64, as the model's norms are.
    found = torch.cat([*model, *updates[0], *updates[1], *beside]).cpu().numpy()
    rest = found[2:].reshape(2 + len(names), len(models))
    return _Norms(rest[:2].T, (float(found[0]), float(found[1])), dict(zip(names, rest[2:], strict=True)))


def _bound(norms: Floats, model: float, count: int, factor: float, floor: float) -> float:
    # NaN is not above 0.
    heard = norms[norms > 0]
    if len(heard) < _MAJORITY:
        return _BEYOND_THE_MODEL * max(model, math.sqrt(count))
    # The median; the lower of the two in the middle.
    middle = (len(heard) - 1) // 2
    return factor * max(float(np.partition(heard, middle)[middle]), floor * model)


def _judge_beside(
    ruling: Ruling, found: Floats, bound: float, round: Round, name: str, action: str
) -> Ruling:
    """The ruling after judging one of the vectors beside the models, given its norms."""
    over = found > bound
    if not over.any():
        return ruling
    reasons = {
        client: f"its {name}, beside the model, has a norm of {found[row]:.3g}, and {bound:.3g} is the most"
        for row, client in enumerate(round.arrived_ids)
        if over[row]
    }
    if action == "refuse":
        return replace(ruling, refused={**reasons, **ruling.refused})
    rows = round.up[name].flatten(1)
    scales = torch.from_numpy(np.divide(bound, found, out=np.ones_like(found), where=over)).to(rows.device)
    smaller = (rows.double() * scales[:, None]).to(rows.dtype).view_as(round.up[name])
    return replace(ruling, clipped={**reasons, **ruling.clipped}, up={**ruling.up, name: smaller})


def _ruling(round: Round, found: Floats, over: NDArray[np.bool_], bounds: list[float], action: str) -> Ruling:
    refused: dict[int, str] = {}
    clipped: dict[int, str] = {}
    for row, client in enumerate(round.arrived_ids):
        reasons = [
            f"its update of the {kind} has a norm of {found[row, k]:.3g}, and {bounds[k]:.3g} is the most"
            for k, kind in enumerate(("parameters", "buffers"))
            if over[row, k]
        ]
        if reasons:
            (clipped if action == "clip" else refused)[client] = "; ".join(reasons)
    if not clipped:
        return Ruling(refused=refused)
    scales = np.divide(bounds, found, out=np.ones_like(found), where=over)
    return Ruling(refused=refused, clipped=clipped, models=_scaled(round, scales, list(clipped)))


def _scaled(round: Round, scales: Floats, clients: list[int]) -> Tensor:
    """The models with the updates of these clients times their scales."""
    models, x = round.models.clone(), round.global_model
    ids = round.arrived_ids
    for client in clients:
        row = ids.index(client)
        # In float64: the difference of two large numbers may be beyond float32.
        step = models[row].double() - x
        for k, part in enumerate((slice(round.parameters), slice(round.parameters, None))):
            step[part] *= float(scales[row, k])
        models[row] = torch.where(round.masks[row], (x + step).to(x.dtype), 0.0)
    return models
