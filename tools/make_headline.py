"""Draw the figure at the top of the README from the numbers in results.json.

    python tools/make_headline.py results/evidence-second

Writes docs/images/headline.svg, headline-dark.svg and headline.png: how far behind a perfect network dropping
the missing, FedAU, the paper's rule, MIFA and safari+ end, in the settings of `safari reproduce rules`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from safari.evidence import Results, find, read, shipped
from safari.evidence.headline import Row, headline
from safari.report.inline import VARIABLES
from safari.report.sheet import _DARK
from safari.report.style import render

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WORDS = "Most updates lost, 80 % of the weights cut: how far behind a perfect network?"
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


def rows_of(results: Results, rows: Mapping[str, str], folder: Path) -> list[Row]:
    """The trials of every arm in these cases."""
    experiments = read(find(folder, sorted({place.split("/")[0] for place in rows.values()})), [])
    known = {f"{e.name}/{case.name}": case for e in experiments for case in e.cases}
    return [Row(name, results.arms(known[place])) for name, place in rows.items()]


def draw(records: Path, out: Path, words: str, rows: Mapping[str, str], folder: Path) -> list[Path]:
    """Write the three files; returns their paths."""
    figure = headline(rows_of(Results.open(records), rows, folder), words)
    dark = render(figure, "svg", transparent=True).decode("utf-8")
    for light, variable in VARIABLES.items():
        dark = dark.replace(light, _DARK[variable])
    files = {
        "headline.svg": render(figure, "svg"),
        "headline-dark.svg": dark.encode(),
        "headline.png": render(figure, "png"),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (out / name).write_bytes(data)
    return [out / name for name in files]


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description="Draw the figure at the top of the README.")
    parser.add_argument("records", type=Path, help="the folder of a results.json of safari reproduce")
    parser.add_argument("--words", default=WORDS, help="what stands above the figure")
    parser.add_argument("--out", type=Path, default=IMAGES)
    given = parser.parse_args()
    for path in draw(given.records, given.out, given.words, ROWS, shipped()):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
