"""Masks are data: what a client cut is said by its mask, and a kept weight may be 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aggregation.samples import A, B, sparse_step, start, vector
from safari.aggregation import RULES, Server
from safari.errors import SafariError


def bools(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


ALL = bools(1, 1, 1)

# --- a kept weight that is 0


def test_the_rest_of_the_old_model_stays_where_a_kept_weight_is_0() -> None:
    """fedau steps by half: of a weight that arrived as 0 and kept, half of the old value is left."""
    one = {0: vector(3, 0, 0)}
    server, _ = Server.start(vector(1, 1, 1), 2, RULES["fedau"]()).step(one, masks={0: bools(1, 1, 0)})
    assert server.model.tolist() == [2, 0.5, 0]


@pytest.mark.parametrize("rule", ["mifa", "fedvarp", "cluster-fedvarp", "safari+"])
def test_an_update_to_exactly_0_is_remembered(rule: str) -> None:
    """Client 1 trained the second weight from 1 to 0 and cut the third: an update of -1, and none."""
    sent = {0: vector(2, 3, 4), 1: vector(2, 0, 0)}
    server, _ = Server.start(vector(1, 1, 1), 2, RULES[rule]()).step(sent, masks={1: bools(1, 1, 0)})
    row = 1
    assert server.state["updates"][row].tolist() == [1, -1, 0]
    assert server.state["kept"][row].tolist() == [True, True, False]


def test_what_is_recalled_counts_where_an_arrival_kept_a_0() -> None:
    """mifa: client 1 is missing, its last update was (1, 2, 3); client 0 arrives with a kept 0 and a cut."""
    server, _ = Server.start(vector(1, 1, 1), 2, RULES["mifa"]()).step(
        {0: vector(1, 1, 1), 1: vector(2, 3, 4)}
    )
    x = server.model
    server, _ = server.step({0: vector(1, 0, 0)}, masks={0: bools(1, 1, 0)})
    torch.testing.assert_close(server.model, vector(0.5 + (x[0] + 1) / 2, (x[1] + 2) / 2, 0))


def test_a_cluster_keeps_what_any_of_its_arrivals_kept() -> None:
    """Updates of 1 and -1 on a model of 0 cancel; the union of two masks does not."""
    rule = RULES["cluster-fedvarp"](clusters=1)
    sent = {0: vector(1, 5, 0), 1: vector(-1, 0, 0)}
    server, _ = sparse_step(Server.start(vector(0, 1, 1), 2, rule), sent)
    assert server.state["kept"].tolist() == [[True, True, False]]


def test_the_similarity_of_safari_plus_sees_a_step_to_0() -> None:
    """Both step from (1, 1) to (0, 0) inside full masks: the same direction, so a cosine of 1."""
    sent = {0: vector(0, 0), 1: vector(0, 0)}
    server, _ = Server.start(vector(1, 1), 2, "safari+").step(sent)
    assert float(server.state["alike"][0, 1] / server.state["met"][0, 1]) == pytest.approx(1)
    server, _ = sparse_step(Server.start(vector(1, 1), 2, "safari+"), sent)
    assert float(server.state["alike"][0, 1]) == 0, "nothing was kept, so nothing is known"


def test_nothing_waits_where_masks_are_the_same_and_values_are_0() -> None:
    """One sends 0 in a weight that both kept: masks do not differ, so the cut of the third is final."""
    sent = {0: vector(2, 0, 0), 1: vector(2, 2, 0)}
    masks = dict.fromkeys(sent, bools(1, 1, 0))
    server, _ = Server.start(vector(1, 1, 1), 3, "safari+").step(sent, masks=masks)
    assert server.model.tolist() == pytest.approx([2, 1, 0])


# --- one mask for all


@pytest.mark.parametrize("rule", RULES)
def test_one_row_for_all_is_the_same_as_a_row_for_each(rule: str) -> None:
    draw = torch.Generator().manual_seed(1)
    one = two = Server.start(torch.randn(8, generator=draw), 3, RULES[rule](), parameters=7)
    for ids in ([0, 1, 2], [1], [], [0, 2]):
        mask = torch.rand(1, 8, generator=draw) < 0.6
        mask[:, 7] = True
        models = torch.randn(len(ids), 8, generator=draw) * mask
        named = dict(zip(ids, models, strict=True))
        three, third = one.step(named, masks=dict.fromkeys(ids, mask[0]))
        one, first = one.step_stacked(ids, models, masks=mask)
        two, second = two.step_stacked(ids, models, masks=mask.repeat(len(ids), 1))
        assert torch.equal(one.model, three.model)
        assert first == third
        assert torch.equal(one.model, two.model)
        assert first == second
        assert all(torch.equal(one.state[name], two.state[name]) for name in one.state)


@pytest.mark.parametrize("rule", RULES)
def test_no_masks_are_masks_that_cut_nothing(rule: str) -> None:
    one, _ = start(rule).step({0: A, 1: B})
    two, _ = start(rule).step({0: A, 1: B}, masks={0: ALL.numpy()})
    three, _ = start(rule).step_stacked([0, 1], torch.stack([A, B]), masks=ALL[None])
    assert torch.equal(one.model, two.model)
    assert torch.equal(one.model, three.model)


# --- what does not fit

WRONG: list[tuple[Any, str]] = [
    (bools(1, 1), "expected a mask of 3 bools, got bool of shape [2]"),
    (torch.ones(3), "expected a mask of 3 bools, got float32 of shape [3]"),
    (np.ones(3, np.uint8), "expected a mask of 3 bools, got uint8 of shape [3]"),
    (ALL[None], "expected a mask of 3 bools, got bool of shape [1, 3]"),
    ("keep", "expected a mask of 3 bools, got a str"),
    (bools(1, 1, 0), "1 numbers that its mask cuts are not 0"),
    (bools(0, 0, 0), "2 numbers that its mask cuts are not 0"),
]


@pytest.mark.parametrize(("mask", "reason"), WRONG)
@pytest.mark.parametrize("rule", ["drop", "mifa", "safari+"])
def test_a_mask_that_does_not_fit_refuses_its_client(rule: str, mask: Any, reason: str) -> None:
    server, outcome = start(rule).step({0: A, 1: B}, masks={0: ALL, 1: mask})
    without, _ = start(rule).step({0: A}, masks={0: ALL})
    assert outcome.refused == {1: reason}
    assert outcome.arrived == (0,)
    assert torch.equal(server.model, without.model)


def test_a_nan_where_the_mask_cuts_is_a_nan() -> None:
    _, outcome = start().step({1: vector(1, float("nan"), 2)}, masks={1: bools(1, 0, 0)})
    assert outcome.refused == {1: "1 numbers are NaN or infinite"}


def test_minus_0_is_0() -> None:
    _, outcome = start("drop").step({1: vector(1, -0.0, 2)}, masks={1: bools(1, 0, 1)})
    assert not outcome.refused


@pytest.mark.parametrize(
    ("masks", "got"),
    [
        (torch.ones(2, 2, dtype=torch.bool), "bool of shape [2, 2]"),
        (torch.ones(3, dtype=torch.bool), "bool of shape [3]"),
        (torch.ones(2, 3), "float32 of shape [2, 3]"),
        ([[True] * 3] * 2, "a list"),
    ],
)
def test_masks_that_are_no_stack(masks: Any, got: str) -> None:
    with pytest.raises(SafariError) as error:
        start().step_stacked([0, 2], torch.stack([A, B]), masks=masks)
    assert str(error.value) == (
        "masks must be a tensor of bools of shape [2, 3], a row for each id, or with one row for all, "
        f"got {got}"
    )


def test_masks_by_client_are_a_mapping() -> None:
    with pytest.raises(
        SafariError, match=r"^masks must map client ids to masks, got a tensor of shape \[1, 3\]$"
    ):
        start().step({0: A}, masks=ALL[None])  # type: ignore[arg-type]


def test_rows_of_the_refused_leave_with_their_masks() -> None:
    """Of three rows the middle one is refused; the others keep their own masks."""
    models = torch.stack([vector(4, 0, 0), vector(1, 1, 1), vector(0, 0, 4)])
    masks = torch.stack([bools(1, 0, 0), bools(1, 1, 0), bools(0, 0, 1)])
    server, outcome = start("mifa").step_stacked([0, 1, 2], models, masks=masks)
    assert dict(outcome.refused) == {1: "1 numbers that its mask cuts are not 0"}
    assert server.state["kept"].tolist() == [[True, False, False], [False] * 3, [False, False, True]]
