"""Draw the figure at the top of the README from the numbers in results.json.

    python tools/make_headline.py results/evidence/results.json

Writes docs/images/headline.svg, headline-dark.svg and headline.png: accuracy of the running average against
rounds, of a perfect network, of dropping the missing, of the paper's rule and of safari+, mean and band over
the seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safari.evidence import Book
from safari.evidence.headline import LOOKS, headline
from safari.report.inline import VARIABLES
from safari.report.sheet import _DARK
from safari.report.style import render

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WORDS = "Eight of ten clients lose 70 % of their updates; 80 % of the weights are cut"


def draw(
    results: Path, out: Path, experiment: str, case: str, arms: list[str], words: str, score: str
) -> list[Path]:
    """Write the three files; returns their paths."""
    figure = headline(Book.open(results.parent).entries[experiment]["cases"][case], words, arms, score)
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
    parser.add_argument("results", type=Path, help="a results.json of safari reproduce")
    parser.add_argument("--experiment", default="accuracy")
    parser.add_argument("--case", default="synflow")
    parser.add_argument("--arms", default=",".join(LOOKS), help="names of arms, with commas")
    parser.add_argument("--words", default=WORDS, help="what stands above the figure")
    parser.add_argument("--score", default="average_top1", choices=("top1", "average_top1"))
    parser.add_argument("--out", type=Path, default=IMAGES)
    given = parser.parse_args()
    arms = given.arms.split(",")
    for path in draw(given.results, given.out, given.experiment, given.case, arms, given.words, given.score):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
