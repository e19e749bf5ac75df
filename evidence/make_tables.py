"""Write results/tables.md from the records: every table of every experiment that has some.

    python evidence/make_tables.py [--check] [RESULTS...]

An experiment's numbers come from the first of the folders RESULTS (of `safari reproduce --out`; by default those in
results/) that has any of it; below each are its caveats (the `finding` of its file), command, hardware and version of
the code. `--check` writes nothing and fails where the page is not what the records say.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from safari.errors import SafariError
from safari.sweep import Results, trials_by_version
from safari_evidence.blocks import Table, markdown_table
from safari_evidence.experiments import Experiment, find, read
from safari_evidence.folder import shipped
from safari_evidence.tables import main_table, matrices, race, rivals, verdict_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "results" / "tables.md"
# Of the columns that are shown where there is no matrix.
COLUMNS = (
    "top1", "average_top1", "top5", "loss", "perplexity", "average_perplexity", "accuracy", "right_group", "phi",
    "error", "lost_updates", "megabytes_up",
)  # fmt: skip
HEAD = """# Tables

Generated from the records by `python evidence/make_tables.py`; [README.md](README.md) has commands and hardware,
[docs/found.md](../docs/found.md) what follows from them. A claim is *confirmed* where a test rejects its opposite at
5 %, *refuted* where one rejects the claim, *undecided* otherwise; p is after Holm's correction over the claims of an
experiment. *Averages* are running averages of the models. Each table names the version of the code that made it.
"""


@dataclass(frozen=True)
class Section:
    """An experiment, in full or in its small version, with the records that it has."""

    experiment: Experiment
    quick: bool
    folder: Path
    results: Results


def folders() -> list[Path]:
    """The folders of results that come with the repository: of one experiment, the last by name."""
    return sorted((path.parent for path in ROOT.glob("results/*/results.json")), reverse=True)


def sections(places: Iterable[Path], experiments: Path) -> Iterator[Section]:
    """What the records are of, in the experiments' order."""
    opened = [(place, Results.open(place)) for place in places]
    whole, small = (read(find(experiments), quick=quick) for quick in (False, True))
    by_name = [(e.name, quick, e) for quick, those in ((False, whole), (True, small)) for e in those]
    for _, quick, experiment in sorted(by_name, key=lambda entry: entry[:2]):
        for place, results in opened:
            done, asked = results.progress([experiment])
            # Cases of other experiments may have the setting of some of a small version's.
            if experiment.name in results.entries and done > (asked / 2 if quick else 0):
                yield Section(_with_all_seeds(experiment, results), quick, place, results)
                break


def _with_all_seeds(experiment: Experiment, results: Results) -> Experiment:
    """An experiment that asks for as many seeds as its records have, where they have more than its file asks for."""
    entries = results.entries[experiment.name]["cases"].values()
    most = max(len(made["seeds"]) for entry in entries for made in entry["arms"].values())
    cases = (
        replace(case, config=replace(case.config, seeds=max(most, case.config.seeds)))
        for case in experiment.cases
    )
    return replace(experiment, cases=tuple(cases))


def page(found: Iterable[Section], root: Path = ROOT) -> str:
    """The whole page."""
    return "\n\n".join([HEAD.rstrip(), *(_section(section, root) for section in found)]) + "\n"


def _section(section: Section, root: Path) -> str:
    experiment = section.experiment
    parts = [f"## {experiment.name}{', small version' if section.quick else ''}", f"{experiment.title}."]
    parts += [experiment.finding] if experiment.finding else []
    for table in _tables(section):
        parts += [markdown_table(table), *([table.note] if table.note else [])]
    return "\n\n".join([*parts, _source(section, root)])


def _tables(section: Section) -> Iterator[Table]:
    experiment, results = section.experiment, section.results
    verdicts = verdict_table([experiment], results)
    if verdicts is not None:
        # The head of the page says what verdicts mean.
        yield Table(verdicts.header, verdicts.rows, numbers=False)
    averaged = all(case.config.aggregation.average for case in experiment.cases)
    scores = [experiment.score, *([f"average_{experiment.score}"] if averaged else [])]
    if "matrix" in experiment.show:
        for column in scores:
            yield from matrices(experiment, results, column)
    else:
        yield main_table(experiment, results, COLUMNS)
    if experiment.compare:
        for column in scores:
            yield from (table for table in rivals(experiment, results, column) if not table.folded)
    goal = race(experiment, results)
    if goal is not None:
        yield goal


def _source(section: Section, root: Path) -> str:
    """Command, records, hardware and version: what a number needs beside it."""
    experiment, results = section.experiment, section.results
    done, asked = results.progress([experiment])
    machines = list(
        dict.fromkeys(
            f"{e.get('gpu') or str(e.get('cores')) + ' cores'}, torch {e.get('torch')}"
            for e in results.environments
        )
    )
    codes = ", ".join(trials_by_version([experiment], results))
    place = section.folder.resolve()
    shown = place.relative_to(root) if place.is_relative_to(root) else place
    some = "" if done == asked else f" ({done} of {asked} trials)"
    how = f"`safari reproduce {experiment.name}{' --quick' if section.quick else ''}`{some}"
    return f"{how}; {'; '.join(machines)}; code {codes}; records in `{shown}`."


def main() -> None:
    """Read the arguments and write the page."""
    parser = argparse.ArgumentParser(description="Write results/tables.md from the records.")
    parser.add_argument("results", type=Path, nargs="*", help="folders with a results.json")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would")
    given = parser.parse_args()
    after = page(sections(given.results or folders(), shipped()))
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == after:
        return
    if given.check:
        raise SafariError(f"{PAGE} is not what the records say")
    PAGE.write_text(after, encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
