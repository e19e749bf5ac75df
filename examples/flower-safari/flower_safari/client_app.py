"""The client: Flower calls it for each message, wherever the node is."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_safari.task import train as train_locally
from flower_safari.task import world_of
from safari.flower import local_training, lossy, sparse

app = ClientApp()


def model_for(context: Context):
    return world_of(context.run_config).fresh_module()


def batch_for(message: Message, context: Context):
    """What scores and mask policies look at."""
    world, t = world_of(context.run_config), message.content["config"]["server-round"] - 1
    return world.samples(world.pruning_draw(context.node_config["partition-id"], t))


def batches_for(message: Message, context: Context):
    """This round's mini-batches."""
    world, t = world_of(context.run_config), message.content["config"]["server-round"] - 1
    return world.training_batches(context.node_config["partition-id"], t)


def unreliable(message: Message, context: Context, call_next) -> Message:
    """Lose as many uploads as the run config says."""
    success = context.run_config["success"]
    mod = lossy("bernoulli", uplink_options={"p": success}, seed=context.run_config["seed"])
    return call_next(message, context) if success >= 1 else mod(message, context, call_next)


@sparse(model_for, batch=batch_for)
def own_loop(model, message: Message, context: Context) -> dict[str, float]:
    """Any loop of your own, inside the mask."""
    world, client = world_of(context.run_config), context.node_config["partition-id"]
    loss = train_locally(model, batches_for(message, context), context.run_config["lr"])
    return {"num-examples": len(world.parts[client]), "train_loss": loss}


def by_algorithm(message: Message, context: Context) -> Message:
    """Client algorithms bring their loop."""
    world = world_of(context.run_config)
    answer = local_training(
        model_for,
        batches_for,
        lr=lambda message, context: world.lr(message.content["config"]["server-round"] - 1),
        optimiser=world.config.local.optimiser,
        batch=batch_for,
        label_counts=lambda context: world.label_counts[context.node_config["partition-id"]].tolist(),
    )
    return answer(message, context)


@app.train(mods=[unreliable])
def train(message: Message, context: Context) -> Message:
    answer = own_loop if world_of(context.run_config).config.client.name == "fedavg" else by_algorithm
    return answer(message, context)
