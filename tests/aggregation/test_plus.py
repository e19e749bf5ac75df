"""safari+: the blend against a solver written another way, and what the rule does in situations we know."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aggregation.samples import sparse_step
from safari.aggregation import RULES, Server
from safari.aggregation.blend import blend
from safari.aggregation.plus import Options, _alike, _fading, _shifts, _signal
from safari.errors import ConfigError

SIZE = 400


def cost(among: np.ndarray, to: np.ndarray, c: np.ndarray) -> float:
    return float(c @ among @ c - 2 * to @ c)


def slow_blend(among: np.ndarray, to: np.ndarray, whole: bool) -> np.ndarray:
    """The same problem by brute force: every choice of who takes part, each solved by its conditions."""
    count = len(to)
    best, found = (np.inf, np.zeros(count)) if whole else (0.0, np.zeros(count))
    for bits in range(1, 2**count):
        part = [i for i in range(count) if bits >> i & 1]
        inner = among[np.ix_(part, part)]
        tries = [] if whole else [np.linalg.solve(inner, to[part])]
        border = np.block([[inner, np.ones((len(part), 1))], [np.ones((1, len(part))), np.zeros((1, 1))]])
        tries.append(np.linalg.solve(border, np.append(to[part], 1.0))[:-1])
        for values in tries:
            if (values >= -1e-9).all() and values.sum() <= 1 + 1e-9:
                c = np.zeros(count)
                c[part] = values
                if cost(among, to, c) < best:
                    best, found = cost(among, to, c), c
    return found


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), known=st.integers(1, 5), whole=st.booleans())
def test_the_blend_is_the_best_that_is_allowed(seed: int, known: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(known + 1, 8)) + rng.normal(size=8) * rng.uniform(0, 2)
    products = vectors @ vectors.T / 8 + 0.1 * np.eye(known + 1)
    among, to = products[1:, 1:] + 1e-3 * np.eye(known), products[0, 1:]
    got = blend(
        torch.from_numpy(products[1:, 1:]),
        torch.from_numpy(to)[None],
        torch.ones(1, known, dtype=torch.bool),
        whole=whole,
    )[0].numpy()
    assert (got >= 0).all()
    assert got.sum() <= 1 + 1e-9
    if whole:
        assert got.sum() == pytest.approx(1)
    assert cost(among, to, got) == pytest.approx(cost(among, to, slow_blend(among, to, whole)), abs=1e-7)


def test_a_blend_of_no_allowed_vectors_is_zero() -> None:
    among = torch.eye(2, dtype=torch.float64)
    to = torch.ones(2, 2, dtype=torch.float64)
    allowed = torch.tensor([[False, False], [True, False]])
    assert blend(among, to, allowed)[0].tolist() == [0, 0]
    assert blend(among, to, allowed)[1].tolist() == pytest.approx([1, 0], abs=2e-3)


class Clients:
    """Four clients in two groups that pull in opposite directions, with noise of their own."""

    def __init__(self, noise: float = 0.3, seed: int = 0):
        self.draw = torch.Generator().manual_seed(seed)
        pull = torch.randn(SIZE, generator=self.draw)
        self.pulls = [pull, pull, -pull, -pull]
        self.noise = noise

    def send(self, x: Tensor, ids: list[int]) -> dict[int, Tensor]:
        return {
            i: x + 0.01 * (self.pulls[i] + self.noise * torch.randn(SIZE, generator=self.draw)) for i in ids
        }


def play(arrivals: list[list[int]], clients: Clients, **options: object) -> tuple[Server, list[dict]]:
    server = Server.start(torch.randn(SIZE, generator=clients.draw), 4, RULES["safari+"](**options))
    names = []
    for ids in arrivals:
        server, outcome = server.step(clients.send(server.model, ids))
        names.append(dict(outcome.stand_ins))
    return server, names


def test_the_right_group_stands_in() -> None:
    _, names = play([[0, 1, 2, 3]] * 4 + [[0, 2], [1, 2], [0, 3]], Clients(), memory=False)
    assert names[4:] == [{1: (0,), 3: (2,)}, {0: (1,), 3: (2,)}, {1: (0,), 2: (3,)}]


def test_a_group_with_opposite_updates_gets_no_stand_in() -> None:
    """A single stand-in would push the model away from the silent group; the rule lets it stay instead."""
    clients = Clients()
    server, names = play([[0, 1, 2, 3]] * 4, clients, memory=False)
    x = server.model
    server, outcome = server.step(clients.send(x, [0, 1]))
    assert outcome.stand_ins == {}
    assert moved(clients, x, server) == pytest.approx(0.005, rel=0.1), "half of the clients moved by 0.01"
    assert names[-1] == {}


@pytest.mark.parametrize(("stay", "moves"), [(False, 0.0), (True, 0.005)])
def test_memory_stands_in_for_a_silent_group(stay: bool, moves: float) -> None:
    """Or it fades until the group is taken to stay where it was, if the rule is told so."""
    clients = Clients(noise=0.05)
    server, _ = play([[0, 1, 2, 3]] * 6 + [[0, 1]] * 1, clients, stay=stay)
    for _ in range(3):
        before, server = server.model, server.step(clients.send(server.model, [0, 1]))[0]
        assert abs(moved(clients, before, server)) < 0.004, "the other group's memory pulls back"
    for _ in range(60):
        before, server = server.model, server.step(clients.send(server.model, [0, 1]))[0]
    assert moved(clients, before, server) == pytest.approx(moves, abs=0.0008)


def moved(clients: Clients, before: Tensor, server: Server) -> float:
    """How far the model went the first group's way."""
    return float((server.model - before) @ clients.pulls[0] / (clients.pulls[0] @ clients.pulls[0]))


@pytest.mark.parametrize("arrivals", [[[0, 1, 2]] * 3, [[0, 2]] * 3])
def test_all_stand_in_for_a_client_that_was_never_heard(arrivals: list[list[int]]) -> None:
    _, names = play(arrivals, Clients())
    assert set(names[-1][3]) == set(arrivals[-1])


@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [
        # All alike, and half of it noise: a similar client arrived, and 1's own memory is not used.
        (0.0, {}, [0.5, 0.0, 0.5]),
        # It has a third of the guess where updates count as calm.
        (0.0, {"calm": 0.4}, [0.44, 0.11, 0.44]),
        (0.0, {"calm": 0.0}, [0.44, 0.11, 0.44]),
        # Half of what each always sends is its own: friends are half as near as 1's own memory is.
        (1.0, {"calm": 1.0}, [0.36, 0.28, 0.36]),
        (1.0, {"calm": 1.0, "close": 0.4}, [0.5, 0.0, 0.5]),
        (1.0, {"calm": 0.6, "close": 0.4}, [0.36, 0.28, 0.36]),
    ],
)
def test_memory_stands_in_where_no_similar_client_has_arrived(
    own: float, options: dict[str, float], expected: list[float]
) -> None:
    """0 always comes, 1 and 2 in turn; who stands in for the missing one?"""
    draw = torch.Generator().manual_seed(1)
    pull, *apart = torch.randn(4, 8 * SIZE, generator=draw)
    server = Server.start(torch.ones(8 * SIZE), 3, RULES["safari+"](**options))
    last: dict[int, Tensor] = {}
    for number in range(40):
        x = server.model
        noise = torch.randn(3, 8 * SIZE, generator=draw)
        sent = {i: x + 0.01 * (pull + own * apart[i] + noise[i]) for i in (0, 1 + number % 2)}
        old = dict(last)
        last |= {i: sent[i] - x for i in sent}
        server, outcome = server.step(sent)
    # Round 39: 2 arrives and 1 is missing, heard a round ago.
    basis = torch.stack([last[0], old[1], last[2]], 1).double()
    shares = torch.linalg.lstsq(basis, (server.model - x).double()[:, None]).solution[:, 0]
    assert set(outcome.stand_ins[1]) == {0, 2}
    assert shares.tolist() == pytest.approx(expected, abs=0.03)
    assert float(shares.sum()) == pytest.approx(1, abs=0.01)


def test_how_steady_updates_are_is_learned_where_nobody_is_asked_twice_in_a_row() -> None:
    """Eight clients that never change, two of them asked at a time, each every fourth round."""
    draw = torch.Generator().manual_seed(0)
    pulls = torch.randn(8, SIZE, generator=draw)
    server = Server.start(torch.ones(SIZE), 8, RULES["safari+"]())
    for number in range(24):
        x, ids = server.model, [2 * (number % 4), 2 * (number % 4) + 1]
        server, _ = server.step({i: x + 0.01 * pulls[i] for i in ids}, cohort=ids)
    steady = server.state["steady"]
    assert steady[0, 1] == 0, "nobody was heard twice in a row"
    assert float(steady[2, 0] / steady[2, 1]) == pytest.approx(1, abs=1e-3)
    assert _signal(steady) > 0.9
    options = Options(True, True, True, 0.7, 0.6, False, 3.0, 0.98, 10)
    assert _fading(steady, options)[:3].tolist() == [1, 1, 1]


def test_the_common_part_of_updates_may_change_faster_than_each_clients_own() -> None:
    """Three of twenty arrive. A third of an update is what all want in this round, a third the client's own, always.

    So fresh updates of two clients have a cosine of 1/3, as a client's own at any age, and a fresh one has none with
    another client's old one.
    """
    draw = torch.Generator().manual_seed(0)
    own = torch.randn(20, SIZE, generator=draw)
    server = Server.start(torch.ones(SIZE), 20, RULES["safari+"]())
    for number in range(80):
        x, common = server.model, torch.randn(SIZE, generator=draw)
        cohort = sorted(torch.randperm(20, generator=draw)[:6].tolist())
        sent = {
            i: x + 0.01 * (common + own[i] + torch.randn(SIZE, generator=draw))
            for i in cohort[number % 2 :: 2]
        }
        server, _ = server.step(sent, cohort=cohort)
    state = server.state
    signal, shifts = _signal(state["steady"]), _shifts(state["shift"])
    alike = _alike(state, signal)[~torch.eye(20, dtype=torch.bool)].mean()
    faded = alike * _fading(state["steady"], Options(True, True, True, 0.7, 0.7, False, 3.0, 0.98, 10))
    assert signal == pytest.approx(1 / 3, abs=0.05)
    assert float(alike + shifts[0]) == pytest.approx(1 / 3, abs=0.05)
    for age in range(4):
        assert float(faded[age] + shifts[age + 1]) == pytest.approx(0, abs=0.05)
    # The missing are predicted from arrivals: their own memory is no nearer, and has nothing that all want now.
    fresh = torch.stack([sent[i] - x for i in sent]).mean(0)
    assert float(torch.nn.functional.cosine_similarity(server.model - x, fresh, dim=0)) > 0.97


def test_a_shift_counts_as_far_as_it_is_beyond_doubt() -> None:
    # With the pseudo-observation of 0 there are 6: the mean is 0.5, the squared error 1.8 / 36, of which four count.
    seen = torch.tensor([[3.0, 5.0, 1.8], [3.0, 5.0, 3.0], [-3.0, 5.0, 1.8], [0.0, 0.0, 0.0]]).double()
    assert _shifts(seen).tolist() == pytest.approx([0.1, 0.0, -0.1, 0.0])


def test_updates_count_as_steady_before_any_client_was_heard_twice() -> None:
    """0 comes for the first time and is like all who are missing now: their own memory is used as well."""
    clients = Clients()
    clients.pulls = clients.pulls[:1] * 4
    server, _ = play([[1, 2, 3]], clients)
    x, memory = server.model, server.state["updates"].clone()
    sent = clients.send(x, [0])
    server, _ = server.step(sent)
    basis = torch.stack([sent[0] - x, *memory[1:]], 1).double()
    shares = torch.linalg.lstsq(basis, (server.model - x).double()[:, None]).solution[:, 0]
    assert float(shares[1]) > 0.1
    assert float(shares.sum()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("option", ["close", "calm"])
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_how_close_and_how_calm_are_parts_of_one(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{option} must lie between 0 and 1, got {value}"):
        RULES["safari+"](**{option: value})


def test_products_that_do_not_fit_together_give_no_wild_weights() -> None:
    """Cosines seen at different times need not be those of any vectors: 1 like 0, 2 like 1, 2 unlike 0."""
    among = torch.tensor([[0.5, 0.5, -0.5], [0.5, 0.5, 0.5], [-0.5, 0.5, 0.5]], dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(among)[0]) < -0.4
    to = torch.tensor([[0.5, 0.5, 0.5], [-0.5, 0.5, 0.1]], dtype=torch.float64)
    for whole in (True, False):
        c = blend(among, to, torch.ones(2, 3, dtype=torch.bool), whole=whole)
        assert (c >= 0).all()
        assert (c.sum(1) <= 1 + 1e-9).all()


def test_running_variances_are_remembered_as_they_were() -> None:
    """A variance that fell from 9 to 1 must not fall by 8 again, for the silent, and below 0."""
    server = Server.start(torch.tensor([1.0, 9.0]), 2, RULES["safari+"](), parameters=1)
    server, _ = server.step({0: torch.tensor([2.0, 1.0]), 1: torch.tensor([2.0, 1.0])})
    for _ in range(5):
        server, _ = server.step({0: torch.tensor([2.0, 1.0])})
        assert float(server.model[1]) == pytest.approx(1)


@pytest.mark.parametrize("option", ["friends", "memory", "fade", "stay"])
@pytest.mark.parametrize("on", [True, False])
def test_a_weight_that_all_cut_is_cut_whatever_is_remembered(option: str, on: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    server = Server.start(torch.ones(6), 3, RULES["safari+"](**{option: on}))
    for ids in ([0, 1, 2], [0], [1, 2], [], [2]):
        sent = {i: torch.randn(6, generator=draw) for i in ids}
        for model in sent.values():
            model[[1, 4]] = 0
        server, _ = sparse_step(server, sent)
        assert server.model[[1, 4]].tolist() == [0, 0]
        assert (server.model[[0, 2, 3, 5]] != 0).all()


def test_a_crowd_is_served_by_the_most_alike() -> None:
    """Of sixty clients in two groups at most 32 stand in for one, and all of them are of its group."""
    draw = torch.Generator().manual_seed(0)
    pull = torch.randn(SIZE, generator=draw)
    server = Server.start(torch.ones(SIZE), 60, RULES["safari+"](memory=False))
    everybody = list(range(60))
    for ids in [everybody] * 3 + [everybody[1:]]:
        x = server.model
        sent = {
            i: x + 0.01 * ((1 if i < 40 else -1) * pull + 0.3 * torch.randn(SIZE, generator=draw))
            for i in ids
        }
        server, outcome = server.step(sent)
    (speakers,) = outcome.stand_ins.values()
    assert 2 <= len(speakers) <= 32
    assert set(speakers) <= set(range(1, 40))


def test_too_many_clients_for_all_that_is_made_of_pairs() -> None:
    with pytest.raises(ConfigError, match=r"clients must be at most 5000 for the rule safari\+, .* got 5001"):
        Server.start(torch.ones(2), 5001, "safari+")
