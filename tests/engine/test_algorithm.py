"""The engines against Algorithm 1 written again, in plain PyTorch, by names instead of one vector.

Every client's batch is all of its data, so that the order of the draws cannot matter; who arrives is read
from a trace. What is left is the algorithm itself.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.kit import play, world_of, write_trace
from safari.engine import ENGINES

PLUGINS = """
import numpy as np, torch
from torch import nn

def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(27, 4, generator=draw)
    y = (x @ torch.randn(4, 3, generator=draw)).argmax(1)
    return (x[:15], y[:15]), (x[15:], y[15:])

def parts(labels, clients, rng):
    return [np.arange(0, 3), np.arange(3, 9), np.arange(9, 15)]

def net(shape, classes):
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return net
"""

# The norm comes first: behind a layer it would make some gradients 0, and Adam would blow up their rounding.
WEIGHTS = ("1.weight", "3.weight")
BUFFERS = ("0.running_mean", "0.running_var")
# Pairs that were never seen together, one client for ever missing at first, rounds without anybody;
# and at the end rounds in which one of two known friends must be chosen.
UP = ["110", "000", "011", "100", "001", "111", "101", "011", "110"]
DOWN = ["111", "111", "111", "101", "110", "111", "111", "111", "111"]

Model = dict[str, torch.Tensor]


def forward(model: Model, x: torch.Tensor, training: bool) -> tuple[torch.Tensor, Model]:
    """The net of the plug-in, by hand; returns logits and the buffers afterwards."""
    buffers = {name: model[name] for name in BUFFERS}
    if training:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        seen = {"0.running_mean": mean, "0.running_var": x.var(0, unbiased=True)}
        buffers = {name: 0.9 * old + 0.1 * seen[name] for name, old in buffers.items()}
    else:
        mean, var = model["0.running_mean"], model["0.running_var"]
    normal = (x - mean) / (var + 1e-5).sqrt() * model["0.weight"] + model["0.bias"]
    hidden = (normal @ model["1.weight"].T + model["1.bias"]).relu()
    return hidden @ model["3.weight"].T + model["3.bias"], buffers


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (logits.logsumexp(1) - logits[torch.arange(len(y)), y]).mean()


def gradients(model: Model, x: Any, y: Any, training: bool, temperature: float = 1.0) -> tuple[Model, Model]:
    leaves = {n: v.clone().requires_grad_(n not in BUFFERS) for n, v in model.items()}
    logits, buffers = forward(leaves, x, training)
    names = [n for n in leaves if n not in BUFFERS]
    found = torch.autograd.grad(loss_of(logits / temperature, y), [leaves[n] for n in names])
    return dict(zip(names, found, strict=True)), buffers


def scores(pruner: str, model: Model, x: torch.Tensor, y: torch.Tensor, ranks: Model) -> Model:
    if pruner == "rand":
        return ranks
    if pruner == "mag":
        return {n: model[n].abs() for n in WEIGHTS}
    if pruner == "snip":
        grads, _ = gradients(model, x, y, training=False)
        return {n: (model[n] * grads[n]).abs() for n in WEIGHTS}
    double = {n: v.double() for n, v in model.items()}
    if pruner == "grasp":
        # The Hessian times the gradient as a difference quotient, in place of a second derivative.
        g, _ = gradients(double, x.double(), y, training=False, temperature=200.0)
        size = math.sqrt(sum(float((g[n] ** 2).sum()) for n in WEIGHTS))
        step = 1e-4 / size
        ends = []
        for sign in (1, -1):
            moved = {n: v + sign * step * g[n] if n in WEIGHTS else v for n, v in double.items()}
            ends.append(gradients(moved, x.double(), y, training=False, temperature=200.0)[0])
        return {n: double[n] * (ends[0][n] - ends[1][n]) / (2 * step) for n in WEIGHTS}
    positive = {n: v.abs() for n, v in double.items()}
    leaves = {n: v.clone().requires_grad_(n in WEIGHTS) for n, v in positive.items()}
    flow = forward(leaves, torch.ones(1, 4, dtype=torch.float64), training=False)[0].sum()
    grads = torch.autograd.grad(flow, [leaves[n] for n in WEIGHTS])
    return {n: positive[n] * g for n, g in zip(WEIGHTS, grads, strict=True)}


def mask_of(pruner: str, model: Model, x: Any, y: Any, ranks: Model, keep: int, first: bool) -> Model:
    """Which weights are kept: a ranking over both layers; after the first round 0 is cut for good."""
    kept = {n: torch.ones_like(model[n], dtype=torch.bool) if first else model[n] != 0 for n in WEIGHTS}
    start = sum(int(m.sum()) for m in kept.values())
    iterations = 100 if pruner == "synflow" else 1
    for step in range(1, iterations + 1):
        if start <= keep:
            break
        goal = max(keep, round(start * (keep / start) ** (step / iterations)))
        cut = {n: v * kept[n] if n in WEIGHTS else v for n, v in model.items()}
        found = scores(pruner, cut, x, y, ranks)
        ranking = sorted(
            (-float(found[n].flatten()[i]), which, i, n)
            for which, n in enumerate(WEIGHTS)
            for i in range(found[n].numel())
            if kept[n].flatten()[i]
        )
        kept = {n: torch.zeros_like(m) for n, m in kept.items()}
        for _, _, i, n in ranking[:goal]:
            kept[n].view(-1)[i] = True
    return kept


def train(model: Model, mask: Model, x: Any, y: Any, optimiser: str, lr: float, steps: int) -> Model:
    """Algorithm 2 after its mask; Adam as its paper has it."""
    model = {n: v * mask[n] if n in WEIGHTS else v for n, v in model.items()}
    moments = {n: (torch.zeros_like(v), torch.zeros_like(v)) for n, v in model.items() if n not in BUFFERS}
    for step in range(1, steps + 1):
        grads, buffers = gradients(model, x, y, training=True)
        model = model | buffers
        for name, g in grads.items():
            if name in WEIGHTS:
                g = g * mask[name]
            if optimiser == "sgd":
                model[name] = model[name] - lr / steps * g
                continue
            m, v = (0.9 * moments[name][0] + 0.1 * g, 0.999 * moments[name][1] + 0.001 * g * g)
            moments[name] = (m, v)
            unbiased = m / (1 - 0.9**step), v / (1 - 0.999**step)
            model[name] = model[name] - lr * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
    return model


def distance(a: Model, b: Model) -> float:
    return math.sqrt(sum(float(((a[n] - b[n]) ** 2).sum()) for n in a if n not in BUFFERS))


def algorithm_1(config: dict[str, Any], start: Model, data: Any, parts: Any, ranks: Model):
    """Yields, each round: the model, the masks by client, who stood in for whom."""
    rule, local = config["arms"][0], config["local"]
    weights = [len(p) if config["aggregation"]["weights"] == "samples" else 1 for p in parts]
    keep = round(0.25 * 42)
    similarity: dict[tuple[int, int], float] = {}
    model = start
    for t in range(config["rounds"]):
        arrived, masks = {}, {}
        for client, part in enumerate(parts):
            if rule != "perfect" and DOWN[t][client] == "0":
                continue
            x, y = data.train_x[part], data.train_y[part]
            masks[client] = mask_of(config["pruning"]["pruner"], model, x, y, ranks, keep, first=t == 0)
            if len(part) == 3:  # a batch of 6 holds each of the three samples twice
                x, y = torch.cat([x, x]), torch.cat([y, y])
            trained = train(model, masks[client], x, y, local["optimiser"], local["lr"], local["steps"])
            if rule == "perfect" or UP[t][client] == "1":
                arrived[client] = trained
        for u in arrived:
            for v in arrived:
                similarity[u, v] = -distance(arrived[u], arrived[v])
        share = {client: float(weights[client]) for client in arrived}
        stand_ins = {}
        for j in set(range(3)) - set(arrived):
            if rule != "safari" or not arrived:
                continue
            known = {i: similarity[i, j] for i in arrived if (i, j) in similarity}
            friends = [max(known, key=lambda i: known[i])] if known else sorted(arrived)
            stand_ins[str(j)] = friends
            for i in friends:
                share[i] += weights[j] / len(friends)
        if arrived:
            total = sum(share.values())
            model = {n: sum(share[i] / total * arrived[i][n] for i in arrived) for n in model}
        yield model, masks, stand_ins


@pytest.fixture(params=sorted(ENGINES))
def config(tmp_path, monkeypatch, request) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PLUGINS)
    return {
        "rounds": len(UP),
        "clients": 3,
        "data": {"name": "mine.py:data"},
        "partition": {"name": "mine.py:parts"},
        "model": {"name": "mine.py:net"},
        "pruning": {"sparsity": 0.75, "batch": 100},
        "local": {"steps": 3, "batch": 6, "lr": 0.05, "optimiser": "adam"},
        "uplink": {"name": "trace", "file": write_trace(tmp_path / "up.csv", UP)},
        "downlink": {"name": "trace", "file": write_trace(tmp_path / "down.csv", DOWN)},
        "aggregation": {"weights": "uniform"},
        "engine": {"name": request.param, "device": "cpu"},
    }


def assert_same(config: dict[str, Any]) -> None:
    world = world_of(config)
    layout = world.layout
    start = {n: v.clone() for n, v in layout.split(world.start).items()}
    assert sorted(start) == sorted([*WEIGHTS, *BUFFERS, "0.weight", "0.bias", "1.bias", "3.bias"])
    # Rand is a rank drawn once a run, so one draw tells it: the mask of the first round.
    ranks = {n: torch.zeros(start[n].shape) for n in WEIGHTS}
    if config["pruning"]["pruner"] == "rand":
        first = next(play(config))[1].model
        ranks = {n: (layout.split(first)[n] != 0).float() for n in WEIGHTS}
    parts = [part.tolist() for part in world.parts]
    expected = algorithm_1(config, start, world.data, parts, ranks)
    for t, ((_, after, record), (model, masks, stand_ins)) in enumerate(
        zip(play(config), expected, strict=True)
    ):
        found = layout.split(after.model)
        for name, value in model.items():
            if name in WEIGHTS:
                assert torch.equal(found[name] == 0, value == 0), f"round {t}: another support in {name}"
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=f"round {t}: {name}")
        assert record["trained"] == sorted(masks)
        assert record["stand_ins"] == stand_ins
        kept = [sum(int(m.sum()) for m in masks[client].values()) for client in record["arrived"]]
        assert record["density"] == (pytest.approx(sum(kept) / len(kept) / 42) if kept else None)


@pytest.mark.parametrize("pruner", ["rand", "mag", "snip", "grasp", "synflow"])
@pytest.mark.parametrize("rule", ["perfect", "drop", "safari"])
def test_every_pruner_under_every_rule(config, pruner, rule):
    config["arms"] = [rule]
    config["pruning"]["pruner"] = pruner
    assert_same(config)


@pytest.mark.parametrize("rule", ["perfect", "drop", "safari"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_weights_by_samples_and_both_optimisers(config, rule, optimiser):
    config["arms"] = [rule]
    config["pruning"]["pruner"] = "snip"
    config["aggregation"]["weights"] = "samples"
    config["local"] |= {"optimiser": optimiser, "lr": 0.3 if optimiser == "sgd" else 0.02}
    assert_same(config)


def test_the_pattern_is_not_an_easy_one(config):
    config["arms"], config["pruning"]["pruner"] = ["safari"], "mag"
    stand_ins = [record["stand_ins"] for _, _, record in play(config)]
    assert stand_ins[0] == {"2": [0, 1]}, "a pair that was never seen: all arrivals"
    assert stand_ins[1] == {}, "nobody arrived"
    assert stand_ins[2] == {"0": [1]}
    assert len(stand_ins[3]["2"]) == 1
    assert stand_ins[4] == {}, "2 answered in vain: it had not heard"
    chosen = {(missing, *friends) for round in stand_ins[6:] for missing, friends in round.items()}
    assert len(chosen) == 3
    assert all(len(choice) == 2 for choice in chosen)
