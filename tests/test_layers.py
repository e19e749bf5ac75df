"""The house plan, held: imports point downwards, and wire and net know nothing of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "safari"

# Upper rooms use lower ones. Rooms on one line may use each other, but not in a circle.
LEVELS = (
    ("__main__", "cli"),
    ("api", "lab"),
    ("evidence",),
    ("engine", "flower", "view"),
    ("rounds",),
    ("aggregation", "sampling", "training", "links", "data", "runs", "report", "net"),
    ("pruning", "tasks", "models", "wire"),
    (
        "bounds",
        "config",
        "modes",
        "text",
        "toml",
        "hosting",
        "presets",
        "trust",
        "plugins",
        "loading",
        "seeds",
        "stats",
        "errors",
        "version",
    ),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
WITHOUT_TORCH = ("wire", "net")
# Rooms on one line that know nothing of each other: what both need lies below.
APART = (("engine", "flower"), ("view", "flower"))

Modules = Mapping[str, set[str]]


def room(module: str) -> str:
    """'safari.engine.world' -> 'engine'; the package itself -> ''."""
    return module.split(".")[1] if "." in module else ""


def imports(text: str, module: str, is_package: bool) -> set[str]:
    """Every module that a source imports, wherever in it: names resolved, `from x import y` as x and x.y."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found


def _base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def read(source: Path) -> dict[str, set[str]]:
    """What each module under a folder imports; names that are no module here keep their last known part."""
    files = {_module(path, source): path for path in sorted(source.rglob("*.py"))}
    return {
        module: imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        for module, path in files.items()
    }


def _module(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def inner(modules: Modules) -> dict[str, set[str]]:
    """Imports of modules of this package only: `safari.errors.SafariError` is no module and falls away."""
    return {m: {i for i in found if i in modules and i != m} for m, found in modules.items()}


def wrong_directions(modules: Modules) -> Iterator[str]:
    """A line for each import that points upwards, into cli, or at the package itself."""
    for module, found in inner(modules).items():
        here = room(module)
        if here and here not in LEVEL:
            yield f"{module}: no room is called {here!r}; give it a place in LEVELS"
            continue
        # The package itself is named by every `from safari.x import y`: only what it offers counts.
        for other in sorted(found):
            there = room(other)
            if there == "cli" and here not in LEVELS[0]:
                yield f"{module} imports {other}: nothing imports cli"
            elif here and there and there in LEVEL and LEVEL[there] < LEVEL[here]:
                yield f"{module} imports {other}: {here} is below {there}"
            elif any({here, there} == set(pair) for pair in APART):
                yield f"{module} imports {other}: {here} and {there} are apart"
        if here not in ("", *LEVELS[0]) and _from_the_top(modules, module):
            yield f"{module} imports from safari itself: name the room"


def _from_the_top(modules: Modules, module: str) -> bool:
    """`import safari` or `from safari import prune`, where prune is no module."""
    names = {i for i in modules[module] if i == "safari" or (i.startswith("safari.") and i.count(".") == 1)}
    return any(i != "safari" and i not in modules for i in names) or (
        "safari" in names and not any(i.startswith("safari.") for i in names)
    )


def circles(modules: Modules) -> Iterator[str]:
    """Rooms that need each other."""
    needs: dict[str, set[str]] = {}
    for module, found in inner(modules).items():
        rooms = {room(other) for other in found} - {"", room(module)}
        needs.setdefault(room(module), set()).update(rooms)
    for start in sorted(needs):
        reached = _closure(needs, needs[start])
        if start and start in reached:
            yield f"{start} needs itself through {', '.join(sorted(needs[start]))}"


def with_torch(modules: Modules, rooms: Iterable[str] = WITHOUT_TORCH) -> Iterator[str]:
    """Modules of these rooms that import torch themselves or through others of the package.

    safari/__init__.py is left out: it is run whenever any part is imported, and it offers everything.
    """
    needs = {m: found - {"safari"} for m, found in inner(modules).items()}
    for module in sorted(modules):
        if room(module) not in rooms:
            continue
        for reached in sorted(_closure(needs, {module})):
            if any(i.split(".")[0] == "torch" for i in modules[reached]):
                yield f"{module} needs torch through {reached}"


def _closure(needs: Mapping[str, set[str]], start: Iterable[str]) -> set[str]:
    reached, todo = set(), list(start)
    while todo:
        here = todo.pop()
        if here not in reached:
            reached.add(here)
            # Importing a.b.c runs a.b as well.
            parents = {p for p in (here.rpartition(".")[0],) if p in needs and "." in p}
            todo += [*needs.get(here, ()), *parents]
    return reached


# --- the house


@pytest.fixture(scope="module")
def house() -> dict[str, set[str]]:
    return read(SOURCE)


def test_the_walk_sees_the_house(house: Modules) -> None:
    assert "safari.pruning.masks" in house
    assert "safari.models" in inner(house)["safari.pruning.masks"]
    assert "torch" in house["safari.pruning.masks"]
    assert len(house) == len(list(SOURCE.rglob("*.py")))


def test_imports_point_one_way(house: Modules) -> None:
    assert list(wrong_directions(house)) == []


def test_no_rooms_need_each_other(house: Modules) -> None:
    assert list(circles(house)) == []


def test_wire_and_net_know_nothing_of_torch(house: Modules) -> None:
    assert list(with_torch(house)) == []


# --- the checker itself, on houses that are wrong


def build(folder: Path, **files: str) -> dict[str, set[str]]:
    source = folder / "safari"
    for name, text in {"__init__": "", **files}.items():
        path = source / (name if name.startswith("__") else name.replace("__", "/"))
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.parent != source:
            (path.parent / "__init__.py").touch()
    return read(source)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"errors": "import safari.models.layout", "models__layout": ""},
            "safari.errors imports safari.models.layout: errors is below models",
        ),
        (
            {"errors": "def late():\n    from safari.models import layout", "models__layout": ""},
            "safari.errors imports safari.models: errors is below models",
        ),
        (
            {"models__layout": "from ..engine import world", "engine__world": ""},
            "safari.models.layout imports safari.engine: models is below engine",
        ),
        (
            {"models__layout": "from safari import training", "training__local": ""},
            "safari.models.layout imports safari.training: models is below training",
        ),
        (
            {"data__sets": "import importlib\nimportlib.import_module('safari.view')", "view__page": ""},
            "safari.data.sets imports safari.view: data is below view",
        ),
        (
            {"engine__run": "from safari.cli.main import go", "cli__main": "def go(): ..."},
            "safari.engine.run imports safari.cli.main: nothing imports cli",
        ),
        (
            {"flower__run": "from safari.engine.world import World", "engine__world": "class World: ..."},
            "safari.flower.run imports safari.engine.world: flower and engine are apart",
        ),
        (
            {"engine__run": "def late():\n    from safari import flower", "flower__strategy": ""},
            "safari.engine.run imports safari.flower: engine and flower are apart",
        ),
        ({"attic__box": ""}, "safari.attic.box: no room is called 'attic'; give it a place in LEVELS"),
        (
            {"engine__run": "from safari import prune"},
            "safari.engine.run imports from safari itself: name the room",
        ),
        ({"engine__run": "import safari"}, "safari.engine.run imports from safari itself: name the room"),
    ],
)
def test_a_wrong_direction_is_seen(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    assert problem in list(wrong_directions(build(tmp_path, **files)))


def test_right_directions_are_left_alone(tmp_path: Path) -> None:
    house = build(
        tmp_path,
        __main__="from safari.cli.run import main",
        cli__run="from safari.engine.loop import go\nimport safari\ndef main(): ...",
        engine__loop="from safari.pruning import masks\nfrom safari.errors import SafariError\ndef go(): ...",
        pruning__masks="from safari.models.layout import Layout\nfrom . import scores\nimport torch",
        pruning__scores="",
        models__layout="from ..errors import SafariError\nclass Layout: ...",
        errors="class SafariError(Exception): ...",
        config="from safari.errors import SafariError",
    )
    assert list(wrong_directions(house)) == []
    assert list(circles(house)) == []
    assert list(with_torch(house)) == []


def test_even_the_package_itself_does_not_import_cli(tmp_path: Path) -> None:
    house = build(tmp_path, cli__run="")
    (tmp_path / "safari" / "__init__.py").write_text("from safari.cli import run")
    house = read(tmp_path / "safari")
    assert "safari imports safari.cli: nothing imports cli" in list(wrong_directions(house))


def test_a_circle_of_rooms_is_seen(tmp_path: Path) -> None:
    house = build(
        tmp_path,
        models__a="import safari.pruning.b",
        pruning__b="import safari.wire.c",
        wire__c="import safari.models.a",
    )
    assert list(wrong_directions(house)) == []
    assert list(circles(house)) == [
        "models needs itself through pruning",
        "pruning needs itself through wire",
        "wire needs itself through models",
    ]


def test_torch_is_seen_through_others(tmp_path: Path) -> None:
    house = build(
        tmp_path,
        wire__frame="from safari.errors import SafariError",
        wire__direct="def late():\n    from torch.nn import functional",
        net__peer="from safari.config import Config",
        config="from safari.seeds import derive",
        seeds="import torch",
        errors="class SafariError(Exception): ...",
    )
    assert list(with_torch(house)) == [
        "safari.net.peer needs torch through safari.seeds",
        "safari.wire.direct needs torch through safari.wire.direct",
    ]


def test_torch_in_the_face_of_a_room_is_seen_in_all_its_files(tmp_path: Path) -> None:
    house = build(tmp_path, wire__frame="")
    (tmp_path / "safari" / "wire" / "__init__.py").write_text("import torch")
    house = read(tmp_path / "safari")
    assert "safari.wire.frame needs torch through safari.wire" in list(with_torch(house))
