"""The command `safari`: one file a command, errors without tracebacks."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from safari.cli.completion import completion
from safari.cli.init import init
from safari.cli.list import list_
from safari.cli.reproduce import reproduce
from safari.cli.resume import resume
from safari.cli.run import run
from safari.cli.show import show
from safari.cli.validate import validate
from safari.cli.view import view
from safari.cli.wire import wire
from safari.errors import SafariError
from safari.version import __version__


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Begin with 'safari run': four arms on the embedded digits, in about a minute.",
)
@click.version_option(__version__, "-V", "--version", package_name="safari-fl")
def cli() -> None:
    """Federated learning that keeps training when the network loses most of the updates."""


for command in (run, resume, view, show, reproduce, list_, validate, init, wire, completion):
    cli.add_command(command)


def main() -> None:
    """Run the command; a user's mistake ends in one message and exit code 2, Ctrl-C in 130."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        # Click returns a command's exit code instead of leaving with it when it does not stand alone.
        sys.exit(cli.main(prog_name="safari", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SafariError as error:
        for line in str(error).splitlines():
            click.secho("error: ", fg="red", nl=False, err=True)
            click.echo(line, err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
