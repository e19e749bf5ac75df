"""The CPU's part of `benchmarks/engine.py --cpu`: contestants in processes of their own, in turns.

A block of work counts only when the rest of the machine was idle meanwhile (Linux says so in /proc/stat):
threads that wait for each other after every kernel lose much more than a core's share when somebody else
needs it, and that would flatter whoever waits less. CPU seconds (with `--threads 1`, so that no thread spins)
are taken from all blocks.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

TICKS = os.sysconf("SC_CLK_TCK")
# Of one core; the kernel counts in hundredths of a second.
IDLE = 0.15

Work = Callable[[int], object]


def demo_round(name: str, precision: str) -> Work:
    """A round of each arm of `safari run`, evaluation and record included."""
    from safari.config import parse
    from safari.engine import assemble, engine_of, load_data, rule_of, side_by_side
    from safari.engine.state import initial

    config = parse({"engine": {"name": name, "device": "cpu", "precision": precision}})
    world = assemble(config, 0, load_data(config))
    engine = engine_of(config)(world)
    feds = [world.federation(rule_of(arm.rule)) for arm in config.arms]
    states = [initial(world, fed) for fed in feds]

    def work(t: int) -> None:
        states[:] = [state for state, _, _ in side_by_side(engine, list(zip(feds, states, strict=True)))]

    return work


def resnet_round(name: str, precision: str) -> Work:
    """The training part of a round, 10 clients of ResNet-20 with 64 pictures a step, two steps."""
    from engine import random_pictures, sequential_round, world_of
    from safari.engine.reference import train
    from safari.engine.vectorised import Vectorised

    local = {"batch": 64, "augment": "crop-flip", "steps": 2}
    tables = {"pruning": {"pruner": "mag"}, "engine": {"device": "cpu", "precision": precision}}
    world = world_of(10, random_pictures(5000, 10), "cpu", local=local, **tables)
    x, group = world.start, list(range(10))
    mask = world.mask(x, 0, 0)
    if name == "plain":
        return lambda t: sequential_round(world, x, t)
    if name == "reference":
        return lambda t: [train(world, x, mask, client, t) for client in group]
    engine = Vectorised(world)
    return lambda t: list(engine._in_groups(group, lambda part: engine._train(x, mask.unsqueeze(0), part, t)))


SETTINGS: dict[str, tuple[Callable[[str, str], Work], int, list[tuple[str, str]]]] = {
    # name -> (what to do, how often in a block, who does it; the first is what the others are compared with)
    "demo": (demo_round, 4, [("reference", "float32"), ("vectorised", "float32")]),
    "resnet20": (
        resnet_round,
        1,
        [
            ("plain", "float32"),
            ("reference", "float32"),
            ("vectorised", "float32"),
            ("vectorised", "bfloat16"),
        ],
    ),
}


def contestant(link: Connection, setting: str, name: str, precision: str, threads: int) -> None:
    """A process: builds its work, then does a block whenever it is told to."""
    torch.set_num_threads(threads)
    make, often, _ = SETTINGS[setting]
    work = make(name, precision)
    work(0)
    link.send("ready")
    t = 1
    while link.recv():
        start, used = time.perf_counter(), time.process_time()
        for _ in range(often):
            work(t)
            t += 1
        link.send(((time.perf_counter() - start) / often, time.process_time() - used, often))


def measure(setting: str, threads: int, blocks: int, patience: float) -> list[dict[str, Any]]:
    """Blocks in turns, until each contestant has `blocks` undisturbed ones; when patience (seconds) ends
    before that, `blocks` in all."""
    rows = [(name, precision) for name, precision in SETTINGS[setting][2]]
    context, links, processes = mp.get_context("spawn"), [], []
    for name, precision in rows:
        ours, theirs = context.Pipe()
        process = context.Process(target=contestant, args=(theirs, setting, name, precision, threads))
        process.start()
        ours.recv()
        links.append(ours)
        processes.append(process)
    good: list[list[float]] = [[] for _ in rows]
    worked: list[list[float]] = [[] for _ in rows]
    disturbed = [0] * len(rows)
    end = time.monotonic() + patience
    while min(map(len, good)) < blocks and (time.monotonic() < end or len(worked[0]) < blocks):
        for i, link in enumerate(links):
            _wait_for_calm(end)
            busy, start = _busy(), time.perf_counter()
            link.send(True)
            seconds, used, often = link.recv()
            others = (_busy() - busy - used) / (time.perf_counter() - start)
            worked[i].append(used / often)
            if others < IDLE:
                good[i].append(seconds)
            else:
                disturbed[i] += 1
    for link, process in zip(links, processes, strict=True):
        link.send(False)
        process.join()
    return [
        {"setting": setting, "engine": name, "precision": precision, "disturbed": disturbed[i]}
        | summary(good[i], good[0])
        | {
            "cpu_seconds": statistics.median(worked[i]),
            "cpu_ratio": statistics.median(worked[0]) / statistics.median(worked[i]),
        }
        for i, (name, precision) in enumerate(rows)
    ]


def summary(seconds: list[float], base: list[float]) -> dict[str, Any]:
    """Median and quartiles of a block's seconds, and the ratio to the first contestant's median."""
    if len(seconds) < 2 or len(base) < 2:
        return {"n": len(seconds), "seconds": seconds, "ratio": None}
    low, middle, high = statistics.quantiles(seconds, n=4)
    ratio = statistics.median(base) / middle
    return {"n": len(seconds), "seconds": {"median": middle, "q1": low, "q3": high}, "ratio": ratio}


def benchmark(settings: list[str], threads: int, blocks: int, patience: float) -> dict[str, Any]:
    """All settings; prints a line a contestant."""
    result: dict[str, Any] = {
        "cpu": _cpu(),
        "bfloat16": sorted(flag for flag in ("avx512_bf16", "amx_bf16") if flag in _flags()),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [],
    }
    for setting in settings:
        for row in measure(setting, threads, blocks, patience):
            result["rows"].append(row)
            print(f"{setting:8} {row['engine']:10} {row['precision']:8} {_line(row)}", flush=True)
    return result


def _line(row: dict[str, Any]) -> str:
    cpu = f"{1e3 * row['cpu_seconds']:.1f} ms of CPU time, {row['cpu_ratio']:.2f}x"
    if row["ratio"] is None:
        return f"{row['n']} undisturbed blocks, {row['disturbed']} disturbed: too few to tell; {cpu}"
    low, middle, high = (1e3 * row["seconds"][key] for key in ("q1", "median", "q3"))
    return f"{middle:7.1f} ms [{low:.1f}, {high:.1f}], n {row['n']}, {row['ratio']:.2f}x; {cpu}"


def _wait_for_calm(end: float) -> None:
    while time.monotonic() < end:
        busy = _busy()
        time.sleep(0.2)
        if _busy() - busy < 0.2 * IDLE:
            return


def _busy() -> float:
    """Seconds that all cores together have worked since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / TICKS


def _flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores of {name}"
