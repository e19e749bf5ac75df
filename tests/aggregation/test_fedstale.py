"""FedStale against a loop written from its formula."""

from __future__ import annotations

import pytest
import torch

from safari.aggregation import RULES, Server
from safari.errors import ConfigError

ARRIVALS = [[0, 2], [1], [], [0, 1, 2, 3], [3], [0, 1], [2]]
WEIGHTS = [1.0, 2.0, 3.0, 2.0]


def by_the_formula(beta: float, updates: list[dict[int, list[float]]], size: int) -> list[list[float]]:
    """x + (1 - β) FedAvg's step + β FedVARP's, number by number."""
    share = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    x, last, models = [1.0] * size, [[0.0] * size for _ in WEIGHTS], []
    for arrived in updates:
        if arrived:
            total = sum(share[i] for i in arrived)
            fresh = [sum(share[i] / total * arrived[i][k] for i in arrived) for k in range(size)]
            memory = [sum(share[j] * last[j][k] for j in range(len(share))) for k in range(size)]
            old = [sum(share[i] / total * last[i][k] for i in arrived) for k in range(size)]
            for k in range(size):
                varp = fresh[k] - old[k] + memory[k]
                x[k] += (1 - beta) * fresh[k] + beta * varp
        for i, update in arrived.items():
            last[i] = update
        models.append(list(x))
    return models


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_it_is_the_published_step(beta: float) -> None:
    draw = torch.Generator().manual_seed(0)
    updates = [{i: torch.randn(3, generator=draw).tolist() for i in arrived} for arrived in ARRIVALS]
    server = Server.start(torch.ones(3), 4, RULES["fedstale"](beta=beta), weights=WEIGHTS, gate="off")
    between = {0.0: "drop", 1.0: "fedvarp"}.get(beta)
    end = server if between is None else Server.start(torch.ones(3), 4, between, weights=WEIGHTS, gate="off")
    for arrived, expected in zip(updates, by_the_formula(beta, updates, 3), strict=True):
        server, _ = server.step({i: server.model + torch.tensor(each) for i, each in arrived.items()})
        torch.testing.assert_close(server.model, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        end, _ = end.step({i: end.model + torch.tensor(each) for i, each in arrived.items()})
        if between:
            torch.testing.assert_close(server.model, end.model, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_beta_lies_between_0_and_1(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta must lie between 0 and 1, got"):
        RULES["fedstale"](beta=beta)
