"""The server's side of a round by hand: three clients, and a model of two weights and a bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from safari.aggregation import GATES, RULES, ServerStep, average
from safari.federation import Federation, State, Uploads, begin, cleared, finish, init
from safari.models import Layout
from safari.pruning import Budget, MaskPolicy, Masks
from safari.sampling import SAMPLINGS
from safari.training import CLIENTS, ClientAlgorithm

LAYOUT = Layout.of(nn.Linear(2, 1))
SHARES = dict.fromkeys(range(3), 1.0)
MODEL = torch.tensor([1.0, 2.0, 0.5])


def federation(**changes: object) -> Federation:
    plain = Federation(
        model=MODEL,
        clients=3,
        layout=LAYOUT,
        rounds=5,
        seed=0,
        rule=RULES["drop"](),
        gate=GATES["off"](),
        steps=(),
        algorithm=ClientAlgorithm(),
        policy=None,
        sampling=SAMPLINGS["uniform"](),
        cohort=0,
        weights=None,
        lr=lambda t: 0.1,
        budget=lambda t: Budget(2),
    )
    return replace(plain, **changes)


def uploads(rows: dict[int, list[float]], **more: object) -> Uploads:
    models = torch.tensor(list(rows.values())) if rows else torch.empty(0, 3)
    return Uploads(asked=(0, 1, 2), ids=list(rows), models=models, masks=torch.ones(1, 3).bool(), **more)


def test_a_round_is_the_mean_of_what_came() -> None:
    fed = federation()
    state, sent = begin(fed, init(fed))
    assert (sent.round, sent.lr, sent.draw.clients, sent.model.tolist()) == (0, 0.1, (0, 1, 2), [1, 2, 0.5])
    losses = torch.tensor([1.0, 3.0])
    got = uploads({0: [1.0, 4.0, 0.0], 2: [3.0, 0.0, 1.0]}, losses=losses, trained=(0, 1, 2))
    state, record = finish(fed, state, sent, got)
    assert state.round == 1
    assert state.model.tolist() == [2.0, 2.0, 0.5]
    assert (record.round, record.arrived, record.missing, record.trained) == (1, (0, 2), (1,), (0, 1, 2))
    assert (record.train_loss, record.density, record.lost) == (2.0, 1.0, False)


def test_a_round_without_uploads_is_lost() -> None:
    fed = federation()
    state, sent = begin(fed, init(fed))
    state, record = finish(fed, state, sent, uploads({}, refused={1: "came too late"}))
    assert record.lost
    assert record.refused == {1: "came too late"}
    assert (state.round, state.model.tolist()) == (1, MODEL.tolist())


def test_what_was_refused_counts_nowhere() -> None:
    fed = federation()
    state, sent = begin(fed, init(fed))
    losses = torch.tensor([1.0, float("nan")])
    got = uploads({0: [1.0, 4.0, 0.0], 2: [float("nan"), 0.0, 1.0]}, losses=losses)
    _, record = finish(fed, state, sent, got)
    assert (record.arrived, list(record.refused), record.train_loss) == ((0,), [2], 1.0)


def test_of_a_model_that_came_in_part_the_rest_is_the_global_model() -> None:
    received = torch.tensor([[True, True, True], [True, False, False]])
    seen: list[Tensor] = []

    def learn(policy: dict[str, Tensor], arrivals: object) -> dict[str, Tensor]:
        seen.append(arrivals.models)
        return policy

    policy = MaskPolicy(lambda layout, device: {}, lambda policy, round: (Masks(), policy), learn)
    fed = federation(policy=policy)
    state, sent = begin(fed, init(fed))
    got = uploads({0: [3.0, 4.0, 1.5], 1: [5.0, 9.0, 9.0]}, received=received)
    state, record = finish(fed, state, sent, got)
    # Of the second number only client 0's came: its weight is 1, not a half.
    assert state.model.tolist() == [4.0, 4.0, 1.5]
    assert record.parts == pytest.approx({1: 1 / 3})
    assert seen[0].tolist() == [[3.0, 4.0, 1.5], [5.0, 2.0, 0.5]]


def test_weights_hold_from_the_round_on() -> None:
    fed = federation()
    state, sent = begin(fed, init(fed))
    rows = {0: [0.0, 0.0, 0.0], 1: [4.0, 4.0, 4.0]}
    state, _ = finish(fed, state, sent, uploads(rows, weights=[3.0, 1.0, 1.0]))
    assert state.model.tolist() == [1.0, 1.0, 1.0]
    state, sent = begin(fed, state)
    state, _ = finish(fed, state, sent, uploads(rows))
    assert state.model.tolist() == [1.0, 1.0, 1.0]


def test_an_announced_mask_lasts_until_the_next_round() -> None:
    mask = torch.tensor([True, False, True])
    policy = MaskPolicy(lambda *_: {}, lambda s, r: (Masks(mask, announced=True), s), lambda s, a: s)
    fed = federation(policy=policy)
    state, sent = begin(fed, init(fed))
    assert sent.model.tolist() == [1.0, 0.0, 0.5]
    assert state.mask is None
    state, record = finish(fed, state, sent, replace(uploads({0: [1.0, 0.0, 0.5]}), masks=mask[None]))
    assert state.mask is mask
    # Before the first round everything was kept.
    assert (record.support, record.churn) == (0.5, 0.5)


def test_the_average_is_one_of_the_models_tensors_and_no_step_s() -> None:
    step = ServerStep(lambda model: {"sum": model}, lambda state, step, round: (step, state))
    fed = federation(steps=[step, average(most=0.5)])
    state, sent = begin(fed, init(fed))
    state, _ = finish(fed, state, sent, uploads({0: [3.0, 2.0, 0.5]}))
    state, sent = begin(fed, state)
    state, _ = finish(fed, state, sent, uploads({0: [1.0, 2.0, 0.5]}))
    assert list(state["step"]) == ["0.sum"]
    assert state.average is not None
    assert state.average.tolist() == [2.0, 2.0, 0.5]


@pytest.mark.parametrize("rule", ["safari", "mifa", "fedvarp", "fedau"])
def test_a_new_client_takes_nothing_over(rule: str) -> None:
    """Client 1 is another one in round 3: every part has its rows as before the first round, and all others' as they
    were."""
    fed = federation(
        rule=RULES[rule](), gate=GATES["norm"](), algorithm=CLIENTS["scaffold"](),
        sampling=SAMPLINGS["clustered-similarity"](), cohort=2,
    )  # fmt: skip
    state = init(fed)
    for t in range(2):
        state, sent = begin(fed, state)
        got = uploads(
            {0: [1.0, 4.0, t], 1: [3.0, 0.0, 1.0], 2: [2.0, t, 1.0]},
            along={"variate": torch.ones(3, 3)},
            shares=SHARES,
        )
        state, _ = finish(fed, state, sent, got)
    first, after = init(fed), cleared(fed, state, [1])
    for part, name in (("algorithm", "variate"), ("gate", "norms"), ("sampling", "updates")):
        now, before, start = (each[part][name].nan_to_num(-9) for each in (after, state, first))
        assert not torch.equal(before[1], start[1])
        assert torch.equal(now[1], start[1])
        assert torch.equal(now[[0, 2]], before[[0, 2]])
    for name, tensor in after["rule"].items():
        changed = tensor.nan_to_num(-9) != state["rule"][name].nan_to_num(-9)
        assert name == "similarity" or not changed[[0, 2]].any()
    if rule == "safari":
        assert after["rule"]["similarity"][1].isnan().all()
        assert not after["rule"]["similarity"][0, [0, 2]].isnan().any()
    assert torch.equal(after.model, state.model)


def test_states_are_values() -> None:
    fed = federation(algorithm=CLIENTS["scaffold"]())
    state = init(fed)
    before = {
        (part, name): tensor.clone() for part, named in state.parts.items() for name, tensor in named.items()
    }
    begun, sent = begin(fed, state)
    finish(fed, begun, sent, uploads({0: [3.0, 2.0, 0.5]}, along={"variate": torch.ones(1, 3)}))
    assert isinstance(state, State)
    for (part, name), tensor in before.items():
        assert torch.equal(state[part][name].nan_to_num(), tensor.nan_to_num()), (part, name)
