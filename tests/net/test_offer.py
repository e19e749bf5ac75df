"""Offers: what the control channel carries, checked where it arrives."""

from __future__ import annotations

import pytest

from safari.errors import SafariError
from safari.net.offer import Offer

GOOD = Offer("127.0.0.1", 9100, bytes(8), bytes(range(32)), "3", 0, bytes(8), 1000, bytes(32), 60.0).plain()


def test_an_offer_goes_through_a_table_of_plain_values():
    assert all(isinstance(value, str | int | float | bytes) for value in GOOD.values())
    offer = Offer.read(GOOD)
    assert offer.plain() == GOOD
    assert offer.open().secret == bytes(range(32))
    assert offer.shape.symbols == (1,)
    assert "secret" not in repr(offer)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("port", 0, "offer's port must be 1 to 65535, got 0"),
        ("port", "9100", "offer's port must be int, got str"),
        ("port", True, "offer's port must be int, got bool"),
        ("secret", bytes(5), "session's secret must be 32 bytes, got 5"),
        ("session", "text", "offer's session must be bytes, got str"),
        ("deadline", 0.0, "offer's deadline must be above 0 and at most 2.592e\\+06 s, got 0.0"),
        ("deadline", float("nan"), "offer's deadline must be above 0 and at most 2.592e\\+06 s, got nan"),
        ("rate", float("inf"), "offer's rate must be at least 0, got inf"),
        ("size", 0, "a broadcast must hold 1 to 1024000000 bytes, got 0"),
        ("round", -1, "identity's round must be 0 to 4294967295, got -1"),
        ("model", b"", "identity's model must be a digest of 8 bytes, got b''"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field, value, problem):
    with pytest.raises(SafariError, match=problem):
        Offer.read({**GOOD, field: value})


def test_what_is_missing_is_named():
    table = {name: value for name, value in GOOD.items() if name not in ("host", "digest")}
    with pytest.raises(SafariError, match="the offer must hold host, digest"):
        Offer.read(table)
