"""Run folders damaged in every way we could think of: one generator for all tests of readers.

`damages(run)` gives a name and a function for each kind of damage; the function is handed a copy of a run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]

TRIAL = "trials/safari/seed-0"
DEEP = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = "7" * 5_000
MANY = 10**12
ENDLESS = "(endless)"
# What a JSON value may be instead of the right one.
WRONG: tuple[Any, ...] = (
    None, True, -1, 10**400, "\x1b[31m<script>", [], {"x": [None]}, [[1.5]], [-1, "0"], [10**9], {"0": "y"},
)  # fmt: skip
TEXTS = {
    "nothing": b"",
    "a zero": b"\x00",
    "no text": b"\xff\xfe\x00\xd8" * 9,
    "half": b'{"round": 1, "lo',
    "a list": b"[1, 2]\n",
    "a number": b"3\n",
    "null": b"null\n",
    "deep": DEEP.encode() + b"\n",
    "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\n",
    "a long number": b'{"round": ' + LONG_NUMBER.encode() + b"}\n",
    "NaN": b'{"round": NaN, "loss": Infinity}\n',
    "utf-16": '{"round": 1}\n'.encode("utf-16"),
    "zeros": bytes(10_000),
}


def damages(run: Path) -> Iterator[tuple[str, Damage]]:
    """Every damage, with a name that says what it is; `run` is a good one to take names from."""
    yield from _whole_files()
    yield from _lines(run)
    yield from _configs(run)
    yield from _json_files(run)
    yield from _checkpoints()
    yield from _places()


def _write(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data) and None


def _whole_files() -> Iterator[tuple[str, Damage]]:
    names = [
        "config.toml", "clients.json", "model.json", "data.json", "environment.json", "summary.json", "plugins.json",
        "task.json", f"{TRIAL}/code.json",
        f"{TRIAL}/rounds.jsonl", f"{TRIAL}/timings.jsonl", f"{TRIAL}/similarity.jsonl",
        f"{TRIAL}/checkpoint.safetensors", ".writer",
    ]  # fmt: skip
    for name in names:
        for what, data in TEXTS.items():
            yield f"{name}: {what}", _write(name, data)
        yield f"{name}: missing", lambda run, name=name: (run / name).unlink(missing_ok=True)
        yield f"{name}: a folder", lambda run, name=name: _folder(run / name)


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _lines(run: Path) -> Iterator[tuple[str, Damage]]:
    for file in ("rounds.jsonl", "timings.jsonl", "similarity.jsonl"):
        name = f"{TRIAL}/{file}"
        fields = json.loads((run / name).read_bytes().splitlines()[1])
        for key in fields:
            yield f"{name}: no {key}", _edit_line(name, lambda line, key=key: line.pop(key))
            for number, value in enumerate(WRONG):
                damage = _edit_line(name, lambda line, key=key, value=value: line.update({key: value}))
                yield f"{name}: {key} wrong {number}", damage
        yield f"{name}: twice", lambda run, name=name: _relines(run / name, lambda lines: [*lines, lines[-1]])
        yield f"{name}: backwards", lambda run, name=name: _relines(run / name, lambda lines: lines[::-1])
        yield f"{name}: shorter", lambda run, name=name: _relines(run / name, lambda lines: lines[:2])
        yield f"{name}: cut", lambda run, name=name: (run / name).write_bytes((run / name).read_bytes()[:-9])


def _edit_line(name: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(run: Path) -> None:
        def edited(lines: list[bytes]) -> list[bytes]:
            line = json.loads(lines[1])
            change(line)
            return [lines[0], json.dumps(line).encode() + b"\n", *lines[2:]]

        _relines(run / name, edited)

    return damage


def _relines(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def _configs(run: Path) -> Iterator[tuple[str, Damage]]:
    changes = {
        "clients = 4": [
            "clients = 3", "clients = 5", "clients = 100000", f"clients = {LONG_NUMBER}", "clients = 0",
        ],
        "rounds = 7": ["rounds = 5", "rounds = 9", "rounds = -1", "rounds = 7.5", f"rounds = {MANY}"],
        "seeds = 1": ["seeds = 2", f"seeds = {MANY}"],
        "seed = 0": ["seed = 5", "seed = 18446744073709551616", f"seed = {LONG_NUMBER}"],
        "cohort = 0": ["cohort = 3", "cohort = 9"],
        'name = "tiny"': [
            'name = "../x"', 'name = "\\u001b[31m"', "name = 3", "name = 2020-01-01", f'name = "{"x" * 300}"',
        ],
        'arms = ["drop", "safari"]': [
            "arms = []", 'arms = ["drop", "drop"]', 'arms = [{name = "safari", rule = "drop"}]', "arms = [3]",
            'arms = ["drop", "gone"]', f"arms = {DEEP}", 'arms = ["safari", "nowhere.py:rule"]',
            'arms = [{rule = "safari", when = 2020-01-01}, "drop"]', 'arms = ["safari", "no.such:rule"]',
        ],
        'name = "mlp"': ['name = "cnn"', 'name = "gone"', 'name = "nowhere.py:net"', 'name = ""'],
        "hidden = [8]": ["hidden = [9]", "hidden = 2020-01-01T00:00:00Z", 'hidden = "x"', "hidden = [-1]"],
        'pruner = "mag"': ['pruner = "gone"', "pruner = inf", 'pruner = "nowhere.py:score"'],
        'target = "auto"': ["target = nan", "target = 85", 'target = "high"'],
        "last = 4": ["last = 0", "last = 1000000000"],
        "p = 0.5": ["p = 2", "p = [0.5]", "p = []"],
        'mlflow = ""': ["mlflow = 3", 'mlflow = "\\u0000"', 'mlflow = "http://["'],
    }  # fmt: skip
    text = (run / "config.toml").read_text()
    for before, afters in changes.items():
        assert before in text, before
        for number, after in enumerate(afters):
            # Such a run would take too long to go on with; it can only be looked at.
            endless = f" {ENDLESS}" if str(MANY) in after else ""
            yield f"config.toml: {before} -> {number}{endless}", _replace("config.toml", before, after)
    more = ["x = 1", "[x]", "[[trials]]", 'track = "x"', f"x = {DEEP}", "= 3", "\x00"]
    for number, text in enumerate(more):
        yield f"config.toml: more {number}", lambda run, text=text: _append(run / "config.toml", text)


def _replace(name: str, before: str, after: str) -> Damage:
    def damage(run: Path) -> None:
        text = (run / name).read_text()
        (run / name).write_text(text.replace(before, after, 1))

    return damage


def _append(path: Path, text: str) -> None:
    path.write_text(f"{path.read_text()}\n{text}\n")


def _json_files(run: Path) -> Iterator[tuple[str, Damage]]:
    for name in ("clients.json", "model.json", "data.json", "environment.json", "summary.json"):
        for key in json.loads((run / name).read_text()):
            for number, value in enumerate(WRONG):
                yield f"{name}: {key} wrong {number}", _edit_json(name, {key: value})
    ragged = {"label_counts": [[1, 2], [3], [4, 5], [6, 7]]}
    yield "clients.json: ragged", _edit_json("clients.json", ragged)
    yield "clients.json: others", _edit_json("clients.json", {"label_counts": [[1, 2]] * 9})


def _edit_json(name: str, more: dict[str, Any]) -> Damage:
    def damage(run: Path) -> None:
        table = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**table, **more}))

    return damage


def _checkpoints() -> Iterator[tuple[str, Damage]]:
    name = f"{TRIAL}/checkpoint.safetensors"
    yield f"{name}: cut", lambda run: (run / name).write_bytes((run / name).read_bytes()[:-5])
    yield f"{name}: longer", lambda run: (run / name).write_bytes((run / name).read_bytes() + b"x")
    yield f"{name}: a bit", lambda run: _flip(run / name)
    heads: list[Any] = [
        None, "", "[]", "{", "3", DEEP, '{"format": "other"}', '{"format": "safari-run-1"}',
        {"round": -1}, {"round": 10**400}, {"round": "x"}, {"round": None}, {"round": 3}, {"round": 99},
        {"facts": 3}, {"facts": {}}, {"facts": {"config": []}}, {"facts": {"config": {"rule": 3}}},
        {"facts": {"layout": "x"}}, {"seed": 9}, {"seed": "x"}, {"digest": 3}, {"digest": "x"},
    ]  # fmt: skip
    for number, head in enumerate(heads):
        yield f"{name}: head {number}", lambda run, head=head: _rewrite(run / name, head=head)
        if isinstance(head, dict):
            whole = {**head, "digest": None} if "digest" not in head else head
            yield f"{name}: undigested head {number}", lambda run, head=whole: _rewrite(run / name, head=head)
    tensors = [
        {"model": None}, {"model": torch.zeros(3)}, {"model": torch.zeros(2, 2)}, {"model": torch.zeros(0)},
        {"model": torch.zeros(5, dtype=torch.bfloat16)}, {"model": torch.full((658,), torch.nan)},
        {"rule.similarity": None}, {"rule.similarity": torch.zeros(3, 3)},
        {"rule.similarity": torch.zeros(())},
        {"rule.similarity": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)},
        {"rule.similarity": torch.zeros(4, 4, dtype=torch.bool)}, {"rule.met": torch.zeros(4, 4)},
        {"uplink.up": None}, {"uplink.up": torch.zeros(3)}, {"extra": torch.zeros(2)},
    ]  # fmt: skip
    for number, more in enumerate(tensors):
        yield f"{name}: tensors {number}", lambda run, more=more: _rewrite(run / name, more, {"digest": None})


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _rewrite(path: Path, more: dict[str, Any] | None = None, head: Any = None) -> None:
    with safe_open(path, "pt") as handle:
        before = json.loads(handle.metadata()["safari"])
    if isinstance(head, dict):
        table = {
            key: value for key, value in {**before, **head}.items() if key != "digest" or value is not None
        }
        text: str | None = json.dumps(table)
    else:
        text = head
    tensors = {name: t for name, t in (load_file(path) | (more or {})).items() if t is not None}
    save_file(tensors, path, None if text is None else {"safari": text})


def _places() -> Iterator[tuple[str, Damage]]:
    yield "no trials", lambda run: shutil.rmtree(run / "trials")
    yield "trials are a file", lambda run: _file(run / "trials")
    yield "an arm is a file", lambda run: _file(run / "trials/safari")
    yield "a trial is a file", lambda run: _file(run / TRIAL)
    yield "an empty trial", lambda run: _file(run / TRIAL) or _folder(run / TRIAL)
    yield "a lock that is a folder", lambda run: _folder(run / ".lock")
    yield "figures are a file", lambda run: (run / "figures").write_bytes(b"") and None
    yield "the report is a folder", lambda run: _folder(run / "report.html")
    yield "many odd names", lambda run: _odd_names(run)
    yield "an older checkpoint is garbage", _write(f"{TRIAL}/checkpoint-000003.safetensors", b"x")
    yield (
        "an older checkpoint is a folder",
        lambda run: _folder(run / TRIAL / "checkpoint-000003.safetensors"),
    )
    yield "a checkpoint of the far future", _write(f"{TRIAL}/checkpoint-999999999999.safetensors", b"x")


def _file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


def _odd_names(run: Path) -> None:
    for name in ("seed-1", "seed--1", "seed-00", "seed-x", "seed-99999999999999999999", "\x1b[31m", "seed-٣"):
        (run / "trials/safari" / name).mkdir()
