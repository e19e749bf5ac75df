from __future__ import annotations

import numpy as np

from safari.wire import Shared, covered, decode, decode_packet, encode, merge, packets, settle, with_residual
from wire.samples import lossy, small_layout, small_model


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
