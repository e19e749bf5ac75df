"""The broadcast's symbols: any sufficient number of them gives the message back."""

from __future__ import annotations

import numpy as np
import pytest

from safari.errors import SafariError
from safari.net import fec
from safari.net.fec import HEAD_BYTES, SYMBOL, Shape, Sink, Source


def message(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("size", [1, SYMBOL, SYMBOL + 1, 250_000])
@pytest.mark.parametrize("loss", [0.0, 0.7])
def test_what_survives_a_loss_is_enough(size, loss):
    rng, data = np.random.default_rng(1), message(size)
    source, number, taken = Source(data), 0, 0
    sink = Sink(source.shape)
    while sink.message is None:
        if rng.random() >= loss:
            assert sink.add(source.symbol(0, number))
            taken += 1
        number += 1
        assert number < 20 * source.shape.symbols[0] + 100
    assert sink.message == data
    assert sink.missing() == (0,)
    assert taken <= source.shape.symbols[0] + 2


def test_a_long_message_comes_in_chunks(monkeypatch):
    monkeypatch.setattr(fec, "CHUNK", 10_000)
    data = message(25_000)
    source = Source(data)
    assert source.shape.chunks == (8333, 8333, 8334)
    sink = Sink(source.shape)
    assert sink.missing() == (10, 10, 10)
    for chunk in (2, 0, 1):
        for number in range(8):
            sink.add(source.symbol(chunk, number))
    assert sink.message == data


def test_symbols_come_in_any_order_and_more_than_once():
    data = message(40_000)
    source = Source(data)
    sink = Sink(source.shape)
    symbols = [source.symbol(0, i) for i in range(30)]
    for _ in range(2):
        for symbol in symbols:
            sink.add(symbol)
    assert sink.received == 30
    assert sink.missing() == (source.shape.symbols[0] + 2 - 30,)
    for i in np.random.default_rng(2).permutation(40):
        sink.add(source.symbol(0, 30 + int(i)))
    assert sink.message == data


@pytest.mark.parametrize(
    "body",
    [b"", bytes(HEAD_BYTES), bytes(HEAD_BYTES + SYMBOL - 1), bytes(HEAD_BYTES + SYMBOL + 1),
     b"\x01\x00" + bytes(3 + SYMBOL), b"\xff" * (HEAD_BYTES + SYMBOL)],
)  # fmt: skip
def test_what_is_no_symbol_of_this_message_never_reaches_the_decoder(body):
    sink = Sink(Source(message(5000)).shape)
    assert not sink.add(body)
    assert sink.received == 0


def test_a_wrong_symbol_is_noticed_by_the_digest():
    source = Source(message(5000))
    sink = Sink(source.shape)
    sink.add(source.symbol(0, 0)[:HEAD_BYTES] + bytes(SYMBOL))
    for number in range(1, 4):
        sink.add(source.symbol(0, number))
    with pytest.raises(SafariError, match="the broadcast's digest must be that of the round's message"):
        sink.add(source.symbol(0, 4))


@pytest.mark.parametrize(
    ("size", "digest", "problem"),
    [
        (0, bytes(32), "a broadcast must hold 1 to 1024000000 bytes, got 0"),
        (2_000_000_000, bytes(32), "a broadcast must hold 1 to 1024000000 bytes, got 2000000000"),
        (5, b"", "a broadcast's digest must be 32 bytes, got 0"),
    ],
)
def test_wrong_shapes_are_refused(size, digest, problem):
    with pytest.raises(SafariError, match=problem):
        Shape(size, digest)
