"""Completions for the shell: config fields, names, run folders.

Names of plug-ins come from `names.json`, which `make docs` writes from the code: importing torch for every
press of the Tab key would take seconds.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from safari.config import Config, Plug

# The fields that name a plug-in of a kind, besides the tables that are plug-ins themselves.
_FIELDS = {"pruning.pruner": "pruner", "arms": "rule"}
_KIND_OF_TABLE = {"uplink": "link", "downlink": "link"}


def setting_keys() -> dict[str, str]:
    """Every key that `--set` takes, with its documentation."""
    keys = {}
    for f in dataclasses.fields(Config):
        section = getattr(Config(), f.name)
        if not dataclasses.is_dataclass(section):
            keys[f.name] = f.metadata.get("doc", "")
            continue
        for inner in dataclasses.fields(section):
            doc = inner.metadata.get("doc", f.metadata.get("doc", ""))
            if inner.name != "options":
                keys[f"{f.name}.{inner.name}"] = doc
    return keys


def complete_setting(ctx: click.Context, param: click.Parameter, text: str) -> list[CompletionItem]:
    """Fields for `--set`, or, after the sign, what a field can name."""
    key, sign, written = text.partition("=")
    if not sign:
        return [
            CompletionItem(f"{name}=", help=doc) for name, doc in _keys(ctx).items() if name.startswith(text)
        ]
    # A list of arms: what stands before the last comma stays.
    before = written.rpartition(",")[0] + "," if key == "arms" and "," in written else ""
    offered = [f"{key}={before}{value}" for value in _values(key)]
    return [CompletionItem(value) for value in offered if value.startswith(text)]


def complete_run(ctx: click.Context, param: click.Parameter, text: str) -> list[CompletionItem]:
    """Run folders: those in `runs`, or below what is written, and folders on the way to one."""
    place = Path(text) if text.endswith("/") else Path(text).parent
    if not text and Path("runs").is_dir():
        place = Path("runs")
    try:
        there = sorted(entry for entry in place.iterdir() if entry.is_dir())
    except OSError:
        return []
    fitting = [entry for entry in there if str(entry).startswith(text.removeprefix("./"))]
    runs = [CompletionItem(str(entry)) for entry in fitting if (entry / "config.toml").is_file()]
    return runs or [CompletionItem(f"{entry}/") for entry in fitting if not entry.name.startswith(".")]


@cache
def names() -> dict[str, dict[str, list[str]]]:
    """The built-ins of each kind, each with its options."""
    table: dict[str, dict[str, list[str]]] = json.loads(
        files("safari.cli").joinpath("names.json").read_bytes()
    )
    return table


def _keys(ctx: click.Context) -> dict[str, str]:
    """All fields, and the options of the plug-ins that are named so far."""
    keys = setting_keys()
    given = dict(setting.partition("=")[::2] for setting in ctx.params.get("settings") or ())
    config = Config()
    for table in (name for name in vars(config) if isinstance(getattr(config, name), Plug)):
        chosen = given.get(f"{table}.name", getattr(config, table).name)
        for option in names().get(_KIND_OF_TABLE.get(table, table), {}).get(chosen, ()):
            keys[f"{table}.{option}"] = f"an option of {chosen}"
    return keys


def _values(key: str) -> list[str]:
    table, _, field = key.partition(".")
    kind = _FIELDS.get(key) or _KIND_OF_TABLE.get(table, table)
    if kind in names() and (key in _FIELDS or field == "name"):
        return [*names().get(kind, {}), *(point.name for point in entry_points(group=f"safari.{kind}"))]
    return [str(choice) for choice in _choices(table, field)]


def _choices(table: str, field: str) -> list[Any]:
    """Allowed values of a config field; none where they cannot be enumerated."""
    section = getattr(Config(), table, None)
    if not dataclasses.is_dataclass(section) or isinstance(section, Plug):
        return []
    found = {f.name: f for f in dataclasses.fields(section)}.get(field)
    if found is None:
        return []
    if isinstance(getattr(section, field), bool):
        return ["true", "false"]
    return list(found.metadata.get("choices", ()))
