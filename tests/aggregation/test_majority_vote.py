"""signSGD's majority vote: by hand, against a plain loop, and what one client can do to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.samples import vector
from safari.aggregation import RULES, Server
from safari.errors import ConfigError

Models = dict[int, list[float]]


def begin(model: list[float], clients: int, parameters: int | None = None, **options: Any) -> Server:
    more: Any = {"weights": options.pop("weights", None), "parameters": parameters, "gate": "off"}
    return Server.start(vector(*model), clients, RULES["majority-vote"](**options), **more)


def after(
    server: Server, sent: Models, masks: Models | None = None, came: Models | None = None
) -> list[float]:
    bools = [
        None if given is None else {i: vector(*row).bool() for i, row in given.items()}
        for given in (masks, came)
    ]
    following, _ = server.step({i: vector(*row) for i, row in sent.items()}, None, *bools)
    found: list[float] = following.model.tolist()
    return found


# From (1, 1, 1) with a buffer of 8: changes of mean magnitude 2, 1 and 4.
SENT = {0: [4, -2, 1, 0], 1: [2, 2, 0, 4], 2: [-3, -4, 4, 8]}


def test_a_vote_by_hand() -> None:
    """Signs (+, -, 0), (+, +, -), (-, -, +): the third is tied. The median of 2, 1 and 4 is the step."""
    assert after(begin([1, 1, 1, 8], 3, 3), SENT) == [3, -1, 1, 4]
    assert after(begin([1, 1, 1, 8], 3, 3, lr=0.25), SENT) == [1.5, 0.5, 1, 4]
    assert after(begin([1, 1, 1, 8], 3, 3, lr=0.25, relative=False), SENT) == [1.25, 0.75, 1, 4]


def test_votes_have_their_clients_weights() -> None:
    """Client 1 has as much weight as the others together: the second number is tied, and the third goes down."""
    found = after(begin([1, 1, 1, 8], 3, 3, weights=[1, 3, 2]), SENT)
    assert found == pytest.approx([3, 1, -1, (0 + 3 * 4 + 2 * 8) / 6])
    # 0.1 + 0.2 is not 0.3 in floating point, and a tie nevertheless.
    tied = after(begin([0], 3, lr=1, relative=False, weights=[0.1, 0.2, 0.3]), {0: [1], 1: [1], 2: [-1]})
    assert tied == [0]


def test_the_missing_do_not_vote() -> None:
    """Of 0 and 2 the lower magnitude, 2, is the step; they disagree about the first number."""
    server = begin([1, 1, 1, 8], 3, 3)
    assert after(server, {i: SENT[i] for i in (0, 2)}) == [1, -1, 3, 4]
    assert after(server, {}) == [1, 1, 1, 8]


def test_who_cut_a_weight_does_not_vote_on_it() -> None:
    """0 alone keeps the first number, nobody the second, 1 alone the third. The median of 1, 3 and 0 is 1."""
    masks: Models = {0: [1, 0, 0], 1: [0, 0, 1], 2: [0, 0, 0]}
    sent: Models = {0: [4, 0, 0], 1: [0, 0, 8], 2: [0, 0, 0]}
    assert after(begin([5, 5, 5], 3), sent, masks) == [4, 0, 6]


def test_in_blocks_each_number_is_voted_on_by_those_whose_number_came() -> None:
    """Changes: 2 and 2 of client 0, 4 of client 1; the step is 2 for all, and nothing came of the last."""
    came: Models = {0: [1, 1, 0, 0], 1: [0, 1, 1, 0]}
    sent: Models = {0: [3, 3, 9, 9], 1: [9, -3, -3, 9]}
    assert after(begin([1, 1, 1, 1], 2), sent, came=came) == [3, 1, -1, 1]


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_a_vote_as_a_plain_loop_counts_it(seed: int, count: int, relative: bool) -> None:
    rng = np.random.default_rng(seed)
    x, models = rng.normal(size=7), rng.normal(size=(count, 7))
    masks = rng.random((count, 7)) < 0.7
    x, models = x.astype(np.float32), (models * masks).astype(np.float32)
    weights = rng.random(count) + 0.1
    magnitudes = []
    for i in range(count):
        changes = [abs(float(models[i, k]) - float(x[k])) for k in range(7) if masks[i, k]]
        magnitudes.append(sum(changes) / max(len(changes), 1))
    eta = 0.5 * (sorted(magnitudes)[(count - 1) // 2] if relative else 1)
    expected = []
    for k in range(7):
        up = sum(weights[i] for i in range(count) if masks[i, k] and models[i, k] > x[k])
        down = sum(weights[i] for i in range(count) if masks[i, k] and models[i, k] < x[k])
        moved = x[k] + (eta if up > down else -eta if down > up else 0)
        expected.append(moved if masks[:, k].any() else 0.0)
    server = begin(x.tolist(), count, lr=0.5, relative=relative, weights=weights.tolist())
    found = after(server, dict(enumerate(models.tolist())), dict(enumerate(masks.tolist())))
    assert found == pytest.approx(expected, abs=1e-5)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(3, 8), st.floats(1e-3, 1e30), st.data())
def test_each_client_has_one_vote(seed: int, count: int, factor: float, data: st.DataObject) -> None:
    """However long one update is, the vote is the same, and the step is at most the others' longest."""
    changes = torch.randn(count, 9, generator=torch.Generator().manual_seed(seed))
    who = data.draw(st.integers(0, count - 1))
    scaled = changes.clone()
    scaled[who] *= factor
    for options in ({"relative": False}, {}):
        server = begin([0.0] * 9, count, **options)
        one = server.step(dict(enumerate(changes)))[0].model
        two = server.step(dict(enumerate(scaled)))[0].model
        assert torch.equal(one.sign(), two.sign())
        if options:
            assert torch.equal(one, two)
        others = torch.cat([changes[:who], changes[who + 1 :]]).abs().mean(1)
        assert two.abs().max() <= others.max() * (1 + 1e-5) or options


@pytest.mark.parametrize("lr", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_must_be_above_0(lr: float) -> None:
    with pytest.raises(ConfigError) as error:
        RULES["majority-vote"](lr=lr)
    assert str(error.value) == f"lr must be a finite number above 0, got {lr}"
