"""A name becomes an object: built in, by file, by module, by an installed entry point; and its options."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import pytest

from safari.errors import ConfigError
from safari.links import LINKS
from safari.plugins import Option, check_options, first_line, fits, options_of, resolve, spell
from safari.pruning import PRUNERS

if TYPE_CHECKING:
    from decimal import Decimal

BUILTIN = {"drop": 1, "safari": 2}


def refusal(name: str, builtin: dict[str, Any] | None = None, kind: str = "rule") -> str:
    with pytest.raises(ConfigError) as error:
        resolve(kind, "arms", name, BUILTIN if builtin is None else builtin)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of one's own, importable, that leaves no modules behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


# --- by name


def test_a_built_in() -> None:
    assert resolve("rule", "arms", "drop", BUILTIN) == 1


def test_an_unknown_name() -> None:
    advice = "; your own goes in as file.py:name or package.module:name"
    assert refusal("sfari") == (
        f"arms must be one of drop, safari; got 'sfari' (did you mean 'safari'?){advice}"
    )
    assert refusal("xyz") == f"arms must be one of drop, safari; got 'xyz'{advice}"


# --- by file


def test_by_file(folder: Path) -> None:
    (folder / "mine.py").write_text("def rule(): return 'mine'\n")
    assert resolve("rule", "arms", "mine.py:rule", BUILTIN)() == "mine"
    assert resolve("rule", "arms", f"{folder / 'mine.py'}:rule", BUILTIN)() == "mine"
    (folder / "sub dir").mkdir()
    (folder / "sub dir" / "other-name.py").write_text("value = 5\n")
    assert resolve("rule", "arms", "sub dir/other-name.py:value", BUILTIN) == 5


def test_a_file_is_run_once_however_it_is_named(folder: Path) -> None:
    (folder / "mine.py").write_text("class Rule: ...\n")
    one = resolve("rule", "arms", "mine.py:Rule", BUILTIN)
    two = resolve("rule", "arms", f"{folder}/../{folder.name}/mine.py:Rule", BUILTIN)
    assert one is two


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    for part in ("a", "b"):
        (folder / part).mkdir()
        (folder / part / "mine.py").write_text(f"value = {part!r}\n")
    assert resolve("rule", "arms", "a/mine.py:value", {}) == "a"
    assert resolve("rule", "arms", "b/mine.py:value", {}) == "b"


def test_dataclasses_and_hints_work_in_a_file(folder: Path) -> None:
    """Both look their module up by name."""
    (folder / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Thing:\n"
        "    x: int = 1\n"
        "def link(*, p: float = 0.5, thing: Thing = Thing()): ...\n"
    )
    link = resolve("link", "uplink", "mine.py:link", {})
    assert check_options("uplink", link, {"p": "much"}) == ["uplink.p must be a number, got 'much'"]


def test_what_can_go_wrong_with_a_file(folder: Path) -> None:
    (folder / "mine.py").write_text("def blend(): ...\n")
    (folder / "broken.py").write_text("def (\n")
    (folder / "raises.py").write_text("1 / 0\n")
    (folder / "needs.py").write_text("import no_such_package\n")
    (folder / "folder.py").mkdir()
    assert (
        refusal("absent.py:x") == "arms: no such file: absent.py (paths are relative to the current folder)"
    )
    assert (
        refusal("folder.py:x") == "arms: no such file: folder.py (paths are relative to the current folder)"
    )
    assert refusal("mine.py:blnd") == "arms: mine.py has no 'blnd' (did you mean 'blend'?)"
    assert refusal("mine.py:") == "arms: mine.py has no ''"
    assert refusal("broken.py:x").startswith("arms: cannot import broken.py: SyntaxError: ")
    assert refusal("raises.py:x") == "arms: cannot import raises.py: ZeroDivisionError: division by zero"
    (folder / "exits.py").write_text("raise SystemExit(7)\n")
    assert refusal("exits.py:x") == "arms: cannot import exits.py: SystemExit: 7"
    assert refusal("needs.py:x") == (
        "arms: cannot import needs.py: ModuleNotFoundError: No module named 'no_such_package'"
    )


def test_a_file_that_failed_may_be_mended_and_tried_again(folder: Path) -> None:
    (folder / "mine.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in refusal("mine.py:value")
    (folder / "mine.py").write_text("value = 'mended by now'\n")
    assert resolve("rule", "arms", "mine.py:value", {}) == "mended by now"


# --- by module


def test_by_module(folder: Path) -> None:
    (folder / "user_package").mkdir()
    (folder / "user_package" / "rules.py").write_text("def blend(): return 7\n")
    assert resolve("rule", "arms", "user_package.rules:blend", BUILTIN)() == 7
    assert resolve("rule", "arms", "math:pi", BUILTIN) == pytest.approx(3.14159, rel=1e-5)


def test_what_can_go_wrong_with_a_module(folder: Path) -> None:
    (folder / "user_broken.py").write_text("raise RuntimeError('not today')\n")
    assert refusal("no_such_package.x:y") == (
        "arms: cannot import no_such_package.x: ModuleNotFoundError: No module named 'no_such_package'"
    )
    assert refusal("user_broken:y") == "arms: cannot import user_broken: RuntimeError: not today"
    assert refusal("math:pie") == "arms: math has no 'pie' (did you mean 'pi'?)"
    assert refusal(":y").startswith("arms: cannot import : ValueError: ")
    assert refusal(".math:y").startswith("arms: cannot import .math: TypeError: ")


# --- by entry point


@pytest.fixture
def installed(folder: Path) -> Path:
    """What an installer leaves behind: a module and a dist-info folder that names its entry points."""
    (folder / "user_plugin.py").write_text("def blend(): return 'installed'\nraises = None\n")
    (folder / "user_bad_plugin.py").write_text("import no_such_package\n")
    info = folder / "user_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: user-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[safari.rule]\n"
        "blend = user_plugin:blend\n"
        "drop = user_plugin:blend\n"
        "bad = user_bad_plugin:x\n"
        "gone = user_plugin:gone\n"
        "[safari.link]\n"
        "tunnel = user_plugin:blend\n"
    )
    return folder


def test_by_entry_point(installed: Path) -> None:
    assert resolve("rule", "arms", "blend", BUILTIN)() == "installed"
    assert resolve("link", "uplink", "tunnel", LINKS)() == "installed"


def test_a_built_in_cannot_be_replaced_from_outside(installed: Path) -> None:
    assert resolve("rule", "arms", "drop", BUILTIN) == 1


def test_entry_points_are_offered_and_kept_apart_by_kind(installed: Path) -> None:
    offered = "arms must be one of bad, blend, drop, gone, safari; got 'blnd' (did you mean 'blend'?)"
    assert refusal("blnd").startswith(offered)  # and so no tunnel, which is a link


def test_an_entry_point_that_cannot_be_loaded(installed: Path) -> None:
    assert refusal("bad") == (
        "arms: cannot import entry point 'bad' (user_bad_plugin:x): "
        "ModuleNotFoundError: No module named 'no_such_package'"
    )
    assert refusal("gone").startswith(
        "arms: cannot import entry point 'gone' (user_plugin:gone): AttributeError"
    )


# --- options


def plain(a: int, b: str = "x", *args: Any, p: float = 0.3, steps: int, **rest: Any) -> None: ...
def loose(*, x=1): ...  # type: ignore[no-untyped-def]
def checkers_only(*, price: Decimal = 1, n: int = 2) -> None: ...  # type: ignore[assignment]


class Net:
    """A network of the user's."""

    def __init__(self, shape: tuple[int, ...], classes: int, *, width: int = 4) -> None: ...


class Maker:
    def __call__(self, *, size: int = 3) -> None: ...


def names(factory: Callable[..., Any]) -> list[str]:
    return [option.name for option in options_of(factory)]


def test_options_are_the_keyword_only_parameters() -> None:
    assert options_of(plain) == [Option("p", float, 0.3), Option("steps", int, inspect.Parameter.empty)]
    assert options_of(loose) == [Option("x", Any, 1)]
    assert options_of(lambda: None) == []
    assert options_of(Net) == [Option("width", int, 4)]
    assert names(checkers_only) == ["price", "n"]
    assert names(Maker()) == ["size"]
    assert names(functools.partial(plain, 1, steps=2)) == ["p", "steps"]


@pytest.mark.parametrize(
    ("factory", "options", "expected"),
    [
        (plain, {"steps": 1}, []),
        (plain, {"steps": 1, "p": 1}, []),
        (plain, {}, ["uplink.steps is required"]),
        (plain, {"p": 0.1, "step": 1}, [
            "uplink.step is not an option (allowed: p, steps) (did you mean 'steps'?)",
            "uplink.steps is required",
        ]),
        (plain, {"steps": 1.5, "p": "high"}, [
            "uplink.steps must be a whole number, got 1.5",
            "uplink.p must be a number, got 'high'",
        ]),
        (plain, {"steps": 1, "a": 1}, [
            "uplink.a must be an argument by name alone: write `def plain(*args, a, b='x', p=0.3, steps, **rest)`"
        ]),
        (lambda: None, {"p": 1}, ["uplink.p is not an option (allowed: none)"]),
        (loose, {"x": object}, []),
        (Net, {"width": "wide"}, ["uplink.width must be a whole number, got 'wide'"]),
        (checkers_only, {"price": "1", "n": 3}, []),
        (LINKS["bernoulli"], {"p": [1, "x"]}, [
            "uplink.p must be a number or a list (each a number), got [1, 'x']"
        ]),
        (LINKS["trace"], {"file": "x.csv", "after": "stop"}, [
            "uplink.after must be one of repeat, lost, error, got 'stop'"
        ]),
        (LINKS["staircase"], {"p": 0.3, "levels": [1, 0.5], "every": True}, [
            "uplink.every must be a whole number, got True"
        ]),
    ],
)  # fmt: skip
def test_options_are_checked(factory: Any, options: dict[str, Any], expected: list[str]) -> None:
    assert check_options("uplink", factory, options) == expected


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [0, -3, 2**80], [1.0, True, "1", None, [1]]),
        (float, [0, 1.5, -2, float("inf")], [True, "1", None, 10**400, -(10**400)]),
        (str, ["", "x"], [1, True, ["x"]]),
        (bool, [True, False], [0, 1, "true"]),
        (list[int], [[], [1, 2]], [[1.5], 1, "12", [True]]),
        (list, [[], [1, "x"]], [1, "x"]),
        (Sequence[float], [[1, 0.5], ()], [0.5, ["x"], "ab"]),
        (Sequence[Sequence[int]], [[[1], []]], [[1]]),
        (tuple[float, ...], [[1, 0.5]], [["x"]]),
        (float | Sequence[float], [1, [1]], ["x", ["x"]]),
        (Union[int, str], [1, "x"], [1.5]),  # noqa: UP007
        (Optional[int], [None, 1], ["x"]),  # noqa: UP045
        (Literal["a", "b"], ["a", "b"], ["c", 1]),
        (dict, [{}, {"a": 1}], [1, []]),
        (Any, [None, 1, "x"], []),
    ],
)
def test_what_fits_a_hint(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (float, "a number"),
        (str, "a text"),
        (bool, "true or false"),
        (list, "a list"),
        (list[int], "a list (each a whole number)"),
        (Sequence[float], "a list (each a number)"),
        (float | Sequence[float], "a number or a list (each a number)"),
        (Literal["a", "b"], "one of a, b"),
        (Any, "anything"),
        (Path, "Path"),
    ],
)
def test_a_hint_in_words(hint: Any, words: str) -> None:
    assert spell(hint) == words


def test_every_built_in_link_has_options_that_can_be_checked() -> None:
    for name, factory in LINKS.items():
        defaults = {option.name: option.default for option in options_of(factory)}
        assert check_options("uplink", factory, defaults) == [], name


def test_the_first_line_of_a_docstring() -> None:
    assert first_line(LINKS["lost"]) == "Nothing ever arrives."
    assert first_line(PRUNERS["mag"]) == "Magnitude: |w|."
    assert first_line(plain) == ""


def test_options_full_of_nonsense_are_refused_in_few_words() -> None:
    def link(*, p: float = 0.3) -> None: ...

    found = check_options("uplink", link, {f"q{k}": k for k in range(200_000)})
    assert found[0] == "uplink.q0 is not an option (allowed: p)"
    assert found[20:] == ["uplink has 199,980 more names that do not exist"]
    assert len(check_options("uplink", link, {"q" * 10**6: 1})[0]) < 200
