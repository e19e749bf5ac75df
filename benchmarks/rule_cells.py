"""Rules for missing clients in cells of clients x links on the embedded digits, all rules of a cell side by side.

    python benchmarks/rule_cells.py FILE --seeds 300-309      # a line for each cell, seed and rule
    python benchmarks/rule_cells.py FILE --table              # points behind the perfect network, paired intervals

A dense MLP (64-48-10), ten clients, 80 rounds of 5 steps on batches of 32; clients are trained with stacked matrices,
which takes a quarter of a second for a run. Partitions, links, draws, rules and the server are the package's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from safari.aggregation import Server
from safari.config import parse
from safari.engine.assembly import assemble
from safari.engine.parts import load_data
from safari.engine.world import World
from safari.seeds import generator

ROUNDS, CLIENTS, HIDDEN = 80, 10, 48
SIZES = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
BETA, SECOND, EPS, CLIP = 0.8, 0.999, 1e-5, 5.0
GROUPS, SKEWED = {"name": "groups", "groups": 2}, {"name": "dirichlet", "alpha": 0.1}
P = [1, 0.3, 0.3, 0.3, 0.3]
LINKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "even": (GROUPS, {"name": "bernoulli", "p": P}),
    "uneven": (GROUPS, {"name": "bernoulli", "p": [1, 0.9, 0.9, 0.9, 0.9, 1, 0.1, 0.1, 0.1, 0.1]}),
    "bursts": (SKEWED, {"name": "gilbert-elliott", "p": 0.3, "burst": 8.0}),
    "sine": (GROUPS, {"name": "sine", "p": 0.6, "depth": 0.5, "period": 40}),
    "stairs": (GROUPS, {"name": "staircase", "p": 0.6, "levels": [1.0, 0.2], "every": 20}),
    "never": (GROUPS, {"name": "bernoulli", "p": [1, *[0.3] * 8, 0]}),
    "iid": ({"name": "iid"}, {"name": "bernoulli", "p": P}),
}
# Strength of the calibrated loss, learning rate.
ALGORITHMS = {"plain": (0.0, 0.004), "calibrated": (0.5, 0.004), "mime": (1.0, 0.03)}
OWN = ("sine", "stairs", "never", "iid")
RIVALS = ["perfect", "drop", "safari", "safari+", "mifa", "fedau", "blue"]


def gradient(models: Tensor, x: Tensor, y: Tensor, prior: Tensor) -> Tensor:
    """The gradient of each row's mean loss on its own batch; `prior` is added to its logits."""
    w1, b1, w2, b2 = parts(models)
    inner = torch.baddbmm(b1[:, None], x, w1)
    hidden = inner.relu()
    wrong = (torch.softmax(torch.baddbmm(b2[:, None], hidden, w2) + prior[:, None], -1) - y) / x.shape[1]
    back = (wrong @ w2.transpose(1, 2)) * (inner > 0)
    found = [x.transpose(1, 2) @ back, back.sum(1), hidden.transpose(1, 2) @ wrong, wrong.sum(1)]
    return torch.cat([part.flatten(1) for part in found], 1)


def parts(models: Tensor) -> list[Tensor]:
    pieces = models.split([math.prod(size) for size in SIZES], dim=1)
    return [piece.view(len(models), *size) for piece, size in zip(pieces, SIZES, strict=True)]


def accuracy(models: Tensor, x: Tensor, y: Tensor) -> list[float]:
    w1, b1, w2, b2 = parts(models)
    hidden = torch.baddbmm(b1[:, None], x.expand(len(models), *x.shape), w1).relu()
    found = torch.baddbmm(b2[:, None], hidden, w2).argmax(-1) == y
    return [float(share) for share in found.double().mean(1)]


def world_of(link: str, seed: int) -> World:
    partition, uplink = LINKS[link]
    config = parse({
        "rounds": ROUNDS, "clients": CLIENTS, "arms": ["drop"], "partition": partition, "uplink": uplink,
        "data": {"name": "digits"}, "model": {"name": "mlp"}, "local": {"steps": 5, "batch": 32},
    })  # fmt: skip
    return assemble(config, seed, load_data(config))


def play(client: str, link: str, seed: int, rules: list[str]) -> list[dict[str, Any]]:
    """One cell and seed: accuracy of the newest and the averaged model, a mean over the last 20 rounds; and the share
    of named stand-ins that hold the missing client's labels."""
    world, (strength, rate) = world_of(link, seed), ALGORITHMS[client]
    train_x, train_y = world.data.train_x.flatten(1), world.data.train_y
    test_x, test_y = world.data.test_x.flatten(1), world.data.test_y
    counts = torch.as_tensor(world.label_counts, dtype=torch.float32)
    prior = strength * (counts / counts.sum(1, keepdim=True) + 0.001).log()
    group = (counts > 0).float() @ (counts > 0).float().T > 2.5
    draw = torch.Generator().manual_seed(seed)
    widths = ((64 * HIDDEN, 64), (HIDDEN, 64), (HIDDEN * 10, HIDDEN), (10, HIDDEN))
    start = torch.cat([(2 * torch.rand(n, generator=draw) - 1) / math.sqrt(into) for n, into in widths])
    oracle = [name == "perfect" for name in rules]
    servers = [
        Server.start(start, CLIENTS, "drop" if name == "perfect" else name, gate="off") for name in rules
    ]
    size, arms = len(start), len(rules)
    momentum, second, done = torch.zeros(arms, size), torch.zeros(arms, size), torch.zeros(arms, 1)
    average, scores = start.expand(arms, size), [([], []) for _ in rules]
    right, named = [0] * arms, [0] * arms
    link_state = world.uplink.init(world.setting("uplink"))
    for t in range(ROUNDS):
        came, link_state = world.uplink.apply(link_state, t, generator(seed, "uplink", t))
        ids = [i for i in range(CLIENTS) if came[i]]
        who = [list(range(CLIENTS)) if everybody else ids for everybody in oracle]
        arm = torch.tensor([k for k in range(arms) for _ in who[k]], dtype=torch.int64)
        row = torch.tensor([i for k in range(arms) for i in who[k]], dtype=torch.int64)
        pick = torch.from_numpy(
            np.stack([world.training_draw(i, t)[0].reshape(5, -1)[:, :32] for i in range(CLIENTS)])
        )[row]
        lr = rate * (0.05 + 0.95 * (1 + math.cos(math.pi * t / ROUNDS)) / 2 if client == "mime" else 1.0)
        x = torch.stack([server.model for server in servers])
        scale = (second / (1 - SECOND ** done.clamp(min=1))).sqrt() + EPS
        models, m, v = x[arm], torch.zeros(len(arm), size), torch.zeros(len(arm), size)
        for k in range(5 if len(arm) else 0):
            at = pick[:, k]
            g = gradient(models, train_x[at], one_hot(train_y[at], 10).float(), prior[row])
            if client == "mime":
                mixed = ((1 - BETA) * g + BETA * momentum[arm]) / scale[arm]
                models = models - lr / 5 * mixed.clamp(-CLIP, CLIP)
            else:
                m, v = m.lerp(g, 0.1), v.lerp(g * g, 0.001)
                models = models - lr * (m / (1 - 0.9 ** (k + 1))) / (
                    (v / (1 - 0.999 ** (k + 1))).sqrt() + 1e-8
                )
        for k in range(arms):
            servers[k], outcome = servers[k].step_stacked(who[k], models[arm == k], same_mask=True, lr=lr)
            for missing, others in outcome.stand_ins.items():
                named[k] += 1
                right[k] += int(group[missing, others[0]])
            if client == "mime" and who[k]:
                mixed = -(servers[k].model - x[k]) / lr * scale[k]
                mean = (mixed - BETA * momentum[k]) / (1 - BETA)
                momentum[k], done[k] = mixed, done[k] + 1
                second[k] = SECOND * second[k] + (1 - SECOND) * mean.square()
        x = torch.stack([server.model for server in servers])
        average = x.lerp(average, min(0.9, t / (t + 1)))
        if t >= ROUNDS - 20 and (t % 2 == 1 or t >= ROUNDS - 4):
            for scored, new, mean in zip(
                scores, accuracy(x, test_x, test_y), accuracy(average, test_x, test_y), strict=True
            ):
                scored[0].append(new)
                scored[1].append(mean)
    about = {"client": client, "link": link, "seed": seed}
    return [
        about
        | {"rule": rules[k], "newest": float(np.mean(scores[k][0])), "average": float(np.mean(scores[k][1]))}
        | {"right": right[k], "named": named[k]}
        for k in range(arms)
    ]


def table(rows: list[dict[str, Any]]) -> None:
    """Points behind the perfect network: means over seeds with 95% intervals of paired differences."""
    for column in ("average", "newest"):
        print(f"\n{column} model\n\n| clients, links | n | perfect | " + " | ".join(RIVALS[1:]) + " |")
        print("|---|---|---|" + "---|" * len(RIVALS[1:]))
        found: dict[tuple[str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            found[row["client"], row["link"]][row["rule"]][row["seed"]] = 100 * row[column]
        for (client, link), by in found.items():
            seeds = sorted(set.intersection(*(set(by[name]) for name in RIVALS)))
            best = np.array([by["perfect"][s] for s in seeds])
            cells = []
            for name in RIVALS[1:]:
                gap = best - np.array([by[name][s] for s in seeds])
                wide = student(len(gap) - 1) * gap.std(ddof=1) / math.sqrt(len(gap))
                cells.append(f"{gap.mean():.2f} ± {wide:.2f}")
            print(f"| {client}, {link} | {len(seeds)} | {best.mean():.1f} | " + " | ".join(cells) + " |")
    print("\n| links | " + " | ".join(RIVALS[2:]) + " |\n|---|" + "---|" * len(RIVALS[2:]))
    for link in ("even", "uneven", "sine", "stairs", "never"):
        shares = []
        for name in RIVALS[2:]:
            mine = [row for row in rows if row["link"] == link and row["rule"] == name]
            count = sum(row["named"] for row in mine)
            shares.append(f"{sum(row['right'] for row in mine) / count:.0%}" if count else "")
        print(f"| {link} | " + " | ".join(shares) + " |")


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution (Cornish-Fisher; within 0.2% from 4 degrees of freedom on)."""
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def main() -> None:
    reads = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reads.add_argument("file", type=Path)
    reads.add_argument("--seeds", default="300-309")
    reads.add_argument("--table", action="store_true")
    given = reads.parse_args()
    rows = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    if given.table:
        return table(rows)
    done = {(row["client"], row["link"], row["seed"], row["rule"]) for row in rows}
    first, _, last = given.seeds.partition("-")
    cells = [(c, link) for link in LINKS for c in ALGORITHMS if link not in OWN or c != "calibrated"]
    with given.file.open("a") as out:
        for client, link in cells:
            for seed in range(int(first), int(last or first) + 1):
                rules = [name for name in RIVALS if (client, link, seed, name) not in done]
                for row in play(client, link, seed, rules) if rules else []:
                    out.write(json.dumps(row) + "\n")
                out.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
