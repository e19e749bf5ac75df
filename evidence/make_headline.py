"""Draw the figures of the README from the records.

    python evidence/make_headline.py

Writes docs/images/headline.svg and headline-dark.svg: accuracy against megabytes sent, from `safari reproduce recipe`;
and rules.svg and rules-dark.svg: how far behind a perfect network dropping the missing, FedAU, the paper's rule, MIFA
and safari+ end, from `safari reproduce rules`. uneven.svg and uneven-dark.svg: the same against how uneven the links of
two groups are, from `safari reproduce uneven --quick`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safari.report.inline import VARIABLES
from safari.report.sheet import _DARK
from safari.report.style import render
from safari.sweep import Results
from safari_evidence.experiments import find, read
from safari_evidence.figures import figures_of
from safari_evidence.folder import shipped
from safari_evidence.headline import Line, Row, behind, race

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"

RACE = "recipe/main"
RACE_WORDS = "Pruned, with 56 % of the updates lost: better than dense FedAvg without loss"
RACE_GOAL = "where dense FedAvg ends"
# Of the arms of `recipe`: name in a reader's words, colour, place of the name.
RACE_ARMS: dict[str, tuple[str, int, tuple[float, float], str]] = {
    "fedavg-dense": ("dense FedAvg,\nnothing lost", 0, (9, 0), "left"),
    "fedavg-dense-0.003": ("dense FedAvg, tuned,\nnothing lost", 4, (9, 0), "left"),
    "safari": ("the paper's method", 2, (9, -6), "left"),
    "recipe": ("our recipe,\nsent exactly", 5, (9, 4), "left"),
    "recipe-small": ("our recipe", 3, (9, 4), "left"),
}

ROWS_WORDS = "Most updates lost, 80 % of the weights cut: how far behind a perfect network?"
# Every case of `rules` with plain clients that has been run, in a reader's words.
ROWS = {
    "two groups of labels, 8 of 10 clients lose 70 %": "rules/fedavg.groups.stationary",
    "two groups, losses in bursts": "rules/fedavg.groups.bursts",
    "two groups, good and bad periods": "rules/fedavg.groups.staircase",
    "two groups, links that rise and fall": "rules/fedavg.groups.sine",
    "two groups, loss depends on the labels": "rules/fedavg.groups.labels",
    "Dirichlet 0.1, 8 of 10 clients lose 70 %": "rules/fedavg.dirichlet.stationary",
    "Dirichlet 0.1, losses in bursts": "rules/fedavg.dirichlet.bursts",
    "Dirichlet 0.1, good and bad periods": "rules/fedavg.dirichlet.staircase",
    "Dirichlet 0.1, links that rise and fall": "rules/fedavg.dirichlet.sine",
    "Dirichlet 0.1, loss depends on the labels": "rules/fedavg.dirichlet.labels",
    "IID data, 8 of 10 clients lose 70 %": "rules/fedavg.iid.stationary",
    "IID data, losses in bursts": "rules/fedavg.iid.bursts",
    "IID data, good and bad periods": "rules/fedavg.iid.staircase",
    "IID data, links that rise and fall": "rules/fedavg.iid.sine",
    "IID data, loss depends on the labels": "rules/fedavg.iid.labels",
}


def arms_of(results: Results, place: str, folder: Path) -> Mapping[str, Mapping[int, dict]]:
    """The trials of every arm of a case, by seed."""
    name, case = place.split("/")
    (experiment,) = read(find(folder, [name]), [])
    return results.arms(next(c for c in experiment.cases if c.name == case))


def lines_of(results: Results, folder: Path) -> list[Line]:
    """The lines of the race."""
    arms = arms_of(results, RACE, folder)
    return [
        Line(words, look, arms[arm], offset, align) for arm, (words, look, offset, align) in RACE_ARMS.items()
    ]


def rows_of(results: Results, rows: Mapping[str, str], folder: Path) -> list[Row]:
    """The trials of every arm in these cases."""
    return [Row(name, arms_of(results, place, folder)) for name, place in rows.items()]


def save(figure: Figure, out: Path, name: str) -> list[Path]:
    """Write the figure for light pages and for dark ones; returns their paths."""
    dark = render(figure, "svg", transparent=True).decode("utf-8")
    for light, variable in VARIABLES.items():
        dark = dark.replace(light, _DARK[variable])
    files = {f"{name}.svg": render(figure, "svg"), f"{name}-dark.svg": dark.encode()}
    out.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (out / file).write_bytes(data)
    return [out / file for file in files]


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description="Draw the figures of the README from the records.")
    parser.add_argument("--recipe", type=Path, default=ROOT / "results/evidence-recipe", help="of `recipe`")
    parser.add_argument("--rules", type=Path, default=ROOT / "results/evidence-second", help="of `rules`")
    parser.add_argument("--uneven", type=Path, default=ROOT / "results/uneven", help="of `uneven --quick`")
    parser.add_argument("--out", type=Path, default=IMAGES)
    given = parser.parse_args()
    lines = lines_of(Results.open(given.recipe), shipped())
    rows = rows_of(Results.open(given.rules), ROWS, shipped())
    paths = save(race(lines, RACE_WORDS, RACE_GOAL), given.out, "headline")
    paths += save(behind(rows, ROWS_WORDS), given.out, "rules")
    (experiment,) = read(find(shipped(), ["uneven"]), [], quick=True)
    (drawn,) = figures_of(experiment, Results.open(given.uneven))
    for path in paths + save(drawn.figure, given.out, "uneven"):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
