"""signSGD with majority vote through the training loop: signs up, a vote at the server."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kit import SMALL, bit_equal_in_halves, play

VOTE: dict[str, Any] = {
    **SMALL,
    "arms": ["majority-vote"],
    "uplink": {"name": "bernoulli", "p": 0.7},
    "wire": {"values": "sign", "every": 1},
    "checkpoint": {"every": 2},
}


def test_both_engines_take_the_same_vote() -> None:
    """Except for votes on changes that are rounding errors, of which a model has few."""
    engines = [
        play(VOTE | {"engine": SMALL["engine"] | {"name": name}}) for name in ("reference", "vectorised")
    ]
    for (before, one, theirs), (_, other, ours) in zip(*engines, strict=True):
        close = (one.model - other.model).abs() < 1e-6
        assert close.double().mean() > 0.995
        assert theirs.arrived == ours.arrived
        assert theirs.bytes == ours.bytes
        # All numbers take the same step: but for those that were cut, changes have one magnitude.
        if ours.arrived:
            moved = (one.model - before.model).abs()[one.model != 0]
            step = float(one["rule"]["step"])
            assert step > 0
            assert (((moved - step).abs() < 1e-6) | (moved < 1e-6)).all()


@pytest.mark.parametrize("packets", [False, True])
def test_a_resumed_run_is_bit_equal(tmp_path: Any, packets: bool) -> None:
    own: dict[str, Any] = {"packets": {"name": "lossy", "loss": 0.3}} if packets else {}
    config = VOTE | own | {"wire": {"values": "sign", "every": 1, "feedback": not packets}}
    saved, _ = bit_equal_in_halves(config, tmp_path, 3)
    assert saved["rule.step"] > 0
