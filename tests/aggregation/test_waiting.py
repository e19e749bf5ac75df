"""Cuts that wait: what the first few to arrive cut stays until everybody was heard."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aggregation.samples import sparse_step
from safari.aggregation import RULES, Server
from safari.aggregation.waiting import OVER
from safari.errors import SafariError


def start(clients: int, model: list[float] | Tensor, parameters: int | None = None, **options: Any) -> Server:
    return Server.start(
        torch.as_tensor(model), clients, RULES["safari+"](**options), parameters=parameters or len(model)
    )


def sent(*models: list[float]) -> dict[int, Tensor]:
    return {i: torch.tensor(model) for i, model in enumerate(models) if model}


def test_a_cut_waits_for_those_who_were_never_heard() -> None:
    server = start(3, [1.0, 1.0, 1.0, 1.0])
    # 0 and 1 keep one weight each, and stand in for 2 in equal shares: weights 2 and 3 would be cut.
    server, _ = sparse_step(server, sent([2.0, 0, 0, 0], [0, 4.0, 0, 0]))
    assert server.model.tolist() == pytest.approx([1, 2, 1, 1])
    # 2 comes, keeps weight 2, and stands in for the others with their memory. Weight 3 was kept by nobody.
    server, _ = sparse_step(server, sent([], [], [0, 0, 3.0, 0]))
    assert server.model[3] == 0
    assert server.model[2] > 0
    # 0 and 1 cannot keep what the arrivals cut, but had kept 0 and 1 when they were last heard.
    assert server.model[:2].tolist() == pytest.approx([1, 2])
    # Over: from now on a weight that all arrivals cut is cut.
    server, _ = sparse_step(server, sent([2.0, 0, 0, 0], [2.0, 0, 0, 0]))
    assert (server.model != 0).tolist() == [True, False, False, False]


def test_without_waiting_the_first_to_arrive_decide() -> None:
    server, _ = sparse_step(start(3, [1.0, 1.0, 1.0, 1.0], wait=0), sent([2.0, 0, 0, 0], [0, 4.0, 0, 0]))
    assert server.model.tolist() == pytest.approx([1, 2, 0, 0])


def test_one_mask_alone_may_not_be_the_only_one() -> None:
    server, _ = sparse_step(start(2, [1.0, 1.0]), sent([3.0, 0]))
    assert server.model.tolist() == pytest.approx([3, 1])


@pytest.mark.parametrize("wait", [1, 3])
def test_it_waits_so_many_rounds_and_no_longer(wait: int) -> None:
    """2 is never heard."""
    server = start(3, [1.0, 1.0, 1.0], wait=wait)
    for _ in range(wait):
        server, _ = server.step({})
        server, _ = sparse_step(server, sent([2.0, 0, 0], [0, 2.0, 0]))
        assert server.model[2] == pytest.approx(1), "a round in which nobody arrives does not count"
    server, _ = sparse_step(server, sent([2.0, 0, 0], [0, 2.0, 0]))
    assert server.model[2] == 0


def test_a_bias_that_stayed_0_for_some_is_no_difference_between_masks() -> None:
    # The last number is 0 in the model and in what 0 sends, too; weight 1 is cut by all.
    masks = dict.fromkeys([0, 1], torch.tensor([True, False, True]))
    server, _ = start(3, [1.0, 1.0, 0.0]).step(sent([2.0, 0, 0], [2.0, 0, 0.5]), masks=masks)
    assert server.model.tolist() == pytest.approx([2, 0, 0.25])


def test_nothing_waits_when_everybody_who_was_asked_arrived() -> None:
    """Of three clients two are asked, and both come: nobody is missing who could keep a weight."""
    server, _ = sparse_step(start(3, [1.0, 1.0, 1.0]), sent([2.0, 0, 0], [0, 2.0, 0]), cohort=[0, 1])
    assert server.model.tolist() == pytest.approx([1, 1, 0])


def test_it_waits_for_those_who_are_asked() -> None:
    """2 is never asked. 1 is missing, and heard in the next round: nobody is left to wait for."""
    server, _ = sparse_step(start(3, [1.0, 1.0, 1.0]), sent([2.0, 0, 0]), cohort=[0, 1])
    assert server.model.tolist() == pytest.approx([2, 1, 1])
    server, _ = sparse_step(server, sent([], [0, 2.0, 0]), cohort=[0, 1])
    assert (server.model != 0).tolist() == [True, True, False]


OPTIONS: list[dict[str, float]] = [
    {},
    {"friends": False},
    {"memory": False},
    {"stay": True},
    {"calm": 0.0, "patience": 30.0},
]


@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(2, 6),
    before=st.integers(0, 3),
    same=st.booleans(),
    options=st.sampled_from(OPTIONS),
)
def test_a_round_that_waits_differs_only_where_all_arrivals_cut(
    seed: int, clients: int, before: int, same: bool, options: dict[str, float]
) -> None:
    """Some rounds, and then one in which the same server waits, or is over with waiting."""
    draw = torch.Generator().manual_seed(seed)
    server = start(clients + 1, 1 + torch.rand(30, generator=draw), parameters=24, **options)
    for _ in range(before):
        server, _ = sparse_step(server, some_models(server, draw, clients))
    models = some_models(server, draw, clients, same=same)
    at_once = dataclasses.replace(server, state={**server.state, "wait": torch.tensor([OVER])})
    (patient, spoken), (cut, said) = sparse_step(server, models), sparse_step(at_once, models)
    assert spoken.stand_ins == said.stand_ins
    alive = torch.stack(list(models.values())).ne(0).any(0)
    torch.testing.assert_close(patient.model[alive], cut.model[alive])
    assert not cut.model[~alive].any()
    assert not patient.model[24:][~alive[24:]].any(), "buffers do not wait"
    # The last client is never heard. Where masks are the same, what anybody had kept stays; else all of it.
    over = same and len(models) > 1
    stays = server.model * (patient.state["kept"].any(0) if over else True)
    waits = ~alive[:24]
    torch.testing.assert_close(patient.model[:24][waits], stays[:24][waits])
    assert int(patient.state["wait"]) == (OVER if over else 10 - before - 1)


def some_models(
    server: Server, draw: torch.Generator, clients: int, *, same: bool = False
) -> dict[int, Tensor]:
    """Models of at least one of the first clients, a third of whose weights are kept; one buffer is 0."""
    ids = torch.randperm(clients, generator=draw)[: int(torch.randint(1, clients + 1, (), generator=draw))]
    masks = torch.rand(len(ids), 30, generator=draw) < 0.3
    masks = masks[:1].repeat(len(ids), 1) if same else masks
    masks[:, 24:], masks[:, 29] = True, False
    steps = 0.1 * torch.randn(len(ids), 30, generator=draw)
    return {int(i): (server.model + step) * mask for i, step, mask in zip(ids, steps, masks, strict=True)}


@pytest.mark.parametrize("share", [1.0, 1e-7])
def test_however_little_the_missing_weigh_they_are_waited_for(share: float) -> None:
    server = Server.start(torch.ones(4), 3, RULES["safari+"](), weights=[1.0, 1.0, share])
    server, _ = sparse_step(server, sent([2.0, 0, 0, 0], [0, 4.0, 0, 0]))
    assert server.model[2:].tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (-1, "wait must lie between 0 and 1000000, got -1"),
        (10**20, f"wait must lie between 0 and 1000000, got {10**20}"),
        (2.5, "wait must be a whole number, got 2.5"),
        ("3", "wait must be a whole number, got '3'"),
    ],
)
def test_how_long_is_a_number_of_rounds(wait: object, text: str) -> None:
    with pytest.raises(SafariError, match=f"^{text}$"):
        RULES["safari+"](wait=wait)
