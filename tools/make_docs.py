"""Write the parts of the documentation that come from the code: `make docs`.

docs/configuration.md           from the config's fields and the plug-ins' signatures and docstrings
src/safari/cli/names.json       names and options of the plug-ins, which a shell completes
docs/images/partition-*.svg     label counts of each partition of the digits
With `--demo RUN`, from a finished run of the demo:
docs/images/demo.svg, demo-dark.svg, README.md's caption, the table in docs/quickstart.md, and
results/demo/, the records behind them
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safari.config import Config, Plug
from safari.engine import KINDS
from safari.plugins import options_of, spell
from safari.runs import RunFolder

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
DEMO = ROOT / "results" / "demo"
NAMES = ROOT / "src" / "safari" / "cli" / "names.json"
SUMMARY = "summary.json"
TABLE = re.compile(r"(?<=<!-- demo table -->\n)(.*?)(?=<!-- end of demo table -->)", re.DOTALL)

# Name, type, default, meaning.
Row = tuple[str, str, Any, str]

# Names for a reader who has never seen the arms' own.
_SPOKEN = {"perfect": "perfect network", "drop": "drop the missing", "safari": "the paper's rule"}
_LIMITS = {"least": "at least {}", "above": "above {}", "below": "below {}", "most": "at most {}"}
_INTRO = """\
<!-- Written by `make docs` from the code. Do not edit: change the field's documentation instead. -->
# Configuration

An experiment is a TOML file (`safari run mine.toml`, in Python `safari.run("mine.toml", "runs/mine")`), a
table of the same form in Python (`safari.run({...}, "runs/mine")`), or `--set key=value` on the command line.
What is left out has its default.
`safari init mine.toml` writes all fields with their documentation; `safari validate mine.toml` says
everything that is wrong at once.

`--set` takes the dotted name of a field: `--set pruning.sparsity=0.9`. The value is read as TOML, and what
is not TOML is a text. `--set arms=drop,safari` is a list. Naming another plug-in (`--set uplink.name=sine`)
drops the options of the one before.
"""
_PLUG_INS = """\
## Plug-ins

What the fields above can name. The options of a plug-in stand in the same table as its name; those of a
score function of yours are in `pruning.options`. Your own goes in by the same field, as `file.py:name` or
`package.module:name`: see [Plugging in your own](plugins.md). `safari list --options` prints this list.
"""


def configuration_page() -> str:
    """The reference of all fields and of all that they can name."""
    return "\n".join([_INTRO, *_fields(), _PLUG_INS, *_plug_ins()]).rstrip() + "\n"


def names_file() -> str:
    """Every plug-in with its options, for the shell's completion: src/safari/cli/names.json."""
    table = {
        kind: {
            name: [] if dataclasses.is_dataclass(thing) else [option.name for option in options_of(thing)]
            for name, thing in builtin.items()
        }
        for kind, builtin in KINDS.items()
    }
    return json.dumps(table, indent=1) + "\n"


def demo_results() -> dict[Path, str]:
    """What the pages say of the demo, from the records in results/demo: README's caption, and a table."""
    from safari.report import rows_of, to_text

    summary = json.loads((DEMO / SUMMARY).read_text(encoding="utf-8"))
    scores = {name: f"{100 * arm['top1']['mean']:.1f} %" for name, arm in summary["arms"].items()}
    seeds = summary["arms"]["drop"]["top1"]["n"]
    caption = (
        f"*Top-1 of the demo after {summary['rounds']} rounds, means of {seeds} seeds (`make demo` runs one): "
        f"a perfect network {scores['perfect']}, dropping the missing {scores['drop']}, "
        f"the paper's rule {scores['safari']}, `safari+` {scores['safari+']}, the recipe {scores['recipe']}.*\n"
    )
    return {
        ROOT / "README.md": caption,
        DOCS / "quickstart.md": f"```text\n{to_text(rows_of({'demo': summary}))}```\n",
    }


def split_at_table(page: Path) -> tuple[str, str, str]:
    """A page before, in and after the marks of the demo's table."""
    before, table, after = TABLE.split(page.read_text(encoding="utf-8"))
    return before, table, after


def _fields() -> Iterator[str]:
    config, hints = Config(), typing.get_type_hints(Config)
    values = config.to_dict()
    yield "## The experiment\n"
    yield from _table(
        _row(f, hints[f.name], values[f.name])
        for f in dataclasses.fields(Config)
        if not dataclasses.is_dataclass(hints[f.name])
    )
    for f in dataclasses.fields(Config):
        section = getattr(config, f.name)
        if isinstance(section, Plug):
            kind = next(kind for kind, of in KINDS.items() if f.name in of.tables)
            options = ", ".join(f"`{key} = {_toml(value)}`" for key, value in section.options.items())
            default = f"`{_toml(section.name)}`" + (f" with {options}" if options else "")
            doc = f.metadata["doc"]
            yield f"## `[{f.name}]`\n"
            yield f"{doc[0].upper()}{doc[1:]}.\nDefault: {default}. See [{kind}](#plug-in-{kind}).\n"
        elif dataclasses.is_dataclass(section):
            inner = typing.get_type_hints(type(section))
            yield f"## `[{f.name}]`\n"
            yield f"{inspect.getdoc(type(section))}\n"
            yield from _table(
                _row(g, inner[g.name], values[f.name][g.name]) for g in dataclasses.fields(section)
            )


def _plug_ins() -> Iterator[str]:
    for kind, builtin in KINDS.items():
        yield f"### Plug-in: {kind}\n"
        yield "Named in " + " and ".join(f"`{field}`" for field in builtin.field.split(", ")) + ".\n"
        for described in {type(thing) for thing in builtin.values() if dataclasses.is_dataclass(thing)}:
            yield f"{inspect.getdoc(described)}\n"
        for name, thing in builtin.items():
            yield f"**`{name}`**: {_prose(thing)}\n"
            if dataclasses.is_dataclass(thing):
                facts = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
                plain = [f"`{key}`: {_toml(v)}" for key, v in facts.items() if isinstance(v, bool | int)]
                yield f"{', '.join(plain)}.\n"
            elif options := options_of(thing):
                rows = ((o.name, spell(o.hint), _default(o.default), "") for o in options)
                yield from _table(rows, head="option")


def _row(f: dataclasses.Field[Any], hint: Any, value: Any) -> Row:
    return f.name, _limited(_kind(f.name, hint), f.metadata), value, f.metadata.get("doc", "")


def _table(rows: Iterable[Row], head: str = "field") -> list[str]:
    """Name, type, default and meaning; the last column only where there is one."""
    found = list(rows)
    documented = any(doc for *_, doc in found)
    lines = [f"| {head} | type | default |", "|---|---|---|"]
    if documented:
        lines = [lines[0] + " meaning |", lines[1] + "---|"]
    for name, kind, value, doc in found:
        cells = [f"`{name}`", kind, f"`{_toml(value)}`", *([doc] if documented else [])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _limited(kind: str, limits: Mapping[str, Any]) -> str:
    if "choices" in limits:
        return "one of " + ", ".join(f"`{choice}`" for choice in limits["choices"])
    said = [text.format(limits[name]) for name, text in _LIMITS.items() if name in limits]
    return f"{kind}, {' and '.join(said)}" if said else kind


def _kind(name: str, hint: Any) -> str:
    if hint == tuple[Plug, ...]:
        return "a list of names and tables"
    if hint is Plug:
        return "a name or a table"
    return "a list of rules" if name == "arms" else spell(hint)


def _default(value: Any) -> Any:
    return "" if value is inspect.Parameter.empty else value


def _toml(value: Any) -> str:
    """Texts, numbers, booleans and lists look the same in JSON and in TOML."""
    return json.dumps(value, ensure_ascii=False)


def _prose(thing: Any) -> str:
    doc = inspect.getdoc(getattr(thing, "score", thing)) or ""
    return doc.split("\n>>>", 1)[0].strip()


def draw_partitions() -> None:
    """Label counts of 10 clients under each partition of the digits, seed 0."""
    import numpy as np

    from safari.data import PARTITIONS, digits, label_counts
    from safari.report import figures
    from safari.report.style import render

    labels = digits().train_y.numpy()
    for name in ("groups", "iid", "shards", "dirichlet"):
        parts = PARTITIONS[name](labels, 10, np.random.default_rng(0))
        picture = render(figures.label_counts(label_counts(labels, parts, 10)), "svg")
        _write(IMAGES / f"partition-{name}.svg", picture)


def show_demo(run: Path) -> None:
    """The picture and the caption of README.md, the quick start's table, and the records behind them."""
    import numpy as np

    from safari.report import figures
    from safari.report.gather import read_run
    from safari.report.style import render

    data = read_run(RunFolder.open(run))
    rows = {_SPOKEN.get(arm.name, arm.name): arm.by_class for arm in data.arms if arm.by_class is not None}
    figure = figures.by_class([*rows], data.class_names, np.stack([*rows.values()]))
    _write(IMAGES / "demo.svg", render(figure, "svg"))
    _write(IMAGES / "demo-dark.svg", _darkened(render(figure, "svg", transparent=True)))
    for name in ("config.toml", SUMMARY, "environment.json"):
        _write(DEMO / name, (run / name).read_bytes())
    for page, results in demo_results().items():
        before, _, after = split_at_table(page)
        _write(page, f"{before}{results}{after}".encode())


def _darkened(svg: bytes) -> bytes:
    """The colours that report.html uses on a dark page."""
    from safari.report.inline import VARIABLES
    from safari.report.sheet import _DARK

    text = svg.decode("utf-8")
    for light, variable in VARIABLES.items():
        text = text.replace(light, _DARK[variable])
    return text.encode()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_bytes() == data:
        return
    path.write_bytes(data)
    print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    """Write everything that can be written."""
    parser = argparse.ArgumentParser(description="Write the documentation that comes from the code.")
    parser.add_argument("--demo", type=Path, metavar="RUN", help="a finished run of the demo")
    demo = parser.parse_args().demo
    _write(DOCS / "configuration.md", configuration_page().encode())
    _write(NAMES, names_file().encode())
    draw_partitions()
    if demo is not None:
        show_demo(demo)


if __name__ == "__main__":
    main()
