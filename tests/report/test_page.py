from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from report.made_up import record
from safari.config import Arm, Config, Plug, Track
from safari.errors import MissingExtraError, RunError
from safari.report import write_figures, write_report
from safari.runs import RunFolder, summarise
from safari.toml import to_toml

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """The page as a browser would take it apart."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.text = text
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and data.strip():
            self.words.setdefault(self.open[-1], []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def page_of(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tiny, tmp_path_factory) -> Page:
    return page_of(write_report([tiny], tmp_path_factory.mktemp("page"), {"drop": "Average what arrived."}))


def test_nothing_is_fetched_and_nothing_runs(page):
    for tag, attrs in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value.startswith(("#", "data:image/png;base64,"))
            if name == "style":
                assert re.fullmatch(r"[^@]*", value)
                assert set(re.findall(r"url\((.)", value)) <= {"#"}
    assert "@import" not in page.text
    assert "url(" not in page.words["style"][0]


def test_the_policy_allows_the_one_style_sheet_and_nothing_else(page):
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "script-src" not in rules
    (style,) = page.words["style"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules["style-src-elem"] == rules["style-src"] == f"'sha256-{digest}'"
    # It must stand before whatever it is to govern.
    assert [attrs for tag, attrs in page.tags if tag in ("meta", "style")][1]["content"] == policy


def test_light_dark_and_phone(page):
    (style,) = page.words["style"]
    assert "prefers-color-scheme: dark" in style
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", page.text))
    light = style.split("@media", 1)[0]
    assert used - {"--natural"} <= set(re.findall(r"(--[a-z0-9-]+):", light))


def test_table_figures_rules_and_config_are_there(page, tiny):
    assert page.words["h1"] == ["tiny"]
    arms = [text for text in page.words["th"] if text in ("perfect", "drop", "safari")]
    # The table of results, the table of rules, and the version under "Made with".
    assert arms == ["perfect", "drop", "safari"] * 2 + ["safari"]
    labels = [svg["aria-label"] for svg in page.all("svg")]
    assert labels[:5] == ["Test accuracy, top-1", "Test accuracy, top-5", "Test loss", "Bytes", "Masks"]
    assert labels[5:8] == ["Arrivals: drop", "Arrivals: safari", "Similarity: safari"]
    assert len(labels) == 9
    assert "Average what arrived." in page.words["td"]
    assert "".join(page.words["code"]).endswith(to_toml(tiny.config))
    mean = summarise(tiny)["arms"]["drop"]["top1"]["mean"]
    assert any(text.startswith(f"{100 * mean:.1f} ± ") for text in page.words["td"])


def test_ids_are_used_once_and_all_references_lead_somewhere(page):
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    named = set(re.findall(r"url\(#([^)]+)\)", page.text)) | set(re.findall(r'href="#([^"]+)"', page.text))
    assert named <= set(ids)
    assert named


def test_the_same_run_gives_the_same_page(tiny, tmp_path):
    one, other = (write_report([tiny], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert one == other


HOSTILE = '"><img src=x onerror=alert(1)>&amp;$\\frac{1}{$'


def test_hostile_names_are_words(tmp_path):
    config = Config(
        name=HOSTILE, rounds=1, clients=3, seed=0,
        arms=(Arm(HOSTILE, Plug("</code></pre><script>alert(2)</script>", {"<b>": "<i>"})),),
        data=Plug("<script>"),
    )  # fmt: skip
    run = RunFolder(tmp_path / "<u>$", config)
    run.path.mkdir()
    run.trial(HOSTILE, 0).append(record(1), {})
    (run.path / "environment.json").write_text(json.dumps({"<s>": ["<q>", 1], "torch": "</table>"}))
    page = page_of(write_report([run], tmp_path / "out.html", {config.arms[0].rule.name: "<em>"}))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "i", "u", "s", "q", "em"}
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert page.words["h1"] == [HOSTILE]
    assert HOSTILE in page.words["th"]
    assert "".join(page.words["title"]) == f"SAFARI: {HOSTILE}"
    assert to_toml(config) in page.words["code"]


def test_passwords_stay_at_home(synthetic, tmp_path):
    config = Config(rounds=4, clients=3, track=Track(mlflow="https://me:secret@host:5000"))
    text = write_report([synthetic({}, config)], tmp_path / "r.html").read_text()
    assert "secret" not in text
    assert "https://host:5000" in text


def test_several_runs_are_overlaid(tiny, synthetic, tmp_path):
    other = synthetic({("drop", 0): [record(1), record(2)]}, {"name": "other"})
    page = page_of(write_report([tiny, other], tmp_path / "both.html"))
    assert page.words["h1"] == ["tiny and other"]
    assert {"tiny/drop", "other/drop", "other/safari"} <= set(page.words["th"])
    assert page.words["summary"] == [
        "Clients of tiny", "Clients of other", "Configuration of tiny", "Configuration of other",
    ]  # fmt: skip
    assert len([svg for svg in page.all("svg") if svg["aria-label"] == "Test loss"]) == 1


def test_without_matplotlib_there_is_the_table_and_a_line(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = page_of(write_report([tiny], tmp_path))
    assert page.all("svg") == []
    assert "figures need matplotlib: pip install 'safari-fl[plots]'" in page.words["p"]
    assert "safari" in page.words["th"]
    with pytest.raises(MissingExtraError):
        write_figures(tiny, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_a_run_that_has_not_begun(synthetic, tmp_path):
    page = page_of(write_report([synthetic({})], tmp_path / "r.html"))
    assert page.all("svg") == []
    assert page.words["td"].count("not begun") == 2


def test_an_arm_that_has_not_begun(synthetic, tmp_path):
    page = page_of(write_report([synthetic({("safari", 0): [record(1)]})], tmp_path / "r.html"))
    assert page.all("svg")
    assert {"not begun", "1 of 4 rounds"} <= set(page.words["td"])


def test_figures_as_files(tiny, tmp_path):
    names = ["top1", "top5", "loss", "bytes", "masks", "arrivals-drop", "arrivals-safari"]
    names += ["similarity-safari", "labels"]
    paths = write_figures(tiny, tmp_path / "figures")
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    assert sorted(tmp_path.glob("figures/*")) == sorted(paths)
    first = paths[0].read_bytes()
    assert first.startswith(b"\x89PNG")
    # 6.0 × 3.3 inches at 150 dots an inch, from the header of the file.
    assert (int.from_bytes(first[16:20]), int.from_bytes(first[20:24])) == (900, 495)


def test_figures_of_several_runs_do_not_overwrite_each_other(synthetic, tmp_path):
    trials = {("drop", 0): [record(1, top1=None)]}
    runs = [synthetic(trials, folder=name) for name in ("a b", "a$b")]
    (runs[0].path / "clients.json").write_text('{"label_counts": [[1, 2]]}')
    names = [path.name for path in write_figures(runs, tmp_path / "figures") if path.suffix == ".png"]
    assert names == ["masks.png", "a-b-arrivals-drop.png", "a-b-labels.png", "a-b-arrivals-drop-2.png"]


def test_a_folder_that_cannot_be_written_is_named(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file"):
        write_report([tiny], tmp_path / "file" / "report.html")
