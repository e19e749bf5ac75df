"""What a client keeps of its lossy uploads until it hears what arrived."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.clientapp import ClientApp

from flower.kit import Loopback, Net, net, train_a_bit
from safari.errors import SafariError
from safari.flower import SafariStrategy, sparse
from safari.flower.arrays import dense_record
from safari.flower.residual import MEMORY, NEVER, read_residual, write_residual
from safari.wire import WireLayout

OLD, NEW = np.array([1, 2], np.float32), np.array([3, 4], np.float32)


def test_the_last_round_that_was_heard_decides():
    state = RecordDict()
    assert read_residual(state, 2, 5).tolist() == [0, 0]
    write_residual(state, OLD, NEW, 5)
    assert read_residual(state, 2, 5).tolist() == [3, 4]
    assert read_residual(state, 2, 4).tolist() == [1, 2]
    assert read_residual(state, 2, NEVER).tolist() == [1, 2]


def test_what_does_not_fit_is_forgotten():
    state = RecordDict()
    write_residual(state, OLD, NEW, 0)
    assert read_residual(state, 3, 0).tolist() == [0, 0, 0]
    state[MEMORY] = ArrayRecord({"lost": Array(OLD)})
    assert read_residual(state, 2, 0).tolist() == [0, 0]
    write_residual(state, OLD.astype(np.float64), NEW.astype(np.float64), 0)
    assert read_residual(state, 2, 0).tolist() == [0, 0]


def test_the_residual_of_each_coordinate_depends_on_its_packet():
    # On the wire the weight comes first: its last number and the bias are in the second packet.
    wire, state = WireLayout(["bias", "weight"], [1, 3], [False, True]), RecordDict()
    old, new = np.arange(4, dtype=np.float32), np.arange(10, 14, dtype=np.float32)
    write_residual(state, old, new, 5, [(0, 2), (2, 2)])
    assert read_residual(state, 4, 5, b"\x80", wire).tolist() == [0, 11, 12, 3]
    assert read_residual(state, 4, 5, b"\x40", wire).tolist() == [10, 1, 2, 13]
    assert read_residual(state, 4, 5, b"", wire).tolist() == new.tolist()
    assert read_residual(state, 4, 4, b"\x80", wire).tolist() == old.tolist()
    with pytest.raises(
        SafariError, match="a bit for each of the 2 packets that this client sent in round 6, got 3"
    ):
        read_residual(state, 4, 5, b"abc", wire)


def play(rounds, wire):
    app = ClientApp()
    app.train()(sparse(Net)(train_a_bit))
    grid = Loopback({7: app, 8: app})
    strategy = SafariStrategy(net(), 2, "drop", config={"wire": wire})
    start = net()
    strategy.start(grid, dense_record(strategy.layout, strategy.layout.read(start)), num_rounds=rounds)
    return grid


def test_clients_with_error_feedback_learn_what_arrived():
    def heard(grid):
        return [m.content["config"]["safari.heard"] for m in grid.sent]

    grid = play(3, {"values": "step"})
    assert heard(grid) == [-1, -1, 0, 0, 1, 1]
    for state in grid.states.values():
        kept = state[MEMORY]
        assert kept["round"].numpy().tolist() == [2]
        assert not np.array_equal(kept["lost"].numpy(), kept["arrived"].numpy())
        # 8·6 + 8, a norm's 2·8 and 3·8 + 3 parameters; the norm's buffers have none.
        assert kept["lost"].numpy().shape == kept["arrived"].numpy().shape == (99,)
    for wire in ({"values": "step", "feedback": False}, {"values": "int8"}, {}):
        grid = play(2, wire)
        assert heard(grid) == [-1] * 4
        assert all(MEMORY not in state for state in grid.states.values())


@pytest.mark.parametrize("values", ["step", "int8", "qsgd"])
@pytest.mark.parametrize("feedback", [True, False])
def test_variances_that_fall_to_zero_go_no_further(values, feedback):
    seen = []

    def train(model, message, context):
        seen.append(float(model.norm.running_var.min()))
        metrics = train_a_bit(model, message, context)
        # As from a layer that gets no input any more.
        model.norm.running_var.copy_(torch.tensor([0.5 * seen[-1]] * 8))
        return metrics

    app = ClientApp()
    app.train()(sparse(Net)(train))
    strategy = SafariStrategy(net(), 2, "drop", config={"wire": {"values": values, "feedback": feedback}})
    strategy.start(Loopback({7: app, 8: app}), num_rounds=8)
    assert len(seen) == 16
    assert min(seen) >= 0
    assert seen[-1] < 0.1
