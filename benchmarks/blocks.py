"""What models that arrive in part cost the server: all blocks at once against one after the other.

    python benchmarks/blocks.py --out results/blocks/cpu.json
    python benchmarks/blocks.py --device cuda

Ten clients send a model of ResNet-20's size in packets, of which 30% are lost; with one mask for all the packets of
all clients begin at the same coordinates ("shared"), with masks of their own they do not ("own"). Timed is
`Server.step_stacked`, both ways in turn on the same rounds, so that what else the machine does affects both alike.
Rules that cannot weigh all blocks at once are left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from safari.aggregation import RULES, Server
from safari.version import __version__

CLIENTS, SIZE, PARAMETERS = 10, 272_474, 270_000
LOSS, DENSITY = 0.3, 0.2


def what_came(packets: int, shared: bool, generator: torch.Generator) -> Tensor:
    """`bool[clients, size]`: the coordinates of the packets that were not lost."""
    edges = torch.linspace(0, SIZE, packets + 1).long()[1:-1].repeat(CLIENTS, 1)
    if not shared:
        half = SIZE // packets // 2
        edges += torch.randint(-half, half, edges.shape, generator=generator)
    packet = torch.searchsorted(edges.sort(1).values, torch.arange(SIZE).repeat(CLIENTS, 1), right=True)
    return (torch.rand(CLIENTS, packets, generator=generator) >= LOSS).gather(1, packet)


def measure(rule: str, packets: int, shared: bool, rounds: int, device: str) -> dict[str, object]:
    """Milliseconds a round both ways, and the ratio round by round."""
    generator = torch.Generator().manual_seed(0)
    # safari+ looks at each block while it waits for clients that were never heard.
    made = RULES[rule](wait=0) if rule == "safari+" else RULES[rule]()
    first = torch.randn(SIZE, generator=generator).to(device)
    servers = {
        "at once": Server.start(first, CLIENTS, made, parameters=PARAMETERS),
        "one by one": Server.start(first, CLIENTS, replace(made, weigh=None), parameters=PARAMETERS),
    }
    found: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds + 1):
        masks = torch.rand(1 if shared else CLIENTS, SIZE, generator=generator) < DENSITY
        masks[:, PARAMETERS:] = True
        models = (first.cpu() + 0.1 * torch.randn(CLIENTS, SIZE, generator=generator)) * masks
        models[:, PARAMETERS:] = models[:, PARAMETERS:].abs()
        came = what_came(packets, shared, generator)
        given = [t.to(device) for t in (models, masks, came)]
        for name, server in servers.items():
            wait(device)
            start = time.perf_counter()
            servers[name], _ = server.step_stacked(
                range(CLIENTS), given[0], None, given[1], given[2], same_mask=shared
            )
            wait(device)
            found[name].append((time.perf_counter() - start) * 1000)
    # The first round is not counted.
    ratios = [slow / fast for fast, slow in zip(*(times[1:] for times in found.values()), strict=True)]
    row: dict[str, object] = {
        "rule": rule,
        "packets": packets,
        "masks": "shared" if shared else "own",
        "n": rounds,
    }
    return row | {name: spread(times[1:]) for name, times in found.items()} | {"ratio": spread(ratios)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 2), "q1": round(low, 2), "q3": round(high, 2)}


def wait(device: str) -> None:
    """Until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rules", nargs="+", default=["drop", "safari", "safari+"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for rule in options.rules:
        for packets, shared in ((60, True), (160, True), (160, False)):
            row = measure(rule, packets, shared, options.rounds, options.device)
            rows.append(row)
            print(json.dumps(row), flush=True)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    versions = {"safari": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {"device": name, "threads": 1}
        options.out.write_text(
            json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
