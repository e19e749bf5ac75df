"""Paths that options name: what the system cannot look at is told with the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from safari.bounds import path_of
from safari.config import parse
from safari.engine import check
from safari.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("uplink: file", {"uplink": {"name": "trace", "file": "PATH.csv"}}),
        ("uplink: file", {"uplink": {"name": "trace", "file": "PATH.parquet"}}),
        ("packets: file", {"packets": {"name": "recorded", "file": "PATH"}}),
        ("data: root", {"data": {"name": "leaf", "root": "PATH"}}),
        ("data: root", {"data": {"name": "cifar10", "root": "PATH"}}),
        ("data: source", {"data": {"name": "hf", "source": "PATH"}}),
        ("data: source", {"data": {"name": "hf", "source": "PATH.csv"}}),
        ("model: weights", {"model": {"name": "lora", "base": "mlp", "weights": "PATH"}}),
    ],
    ids=["csv", "parquet", "recorded", "leaf", "cifar10", "hub", "file of hf", "weights"],
)
@pytest.mark.parametrize(
    ("path", "why"),
    [("x" * 5000, "File name too long"), ("a\0b", "embedded null byte"), ("~nobody-of-this-name/x", "home")],
    ids=["long", "null", "home"],
)
def test_paths_that_cannot_be_looked_at_are_told_with_their_option(
    field: str, table: dict[str, dict[str, str]], path: str, why: str
) -> None:
    given: dict[str, Any] = {
        key: {k: v.replace("PATH", path) for k, v in options.items()} for key, options in table.items()
    }
    found = check(parse({"uplink": {"name": "perfect"}, "clients": 4, **given}))
    (line,) = [line for line in found if "path" in line]
    assert line.startswith(f"{field} must be a path that can be looked at, got '")
    assert why in line
    assert len(line) < 250


def test_what_is_there_and_what_is_not_are_both_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for there in (tmp_path, tmp_path / "file", tmp_path / "none", tmp_path / "file" / "below"):
        assert path_of("root", str(there)) == there
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(
        ConfigError, match=r"root must be a path that can be looked at, got .*loop': Too many"
    ):
        path_of("root", str(tmp_path / "loop"))
