"""The frozen page and the files of the live one, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from safari.errors import RunError
from safari.runs import RunFolder, Saved
from safari.runs.similarity import to_line
from safari.view import page as pages
from safari.view import write_report
from safari.view.page import FILES, bundle, read_file
from view.made_up import record

SCRIPTS = {name: read_file(name).decode() for name in FILES if name.endswith(".js")}


class Parts(HTMLParser):
    """Tags with their attributes, and the text in scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], {}
        self._open = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = (tag, dict(attrs).get("type"))

    def handle_data(self, data):
        if self._open and self._open[0] in ("script", "style"):
            self.texts[self._open] = self.texts.get(self._open, "") + data

    def handle_endtag(self, tag):
        self._open = None


@pytest.fixture(scope="module")
def frozen(small, tmp_path_factory):
    return write_report([small], tmp_path_factory.mktemp("page")).read_text(encoding="utf-8")


def digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_this_script_and_this_style_and_nothing_else(frozen):
    parts = Parts(frozen)
    (policy,) = [a["content"] for t, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'", "script-src": digest(parts.texts["script", "module"]),
        "style-src": digest(parts.texts["style", None]), "img-src": "data:", "base-uri": "'none'",
        "form-action": "'none'",
    }  # fmt: skip
    before = [tag for tag, a in parts.tags if tag in ("script", "style", "link")]
    assert parts.tags.index(("meta", {"http-equiv": "Content-Security-Policy", "content": policy})) == 3
    assert before == ["link", "style", "script", "script"]


def test_nothing_is_fetched(frozen):
    parts = Parts(frozen)
    for _, attrs in parts.tags:
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value.startswith(("data:image/svg+xml;base64,", "#"))
    style = parts.texts["style", None]
    assert "@import" not in style
    assert "url(" not in style


def test_the_data_are_all_there(frozen, small):
    data = json.loads(Parts(frozen).texts["script", "application/json"])
    assert (
        set(data["trials"])
        == set(data["details"])
        == {f"0/{a}/{s}" for a in ("drop", "safari") for s in (0, 1)}
    )
    assert len(data["snapshots"]["0/safari/0"]) == len(data["trials"]["0/safari/0"]["snapshots"]) == 36
    assert data["trials"]["0/safari/0"]["detail"] is None


def test_the_same_run_gives_the_same_page(small, tmp_path):
    one, other = (write_report([small], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert one == other


def test_no_script_makes_markup_or_reaches_out():
    words = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
             "createContextualFragment", "DOMParser", "srcdoc", "http:", "https:", "import("]  # fmt: skip
    for name, text in SCRIPTS.items():
        plain = text.replace("http://www.w3.org/2000/svg", "")
        assert [word for word in words if word in plain] == [], name


def test_scripts_are_short_and_import_one_way():
    for name, text in SCRIPTS.items():
        assert len(text.splitlines()) <= 400, name
        for line in re.findall(r"^import .*$", text, re.MULTILINE):
            other = re.fullmatch(r'import \{ [\w, ]+ \} from "\./([a-z]+\.js)";', line)
            assert other, f"{name}: {line}"
            assert other[1] in SCRIPTS
    assert {name for name in SCRIPTS if name[:-3] not in _reached("main")} == set(), (
        "a file that nobody needs"
    )


def _reached(name, seen=None):
    seen = set() if seen is None else seen
    if name not in seen:
        seen.add(name)
        for other in re.findall(r'from "\./([a-z]+)\.js"', SCRIPTS[f"{name}.js"]):
            _reached(other, seen)
    return seen


def test_what_is_imported_is_exported_and_used():
    for name, text in SCRIPTS.items():
        for names, other in re.findall(
            r'^import \{ ([\w, ]+) \} from "\./([a-z]+)\.js";$', text, re.MULTILINE
        ):
            for wanted in names.split(", "):
                assert re.search(
                    rf"^export (?:const|let|class|(?:async )?function) {wanted}\b",
                    SCRIPTS[f"{other}.js"],
                    re.MULTILINE,
                ), f"{name}: {wanted}"
                assert len(re.findall(rf"\b{wanted}\b", text)) > 1, f"{name} does not use {wanted}"
    exported = {
        (name, word)
        for name, text in SCRIPTS.items()
        for word in re.findall(r"^export (?:const|let|class|(?:async )?function) (\w+)", text, re.MULTILINE)
    }
    for name, word in exported:
        used = [other for other, text in SCRIPTS.items() if re.search(rf"\b{word}\b", text)]
        assert len(used) > 1, f"{name} exports {word}, which nobody imports"


def test_names_of_modules_do_not_collide_in_the_bundle():
    names = [
        word
        for text in SCRIPTS.values()
        for word in re.findall(
            r"^(?:export )?(?:const|let|class|(?:async )?function) (\w+)", text, re.MULTILINE
        )
    ]
    assert sorted({word for word in names if names.count(word) > 1}) == []
    text = bundle()
    assert "import {" not in text
    assert not re.search(r"^export ", text, re.MULTILINE)
    assert "</script" not in text.lower()
    assert "<!--" not in text


def test_a_file_stays_small_and_says_what_it_left_out(tmp_path, small, monkeypatch):
    run = RunFolder.create(tmp_path / "run", small.config)
    for seed in (0, 1):
        trial = run.trial("safari", seed)
        for t in range(1, 9):
            trial.append(record(t), {}, to_line(t, np.zeros((6, 6), np.float32)))
        trial.save(Saved(8, {}, {}))
    monkeypatch.setattr(pages, "MOST_DETAIL_CELLS", 70)
    monkeypatch.setattr(pages, "MOST_SNAPSHOT_NUMBERS", 36 * 3)
    data = pages.freeze([run])
    assert list(data["details"]) == ["0/safari/0"]
    assert list(data["snapshots"]["0/safari/0"]) == ["1", "5", "8"]
    assert data["trials"]["0/safari/0"]["snapshots"] == [1, 5, 8]
    assert (
        data["trials"]["0/safari/0"]["snapshots_note"]
        == "This file holds 3 of 8 snapshots; safari view shows all."
    )


def test_a_folder_gets_the_usual_name(small, tmp_path):
    assert write_report([small], tmp_path) == tmp_path / "report.html"
    assert write_report([small], tmp_path / "mine.html") == tmp_path / "mine.html"


def test_a_folder_that_cannot_be_written_is_named(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file"):
        write_report([small], tmp_path / "file" / "report.html")
