"""Options that several commands share, and what the shell can complete in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from safari.cli.offers import complete_setting
from safari.config import Config, examine, override
from safari.errors import ConfigError
from safari.presets import preset
from safari.toml import parse_setting, read_toml
from safari.trust import names_in, using

F = TypeVar("F", bound=Callable[..., Any])


def set_option(function: F) -> F:
    """`--set key=value`, as often as needed."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete_setting,
        help="Change a field, such as pruning.sparsity=0.9 or uplink.name=lost. Repeatable.",
    )(function)


def trust_option(function: F) -> F:
    """`--trust`: the config is the user's own, or was looked at."""
    return click.option(
        "--trust",
        is_flag=True,
        help="Use the code and the addresses that the config names. Not needed for a config with built-in names alone, "
        "nor for one that you have run before.",
    )(function)


def json_option(function: F) -> F:
    """`--json`, for scripts."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")(function)


def quiet_option(function: F) -> F:
    """`--quiet`, for those who do not want progress."""
    return click.option("-q", "--quiet", is_flag=True, help="No progress, no messages.")(function)


def read_config(
    path: Path | None, settings: Sequence[str], seeds: int | None = None, presets: Sequence[str] = ()
) -> Config:
    """The config from a file (or the demo's), with the command line's changes; all that is wrong at once."""
    wanted, problems = examine(read_table(path, settings, seeds, presets))
    if problems:
        raise ConfigError(problems + wrong_names(wanted))
    return wanted


def wrong_names(config: Config) -> list[str]:
    """Problems of the plug-ins' names and options alone, whether or not the config has others."""
    from safari.engine import Problems, check_names

    problems = Problems()
    check_names(config, problems)
    return problems.lines


@contextlib.contextmanager
def using_config(path: Path | None, settings: Sequence[str], trust: bool) -> Iterator[None]:
    """Use a config file, which may be someone else's, with the command line's settings, which are the user's own."""
    with using(path, trust, names_in(map(parse_setting, settings))):
        yield


def read_table(
    path: Path | None, settings: Sequence[str], seeds: int | None = None, presets: Sequence[str] = ()
) -> dict[str, Any]:
    """A config as plain tables, not yet checked: the file's, the presets' over them, then the command line's."""
    table = Config().to_dict() if path is None else read_toml(path)
    changes = [parse_setting(text) for text in settings]
    if seeds is not None:
        changes.append(("seeds", seeds))
    wanted = override(table, changes)
    for name in presets:
        table = override(table, preset(name, wanted))
    return override(table, changes)
