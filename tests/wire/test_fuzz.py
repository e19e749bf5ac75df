from __future__ import annotations

import pytest

from safari.errors import WireError
from safari.wire import decode, decode_packet
from wire.fuzzing import attack, large_seeds, small_seeds


def test_damage_gives_wire_errors_or_valid_models():
    outcome = attack(small_seeds(), cases=6_000, seed=1)
    assert outcome.counts["refused"] > 3_000
    assert outcome.counts["decoded"] > 30


def test_every_truncation_is_refused():
    for seed in small_seeds():
        for size in range(len(seed.data)):
            with pytest.raises(WireError):
                (decode_packet if seed.packet else decode)(seed.data[:size], seed.shared)


@pytest.mark.slow
def test_a_million_damaged_frames_and_packets():
    assert sum(attack(small_seeds(), cases=990_000, seed=3).counts.values()) == 990_000
    assert sum(attack(large_seeds(), cases=10_000, seed=4).counts.values()) == 10_000
