"""Each rival against its published formula, worked out by hand on three clients and two numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aggregation.samples import sparse_step, vector
from safari.aggregation import RULES, Server
from safari.errors import ConfigError


def begin(rule: str, **options: object) -> Server:
    return Server.start(vector(1, 1), 3, RULES[rule](**options))


# Round 1, from x = (1, 1): updates (3, 0), (0, 3), (-3, 3); mean (0, 2), so that x becomes (1, 3).
FIRST = {0: vector(4, 1), 1: vector(1, 4), 2: vector(-2, 4)}


def after_first(rule: str, **options: object) -> Server:
    server, _ = begin(rule, **options).step(FIRST)
    torch.testing.assert_close(server.model, vector(1, 3))
    return server


def test_stale_sends_the_last_model_again() -> None:
    server, outcome = after_first("stale").step({0: vector(7, 3)})
    # (7, 3), and the old (1, 4) and (-2, 4): their mean.
    torch.testing.assert_close(server.model, vector(2, 11 / 3))
    assert outcome.stand_ins == {}


def test_stale_shares_the_weight_of_one_never_heard() -> None:
    server, _ = begin("stale").step({0: vector(4, 1), 1: vector(1, 4)})
    torch.testing.assert_close(server.model, vector(2.5, 2.5))


def test_mifa_repeats_the_last_update() -> None:
    server, _ = after_first("mifa").step({0: vector(7, 3)})
    # x + ((6, 0) + (0, 3) + (-3, 3)) / 3
    torch.testing.assert_close(server.model, vector(1 + 1, 3 + 2))
    server, _ = server.step({1: vector(2, 8)})
    # x = (2, 5) + ((6, 0) + (0, 3) + (-3, 3)) / 3: the latest of each.
    torch.testing.assert_close(server.model, vector(3, 7))


def test_mifa_adds_nothing_for_one_never_heard() -> None:
    server, _ = begin("mifa").step({0: vector(4, 1)})
    torch.testing.assert_close(server.model, vector(2, 1))


def test_fedvarp_corrects_the_memory_by_what_arrived() -> None:
    server, _ = after_first("fedvarp").step({0: vector(7, 3), 1: vector(1, 6)})
    # Arrivals changed by (6, 0) - (3, 0) and (0, 3) - (0, 3): mean (1.5, 0). Memories' mean: (0, 2).
    torch.testing.assert_close(server.model, vector(1 + 1.5, 3 + 2))


def test_cluster_fedvarp_has_one_memory_a_cluster() -> None:
    # Clusters {0, 1} and {2}: memories ((3, 0) + (0, 3)) / 2 = (1.5, 1.5), and (-3, 3).
    server, _ = after_first("cluster-fedvarp", clusters=2).step({0: vector(7, 3)})
    # (6, 0) - (1.5, 1.5) = (4.5, -1.5); memories' mean over clients (3 - 3, 3 + 3) / 3 = (0, 2).
    torch.testing.assert_close(server.model, vector(1 + 4.5, 3 - 1.5 + 2))
    # The first cluster now remembers (6, 0), the second (-3, 3); client 1 arrives with (0, 0.5).
    server, _ = server.step({1: vector(5.5, 4)})
    torch.testing.assert_close(server.model, vector(5.5 + (0 - 6) + (6 + 6 - 3) / 3, 3.5 + 0.5 - 0 + 3 / 3))


def test_fdms_takes_the_friend_with_the_highest_mean_cosine() -> None:
    server = begin("fdms")
    # cos(0, 1) = 0 and cos(0, 2) = -1/√2, then cos(0, 1) = 1 and cos(0, 2) = 0: means 0.5 and -0.35.
    server, _ = server.step(FIRST)
    server, _ = server.step({0: server.model + 1, 1: server.model + 2, 2: server.model + vector(1, -1)})
    mean = server.state["similarity"] / server.state["met"]
    assert mean[0, 1].item() == pytest.approx(0.5 * (1 + (0 + 1) / 2))
    assert mean[0, 2].item() == pytest.approx(0.5 * (1 + (-math.sqrt(0.5) + 0) / 2))
    x = server.model
    server, outcome = server.step({1: x + vector(3, 0), 2: x + vector(0, 3)})
    assert outcome.stand_ins == {0: (1,)}
    torch.testing.assert_close(server.model, x + vector(2, 1))


def test_fedau_weighs_by_the_mean_gap() -> None:
    server = begin("fedau", cutoff=3)
    # Nobody has a gap behind them: plain sums over m.
    server, _ = server.step({0: vector(4, 1)})
    torch.testing.assert_close(server.model, vector(2, 1))
    server, _ = server.step({0: vector(5, 1)})
    torch.testing.assert_close(server.model, vector(3, 1))
    # Client 1 arrives after a gap of 3, of which it knows only now: its weight is still 1.
    server, _ = server.step({1: vector(3, 4)})
    torch.testing.assert_close(server.model, vector(3, 2))
    # Now it is 3. Client 0's gaps were 1 and 1.
    server, _ = server.step({0: vector(6, 2), 1: vector(3, 3)})
    torch.testing.assert_close(server.model, vector(3 + 1, 2 + 3 / 3))
    # Client 2 was cut off at 3 rounds, client 1 had gaps 3 and 1, client 0 1, 1 and 2.
    assert server.state["omega"].tolist() == pytest.approx([4 / 3, 2, 3])


def test_few_hears_some_of_each_cluster_in_turn() -> None:
    """Clients 0, 1 | 2: of the first pair one in each round, for both; 2 is heard always."""
    server, _ = begin("few", heard=1).step(FIRST)
    torch.testing.assert_close(server.model, vector(4 * 2 / 3 - 2 / 3, 1 * 2 / 3 + 4 / 3))
    server, _ = server.step(FIRST)
    torch.testing.assert_close(server.model, vector(1 * 2 / 3 - 2 / 3, 4 * 2 / 3 + 4 / 3))
    server, _ = begin("few", heard=2).step(FIRST)
    torch.testing.assert_close(server.model, vector(1, 3), msg="everybody is heard")


def test_known_p_divides_by_the_probability() -> None:
    server, _ = begin("known-p", p=[1, 0.5, 0.25]).step({0: vector(4, 1), 2: vector(1, 2)})
    torch.testing.assert_close(server.model, vector(1 + 3 / 3, 1 + 1 / 0.25 / 3))


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("few", {"heard": 0}, "heard must lie between 1 and 1000000000, got 0"),
        ("few", {"heard": 10**21}, "heard must lie between 1 and 1000000000, got 1000000000000000000000"),
        ("few", {"clusters": 0}, "clusters must be at least 1, got 0"),
        ("few", {"clusters": 4}, "clusters must be at most the 3 clients, got 4"),
        ("known-p", {"p": 0.0}, "p must be above 0 and at most 1, got 0.0"),
        (
            "known-p",
            {"form": "plane"},
            "form must be one of doubly-robust, normalised, plain; got 'plane' (did you mean 'plain'?)",
        ),
        ("known-p", {"p": []}, "p must hold at least one number, got an empty list"),
        (
            "known-p",
            {"p": [1, 0.5]},
            "p must hold one number or a list whose length divides the 3 clients; got 2 numbers",
        ),
        ("fedau", {"cutoff": 0}, "cutoff must lie between 1 and 1000000000, got 0"),
        ("fedau", {"cutoff": 10**21}, "cutoff must lie between 1 and 1000000000, got 1000000000000000000000"),
        ("cluster-fedvarp", {"clusters": 0}, "clusters must be at least 1, got 0"),
        ("cluster-fedvarp", {"clusters": 4}, "clusters must be at most the 3 clients, got 4"),
        ("safari+", {"patience": 0.5}, "patience must be at least 1, got 0.5"),
        ("blue", {"ridge": -1.0}, "ridge must lie between 0 and 1000000, got -1.0"),
        ("safari+", {"keep": 0.0}, "keep must be above 0 and at most 1, got 0.0"),
    ],
)
def test_options_out_of_bounds(rule: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        begin(rule, **options)
    assert str(error.value) == text


@pytest.mark.parametrize("rule", ["stale", "mifa", "fedvarp", "cluster-fedvarp", "safari+"])
def test_a_memory_that_would_not_fit(rule: str) -> None:
    with pytest.raises(ConfigError, match=r"clients × model size must be at most 2000000000 .* got [23] × 2"):
        RULES[rule]().init(3, 2 * 10**9, torch.device("meta"))


def test_mifa_as_published_steps_from_memory_when_nobody_arrives() -> None:
    server, _ = begin("mifa", idle=True).step(FIRST)
    assert server.model.tolist() == [1, 3]
    for expected in ([1, 5], [1, 7]):
        server, outcome = server.step({})
        assert outcome.lost
        torch.testing.assert_close(server.model, vector(*expected))
    # Before anybody was heard there is nothing to step from.
    assert begin("mifa", idle=True).step({})[0].model.tolist() == [1, 1]
    waiting, _ = after_first("mifa").step({})
    assert waiting.model.tolist() == [1, 3]


def test_mifa_as_published_takes_a_server_step_from_memory() -> None:
    rule = RULES["mifa"](idle=True)
    server = Server.start(vector(0), 1, rule, steps=["fedavgm"])
    server, _ = server.step({0: vector(1)})
    server, _ = server.step({})
    assert server.model.item() == pytest.approx(1 + 1.9)


def test_a_memory_stays_inside_the_mask_that_the_client_had() -> None:
    """Client 1 cut the second weight; when it is missing, what it is taken to send has it cut as well."""
    server, _ = sparse_step(begin("mifa"), {0: vector(4, 1), 1: vector(4, 0), 2: vector(1, 4)})
    torch.testing.assert_close(server.model, vector(3, 5 / 3))
    server, _ = server.step({0: vector(3, 5 / 3), 2: vector(3, 5 / 3)})
    torch.testing.assert_close(server.model, vector(3 + 3 / 3, 2 / 3 * 5 / 3))


def story(clients: int = 4, rounds: int = 12) -> Iterator[tuple[float, list[int], np.ndarray]]:
    """Of each round the learning rate, who arrives, and what all clients change."""
    draw = np.random.default_rng(3)
    for t in range(rounds):
        arrived = [] if t in (4, 9) else np.flatnonzero(draw.random(clients) < 0.5).tolist()
        yield 0.5 / (t + 1), arrived, draw.normal(size=(clients, 3))


def play(server: Server) -> Iterator[tuple[Server, float, list[int], np.ndarray]]:
    """The server after each round of the story, and what happened in it."""
    for lr, arrived, changes in story():
        models = server.model + torch.tensor(changes[arrived], dtype=torch.float32).reshape(-1, 3)
        server, _ = server.step_stacked(arrived, models, lr=lr)
        yield server, lr, arrived, changes


def test_mifa_rescaled_is_a_table_of_updates_over_the_learning_rate() -> None:
    """The paper's loop, which its authors' code has, too: x + η_t · mean of (x_i - x) / η of i's last round."""
    table, x = np.zeros((4, 3)), np.zeros(3)
    for after, lr, arrived, changes in play(
        Server.start(torch.zeros(3), 4, RULES["mifa"](idle=True, rescale=True))
    ):
        table[arrived] = changes[arrived] / lr
        x = x + lr * table.mean(0)
        np.testing.assert_allclose(after.model.numpy(), x, atol=1e-5)


def test_mifa_rescaled_in_parts_takes_each_number_at_its_own_rate() -> None:
    server = Server.start(torch.zeros(2), 1, RULES["mifa"](rescale=True, idle=True))
    server, _ = server.step_stacked([0], torch.tensor([[4.0, 4.0]]), lr=2.0)
    half = torch.tensor([[True, False]])
    # The first number moves by 5 - 4; the second by 4 / 2 · 1, what it moved by at a rate of 2.
    server, _ = server.step_stacked([0], torch.tensor([[5.0, 9.0]]), came=half, lr=1.0)
    assert server.model.tolist() == [5.0, 6.0]
    server, _ = server.step_stacked([], torch.zeros(0, 2), lr=0.5)
    assert server.model.tolist() == [5.5, 7.0]


P = [1.0, 0.5, 0.25, 0.5]
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4])


def test_known_p_normalised_is_a_mean_with_weights_over_p() -> None:
    x = np.zeros(3)
    server = Server.start(
        torch.zeros(3), 4, RULES["known-p"](p=P, form="normalised"), weights=WEIGHTS.tolist()
    )
    for after, _, arrived, changes in play(server):
        if arrived:
            x = x + np.average(changes[arrived], axis=0, weights=(WEIGHTS / P)[arrived])
        np.testing.assert_allclose(after.model.numpy(), x, atol=1e-5)


def test_known_p_doubly_robust_corrects_a_memory_without_bias() -> None:
    x, memory = np.zeros(3), np.zeros((4, 3))
    server = Server.start(
        torch.zeros(3), 4, RULES["known-p"](p=P, form="doubly-robust"), weights=WEIGHTS.tolist()
    )
    for after, _, arrived, changes in play(server):
        if arrived:
            x = x + WEIGHTS @ memory
            for i in arrived:
                x = x + WEIGHTS[i] / P[i] * (changes[i] - memory[i])
            memory[arrived] = changes[arrived]
        np.testing.assert_allclose(after.model.numpy(), x, atol=1e-5)
