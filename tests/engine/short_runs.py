"""Short runs of every part whose records and models were kept, each stopped and resumed half way.

As `recorded_runs`: a later version must compute them bit for bit. `python tests/engine/short_runs.py` writes
`recorded/short.json` anew, `--add` adds this machine's digests. What is compared are values alone, so that tensors of
a checkpoint may change their names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.kit import world_of
from engine.recorded_runs import machine
from safari.engine import engine_of
from safari.engine.state import from_saved, initial, to_saved
from safari.runs import Trial

RECORDED = Path(__file__).parent / "recorded" / "short.json"
ROUNDS, STOP = 4, 2
FIELDS = (
    "round", "loss", "top1", "top5", "average", "train_loss", "trained", "arrived", "missing", "refused",
    "stand_ins", "lost", "parts", "density", "agreement", "support", "churn", "layers", "layer_churn", "mask_age",
    "clients", "bytes", "modes", "shares", "levels", "diagnosis",
)  # fmt: skip

BASE: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients": 5,
    "arms": ["safari"],
    "model": {"name": "mlp", "hidden": [12]},
    "local": {"steps": 2, "batch": 8, "optimiser": "sgd", "lr": 0.1},
    "uplink": {"name": "bernoulli", "p": 0.6},
    "downlink": {"name": "bernoulli", "p": 0.9},
    "wire": {"every": 2},
    "engine": {"name": "vectorised", "device": "cpu", "threads": 1},
}
LOSSY = ("bf16", "fp16", "int8", "qsgd", "step", "sign", "top-k", "unbiased", "threshold")
CLIENTS = (
    "calibrated", "masked-loss", "fedprox", "scaffold", "mime", "feddyn", "fednova", "dane", "bvr-l-sgd", "fedpbc",
    "fedawe",
)  # fmt: skip
RULES = (
    "perfect", "attainable", "drop", "safari+", "stale", "fdms", "mifa", "fedvarp", "cluster-fedvarp", "fedau",
    "trimmed-mean", "geometric-median", "majority-vote",
)  # fmt: skip
STEPS = ("lr", "fedavgm", "fedadagrad", "fedyogi", "fedadam", "ghbm")
PACKETS: dict[str, Any] = {
    "packets": {"name": "lossy", "loss": 0.3, "size": 300},
    "model": {"name": "mlp", "hidden": [40]},
}
# What both engines do by code of their own.
BOTH: dict[str, dict[str, Any]] = {
    "values-step": {"wire": {"every": 2, "values": "step"}},
    "values-int8": {"wire": {"every": 2, "values": "int8"}, "pruning": {"pruner": "snip"}},
    "client-scaffold": {"client": {"name": "scaffold"}},
    "policy-feddst": {"policy": {"name": "feddst", "interval": 1}},
    "packets": {**PACKETS, "arms": ["safari+"]},
    "mixed": {
        "cohort": 3,
        "arms": ["safari+"],
        "client": {"name": "mime"},
        "policy": {"name": "rigl", "interval": 1},
        "wire": {"every": 1, "values": "step"},
        "aggregation": {"average": 0.5, "weights": "samples"},
    },
}


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each by its name: one thing apart from a plain run, in the fast engine, and some in the other one too."""
    for name, more in BOTH.items():
        for engine in ("reference", "vectorised"):
            yield f"{name}-{engine}", {**more, "engine": {**BASE["engine"], "name": engine}}
    for values in LOSSY:
        yield f"values-{values}-mag", {"wire": {"every": 2, "values": values}}
    yield "adapt", {"wire": {"every": 2, "values": "qsgd", "adapt": "loss"}}
    yield "no-feedback", {"wire": {"every": 2, "values": "sign", "feedback": False}}
    for rule in RULES:
        yield f"rule-{rule}", {"arms": [rule]}
    yield "perfect-packets", {**PACKETS, "arms": ["perfect"]}
    yield "packets-step", {**PACKETS, "wire": {"every": 2, "values": "step"}}
    yield "packets-cohort", {**PACKETS, "cohort": 3, "policy": {"name": "set", "interval": 1}}
    for client in CLIENTS:
        yield f"client-{client}-drop", {"client": {"name": client}, "arms": ["drop"]}
    yield "mime-average", {"client": {"name": "mime"}, "aggregation": {"average": 0.5, "steps": ["fedavgm"]}}
    for policy in ("set", "rigl", "sparse-momentum", "fedrts", "early-bird"):
        options = {} if policy == "early-bird" else {"interval": 1}
        yield f"policy-{policy}", {"policy": {"name": policy, **options}}
    for sampling in ("uniform", "multinomial", "clustered-size", "clustered-similarity"):
        yield f"sampling-{sampling}", {"cohort": 3, "sampling": {"name": sampling}, "arms": ["drop"]}
    for step in STEPS:
        yield f"step-{step}", {"aggregation": {"steps": [step], "average": 0.5}}
    yield "gate-clip", {"aggregation": {"gate": {"name": "norm", "factor": 1.0, "action": "clip"}}}
    yield (
        "gate-refuse",
        {"aggregation": {"gate": {"name": "norm", "factor": 1.01}}, "client": {"name": "scaffold"}},
    )
    yield "held-out", {"evaluation": {"clients": 0.2}, "diagnostics": {"every": 2}}
    yield (
        "epochs",
        {"local": {**BASE["local"], "epochs": 0.2}, "partition": {"name": "dirichlet", "alpha": 0.3}},
    )
    yield (
        "bursts",
        {"uplink": {"name": "gilbert-elliott", "p": 0.5}, "downlink": {"name": "staircase", "p": 0.9}},
    )
    yield "printed", {"pruning": {"masks_gradient": False}}
    yield "nothing-arrives", {"uplink": {"name": "lost"}, "wire": {"every": 1, "values": "step"}}


def play(config: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """The records of a run, and its models: the newest, and the average where one is kept."""
    world = world_of({**BASE, **config})
    fed = world.federation()
    run_round, state = engine_of(world.config)(world), initial(world, fed)
    trial = Trial(world.config.arms[0].name, 0, Path())
    lines = []
    for t in range(ROUNDS):
        if t == STOP:
            state = from_saved(to_saved(state, world, trial), world, fed, trial)
        state, record, _ = run_round(fed, state)
        lines.append(record.to_json())
    return lines, [state.model, *(() if state.average is None else [state.average])]


# Of a federation on Flower, by how models travel: more of the config, options of the strategy.
FEDERATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flower-frames": ({}, {}),
    "flower-dense": ({"pruning": {"sparsity": 0.0}}, {"download": "dense", "upload": "dense"}),
    "flower-step": ({"wire": {"every": 1, "values": "step"}}, {"download": "step"}),
    "flower-mime": ({"client": {"name": "mime"}, "policy": {"name": "feddst", "interval": 1}}, {}),
    "flower-clustered": ({"cohort": 3, "sampling": {"name": "clustered-similarity"}}, {}),
    "flower-datagrams": ({}, {"datagrams": {"host": "127.0.0.1", "listen": "127.0.0.1", "insecure": True}}),
}


def federate(name: str, folder: Path) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """What `play` gives, of a federation."""
    from flower.twin import grid_of, on_flower, our_loop, own_loop
    from safari.flower import Datagrams

    more, options = FEDERATIONS[name]
    world = world_of({**BASE, "wire": {"every": 1}, "downlink": {"name": "perfect"}, **more})
    app = (our_loop if "client" in more else own_loop)(world)
    grid, resumed = grid_of(world, app), True
    if "datagrams" in options:
        options = {"datagrams": Datagrams(**options["datagrams"])}
        resumed = False
    # Masks that move do so by the length of the run, which must then stay.
    resumed &= "policy" not in more
    for rounds in (STOP, ROUNDS) if resumed else (ROUNDS,):
        strategy, lines, _ = on_flower(world, app, folder, rounds, grid, **options)
    return [line.to_json() for line in lines], [strategy.server.model]


def digest(lines: list[dict[str, Any]], models: list[Tensor]) -> str:
    """A hash of the records' fields, floats as JSON has them, and of the models' bytes."""
    named = [{name: line.get(name) for name in FIELDS} for line in lines]
    found = hashlib.sha256(json.dumps(named, sort_keys=True).encode())
    for model in models:
        found.update(model.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Write the record, or add this machine's digests to it."""
    parser = argparse.ArgumentParser(description="Keep the records of short runs.")
    parser.add_argument("--add", action="store_true", help="keep the digests of other machines")
    known = json.loads(RECORDED.read_text()) if parser.parse_args().add else {}
    table: dict[str, Any] = {}
    runs = {name: play(config) for name, config in configs()}
    with tempfile.TemporaryDirectory() as folder:
        runs |= {name: federate(name, Path(folder) / name) for name in FEDERATIONS}
    for name, (lines, models) in runs.items():
        kept = known.get(name, {"losses": [line["train_loss"] for line in lines], "digests": {}})
        table[name] = {**kept, "digests": {**kept["digests"], machine(): digest(lines, models)}}
    RECORDED.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
