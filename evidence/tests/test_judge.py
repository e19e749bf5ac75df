"""Which claims hold, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats as scipy

from claims import TINY, write
from safari.sweep import Results
from safari.sweep.numbers import maker_of
from safari_evidence.experiments import Experiment, find, read
from safari_evidence.judge import Verdict, judge


def results_of(experiment: Experiment, **arms: list[float]) -> Results:
    """Results in which every case has these scores, a seed each."""
    cases = {}
    for case in experiment.cases:
        entries = {
            arm.name: {
                **maker_of(arm),
                "seeds": {
                    str(s): {"top1": v, "top1_wobble": v / 10, "code": ["aa"]}
                    for s, v in enumerate(arms[arm.name])
                },
            }
            for arm in case.config.arms
            if arm.name in arms
        }
        cases[case.name] = {"setting": case.setting, "arms": entries}
    return Results({experiment.name: {"cases": cases}}, [])


def experiment_with(folder: Path, *checks: str, seeds: int = 2) -> Experiment:
    told = "".join(f'[[checks]]\nsays = "so"\narm = "safari"\n{check}\n' for check in checks)
    text = TINY.partition("[[checks]]")[0] + told
    (experiment,) = read(find(write(folder, tiny=text)), [("seeds", seeds)])
    return experiment


def verdict_on(folder: Path, check: str, **arms: list[float]) -> Verdict:
    experiment = experiment_with(folder, check, seeds=max(map(len, arms.values())))
    (verdict,) = judge(experiment, results_of(experiment, **arms))
    return verdict


OURS, PERFECT = [0.50, 0.62, 0.56, 0.55], [0.51, 0.65, 0.57, 0.58]
# Behind by 1, 3, 1 and 3 points: 2 on average, standard error 1.1547 / 2 = 0.577, t 3 degrees of freedom.
BEHIND = scipy.ttest_1samp([-0.01, -0.03, -0.01, -0.03], 0.0).statistic


@pytest.mark.parametrize(
    ("check", "status", "p"),
    [
        # 2 behind, error 0.577: 5 is 5.2 errors away, 2.5 less than one, 0.1 is 3.3 on the other side.
        ("margin = 0.05", "confirmed", scipy.t.sf(0.03 / 0.0057735, 3)),
        ("margin = 0.025", "undecided", scipy.t.sf(0.005 / 0.0057735, 3)),
        ("margin = 0.001", "refuted", scipy.t.sf(0.019 / 0.0057735, 3)),
        ("within = 0.05", "confirmed", scipy.t.sf(0.03 / 0.0057735, 3)),
        ("within = 0.03", "undecided", scipy.t.sf(0.01 / 0.0057735, 3)),
    ],
)
def test_a_claim_is_a_test(tmp_path: Path, check: str, status: str, p: float) -> None:
    verdict = verdict_on(tmp_path, f'against = "perfect"\n{check}', safari=OURS, perfect=PERFECT)
    assert verdict.status == status
    # Two cases with the same numbers: both must hold, one must fail. Of two ways to fail Holm takes twice.
    assert verdict.p == pytest.approx(p * (2 if status == "refuted" else 1), rel=1e-4)
    assert [part.figure for part in verdict.parts] == ["-2.0 [-3.8, -0.2] points"] * 2
    assert [part.n for part in verdict.parts] == [4, 4]


def test_a_difference_beyond_the_margin_refutes_that_there_is_none(tmp_path: Path) -> None:
    below = [0.50, 0.61, 0.56, 0.55, 0.52]
    above = [value + 0.05 + 0.001 * k for k, value in enumerate(below)]
    verdict = verdict_on(tmp_path, 'against = "perfect"\nwithin = 0.01', safari=above, perfect=below)
    assert verdict.status == "refuted"
    better = verdict_on(tmp_path / "2", 'against = "perfect"\nmargin = 0.01', safari=above, perfect=below)
    assert better.status == "confirmed"


def test_at_least_and_times_are_tests_too(tmp_path: Path) -> None:
    sure = verdict_on(tmp_path / "a", "at_least = 0.5", safari=[0.61, 0.62, 0.6])
    assert (sure.status, sure.parts[0].figure) == ("confirmed", "61.0 [58.5, 63.5] %")
    unsure = verdict_on(tmp_path / "b", "at_least = 0.6", safari=[0.61, 0.62, 0.6])
    assert unsure.status == "undecided"
    wobble = 'column = "top1_wobble"\nagainst = "drop"\ntimes = '
    numbers = {"safari": [0.40, 0.62, 0.50], "drop": [0.20, 0.30, 0.26]}
    twice = verdict_on(tmp_path / "c", wobble + "2.5", **numbers)
    assert twice.status == "confirmed"
    assert twice.parts[0].figure.startswith("2.00 [")
    assert twice.parts[0].p_wrong == pytest.approx(
        scipy.ttest_1samp([0.010, 0.013, 0.015], 0.0, alternative="greater").pvalue
    )
    assert verdict_on(tmp_path / "d", wobble + "1.5", **numbers).status == "refuted"


def test_less_is_better_for_a_wobble(tmp_path: Path) -> None:
    numbers = {"safari": [0.40, 0.62, 0.50], "drop": [0.20, 0.40, 0.31]}
    check = 'column = "top1_wobble"\nagainst = "drop"\nmargin = '
    assert verdict_on(tmp_path / "a", check + "0.03", **numbers).status == "confirmed"
    assert verdict_on(tmp_path / "b", check + "0.001", **numbers).status == "refuted"


def test_every_rival_must_be_beaten(tmp_path: Path) -> None:
    numbers = {"safari": [0.5, 0.6, 0.71], "perfect": [0.9, 0.9, 0.9]}
    check = 'against = "*"\nmargin = 0.01'
    first = verdict_on(tmp_path / "a", check, drop=[0.4, 0.5, 0.6], **numbers)
    assert (first.status, {part.rival for part in first.parts}) == ("confirmed", {"drop"})
    assert str(first.parts[0]).startswith("mag: +10.3 [+8.9, +11.8] points against drop (n = 3, one-sided t")
    behind = verdict_on(tmp_path / "b", check, drop=[0.6, 0.7, 0.8], **numbers)
    assert behind.status == "refuted"


def test_an_arm_of_another_case_can_be_the_measure(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, 'against = "rand/safari"\nmargin = 0.0', seeds=3)
    results = results_of(experiment, safari=[0.5, 0.6, 0.7])
    arms = results.entries["tiny"]["cases"]["rand"]["arms"]
    for k, seed in enumerate("012"):
        arms["safari"]["seeds"][seed] = {"top1": 0.4 + 0.1 * k + 0.001 * k}
    (verdict,) = judge(experiment, results)
    # The case of the measure itself is no part of the claim.
    assert (verdict.status, [part.case for part in verdict.parts]) == ("confirmed", ["mag"])
    assert verdict.versions == ("aa", "unknown")


def test_many_claims_are_corrected(tmp_path: Path) -> None:
    one = verdict_on(tmp_path / "one", "at_least = 0.545", safari=[0.56, 0.57, 0.575])
    assert one.status == "confirmed"
    assert one.p is not None
    experiment = experiment_with(tmp_path / "many", *["at_least = 0.545"] * 3, seeds=3)
    verdicts = judge(experiment, results_of(experiment, safari=[0.56, 0.57, 0.575]))
    assert [v.p for v in verdicts] == [pytest.approx(3 * one.p)] * 3
    assert {v.status for v in verdicts} == {"undecided"}


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, "at_least = 0.5", safari=[0.9])
    assert (verdict.status, verdict.p, str(verdict.parts[0])) == ("undecided", None, "mag: 90.0 % (n = 1)")


def test_a_check_without_its_arm_is_not_finished(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path)), [("arms", ["safari"])])
    (verdict,) = judge(experiment, results_of(experiment, safari=[0.5, 0.62]))
    assert (verdict.status, verdict.parts) == ("not finished", ())


def test_a_claim_is_not_judged_before_every_seed_is_there(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, "at_least = 0.5", seeds=4)
    for scores in ([0.9, 0.91, 0.92], [0.1, 0.11, 0.12]):
        (verdict,) = judge(experiment, results_of(experiment, safari=scores))
        assert verdict.status == "not finished"


def test_a_check_of_some_cases_looks_at_those_alone(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, 'at_least = 0.5\ncases = ["rand"]', safari=[0.5, 0.7])
    assert [part.case for part in verdict.parts] == ["rand"]
