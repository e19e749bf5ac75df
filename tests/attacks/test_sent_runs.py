"""A run or a config that somebody sent: nothing of theirs is run or contacted, unless `--trust` is given."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

import safari as package
from runs.kit import TINY, environment
from safari.api import rule_lines
from safari.cli import cli
from safari.config import parse
from safari.errors import ConfigError, RunError, SafariError, TrustError
from safari.loading import find
from safari.runs import RunFolder
from safari.runs.code import refuse_changed_code
from safari.toml import to_toml
from safari.view import write_report

RULE = '''
from safari import Compensation, Decision

def rule(*, trust: float = 0.5):
    """A rule of the sender's own."""
    return Compensation(
        lambda clients, size, device: {},
        lambda state, round: (Decision(a=round.weights[round.present]), state),
    )
'''
# What the receiver has instead: the same, and it leaves a mark when it is run.
EVIL = 'from pathlib import Path\nPath("pwned").touch()\n' + RULE
CONFIG = {**TINY, "rounds": 3, "arms": ["drop", {"name": "own", "rule": "evil/lib.py:rule"}]}


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A trust store of one's own, empty at first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "safari" / "trusted"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The sender's run, finished."""
    place = tmp_path_factory.mktemp("sender")
    (place / "evil").mkdir()
    (place / "evil" / "lib.py").write_text(RULE)
    before = Path.cwd()
    os.chdir(place)
    try:
        package.run(CONFIG, "run")
        write_report([RunFolder.open(Path("run"))], Path("run/report.html"))
    finally:
        os.chdir(before)
    return place / "run"


@pytest.fixture
def sent(made, tmp_path, monkeypatch, store) -> Path:
    """The run at the receiver's, who has the code beside it and works there."""
    place = tmp_path / "receiver"
    run = Path(shutil.copytree(made, place / "run"))
    # As somebody who wants it to be loaded would send it: nothing says that the code has changed.
    shutil.rmtree(run / "plugins")
    (run / "plugins.json").unlink()
    (place / "evil").mkdir()
    (place / "evil" / "lib.py").write_text(EVIL)
    monkeypatch.chdir(place)
    return Path("run")


def unfinished(run: Path) -> Path:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("rounds = 3", "rounds = 4"))
    return run


def ran() -> bool:
    return Path("pwned").exists()


def safari(*arguments: str | Path):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def told(result) -> str:
    assert isinstance(result.exception, SafariError), result.output
    return str(result.exception)


# --- looking


def test_show_and_resume_of_a_finished_run_load_nothing(sent):
    for arguments in (("show", sent, "--json"), ("resume", sent), ("resume", sent, "--json")):
        result = safari(*arguments)
        assert result.exit_code == 0, result.output
        assert not ran(), arguments
    # A summary that is missing is made again, a page and its figures with it.
    (sent / "summary.json").unlink()
    assert safari("resume", sent).exit_code == 0
    assert (sent / "summary.json").exists()
    assert not ran()
    assert package.resume(sent)["arms"]["own"]["seeds"]["0"]["finished"]
    assert not ran()
    loaded = package.load(sent)
    assert set(loaded.columns("rounds")["arm"]) == {"drop", "own"}
    assert len(loaded.model("own"))
    assert "own" in repr(loaded)
    assert not ran()


def test_the_wire_is_looked_at_without_the_rule(sent):
    for arm in ("drop", "own"):
        assert safari("wire", "bench", sent, "--arm", arm, "--save", "frame").exit_code == 0
    assert safari("wire", "inspect", "frame", "--run", sent).exit_code == 0
    assert not ran()


def test_the_page_has_the_words_of_a_rule_without_loading_it(sent, made):
    runs = [RunFolder.open(sent)]
    assert rule_lines(runs)["evil/lib.py:rule"] == ""
    write_report(runs, Path("page.html"), rules=rule_lines(runs))
    assert not ran()
    # Where the run was made, its folder holds what the rule said of itself.
    assert rule_lines([RunFolder.open(made)])["evil/lib.py:rule"] == "A rule of the sender's own."


@pytest.mark.parametrize(
    "folder", ["view", *(pytest.param(name, marks=pytest.mark.slow) for name in ("show", "resume"))]
)
def test_the_console_command_loads_nothing_either(sent, folder):
    """In a process of its own, where nothing has been loaded before."""
    code = (
        "import sys, pathlib\n"
        "from safari.cli import main\n"
        "if sys.argv[1] == 'view':\n"
        "    import safari.view.server as server\n"
        "    server.serve = lambda *a, **k: sys.exit(0)\n"
        "sys.argv = ['safari', *sys.argv[1:]]\n"
        "main()\n"
    )
    more = {"view": ["--no-browser", "--port", "0"], "show": ["--json"], "resume": []}[folder]
    done = subprocess.run(
        [sys.executable, "-c", code, folder, "run", *more], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not ran()


# --- going on


def changed(run: Path, old: str, new: str) -> Path:
    text = (run / "config.toml").read_text()
    assert old in text
    (run / "config.toml").write_text(text.replace(old, new))
    return run


REFUSED = (
    "'evil/lib.py' is code, which run/config.toml names, and somebody else may have written that: look at it first; "
    "with --trust (in Python trust=True) everything that it names is used"
)


def test_resume_names_the_code_and_the_field_and_runs_nothing(sent, store):
    before = {path: path.read_bytes() for path in unfinished(sent).rglob("*") if path.is_file()}
    for arguments in (["resume", sent], ["resume", sent, "--from", "0"]):
        assert told(safari(*arguments)) == f"arms: own: {REFUSED}"
    for from_round in (None, 0):
        with pytest.raises(TrustError) as error:
            package.resume(sent, from_round=from_round)
        assert str(error.value) == f"arms: own: {REFUSED}"
    assert not ran()
    assert {path: path.read_bytes() for path in sent.rglob("*") if path.is_file()} == before
    assert not store.exists()


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("evil/lib.py:rule", "evil/lib.py:no-name", "arms: own: 'evil/lib.py'"),
        ("evil/lib.py:rule", "evil/lib.py:", "arms: own: 'evil/lib.py'"),
        ("evil/lib.py:rule", "evil.lib:rule", "arms: own: 'evil.lib'"),
        ("evil/lib.py:rule", "os:abort", "arms: own: 'os'"),
        ("evil/lib.py:rule", "__main__:rule", "arms: own: '__main__'"),
        ('name = "mlp"', 'name = "evil/lib.py:net"', "model.name: 'evil/lib.py'"),
        (
            'name = "mlp"\nhidden = [8]',
            'name = "lora"\nbase = "evil/lib.py:no-name"',
            "model: base: 'evil/lib.py'",
        ),
        ('pruner = "mag"', 'pruner = "evil/lib.py:no-name"', "pruning.pruner: 'evil/lib.py'"),
        ('name = "fedavg"', 'name = "evil/lib.py:no-name"', "client.name: 'evil/lib.py'"),
    ],
)
def test_code_by_any_name_in_any_field_is_refused(sent, old, new, where):
    changed(unfinished(sent), old, new)
    if "arms" not in where:
        changed(sent, "evil/lib.py:rule", "drop")
    assert where in told(safari("resume", sent))
    with pytest.raises(TrustError):
        package.run(sent / "config.toml", "new")
    for arguments in (["run", sent / "config.toml"], ["validate", sent / "config.toml"]):
        assert where in told(safari(*arguments)), arguments
    assert not ran()


def test_all_that_is_refused_is_told_at_once(sent):
    changed(unfinished(sent), 'pruner = "mag"', 'pruner = "fine.py:mine"')
    problems = told(safari("resume", sent)).splitlines()
    assert [line.split(" is code")[0] for line in problems] == [
        "pruning.pruner: 'fine.py'", "arms: own: 'evil/lib.py'"
    ]  # fmt: skip


def test_a_model_of_the_sender_s_own_is_not_built_for_a_frame(sent, monkeypatch):
    # As a sender would who makes a checkpoint that fits.
    monkeypatch.setattr("safari.engine.sample.refuse_changes", lambda *_: None)
    (sent / "frame").touch()
    changed(sent, 'name = "mlp"', 'name = "evil/lib.py:net"')
    for arguments in (["wire", "bench", sent], ["wire", "inspect", sent / "frame", "--run", sent]):
        assert "model.name: 'evil/lib.py' is code" in told(safari(*arguments))
    assert not ran()


def test_with_trust_it_is_run_and_needs_no_flag_again_until_something_changes(sent, store):
    unfinished(sent)
    result = safari("resume", sent, "--trust")
    assert result.exit_code == 0, result.output
    assert ran()
    assert store.stat().st_mode & 0o077 == 0
    changed(sent, "rounds = 4", "rounds = 5")
    assert told(safari("resume", sent)) == f"arms: own: {REFUSED}"
    changed(sent, "rounds = 5", "rounds = 4")
    package.resume(sent, from_round=0)
    # As a sender would who wants other code to be loaded.
    Path("evil/lib.py").write_text(EVIL + "# more")
    (sent / "plugins.json").unlink()
    assert "is not what you have run with run/config.toml before" in told(
        safari("resume", sent, "--from", "0")
    )


def test_what_was_trusted_is_one_config_and_nothing_else(sent, store):
    unfinished(sent)
    package.resume(sent, trust=True)
    shutil.copytree(sent, "other")
    changed(Path("other"), 'name = "own"', 'name = "another"')
    with pytest.raises(TrustError):
        package.resume("other")


@pytest.fixture
def home(tmp_path, monkeypatch, store) -> Path:
    """A user's own folder with a rule of their own."""
    monkeypatch.chdir(tmp_path)
    Path("evil").mkdir()
    Path("evil/lib.py").write_text(RULE)
    return tmp_path


def stopped(config: object, out: str, **more: object) -> Path:
    """A run that was stopped after its first round."""

    class Stop:
        def start(self, run: object) -> None: ...
        def stop(self) -> None: ...
        def round(self, trial: object, record: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        package.run(config, out, [Stop()], **more)
    return Path(out)


def test_a_run_of_one_s_own_goes_on_without_a_flag(home):
    assert safari("resume", stopped(CONFIG, "run")).exit_code == 0
    Path("mine.toml").write_text("# A file\n" + to_toml(parse(CONFIG)))
    with pytest.raises(TrustError):
        package.run("mine.toml", "first")
    assert safari("resume", stopped("mine.toml", "first", trust=True)).exit_code == 0
    # The file, too, is known now, until somebody edits it.
    package.run("mine.toml", "second")
    Path("mine.toml").write_text(Path("mine.toml").read_text() + "\n")
    with pytest.raises(TrustError):
        package.run("mine.toml", "third")


def test_what_is_typed_beside_a_file_is_one_s_own(home):
    """Also where the file is of somebody else, whose own names stay refused."""
    Path("plain.toml").write_text(to_toml(parse(TINY)))
    Path("evil/other.py").write_text("import lib\nrule = lib.rule\n")
    typed = ["--set", 'arms=["drop", {name = "own", rule = "evil/other.py:rule"}]']
    assert safari("run", "plain.toml", "--out", "run", *typed).exit_code == 0
    assert safari("resume", "run", "--from", "0").exit_code == 0
    Path("theirs.toml").write_text(to_toml(parse({**TINY, "model": {"name": "evil/lib.py:net"}})))
    result = told(safari("run", "theirs.toml", "--out", "again", *typed))
    assert "model.name: 'evil/lib.py' is code" in result
    assert "other.py" not in result


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweep_runs_code_with_trust_alone_in_processes_too(sent, jobs):
    shutil.copy(sent / "config.toml", "base.toml")
    Path("theirs.toml").write_text('base = "base.toml"\n[axes]\nrounds = [1, 2]\n')
    command = ["sweep", "theirs.toml", "--out", "out", "--jobs", jobs, "--quiet"]
    problem = told(safari(*command))
    assert "arms: own: 'evil/lib.py' is code, which the sweep names" in problem
    assert not ran()
    assert safari(*command, "--trust").exit_code == 0
    assert ran()


@pytest.mark.slow
def test_a_run_in_several_processes_is_one_s_own(home):
    Path("mine.toml").write_text(to_toml(parse({**CONFIG, "seeds": 2})))
    assert safari("run", "mine.toml", "--out", "run", "--jobs", 2, "--trust").exit_code == 0
    changed(Path("run"), "seeds = 2", "seeds = 2 ")
    with pytest.raises(TrustError):
        package.resume("run", from_round=0)
    changed(Path("run"), "seeds = 2 ", "seeds = 2")
    package.resume("run", from_round=0)


def test_a_config_that_comes_through_a_pipe_is_never_known(home):
    reader, writer = os.pipe()
    os.write(writer, to_toml(parse(CONFIG)).encode())
    os.close(writer)
    assert "arms: own: 'evil/lib.py' is code" in told(safari("run", f"/dev/fd/{reader}", "--out", "run"))
    os.close(reader)


def test_what_a_folder_says_of_its_code_makes_it_no_safer(sent):
    """Digests in the folder are of the sender's making."""
    digest = find("evil/lib.py").digest
    entry = {"sha256": digest, "copy": None}
    (sent / "plugins.json").write_text(json.dumps({"files": {"evil/lib.py": entry}, "about": {}}))
    unfinished(sent)
    assert "evil/lib.py" in told(safari("resume", sent))
    assert not ran()


def test_what_lies_beside_known_code_has_to_be_known_too(home):
    Path("evil/lib.py").write_text("import beside\n" + RULE)
    Path("evil/beside.py").write_text("")
    run = stopped(CONFIG, "run")
    Path("evil/beside.py").write_text('from pathlib import Path\nPath("pwned").touch()\n')
    assert "evil/beside.py has changed since run was made with it" in told(safari("resume", run))
    (run / "plugins.json").unlink()
    assert "evil/beside.py (" in told(safari("resume", run))
    assert not ran()


def test_a_compiled_file_beside_the_source_is_not_run(sent):
    """Python would believe a cache that claims to belong to the source; what was approved is the source."""
    Path("evil/lib.py").write_text(RULE)
    Path("other.py").write_text(EVIL)
    cache = Path("evil/__pycache__")
    cache.mkdir()
    name = f"lib.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(
        "other.py", cfile=str(cache / name), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    package.resume(unfinished(sent), trust=True)
    assert not ran()


def test_a_wrong_config_of_a_sent_run_is_not_looked_into_either(sent):
    text = (sent / "config.toml").read_text()
    (sent / "config.toml").write_text(text.replace("rounds = 3", "rounds = 0"))
    for command in ("run", "validate", "show", "resume"):
        arguments = [sent / "config.toml"] if command in ("run", "validate") else [sent]
        told(safari(command, *arguments))
        assert not ran()


@pytest.mark.slow
def test_without_a_terminal_the_exit_code_is_2_and_the_words_are_there(sent):
    unfinished(sent)
    done = subprocess.run(
        [sys.executable, "-m", "safari", "resume", "run"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: arms: own: {REFUSED}"
    assert "Traceback" not in done.stderr
    assert not ran()


# --- the store


@pytest.mark.parametrize("text", ["", "{", '{"evil/lib.py": 1}', "[" * 10_000, "3"])
def test_a_store_that_cannot_be_read_knows_nothing(sent, store, text):
    package.resume(unfinished(sent), trust=True)
    package.resume(sent, from_round=0)
    for path in store.iterdir():
        path.write_text(text)
    with pytest.raises(TrustError):
        package.resume(sent, from_round=0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="only where files have owners")
def test_a_store_that_others_can_write_is_not_believed(sent, store):
    package.resume(unfinished(sent), trust=True)
    store.chmod(0o777)
    with pytest.raises(TrustError):
        package.resume(sent, from_round=0)
    store.chmod(0o700)
    package.resume(sent, from_round=0)


def test_a_store_that_cannot_be_written_stops_nothing(sent, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    package.resume(unfinished(sent), trust=True)
    assert ran()


# --- addresses


def test_an_address_in_a_sent_config_is_not_contacted_unasked(sent, monkeypatch):
    pytest.importorskip("mlflow")
    contacted = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def accept() -> None:
            try:
                server.accept()[0].close()
                contacted.set()
            except OSError:
                pass

        listener = threading.Thread(target=accept, daemon=True)
        listener.start()
        text = (sent / "config.toml").read_text()
        address = f"http://127.0.0.1:{port}"
        (sent / "config.toml").write_text(text.replace('mlflow = ""', f'mlflow = "{address}"'))
        package.resume(sent)
        result = safari("resume", sent)
        assert result.exit_code == 0, result.output
        assert f"no tracker is told: '{address}' in track.mlflow is an address" in result.stderr
        changed(sent, "evil/lib.py:rule", "drop")
        for arguments in (["resume", sent, "--from", "0"], ["run", sent / "config.toml", "--out", "new"]):
            assert f"'{address}' in track.mlflow is an address" in told(safari(*arguments))
        assert not contacted.is_set()


def contacts(*arguments: str) -> list[str]:
    """Whom a command tries to reach, and its exit code: an audit hook ends its process at the first attempt."""
    code = (
        "import sys\n"
        "def hook(event, arguments):\n"
        "    if event in ('socket.getaddrinfo', 'socket.connect'):\n"
        "        place = arguments[0] if event == 'socket.getaddrinfo' else arguments[1]\n"
        "        open('contacted', 'a').write(f'{place}\\n')\n"
        "        import os\n"
        "        os._exit(9)\n"
        "sys.addaudithook(hook)\n"
        "from safari.cli import main\n"
        "sys.argv = ['safari', *sys.argv[1:]]\n"
        "main()\n"
    )
    Path("contacted").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(), capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr
    seen = Path("contacted").read_text().splitlines() if Path("contacted").exists() else []
    return [*seen, f"exit code {done.returncode}"]


HUB = [
    ("data", 'name = "hf:somebody/somewhere"', "data: 'somebody/somewhere' would be fetched"),
    ("data", 'name = "hf"\nsource = "somebody/somewhere"', "data: 'somebody/somewhere' would be fetched"),
    ("data", 'name = "cifar10"\nroot = "none"\ndownload = true', "data: 'data.download' fetches https://"),
]


@pytest.mark.parametrize(("table", "text", "says"), HUB)
def test_data_from_elsewhere_is_refused(sent, table, text, says):
    pytest.importorskip("datasets")
    config = changed(sent, "evil/lib.py:rule", "drop") / "config.toml"
    before = config.read_text()
    start = before.index(f"[{table}]")
    end = before.index("\n[", start)
    config.write_text(before[:start] + f"[{table}]\n{text}\n" + before[end:])
    unfinished(sent)
    for arguments in (("resume", sent), ("run", config), ("validate", config)):
        assert says in told(safari(*arguments)), arguments
    with pytest.raises(TrustError):
        package.run(config, "new")
    # Looking at one asks nothing and goes nowhere.
    assert safari("show", sent).exit_code == 0


@pytest.mark.slow
def test_nothing_is_contacted_unless_it_is_trusted(sent):
    """The hub with --trust alone, which shows that the hook would notice an attempt."""
    test_data_from_elsewhere_is_refused(sent, *HUB[0])
    assert contacts("resume", "run") == ["exit code 2"]
    assert contacts("validate", "run/config.toml", "--trust")[-1] == "exit code 9"


# --- code that has changed


def test_code_that_changed_since_is_refused_by_name(home):
    """With --trust as well: the run's numbers would be of neither."""
    run = stopped(CONFIG, "run")
    digest = find("evil/lib.py").digest
    (copy,) = (run / "plugins").iterdir()
    assert copy.read_text() == RULE
    Path("evil/lib.py").write_text(EVIL)
    for use in (lambda: package.resume(run, trust=True), lambda: refuse_changed_code(RunFolder.open(run))):
        with pytest.raises(RunError) as error:
            use()
        assert str(error.value) == (
            f"evil/lib.py has changed since run was made with it (sha256 {digest[:16]} then, "
            f"{find('evil/lib.py').digest[:16]} now); the run's own copy is run/plugins/{copy.name}. "
            "Put it back, or begin a new run"
        )
    assert not ran(), "changed code was run before it was refused"
    shutil.copy(copy, "evil/lib.py")
    package.resume(run)


@pytest.mark.parametrize("text", ["[]", "{", '{"files": 3}', '{"files": {"x": 3}}', '{"about": {"x": 3}}'])
def test_a_list_of_plug_ins_that_is_damaged_is_named(sent, text):
    (sent / "plugins.json").write_text(text)
    assert rule_lines([RunFolder.open(sent)])["evil/lib.py:rule"] == ""
    with pytest.raises(RunError, match=r"^run/plugins\.json"):
        package.resume(sent, from_round=0, trust=True)


def test_a_missing_plug_in_is_reported_as_before(sent):
    shutil.rmtree("evil")
    with pytest.raises(ConfigError, match=r"^arms: own: no such file: evil/lib.py \(paths are relative"):
        package.resume(unfinished(sent), trust=True)


# --- what a terminal would act on


@pytest.mark.slow
def test_escape_sequences_of_a_sent_run_are_written_out(sent):
    (sent / "trials/own/seed-0/rounds.jsonl").write_text('{"round": "\\u001b[2J\\u001b]0;x\\u0007"}\n')
    (sent / "config.toml").write_text('"\\u001b[31mred" = 1\n' + (sent / "config.toml").read_text())
    for arguments in (["show", "run"], ["resume", "run"]):
        done = subprocess.run(
            [sys.executable, "-m", "safari", *arguments], env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "\x1b" not in done.stderr + done.stdout
        assert "\\x1b[31mred is not a field" in done.stderr
