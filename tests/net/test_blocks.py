"""What arrived of a model, put together from packets of the wire format."""

from __future__ import annotations

import numpy as np

from safari.net.blocks import assemble
from safari.net.client import PACKET
from safari.net.server import Upload
from safari.wire import Shared, WireLayout, packets
from safari.wire.identity import Identity
from safari.wire.shared import reference_digest

LAYOUT = WireLayout(["conv", "bias", "fc"], [4000, 50, 3000], [True, False, True])
RNG = np.random.default_rng(0)
GLOBAL = RNG.normal(size=LAYOUT.d).astype(np.float32)
MASK = (RNG.random(LAYOUT.d) < 0.5) | np.repeat([False, True, False], LAYOUT.sizes)
VECTOR = np.where(MASK, GLOBAL + 0.01 * RNG.normal(size=LAYOUT.d).astype(np.float32), 0).astype(np.float32)
SHARED = Shared(LAYOUT, GLOBAL, MASK)
NAME = Identity("client 3", 4, reference_digest(GLOBAL))


def upload(found: dict[int, bytes], total: int) -> Upload:
    return Upload(found, total, True, True, 0, 0, 0)


def model(identity: Identity = NAME) -> list[bytes]:
    return packets(VECTOR, MASK, SHARED, limit=PACKET, identity=identity)


def test_a_whole_model():
    parts = model()
    found = assemble(upload(dict(enumerate(parts)), len(parts)), SHARED, NAME)
    assert found.whole
    assert (found.vector == VECTOR).all()
    assert (found.mask == MASK).all()
    assert found.ranges == ((0, LAYOUT.d),)
    assert (found.packets, found.total, found.refused, found.size) == (
        len(parts), len(parts), 0, sum(map(len, parts)),
    )  # fmt: skip


def test_some_packets_of_it():
    parts = model()
    assert len(parts) > 5
    some = {i: parts[i] for i in (0, 1, 4)}
    found = assemble(upload(some, len(parts)), SHARED, NAME)
    came = found.arrived
    assert 0.2 < came.mean() < 0.9
    assert (found.vector[came] == VECTOR[came]).all()
    assert (found.mask[came] == MASK[came]).all()
    assert not found.vector[~came].any()
    assert not found.mask[~came].any()
    assert len(found.ranges) == 2
    assert sum(count for _, count in found.ranges) == came.sum()
    wire = np.zeros(LAYOUT.d, bool)
    for first, count in found.ranges:
        wire[first : first + count] = True
    assert (LAYOUT.from_wire(wire) == came).all()


def test_nothing_came():
    found = assemble(upload({}, 0), SHARED, NAME)
    assert (found.packets, found.ranges, found.modes, found.whole) == (0, (), "", False)


def test_packets_of_another_client_round_or_model_and_garbage_are_refused():
    good = model()
    others = [
        model(Identity("client 4", 4, NAME.model))[0],
        model(Identity("client 3", 5, NAME.model))[1],
        model(Identity("client 3", 4, bytes(8)))[2],
        packets(VECTOR, MASK, SHARED, limit=PACKET)[3],
        b"garbage",
        good[4][:-1],
    ]
    found = assemble(upload({**dict(enumerate(others)), 9: good[5]}, 10), SHARED, NAME)
    assert (found.packets, found.refused) == (1, 6)
    assert (found.vector[found.arrived] == VECTOR[found.arrived]).all()
