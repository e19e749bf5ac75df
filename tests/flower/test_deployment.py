"""A real federation on loopback: SuperLink, gate, three SuperNodes, TLS, node keys; and a bad day."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

from functools import partial
from pathlib import Path

from flower.deploy import Federation, seconds_to_import
from processes import wait_until
from safari.runs import RunFolder, read_checkpoint, read_lines

NODES = 3


class Story:
    """The records as they grow."""

    def __init__(self, run: Path, patience: float):
        self.rounds, self.patience = run / "trials/safari/seed-0/rounds.jsonl", patience

    @property
    def lines(self) -> list[dict]:
        return list(read_lines(self.rounds))

    def wait_for(self, what: str, when, federation: Federation) -> dict:
        """The first record that `when` accepts; SuperNodes that end meanwhile are started again."""

        def look() -> dict | None:
            federation.look_after_nodes()
            return next((line for line in self.lines if when(line)), None)

        return wait_until(what, look, self.patience)


def test_training_goes_on_through_kills_delays_and_a_restart(tmp_path):
    run, everybody = tmp_path / "run", list(range(NODES))
    # Each message starts a process that imports torch, three of them at once; how long that takes depends on
    # what else the machine does. A round in which a client is missing lasts as long as its deadline.
    deadline = max(15.0, round(5 * seconds_to_import(NODES)))
    # After the restart SuperNodes first work off what the dead run had asked for. They are behind then, by up
    # to a deadline, and catch up in each round by no more than what is left of it when they are done.
    story = Story(run, patience=12 * deadline)
    with Federation(tmp_path, NODES) as federation, federation.explained():
        wait_for = partial(story.wait_for, federation=federation)
        federation.start_gate()
        federation.start_superlink()
        federation.register()
        for i in everybody:
            federation.start_node(i)
        settings = {
            "run": str(run), "clients": NODES, "num_server_rounds": 1000, "deadline": deadline,
            "success": 1.0, "model": "mlp",
        }  # fmt: skip
        dead = federation.submit(**settings)
        calm = wait_for("all three arrive", lambda line: line["arrived"] == everybody)
        nodes = calm["nodes"]

        # One dies and one is late, in the middle of a round.
        federation.kill("node-2")
        federation.pause("node-1")
        bad = wait_for("a round without them", lambda line: line["arrived"] == [0])
        assert bad["missing"] == [1, 2]
        # The SuperLink notices after two missed heartbeats; the round may end before that.
        silence = (f"no reply within {deadline:g} s", "error 5: Error: Node Unavailable")
        assert list(bad["reasons"]) == ["1", "2"]
        assert all(reason.startswith(silence) for reason in bad["reasons"].values())
        assert bad["stand_ins"] == {"1": [0], "2": [0]}

        # Then the whole server side dies, again in the middle of a round: SuperLink, SuperExec, ServerApp.
        federation.wake("node-1")
        federation.kill("superlink")
        before = story.lines
        saved = read_checkpoint(RunFolder.open(run).trials()[0].checkpoint)
        # A record comes just before its checkpoint: the kill may have come between the two.
        assert bad["round"] - 1 <= saved.round <= len(before)

        # All come back, as what they were.
        federation.start_superlink()
        federation.stop(dead)
        federation.sign_off(2, int(nodes["2"]))
        federation.start_node(2)
        federation.submit(**settings)
        on = wait_for("a round after the restart", lambda line: line["resumed"])
        again = wait_for(
            "all three again", lambda line: line["round"] >= on["round"] and line["arrived"] == everybody
        )
        assert again["nodes"] == nodes

    # Nothing was lost but the round in flight, and the records say what happened.
    lines = story.lines
    assert lines[: saved.round] == before[: saved.round]
    assert on["round"] == saved.round + 1
    assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["round"] for line in lines if line["resumed"]] == [on["round"]]
    assert lines[-1]["top1"] is not None
