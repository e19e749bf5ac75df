"""`safari flower`."""

from __future__ import annotations

from pathlib import Path

import click


@click.group(short_help="Look after a run on Flower.")
def flower() -> None:
    """Look after a run on Flower: a SuperLink or a ServerApp that dies is started again (docs/deploy.md)."""


@flower.command(short_help="Start a run's SuperLink and ServerApp again until it is complete.")
@click.argument("app", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("connection")
@click.argument("superlink", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--run", type=click.Path(path_type=Path, file_okay=False), required=True,
    help="The folder in which the app's SafariStrategy keeps its records.",
)  # fmt: skip
@click.option("--run-config", "-c", multiple=True, help="As of 'flwr run'.")
def keep(
    app: Path, connection: str, superlink: tuple[str, ...], run: Path, run_config: tuple[str, ...]
) -> None:
    """Submit the Flower app in APP to the SuperLink that Flower's configuration calls CONNECTION, and again whenever
    the run ends before all rounds are done; it goes on after its last checkpoint.

    What follows -- is the command of a SuperLink to start first, and again when it ends. Otherwise this waits for one
    that somebody else starts. Each start in a row that brings no new round waits twice as long, up to five minutes;
    after eight of them the exit code is 2, with the reason of the last one.

    \b
    Example:
      safari flower keep my-app server --run /var/lib/safari/run -c "run='/var/lib/safari/run'" -- \\
        flower-superlink --insecure --host 127.0.0.1 --port 9091
    """
    from safari.keep import Keeper

    Keeper(
        app.absolute(),
        connection,
        run.absolute(),
        run_config,
        superlink,
        lambda text: click.echo(text, err=True),
    ).keep()
