"""How fast is a round of text? All clients of a cohort stacked, against a plain sequential PyTorch loop.

    python benchmarks/text.py --out FILE                  # on a GPU: the setting of evidence/experiments/base/text.toml
    python benchmarks/text.py --small --out FILE          # on a CPU: that of evidence/experiments/base/text-small.toml

The loop is what any researcher would write: client after client, Adam, the gradient masked. Both train the same
clients with the same number of steps, in float32 on one thread (`--threads`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from engine import timed
from safari.config import parse
from safari.engine.assembly import assemble
from safari.engine.parts import load_data
from safari.engine.state import initial
from safari.engine.vectorised import Vectorised
from safari.engine.world import World
from safari.toml import read_toml

ROOT = Path(__file__).resolve().parent.parent


def plain_round(world: World, x: torch.Tensor, t: int) -> torch.Tensor:
    """The training of a cohort, client after client."""
    local, data, model = world.config.local, world.data, world.module
    rng, total = np.random.default_rng(t), torch.zeros_like(x)
    mask = world.mask(x, 0, 0)
    masks, start = world.layout.split(mask), world.layout.split(x * mask)
    cohort = world.cohort(t)
    for client in cohort:
        model.load_state_dict({name: v.clone() for name, v in start.items()}, strict=False)
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=local.lr)
        for _ in range(local.steps):
            pick = torch.from_numpy(rng.choice(world.parts[client], local.batch)).to(x.device)
            optimizer.zero_grad()
            outputs = model(data.train_x[pick])
            F.cross_entropy(outputs.flatten(0, 1), data.train_y[pick].flatten()).backward()
            for name, p in model.named_parameters():
                p.grad.mul_(masks[name])
            optimizer.step()
        total += world.layout.read(model)
    return total / len(cohort)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="the setting that fits a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--cohort", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    name = "text-small" if asked.small else "text"
    table = read_toml(ROOT / "evidence/experiments/base" / f"{name}.toml")
    engine = {"device": asked.device, "precision": asked.precision}
    base = parse(table | {"rounds": 10_000, "arms": ["perfect"], "engine": engine})
    never = dataclasses.replace(base.evaluation, every=10_000, pairs=False)
    base = dataclasses.replace(base, evaluation=never, wire=dataclasses.replace(base.wire, every=100_000))
    data = load_data(base, None)
    rows = []
    for cohort in asked.cohort:
        world = assemble(dataclasses.replace(base, cohort=cohort), 0, data)
        stacked = Vectorised(world)
        fed = world.federation()
        state = [initial(world, fed)]

        def a_round(_: int) -> None:
            state[0] = stacked(fed, state[0])[0]

        # Turn by turn, so that a busy machine is as busy for both.
        fast = timed(a_round, asked.device, 3, asked.repeats)
        slow = timed(lambda t: plain_round(world, world.start, t), asked.device, 1, asked.repeats)
        again = timed(a_round, asked.device, 1, asked.repeats)
        best = min(fast["median"], again["median"])
        rows.append({"clients": cohort, "stacked": fast, "stacked_again": again, "loop": slow,
                     "ratio": slow["median"] / best})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    made_with = {
        "setting": f"evidence/experiments/base/{name}.toml",
        "numbers": world.layout.size,
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "threads": asked.threads,
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "precision": asked.precision,
        "note": "a stacked round also draws, aggregates and records; the loop only trains",
    }
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps({"made with": made_with, "rounds": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
