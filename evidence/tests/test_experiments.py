"""Experiment files: the cases and arms that they make, and every way to get one wrong."""

from __future__ import annotations

import math
import os
import time
import tomllib
from pathlib import Path

import pytest

from claims import BASE, TINY, write
from safari.aggregation import RULES
from safari.config import parse
from safari.errors import ConfigError
from safari.sweep.plan import digest
from safari_evidence.experiments import find, read
from safari_evidence.folder import shipped

TWO_AXES = """
title = "Two axes"
claim = "words"
base = "base/tiny.toml"
[set]
rounds = 10
[axes.partition]
groups = {}
iid = { partition = { name = "iid" } }
[axes.link]
even = { uplink.p = 0.5 }
wave = { uplink = { name = "sine", p = 0.4 } }
"""


def problems(folder: Path, text: str, **more: object) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(find(write(folder, tiny=text)), **more)  # type: ignore[arg-type]
    lines = [line.replace(f"{folder}/tiny.toml", "FILE") for line in error.value.problems]
    return [line.replace(str(folder), "FOLDER") for line in lines]


def test_cases_are_all_combinations_on_top_of_the_base(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path, two=TWO_AXES)))
    assert [case.name for case in experiment.cases] == ["groups.even", "groups.wave", "iid.even", "iid.wave"]
    assert experiment.axes == {"partition": ("groups", "iid"), "link": ("even", "wave")}
    last = experiment.cases[-1].config
    assert (last.name, last.rounds, last.seeds, last.partition.name) == ("two.iid.wave", 10, 2, "iid")
    assert (last.uplink.name, dict(last.uplink.options)) == ("sine", {"p": 0.4})
    assert experiment.cases[0].config.uplink.options == {"p": 0.5}


def test_an_arm_that_loses_nothing_is_lent_between_cases_that_differ_by_links_alone(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path, two=TWO_AXES)))
    groups_even, groups_wave, iid_even, iid_wave = experiment.cases
    perfect, drop, _ = groups_wave.config.arms
    assert groups_wave.source(perfect) is groups_even
    assert groups_wave.source(drop) is groups_wave
    assert groups_even.source(perfect) is groups_even
    assert iid_even.source(perfect) is iid_even
    assert iid_wave.source(perfect) is iid_even
    assert [case.trials for case in experiment.cases] == [6, 4, 6, 4]


def test_without_axes_there_is_one_case(tmp_path: Path) -> None:
    text = 'title = "t"\nclaim = "c"\nbase = "base/tiny.toml"'
    (experiment,) = read(find(write(tmp_path, one=text)))
    assert [case.name for case in experiment.cases] == ["main"]


def test_settings_go_on_top_of_everything(tmp_path: Path) -> None:
    settings = [("pruning.pruner", "snip"), ("rounds", 8), ("seeds", 1)]
    (experiment,) = read(find(write(tmp_path)), settings)
    for case in experiment.cases:
        assert (case.config.pruning.pruner, case.config.rounds, case.config.seeds) == ("snip", 8, 1)
        # In proportion: 4 rounds had evaluations each round and the last 2.
        assert (case.config.evaluation.every, case.config.evaluation.last) == (2, 4)
        assert case.config.evaluation.last_every == 0


def test_all_of_a_schedule_keeps_its_proportion_to_the_rounds(tmp_path: Path) -> None:
    text = 'title = "t"\nclaim = "c"\nbase = "base/tiny.toml"\n[set]\nrounds = 8\n'
    text += "evaluation = { every = 4, last = 4, last_every = 2 }"
    (experiment,) = read(find(write(tmp_path, one=text)), [("rounds", 16)])
    found = experiment.cases[0].config.evaluation
    assert (found.every, found.last, found.last_every) == (8, 8, 4)


def test_evaluations_that_are_set_stay_as_they_are_set(tmp_path: Path) -> None:
    settings = [("rounds", 40), ("evaluation.every", 3)]
    (experiment,) = read(find(write(tmp_path)), settings)
    assert experiment.cases[0].config.evaluation.every == 3
    assert experiment.cases[0].config.evaluation.last == 20


def test_a_plug_ins_option_goes_where_the_plug_in_takes_it(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path, two=TWO_AXES)), [("uplink.period", 7)])
    options = {case.name: dict(case.config.uplink.options) for case in experiment.cases}
    assert options["iid.wave"] == {"p": 0.4, "period": 7}
    assert options["iid.even"] == {"p": 0.5}
    with pytest.raises(ConfigError, match=r"^--set data.root='x': no plug-in of these cases takes it$"):
        read(find(tmp_path), [("data.root", "x")])


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        (("ronuds", 3), "--set ronuds=3: ronuds is not a field (did you mean 'rounds'?)"),
        (("local.stps", "x"), "--set local.stps='x': local.stps is not a field (did you mean 'steps'?)"),
        (("rounds", 0), "rounds must be at least 1, got 0"),
        (("seeds", math.nan), "seeds must be a whole number, got nan"),
        (("cohort", 99), "cohort must be at most clients (4), got 99"),
        (("uplink.perod", 7), "--set uplink.perod=7: no plug-in of these cases takes it (did you mean 'period'?); "
                              "uplink takes depth, p, period"),
        # Two of the six cases have this link.
        (("uplink.period", 0), "FOLDER/two.toml, case groups.wave and 1 more of 6 cases: uplink: period must be at "
                               "least 2, got 0"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_setting_is_reported_once(tmp_path: Path, setting: tuple[str, object], wanted: str) -> None:
    third = TWO_AXES.replace("wave =", "later = { uplink.p = 0.1 }\nwave =")
    write(tmp_path, two=third)
    with pytest.raises(ConfigError) as error:
        read(find(tmp_path), [setting])
    assert [line.replace(str(tmp_path), "FOLDER") for line in error.value.problems] == [wanted]


def test_what_the_file_itself_has_wrong_is_not_blamed_on_a_setting(tmp_path: Path) -> None:
    text = TINY.replace('"rand" }', '"rand", ronuds = 3 }')
    assert problems(tmp_path, text, settings=[("rounds", 0)]) == [
        "FILE, case rand: ronuds is not a field (did you mean 'rounds'?)",
        "rounds must be at least 1, got 0",
    ]


def test_quick_is_for_those_that_have_it(tmp_path: Path) -> None:
    found = 'finding = "We found out."\n'
    write(tmp_path, tiny=found + TINY, two=TWO_AXES)
    (experiment,) = read(find(tmp_path), quick=True)
    assert experiment.name == "tiny"
    assert experiment.cases[0].config.rounds == 2
    assert experiment.finding == "", "of the whole, not of the small one"
    assert [e.finding for e in read(find(tmp_path))] == ["We found out.", ""]


def test_quick_compares_what_the_whole_compares(tmp_path: Path) -> None:
    arms = TWO_AXES.replace("[set]", '[set]\narms = ["perfect", { name = "old", rule = "stale" }]')
    write(tmp_path, two=arms + "[quick]\nset = { seeds = 1 }\n")
    (experiment,) = read(find(tmp_path), quick=True)
    assert [[arm.name for arm in case.config.arms] for case in experiment.cases] == [["perfect", "old"]] * 4
    assert {case.config.rounds for case in experiment.cases} == {parse(tomllib.loads(BASE)).rounds}


def test_the_folders_name_follows_from_the_setting_alone(tmp_path: Path) -> None:
    def of(**changes: object) -> str:
        return digest(parse({"clients": 4, **changes}))

    same = [
        {"arms": ["drop"]},
        {"seeds": 5, "seed": 3},
        {"name": "other"},
        {"engine": {"device": "cpu", "threads": 3}},
        {"checkpoint": {"every": 3}},
    ]
    others = [
        {"rounds": 7},
        {"uplink": {"p": 0.5}},
        {"engine": {"name": "reference"}},
        {"evaluation": {"every": 2}},
        {"aggregation": {"average": 0.9}},
    ]
    assert {of(**changes) for changes in same} == {of()}
    assert len({of(), *(of(**changes) for changes in others)}) == len(others) + 1
    here, there = (parse({"data": {"name": "cifar10", "root": root}}) for root in ("here", "there"))
    assert digest(here) == digest(there)


def test_results_from_before_feedback_was_automatic_keep_their_names() -> None:
    def of(**wire: object) -> str:
        return digest(parse({"wire": wire}))[:12]

    # As version 0.1's code named them, with feedback off unless it was asked for.
    assert of() == "44136fa355b3"
    assert of(values="step", feedback=False) == "0fd6107d3971"
    assert of(values="step", feedback=True) == "9064ee4b2aa7"
    assert of(values="qsgd") == "1a2bd7eb7376"
    assert digest(parse({"aggregation": {"average": 0}}))[:12] == of()
    assert of(values="step") == of(values="step", feedback="auto") == of(values="step", feedback=True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('titel = "t"\nclaim = "c"\nbase = "base/tiny.toml"',
         ["FILE: titel is not a field (did you mean 'title'?)", "FILE: title is required"]),
        ('title = 3\nclaim = "c"\nbase = "base/tiny.toml"', ["FILE: title must be a text, got 3"]),
        (TINY + "[set]\nronuds = 3",
         ["FILE, case mag: ronuds is not a field (did you mean 'rounds'?)",
          "FILE, case rand: ronuds is not a field (did you mean 'rounds'?)"]),
        (TINY.replace('"rand" }', '"rnad" }'),
         ["FILE, case rand: pruning.pruner must be one of grasp, mag, rand, snip, synflow; got 'rnad' "
          "(did you mean 'rand'?); your own goes in as file.py:name or package.module:name"]),
        (TINY.replace('"loss"', '"los"'),
         ["FILE: show must be one of average, behind, bytes, curves, diagnosis, groups, loss, matrix, perplexity, "
          "similarity, sweep, top5; got 'los' (did you mean 'loss'?)"]),
        (TINY.replace("set = {", "rounds = {"), ["FILE: quick.rounds is not a field"]),
        (TINY + "[cost]\ngpu = 'cheap'", ["FILE: cost.gpu must be a number, got 'cheap'"]),
        (TINY + "[axes.empty]", ["FILE: axes.empty must be a table of cases or a list of values, got {}"]),
        (TINY + "[axes.p]\nlow = 0.1", ["FILE: axes.p.low must be a table of changes, got 0.1"]),
        (TINY + "[axes.p]\n'a b' = {}",
         ["FILE: axes.p: a name may hold letters, digits, and . _ - only, got 'a b'"]),
        (TINY.replace("margin = 0.99", ""),
         ["FILE: checks[0] must have one of at_least, margin, within and times, got none"]),
        (TINY.replace('against = "perfect"', ""),
         ["FILE: checks[0]: margin, within and times need against, at_least does without"]),
        (TINY.replace("margin = 0.99", 'margin = 0.99\ncolumn = "top2"'),
         ["FILE: checks[0].column must be one of accuracy, alternation, average_accuracy, average_loss, "
          "average_loss_wobble, average_perplexity, "
          "average_top1, average_top1_wobble, average_top5, bytes_up, error, loss, loss_wobble, "
          "lost_updates, megabytes_up, perplexity, perplexity_wobble, phi, right_group, "
          "rounds_to_stay, rounds_to_target, top1, "
          "top1_wobble, top5; got 'top2' (did you mean 'top5'?)"]),
        (TINY.replace("margin = 0.99", "within = 0"), ["FILE: checks[0].within must be above 0, got 0"]),
        (TINY.replace('against = "perfect"', 'against = "mga/perfect"'),
         ["FILE: checks[0].against must be one of mag, rand; got 'mga' (did you mean 'mag'?)"]),
        (TINY.replace('against = "perfect"', 'against = "mag/perfct"'),
         ["FILE: checks[0].against must be one of drop, perfect, safari; got 'perfct' "
          "(did you mean 'perfect'?)"]),
        ('compare = "mine"\n' + TINY, ["FILE: compare must be one of drop, perfect, safari; got 'mine'"]),
        ('goal = "mag/prefect"\n' + TINY,
         ["FILE: goal must be one of mag/drop, mag/perfect, mag/safari, rand/drop, rand/perfect, "
          "rand/safari; got 'mag/prefect' (did you mean 'mag/perfect'?)"]),
        (TINY.replace("margin = 0.99", 'margin = 0.99\ncolumn = "average_top1"\ncases = ["rand"]'),
         ["FILE: checks[0].column is average_top1, and aggregation.average is 0 in case rand"]),
        (TINY.replace("margin = 0.99", 'margin = 0.99\ncases = ["mga"]'),
         ["FILE: checks[0].cases must be one of mag, rand; got 'mga' (did you mean 'mag'?)"]),
        (TINY.replace('arm = "safari"', 'arm = "safarii"'),
         ["FILE: checks[0].arm must be one of drop, perfect, safari; got 'safarii' "
          "(did you mean 'safari'?)"]),
        (TINY.replace('against = "perfect"', 'against = "perfct"'),
         ["FILE: checks[0].against must be one of drop, perfect, safari; got 'perfct' "
          "(did you mean 'perfect'?)"]),
        ('unranked = ["perfekt", "drop"]\n' + TINY,
         [f"FILE: unranked must be one of {', '.join(sorted(RULES))}; got 'perfekt' (did you mean 'perfect'?)"]),
        (TINY.replace('against = "perfect"\nmargin = 0.99', "at_least = 85"),
         ["FILE: checks[0].at_least must lie between 0 and 1, because top1 is a fraction; got 85"]),
        (TINY.replace('against = "perfect"\nmargin = 0.99', 'column = "average_top5"\nat_least = nan'),
         ["FILE: checks[0].at_least must be finite, got nan"]),
        (TINY.replace("margin = 0.99", "margin = 1"),
         ["FILE: checks[0].margin must lie between -1 and 1, because top1 is a fraction (a point is 0.01); got 1"]),
        (TINY.replace("margin = 0.99", "within = 2.5"),
         ["FILE: checks[0].within must lie between 0 and 1, because top1 is a fraction (a point is 0.01); got 2.5"]),
        (TINY.replace("margin = 0.99", "times = inf"), ["FILE: checks[0].times must be finite, got inf"]),
        (TINY + "[cost]\ncpu = nan",
         ["FILE: cost.cpu must lie above 0 and at most at 1,000,000 seconds, got nan"]),
        (TINY + "[cost]\ngpu = -1.0",
         ["FILE: cost.gpu must lie above 0 and at most at 1,000,000 seconds, got -1.0"]),
        (TINY + "".join(f"[axes.a{k}]\n" + "".join(f"v{i} = {{}}\n" for i in range(10)) for k in range(7)),
         ["FILE: axes must give at most 10,000 cases together, got 20,000,000"]),
        (TINY.replace("base/tiny.toml", "base"), ["FILE: base: FOLDER/base is not a file"]),
        (TINY.replace("base/tiny.toml", "base/\\u0000.toml"),
         ["FILE: base: cannot read 'FOLDER/base/\\x00.toml': embedded null byte"]),
        (TINY.replace("base/tiny.toml", "nix.toml"),
         ["FILE: base: cannot read FOLDER/nix.toml: No such file or directory"]),
    ],
)  # fmt: skip
def test_problems_are_reported_by_file_case_and_field(tmp_path: Path, text: str, wanted: list[str]) -> None:
    assert problems(tmp_path, text) == wanted


def test_an_arm_that_a_setting_takes_away_may_be_named(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny='unranked = ["perfect"]\n' + TINY)
    (experiment,) = read(find(folder), [("arms", ["drop"])])
    assert [arm.name for arm in experiment.cases[0].config.arms] == ["drop"]
    (wrong,) = problems(tmp_path, TINY.replace('"safari"', '"safarii"'), settings=[("arms", ["drop"])])
    assert wrong.startswith("FILE: checks[0].arm must be one of drop, perfect, safari; got 'safarii'")


def test_an_arm_that_the_quick_version_lacks_may_be_named(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny=TINY.replace("set = {", 'set = { arms = ["drop"],'))
    (experiment,) = read(find(folder), quick=True)
    assert [arm.name for arm in experiment.cases[0].config.arms] == ["drop"]
    (wrong,) = problems(tmp_path, TINY.replace('"safari"', '"safarii"'), quick=True)
    assert wrong.startswith("FILE: checks[0].arm must be one of drop, perfect, safari; got 'safarii'")


def test_a_rule_that_only_a_setting_brings_in_may_be_left_out_of_the_contest(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path, tiny='unranked = ["perfect", "known-p"]\n' + TINY)))
    assert experiment.unranked == ("perfect", "known-p")


def test_an_arm_must_be_in_a_case_that_the_check_is_about(tmp_path: Path) -> None:
    text = TINY.replace('"rand" }', '"rand", arms = ["perfect", "fedau"] }').replace('"safari"', '"fedau"')
    assert len(read(find(write(tmp_path, tiny=text)))) == 1
    assert problems(tmp_path, text + 'cases = ["mag"]') == [
        "FILE: checks[0].arm must be one of drop, perfect, safari; got 'fedau'"
    ]


def test_other_columns_are_no_fractions(tmp_path: Path) -> None:
    text = TINY.replace('against = "perfect"\nmargin = 0.99', 'column = "bytes_up"\nat_least = 1000')
    (experiment,) = read(find(write(tmp_path, tiny=text)))
    assert experiment.checks[0].at_least == 1000


def test_a_base_beside_its_experiment_is_no_experiment(tmp_path: Path) -> None:
    text = TINY.replace("base/tiny.toml", "small.toml").replace("[quick]", '[quick]\nbase = "less.toml"')
    write(tmp_path, mine=text, small=BASE, less=BASE)
    assert [path.name for path in find(tmp_path)] == ["mine.toml"]
    with pytest.raises(ConfigError) as error:
        find(tmp_path, ["small", "less", "mien"])
    assert error.value.problems == [
        f"{tmp_path}/small.toml is the base of mine.toml, not an experiment",
        f"{tmp_path}/less.toml is the base of mine.toml, not an experiment",
        "NAME must be one of mine; got 'mien' (did you mean 'mine'?)",
    ]
    (tmp_path / "broken.toml").write_text("title = ")
    assert [path.name for path in find(tmp_path, ["mine"])] == ["mine.toml"], "others do not matter"
    with pytest.raises(ConfigError, match=r"broken.toml is not valid TOML"):
        read(find(tmp_path))


def test_files_that_name_each_other_are_not_skipped(tmp_path: Path) -> None:
    write(tmp_path, a=TINY.replace("base/tiny", "b"), b=TINY.replace("base/tiny", "a"))
    assert [path.name for path in find(tmp_path)] == ["a.toml", "b.toml"]


def test_the_page_names_every_experiment() -> None:
    page = (Path(__file__).parents[2] / "docs/reproduce.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.split("\n## ")[0].splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for row in rows for name in row.split(",")}
    assert named == {path.stem for path in find(shipped())}


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^no experiments \(\*.toml\) in {tmp_path}; --from names"):
        find(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^NAME must be one of tiny; got 'tinny' \(did you mean 'tiny'\?\)$"
    ):
        find(write(tmp_path), ["tinny"])
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.toml"):
        read(find(write(tmp_path, tiny=TINY.replace("tiny.toml", "nothing.toml"))))


@pytest.mark.parametrize("quick", [False, True])
def test_the_experiments_that_come_with_the_package_are_valid(quick: bool) -> None:
    experiments = {e.name: e for e in read(find(shipped()), quick=quick)}
    assert {"accuracy", "pruners", "probability", "sparsity", "rules", "uneven", "digits"} <= set(experiments)
    for experiment in experiments.values():
        for check in experiment.checks:
            about = [case for case in experiment.cases if not check.cases or case.name in check.cases]
            assert about
            assert all(check.arm in {arm.name for arm in case.config.arms} for case in about)
        data = {case.config.data.name for case in experiment.cases}
        if experiment.name in ("text", "lora"):
            assert data == {"dialogue"}
        else:
            on_digits = quick or experiment.name in ("digits",)
            assert data == ({"digits"} if on_digits else {"cifar10"})


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    folder = write(tmp_path)
    os.mkfifo(folder / "pipe.toml")
    assert [path.stem for path in find(folder)] == ["tiny"]
    os.mkfifo(folder / "base/pipe.toml")
    text = TINY.replace("base/tiny.toml", "base/pipe.toml")
    assert problems(tmp_path, text) == ["FILE: base: FOLDER/base/pipe.toml is not a file"]


def test_a_file_given_as_a_name_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find(write(tmp_path), ["mine/tiny.toml"])
    wanted = "NAME is that of an experiment, not of its file: tiny --from mine; got 'mine/tiny.toml'"
    assert str(error.value) == wanted


def test_a_thousand_cases_are_read_in_seconds_and_find_their_twins(tmp_path: Path) -> None:
    """Each was compared with all before it: ten thousand, which a file may have, took longer than anybody waits."""
    begin = time.monotonic()
    rates = "".join(f"r{k} = {{ local.lr = {k + 1}{'.0' * (k % 2)} }}\n" for k in range(500))
    text = 'title = "t"\nclaim = "c"\nbase = "base/tiny.toml"\n[axes.link]\neven = {}\nodd = { uplink.p = 0.5 }\n'
    (experiment,) = read(find(write(tmp_path, many=f"{text}[axes.rate]\n{rates}")))
    cases = experiment.cases
    assert len(cases) == 1000
    assert [case.twin for case in cases[:500]] == [None] * 500
    assert [case.twin for case in cases[500:]] == list(cases[:500])
    assert time.monotonic() - begin < 60


def test_tables_in_another_order_and_whole_numbers_make_twins(tmp_path: Path) -> None:
    tables = ("name = 'fedprox', mu = 1", "mu = 1.0, name = 'fedprox'")
    axes = "".join(f"c{k} = {{ client = {{ {table} }} }}\n" for k, table in enumerate(tables))
    text = 'title = "t"\nclaim = "c"\nbase = "base/tiny.toml"\n[axes.client]\n'
    (experiment,) = read(find(write(tmp_path, two=text + axes)))
    first, second = experiment.cases
    assert second.twin is first


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("{checks}", "FILE: checks[0].at_least must lie between 0 and 1, because top1 is a fraction; got 4.0",
         "FILE has more problems than these"),
        ("[axes]\n{axes}", "FILE: axes.a0 must be a table of cases or a list of values, got 1",
         "FILE has more problems than these"),
        ("[axes.a]\n{axes}", "FILE: axes.a.a0 must be a table of changes, got 1", "FILE has more problems than these"),
        ("[axes.a]\n{cases}", "FILE, case a0: rounds must be at least 1, got 0", "FILE has more problems than these"),
    ],
    ids=["checks", "axes", "values", "cases"],
)  # fmt: skip
def test_of_a_file_that_is_wrong_throughout_a_few_problems_are_told(
    tmp_path: Path, text: str, first: str, last: str
) -> None:
    checks = '[[checks]]\nsays = "x"\narm = "safari"\nat_least = 4.0\n' * 900
    axes, cases = ("".join(f"a{k} = {value}\n" for k in range(900)) for value in ("1", "{ rounds = 0 }"))
    head = 'title = "t"\nclaim = "c"\nbase = "base/tiny.toml"\n'
    found = problems(tmp_path, head + text.format(checks=checks, axes=axes, cases=cases))
    assert (found[0], found[-1], len(found)) == (first, last, 21)


def test_checks_are_bounded_and_so_is_what_is_listed_as_allowed(tmp_path: Path) -> None:
    head = 'title = "t"\nclaim = "c"\nbase = "base/tiny.toml"\n'
    check = '[[checks]]\nsays = "x"\narm = "safari"\nat_least = 0.5\ncases = ["none"]\n'
    assert problems(tmp_path, head + check * 1001) == ["FILE: checks must be at most 1,000, got 1,001"]
    cases = "".join(f"a{k} = {{}}\n" for k in range(400))
    found = problems(tmp_path, f"{head}{check * 1000}[axes.a]\n{cases}")
    assert found[0].startswith("FILE: checks[0].cases must be one of a0, a1, a10, a100, ")
    assert found[0].endswith(" and 300 more; got 'none'")
    assert (len(found), found[-1]) == (21, "FILE has more problems than these")
    assert max(map(len, found)) < 800


def test_a_base_whose_name_is_too_long_is_told_as_such(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, f'title = "t"\nclaim = "c"\nbase = "{"x" * 5000}"\n')
    assert line == f"FILE: base: cannot read '{'x' * 96}...: File name too long"
