from __future__ import annotations

import contextlib
import random
import tracemalloc

import pytest

from safari.errors import WireError
from safari.wire import decode, decode_packet
from wire.fuzzing import attack, large_seeds, mutated, small_seeds


def test_damage_gives_wire_errors_or_valid_models():
    outcome = attack(small_seeds(), cases=20_000, seed=1)
    assert outcome.counts["refused"] > 10_000
    assert outcome.counts["decoded"] > 100


def test_every_truncation_is_refused():
    for seed in small_seeds():
        for size in range(len(seed.data)):
            with pytest.raises(WireError):
                (decode_packet if seed.packet else decode)(seed.data[:size], seed.shared)


def test_memory_stays_in_proportion_to_the_model():
    seeds = large_seeds(60_000)
    rng = random.Random(2)
    worst = 0
    tracemalloc.start()
    try:
        for _ in range(300):
            chosen = rng.choice(seeds)
            data = mutated(rng, chosen, rng.choice(seeds))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(WireError):
                (decode_packet if chosen.packet else decode)(data, chosen.shared)
            worst = max(worst, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert worst < 200 * 60_000


@pytest.mark.slow
def test_a_million_damaged_frames_and_packets():
    assert sum(attack(small_seeds(), cases=990_000, seed=3).counts.values()) == 990_000
    assert sum(attack(large_seeds(), cases=10_000, seed=4).counts.values()) == 10_000
