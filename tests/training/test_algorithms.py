"""Client algorithms against plain loops written from their papers' formulas, each on two small problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.aggregation import Round
from safari.errors import ConfigError
from safari.models import Layout
from safari.tasks import Task, classification, regression
from safari.training import CLIENTS, ClientAlgorithm, ClientSide, Known, LocalRound, Scaled, train_local

STEPS, LR = 3, 0.3
COUNTS = torch.tensor([[6.0, 2.0, 0.0]])
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Problem:
    """A small problem twice: as a module and a task, and as plain functions of the vector of all weights."""

    name: str
    size: int
    module: Callable[[], nn.Module]
    task: Task
    outputs: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    label: Callable[[torch.Generator], Tensor]

    def net(self) -> nn.Module:
        with torch.random.fork_rng([]):
            torch.manual_seed(2)
            return self.module()

    def batches(self, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        return [(torch.randn(6, 4, generator=draw), self.label(draw)) for _ in range(STEPS)]

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, prior: Tensor | float = 0.0) -> Tensor:
        w = w.clone().requires_grad_()
        return torch.autograd.grad(self.loss(self.outputs(w, x) + prior, y), w)[0]


def perceptron(w: Tensor, x: Tensor, out: int) -> Tensor:
    """4 inputs, 5 tanh units, `out` outputs."""
    w1, b1, w2, b2 = w.split([20, 5, 5 * out, out])
    return torch.tanh(x @ w1.view(5, 4).T + b1) @ w2.view(out, 5).T + b2


def classes(draw: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (6,), generator=draw)


LINEAR = Problem(
    "linear", 12, lambda: nn.Linear(4, 3, bias=False), classification(),
    lambda w, x: x @ w.view(3, 4).T, F.cross_entropy, classes,
)  # fmt: skip
MLP = Problem(
    "mlp", 43, lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), classification(),
    lambda w, x: perceptron(w, x, 3), F.cross_entropy, classes,
)  # fmt: skip
REGRESSION = Problem(
    "regression", 37, lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), regression(),
    lambda w, x: perceptron(w, x, 2), F.mse_loss, lambda draw: torch.randn(6, 2, generator=draw),
)  # fmt: skip

COMPARED: dict[str, set[str]] = {}


def compares(name: str, *problems: Problem):
    """Marks a test as the comparison of an algorithm with a plain loop on these problems."""
    COMPARED.setdefault(name, set()).update(problem.name for problem in problems)
    return pytest.mark.parametrize("problem", problems, ids=lambda problem: problem.name)


def trained(problem: Problem, name: str, state=None, down=None, start=None, seed: int = 5, **options):
    """The start and what the package's local steps made of it."""
    module = problem.net()
    layout = Layout.of(module)
    start = layout.read(module) if start is None else start
    everything = torch.ones(layout.size, dtype=torch.bool)
    side = ClientSide(state or {}, down or {}, Known(COUNTS, COUNTS.sum(1)))
    found = train_local(
        module, layout, start, everything, problem.batches(seed), optimiser="sgd", lr=LR * STEPS, seed=0,
        task=problem.task, algorithm=CLIENTS[name](**options), side=side,
    )  # fmt: skip
    return start, found


def arrivals(ids: list[int], size: int = 12, lr: float = 0.0, **more) -> Round:
    rows = torch.zeros(len(ids), size)
    return Round(
        0, torch.zeros(size), torch.arange(2), torch.tensor(ids), rows, rows.bool(), torch.tensor([0.5, 0.5]), size,
        lr=lr, **more,
    )  # fmt: skip


def noise(problem: Problem, seed: int) -> Tensor:
    return torch.randn(problem.size, generator=torch.Generator().manual_seed(seed)) * 0.1


def test_every_algorithm_is_compared_with_a_loop_on_two_problems() -> None:
    assert {name for name, problems in COMPARED.items() if len(problems) >= 2} == set(CLIENTS)


@compares("fedavg", LINEAR, REGRESSION)
def test_fedavg_is_plain_sgd(problem: Problem) -> None:
    w, found = trained(problem, "fedavg")
    for x, y in problem.batches():
        w = w - LR * problem.gradient(w, x, y)
    torch.testing.assert_close(found.model, w)


@compares("fedprox", LINEAR, REGRESSION)
def test_fedprox_follows_its_formula(problem: Problem) -> None:
    start, found = trained(problem, "fedprox", mu=0.7)
    w = start
    for x, y in problem.batches():
        w = w - LR * (problem.gradient(w, x, y) + 0.7 * (w - start))
    torch.testing.assert_close(found.model, w)


@compares("calibrated", LINEAR, MLP)
def test_the_calibrated_loss_lowers_what_a_client_hardly_has(problem: Problem) -> None:
    w, found = trained(problem, "calibrated", strength=0.5, smoothing=0.001)
    prior = 0.5 * torch.tensor([math.log(0.751), math.log(0.251), math.log(0.001)])
    for x, y in problem.batches():
        w = w - LR * problem.gradient(w, x, y, prior)
    torch.testing.assert_close(found.model, w)
    assert float(prior[2]) == pytest.approx(-3.45, abs=0.01)


@compares("masked-loss", LINEAR, MLP)
def test_the_masked_loss_leaves_out_what_a_client_lacks(problem: Problem) -> None:
    start, found = trained(problem, "masked-loss")
    w = start
    for x, y in problem.batches():
        leaf = w.clone().requires_grad_()
        logits = problem.outputs(leaf, x) * torch.tensor([1.0, 1.0, 0.0])
        w = w - LR * torch.autograd.grad(F.cross_entropy(logits, y), leaf)[0]
    torch.testing.assert_close(found.model, w)
    if problem is LINEAR:
        # The logit of a label that is masked does not move its weights.
        torch.testing.assert_close(found.model[8:], start[8:])


@compares("scaffold", LINEAR, REGRESSION)
def test_scaffold_is_option_two_of_its_paper(problem: Problem) -> None:
    own, mean = noise(problem, 1), noise(problem, 2)
    start, found = trained(problem, "scaffold", {"variate": own[None]}, {"variate": mean})
    w = start
    for x, y in problem.batches():
        w = w - LR * (problem.gradient(w, x, y) - own + mean)
    torch.testing.assert_close(found.model, w)
    expected = own - mean + (start - w) / (STEPS * LR)
    torch.testing.assert_close(found.up["variate"][0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.state["variate"], found.up["variate"])


@compares("feddyn", LINEAR, REGRESSION)
def test_feddyn_follows_its_paper_on_both_sides(problem: Problem) -> None:
    own = noise(problem, 1)
    start, found = trained(problem, "feddyn", {"h": own[None]}, alpha=0.2)
    w = start
    for x, y in problem.batches():
        w = w - LR * (problem.gradient(w, x, y) - own + 0.2 * (w - start))
    torch.testing.assert_close(found.model, w)
    h = own - 0.2 * (w - start)
    torch.testing.assert_close(found.up["h"][0], h)
    server = CLIENTS["feddyn"](alpha=0.2).server
    held = server.init(2, problem.size, CPU)
    step, _ = server.apply(held, torch.zeros(problem.size), {"h": h[None]}, arrivals([1], problem.size))
    torch.testing.assert_close(step, -(h / 2) / 0.2)


@compares("dane", LINEAR, REGRESSION)
def test_dane_shifts_the_gradient_at_the_start_to_the_mean(problem: Problem) -> None:
    mean = noise(problem, 3)
    start, found = trained(problem, "dane", down={"mean": mean}, mu=0.4)
    w, first = start, problem.gradient(start, *problem.batches()[0])
    for x, y in problem.batches():
        w = w - LR * (problem.gradient(w, x, y) - first + mean + 0.4 * (w - start))
    torch.testing.assert_close(found.model, w)
    torch.testing.assert_close(found.up["gradient"][0], first)


@compares("bvr-l-sgd", LINEAR, REGRESSION)
def test_bvr_l_sgd_takes_two_gradients_of_each_batch(problem: Problem) -> None:
    mean = noise(problem, 3)
    w, found = trained(problem, "bvr-l-sgd", down={"mean": mean})
    last, v = None, mean
    for k, (x, y) in enumerate(problem.batches()):
        if k:
            v = problem.gradient(w, x, y) - problem.gradient(last, x, y) + v
        last, w = w, w - LR * v
    torch.testing.assert_close(found.model, w)


@compares("fednova", LINEAR, REGRESSION)
def test_fednova_sends_a_normalised_update_and_the_server_scales_it_back(problem: Problem) -> None:
    start, found = trained(problem, "fednova")
    w = start
    for x, y in problem.batches():
        w = w - LR * problem.gradient(w, x, y)
    torch.testing.assert_close(found.model, start + (w - start) / STEPS)
    server, one = CLIENTS["fednova"]().server, torch.ones(problem.size)
    held = server.init(2, problem.size, CPU)
    step, held = server.apply(
        held, one, {"steps": torch.tensor([[2.0], [6.0]])}, arrivals([0, 1], problem.size)
    )
    torch.testing.assert_close(step, 4 * one)
    # Client 1 is lost: what was last heard of it counts.
    step, _ = server.apply(held, one, {"steps": torch.tensor([[4.0]])}, arrivals([0], problem.size))
    torch.testing.assert_close(step, 5 * one)


@compares("mime", LINEAR, REGRESSION)
def test_mime_is_adam_with_the_servers_moments(problem: Problem) -> None:
    """Some rounds, against a loop that is told the gradients which the server has to work out."""
    beta, second, eps = 0.8, 0.9, 0.1
    options = {"momentum": beta, "second": second, "eps": eps, "clip": 1e6}
    server = CLIENTS["mime"](**options).server
    held = server.init(2, problem.size, CPU)
    m, v = torch.zeros(problem.size), torch.zeros(problem.size)
    for t in range(1, 4):
        down = server.down(held)
        start, found = trained(problem, "mime", down=down, **options)
        scale = (v / (1 - second ** max(t - 1, 1))).sqrt() + eps
        w, gradients = start, []
        for x, y in problem.batches():
            gradients.append(problem.gradient(w, x, y))
            w = w - LR * ((1 - beta) * gradients[-1] + beta * m) / scale
        torch.testing.assert_close(found.model, w)
        assert not found.up
        mean = torch.stack(gradients).mean(0)
        m, v = (1 - beta) * mean + beta * m, second * v + (1 - second) * mean**2
        step, held = server.apply(held, w - start, {}, arrivals([0, 1], problem.size, lr=LR * STEPS))
        assert torch.equal(step, w - start)
        torch.testing.assert_close(held["momentum"], m, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(held["second"], v, rtol=1e-4, atol=1e-6)


@compares("mime", LINEAR, REGRESSION)
def test_mime_scaled_by_the_clients_own_gradients(problem: Problem) -> None:
    """Two clients, some rounds, against a loop that is told the gradients of both."""
    beta, second, eps = 0.8, 0.9, 0.1
    options = {"momentum": beta, "second": second, "eps": eps, "clip": 1e6, "scale": "clients"}
    server = CLIENTS["mime"](**options).server
    held = server.init(2, problem.size, CPU)
    m, v = torch.zeros(problem.size), torch.zeros(problem.size)
    for t in range(1, 4):
        down = server.down(held)
        scale = (v / (1 - second ** max(t - 1, 1))).sqrt() + eps
        models, means = [], []
        for client in (0, 1):
            start, found = trained(problem, "mime", down=down, seed=client, **options)
            w, gradients = start, []
            for x, y in problem.batches(client):
                gradients.append(problem.gradient(w, x, y))
                w = w - LR * ((1 - beta) * gradients[-1] + beta * m) / scale
            torch.testing.assert_close(found.model, w)
            models.append(w)
            means.append(torch.stack(gradients).mean(0))
        m = (1 - beta) * (means[0] + means[1]) / 2 + beta * m
        v = second * v + (1 - second) * (means[0] ** 2 + means[1] ** 2) / 2
        round = arrivals([0, 1], problem.size, lr=LR * STEPS)
        rows = torch.stack(models)
        round = replace(round, global_model=start, models=rows, masks=torch.ones_like(rows, dtype=torch.bool))
        _, held = server.apply(held, rows.mean(0) - start, {}, round)
        torch.testing.assert_close(held["momentum"], m, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(held["second"], v, rtol=1e-4, atol=1e-6)


def test_mime_takes_the_scale_of_clients_from_what_they_kept_and_what_came() -> None:
    """Steps of 0.1 · 2 and 0.1 · 4 at a scale of 1: gradients of 2 and 4, squares of 4 and 16."""
    server = CLIENTS["mime"](momentum=0.0, second=0.5, eps=1.0, scale="clients").server
    held = server.init(2, 4, CPU)
    models = torch.tensor([[0.8, 0.8, 0.8, 0.0], [0.6, 0.0, 0.0, 0.0]])
    came = torch.tensor([[True, True, True, True], [True, True, False, True]])
    masks = torch.tensor([[True, True, True, False], [True, False, True, False]])
    round = replace(
        arrivals([0, 1], 4, lr=0.1), global_model=torch.ones(4), models=models, masks=masks, came=came
    )
    _, held = server.apply(held, torch.zeros(4), {}, round)
    torch.testing.assert_close(held["second"], torch.tensor([5.0, 2.0, 2.0, 0.0]))


def test_mime_bounds_each_number_of_a_step() -> None:
    zeros = torch.zeros(LINEAR.size)
    start, found = trained(LINEAR, "mime", down={"momentum": zeros, "second": zeros}, clip=0.5)
    # Without second moments the scale is eps, so every number of a gradient that is not 0 is beyond the bound.
    moved = (found.model - start).abs() / LR
    torch.testing.assert_close(moved.max(), torch.tensor(0.5 * STEPS))


@compares("mime", LINEAR, MLP)
def test_mime_with_a_strength_has_the_calibrated_loss(problem: Problem) -> None:
    down = {"momentum": torch.zeros(problem.size), "second": torch.ones(problem.size)}
    w, found = trained(problem, "mime", down=down, momentum=0.0, eps=1e-9, strength=1.0)
    prior = torch.tensor([math.log(0.751), math.log(0.251), math.log(0.001)])
    for x, y in problem.batches():
        w = w - LR * problem.gradient(w, x, y, prior)
    torch.testing.assert_close(found.model, w)


def test_mime_needs_classes_only_with_a_strength() -> None:
    with pytest.raises(ConfigError, match="must have one class a sample"):
        CLIENTS["mime"](strength=1.0).check(regression())
    CLIENTS["mime"]().check(regression())


def test_mime_keeps_the_moments_of_numbers_that_nobody_sent() -> None:
    server = CLIENTS["mime"]().server
    held = server.init(2, 12, torch.device("cpu"))
    _, held = server.apply(held, -torch.ones(12), {}, arrivals([0, 1], lr=0.1))
    came = torch.zeros(2, 12, dtype=torch.bool)
    came[0, :4] = came[1, 4:8] = True
    _, after = server.apply(held, torch.zeros(12), {}, arrivals([0, 1], lr=0.1, came=came))
    for name in ("momentum", "second"):
        assert torch.equal(after[name][8:], held[name][8:])
        assert (after[name][:8] != held[name][:8]).all()


def test_a_server_that_does_not_know_the_learning_rate_cannot_follow_mime() -> None:
    server = CLIENTS["mime"]().server
    held = server.init(2, 12, CPU)
    with pytest.raises(ConfigError, match=r"learning rate above 0, got 0\.0"):
        server.apply(held, torch.ones(12), {}, arrivals([0, 1]))


def test_a_huge_step_leaves_the_moments_of_mime_finite() -> None:
    """Squares of what a server without a gate takes may be infinite, and 0 times that would be NaN for good."""
    server = CLIENTS["mime"]().server
    held = server.init(2, 12, CPU)
    for step in (torch.full((12,), 1e24), torch.zeros(12), torch.full((12,), -3e38), torch.zeros(12)):
        _, held = server.apply(held, step, {}, arrivals([0, 1], lr=0.01))
        for name, vector in (held | server.down(held)).items():
            assert vector.isfinite().all(), name


@pytest.mark.parametrize(("name", "key"), [("scaffold", "variate"), ("feddyn", "h"), ("dane", "gradient")])
def test_the_server_holds_what_it_last_heard(name: str, key: str) -> None:
    server, draw = CLIENTS[name]().server, torch.Generator().manual_seed(0)
    held = server.init(2, 12, CPU)
    heard = torch.zeros(2, 12)
    for ids in ([0], [1], [0, 1], [1]):
        sent = torch.randn(len(ids), 12, generator=draw)
        heard[ids] = sent
        _, held = server.apply(held, torch.zeros(12), {key: sent}, arrivals(ids))
        torch.testing.assert_close(held[key], heard)


@pytest.mark.parametrize(
    ("memory", "means"),
    # In the last round client 0 is missing, and client 1, now at 9, stands in for it.
    [("last", [3.0, 4.0, 5.5]), ("stand-in", [3.0, 4.0, 9.0]), ("arrived", [3.0, 6.0, 9.0])],
)
def test_which_variate_of_a_missing_client_scaffold_counts(memory: str, means: list[float]) -> None:
    server = CLIENTS["scaffold"](memory=memory).server
    held, found = server.init(2, 12, CPU), []
    rounds = [([0, 1], [2.0, 4.0], {}), ([1], [6.0], {}), ([1], [9.0], {0: (1,)})]
    for ids, sent, stand_ins in rounds:
        up = {"variate": torch.tensor(sent)[:, None].expand(-1, 12)}
        _, held = server.apply(held, torch.zeros(12), up, arrivals(ids, stand_ins=stand_ins))
        found.append(server.down(held)["variate"])
    torch.testing.assert_close(torch.stack(found), torch.tensor(means)[:, None].expand(-1, 12))


def test_several_stand_ins_share_a_client_and_what_it_sent_itself_is_remembered() -> None:
    server = CLIENTS["scaffold"](memory="stand-in").server
    rows = torch.tensor([[1.0], [4.0], [8.0]])
    held = server.init(3, 1, CPU)

    def play(held, ids: list[int], stand_ins: dict[int, tuple[int, ...]]):
        models = torch.zeros(len(ids), 1)
        round = Round(
            0, torch.zeros(1), torch.arange(3), torch.tensor(ids), models, models.bool(), torch.full((3,), 1 / 3), 1,
            stand_ins=stand_ins,
        )  # fmt: skip
        _, held = server.apply(held, torch.zeros(1), {"variate": rows[ids]}, round)
        return float(server.down(held)["variate"]), held

    mean, held = play(held, [0, 1, 2], {})
    assert mean == pytest.approx(13 / 3)
    mean, held = play(held, [1, 2], {0: (2, 1)})
    assert mean == pytest.approx((6 + 4 + 8) / 3)
    # Nobody stands in for client 0 any more; a name that did not arrive does not count.
    mean, held = play(held, [1], {0: (2,), 7: (1,)})
    assert mean == pytest.approx(13 / 3)


@pytest.mark.parametrize("name", ["calibrated", "masked-loss"])
def test_a_task_without_classes_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match="must have one class a sample; task regression has none"):
        CLIENTS[name]().check(regression())


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fedprox", {"mu": -1.0}, "mu must be a finite number of at least 0, got -1.0"),
        ("feddyn", {"alpha": 0.0}, "alpha must be a finite number above 0, got 0.0"),
        ("feddyn", {"alpha": float("inf")}, "alpha must be a finite number above 0, got inf"),
        ("calibrated", {"strength": float("inf")}, "strength must be a finite number of at least 0, got inf"),
        ("calibrated", {"smoothing": 0.0}, "smoothing must be above 0 and at most 1, got 0.0"),
        ("dane", {"mu": float("nan")}, "mu must be a finite number of at least 0, got nan"),
        ("mime", {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ("mime", {"second": 0.99999999}, "second must lie between 0 and 0.999999, got 0.99999999"),
        ("mime", {"clip": 0.0}, "clip must lie between 1e-30 and 1e+30, got 0.0"),
        ("mime", {"clip": 1e39}, "clip must lie between 1e-30 and 1e+30, got 1e+39"),
        ("mime", {"eps": 1e40}, "eps must lie between 1e-30 and 1e+30, got 1e+40"),
        ("mime", {"eps": 1e-50}, "eps must lie between 1e-30 and 1e+30, got 1e-50"),
        (
            "mime",
            {"scale": "client"},
            "scale must be one of clients, mean; got 'client' (did you mean 'clients'?)",
        ),
        ("scaffold", {"memory": "none"}, "memory must be one of arrived, last, stand-in; got 'none'"),
        ("fedawe", {"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
        ("fedawe", {"clip": -0.5}, "clip must be a finite number of at least 0, got -0.5"),
        ("fedawe", {"clip": float("nan")}, "clip must be a finite number of at least 0, got nan"),
    ],
)
def test_options_out_of_bounds(name: str, options: dict, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        CLIENTS[name](**options)
    assert str(error.value) == text


def test_a_scaled_direction_is_found_by_those_who_know_directions_alone() -> None:
    algorithm = ClientAlgorithm(
        scaled=lambda down: Scaled(0.5, down["shift"], torch.tensor([2.0, 1.0]), limit=5.0)
    )
    down = {"shift": torch.tensor([1.0, -9.0])}
    ones = torch.ones(1, 2)
    local = LocalRound(ones, ones, ones.bool(), {"own": ones}, down, None, 0, 1, 0.1, None)
    found, state = algorithm.direction(torch.tensor([[4.0, 4.0]]), local)
    # (0.5 · 4 + 1) / 2, and 0.5 · 4 - 9, which is beyond the limit.
    assert found.tolist() == [[1.5, -5.0]]
    assert state == {"own": ones}
    # It follows every change, and no other direction stands beside it.
    other = replace(algorithm, scaled=lambda down: Scaled(1.0, down["shift"], torch.ones(2), limit=99.0))
    assert other.direction(torch.tensor([[4.0, 4.0]]), local)[0].tolist() == [[5.0, -5.0]]
    assert replace(algorithm, direction=None, scaled=None).direction is None
    with pytest.raises(ConfigError, match="mine has both a direction and `scaled`, which is one"):
        replace(algorithm, name="mine", direction=lambda gradient, local: (gradient, local.state))


# --- whole federations of three clients, in which uploads are lost

PATTERN = [[0, 2], [1], [], [0], [0, 1, 2], [2], [], [1, 2]]


def federated(problem: Problem, name: str, **options) -> tuple[list[Tensor], list[dict], dict]:
    """By the package's two halves, all clients training in every round: the models after each round, what the server
    then sends down, and what the clients hold at the end."""
    algorithm = CLIENTS[name](**options)
    x = Layout.of(net := problem.net()).read(net)
    own, held = dict(algorithm.init(3, problem.size, CPU)), algorithm.server.init(3, problem.size, CPU)
    models, downs = [], []
    for t, ids in enumerate(PATTERN):
        down = algorithm.server.down(held)
        clients = [
            trained(
                problem, name, {key: rows[[i]] for key, rows in own.items()},
                {key: rows[[i]] if rows.ndim > 1 else rows for key, rows in down.items()},
                start=x, seed=10 * t + i, **options,
            )[1]
            for i in range(3)
        ]  # fmt: skip
        own = {key: torch.cat([client.state[key] for client in clients]) for key in own}
        if ids:
            sent = torch.stack([clients[i].model for i in ids])
            up = {key: torch.cat([clients[i].up[key] for i in ids]) for key in clients[0].up}
            round = Round(
                t, x, torch.arange(3), torch.tensor(ids), sent, torch.ones_like(sent).bool(),
                torch.full((3,), 1 / 3, dtype=torch.float64), problem.size,
            )  # fmt: skip
            step, held = algorithm.server.apply(held, sent.mean(0) - x, up, round)
            x = x + step
        models.append(x)
        downs.append(algorithm.server.down(held))
    return models, downs, own


def first_model(problem: Problem) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in problem.net().parameters()])


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)


@compares("scaffold", LINEAR, REGRESSION)
def test_scaffold_under_loss_as_a_plain_loop(problem: Problem) -> None:
    x, own, heard = first_model(problem), [torch.zeros(problem.size)] * 3, [torch.zeros(problem.size)] * 3
    models, means = [], []
    for t, ids in enumerate(PATTERN):
        c, sent = sum(heard) / 3, []
        for i in range(3):
            w, total = x, 0
            for batch in problem.batches(10 * t + i):
                g = problem.gradient(w, *batch)
                w, total = w - LR * (g - own[i] + c), total + g
            # A client does not learn that its upload was lost: it keeps its new variate.
            own[i] = total / STEPS
            sent.append(w)
        for i in ids:
            heard[i] = own[i]
        x = sum(sent[i] for i in ids) / len(ids) if ids else x
        models.append(x)
        means.append(sum(heard) / 3)
    found, downs, state = federated(problem, "scaffold")
    close(found, models)
    # The invariant: c is the mean of the variates that each client sent when it was last heard.
    close([down["variate"] for down in downs], means)
    close(list(state["variate"]), own)


@compares("feddyn", LINEAR, REGRESSION)
def test_feddyn_under_loss_as_a_plain_loop(problem: Problem) -> None:
    alpha = 0.5
    x, own, heard = first_model(problem), [torch.zeros(problem.size)] * 3, [torch.zeros(problem.size)] * 3
    models = []
    for t, ids in enumerate(PATTERN):
        sent = []
        for i in range(3):
            w = x
            for batch in problem.batches(10 * t + i):
                w = w - LR * (problem.gradient(w, *batch) - own[i] + alpha * (w - x))
            own[i] = own[i] - alpha * (w - x)
            sent.append(w)
        for i in ids:
            heard[i] = own[i]
        # The invariant: the mean is corrected by all h_i as they were last heard, also those of the missing.
        x = sum(sent[i] for i in ids) / len(ids) - sum(heard) / 3 / alpha if ids else x
        models.append(x)
    found, _, state = federated(problem, "feddyn", alpha=alpha)
    close(found, models)
    close(list(state["h"]), own)


# --- clients that go on from their own models

CORNERS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0]])
Move = Callable[[Tensor, int, int], Tensor]


def halfway(model: Tensor, client: int, t: int) -> Tensor:
    """Half of the way to a corner of the client's own, in place of local steps."""
    return model + (CORNERS[client] - model) / 2


def descent(problem: Problem) -> Move:
    """Plain SGD on the client's batches."""

    def move(w: Tensor, client: int, t: int) -> Tensor:
        for batch in problem.batches(10 * t + client):
            w = w - LR * problem.gradient(w, *batch)
        return w

    return move


def in_corners(name: str, **options: float) -> list[Tensor]:
    """The global models of `halfway`'s rounds, by the algorithm's own two halves."""
    algorithm = CLIENTS[name](**options)
    x, own = torch.zeros(2), dict(algorithm.init(3, 2, CPU))
    held, found = algorithm.server.init(3, 2, CPU), []
    for t, ids in enumerate(PATTERN):
        down = algorithm.server.down(held)
        # With FedPBC everybody trains in every round; with FedAWE nothing is kept of what does not arrive.
        starts = algorithm.begin(x.expand(3, -1), own, down)
        models = torch.stack([halfway(start, client, t) for client, start in enumerate(starts)])
        if algorithm.finish is not None:
            local = LocalRound(models, starts, torch.ones(3, 2).bool(), own, down, None, 1, 1, 0.1, None)
            own = dict(algorithm.finish(local)[0])
        if ids:
            weights = torch.full((3,), 1 / 3, dtype=torch.float64)
            round = Round(
                t, x, torch.arange(3), torch.tensor(ids), models[ids], torch.ones(1, 2).bool(), weights, 2
            )
            step, held = algorithm.server.apply(held, models[ids].mean(0) - x, {}, round)
            x = x + step
        found.append(x)
    return found


def fedawe_loop(x: Tensor, move: Move, clip: float = math.inf) -> list[Tensor]:
    models, since, expected = [x] * 3, [-1] * 3, []
    for t, ids in enumerate(PATTERN):
        if ids:
            innovations = {i: models[i] - move(models[i], i, t) for i in ids}
            step = sum((t - since[i]) * innovations[i] for i in ids) / len(ids)
            if float(step.norm()) > clip:
                step = clip * step / step.norm()
            x = sum(models[i] for i in ids) / len(ids) - step
        for i in ids:
            models[i], since[i] = x, t
        expected.append(x)
    return expected


def fedpbc_loop(x: Tensor, move: Move) -> list[Tensor]:
    models, expected = [x] * 3, []
    for t, ids in enumerate(PATTERN):
        models = [move(model, i, t) for i, model in enumerate(models)]
        if ids:
            x = sum(models[i] for i in ids) / len(ids)
        models = [x if i in ids else model for i, model in enumerate(models)]
        expected.append(x)
    return expected


@compares("fedawe", LINEAR, REGRESSION)
def test_fedawe_as_a_plain_loop(problem: Problem) -> None:
    close(federated(problem, "fedawe")[0], fedawe_loop(first_model(problem), descent(problem)))


@compares("fedpbc", LINEAR, REGRESSION)
def test_fedpbc_as_a_plain_loop(problem: Problem) -> None:
    close(federated(problem, "fedpbc")[0], fedpbc_loop(first_model(problem), descent(problem)))


def test_fedawe_among_corners() -> None:
    expected = fedawe_loop(torch.zeros(2), halfway)
    close(in_corners("fedawe"), expected)
    # Client 1, away in round 0, begins at (0, 0) and counts twice: its way to (0, 1) becomes (0, 2).
    assert expected[1].tolist() == [0.0, 2.0]
    clipped = fedawe_loop(torch.zeros(2), halfway, clip=0.5)
    close(in_corners("fedawe", clip=0.5), clipped)
    assert clipped[1].tolist() == [0.0, 0.5]


def test_fedawe_clips_the_mean_step_and_not_the_mean_of_where_clients_began() -> None:
    """Client 0 went from (0, 0) to (6, 8), client 1 stayed: the mean step (3, 4) has norm 5."""
    models = torch.tensor([[6.0, 8.0], [0.0, 0.0]])
    kept = torch.ones(1, 2).bool()
    round = Round(
        0, torch.zeros(2), torch.arange(2), torch.arange(2), models, kept, torch.full((2,), 0.5).double(), 2
    )

    def stepped(**options: float) -> list[float]:
        half = CLIENTS["fedawe"](**options).server
        return half.apply(half.init(2, 2, CPU), torch.zeros(2), {}, round)[0].tolist()

    assert stepped() == stepped(clip=5.0) == stepped(clip=9.0) == [3.0, 4.0]
    assert stepped(clip=0.5) == pytest.approx([0.3, 0.4])
    # The learning rate is that of the clipped step.
    assert stepped(clip=0.5, lr=2.0) == pytest.approx([0.6, 0.8])
    # Where nobody moved the norm is 0.
    still = replace(round, models=torch.zeros(2, 2))
    half = CLIENTS["fedawe"](clip=0.5).server
    assert half.apply(half.init(2, 2, CPU), torch.zeros(2), {}, still)[0].tolist() == [0.0, 0.0]
    # One that was away begins elsewhere; where it began is in the mean, whatever the clip.
    held = {
        **half.init(2, 2, CPU),
        "held": torch.tensor([[0.0, 0.0], [4.0, 0.0]]),
        "current": torch.zeros(2, 1),
    }
    there = replace(round, models=torch.tensor([[0.0, 0.0], [4.0, 0.0]]))
    assert half.apply(held, torch.zeros(2), {}, there)[0].tolist() == [2.0, 0.0]


def test_fedawes_mean_is_that_of_all_clients_models() -> None:
    """Two clients of three arrived and hold the newest model; the third holds what it got before."""
    half = CLIENTS["fedawe"](mean=True).server
    state = {
        "held": torch.tensor([[9.0, 9.0], [9.0, 9.0], [1.0, 4.0]]),
        "current": torch.tensor([[1.0], [1.0], [0.0]]),
        "since": torch.zeros(3, 1),
    }
    assert half.average(state, torch.tensor([4.0, 1.0])).tolist() == [3.0, 2.0]
    assert CLIENTS["fedawe"]().server.average is None


def test_fedawe_averages_what_came_of_each_number() -> None:
    half = CLIENTS["fedawe"]().server
    models = torch.tensor([[1.0, 0.0, 0.0], [3.0, 5.0, 0.0]])
    came = torch.tensor([[True, False, False], [True, True, False]])
    round = Round(
        0, torch.full((3,), 7.0), torch.arange(2), torch.arange(2), models, torch.ones_like(came),
        torch.full((2,), 0.5, dtype=torch.float64), 3, came=came,
    )  # fmt: skip
    step, _ = half.apply(half.init(2, 3, CPU), torch.zeros(3), {}, round)
    assert step.tolist() == [2.0 - 7.0, 5.0 - 7.0, 0.0]


def test_fedpbc_among_corners() -> None:
    expected = fedpbc_loop(torch.zeros(2), halfway)
    close(in_corners("fedpbc"), expected)
    # Client 1 went half of the way to (0, 2) twice.
    assert expected[1].tolist() == [0.0, 1.5]
