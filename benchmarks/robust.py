"""Hostile clients against the gate and the robust rules: accuracy, and the cost when nobody is hostile.

    python benchmarks/robust.py --out results/robust

Digits, ten clients in two groups of labels, the paper's links, an MLP with 80% of its weights cut (MAG). 0, 1, 2 or
3 of the ten clients, drawn by the seed, are hostile and send, whenever they arrive:

giant    1e19 for every weight that they keep
nan      NaN
sign     their update with its sign flipped
label    a model trained on labels 9 - y
stale    the first model that they ever sent, again and again

Accuracy is the mean of the last ten rounds. The cost of the gate is the CPU time of a round with it over that of the
same round without it, for the demo's CNN and this MLP, with nobody hostile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safari.aggregation import Outcome, Server
from safari.config import Config, parse
from safari.data import Data
from safari.engine import World, assemble, engine_of, load_data
from safari.engine.state import initial
from safari.federation import Federation, State
from safari.seeds import generator
from safari.training import evaluate
from safari.version import __version__

ATTACKS = ("giant", "nan", "sign", "label", "stale")
# name -> rule and gate
CLIP = {"name": "norm", "factor": 1.5, "action": "clip", "floor": 0.0}
DEFENCES: dict[str, tuple[str, Any]] = {
    "drop, gate off": ("drop", "off"),
    "drop, gate on": ("drop", "norm"),
    "drop, clip at 1.5": ("drop", CLIP),
    "safari+, gate off": ("safari+", "off"),
    "safari+, gate on": ("safari+", "norm"),
    "trimmed mean": ("trimmed-mean", "norm"),
    "geometric median": ("geometric-median", "norm"),
}
CLIENTS, LAST = 10, 10


@dataclass(frozen=True)
class Attacked(Server):
    """A server some of whose clients are hostile: what they sent is replaced as it arrives."""

    attack: str = ""
    hostile: tuple[int, ...] = ()
    # The first model of each hostile client; filled as they arrive.
    first: dict[int, Tensor] = field(default_factory=dict)

    def step_stacked(
        self,
        ids: Sequence[int],
        models: Tensor,
        cohort: Sequence[int] | None = None,
        masks: Tensor | None = None,
        came: Tensor | None = None,
        **more: Any,
    ) -> tuple[Server, Outcome]:
        """The round with the hostile models in it."""
        sent = models.clone()
        kept = torch.ones_like(models, dtype=torch.bool) if masks is None else masks.expand_as(models)
        for row, client in enumerate(ids):
            if client in self.hostile:
                sent[row] = torch.where(kept[row], self._poisoned(client, models[row]), 0.0)
        return super().step_stacked(ids, sent, cohort, masks, came, **more)

    def _poisoned(self, client: int, model: Tensor) -> Tensor:
        if self.attack == "giant":
            return torch.full_like(model, 1e19)
        if self.attack == "nan":
            return torch.full_like(model, torch.nan)
        if self.attack == "sign":
            return 2 * self.model - model
        if self.attack == "stale":
            return self.first.setdefault(client, model)
        return model


def config_of(rule: str, gate: Any, model: str, rounds: int) -> Config:
    return parse(
        {
            "rounds": rounds,
            "clients": CLIENTS,
            "arms": [rule],
            "model": {"name": model},
            "aggregation": {"gate": gate},
            "wire": {"every": 0},
            "evaluation": {"every": rounds},
            "engine": {"device": "cpu", "threads": 1},
        }
    )


def hostile_of(seed: int, count: int) -> tuple[int, ...]:
    order = generator(seed, "hostile").permutation(CLIENTS)
    return tuple(sorted(int(client) for client in order[:count]))


def with_flipped_labels(world: World, clients: Sequence[int]) -> World:
    labels = world.data.train_y.clone()
    for client in clients:
        labels[torch.from_numpy(world.parts[client])] *= -1
        labels[torch.from_numpy(world.parts[client])] += world.data.classes - 1
    return replace(world, data=replace(world.data, train_y=labels))


@dataclass(frozen=True)
class UnderAttack(Federation):
    """A federation some of whose clients are hostile."""

    attack: str = ""
    hostile: tuple[int, ...] = ()
    first: dict[int, Tensor] = field(default_factory=dict)

    def server(self, state: State | None = None) -> Server:
        """The server, to which hostile clients send what they like."""
        more = {"attack": self.attack, "hostile": self.hostile, "first": self.first}
        return Attacked(**vars(super().server(state)), **more)


def under_attack(world: World, attack: str, hostile: tuple[int, ...]) -> Federation:
    return UnderAttack(**vars(world.federation()), attack=attack, hostile=hostile)


def accuracy(data: Data, defence: str, attack: str, count: int, seed: int, rounds: int) -> dict[str, float]:
    """Top-1 of the last rounds, and how many updates were refused or clipped."""
    world = assemble(config_of(*DEFENCES[defence], "mlp", rounds), seed, data)
    hostile = hostile_of(seed, count)
    if attack == "label":
        world = with_flipped_labels(world, hostile)
    fed = under_attack(world, attack, hostile)
    engine, state = engine_of(world.config)(world), initial(world, fed)
    scores, refused = [], 0
    for t in range(rounds):
        state, record, _ = engine(fed, state)
        refused += len(record["refused"])
        if t >= rounds - LAST:
            world.layout.write(world.module, state.model)
            found = evaluate(world.module, world.data.test_x, world.data.test_y, 1000)
            scores.append(found["top1"])
    return {"top1": statistics.fmean(scores), "refused": refused}


def cost(data: Data, model: str, rounds: int) -> dict[str, Any]:
    """CPU milliseconds of a round with the gate and without, nobody hostile, in turns."""
    engines, feds, states = [], [], []
    for gate in ("off", "norm"):
        world = assemble(config_of("safari+", gate, model, 10_000), 0, data)
        engines.append(engine_of(world.config)(world))
        feds.append(world.federation())
        states.append(initial(world, feds[-1]))
    seconds: list[list[float]] = [[], []]
    for t in range(rounds + 5):
        for k in (0, 1) if t % 2 else (1, 0):
            begin = time.process_time()
            states[k], *_ = engines[k](feds[k], states[k])
            if t >= 5:
                seconds[k].append(time.process_time() - begin)
    same = torch.equal(states[0].model, states[1].model)
    ratios = [on / off for off, on in zip(*seconds, strict=True)]
    off, on = (1000 * statistics.median(found) for found in seconds)
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "model": model,
        "rounds": rounds,
        "off_ms": round(off, 3),
        "on_ms": round(on, 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "models_bit_equal": same,
    }


def table(results: Sequence[Mapping[str, Any]], seeds: int, rounds: int) -> str:
    """The accuracies as Markdown: a row for each attack and number of hostile clients."""
    lines = [
        "| attack | hostile | " + " | ".join(DEFENCES) + " |",
        "|---|---:|" + "---:|" * len(DEFENCES),
    ]
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    for r in results:
        cells.setdefault((r["attack"], r["hostile"]), {}).setdefault(r["defence"], []).append(r["top1"])
    for (attack, count), row in cells.items():
        spoken = [
            f"{100 * statistics.fmean(row[d]):.1f} ± {100 * statistics.stdev(row[d]):.1f}" for d in DEFENCES
        ]
        lines.append(f"| {attack} | {count} | " + " | ".join(spoken) + " |")
    head = f"Top-1 in %, mean ± standard deviation over {seeds} seeds, {rounds} rounds."
    return "\n".join([head, "", *lines]) + "\n"


def as_json(record: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """The record and its results, a line for each attack, number of hostile clients and defence."""
    cells: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for r in results:
        cell = cells.setdefault((r["attack"], r["hostile"], r["defence"]), {"top1": [], "refused": []})
        cell["top1"].append(round(r["top1"], 5))
        cell["refused"].append(r["refused"])
    lines = [
        json.dumps({"attack": attack, "hostile": count, "defence": defence, **cell})
        for (attack, count, defence), cell in cells.items()
    ]
    head = json.dumps(record, indent=1).removesuffix("\n}")
    return head + ',\n "results": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a folder for digits.json and digits.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load_data(config_of("drop", "off", "mlp", 1))
    begin, results = time.process_time(), []
    cases = [("none", 0), *((attack, count) for attack in ATTACKS for count in (1, 2, 3))]
    for attack, count in cases:
        for defence in DEFENCES:
            for seed in range(args.seeds):
                found = accuracy(data, defence, attack, count, seed, args.rounds)
                results.append(
                    {"attack": attack, "hostile": count, "defence": defence, "seed": seed, **found}
                )
        print(f"{attack} {count}: {time.process_time() - begin:.0f} s", flush=True)
    costs = [cost(data, model, 200) for model in ("cnn", "mlp")]
    page = table(results, args.seeds, args.rounds)
    print(page)
    for entry in costs:
        print(json.dumps(entry))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {
            "safari": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "rounds": args.rounds,
            "seeds": args.seeds,
            "cpu_seconds": round(time.process_time() - begin),
            "cost": costs,
        }
        (args.out / "digits.json").write_text(as_json(record, results), encoding="utf-8")
        (args.out / "digits.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
