"""A run's model as a file for other programs, with a model card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from safari.errors import MissingExtraError, RunError, one_of
from safari.report.trained import Picked
from safari.rounds.beside import wire_layout
from safari.runs.files import making, write_atomically
from safari.text import visible
from safari.version import __version__
from safari.wire import encode

Format = Literal["safetensors", "torchscript", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
_FILES = {"safetensors": "model.safetensors", "torchscript": "model.pt", "onnx": "model.onnx"}
# Letters of all classes' names on the card.
_LONGEST = 500


def export(picked: Picked, out: Path, form: str, *, overwrite: bool = False) -> Path:
    """Write a model and its card into a new folder; returns the model's file.

    Args:
        picked: which model, from `pick`.
        out: the folder.
        form: `safetensors`, `torchscript` or `onnx`.
        overwrite: replace files of an earlier export that the folder holds.
    """
    if form not in FORMATS:
        raise RunError(one_of("format", form, FORMATS))
    file = out / _FILES[form]
    if file.exists() and not overwrite:
        raise RunError(f"{file} is there already; --overwrite replaces it")
    example = _example(picked.facts)
    with making(out):
        if form == "safetensors":
            _write_safetensors(picked, file)
        elif form == "torchscript":
            with torch.no_grad():
                torch.jit.save(torch.jit.trace(picked.module, example), file)
        else:
            _write_onnx(picked, file, example)
        write_atomically(out / "README.md", card(picked, file).encode())
    return file


def _example(facts: Mapping[str, Any]) -> Tensor:
    shape = (2, *facts["input_shape"])
    return torch.zeros(shape, dtype=torch.int64) if facts["tokens"] else torch.rand(shape)


def _write_safetensors(picked: Picked, file: Path) -> None:
    from safetensors.torch import save_model

    config = {
        "model": picked.run.config.to_dict()["model"],
        "data": dict(picked.facts),
        "format": f"safari-fl {__version__}",
    }
    save_model(picked.module, str(file), {"config": json.dumps(config)})


def _write_onnx(picked: Picked, file: Path, example: Tensor) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnxscript", "onnx", "ONNX files") from error
    program = torch.onnx.export(
        picked.module,
        (example,),
        dynamo=True,
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    program.save(str(file))


def card(picked: Picked, file: Path) -> str:
    """The model card: what it is, how good, how large, how to use it."""
    config, trial, facts = picked.run.config, picked.trial, picked.facts
    metrics = picked.run.metrics
    found = (picked.record.average if picked.average else picked.record.metrics) if picked.record else None
    scores = {
        metrics[name].label: _told(metrics[name].percent, value) for name, value in (found or {}).items()
    }
    kept = int((picked.vector[picked.layout.prunable] != 0).sum())
    vector = picked.vector.numpy()
    kept_mask = (vector != 0) | ~picked.layout.prunable.numpy()
    frame = len(encode(vector, kept_mask, wire_layout(picked.layout)))
    cut = 1 - kept / max(1, picked.layout.prunable_count)
    lines = [
        f"# {visible(config.name)}, {trial.arm}",
        "",
        f"`{file.name}`: `{visible(config.model.name)}` trained on `{visible(config.data.name)}` by "
        f"{config.clients} clients, {picked.round} rounds, seed {trial.seed}, with safari-fl {__version__}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} on the test set | {value} |" for label, value in scores.items()),
        f"| inputs | {_inputs(facts)} |",
        f"| outputs | {_outputs(facts)} |",
        f"| numbers | {picked.layout.size:,}, of which {picked.layout.prunable_count:,} may be pruned |",
        f"| cut | {100 * cut:.1f} % of these: {kept:,} are left |",
        f"| size | {4 * picked.layout.size:,} bytes dense; {frame:,} as one sparse frame (`safari.wire.encode`) |",
        "",
        "Scaling of inputs is part of the model. Zeros save bytes where a file or a runtime uses them: this file "
        "is dense, and compresses well.",
    ]
    if config.evaluation.norms == "gathered":
        lines += [
            "",
            "The scores were measured with batch-norm statistics gathered for the test; the model has its own.",
        ]
    return "\n".join(lines) + "\n"


def _told(percent: bool, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "unknown"
    return f"{100 * value:.2f} %" if percent else f"{value:.4g}"


def _inputs(facts: Mapping[str, Any]) -> str:
    shape = "×".join(map(str, facts["input_shape"]))
    if facts["tokens"]:
        return f"int64, {shape} tokens of {facts['tokens']} kinds"
    pixels = ", pixels from 0 to 1" if len(facts["input_shape"]) == 3 and facts.get("inputs") else ""
    return f"float32, {shape}{pixels}"


def _outputs(facts: Mapping[str, Any]) -> str:
    if facts["label_kind"] == "numbers":
        return f"{facts['classes']} numbers"
    names = visible(", ".join(map(str, facts.get("class_names", ())[:20])), _LONGEST)
    return f"logits of {facts['classes']} classes" + (f": {names}" if names else "")
