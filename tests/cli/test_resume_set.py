"""`safari resume RUN --set`: a longer run, more seeds; never another one."""

from __future__ import annotations

import pytest

import safari
from safari.cli import main

SMALL = {"rounds": 3, "clients": 5, "arms": ["drop", "safari"], "model": {"name": "mlp"}}


@pytest.fixture
def run(tmp_path):
    safari.run(SMALL, tmp_path / "run", progress=False, report=False)
    return tmp_path / "run"


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["safari", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


def test_a_run_becomes_longer_bit_for_bit(run, tmp_path, monkeypatch):
    assert command(monkeypatch, "resume", run, "--set", "rounds=5", "--set", "seeds=2", "--quiet") == 0
    safari.run({**SMALL, "rounds": 5, "seeds": 2}, tmp_path / "whole", progress=False, report=False)
    for seed in (0, 1):
        place = f"trials/safari/seed-{seed}/checkpoint.safetensors"
        assert (run / place).read_bytes() == (tmp_path / "whole" / place).read_bytes()


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("pruning.sparsity=0.5", "pruning.sparsity"),
        ("rounds=2", "rounds"),
        ("arms=drop", "arms"),
        ("ronuds=4", "ronuds"),
    ],
)
def test_what_is_done_stays_as_it_is(run, monkeypatch, capsys, setting, field):
    before = (run / "config.toml").read_bytes()
    assert command(monkeypatch, "resume", run, "--set", setting) == 2
    assert field in capsys.readouterr().err
    assert (run / "config.toml").read_bytes() == before
