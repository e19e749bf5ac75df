from __future__ import annotations

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

import safari
from safari.cli import cli
from safari.cli.wire import LARGEST
from safari.errors import SafariError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wire") / "run"
    safari.run({"rounds": 3, "clients": 5, "arms": ["drop"], "model": {"name": "mlp"}}, folder)
    return folder


def invoke(*words):
    return CliRunner().invoke(cli, ["wire", *map(str, words)], catch_exceptions=False)


def test_bench_prints_every_mode_and_writes_what_it_measured(run, tmp_path):
    frame, record = tmp_path / "upload.frame", tmp_path / "upload.npz"
    table = json.loads(invoke("bench", run, "--json", "--save", frame, "--record", record).stdout)
    sizes = {row["name"]: row["size"] for row in table["costs"]}
    # 64·64 + 64 + 64·10 + 10 numbers of four bytes.
    assert sizes["dense float32"] == 4 * 4810
    exact = {name: size for name, size in sizes.items() if name.startswith(("absolute", "difference"))}
    assert frame.stat().st_size == min(exact.values()) < sizes["bit mask + float32"]
    with np.load(record, allow_pickle=False) as kept:
        assert kept["vector"].shape == kept["mask"].shape == kept["reference"].shape == (4810,)
        assert kept["shapes"].tolist() == ["64x64", "64", "10x64", "10"]
    text = invoke("bench", run).stdout
    assert all(name in text for name in sizes)
    more = [line.split()[-1] for line in text.splitlines()[1:] if line.endswith("%")]
    costs = [row["packet_bytes"] / row["size"] - 1 for row in table["costs"] if row["packet_bytes"]]
    assert more == [f"{'+' if cost >= 0 else '-'}{abs(cost):.1%}" for cost in costs]


def test_inspect_explains_a_frame(run, tmp_path):
    frame = tmp_path / "upload.frame"
    invoke("bench", run, "--save", frame)
    found = json.loads(invoke("inspect", frame, "--run", run, "--json").stdout)
    assert found["size"] == frame.stat().st_size == sum(found["parts"].values())
    kept = {entry["name"]: entry["kept"] for entry in found["density"]}
    assert kept["1.weight"] + kept["3.weight"] == round(0.2 * (64 * 64 + 640))
    assert found["over_bound"] < 1.2
    text = invoke("inspect", frame, "--run", run).stdout
    assert "below dense float32" in text
    assert "1.weight" in text
    # Without the run there is a head and a body.
    assert invoke("inspect", frame).stdout.startswith(f"frame of {found['size']:,} bytes; values difference")
    brief = json.loads(invoke("inspect", frame, "--json").stdout)
    assert set(brief) == set(found)
    assert [brief[name] for name in ("kept", "span", "density", "over_bound")] == [None] * 4


def test_inspect_explains_the_upload_of_any_arm_and_client(tmp_path):
    folder, frame = tmp_path / "run", tmp_path / "upload.frame"
    half = {"name": "half", "rule": "drop", "set": {"pruning": {"sparsity": 0.5}}}
    safari.run({"rounds": 1, "clients": 5, "arms": [half, "drop"], "model": {"name": "mlp"}}, folder)
    whose = ("--arm", "half", "--client", 3)
    invoke("bench", folder, *whose, "--save", frame)
    found = json.loads(invoke("inspect", frame, "--run", folder, *whose, "--json").stdout)
    assert {entry["name"]: entry["kept"] for entry in found["density"]}["1.weight"] > 0.4 * 64 * 64
    other = (
        r"upload\.frame is not the next upload of (the last arm|arm drop) of .*run \(see --arm\): predicted"
    )
    for wrong in ([], ["--arm", "drop"]):
        with pytest.raises(SafariError, match=other):
            invoke("inspect", frame, "--run", folder, *wrong)
    with pytest.raises(SafariError, match="arm must be one of drop, half; got 'hafl'"):
        invoke("inspect", frame, "--run", folder, "--arm", "hafl")
    with pytest.raises(SafariError, match="client must be between 0 and 4, got 5"):
        invoke("inspect", frame, "--run", folder, "--client", 5)
    assert "--arm and --client need --run" in invoke("inspect", frame, *whose).output


def test_what_is_no_frame_gets_a_clear_error(run, tmp_path):
    bad = tmp_path / "bad"
    bad.write_bytes(b"not a frame at all")
    with pytest.raises(SafariError, match=r"^this is no frame and no packet: it begins with b'not a fr'; "):
        invoke("inspect", bad)
    with pytest.raises(SafariError, match=r"cannot read .*: No such file or directory"):
        invoke("inspect", tmp_path / "missing")
    with pytest.raises(SafariError, match="is not a run's folder"):
        invoke("bench", tmp_path)


def test_inspect_reads_plain_files_of_a_bounded_size(run, tmp_path):
    frame, link, large, pipe = (tmp_path / name for name in ("frame", "link", "large", "pipe"))
    invoke("bench", run, "--save", frame)
    link.symlink_to(frame)
    assert invoke("inspect", link).stdout == invoke("inspect", frame).stdout
    with large.open("wb") as handle:
        handle.truncate(LARGEST + 1)
    with pytest.raises(
        SafariError, match=r"large is larger than the 1,073,741,824 bytes that such a file may"
    ):
        invoke("inspect", large)
    os.mkfifo(pipe)
    with pytest.raises(SafariError, match="pipe is a FIFO; only plain files"):
        invoke("inspect", pipe)
    with pytest.raises(SafariError, match="null is a device; only plain files"):
        invoke("inspect", "/dev/null")
    with pytest.raises(SafariError, match=r"cannot read .*gone: No such file"):
        invoke("inspect", tmp_path / "gone")
