"""`safari reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from safari.cli.working import Asked, work, work_options
from safari.errors import ConfigError
from safari.text import visible

if TYPE_CHECKING:
    from safari.sweep import Results
    from safari_evidence.experiments import Experiment

# Characters of a claim that are shown.
_LONGEST_CLAIM = 240


def complete_experiment(ctx: click.Context, param: click.Parameter, text: str) -> list[CompletionItem]:
    """Experiments by name."""
    from safari_evidence.folder import shipped

    folder = ctx.params.get("folder") or shipped()
    return [CompletionItem(file.stem) for file in sorted(folder.glob("*.toml")) if file.stem.startswith(text)]


@click.command(short_help="Run the claims of the paper again.")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_experiment)
@work_options("runs/reproduce")
@click.option("--no-report", is_flag=True, help="Leave the page for later: only runs and results.json.")
@click.option(
    "--from",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of experiment files.  [default: those that come with the package]",
)
def reproduce(names: tuple[str, ...], no_report: bool, folder: Path | None, **options: Any) -> None:
    """Run the claims of the paper again: the experiments NAME, or all of them.

    Each experiment is a sweep with the paper's words. What is finished is never run twice, and what was
    interrupted goes on. The report, with the paper's words beside the figures, shows what is done so far.

    \b
    Examples:
      safari reproduce --list
      safari reproduce digits
      safari reproduce accuracy sparsity --jobs 6 --set rounds=500
      safari reproduce rules --only 'fedavg.groups.*,*.iid.labels' --seeds 3
      safari reproduce rules --arms 'perfect,drop,safari+' --seeds 3
      safari reproduce accuracy --report-only
      safari reproduce accuracy --add FROM-ANOTHER-MACHINE
    """
    asked = Asked(**options)
    if folder is None:
        # The experiments of this package.
        asked = replace(asked, trust=True)
    with asked.using():
        work(_read(names, asked, folder), asked, _Page(not no_report, own=folder is not None))


def _read(names: Sequence[str], asked: Asked, folder: Path | None) -> list[Experiment]:
    from safari_evidence.experiments import find, read
    from safari_evidence.folder import shipped

    experiments = read(find(folder or shipped(), names), asked.changes, quick=asked.quick)
    for name in names:
        if name not in {e.name for e in experiments}:
            raise ConfigError(f"{name} has no small version: run it without --quick")
    return experiments


@dataclass(frozen=True)
class _Page:
    """Verdicts, and a page unless it is left for later. `own`: the experiments are a user's own."""

    page: bool
    own: bool

    def words(self, sweep: Experiment) -> str:
        """The claim."""
        return sweep.claim

    def write(self, sweeps: Sequence[Experiment], results: Results, out: Path) -> str:
        """Write the page."""
        if not self.page:
            return f"numbers: {out / 'results.json'}"
        from safari_evidence.page import TITLE, write_page

        return f"report: {write_page(sweeps, results, out, 'Experiments' if self.own else TITLE)}"

    def show(self, sweeps: Sequence[Experiment], results: Results, out: Path) -> None:
        """Print the verdicts."""
        from safari.sweep.paired import spelled_p
        from safari_evidence.judge import judge

        for experiment in sweeps:
            for verdict in judge(experiment, results):
                if verdict.status != "not finished":
                    p = "" if verdict.p is None else f" (p {spelled_p(verdict.p)} after Holm's correction)"
                    says = visible(verdict.check.says, _LONGEST_CLAIM)
                    click.echo(f"{experiment.name}: {says}: {verdict.status}{p}")
                    for part in verdict.parts:
                        click.echo(f"  {part}")

    def as_json(self, sweep: Experiment, results: Results, out: Path) -> dict[str, Any]:
        """The verdicts."""
        from safari_evidence.judge import judge

        verdicts = [
            {
                "claim": verdict.check.says,
                "verdict": verdict.status,
                "p": verdict.p,
                "parts": [asdict(part) for part in verdict.parts],
            }
            for verdict in judge(sweep, results)
        ]
        return {"verdicts": verdicts}
