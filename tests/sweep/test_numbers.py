"""A trial in few numbers: by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from report.made_up import record
from safari.config import parse
from safari.runs import Trial
from safari.sweep.numbers import _seconds, group_of, trial_numbers

ROOT = Path(__file__).parents[2]
CONFIG = parse({"rounds": 4, "clients": 3, "evaluation": {"last": 2, "target": 0.5}})


def test_the_curve_has_the_evaluations_and_final_numbers_are_of_the_last_rounds() -> None:
    scores = [0.1, None, 0.5, 0.75]
    records = [record(t, top1=s, loss=None if s is None else 2.0 - s) for t, s in enumerate(scores, 1)]
    found = trial_numbers(records, CONFIG, None)
    assert found["curve"]["round"] == [1, 3, 4]
    assert found["curve"]["top1"] == [0.1, 0.5, 0.75]
    assert (found["top1"], found["top1_wobble"]) == (0.625, None)  # two evaluations have a trend only
    assert (found["rounds_to_target"], found["rounds_to_stay"]) == (3, 3)
    assert found["finished"] is True
    assert found["right_group"] is None
    assert "groups" not in found


def test_the_average_is_kept_where_there_is_one() -> None:
    averages = [None, {"top1": 0.25, "top5": 0.5, "loss": 2.0}, {"top1": 0.5, "top5": 1.0, "loss": 1.0}]
    records = [
        record(t, average=found, **({} if found else {"top1": None})) for t, found in enumerate(averages, 2)
    ]
    found = trial_numbers(records, CONFIG, None)
    assert found["average_top1"] == 0.375
    assert (found["average_top5"], found["average_loss"]) == (0.75, 1.5)
    assert found["curve"]["round"] == [3, 4]
    assert found["curve"]["average_top1"] == [0.25, 0.5]
    assert found["curve"]["average_loss"] == [2.0, 1.0]


@pytest.mark.parametrize("more", [{}, {"average": None}])
def test_numbers_without_an_average_do_not_name_it(more: dict[str, None]) -> None:
    found = trial_numbers([record(t, **more) for t in range(1, 5)], CONFIG, None)
    assert [name for name in (*found, *found["curve"]) if name.startswith("average")] == []


def test_the_right_group_is_that_of_the_first_stand_in() -> None:
    # Clients 0 and 2 are of one group, 1 is of another.
    choices = [{"2": [0]}, {"2": [1, 0]}, {"2": [0, 1], "1": [0]}, {"2": []}]
    records = [record(t, stand_ins=who) for t, who in enumerate(choices, 1)]
    found = trial_numbers(records, CONFIG, [0, 1, 0])
    assert found["right_group"] == pytest.approx(2 / 4)
    # Four windows of a round each; the last has nobody.
    assert found["groups"] == {"round": [0.5, 1.5, 2.5], "share": [1.0, 0.0, 0.5]}


ODD_SECONDS = ["x", None, [1.5], "1", -1, 1e308, 10**400, float("inf"), float("nan")]


@pytest.mark.parametrize("odd", ODD_SECONDS)
def test_seconds_that_are_none_do_not_count(tmp_path: Path, odd: object) -> None:
    timings = [{"round": 1, "train": 1.5, "wire": odd, "mask": odd}, {"round": 2, "train": 0.25}]
    text = "".join(json.dumps(line) + "\n" for line in timings)
    trial = Trial("drop", 0, tmp_path)
    trial.timings.write_text(text.replace("Infinity", "1e999").replace("NaN", "-1e999"))
    assert _seconds(trial) == 1.75


def test_a_diagnosis_without_all_quantities_has_what_there_is() -> None:
    records = [record(t, diagnosis={"error": 0.5}) for t in range(1, 5)]
    found = trial_numbers(records, CONFIG, None)
    assert (found["error"], found["phi"]) == (0.5, None)
    assert found["diagnosis"]["delta"] == [None] * 4


def test_a_rule_without_stand_ins_has_no_share_of_right_groups() -> None:
    found = trial_numbers([record(t, stand_ins={}) for t in range(1, 5)], CONFIG, [0, 1, 0])
    assert found["right_group"] is None


def test_diagnoses_are_kept_and_averaged() -> None:
    given = [None, {"error": 0.5, "phi": None, "delta": 0.25, "dissimilarity": 3.0}] * 2
    given[3] = {"error": 0.25, "phi": 0.5, "delta": 0.0, "dissimilarity": 1.0}
    records = [record(t, diagnosis=d) for t, d in enumerate(given, 1)]
    found = trial_numbers(records, CONFIG, None)
    assert found["diagnosis"] == {
        "round": [2, 4], "error": [0.5, 0.25], "phi": [None, 0.5], "delta": [0.25, 0.0],
        "dissimilarity": [3.0, 1.0],
    }  # fmt: skip
    assert (found["error"], found["phi"]) == (0.375, 0.5)


def test_groups_are_those_of_the_partition() -> None:
    """As the partition cuts clients: contiguous, the first blocks larger by one."""
    import numpy as np

    from safari.data import PARTITIONS

    for clients, groups in ((10, 2), (7, 3), (5, 5)):
        config = parse({"clients": clients, "partition": {"name": "groups", "groups": groups}})
        labels = np.repeat(np.arange(10), 20)
        parts = PARTITIONS["groups"](labels, clients, np.random.default_rng(0), groups=groups)
        held = [frozenset(labels[part].tolist()) for part in parts]
        found = group_of(config)
        assert found is not None
        for a in range(clients):
            for b in range(clients):
                assert (found[a] == found[b]) == (held[a] == held[b])
    assert group_of(parse({"partition": {"name": "iid"}})) is None


def test_megabytes_count_every_message_that_was_sent() -> None:
    sizes = [None, 2e6, None, 1e6]
    sent = [[0, 1, 2], [0, 1], [0], [0, 1, 2]]
    records = [
        record(t, bytes={"up": size, "down": None}, trained=who)
        for t, (size, who) in enumerate(zip(sizes, sent, strict=True), 1)
    ]
    found = trial_numbers(records, CONFIG, None)
    # What was not measured has the size before it; the first round that of the first measured one.
    assert found["curve"]["megabytes_up"] == [6.0, 10.0, 12.0, 15.0]
    assert found["megabytes_up"] == 15.0
    assert trial_numbers([record(t) for t in range(1, 5)], CONFIG, None)["megabytes_up"] is None


def test_alternation_is_told_apart_from_wobble() -> None:
    config = parse({"rounds": 8, "clients": 3, "evaluation": {"last": 8}})
    records = [record(t, top1=0.5 + 0.01 * t + (0.04 if t % 2 else 0.0)) for t in range(1, 9)]
    found = trial_numbers(records, config, None)
    assert found["alternation"] == pytest.approx(0.04)
    assert found["top1_wobble"] == pytest.approx(0.0, abs=1e-9)
    # One round jumps: odd rounds are still the higher ones, now with an error.
    jump = [*records[:4], {**records[4], "top1": 0.9}, *records[5:]]
    found = trial_numbers(jump, config, None)
    assert found["alternation_t"] < 0
    assert found["top1_wobble"] > 0.1
    even = trial_numbers([r if r["round"] % 2 == 0 else {**r, "top1": None} for r in records], config, None)
    assert (even["alternation"], even["top1_wobble"]) == (None, pytest.approx(0.0, abs=1e-9))


def test_a_task_with_other_metrics():
    from safari.runs.metrics import RunMetrics
    from safari.tasks import tokens

    metrics = RunMetrics.of(tokens())
    records = [
        {**record(t), "perplexity": 10.0 / t, "accuracy": 0.1 * t, "average": None} for t in range(1, 5)
    ]
    found = trial_numbers(records, CONFIG, None, metrics)
    assert found["curve"]["perplexity"] == [10.0, 5.0, 3.3333, 2.5]
    assert set(found["curve"]) >= {"round", "perplexity", "accuracy", "loss"}
    assert "top1" not in found["curve"]
    assert found["perplexity"] is not None
    assert "alternation" in found


def test_what_a_run_that_diverged_leaves_is_unknown_and_can_be_read_again():
    from safari.runs.metrics import RunMetrics
    from safari.sweep.numbers import problem_of
    from safari.tasks import tokens

    values = [2.0, 1e260, 1e300, float("inf")]
    records = [
        {**record(t), "perplexity": value, "accuracy": 0.1, "loss": 1538.0, "average": None}
        for t, value in enumerate(values, 1)
    ]
    found = trial_numbers(records, CONFIG, None, RunMetrics.of(tokens()))
    assert found["curve"]["perplexity"] == [2.0, None, None, None]
    assert (found["perplexity"], found["loss"]) == (None, 1538.0)
    assert problem_of(found) == ""


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/**/results.json")), ids=lambda p: p.parent.name)
def test_our_own_results_can_be_read(path):
    from safari.sweep import Results

    assert Results.open(path.parent).entries


def test_an_option_that_a_rule_got_later_does_not_make_old_records_strange():
    from safari.config import Arm, Plug
    from safari.sweep.numbers import made_by, maker_of

    plain, idle = Arm("mifa", Plug("mifa")), Arm("mifa", Plug("mifa", {"idle": True}))
    old = {"rule": {"name": "mifa"}, "defaults": {}}
    assert made_by(old, plain)
    known = Arm("known-p", Plug("known-p", {"p": 0.5}))
    assert made_by({"rule": {"name": "known-p", "p": 0.5}, "defaults": {}}, known), "from before it had forms"
    assert not made_by(old, idle)
    assert all(made_by(maker_of(arm), arm) for arm in (plain, idle))
    assert not made_by(maker_of(idle), plain)


def test_a_score_of_ones_own_task_may_count_to_a_hundred() -> None:
    from safari.sweep.numbers import problem_of

    curve = {"round": [1, 2], "accuracy": [10.0, 37.5], "share": [3.0, 4.0]}
    assert problem_of({"accuracy": 37.5, "curve": curve}) == ""
    assert problem_of({"lost_updates": 37.5}).startswith(
        "lost_updates must be null or a number from 0 to 1, got"
    )
