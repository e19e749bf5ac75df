"""A trained model as a module and as files: what comes out is as good as the record says."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest
import torch
from torch import nn

import safari
from safari.cli import main
from safari.errors import RunError
from safari.exports import export
from safari.models import cnn
from safari.report.trained import TrainedModel


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    config = {
        "rounds": 6,
        "arms": ["drop", "safari"],
        "evaluation": {"every": 1, "last": 1},
        "aggregation": {"average": 0.5},
        "checkpoint": {"best": True},
    }
    safari.run(config, folder, progress=False, report=False)
    return folder


@pytest.fixture(scope="module")
def raw():
    """The test set as it is on disk, scaled to 0..1 and no further, and its labels."""
    with files("safari.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file)
        test = np.arange(len(stored["labels"])) % 5 == 0
        pixels = stored["images"][test, None].astype(np.float32) / 16
        return torch.from_numpy(pixels), torch.from_numpy(stored["labels"][test].astype(np.int64))


def accuracy(outputs, labels):
    return float((outputs.argmax(1) == labels).double().mean())


def recorded(run, arm, field=None):
    lines = (run / f"trials/{arm}/seed-0/rounds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record if field is None else record[field])["top1"] for record in records]


def test_the_module_takes_raw_pixels_and_is_as_accurate_as_the_record(run, raw):
    pixels, labels = raw
    loaded = safari.load(run)
    for arm in ("drop", "safari"):
        module = loaded.module(arm)
        assert module.classes == tuple("0123456789")
        with torch.no_grad():
            assert accuracy(module(pixels), labels) == recorded(run, arm)[-1]
            assert (
                accuracy(loaded.module(arm, average=True)(pixels), labels)
                == recorded(run, arm, "average")[-1]
            )
            assert accuracy(loaded.module(arm, best=True)(pixels), labels) == max(recorded(run, arm))


def test_exported_files_give_what_the_record_says(run, raw, tmp_path):
    pixels, labels = raw
    picked = safari.load(run).pick("safari")
    score = recorded(run, "safari")[-1]

    traced = torch.jit.load(export(picked, tmp_path / "script", "torchscript"))
    assert accuracy(traced(pixels), labels) == score

    onnxruntime = pytest.importorskip("onnxruntime")
    file = export(picked, tmp_path / "onnx", "onnx")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"inputs": pixels.numpy()})
    assert accuracy(torch.from_numpy(outputs), labels) == score

    file = export(picked, tmp_path / "tensors", "safetensors")
    from safetensors import safe_open
    from safetensors.torch import load_model

    with safe_open(file, "pt") as opened:
        facts = json.loads(opened.metadata()["config"])["data"]
    fresh = TrainedModel(cnn((1, 8, 8), 10), facts).eval()
    load_model(fresh, file)
    with torch.no_grad():
        assert accuracy(fresh(pixels), labels) == score


def test_the_card_says_what_it_is_and_what_zeros_save(run, tmp_path):
    picked = safari.load(run).pick("safari")
    export(picked, tmp_path, "safetensors")
    card = (tmp_path / "README.md").read_text()
    kept = int((picked.vector[picked.layout.prunable] != 0).sum())
    assert f"{100 * recorded(run, 'safari')[-1]:.2f} %" in card
    assert f"{kept:,} are left" in card
    assert f"{4 * picked.layout.size:,} bytes dense" in card
    assert "pixels from 0 to 1" in card


def test_an_export_is_not_overwritten_unasked(run, tmp_path):
    picked = safari.load(run).pick("safari")
    export(picked, tmp_path, "safetensors")
    with pytest.raises(RunError, match="--overwrite"):
        export(picked, tmp_path, "safetensors")
    export(picked, tmp_path, "safetensors", overwrite=True)


def test_numbers_come_back_in_their_own_units():
    facts = {
        "input_shape": [2],
        "inputs": {"mean": [1.0, 2.0], "scale": [1.0, 4.0]},
        "labels": {"mean": [100.0], "scale": [10.0]},
    }
    module = TrainedModel(nn.Linear(2, 1, bias=False), facts)
    nn.init.ones_(module.net.weight)
    # (3 - 1) / 1 + (6 - 2) / 4 = 3, and 100 + 10 · 3.
    assert module(torch.tensor([[3.0, 6.0]])).tolist() == [[130.0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_shape", [10**5, 10**5]),
        ("input_shape", [-1]),
        ("classes", 10**9),
        ("tokens", "many"),
        ("label_kind", None),
        ("inputs", {"mean": [0.5]}),
        ("labels", "none"),
        ("class_names", 7),
    ],
)
def test_a_crafted_description_builds_no_giant(run, tmp_path, field, value):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    facts = json.loads((copy / "data.json").read_text()) | {field: value}
    (copy / "data.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=rf"data\.json: {field}"):
        safari.load(copy).module("drop")


def test_code_of_ones_own_is_given_not_run(run, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace('name = "cnn"', 'name = "mine.py:net"'))
    with pytest.raises(RunError, match="net="):
        safari.load(copy).module("drop")
    assert safari.load(copy).module("drop", net=cnn((1, 8, 8), 10)).classes
    with pytest.raises(RunError, match="must have 38282 numbers"):
        safari.load(copy).module("drop", net=nn.Linear(3, 2))


def test_the_command(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["safari", "export", str(run), "--arm", "drop", "--out", str(tmp_path / "x")]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert (tmp_path / "x/model.safetensors").exists()
    monkeypatch.setattr("sys.argv", ["safari", "export", str(run), "--arm", "dorp"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "did you mean 'drop'" in capsys.readouterr().err
