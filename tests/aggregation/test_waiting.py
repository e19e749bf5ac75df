"""Cuts that wait: what the first few to arrive cut stays until everybody was heard."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from safari.aggregation import RULES, Server
from safari.errors import ConfigError


def start(clients: int, model: list[float] | Tensor, parameters: int | None = None, **options: int) -> Server:
    return Server.start(
        torch.as_tensor(model), clients, RULES["safari+"](**options), parameters=parameters or len(model)
    )


def sent(*models: list[float]) -> dict[int, Tensor]:
    return {i: torch.tensor(model) for i, model in enumerate(models) if model}


def test_a_cut_waits_for_those_who_were_never_heard() -> None:
    server = start(3, [1.0, 1.0, 1.0, 1.0])
    # 0 and 1 keep one weight each, and speak for 2 in equal shares: weights 2 and 3 would be cut.
    server, _ = server.step(sent([2.0, 0, 0, 0], [0, 4.0, 0, 0]))
    assert server.model.tolist() == pytest.approx([1, 2, 1, 1])
    # 2 comes, keeps weight 2, and speaks for the others with their memory. Weight 3 was kept by nobody.
    server, _ = server.step(sent([], [], [0, 0, 3.0, 0]))
    assert server.model[3] == 0
    assert server.model[2] > 0
    # 0 and 1 cannot keep what the arrivals cut, but had kept 0 and 1 when they were last heard.
    assert server.model[:2].tolist() == pytest.approx([1, 2])
    # Over: from now on a weight that all arrivals cut is cut.
    server, _ = server.step(sent([2.0, 0, 0, 0], [2.0, 0, 0, 0]))
    assert (server.model != 0).tolist() == [True, False, False, False]


def test_without_waiting_the_first_to_arrive_decide() -> None:
    server, _ = start(3, [1.0, 1.0, 1.0, 1.0], wait=0).step(sent([2.0, 0, 0, 0], [0, 4.0, 0, 0]))
    assert server.model.tolist() == pytest.approx([1, 2, 0, 0])


def test_one_mask_alone_may_not_be_the_only_one() -> None:
    server, _ = start(2, [1.0, 1.0]).step(sent([3.0, 0]))
    assert server.model.tolist() == pytest.approx([3, 1])


@pytest.mark.parametrize("wait", [1, 3])
def test_it_waits_so_many_rounds_and_no_longer(wait: int) -> None:
    """2 is never heard."""
    server = start(3, [1.0, 1.0, 1.0], wait=wait)
    for _ in range(wait):
        server, _ = server.step(sent([2.0, 0, 0], [0, 2.0, 0]))
        assert server.model[2] == pytest.approx(1)
    server, _ = server.step({})
    assert server.model[2] == pytest.approx(1), "a round in which nobody arrives changes nothing"
    server, _ = server.step(sent([2.0, 0, 0], [0, 2.0, 0]))
    assert server.model[2] == 0


def test_a_bias_that_stayed_0_for_some_is_no_difference_between_masks() -> None:
    # The last number is 0 in the model and in what 0 sends, too; weight 1 is cut by all.
    server, _ = start(3, [1.0, 1.0, 0.0]).step(sent([2.0, 0, 0], [2.0, 0, 0.5]))
    assert server.model.tolist() == pytest.approx([2, 0, 0.25])


def test_who_was_asked_and_all_came_waits_for_nobody() -> None:
    """Of three clients two are asked, and both come: nobody is missing who could keep a weight."""
    server, _ = start(3, [1.0, 1.0, 1.0]).step(sent([2.0, 0, 0], [0, 2.0, 0]), cohort=[0, 1])
    assert server.model.tolist() == pytest.approx([1, 1, 0])


@given(
    seed=st.integers(0, 10**6),
    arrived=st.integers(1, 4),
    clients=st.integers(2, 6),
    same=st.booleans(),
)
def test_a_round_that_waits_differs_only_where_all_arrivals_cut(
    seed: int, arrived: int, clients: int, same: bool
) -> None:
    arrived = min(arrived, clients)
    draw = torch.Generator().manual_seed(seed)
    x = 1 + torch.rand(30, generator=draw)
    masks = torch.rand(arrived, 30, generator=draw) < 0.3
    masks = masks[:1].repeat(arrived, 1) if same else masks
    masks[:, 24:] = True  # buffers
    models = {i: (x + 0.1 * torch.randn(30, generator=draw)) * masks[i] for i in range(arrived)}
    patient, _ = start(clients, x, parameters=24).step(models)
    at_once, _ = start(clients, x, parameters=24, wait=0).step(models)
    alive = masks.any(0)
    torch.testing.assert_close(patient.model[alive], at_once.model[alive])
    assert (at_once.model[~alive] == 0).all()
    if arrived < clients and not (same and arrived > 1):
        torch.testing.assert_close(patient.model[~alive], x[~alive])
    else:
        assert torch.equal(patient.model, at_once.model)


def test_a_negative_wait_is_refused() -> None:
    with pytest.raises(ConfigError, match="wait must be at least 0, got -1"):
        RULES["safari+"](wait=-1)
