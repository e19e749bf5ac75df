"""AdaQuantFL: the levels of QSGD follow the training loss that the server has heard of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kit import SMALL, bit_equal_in_halves, play, world_of, write_trace
from safari.config import Config, Wire, parse
from safari.engine.codec import RoundCodec
from safari.engine.state import from_saved, initial, to_saved
from safari.errors import ConfigError, RunError
from safari.federation.round import reported
from safari.rounds.rate import adapted_levels
from safari.runs import Trial
from safari.wire import decode, encode

ADAPT: dict[str, Any] = {
    **SMALL,
    "rounds": 12,
    "arms": ["drop"],
    "model": {"name": "mlp", "hidden": [16]},
    "pruning": {"sparsity": 0.5},
    "local": {"steps": 8, "batch": 16, "lr": 0.03},
    "partition": {"name": "iid"},
    "wire": {"values": "qsgd", "bits": 4, "adapt": "loss", "every": 1},
    "checkpoint": {"every": 2},
}


@pytest.fixture
def config(tmp_path: Any) -> dict[str, Any]:
    """Nothing arrives in rounds 0 and 4; otherwise most do."""
    rows = ["00000", "11111", "10111", "11111", "00000", *["11011", "01111"] * 4]
    return ADAPT | {"uplink": {"name": "trace", "file": write_trace(tmp_path / "trace.csv", rows)}}


def test_levels_over_rounds_by_hand() -> None:
    """s_0 = 2² − 1 = 3, f_0 = (1 + 3)/2; a round's levels come from the losses of the rounds before it."""
    wire, losses = Wire("qsgd", bits=3, adapt="loss"), torch.full((2,), math.nan, dtype=torch.float64)
    story: list[tuple[tuple[float, ...], int]] = [
        ((), 3),  # nothing heard yet
        ((1.0, 3.0), 3),  # nor here
        ((0.5,), 3),  # the first loss, 2
        ((), 6),  # 3 · √(2 / 0.5)
        ((99.0, 0.1, 0.3), 6),  # a round in which nothing came changes nothing
        ((math.nan,), 9),  # 3 · √(2 / 0.2) = 9.49: without the loss that was refused
        ((0.0,), 9),  # no number, no root
        ((8.0,), 9),
        ((200.0,), 2),  # 3 · √(2 / 8) = 1.5, to the even one
        ((1e-9,), 1),  # 0.3, but at least 1
        ((1.0,), (1 << 15) - 1),  # 134,164, but at most that
    ]
    for sent, expected in story:
        assert adapted_levels(wire, losses) == expected
        # Of more than two, the server has refused the first.
        used = sent[1:] if len(sent) > 2 else sent
        if used:
            losses = reported(losses, torch.tensor(used, dtype=torch.float64).mean())
    assert losses.tolist() == [2.0, 1.0]


def test_a_run_takes_these_levels_and_its_bytes_grow_as_its_loss_falls(config: dict[str, Any]) -> None:
    first = latest = None
    sizes = []
    for _, after, record in play(config):
        expected = 7 if first is None or latest is None else round(7 * math.sqrt(first / latest))
        assert record.to_json()["levels"] == expected
        if record.arrived:
            latest = record.train_loss
            first = latest if first is None else first
            sizes.append((expected, record.bytes["up"]))
        if latest is not None:
            assert after["wire"]["losses"].tolist() == pytest.approx([first, latest], rel=1e-12)
    assert first is not None
    assert latest is not None
    assert latest < first / 2
    assert sizes[-1][0] >= 10
    assert sizes[-1][1] > sizes[0][1] * 1.1


def test_what_the_server_sees_is_what_the_bytes_say(config: dict[str, Any]) -> None:
    """With few levels, many, and more than fit into a byte: decoded from real frames, bit for bit."""
    world = world_of(config)
    fed = world.federation()
    state = initial(world, fed)
    x = state.model
    noise = torch.randn(2, len(x), generator=torch.Generator().manual_seed(3))
    mask = world.mask(x, 0, 0)
    models = torch.where(mask, x + 0.01 * noise, 0.0)
    sizes = []
    for levels in (1, 3, 100, 1000, (1 << 15) - 1):
        codec = RoundCodec(world, x, 0, levels=levels)
        got = codec.up([0, 1], models, mask[None])
        frames = [
            encode(row.numpy(), mask.numpy(), codec.shared, values="qsgd", lossy=codec.choices(client))
            for client, row in enumerate(models)
        ]
        for row, frame in zip(got, frames, strict=True):
            assert torch.equal(row, torch.from_numpy(decode(frame, codec.shared).vector))
        assert codec.sizes()["up"] == sum(map(len, frames)) / 2
        sizes.append(sum(map(len, frames)))
    assert sizes == sorted(set(sizes))


def test_both_engines_announce_the_same_levels(config: dict[str, Any]) -> None:
    engines = [
        play(config | {"rounds": 8, "engine": SMALL["engine"] | {"name": name}})
        for name in ("reference", "vectorised")
    ]
    for (_, one, theirs), (_, other, ours) in zip(*engines, strict=True):
        assert theirs.to_json()["levels"] == ours.to_json()["levels"]
        # A number between two levels may fall to either side when models differ in their last bits.
        close = (one.model - other.model).abs() < 1e-5
        assert close.double().mean() > 0.99


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_resumed_run_is_bit_equal(tmp_path: Any, config: dict[str, Any], engine: str) -> None:
    config = config | {"rounds": 8, "engine": {"name": engine, "device": "cpu", "threads": 1}}
    saved, records = bit_equal_in_halves(config, tmp_path, 5)
    assert saved["wire.losses"][1] < saved["wire.losses"][0]
    assert len({record["levels"] for record in records}) > 1


def test_a_checkpoint_whose_losses_are_none_is_refused(config: dict[str, Any]) -> None:
    world = world_of(config)
    fed = world.federation()
    trial = Trial("drop", 0, Path("trial"))
    for found in ([0.0, 1.0], [1.0, math.nan], [1.0, math.inf]):
        state = initial(world, fed).put("wire", {"losses": torch.tensor(found, dtype=torch.float64)})
        with pytest.raises(RunError, match=r"wire\.losses must be above 0 and finite"):
            from_saved(to_saved(state, world, trial), world, fed, trial)


def test_other_modes_have_no_levels_to_adapt() -> None:
    with pytest.raises(ConfigError, match=r"^wire.adapt = 'loss' needs wire.values = 'qsgd', got 'int8'$"):
        parse({"wire": {"values": "int8", "adapt": "loss"}})
    assert Config().wire.adapt == "none"
