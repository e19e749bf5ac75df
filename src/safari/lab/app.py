"""The lab example: ServerApp and ClientApp that train on the embedded digits, with models in datagrams.

`safari net serve` and `safari net join` run them on a local network. An app of your own differs in `world_of`
and in `batches`, or has a training loop of its own in `safari.flower.sparse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from safari.config import Config, override, parse
from safari.engine import World, assemble, load_data
from safari.flower.datagrams import Datagrams
from safari.flower.local import local_training
from safari.flower.strategy import SafariStrategy
from safari.presets import preset
from safari.pruning import Batch
from safari.training import evaluate

server, client = ServerApp(), ClientApp()


def config_of(settings: Mapping[str, Any]) -> Config:
    """A Flower run config as a config of our own: the same experiment for `safari run`.

    `preset`: settings that belong together, by name; of them all but the arms count. `values`: how numbers travel;
    empty: as the preset says.
    """
    recipe = preset(settings["preset"]) if settings.get("preset") else []
    values = [("wire.values", settings["values"])] if settings["values"] else []
    return parse(
        override(
            {
                "name": "net-lab",
                "seed": settings["seed"],
                "rounds": settings["rounds"],
                "clients": settings["clients"],
                "data": {"name": "digits"},
                "model": {"name": settings["model"]},
                "partition": {"name": "groups", "groups": 2},
                "pruning": {"pruner": "mag", "sparsity": settings["sparsity"]},
                "local": {"steps": 5, "batch": 32, "lr": 0.001},
                "uplink": {"name": "perfect"},
                "downlink": {"name": "perfect"},
                "wire": {"every": 1},
                "engine": {"device": "cpu", "threads": 1},
                "checkpoint": {"every": 1},
                "arms": [settings["rule"]],
            },
            [*((name, value) for name, value in recipe if name != "arms"), *values],
        )
    )


def world_of(settings: Mapping[str, Any]) -> World:
    """The digits, divided among the clients, and the model; read once in a process."""
    return _world(tuple(sorted(settings.items())))


@lru_cache(maxsize=1)
def _world(items: tuple[tuple[str, Any], ...]) -> World:
    torch.set_num_threads(1)
    config = config_of(dict(items))
    return assemble(config, config.seed, load_data(config))


def check(settings: Mapping[str, Any], run: Path) -> None:
    """ConfigError for invalid settings; RunError where the run in that folder was begun with others."""
    world = world_of(settings)
    module = world.fresh_module()
    strategy = SafariStrategy(module, settings["clients"], settings["rule"], config=world.config, run=run)
    strategy.check_run(settings["rounds"])


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds; the run's folder then holds what happened. If they end early, `failure.txt` in it says why."""
    settings: dict[str, Any] = {**context.run_config}
    world = world_of(settings)
    model = world.fresh_module()
    strategy = SafariStrategy(
        model,
        clients=settings["clients"],
        rule=settings["rule"],
        config=world.config,
        run=settings["run"],
        min_nodes=settings["clients"],
        wait=settings["wait"],
        give_up=None,
        datagrams=Datagrams(
            settings["host"],
            settings["port"],
            listen=settings["listen"],
            public_port=settings["public-port"],
            superlink=settings["superlink"],
            root_certificates=settings["root-certificates"],
            client_rate=settings["client-rate"],
            server_rate=settings["server-rate"],
        ),
    )

    def test(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({**evaluate(model, world.data.test_x, world.data.test_y, batch=1000)})

    strategy.start(
        grid,
        ArrayRecord(dict(model.state_dict())),
        num_rounds=settings["rounds"],
        timeout=settings["deadline"],
        evaluate_fn=test,
        average_fn=test,
    )


def fresh_module(context: Context) -> nn.Module:
    """The model that a client trains."""
    return world_of(context.run_config).fresh_module()


def batches(message: Message, context: Context) -> list[Batch]:
    """Mini-batches of this round from this client's own digits."""
    return world_of(context.run_config).training_batches(_own(context), _round(message))


@client.train()
def train(message: Message, context: Context) -> Message:
    """Local training by the algorithm that the server names."""
    world = world_of(context.run_config)
    answer = local_training(
        fresh_module,
        batches,
        lr=lambda message, context: world.lr(_round(message)),
        optimiser=world.config.local.optimiser,
        label_counts=lambda context: world.label_counts[_own(context)].tolist(),
        task=world.task,
    )
    return answer(message, context)


def _own(context: Context) -> int:
    return int(str(context.node_config["partition-id"]))


def _round(message: Message) -> int:
    return int(str(message.content.config_records["config"]["server-round"])) - 1
