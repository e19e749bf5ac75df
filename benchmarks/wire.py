"""What a sparse model costs on the wire: bytes, packets and speed, beside other formats, in one run.

    python benchmarks/wire.py RECORDINGS        a folder of .npz files recorded from runs
    python benchmarks/wire.py                   stand-ins: ResNet-20 really trained on digits for some rounds
    python benchmarks/wire.py --fuzz 10000000   damaged frames and packets as well

A recording holds `reference` and `vector` (float32[d]), `mask` (bool[d]), `names`, `sizes`, `prunable`, and
perhaps `predicted` (bool[d], the mask that the server guesses; otherwise the largest magnitudes of the
reference, as many as the mask keeps) and `shapes` ("16x3x3x3"). Sizes do not depend on the machine; speeds
do, so that each is also given as a ratio to zlib level 1 on the same dense bytes in the same run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from safari.wire import (
    Bounds,
    Lossy,
    Shared,
    WireLayout,
    bounds,
    decode,
    decode_packet,
    encode,
    merge,
    packets,
    plain_costs,
)

LOSSY = ("bf16", "fp16", "int8", "qsgd", "step")
TARGETS = {
    "absolute / order-0 entropy": 1.02,
    "mask known / floor": 0.62,
    "own mask / floor": 0.65,
    "dense / step": 60.0,
    "packets / frame": 1.035,
}


@dataclass(frozen=True, eq=False)
class Recording:
    """One client's model as it would travel, and what the server holds."""

    name: str
    layout: WireLayout
    shapes: list[tuple[int, ...]]
    vector: np.ndarray
    mask: np.ndarray
    reference: np.ndarray
    predicted: np.ndarray

    @property
    def prunable(self):
        """Which numbers a mask may cut."""
        return np.repeat(np.array(self.layout.prunable, bool), self.layout.sizes)

    @property
    def dense(self):
        """The bytes of the dense vector."""
        return 4 * self.layout.d


def load(path: Path) -> Recording:
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    layout = WireLayout(arrays["names"].tolist(), arrays["sizes"], arrays["prunable"])
    mask = arrays["mask"]
    prunable = np.repeat(arrays["prunable"], arrays["sizes"])
    predicted = arrays.get("predicted")
    if predicted is None:
        predicted = ~prunable
        predicted[prunable] = largest(np.abs(arrays["reference"][prunable]), int(mask[prunable].sum()))
    shapes = [(size,) for size in layout.sizes]
    if "shapes" in arrays:
        shapes = [
            tuple(int(n) for n in text.split("x")) if text else () for text in arrays["shapes"].tolist()
        ]
    vector = np.where(mask, arrays["vector"], np.float32(0))
    return Recording(path.stem, layout, shapes, vector, mask, arrays["reference"], predicted)


def largest(scores, count):
    keep = np.zeros(scores.size, bool)
    keep[np.argsort(-scores, kind="stable")[:count]] = True
    return keep


def others(recording: Recording) -> dict[str, int | None]:
    """The same model in formats of others; None where one is not installed."""
    import scipy.sparse

    vector, mask = recording.vector, recording.mask
    dense = vector.tobytes()
    edges = np.concatenate([[0], np.cumsum(recording.layout.sizes)])
    tensors = {
        name: vector[a:b].reshape(shape)
        for name, a, b, shape in zip(recording.layout.names, edges, edges[1:], recording.shapes, strict=False)
    }
    csr = [scipy.sparse.csr_array(t.reshape(t.shape[0] if t.ndim else 1, -1)) for t in tensors.values()]
    npz = io.BytesIO()
    np.savez_compressed(npz, **tensors)
    out: dict[str, int | None] = {
        cost.name: cost.size for cost in plain_costs(vector, mask, recording.layout)
    }
    out["torch COO, saved"] = _torch_coo(tensors)
    out["scipy CSR"] = sum(m.data.nbytes + 4 * m.indices.size + 4 * m.indptr.size for m in csr)
    out["npz, compressed"] = npz.getbuffer().nbytes
    try:
        from safetensors.numpy import save

        out["safetensors"] = len(save(tensors))
    except ImportError:
        out["safetensors"] = None
    try:
        import zstandard

        out["zstd 19"] = len(zstandard.ZstdCompressor(level=19).compress(dense))
    except ImportError:
        out["zstd 19"] = None
    try:
        from pcodec import ChunkConfig, standalone

        kept = len(standalone.simple_compress(vector[mask], ChunkConfig()))
        out["bit mask + pcodec"] = (recording.layout.prunable_total + 7) // 8 + kept
    except ImportError:
        out["bit mask + pcodec"] = None
    return out


def _torch_coo(tensors) -> int | None:
    try:
        import torch
    except ImportError:
        return None
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(t.copy()).to_sparse() for name, t in tensors.items()}, file)
    return file.getbuffer().nbytes


def nncodec_size(recording: Recording, error: float) -> int | None:
    """The smallest NNCodec stream of the kept differences (mask known) with at most that relative error."""
    try:
        from nncodec import tensor
    except ImportError:
        return None
    target = (recording.vector - recording.reference)[recording.mask]
    # One-dimensional tensors are kept nearly exact whatever is asked: a matrix it must be.
    matrix = np.zeros((-(-target.size // 64), 64), np.float32)
    matrix.reshape(-1)[: target.size] = target
    for qp in range(-8, -80, -1):
        stream = tensor.encode(matrix, {"qp": qp})
        found = tensor.decode(stream)
        if np.linalg.norm(found - matrix) <= error * np.linalg.norm(target):
            return len(stream)
    return None


def best_time(call, repeat):
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(recording: Recording, repeat: int) -> dict:
    """Every mode of ours on one recording."""
    layout, vector, mask = recording.layout, recording.vector, recording.mask
    reference, predicted = recording.reference, recording.predicted
    dense = vector.tobytes()
    squeezed = zlib.compress(dense, 1)
    zlib_encode = best_time(lambda: zlib.compress(dense, 1), max(3, repeat // 4))
    zlib_decode = best_time(lambda: zlib.decompress(squeezed), repeat)
    cases = {
        "absolute, coded mask": ("absolute", "coded", {}),
        "difference, coded mask": ("difference", "coded", {"reference": reference}),
        "difference, known mask": ("difference", "known", {"reference": reference, "predicted_mask": mask}),
    }
    if (mask != predicted).any():
        flips = {"reference": reference, "predicted_mask": predicted}
        cases["difference, flips"] = ("difference", "flips", flips)
    for mode in LOSSY:
        cases[f"{mode}, known mask"] = (mode, "known", {"reference": reference, "predicted_mask": mask})
    rows = {}
    change = (vector - reference)[mask]
    for name, (values, mask_mode, knowledge) in cases.items():

        def make(values=values, mask_mode=mask_mode, knowledge=knowledge):
            lossy = Lossy(rng=np.random.default_rng(0))
            return encode(vector, mask, layout, values=values, mask_mode=mask_mode, lossy=lossy, **knowledge)

        frame = make()
        found = decode(frame, layout, **knowledge)
        shared = Shared(layout, **knowledge)
        lossy = Lossy(rng=np.random.default_rng(0))
        datagrams = packets(vector, mask, shared, values=values, mask_mode=mask_mode, lossy=lossy)
        whole = merge((decode_packet(data, shared) for data in datagrams), layout)
        if values in ("absolute", "difference"):
            for result in (found.vector, whole.vector):
                if not np.array_equal(result.view(np.uint32), vector.view(np.uint32)):
                    raise SystemExit(f"{recording.name}: {name} did not come back exactly")
        to_bytes = best_time(make, repeat)
        back = best_time(lambda frame=frame, knowledge=knowledge: decode(frame, layout, **knowledge), repeat)
        rows[name] = {
            "bytes": len(frame),
            "packets": len(datagrams),
            "packet_bytes": sum(map(len, datagrams)),
            "error": float(
                np.linalg.norm((found.vector - vector)[mask]) / max(np.linalg.norm(change), 1e-30)
            ),
            "encode_MB_s": len(dense) / to_bytes / 1e6,
            "decode_MB_s": len(dense) / back / 1e6,
            "encode_vs_zlib1": zlib_encode / to_bytes,
            "decode_vs_zlib1": zlib_decode / back,
        }
    return rows


def targets(recording: Recording, rows: dict, limits: Bounds) -> dict[str, float]:
    out = {
        "absolute / order-0 entropy": rows["absolute, coded mask"]["bytes"] / limits.order0,
        "mask known / floor": rows["difference, known mask"]["bytes"] / limits.floor,
        "dense / step": recording.dense / rows["step, known mask"]["bytes"],
        "packets / frame": max(r["packet_bytes"] / r["bytes"] for n, r in rows.items() if r["error"] == 0),
    }
    if "difference, flips" in rows:
        out["own mask / floor"] = rows["difference, flips"]["bytes"] / limits.floor
    return out


def show(recording: Recording, rivals: dict, rows: dict, limits: Bounds, reached: dict) -> None:
    cut = 1 - recording.mask[recording.prunable].mean()
    print(f"\n## {recording.name}: {recording.layout.d:,} numbers, {cut:.1%} cut\n")
    print("| format | bytes | of the floor |\n|---|---|---|")
    for name, size in {**rivals, "floor: mask entropy + float32": limits.floor}.items():
        print(
            f"| {name} | "
            + ("not installed | |" if size is None else f"{size:,.0f} | {size / limits.floor:.3f} |")
        )
    for name, row in rows.items():
        exact = "exact" if row["error"] == 0 else f"error {row['error']:.3f}"
        print(f"| **{name}** ({exact}) | {row['bytes']:,} | {row['bytes'] / limits.floor:.3f} |")
    print("\n| mode | packets | over the frame | encode, MB/s | decode, MB/s | to zlib 1 | from zlib 1 |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        more = row["packet_bytes"] / row["bytes"] - 1
        print(
            f"| {name} | {row['packets']} | +{more:.2%} "
            f"| {row['encode_MB_s']:.0f} | {row['decode_MB_s']:.0f} "
            f"| {row['encode_vs_zlib1']:.1f}x | {row['decode_vs_zlib1']:.2f}x |"
        )
    print()
    for name, value in reached.items():
        wanted = TARGETS[name]
        good = value >= wanted if name == "dense / step" else value <= wanted
        print(f"{'met   ' if good else 'MISSED'} {name}: {value:.4f} (target {wanted})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", nargs="?", type=Path, help="folder of .npz recordings, or one file")
    parser.add_argument("--repeat", type=int, default=30, help="timings take the best of so many")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of training behind a stand-in")
    parser.add_argument("--fuzz", type=int, default=0, help="damaged frames and packets to decode as well")
    parser.add_argument("--json", type=Path, help="where to write everything as JSON")
    arguments = parser.parse_args()
    if arguments.recordings is None:
        from wire_standins import make

        source = Path(tempfile.mkdtemp(prefix="wire-"))
        make(source, arguments.rounds)
        print(f"stand-ins are in {source}")
    else:
        source = arguments.recordings
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
    }
    print(json.dumps(machine | {"machine": platform.machine(), "cpus": os.cpu_count()}))
    everything = {"machine": machine, "recordings": {}}
    for path in [source] if source.is_file() else sorted(source.glob("*.npz")):
        recording = load(path)
        limits = bounds(recording.vector, recording.mask, recording.layout)
        rows, rivals = measure(recording, arguments.repeat), others(recording)
        rivals["NNCodec at the error of step, known mask"] = nncodec_size(
            recording, rows["step, known mask"]["error"]
        )
        reached = targets(recording, rows, limits)
        show(recording, rivals, rows, limits, reached)
        everything["recordings"][recording.name] = {
            "bounds": vars(limits),
            "others": rivals,
            "ours": rows,
            "targets": reached,
        }
    if arguments.fuzz:
        command = [sys.executable, "-m", "wire.fuzzing", "--cases", str(arguments.fuzz)]
        subprocess.run(command, cwd=Path(__file__).parents[1] / "tests", check=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
