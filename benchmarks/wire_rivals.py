"""The same model in formats of others, for benchmarks/wire.py; None where one is not installed."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np

from safari.wire import plain_costs

PACKAGES = ("torch", "scipy", "safetensors", "zstandard", "pcodec", "nncodec")


def versions() -> dict[str, str]:
    """Which of them are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def others(recording) -> dict[str, int | None]:
    """Bytes of one recording in each format."""
    vector, mask, layout = recording.vector, recording.mask, recording.layout
    edges = np.concatenate([[0], np.cumsum(layout.sizes)])
    tensors = {
        name: vector[a:b].reshape(shape)
        for name, a, b, shape in zip(layout.names, edges, edges[1:], recording.shapes, strict=False)
    }
    npz = io.BytesIO()
    np.savez_compressed(npz, **tensors)
    return {cost.name: cost.size for cost in plain_costs(vector, mask, layout)} | {
        "npz, compressed": npz.getbuffer().nbytes,
        "torch COO, saved": _if_installed(lambda: _torch_coo(tensors)),
        "scipy CSR": _if_installed(lambda: _scipy_csr(tensors)),
        "safetensors": _if_installed(lambda: _safetensors(tensors)),
        "zstd 19 of dense": _if_installed(lambda: _zstd(vector)),
        "bit mask + pcodec": _if_installed(
            lambda: (layout.prunable_total + 7) // 8 + _pcodec(vector[mask]),
        ),
    }


def _if_installed(size: Callable[[], int | None]) -> int | None:
    try:
        return size()
    except ImportError:
        return None


def _torch_coo(tensors) -> int:
    import torch

    file = io.BytesIO()
    torch.save({name: torch.from_numpy(t.copy()).to_sparse() for name, t in tensors.items()}, file)
    return file.getbuffer().nbytes


def _scipy_csr(tensors) -> int:
    from scipy.sparse import csr_array

    rows = [csr_array(t.reshape(t.shape[0] if t.ndim else 1, -1)) for t in tensors.values()]
    return sum(m.data.nbytes + 4 * m.indices.size + 4 * m.indptr.size for m in rows)


def _safetensors(tensors) -> int:
    from safetensors.numpy import save

    return len(save(tensors))


def _zstd(vector) -> int:
    import zstandard

    return len(zstandard.ZstdCompressor(level=19).compress(vector.tobytes()))


def _pcodec(numbers) -> int:
    from pcodec import ChunkConfig, standalone

    return len(standalone.simple_compress(numbers, ChunkConfig()))


def nncodec_size(recording, error: float) -> int | None:
    """The smallest NNCodec stream of the kept differences (mask known) with at most that error of weights."""
    return _if_installed(lambda: _nncodec(recording, error))


def _nncodec(recording, error: float) -> int | None:
    from nncodec import tensor

    target = (recording.vector - recording.reference)[recording.mask]
    # One-dimensional tensors are kept nearly exact whatever is asked: a matrix it must be.
    matrix = np.zeros((-(-target.size // 64), 64), np.float32)
    matrix.reshape(-1)[: target.size] = target
    weights = recording.prunable[recording.mask]
    before = Path.cwd()
    # It leaves files where it runs.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for qp in range(-8, -80, -1):
                with contextlib.redirect_stdout(io.StringIO()):
                    stream = tensor.encode(matrix, {"qp": qp})
                    found = tensor.decode(stream)
                missing = found.reshape(-1)[: target.size] - target
                if np.linalg.norm(missing[weights]) <= error * np.linalg.norm(target[weights]):
                    return len(stream)
        finally:
            os.chdir(before)
    return None
