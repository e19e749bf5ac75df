"""A checkpoint: a trial's state after a round, a safetensors file with facts and a digest in its header.

`checkpoint.safetensors` is the newest; older ones have their round in the name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from safari.errors import RunError
from safari.runs.files import open_plain

FORMAT = "safari-run-1"
NEWEST = "checkpoint.safetensors"
BEST = "best.safetensors"
# Bytes of checkpoints for a round, where the config does not say how often one is made.
_A_ROUND = 500_000_000
# Bytes that are hashed or written at once.
_PIECE = 2**24
_TYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_OLDER = re.compile(r"checkpoint-(\d{6,12})\.safetensors")


@dataclass(frozen=True)
class About:
    """Metadata of a checkpoint: the round it was made after, small facts as JSON, seed and digest."""

    round: int
    facts: Mapping[str, Any]
    seed: int
    digest: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the round it was made after, its tensors, and small facts as JSON."""

    round: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def spacing(every: int, usual: int, saved: Saved) -> int:
    """Rounds between two checkpoints as large as this one: `every`, as the config says.

    Where that is 0, `usual`, or as many more as keep what is written to 0.5 GB a round.

    >>> large = Saved(0, {"rule.updates": torch.empty(1_650_000_000, dtype=torch.int8, device="meta")}, {})
    >>> spacing(0, 10, large), spacing(0, 1, large), spacing(1, 1, large)
    (10, 4, 1)
    """
    size = sum(tensor.nbytes for tensor in saved.tensors.values())
    return every or max(usual, -(-size // _A_ROUND))


def older_name(round: int) -> str:
    """File name of a round's checkpoint once it is no longer the newest.

    >>> older_name(40), round_in("checkpoint-000040.safetensors"), round_in("checkpoint.safetensors")
    ('checkpoint-000040.safetensors', 40, None)
    """
    return f"checkpoint-{round:06d}.safetensors"


def round_in(name: str) -> int | None:
    """The round in the name of an older checkpoint; None for any other name."""
    found = _OLDER.fullmatch(name)
    return int(found[1]) if found else None


def to_chunks(saved: Saved, seed: int) -> Iterator[bytes | memoryview]:
    """The file of a checkpoint of a trial with this seed, piece by piece; equal states give equal bytes.

    Tensors are written from where they are: nothing is copied but what comes from a GPU, a piece at a time.
    """
    tensors = {name: tensor.detach() for name, tensor in saved.tensors.items()}
    head = {"format": FORMAT, "round": saved.round, "seed": seed, "facts": saved.facts}
    head |= {"digest": _digest(head, tensors)}
    # The largest numbers first, so that all begin at a multiple of their size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    table: dict[str, Any] = {"__metadata__": {"safari": json.dumps(head)}}
    at = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _TYPES:
            raise RunError(f"{name} must be a tensor that a checkpoint can hold, got one of {tensor.dtype}")
        end = at + tensor.nbytes
        table[name] = {"dtype": _TYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield from _pieces(tensors[name])


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor."""
    flat = tensor.reshape(-1)
    count = _PIECE // tensor.element_size()
    for start in range(0, len(flat), count):
        yield flat[start : start + count].cpu().view(torch.uint8).numpy().data


def read_about(path: Path, root: Path | None = None) -> About:
    """Read a checkpoint's metadata without its tensors; RunError when it cannot be read."""
    with opened(path, root) as (handle, about):
        del handle
        return about


def read_checkpoint(path: Path, root: Path | None = None, *, seed: int | None = None) -> Saved:
    """A checkpoint, checked against its digest; never unpickles.

    Args:
        path: the file.
        root: the run's folder, below which no link is followed; the file's own by default.
        seed: the seed that it must be of; None: any.
    """
    with opened(path, root) as (handle, about):
        # Copies: a tensor that is mapped from the file begins at any address, torch's own at a multiple of 64 bytes,
        # and the order in which torch adds numbers up depends on that. A resumed run would round otherwise.
        tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        if seed is not None and about.seed != seed:
            raise RunError(f"{path} is of seed {about.seed}, not of seed {seed}")
        head = {"format": FORMAT, "round": about.round, "seed": about.seed, "facts": about.facts}
        if about.digest != _digest(head, tensors):
            raise RunError(f"{path} is damaged: its digest is not that of its contents")
        return Saved(about.round, tensors, about.facts)


def model_size(path: Path, root: Path | None = None) -> int | None:
    """Size of a checkpoint's model in numbers, without reading them; None where it cannot be determined."""
    try:
        with opened(path, root) as (handle, _):
            (size,) = handle.get_slice("model").get_shape()
            return int(size)
    except (RunError, FileNotFoundError):
        return None


def _digest(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Over round, seed, facts, and name, type, shape and bytes of each tensor."""
    # As it comes back from the file: there, keys are texts and tuples are lists.
    plain = json.loads(json.dumps(head))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), [*tensor.shape]]).encode())
        for piece in _pieces(tensor):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def opened(path: Path, root: Path | None = None) -> Iterator[tuple[Any, About]]:
    """A checkpoint's open safetensors file, its digest not checked; RunError where it cannot be read."""
    try:
        with open_plain(path, root) as plain, safe_open(_same_file(plain.fileno(), path), "pt") as handle:
            yield handle, _about(path, json.loads((handle.metadata() or {}).get("safari", "{}")))
    # RuntimeError: torch, of a file that became shorter meanwhile.
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(f"{path} is not a readable checkpoint: {words}") from error


def _about(path: Path, table: Any) -> About:
    if table.get("format") != FORMAT:
        raise RunError(f"{path}: format must be {FORMAT}, got {table.get('format')!r}")
    for name in ("round", "seed"):
        value = table.get(name)
        if type(value) is not int or value < 0:
            raise RunError(f"{path}: {name} must be a whole number of at least 0, got {value!r}")
    if not isinstance(table.get("digest"), str):
        raise RunError(f"{path}: digest must be a text, got {table.get('digest')!r}")
    return About(table["round"], dict(table["facts"]), table["seed"], table["digest"])


def _same_file(descriptor: int, path: Path) -> str:
    """A name of the file that is open: another one may have been put at its path since."""
    name = f"/proc/self/fd/{descriptor}"
    return name if os.path.exists(name) else str(path)  # noqa: PTH110
