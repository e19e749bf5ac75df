"""Data sets of the Hugging Face hub, and local tables of the same kinds (extra `hf`).

Nothing of a data set is ever executed: only tables and pictures are read, and scripts are refused.
"""

from __future__ import annotations

import importlib
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from safari.bounds import at_least, path_of
from safari.data.columns import Columns, find_columns, kind_of, spoken
from safari.data.dataset import IGNORED, Data, Scaling
from safari.data.store import filled
from safari.data.text import Level, Vocabulary, check_length, next_token_windows, padded, window_count
from safari.errors import ConfigError, DataError, brief, one_of
from safari.hub import is_path, library, offline, permit_hub

# How a local file is read, by its ending.
_READERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
}
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
# Formats that are decoded in this process: for some others Pillow starts programs.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_BILINEAR = 2
_ROWS = 1000
# Part of the name of what is kept in the cache: to be raised when the numbers would come out otherwise.
_VERSION = 2

Table = Any  # datasets.Dataset; the library is optional
Floats = npt.NDArray[np.float32]


def hf(
    *,
    source: str,
    subset: str = "",
    revision: str = "",
    train: str = "train",
    test: str = "test",
    holdout: float = 0.1,
    image: str = "",
    text: str = "",
    inputs: Sequence[str] = (),
    label: str = "",
    owner: str = "",
    size: int = 0,
    normalise: bool = True,
    tokens: Literal["characters", "bytes", "words"] = "characters",
    length: int = 80,
    join: bool = False,
    numbers: bool = False,
) -> Data:
    """A data set of the Hugging Face hub, or a local folder or file; `hf:NAME` is short for it (extra hf).

    `source`: a name on the hub (`subset`, `revision`: which part, which version of it), or a path: a folder
    that `save_to_disk` wrote, a folder of Parquet, Arrow, CSV or JSON files, a folder of pictures with one
    folder a class, or one such file. Paths need no network.

    `train` and `test` name the splits. Where there is no test split, `holdout` of the training samples is
    held out, always the same.

    Columns are found by their types, or named: `image` (pictures, or arrays of numbers), `text`, or `inputs`
    (columns of numbers, or one of arrays); `label` (classes, numbers, or lists of classes); `owner`: whose
    sample it is, for the partition `natural`. Text without a label is for next-token prediction.

    `size`: pictures are scaled to this many pixels on each side. `normalise`: numbers get mean 0 and standard
    deviation 1 over the training samples, by channel or column. `tokens`, `length`: what a token of text is,
    and how many a sample has; longer text without labels becomes several samples. `join`: rows of one owner
    are one text. `numbers`: whole numbers in the label's column are numbers and not classes; tasks whose labels are
    numbers ask for that by themselves.
    """
    tables = _load(source, subset, revision)
    return from_hf(
        tables,
        f"hf:{source}",
        train=train,
        test=test,
        holdout=holdout,
        image=image,
        text=text,
        inputs=inputs,
        label=label,
        owner=owner,
        size=size,
        normalise=normalise,
        tokens=tokens,
        length=length,
        join=join,
        numbers=numbers,
    )


def from_hf(
    tables: Any,
    name: str = "hf",
    *,
    train: str = "train",
    test: str = "test",
    holdout: float = 0.1,
    image: str = "",
    text: str = "",
    inputs: Sequence[str] = (),
    label: str = "",
    owner: str = "",
    size: int = 0,
    normalise: bool = True,
    tokens: Literal["characters", "bytes", "words"] = "characters",
    length: int = 80,
    join: bool = False,
    numbers: bool = False,
) -> Data:
    """A `datasets.DatasetDict` (or a `Dataset`, of which some is held out) as `Data`; options as of `hf`."""
    splits = _splits(tables, name, train, test, holdout)
    features = splits[0].features
    splits = (_by_bytes(splits[0]), _by_bytes(splits[1]))
    columns = find_columns(features, name, image=image, text=text, inputs=inputs, label=label, owner=owner)
    missing = set(columns.inputs + ((columns.label,) if columns.label else ())) - set(splits[1].features)
    if missing:
        raise DataError(f"{name}: the split {test!r} has no column {sorted(missing)[0]!r}")
    owners = None if columns.owner is None else _codes(splits[0], columns.owner)
    if columns.kind in ("text", "words"):
        check_length(length)
        return _text_data(name, splits, columns, owners, tokens, length, join)
    key = _key(splits, columns, size, normalise)
    if columns.kind == "image":
        column = columns.inputs[0]
        reader = _picture_reader(splits[0], column, size, files=features[column].decode)
    else:
        reader = _number_reader(splits[0], columns)
    train_x, test_x, scaling = _number_tensors(splits, reader, normalise, key)
    train_y, test_y, classes, names = _labels(name, splits, columns.label or "", numbers)
    return Data(name, train_x, train_y, test_x, test_y, classes, owners, class_names=names, scaling=scaling)


# --- reading


def _load(source: str, subset: str, revision: str) -> Any:
    if not source:
        raise ConfigError("source must name a data set of the hub, a folder or a file, got ''")
    path = path_of("source", source)
    local = is_path("source", source) or path.suffix.lower() in _READERS
    if local and not path.exists():
        raise DataError(f"hf:{source}: no such file or folder: {path}")
    if not local:
        permit_hub(source)
    hf = library("datasets", "hf", "data sets named hf:...")
    # Its progress bars would overwrite ours.
    hf.disable_progress_bars()
    try:
        if local:
            with offline():
                return _load_local(hf, path)
        return hf.load_dataset(source, subset or None, revision=revision or None)
    except (DataError, ConfigError):
        raise
    except Exception as error:  # whatever a library of many formats and a network raise
        cause: BaseException = error
        # Of a file that cannot be read the library's own error says no more than that; what it was is behind it.
        while local and (before := cause.__cause__ or cause.__context__) is not None:
            cause = before
        text = " ".join(str(cause).split()) or "no message"
        where = "" if local else " (it is no file or folder here, so it was looked for on the hub)"
        raise DataError(f"hf:{source}{where}: {type(cause).__name__}: {text[:300]}") from error


def _load_local(hf: Any, path: Path) -> Any:
    if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _by_bytes(hf.load_from_disk(str(path)))
    if path.is_file():
        return _by_bytes(hf.load_dataset(_reader(path), data_files={"train": [str(path)]}))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    readable = [file for file in files if file.suffix.lower() in _READERS]
    if not readable:
        if any(file.suffix.lower() in _PICTURES for file in files):
            return hf.load_dataset("imagefolder", data_dir=str(path))
        endings = ", ".join(sorted({*_READERS}))
        raise DataError(f"hf:{path}: a folder must hold {endings} files or pictures, and this has none")
    kinds = {_reader(file) for file in readable}
    if len(kinds) > 1:
        raise DataError(
            f"hf:{path}: a folder must hold files of one kind, and this has {', '.join(sorted(kinds))}"
        )
    by_split: dict[str, list[str]] = {}
    for file in readable:
        by_split.setdefault(_split_of(file, path), []).append(str(file))
    return _by_bytes(hf.load_dataset(kinds.pop(), data_files=by_split))


def _by_bytes(table: Any) -> Any:
    """A table, or several, whose pictures are not decoded by the library: that would follow any address in a row."""
    if isinstance(table, Mapping):
        return library("datasets", "hf", "tables").DatasetDict(
            {split: _by_bytes(inner) for split, inner in table.items()}
        )
    for name, feature in table.features.items():
        if kind_of(feature) == "image" and feature.decode:
            table = table.cast_column(name, type(feature)(mode=feature.mode, decode=False))
    return table


def _reader(path: Path) -> str:
    ending = path.suffix.lower()
    if ending not in _READERS:
        raise DataError(
            f"hf:{path}: a file must end in {', '.join(_READERS)}, got {path.suffix or 'no ending'!r}"
        )
    return _READERS[ending]


def _split_of(file: Path, root: Path) -> str:
    """The split of a file, by its folder or name, as on the hub: `test/0.parquet`, `test-00000.parquet`."""
    words = [*file.relative_to(root).parts[:-1], *file.stem.replace("_", "-").split("-")]
    for split in ("test", "validation", "train"):
        if split in words:
            return split
    return "train"


def _splits(tables: Any, name: str, train: str, test: str, holdout: float) -> tuple[Table, Table]:
    if not isinstance(tables, Mapping):
        tables = {train: tables}
    if train not in tables:
        if len(tables) != 1:
            raise ConfigError(one_of("train", train, tables))
        tables = {train: next(iter(tables.values()))}
    if test not in tables:
        if test != "test":
            raise ConfigError(one_of("test", test, tables))
        if not 0 < holdout < 1:
            raise ConfigError(f"holdout must be above 0 and below 1, got {holdout}")
        if len(tables[train]) < 2:
            raise DataError(
                f"{name}: there must be at least 2 rows, of which some are held out, got {len(tables[train])}"
            )
        # Not by the run's seed: all runs and seeds are to be tested on the same samples.
        parts = tables[train].train_test_split(test_size=holdout, seed=0)
        tables = {train: parts["train"], test: parts["test"]}
    for split in (train, test):
        if not len(tables[split]):
            raise DataError(f"{name}: the split {split!r} is empty")
    return tables[train], tables[test]


def _chunks(table: Table, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """A table in pieces, decoded one at a time: it stays where it is, mapped into memory."""
    picked = table.select_columns(list(columns))
    for start in range(0, len(picked), _ROWS):
        yield start, picked[start : start + _ROWS]


def _key(splits: tuple[Table, Table], columns: Columns, *options: Any) -> tuple[Any, ...]:
    prints = [str(getattr(table, "_fingerprint", "")) for table in splits]
    return (_VERSION, *prints, columns.kind, *columns.inputs, columns.label, *options)


def _codes(table: Table, column: str) -> Tensor:
    """A number for each different value, in the order of the values."""
    values = np.asarray(table.with_format("arrow")[column][:].to_pandas())
    try:
        return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))
    except TypeError as error:
        raise DataError(f"the column {column!r} must hold texts or whole numbers, all of one kind") from error


# --- inputs that are numbers


@dataclass(frozen=True)
class Reader:
    """Conversion of rows to numbers: `read(rows, number of the first)` gives `[rows, *shape]`."""

    columns: tuple[str, ...]
    shape: tuple[int, ...]
    read: Callable[[dict[str, Any], int], Floats]


def _picture(value: Any, where: str, mode: str | None, files: bool) -> Any:
    """A picture from its bytes, or from a file of this machine where `files` are allowed; nothing else is followed."""
    image, ops = importlib.import_module("PIL.Image"), importlib.import_module("PIL.ImageOps")
    value = value or {}
    data, path = value.get("bytes"), value.get("path")
    if data is None and files and path and Path(path).is_file():
        data = Path(path).read_bytes()
    if data is None:
        raise DataError(f"{where} is missing" + (f": {brief(path)} is not followed" if path else ""))
    try:
        picture = image.open(io.BytesIO(data), formats=_FORMATS)
        picture = ops.exif_transpose(picture)
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise DataError(f"{where} cannot be read ({', '.join(_FORMATS)}): {brief(str(error))}") from error
    return picture.convert(mode) if mode else picture


def _picture_reader(table: Table, column: str, size: int, *, files: bool) -> Reader:
    """Pictures as `[channels, height, width]` in 0..1; grey ones have one channel, all others three."""
    at_least("size", size, 0)
    own_mode = table.features[column].mode

    def decoded(number: int, value: Any) -> Any:
        return _picture(value, f"picture {number} of the column {column!r}", own_mode, files)

    first = decoded(0, table[0][column])
    mode = "L" if first.mode in ("1", "L", "I", "I;16", "F") else "RGB"
    wanted = (size, size) if size else first.size

    def pixels(number: int, value: Any) -> Floats:
        picture = decoded(number, value)
        if picture.size != wanted:
            if not size:
                raise DataError(
                    f"picture {number} must have the first one's {wanted[0]}x{wanted[1]} pixels, got "
                    f"{picture.size[0]}x{picture.size[1]}; data.size scales them all"
                )
            picture = picture.resize(wanted, _BILINEAR)
        found = np.asarray(picture.convert(mode), np.float32) / np.float32(255)
        return found[None] if mode == "L" else found.transpose(2, 0, 1)

    def read(rows: dict[str, Any], start: int) -> Floats:
        return np.stack([pixels(start + i, value) for i, value in enumerate(rows[column])])

    return Reader((column,), (1 if mode == "L" else 3, wanted[1], wanted[0]), read)


def _number_reader(table: Table, columns: Columns) -> Reader:
    """Arrays of one column as they are (pictures without channels get one), or several columns stacked."""
    names = ", ".join(columns.inputs)

    def read(rows: dict[str, Any], start: int) -> Floats:
        try:
            if columns.kind == "columns":
                numbers = {name: np.asarray(rows[name], np.float32) for name in columns.inputs}
                for name, column in numbers.items():
                    if not np.isfinite(column).all():
                        raise DataError(
                            f"the column {name!r} must have a finite number in every row, got a gap, NaN or infinity"
                        )
                return np.stack([*numbers.values()], axis=1)
            found = np.asarray(rows[columns.inputs[0]], np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the column {names} must hold numbers, in arrays of one shape and without gaps "
                f"(in the rows from {start} on: {' '.join(str(error).split())})"
            ) from error
        return found[:, None] if found.ndim == 3 else found

    return Reader(columns.inputs, read(table.select_columns(list(columns.inputs))[:1], 0).shape[1:], read)


def _number_tensors(
    splits: tuple[Table, Table], reader: Reader, normalise: bool, key: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Scaling | None]:
    """Both splits' inputs, and what they were scaled with.

    They lie one after the other in one array, so that one file in the cache holds them; its last two rows are the
    mean and the scale.
    """
    trained_on, rows = len(splits[0]), len(splits[0]) + len(splits[1])

    def fill(out: npt.NDArray[Any]) -> None:
        for base, table in zip((0, trained_on), splits, strict=True):
            for start, rows_of_table in _chunks(table, reader.columns):
                values = reader.read(rows_of_table, start)
                if values.shape[1:] != reader.shape:
                    raise DataError(
                        f"all rows must be like the first, of shape {[*reader.shape]}; those from {start} on "
                        f"have shape {[*values.shape[1:]]}"
                    )
                out[base + start : base + start + len(values)] = values
        out[rows], out[rows + 1] = _normalise(out[:rows], trained_on) if normalise else (0, 1)

    both = filled((rows + 2, *reader.shape), np.float32, key, fill)
    scaling = Scaling.of(both[rows].numpy(), both[rows + 1].numpy()) if normalise else None
    return both[:trained_on], both[trained_on:rows], scaling


def _normalise(out: npt.NDArray[Any], trained_on: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Scale in place to mean 0 and standard deviation 1 over the first rows, by channel of pictures or by column.

    Returns the mean and the scale.
    """
    axes = (0, 2, 3) if out.ndim == 4 else (0,) if out.ndim == 2 else tuple(range(out.ndim))
    pieces = [slice(start, start + _ROWS) for start in range(0, len(out), _ROWS)]
    inside = [slice(p.start, min(p.stop, trained_on)) for p in pieces if p.start < trained_on]
    count = trained_on * out[0].size / max(1, np.mean(out[:1], axis=axes).size)
    # In pieces and in float64: the array may be far larger than the memory.
    mean = sum(out[p].sum(axes, dtype=np.float64, keepdims=True) for p in inside) / count
    square = sum(np.square(out[p] - mean).sum(axes, keepdims=True) for p in inside) / count
    spread = np.sqrt(square)
    spread[spread == 0] = 1
    for piece in pieces:
        out[piece] = (out[piece] - mean) / spread
    return mean[0], spread[0]


# --- text

# A text a row, from the start each time it is called: a table is gone through several times and never held.
Texts = Callable[[], Iterator[Any]]


def _text_data(
    name: str,
    splits: tuple[Table, Table],
    columns: Columns,
    owners: Tensor | None,
    level: Level,
    length: int,
    join: bool,
) -> Data:
    level = "words" if columns.kind == "words" else level
    key = _key(splits, columns, level, length, join)
    texts = [_texts(table, columns.inputs[0]) for table in splits]
    if join:
        if columns.label is not None:
            raise ConfigError("join makes one text of several rows, so it needs text without a label")
        test_owners = None if columns.owner is None else _codes(splits[1], columns.owner)
        (train, owners), (test, _) = _joined(texts[0], owners), _joined(texts[1], test_owners)
        texts = [train, test]
    vocabulary = Vocabulary.of(texts[0](), level)
    if columns.label is None:
        (train_x, train_y, rows), (test_x, test_y, _) = (
            _windows(found, vocabulary, length, (*key, split)) for split, found in enumerate(texts)
        )
        whose = None if owners is None else owners[rows]
        size = len(vocabulary.tokens)
        return Data(name, train_x, train_y, test_x, test_y, size, whose, vocabulary.tokens)
    train_x, test_x = (
        _sequences(found, len(table), vocabulary, length, (*key, split))
        for split, (found, table) in enumerate(zip(texts, splits, strict=True))
    )
    if columns.kind == "words" and kind_of(splits[0].features[columns.label]) in ("classes", "integers"):
        train_y, test_y, classes, names = _tags(splits, columns.label, texts, length)
    else:
        train_y, test_y, classes, names = _labels(name, splits, columns.label)
    return Data(name, train_x, train_y, test_x, test_y, classes, owners, vocabulary.tokens, names)


def _texts(table: Table, column: str) -> Texts:
    def each() -> Iterator[Any]:
        for start, rows in _chunks(table, [column]):
            for offset, text in enumerate(rows[column]):
                if text is None:
                    raise DataError(f"row {start + offset} of the column {column!r} is empty")
                yield text

    return each


def _joined(texts: Texts, owners: Tensor | None) -> tuple[Texts, Tensor | None]:
    """One text for each owner, or one in all, a line for each row; and the owners."""
    lines: dict[int, list[Any]] = {}
    for number, text in enumerate(texts()):
        lines.setdefault(0 if owners is None else int(owners[number]), []).append(text)
    ordered = sorted(lines)

    def each() -> Iterator[Any]:
        for owner in ordered:
            words = not isinstance(lines[owner][0], str)
            yield list(itertools.chain(*lines[owner])) if words else "\n".join(lines[owner])

    return each, None if owners is None else torch.tensor(ordered)


def _windows(
    texts: Texts, vocabulary: Vocabulary, length: int, key: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and next tokens, `[windows, length]` each, and the number of each window's text."""
    counts = np.array([window_count(vocabulary.length(text), length) for text in texts()], np.int64)
    if not counts.sum():
        raise DataError("the texts must hold at least two tokens, one of which follows the other")

    def fill(out: npt.NDArray[Any]) -> None:
        end = 0
        for text, count in zip(texts(), counts, strict=True):
            out[:, end : end + count] = next_token_windows(vocabulary.encode(text), length)
            end += count

    both = filled((2, int(counts.sum()), length), np.int64, key, fill)
    return both[0], both[1], torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _sequences(texts: Texts, count: int, vocabulary: Vocabulary, length: int, key: tuple[Any, ...]) -> Tensor:
    """The first `length` tokens of each text."""

    def fill(out: npt.NDArray[Any]) -> None:
        for number, text in enumerate(texts()):
            out[number] = padded(vocabulary.encode(text), length)

    return filled((count, length), np.int64, key, fill)


# --- labels


# Both splits' labels, the number of classes, and what the classes are called where the data say so.
Labels = tuple[Tensor, Tensor, int, tuple[str, ...]]


def _labels(name: str, splits: tuple[Table, Table], column: str, numbers: bool = False) -> Labels:
    """Both splits' labels, by the type of the column."""
    feature = splits[0].features[column]
    kind = kind_of(feature)
    values = [_values(table, column) for table in splits]
    if kind in ("float", "floats") or (numbers and kind == "integer"):
        train, test = (_rows_of_numbers(rows, column) for rows in values)
        return train, test, train.shape[1], ()
    if kind in ("classes", "integers"):
        inner = feature.feature
        return *_several(name, values, getattr(inner, "num_classes", 0)), _names_of(inner)
    if kind == "class":
        train_y, test_y = (torch.tensor(rows, dtype=torch.int64) for rows in values)
        return train_y, test_y, int(feature.num_classes), _names_of(feature)
    if kind not in ("integer", "text"):
        raise DataError(f"{name}: the column {column!r} cannot be a label: it holds {spoken(kind)}")
    known = {value: number for number, value in enumerate(sorted(set(values[0])))}
    strange = sorted(set(values[1]) - set(known))
    if strange:
        raise DataError(
            f"{name}: the label {strange[0]!r} occurs in the test split and not in the training split: the column "
            f'{column!r} is read as classes (task.name = "regression" reads whole numbers as numbers)'
        )
    train_y, test_y = (torch.tensor([known[value] for value in rows]) for rows in values)
    return train_y, test_y, len(known), tuple(map(str, known))


def _names_of(feature: Any) -> tuple[str, ...]:
    """The names of a feature's classes."""
    return tuple(map(str, getattr(feature, "names", None) or ()))


def _values(table: Table, column: str) -> list[Any]:
    found = [value for _, rows in _chunks(table, [column]) for value in rows[column]]
    if None in found:
        raise DataError(f"row {found.index(None)} of the column {column!r} is empty")
    return found


def _rows_of_numbers(values: list[Any], column: str) -> Tensor:
    try:
        found = torch.tensor(values, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"the column {column!r} must hold as many numbers in every row: {error}") from error
    return found[:, None] if found.ndim == 1 else found


def _several(name: str, values: Sequence[list[Any]], classes: int) -> tuple[Tensor, Tensor, int]:
    """Lists of classes as rows of 0 and 1."""
    largest = max((max(row) for found in values for row in found if row), default=0)
    smallest = min((min(row) for found in values for row in found if row), default=0)
    classes = classes or largest + 1
    if smallest < 0 or largest >= classes:
        raise DataError(f"{name}: labels must lie in 0..{classes - 1}, got {smallest}..{largest}")
    tensors = []
    for found in values:
        rows = torch.zeros(len(found), classes)
        for number, row in enumerate(found):
            rows[number, row] = 1.0
        tensors.append(rows)
    return tensors[0], tensors[1], classes


def _tags(splits: tuple[Table, Table], column: str, texts: Sequence[Texts], length: int) -> Labels:
    """A class for each word."""
    tensors = []
    for table, words in zip(splits, texts, strict=True):
        found = _values(table, column)
        for number, (row, text) in enumerate(zip(found, words(), strict=True)):
            if len(row) != len(text):
                raise DataError(
                    f"row {number} of {column!r} must have a label for each of its {len(text)} words, "
                    f"got {len(row)}"
                )
        rows = [padded(np.asarray(row, np.int64), length, IGNORED) for row in found]
        tensors.append(torch.from_numpy(np.stack(rows)))
    inner = splits[0].features[column].feature
    classes = getattr(inner, "num_classes", 0) or 1 + max(int(t.max()) for t in tensors)
    return tensors[0], tensors[1], int(classes), _names_of(inner)
