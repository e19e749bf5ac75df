"""Hand-checked rounds with three clients, what is refused, and the paper's rule against a plain oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aggregation.oracle import PlainServer
from aggregation.samples import A, B, C, start, vector
from safari.aggregation import RULES, Outcome, Server
from safari.errors import SafariError


def similarity(server: Server) -> list[list[float]]:
    return server.state["similarity"].tolist()


# --- tables


@pytest.mark.parametrize(
    "rule", sorted(RULES.keys() - {"known-p", "trimmed-mean", "geometric-median", "majority-vote"})
)
def test_all_arrive(rule: str) -> None:
    server, outcome = start(rule).step({0: A, 1: B, 2: C})
    torch.testing.assert_close(server.model, vector(4, 4 / 3, 2))
    assert outcome == Outcome(arrived=(0, 1, 2), missing=(), refused={}, stand_ins={})
    assert not outcome.lost
    assert server.round == 1


def test_one_is_missing_and_the_nearest_stands_in() -> None:
    server, _ = start().step({0: A, 1: B, 2: C})
    assert similarity(server)[1] == pytest.approx([-4, 0, -13])
    server, outcome = server.step({0: A, 2: C})
    # B's place goes to A, 4 away, not to C, 13 away: (2A + C) / 3.
    torch.testing.assert_close(server.model, vector(4, 0, 2))
    assert outcome == Outcome(arrived=(0, 2), missing=(1,), refused={}, stand_ins={1: (0,)})
    server, outcome = server.step({1: B, 2: C})
    # A's place goes to B: (2B + C) / 3.
    torch.testing.assert_close(server.model, vector(4, 8 / 3, 2))
    assert outcome.stand_ins == {0: (1,)}
    server, outcome = server.step({0: A, 1: B})
    # C is nearer to A (12.4) than to B (13).
    torch.testing.assert_close(server.model, vector(0, 4 / 3, 3))
    assert outcome.stand_ins == {2: (0,)}


def test_two_are_missing_and_one_stands_in_for_both() -> None:
    server, _ = start().step({0: A, 1: B, 2: C})
    server, outcome = server.step({2: C})
    torch.testing.assert_close(server.model, C)
    assert outcome.stand_ins == {0: (2,), 1: (2,)}


def test_drop_averages_the_arrivals() -> None:
    server, outcome = start("drop").step({0: A, 2: C})
    torch.testing.assert_close(server.model, vector(6, 0, 1.5))
    assert outcome == Outcome(arrived=(0, 2), missing=(1,), refused={}, stand_ins={})
    assert server.state == {}


def test_a_client_never_seen_with_an_arrival_is_shared_equally_by_all() -> None:
    """0 and 1 were seen together, 2 with nobody: when 1 and 2 are missing, 0 stands in for 1, and all for 2."""
    server = Server.start(torch.zeros(1), 4, "safari")
    server, _ = server.step({0: vector(0), 1: vector(1), 3: vector(9)})
    server, outcome = server.step({0: vector(0), 3: vector(9)})
    # 1 -> 0 (1 away against 8); 2 unknown -> half 0, half 3: (0 + 0 + 4.5 + 9) / 4.
    assert outcome.stand_ins == {1: (0,), 2: (0, 3)}
    torch.testing.assert_close(server.model, vector(13.5 / 4))


def test_a_known_pair_beats_an_unknown_one_at_any_distance() -> None:
    server = start()
    server, _ = server.step({0: vector(0, 0, 0), 1: vector(1e6, 0, 0)})
    server, outcome = server.step({1: vector(3, 0, 0), 2: vector(9, 0, 0)})
    assert outcome.stand_ins == {0: (1,)}
    torch.testing.assert_close(server.model, vector(5, 0, 0))


def test_a_distance_beyond_float32_is_still_a_known_one() -> None:
    server = start(gate="off")
    server, _ = server.step({0: vector(3e38, 0, 0), 1: vector(-3e38, 0, 0)})
    assert similarity(server)[0][1] == -math.inf
    _, outcome = server.step({1: A, 2: B})
    assert outcome.stand_ins == {0: (1,)}


@pytest.mark.parametrize("rule", RULES)
def test_nobody_arrived(rule: str) -> None:
    server, _ = start(rule).step({0: A, 1: B, 2: C})
    before = {name: t.clone() for name, t in server.state.items()}
    after, outcome = server.step({})
    assert torch.equal(after.model, server.model)
    assert outcome == Outcome(arrived=(), missing=(0, 1, 2), refused={}, stand_ins={})
    assert outcome.lost
    assert after.round == 2
    # A memory grows older and a gap longer; what is known of clients stays.
    known = [name for name in before if name not in ("age", "gap")]
    assert all(torch.equal(after.state[name].nan_to_num(), before[name].nan_to_num()) for name in known)


def test_one_client_never_arrives() -> None:
    """Nothing is ever known of it, so the others share its place equally, round after round."""
    server = start()
    for t in range(1, 5):
        server, outcome = server.step({0: A * t, 1: B * t})
        torch.testing.assert_close(server.model, (A + B) * t / 2)
        assert outcome.stand_ins == {2: (0, 1)}
        assert all(math.isnan(row[2]) for row in similarity(server))
    server, outcome = server.step({0: A})
    torch.testing.assert_close(server.model, A)
    assert outcome.stand_ins == {1: (0,), 2: (0,)}


def test_old_distances_are_compared_with_new_ones() -> None:
    """The paper's rule as it is written: 2 was near 0 long ago; near 1 only in today's scale."""
    server = Server.start(torch.zeros(1), 3, "safari")
    server, _ = server.step({0: vector(0), 2: vector(2)})  # 0-2: 2
    server, _ = server.step({1: vector(100), 2: vector(103)})  # 1-2: 3, and 0 is not there
    server, outcome = server.step({0: vector(500), 1: vector(103)})
    assert outcome.stand_ins == {2: (0,)}
    torch.testing.assert_close(server.model, vector((500 + 103 + 500) / 3))
    # A new meeting overwrites: now 0-2 is 400 and 1-2 still 3.
    server, _ = server.step({0: vector(500), 2: vector(100)})
    _, outcome = server.step({0: vector(500), 1: vector(103)})
    assert outcome.stand_ins == {2: (1,)}


def test_the_similarity_of_this_round_counts() -> None:
    """Pairs of arrivals are updated before stand-ins are chosen, and those of the missing are not."""
    server, _ = start().step({0: A, 1: B, 2: C})
    server, _ = server.step({0: C, 2: C})
    table = similarity(server)
    assert table[0][2] == 0
    assert table[0][1] == pytest.approx(-4)
    assert table[1][2] == pytest.approx(-13)


def test_ties_go_to_the_lowest_id() -> None:
    server = Server.start(torch.zeros(1), 4, "safari")
    server, _ = server.step({0: vector(5), 1: vector(1), 2: vector(3), 3: vector(2)})
    _, outcome = server.step({1: vector(1), 2: vector(3), 0: vector(9)})
    assert outcome.stand_ins == {3: (1,)}  # 1 and 2 are both 1 away
    _, outcome = server.step({2: vector(3), 0: vector(9)})
    assert outcome.stand_ins == {1: (2,), 3: (2,)}


def test_similarity_ignores_buffers_and_buffers_are_averaged_alike() -> None:
    """Numbers from `parameters` on are far apart where the parameters are near, and must not matter."""
    server = Server.start(torch.zeros(3), 3, "safari", parameters=2)
    one, two, three = vector(0, 0, 1000), vector(0, 1, -1000), vector(9, 9, 1000)
    server, _ = server.step({0: one, 1: two, 2: three})
    assert similarity(server)[0][1] == -1.0
    server, outcome = server.step({1: two, 2: three})
    assert outcome.stand_ins == {0: (1,)}
    torch.testing.assert_close(server.model, vector(3, 11 / 3, -1000 / 3))


# --- weights and cohorts


def test_clients_count_by_their_samples() -> None:
    server = start(weights=[1, 2, 5])
    server, _ = server.step({0: A, 1: B, 2: C})
    torch.testing.assert_close(server.model, (A + 2 * B + 5 * C) / 8)
    server, outcome = server.step({0: A, 2: C})
    # B's place, 2 of 8, goes to A.
    assert outcome.stand_ins == {1: (0,)}
    torch.testing.assert_close(server.model, (3 * A + 5 * C) / 8)
    dropped, _ = start("drop", weights=[1, 2, 5]).step({0: A, 2: C})
    torch.testing.assert_close(dropped.model, (A + 5 * C) / 6)


def test_weights_matter_only_by_their_ratio() -> None:
    for weights in ([1, 2, 5], [0.5, 1, 2.5], [1e6, 2e6, 5e6]):
        server, _ = start(weights=weights).step({0: A, 1: B})
        torch.testing.assert_close(server.model, (A + 2 * B + 5 * (A + B) / 2) / 8)


def test_only_the_cohort_is_averaged_and_missed() -> None:
    server, _ = start(weights=[1, 2, 5]).step({0: A, 1: B, 2: C})
    server, outcome = server.step({2: C}, cohort=[2, 1])
    assert outcome == Outcome(arrived=(2,), missing=(1,), refused={}, stand_ins={1: (2,)})
    torch.testing.assert_close(server.model, C)
    server, outcome = server.step({1: B}, cohort=[1])
    assert outcome.missing == ()
    torch.testing.assert_close(server.model, B)
    # What was learnt of a client outside the cohort stays known.
    _, outcome = server.step({0: A, 2: C})
    assert outcome.stand_ins == {1: (0,)}


@pytest.mark.parametrize(
    ("cohort", "text"),
    [
        ([], "cohort must hold ids from 0 to 2, got []"),
        ([0, 3], "cohort must hold ids from 0 to 2, got [0, 3]"),
        ([1, -1], "cohort must hold ids from 0 to 2, got [-1, 1]"),
        ([1, 0, 1], "cohort must name each client once"),
    ],
)
def test_a_cohort_that_cannot_be(cohort: list[int], text: str) -> None:
    with pytest.raises(SafariError) as error:
        start().step({0: A}, cohort=cohort)
    assert str(error.value) == text


# --- against the oracle


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[float], list[tuple[list[int], dict[int, list[float]]]]]:
    """Client weights, and for each round a cohort with who arrived and with what (5 numbers, 4 of them
    parameters)."""
    clients = draw(st.integers(1, 6))
    weights = draw(st.lists(st.floats(0.1, 10), min_size=clients, max_size=clients))
    number = st.floats(-100, 100, width=32)
    rounds = []
    for _ in range(draw(st.integers(1, 6))):
        cohort = sorted(draw(st.sets(st.integers(0, clients - 1), min_size=1)))
        arrived = draw(st.sets(st.sampled_from(cohort)))
        models = {i: draw(st.lists(number, min_size=5, max_size=5)) for i in sorted(arrived)}
        rounds.append((cohort, models))
    return weights, rounds


@given(history=histories())
def test_the_papers_rule_is_the_plain_oracle(history: Any) -> None:
    weights, rounds = history
    plain = PlainServer([1.0] * 5, weights, parameters=4)
    server = Server.start(torch.ones(5), len(weights), "safari", weights=weights, parameters=4, gate="off")
    for cohort, models in rounds:
        plain.step(models, cohort)
        server, outcome = server.step({i: torch.tensor(m) for i, m in models.items()}, cohort)
        # Distances are float32 there and exact here: where two nearly tie, either may be nearest.
        for client, speakers in outcome.stand_ins.items():
            theirs = plain.stand_ins[client]
            if list(speakers) != theirs:
                mine = plain.pairs[speakers[0], client]
                assert mine == pytest.approx(plain.pairs[theirs[0], client], rel=1e-5, abs=1e-4)
                return
        assert {k: list(v) for k, v in outcome.stand_ins.items()} == plain.stand_ins
        assert outcome.lost == (not models)
        assert server.model.tolist() == pytest.approx(plain.model, rel=1e-4, abs=1e-3)
