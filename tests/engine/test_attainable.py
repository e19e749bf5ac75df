"""The oracle for what can be known: a perfect network, except in rounds in which nobody arrives."""

from __future__ import annotations

from engine.kit import SMALL, play, write_trace


def test_everything_arrives_where_anything_does(tmp_path):
    trace = write_trace(tmp_path / "trace.csv", ["00000", "00100", "00000", "11000", "10101"])
    config = {**SMALL, "uplink": {"name": "trace", "file": trace}}
    arrived = {
        rule: [len(record["arrived"]) for *_, record in play({**config, "arms": [rule]})]
        for rule in ("attainable", "perfect", "drop")
    }
    assert arrived == {"attainable": [0, 5, 0, 5, 5], "perfect": [5] * 5, "drop": [0, 1, 0, 2, 3]}


def test_only_those_who_were_asked_count(tmp_path):
    """Of five, two are asked in each round; an arrival of another is none."""
    trace = write_trace(tmp_path / "trace.csv", ["10000"] * 5)
    config = {**SMALL, "cohort": 2, "uplink": {"name": "trace", "file": trace}}
    heard = [len(r["arrived"]) for *_, r in play({**config, "arms": ["attainable"]})]
    plain = [len(r["arrived"]) for *_, r in play({**config, "arms": ["drop"]})]
    assert heard == [2 * bool(count) for count in plain]
    assert set(plain) == {0, 1}
