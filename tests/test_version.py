"""The digest of the code: it follows from what can change a number, and from nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from safari import version


def package(folder: Path, **files: str) -> Path:
    for name, text in {"engine/loop": "x = 1\n", "view/page": "y = 1\n", **files}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")
    return folder


def test_the_digest_follows_from_names_and_texts(tmp_path: Path) -> None:
    first = version.digest_of(package(tmp_path / "a"))
    assert len(first) == 12
    assert version.digest_of(package(tmp_path / "b")) == first
    assert version.digest_of(package(tmp_path / "c", **{"engine/loop": "x = 2\n"})) != first
    assert version.digest_of(package(tmp_path / "d", **{"engine/more": ""})) != first
    moved = package(tmp_path / "e")
    (moved / "engine/loop.py").rename(moved / "engine/poll.py")
    assert version.digest_of(moved) != first


def test_what_only_shows_numbers_and_line_ends_do_not_count(tmp_path: Path) -> None:
    first = version.digest_of(package(tmp_path / "a"))
    assert (
        version.digest_of(package(tmp_path / "b", **{"view/page": "y = 2\n", "cli/run": "z = 1\n"})) == first
    )
    assert version.digest_of(package(tmp_path / "c", **{"engine/loop": "x = 1\r\n"})) == first
    (tmp_path / "a/engine/data.npz").write_bytes(b"data")
    assert version.digest_of(tmp_path / "a") == first


def test_names_and_texts_cannot_run_into_each_other(tmp_path: Path) -> None:
    one = package(tmp_path / "a", **{"engine/ab": "c"})
    other = package(tmp_path / "b", **{"engine/a": "b.pyc"})
    assert version.digest_of(one) != version.digest_of(other)


def test_nothing_that_counts_imports_what_does_not() -> None:
    """Otherwise a number could follow from a file that the digest leaves out."""
    here = Path(version.__file__).parent
    assert version.code_version() == version.digest_of(here)
    for path in here.rglob("*.py"):
        parts = path.relative_to(here).parts
        # The package's `__init__` and the command only offer what others do.
        if parts[0] in (*version._WITHOUT_NUMBERS, "__init__.py", "__main__.py"):
            continue
        named = re.findall(r"^\s*(?:from|import) safari\.(\w+)", path.read_text("utf-8"), re.MULTILINE)
        assert [part for part in named if part in version._WITHOUT_NUMBERS] == [], path
