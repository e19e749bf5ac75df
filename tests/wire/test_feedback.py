from __future__ import annotations

import numpy as np
import pytest

from safari.wire import (
    Lossy,
    Shared,
    covered,
    decode,
    decode_packet,
    encode,
    merge,
    packets,
    roundtrip,
    settle,
    with_residual,
)
from wire.samples import layout_of, lossy, small_layout, small_model


def test_residual_moves_only_where_the_bytes_arrived():
    layout = small_layout()
    vector, mask, reference, _ = small_model(layout)
    shared = Shared(layout, reference, mask)
    old = np.where(mask, np.float32(1e-4), np.float32(5))
    target = with_residual(vector, mask, old)
    datagrams = packets(target, mask, shared, limit=120, values="step", lossy=lossy())
    received = merge((decode_packet(data, shared) for data in datagrams), layout).vector
    arrived = np.zeros(layout.d, bool)
    arrived[covered(datagrams[0], layout)] = True
    new = settle(old, target, received, mask, arrived)
    assert (new[~mask] == 5).all()
    assert (new[mask & ~arrived] == old[mask & ~arrived]).all()
    assert np.allclose((received + new)[mask & arrived], target[mask & arrived], atol=1e-7)
    assert (settle(old, target, received, mask, False) == old).all()


def test_a_shorter_residual_is_about_the_first_numbers():
    vector, mask = np.array([1, 0, 2, 0.125], np.float32), np.array([True, False, True, True])
    residual = np.array([0.25, 0.5, -0.25], np.float32)
    target = with_residual(vector, mask, residual)
    assert target.tolist() == [1.25, 0, 1.75, 0.125]
    received = np.array([1, 0, 2, 0], np.float32)
    assert settle(residual, target, received, mask, True).tolist() == [0.25, 0.5, -0.25]
    arrived = np.array([False, True, True, True])
    assert settle(residual * 2, target, received, mask, arrived).tolist() == [0.5, 1, -0.25]


def test_with_feedback_small_changes_get_through():
    # Without feedback a change of a fraction of a step is lost every time; with it, it adds up and arrives.
    layout = small_layout()
    mask = np.ones(layout.d, bool)
    change = np.where(np.arange(layout.d) % 20, 0.2, 5.0).astype(np.float32)
    zeros = np.zeros(layout.d, np.float32)
    shared = Shared(layout, zeros, mask)
    totals = []
    for feedback in (False, True):
        residual, total = zeros, zeros
        for _ in range(20):
            target = with_residual(change, mask, residual)
            received = decode(encode(target, mask, shared, values="step", lossy=lossy()), shared).vector
            total = total + received
            if feedback:
                residual = settle(residual, target, received, mask, True)
        totals.append(total)
    small = np.arange(layout.d) % 20 > 0
    assert (totals[0][small] == 0).all()
    assert np.abs(totals[1][small] - 4).max() < 1


@pytest.mark.parametrize("arriving", [1.0, 0.3, 0.02])
@pytest.mark.parametrize("ratio", [0, 30, 200])
@pytest.mark.parametrize("power", [1, 3])
def test_what_waits_stays_bounded(arriving, ratio, power):
    # 30 is about what signs take, 200 is out of reach; cubes have long tails.
    layout = layout_of([2000, 30], [True, False])
    mask, zeros = np.ones(layout.d, bool), np.zeros(layout.d, np.float32)
    shared = Shared(layout, zeros, mask)
    rng = np.random.default_rng(5)
    always = 0.3 * rng.normal(size=layout.d)
    residual, largest, sent, got = zeros, 0.0, np.zeros(layout.d), np.zeros(layout.d)
    for _ in range(100):
        change = (always + rng.normal(size=layout.d) ** power).astype(np.float32)
        target = with_residual(change, mask, residual)
        received = roundtrip(target, mask, shared, "step", Lossy(ratio=ratio))
        arrived = bool(rng.random() < arriving)
        residual = settle(residual, target, received, mask, arrived)
        sent, got = sent + change * arrived, got + received * arrived
        largest = max(largest, float(np.linalg.norm(change)))
        assert np.linalg.norm(residual) < 2.4 * largest
    # Nothing else is missing of all that arrived.
    assert np.allclose(sent - got, residual, atol=1e-3)


def test_two_random_bits_add_more_than_they_are_given():
    # Why feedback is not automatic with qsgd.
    layout = layout_of([2000], [True])
    mask, zeros, rng = np.ones(2000, bool), np.zeros(2000, np.float32), np.random.default_rng(5)
    shared, residual = Shared(layout, zeros, mask), zeros
    change = rng.normal(size=2000).astype(np.float32)
    for _ in range(100):
        target = with_residual(change, mask, residual)
        frame = encode(target, mask, shared, values="qsgd", lossy=Lossy(bits=2, rng=rng))
        residual = settle(residual, target, decode(frame, shared).vector, mask, True)
    assert np.linalg.norm(residual) > 10 * np.linalg.norm(change)
