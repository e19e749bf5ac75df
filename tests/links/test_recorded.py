"""Files of recorded arrivals: what is no record of datagrams is refused in words."""

from __future__ import annotations

import json

import numpy as np
import pytest

from safari.errors import ConfigError, SafariError
from safari.links.link import Setting
from safari.links.recorded import recorded


def opened(path):
    link = recorded(file=str(path))
    return link, link.init(Setting(3, np.zeros((3, 2), np.int64), np.random.default_rng(0)))


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_ranges_of_clients_whose_update_was_used(tmp_path):
    blocks = {"0": {"ranges": [[0, 5], [9, 1]]}, "1": {"ranges": [[3, 3]]}, "2": {"ranges": []}}
    lost = {"round": 2, "arrived": [], "lost": True}
    link, state = opened(
        write(tmp_path / "rounds.jsonl", {"round": 1, "arrived": [0], "blocks": blocks}, lost)
    )
    assert link.ranges(state, 0) == {0: [(0, 5), (9, 1)]}
    assert link.ranges(state, 1) == {}
    assert link.rounds(state) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"arrived": [0]}, ", round 1: needs blocks, which runs over datagrams record"),
        ({"arrived": [0], "blocks": {"7": {}}}, ", round 1: client must lie between 0 and 2, got '7'"),
        ({"arrived": [0], "blocks": {"-1": {}}}, ", round 1: client must lie between 0 and 2, got '-1'"),
        ({"arrived": [0], "blocks": {"0": {}}}, ", round 1, client 0: needs ranges"),
        (
            {"arrived": [0], "blocks": {"0": {"ranges": [[1]]}}},
            r"a range must be \[first, count\], got \[1\]",
        ),
        ({"arrived": [0], "blocks": {"0": {"ranges": [[1, 0]]}}}, r"a range must be .* got \[1, 0\]"),
        ({"arrived": [0], "blocks": {"0": {"ranges": [[1, 1e9]]}}}, "a range must be"),
        ("{", ", line 1 is not JSON"),
    ],
)
def test_what_is_no_record_of_arrivals_is_refused(tmp_path, line, problem):
    with pytest.raises(SafariError, match=problem):
        opened(write(tmp_path / "rounds.jsonl", line))


def test_a_file_must_be_named_and_there(tmp_path):
    with pytest.raises(ConfigError, match=r"file must name the rounds.jsonl of a run over datagrams, got ''"):
        recorded()
    with pytest.raises(SafariError, match="no such file of records"):
        opened(tmp_path / "none.jsonl")
    with pytest.raises(SafariError, match="holds no rounds"):
        opened(write(tmp_path / "empty.jsonl"))
