"""The tables of an experiment, from its results: means with intervals, differences, verdicts.

A ± is half of the 95 % interval of a mean over seeds (Student's t), of differences seed by seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from safari.stats import Interval, holm, mean_interval, sign_flip_test
from safari.sweep import Case
from safari.sweep.numbers import COLUMNS, Numbers
from safari.sweep.paired import ALPHA, Standing, Trials, paired, scale, spelled_p, standings
from safari.sweep.results import Results, trials_by_version, versions
from safari_evidence.blocks import Table
from safari_evidence.experiments import Experiment
from safari_evidence.judge import judge, reference_of

NOTHING = "–"
MINUS = "minus perfect"
AHEAD, BEHIND = "▲", "▼"
PLUS_MINUS = (
    "± is half of the 95 % interval of the mean over seeds (Student's t), of differences seed by seed."
)
_TITLES = {
    "top1": "top-1 %",
    "top1_wobble": "wobble",
    "alternation": "even−odd",
    "average_top1": "top-1 of the average %",
    "average_top1_wobble": "its wobble",
    "top5": "top-5 %",
    "average_top5": "top-5 of the average %",
    "perplexity": "perplexity",
    "perplexity_wobble": "wobble",
    "average_perplexity": "perplexity of the average",
    "accuracy": "accuracy %",
    "average_accuracy": "accuracy of the average %",
    "loss": "loss",
    "loss_wobble": "its wobble",
    "rounds_to_target": "rounds to target",
    "rounds_to_stay": "to stay there",
    "right_group": "right group %",
    "phi": "φ",
    "error": "error",
    "lost_updates": "lost %",
    "megabytes_up": "MB up",
}
# Columns without an interval, and those beside which stands the difference to the perfect network.
_MEANS_ALONE = (
    "top1_wobble",
    "average_top1_wobble",
    "loss_wobble",
    "perplexity_wobble",
    "alternation",
    "lost_updates",
    "megabytes_up",
)
_GAPS = ("top1", "average_top1", "perplexity", "average_perplexity", "accuracy", "average_accuracy")
# Numbers for which one decimal is too coarse.
_FINE = ("loss", "loss_wobble", "phi", "error", "perplexity", "perplexity_wobble", "average_perplexity")


def verdict_table(experiments: Sequence[Experiment], results: Results) -> Table | None:
    """Each claim with its verdict, how sure it is, and our figures; None without claims."""
    rows = []
    for experiment in experiments:
        for verdict in judge(experiment, results):
            p = NOTHING if verdict.p is None else spelled_p(verdict.p)
            figures = str(verdict) or NOTHING
            if len(verdict.versions) > 1:
                figures += f" (code versions {', '.join(verdict.versions)})"
            rows.append([experiment.name, verdict.check.says, verdict.status, p, figures])
    note = (
        f"A claim is confirmed where a test rejects its opposite at {100 * ALPHA:g} %, refuted where one "
        "rejects the claim, and undecided otherwise. p: of the claim, of its opposite where refuted, after "
        "Holm's correction over the claims of its experiment. In brackets: the 95 % interval of the mean "
        "over seeds, of differences seed by seed; then n, the test and its p-value, and that of a test "
        "that only flips signs, which cannot fall below 2 to the power of −n."
    )
    header = ["experiment", "claim", "verdict", "p", "our figures"]
    return Table(header, rows, note, numbers=False) if rows else None


def main_table(
    experiment: Experiment, results: Results, columns: Sequence[str] = (), *, folded: bool = False
) -> Table:
    """Table of these columns, or of all, as far as they have numbers; a row for each case and arm.

    Once something is finished, what has not been run at all is named below the table instead.
    """
    # The alternation is given in points.
    hidden = () if experiment.score == "top1" else ("alternation",)
    names = [name for name in _TITLES if (not columns or name in columns) and name not in hidden]
    rows = []
    several = len(trials_by_version([experiment], results)) > 1
    finished = any(_arms_run(case, results) for case in experiment.cases)
    for case in experiment.cases:
        reference = reference_of(case)
        for arm in case.config.arms:
            trials = results.arm(case, arm)
            if finished and not trials:
                continue
            other = results.arm(case, reference) if reference and arm != reference else {}
            row = [case.name, arm.name]
            for name in names:
                row += [_mean(trials, name), *([_gap(trials, other, name)] if name in _GAPS else [])]
            code = [", ".join(sorted(versions(trials))) or NOTHING] if several else []
            rows.append([*row, f"{len(trials)} of {case.config.seeds}", *code])
    titles = [t for name in names for t in (_TITLES[name], *([MINUS] if name in _GAPS else []))]
    header = ["case", "arm", *titles, "seeds", *(["code"] if several else [])]
    kept = [k for k in range(len(header)) if k < 2 or any(row[k] != NOTHING for row in rows)]
    wobble = (
        " Wobble: standard deviation within those rounds, of top-1 in points, without its trend and without "
        "the difference between even and odd rounds, which has a column of its own."
    )
    note = (
        f"{_lengths(experiment.cases)} Scores are means over the evaluations of those last rounds, then over "
        f"seeds; {PLUS_MINUS}{wobble if 'top1_wobble' in names and experiment.score == 'top1' else ''} Minus "
        f"perfect: {'points' if experiment.score == 'top1' else 'of perplexities as they are, of accuracies points'}."
        f"{_not_run(_missing(experiment, results)) if finished else ''}"
    )
    return Table(
        [header[k] for k in kept], [[row[k] for k in kept] for row in rows], note, folded=folded, names=2
    )


def matrices(experiment: Experiment, results: Results, name: str = "top1") -> Iterator[Table]:
    """A table for each value of all axes but the last, whose values are the columns; arms are the rows.

    Once something is finished, tables and rows without a number are named below the last table instead.
    """
    parts: dict[tuple[str, ...], list[Case]] = {}
    for case in experiment.cases:
        parts.setdefault(case.values[:-1], []).append(case)
    arms, absent = experiment.arms, list[str]()
    run = {arm for case in experiment.cases for arm in _arms_run(case, results)}
    if run:
        empty = [v for v, cases in parts.items() if not any(_arms_run(case, results) for case in cases)]
        parts = {values: cases for values, cases in parts.items() if values not in empty}
        absent = [" · ".join(values) for values in empty] + [arm for arm in arms if arm not in run]
        arms = [arm for arm in arms if arm in run]
    unranked = ", ".join(arm for arm in experiment.unranked if arm in arms)
    note = (
        f"{_TITLES[name]}; {PLUS_MINUS} Bold: the best. Italic: not shown to be behind it (paired "
        f"t-tests, Holm's correction over the column, {100 * ALPHA:g} %), which is not the same as level."
        + (f" Not ranked: {unranked}." if unranked else "")
        + _not_run(absent)
    )
    for k, (values, cases) in enumerate(parts.items(), 1):
        columns = [standings(results.arms(case), name, experiment.unranked) for case in cases]
        rows = [[arm, *(_cell(found.get(arm)) for found in columns)] for arm in arms]
        header = [" · ".join(values), *(case.values[-1] if case.values else case.name for case in cases)]
        yield Table(header, rows, note if k == len(parts) else "")


def rivals(experiment: Experiment, results: Results, name: str = "top1") -> Iterator[Table]:
    """The arm that the experiment compares, against every ranked rival: over all cases, over those that differ in the
    last axis alone (here with the unranked arms, too), then case by case."""
    ours = experiment.compare
    others = [arm for arm in experiment.arms if arm != ours and arm not in experiment.unranked]
    trials = {case.name: results.arms(case) for case in experiment.cases}
    found = {}
    for case, arms in trials.items():
        for rival in others:
            gap = paired(arms.get(ours, {}), arms.get(rival, {}), name)
            if gap is not None:
                found[rival, case] = gap
    if not ours or not found:
        return
    tested = {key: gap.p for key, gap in found.items() if gap.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    sign = 1.0 if COLUMNS[name] else -1.0
    factor, unit = scale(name)

    def arrow(key: tuple[str, str]) -> str:
        if adjusted.get(key, 1.0) > ALPHA:
            return ""
        return AHEAD if sign * found[key].mean > 0 else BEHIND

    compared = [case.name for case in experiment.cases if any(case.name == where for _, where in found)]
    whole, single = [], []
    for rival in others:
        keys = [key for key in found if key[0] == rival]
        if not keys:
            continue
        signs = sign_flip_test([found[key].mean for key in keys])
        shown = [arrow(key) for key in keys]
        whole.append(
            [
                rival,
                _over_cases(ours, rival, trials.values(), name),
                f"{sum(sign * found[key].mean > 0 for key in keys)} of {len(keys)}",
                str(shown.count(AHEAD)),
                str(shown.count(BEHIND)),
                NOTHING if signs is None else spelled_p(signs),
            ]
        )
        texts = {
            case: f"{_with_half(factor * found[rival, case].mean, found[rival, case].interval, factor)}"
            f"{arrow((rival, case))}"
            for _, case in keys
        }
        single.append([rival, *(texts.get(case, NOTHING) for case in compared)])
    what = f"{_TITLES[name]}{', in points' if unit else ''}"
    yield Table(
        [f"{ours} minus", "mean over the cases", "ahead in", "shown ahead", "shown behind", "p over cases"],
        whole,
        f"{what}: {ours} minus the rival. {PLUS_MINUS} Shown: paired t-tests with Holm's correction over all "
        f"{len(tested)} of them, {100 * ALPHA:g} %. p over cases: two-sided, flipping the signs of the "
        "cases' means.",
    )
    yield from _by_group(experiment, trials, name, what)
    yield Table(
        [f"{ours} minus", *compared],
        single,
        f"{what}, case by case. {AHEAD} {BEHIND}: shown to be ahead, behind.",
        folded=True,
    )


def race(experiment: Experiment, results: Results) -> Table | None:
    """Rounds and megabytes up until an arm first reaches the final accuracy of the goal, seed by seed."""
    if not experiment.goal:
        return None
    place, _, name = experiment.goal.rpartition("/")
    where = next(case for case in experiment.cases if case.name == place)
    goal = results.arms(where).get(name, {})
    rows = []
    for case in experiment.cases:
        for arm, trials in results.arms(case).items():
            row = [case.name, arm]
            for column in ("top1", "average_top1"):
                levels = {seed: numbers.get(column) for seed, numbers in goal.items()}
                reached = [
                    _first(trials[seed], column, level)
                    for seed, level in levels.items()
                    if level is not None and column in trials.get(seed, {}).get("curve", {})
                ]
                row += _race_cells(reached)
            rows.append(row)
    if not any(cell != NOTHING for row in rows for cell in row[2:]):
        return None
    header = ["case", "arm", "rounds", "MB up", "rounds of the average", "MB up"]
    note = (
        f"Until top-1 first reaches the final top-1 of {experiment.goal} with the same seed; averages "
        "against its average. Means over the seeds that reach it; MB up: all messages that clients sent "
        "by then, arrived or not."
    )
    return Table(header, rows, note, names=2)


def _arms_run(case: Case, results: Results) -> set[str]:
    """The arms of a case that have a finished trial."""
    return {arm for arm, trials in results.arms(case).items() if trials}


def _missing(experiment: Experiment, results: Results) -> list[str]:
    """Names of all that has no finished trial: whole cases, then single arms of the others."""
    cases, arms = [], []
    for case in experiment.cases:
        run = _arms_run(case, results)
        if not run:
            cases.append(case.name)
        else:
            arms += [f"{case.name}/{arm.name}" for arm in case.config.arms if arm.name not in run]
    return cases + arms


def _not_run(names: Sequence[str]) -> str:
    return f" Not run: {', '.join(names)}." if names else ""


def _first(trial: Numbers, name: str, level: float) -> tuple[float, float | None] | None:
    """The first evaluation at `level`: round, and megabytes sent by then."""
    curve = trial["curve"]
    for k, value in enumerate(curve[name]):
        if value is not None and value >= level:
            sent = curve.get("megabytes_up")
            return curve["round"][k], None if sent is None else sent[k]
    return None


def _race_cells(reached: Sequence[tuple[float, float | None] | None]) -> list[str]:
    known = [r for r in reached if r is not None]
    if not reached:
        return [NOTHING, NOTHING]
    of = f" ({len(known)} of {len(reached)})"
    if not known:
        return [f"{NOTHING}{of}", NOTHING]
    sent = [mb for _, mb in known if mb is not None]
    return [f"{fmean(r for r, _ in known):.0f}{of}", f"{fmean(sent):.3g}" if sent else NOTHING]


def _by_group(
    experiment: Experiment, trials: Mapping[str, Mapping[str, Trials]], name: str, what: str
) -> Iterator[Table]:
    """Differences to `compare` as means over the last axis; no table for fewer than two groups."""
    ours, groups = experiment.compare, dict[str, list[Mapping[str, Trials]]]()
    for case in experiment.cases:
        if any(trials[case.name].values()):
            groups.setdefault(" · ".join(case.values[:-1]), []).append(trials[case.name])
    if len(groups) < 2:
        return
    groups[f"all {sum(map(len, groups.values()))}"] = [arms for cases in groups.values() for arms in cases]
    others = [arm for arm in experiment.arms if arm != ours]
    rows = [
        [group, *(_over_cases(ours, arm, cases, name) for arm in others)] for group, cases in groups.items()
    ]
    run = [0, *(k for k in range(1, len(others) + 1) if any(row[k] != NOTHING for row in rows))]
    header = [f"{ours} minus", *others]
    yield Table(
        [header[k] for k in run],
        [[row[k] for k in run] for row in rows],
        f"{what}: means over the cases of each row.",
    )


def _over_cases(ours: str, rival: str, cases: Iterable[Mapping[str, Trials]], name: str) -> str:
    """The mean difference over the cases, with its interval over the seeds that all cases have."""
    by_seed: dict[int, list[float]] = {}
    for arms in cases:
        for seed, numbers in arms.get(ours, {}).items():
            other = arms.get(rival, {}).get(seed, {})
            if numbers.get(name) is not None and other.get(name) is not None:
                by_seed.setdefault(seed, []).append(numbers[name] - other[name])
    most = max(map(len, by_seed.values()), default=0)
    means = [fmean(gaps) for gaps in by_seed.values() if len(gaps) == most]
    factor, _ = scale(name)
    return _with_half(factor * fmean(means), mean_interval(means), factor) if means else NOTHING


def _with_half(mean: float, interval: Interval | None, factor: float, digits: int = 1) -> str:
    half = "" if interval is None else f" ± {factor * (interval.high - interval.low) / 2:.{digits}f}"
    # Adding 0 turns a rounded -0.0 into +0.0.
    return f"{round(mean, digits) + 0.0:+.{digits}f}{half}"


def _cell(cell: Standing | None) -> str:
    if cell is None:
        return NOTHING
    half = "" if cell.interval is None else f" ± {50 * (cell.interval.high - cell.interval.low):.1f}"
    text = f"{100 * cell.mean:.1f}{half}"
    return {"best": f"**{text}**", "level": f"*{text}*", "": text}[cell.mark]


def _lengths(cases: Sequence[Case]) -> str:
    """Rounds of the cases, those by which they are judged, and their target; one sentence if all are alike."""
    names: dict[str, list[str]] = {}
    for case in cases:
        last, percent = case.config.evaluation.last, case.config.task.name != "tokens"
        target = case.config.evaluation.goal(percent)
        text = f"{case.config.rounds} rounds, the last {last} count"
        if target is not None:
            text += f", target {100 * target:g} % top-1" if percent else f", target perplexity {target:g}"
        names.setdefault(text, []).append(case.name)
    if len(names) == 1:
        return f"{next(iter(names))}."
    return " ".join(f"{', '.join(of)}: {text}." for text, of in names.items())


def _gap(trials: Mapping[int, Numbers], other: Mapping[int, Numbers], name: str) -> str:
    gap = paired(trials, other, name)
    factor, _ = scale(name)
    digits = 3 if name in _FINE else 1
    return NOTHING if gap is None else _with_half(factor * gap.mean, gap.interval, factor, digits)


def _mean(trials: Mapping[int, Numbers], name: str) -> str:
    values = [t[name] for t in trials.values() if t.get(name) is not None]
    if not values:
        return NOTHING
    factor, _ = scale(name)
    digits = 0 if name.startswith("rounds") else 3 if name in _FINE else 1
    text = f"{factor * fmean(values):.{digits}f}"
    interval = mean_interval(values)
    if interval is not None and name not in _MEANS_ALONE:
        text += f" ± {factor * (interval.high - interval.low) / 2:.{digits}f}"
    return text + (f" ({len(values)} of {len(trials)})" if len(values) < len(trials) else "")
