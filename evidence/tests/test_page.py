"""The page: the paper's words beside our figures, whole or in part, and the command around it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from matplotlib.colors import to_hex

from claims import TINY, write
from safari.cli import cli
from safari.errors import ConfigError, RunError, SafariError
from safari.report.style import INK, colour
from safari.sweep import Results
from safari.version import code_version
from safari_evidence.experiments import find, read
from safari_evidence.figures import figures_of

MATRIX = """
title = "A <matrix>"
claim = "“all & everything”"
finding = "We found out."
base = "base/tiny.toml"
show = ["matrix", "sweep"]
[set]
diagnostics = { every = 2 }
[axes.p]
"0.2" = { uplink.p = 0.2 }
"0.9" = { uplink.p = 0.9 }
"""


AVERAGED = """
[set]
rounds = 5
aggregation = { average = 0.5 }
evaluation = { every = 1, last = 4 }
"""


def reproduce(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["reproduce", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("evidence") / "experiments", tiny=TINY, matrix=MATRIX)
    done = reproduce("--from", folder, "--out", folder.parent / "out")
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-2:] == [
        "22 of 22 trials are finished", f"report: {folder.parent / 'out/report.html'}"
    ]  # fmt: skip
    return folder.parent


def test_an_arm_has_the_colour_of_the_demo_in_every_figure(finished: Path) -> None:
    results, seen = Results.open(finished / "out"), set()
    for experiment in read(find(finished / "experiments"), []):
        for picture in figures_of(experiment, results):
            for axes in picture.figure.axes:
                # A dash of the line's colour joins it to its name.
                named = [
                    (t.get_text(), to_hex(t.arrow_patch.get_edgecolor())) for t in axes.texts if t.arrow_patch
                ]
                assert {shade for _, shade in named} == {line.get_color() for line in axes.lines}
                seen |= {(picture.name.partition("-")[2], arm, shade) for arm, shade in named}
    kinds = {name.partition("-")[2] or name for name, _, _ in seen}
    assert kinds == {"top1", "loss", "right-group", "sweep"}
    # In a run with these arms they are the first, second and third line.
    assert {(arm, shade) for _, arm, shade in seen} == {
        ("perfect", INK), ("drop", colour(1)), ("safari", colour(2))
    }  # fmt: skip
    # Nobody stands in with the first two.
    assert {arm for name, arm, _ in seen if name == "mag-right-group"} == {"safari"}


def test_names_in_the_figure_of_bytes_do_not_lie_on_each_other() -> None:
    root = Path(__file__).parents[2]
    (experiment,) = (e for e in read(find(root / "evidence/experiments"), []) if e.name == "sparse")
    results = Results.open(root / "results/evidence-recipe")
    (picture,) = (p for p in figures_of(experiment, results) if p.name == "sparse-bytes")
    (axes,) = picture.figure.axes
    picture.figure.canvas.draw()
    assert {"100", "1,000"} <= {t.get_text() for t in axes.get_xticklabels()}
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["perfect", "drop", "safari+"]
    boxes = {t.get_text(): t.get_window_extent() for t in axes.texts}
    assert set(boxes) == {case.name for case in experiment.cases}
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]


def test_the_page_has_the_claim_the_verdict_and_the_numbers(finished: Path) -> None:
    text = (finished / "out/report.md").read_text()
    assert "> words of the paper" in text
    assert "\nWe found out.\n" in text
    claim = next(line for line in text.splitlines() if line.startswith("| tiny | SAFARI ends near"))
    assert re.search(
        r"\| confirmed \| [< \d.]+ \| mag: \S+ \[\S+, \S+\] points "
        r"\(n = 2, one-sided t-test p [< \d.]+, by signs 0.25\); rand: ",
        claim,
    )
    assert "All 22 trials are finished." in text
    assert "| mag | safari | " in text
    results = json.loads((finished / "out/results.json").read_text())
    seeds = results["experiments"]["matrix"]["cases"]["0.2"]["arms"]["drop"]["seeds"]
    mean = 50 * (seeds["0"]["top1"] + seeds["1"]["top1"])
    row = next(line for line in text.splitlines() if line.startswith("| drop | "))
    assert row.replace("*", "").split("|")[2].split()[0] == f"{mean:.1f}"
    assert seeds["0"]["diagnosis"]["round"] == [2, 4]


def test_the_note_says_where_cases_differ_in_length(finished: Path, tmp_path: Path) -> None:
    alike = "4 rounds, the last 2 count, target 10 % top-1. Scores are means"
    assert f"\n{alike}" in (finished / "out/report.md").read_text()
    longer = "rand = { rounds = 6, evaluation = { every = 1, last = 3, target = 0.2 } }"
    folder = write(tmp_path / "experiments", tiny=TINY.replace('rand = { pruning.pruner = "rand" }', longer))
    assert reproduce("--from", folder, "--out", tmp_path / "out", "--within", "0").exit_code == 0
    mag = alike.removesuffix(" Scores are means")
    note = f"\nmag: {mag} rand: 6 rounds, the last 3 count, target 20 % top-1. Scores are means"
    assert note in (tmp_path / "out/report.md").read_text()


def test_the_average_has_columns_checks_and_a_figure_where_it_is_on(finished: Path, tmp_path: Path) -> None:
    check = 'arm = "safari"\nagainst = "perfect"\ncolumn = "average_top1"'
    text = TINY.replace('arm = "safari"\nagainst = "perfect"', check)
    text = text.replace('show = ["curves"', 'show = ["curves", "average"')
    folder = write(tmp_path / "experiments", tiny=text + AVERAGED)
    done = reproduce("--from", folder, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out/report.md").read_text()
    header = next(line for line in page.splitlines() if line.startswith("| case | arm | "))
    wanted = ["top-1 %", "minus perfect", "wobble", "even−odd", "top-1 of the average %", "minus perfect",
              "its wobble"]  # fmt: skip
    assert header.split(" | ")[2:9] == wanted
    arms = json.loads((tmp_path / "out/results.json").read_text())["experiments"]["tiny"]["cases"]["mag"][
        "arms"
    ]
    ends = {arm: [arms[arm]["seeds"][s]["average_top1"] for s in "01"] for arm in ("safari", "perfect")}
    row = next(line for line in page.splitlines() if line.startswith("| mag | safari | ")).split(" | ")
    assert row[6].split()[0] == f"{50 * sum(ends['safari']):.1f}"
    gap = f"{50 * (sum(ends['safari']) - sum(ends['perfect'])):+.1f}"
    assert row[7].split()[0] == gap
    assert re.search(rf"near the perfect network \| confirmed \| [< \d.]+ \| mag: {re.escape(gap)} \[", page)
    assert (tmp_path / "out/figures/tiny-mag-average-top1.svg").exists()
    assert "average" not in (finished / "out/report.md").read_text()


def test_the_arm_that_is_lent_has_its_numbers_in_every_case(finished: Path) -> None:
    text = (finished / "out/report.md").read_text()
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| 0.")}
    assert set(rows) == {"| 0.2", "| 0.9"}
    perfect = [line.split(" | ")[2] for line in text.splitlines() if re.match(r"\| 0\.\d \| perfect ", line)]
    assert len(perfect) == 2
    assert perfect[0] == perfect[1]


def test_the_figures_are_files_and_in_the_page(finished: Path) -> None:
    names = {path.name for path in (finished / "out/figures").iterdir()}
    for stem in ("tiny-mag-top1", "tiny-rand-loss", "tiny-mag-similarity-safari", "matrix-sweep"):
        assert {f"{stem}.svg", f"{stem}.png"} <= names
    page = (finished / "out/report.html").read_text()
    assert page.count("<figure") == len(names) / 2
    linked = set(re.findall(r"\(figures/([^)]+)\)", (finished / "out/report.md").read_text()))
    assert linked == {name for name in names if name.endswith(".svg")}


def test_the_page_is_well_formed_and_fetches_nothing(finished: Path) -> None:
    page = (finished / "out/report.html").read_text()

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.wrong: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "path", "use", "image", "rect"):
                self.open.append(tag)
            self.wrong += [v for k, v in attrs if k in ("src", "href") and v and v.startswith("http")]

        def handle_endtag(self, tag: str) -> None:
            if tag in self.open and self.open.pop() != tag:
                self.wrong.append(tag)

    tags = Tags()
    tags.feed(page)
    assert tags.wrong == []
    assert tags.open == []
    assert "A &lt;matrix&gt;" in page
    assert "“all &amp; everything”" in page
    assert "<script" not in page


def test_nothing_is_run_twice_and_the_page_comes_from_the_results_alone(
    finished: Path, tmp_path: Path
) -> None:
    again = reproduce("--from", finished / "experiments", "--out", finished / "out")
    assert again.stderr.splitlines() == [
        "22 of 22 trials are finished",
        f"report: {finished}/out/report.html",
    ]
    (tmp_path / "results.json").write_text((finished / "out/results.json").read_text())
    only = reproduce("--from", finished / "experiments", "--out", tmp_path, "--report-only")
    assert only.exit_code == 0, only.output
    assert (tmp_path / "report.md").read_text() == (finished / "out/report.md").read_text()


def test_results_of_several_machines_are_added(finished: Path, tmp_path: Path) -> None:
    folder = finished / "experiments"
    for seed in (0, 1):
        one = reproduce("tiny", "--from", folder, "--out", tmp_path / f"m{seed}", "--no-report", "--set",
                        f"seed={seed}", "--seeds", "1")  # fmt: skip
        assert one.exit_code == 0, one.output
    ask = ("tiny", "--from", folder, "--out", tmp_path / "all")
    add = ("--add", tmp_path / "m0", "--add", tmp_path / "m1", "--add", tmp_path / "m1")
    shown = reproduce(*ask, "--list", *add)
    assert "2 cases, 12 trials: all finished" in shown.stdout
    assert not (tmp_path / "all").exists(), "a list wrote something"
    done = reproduce(*ask, "--report-only", *add)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == [
        f"{tmp_path}/m0: 6 trials",
        f"{tmp_path}/m1: 6 trials",
        f"{tmp_path}/m1: no trial that is asked for and new",
        "12 of 12 trials are finished",
        f"report: {tmp_path}/all/report.html",
    ]
    ours, theirs = Results.open(tmp_path / "all"), Results.open(finished / "out")
    (experiment,) = read(find(folder, ["tiny"]))
    assert ours.environments == theirs.environments
    for case in experiment.cases:
        for arm in case.config.arms:
            found, expected = ours.arm(case, arm), theirs.arm(case, arm)
            assert list(found) == [0, 1]
            assert [n["curve"] for n in found.values()] == [n["curve"] for n in expected.values()]
    # What is there stays, and nothing is run.
    again = reproduce(*ask, *add)
    assert again.stderr.splitlines()[-2] == "12 of 12 trials are finished"
    assert not (tmp_path / "all/tiny").exists()


def test_only_trials_that_are_asked_for_are_added(finished: Path, tmp_path: Path) -> None:
    folder = finished / "experiments"
    ask = ("tiny", "--from", folder, "--out", tmp_path / "out", "--report-only", "--add", finished / "out")
    some = reproduce(*ask, "--only", "mag", "--set", "arms=drop", "--seeds", "1")
    assert some.stderr.splitlines()[0] == f"{finished}/out: 1 trial"
    other = reproduce(*ask, "--set", "rounds=3")
    assert other.stderr.splitlines()[0] == f"{finished}/out: no trial that is asked for and new"
    (tmp_path / "empty").mkdir()
    wrong = reproduce("tiny", "--from", folder, "--out", tmp_path / "new", "--add", tmp_path / "empty")
    assert str(wrong.exception) == f"{tmp_path}/empty holds no results.json to add"
    assert not (tmp_path / "new").exists()


def test_a_stop_while_the_page_is_written_says_what_is_there(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> Path:
        raise KeyboardInterrupt

    (tmp_path / "results.json").write_text((finished / "out/results.json").read_text())
    monkeypatch.setattr("safari_evidence.page.write_page", stop)
    stopped = reproduce("--from", finished / "experiments", "--out", tmp_path)
    assert stopped.exit_code != 0
    assert stopped.stderr.splitlines()[:3] == [
        "22 of 22 trials are finished",
        f"numbers: {tmp_path}/results.json",
        "the report was not written: the same command with --report-only writes it",
    ]


def test_a_part_is_reported_as_a_part(tmp_path: Path) -> None:
    folder = write(tmp_path / "experiments")
    stopped = reproduce("tiny", "--from", folder, "--out", tmp_path / "out", "--within", "0")
    assert stopped.exit_code == 0
    assert "0 of 12 trials are finished; nothing is lost: the same command goes on" in stopped.stderr
    done = reproduce("tiny", "--from", folder, "--out", tmp_path / "out", "--report-only")
    assert done.exit_code == 0, done.output
    assert (
        "0 of 12 trials are finished; what follows is of those alone."
        in (tmp_path / "out/report.md").read_text()
    )
    some = reproduce(
        "tiny", "--from", folder, "--out", tmp_path / "out", "--set", "arms=drop", "--seeds", "1"
    )
    assert some.exit_code == 0
    text = (tmp_path / "out/report.md").read_text()
    assert "| mag | drop | " in text
    rest = reproduce("tiny", "--from", folder, "--out", tmp_path / "out", "--report-only", "--json")
    found = json.loads(rest.stdout)["tiny"]
    assert (found["finished"], found["trials"], found["code"]) == (2, 12, [code_version()])
    claim = "SAFARI ends near the perfect network"
    assert found["verdicts"] == [{"claim": claim, "verdict": "not finished", "p": None, "parts": []}]
    text = (tmp_path / "out/report.md").read_text()
    assert "2 of 12 trials are finished" in text
    assert "1 of 2 |" in text
    assert "| not finished |" in text


def test_the_list_says_what_is_left_and_runs_nothing(finished: Path, tmp_path: Path) -> None:
    folder = finished / "experiments"
    fresh = reproduce("--list", "--from", folder, "--out", tmp_path / "out")
    assert fresh.exit_code == 0, fresh.output
    assert not (tmp_path / "out").exists()
    lines = fresh.stdout.splitlines()
    assert lines[0] == "matrix  A <matrix>"
    assert "  2 cases, 10 trials: 10 not finished, about 20 s on one CPU with one process" in lines
    assert "  words of the paper" in lines
    done = reproduce("tiny", "--list", "--json", "--from", folder, "--out", finished / "out")
    (row,) = json.loads(done.stdout)
    assert (row["name"], row["cases"], row["trials"], row["trials_left"]) == ("tiny", ["mag", "rand"], 12, 0)


def test_mistakes_are_told_and_make_no_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "experiments")

    def problem(*arguments: object) -> SafariError:
        result = reproduce("--from", folder, "--out", tmp_path / "out", *arguments)
        assert isinstance(result.exception, SafariError), result.output
        return result.exception

    assert isinstance(problem("tyni"), ConfigError)
    (folder / "slow.toml").write_text(MATRIX)
    text = "slow has no small version: run it without --quick"
    assert str(problem("slow", "--quick")) == text
    assert str(problem("slow", "--quick", "--seeds", "1", "--set", "rounds=2")) == text
    (folder / "slow.toml").unlink()
    assert "ronuds is not a field" in str(problem("--set", "ronuds=3"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.json").write_text('{"format": "other"}')
    assert isinstance(problem(), RunError)
    assert "format must be safari-evidence-2, got 'other'" in str(problem())


def test_a_page_needs_numbers(finished: Path, tmp_path: Path) -> None:
    folder, out = finished / "experiments", tmp_path / "out"
    nothing = reproduce("--from", folder, "--out", out, "--report-only")
    assert isinstance(nothing.exception, RunError)
    assert str(nothing.exception) == (
        f"{out} holds no results.json and no finished trial to report; --out names where they are"
    )
    assert not out.exists()
    # What a process that was killed has left is enough.
    shutil.copytree(finished / "out", out)
    (out / "results.json").unlink()
    assert reproduce("--from", folder, "--out", out, "--report-only").exit_code == 0
    assert (out / "report.md").read_text() == (finished / "out/report.md").read_text()


def test_a_runs_folder_is_left_alone(finished: Path) -> None:
    run = next((finished / "out/tiny").iterdir())
    (run / "report.html").write_text("the run's own")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for more in ([], ["--report-only"], ["--no-report"]):
        result = reproduce("--from", finished / "experiments", "--out", run, *more)
        assert isinstance(result.exception, RunError)
        assert str(result.exception) == f"{run} holds a run; choose another --out"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert reproduce("--from", finished / "experiments", "--out", run, "--list").exit_code == 0


def test_a_time_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "experiments")
    result = reproduce("--from", folder, "--out", tmp_path / "out", "--within", "nan")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "--within must be at least 0 seconds, got nan"
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is shared by many processes")
def test_more_processes_than_cores_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safari.sweep.cores", lambda: 2)
    folder = write(tmp_path / "experiments")
    line = "--jobs 50: 12 processes are more than the cores (2), and there is no GPU"

    def told(*arguments: object) -> bool:
        stopped = reproduce("--from", folder, "--out", tmp_path / "out", "--within", "0", *arguments)
        assert stopped.exit_code == 0, stopped.output
        return line in stopped.stderr.splitlines()

    assert told("--jobs", 50)
    assert not told("--jobs", 50, "--quiet")
    assert not told("--jobs", 2)


def test_verdicts_are_printed_with_interval_test_and_n(finished: Path) -> None:
    again = reproduce("tiny", "--from", finished / "experiments", "--out", finished / "out", "--no-report")
    lines = again.stdout.splitlines()
    assert re.match(
        r"tiny: SAFARI ends near the perfect network: confirmed \(p [< \d.]+ after Holm's correction\)$",
        lines[0],
    )
    assert [line.split(":")[0] for line in lines[1:]] == ["  mag", "  rand"]
    assert all(" points (n = 2, one-sided t-test p " in line for line in lines[1:])


def test_versions_of_the_code_stand_beside_each_other_only_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write(tmp_path / "experiments"), tmp_path / "out"
    where = ["tiny", "--from", folder, "--out", out, "--set", "arms=drop,safari", "--set", "rounds=2"]
    assert reproduce(*where, "--seeds", "1", "--no-report").exit_code == 0
    for place in ("safari.version", "safari.runs.versions"):
        monkeypatch.setattr(f"{place}.code_version", lambda: "another")
    # What is finished may be looked at; that was the other version's alone.
    same = reproduce(*where, "--seeds", "1", "--no-report")
    assert same.exit_code == 0, same.output
    assert "versions of the code" not in same.stderr
    before = (out / "results.json").read_bytes()
    refused = reproduce(*where, "--no-report")
    assert isinstance(refused.exception, RunError)
    assert str(refused.exception) == (
        f"{out} holds trials that other versions of the code made ({code_version()}; this one is another), "
        "and new ones would stand beside them. Choose another --out, or add --mix-versions: then the report "
        "says which version made what"
    )
    assert (out / "results.json").read_bytes() == before
    mixed = reproduce(*where, "--mix-versions")
    assert mixed.exit_code == 0, mixed.output
    told = (
        f"These trials were made by 2 versions of the code: {code_version()} (4 trials), another (4 trials)."
    )
    assert told in mixed.stderr.splitlines()
    page = (out / "report.md").read_text()
    assert told in page
    assert f"| 2 of 2 | {', '.join(sorted([code_version(), 'another']))} |" in page


def test_what_another_version_only_began_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write(tmp_path / "experiments"), tmp_path / "out"
    where = ["tiny", "--from", folder, "--out", out, "--set", "arms=drop", "--seeds", "1", "--no-report"]
    assert reproduce(*where).exit_code == 0
    # As a kill leaves it: rounds, and no numbers of them.
    for path in (out / "results.json", *out.rglob("numbers.json")):
        path.unlink()
    monkeypatch.setattr("safari.version.code_version", lambda: "another")
    refused = reproduce(*where)
    assert isinstance(refused.exception, RunError)
    assert "made (" in str(refused.exception)


def test_what_a_killed_process_left_half_written_is_swept_up(finished: Path, tmp_path: Path) -> None:
    dead, living = "999999999-0123abcd", "1-0123abcd"
    left = [f".results.json.{dead}.tmp", f".report.md.{dead}.tmp", f"figures/.tiny-a.b-top1.svg.{dead}.tmp"]
    # The lock of a process that is alive (the first of the machine), or of an unknown one.
    kept = [f".results.json.{living}.tmp", ".notes.tmp", f".paper.tex.{dead}.tmp"]
    (tmp_path / "figures").mkdir()
    for name in (*left, *kept):
        (tmp_path / name).touch()
    Results.open(finished / "out").save(tmp_path)
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {"results.json", *kept}


def test_some_cases_can_be_run_alone(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "experiments", tiny=TINY), tmp_path / "out"
    where = [
        "tiny",
        "--from",
        folder,
        "--out",
        out,
        "--set",
        "arms=drop",
        "--set",
        "rounds=2",
        "--seeds",
        "1",
    ]
    listed = reproduce(*where, "--only", "ra*", "--list", "--json")
    (row,) = json.loads(listed.stdout)
    assert (row["cases"], row["trials_left"]) == (["rand"], 1)
    some = reproduce(*where, "--only", "ra*", "--no-report")
    assert some.exit_code == 0, some.output
    assert "1 of 2 trials are finished" in some.stderr
    assert [path.name.partition("-")[0] for path in (out / "tiny").iterdir()] == ["rand"]
    wrong = reproduce(*where, "--only", "mag,rnad")
    assert isinstance(wrong.exception, ConfigError)
    assert str(wrong.exception) == "--only must be one of mag, rand; got 'rnad' (did you mean 'rand'?)"


def test_only_the_arms_that_match_run(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    where = ("tiny", "--from", finished / "experiments", "--out", out, "--set", "rounds=2", "--seeds", "1")
    where = (*where, "--only", "mag")
    (row,) = json.loads(reproduce(*where, "--arms", "dr*", "--list", "--json").stdout)
    assert (row["trials"], row["trials_left"]) == (1, 1)
    some = reproduce(*where, "--arms", "dr*", "--no-report")
    assert some.exit_code == 0, some.output
    (run,) = (out / "tiny").iterdir()
    assert [path.name for path in (run / "trials").iterdir()] == ["drop"]
    # The others are still asked for, and are run without the option.
    (row,) = json.loads(reproduce(*where, "--list", "--json").stdout)
    assert row["trials_left"] == row["trials"] - 1 > 0
    wrong = reproduce(*where, "--arms", "drop,safri")
    assert isinstance(wrong.exception, ConfigError)
    assert str(wrong.exception).startswith("--arms must be one of drop, ")
    assert str(wrong.exception).endswith("got 'safri' (did you mean 'safari'?)")


LINKS = """
title = "Red \\u001b[31m"
claim = "words"
base = "base/tiny.toml"
show = []

[axes.link]
even = {}
bursts = { uplink = { name = "gilbert-elliott", p = 0.5 } }

[[checks]]
says = "Ends near \\u001b]0;the perfect network"
arm = "drop"
against = "perfect"
margin = 0.99
"""


def test_a_case_alone_has_the_arm_that_it_shares_with_others(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "experiments", links=LINKS), tmp_path / "out"
    where = ("--from", folder, "--out", out, "--set", "arms=perfect,drop", "--seeds", "2", "--only", "bursts")
    listed = reproduce(*where, "--list")
    assert "  cases: bursts" in listed.stdout
    assert "  arms: perfect, drop" in listed.stdout
    assert "1 cases, 4 trials: 4 not finished" in listed.stdout
    done = reproduce(*where)
    assert done.exit_code == 0, done.output
    # The perfect network is run once for all cases, in the first of them, which was not asked for.
    assert sorted(path.parent.name for path in out.glob("links/*/trials/*/seed-0")) == ["drop", "perfect"]
    assert "| bursts | drop |" in (out / "report.md").read_text()
    # Two trials of the other case are missing, and the same command would not run them.
    assert "4 of 6 trials are finished" in done.stderr.splitlines()
    assert (out / "report.md").read_text().startswith("# Experiments\n")
    # What a file says does not reach the terminal as it is.
    everything = reproduce("--from", folder, "--out", out, "--set", "arms=perfect,drop", "--seeds", "2")
    for shown in (listed.output, everything.output):
        assert "\x1b" not in shown
    assert "links: Ends near \\x1b]0;the perfect network: " in everything.stdout


def test_more_processes_than_trials_are_not_started(tmp_path: Path) -> None:
    folder = write(tmp_path / "experiments")
    few = reproduce("tiny", "--from", folder, "--out", tmp_path / "out", "--only", "mag", "--arms", "drop",
                    "--jobs", 10**12, "--seeds", 1, "--no-report")  # fmt: skip
    assert few.exit_code == 0, few.output


def test_a_shared_arm_is_added_with_the_cases_that_need_it(tmp_path: Path) -> None:
    folder, there = write(tmp_path / "experiments", links=LINKS), tmp_path / "there"
    where = ("--from", folder, "--set", "arms=perfect,drop", "--seeds", "1", "--no-report")
    assert reproduce(*where, "--out", there).exit_code == 0
    here = reproduce(*where, "--out", tmp_path / "here", "--only", "bursts", "--add", there)
    assert here.stderr.splitlines()[0] == f"{there}: 2 trials"
    # Both are there, so that nothing is run.
    assert not (tmp_path / "here/links").exists()
