"""Training in network namespaces: it goes on whatever the network does, and ends where the simulator ends that has
the same arrivals."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import subprocess

from flwr.app import Context, MetricRecord

from flower.kit import NODES, Loopback, lines_of
from net.end_to_end import PHASES, play, simulate
from net.namespaces import SERVER, Network, why_not
from safari.flower import Datagrams, SafariStrategy
from safari.lab import app as lab
from safari.training import evaluate

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SETTINGS = {
    "seed": 0, "rounds": 3, "clients": 2, "rule": "safari+", "model": "cnn", "sparsity": 0.8, "values": "auto",
    "preset": "best",
}  # fmt: skip


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_the_strategy_and_its_clients_in_namespaces_with_loss_by_nft(tmp_path):
    """The recipe: messages go through memory, and models through real sockets and the kernel's packet filter."""
    world = lab.world_of(SETTINGS)
    model = world.fresh_module()
    with Network(2, tmp_path) as network:

        def client(number: int):
            def answer(message, context):
                own = Context(1, context.node_id, context.node_config, context.state, SETTINGS)
                return network.inside(f"client-{number}", lambda: lab.client(message, own))

            return answer

        def change(round: int, arrays):
            """Test the model, and change the network for the rounds to come."""
            if round in changes:
                network.clear()
                changes[round]()
            model.load_state_dict(arrays.to_torch_state_dict())
            return MetricRecord({**evaluate(model, world.data.test_x, world.data.test_y, batch=1000)})

        changes = {1: lambda: network.lose(30), 2: lambda: network.lose(60)}
        datagrams = Datagrams(SERVER, listen=SERVER, insecure=True, client_rate=2e6, server_rate=6e6)
        network.inside("server", datagrams.open)
        strategy = SafariStrategy(
            model,
            2,
            SETTINGS["rule"],
            config=world.config,
            run=tmp_path / "run",
            datagrams=datagrams,
            give_up=None,
        )
        grid = Loopback({node: client(i) for i, node in enumerate(sorted(NODES)[:2])})
        strategy.start(grid, num_rounds=3, timeout=60.0, evaluate_fn=change)
        prefix = network.name("")
    assert prefix not in namespaces()
    lines = lines_of(tmp_path / "run")
    shares = [[block["packets"] / block["of"] for block in line["blocks"].values()] for line in lines]
    assert shares[0] == [1.0, 1.0]
    # Of 38 packets each: four standard deviations.
    assert sum(shares[1]) / 2 == pytest.approx(0.7, abs=0.3)
    assert sum(shares[2]) / 2 == pytest.approx(0.4, abs=0.32)
    simulated = simulate(tmp_path / "run", tmp_path / "simulated")
    assert [line["arrived"] for line in simulated] == [line["arrived"] for line in lines]
    assert [line["top1"] for line in simulated] == pytest.approx([line["top1"] for line in lines], abs=0.01)


@pytest.mark.slow
def test_superlink_and_supernodes_train_through_every_kind_of_bad_network(tmp_path):
    found = play(tmp_path)
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert abs(found["top1"]["network"] - found["top1"]["simulator"]) <= 0.01
    for phase in PHASES:
        played = phases[phase.name]
        if phase.loss == 1.0:
            assert played["arrived"] == 0
        else:
            assert played["arrived"] > 0
        if phase.loss is not None and 0 < phase.loss < 1:
            assert played["packets"] / played["of"] == pytest.approx(1 - phase.loss, abs=0.12)
    assert "forged" not in found["datagrams"]
    assert found["outsider"] == {"gate": "404", "superlink": "[Errno 111] Connection refused"}


@pytest.mark.slow
def test_the_recipe_with_real_processes_over_lossy_links_is_the_simulator(tmp_path):
    """Steps with error feedback: a client that is told wrongly what arrived would go another way."""
    calm, lossy, worse = (PHASES[i] for i in (0, 1, 6))
    found = play(tmp_path, (calm, lossy, worse), preset="best")
    assert found["largest_difference"] <= 0.01
    assert found["top1"]["network"] > 0.5
    assert all(phase["arrived"] > 0 for phase in found["phases"])
    assert found["phases"][1]["packets"] < found["phases"][1]["of"]
