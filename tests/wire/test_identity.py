from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError, WireError
from safari.wire import (
    Identity,
    IdentityError,
    Shared,
    covered,
    decode,
    decode_packet,
    encode,
    inspect,
    merge,
    packet_label,
    packets,
    reference_digest,
)
from wire.samples import (
    EXACT_MODES,
    LOSSY_MODES,
    layout_of,
    lossy,
    models,
    same_bits,
    small_layout,
    small_model,
)

IDENTITY = Identity("client 7", 12, bytes(range(8)))
OTHERS = {
    "client": replace(IDENTITY, client="client 8"),
    "round": replace(IDENTITY, round=11),
    "model": replace(IDENTITY, model=bytes(8)),
}


def made(identity=IDENTITY, values="auto", limit=200):
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    shared = Shared(layout, reference, predicted)
    choices = {"values": values, "identity": identity}
    frame = encode(vector, mask, shared, lossy=lossy(), **choices)
    return frame, packets(vector, mask, shared, limit=limit, lossy=lossy(), **choices), shared


@pytest.mark.parametrize("values", [*EXACT_MODES, *LOSSY_MODES])
def test_an_identity_adds_its_bytes_and_changes_nothing_else(values):
    frame, datagrams, shared = made(values=values)
    plain, plain_datagrams, _ = made(None, values)
    assert len(frame) == len(plain) + 20
    ours, theirs = decode(frame, shared, expect=IDENTITY), decode(plain, shared)
    assert same_bits(ours.vector, theirs.vector)
    assert (ours.mask == theirs.mask).all()
    merged = merge((decode_packet(data, shared, expect=IDENTITY) for data in datagrams), shared)
    assert same_bits(merged.vector, theirs.vector)
    assert max(map(len, datagrams)) <= 200
    assert sum(map(len, datagrams)) - sum(map(len, plain_datagrams)) < 12 * len(datagrams)


def test_what_is_stated_can_be_read_before_anything_is_known():
    frame, datagrams, shared = made()
    assert inspect(frame).info.identity == IDENTITY.label
    assert decode(frame, shared).info.identity == IDENTITY.label
    label = packet_label(datagrams[0])
    assert (label.client, label.round) == (IDENTITY.label.client[:4], 12)
    assert label == IDENTITY.packet_key
    assert packet_label(made(None)[1][0]) is None
    places = np.concatenate([covered(data, shared) for data in datagrams])
    assert sorted(places.tolist()) == list(range(shared.layout.d))
    assert inspect(datagrams[0], shared, expect=IDENTITY).parts["head"] > 7


@pytest.mark.parametrize("what", OTHERS)
def test_a_message_of_another_is_refused_by_name(what):
    frame, datagrams, shared = made()
    with pytest.raises(IdentityError, match=rf"^{what} must be .* \(at byte 18\)$") as caught:
        decode(frame, shared, expect=OTHERS[what])
    assert caught.value.what == what
    for data in datagrams:
        # The model's digest is only in the checksum, and in one byte that finds most others first.
        with pytest.raises(
            WireError, match=rf"^{what} must be|^context of .* identity's model must|^checksum"
        ):
            decode_packet(data, shared, expect=OTHERS[what])


def test_a_wrong_round_is_reported_before_the_missing_reference():
    frame, _, shared = made()
    later = Shared(shared.layout, shared.reference + 1, shared.predicted_mask)
    with pytest.raises(IdentityError, match=r"^round must be 13, got 12 \(at byte 18\)$"):
        decode(frame, later, expect=replace(IDENTITY, round=13))


def test_silence_is_no_identity_and_an_identity_is_no_silence():
    plain, plain_datagrams, shared = made(None)
    with pytest.raises(
        IdentityError, match=r"^identity must be stated, of client 'client 7' \(at byte 18\)$"
    ):
        decode(plain, shared, expect=IDENTITY)
    with pytest.raises(IdentityError, match=r"^identity must be stated, of client 'client 7' \(at byte 7\)$"):
        decode_packet(plain_datagrams[0], shared, expect=IDENTITY)
    data = made()[1][0]
    with pytest.raises(IdentityError, match=r"^the packet is of client \w{8}, round 12: expect must name it"):
        decode_packet(data, shared)


def test_packets_of_two_uploads_are_not_merged():
    _, datagrams, shared = made()
    for other in (None, *OTHERS.values()):
        theirs = made(other)[1]
        parts = [
            decode_packet(datagrams[0], shared, expect=IDENTITY),
            decode_packet(theirs[1], shared, expect=other),
        ]
        with pytest.raises(SafariError, match=r"^packets to merge must share one identity, got Identity"):
            merge(parts, shared)
    elsewhere = layout_of([shared.layout.d], [True])
    with pytest.raises(SafariError, match=r"^packets to merge must be of the layout given$"):
        merge([decode_packet(datagrams[0], shared, expect=IDENTITY)], elsewhere)


@given(models(), st.text(max_size=8), st.integers(0, 2**32 - 1), st.binary(min_size=8, max_size=8))
def test_any_identity_comes_back(model, client, number, digest):
    layout, vector, mask, reference, predicted = model
    shared = Shared(layout, reference, predicted)
    identity = Identity(client, number, digest)
    found = decode(encode(vector, mask, shared, identity=identity), shared, expect=identity)
    assert same_bits(found.vector, vector)
    assert found.info.identity == identity.label
    datagrams = packets(vector, mask, shared, limit=100, identity=identity)
    whole = merge((decode_packet(data, shared, expect=identity) for data in datagrams), layout)
    assert same_bits(whole.vector, vector)
    assert whole.arrived.all()


def test_limits_are_named():
    with pytest.raises(SafariError, match=r"^identity's round must be 0 to 4294967295, got -1$"):
        Identity("a", -1, bytes(8))
    with pytest.raises(SafariError, match=re.escape("identity's model must be a digest of 8 bytes, got b''")):
        Identity("a", 0, b"")
    assert Identity("a", 0, reference_digest(np.zeros(3, np.float32))).model.hex() == "15ec7bf0b50732b4"
