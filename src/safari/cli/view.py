"""`safari view`."""

from __future__ import annotations

import secrets
import webbrowser
from pathlib import Path

import click

from safari.cli.offers import complete_run


@click.command(short_help="Watch runs on a page, also while they go on.")
@click.argument(
    "folders", metavar="[RUN]...", nargs=-1, type=click.Path(path_type=Path), shell_complete=complete_run
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to serve on.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port.  [default: 8100, or any that is free]")
@click.option("--token", help="What others must know to be let in.  [default: made up, beyond this machine]")
@click.option("--browser/--no-browser", default=True, help="Open the page in the browser.  [default: do]")
def view(folders: tuple[Path, ...], host: str, port: int | None, token: str | None, browser: bool) -> None:
    """Watch runs on a page: those that are still going, and finished ones laid over them.

    Without RUN it is the newest run in runs/. The page is served to this machine alone, unless --host says
    otherwise; then whoever opens it needs the token in the address that is printed.

    \b
    Examples:
      safari view
      safari view runs/mine runs/other
      safari view runs/mine --host 0.0.0.0 --no-browser
    """
    from safari.api import rule_lines
    from safari.runs import RunFolder
    from safari.view.monitor import Monitor
    from safari.view.server import address_of, build, is_loopback, listen, serve

    runs = [RunFolder.open(folder) for folder in folders or [_newest(Path("runs"))]]
    local = is_loopback(host)
    if not local and token is None:
        token = secrets.token_urlsafe(24)
    names = frozenset({"localhost", "127.0.0.1", "::1", host}) if local else None
    app = build(Monitor(runs, rule_lines(runs)), token, names)
    with listen(host, port) as where:
        address = address_of(host, where.getsockname()[1], token)

        def opened() -> None:
            click.echo(f"watching {', '.join(str(run.path) for run in runs)}", err=True)
            click.echo(f"page: {address}", err=True)
            click.echo("stop with Ctrl-C", err=True)
            if browser:
                webbrowser.open(address)

        serve(app, where, opened)


def _newest(place: Path) -> Path:
    """The run in a folder that was begun last."""
    runs = [config.parent for config in place.glob("*/config.toml")]
    if not runs:
        raise click.UsageError(f"there is no run in {place}/: name one, or begin one with 'safari run'")
    return max(runs, key=lambda run: ((run / "config.toml").stat().st_mtime, run.name))
