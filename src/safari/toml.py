"""TOML in and out: the standard library reads it; writing our few kinds of values takes a page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from safari.config import Config
from safari.errors import ConfigError

# On the command line these may be names with commas between them.
_LISTS = ("arms", "aggregation.steps")
# A config is a few kilobytes; one with a probability for each of 100,000 clients has 2 MB.
LARGEST = 64 * 2**20
# Tables and lists in one another: what is deeper could not be walked, and a key of many parts is slow to read.
DEEPEST = 100
# Python writes no whole number of more than 4,300 digits, so no message could name it.
_MOST_BITS = 14_000
_DEEP = f"it is nested too deeply (at most {DEEPEST} tables and lists in one another)"
# Strings and comments. A multi-line string may end in one or two quotes of its own; one without an end reaches to the
# file's. Possessive quantifiers keep the time linear.
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:[^"\\]++|\\.?|"(?!""))*+(?:"{3,5}|\Z)|"(?:[^"\\\n]++|\\.?)*+"?|'''
    r"""'''(?:[^']++|'(?!''))*+(?:'{3,5}|\Z)|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
# Without those, what may be a key or a table's name.
_KEY = re.compile(r"[^=,{}\[\]\n]+")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain tables; ConfigError when it is missing or malformed."""
    try:
        with path.open("rb") as handle:
            # In pieces: a pipe does not say how long it is, and a buffer for the most would be large.
            pieces = list(islice(iter(lambda: handle.read(2**16), b""), LARGEST // 2**16 + 1))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a name with a null character in it
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    data = b"".join(pieces)
    if len(data) > LARGEST:
        raise ConfigError(f"{path} is larger than the {LARGEST:,} bytes that a config may have")
    return parse_toml(data, path)


def parse_toml(data: bytes, name: Path) -> dict[str, Any]:
    """The contents of a TOML file as plain tables; ConfigError, with its name, when it is malformed."""
    try:
        # Line ends as a file opened for text has them.
        return _loads(data.decode().replace("\r\n", "\n"))
    # ValueError: not TOML, not UTF-8, or a number of thousands of digits.
    except ValueError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not valid TOML: {_DEEP}") from error


def _loads(text: str) -> dict[str, Any]:
    """Parse as `tomllib.loads`; RecursionError for nesting too deep for it or for a walk of the result."""
    if any(key[0].count(".") > DEEPEST for key in _KEY.finditer(_STRING_OR_COMMENT.sub("", text))):
        raise RecursionError(_DEEP)
    table = tomllib.loads(text)
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        inner = [held for value in level for held in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(held, int) and held.bit_length() > _MOST_BITS for held in inner):
            raise ValueError(f"a whole number has more than {_MOST_BITS:,} bits")
        level = [held for held in inner if isinstance(held, dict | list)]
        if not level:
            return table
    raise RecursionError(_DEEP)


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` from the command line; the value as TOML reads it, or else a text.

    >>> parse_setting("pruning.sparsity=0.9"), parse_setting("pruning.pruner=snip")
    (('pruning.sparsity', 0.9), ('pruning.pruner', 'snip'))
    >>> parse_setting("arms=drop,safari")
    ('arms', ['drop', 'safari'])
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise ConfigError(f"--set takes key=value, such as pruning.sparsity=0.9; got {text!r}")
    try:
        return key, _loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return key, value.split(",") if key in _LISTS else value


def to_toml(config: Config, *, comments: bool = False, values: Mapping[str, Any] | None = None) -> str:
    """The complete config; with `comments`, each field's documentation above it.

    `values`: its tables, where only some of them are to be written.
    """
    scalars: list[str] = []
    tables: list[str] = []
    values = config.to_dict() if values is None else values
    for f in dataclasses.fields(Config):
        if f.name not in values:
            continue
        value, doc = values[f.name], f.metadata.get("doc", "")
        if not isinstance(value, Mapping):
            scalars += _line(f.name, value, doc, comments)
            continue
        docs = _docs(getattr(config, f.name))
        body = [line for k, v in value.items() for line in _line(k, v, docs.get(k, ""), comments)]
        head = doc or _first_line(type(getattr(config, f.name)))
        tables += ["", *([f"# {head}"] if comments else []), f"[{f.name}]", *body]
    return "\n".join([*scalars, *tables]) + "\n"


def table_to_toml(values: Mapping[str, Any]) -> str:
    """A table's lines, `key = value` each; tables inside it are written inline.

    >>> print(table_to_toml({"folder": 'a "b"', "rate": 0.5, "odd name": [1, 2]}))
    folder = "a \\"b\\""
    rate = 0.5
    "odd name" = [1, 2]
    """
    return "\n".join(f"{_key(key)} = {_value(value)}" for key, value in values.items())


def _docs(section: object) -> dict[str, str]:
    if not dataclasses.is_dataclass(section):
        return {}
    return {f.name: f.metadata.get("doc", "") for f in dataclasses.fields(section)}


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").split("\n", 1)[0]


def _line(key: str, value: Any, doc: str, comments: bool) -> list[str]:
    return [*([f"# {doc}"] if comments and doc else []), f"{_key(key)} = {_value(value)}"]


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, int):
        return str(value)
    raise ConfigError(f"a config can hold texts, numbers, booleans, lists and tables; got {value!r}")
