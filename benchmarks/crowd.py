"""A cohort of 50 out of 100,000 clients, their data on the host: start-up, memory, a round.

    python benchmarks/crowd.py --out results/engine/crowd.json

ResNet-20 on pictures of CIFAR-10's size, two of them a client, so 200,000 in all (2.3 GiB); links lose 30%.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import statistics
import time
from pathlib import Path

import torch

from safari.config import parse
from safari.data import Data
from safari.engine.assembly import assemble
from safari.engine.state import initial
from safari.engine.vectorised import Vectorised


def pictures(samples: int) -> Data:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples + 1000, 3, 32, 32, generator=draw)
    y = torch.randint(0, 10, (samples + 1000,), generator=draw)
    return Data("random", x[:samples], y[:samples], x[samples:], y[samples:], 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = pictures(2 * args.clients)
    config = parse(
        {
            "rounds": 10_000,
            "clients": args.clients,
            "cohort": args.cohort,
            "arms": ["drop"],
            "partition": {"name": "iid"},
            "model": {"name": "resnet20"},
            "pruning": {"pruner": "mag"},
            "local": {"steps": 5, "batch": 16, "augment": "crop-flip"},
            "uplink": {"name": "bernoulli", "p": 0.7},
            "wire": {"every": 0},
            "evaluation": {"every": 10_000},
            "engine": {"device": args.device, "precision": args.precision},
        }
    )
    start = time.perf_counter()
    world = assemble(config, 0, data)
    assembled = time.perf_counter() - start
    # However much room the device has.
    world = dataclasses.replace(world, data=data)
    start = time.perf_counter()
    engine = Vectorised(world)
    fed = world.federation()
    state = initial(world, fed)
    prepared = time.perf_counter() - start
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        state, _, _ = engine(fed, state)
        seconds.append(time.perf_counter() - start)
    # Each number of arrivals is recorded when it first comes: the later half has seen most of them.
    later = seconds[len(seconds) // 2 :]
    low, middle, high = statistics.quantiles(later, n=4)
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "clients": args.clients,
        "cohort": args.cohort,
        "precision": args.precision,
        "assemble": assembled,
        "prepare": prepared,
        "first_round": seconds[0],
        "round": {"median": middle, "q1": low, "q3": high, "n": len(later)},
        "all_rounds": sum(seconds),
        "data_bytes": data.train_x.nbytes,
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
        "note": engine.note,
    }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
