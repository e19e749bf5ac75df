"""An experiment of our own engine on Flower: clients with the same data, draws and losses on the way."""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower.kit import Loopback
from safari.engine.world import World
from safari.flower import SafariStrategy, local_training, lossy, sparse
from safari.flower.arrays import dense_record, dense_vector
from safari.runs import RoundRecord, RunFolder
from safari.training import ClientAlgorithm
from safari.training.local import OPTIMISERS

# In no order, as a real SuperLink gives them.
NODES = [901, 17, 404, 333, 58, 600, 77, 12]


def client_and_round(message: Message, context: Context) -> tuple[int, int]:
    return context.node_config["partition-id"], message.content["config"]["safari.round"]


def links(world: World):
    """The losses that the engine draws."""
    config = world.config
    return lossy(
        uplink=config.uplink.name,
        downlink=config.downlink.name,
        uplink_options=config.uplink.options,
        downlink_options=config.downlink.options,
        seed=world.seed,
    )


def own_loop(world: World) -> ClientApp:
    """A client that trains on the samples that the engine would give it, by an ordinary loop."""
    config = world.config
    app = ClientApp(mods=[links(world)])

    @app.train()
    @sparse(lambda context: world.fresh_module(), batch=lambda m, c: samples(world, m, c))
    def train(model, message, context):
        client, t = client_and_round(message, context)
        optimizer = OPTIMISERS[config.local.optimiser](
            model.parameters(), config.local.lr, config.local.steps
        )
        losses = []
        model.train()
        for x, y in world.training_batches(client, t):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return {"num-examples": len(world.parts[client]), "train_loss": float(torch.stack(losses).mean())}

    return app


def our_loop(world: World, algorithm: ClientAlgorithm | None = None) -> ClientApp:
    """A client that trains by the algorithm that the server names, or by one of its own."""
    app = ClientApp(mods=[links(world)])
    train = local_training(
        lambda context: world.fresh_module(),
        lambda m, c: world.training_batches(*client_and_round(m, c)),
        lr=lambda m, c: world.lr(client_and_round(m, c)[1]),
        optimiser=world.config.local.optimiser,
        algorithm=algorithm,
        label_counts=lambda context: world.label_counts[context.node_config["partition-id"]].tolist(),
        batch=lambda m, c: samples(world, m, c),
        task=world.task,
    )
    app.train()(train)
    return app


def samples(world: World, message: Message, context: Context):
    """What scores and policies look at."""
    return world.samples(world.pruning_draw(*client_and_round(message, context)))


def on_flower(
    world: World,
    app: ClientApp,
    run: Path,
    rounds: int | None = None,
    grid: Loopback | None = None,
    **options,
) -> tuple[SafariStrategy, list[RoundRecord], dict[int, torch.Tensor]]:
    """The experiment through messages: the strategy at its end, the records, and the model after each round."""
    models: dict[int, torch.Tensor] = {}
    strategy = SafariStrategy(
        world.module,
        world.config.clients,
        world.config.arms[0].name,
        config=world.config,
        run=run,
        batch=world.samples(world.pruning_draw(0, 0)),
        **options,
    )
    strategy.start(
        grid or grid_of(world, app),
        dense_record(world.layout, world.start),
        num_rounds=rounds or world.config.rounds,
        evaluate_fn=lambda t, arrays: models.update({t: dense_vector(arrays, world.layout)}),
    )
    return strategy, RunFolder.open(run).trials()[0].records(), models


def grid_of(world: World, app: ClientApp, kind: type[Loopback] = Loopback) -> Loopback:
    nodes = NODES[: world.config.clients]
    configs = {n: {"partition-id": i, "num-partitions": len(nodes)} for i, n in enumerate(nodes)}
    return kind(dict.fromkeys(nodes, app), configs)
