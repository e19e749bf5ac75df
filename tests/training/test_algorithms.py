"""Client algorithms against plain loops written from their papers, on a small regression-like problem."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from safari.aggregation import Round
from safari.errors import ConfigError
from safari.models import Layout
from safari.tasks import regression
from safari.training import CLIENTS, ClientSide, Known, LocalRound, train_local

STEPS, LR = 3, 0.3
COUNTS = torch.tensor([[6.0, 2.0, 0.0]])


def net() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        return nn.Linear(4, 3, bias=False)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(6, 4, generator=draw), torch.randint(0, 2, (6,), generator=draw)) for _ in range(STEPS)
    ]


def gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, prior: torch.Tensor | None = None):
    w = w.clone().requires_grad_()
    logits = x @ w.view(3, 4).T
    loss = F.cross_entropy(logits if prior is None else logits + prior, y)
    return torch.autograd.grad(loss, w)[0]


def trained(name: str, state=None, down=None, **options):
    module = net()
    layout = Layout.of(module)
    start = layout.read(module)
    everything = torch.ones(layout.size, dtype=torch.bool)
    side = ClientSide(state or {}, down or {}, Known(COUNTS, COUNTS.sum(1)))
    found = train_local(
        module, layout, start, everything, batches(), optimiser="sgd", lr=LR * STEPS, seed=0,
        algorithm=CLIENTS[name](**options), side=side,
    )  # fmt: skip
    return start, found


def test_fedavg_is_plain_sgd() -> None:
    start, found = trained("fedavg")
    w = start
    for x, y in batches():
        w = w - LR * gradient(w, x, y)
    torch.testing.assert_close(found.model, w)


def test_fedprox_follows_its_formula() -> None:
    start, found = trained("fedprox", mu=0.7)
    w = start
    for x, y in batches():
        w = w - LR * (gradient(w, x, y) + 0.7 * (w - start))
    torch.testing.assert_close(found.model, w)


def test_the_calibrated_loss_lowers_what_a_client_hardly_has() -> None:
    start, found = trained("calibrated", strength=0.5, smoothing=0.001)
    prior = 0.5 * torch.tensor([math.log(0.751), math.log(0.251), math.log(0.001)])
    w = start
    for x, y in batches():
        w = w - LR * gradient(w, x, y, prior)
    torch.testing.assert_close(found.model, w)
    assert float(prior[2]) == pytest.approx(-3.45, abs=0.01)


def test_the_masked_loss_leaves_out_what_a_client_lacks() -> None:
    start, found = trained("masked-loss")
    w = start
    for x, y in batches():
        leaf = w.clone().requires_grad_()
        logits = (x @ leaf.view(3, 4).T) * torch.tensor([1.0, 1.0, 0.0])
        w = w - LR * torch.autograd.grad(F.cross_entropy(logits, y), leaf)[0]
    torch.testing.assert_close(found.model, w)
    # The logit of a label that is masked does not move its weights.
    torch.testing.assert_close(found.model[8:], start[8:])


def test_scaffold_is_option_two_of_its_paper() -> None:
    draw = torch.Generator().manual_seed(1)
    own, mean = torch.randn(12, generator=draw) * 0.1, torch.randn(12, generator=draw) * 0.1
    start, found = trained("scaffold", {"variate": own[None]}, {"variate": mean})
    w = start
    for x, y in batches():
        w = w - LR * (gradient(w, x, y) - own + mean)
    torch.testing.assert_close(found.model, w)
    expected = own - mean + (start - w) / (STEPS * LR)
    torch.testing.assert_close(found.up["variate"][0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.state["variate"], found.up["variate"])


def test_feddyn_follows_its_paper_on_both_sides() -> None:
    own = torch.full((12,), 0.05)
    start, found = trained("feddyn", {"h": own[None]}, alpha=0.2)
    w = start
    for x, y in batches():
        w = w - LR * (gradient(w, x, y) - own + 0.2 * (w - start))
    torch.testing.assert_close(found.model, w)
    h = own - 0.2 * (w - start)
    torch.testing.assert_close(found.up["h"][0], h)
    server = CLIENTS["feddyn"](alpha=0.2).server
    held = server.init(2, 12, torch.device("cpu"))
    step, held = server.apply(held, torch.zeros(12), {"h": h[None]}, arrivals([1]))
    torch.testing.assert_close(step, -(h / 2) / 0.2)


def test_dane_shifts_the_gradient_at_the_start_to_the_mean() -> None:
    mean = torch.full((12,), 0.03)
    start, found = trained("dane", down={"mean": mean}, mu=0.4)
    w, first = start, gradient(start, *batches()[0])
    for x, y in batches():
        w = w - LR * (gradient(w, x, y) - first + mean + 0.4 * (w - start))
    torch.testing.assert_close(found.model, w)
    torch.testing.assert_close(found.up["gradient"][0], first)


def test_bvr_l_sgd_takes_two_gradients_of_each_batch() -> None:
    mean = torch.full((12,), 0.03)
    start, found = trained("bvr-l-sgd", down={"mean": mean})
    last, w, v = None, start, mean
    for k, (x, y) in enumerate(batches()):
        if k:
            v = gradient(w, x, y) - gradient(last, x, y) + v
        last, w = w, w - LR * v
    torch.testing.assert_close(found.model, w)


def test_fednova_sends_a_normalised_update_and_the_server_scales_it_back() -> None:
    start, plain = trained("fedavg")
    _, found = trained("fednova")
    torch.testing.assert_close(found.model, start + (plain.model - start) / STEPS)
    server = CLIENTS["fednova"]().server
    held = server.init(2, 12, torch.device("cpu"))
    step, held = server.apply(held, torch.ones(12), {"steps": torch.tensor([[2.0], [6.0]])}, arrivals([0, 1]))
    torch.testing.assert_close(step, torch.full((12,), 4.0))
    # Client 1 is lost: what was last heard of it counts.
    step, _ = server.apply(held, torch.ones(12), {"steps": torch.tensor([[4.0]])}, arrivals([0]))
    torch.testing.assert_close(step, torch.full((12,), 5.0))


def arrivals(ids: list[int], lr: float = 0.0) -> Round:
    rows = torch.zeros(len(ids), 12)
    return Round(
        0, torch.zeros(12), torch.arange(2), torch.tensor(ids), rows, rows.bool(), torch.tensor([0.5, 0.5]), 12, lr=lr
    )  # fmt: skip


def test_mime_is_adam_with_the_servers_moments() -> None:
    """Some rounds of two clients, against a loop that is told the gradients which the server has to work out."""
    beta, second, eps = 0.8, 0.9, 1e-3
    options = {"momentum": beta, "second": second, "eps": eps, "clip": 1e6}
    server = CLIENTS["mime"](**options).server
    held = server.init(2, 12, torch.device("cpu"))
    m, v = torch.zeros(12), torch.zeros(12)
    for t in range(1, 4):
        down = server.down(held)
        start, found = trained("mime", down=down, **options)
        scale = (v / (1 - second ** max(t - 1, 1))).sqrt() + eps
        w, gradients = start, []
        for x, y in batches():
            gradients.append(gradient(w, x, y))
            w = w - LR * ((1 - beta) * gradients[-1] + beta * m) / scale
        torch.testing.assert_close(found.model, w, rtol=1e-4, atol=1e-4)
        assert not found.up
        mean = torch.stack(gradients).mean(0)
        m, v = (1 - beta) * mean + beta * m, second * v + (1 - second) * mean**2
        step, held = server.apply(held, w - start, {}, arrivals([0, 1], lr=LR * STEPS))
        assert torch.equal(step, w - start)
        torch.testing.assert_close(held["momentum"], m, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(held["second"], v, rtol=1e-3, atol=1e-6)


def test_mime_bounds_each_number_of_a_step() -> None:
    start, found = trained("mime", down={"momentum": torch.zeros(12), "second": torch.zeros(12)}, clip=0.5)
    # Without second moments the scale is eps, so every number of a gradient that is not 0 is beyond the bound.
    moved = (found.model - start).abs() / LR
    torch.testing.assert_close(moved.max(), torch.tensor(0.5 * STEPS))


def test_mime_with_a_strength_has_the_calibrated_loss() -> None:
    down = {"momentum": torch.zeros(12), "second": torch.ones(12)}
    start, found = trained("mime", down=down, momentum=0.0, eps=1e-9, strength=1.0)
    prior = torch.tensor([math.log(0.751), math.log(0.251), math.log(0.001)])
    w = start
    for x, y in batches():
        w = w - LR * gradient(w, x, y, prior)
    torch.testing.assert_close(found.model, w)
    with pytest.raises(ConfigError, match="must have one class a sample"):
        CLIENTS["mime"](strength=1.0).check(regression())
    CLIENTS["mime"]().check(regression())


def test_a_server_that_does_not_know_the_learning_rate_cannot_follow_mime() -> None:
    server = CLIENTS["mime"]().server
    held = server.init(2, 12, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"learning rate above 0, got 0\.0"):
        server.apply(held, torch.ones(12), {}, arrivals([0, 1]))


@pytest.mark.parametrize(("name", "key"), [("scaffold", "variate"), ("feddyn", "h"), ("dane", "gradient")])
def test_the_server_holds_the_mean_of_what_it_last_heard_under_loss(name: str, key: str) -> None:
    server, draw = CLIENTS[name]().server, torch.Generator().manual_seed(0)
    held = server.init(2, 12, torch.device("cpu"))
    heard = torch.zeros(2, 12)
    for ids in ([0], [1], [0, 1], [1]):
        sent = torch.randn(len(ids), 12, generator=draw)
        heard[ids] = sent
        _, held = server.apply(held, torch.zeros(12), {key: sent}, arrivals(ids))
        torch.testing.assert_close(held[key], heard)
    if name == "scaffold":
        torch.testing.assert_close(server.down(held)["variate"], heard.mean(0))


@pytest.mark.parametrize("name", ["calibrated", "masked-loss"])
def test_a_task_without_classes_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match="must have one class a sample; task regression has none"):
        CLIENTS[name]().check(regression())


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fedprox", {"mu": -1.0}, "mu must be at least 0, got -1.0"),
        ("feddyn", {"alpha": 0.0}, "alpha must be above 0, got 0.0"),
        ("calibrated", {"smoothing": 0.0}, "smoothing must be above 0 and at most 1, got 0.0"),
        ("dane", {"mu": float("nan")}, "mu must be at least 0, got nan"),
        ("mime", {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ("mime", {"clip": 0.0}, "clip must be above 0, got 0.0"),
        ("fedawe", {"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
    ],
)
def test_options_out_of_bounds(name: str, options: dict, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        CLIENTS[name](**options)
    assert str(error.value) == text


# --- clients that go on from their own models: three of them, pulled towards corners of their own

CORNERS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0]])
PATTERN = [[0, 2], [1], [], [0], [0, 1, 2], [2], [], [1, 2]]


def moved(model: torch.Tensor, client: int) -> torch.Tensor:
    """Half of the way to the client's corner, in place of local steps."""
    return model + (CORNERS[client] - model) / 2


def played(name: str) -> list[list[float]]:
    """The global models of rounds in which only some clients take part, by the algorithm's own two halves."""
    algorithm = CLIENTS[name]()
    x, own = torch.zeros(2), dict(algorithm.init(3, 2, torch.device("cpu")))
    held, found = algorithm.server.init(3, 2, torch.device("cpu")), []
    for t, ids in enumerate(PATTERN):
        down = algorithm.server.down(held)
        # With FedPBC everybody trains in every round; with FedAWE nothing is kept of what does not arrive.
        starts = algorithm.begin(x.expand(3, -1), own, down)
        models = torch.stack([moved(start, client) for client, start in enumerate(starts)])
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
        found.append(x.tolist())
    return found


def test_fedawe_as_a_plain_loop() -> None:
    x, models, since, expected = torch.zeros(2), [torch.zeros(2)] * 3, [-1] * 3, []
    for t, ids in enumerate(PATTERN):
        if ids:
            innovations = {i: models[i] - moved(models[i], i) for i in ids}
            x = sum(models[i] - (t - since[i]) * innovations[i] for i in ids) / len(ids)
        for i in ids:
            models[i], since[i] = x, t
        expected.append(x.tolist())
    torch.testing.assert_close(torch.tensor(played("fedawe")), torch.tensor(expected))
    # Client 1, away in round 0, begins at (0, 0) and counts twice: its way to (0, 1) becomes (0, 2).
    assert expected[1] == [0.0, 2.0]


def test_fedpbc_as_a_plain_loop() -> None:
    x, models, expected = torch.zeros(2), [torch.zeros(2)] * 3, []
    for ids in PATTERN:
        models = [moved(model, i) for i, model in enumerate(models)]
        if ids:
            x = sum(models[i] for i in ids) / len(ids)
        models = [x if i in ids else model for i, model in enumerate(models)]
        expected.append(x.tolist())
    torch.testing.assert_close(torch.tensor(played("fedpbc")), torch.tensor(expected))
    # Client 1 went half of the way to (0, 2) twice.
    assert expected[1] == [0.0, 1.5]
