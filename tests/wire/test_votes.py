from __future__ import annotations

import contextlib
import random
import zlib
from math import lgamma, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError, WireError
from safari.wire import Identity, IdentityError, decode_votes, encode_votes
from wire.samples import lossy


@st.composite
def votes(draw):
    size = draw(st.integers(0, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    indices = rng.permutation(size)[: draw(st.integers(0, size))]
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    segments = np.diff([0, *cuts, size]).tolist()
    return (
        indices,
        rng.normal(size=indices.size).astype(np.float32),
        size,
        draw(st.sampled_from([None, segments])),
    )


@given(votes())
def test_places_come_back_in_order(case):
    indices, _, size, segments = case
    found = decode_votes(encode_votes(indices, None, size, segments=segments), size, segments=segments)
    assert found.indices.tolist() == sorted(indices.tolist())
    assert found.values is None


@given(votes(), st.sampled_from(["absolute", "bf16", "int8", "step"]))
def test_numbers_come_back_beside_their_places(case, mode):
    indices, values, size, segments = case
    data = encode_votes(indices, values, size, segments=segments, mode=mode, lossy=lossy(ratio=0))
    found = decode_votes(data, size, with_values=True, segments=segments)
    order = np.argsort(indices)
    assert found.indices.tolist() == indices[order].tolist()
    largest = np.abs(values).max(initial=1e-9)
    near = {"absolute": 0, "bf16": largest / 256, "int8": largest / 120, "step": 0.51 * largest}[mode]
    assert np.abs(found.values - values[order]).max(initial=0) <= near


def test_a_vote_of_zero_is_a_vote():
    found = decode_votes(encode_votes(np.array([3]), np.zeros(1, np.float32), 9), 9, with_values=True)
    assert (found.indices.tolist(), found.values.tolist()) == ([3], [0.0])


@pytest.mark.parametrize(("k", "n"), [(100, 216_000), (3_000, 216_000), (30_000, 216_000)])
def test_places_are_near_their_entropy(k, n):
    indices = np.random.default_rng(0).choice(n, k, replace=False)
    bits = (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)
    size = len(encode_votes(indices, None, n)) - 18
    assert bits / 8 < size < 1.04 * bits / 8 + 4
    signs = np.where(np.random.default_rng(1).random(k) < 0.5, -1, 1).astype(np.float32)
    more = len(encode_votes(indices, signs, n, mode="sign")) - 18 - size
    assert more == 2 + (k + 7) // 8


def test_layers_that_vote_unlike_often_are_cheaper_apart():
    rng = np.random.default_rng(0)
    places = np.concatenate(
        [rng.choice(2_000, 800, replace=False), 2_000 + rng.choice(98_000, 200, replace=False)]
    )
    apart = encode_votes(places, None, 100_000, segments=[2_000, 98_000])
    assert len(apart) < 0.8 * len(encode_votes(places, None, 100_000))


def test_arguments_are_checked():
    one = np.array([1])
    with pytest.raises(SafariError, match=r"^indices must be 0 to 4, got 1 to 5$"):
        encode_votes(np.array([1, 5]), None, 5)
    with pytest.raises(SafariError, match=r"^indices must be 0 to 4, got -1 to 1$"):
        encode_votes(np.array([1, -1]), None, 5)
    with pytest.raises(SafariError, match=r"^indices must differ, got 1 twice$"):
        encode_votes(np.array([1, 1]), None, 5)
    with pytest.raises(SafariError, match=r"^indices must be a row of whole numbers, got float64\[1\]$"):
        encode_votes(np.array([1.0]), None, 5)
    with pytest.raises(SafariError, match=r"^values must be float32\[1\], got float64\[1\]$"):
        encode_votes(one, np.array([1.0]), 5)
    with pytest.raises(SafariError, match=r"^segments must add up to size 5, got 4$"):
        encode_votes(one, None, 5, segments=[2, 2])


def test_a_message_of_another_kind_size_or_sender_is_refused():
    one, value = np.array([1]), np.ones(1, np.float32)
    with pytest.raises(WireError, match=r"^the frame must hold numbers"):
        decode_votes(encode_votes(one, None, 5), 5, with_values=True)
    with pytest.raises(WireError, match=r"^the frame must hold a mask alone"):
        decode_votes(encode_votes(one, value, 5), 5)
    with pytest.raises(WireError, match=r"^layout must be"):
        decode_votes(encode_votes(one, None, 5), 6)
    data = encode_votes(one, None, 5, identity=Identity("a", 0, bytes(8)))
    with pytest.raises(IdentityError, match=r"^client must be"):
        decode_votes(data, 5, expect=Identity("b", 0, bytes(8)))


def test_damage_gives_wire_errors_or_votes():
    rng, size = random.Random(0), 300
    indices = np.arange(0, size, 7)
    values = np.linspace(-1, 1, indices.size, dtype=np.float32)
    whole = [encode_votes(indices, numbers, size, mode="int8") for numbers in (None, values)]
    for number in range(3000):
        with_values = number % 2 == 1
        data = bytearray(whole[with_values])
        at = rng.randrange(18, len(data))
        data[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
        data[14:18] = zlib.crc32(bytes(data[:14]) + bytes(data[18:])).to_bytes(4, "little")
        with contextlib.suppress(WireError):
            found = decode_votes(bytes(data), size, with_values=with_values)
            assert (np.diff(found.indices) > 0).all()
            assert found.indices.size == 0 or found.indices[-1] < size
