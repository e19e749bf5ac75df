"""The server: the strategy, its rounds, and the test of each new model."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from flower_safari.task import test, world_of
from safari.flower import SafariStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    world = world_of(settings)
    model = world.fresh_module()
    strategy = SafariStrategy(
        model,
        clients=settings["clients"],
        rule=settings["rule"],
        # Whole, so that the run's record says what the clients do, too.
        config=world.config,
        run=settings["run"] or None,
        min_nodes=settings["clients"],
        # What a score at the server sees the shape of.
        batch=world.samples(world.pruning_draw(0, 0)),
    )

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(test(model, world))

    result = strategy.start(
        grid,
        ArrayRecord(dict(model.state_dict())),
        num_rounds=settings["num-server-rounds"],
        timeout=settings["deadline"],
        evaluate_fn=evaluate,
    )
    last = result.evaluate_metrics_serverapp
    print("final accuracy:", last[max(last)]["top1"] if last else "trained already, see the run's folder")
