"""Choice of a table's columns as inputs, labels and owners: by name, or by their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from safari.errors import ConfigError, DataError, one_of

Kind = Literal[
    "image", "array", "text", "words", "class", "integer", "float", "classes", "integers", "floats", "other"
]
Input = Literal["image", "array", "text", "words", "columns"]

_LABELS = ("label", "labels", "fine_label", "target", "y", "class")


@dataclass(frozen=True)
class Columns:
    """Roles of a table's columns. There are several `inputs` only where `kind` is "columns": a number each."""

    kind: Input
    inputs: tuple[str, ...]
    label: str | None
    owner: str | None


def kind_of(feature: Any) -> Kind:
    """Kind of the values in a column of the library `datasets`, by its feature's type."""
    name = type(feature).__name__
    if name in ("Image", "ClassLabel"):
        return "image" if name == "Image" else "class"
    if name.startswith("Array"):
        return "array"
    if name == "Value":
        dtype = str(feature.dtype)
        if "string" in dtype:
            return "text"
        if dtype.startswith(("int", "uint", "bool")):
            return "integer"
        return "float" if dtype.startswith(("float", "decimal")) else "other"
    if name in ("List", "LargeList", "Sequence"):
        lists: dict[Kind, Kind] = {
            "text": "words", "class": "classes", "integer": "integers", "float": "floats",
            "integers": "array", "floats": "array", "array": "array",
        }  # fmt: skip
        return lists.get(kind_of(feature.feature), "other")
    return "other"


def find_columns(
    features: Mapping[str, Any],
    source: str,
    *,
    image: str = "",
    text: str = "",
    inputs: Sequence[str] = (),
    label: str = "",
    owner: str = "",
) -> Columns:
    """The columns as named, the others by their types; errors say what there is.

    Parameters
    ----------
    features: the table's columns and their types, as `datasets.Dataset.features` has them.
    source: where the table is from, for messages.
    image, text, inputs, label, owner: names that a user gave; empty where not.
    """
    kinds = {name: kind_of(feature) for name, feature in features.items()}
    _check_named(kinds, {"image": image, "text": text, "label": label, "owner": owner}, inputs)
    if label and kinds[label] in ("image", "other"):
        raise DataError(f"{source}: the column {label!r} cannot be a label: it holds {spoken(kinds[label])}")
    # What someone named as an input is no label, and the other way round.
    taken = {image, text, owner, *inputs} - {""}
    found_label = label or _find_label(kinds, taken, source)
    free = {name: kind for name, kind in kinds.items() if name not in (owner, found_label)}
    kind, chosen = _inputs(free, image, text, inputs, source)
    if found_label is None and kind not in ("text", "words"):
        raise DataError(f"{source}: no column of labels was found ({_listed(kinds)}); name it as data.label")
    return Columns(kind, chosen, found_label, owner or None)


def _check_named(kinds: Mapping[str, Kind], named: Mapping[str, str], inputs: Sequence[str]) -> None:
    problems = [one_of(option, name, kinds) for option, name in named.items() if name and name not in kinds]
    problems += [one_of("inputs", name, kinds) for name in inputs if name not in kinds]
    given = [option for option in ("image", "text") if named[option]] + (["inputs"] if inputs else [])
    if len(given) > 1:
        problems.append(f"only one of image, text and inputs can be given, got {' and '.join(given)}")
    wanted: dict[str, tuple[Kind, ...]] = {"image": ("image", "array"), "text": ("text", "words")}
    for option, kinds_wanted in wanted.items():
        name = named[option]
        if name in kinds and kinds[name] not in kinds_wanted:
            problems.append(
                f"{option} must name a column of {option}s, and {name!r} holds {spoken(kinds[name])}"
            )
    if problems:
        raise ConfigError(problems)


def _find_label(kinds: Mapping[str, Kind], taken: set[str], source: str) -> str | None:
    classes = [name for name, kind in kinds.items() if kind == "class" and name not in taken]
    if len(classes) > 1:
        raise DataError(
            f"{source}: several columns hold classes ({', '.join(classes)}); name one as data.label"
        )
    usual = [name for name in _LABELS if name in kinds and name not in taken]
    return next(iter(classes + usual), None)


def _inputs(
    kinds: Mapping[str, Kind], image: str, text: str, inputs: Sequence[str], source: str
) -> tuple[Input, tuple[str, ...]]:
    if image:
        return ("image" if kinds[image] == "image" else "array"), (image,)
    if text:
        return ("words" if kinds[text] == "words" else "text"), (text,)
    if inputs:
        return _named_inputs(kinds, inputs)
    for kind in ("image", "array", "text", "words", "floats"):
        found = [name for name, held in kinds.items() if held == kind]
        if len(found) > 1:
            option = {"image": "image", "text": "text", "words": "text"}.get(kind, "inputs")
            raise DataError(
                f"{source}: several columns hold {spoken(kind)} ({', '.join(found)}); "
                f"name one as data.{option}"
            )
        if found:
            chosen: Input = "array" if kind in ("array", "floats") else kind  # type: ignore[assignment]
            return chosen, (found[0],)
    numbers = tuple(name for name, kind in kinds.items() if kind in ("float", "integer"))
    if not numbers:
        raise DataError(f"{source}: no column can be an input ({_listed(kinds)})")
    return "columns", numbers


def _named_inputs(kinds: Mapping[str, Kind], inputs: Sequence[str]) -> tuple[Input, tuple[str, ...]]:
    if len(inputs) == 1 and kinds[inputs[0]] in ("array", "floats", "integers"):
        return "array", (inputs[0],)
    wrong = [name for name in inputs if kinds[name] not in ("float", "integer")]
    if wrong:
        raise ConfigError(
            f"inputs must name columns of numbers, or one of arrays; {wrong[0]!r} holds "
            f"{spoken(kinds[wrong[0]])}"
        )
    return "columns", tuple(inputs)


def spoken(kind: str) -> str:
    """Words for the values in a column of a kind."""
    words = {
        "image": "images", "array": "arrays", "words": "lists of words", "class": "classes",
        "integer": "whole numbers", "float": "numbers", "classes": "lists of classes",
        "integers": "lists of whole numbers", "floats": "lists of numbers", "other": "something else",
    }  # fmt: skip
    return words.get(kind, kind)


def _listed(kinds: Mapping[str, Kind]) -> str:
    return "columns: " + ", ".join(f"{name} ({spoken(kind)})" for name, kind in kinds.items())
