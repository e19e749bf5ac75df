"""The documentation holds: code runs, commands exist, links lead somewhere, and made pages are not stale.

A page's blocks run in order, in a folder of their own, in one namespace. The words after a block's language:

python              is run, as a script; with `>>>` it is a doctest
python file=x.py    is written to x.py (any language)
toml                is a valid config, or a part of one; toml wrong: is not
console             every `$ safari ...` is run and must end well; `$ make ...` must be a target
console exact       what is printed must be what is shown
console fails       the same, for commands that end with an error
console check       commands are not run, but checked as `safari validate` would: up to the first round
console parse       commands that take too long are only parsed, with all their settings
"""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shlex
import signal
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import click
import pytest

from safari.cli import cli, main
from safari.cli.options import read_config
from safari.config import Config, parse
from safari.engine.experiment import check
from safari.plugins import options_of
from safari.sweep.plan import digest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
# Pages whose code needs an optional library, and the extra that brings it.
NEEDS = {"flower.md": ("flwr", "flower"), "net.md": ("flwr", "flower"), "data.md": ("flwr_datasets", "hf")}
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, the words after it, its text."""

    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        return next((word.removeprefix("file=") for word in self.words if word.startswith("file=")), None)

    @property
    def needs(self) -> list[str]:
        """The libraries of extras without which the block cannot run."""
        return [word.removeprefix("needs=") for word in self.words if word.startswith("needs=")]

    @property
    def commands(self) -> list[tuple[list[str], str]]:
        """Each command of a console block, and what it prints."""
        pieces = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not pieces[0].strip(), f"line {self.line}: a console block begins with a command"
        return [
            (shlex.split(command), output) for command, _, output in (p.partition("\n") for p in pieces[1:])
        ]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, *words = match[1].split() or [""]
        found.append(Block(text.count("\n", 0, match.start()) + 1, language, tuple(words), match[2]))
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def page_module(tmp_path, monkeypatch):
    """What a page's code runs in: a script of its own, in a folder of its own."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before, loaded = signal.getsignal(signal.SIGTERM), set(sys.modules)
    yield module
    signal.signal(signal.SIGTERM, before)
    for name in set(sys.modules) - loaded:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


WITH_CODE = [page for page in PAGES if {"python", "console", "toml"} & {b.language for b in blocks_of(page)}]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_block_of_a_page_does_what_it_says(page, page_module, tmp_path, monkeypatch, capsys):
    if page.name in NEEDS:
        library, extra = NEEDS[page.name]
        pytest.importorskip(library, reason=f"needs the extra {extra}: pip install 'safari-fl[{extra}]'")
    for block in blocks_of(page):
        place = f"{name_of(page)}, line {block.line}"
        if block.language == "toml" and "wrong" not in block.words:
            parse(tomllib.loads(block.text))
        if block.file is not None:
            assert Path(block.file).parent == Path(), place
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and all(importlib.util.find_spec(library) for library in block.needs):
            run_python(block, place, page_module)
        elif block.language == "console":
            for command, output in block.commands:
                check_command(command, output, block, place, monkeypatch, capsys)


def run_python(block: Block, place: str, module: ModuleType) -> None:
    if not block.text.startswith(">>> "):
        # Line numbers as in the page, so that a traceback can be followed.
        exec(compile("\n" * block.line + block.text, place, "exec"), vars(module))
        return
    example = doctest.DocTestParser().get_doctest(block.text, vars(module), place, place, block.line)
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        example, out=told.append, clear_globs=False
    )
    assert not told, "".join(told)
    vars(module).update(example.globs)


def check_command(command, output, block, place, monkeypatch, capsys):
    program, *arguments = command
    if program == "make":
        assert set(arguments) <= set(make_targets()), place
    if program != "safari":
        return
    if {"parse", "check"} & set(block.words):
        config = parse_command(arguments, place)
        problems = check(config) if "check" in block.words else []
        assert not problems, f"{place}: {problems}"
        return
    monkeypatch.setattr(sys, "argv", ["safari", *arguments])
    capsys.readouterr()
    with monkeypatch.context() as without:
        # Figures are most of the time of a short run, and other tests draw them: as if `plots` were not installed.
        without.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SystemExit) as end:
            main()
    printed = "".join(capsys.readouterr())
    wanted = 2 if "fails" in block.words else 0
    assert (end.value.code or 0) == wanted, f"{place}: {shlex.join(command)}\n{printed}"
    if {"exact", "fails"} & set(block.words):
        assert trimmed(printed) == trimmed(output), f"{place}: {shlex.join(command)}"


def parse_command(arguments: list[str], place: str) -> Config:
    """The config that a command would have run."""
    name, *rest = arguments
    # Under the group, as a person calls it: a command remembers how it was first asked for help.
    group = click.Context(cli, info_name="safari", **cli.context_settings)
    command = cli.get_command(group, name)
    assert command is not None, f"{place}: {name}"
    given = command.make_context(name, list(rest), parent=group).params
    return read_config(
        given.get("config"), given.get("settings", ()), given.get("seeds"), given.get("presets", ())
    )


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def make_targets() -> list[str]:
    return re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        label, target = match[1] or "", match[2] or match[3]
        if target.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}"
        code = re.fullmatch(r"`(\w+)`", label)
        if code and file.suffix == ".py":
            there = re.search(
                rf"\b(?:def|class) {code[1]}\b|^{code[1]}\b.* = ", file.read_text(), re.MULTILINE
            )
            assert there, f"{name_of(page)}: {target} has no {code[1]}"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    seen: list[str] = []
    for heading in headings:
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        seen.append(f"{slug}-{seen.count(slug)}" if slug in seen else slug)
    return set(seen)


def test_the_first_commands_are_the_two():
    first = next(block for block in blocks_of(ROOT / "README.md") if block.language == "console")
    assert [" ".join(command) for command, _ in first.commands] == ["make demo", "make test"]


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, f"docs/README.md leaves out {page.name}"


@pytest.fixture(scope="module")
def make_docs():
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools/make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_what_the_code_says(make_docs):
    stale = "docs/configuration.md is stale: make docs"
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == make_docs.configuration_page(), stale


def test_a_shell_is_offered_the_names_that_there_are(make_docs):
    assert make_docs.NAMES.read_text(encoding="utf-8") == make_docs.names_file(), (
        "names.json is stale: make docs"
    )


def test_the_configuration_page_leaves_nothing_out(make_docs):
    page = make_docs.configuration_page()
    for name, value in Config().to_dict().items():
        assert f"## `[{name}]`" in page if isinstance(value, dict) else f"| `{name}` |" in page
    for kind, builtin in make_docs.KINDS.items():
        part = page.partition(f"### Plug-in: {kind}\n")[2].partition("\n### ")[0]
        for name, thing in builtin.items():
            about = part.partition(f"**`{name}`**: ")[2].partition("**`")[0]
            assert about, f"{kind} {name}"
            assert ">>>" not in about
            options = [] if kind == "pruner" else options_of(thing)
            assert re.findall(r"^\| `(\w+)` \|", about, re.MULTILINE) == [o.name for o in options]


def test_the_pages_say_what_the_records_say(make_docs):
    for page, results in make_docs.demo_results().items():
        _, shown, _ = make_docs.split_at_table(page)
        assert shown == results, f"the table in {name_of(page)} is not that of results/demo"


def test_the_records_are_those_of_the_demo(make_docs):
    config = parse(tomllib.loads((make_docs.DEMO / "config.toml").read_text(encoding="utf-8")))
    summary = json.loads((make_docs.DEMO / "summary.json").read_text(encoding="utf-8"))
    # What has its default under another name, such as feedback where there is none to give, is the same.
    assert digest(config) == digest(read_config(None, (), presets=["demo"]))
    assert config.arms == read_config(None, (), presets=["demo"]).arms
    assert all(arm["top1"]["n"] == config.seeds >= 5 for arm in summary["arms"].values())


def test_every_field_of_a_records_line_is_explained(tmp_path):
    import safari
    from safari.runs import RunFolder

    summary = safari.run({"rounds": 1, "arms": ["drop"], "clients": 4, "model": {"name": "mlp"},
                          "uplink": {"name": "perfect"}}, tmp_path / "run")  # fmt: skip
    page = (DOCS / "runs.md").read_text(encoding="utf-8")
    (trial,) = RunFolder.open(tmp_path / "run").trials()
    (record,) = trial.records()
    seed = summary["arms"]["drop"]["seeds"]["0"]
    timing = json.loads(trial.timings.read_text())
    for name in {*record, *summary, *summary["arms"]["drop"], *seed, *timing}:
        assert re.search(rf"^\| [^|]*`{name}`[^|]* \|", page, re.MULTILINE), f"docs/runs.md leaves out {name}"
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.name != ".lock":
            assert f"`{file.name}`" in page or f"{file.name}" in page, f"docs/runs.md leaves out {file.name}"


def test_the_citation_names_the_software_and_the_paper():
    import yaml

    from safari.version import __version__

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(cited)
    assert (cited["cff-version"], cited["version"], cited["license"]) == ("1.2.0", __version__, "Apache-2.0")
    paper = cited["preferred-citation"]
    assert paper["type"] == "article"
    assert paper["title"].startswith("SAFARI: Sparsity")
    assert paper["year"] == 2022
    assert len(paper["authors"]) == 8
    assert {"type": "other", "value": "arXiv:2204.02321"} in paper["identifiers"]
    for author in (*cited["authors"], *paper["authors"]):
        assert "name" in author or {"family-names", "given-names"} <= set(author)


def test_the_changelog_knows_this_version():
    from safari.version import __version__

    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
