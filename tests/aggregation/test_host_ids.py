"""The host's copy of a round's ids: the same answers as the tensors give, and how seldom a device is asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from safari.aggregation import RULES, Round, Server
from safari.aggregation.compensation import OnHost

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "launches.py"


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launches", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def view(arrived: Sequence[int], cohort: Sequence[int] = (1, 3, 4, 7)) -> Round:
    """A round of which only the tensors are known."""
    return Round(
        number=0,
        global_model=torch.zeros(2),
        cohort=torch.tensor(cohort),
        arrived=torch.tensor(arrived, dtype=torch.int64),
        models=torch.zeros(len(arrived), 2),
        masks=torch.ones(1, 2, dtype=torch.bool).expand(len(arrived), -1),
        weights=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        parameters=2,
    )


def on_host(round: Round, arrived: list[int]) -> OnHost:
    return OnHost((round.cohort, round.arrived, round.weights), [1, 3, 4, 7], arrived, round.weights)


@pytest.mark.parametrize("arrived", [[], [3], [1, 7], [1, 3, 4, 7]])
def test_ids_of_the_host_give_what_the_tensors_give(arrived: list[int]) -> None:
    plain = view(arrived)
    known = replace(plain, on_host=on_host(plain, arrived))
    assert known.arrived_ids == plain.arrived_ids == arrived
    assert known.cohort_ids == plain.cohort_ids == [1, 3, 4, 7]
    assert known.missing_ids == plain.missing_ids == plain.missing.tolist()
    for name in ("present", "missing", "own", "others"):
        mine, theirs = getattr(known, name), getattr(plain, name)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name


def test_a_round_made_from_another_does_not_trust_its_ids() -> None:
    plain = view([1, 7])
    known = replace(plain, on_host=on_host(plain, [1, 7]))
    other = replace(known, arrived=torch.tensor([3, 4]))
    assert other.arrived_ids == [3, 4]
    assert other.missing_ids == [1, 7]
    assert other.own.tolist() == [0.2, 0.3]
    even = replace(known, weights=torch.full((4,), 0.25, dtype=torch.float64))
    assert even.weights_on_host.tolist() == [0.25] * 4


@pytest.mark.parametrize(("rule", "most"), [("perfect", 3), ("drop", 3), ("safari", 4), ("safari+", 7)])
@pytest.mark.parametrize("arrived", [range(10), range(7)])
def test_a_step_waits_for_the_device_only_a_few_times(
    launches: ModuleType, rule: str, most: int, arrived: Sequence[int]
) -> None:
    """Once for what is refused, once for the gate, once for the sum; rules may look for themselves."""
    found = launches.count_step(rule, arrived)
    assert found["waits"] <= most, found["waits by name"]


@pytest.mark.parametrize("rule", sorted({"drop", "safari", "safari+", "mifa"} & set(RULES)))
def test_a_step_on_a_device_is_the_step_on_the_host(launches: ModuleType, rule: str) -> None:
    """Nothing that is kept on the host is mistaken for what is on the device."""
    first, models, mask = launches.arrivals(100, 90, range(10))
    there = launches.OnDevice
    here = Server.start(first, 10, rule, parameters=90)
    with launches.counted():
        far = Server.start(there(first), 10, rule, parameters=90)
    for ids, cohort in ((range(10), None), (range(4), None), ([2, 5], [2, 5, 8]), ([], [1])):
        rows = models[list(ids)]
        here, outcome = here.step_stacked(ids, rows, cohort, mask, same_mask=True)
        with launches.counted():
            far, same = far.step_stacked(ids, there(rows), cohort, there(mask), same_mask=True)
        assert (same.arrived, same.missing, same.stand_ins) == (
            outcome.arrived,
            outcome.missing,
            outcome.stand_ins,
        )
        torch.testing.assert_close(far.model.numbers, here.model)
