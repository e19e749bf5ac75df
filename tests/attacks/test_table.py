"""Every test that the table in README.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_the_tests_in_the_table_exist():
    page = (TESTS / "attacks/README.md").read_text(encoding="utf-8")
    named = 0
    for row in re.findall(r"^\|.*`.*$", page, re.MULTILINE):
        source = ""
        for name in re.findall(r"`([\w/.]+)`", row.split("|")[2]):
            if name.endswith(".py"):
                source = (TESTS / name).read_text(encoding="utf-8")
            elif source and "." not in name and "/" not in name:
                assert f"def test_{name}(" in source, f"{row}\n{name}"
                named += 1
    assert named > 40
