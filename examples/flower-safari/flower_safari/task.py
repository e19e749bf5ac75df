"""Data, model, training: what would be yours. Nothing in here knows of masks, frames or losses."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safari.config import override, parse
from safari.engine import World, assemble, load_data
from safari.presets import preset
from safari.toml import parse_setting
from safari.training import evaluate


def config_of(run_config: dict) -> dict:
    """A Flower run config as tables of our own: the same experiment for `safari run`."""
    data = {"name": run_config["data"]}
    if run_config["data-root"]:
        data["root"] = run_config["data-root"]
    policy = run_config["policy"]
    table = {
        "name": "flower-safari",
        "seed": run_config["seed"],
        "rounds": run_config["num-server-rounds"],
        "clients": run_config["clients"],
        "data": data,
        "model": {"name": run_config["model"]},
        "partition": {"name": "groups", "groups": 2},
        "pruning": {"pruner": run_config["pruner"], "sparsity": run_config["sparsity"]},
        "policy": {"name": policy, **({} if policy == "static" else {"interval": run_config["interval"]})},
        "client": {"name": run_config["client"]},
        "aggregation": {"steps": [run_config["step"]] if run_config["step"] else []},
        "local": {"steps": run_config["local-steps"], "batch": run_config["batch"], "lr": run_config["lr"]},
        "uplink": {"name": "bernoulli", "p": run_config["success"]},
        "downlink": {"name": "perfect"},
        "wire": {"values": run_config["values"], "every": 1},
        "engine": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 1},
    }
    # Settings that belong together; which rule is up to the run config.
    recipe = map(parse_setting, preset(run_config["preset"])) if run_config["preset"] else ()
    return override(table, [(name, value) for name, value in recipe if name != "arms"])


def world_of(run_config: dict) -> World:
    """The experiment's data, divided among the clients, and its model; read once a process."""
    return _world(tuple(sorted(run_config.items())))


@lru_cache(maxsize=1)
def _world(items: tuple) -> World:
    torch.set_num_threads(1)
    config = parse({**config_of(dict(items)), "arms": ["drop"]})
    return assemble(config, config.seed, load_data(config))


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float) -> float:
    """An ordinary loop; returns the mean loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def test(model: nn.Module, world: World) -> dict[str, float]:
    """Loss and accuracy on the test set."""
    return evaluate(model, world.data.test_x, world.data.test_y, batch=1000)
