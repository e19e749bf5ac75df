"""One upload of a run under way: what a client would send next from where the run stands."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from safari.config import Plug
from safari.engine.assembly import assemble
from safari.engine.clients import sent_mask, side_of
from safari.engine.codec import RoundCodec
from safari.engine.parts import load_data
from safari.engine.reference import train
from safari.engine.state import from_saved, initial, to_saved
from safari.engine.world import World
from safari.errors import ConfigError, RunError, one_of
from safari.federation import State, masks_of
from safari.federation.algorithm import vectors_along
from safari.rounds.resume import meaning, refuse_changes
from safari.runs import RunFolder
from safari.runs.files import write_atomically
from safari.wire import Shared


@dataclass(frozen=True)
class Upload:
    """A client's model and mask, and what the server knows before it arrives."""

    vector: np.ndarray
    mask: np.ndarray
    shared: Shared
    shapes: tuple[tuple[int, ...], ...]


def next_upload(run: RunFolder, arm: str | None = None, client: int = 0) -> Upload:
    """Train one client from an arm's last checkpoint (the last arm's by default), as its next round would."""
    config = run.config
    arms = {a.name: a for a in config.arms}
    name = arm or config.arms[-1].name
    if name not in arms:
        raise ConfigError(one_of("arm", name, arms))
    if not 0 <= client < config.clients:
        raise ConfigError(f"client must be between 0 and {config.clients - 1}, got {client}")
    trial = run.trial(name, config.seed)
    if not trial.checkpoint.exists():
        raise RunError(f"{trial.path} has no checkpoint yet")
    saved = trial.read_checkpoint()
    refuse_changes(saved, config, trial)
    # An upload does not depend on the rule, so a user's own is not loaded for it.
    config = replace(config.for_arm(arms[name]), arms=(replace(arms[name], rule=Plug("drop")),))
    world = assemble(config, config.seed, load_data(config))
    saved = replace(saved, facts={**saved.facts, "config": meaning(config, name)})
    fed = world.federation(world.rules[name])
    if run.is_federation:
        # Its checkpoints are the server's: links, and what clients keep to themselves, are taken as at first.
        first = to_saved(initial(world, fed), world, trial)
        saved = replace(saved, tensors={**first.tensors, **saved.tensors})
    return upload_of(world, from_saved(saved, world, fed, trial), client)


def upload_of(world: World, state: State, client: int) -> Upload:
    """Upload that a client would send in the round that follows a state."""
    t, x, fed = state.round, state.model, world.federation()
    masks, _ = masks_of(fed, state, x)
    mask, _ = world.client_mask(masks, x, client, t)
    side = side_of(world, state["client"], vectors_along(world.client, state["algorithm"]), [client])
    model = train(world, x, mask, client, t, side).model
    codec, shapes = RoundCodec(world, x, t, masks), tuple(e.shape for e in world.layout.entries)
    return Upload(model.cpu().numpy(), sent_mask(world, mask).cpu().numpy(), codec.shared, shapes)


def save_upload(path: Path, upload: Upload, **more: np.ndarray) -> None:
    """Write an upload as the `.npz` that benchmarks/wire.py reads; `more` are further arrays to keep."""
    shared = upload.shared
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {
        "reference": shared.reference,
        "vector": upload.vector,
        "mask": upload.mask,
        "predicted": shared.predicted_mask,
        "names": np.array(shared.layout.names),
        "sizes": np.array(shared.layout.sizes),
        "prunable": np.array(shared.layout.prunable),
        "shapes": np.array(["x".join(map(str, shape)) for shape in upload.shapes]),
        **more,
    }
    np.savez_compressed(buffer, **{name: array for name, array in arrays.items() if array is not None})
    write_atomically(path, buffer.getvalue())
