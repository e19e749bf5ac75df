"""Asking before code is loaded that a run's folder names."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from safari.cli.options import read_table
from safari.errors import TrustError
from safari.loading import Source
from safari.trust import contacts, is_of_a_run, needs, trusting

F = TypeVar("F", bound=Callable[..., Any])


def trust_option(function: F) -> F:
    """`--trust`, for those who have looked at the code, and for scripts."""
    return click.option(
        "--trust",
        is_flag=True,
        help="Load plug-ins that the run's config names, and that you have not run before, without asking.",
    )(function)


@contextlib.contextmanager
def approval(sources: Sequence[Source], what: str, trust: bool) -> Iterator[None]:
    """Ask on a terminal whether these may be loaded; elsewhere TrustError says that --trust is wanted.

    Args:
        sources: what the config of a run's folder names.
        what: whose config it is.
        trust: `--trust` was given: say what is loaded, and load it.
    """
    if trust:
        for source in sources:
            click.echo(f"loading {source}", err=True)
    asks = _ask if sys.stdin.isatty() and sys.stderr.isatty() else False
    try:
        with trusting(sources, trust or asks, what):
            yield
    except TrustError as error:
        raise TrustError([*error.problems, "look at it first; with --trust it is loaded"]) from error


@contextlib.contextmanager
def approved_config(
    config: Path | None, settings: Sequence[str], trust: bool, seeds: int | None = None
) -> Iterator[None]:
    """Ask where a config file is that of a run's folder; one that a user wrote is theirs."""
    if config is None or not is_of_a_run(config):
        yield
        return
    table = read_table(config, settings, seeds)
    with approval([*needs(table), *contacts(table)], str(config), trust):
        yield


def _ask(sources: Sequence[Source]) -> bool:
    click.echo("This run wants to load what you have not run or approved before:", err=True)
    for source in sources:
        click.echo(f"  {source}", err=True)
    click.echo("It can do whatever you can do on this machine.", err=True)
    return click.confirm("Go on?", default=False, err=True)
