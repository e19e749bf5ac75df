"""`safari.load`: a run to work with, its tables as data frames, its figures, its models."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safari.config import Config
from safari.errors import MissingExtraError, RunError, one_of
from safari.report.gallery import Drawn, draw_all
from safari.report.gather import read_run
from safari.report.live import show_figures
from safari.report.style import styled
from safari.report.table import cells, rows_of, to_text
from safari.report.trained import Picked, TrainedModel, pick, saved_model
from safari.runs import RunFolder, RunMetrics, Trial, summarise
from safari.runs.tables import TEXTS, Columns, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import Tensor, nn


@dataclass(frozen=True, repr=False)
class Run:
    """A run's folder, opened for reading. Every call reads its present contents, also during the run.

    Tables are pandas frames; `columns` gives the same as plain lists, for Polars, Arrow or nothing at all. Lines of
    the records that are damaged are left out, with a warning that names them. Nothing of the run is executed:
    neither plug-ins that its config names nor anything that its files say.
    """

    folder: RunFolder

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder.path

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.folder.config

    @property
    def metrics(self) -> RunMetrics:
        """The metrics of the run's tests: names, labels, and which one is the score."""
        return self.folder.metrics

    def rounds(self) -> DataFrame:
        """A row for each arm, seed and round: metrics, losses, masks, bytes, arrivals, seconds."""
        return self._frame("rounds")

    def clients(self) -> DataFrame:
        """A row for each arm, seed and client: how often it was asked, arrived, was lost, was stood in for."""
        return self._frame("clients")

    def arrivals(self) -> DataFrame:
        """A row for each arm, seed, round and client that was asked: what became of it, and who stood in."""
        return self._frame("arrivals")

    def layers(self) -> DataFrame:
        """A row for each arm, seed, round and prunable tensor: density, churn, and the age of its mask."""
        return self._frame("layers")

    def summary(self) -> DataFrame:
        """A row for each arm and seed: final metrics, rounds to the target, bytes, lost updates."""
        return self._frame("summary")

    def columns(self, table: str) -> Columns:
        """A table as lists by the column's name; None where there is no number.

        Args:
            table: `rounds`, `clients`, `arrivals`, `layers` or `summary`.
        """
        skipped: list[str] = []
        found = columns(self.folder, table, skipped)
        _warn(skipped)
        return found

    def figures(self) -> dict[str, Figure]:
        """Every figure for which the records have data, by name; needs the extra `plots`."""
        return {drawn.name: drawn.figure for drawn in self._drawn()}

    def figure(self, name: str | None = None) -> Figure:
        """One figure; by default the one of the score. RunError names those that there are."""
        found = {drawn.name: drawn for drawn in self._drawn()}
        wanted = name or self.metrics.score.replace("_", "-")
        if wanted in found:
            return found[wanted].figure
        if not found:
            raise RunError(f"{self.path} has no records yet")
        for drawn in found.values():
            if wanted in drawn.same:
                raise RunError(
                    f"figure must be one of {', '.join(sorted(found))}; got {wanted!r}, which looks the same "
                    f"as {drawn.name!r} and is drawn once, under that name"
                )
        raise RunError(one_of("figure", wanted, found))

    def _drawn(self) -> list[Drawn]:
        data = read_run(self.folder)
        _warn(list(data.skipped))
        show_figures()
        with styled():
            return list(draw_all([data]))

    def model(
        self,
        arm: str | None = None,
        seed: int | None = None,
        *,
        average: bool = False,
        best: bool = False,
    ) -> Tensor:
        """The global model at the newest checkpoint, one vector; `Layout.write` puts it into a module.

        Args:
            arm: whose; may be left out where the run has one.
            seed: of which seed; the first by default.
            average: the running average instead, where the run keeps one (`aggregation.average`).
            best: after the round with the best score instead, where the run keeps that (`checkpoint.best`).
        """
        return saved_model(self._trial(arm, seed), average=average, best=best)[1]

    def module(
        self,
        arm: str | None = None,
        seed: int | None = None,
        *,
        average: bool = False,
        best: bool = False,
        net: nn.Module | None = None,
    ) -> TrainedModel:
        """The trained model as a torch module, ready for raw data: pixels from 0 to 1, columns as they were read.

        It scales its inputs as the run did; `classes` has the names of its outputs, `net` the model by itself.

        Args:
            arm, seed, average, best: which model, as in `model`.
            net: an instance of the model, where it is code of your own, which is not run here.
        """
        return self.pick(arm, seed, average=average, best=best, net=net).module

    def pick(
        self,
        arm: str | None = None,
        seed: int | None = None,
        *,
        average: bool = False,
        best: bool = False,
        net: nn.Module | None = None,
    ) -> Picked:
        """The trained model with what is known about it, for `safari.exports.export`; arguments as of `module`."""
        return pick(self.folder, self._trial(arm, seed), average=average, best=best, net=net)

    def _trial(self, arm: str | None, seed: int | None) -> Trial:
        arms = [each.name for each in self.config.arms]
        if arm is None and len(arms) > 1:
            raise RunError(f"arm must be given where there are several: {', '.join(arms)}")
        wanted, first = arm or arms[0], self.config.seed if seed is None else seed
        if wanted not in arms:
            raise RunError(one_of("arm", wanted, arms))
        for trial in self.folder.trials():
            if (trial.arm, trial.seed) == (wanted, first):
                if not trial.done():
                    raise RunError(f"{trial.path} has no checkpoint yet")
                return trial
        raise RunError(f"{self.path} has no trial of arm {wanted} and seed {first} yet")

    def _frame(self, table: str) -> DataFrame:
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError(
                "pandas", "pandas", f"data frames (run.columns({table!r}) gives plain lists)"
            ) from error
        found = self.columns(table)
        # Among numbers None becomes NaN; a column of nothing but None is one of objects, which have no mean.
        missing = [name for name, values in found.items() if values and set(values) == {None}]
        return pandas.DataFrame(found).astype({name: "float64" for name in missing if name not in TEXTS})

    def _summary(self) -> dict[str, Any]:
        return summarise(self.folder, [])

    def __repr__(self) -> str:
        return f"{self.path}\n{to_text(rows_of({self.config.name: self._summary()}))}".rstrip()

    def _repr_html_(self) -> str:
        """The table of results, as a notebook shows it."""
        header, body = cells(rows_of({self.config.name: self._summary()}))
        head = "".join(f"<th>{escape(text)}</th>" for text in header)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>" for line in body
        )
        caption = f"<caption>{escape(str(self.path))}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def load(path: str | Path) -> Run:
    """A run to work with, finished or not; RunError where the folder holds none.

    Args:
        path: the run's folder.

    >>> import tempfile
    >>> import safari
    >>> small = {"rounds": 2, "arms": ["drop"], "clients": 5, "model": {"name": "mlp"}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = safari.run(small, f"{folder}/first", progress=False, report=False)
    ...     safari.load(f"{folder}/first").columns("rounds")["round"]
    [1, 2]
    """
    return Run(RunFolder.open(Path(path)))


def _warn(skipped: list[str]) -> None:
    for line in dict.fromkeys(skipped):
        warnings.warn(f"left out: {line}", stacklevel=4)
