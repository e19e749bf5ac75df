"""A round in Flower's simulation and in our own engine: the same work, measured in one run.

    python benchmarks/flower.py --clients 10 100 1000 --seeds 3 --out results/flower/simulation.json

Two parts. *Speed*: seconds a round (median; the first is left out, because Ray starts in it) of our
vectorised engine on one thread, of SAFARI on Flower's simulation with a worker a core, and of Flower's FedAvg
with plain dense clients.
*Accuracy*: ten clients, 30 rounds, 70 % of the uploads lost, on Flower and in our engine, same arrivals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

SPEED = {
    "arms": ["safari"],
    "partition": {"name": "iid"},
    "uplink": {"name": "perfect"},
    "downlink": {"name": "perfect"},
    "wire": {"every": 1},
    "engine": {"device": "cpu"},
    "checkpoint": {"every": 1},
}
ACCURACY = SPEED | {
    "rounds": 30,
    "clients": 10,
    "partition": {"name": "groups", "groups": 2},
    "uplink": {"name": "bernoulli", "p": 0.3},
}


@lru_cache(maxsize=1)
def world_of(text: str):
    """The experiment's data and model; read once a process."""
    import torch

    from safari.config import parse
    from safari.engine import assemble, load_data

    torch.set_num_threads(1)
    config = parse(json.loads(text))
    return assemble(config, config.seed, load_data(config))


def train(world, model, client: int, t: int) -> dict[str, float]:
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=world.config.local.lr)
    model.train()
    losses = []
    for x, y in world.training_batches(client, t):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"num-examples": len(world.parts[client]), "train_loss": float(torch.stack(losses).mean())}


def simulate(table: dict, strategy: str, place: str) -> None:
    """One Flower simulation in this process; leaves `seconds.json` there and, for safari, a run's folder."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from safari.flower import SafariStrategy, lossy, sparse
    from safari.training import evaluate

    text, folder = json.dumps(table), Path(place)
    link = table["uplink"]
    options = {name: value for name, value in link.items() if name != "name"}
    client_app = ClientApp(mods=[lossy(link["name"], uplink_options=options, seed=table["seed"])])
    server_app = ServerApp()

    def train_sparse(model, message, context):
        t = message.content["config"]["server-round"] - 1
        return train(world_of(text), model, context.node_config["partition-id"], t)

    def train_dense(message, context):
        world = world_of(text)
        model = world.fresh_module()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord(train_sparse(model, message, context))
        content = {"arrays": ArrayRecord(dict(model.state_dict())), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    if strategy == "safari":
        client_app.train()(sparse(lambda context: world_of(text).fresh_module())(train_sparse))
    else:
        client_app.train()(train_dense)

    @server_app.main()
    def main(grid, context):
        world, clients = world_of(text), table["clients"]
        model = world.fresh_module()
        ends = [time.perf_counter()]

        def test(number, arrays):
            model.load_state_dict(arrays.to_torch_state_dict())
            found = MetricRecord(evaluate(model, world.data.test_x, world.data.test_y, batch=1000))
            ends.append(time.perf_counter())
            return found

        if strategy == "safari":
            chosen = SafariStrategy(
                model, clients, table["arms"][0], config=world.config, run=folder / "run", min_nodes=clients
            )
        else:
            chosen = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
        chosen.start(
            grid, ArrayRecord(dict(model.state_dict())), num_rounds=table["rounds"], evaluate_fn=test
        )
        seconds = [b - a for a, b in itertools.pairwise(ends[1:])]
        (folder / "seconds.json").write_text(json.dumps(seconds))

    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count()},
    }
    run_simulation(server_app, client_app, table["clients"], backend_config=backend)


def apart(table: dict, strategy: str, folder: Path) -> list[float]:
    """The same in a process of its own, because Ray and Flower leave things behind; seconds of each round."""
    folder.mkdir(parents=True)
    environment = os.environ | {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.05",
        # As a module that Ray's workers can import, too.
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    code = "import json, sys, flower; flower.simulate(*map(json.loads, sys.argv[1:]))"
    arguments = [json.dumps(thing) for thing in (table, strategy, str(folder))]
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-c", code, *arguments], env=environment, stdout=log, stderr=log, check=True
        )
    return json.loads((folder / "seconds.json").read_text())


def engine(table: dict, name: str, folder: Path) -> list[float]:
    """Our own engine on the same config; seconds of each round."""
    import safari
    from safari.runs import RunFolder

    safari.run({**table, "engine": {"name": name, "device": "cpu", "threads": 1}}, folder)
    lines = RunFolder.open(folder).trials()[0].timings.read_text().splitlines()
    return [sum(s for part, s in json.loads(line).items() if part != "round") for line in lines]


def speed(clients: int, rounds: int, rule: str, place: Path) -> dict:
    table = SPEED | {"clients": clients, "rounds": rounds, "seed": 0, "arms": [rule]}
    found = {
        "vectorised engine": engine(table, "vectorised", place / f"engine-{clients}"),
        "safari on Flower": apart(table, "safari", place / f"safari-{clients}"),
        "fedavg on Flower": apart(table, "fedavg", place / f"fedavg-{clients}"),
    }
    medians = {name: statistics.median(seconds[1:]) for name, seconds in found.items()}
    ours = medians["vectorised engine"]
    ratios = {name: round(value / ours, 1) for name, value in medians.items() if name != "vectorised engine"}
    line = {"clients": clients, "seconds": found, "medians": medians, "times the engine": ratios}
    print(json.dumps({k: v for k, v in line.items() if k != "seconds"}), flush=True)
    return line


def accuracy(seed: int, place: Path) -> dict:
    """Final accuracy: the mean over the last ten rounds."""
    from safari.runs import RunFolder

    table = ACCURACY | {"seed": seed}
    folder = place / f"accuracy-{seed}"
    apart(table, "safari", folder)
    engine(table, "reference", folder / "engine")
    runs = {"flower": RunFolder.open(folder / "run"), "engine": RunFolder.open(folder / "engine")}
    records = {name: run.trials()[0].records() for name, run in runs.items()}
    arrivals = [[line["arrived"] for line in lines] for lines in records.values()]
    line = {
        "seed": seed,
        **{name: statistics.fmean(r["top1"] for r in lines[-10:]) for name, lines in records.items()},
        "same arrivals": arrivals[0] == arrivals[1],
        "same accuracies": [r["top1"] for r in records["flower"]] == [r["top1"] for r in records["engine"]],
        "lost": 1 - sum(map(len, arrivals[0])) / (10 * table["rounds"]),
    }
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=4, help="of which the first is not counted")
    parser.add_argument(
        "--rule", default="drop", help="of the speed part; safari compares every pair of clients"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the accuracy part; 0: leave it out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    about = {name: version(name) for name in ("flwr", "ray", "torch", "numpy")}
    about |= {"python": platform.python_version(), "cores": os.cpu_count(), "load before": os.getloadavg()}
    found: dict = {"about": about, "accuracy": [], "speed": []}

    def note(part: str, line: dict) -> None:
        """After each line, so that a run that is stopped leaves what it has."""
        found[part].append(line)
        about["load after"] = os.getloadavg()
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as place:
        for seed in range(arguments.seeds):
            note("accuracy", accuracy(seed, Path(place)))
        for clients in arguments.clients:
            note("speed", speed(clients, arguments.rounds, arguments.rule, Path(place)))


if __name__ == "__main__":
    main()
