"""The page of all tables is what the records say."""

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


def test_an_experiment_has_its_caveats_tables_and_where_they_come_from(
    tool: ModuleType, tmp_path: Path
) -> None:
    text = 'compare = "safari"\ngoal = "mag/drop"\nfinding = "Tiny, and no test."\n' + TINY
    write(tmp_path / "experiments", tiny=text, later=TINY.replace("rounds = 2", "rounds = 3"))
    (experiment,) = read(find(tmp_path / "experiments", ["tiny"]), quick=True)
    out, results = tmp_path / "out", Results({}, [])
    execute([u for c in experiment.cases for u in units_of(c, out, results, 1.0)], out, Listener())
    results.gather(experiment, out)
    results.save(out)
    found = list(tool.sections([out], tmp_path / "experiments"))
    assert [(s.experiment.name, s.quick) for s in found] == [("tiny", True)]
    page = tool.page(found, tmp_path)
    assert "## tiny, small version\n\nTiny.\n" in page
    assert "Tiny, and no test." not in page, "the finding of the whole"
    assert "| tiny | SAFARI ends near the perfect network |" in page
    assert "| mag | safari | " in page
    assert "| safari minus | mean over the cases |" in page
    assert "`safari reproduce tiny --quick`; " in page
    assert f"; code {code_version()}; records in `out`." in page


def test_the_page_is_what_the_records_say(tool: ModuleType) -> None:
    """results/tables.md: `python evidence/make_tables.py` writes it again."""
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(tool.sections(tool.folders(), shipped()))


def test_what_was_found_is_quoted_from_the_tables(tool: ModuleType) -> None:
    """Every number with its interval on docs/found.md stands in results/tables.md as well; the page stays short."""
    text = (ROOT / "docs/found.md").read_text(encoding="utf-8")
    tables = tool.PAGE.read_text(encoding="utf-8")
    quoted = re.findall(r"([−+]?)(\d+\.\d ± \d+\.\d)", text)
    assert len(quoted) > 30
    missing = [
        f"{sign}{number}" for sign, number in quoted if f"{sign.replace('−', '-')}{number}" not in tables
    ]
    assert missing == []
    assert len(text.split()) <= 1500
