"""The page of what was found: its tables come from the records, and are what the records say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from claims import TINY, Listener, write
from safari.sweep import Results, execute, units_of
from safari.version import code_version
from safari_evidence.experiments import find, read
from safari_evidence.folder import shipped

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "evidence/make_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tables"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experiments, of which one was run."""
    folder = tmp_path_factory.mktemp("fill")
    text = 'compare = "safari"\ngoal = "mag/drop"\n' + TINY
    write(folder / "experiments", tiny=text, later=TINY)
    (experiment,) = read(find(folder / "experiments", ["tiny"]))
    out, results = folder / "out", Results({}, [])
    execute([u for c in experiment.cases for u in units_of(c, out, results, 1.0)], out, Listener())
    results.gather(experiment, out)
    results.save(out)
    return folder


def block(text: str) -> str:
    return f"before\n\n<!-- evidence: {text} -->\nold\n<!-- end of evidence -->\n\nafter\n"


def test_blocks_are_written_and_the_rest_stays(tool: ModuleType, folder: Path) -> None:
    records = tool.Records.open([folder / "out"], folder / "experiments")
    page = tool.filled(block("table tiny top1 lost_updates"), records, folder)
    assert page.startswith(
        "before\n\n<!-- evidence: table tiny top1 lost_updates -->\n| case | arm | top-1 % |"
    )
    assert page.endswith("\n<!-- end of evidence -->\n\nafter\n")
    assert "old" not in page
    assert re.search(r"`safari reproduce tiny`; \d+ cores, torch \S+; code ", page)
    assert f"; code {code_version()}; records in `out`." in page
    assert tool.filled(page, records, folder) == page, "a second time changes nothing"


@pytest.mark.parametrize("kind", ["verdicts tiny", "matrix tiny top1", "rivals tiny", "race tiny"])
def test_every_kind_has_a_table(tool: ModuleType, folder: Path, kind: str) -> None:
    records = tool.Records.open([folder / "out"], folder / "experiments")
    page = tool.filled(block(kind), records, folder)
    assert "\n|---|" in page
    assert "records in `out`." in page


def test_what_was_not_run_says_so(tool: ModuleType, folder: Path) -> None:
    records = tool.Records.open([folder / "out"], folder / "experiments")
    assert "*Not run yet: `safari reproduce later`.*" in tool.filled(block("table later"), records, folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "tabel tiny",
            "a block must be one of verdicts, table, matrix, rivals, race with a name, got 'tabel tiny'",
        ),
        ("table", "a block must be one of verdicts, table, matrix, rivals, race with a name, got 'table'"),
        ("table tinny", "tinny is not an experiment (of later, tiny)"),
        ("table tiny top2", "top2 is not a column (of top1, top5, loss,"),
    ],
)
def test_a_wrong_block_is_named(tool: ModuleType, folder: Path, text: str, problem: str) -> None:
    records = tool.Records.open([folder / "out"], folder / "experiments")
    with pytest.raises(tool.PageError) as error:
        tool.filled(block(text), records, folder)
    assert str(error.value).startswith(problem)


def test_the_page_is_what_the_records_say(tool: ModuleType) -> None:
    """docs/evidence.md: `python tools/make_evidence.py` writes it again."""
    text = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    assert tool.BLOCK.search(text)
    assert tool.filled(text, tool.Records.open(tool.folders(), shipped()), ROOT) == text
