"""A run that somebody sent: looking at it runs none of its code; what would run it asks first."""

from __future__ import annotations

import json
import os
import pty
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
from safari import trust
from safari.api import rule_lines
from safari.cli import cli
from safari.errors import ConfigError, RunError, SafariError, TrustError
from safari.loading import find
from safari.runs import RunFolder
from safari.runs.code import refuse_changed_code
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
    return tmp_path / "state" / "safari" / "trusted.json"


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


def test_a_model_of_the_sender_s_own_is_asked_about_before_a_frame_is_rule_lines(sent):
    text = (sent / "config.toml").read_text()
    (sent / "config.toml").write_text(text.replace('name = "mlp"', 'name = "evil/lib.py:net"'))
    problem = told(safari("wire", "bench", sent))
    assert "evil/lib.py" in problem
    assert not ran()


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


def test_resume_says_what_it_would_load_and_loads_nothing(sent, store):
    unfinished(sent)
    records = (sent / "trials/own/seed-0/rounds.jsonl").read_bytes()
    digest = find("evil/lib.py").digest
    where = f"evil/lib.py ({Path('evil/lib.py').resolve()}, sha256 {digest[:16]})"
    lines = told(safari("resume", sent)).splitlines()
    assert lines == [
        f"run/config.toml names what you have not run or approved before: {where}",
        "look at it first; with --trust it is loaded",
    ]
    with pytest.raises(TrustError) as error:
        package.resume(sent)
    assert str(error.value) == lines[0]
    with pytest.raises(TrustError):
        package.resume(sent, trust=lambda sources: False)
    assert not ran()
    assert (sent / "trials/own/seed-0/rounds.jsonl").read_bytes() == records
    assert not store.exists()


def test_going_back_asks_as_well_and_changes_nothing_when_refused(sent):
    before = {path: path.read_bytes() for path in sent.rglob("*") if path.is_file()}
    assert "evil/lib.py" in told(safari("resume", sent, "--from", "0"))
    with pytest.raises(TrustError):
        package.resume(sent, from_round=0)
    assert not ran()
    assert {path: path.read_bytes() for path in sent.rglob("*") if path.is_file()} == before


def test_with_trust_it_is_loaded_and_never_asked_about_again(sent, store):
    unfinished(sent)
    result = safari("resume", sent, "--trust")
    assert result.exit_code == 0, result.output
    assert "loading evil/lib.py (" in result.stderr
    assert ran()
    table = json.loads(store.read_text())
    assert table["files"][str(Path("evil/lib.py").resolve())] == [find("evil/lib.py").digest]
    assert store.stat().st_mode & 0o077 == 0
    text = (sent / "config.toml").read_text()
    (sent / "config.toml").write_text(text.replace("rounds = 4", "rounds = 5"))
    package.resume(sent)


def test_a_function_may_decide(sent):
    unfinished(sent)
    shown = []
    package.resume(sent, trust=lambda sources: shown.extend(sources) or True)
    assert [source.name for source in shown] == ["evil/lib.py"]
    assert ran()


def test_the_own_run_of_a_user_is_resumed_without_a_question(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    Path("evil").mkdir()
    Path("evil/lib.py").write_text(RULE)
    package.run(CONFIG, "run")
    package.resume(unfinished(Path("run")))


def test_what_a_folder_says_of_its_code_makes_it_no_safer(sent):
    """Digests in the folder are of the sender's making."""
    digest = find("evil/lib.py").digest
    entry = {"sha256": digest, "copy": None}
    (sent / "plugins.json").write_text(json.dumps({"files": {"evil/lib.py": entry}, "about": {}}))
    unfinished(sent)
    assert "evil/lib.py" in told(safari("resume", sent))
    assert not ran()


def test_what_lies_beside_approved_code_has_to_be_approved_too(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    Path("evil").mkdir()
    Path("evil/lib.py").write_text("import beside\n" + RULE)
    Path("evil/beside.py").write_text("")
    package.run(CONFIG, "run")
    Path("evil/beside.py").write_text('from pathlib import Path\nPath("pwned").touch()\n')
    run = unfinished(Path("run"))
    assert "evil/beside.py has changed since run was made with it" in told(safari("resume", run))
    (run / "plugins.json").unlink()
    problem = told(safari("resume", run))
    assert "evil/beside.py (" in problem
    assert "was not approved, so it is not loaded" in problem
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


def test_modules_by_name_are_asked_about_too(sent, monkeypatch):
    Path("evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    text = (sent / "config.toml").read_text()
    (sent / "config.toml").write_text(text.replace("evil/lib.py:rule", "evil_module:rule"))
    assert f"evil_module ({Path('evil_module.py').resolve()}, sha256 " in told(
        safari("resume", sent, "--from", "0")
    )
    assert not ran()
    # Not even what Python itself has: somebody else chose the function and its options.
    (sent / "config.toml").write_text(text.replace("evil/lib.py:rule", "os:abort"))
    assert "not run or approved before: os (" in told(safari("resume", sent, "--from", "0"))


def test_of_the_running_script_only_what_it_defines_itself_can_be_named(sent, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "rmtree", shutil.rmtree, raising=False)
    text = (sent / "config.toml").read_text()
    (sent / "config.toml").write_text(text.replace("evil/lib.py:rule", "__main__:rmtree"))
    with pytest.raises(ConfigError, match="arms: own: __main__ does not define 'rmtree' itself"):
        package.resume(sent, from_round=0)


@pytest.mark.parametrize("command", ["run", "validate"])
def test_the_config_of_a_sent_run_is_asked_about_and_one_of_your_own_is_not(sent, command):
    out = ["--out", "again"] if command == "run" else []
    assert "evil/lib.py" in told(safari(command, sent / "config.toml", *out))
    if command == "run":
        with pytest.raises(TrustError):
            package.run(sent / "config.toml", "again")
    assert not ran()
    shutil.copy(sent / "config.toml", "mine.toml")
    if command == "run":
        package.run("mine.toml", "again")
    else:
        assert safari(command, "mine.toml").exit_code == 0
    assert ran()


def test_a_wrong_config_of_a_sent_run_is_not_looked_into_either(sent):
    text = (sent / "config.toml").read_text()
    (sent / "config.toml").write_text(text.replace("rounds = 3", "rounds = 0"))
    for command in ("run", "validate", "show", "resume"):
        arguments = [sent / "config.toml"] if command in ("run", "validate") else [sent]
        told(safari(command, *arguments))
        assert not ran()


# --- the question


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code"), [("n", 2), ("y", 0), ("", 2)])
def test_on_a_terminal_the_question_is_asked(sent, answer, code):
    unfinished(sent)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "safari", "resume", "run"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment() | {"TERM": "dumb"},
    )
    os.close(theirs)
    seen = b""
    while b"Go on? [y/N]" not in seen:
        seen += os.read(ours, 4096)
    assert b"evil/lib.py (" in seen
    assert not ran()
    os.write(ours, f"{answer}\n".encode())
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        seen += part
    process.communicate()
    os.close(ours)
    assert process.returncode == code, seen.decode()
    assert ran() == (code == 0)


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
    assert done.stderr.splitlines()[-1] == "error: look at it first; with --trust it is loaded"
    assert "Traceback" not in done.stderr
    assert not ran()


# --- the store


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": "other"}', '{"format": "safari-trust-1", "files": 3}', "[" * 10_000]
)
def test_a_store_that_cannot_be_read_knows_nothing(sent, store, text):
    store.parent.mkdir(parents=True)
    store.write_text(text)
    assert trust.Store.read() == trust.Store({})
    assert "evil/lib.py" in told(safari("resume", unfinished(sent)))
    package.resume(sent, trust=True)
    assert trust.Store.read().knows(find("evil/lib.py"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="only where files have owners")
def test_a_store_that_others_can_write_is_not_believed(sent, store):
    package.resume(unfinished(sent), trust=True)
    assert trust.Store.read().knows(find("evil/lib.py"))
    for path, mode in ((store, 0o666), (store.parent, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert not trust.Store.read().knows(find("evil/lib.py"))
        path.chmod(before)


def test_a_store_that_cannot_be_written_stops_nothing(sent, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    package.resume(unfinished(sent), trust=True)
    assert ran()


def test_the_store_stays_small(store):
    files = [trust.Source(f"{n}.py", Path(f"/{n}.py"), "0" * 64) for n in range(trust.MOST_FILES + 1)]
    versions = [trust.Source("x.py", Path("/x.py"), f"{n:064d}") for n in range(trust.MOST_VERSIONS + 1)]
    found = trust.Store({}).with_sources([*files, *versions])
    assert len(found.files) == trust.MOST_FILES
    assert [found.knows(each) for each in (files[0], files[1], files[-1])] == [False, False, True]
    assert [found.knows(each) for each in (versions[0], versions[-1])] == [False, True]


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
        assert "track.mlflow is new to you and left alone" in result.stderr
        text = (sent / "config.toml").read_text()
        (sent / "config.toml").write_text(text.replace("evil/lib.py:rule", "drop"))
        problem = told(safari("resume", sent, "--from", "0"))
        assert f"not run or approved before: track.mlflow = '{address}'" in problem
        assert not contacted.is_set()


def test_a_sent_run_with_data_of_the_hub_asks_before_it_goes_there(sent, monkeypatch):
    """With the `datasets` of a hub that notes who calls."""
    called = []
    monkeypatch.setattr(
        "safari.data.huggingface._library", lambda: called.append(1) or pytest.fail("contacted")
    )
    text = (sent / "config.toml").read_text().replace("evil/lib.py:rule", "drop")
    start, end = text.index("[data]"), text.index("[partition]")
    text = text[:start] + '[data]\nname = "hf:somebody/somewhere"\n\n' + text[end:]
    (sent / "config.toml").write_text(text)
    unfinished(sent)
    name = "data.name = 'hf:somebody/somewhere', from the Hugging Face hub"
    asked = []
    for use in (
        lambda: package.resume(sent),
        lambda: package.resume(sent, trust=lambda sources: asked.append(sources)),
        lambda: package.run(sent / "config.toml", "new"),
    ):
        with pytest.raises(TrustError, match=r"have not run or approved before: data\.name = 'hf:somebody"):
            use()
    assert [str(source) for source in asked[0]] == [f"{name} (no file)"]
    for arguments in (
        ("resume", sent),
        ("run", sent / "config.toml"),
        ("validate", sent / "config.toml"),
        ("wire", "bench", sent),
    ):
        assert f"not run or approved before: {name}" in told(safari(*arguments)), arguments
    assert not called
    # Looking at one asks nothing and goes nowhere.
    assert safari("show", sent).exit_code == 0
    # Who approves, or has gone there before, is not asked again.
    trust.remember(trust.downloads({"data": {"name": "hf", "source": "somebody/somewhere"}}))
    with pytest.raises(pytest.fail.Exception, match="contacted"):
        package.resume(sent)


def test_what_is_fetched_and_what_is_read_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def fetched(**tables: dict[str, object]) -> list[str]:
        return [source.name for source in trust.contacts(tables)]

    hub = "from the Hugging Face hub"
    assert fetched(data={"name": "hf:a/b"}) == [f"data.name = 'hf:a/b', {hub}"]
    assert fetched(data={"name": "hf", "source": "a/b"}) == [f"data.name = 'hf:a/b', {hub}"]
    for source in ("here", "./gone", "/gone/too", "~/gone"):
        assert fetched(data={"name": f"hf:{source}"}) == []
    for source in ("x" * 5000, "a\0b"):
        assert fetched(data={"name": f"hf:{source}"}) == [f"data.name = {'hf:' + source!r}, {hub}"]
    assert fetched(data={"name": "cifar10", "download": True}) == [
        "data.download = true, cifar10 from its own site"
    ]
    assert fetched(data={"name": "cifar10", "download": False}) == []
    assert fetched(model={"name": "transformers", "path": "a/b"}) == [f"model.path = 'a/b', {hub}"]
    assert fetched(model={"name": "transformers", "path": "here"}) == []
    assert fetched(model={"name": "mlp"}) == fetched() == []
    # What no config may hold is not stumbled over: it is refused where the config is read.
    assert fetched(data={"name": "hf", "source": 3}, model={"name": "transformers", "path": [1]}) == []
    assert trust.contacts({"data": 3, "model": "x", "track": []}) == []


# --- code that has changed


def test_code_that_changed_since_is_refused_by_name(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    Path("evil").mkdir()
    Path("evil/lib.py").write_text(RULE)
    package.run(CONFIG, "run")
    run = unfinished(Path("run"))
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


def test_no_approval_is_asked_for_code_that_is_refused_anyway(tmp_path, monkeypatch, store):
    """An own file that was edited is new to the store, too: `--trust` would only lead to the next refusal."""
    monkeypatch.chdir(tmp_path)
    Path("evil").mkdir()
    Path("evil/lib.py").write_text(RULE)
    package.run(CONFIG, "run", progress=False, report=False)
    run = unfinished(Path("run"))
    Path("evil/lib.py").write_text(EVIL)
    asked = []
    for use in (lambda: package.resume(run), lambda: package.resume(run, trust=asked.append)):
        with pytest.raises(RunError, match=r"^evil/lib\.py has changed since run was made with it"):
            use()
    for arguments in (("resume", run), ("resume", run, "--trust")):
        result = safari(*arguments)
        assert told(result).startswith("evil/lib.py has changed since run was made with it")
        assert "loading" not in result.stderr
    assert not asked
    assert not ran()


@pytest.mark.parametrize("text", ["[]", "{", '{"files": 3}', '{"files": {"x": 3}}', '{"about": {"x": 3}}'])
def test_a_list_of_plug_ins_that_is_damaged_is_named(sent, text):
    (sent / "plugins.json").write_text(text)
    assert rule_lines([RunFolder.open(sent)])["evil/lib.py:rule"] == ""
    with pytest.raises(RunError, match=r"^run/plugins\.json"):
        package.resume(sent, from_round=0, trust=True)


def test_a_missing_plug_in_is_reported_as_before(sent):
    shutil.rmtree("evil")
    with pytest.raises(ConfigError, match=r"^arms: own: no such file: evil/lib.py \(paths are relative"):
        package.resume(unfinished(sent))


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
