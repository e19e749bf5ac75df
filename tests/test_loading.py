"""Plug-in files: what lies beside them can be imported, and every file used is known by its digest."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path

import pytest

from safari import loading
from safari.errors import ConfigError, TrustError
from safari.loading import find, load, loaded, sources_of
from safari.trust import using


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Path:
    """A folder of plug-ins, named from the folder above it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    return Path("lab")


@pytest.fixture(autouse=True)
def nothing_lasts(tmp_path):
    """What Python searches, and what it has loaded by plain names, is as before."""
    path, finders = list(sys.path), list(sys.meta_path)
    yield
    assert sys.path == path
    assert sys.meta_path == finders
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    left = {name for name, file in files.items() if file.startswith(str(tmp_path))}
    assert {name for name in left if not name.startswith("safari_plugin_")} == set()


def names(file: str) -> list[str]:
    return [source.name for source, _ in sources_of(file)]


def test_a_file_imports_its_neighbours(lab):
    (lab / "mine.py").write_text("import helper\nfrom tools.deep import value\nhelp = helper.help\n")
    (lab / "helper.py").write_text("import other\nhelp = 'helped ' + other.word\n")
    (lab / "other.py").write_text("word = 'a lot'\n")
    (lab / "tools").mkdir()
    (lab / "tools" / "__init__.py").write_text("from .near import near\n")
    (lab / "tools" / "near.py").write_text("near = 1\n")
    (lab / "tools" / "deep.py").write_text("from tools.near import near\nvalue = near + 1\n")
    module = load("lab/mine.py")
    assert (module.help, module.value) == ("helped a lot", 2)
    assert names("lab/mine.py") == [
        "lab/mine.py", "lab/helper.py", "lab/other.py", "lab/tools/__init__.py", "lab/tools/near.py",
        "lab/tools/deep.py",
    ]  # fmt: skip
    for source, contents in sources_of("lab/mine.py"):
        assert contents == Path(source.name).read_bytes()
        assert source.digest == hashlib.sha256(contents).hexdigest()
        assert source.path == Path(source.name).resolve()


def test_two_folders_may_each_have_a_helper(lab):
    for name in ("a", "b"):
        (lab / name).mkdir()
        (lab / name / "mine.py").write_text("import helper\nvalue = helper.value\n")
        (lab / name / "helper.py").write_text(f"value = {name!r}\n")
    assert [load(f"lab/{name}/mine.py").value for name in ("a", "b")] == ["a", "b"]


def test_two_plug_ins_share_a_neighbour_and_each_knows_only_its_own(lab):
    (lab / "one.py").write_text("from common import Thing\nimport only_one\n")
    (lab / "two.py").write_text("from common import Thing\n")
    (lab / "common.py").write_text("import base\nclass Thing: ...\n")
    (lab / "base.py").write_text("")
    (lab / "only_one.py").write_text("")
    assert load("lab/one.py").Thing is load("lab/two.py").Thing
    assert names("lab/one.py") == ["lab/one.py", "lab/common.py", "lab/base.py", "lab/only_one.py"]
    assert sorted(names("lab/two.py")) == ["lab/base.py", "lab/common.py", "lab/two.py"]


def test_what_is_installed_is_not_shadowed(lab):
    (lab / "mine.py").write_text("import statistics, click\nimport numpy as np\n")
    for name in ("statistics", "click", "numpy"):
        (lab / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    for name in ("statistics", "click"):
        sys.modules.pop(name, None)
        importable = load("lab/mine.py")
        assert "lab" not in Path(getattr(importable, name).__file__).parts
    import statistics  # noqa: F401

    import click  # noqa: F401


def test_a_folder_that_is_on_the_path_is_noted_too(lab, monkeypatch):
    """As the current folder is with `python -m safari`."""
    (lab / "mine.py").write_text("import neighbour_on_the_path as n\nvalue = n.value\n")
    (lab / "neighbour_on_the_path.py").write_text("value = 3\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(lab.resolve()))
        assert load("lab/mine.py").value == 3
    assert names("lab/mine.py") == ["lab/mine.py", "lab/neighbour_on_the_path.py"]


def test_a_changed_file_is_loaded_again_and_a_changed_neighbour_too(lab):
    (lab / "mine.py").write_text("import helper\nvalue = helper.value\n")
    (lab / "helper.py").write_text("value = 1\n")
    first = load("lab/mine.py")
    assert load("lab/mine.py") is first
    (lab / "helper.py").write_text("value = 2\n")
    assert load("lab/mine.py").value == 2
    (lab / "mine.py").write_text("value = 3\n")
    assert load("lab/mine.py").value == 3


def test_within_a_run_a_file_stays_what_it_was(lab):
    (lab / "mine.py").write_text("value = 1\n")
    with using(None):
        assert load("lab/mine.py").value == 1
        before = sources_of("lab/mine.py")
        (lab / "mine.py").write_text("value = 2\n")
        assert load("lab/mine.py").value == 1
        assert sources_of("lab/mine.py") == before
    assert load("lab/mine.py").value == 2


def test_nothing_is_loaded_for_a_config_of_somebody_else(lab):
    (lab / "mine.py").write_text("from pathlib import Path\nPath('one').touch()\n")
    Path("sent.toml").touch()
    with (
        using(Path("sent.toml")),
        pytest.raises(TrustError, match=r"^'lab/mine.py' is code, which sent.toml"),
    ):
        load("lab/mine.py")
    assert not Path("one").exists()
    load("lab/mine.py")
    # Nor is what was loaded before: it would be called. What is inside of the session cannot widen it.
    with using(Path("sent.toml")), using(None), using(Path("sent.toml"), True), pytest.raises(TrustError):
        load("lab/mine.py")


def test_finding_runs_nothing(lab, monkeypatch):
    (lab / "pack").mkdir()
    (lab / "pack" / "__init__.py").write_text("raise RuntimeError('run')\n")
    (lab / "pack" / "inner.py").write_text("raise RuntimeError('run')\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(lab.resolve()))
        found = find("pack.inner")
        assert find("pack.nothing") is None
    assert found.path == (lab / "pack" / "inner.py").resolve()
    assert find("lab/pack/inner.py").digest == found.digest
    assert find("lab/none.py") is None
    assert find("no_such_module_anywhere") is None
    assert find("sys").path is None
    assert loaded("lab/pack/inner.py") is None


def test_a_name_cannot_act_on_a_terminal(lab):
    (lab / "\x1b[2Kmine.py").write_text("")
    source = find("lab/\x1b[2Kmine.py")
    assert source is not None
    assert str(source).startswith(r"lab/\x1b[2Kmine.py (")
    assert str(source).isprintable()


def test_source_and_lines_can_be_shown(lab):
    (lab / "mine.py").write_text("import helper\ndef rule():\n    '''Mine.'''\n")
    (lab / "helper.py").write_text("def help():\n    return 1\n")
    module = load("lab/mine.py")
    assert inspect.getsource(module.rule) == "def rule():\n    '''Mine.'''\n"
    assert inspect.getsource(module.helper.help) == "def help():\n    return 1\n"


def test_a_file_that_fails_leaves_nothing_behind(lab):
    (lab / "mine.py").write_text("import helper\n1 / 0\n")
    (lab / "helper.py").write_text("value = 1\n")
    with pytest.raises(ZeroDivisionError):
        load("lab/mine.py")
    assert loaded("lab/mine.py") is None
    (lab / "mine.py").write_text("import helper\nvalue = helper.value\n")
    assert load("lab/mine.py").value == 1


def test_a_file_that_is_too_large_is_not_read(lab):
    with (lab / "mine.py").open("wb") as handle:
        handle.truncate(loading.LARGEST_SOURCE + 1)
    for use in (load, find):
        with pytest.raises(ConfigError, match=r"mine.py is larger than the 16,777,216 bytes"):
            use("lab/mine.py")
