"""What every rule must keep to: one table, the same tests and properties for all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aggregation.samples import sparse_step
from safari.aggregation import (
    RULES,
    Compensation,
    Decision,
    Round,
    Server,
    combine,
    observe,
    similarity,
    stand_in,
    unknown,
)
from safari.aggregation.compensation import State
from safari.aggregation.similarity import distances

# name -> options of the rule; a new rule has to be put here.
OPTIONS: dict[str, dict[str, Any]] = {
    "perfect": {},
    "attainable": {},
    "drop": {},
    "safari": {},
    "safari+": {},
    "blue": {},
    "stale": {},
    "fdms": {},
    "mifa": {},
    "fedvarp": {},
    "cluster-fedvarp": {"clusters": 1},
    "fedstale": {},
    "fedau": {},
    "known-p": {"p": 1.0},
    "few": {"heard": 100, "clusters": 1},
    "trimmed-mean": {"trim": 0.0},
    "geometric-median": {},
    "majority-vote": {},
}
# Rules whose decision is an average of arrivals alone: their weights sum to 1.
AVERAGING = ["perfect", "attainable", "drop", "safari", "fdms"]
# Rules that are no mean, even when everything arrived.
ROBUST = ["trimmed-mean", "geometric-median", "majority-vote"]
# Rules for which no client is special: nothing but names depends on names.
NAMELESS = [name for name in OPTIONS if name not in ("cluster-fedvarp", "known-p", "few")]
# Rules that leave nothing of the old model in a weight that all arrivals cut, whatever they remember.
CUTTING = [*AVERAGING, *ROBUST, "fedau", "known-p"]
CPU = torch.device("cpu")


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Compensation:
    return RULES[request.param](**OPTIONS[request.param])


def round_of(
    number: int,
    clients: int,
    arrived: list[int],
    seed: int = 0,
    cohort: list[int] | None = None,
    size: int = 6,
    cut: float = 0.0,
) -> Round:
    """A made-up round; `cut`: the share of weights that is cut, by each client others."""
    generator = torch.Generator().manual_seed(seed * 1000 + number)
    asked = torch.tensor(list(range(clients)) if cohort is None else cohort)
    weights = torch.rand(len(asked), generator=generator, dtype=torch.float64) + 0.1
    x, models = (torch.randn(*shape, generator=generator) for shape in ((size,), (len(arrived), size)))
    masks = torch.rand(len(arrived), size, generator=generator) >= cut
    masks[:, size - 2 :] = True
    return Round(
        number=number,
        global_model=x,
        cohort=asked,
        arrived=torch.tensor(arrived, dtype=torch.int64),
        models=models * masks,
        masks=masks,
        weights=weights / weights.sum(),
        parameters=size - 2,
    )


ROUNDS = [[0, 1, 2, 3], [0, 2], [], [3], [1, 2, 3], [0]]


def snapshot(thing: Any) -> dict[str, Tensor]:
    items = thing.items() if isinstance(thing, dict) else dataclasses.asdict(thing).items()
    return {name: value.clone() for name, value in items if isinstance(value, Tensor)}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[k].dtype == two[k].dtype and torch.equal(one[k].nan_to_num(nan=7e7), two[k].nan_to_num(nan=7e7))
        for k in one
    )


PEOPLE = st.integers(1, 7)


@st.composite
def plays(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[int], list[int]]]]:
    """How many clients, a seed for their numbers, and for each round a cohort and who of it arrived."""
    clients = draw(PEOPLE)
    rounds = []
    for _ in range(draw(st.integers(1, 5))):
        cohort = sorted(draw(st.sets(st.integers(0, clients - 1), min_size=1)))
        rounds.append((cohort, sorted(draw(st.sets(st.sampled_from(cohort))))))
    return clients, draw(st.integers(0, 10**6)), rounds


def test_the_table_has_every_rule() -> None:
    assert OPTIONS.keys() == RULES.keys()


def test_state_is_named_tensors_and_keeps_its_form(rule: Compensation) -> None:
    """So that a checkpoint can hold it and a resumed run can read it."""
    state = rule.init(4, 6, CPU)
    form = {name: (t.shape, t.dtype) for name, t in state.items()}
    for number, arrived in enumerate(ROUNDS):
        assert all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items())
        assert {name: (t.shape, t.dtype) for name, t in state.items()} == form
        _, state = rule.apply(state, round_of(number, 4, arrived))


@pytest.mark.parametrize("name", RULES)
def test_the_state_is_all_there_is(name: str) -> None:
    """A rule made anew each round goes on from a copied state as the old one does: no closure hides any."""
    rule = RULES[name](**OPTIONS[name])
    state: State = rule.init(4, 6, CPU)
    copied = snapshot(state)
    for number, arrived in enumerate(ROUNDS):
        view = round_of(number, 4, arrived)
        decision, state = rule.apply(state, view)
        other, copied = RULES[name](**OPTIONS[name]).apply(snapshot(copied), view)
        assert torch.equal(combine(view, decision), combine(view, other))
        assert decision.stand_ins == other.stand_ins
        assert same(state, copied)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=30)
@given(play=plays(), huge=st.booleans(), parts=st.booleans())
def test_a_memory_in_place_is_that_of_a_step_that_copies(
    name: str, play: Any, huge: bool, parts: bool
) -> None:
    """Also where a sum that is not finite is made again without those who caused it."""
    clients, seed, rounds = play
    one = two = Server.start(torch.zeros(6), clients, RULES[name](**OPTIONS[name]), parameters=4, gate="off")
    two = dataclasses.replace(two, state={k: v.clone() for k, v in two.state.items()})
    generator = torch.Generator().manual_seed(seed)
    for number, (cohort, arrived) in enumerate(rounds):
        models = torch.randn(len(arrived), 6, generator=generator)
        if huge and number == 1:
            models[:1] = torch.finfo(torch.float32).max
        came = torch.rand(len(arrived), 6, generator=generator) < 0.7 if parts else None
        before = snapshot(one.state)
        after, outcome = one.step_stacked(arrived, models, cohort, came=came)
        assert same(snapshot(one.state), before)
        columns = {k: two.state[k].data_ptr() for k in two.rule.columns}
        two, found = two.step_stacked(arrived, models, cohort, came=came, in_place=True)
        assert {k: two.state[k].data_ptr() for k in two.rule.columns} == columns
        assert found == outcome
        assert torch.equal(after.model, two.model)
        assert same(snapshot(after.state), snapshot(two.state))
        one = after


def test_no_arrivals_leave_the_model(rule: Compensation) -> None:
    state = rule.init(4, 6, CPU)
    _, state = rule.apply(state, round_of(0, 4, [0, 1, 2, 3]))
    view = round_of(1, 4, [])
    decision, _ = rule.apply(state, view)
    assert decision.a.shape == (0,)
    assert decision.stand_ins == {}
    assert torch.equal(combine(view, decision), view.global_model)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ROBUST])
def test_everything_arrived_is_the_weighted_mean(name: str) -> None:
    rule = RULES[name](**OPTIONS[name])
    state = rule.init(4, 6, CPU)
    for number in range(3):
        view = round_of(number, 4, [0, 1, 2, 3])
        decision, state = rule.apply(state, view)
        expected = (view.weights[:, None] * view.models.double()).sum(0)
        torch.testing.assert_close(combine(view, decision).double(), expected, rtol=1e-5, atol=1e-5)
        assert decision.stand_ins == {}


@pytest.mark.parametrize("name", [name for name in RULES if name != "majority-vote"])
def test_one_client_alone(name: str) -> None:
    """Its model is the next one; a vote takes no more than its signs."""
    rule = RULES[name](**OPTIONS[name])
    state = rule.init(1, 6, CPU)
    # Never missing before it arrives: fedau would make up for that.
    for number, arrived in enumerate([[0], [0], [], []]):
        view = round_of(number, 1, arrived)
        decision, state = rule.apply(state, view)
        expected = view.models[0] if arrived else view.global_model
        torch.testing.assert_close(combine(view, decision), expected, rtol=1e-6, atol=1e-6)


# --- properties over whole histories


@pytest.mark.parametrize("name", AVERAGING)
@settings(max_examples=40)
@given(play=plays())
def test_weights_sum_to_one_and_the_model_is_among_the_arrivals(name: str, play: Any) -> None:
    clients, seed, rounds = play
    rule = RULES[name](**OPTIONS[name])
    state = rule.init(clients, 6, CPU)
    for number, (cohort, arrived) in enumerate(rounds):
        view = round_of(number, clients, arrived, seed, cohort)
        decision, state = rule.apply(state, view)
        if not arrived:
            continue
        assert (decision.a >= 0).all()
        assert float(decision.a.sum()) == pytest.approx(1.0, abs=1e-12)
        out = combine(view, decision)
        low, high = view.models.min(0).values, view.models.max(0).values
        slack = 1e-6 * (1 + view.models.abs().max())
        assert ((out >= low - slack) & (out <= high + slack)).all()


@pytest.mark.parametrize("name", NAMELESS)
@settings(max_examples=40)
@given(play=plays(), data=st.data())
def test_renaming_clients_renames_the_result(name: str, play: Any, data: st.DataObject) -> None:
    """Random numbers have no ties, so nothing but names may depend on names."""
    clients, seed, rounds = play
    new = data.draw(st.permutations(range(clients)))
    old_of = {n: o for o, n in enumerate(new)}
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.rand(clients, generator=generator) + 0.1).tolist()
    one = Server.start(torch.zeros(6), clients, RULES[name](), weights=weights, parameters=4)
    two = Server.start(
        torch.zeros(6),
        clients,
        RULES[name](),
        weights=[weights[old_of[n]] for n in range(clients)],
        parameters=4,
    )
    for cohort, arrived in rounds:
        models = {i: torch.randn(6, generator=generator) for i in arrived}
        one, first = one.step(models, cohort)
        two, second = two.step({new[i]: m for i, m in models.items()}, [new[i] for i in cohort])
        torch.testing.assert_close(one.model, two.model, rtol=1e-5, atol=1e-5)
        renamed = {new[j]: sorted(new[i] for i in who) for j, who in first.stand_ins.items()}
        assert renamed == {j: sorted(who) for j, who in second.stand_ins.items()}


@pytest.mark.parametrize("name", CUTTING)
@settings(max_examples=60)
@given(data=st.data())
def test_a_weight_that_everybody_cut_becomes_exactly_zero(name: str, data: st.DataObject) -> None:
    """Whatever the client weights and whoever arrived, nothing of the old model is left."""
    clients = data.draw(st.integers(1, 30))
    weights = data.draw(st.lists(st.floats(1e-6, 1e6), min_size=clients, max_size=clients))
    arrivals = st.sets(st.integers(0, clients - 1), min_size=1)
    server = Server.start(torch.full((4,), 1e6), clients, RULES[name](), weights=weights)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    for arrived in data.draw(st.lists(arrivals, min_size=1, max_size=4)):
        models = {}
        for i in arrived:
            models[i] = torch.randn(4, generator=generator) * 1e3
            models[i][[1, 3]] = 0
        server, _ = sparse_step(server, models)
        assert server.model[[1, 3]].tolist() == [0.0, 0.0]
        assert (server.model[[0, 2]] != 0).all()


@pytest.mark.parametrize("name", ["mifa", "fedvarp", "cluster-fedvarp", "safari+"])
def test_old_masks_do_not_hold_a_weight_that_all_arrivals_cut(name: str) -> None:
    """Else the support stays above the budget, and masks never come to rest."""
    first, last = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 0.0, 3.5])
    server, _ = Server.start(torch.ones(3), 4, RULES[name]()).step({i: first + i for i in range(4)})
    assert (server.model != 0).all()
    server, _ = sparse_step(server, {0: last})
    assert (server.model != 0).tolist() == [True, False, True]


# --- the parts


def test_combine_is_the_linear_form() -> None:
    """x + Σ a_i (x_i - x) + Σ b_j (z_j - x), by hand."""
    view = Round(
        number=0,
        global_model=torch.tensor([1.0, 2.0]),
        cohort=torch.tensor([0, 1, 2]),
        arrived=torch.tensor([0, 2]),
        models=torch.tensor([[3.0, 2.0], [1.0, 6.0]]),
        masks=torch.ones(2, 2, dtype=torch.bool),
        weights=torch.full((3,), 1 / 3, dtype=torch.float64),
        parameters=2,
    )
    half = Decision(torch.tensor([0.25, 0.25], dtype=torch.float64))
    assert combine(view, half).tolist() == [1 + 0.25 * 2, 2 + 0.25 * 4]
    more = Decision(torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert combine(view, more).tolist() == [1 + 2, 2 + 4]
    memory = Decision(
        torch.zeros(2, dtype=torch.float64), torch.tensor([2.0, -1.0]), torch.tensor([[2.0, 2.0], [1.0, 3.0]])
    )
    assert combine(view, memory).tolist() == [1 + 2, 2 - 1]
    assert view.present.tolist() == [True, False, True]
    assert view.missing.tolist() == [1]


def test_stand_in_shares_a_place_as_the_mixture_says() -> None:
    view = round_of(0, 4, [0, 3])
    view = dataclasses.replace(view, weights=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    mixture = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    decision = stand_in(view, mixture)
    # 1's 0.2 goes 0.05 to 0 and 0.15 to 3; 2's 0.3 goes to 0.
    assert decision.a.tolist() == pytest.approx([0.1 + 0.05 + 0.3, 0.4 + 0.15])
    assert decision.stand_ins == {1: (3, 0), 2: (0,)}


def test_observe_by_hand_and_pure() -> None:
    table = unknown(3)
    assert table.dtype == torch.float32
    after = observe(table, torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    assert table.isnan().all()
    assert after[[0, 2]][:, [0, 2]].tolist() == [[0, -5], [-5, 0]]
    assert after[1].isnan().all()
    assert after[:, 1].isnan().all()
    # Only the pairs that met are touched by the next meeting.
    again = observe(after, torch.tensor([0, 1]), torch.tensor([[0.0, 0.0], [0.0, 2.0]]))
    assert again[0].tolist() == [0, -2, -5]


@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 6),
    size=st.integers(1, 40),
    apart=st.floats(1e-4, 1e4),
    at_once=st.integers(1, 300),
)
def test_distances_as_numpy_subtracts(seed: int, clients: int, size: int, apart: float, at_once: int) -> None:
    """Of models near each other and far from 0, two of them the same, one astray; in slices of any width."""
    rng = np.random.default_rng(seed)
    began = rng.normal(size=size).astype(np.float32)
    steps = apart * rng.normal(size=(clients, size)) * (rng.random((clients, size)) < 0.7)
    models = (began + steps).astype(np.float32)
    models[-1] = models[0]
    models[clients // 2] *= np.float32(1e12) ** (clients > 2)
    expected = np.linalg.norm(models[:, None].astype(np.float64) - models[None], axis=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "_AT_ONCE", at_once)
        found = distances(torch.from_numpy(models), torch.from_numpy(began)).numpy()
    lengths = np.linalg.norm(models - began.astype(np.float64), axis=1)
    # Rounding is of the size of the squares that are subtracted.
    near = 1e-6 * (lengths[:, None] + lengths[None, :])
    assert (np.abs(found - expected) <= near).all()
    assert (found == found.T).all()
    assert (found[(models[:, None] == models[None]).all(2)] == 0).all()


def test_the_matrix_is_float32_whatever_the_default() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert unknown(2).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
