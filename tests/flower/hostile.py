"""Replies that nobody should send: the attack suite's and the soak's."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower.kit import Net, Raw, objects
from safari.flower.arrays import CHAIN_TYPE, FRAME_TYPE, frame_of
from safari.flower.protocol import PROTOCOL

# Given the message that is answered and an honest reply to it in a frame: what is sent instead.
Attack = Callable[[Message, Message], Message | Raw]

NPY = "numpy.ndarray"
SHAPES = {name: tuple(tensor.shape) for name, tensor in Net().state_dict().items()}


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npy_with(text: str, rest: bytes = bytes(192)) -> bytes:
    head = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + rest


def described(descr: str = "'<f4'", fortran: str = "False", shape: str = "(8, 6)") -> bytes:
    return npy_with(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n")


def archive(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, buffer)
    return buffer.getvalue()


def state(seed: int = 1) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return dict(Net().state_dict())


def content_of(metrics: dict | None = None, **tensors: torch.Tensor) -> dict:
    """A plausible dense reply; `tensors` replaces some of its arrays, `_` for the dots in their names."""
    arrays = state() | {name.replace("_", ".", 1): tensor for name, tensor in tensors.items()}
    return {
        "arrays": ArrayRecord(arrays),
        "metrics": MetricRecord({"num-examples": 17, "train_loss": 1.0} if metrics is None else metrics),
    }


def says(content: dict) -> Attack:
    return lambda message, honest: Message(RecordDict(content), reply_to=message)


def with_bytes(data: bytes, name: str = "one.weight", stype: str = NPY) -> Attack:
    """A dense reply in which one array's bytes are these."""
    content = content_of()
    content["arrays"][name] = Array("float32", SHAPES[name], stype, data)
    return says(content)


def with_metrics(**metrics) -> Attack:
    names = {name.replace("_examples", "-examples"): value for name, value in metrics.items()}
    return says(content_of({"num-examples": 17, "train_loss": 1.0} | names))


def with_frame(change: Callable[[bytes], bytes]) -> Attack:
    """The honest frame, changed."""

    def attack(message: Message, honest: Message) -> Message:
        frame = change(frame_of(honest.content["arrays"]))
        content = dict(honest.content) | {"arrays": framed(frame)}
        return Message(RecordDict(content), reply_to=message)

    return attack


def framed(frame: bytes, stype: str = FRAME_TYPE) -> ArrayRecord:
    return ArrayRecord({"frame": Array("uint8", (len(frame),), stype, frame)})


def restated(frame: bytes, at: int) -> bytes:
    """A frame with another byte in the identity that it states, and the right checksum."""
    head = 18 + 8 * bool(frame[4] & 64) + 8 * (frame[4] >> 4 & 3 != 2) + at
    changed = frame[:head] + bytes([frame[head] ^ 1]) + frame[head + 1 :]
    return changed[:14] + zlib.crc32(changed[:14] + changed[18:]).to_bytes(4, "little") + changed[18:]


def flipped(seed: int) -> Callable[[bytes], bytes]:
    def change(frame: bytes) -> bytes:
        rng, data = random.Random(seed), bytearray(frame)
        for _ in range(1 + seed % 4):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)

    return change


def named(client: object, protocol: object = PROTOCOL) -> Attack:
    """An honest frame under another name."""

    def attack(message: Message, honest: Message) -> Message:
        info = {
            name: value for name, value in (("client", client), ("protocol", protocol)) if value is not None
        }
        content = dict(honest.content) | {"safari": ConfigRecord(info)}
        return Message(RecordDict(content), reply_to=message)

    return attack


def error(code: int, reason: str) -> Attack:
    return lambda message, honest: Message(Error(code, reason), reply_to=message)


def tampered(what: bytes, change: Callable[[bytes], bytes]) -> Attack:
    """The honest reply's objects, of which the first that contains `what` is changed."""

    def attack(message: Message, honest: Message) -> Raw:
        parts = objects(honest)
        name = next(i for i, data in parts.items() if what in data)
        return Raw(honest.object_id, parts | {name: change(parts[name])})

    return attack


def metadata(**fields: object) -> Attack:
    def attack(message: Message, honest: Message) -> Message:
        for name, value in fields.items():
            honest.metadata.__dict__[f"_{name}"] = value
        return honest

    return attack


def body_of(table: object) -> Callable[[bytes], bytes]:
    """An object with the same head and another JSON body."""
    text = table if isinstance(table, str) else json.dumps(table)

    def change(data: bytes) -> bytes:
        return data[: data.index(b"\0") + 1] + text.encode() if b"\0" in data else text.encode()

    return change


def attacks() -> dict[str, Attack]:
    """All of them, by name."""
    found: dict[str, Attack] = {}
    good = npy(np.zeros((8, 6), np.float32))
    found |= {
        f"npy: {name}": with_bytes(data)
        for name, data in {
            "nothing": b"",
            "zip": archive("a.npy", good),
            "zip with a bad checksum": archive("a.npy", good)[:-30] + bytes(30),
            "half a zip": archive("a.npy", good)[:40],
            "zip of a pickle": archive("a.npy", npy(np.array([{}], object))),
            "torch file": torch_file(),
            "gzip": zlib.compress(good),
            "pickle": pickle.dumps(np.zeros((8, 6))),
            "pickle bomb": b"\x80\x04" + b"(" * 4000 + b".",
            "text": b"1 2 3",
            "random": random.Random(0).randbytes(256),
            "magic alone": good[:6],
            "version 0": good[:6] + b"\0\0" + good[8:],
            "version 3": good[:6] + b"\3\0" + good[8:],
            "version 255": good[:6] + b"\xff\xff" + good[8:],
            "no length": good[:9],
            "half a header": good[:50],
            "length 0": good[:8] + b"\0\0" + good[10:],
            "length 65535": good[:8] + b"\xff\xff" + good[10:],
            "length 4 GB": good[:6] + b"\2\0\xff\xff\xff\xff" + good[10:],
            "padded header": npy_with(" " * 60000),
            "deep header": npy_with("(" * 60000),
            "deep brackets": npy_with("[" * 190 + "]" * 190),
            "deep signs": npy_with("-" * 60000 + "1"),
            "deep sums": npy_with("1+" * 30000 + "1"),
            "deep dicts": npy_with("{1:" * 90 + "1" + "}" * 90),
            "open text": npy_with("{'descr': '''"),
            "nul header": npy_with("\0" * 118),
            "code": npy_with("__import__('os').system('false')"),
            "huge number": npy_with(
                f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 5000},), }}"
            ),
            "negative shape": described(shape="(-8, -6)"),
            "minus one": described(shape="(-1,)"),
            "long shape": described(shape=f"({'1, ' * 5000})"),
            "product beyond 64 bits": described(shape=f"({2**40}, {2**40})"),
            "terabytes": described(shape="(1000000000000,)"),
            "shape of floats": described(shape="(8.0, 6.0)"),
            "shape of bools": described(shape="(True, True)"),
            "shape of texts": described(shape="('8', '6')"),
            "no shape": npy_with("{'descr': '<f4', 'fortran_order': False}"),
            "another shape": described(shape="(6, 8)"),
            "flat": described(shape="(48,)"),
            "scalar": described(shape="()"),
            "empty": described(shape="(0, 6)"),
            "objects": described("'|O'"),
            "an object array": npy(np.array([[{}] * 6] * 8, object)),
            "records": described("[('a', '<f4')]"),
            "nested records": described("[('a', [('b', '<f4')])]"),
            "text numbers": described("'<U1'"),
            "bytes": described("'|S4'"),
            "void": described("'|V4'"),
            "dates": described("'<M8[s]'"),
            "spans": described("'<m8[ns]'"),
            "complex": described("'<c8'"),
            "long doubles": described("'<f16'"),
            "bools": described("'|b1'"),
            "unknown type": described("'<q9'"),
            "type of commas": described("'f4,f4'"),
            "alignment": described("{'names': ['a'], 'formats': ['<f4'], 'offsets': [-4]}"),
            "truncated": good[:-1],
            "one byte more": good + b"\0",
            "NaN": npy(np.full((8, 6), np.nan, np.float32)),
            "infinity": npy(np.full((8, 6), np.inf, np.float32)),
            "beyond float32": npy(np.full((8, 6), 1e300)),
            "beyond float32, below 0": npy(np.full((8, 6), -1e300)),
        }.items()
    }
    found["npy: a bad buffer"] = with_bytes(archive("a", b""), "norm.running_mean")
    found["npy: a bad scalar"] = with_bytes(b"\x93NUMPY", "norm.num_batches_tracked")
    found["npy: a counter of text"] = with_bytes(pickle.dumps("x"), "norm.num_batches_tracked")
    for stype in ("", "torch.save", "safari.frame.9", "numpy.ndarray\0", "\x1b[2J"):
        found[f"stype {stype!r}"] = with_bytes(good, stype=stype)
    frames: dict[str, Callable[[bytes], bytes]] = {
        "nothing": lambda frame: b"",
        "magic alone": lambda frame: frame[:4],
        "random": lambda frame: random.Random(1).randbytes(len(frame)),
        "zeros": lambda frame: bytes(len(frame)),
        "ones": lambda frame: b"\xff" * len(frame),
        "one byte more": lambda frame: frame + b"\0",
        "twice": lambda frame: frame + frame,
        "backwards": lambda frame: frame[::-1],
        "an npy": lambda frame: npy(np.zeros(3)),
        "a megabyte": lambda frame: frame + bytes(1 << 20),
        "another client": lambda frame: restated(frame, 0),
        "another round": lambda frame: restated(frame, 8),
        "another model": lambda frame: restated(frame, 12),
    }
    frames |= {f"cut at {k}/8": lambda frame, k=k: frame[: len(frame) * k // 8] for k in range(1, 8)}
    frames |= {f"flipped {seed}": flipped(seed) for seed in range(24)}
    found |= {f"frame: {name}": with_frame(change) for name, change in frames.items()}
    found |= {
        "records: none": says({}),
        "records: metrics alone": says({"metrics": MetricRecord({"num-examples": 1})}),
        "records: no arrays in it": says({"arrays": ArrayRecord()}),
        "records: two of unknown names": says(
            {"a": ArrayRecord(state()), "b": ArrayRecord(state()), "metrics": MetricRecord()}
        ),
        "records: arrays that are a config": says({"arrays": ConfigRecord({"a": 1})}),
        "records: one array is missing": says(
            {"arrays": ArrayRecord({n: t for n, t in state().items() if n != "two.bias"})}
        ),
        "records: many more arrays": says(
            {"arrays": ArrayRecord(state() | {f"{i}": torch.zeros(1) for i in range(500)})}
        ),
        "records: other names": says({"arrays": ArrayRecord([np.zeros(3, np.float32)])}),
        "records: a chain": says({"arrays": framed(b"abc", CHAIN_TYPE)}),
        "records: two frames": says(
            {"arrays": ArrayRecord({n: Array("uint8", (3,), FRAME_TYPE, b"abc") for n in "ab"})}
        ),
        "records: a frame without a name": lambda message, honest: Message(
            RecordDict({"arrays": honest.content["arrays"]}), reply_to=message
        ),
    }
    numbers = [float("inf"), float("-inf"), float("nan"), 1.7e308, -1.7e308, 1e13, -(2**63), 2**63 - 1]
    found |= {f"train_loss {value}": with_metrics(train_loss=value) for value in numbers}
    counts = [*numbers, 0, -1, -33.000001, 1e-320, 10**9 + 1, [1, 2], []]
    found |= {f"num-examples {value}": with_metrics(num_examples=value) for value in counts}
    found |= {
        "metrics: a thousand names": says(content_of({f"m{i}": 1.0 for i in range(1000)})),
        "metrics: a long name": says(content_of({"m" * 100_000: 1.0})),
        "metrics: escape sequences": says(content_of({"\x1b[2J\x07": float("nan")})),
        "metrics: lists": says(content_of({"train_loss": [1.0] * 100, "num-examples": 4})),
        "metrics: a partition beyond all": says(content_of({"partition-id": 2**62})),
        "metrics: a partition below 0": says(content_of({"partition-id": -1})),
        "metrics: two records": says(content_of() | {"more": MetricRecord({"train_loss": float("nan")})}),
    }
    names = [
        "",
        "x" * 201,
        "x" * 200,
        "\x1b[31mred",
        "²",
        "٣",
        "9" * 199,
        "node-30",
        "0",
        "../../etc",
        3,
    ]
    found |= {f"name {str(name)[:12]!a} ({len(str(name))})": named(name) for name in names}
    found |= {
        "name: none": named(None),
        "protocol 0": named("1", 0),
        "protocol as text": named("1", "1"),
        "protocol: none": named("1", None),
    }
    reasons = {
        "empty": "",
        "spaces": " \n\t ",
        "long": "x" * 1_000_000,
        "lines": "\n" * 100_000,
        "escape sequences": "RuntimeError: \x1b]0;title\x07\x1b[2J\x1b[31m",
        "bidirectional": "RuntimeError: \u202egnp.exe",
        "carriage return": "no\rRuntimeError: yes\x08\x08",
    }
    found |= {f"error: {name}": error(2, reason) for name, reason in reasons.items()}
    found |= {
        f"error: code {code}": error(code, "no") for code in (0, -1, 5, 999, 1001, 1002, 1003, 2**31 - 1)
    }
    bodies = {
        "shape is text": {"dtype": "f4", "shape": "abc", "stype": NPY, "arraychunk_ids": [0]},
        "shape is none": {"dtype": "f4", "shape": None, "stype": NPY, "arraychunk_ids": [0]},
        "type is a list": {"dtype": [], "shape": [3], "stype": {}, "arraychunk_ids": [0]},
        "no such chunk": {"dtype": "f4", "shape": [3], "stype": NPY, "arraychunk_ids": [7]},
        "chunk before the first": {"dtype": "f4", "shape": [3], "stype": NPY, "arraychunk_ids": [-5]},
        "no chunks": {"dtype": "f4", "shape": [3], "stype": NPY},
        "not JSON": "{",
        "deep JSON": "[" * 100_000,
        "a list": [],
        "nothing": "",
    }
    found |= {f"object: {name}": tampered(b'"stype"', body_of(table)) for name, table in bodies.items()}
    found |= {
        "object: no head": tampered(b'"stype"', lambda data: b""),
        "object: half a head": tampered(b'"stype"', lambda data: data[:10]),
        "object: not text": tampered(b'"stype"', lambda data: b"\xff" * len(data)),
        "object: unknown kind": tampered(b'"stype"', lambda data: data.replace(b"Array ", b"Errey ", 1)),
        "object: metrics cut short": tampered(b"num-examples", lambda data: data[:-3]),
        "object: metrics of garbage": tampered(b"num-examples", lambda data: data[:-9] + b"\xff" * 9),
        "metadata: another message": metadata(reply_to_message_id="m0"),
        "metadata: no message": metadata(reply_to_message_id=""),
        "metadata: another node": metadata(src_node_id=30),
        "metadata: the server": metadata(src_node_id=1, dst_node_id=30),
        "metadata: another kind": metadata(message_type="evaluate"),
        "metadata: a strange run": metadata(run_id=2**62, group_id="\x1b[2J"),
    }
    return found


def giants() -> dict[str, Attack]:
    """Models of finite numbers that are too large for any training."""
    return {
        f"{value:g}": says(content_of(one_weight=torch.full((8, 6), value)))
        for value in (1e6, 1e19, -1e19, 1e30, 3e38, -3e38)
    } | {
        "all 3e38": says(
            content_of(
                **{
                    n.replace(".", "_", 1): torch.full_like(t, 3e38) if t.is_floating_point() else t
                    for n, t in state().items()
                }
            )
        ),
        "a large variance": says(content_of(norm_running_var=torch.full((8,), 3e38))),
        "a negative variance": says(content_of(norm_running_var=torch.full((8,), -1e6))),
    }
