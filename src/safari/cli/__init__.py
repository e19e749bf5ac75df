"""The command `safari`: one file a command, errors without tracebacks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import Any

import click

from safari.aliases import AliasWarning
from safari.cli.compare import compare
from safari.cli.completion import completion
from safari.cli.export import export
from safari.cli.flower import flower
from safari.cli.init import init
from safari.cli.list import list_
from safari.cli.net import net
from safari.cli.resume import resume
from safari.cli.run import run
from safari.cli.show import show
from safari.cli.sweep import sweep
from safari.cli.validate import validate
from safari.cli.view import view
from safari.cli.wire import wire
from safari.errors import SafariError
from safari.processes import TerminatedError
from safari.text import visible
from safari.version import __version__

# Letters of an error's line: paths are long, and nobody reads more.
_LONGEST = 2000
_FIRST_STEPS = """
\b
First steps:
  safari run                     the demo: four arms, in about a minute
  safari view                    watch it in the browser (extra: view)
  safari run --set uplink.p=0.1  the same, with nine of ten updates lost
  safari list rule               what a server can do about the missing
  safari init my.toml            every field, explained: change some, then
  safari validate my.toml        say all that is wrong, without running it
  safari run my.toml --seeds 5   five seeds, with means and spreads

\b
A run is a folder in runs/. Stop it with Ctrl-C whenever you like, and go on
with 'safari resume'. 'safari COMMAND --help' has examples; your shell
completes names and config fields after 'safari completion bash'.
"""


def _reproduce() -> click.Command:
    """`safari reproduce`, which comes with a package of its own."""
    if find_spec("safari_evidence"):
        command: click.Command = import_module("safari_evidence.cli").reproduce
        return command

    @click.command(
        "reproduce",
        short_help="Run the claims of the paper again (package: safari-evidence).",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def missing() -> None:
        """Run the claims of the paper again: needs the package safari-evidence, the folder evidence/ of the sources."""
        raise SafariError(
            "reproduce needs the package safari-evidence: pip install ./evidence in the sources of safari-fl"
        )

    return missing


class _Commands(click.Group):
    """The commands; `reproduce` is imported when it is asked for, because its package imports this one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands."""
        return sorted([*super().list_commands(ctx), "reproduce"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        return _reproduce() if cmd_name == "reproduce" else super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_FIRST_STEPS,
)
@click.version_option(__version__, "-V", "--version", package_name="safari-fl")
def cli() -> None:
    """Federated learning that keeps training when the network loses most of the updates."""


for command in (
    run,
    resume,
    view,
    show,
    export,
    compare,
    sweep,
    list_,
    validate,
    init,
    wire,
    net,
    flower,
    completion,
):
    cli.add_command(command)


def main() -> None:
    """Run the command; what a user can mend ends in a message and exit code 2, Ctrl-C and SIGTERM in 130."""
    stops: list[int] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        raise TerminatedError

    signal.signal(signal.SIGTERM, terminate)
    try:
        _run()
    except Exception:
        # An import that is stopped halfway may end in any error.
        if not stops:
            raise
        click.echo("stopped", err=True)
        sys.exit(130)


def _run() -> None:
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
        # Click returns a command's exit code instead of leaving with it when it does not stand alone.
        sys.exit(cli.main(prog_name="safari", standalone_mode=False))
    except click.ClickException as error:
        with contextlib.suppress(OSError, AttributeError):  # nobody can be told
            error.show()
        sys.exit(error.exit_code)
    except SafariError as error:
        _say(str(error))
        sys.exit(2)
    # Before RuntimeError: click's Abort is one.
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
    except OSError as error:
        # Errors of our own files have their own messages: this is the output, on a full disk or a failing device.
        what = f"cannot read or write {error.filename}" if error.filename else "cannot write the output"
        _say(f"{what}: {error.strerror or error}")
        _drop_output()
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _say(": ".join(["out of memory", *str(error).splitlines()[:1]]))
        _say(
            "what needs less: fewer clients, a smaller model, cohort, local.batch, pruning.batch or evaluation.batch"
        )
        sys.exit(2)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # where it cannot be said, the exit code still tells
        for line in text.splitlines():
            click.secho("error: ", fg="red", nl=False, err=True)
            # A file's name, or what a file or a client says, may hold what a terminal would act on.
            click.echo(visible(line, _LONGEST), err=True)


def _show_warning(usual: Callable[..., None], message: Any, category: type[Warning], *place: Any) -> None:
    """Print a note about a field's name as other notes; leave other warnings as they are."""
    if issubclass(category, AliasWarning):
        click.echo(f"note: {message}", err=True)
    else:
        usual(message, category, *place)


def _drop_output() -> None:
    """Discard pending output, which Python would otherwise try to write at exit, and complain about."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _out_of_memory(error: Exception) -> bool:
    # By name and text: torch is not imported for every command, and has no class for a CPU without memory.
    words = "can't allocate memory"
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or words in str(error)
