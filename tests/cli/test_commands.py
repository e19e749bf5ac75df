"""Each command, quickly, in this process."""

from __future__ import annotations

import json
import shutil
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from runs.kit import TINY
from safari.cli import cli
from safari.cli.options import read_config
from safari.config import Config, parse
from safari.engine import KINDS, check, run
from safari.errors import RunError, SafariError
from safari.toml import to_toml


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Where figures are looked at. Elsewhere they are not drawn, because that takes seconds.
DRAWN = {
    "test_a_run_that_can_only_be_read_is_shown_and_its_report_goes_elsewhere",
    "test_run_from_a_config_with_changes",
    "test_the_average_is_in_the_table_where_there_is_one",
    "test_show_one_elsewhere",
    "test_show_several_overlaid",
}


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    if request.node.originalname not in DRAWN:
        monkeypatch.setattr("safari.cli.finish.write_figures", lambda runs, folder: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run({**TINY, "seeds": 2}, path)
    return path


def safari(*arguments: str):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def output(*arguments: str) -> str:
    result = safari(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def problem(*arguments: str) -> str:
    """The text of the error that a user would be shown; `test_process` sees to how."""
    result = safari(*arguments)
    assert isinstance(result.exception, SafariError), result.output
    return str(result.exception)


# run


def test_run_from_a_config_with_changes(here):
    (here / "tiny.toml").write_text(to_toml(parse({**TINY, "evaluation": {"every": 1}})))
    changes = ["--set", "rounds=3", "--set", "arms=drop", "--seeds", "2"]
    done = safari("run", "tiny.toml", *changes, "--out", "mine")
    assert done.exit_code == 0, done.output
    table = tomllib.loads((here / "mine/config.toml").read_text())
    assert (table["rounds"], table["arms"], table["seeds"], table["clients"]) == (3, ["drop"], 2, 4)
    assert sorted(p.name for p in (here / "mine/trials/drop").iterdir()) == ["seed-0", "seed-1"]
    assert {"config.toml", "summary.json", "report.html", "figures", "trials"} <= {
        p.name for p in (here / "mine").iterdir()
    }
    assert sorted(p.name for p in here.iterdir()) == ["mine", "tiny.toml"]
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["arm", "top-1"]
    assert lines[2].split()[0] == "drop"
    # Progress is no result, so it goes elsewhere.
    assert done.stderr.startswith("run folder: mine\ndrop  seed 0  round 1/3  top-1 ")
    assert "report: mine/report.html\nlook at it in the browser:" in done.stderr


def test_run_json_is_the_summary_and_the_folder_has_a_name_by_default(here):
    (here / "tiny.toml").write_text(to_toml(parse({**TINY, "rounds": 2, "name": "my-name"})))
    result = safari("run", "tiny.toml", "--json", "--quiet")
    assert result.stderr == ""
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("my-name-20")
    assert len(folder.name) == len("my-name-20260131-235959")
    summary = json.loads(result.stdout)
    assert summary == json.loads((folder / "summary.json").read_text())
    assert list(summary["arms"]) == ["drop", "safari"]
    assert (folder / "report.html").exists()


def test_the_average_is_in_the_table_where_there_is_one(here, finished):
    (here / "tiny.toml").write_text(to_toml(parse({**TINY, "rounds": 2, "aggregation": {"average": 0.9}})))
    done = safari("run", "tiny.toml", "--out", "mine")
    assert done.exit_code == 0, done.output
    header = done.stdout.splitlines()[0]
    assert "average %" in header
    assert (here / "mine/figures/average-top1.png").exists()
    (here / "mine/summary.json").unlink()
    assert safari("resume", "mine").stdout.splitlines()[0] == header
    assert "average" not in safari("resume", shutil.copytree(finished, here / "plain")).stdout


def test_run_says_all_that_is_wrong_at_once(here):
    (here / "wrong.toml").write_text('rounds = 0\n[pruning]\npruner = "snipp"\n[uplink]\nq = 1\n')
    for command in ("run", "validate"):
        lines = problem(command, "wrong.toml").splitlines()
        assert [line.split()[0] for line in lines] == ["rounds", "pruning.pruner", "uplink.q"]


def test_refused_updates_are_reported_and_counted(here):
    changes = {"rounds": 2, "arms": "drop", "local.lr": 1e30, "clients": 2, "model.name": "mlp"}
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    result = safari("run", *settings, "--set", "uplink.name=perfect", "--out", "x")
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if "refused" in line]
    assert len(told) == 1
    assert told[0].startswith("note: drop, seed 0, round 1: 2 updates were refused (client 0: ")
    header, row = (line.replace(" %", "%").split("  ") for line in result.stdout.splitlines()[::2])
    header, row = ([text.strip() for text in line if text.strip()] for line in (header, row))
    assert dict(zip(header, row, strict=True))["refused"] == "4"


def test_a_run_is_not_shortened(here, finished):
    folder = shutil.copytree(finished, here / "short")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("rounds = 7", "rounds = 6"))
    for command in ("resume", "show"):
        assert problem(command, folder).startswith("rounds must be at least the 7 that "), command


def test_run_refuses_a_folder_that_is_taken(here, finished):
    before = sorted(finished.rglob("*"))
    assert problem("run", "--set", "rounds=1", "--out", finished).startswith(
        f"{finished} holds a run already"
    )
    (here / "full").mkdir()
    (here / "full/thesis.tex").touch()
    assert problem("run", "--out", "full") == "full is not an empty folder; choose another one"
    assert sorted(finished.rglob("*")) == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rounds", "--set takes key=value, such as pruning.sparsity=0.9; got 'rounds'"),
        ("ronuds=3", "ronuds is not a field (did you mean 'rounds'?)"),
        ("rounds=many", "rounds must be a whole number, got 'many'"),
        ("rounds.x=3", "rounds.x: rounds is not a table"),
        ("pruning.sparsity=1", "pruning.sparsity must be below 1.0, got 1"),
        ("aggregation.average=1", "aggregation.average must be below 1.0, got 1"),
        ("aggregation.average=high", "aggregation.average must be a number, got 'high'"),
        ("uplink.p=2", "uplink: p must lie between 0 and 1, got 2.0"),
        ("uplink.q=2", "uplink.q is not an option (allowed: p)"),
        ("data.name=mnist", "data.name must be one of cifar10, dialogue, digits, hf, leaf, text; got 'mnist'; "
         "your own goes in as file.py:name or package.module:name, "
         "a data set of the Hugging Face hub, or a table in a file, as hf:mnist"),
        ("local.steps=1000000000", "local.steps must be at most 31250000 for batches of 32, got 1000000000"),
        ("local.batch=1000000001", "local.batch must be at most 1000000000, got 1000000001"),
        ("local.epochs=1e9", "local.epochs must be at most 6944444 for a client with 144 samples, "
         "got 1000000000.0"),
        ("local.epochs=1e308", "local.epochs must be at most 6944444 for a client with 144 samples, "
         "got 1e+308"),
        ("name=../x", "name may hold letters, digits, and . _ + - only, got '../x'"),
    ],
)  # fmt: skip
def test_bad_settings_are_reported_and_make_no_folder(here, setting, message):
    assert problem("run", "--set", setting, "--out", "mine").startswith(message)
    assert list(here.iterdir()) == []


def test_naming_another_plug_in_drops_the_options_of_the_one_before(here):
    output(
        "run", "--set", "uplink.name=lost", "--set", "rounds=1", "--set", "model.name=mlp", "--out", "x", "-q"
    )
    assert tomllib.loads((here / "x/config.toml").read_text())["uplink"] == {"name": "lost"}


def test_a_config_that_is_missing_or_not_toml(here):
    assert problem("run", "no.toml") == "cannot read no.toml: No such file or directory"
    (here / "bad.toml").write_text("rounds = = 3")
    assert problem("run", "bad.toml").startswith("bad.toml is not valid TOML: ")
    (here / "bad.toml").write_bytes(b"\xff\xfe")
    assert problem("validate", "bad.toml").startswith("bad.toml is not valid TOML: ")


@pytest.mark.parametrize("what", ["missing", "incomplete", "truncated"])
def test_incomplete_data_is_reported_and_leaves_no_folder(here, what):
    place = here / "data" / "cifar-10-batches-bin"
    if what != "missing":
        place.mkdir(parents=True)
        for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
            (place / name).write_bytes(bytes(3073 * 10))
    if what == "incomplete":
        (place / "data_batch_1.bin").unlink()
    text = problem("run", "--set", "data.name=cifar10", "--set", "model.name=resnet20", "--out", "mine")
    assert {
        "missing": "cifar10: expected data/cifar-10-batches-bin, found none",
        "incomplete": "data/cifar-10-batches-bin/data_batch_1.bin: expected a file of CIFAR-10, found none",
        "truncated": "data/cifar-10-batches-bin/data_batch_1.bin: expected 30730000 bytes",
    }[what] in text
    assert not (here / "mine").exists()


# resume and show


def test_a_finished_run_is_only_shown_by_resume(here, finished):
    run = shutil.copytree(finished, here / "run")
    # Killed before there was a report: that is left to do, and no progress is to be told.
    (run / "report.html").unlink(missing_ok=True)
    shown = safari("resume", "run")
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:4]] == ["drop", "safari"]
    assert shown.stderr == "report: run/report.html\n"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert before[run / "summary.json"] == (finished / "summary.json").read_bytes()

    again = safari("resume", "run")
    assert again.exit_code == 0
    assert again.stdout == shown.stdout
    assert again.stderr == "nothing to do: all 4 trials are finished (report: run/report.html)\n"
    assert safari("resume", "run", "-q").output == shown.stdout
    assert json.loads(output("resume", "run", "--json")) == json.loads(before[run / "summary.json"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_resume_of_a_finished_run_brings_old_results_up_to_date(here, finished):
    run = shutil.copytree(finished, here / "run")
    output("resume", "run")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("last = 4", "last = 2"))
    shown = safari("resume", "run")
    assert shown.stdout.startswith("arm ")
    assert "round" not in shown.stderr
    assert json.loads((run / "summary.json").read_text())["last"] == 2
    (run / "config.toml").write_text(text.replace("sparsity = 0.8", "sparsity = 0.5"))
    assert "was made under another config: pruning.sparsity was 0.8 and is 0.5" in problem("resume", "run")


def test_resume_of_what_is_no_run(here):
    assert problem("resume", "nothing") == "nothing is not a run's folder: it has no config.toml"


def test_show_one_elsewhere(here, finished):
    before = sorted(finished.rglob("*"))
    shown = safari("show", finished, "--out", "elsewhere")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:4]] == ["drop", "safari"]
    assert shown.stderr == "report: elsewhere/report.html\n"
    assert (here / "elsewhere/report.html").read_text().startswith("<!doctype html>")
    assert {"top1.png", "top1.svg", "loss.png"} <= {p.name for p in (here / "elsewhere/figures").iterdir()}
    assert sorted(finished.rglob("*")) == before


def test_a_run_that_can_only_be_read_is_shown_and_its_report_goes_elsewhere(here, finished):
    shutil.copytree(finished, "copy")
    # The user who runs the tests may write everywhere: so a file is in the way.
    shutil.rmtree("copy/figures", ignore_errors=True)
    Path("copy/figures").touch()
    shown = safari("show", "copy")
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:4]] == ["drop", "safari"]
    assert isinstance(shown.exception, RunError)
    assert str(shown.exception).startswith("cannot write copy/figures: File exists")
    assert str(shown.exception).endswith("; --out names another place for the report")


def test_show_several_overlaid(here, finished):
    for name in ("a", "b"):
        shutil.copytree(finished, here / name)
    shown = safari("show", "a", "b")
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:6]] == [
        "a/drop",
        "a/safari",
        "b/drop",
        "b/safari",
    ]
    assert shown.stderr == "report: runs/overlay/report.html\n"
    assert (here / "runs/overlay/figures/top1.png").exists()
    assert list(json.loads(output("show", "a", "b", "--json"))) == ["a", "b"]


@pytest.mark.parametrize("lines", [0, 5])
def test_show_a_run_that_is_not_finished(here, finished, lines):
    copy = shutil.copytree(finished, here / "copy")
    for file in copy.rglob("rounds.jsonl"):
        text = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(text[:lines]) + text[lines][:30])
    shown = safari("show", "copy")
    assert shown.exit_code == 0, shown.output
    assert {0: "not begun", 5: "10 of 14 rounds"}[lines] in shown.stdout
    assert shown.stderr == "report: copy/report.html\n"
    summary = json.loads(output("show", "copy", "--json"))["copy"]
    assert summary["arms"]["drop"]["seeds"]["1"]["rounds"] == lines
    assert summary["arms"]["drop"]["seeds"]["1"]["finished"] is False


def test_show_a_run_that_has_not_begun(here, finished):
    (here / "new").mkdir()
    shutil.copy(finished / "config.toml", here / "new")
    assert safari("show", "new").exit_code == 0


def test_show_names_what_is_no_run_before_it_writes(here, finished):
    assert problem("show", finished, "nothing") == "nothing is not a run's folder: it has no config.toml"
    assert not (here / "runs").exists()


# list


def test_list_has_a_line_for_everything():
    shown = output("list")
    for kind, builtin in KINDS.items():
        assert f"{kind}  ({builtin.field})" in shown
        for name in builtin:
            (line,) = [line for line in shown.splitlines() if line.split()[:1] == [name] or line == name][:1]
            assert len(line.split()) > 2, f"{name} has no explanation"


def test_list_one_kind_with_options():
    shown = output("list", "link", "--options")
    assert "  bernoulli        Each message arrives with the client's own probability p" in shown
    assert "    p = 0.3  (a number or a list (each a number))" in shown
    assert "mag" not in shown


def test_list_json():
    found = json.loads(output("list", "--json"))
    assert list(found) == list(KINDS)
    assert found["partition"]["names"]["groups"]["options"] == {
        "groups": {"type": "a whole number", "default": 2}
    }
    assert found["rule"]["names"]["safari"]["doc"].startswith("The paper's rule")


# validate and init


def test_validate_a_good_config(here):
    (here / "tiny.toml").write_text(to_toml(parse(TINY)))
    assert output("validate", "tiny.toml") == "tiny.toml: fine; 2 arms × 1 seeds × 7 rounds\n"
    assert json.loads(output("validate", "tiny.toml", "--json")) == {
        "config": "tiny.toml",
        "valid": True,
        "problems": [],
        "notes": [],
    }
    assert [p.name for p in here.iterdir()] == ["tiny.toml"]


def test_validate_with_a_change(here):
    (here / "tiny.toml").write_text(to_toml(parse(TINY)))
    assert (
        problem("validate", "tiny.toml", "--set", "cohort=5") == "cohort must be at most clients (4), got 5"
    )


def test_init_writes_a_config_that_is_the_demo_with_every_field_explained(here):
    assert output("init") == "wrote safari.toml; try: safari validate safari.toml && safari run safari.toml\n"
    text = (here / "safari.toml").read_text()
    assert parse(tomllib.loads(text)) == Config()
    assert "# fraction of the prunable weights that is cut\nsparsity = 0.8\n" in text
    fields = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert len(fields) > 30
    assert output("validate", "safari.toml").startswith("safari.toml: fine; 4 arms × 1 seeds × 150 rounds")


def test_init_to_the_output(here):
    assert parse(tomllib.loads(output("init", "-", "--set", "clients=20"))).clients == 20
    assert list(here.iterdir()) == []


def test_init_with_changes_and_never_over_a_file(here):
    output("init", "mine.toml", "--set", "clients=20", "--set", "pruning.pruner=snip")
    before = (here / "mine.toml").read_bytes()
    config = parse(tomllib.loads(before.decode()))
    assert (config.clients, config.pruning.pruner) == (20, "snip")
    assert problem("init", "mine.toml") == "mine.toml exists already; choose another name"
    assert problem("init", "other.toml", "--set", "clients=0") == "clients must be at least 1, got 0"
    assert (here / "mine.toml").read_bytes() == before
    assert [p.name for p in here.iterdir()] == ["mine.toml"]


def test_init_where_nothing_can_be_written(here):
    (here / "file").touch()
    assert problem("init", "file/x.toml") == "cannot write file/x.toml: Not a directory"
    assert problem("init", "no/such/x.toml") == "cannot write no/such/x.toml: No such file or directory"


# help


COMMANDS = {name: cli.get_command(None, name) for name in cli.list_commands(None)}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_or_gives_an_example(name):
    shown = output(name, "--help")
    assert shown.startswith(f"Usage: cli {name} ")
    explanation = shown.split("Options:")[0]
    assert len(explanation.split()) > 15
    assert shown == output(name, "-h")
    for option in COMMANDS[name].params:
        if option.param_type_name == "option":
            assert option.help, f"{option.name} has no help"


@pytest.mark.parametrize("group", [[], ["wire"]])
def test_the_overview_has_whole_lines_on_a_common_terminal(group):
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(cli, [*group, "--help"], terminal_width=80).stdout
    commands = shown.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert len(commands) >= 2
    assert all(line.endswith(".") and not line.endswith("...") for line in commands), shown


def test_the_examples_in_the_help_work():
    lines = [line.strip() for command in COMMANDS.values() for line in (command.help or "").splitlines()]
    examples = [part.strip() for line in lines for part in line.split("&&") if "safari " in part]
    assert len(examples) > 6
    for example in examples:
        name, *words = example[example.index("safari ") :].split()[1:]
        assert name in COMMANDS, example
        settings = [after for word, after in pairwise(words) if word == "--set"]
        assert check(read_config(None, settings)) == [], example
