"""What a shell is offered when Tab is pressed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from runs.kit import environment, python
from safari.cli import cli
from safari.cli.completion import Bash
from safari.cli.offers import names


@pytest.fixture
def offers(monkeypatch, tmp_path):
    """What stands below the line, as bash would replace its last word."""
    monkeypatch.chdir(tmp_path)

    def complete(line: str) -> list[str]:
        monkeypatch.setenv("SAFARI_LINE", line)
        shell = Bash(cli, {}, "safari", "_SAFARI_COMPLETE")
        found = shell.get_completions(*shell.get_completion_args())
        return [shell.format_completion(item).partition(",")[2] for item in found]

    return complete


def test_fields_and_then_what_they_can_name(offers):
    assert offers("safari run --set up") == ["uplink.name=", "uplink.p="]
    assert offers("safari run --set uplink.name=b") == ["bernoulli"]
    assert offers("safari run --set model.name=") == list(names()["model"])
    assert offers("safari run --set pruning.pruner=s") == ["snip", "synflow"]
    assert offers("safari run --set engine.name=") == ["vectorised", "reference"]
    assert offers("safari run --set engine.graph=t") == ["true"]
    assert offers("safari run --set rounds=") == []
    assert offers("safari run --set nothing.name=") == []


def test_options_of_the_plug_in_that_was_named(offers):
    assert offers("safari run --set uplink.name=gilbert-elliott --set uplink.") == [
        "uplink.name=", "uplink.p=", "uplink.burst=", "uplink.good=", "uplink.bad=",
    ]  # fmt: skip


def test_a_list_of_arms(offers):
    assert offers("safari run --set arms=s") == ["safari", "safari+", "stale"]
    assert offers("safari run --set arms=drop,sa") == ["drop,safari", "drop,safari+"]


def test_run_folders(offers, tmp_path):
    for name in ("runs/mine", "runs/other", "elsewhere/deep/third"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "runs/no-run").mkdir()
    for command in ("resume", "show", "view", "wire bench"):
        assert offers(f"safari {command} ") == ["runs/mine", "runs/other"]
    assert offers("safari show runs/mine runs/o") == ["runs/other"]
    assert offers("safari resume el") == ["elsewhere/"]
    assert offers("safari resume elsewhere/deep/") == ["elsewhere/deep/third"]
    assert offers("safari resume nowhere/") == []
    assert offers("safari wire inspect x --run runs/m") == ["runs/mine"]


def test_experiments(offers):
    assert "digits" in offers("safari reproduce ")
    assert offers("safari reproduce digi") == ["digits"]


def test_names_are_offered_without_importing_torch(tmp_path):
    code = "import sys, safari.cli.offers as o; o.names(); print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_itself_completes_a_value(tmp_path):
    """The script as a user has it, with the way in which bash takes words apart."""
    script = subprocess.run(
        [sys.executable, "-m", "safari", "completion", "bash"],
        env=environment(),
        capture_output=True,
        text=True,
    ).stdout
    (tmp_path / "safari").write_text(f'#!/bin/sh\nexec {sys.executable} -m safari "$@"\n')
    (tmp_path / "safari").chmod(0o755)
    lines = [
        script,
        f"PATH={tmp_path}:$PATH",
        "COMP_LINE='safari run --set uplink.name=bern'",
        "COMP_POINT=${#COMP_LINE}",
        "COMP_WORDS=(safari run --set uplink.name = bern)",
        "COMP_CWORD=5",
        "_safari_completion safari bern =",
        'echo "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment(), capture_output=True, text=True)
    assert done.stdout == "bernoulli\n", done.stderr
