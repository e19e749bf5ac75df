"""The numbers of summary.json, by hand on synthetic records."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from safari.config import parse
from safari.errors import RunError
from safari.runs import RunFolder, spread, summarise, summarise_trial


def record(number: int, top1: float | None, **more: Any) -> dict[str, Any]:
    base = {
        "round": number,
        "top1": top1,
        "top5": None if top1 is None else min(1.0, 2 * top1),
        "loss": None if top1 is None else 1 - top1,
        "arrived": [0, 1],
        "missing": [2, 3],
        "refused": {},
        "bytes": {"up": 10, "down": 100},
    }
    return base | more


def config(**fields: Any):
    return parse({"clients": 4, "rounds": 25, **fields})


def test_the_final_accuracy_is_the_mean_of_the_last_twenty_rounds():
    # 5 early rounds that must not count, then two rounds of 0.5 and two of 0.7 in turn.
    records = [record(n, 0.9) for n in range(1, 6)]
    records += [record(n, 0.7 if n // 2 % 2 else 0.5) for n in range(6, 26)]
    summary = summarise_trial(records, config())
    assert summary["rounds"] == 25
    assert summary["finished"] is True
    assert summary["top1"] == pytest.approx(0.6, abs=1e-15)
    assert summary["top5"] == 1.0
    assert summary["loss"] == pytest.approx(0.4, abs=1e-15)
    # Half of the values lie 0.1 above, half 0.1 below; the fit of the trend takes out next to nothing of it.
    assert summary["top1_wobble"] == pytest.approx(0.1 * math.sqrt(20 / 17), rel=0.02)
    assert summary["loss_wobble"] == pytest.approx(summary["top1_wobble"])
    assert summary["lost_updates"] == 0.5
    assert (summary["bytes_up"], summary["bytes_down"]) == (10, 100)


def test_the_average_of_the_models_has_final_numbers_of_its_own():
    records = [record(n, 0.5, average={"top1": 0.9, "top5": 1.0, "loss": 9.0}) for n in range(1, 6)]
    for n in range(6, 26):
        # Up by 0.01 a round, and 0.2 higher in even rounds: a trend and an alternation, but no wobble.
        scores = {"top1": 0.01 * n + (0 if n % 2 else 0.2), "top5": 0.9, "loss": None if n == 6 else 0.5}
        records.append(record(n, 0.5, average=scores))
    summary = summarise_trial(records, config())
    assert summary["average_top1"] == pytest.approx(0.155 + 0.1, abs=1e-15)
    assert summary["average_top5"] == pytest.approx(0.9, abs=1e-15)
    assert summary["average_loss"] == 0.5
    assert summary["average_top1_wobble"] == pytest.approx(0.0, abs=1e-12)
    assert (summary["top1"], summary["top1_wobble"]) == (0.5, pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize("more", [{}, {"average": None}], ids=["before there was one", "off"])
def test_without_an_average_its_numbers_are_null(more):
    summary = summarise_trial([record(n, 0.5, **more) for n in range(1, 26)], config())
    names = [name for name in summary if name.startswith("average_")]
    assert len(names) == 5
    assert {summary[name] for name in names} == {None}


def test_rounds_to_target_is_the_first_evaluation_at_85_percent_or_more():
    scores = [0.2, None, 0.8499, 0.85, 0.3, 0.99]
    records = [record(n, score) for n, score in enumerate(scores, 1)]
    assert summarise_trial(records, config(rounds=6))["rounds_to_target"] == 4
    assert summarise_trial(records[:3], config(rounds=6))["rounds_to_target"] is None
    easy = config(rounds=6, evaluation={"target": 0.2})
    assert summarise_trial(records, easy)["rounds_to_target"] == 1


def test_a_line_that_is_no_record_is_named(tmp_path):
    run = RunFolder.create(tmp_path / "run", config(rounds=2, arms=["drop"]))
    trial = run.trial("drop", 0)
    trial.rounds.write_text('{"round": 1}\n')
    with pytest.raises(RunError, match=r"rounds\.jsonl, line 1 is not a round's record: arrived is missing"):
        summarise(run)


def test_a_record_of_other_types_is_named(tmp_path):
    run = RunFolder.create(tmp_path / "run", config(rounds=2, arms=["drop"]))
    run.trial("drop", 0).rounds.write_text(json.dumps(record(1, 0.5, arrived=3)) + "\n")
    with pytest.raises(RunError, match=r"jsonl, line 1 is not a round's record: arrived must be a list"):
        summarise(run)


def test_more_rounds_than_the_config_asks_for_are_not_summarised(tmp_path):
    """A mean over the last of them would be that of no run."""
    run = RunFolder.create(tmp_path / "run", config(rounds=2, arms=["drop"]))
    trial = run.trial("drop", 0)
    trial.rounds.write_text("".join(json.dumps(record(n, 0.5)) + "\n" for n in (1, 2, 3)))
    with pytest.raises(RunError, match=r"^rounds must be at least the 3 that .*seed-0 has done, got 2$"):
        summarise(run)


def test_refused_updates_are_counted_over_the_seeds(tmp_path):
    run = RunFolder.create(tmp_path / "run", config(rounds=1, seeds=2, arms=["drop"]))
    for seed, refused in enumerate(({"2": "NaN", "3": "NaN"}, {})):
        run.trial("drop", seed).rounds.write_text(json.dumps(record(1, 0.5, refused=refused)) + "\n")
    assert summarise(run)["arms"]["drop"]["refused"] == {"mean": 1.0, "std": math.sqrt(2), "n": 2}


def test_rounds_to_stay_is_the_first_evaluation_after_the_last_one_below():
    scores = [0.2, None, 0.9, 0.3, None, 0.85, 0.99]
    records = [record(n, score) for n, score in enumerate(scores, 1)]
    assert summarise_trial(records, config(rounds=7))["rounds_to_stay"] == 6
    assert summarise_trial(records[:4], config(rounds=7))["rounds_to_stay"] is None
    always = config(rounds=7, evaluation={"target": 0.1})
    assert summarise_trial(records, always)["rounds_to_stay"] == 1


def test_only_the_evaluations_in_the_last_rounds_count():
    records = [
        record(n, 0.4 if n == 20 else 0.8 if n == 25 else 0.1 if n == 5 else None) for n in range(1, 26)
    ]
    summary = summarise_trial(records, config())
    assert summary["top1"] == pytest.approx(0.6)  # rounds 6 to 25 hold those of rounds 20 and 25
    assert summary["top1_wobble"] is None  # two evaluations have a trend and nothing else


def test_a_window_longer_than_the_run_takes_all_of_it():
    records = [record(1, 0.2), record(2, 0.4)]
    assert summarise_trial(records, config(rounds=2))["top1"] == pytest.approx(0.3)


def test_a_run_that_goes_on_has_the_newest_numbers():
    unfinished = [record(n, 0.9) for n in range(1, 6)]
    summary = summarise_trial(unfinished, config())
    assert summary["finished"] is False
    assert summary["rounds"] == 5
    assert summary["top1"] == pytest.approx(0.9)
    assert summary["rounds_to_target"] == 1
    # The last rounds so far, as the end of a whole run has them.
    longer = unfinished + [record(n, 0.5) for n in range(6, 12)]
    assert summarise_trial(longer, config(evaluation={"last": 4}))["top1"] == pytest.approx(0.5)
    # None of those was evaluated: the newest evaluation there is.
    rarely = unfinished + [record(n, None) for n in range(6, 24)]
    assert summarise_trial(rarely, config(evaluation={"last": 4}))["top1"] == pytest.approx(0.9)


def test_no_evaluation_yet():
    summary = summarise_trial([record(n, None) for n in range(1, 6)], config())
    assert [summary[key] for key in ("top1", "top5", "loss", "top1_wobble")] == [None] * 4


def test_no_records_at_all():
    summary = summarise_trial([], config())
    assert summary["rounds"] == 0
    assert summary["lost_updates"] is None
    assert summary["top1"] is None


def test_a_loss_that_overflowed_is_left_out_and_the_accuracy_is_not():
    records = [record(1, 0.1, loss=None), record(2, 0.3, loss=2.0)]
    summary = summarise_trial(records, config(rounds=2))
    assert summary["loss"] == 2.0
    assert summary["top1"] == pytest.approx(0.2)


def test_refused_updates_are_counted_and_are_lost():
    records = [record(1, 0.1, arrived=[0], missing=[1, 2, 3], refused={"1": "NaN", "3": "NaN"})]
    summary = summarise_trial(records, config(rounds=1))
    assert summary["refused"] == 2
    assert summary["lost_updates"] == 0.75


def test_the_spread_over_seeds_is_that_of_a_sample():
    assert spread([0.6, 0.8, 1.0]) == {"mean": pytest.approx(0.8), "std": pytest.approx(0.2), "n": 3}
    assert spread([0.25]) == {"mean": 0.25, "std": None, "n": 1}
    assert spread([]) == {"mean": None, "std": None, "n": 0}


def test_the_whole_summary_over_arms_and_seeds(tmp_path):
    wanted = config(rounds=2, seeds=3, arms=["drop", "safari"], name="by-hand")
    run = RunFolder.create(tmp_path / "run", wanted)
    scores = {
        ("drop", 0): [0.1, 0.5],
        ("drop", 1): [0.9, 0.9],
        ("drop", 2): [0.2, 0.2],
        ("safari", 0): [1, 1],
    }
    for (arm, seed), values in scores.items():
        for number, score in enumerate(values, 1):
            run.trial(arm, seed).append(record(number, score), {})

    summary = json.loads(json.dumps(summarise(run), allow_nan=False))

    assert {key: summary[key] for key in ("name", "rounds", "seeds", "last", "target", "config")} == {
        "name": "by-hand",
        "rounds": 2,
        "seeds": 3,
        "last": 20,
        "target": 0.85,
        "config": wanted.digest,
    }
    drop = summary["arms"]["drop"]
    # Means 0.3, 0.9, 0.2 over the seeds: mean 1.4 / 3, squares of the differences sum to 0.2866...
    assert drop["top1"] == {
        "mean": pytest.approx(1.4 / 3),
        "std": pytest.approx(math.sqrt((1 / 36 + 169 / 900 + 64 / 900) / 2)),
        "n": 3,
    }
    assert drop["top1_wobble"] == {"mean": None, "std": None, "n": 0}  # of two rounds
    assert drop["rounds_to_target"] == {"mean": 1, "std": None, "n": 1}
    assert drop["reached_target"] == "1 of 3"
    assert [drop["seeds"][seed]["top1"] for seed in "012"] == pytest.approx([0.3, 0.9, 0.2])
    assert summary["arms"]["safari"]["top1"] == {"mean": 1.0, "std": None, "n": 1}
    assert summary["arms"]["safari"]["reached_target"] == "1 of 1"


def test_a_run_that_has_not_begun_has_a_summary_too(tmp_path):
    summary = summarise(RunFolder.create(tmp_path / "run", config(arms=["drop"])))
    assert summary["arms"]["drop"]["top1"] == {"mean": None, "std": None, "n": 0}
    assert summary["arms"]["drop"]["reached_target"] == "0 of 0"
