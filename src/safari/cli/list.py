"""`safari list`."""

from __future__ import annotations

import inspect
import json
from typing import Any

import click

from safari.cli.offers import names
from safari.cli.options import json_option

KIND_NAMES = tuple(names())


@click.command("list")
@click.argument("kind", type=click.Choice(KIND_NAMES), required=False)
@click.option(
    "--options", "with_options", is_flag=True, help="Also the options of each, with their defaults."
)
@json_option
def list_(kind: str | None, with_options: bool, as_json: bool) -> None:
    """List the parts that can be plugged in, one line each.

    Your own goes in by the same config field, as file.py:name or package.module:name.
    """
    kinds = [kind] if kind else list(KIND_NAMES)
    found = {each: catalogue(each) for each in kinds}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for each in kinds:
        click.secho(f"{each}  ({found[each]['field']})", bold=True)
        width = max(map(len, found[each]["names"]))
        for name, item in found[each]["names"].items():
            click.echo(f"  {name:<{width}}  {item['doc']}")
            if with_options:
                for option, facts in item["options"].items():
                    click.echo(f"    {option} = {facts['default']!r}  ({facts['type']})")


def catalogue(kind: str) -> dict[str, Any]:
    """Names, first lines and options of all built-ins of a kind and of what installed packages offer."""
    from importlib.metadata import entry_points

    from safari.engine import KINDS
    from safari.plugins import first_line, options_of, spell

    things = dict(KINDS[kind]) | {point.name: point.load() for point in entry_points(group=f"safari.{kind}")}
    names = {}
    for name, thing in things.items():
        options = options_of(thing) if inspect.isfunction(thing) else []
        names[name] = {
            "doc": first_line(thing),
            "options": {
                o.name: {
                    "type": spell(o.hint),
                    "default": None if o.default is inspect.Parameter.empty else o.default,
                }
                for o in options
            },
        }
    return {"field": KINDS[kind].field, "names": names}
