"""The client: Flower calls it for each message, wherever the node is."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_safari.task import train as train_locally
from flower_safari.task import world_of
from safari.flower import lossy, sparse

app = ClientApp()


def model_for(context: Context):
    return world_of(context.run_config).fresh_module()


def batch_for(message: Message, context: Context):
    """What snip and grasp look at."""
    world, t = world_of(context.run_config), message.content["config"]["server-round"] - 1
    return world.pruning_batch(context.node_config["partition-id"], t)


def unreliable(message: Message, context: Context, call_next) -> Message:
    """Lose as many uploads as the run config says."""
    success = context.run_config["success"]
    mod = lossy("bernoulli", uplink_options={"p": success}, seed=context.run_config["seed"])
    return call_next(message, context) if success >= 1 else mod(message, context, call_next)


@app.train(mods=[unreliable])
@sparse(model_for, batch=batch_for)
def train(model, message: Message, context: Context) -> dict[str, float]:
    world, client = world_of(context.run_config), context.node_config["partition-id"]
    batches = world.training_batches(client, message.content["config"]["server-round"] - 1)
    loss = train_locally(model, batches, context.run_config["lr"])
    return {"num-examples": len(world.parts[client]), "train_loss": loss}
