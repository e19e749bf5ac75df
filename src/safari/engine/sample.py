"""One upload of a run under way: what a client would send next from where the run stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from safari.engine.mail import Mail
from safari.engine.reference import train
from safari.engine.state import from_saved
from safari.engine.world import assemble, load_data, rule_of
from safari.errors import ConfigError, RunError, one_of
from safari.runs import RunFolder, read_checkpoint
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
    world = assemble(config, config.seed, load_data(config))
    state = from_saved(read_checkpoint(trial.checkpoint), world, rule_of(arms[name].rule), trial)
    t, x = state.round, state.server.model
    mask = world.mask(x, client, t)
    model, _ = train(world, x, mask, client, t)
    mail = Mail(world, x, t)
    shapes = tuple(e.shape for e in world.layout.entries)
    return Upload(model.cpu().numpy(), mask.cpu().numpy(), mail.shared, shapes)
