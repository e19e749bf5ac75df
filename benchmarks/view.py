"""How fast is the page on a long run? First paint, all charts, and what a hand does with them.

python benchmarks/view.py [--rounds 5000] [--clients 200] [--out FILE]

The run is made up (`rounds` records of `clients` clients for two arms, written through the run folder's own
functions), served by `safari view` in a process of its own, and opened in headless Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from safari.config import parse
from safari.runs import RunFolder
from safari.runs.similarity import due, to_line
from safari.version import __version__

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
LAYERS = [f"layer{k // 3 + 1}.{k % 3}.conv.weight" for k in range(20)]
ARRIVES = 0.4


def make_run(folder: Path, rounds: int, clients: int) -> RunFolder:
    """Records of two arms as they might be."""
    config = parse({"name": "long", "rounds": rounds, "clients": clients, "arms": ["drop", "safari"]})
    run = RunFolder.create(folder, config)
    counts = np.where(np.arange(clients)[:, None] * 10 // clients == np.arange(10), 40, 2)
    run.write("clients.json", json.dumps({"label_counts": counts.tolist(), "samples": [60] * clients}))
    run.write("model.json", json.dumps({"numbers": 270_000, "prunable": 268_000, "layers": {}}))
    for arm in ("drop", "safari"):
        make_trial(run, arm, rounds, clients)
    return run


def make_trial(run: RunFolder, arm: str, rounds: int, clients: int) -> None:
    """One arm; all lines are written at once, because a file opened for each would take minutes."""
    rng = np.random.default_rng(arm == "safari")
    trial = run.trial(arm, 0)
    group = np.arange(clients) * 8 // clients
    lines, timings, pictures = [], [], []
    for t in range(1, rounds + 1):
        here = rng.random(clients) < ARRIVES
        arrived, missing = np.flatnonzero(here), np.flatnonzero(~here)
        stand_ins = {}
        if arm == "safari":
            for j in missing:
                near = arrived[group[arrived] == group[j]]
                stand_ins[str(j)] = [int(near[0] if len(near) else arrived[0])]
        score = 0.9 * (1 - np.exp(-t / 600)) + 0.01 * rng.standard_normal()
        lines.append(
            {
                "round": t, "loss": 2.3 - 2 * score, "top1": score, "top5": min(1.0, score + 0.1),
                "train_loss": 2.3 - 2 * score, "trained": list(range(clients)), "arrived": arrived.tolist(),
                "missing": missing.tolist(), "refused": {}, "stand_ins": stand_ins, "lost": False,
                "density": 0.2, "agreement": 1.0, "support": 0.2 + 0.3 / t, "churn": 0.3 / t,
                "layers": {name: round(0.1 + 0.04 * k + 0.1 / t, 6) for k, name in enumerate(LAYERS)},
                "layer_churn": {name: round(0.3 / t, 6) for name in LAYERS[::3]},
                "bytes": {"up": 143e3, "down": 344e3} if t % 10 == 1 else {"up": None, "down": None},
            }
        )  # fmt: skip
        timings.append(
            {"round": t, **dict.fromkeys(("mask", "train", "wire", "aggregate", "evaluate"), 0.01)}
        )
        if arm == "safari" and due(t):
            near = -np.abs(group[:, None] - group).astype(np.float32) - rng.random(
                (clients, clients), np.float32
            )
            pictures.append(to_line(t, (near + near.T) / 2))
    for path, found in ((trial.rounds, lines), (trial.timings, timings), (trial.similarity, pictures)):
        if found:
            path.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


# Runs in the page: from an action to the frame after everything it asked for was drawn.
TIMER = """
async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  await frame();
  const start = performance.now();
  (ACT)();
  await frame();
  await frame();
  return performance.now() - start;
}
"""
SLIDE = """() => {
  const slider = document.getElementById("round");
  slider.value = Number(slider.value) - 7;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}"""
HOVER = """() => {
  const stage = document.querySelector("#card-top1 .stage");
  const box = stage.getBoundingClientRect();
  const clientX = box.left + 90 + Math.random() * (box.width - 200);
  stage.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: box.top + 90 }));
}"""
ZOOM = """() => {
  const first = document.querySelector(".span input");
  first.value = 1 + Math.floor(Math.random() * 900);
  first.dispatchEvent(new Event("change"));
}"""
HIDE = "() => document.querySelector('.tile').click()"
DRESS = """() => {
  const theme = document.querySelector("#controls select");
  theme.value = theme.value === "dark" ? "light" : "dark";
  theme.dispatchEvent(new Event("change"));
}"""
ACTIONS = {
    "hover a line": (HOVER, "#card-top1"),
    "zoom the axes": (ZOOM, "#card-top1"),
    "hide or show an arm": (HIDE, "#card-top1"),
    "switch the theme": (DRESS, "#card-top1"),
    "zoom, with the strip in view": (ZOOM, "#card-arrivals"),
    "move the slider": (SLIDE, "#card-similarity"),
}


def measure(address: str, repeats: int) -> dict[str, Any]:
    """Times in milliseconds."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if browser is None:
        raise SystemExit("there is no Chromium: apt-get install chromium, or set CHROMIUM to its path")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        context = playwright.chromium.launch_persistent_context(
            folder,
            executable_path=browser,
            args=FLAGS,
            headless=True,
            viewport={"width": 1440, "height": 900},
        )
        tab = context.pages[0]
        loads = [load(tab, address) for _ in range(repeats)]
        out: dict[str, Any] = {name: spread([one[name] for one in loads]) for name in loads[0]}
        for name, (act, where) in ACTIONS.items():
            tab.locator(where).scroll_into_view_if_needed()
            tab.wait_for_timeout(500)
            out[name] = spread([tab.evaluate(TIMER.replace("ACT", act)) for _ in range(3 * repeats)])
        out["memory of the page, MB"] = tab.evaluate("performance.memory.usedJSHeapSize / 1e6")
        out["browser"] = (
            playwright.chromium.name + " " + tab.evaluate("navigator.userAgent").split("Chrome/")[1]
        )
        context.close()
    return out


def load(tab: Any, address: str) -> dict[str, float]:
    """From the address to the first paint, the first chart with its data, and the strip of all clients."""
    tab.goto("about:blank")
    start = time.perf_counter()
    tab.goto(address)
    tab.wait_for_function(
        "() => document.querySelector('#card-top1 .stage')?.ariaLabel?.includes('in round')"
    )
    chart = 1000 * (time.perf_counter() - start)
    paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    tab.locator("#card-arrivals").scroll_into_view_if_needed()
    tab.wait_for_function(
        "() => document.querySelector('#card-arrivals .stage').ariaLabel?.includes('arrived')"
    )
    return {"first paint": paint, "first chart with all rounds": chart,
            "strip of all clients": 1000 * (time.perf_counter() - start)}  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 1), "least": round(min(values), 1), "most": round(max(values), 1),
            "n": len(values)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "long", options.rounds, options.clients)
        size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
        command = [sys.executable, "-m", "safari", "view", str(run.path), "--no-browser", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                found = next(m for line in server.stderr or () if (m := re.fullmatch(r"page: (\S+)\n", line)))
                times = measure(found[1], options.repeats)
            finally:
                server.terminate()
    result = {
        "rounds": options.rounds, "clients": options.clients, "arms": 2, "run, MB": round(size / 1e6, 1),
        "milliseconds": times, "safari": __version__, "python": platform.python_version(),
        "cores": os.cpu_count(), "load": os.getloadavg()[0],
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
