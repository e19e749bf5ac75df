from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import safari
from safari.config import Config, parse
from safari.runs import RunFolder, Saved

TINY = {
    "name": "tiny",
    "rounds": 4,
    "seeds": 2,
    "clients": 4,
    "arms": ["perfect", "drop", "safari"],
    "model": {"name": "mlp"},
    "uplink": {"name": "bernoulli", "p": 0.5},
    "evaluation": {"last": 2, "target": 0.02},
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was really made."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    safari.run(TINY, path)
    return RunFolder.open(path)


Trials = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]


@pytest.fixture
def synthetic(tmp_path: Path) -> Callable[..., RunFolder]:
    """A run made up from records: `{(arm, seed): [record, ...]}`."""

    def make(
        trials: Trials,
        config: Mapping[str, Any] | Config | None = None,
        folder: str = "run",
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> RunFolder:
        settings = {"rounds": 4, "clients": 3, "arms": ["drop", "safari"]}
        complete = config if isinstance(config, Config) else parse({**settings, **(config or {})})
        run = RunFolder.create(tmp_path / folder, complete)
        for (arm, seed), records in trials.items():
            trial = run.trial(arm, seed)
            trial.rounds.touch()
            for one in records:
                trial.append(one, {})
            if tensors is not None:
                trial.save(Saved(len(records), tensors, {}))
        return run

    return make
