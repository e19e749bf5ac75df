"""Gates in front of the rules: what is usual passes without a bit of difference, what is absurd does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from aggregation.samples import vector
from safari.aggregation import GATES, RULES, Gate, Round, Ruling, Server, to_tensors, with_tensors
from safari.aggregation.compensation import State
from safari.errors import ConfigError, SafariError

# name -> options; a new gate has to be put here.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "off": [{}],
    "norm": [{}, {"factor": 2.0, "action": "clip", "floor": 0.0}, {"factor": 2.0, "floor": 0.0}],
}
CASES = [(name, options) for name, many in OPTIONS.items() for options in many]
SIZE, PARAMETERS, CLIENTS = 40, 32, 5


def test_the_table_has_every_gate() -> None:
    assert OPTIONS.keys() == GATES.keys()


def start(gate: str | Gate = "norm", rule: str = "drop", **options: Any) -> Server:
    model = torch.randn(SIZE, generator=torch.Generator().manual_seed(3))
    made = GATES[gate](**options) if isinstance(gate, str) else gate
    return Server.start(model, CLIENTS, RULES[rule](), parameters=PARAMETERS, gate=made)


def honest(server: Server, ids: list[int], seed: int = 0, scale: float = 0.1) -> dict[int, Tensor]:
    """Updates of about the same length."""
    draw = torch.Generator().manual_seed(1000 * seed + server.round)
    return {i: server.model + scale * torch.randn(SIZE, generator=draw) for i in ids}


ROUNDS = [[0, 1, 2, 3, 4], [0, 2], [], [3], [1, 2, 4], [0, 1, 2, 3, 4]]

# --- the contract


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_state_is_all_there_is(name: str, options: dict[str, Any]) -> None:
    server = resumed = start(name, **options)
    for t, ids in enumerate(ROUNDS):
        sent = honest(server, ids)
        if 0 in sent:
            sent[0] = server.model + 10 * (sent[0] - server.model)
        tensors = {key: value.clone() for key, value in to_tensors(resumed).items()}
        resumed = with_tensors(start(name, **options), t, tensors)
        (one, told), (two, again) = server.step(sent), resumed.step(sent)
        assert torch.equal(one.model, two.model)
        assert told == again
        for key, value in one.gate_state.items():
            assert torch.equal(value.nan_to_num(-1), two.gate_state[key].nan_to_num(-1))
        server, resumed = one, two


@pytest.mark.parametrize("rule", RULES)
def test_an_honest_run_is_the_same_bit_for_bit(rule: str) -> None:
    """Also where some updates are ten times as long as others."""
    one, two = start("norm", rule), start("off", rule)
    for ids in ROUNDS:
        sent = honest(one, ids)
        if 1 in sent:
            sent[1] = one.model + 10 * (sent[1] - one.model)
        (one, first), (two, second) = one.step(sent), two.step(sent)
        assert torch.equal(one.model, two.model)
        assert first == second
        assert all(torch.equal(one.state[k].nan_to_num(9), v.nan_to_num(9)) for k, v in two.state.items())


@pytest.mark.parametrize("rule", RULES)
def test_who_is_refused_counts_as_missing(rule: str) -> None:
    server = start("norm", rule)
    server, _ = server.step(honest(server, [0, 1, 2, 3, 4]))
    sent = honest(server, [0, 1, 2, 3])
    sent[3] = server.model + 1e4
    told, outcome = server.step(sent)
    untold, without = server.step({i: sent[i] for i in (0, 1, 2)})
    assert set(outcome.refused) == {3}
    assert outcome.refused[3].startswith("its update of the parameters has a norm of 5.66e+04, and ")
    assert outcome.missing == without.missing == (3, 4)
    assert outcome.stand_ins == without.stand_ins
    assert torch.equal(told.model, untold.model)


# --- what the bound is


def bounded(norms: list[float], last: float, x: float = 0.0, **options: Any) -> bool:
    """Does an update of this norm pass, after clients with these?"""
    server = Server.start(vector(x), len(norms) + 1, "drop", gate=GATES["norm"](**options))
    for client, norm in enumerate(norms):
        # Back to where it was: only norms are remembered.
        after, _ = server.step({client: vector(x + norm)})
        server = with_tensors(after, after.round, {**to_tensors(after), "model": vector(x)})
    _, outcome = server.step({len(norms): vector(x + last)})
    return not outcome.refused


def test_the_bound_is_a_multiple_of_the_median() -> None:
    assert bounded([1, 2, 3], 100 * 2)
    # The median of 1, 2, 3 and itself is the lower of the two in the middle.
    assert not bounded([1, 2, 3], 100 * 2 + 1)
    assert not bounded([1, 2, 3, 1e30, 1e30], 1e30), "the third of six is 3"
    assert bounded([1, 2, 3, 1e30, 1e30, 1e30], 1e30), "most are hostile: nothing can be known"


def test_the_model_itself_is_a_floor() -> None:
    """Of a model of norm 50, updates of up to 50 are never absurd, however short the others are."""
    assert bounded([1e-3] * 5, 50, x=50)
    assert not bounded([1e-3] * 5, 51, x=50)
    assert bounded([1e-3] * 5, 5, x=50, floor=0.001)
    assert not bounded([1e-3] * 5, 5.1, x=50, floor=0.001)


def test_updates_of_0_are_left_out_of_the_median() -> None:
    assert bounded([0, 0, 0, 0, 1, 1], 99)
    assert not bounded([0, 0, 0, 0, 1, 1], 101)


def test_the_models_norm_is_the_bound_until_three_clients_were_heard() -> None:
    assert bounded([], 0.9e6)
    assert not bounded([], 1.1e6)
    assert not bounded([], 1e19, x=3.0)
    assert bounded([1], 0.9e6)
    assert not bounded([1, 1], 101)


def test_one_hostile_client_that_always_arrives_does_not_move_the_median() -> None:
    """Four honest ones were heard once each; the fifth sends huge updates, a hundred times."""
    server, _ = start().step(honest(start(), [0, 1, 2, 3]))
    for _ in range(100):
        before = server
        server, outcome = server.step({4: server.model + 1e6})
        assert set(outcome.refused) == {4}
        assert torch.equal(server.model, before.model)


def test_it_follows_when_updates_of_most_clients_grow() -> None:
    """A thousand times as long all at once: refused while few, usual as soon as they are most."""
    server, _ = start(floor=0.0).step(honest(start(floor=0.0), list(range(CLIENTS))))
    refused = []
    for client in range(CLIENTS):
        server, outcome = server.step(honest(server, [client], scale=100.0))
        refused.append(bool(outcome.refused))
    assert refused == [True, True, False, False, False]


def test_the_first_round_protects_itself() -> None:
    sent = honest(start(), [0, 1, 2, 3, 4])
    sent[2] = torch.full((SIZE,), 1e38)
    sent[4] = torch.full((SIZE,), -1e19)
    server, outcome = start().step(sent)
    assert set(outcome.refused) == {2, 4}
    expected, _ = start("off").step({i: sent[i] for i in (0, 1, 3)})
    assert torch.equal(server.model, expected.model)


def test_buffers_have_a_bound_of_their_own() -> None:
    sent = honest(start(), [0, 1, 2, 3])
    sent[1][PARAMETERS + 3] = 1e6
    _, outcome = start().step(sent)
    assert set(outcome.refused) == {1}
    assert outcome.refused[1].startswith("its update of the buffers has a norm of 1e+06, and ")


def test_what_a_mask_cuts_is_no_part_of_an_update() -> None:
    """All cut nearly all of a large model: the change that this makes is not theirs."""
    x = torch.full((SIZE,), 1e3)
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[0] = True
    server = Server.start(x, 4, "drop", gate=GATES["norm"](floor=0.0))
    sent = {i: torch.where(mask, x + 1 + i, 0.0) for i in range(4)}
    server, outcome = server.step(sent, masks=dict.fromkeys(sent, mask))
    assert not outcome.refused
    assert server.gate_state["norms"][:, 0].tolist() == pytest.approx([1, 2, 3, 4])


def test_what_did_not_come_is_no_part_of_an_update() -> None:
    came = torch.zeros(4, SIZE, dtype=torch.bool)
    came[:, :4] = True
    models = torch.where(came, start().model + 1, 9e9)
    server, outcome = start().step_stacked([0, 1, 2, 3], models, came=came)
    assert not outcome.refused
    assert server.gate_state["norms"][:4, 0].tolist() == pytest.approx([2, 2, 2, 2])


# --- clipping


def test_clipping_by_hand() -> None:
    """Norms 1, 1, 5; the bound is 2: the third goes two fifths of its way, and only inside its mask."""
    server = Server.start(vector(0, 0, 1), 3, "mifa", gate=GATES["norm"](factor=2, action="clip", floor=0))
    sent = {0: vector(1, 0, 1), 1: vector(0, 1, 1), 2: vector(3, 4, 0)}
    mask = torch.tensor([True, True, False])
    server, outcome = server.step(sent, masks={2: mask})
    assert outcome.arrived == (0, 1, 2)
    assert dict(outcome.clipped) == {2: "its update of the parameters has a norm of 5, and 2 is the most"}
    torch.testing.assert_close(server.state["updates"][2], vector(1.2, 1.6, 0))
    assert sent[2].tolist() == [3, 4, 0], "what arrived is the caller's"


def test_buffers_are_clipped_apart_from_parameters() -> None:
    gate = GATES["norm"](factor=2, action="clip", floor=0)
    server = Server.start(vector(0, 0), 3, "mifa", parameters=1, gate=gate)
    sent = {0: vector(1, 1), 1: vector(1, 1), 2: vector(1, 10)}
    server, outcome = server.step(sent)
    assert set(outcome.clipped) == {2}
    torch.testing.assert_close(server.state["updates"][2], vector(1, 2))


@pytest.mark.parametrize("giant", [1e19, 1e38, -3.4e38])
def test_huge_updates_are_clipped_to_the_usual_norm(giant: float) -> None:
    gate = GATES["norm"](factor=2, action="clip", floor=0)
    server = Server.start(vector(1, 1), 4, "drop", gate=gate)
    sent = {0: vector(2, 1), 1: vector(1, 2), 2: vector(0, 1), 3: vector(giant, giant)}
    server, outcome = server.step(sent)
    assert set(outcome.clipped) == {3}
    shift = math.copysign(math.sqrt(2), giant) / 4
    torch.testing.assert_close(server.model, vector(1 + shift, 1.25 + shift))


# --- denser than asked


def test_a_mask_that_keeps_too_much_is_refused() -> None:
    masks = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    models = torch.ones(3, 3) * masks
    server = Server.start(torch.ones(3), 3, "drop")
    _, outcome = server.step_stacked([0, 1, 2], models, masks=masks, most_kept=2)
    assert dict(outcome.refused) == {2: "its mask keeps 3 numbers, at most 2 were asked for"}
    named = dict(enumerate(models))
    _, outcome = server.step(named, masks={0: masks[0], 1: masks[1]}, most_kept=2)
    assert set(outcome.refused) == {2}, "a client without a mask cut nothing"
    _, outcome = server.step_stacked([0, 1, 2], torch.ones(3, 3), masks=masks[2:], most_kept=2)
    assert set(outcome.refused) == {0, 1, 2}
    _, outcome = server.step_stacked([0, 1, 2], models, masks=masks, most_kept=3)
    assert not outcome.refused


# --- what does not fit


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"factor": 0.5}, "factor must be a finite number of at least 1, got 0.5"),
        ({"factor": math.inf}, "factor must be a finite number of at least 1, got inf"),
        ({"action": "drop"}, "action must be one of clip, refuse; got 'drop'"),
        ({"floor": -1.0}, "floor must be a finite number of at least 0, got -1.0"),
        ({"floor": math.nan}, "floor must be a finite number of at least 0, got nan"),
    ],
)
def test_options_out_of_bounds(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        GATES["norm"](**options)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        ("nrom", "gate must be one of norm, off; got 'nrom' (did you mean 'norm'?)"),
        (GATES["norm"], "gate must be a name or a Gate, got a function; call it: gate=norm()"),
        (None, "gate must be a name or a Gate, got None"),
    ],
)
def test_what_is_no_gate(gate: Any, text: str) -> None:
    with pytest.raises(SafariError) as error:
        Server.start(vector(1), 2, gate=gate)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "apply must return (Ruling, state), got None"),
        ((Ruling(), [1]), "the state that apply returns must be a dict, got a list"),
        (
            (Ruling(models=torch.zeros(1)), {}),
            "models must be a tensor of shape [1, 40], torch.float32 on cpu, got a tensor of shape [1]",
        ),
    ],
)
def test_a_wrong_return_value_of_a_gate_is_reported(answer: Any, text: str) -> None:
    gate = Gate(lambda clients, size, device: {}, lambda state, round: answer, name="mine")
    with pytest.raises(ConfigError) as error:
        start(gate).step(honest(start(), [0]))
    assert str(error.value) == f"mine: {text}"


def test_a_gate_of_ones_own() -> None:
    def apply(state: State, round: Round) -> tuple[Ruling, State]:
        late = {i: "late" for i in round.arrived.tolist() if i > 1}
        return Ruling(refused=late), {"seen": state["seen"] + len(late)}

    gate = Gate(lambda clients, size, device: {"seen": torch.zeros(1)}, apply)
    server, outcome = start(gate).step(honest(start(), [0, 1, 2, 3]))
    assert dict(outcome.refused) == {2: "late", 3: "late"}
    assert server.gate_state["seen"].item() == 2


def test_a_checkpoint_of_fewer_clients_or_from_before_there_were_gates() -> None:
    server, _ = Server.start(vector(0), 3, "drop").step({0: vector(1), 1: vector(2), 2: vector(3)})
    tensors = to_tensors(server)
    more = with_tensors(Server.start(vector(0), 4, "drop"), 1, tensors).gate_state["norms"]
    assert more[:3, 0].tolist() == [1, 2, 3]
    assert more[3].isnan().all()
    del tensors["gate.norms"]
    old = with_tensors(Server.start(vector(0), 3, "drop"), 1, tensors)
    assert old.gate_state["norms"].isnan().all()
