"""Fill the tables of docs/evidence.md from the records.

    python evidence/make_tables.py [--page PAGE]... [--check] [RESULTS...]

A page holds blocks such as

    <!-- evidence: rivals rules average_top1 -->
    <!-- end of evidence -->

and what stands between the two lines is written here. Kinds: `verdicts NAME...`, `table NAME [COLUMN]...`,
`matrix NAME [COLUMN]`, `rivals NAME [COLUMN]`, `race NAME`, with the names of experiments and columns. An
experiment's numbers come from the first of the folders RESULTS (of `safari reproduce --out`; by default
results/evidence*, the last one first) that has any of it; below each table stand hardware, version of the
code and records. What has no records yet says so. `--check` writes nothing and fails where a page is not
what the records say.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safari.errors import SafariError
from safari.sweep import Results, trials_by_version
from safari.sweep.numbers import COLUMNS
from safari_evidence.blocks import Table, markdown_table
from safari_evidence.experiments import Experiment, find, read
from safari_evidence.folder import shipped
from safari_evidence.tables import main_table, matrices, race, rivals, verdict_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence.md"
BLOCK = re.compile(r"(<!-- evidence: (.+?) -->\n).*?(<!-- end of evidence -->)", re.DOTALL)
KINDS = ("verdicts", "table", "matrix", "rivals", "race")


class PageError(SafariError):
    """A block that asks for what there is not."""


@dataclass(frozen=True)
class Records:
    """The folders of results, and the experiments that their numbers belong to."""

    folders: tuple[tuple[Path, Results], ...]
    experiments: dict[str, Experiment]

    @classmethod
    def open(cls, folders: Iterable[Path], experiments: Path) -> Records:
        """Read all of them."""
        found = {e.name: e for e in read(find(experiments))}
        return cls(tuple((folder, Results.open(folder)) for folder in folders), found)

    def of(self, name: str) -> tuple[Experiment, Path, Results] | None:
        """An experiment, and the first folder that has a finished trial of it; None where none has."""
        if name not in self.experiments:
            raise PageError(f"{name} is not an experiment (of {', '.join(sorted(self.experiments))})")
        experiment = self.experiments[name]
        for folder, results in self.folders:
            if name in results.entries and results.progress([experiment])[0]:
                return experiment, folder, results
        return None


def folders() -> list[Path]:
    """The folders of results that come with the repository: a later edition sorts behind and goes first."""
    return sorted(ROOT.glob("results/evidence*"), reverse=True)


def filled(text: str, records: Records, root: Path = ROOT) -> str:
    """A page with all its blocks written anew."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{written(match[2].split(), records, root)}\n{match[3]}"

    return BLOCK.sub(block, text)


def written(words: Sequence[str], records: Records, root: Path) -> str:
    """What one block asks for, in Markdown."""
    kind, names = words[0], words[1:]
    if kind not in KINDS or not names:
        raise PageError(f"a block must be one of {', '.join(KINDS)} with a name, got {' '.join(words)!r}")
    experiments = names if kind == "verdicts" else names[:1]
    columns = [] if kind == "verdicts" else names[1:]
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown:
        raise PageError(f"{unknown[0]} is not a column (of {', '.join(COLUMNS)})")
    parts = [_part(kind, name, columns, records, root) for name in experiments]
    return "\n\n".join(parts)


def _part(kind: str, name: str, columns: Sequence[str], records: Records, root: Path) -> str:
    found = records.of(name)
    if found is None:
        return f"*Not run yet: `safari reproduce {name}`.*"
    experiment, folder, results = found
    texts = []
    for table in _tables(kind, experiment, results, columns):
        # The page itself says what verdicts mean.
        texts += [markdown_table(table), *([table.note] if table.note and kind != "verdicts" else [])]
    return "\n\n".join([*texts, _source(experiment, folder, results, root)])


def _tables(kind: str, experiment: Experiment, results: Results, columns: Sequence[str]) -> Iterator[Table]:
    column = columns[0] if columns else "top1"
    if kind == "verdicts":
        table = verdict_table([experiment], results)
        yield from [] if table is None else [table]
    elif kind == "table":
        yield main_table(experiment, results, columns)
    elif kind == "matrix":
        yield from matrices(experiment, results, column)
    elif kind == "rivals":
        yield from (table for table in rivals(experiment, results, column) if not table.folded)
    else:
        table = race(experiment, results)
        yield from [] if table is None else [table]


def _source(experiment: Experiment, folder: Path, results: Results, root: Path) -> str:
    """Command, records, hardware and version: what a number needs beside it."""
    done, asked = results.progress([experiment])
    machines = list(
        dict.fromkeys(
            f"{e.get('gpu') or str(e.get('cores')) + ' cores'}, torch {e.get('torch')}"
            for e in results.environments
        )
    )
    codes = ", ".join(trials_by_version([experiment], results))
    place = folder.resolve()
    shown = place.relative_to(root) if place.is_relative_to(root) else place
    some = "" if done == asked else f" ({done} of {asked} trials)"
    how = f"`safari reproduce {experiment.name}`{some}; {'; '.join(machines)}; code {codes}"
    return f"{how}; records in `{shown}`."


def main() -> None:
    """Read the arguments and write the pages."""
    parser = argparse.ArgumentParser(description="Fill the tables of docs/evidence.md from the records.")
    parser.add_argument("results", type=Path, nargs="*", help="folders with a results.json")
    parser.add_argument("--page", type=Path, action="append", help="to fill; docs/evidence.md by default")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would")
    given = parser.parse_args()
    records, stale = Records.open(given.results or folders(), shipped()), []
    for page in given.page or [PAGE]:
        before = page.read_text(encoding="utf-8")
        after = filled(before, records)
        if after != before and given.check:
            stale.append(str(page))
        elif after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page}")
    if stale:
        raise SystemExit(f"not what the records say: {', '.join(stale)}")


if __name__ == "__main__":
    main()
