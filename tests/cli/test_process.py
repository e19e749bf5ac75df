"""The command as a user meets it: real processes, exit codes, what lies on which stream, signals."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import safari as package
from runs.kit import TINY, checkpoints, environment, leftovers, python, results
from safari.aggregation import RULES
from safari.config import parse
from safari.models import MODELS
from safari.toml import to_toml
from sweep.kit import TINY as SWEEP
from sweep.kit import write

FAST = ["--set", "model.name=mlp", "--set", "local.steps=1", "--set", "engine.threads=1"]

NAMES = ", ".join(sorted(RULES))


def safari(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "safari", *arguments, cwd=cwd, env=environment() | more)


def test_the_demo_through_the_console_script(tmp_path):
    script = shutil.which("safari", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed, so that there is no script")
    done = subprocess.run(
        [script, "run", "--set", "rounds=3", "--json", *FAST],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert list(summary["arms"]) == ["perfect", "drop", "safari", "safari+"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert summary == json.loads((folder / "summary.json").read_text())
    assert (folder / "report.html").stat().st_size > 10_000
    assert f"run folder: runs/{folder.name}\n" in done.stderr


def test_a_wrong_setting_of_a_sweep_is_one_line_and_nothing_is_written(tmp_path):
    folder = write(tmp_path / "files", tiny=SWEEP)
    done = safari("sweep", str(folder / "tiny.toml"), "--set", "ronuds=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --set ronuds=3: ronuds is not a field (did you mean 'rounds'?)\n"
    assert not (tmp_path / "runs").exists()


SIX = """
ronuds = 100
clients = 0
arms = ["perfect", "safri"]

[model]
name = "cnnn"

[pruning]
sparsity = 1.0

[uplink]
name = "bernoulli"
q = 0.3
"""


def test_all_six_mistakes_of_a_config_are_reported(tmp_path):
    (tmp_path / "bad.toml").write_text(SIX)
    done = safari("validate", "bad.toml", cwd=tmp_path)
    own = "; your own goes in as file.py:name or package.module:name"
    problems = [
        "ronuds is not a field (did you mean 'rounds'?)",
        "clients must be at least 1, got 0",
        "pruning.sparsity must be below 1.0, got 1.0",
        f"model.name must be one of {', '.join(sorted(MODELS))}; got 'cnnn' (did you mean 'cnn'?){own}",
        "uplink.q is not an option (allowed: p)",
        f"arms must be one of {NAMES}; got 'safri' (did you mean 'safari'?){own}",
    ]
    assert done.stderr == "".join(f"error: {line}\n" for line in problems)
    assert (done.returncode, done.stdout) == (2, "")

    scripted = safari("validate", "bad.toml", "--json", cwd=tmp_path)
    assert json.loads(scripted.stdout) == {
        "config": "bad.toml",
        "valid": False,
        "problems": problems,
        "notes": [],
    }
    assert (scripted.returncode, scripted.stderr) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run", "--sedes", "3"], "No such option"),
        (["run", "--seeds", "0"], "0 is not in the range x>=1"),
        (["list", "nonsense"], "'nonsense' is not one of"),
        (["show"], "Missing argument 'RUN...'"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
        (["resume", "nowhere"], "error: nowhere is not a run's folder: it has no config.toml"),
        (
            ["run", "--set", "data.name=cifar10"],
            "error: cifar10: expected data/cifar-10-batches-bin, found none",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_end_in_a_message_and_exit_code_2(tmp_path, arguments, said):
    done = safari(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_plug_in_that_cannot_work_is_one_line_and_exit_code_2(tmp_path):
    """At once where the first round shows it, in `validate` as in `run`; else in the round that does."""
    (tmp_path / "bad.py").write_text(
        "import numpy as np\n"
        "from safari.links import Link\n"
        "def late():\n"
        "    return Link(lambda s: {}, lambda state, t, rng: (np.ones([4, 3][t > 1], bool), state))\n"
        "def raises():\n"
        "    return Link(lambda s: {}, lambda state, t, rng: state['x'])\n"
    )
    (tmp_path / "tiny.toml").write_text(to_toml(parse(TINY)))
    link = ["--set", "uplink.name=bad.py:raises"]
    for arguments in (["validate", "tiny.toml"], ["run", "tiny.toml", "--out", "x"]):
        done = safari(*arguments, *link, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: uplink.name: bad.py:raises raised KeyError: 'x' (bad.py, line 6)\n"
    assert not (tmp_path / "x").exists()
    done = safari("run", "tiny.toml", "--set", "uplink.name=bad.py:late", "--out", "x", "-q", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: uplink.name: bad.py:late: apply must return (delivered, state), delivered being a bool array "
        "with an entry for each of the 4 clients; got ndarray of bool and shape [3]\n"
    )


def test_a_model_too_large_for_memory_is_reported_without_a_traceback(tmp_path):
    huge = ["--set", "model.name=mlp", "--set", "model.hidden=[1000000, 1000000]"]
    done = safari("run", *huge, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: out of memory: ")
    assert done.stderr.splitlines()[1].startswith("error: what needs less: fewer clients, a smaller model, ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stop_where_nothing_was_begun_is_one_word(tmp_path, name):
    (tmp_path / "mine.py").write_text(
        f"import os, signal\ndef data():\n    os.kill(os.getpid(), signal.{name})\n"
    )
    done = safari("run", "--set", "data.name=mine.py:data", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "stopped")


def test_sigterm_while_a_library_is_imported_is_a_stop(tmp_path):
    """Libraries in C turn whatever interrupts their import into errors of their own."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGTERM)\n"
        "            except KeyboardInterrupt as error:\n"
        "                raise ImportError('initialisation failed') from error\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from safari.cli import main\n"
        "sys.argv = ['safari', 'run']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_help_and_version_import_no_torch(tmp_path):
    code = """
import sys
sys.argv = ["safari", *sys.argv[1:]]
from safari.cli import main
try:
    main()
finally:
    print("heavy:", sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""
    for arguments in (["--help"], ["run", "--help"], ["--version"], ["completion", "bash"], ["init"]):
        done = python("-c", code, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.endswith("heavy: []\n"), arguments
    assert package.__version__ in python("-m", "safari", "--version").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_for_the_right_variable(shell, tmp_path):
    done = safari("completion", shell, cwd=tmp_path)
    assert done.returncode == 0
    assert f"_SAFARI_COMPLETE={shell}_complete" in done.stdout
    program = shutil.which(shell)
    if program:
        (tmp_path / "script").write_text(done.stdout)
        assert subprocess.run([program, "-n", str(tmp_path / "script")]).returncode == 0


def complete(cwd: Path, *words: str) -> list[str]:
    """What bash would be offered for the last of the words."""
    line = " ".join(["safari", *words])
    done = safari(
        cwd=cwd,
        _SAFARI_COMPLETE="bash_complete",
        COMP_WORDS=line,
        COMP_CWORD=str(len(words)),
    )
    assert done.returncode == 0, done.stderr
    return [entry.partition(",")[2] for entry in done.stdout.split()]


def test_a_shell_is_offered_commands_options_keys_and_names(tmp_path):
    commands = ["compare", "completion", "export", "flower", "init", "list", "net", "reproduce", "resume", "run",
                "show", "sweep", "validate", "view", "wire"]  # fmt: skip
    assert complete(tmp_path, "") == commands
    assert complete(tmp_path, "re") == ["reproduce", "resume"]
    assert {"--set", "--seeds", "--out", "--json"} <= set(complete(tmp_path, "run", "--"))
    assert complete(tmp_path, "run", "--set", "checkpoint.") == [
        "checkpoint.every=",
        "checkpoint.keep=",
        "checkpoint.best=",
    ]
    assert complete(tmp_path, "list", "p") == ["partition", "pruner", "policy", "packets"]


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m safari list | head -1",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.stdout == "data  (data.name)\n"
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_output_is_reported_in_one_line_and_a_full_error_stream_exits_with_2():
    with Path("/dev/full").open("w") as full:
        command, told = [sys.executable, "-m", "safari"], {"env": environment(), "timeout": 60}
        done = subprocess.run([*command, "list"], stdout=full, stderr=subprocess.PIPE, text=True, **told)
        assert done.returncode == 2
        assert done.stderr == "error: cannot write the output: No space left on device\n"
        for wrong in (["run", "nothing.toml"], ["frobnicate"]):
            assert subprocess.run([*command, *wrong], stderr=full, **told).returncode == 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "run"
    package.run({**TINY, "rounds": 40}, path)
    return path


def begin(folder: Path, rounds: int = 40, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A run in a process of its own, already a few rounds on."""
    (folder / "tiny.toml").write_text(to_toml(parse({**TINY, "rounds": rounds})))
    process = subprocess.Popen(
        [*launcher, sys.executable, "-m", "safari", "run", "tiny.toml", "--out", "mine"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    records = folder / "mine/trials/safari/seed-0/rounds.jsonl"
    deadline = time.monotonic() + 60
    while not records.exists() or records.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_says_how_to_go_on_and_that_works(tmp_path, reference, number):
    process = begin(tmp_path)
    process.send_signal(number)
    shown, said = process.communicate()
    assert process.returncode == 130
    assert said.endswith("stopped; nothing is lost: go on with: safari resume mine\n")
    assert "Traceback" not in said
    assert shown == ""
    assert leftovers(tmp_path / "mine") == []
    assert not (tmp_path / "mine/summary.json").exists()
    if number == signal.SIGINT:
        done = safari("resume", "mine", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == json.loads((reference / "summary.json").read_text())
        assert (tmp_path / "mine/report.html").exists()
    else:
        package.resume(tmp_path / "mine")
    assert results(tmp_path / "mine") == results(reference)
    assert checkpoints(tmp_path / "mine") == checkpoints(reference)


def test_a_background_job_is_not_stopped_by_ctrl_c_but_by_sigterm(tmp_path):
    """A shell starts background jobs with SIGINT ignored; the command must not take that back."""
    process = begin(tmp_path, rounds=100_000, launcher=["sh", "-c", 'trap "" INT; exec "$@"', "sh"])
    process.send_signal(signal.SIGINT)
    records = tmp_path / "mine/trials/safari/seed-0/rounds.jsonl"
    before, deadline = records.stat().st_size, time.monotonic() + 60
    while records.stat().st_size < before + 10_000:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.endswith("stopped; nothing is lost: go on with: safari resume mine\n")


def test_a_second_command_on_the_folder_is_refused_with_the_writers_name(tmp_path):
    process = begin(tmp_path)
    process.send_signal(signal.SIGSTOP)  # so that it cannot end before the second begins
    try:
        second = safari("resume", "mine", cwd=tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert second.returncode == 2
    assert second.stderr == f"error: mine is being written by another process (pid {process.pid})\n"


def test_a_file_size_limit_ends_in_a_message_and_resume_finishes(tmp_path, reference):
    (tmp_path / "tiny.toml").write_text(to_toml(parse({**TINY, "rounds": 40})))
    code = (
        "import resource, sys, torch, safari.engine, safari.cli, safari.cli.finish\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))\n"
        "sys.argv = ['safari', 'run', 'tiny.toml', '--out', 'mine', '-q']\n"
        "safari.cli.main()\n"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: cannot write mine/trials/(drop|safari)/seed-0/rounds\.jsonl: File too large; "
        r"what was there before is untouched\n",
        done.stderr,
    )
    assert leftovers(tmp_path / "mine") == []
    package.resume(tmp_path / "mine")
    assert results(tmp_path / "mine") == results(reference)
    assert checkpoints(tmp_path / "mine") == checkpoints(reference)


@pytest.mark.slow
def test_bars_on_a_terminal(tmp_path):
    (tmp_path / "tiny.toml").write_text(to_toml(parse(TINY)))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "safari", "run", "tiny.toml", "--out", "mine"],
        cwd=tmp_path,
        env=environment() | {"TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        seen += part
    shown = process.communicate()[0].decode()
    os.close(ours)
    assert process.returncode == 0
    text = seen.decode()
    assert "7/7" in text
    assert "top-1" in text
    assert "\x1b[" in text, "no bars"
    assert "\x1b[" not in shown, "the table went to a pipe"
