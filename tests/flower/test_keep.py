"""`safari flower keep` with real processes: a federation's bad day, in which nobody types anything."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import sys
import time

from click.testing import CliRunner

from flower.deploy import Federation, bad_day, seconds_to_import
from safari.cli import cli
from safari.errors import SafariError
from safari.keep import MOST_STARTS, Keeper


@pytest.mark.slow
def test_outages_and_kills_need_nobody(tmp_path):
    """Outages of seconds; benchmarks/flower_soak.py --outage has longer ones."""
    rounds, deadline = 40, max(15.0, round(5 * seconds_to_import(3)))
    with Federation(tmp_path, 3) as federation, federation.explained():
        lines = bad_day(federation, tmp_path / "run", rounds, outage=5.0, deadline=deadline)
    assert [line["round"] for line in lines] == [*range(1, rounds + 1)]
    assert [line["round"] for line in lines if not line["arrived"]] == []
    assert sum(line["resumed"] for line in lines) >= 2


def test_a_superlink_that_ends_at_once_is_started_a_few_times_and_the_reason_is_told(tmp_path, monkeypatch):
    """Without a SuperLink that stays, nothing can be submitted: it gives up, and says what it saw, with the time."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.here]\naddress = "127.0.0.1:9"\ninsecure = true\n')
    lines: list[str] = []
    command = (sys.executable, "-c", "import sys; sys.exit(3)")
    keeper = Keeper(tmp_path, "here", tmp_path / "run", (), command, lines.append, pause=0.001)
    begin = time.monotonic()
    with pytest.raises(SafariError, match="the SuperLink has ended with exit code 3") as error:
        keeper.keep()
    assert str(error.value).startswith(f"{MOST_STARTS} starts in a row brought no new round")
    assert time.monotonic() - begin < 300
    assert len([line for line in lines if "starting the SuperLink" in line]) == MOST_STARTS
    assert all(line[:4].isdigit() and line[19] == "Z" for line in lines)


def test_the_command_names_what_it_needs(tmp_path):
    found = CliRunner().invoke(cli, ["flower", "keep", str(tmp_path), "here"])
    assert found.exit_code == 2
    assert "--run" in found.output
