"""Server steps: one table and the same contract for all, numbers by hand, and loops written independently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aggregation import step_oracles
from aggregation.samples import vector
from safari.aggregation import (
    RULES,
    STEPS,
    Round,
    Server,
    ServerStep,
    average,
    chain,
    running_average,
    to_tensors,
    with_tensors,
)
from safari.aggregation.compensation import State
from safari.errors import ConfigError, SafariError

# name -> options; a new step has to be put here.
OPTIONS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.5},
    "fedavgm": {"momentum": 0.5, "lr": 0.8},
    "fedadagrad": {"lr": 0.1, "beta1": 0.3},
    "fedyogi": {"lr": 0.1},
    "fedadam": {"lr": 0.1},
    "ghbm": {"tau": 3},
}
# All of them, chains, and the average, which leaves the step alone.
MAKE: dict[str, Callable[[], list[ServerStep]]] = {
    **{name: lambda name=name: [STEPS[name](**OPTIONS[name])] for name in OPTIONS},  # type: ignore[misc]
    "chain": lambda: [STEPS["fedavgm"](), STEPS["fedadam"](), STEPS["lr"](lr=0.3)],
    "average": lambda: [average(most=0.75)],
    "all": lambda: [STEPS["fedyogi"](), average(most=0.5)],
}
SIZE, PARAMETERS = 8, 6


def test_the_table_has_every_step() -> None:
    assert OPTIONS.keys() == STEPS.keys()


@pytest.fixture(params=MAKE)
def make(request: pytest.FixtureRequest) -> Callable[[], list[ServerStep]]:
    return MAKE[request.param]


def start(steps: Sequence[ServerStep | str], rule: str = "drop") -> Server:
    model = torch.randn(SIZE, generator=torch.Generator().manual_seed(9))
    return Server.start(model, 3, RULES[rule](), parameters=PARAMETERS, steps=steps)


def rounds(seed: int = 0) -> list[tuple[list[int], Tensor, Tensor]]:
    """Who arrived, models and masks. Weight 1 is cut by all from round 2 on; one round has no arrivals."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for t, ids in enumerate([[0, 1, 2], [0, 2], [1], [], [0, 1], [2]]):
        masks = torch.rand(len(ids), SIZE, generator=draw) < 0.7
        masks[:, 0], masks[:, PARAMETERS:], masks[:, 1] = True, True, t < 2
        found.append((ids, torch.randn(len(ids), SIZE, generator=draw) * masks, masks))
    return found


def play(server: Server, seed: int = 0) -> list[Server]:
    path = []
    for ids, models, masks in rounds(seed):
        server, _ = server.step_stacked(ids, models, masks=masks)
        path.append(server)
    return path


def same(one: Server, two: Server) -> bool:
    names = one.step_state.keys() == two.step_state.keys()
    states = all(torch.equal(one.step_state[name], two.step_state[name]) for name in one.step_state)
    return names and states and torch.equal(one.model, two.model)


# --- the contract


def test_state_is_named_tensors_and_keeps_its_form(make: Callable[[], list[ServerStep]]) -> None:
    first = start(make())
    form = {name: (t.shape, t.dtype) for name, t in first.step_state.items()}
    for server in play(first):
        assert {name: (t.shape, t.dtype) for name, t in server.step_state.items()} == form
        assert server.model.isfinite().all()


def test_the_state_is_all_there_is(make: Callable[[], list[ServerStep]]) -> None:
    """A server made anew from the tensors of the old one goes on as the old one does."""
    server = resumed = start(make())
    for ids, models, masks in rounds():
        saved = {name: t.clone() for name, t in to_tensors(resumed).items()}
        resumed = with_tensors(start(make()), resumed.round, saved)
        server, _ = server.step_stacked(ids, models, masks=masks)
        resumed, _ = resumed.step_stacked(ids, models, masks=masks)
        assert same(server, resumed)


def test_buffers_are_the_weighted_mean(make: Callable[[], list[ServerStep]]) -> None:
    for with_steps, without in zip(play(start(make())), play(start([])), strict=True):
        assert torch.equal(with_steps.model[PARAMETERS:], without.model[PARAMETERS:])


@pytest.mark.parametrize("rule", ["drop", "safari", "fedau", "mifa", "safari+"])
def test_what_no_arrival_kept_is_0_whatever_the_momentum(
    make: Callable[[], list[ServerStep]], rule: str
) -> None:
    for server, (ids, _, masks) in zip(play(start(make(), rule)), rounds(), strict=True):
        # safari+ waits with cuts until round 1, in which masks of all clients are known.
        if ids and server.round > 1:
            cut = ~masks.any(0)
            assert server.model[cut].tolist() == [0.0] * int(cut.sum())


def test_a_weight_that_comes_back_starts_anew(make: Callable[[], list[ServerStep]]) -> None:
    """Two servers, of which one has a past in weight 1, go on alike after all cut it in between."""
    kept, cut = torch.ones(1, SIZE, dtype=torch.bool), torch.ones(1, SIZE, dtype=torch.bool)
    cut[0, 1] = False
    calm = moved = start(make())
    x = calm.model
    there = x.clone()
    there[1] += 3
    calm, _ = calm.step_stacked([0], x[None], masks=kept)
    moved, _ = moved.step_stacked([0], there[None], masks=kept)
    both = []
    for server in (calm, moved):
        for mask in (cut, kept):
            model = torch.where(mask[0], 0.5 * x, 0.0)
            server, _ = server.step_stacked([0], model[None], masks=mask)
        both.append(server)
    # The average remembers what was; training does not.
    for name, t in both[0].step_state.items():
        if not name.endswith("running_average"):
            assert torch.equal(t[..., 1], both[1].step_state[name][..., 1])
    assert float(both[0].model[1]) == float(both[1].model[1])


def test_a_lost_round_leaves_model_and_state(make: Callable[[], list[ServerStep]]) -> None:
    server = play(start(make()))[1]
    lost, outcome = server.step({})
    assert outcome.lost
    assert torch.equal(lost.model, server.model)
    for name, t in server.step_state.items():
        if not name.endswith("running_average"):
            assert torch.equal(lost.step_state[name], t)


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=15, deadline=None)
@given(gone=st.lists(st.booleans(), min_size=SIZE, max_size=SIZE), seed=st.integers(0, 99))
def test_a_number_that_nobody_sent_is_as_in_a_lost_round(name: str, gone: list[bool], seed: int) -> None:
    server = play(start(MAKE[name]()), seed)[1]
    ids, models, masks = rounds(seed)[4]
    lost = torch.tensor(gone)
    found, _ = server.step_stacked(ids, models, masks=masks, came=(~lost).expand(len(ids), SIZE))
    whole, _ = server.step_stacked(ids, models, masks=masks)
    assert torch.equal(found.model[lost], server.model[lost])
    assert torch.allclose(found.model[~lost], whole.model[~lost])
    for key, tensor in found.step_state.items():
        if "running_average" not in key:
            assert torch.equal(tensor[..., lost], server.step_state[key][..., lost]), key
            assert torch.allclose(tensor[..., ~lost], whole.step_state[key][..., ~lost]), key


@pytest.mark.parametrize("name", MAKE)
def test_the_next_step_does_not_see_a_number_that_did_not_come(name: str) -> None:
    seen: list[Tensor] = []
    last = ServerStep(lambda model: {}, lambda state, step, round: (seen.append(step) or step, state))
    server = play(start([*MAKE[name](), last]))[1]
    ids, models, masks = rounds()[4]
    came = torch.arange(SIZE).expand(len(ids), SIZE) >= 2
    server.step_stacked(ids, models, masks=masks, came=came)
    assert seen[-1][:2].tolist() == [0.0, 0.0]
    assert bool(seen[-1][2:].any())


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_steps(rule: str) -> None:
    for server in play(start(MAKE["all"](), rule)):
        assert server.model.isfinite().all()


def test_rules_that_wait_with_cuts_still_do() -> None:
    """safari+ keeps a weight that the only arrival cut; the step does not move it."""
    server = Server.start(vector(1, 1), 2, "safari+", steps=["fedavgm"])
    mask = torch.tensor([True, False])
    server, _ = server.step({0: vector(3, 0)}, masks={0: mask})
    assert server.model.tolist() == pytest.approx([3, 1])
    assert server.step_state["0.velocity"].tolist() == [2, 0]


# --- numbers by hand


def moves(*steps: ServerStep, to: Sequence[float], start: float = 1.0) -> list[float]:
    """Where one weight goes when the weighted sum sends it to these places relative to where it is."""
    server = Server.start(vector(start), 1, RULES["drop"](), steps=steps)
    path = []
    for change in to:
        server, _ = server.step({0: server.model + change})
        path.append(server.model.item())
    return path


def test_a_server_learning_rate() -> None:
    assert moves(STEPS["lr"](lr=0.25), to=[4, -8]) == [2, 0]


def test_fedavgm_by_hand() -> None:
    # v: 4, 2 + 2 = 4, 2 + 0 = 2.
    assert moves(STEPS["fedavgm"](momentum=0.5), to=[4, 2, 0]) == [5, 9, 11]
    # Ahead: 4 + 2, then v = 4, 2 + 2, then v = 2, 0 + 1.
    assert moves(STEPS["fedavgm"](momentum=0.5, nesterov=True), to=[4, 2, 0]) == [7, 11, 12]
    assert moves(STEPS["fedavgm"](momentum=0.5, lr=0.5), to=[4, 2, 0]) == [3, 5, 6]


def test_fedadagrad_by_hand() -> None:
    # v = 1 + 8 = 9, √v + τ = 4: 1 + 2 · √8 / 4. Then v = 9 + 16 = 25: 2 · 4 / 6 more.
    found = moves(STEPS["fedadagrad"](lr=2.0, tau=1.0), to=[8**0.5, 4])
    assert found == pytest.approx([1 + 2 * 8**0.5 / 4, 1 + 2 * 8**0.5 / 4 + 8 / 6])


def test_fedadam_by_hand() -> None:
    # m = 0.5 · 2 = 1, v = 0.5 · 4 + 0.5 · 4 = 4 (τ² = 4): 1 + 3 · 1 / (2 + 2).
    # m = 0.5 + 3 = 3.5, v = 2 + 18 = 20.
    found = moves(STEPS["fedadam"](lr=3.0, beta1=0.5, beta2=0.5, tau=2.0), to=[2, 6])
    assert found == pytest.approx([1.75, 1.75 + 3 * 3.5 / (20**0.5 + 2)])


def test_fedyogi_by_hand() -> None:
    # v = 4: larger than 1, so v = 4 - 0.5 = 3.5; then smaller than 9, so v = 3.5 + 4.5 = 8.
    found = moves(STEPS["fedyogi"](lr=3.0, beta1=0.5, beta2=0.5, tau=2.0), to=[1, 3])
    first = 1 + 3 * 0.5 / (3.5**0.5 + 2)
    assert found == pytest.approx([first, first + 3 * 1.75 / (8**0.5 + 2)])


def test_ghbm_by_hand() -> None:
    # A quarter of the way since two rounds before: of 5 - 1, then of 10 - 1.
    assert moves(STEPS["ghbm"](tau=2, momentum=0.5), to=[4, 4, 0]) == [5, 10, 12.25]
    # With one round it is the classical heavy ball, which is FedAvgM.
    found = moves(STEPS["ghbm"](tau=1, momentum=0.5), to=[4, 2, 0])
    assert found == moves(STEPS["fedavgm"](momentum=0.5), to=[4, 2, 0]) == [5, 9, 11]


def test_steps_are_taken_in_order() -> None:
    # Half of every change into the velocity; or half of the velocity: with other velocities afterwards.
    half, speed = STEPS["lr"](lr=0.5), STEPS["fedavgm"](momentum=0.5)
    assert moves(half, speed, to=[4, 2]) == moves(speed, half, to=[4, 2]) == [3, 5]
    one, two = (Server.start(vector(1), 1, RULES["drop"](), steps=s) for s in ([half, speed], [speed, half]))
    one, two = (server.step({0: vector(5)})[0] for server in (one, two))
    assert (one.step_state["1.velocity"].item(), two.step_state["0.velocity"].item()) == (2, 4)
    assert list(chain(speed, chain(half, speed)).init(vector(1))) == ["0.velocity", "1.1.velocity"]


# --- against loops written from the papers

SEEDS = st.integers(0, 2**32 - 1)


def changes_of(seed: int) -> list[float | None]:
    """Drawn from a normal distribution, which has no ties: Yogi's sign would be that of a rounding error."""
    rng = np.random.default_rng(seed)
    changes = rng.normal(size=12).astype(np.float32)
    return [None if cut else float(change) for change, cut in zip(changes, rng.random(12) < 0.2, strict=True)]


def follow(step: ServerStep, start: float, changes: Sequence[float | None]) -> list[float]:
    """The same as the oracles: one weight, cut by all in rounds with None, beside one that is always kept."""
    server = Server.start(vector(start, 1), 1, RULES["drop"](), steps=[step])
    path = []
    for change in changes:
        mask = torch.tensor([change is not None, True])
        model = torch.where(mask, server.model + (change or 0.0), 0.0)
        server, _ = server.step({0: model}, masks={0: mask})
        path.append(server.model[0].item())
    return path


@settings(max_examples=60)
@given(SEEDS, st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.3, 1.0]))
def test_fedavgm_as_the_loop(seed: int, beta: float, eta: float) -> None:
    changes = changes_of(seed)
    expected = step_oracles.fedavgm(1.0, changes, beta, eta)
    found = follow(STEPS["fedavgm"](momentum=beta, lr=eta), 1.0, changes)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 5), st.sampled_from([0.0, 0.5, 0.9]))
def test_ghbm_as_the_loop(seed: int, tau: int, beta: float) -> None:
    changes = changes_of(seed)
    expected = step_oracles.ghbm(1.0, changes, tau, beta)
    found = follow(STEPS["ghbm"](tau=tau, momentum=beta), 1.0, changes)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", ["fedadagrad", "fedyogi", "fedadam"])
@settings(max_examples=60)
@given(
    seed=SEEDS,
    eta=st.sampled_from([0.01, 0.3]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.5, 0.99]),
    tau=st.sampled_from([0.001, 0.1]),
)
def test_fedopt_as_the_loop(kind: str, seed: int, eta: float, beta1: float, beta2: float, tau: float) -> None:
    changes = changes_of(seed)
    expected = step_oracles.fedopt(kind, 1.0, changes, eta, beta1, beta2, tau)
    options = {"lr": eta, "beta1": beta1, "tau": tau} | ({} if kind == "fedadagrad" else {"beta2": beta2})
    found = follow(STEPS[kind](**options), 1.0, changes)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_huge_update_leaves_no_infinite_memory() -> None:
    for name in ("fedadagrad", "fedyogi", "fedadam"):
        server = Server.start(vector(1, 1), 1, RULES["drop"](), steps=[name])
        for model in (vector(1e30, 1), vector(-1e30, 1), vector(1, 1)):
            server, _ = server.step({0: model})
            assert all(t.isfinite().all() for t in server.step_state.values())


# --- the running average


@pytest.mark.parametrize("rule", RULES)
def test_the_average_is_that_of_the_models_and_training_is_the_same(rule: str) -> None:
    beside, alone = play(start([average(most=0.75)], rule)), play(start([], rule))
    expected = start([]).model
    for done, (one, two) in enumerate(zip(beside, alone, strict=True)):
        assert torch.equal(one.model, two.model)
        expected = running_average(expected, two.model, done, 0.75)
        assert one.average is not None
        assert torch.equal(one.average, expected)
        assert two.average is None


def test_the_average_sees_what_the_other_steps_made() -> None:
    for order in ([STEPS["lr"](lr=0.5), average(most=0.5)], [average(most=0.5), STEPS["lr"](lr=0.5)]):
        server = Server.start(vector(0), 1, RULES["drop"](), steps=order)
        for _ in range(2):
            server, _ = server.step({0: vector(4)})
        assert server.average is not None
        assert (server.model.item(), server.average.item()) == (3, 2.5)


def test_a_checkpoint_from_before_there_were_steps() -> None:
    """It holds the average beside the model, under a name of its own; so do new ones."""
    server = play(start([average(most=0.75)]))[2]
    tensors = to_tensors(server)
    assert tensors.keys() == {"model", "average", "gate.norms"}
    del tensors["gate.norms"]
    again = with_tensors(start([STEPS["lr"](), average(most=0.75)]), 3, tensors)
    assert again.average is not None
    assert server.average is not None
    assert torch.equal(again.average, server.average)


# --- what does not fit


def test_a_checkpoint_without_the_state_of_a_step() -> None:
    plain = to_tensors(play(start([]))[0])
    with pytest.raises(
        SafariError,
        match=r"^step\.0\.velocity must be a tensor of shape \[8\] and torch.float32, got nothing$",
    ):
        with_tensors(start(["fedavgm"]), 1, plain)
    wrong = {**plain, "step.0.velocity": torch.zeros(3)}
    with pytest.raises(
        SafariError,
        match=r"^step\.0\.velocity must be .* of shape \[8\] and torch.float32, got shape \[3\] and torch.float32$",
    ):
        with_tensors(start(["fedavgm"]), 1, wrong)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("lr", {"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
        ("lr", {"lr": float("inf")}, "lr must be a finite number above 0, got inf"),
        ("fedavgm", {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ("fedavgm", {"lr": -1.0}, "lr must be a finite number above 0, got -1.0"),
        ("fedadam", {"beta1": -0.1}, "beta1 must be at least 0 and below 1, got -0.1"),
        ("fedadam", {"beta2": 1.0}, "beta2 must be at least 0 and below 1, got 1.0"),
        ("fedyogi", {"beta2": float("nan")}, "beta2 must be at least 0 and below 1, got nan"),
        ("ghbm", {"tau": 0}, "tau must lie between 1 and 100, got 0"),
        ("ghbm", {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ("fedadagrad", {"tau": 0.0}, "tau must lie between 1e-30 and 1e+18, got 0.0"),
        ("fedadagrad", {"tau": 1e300}, "tau must lie between 1e-30 and 1e+18, got 1e+300"),
        ("fedadam", {"tau": 1e200}, "tau must lie between 1e-30 and 1e+18, got 1e+200"),
        ("fedyogi", {"tau": 1e-50}, "tau must lie between 1e-30 and 1e+18, got 1e-50"),
        ("fedyogi", {"tau": float("nan")}, "tau must lie between 1e-30 and 1e+18, got nan"),
    ],
)
def test_options_out_of_bounds(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        STEPS[name](**options)
    assert str(error.value) == text


@pytest.mark.parametrize("most", [0.0, 1.0, float("nan")])
def test_the_weight_of_the_past_in_an_average(most: float) -> None:
    with pytest.raises(ConfigError, match=f"^most must lie above 0 and below 1, got {most}$"):
        average(most=most)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("fedadam", "steps must be a list of names and ServerSteps, got a str"),
        (
            ["fedadm"],
            f"steps must be one of {', '.join(sorted(STEPS))}; got 'fedadm' (did you mean 'fedadam'?)",
        ),
        ([STEPS["lr"]], "steps must hold names and ServerSteps, got a function; call it: steps=[lr()]"),
        ([3], "steps must hold names and ServerSteps, got an int"),
    ],
)
def test_what_are_no_steps(steps: Any, text: str) -> None:
    with pytest.raises(SafariError) as error:
        start(steps)
    assert str(error.value) == text


WRONG: list[tuple[Any, str]] = [
    (lambda state, step, round: step, "apply must return (step, state), got a tensor of shape [3]"),
    (
        lambda state, step, round: (step[:2], state),
        "the step must be a tensor of shape [3], torch.float32 on cpu, "
        "got a tensor of shape [2], torch.float32 on cpu",
    ),
    (
        lambda state, step, round: (step.double(), state),
        "the step must be a tensor of shape [3], torch.float32 on cpu, "
        "got a tensor of shape [3], torch.float64 on cpu",
    ),
    (
        lambda state, step, round: (None, state),
        "the step must be a tensor of shape [3], torch.float32 on cpu, got None",
    ),
    (
        lambda state, step, round: (step, {"m": 1}),
        "the state that apply returns must hold tensors by name, got an int as 'm'",
    ),
    (
        lambda state, step, round: (step * float("nan"), state),
        "the new model must be finite, got 3 numbers NaN or infinite in round 0",
    ),
]


@pytest.mark.parametrize(("apply", "text"), WRONG)
def test_a_wrong_return_value_of_a_step_is_reported(apply: Any, text: str) -> None:
    step = ServerStep(lambda model: {}, apply, name="mine")
    server = Server.start(vector(1, 1, 1), 1, "drop", steps=[step])
    with pytest.raises(ConfigError) as error:
        server.step({0: vector(2, 2, 2)})
    assert str(error.value) == f"mine: {text}"


def test_a_first_state_that_no_checkpoint_could_hold() -> None:
    step = ServerStep(lambda model: [1], lambda state, step, round: (step, state), name="mine")  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"^mine: the state that init returns must be a dict, got a list$"):
        Server.start(vector(1), 1, "drop", steps=[step])


def test_what_is_passed_to_a_step() -> None:
    """The change of kept parameters, 0 for buffers and cuts; then the finished model."""
    told: list[Tensor] = []

    def apply(state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
        told.append(step)
        return 2 * step, state

    def observe(state: State, model: Tensor, round: Round) -> State:
        told.append(model)
        return state

    step = ServerStep(lambda model: {}, apply, observe)
    server = Server.start(vector(1, 1, 1, 1), 1, "drop", parameters=3, steps=[step])
    server, _ = server.step({0: vector(3, 0, 0, 7)}, masks={0: torch.tensor([True, True, False, True])})
    assert [t.tolist() for t in told] == [[2, -1, 0, 0], [5, -1, 0, 7]]
    assert replace(server, round=9).model.tolist() == [5, -1, 0, 7]
