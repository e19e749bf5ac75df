"""Draw the figure at the top of the README from the numbers in results.json.

    python tools/make_headline.py results/evidence

Writes docs/images/headline.svg, headline-dark.svg and headline.png: how far behind a perfect network dropping
the missing, the paper's rule and safari+ end, with the paper's links and with other kinds of loss. Records of
the second edition (`safari reproduce rules`) are drawn where there are any.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from safari.evidence import Results, find, read, shipped
from safari.evidence.headline import ARMS, LOOKS, Row, headline
from safari.report.inline import VARIABLES
from safari.report.sheet import _DARK
from safari.report.style import render

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WORDS = "Most updates lost, 80 % of the weights cut: how far behind a perfect network?"
# What a reader is told: the case of an experiment, or of several (a later one has more seeds of some arms).
FIRST_EDITION = {
    "8 of 10 clients lose 70 %": "accuracy/synflow seeds/synflow.all",
    "everybody loses 80 %": "robustness/nobody-sure",
    "losses come in bursts": "table/groups.bursts",
    "good and bad times": "table/groups.staircase",
    "links come in waves": "table/groups.sine",
    "links follow the labels": "table/groups.labels",
    "one group silent for 40 rounds": "robustness/silent-group",
    "clients come and go": "robustness/come-and-go",
    "data without groups": "table/dirichlet.stationary",
    "everybody's data alike": "table/iid.stationary",
}


# Every case of `rules` with plain clients that has been run.
SECOND_EDITION = {
    "two groups of labels, 8 of 10 clients lose 70 %": "rules/fedavg.groups.stationary",
    "two groups, losses in bursts": "rules/fedavg.groups.bursts",
    "two groups, good and bad periods": "rules/fedavg.groups.staircase",
    "two groups, links that rise and fall": "rules/fedavg.groups.sine",
    "two groups, loss depends on the labels": "rules/fedavg.groups.labels",
    "Dirichlet 0.1, 8 of 10 clients lose 70 %": "rules/fedavg.dirichlet.stationary",
    "Dirichlet 0.1, losses in bursts": "rules/fedavg.dirichlet.bursts",
    "Dirichlet 0.1, good and bad periods": "rules/fedavg.dirichlet.staircase",
    "Dirichlet 0.1, links that rise and fall": "rules/fedavg.dirichlet.sine",
    "IID data, 8 of 10 clients lose 70 %": "rules/fedavg.iid.stationary",
}


def rows_of(results: Results, troubles: Mapping[str, str], folder: Path) -> list[Row]:
    """The trials of every arm in these cases."""
    names = {case.split("/")[0] for cases in troubles.values() for case in cases.split()}
    experiments = read(find(folder, sorted(names)), [])
    known = {f"{e.name}/{case.name}": case for e in experiments for case in e.cases}
    return [
        Row(
            name,
            {
                a.name: results.arm(known[place], a)
                for place in places.split()
                for a in known[place].config.arms
            },
        )
        for name, places in troubles.items()
    ]


def draw(
    records: Path,
    out: Path,
    words: str,
    troubles: Mapping[str, str],
    folder: Path,
    arms: Sequence[str] = ARMS,
) -> list[Path]:
    """Write the three files; returns their paths."""
    figure = headline(rows_of(Results.open(records), troubles, folder), words, arms)
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
    second = "rules" in Results.open(given.records).entries
    rows, arms = (SECOND_EDITION, tuple(LOOKS)) if second else (FIRST_EDITION, ARMS)
    for path in draw(given.records, given.out, given.words, rows, shipped(), arms):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
