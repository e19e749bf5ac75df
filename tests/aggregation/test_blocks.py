"""Models that arrive in part: what a plain loop over coordinates gives, and whole-model loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from safari.aggregation import RULES, Compensation, Decision, Gate, Ruling, Server
from safari.aggregation.blocks import arrange
from safari.aggregation.compensation import Round, Weights, combine
from safari.aggregation.memory import LARGEST
from safari.aggregation.rule import respond
from safari.aggregation.rule import rule as make_rule
from safari.aggregation.similarity import common_cosines, common_distances, cosines, distances
from safari.errors import ConfigError, SafariError

CLIENTS, SIZE, PARAMETERS = 5, 60, 52
OPTIONS: dict[str, dict[str, Any]] = {
    "cluster-fedvarp": {"clusters": 2},
    "known-p": {"p": 0.7},
    "few": {"heard": 2, "clusters": 2},
}


def server_of(rule: str, seed: int = 0) -> Server:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, generator=generator)
    made = replace(RULES[rule](**OPTIONS.get(rule, {})), name=f"rule {rule}")
    return Server.start(x, CLIENTS, made, parameters=PARAMETERS, weights=[1, 2, 3, 4, 5])


def round_data(t: int, seed: int = 0, cut: float = 0.4) -> tuple[Tensor, Tensor]:
    """Models and masks of all clients in round t."""
    generator = torch.Generator().manual_seed(1000 * seed + t + 1)
    masks = torch.rand(CLIENTS, SIZE, generator=generator) >= cut
    masks[:, PARAMETERS:] = True
    models = torch.randn(CLIENTS, SIZE, generator=generator) * masks
    models[:, PARAMETERS:] = models[:, PARAMETERS:].abs()
    return models, masks


def in_packets(t: int, seed: int, packets: int = 6, lost: float = 0.4) -> Tensor:
    """What came of each client: runs of coordinates, whose edges differ from client to client."""
    generator = torch.Generator().manual_seed(77 * seed + t)
    came = torch.zeros(CLIENTS, SIZE, dtype=torch.bool)
    for row in came:
        edges = torch.randperm(SIZE - 1, generator=generator)[: packets - 1].sort().values + 1
        pieces = row.tensor_split(edges)
        for piece in pieces:
            piece |= bool(torch.rand(1, generator=generator) >= lost)
    return came


@pytest.mark.parametrize("rule", RULES)
def test_everything_or_nothing_of_a_client_is_the_ordinary_step_bit_for_bit(rule):
    ordinary = parts = server_of(rule)
    for t, arrived in enumerate([[0, 1, 2, 3, 4], [0, 3], [1, 2, 4], [], [2], [0, 1, 4]]):
        models, masks = round_data(t)
        rows = torch.tensor(arrived, dtype=torch.int64)
        ordinary, expected = ordinary.step_stacked(arrived, models[rows], None, masks[rows])
        came = torch.zeros(CLIENTS, SIZE, dtype=torch.bool)
        came[rows] = True
        parts, found = parts.step_stacked(list(range(CLIENTS)), models, None, masks, came)
        assert found == expected
        assert torch.equal(parts.model, ordinary.model)
        assert parts.state.keys() == ordinary.state.keys()
        assert all(
            torch.equal(parts.state[k].nan_to_num(9), v.nan_to_num(9)) for k, v in ordinary.state.items()
        )


def plain_loop(server: Server, models: Tensor, masks: Tensor, came: Tensor) -> Tensor:
    """The formula, coordinate by coordinate: a round of one number each, from the state that has learned."""
    rows = came.any(1).nonzero().flatten()
    x, cohort = server.model, torch.arange(CLIENTS)
    filled = torch.where(came, models, x)
    weights = server.weights / server.weights.sum()
    whole = Round(0, x, cohort, rows, filled[rows], (masks & came)[rows], weights, PARAMETERS, came[rows])
    rule = server.rule
    state = rule.phases.learn(server.state, replace(whole, number=server.round))
    out = torch.empty_like(x)
    for k in range(SIZE):
        here = came[:, k].nonzero().flatten()
        one = slice(k, k + 1)
        view = Round(
            server.round,
            x[one],
            cohort,
            here,
            models[here, one],
            masks[here, one],
            weights,
            int(k < PARAMETERS),
        )
        sliced = {name: t[:, one] if name in rule.columns else t for name, t in state.items()}
        out[one] = combine(view, respond(rule.phases, sliced, view))
    return out


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_are_what_a_plain_loop_over_coordinates_gives(rule, seed):
    server = server_of(rule, seed)
    # These two hold cuts back by a look at all coordinates of a block together: masks that are alike here.
    cut = 0.0 if rule in ("safari+", "blue") else 0.4
    for t in range(4):
        models, masks = round_data(t, seed, cut)
        came = in_packets(t, seed)
        expected = plain_loop(server, models, masks, came)
        server, outcome = server.step_stacked(list(range(CLIENTS)), models, None, masks, came)
        torch.testing.assert_close(server.model, expected, rtol=1e-5, atol=1e-6)
        shares = {i: float(row.double().mean()) for i, row in enumerate(came) if row.any() and not row.all()}
        assert outcome.parts == shares
        assert set(outcome.arrived) == {i for i, row in enumerate(came) if row.any()}


def fast_rules() -> dict[str, Compensation]:
    """Rules that weigh all blocks at once; safari+ with each of its options, and never waiting."""
    rules = {name: RULES[name](**OPTIONS.get(name, {})) for name in RULES if name not in ("safari+", "blue")}
    found = {name: rule for name, rule in rules.items() if rule.phases.weigh is not None}
    options = [{}, {"friends": False}, {"memory": False}, {"fade": False}, {"stay": True}, {"calm": 1.0}]
    return (
        found
        | {f"safari+ {option}": RULES["safari+"](wait=0, **option) for option in options}
        | {"blue": RULES["blue"](wait=0)}
        | {"mifa, idle": RULES["mifa"](idle=True), "mifa, rescaled": RULES["mifa"](rescale=True)}
        | {f"known-p, {form}": RULES["known-p"](p=0.7, form=form) for form in ("normalised", "doubly-robust")}
    )


FAST = fast_rules()


def one_by_one(rule: Compensation) -> Compensation:
    """The rule, which weighs each block as a round of its own."""
    weigh = rule.phases.weigh

    def each(state: Any, round: Round, sets: Tensor) -> Weights | None:
        return weigh(state, round, sets) if round.came is None else None

    return replace(rule, phases=replace(rule.phases, weigh=each))


def many_clients(t: int, clients: int, size: int, parameters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Models in two groups, a mask for each client, and what came of them: packets with edges of their own."""
    generator = torch.Generator().manual_seed(t)
    masks = torch.rand(clients, size, generator=generator) >= 0.3
    masks[:, parameters:] = True
    centres = torch.randn(2, size, generator=torch.Generator().manual_seed(99)) / 4
    noise = torch.randn(clients, size, generator=generator)
    models = (centres[torch.arange(clients) % 2] + noise / 4) * masks
    models[:, parameters:] = models[:, parameters:].abs()
    packet = (torch.arange(size) + torch.randint(0, 40, (clients, 1), generator=generator)) // 40
    lost = torch.rand(clients, size // 40 + 2, generator=generator) < 0.3
    came = ~lost.gather(1, packet)
    # Nothing comes from the first, and the last range comes from nobody.
    came[0], came[:, -20:] = False, False
    return models, masks, came


@pytest.mark.parametrize("pieces", ["one piece", "many pieces"])
@pytest.mark.parametrize("rule", FAST)
def test_all_blocks_at_once_are_what_one_by_one_gives(rule, pieces, monkeypatch):
    clients, size, parameters = (34, 80, 50) if rule in ("safari", "safari+ {}", "blue") else (9, 400, 330)
    if pieces == "many pieces":
        monkeypatch.setattr("safari.aggregation.blocks._AT_ONCE", 5 * clients**2)
        monkeypatch.setattr("safari.aggregation.plus._AT_ONCE", 7 * clients**2)
    slow = one_by_one(FAST[rule])
    x = torch.randn(size, generator=torch.Generator().manual_seed(5)) / 4
    weights = [1.0 + i for i in range(clients)]
    server = Server.start(x, clients, FAST[rule], parameters=parameters, weights=weights)
    for t in range(3):
        models, masks, came = many_clients(t, clients, size, parameters)
        cohort = None if t % 2 else list(range(clients - 2))
        rows = slice(clients if t % 2 else clients - 2)
        shared = t == 2
        if shared:
            masks = masks[:1].expand_as(masks)
            models = models * masks
        given = (list(range(clients))[rows], models[rows], cohort, masks[rows], came[rows])
        fast, outcome = server.step_stacked(*given, same_mask=shared, lr=1 / (t + 1))
        plain, expected = replace(server, rule=slow).step_stacked(*given, same_mask=shared, lr=1 / (t + 1))
        torch.testing.assert_close(fast.model, plain.model, rtol=1e-5, atol=1e-6)
        assert outcome.part_stand_ins == expected.part_stand_ins
        assert outcome.stand_ins == expected.stand_ins
        assert fast.state.keys() == plain.state.keys()
        assert all(torch.equal(fast.state[k].nan_to_num(9), v.nan_to_num(9)) for k, v in plain.state.items())
        server = fast


def test_weights_of_all_blocks_are_asked_for_once_and_again_where_a_rule_cannot_say():
    asked: list[int] = []
    safari = RULES["safari"]()
    models, masks, came = many_clients(0, 9, 1200, 1000)
    # Once for the blocks, and once for the decision about the round.
    for rule, expected in ((safari, 2), (one_by_one(safari), len(arrange(came)[1]) + 2)):
        asked.clear()
        weigh = rule.phases.weigh

        def counted(state: Any, round: Round, sets: Tensor, weigh: Any = weigh) -> Weights | None:
            asked.append(len(sets))
            return weigh(state, round, sets)

        rule = replace(rule, phases=replace(rule.phases, weigh=counted))
        Server.start(torch.zeros(1200), 9, rule).step_stacked(list(range(9)), models, None, masks, came)
        assert len(asked) == expected


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ("none", r"weigh must return Weights or None, got a str"),
        (
            Weights(torch.zeros(2)),
            r"a must be a tensor of shape \[2, 2\] on cpu, got a tensor of shape \[2\]",
        ),
        (
            Weights(torch.zeros(2, 2), torch.zeros(2, 1), torch.zeros(1, 3)),
            r"recalled must be a matrix with a model of 2 numbers in each row, .* got shape \[1, 3\]",
        ),
        (
            Weights(torch.zeros(2, 2), torch.zeros(2, 3), torch.zeros(1, 2)),
            r"b must be a tensor of shape \[2, 1\] on cpu, got a tensor of shape \[2, 3\]",
        ),
        (
            Weights(torch.zeros(2, 2), stand_ins=torch.zeros(2, 2)),
            r"stand_ins must be a tensor of shape \[2, 2, 2\] on cpu, got a tensor of shape \[2, 2\]",
        ),
        (
            Weights(torch.full((2, 2), torch.nan)),
            r"weights a must be finite, got 4 numbers NaN or infinite in round 0",
        ),
    ],
)
def test_wrong_weights_of_a_plug_in_are_named(weights, problem):
    rule = replace(make_rule(lambda state, round, sets: weights), name="rule own")
    server = Server.start(torch.ones(2), 2, rule)
    half = torch.tensor([True, False])
    with pytest.raises(ConfigError, match=f"rule own: {problem}"):
        server.step({0: torch.ones(2), 1: torch.ones(2)}, came={0: half})


def test_negative_weights_move_parameters_and_leave_buffers_a_mean():

    def weigh(state, round, sets):
        both = sets.all(1, keepdim=True)
        return Weights(torch.where(both, torch.tensor([2.0, -1.0]), sets * 1.5).double())

    def each(state, round, sets):
        members = torch.isin(torch.arange(2), round.arrived)[None]
        return Weights(weigh(state, round, members).a[:, members[0]]) if round.came is None else None

    rule = make_rule(weigh)
    sent = {0: torch.full((4,), 4.0), 1: torch.ones(4)}
    came = {0: torch.tensor([True, False, True, False])}
    fast, slow = (
        Server.start(torch.full((4,), 8.0), 2, r, parameters=2).step(sent, came=came)[0].model.tolist()
        for r in (rule, make_rule(each))
    )
    # Both came: 2·4 - 1; the second alone: 1.5·1 - 0.5·8. Buffers: 4, and 1.
    assert fast == slow == [7.0, -2.5, 4.0, 1.0]


@pytest.mark.parametrize("weigh", ["at once", "one by one"])
@pytest.mark.parametrize("rule", ["safari+", "mifa", "fedvarp", "cluster-fedvarp"])
def test_a_weight_that_came_back_is_unchanged_where_a_block_is_missing(rule, weigh):
    """One mask for all, without the last number and then with it: the missing have it too, as in a whole round."""
    made = RULES[rule](**OPTIONS.get(rule, {}))
    server = Server.start(torch.full((4,), 8.0), 2, made if weigh == "at once" else one_by_one(made))
    cut = torch.tensor([[True, True, True, False]])
    server, _ = server.step_stacked([0, 1], torch.full((2, 4), 8.0) * cut, None, cut, same_mask=True)
    assert server.model.tolist() == [8.0, 8.0, 8.0, 0.0]
    grown = replace(server, model=torch.full((4,), 8.0))
    came = torch.tensor([[True, True, True, True], [True, True, False, False]])
    whole = torch.ones(1, 4, dtype=torch.bool)
    after, _ = grown.step_stacked([0, 1], torch.full((2, 4), 8.0), None, whole, came, same_mask=True)
    assert after.model.tolist() == [8.0] * 4


def test_by_hand():
    """Clients 0 and 1 are alike, 2 is not; then the second half of 1 and the first of 2 are lost."""
    server = Server.start(torch.zeros(4), 3, "safari")
    near, far = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([9.0, 9.0, 9.0, 9.0])
    server, _ = server.step({0: near, 1: near, 2: far})
    half = torch.tensor([True, True, False, False])
    server, outcome = server.step({0: near, 1: near, 2: far}, came={1: half, 2: ~half})
    # First half: 0 and 1 arrived, the one that is most similar to 2 is either: (1 + 1 + 1) / 3.
    # Second half: 0 stands in for 1: (1 + 1 + 9) / 3.
    torch.testing.assert_close(server.model, torch.tensor([1.0, 1.0, 11 / 3, 11 / 3]))
    assert outcome.stand_ins == {}
    assert outcome.part_stand_ins == {1: (0,), 2: (0,)}
    assert outcome.parts == {1: 0.5, 2: 0.5}
    assert outcome.arrived == (0, 1, 2)


def test_a_block_that_nobody_sent_stays():
    server = Server.start(torch.tensor([5.0, 5.0]), 2, "safari")
    came = torch.tensor([True, False])
    server, _ = server.step({0: torch.ones(2), 1: torch.ones(2)}, came={0: came, 1: came})
    assert server.model.tolist() == [1.0, 5.0]


def test_numbers_that_did_not_come_are_not_looked_at():
    came = {0: torch.tensor([True, False])}
    server = Server.start(torch.zeros(2), 2, "drop")
    first, _ = server.step({0: torch.tensor([1.0, float("nan")])}, came=came)
    second, _ = server.step({0: torch.tensor([1.0, 777.0])}, came=came)
    assert first.model.tolist() == second.model.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("rule", RULES)
def test_memory_keeps_what_did_not_come_and_nothing_is_cut_because_it_is_missing(rule):
    server = Server.start(torch.full((4,), 8.0), 2, replace(RULES[rule](**OPTIONS.get(rule, {})), name=rule))
    half = torch.tensor([True, True, False, False])
    both = {0: torch.full((4,), 8.0), 1: torch.full((4,), 8.0)}
    for _ in range(3):
        # The second half of 1 never comes; whatever a rule makes of that, everybody sent 8.
        server, _ = server.step(both, came={1: half})
        torch.testing.assert_close(server.model, torch.full((4,), 8.0))
    server, _ = server.step({0: both[0]})
    torch.testing.assert_close(server.model, torch.full((4,), 8.0))


def test_patterns_are_few_and_cover_every_coordinate_once():
    came = in_packets(3, 1)
    order, found = arrange(came)
    assert order.sort().values.tolist() == list(range(SIZE))
    assert [block.part.start for block in found[1:]] == [block.part.stop for block in found[:-1]]
    for block in found:
        columns = came[:, order[block.part]]
        assert columns[block.arrived].all()
        assert int(columns.sum()) == columns[block.arrived].numel()
    assert len(found) == len({tuple(column) for column in came.T.tolist()})


def test_common_distances_are_the_distances_where_everything_came():
    models, _ = round_data(0)
    x, came = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)), torch.ones(CLIENTS, SIZE).bool()
    torch.testing.assert_close(common_distances(models, x, came), distances(models, x))
    updates = models - x
    torch.testing.assert_close(common_cosines(updates, came, updates, came), cosines(updates))


def test_common_distances_come_near_the_true_ones():
    """Two groups, layers that move differently, 30% of the packets lost: pairs keep their order."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.cat([torch.full((3000,), 0.1), torch.full((500,), 5.0), torch.full((2500,), 1.0)])
    centres = torch.randn(2, 6000, generator=generator) * scale
    models = centres.repeat_interleave(4, 0) + 0.7 * torch.randn(8, 6000, generator=generator) * scale
    came = (torch.rand(8, 60, generator=generator) >= 0.3).repeat_interleave(100, 1)
    found, true = common_distances(models, torch.zeros(6000), came), distances(models)
    off = ~torch.eye(8, dtype=torch.bool)
    assert float((found / true)[off].sub(1).abs().max()) < 0.12
    assert float(found[:4, :4].max()) < float(found[:4, 4:].min())


def test_pairs_without_common_coordinates_leave_the_similarity_unchanged():
    came = torch.tensor([[True, False], [False, True], [True, True]])
    models = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert common_distances(models, torch.zeros(2), came).isnan().tolist() == [
        [False, True, False], [True, False, False], [False, False, False],
    ]  # fmt: skip
    assert common_cosines(models, came, models, came)[0].isnan().tolist() == [False, True, False]
    server = Server.start(torch.zeros(2), 3, "safari")
    server, _ = server.step(dict(enumerate(models)), came=dict(enumerate(came)))
    assert server.state["similarity"].isnan()[0].tolist() == [False, True, False]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    refused=st.lists(st.sets(st.integers(0, CLIENTS - 1)), min_size=1, max_size=3),
    by=st.sampled_from(["NaN", "the gate", "the sum"]),
    cut=st.sampled_from([0.0, 0.4]),
    shared=st.booleans(),
    lost=st.sampled_from([0.0, 0.4, 0.9]),
)
@example(seed=12173, refused=[set(), {0}, set()], by="the sum", cut=0.4, shared=True, lost=0.4)
def test_whoever_is_refused_might_as_well_have_sent_nothing(rule, seed, refused, by, cut, shared, lost):
    """Whatever is refused of models that came in part, up to all of them; with a step that keeps moments."""
    made = server_of(rule, seed)
    server = Server.start(
        made.model, CLIENTS, made.rule, parameters=PARAMETERS, steps=["fedavgm"], gate="off"
    )
    server, _ = server.step_stacked(list(range(CLIENTS)), round_data(99, seed)[0])
    for t, bad in enumerate(refused):
        models, masks = round_data(t, seed, cut)
        masks = masks[:1].expand_as(masks) if shared else masks
        models, came = models * masks, in_packets(t, seed, lost=lost)
        bad = {i for i in bad if (came & masks)[i].any()}
        models[list(bad)] *= {"NaN": torch.nan, "the gate": 1.0, "the sum": 1e38}[by]
        models = torch.where(masks, models, 0.0).clamp(-LARGEST, LARGEST)
        if by == "the gate":
            ruling = Ruling(refused=dict.fromkeys(bad, "by its id"))
            server = replace(
                server, gate=Gate(lambda *_: {}, lambda state, _, ruling=ruling: (ruling, state))
            )
        before = server
        server, outcome = before.step_stacked(
            list(range(CLIENTS)), models, None, masks, came, same_mask=shared
        )
        assert by == "the sum" or outcome.refused.keys() == bad
        assert server.model.isfinite().all()
        good = sorted(set(range(CLIENTS)) - outcome.refused.keys())
        again, expected = before.step_stacked(
            good, models[good], None, masks[good], came[good], same_mask=shared
        )
        assert outcome.arrived == expected.arrived
        torch.testing.assert_close(server.model, again.model)
        state = server.state | server.step_state
        for name, value in (again.state | again.step_state).items():
            torch.testing.assert_close(state[name], value, equal_nan=True)


def test_what_came_must_fit():
    server = Server.start(torch.zeros(2), 2, "drop")
    with pytest.raises(SafariError, match=r"came must map client ids to bools, got a list"):
        server.step({0: torch.ones(2)}, came=[True])
    with pytest.raises(
        SafariError, match=r"came must be a tensor of bools of shape \[1, 2\], got float32 of"
    ):
        server.step_stacked([0], torch.ones(1, 2), came=torch.ones(1, 2))
    _, outcome = server.step({0: torch.ones(2)}, came={0: torch.ones(3).bool()})
    assert outcome.refused == {0: "expected 2 bools of what came, got bool of shape [3]"}


def test_a_rule_of_ones_own_without_halves_works_block_by_block_and_wrong_columns_are_named():
    def apply(state, round):
        return Decision(round.weights[round.present]), state

    own = Compensation(lambda clients, size, device: {}, apply)
    server = Server.start(torch.zeros(2), 2, own)
    server, _ = server.step(
        {0: torch.full((2,), 4.0), 1: torch.full((2,), 8.0)}, came={0: torch.tensor([True, False])}
    )
    assert server.model.tolist() == [6.0, 4.0]
    wrong = Server.start(torch.zeros(2), 2, replace(own, columns=("memory",)))
    with pytest.raises(ConfigError, match="the rule: columns must name tensors of the state, got 'memory'"):
        wrong.step({0: torch.ones(2)}, came={0: torch.tensor([True, False])})
