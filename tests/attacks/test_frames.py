"""What a stranger can do with a frame or a packet: nothing but be refused in words, at a bounded price.

The fuzzer builds messages field by field (`wire.grammar`). It asserts, for every call, the bytes that the
decoder takes beside the message, and its processor time.
"""

from __future__ import annotations

import contextlib
import random
import time
import tracemalloc
import zlib

import numpy as np
import pytest

from safari.errors import WireError
from safari.wire import Shared, decode, decode_mask, decode_packet, encode
from safari.wire.bits import varint
from wire import plain_decoder
from wire.grammar import NONE, Message, build, disturb
from wire.samples import layout_of, small_layout, small_model

# The promise of docs/wire.md: for each number and each entry of the layout, and beside that.
BYTES_A_NUMBER, BYTES_AN_ENTRY, BYTES_MORE = 16, 256, 1 << 20
# Several times what the slowest calls take on a slow core.
SECONDS_A_NUMBER, SECONDS_AN_ENTRY, SECONDS_MORE = 0.5e-6, 3e-3, 20e-3


def shared_of(layout, seed=0) -> Shared:
    vector, mask, reference, predicted = small_model(layout, seed)
    shared = Shared(layout, reference, predicted)
    # What a receiver works out once is not the price of a message.
    decode(encode(vector, mask, shared), shared)
    assert shared.contexts
    return shared


SMALL = shared_of(small_layout())
MANY = shared_of(layout_of([1 + i % 40 for i in range(60)], [i % 7 > 0 for i in range(60)]))
LARGE = shared_of(layout_of([432] + [37_400] * 8 + [2_000], [True] * 9 + [False]))


def opened(data: bytes, message: Message):
    """(first coordinate, value bits, mask) in wire order."""
    layout, given = message.shared.layout, {"expect": message.identity}
    if message.packet:
        part = decode_packet(data, message.shared, **given)
        return part.first, part.vector.view(np.uint32), part.mask
    if len(data) > 4 and data[4] & 15 == NONE:
        mask = decode_mask(data, message.shared, **given)
        return 0, np.zeros(layout.d, np.uint32), layout.to_wire(mask)
    found = decode(data, message.shared, **given)
    return 0, layout.to_wire(found.vector).view(np.uint32), layout.to_wire(found.mask)


def hostile(shared: Shared, cases: int, seed: int):
    """Valid messages that nobody would write, and as many with one field changed."""
    rng = random.Random(seed)
    before = build(rng, shared, False)
    for _ in range(cases // 2):
        message = build(rng, shared, rng.random() < 0.5)
        for one in (message, disturb(rng, message, before)):
            yield one, one.sealed()
        before = message


def bytes_taken(data: bytes, message: Message) -> int:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with contextlib.suppress(WireError):
        opened(data, message)
    return tracemalloc.get_traced_memory()[1] - before


def seconds_taken(data: bytes, message: Message, tries: int = 3) -> float:
    """The best of some tries, of this thread alone: a busy machine must not fail a test."""
    best = float("inf")
    for _ in range(tries):
        start = time.thread_time()
        with contextlib.suppress(WireError):
            opened(data, message)
        best = min(best, time.thread_time() - start)
    return best


def may_take(shared: Shared) -> tuple[float, float]:
    numbers, entries = shared.layout.d, len(shared.layout.sizes)
    return (
        BYTES_A_NUMBER * numbers + BYTES_AN_ENTRY * entries + BYTES_MORE,
        SECONDS_A_NUMBER * numbers + SECONDS_AN_ENTRY * entries + SECONDS_MORE,
    )


def test_refused_in_words_or_read_as_the_page_says():
    """Whatever the library accepts, a decoder written from the page alone reads the same from."""
    layout = SMALL.layout
    names, sizes, prunable = layout.names, layout.sizes, layout.prunable
    reference, predicted = SMALL.reference.view(np.uint32).tolist(), SMALL.predicted_mask.astype(int).tolist()
    read = refused = 0
    for message, data in hostile(SMALL, 800, seed=1):
        try:
            found = opened(data, message)
        except WireError as error:
            refused += 0 <= error.offset <= len(data)
            continue
        identity = message.identity and (
            message.identity.client,
            message.identity.round,
            message.identity.model,
        )
        first, vector, kept = found
        arguments = (data, names, sizes, prunable, reference, predicted, identity)
        their_first, mask, bits = plain_decoder.decode(*arguments)
        assert (first, kept.astype(int).tolist()) == (their_first, mask)
        # A NaN is a NaN, whichever: hardware chooses its bits when it adds and rounds.
        theirs = np.array(bits, np.uint32)
        both = np.isnan(vector.view(np.float32)) & np.isnan(theirs.view(np.float32))
        same = (vector == theirs) | both
        assert same.all()
        read += 1
    assert read > 200
    assert read + refused == 800


@pytest.mark.parametrize(
    ("shared", "cases"), [(SMALL, 300), (MANY, 60), (LARGE, 60)], ids=["small", "many", "large"]
)
def test_memory_is_bounded_by_the_layout(shared, cases):
    limit, _ = may_take(shared)
    tracemalloc.start()
    try:
        for number, (message, data) in enumerate(hostile(shared, cases, seed=2)):
            taken = bytes_taken(data, message)
            assert taken <= limit, f"case {number}: {len(data)} bytes took {taken}"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("shared", "cases"), [(SMALL, 600), (MANY, 100), (LARGE, 80)], ids=["small", "many", "large"]
)
def test_time_is_bounded_by_the_layout(shared, cases):
    _, limit = may_take(shared)
    for number, (message, data) in enumerate(hostile(shared, cases, seed=3)):
        taken = seconds_taken(data, message, tries=1)
        if taken > limit:
            taken = seconds_taken(data, message)
        assert taken <= limit, f"case {number}: {len(data)} bytes took {1e3 * taken:.1f} ms"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "cases"), [(SMALL, 12_000), (MANY, 2_000), (LARGE, 200)], ids=["small", "many", "large"]
)
def test_a_long_attack(shared, cases):
    limit, seconds = may_take(shared)
    tracemalloc.start()
    try:
        for number, (message, data) in enumerate(hostile(shared, cases, seed=4)):
            if number % 10 == 0:
                assert bytes_taken(data, message) <= limit
            # Counting bytes makes everything several times slower.
            assert seconds_taken(data, message, tries=1) <= 4 * seconds
    finally:
        tracemalloc.stop()


def frame(shared: Shared, body: bytes, modes: int, code: int = 0) -> bytes:
    head = b"SAF\x02" + bytes([modes, code]) + shared.layout.digest
    return head + zlib.crc32(head + body).to_bytes(4, "little") + body


# All kept, absolute: a tag for the one segment, of which no place is left out.
ALL_KEPT = bytes([0x80]) + varint(0)


def price(data: bytes, shared: Shared) -> tuple[int, str]:
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        with pytest.raises(WireError) as caught:
            decode(data, shared)
        return tracemalloc.get_traced_memory()[1], str(caught.value)
    finally:
        tracemalloc.stop()


def test_a_frame_of_32_megabytes_is_refused_by_its_length():
    """Rice-coded symbols took 80 times the input: 2.3 GB and 4.9 s before they were refused."""
    shared = Shared(layout_of([1_000_000], [True]))
    data = frame(shared, ALL_KEPT + bytes([8, 0]) + b"\xff" * 32_000_000, 0x20)
    start = time.thread_time()
    taken, problem = price(data, shared)
    assert time.thread_time() - start < 0.05
    assert taken < 100_000
    assert problem.startswith(
        "a message about 1000000 numbers in 1 entries must be at most 8001088 bytes, got 32"
    )


@pytest.mark.parametrize("byte", [0x00, 0x01, 0xFF])
def test_rice_coded_symbols_of_a_whole_model_are_refused_before_they_are_read(byte):
    shared = Shared(layout_of([1_000_000], [True]))
    data = frame(shared, ALL_KEPT + bytes([8, 0]) + bytes([byte]) * 7_900_000, 0x20)
    taken, problem = price(data, shared)
    assert taken < 2 << 20
    assert problem.startswith("symbols must be at most 32768 bytes under such a code, got 1000000")


def test_gaps_of_a_whole_mask_take_a_constant():
    shared = Shared(layout_of([1_000_000], [True]))
    unary = b"\xff" * 125_000
    data = frame(shared, bytes([24]) + varint(1_000_000) + unary + bytes(3 * 1_000_000), 0x20)
    taken, _ = price(data, shared)
    assert taken < 16 * 1_000_000


def test_a_model_for_each_of_many_segments_is_not_kept():
    """Each took 68 kB, before the sizes were looked at."""
    count = 300
    shared = Shared(layout_of([1000] * count, [True] * count))
    tags = b"".join(bytes([32, 1 + i % 127, i % 64]) for i in range(count))
    taken, problem = price(frame(shared, tags, 0x20), shared)
    assert taken < 2 << 20
    assert problem.startswith("mask bits must be at most 32768 bytes under such a code, got 37500")
    within = Shared(layout_of([8] * count, [True] * count))
    taken, _ = price(frame(within, tags + b"\xff" * 600, 0x20), within)
    assert taken < 2 << 20


def test_minus_2_to_the_31_changes_its_sign_as_the_page_says():
    layout = layout_of([3], [True])
    one = b"\x80\x3f"
    # Three times the symbol 15 of code 4 with the largest number: 2^32 - 1 stands for -2^31.
    largest = (2**32 - 1 - 65820).to_bytes(4, "little") * 3
    body = ALL_KEPT + one + bytes([2]) + b"\xff" * 7 + b"\x0f" + b"\0" + largest
    data = frame(Shared(layout), body, 0x26, 4)
    found = decode(data, layout).vector.tolist()
    assert found == [-(2.0**31), 2.0**31, -(2.0**31)]
    _, _, bits = plain_decoder.decode(data, layout.names, layout.sizes, layout.prunable)
    assert np.array(bits, np.uint32).view(np.float32).tolist() == found


def test_a_packet_cannot_be_longer_than_its_span_needs():
    layout = layout_of([10_000], [True])
    shared = Shared(layout)
    head = bytes([0xB0, 0x20, shared.contexts[False, False][0]])
    rest = varint(5) + varint(2) + bytes([0x80]) + varint(0) + bytes(60_000)
    check = zlib.crc32(shared.contexts[False, False] + head + rest).to_bytes(4, "little")
    with pytest.raises(
        WireError, match=r"^a message about 2 numbers in 1 entries must be at most 1104 bytes, got"
    ):
        decode_packet(head + check + rest, shared)
