"""blue: against loops written another way, and its limits, which are rules that we know."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from safari.aggregation import RULES, Server
from safari.aggregation.blue import _MOST

SIZE = 400
PAIR = [[0, 1, 2, 3]] * 12


class Clients:
    """Clients that send 0.01 · (pull_i · √lasting + noise · √(1 - lasting))."""

    def __init__(self, pulls: Tensor, lasting: float, seed: int = 0):
        self.pulls, self.lasting, self.draw = pulls, lasting, torch.Generator().manual_seed(seed)

    def send(self, x: Tensor, ids: list[int]) -> dict[int, Tensor]:
        noise = torch.randn(len(self.pulls), SIZE, generator=self.draw)
        updates = math.sqrt(self.lasting) * self.pulls + math.sqrt(1 - self.lasting) * noise
        return {i: x + 0.01 * updates[i] for i in ids}


def own_pulls(count: int) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(7))


def played(
    clients: Clients, arrivals: list[list[int]], weights: list[float] | None = None, **options: float
) -> Server:
    server = Server.start(torch.zeros(SIZE), len(clients.pulls), RULES["blue"](**options), weights=weights)
    for ids in arrivals:
        server, _ = server.step(clients.send(server.model, ids))
    return server


def weights_of(server: Server, sent: dict[int, Tensor]) -> list[float]:
    """The weight of everybody's latest update in the server's next step, found by least squares."""
    latest = server.state["updates"].clone()
    for client, model in sent.items():
        latest[client] = model - server.model
    after, _ = server.step(sent)
    step = (after.model - server.model).double()
    # Columns of clients never heard are 0, which the default driver takes for a system without a solution.
    return torch.linalg.lstsq(latest.T.double(), step[:, None], driver="gelsd").solution[:, 0].tolist()


def test_where_nothing_lasts_and_nobody_is_alike_it_is_drop() -> None:
    clients = Clients(own_pulls(4), lasting=0.0)
    server = played(clients, PAIR + [[0, 1, 2], [0, 2, 3], [0, 1]] * 12, weights=[1.0, 2.0, 3.0, 4.0])
    weights = weights_of(server, clients.send(server.model, [0, 2, 3]))
    assert weights == pytest.approx([1 / 8, 0, 3 / 8, 4 / 8], abs=0.02)


def test_where_own_parts_last_it_is_mifa() -> None:
    clients = Clients(own_pulls(4), lasting=0.9)
    server = played(clients, PAIR + [[0, 1, 2], [0, 2, 3], [0, 1], [0, 1], [0, 1]] * 6)
    weights = weights_of(server, clients.send(server.model, [0, 1]))
    assert weights == pytest.approx([1 / 4] * 4, abs=0.03)


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 3], [0, 1, 4]])
def test_where_groups_differ_each_counts_for_its_share_whoever_arrived(ids: list[int]) -> None:
    pull = own_pulls(1)
    clients = Clients(torch.cat([pull, pull, pull, -pull, -pull]), lasting=0.98)
    server = played(clients, [[0, 1, 2, 3, 4]] * 20 + [[0, 3], [1, 4], [0, 1]] * 8)
    weights = weights_of_groups(server, clients.send(server.model, ids), pull[0])
    assert weights == pytest.approx(0.6 - 0.4, abs=0.05)


def weights_of_groups(server: Server, sent: dict[int, Tensor], pull: Tensor) -> float:
    """The weight of the first group's updates without that of the second's."""
    after, _ = server.step(sent)
    return float((after.model - server.model) @ pull / (pull @ pull)) / (0.01 * math.sqrt(0.98))


class Loops:
    """The rule in plain loops: cosines from the models, sums in dicts, every support of `a` tried."""

    def __init__(self, clients: int, ridge: float, keep: float):
        self.m, self.ridge, self.keep = clients, ridge, keep
        self.last: dict[int, np.ndarray] = {}
        self.age: dict[int, int] = {}
        self.alike, self.met = np.zeros((clients, clients)), np.zeros((clients, clients))
        self.shared, self.steady = np.zeros((12, 2)), np.zeros((12, 2))

    @staticmethod
    def bin(age: int) -> int:
        return 0 if age == 0 else min(int(math.log2(age)), 10) + 1

    def falling(self, means: list[tuple[float, float]], first: int, then: float = 1.0) -> list[float]:
        left = [1.0]
        for k, (total, count) in enumerate(means, start=1):
            usual = left[-1] * (0.6 if k > 1 else 1.0)
            seen = (total + usual) / (count + 1)
            left.append(then if k <= first else min(left[-1], max(0.0, seen)))
        return left

    def curves(self) -> tuple[float, list[float], float, list[float]]:
        fresh, count = self.shared[0]
        if not count:
            fresh, count = self.shared.sum(0)
        c = max(fresh / (count + 0.5), 0.0)
        phi = self.falling([(t / max(c, 1e-3), n) for t, n in self.shared[1:]], 0)
        beyond = [t - n * c * f for (t, n), f in zip(self.steady, phi, strict=True)]
        first = next((k for k in range(12) if self.steady[k, 1] >= 0.5), 1)
        r = min(1.0, max(0.0, (beyond[first] + 0.3) / (self.steady[first, 1] + 1)))
        low = max(r, 0.2)
        n = self.steady[1:, 1]
        return (
            c,
            phi,
            r,
            self.falling([(b / low, k) for b, k in zip(beyond[1:], n, strict=True)], first, r / low),
        )

    def step(self, updates: dict[int, np.ndarray], weights: np.ndarray) -> np.ndarray:
        ids, n = sorted(updates), len(updates)
        cos = lambda a, b: float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))
        c, phi, _, psi = self.curves()
        seen: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for u in ids:
            for v in range(self.m):
                age = 0 if v in updates else self.age.get(v, -2) + 1
                if v == u or age < 0:
                    continue
                other = updates[v] if v in updates else self.last[v]
                k = self.bin(age)
                value = cos(updates[u], other) - c * phi[k]
                seen.setdefault((min(u, v), max(u, v)), []).append((value * psi[k], psi[k] ** 2))
        for (u, v), found in seen.items():
            top, bottom = np.mean([f[0] for f in found]), np.mean([f[1] for f in found])
            decay = self.keep if bottom > 0 else 1.0
            self.alike[u, v] = self.alike[v, u] = decay * self.alike[u, v] + top
            self.met[u, v] = self.met[v, u] = decay * self.met[u, v] + bottom
        near = self.alike / (self.met + 1)
        self.shared *= self.keep
        self.steady *= self.keep
        for u in ids:
            for v in ids:
                if u != v:
                    self.shared[0] += np.array([cos(updates[u], updates[v]), 1]) / n
            for v, old in self.last.items():
                k = self.bin(self.age[v] + 1)
                if u == v:
                    self.steady[k] += np.array([cos(updates[u], old), 1]) / n
                else:
                    self.shared[k] += np.array([cos(updates[u], old) - near[u, v] * psi[k], 1]) / n
        self.last |= updates
        ages = {v: 0 if v in updates else self.age[v] + 1 for v in self.last}
        self.age = ages
        return self.solve(ages, weights)

    def solve(self, ages: dict[int, int], weights: np.ndarray) -> np.ndarray:
        c, phi, r, psi = self.curves()
        near = np.minimum(self.alike / (self.met + 1), r)
        np.fill_diagonal(near, r)
        who = sorted(ages)
        among, to = np.zeros((len(who), len(who))), np.zeros(len(who))
        for row, v in enumerate(who):
            to[row] = c * phi[self.bin(ages[v])] + psi[self.bin(ages[v])] * near[v] @ weights
            for column, w in enumerate(who):
                k = self.bin(abs(ages[v] - ages[w]))
                among[row, column] = c * phi[k] + near[v, w] * psi[k]
            gone = 1 + (1 / max(psi[self.bin(ages[v])], 1e-3) - 1) ** 3
            among[row, row] += self.ridge * max(1e-4, 1 - c - r) * gone / (self.m * weights[v])
        lift = 1e-3 - min(0.0, np.linalg.eigvalsh(among)[0])
        to = to + lift * np.array([weights[v] if ages[v] == 0 else 0.0 for v in who])
        among = among + lift * np.eye(len(who))
        best, least = np.zeros(len(who)), math.inf
        for size in range(1, len(who) + 1):
            for support in map(list, itertools.combinations(range(len(who)), size)):
                one = np.ones(size)
                system = np.block(
                    [[among[np.ix_(support, support)], one[:, None]], [one[None], np.zeros((1, 1))]]
                )
                a = np.linalg.solve(system, [*to[support], 1.0])[:-1]
                if (a >= -1e-12).all():
                    cost = a @ among[np.ix_(support, support)] @ a - 2 * to[support] @ a
                    if cost < least - 1e-13:
                        best, least = np.zeros(len(who)), cost
                        best[support] = a
        out = np.zeros(self.m)
        out[who] = best
        return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ridge", "keep"), [(10.0, 0.98), (0.1, 0.9)])
def test_weights_are_those_of_plain_loops(seed: int, ridge: float, keep: float) -> None:
    rng = np.random.default_rng(seed)
    pulls = own_pulls(6) + 0.7 * own_pulls(1)
    pulls[3:5] = pulls[3] + 0.3 * pulls[3:5]
    clients = Clients(pulls, lasting=[0.3, 0.8][seed % 2], seed=seed)
    weights = np.arange(1.0, 7.0) / 21
    server = Server.start(
        torch.zeros(SIZE), 6, RULES["blue"](ridge=ridge, keep=keep), weights=weights.tolist()
    )
    loops = Loops(6, ridge, keep)
    for _ in range(25):
        ids = sorted(rng.choice(6, rng.integers(1, 6), replace=False).tolist())
        sent = clients.send(server.model, ids)
        updates = {i: (model - server.model).double().numpy() for i, model in sent.items()}
        expected = loops.step(updates, weights)
        found = weights_of(server, sent)
        assert found == pytest.approx(expected.tolist(), abs=2e-4)
        server, _ = server.step(sent)


@pytest.mark.parametrize("update", [torch.zeros(SIZE), torch.full((SIZE,), 1e20), torch.full((SIZE,), 1e-30)])
def test_updates_without_a_length_and_of_any_size_leave_numbers(update: Tensor) -> None:
    server = Server.start(torch.zeros(SIZE), 3, "blue", gate="off")
    for ids in ([0], [], [0, 1], [1], [0, 1, 2]):
        server, _ = server.step(dict.fromkeys(ids, server.model + update))
        assert bool(server.model.isfinite().all())
        assert all(bool(server.state[name].isfinite().all()) for name in ("alike", "met", "shared", "steady"))


def test_of_many_clients_those_last_heard_are_mixed() -> None:
    clients = _MOST + 40
    server = Server.start(torch.zeros(4), clients, "blue")
    draw = torch.Generator().manual_seed(0)
    groups = [range(40), range(40, clients), range(0, clients, 2)]
    for ids in groups:
        server, outcome = server.step({i: server.model + torch.randn(4, generator=draw) for i in ids})
    # Clients 1, 3, .. 39 were heard two rounds ago: 532 are left, and those of the last round come before them.
    assert len(outcome.arrived) == clients // 2
    assert bool(server.model.isfinite().all())
