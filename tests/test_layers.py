"""The layers of the package: imports point downwards, and wire and net never import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "safari"

# Upper parts (subpackages and top-level modules) import lower ones. Parts on one line may import each other, but not in
# a cycle.
LEVELS = (
    ("__main__", "cli"),
    ("api", "exports", "lab", "testing"),
    ("sweep",),
    ("engine", "flower", "view"),
    ("federation",),
    ("rounds",),
    ("aggregation", "sampling", "training", "links", "data", "runs", "report", "net"),
    ("pruning", "tasks", "models", "wire"),
    (
        "aliases",
        "bounds",
        "config",
        "modes",
        "text",
        "toml",
        "contracts",
        "hosting",
        "hub",
        "kinds",
        "presets",
        "trust",
        "plugins",
        "loading",
        "seeds",
        "stats",
        "errors",
        "keep",
        "processes",
        "version",
    ),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
WITHOUT_TORCH = ("wire", "net")
# Parts on one line that do not import each other: what both need lies below.
APART = (("engine", "flower"), ("view", "flower"))

Modules = Mapping[str, set[str]]


def part_of(module: str) -> str:
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
        here = part_of(module)
        if here and here not in LEVEL:
            yield f"{module}: LEVELS has no place for {here!r}"
            continue
        # The package itself is named by every `from safari.x import y`: only what it offers counts.
        for other in sorted(found):
            there = part_of(other)
            if there == "cli" and here not in LEVELS[0]:
                yield f"{module} imports {other}: nothing imports cli"
            elif here and there and there in LEVEL and LEVEL[there] < LEVEL[here]:
                yield f"{module} imports {other}: {here} is below {there}"
            elif any({here, there} == set(pair) for pair in APART):
                yield f"{module} imports {other}: {here} and {there} are apart"
        if here not in ("", *LEVELS[0]) and _from_the_top(modules, module):
            yield f"{module} imports from safari itself: name the subpackage"


def _from_the_top(modules: Modules, module: str) -> bool:
    """`import safari` or `from safari import prune`, where prune is no module."""
    names = {i for i in modules[module] if i == "safari" or (i.startswith("safari.") and i.count(".") == 1)}
    return any(i != "safari" and i not in modules for i in names) or (
        "safari" in names and not any(i.startswith("safari.") for i in names)
    )


def cycles(modules: Modules) -> Iterator[str]:
    """Parts that import each other, directly or through others."""
    needs: dict[str, set[str]] = {}
    for module, found in inner(modules).items():
        others = {part_of(other) for other in found} - {"", part_of(module)}
        needs.setdefault(part_of(module), set()).update(others)
    for start in sorted(needs):
        reached = _closure(needs, needs[start])
        if start and start in reached:
            yield f"{start} needs itself through {', '.join(sorted(needs[start]))}"


def with_torch(modules: Modules, parts: Iterable[str] = WITHOUT_TORCH) -> Iterator[str]:
    """Modules of these parts that import torch themselves or through others of the package.

    safari/__init__.py is left out: it is run whenever any part is imported, and it offers everything.
    """
    needs = {m: found - {"safari"} for m, found in inner(modules).items()}
    for module in sorted(modules):
        if part_of(module) not in parts:
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


# --- the package as it is


@pytest.fixture(scope="module")
def tree() -> dict[str, set[str]]:
    return read(SOURCE)


def test_every_module_is_read(tree: Modules) -> None:
    assert "safari.pruning.masks" in tree
    assert "safari.models" in inner(tree)["safari.pruning.masks"]
    assert "torch" in tree["safari.pruning.masks"]
    assert len(tree) == len(list(SOURCE.rglob("*.py")))


def test_imports_point_one_way(tree: Modules) -> None:
    assert list(wrong_directions(tree)) == []


def test_no_parts_import_each_other(tree: Modules) -> None:
    assert list(cycles(tree)) == []


def test_wire_and_net_never_import_torch(tree: Modules) -> None:
    assert list(with_torch(tree)) == []


# --- the checker itself, on small packages that break the rules


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
        ({"attic__box": ""}, "safari.attic.box: LEVELS has no place for 'attic'"),
        (
            {"engine__run": "from safari import prune"},
            "safari.engine.run imports from safari itself: name the subpackage",
        ),
        (
            {"engine__run": "import safari"},
            "safari.engine.run imports from safari itself: name the subpackage",
        ),
    ],
)
def test_a_wrong_direction_is_found(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    assert problem in list(wrong_directions(build(tmp_path, **files)))


def test_right_directions_are_accepted(tmp_path: Path) -> None:
    tree = build(
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
    assert list(wrong_directions(tree)) == []
    assert list(cycles(tree)) == []
    assert list(with_torch(tree)) == []


def test_the_package_itself_may_not_import_cli(tmp_path: Path) -> None:
    tree = build(tmp_path, cli__run="")
    (tmp_path / "safari" / "__init__.py").write_text("from safari.cli import run")
    tree = read(tmp_path / "safari")
    assert "safari imports safari.cli: nothing imports cli" in list(wrong_directions(tree))


def test_a_cycle_is_found(tmp_path: Path) -> None:
    tree = build(
        tmp_path,
        models__a="import safari.pruning.b",
        pruning__b="import safari.wire.c",
        wire__c="import safari.models.a",
    )
    assert list(wrong_directions(tree)) == []
    assert list(cycles(tree)) == [
        "models needs itself through pruning",
        "pruning needs itself through wire",
        "wire needs itself through models",
    ]


def test_indirect_imports_of_torch_are_found(tmp_path: Path) -> None:
    tree = build(
        tmp_path,
        wire__frame="from safari.errors import SafariError",
        wire__direct="def late():\n    from torch.nn import functional",
        net__peer="from safari.config import Config",
        config="from safari.seeds import derive",
        seeds="import torch",
        errors="class SafariError(Exception): ...",
    )
    assert list(with_torch(tree)) == [
        "safari.net.peer needs torch through safari.seeds",
        "safari.wire.direct needs torch through safari.wire.direct",
    ]


def test_torch_in_an_init_counts_for_all_modules_of_its_subpackage(tmp_path: Path) -> None:
    tree = build(tmp_path, wire__frame="")
    (tmp_path / "safari" / "wire" / "__init__.py").write_text("import torch")
    tree = read(tmp_path / "safari")
    assert "safari.wire.frame needs torch through safari.wire" in list(with_torch(tree))
