"""TOML there and back, the commented template, settings from the command line, files that are no config."""

from __future__ import annotations

import dataclasses
import time
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safari.config import Arm, Config, Plug, examine, parse
from safari.errors import ConfigError
from safari.toml import parse_setting, read_toml, to_toml

SECTIONS = {
    name: hint
    for name, hint in typing.get_type_hints(Config).items()
    if dataclasses.is_dataclass(hint) and hint is not Plug
}


# --- settings from the command line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rounds=5", ("rounds", 5)),
        (" rounds = 5 ", ("rounds", 5)),
        ("pruning.sparsity=0.9", ("pruning.sparsity", 0.9)),
        ("local.lr=1e-3", ("local.lr", 1e-3)),
        ("track.tensorboard=true", ("track.tensorboard", True)),
        ("pruning.pruner=snip", ("pruning.pruner", "snip")),
        ('pruning.pruner="snip"', ("pruning.pruner", "snip")),
        ("pruning.pruner=my file.py:score", ("pruning.pruner", "my file.py:score")),
        ("data.root=/a=b", ("data.root", "/a=b")),
        ("uplink.p=[1, 0.3]", ("uplink.p", [1, 0.3])),
        ("uplink={name = 'lost'}", ("uplink", {"name": "lost"})),
        ("track.mlflow=", ("track.mlflow", "")),
        ("name='3'", ("name", "3")),
        ("arms=drop", ("arms", ["drop"])),
        ("arms=drop,safari", ("arms", ["drop", "safari"])),
        ('arms=["drop"]', ("arms", ["drop"])),
        ('arms=["drop", {rule = "f.py:r", x = 1}]', ("arms", ["drop", {"rule": "f.py:r", "x": 1}])),
    ],
)
def test_settings_from_the_command_line(text: str, expected: tuple[str, Any]) -> None:
    assert parse_setting(text) == expected
    assert type(parse_setting(text)[1]) is type(expected[1])


@pytest.mark.parametrize("text", ["rounds", "=5", "", " = 3"])
def test_a_setting_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_setting(text)
    assert str(error.value) == f"--set takes key=value, such as pruning.sparsity=0.9; got {text!r}"


# --- TOML there and back

TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        '"',
        "\\",
        "'''",
        '"""',
        "\n",
        "\r\n",
        "\t",
        "\x00",
        "\x7f",
        "\x1b",
        "\u2028",
        "\ud7ff",
        "😀",
        "# no comment",
    ]
)
NUMBERS = st.integers() | st.floats(allow_nan=False)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OPTIONS = st.dictionaries(TEXTS.filter(lambda k: k not in ("name", "rule")), VALUES, max_size=4)
NAMES = st.from_regex(r"[A-Za-z0-9_+\-][A-Za-z0-9._+\-]{0,10}", fullmatch=True)
PLUGS = st.builds(Plug, TEXTS.filter(bool), OPTIONS)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    arms = tuple(Arm(name, draw(st.builds(Plug, TEXTS, OPTIONS) | st.just(Plug(name)))) for name in names)
    clients = draw(st.integers(1, 10**6))
    return Config(
        name=draw(NAMES),
        seed=draw(st.integers(0, 10**18)),
        clients=clients,
        cohort=draw(st.integers(0, clients)),
        arms=arms,
        data=draw(PLUGS),
        model=draw(PLUGS),
        uplink=draw(PLUGS),
        pruning=dataclasses.replace(Config().pruning, pruner=draw(TEXTS), sparsity=draw(st.floats(0, 0.999))),
        local=dataclasses.replace(Config().local, lr=draw(st.floats(1e-30, 1e30))),
        track=dataclasses.replace(Config().track, tensorboard=draw(st.booleans()), mlflow=draw(TEXTS)),
    )


@settings(max_examples=150)
@given(config=configs(), comments=st.booleans())
def test_toml_there_and_back(config: Config, comments: bool) -> None:
    text = to_toml(config, comments=comments)
    again = parse(tomllib.loads(text))
    assert again == config
    assert again.digest == config.digest
    assert tomllib.loads(text.encode("utf-8").decode("utf-8")) == tomllib.loads(text)


def test_through_a_file(tmp_path: Path) -> None:
    config = parse({"track": {"mlflow": "line\r\nbreak\u2028 é"}, "data": {"name": "d", "root": "C:\\x"}})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert parse(read_toml(path)) == config


def test_the_commented_template_names_every_field() -> None:
    text = to_toml(Config(), comments=True)
    assert parse(tomllib.loads(text)) == Config()
    lines = text.splitlines()
    for prefix, cls in (("", Config), *SECTIONS.items()):
        for f in dataclasses.fields(cls):
            if f.metadata.get("doc"):
                assert f"# {f.metadata['doc']}" in lines, (prefix, f.name)
    assert lines[lines.index("[pruning]") - 1] == "# Which weights are trained and sent."


def test_what_toml_cannot_hold_is_refused() -> None:
    config = dataclasses.replace(Config(), data=Plug("x", {"when": object}))
    with pytest.raises(
        ConfigError, match=r"^a config can hold texts, numbers, booleans, lists and tables; got "
    ):
        to_toml(config)


# Of each, the first is the deepest that is taken. `tomllib` reads all of them, except the last.
DEEP = {
    "keys": lambda n: f"{'x.' * (n - 1)}y = 1\n",
    "headers": lambda n: f"[{'x.' * (n - 2)}y]\nz = 1\n",
    "both": lambda n: f"[{'x.' * (n - 52)}y]\n{'z.' * 50}z = 1\n",
    "inline": lambda n: f"x = {{{'y.' * (n - 2)}z = 1}}\n",
    "quoted": lambda n: f"""{"'x' . " * (n - 1)}"y" = 1\n""",
    "texts as parts": lambda n: f"""{'x.",".' * ((n - 1) // 2)}{"x." * ((n - 1) % 2)}y = 1\n""",
    "after a text": lambda n: f'x = {{z = \'\'\'a\'\'\'\', w = """b""""", {"y." * (n - 2)}z = 1}}\n',
    "lists": lambda n: f"x = {'[' * (n - 1)}{']' * (n - 1)}\n",
}


@pytest.mark.parametrize("form", DEEP)
def test_what_is_nested_too_deeply_is_refused(tmp_path: Path, form: str) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(DEEP[form](100))
    assert examine(read_toml(path))[1]
    for levels in (101, 3_000, 300_000):
        path.write_text(DEEP[form](levels))
        begin = time.monotonic()
        with pytest.raises(ConfigError) as error:
            read_toml(path)
        assert str(error.value) == (
            f"{path} is not valid TOML: it is nested too deeply (at most 100 tables and lists in one another)"
        )
        assert time.monotonic() - begin < 10


def test_a_setting_that_is_nested_too_deeply_is_a_text() -> None:
    text = f"{{{'x.' * 3_000}y = 1}}"
    assert parse_setting(f"pruning.options={text}") == ("pruning.options", text)


def test_many_numbers_are_not_deep(tmp_path: Path) -> None:
    path = tmp_path / "numbers.toml"
    path.write_text(f"p = {[0.5] * 1_000}\nname = '{'.' * 1_000}'\n")
    assert read_toml(path) == {"p": [0.5] * 1_000, "name": "." * 1_000}


DOTS = "." * 200


@pytest.mark.parametrize(
    "text",
    [
        f"# {DOTS} = a heading\nx = 1\n",
        f"x = '{DOTS}=]'\n",
        f'x = "\\"{DOTS}=]"\n',
        f"x = '''\n'a' {DOTS} = 1\n''''\n",
        f'x = """\n"a" \\""" {DOTS} = 1\n"""""\n',
        f"x = 1  # it's {DOTS} = 1\n",
    ],
)
def test_dots_in_texts_and_comments_are_not_deep(tmp_path: Path, text: str) -> None:
    path = tmp_path / "dots.toml"
    path.write_text(text)
    assert read_toml(path) == tomllib.loads(text)


@pytest.mark.parametrize("number", ["9" * 5_000, f"0x{'f' * 5_000}", f"-1{'0' * 5_000}"])
def test_numbers_that_python_cannot_write_are_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "long.toml"
    path.write_text(f'arms = [{{rule = "fedau", cutoff = {number}}}]\n')
    with pytest.raises(ConfigError, match=r"is not valid TOML: .{1,140}$"):
        read_toml(path)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            read_toml(path)
        return str(error.value)

    absent = tmp_path / "absent.toml"
    assert message(absent) == f"cannot read {absent}: No such file or directory"
    assert message(tmp_path) == f"cannot read {tmp_path}: Is a directory"
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = \n")
    assert message(broken).startswith(f"{broken} is not valid TOML: Invalid value (at line 1")
    broken.write_bytes(b"name = '\xff'\n")
    assert message(broken).startswith(f"{broken} is not valid TOML: 'utf-8' codec can't decode byte 0xff")
