"""The site is made from the pages and the docstrings, its links hold, and it asks no network for anything."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

import safari

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def make_site():
    pytest.importorskip("markdown_it")
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "tools/make_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def broken(folder):
    """Links of the pages that lead nowhere, and what a browser would fetch from elsewhere."""
    found = []
    texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    for page, text in texts.items():
        if "api" in page.relative_to(folder).parts:
            continue
        for attribute, target in re.findall(r'\b(href|src|srcset)="([^"]+)"', text):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                if attribute != "href":
                    found.append(f"{page.name} shows {target}")
                continue
            file = (page.parent / unquote(path)).resolve() if path else page
            if not file.exists():
                found.append(f"{page.name} links to {target}")
            elif anchor and file in texts and f'id="{anchor}"' not in texts[file]:
                found.append(f"{page.name} has no {target}")
    return found


def test_the_pages_link_to_each_other(make_site, tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "api/safari.html").touch()
    make_site.write_pages(tmp_path)
    assert (tmp_path / "docs/limits.html").exists()
    assert broken(tmp_path) == []


def test_only_a_site_is_replaced(make_site, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    assert make_site.main([str(tmp_path)]) == 2
    assert "is neither empty nor a site" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.slow
def test_the_reference_has_all_that_is_public(make_site, tmp_path):
    pytest.importorskip("pdoc")
    assert make_site.main([str(tmp_path / "site")]) == 0
    page = (tmp_path / "site/api/safari.html").read_text(encoding="utf-8")
    for name in set(safari.__all__) - {"__version__"}:
        assert f'id="{name}"' in page, name
    assert "A run to work with, finished or not" in page
    for other in (tmp_path / "site").rglob("*.html"):
        text = other.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="https?:', text), other
