"""Models in datagrams with Flower as the control channel: real ClientApps, real sockets on loopback."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import asyncio
import socket
import ssl
import threading
from contextlib import contextmanager

import torch
from flwr.clientapp import ClientApp
from torch import nn

from flower.kit import NODES, Loopback, Net, good_app, lines_of, net, train_a_bit
from safari.errors import ConfigError, SafariError
from safari.flower import Datagrams, SafariStrategy, masked, masks_of, sparse, sparse_mod
from safari.flower.datagrams import check_tls
from safari.net.certificates import fetch_authority, fingerprint, make_certificates
from safari.net.path import Conditions
from safari.net.udp import Relay

CONFIG = {"pruning": {"sparsity": 0.5}}


class BigNet(nn.Module):
    """Some tens of packets."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 2000)
        self.two = nn.Linear(2000, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def big_app() -> ClientApp:
    app = ClientApp()
    app.train()(sparse(BigNet)(train_a_bit))
    return app


def play(path, apps, rounds=1, clients=3, module=None, timeout=20.0, **options) -> list[dict]:
    strategy = SafariStrategy(module or net(), clients, run=path / "run", **options)
    strategy.start(Loopback(apps), num_rounds=rounds, timeout=timeout)
    return lines_of(path / "run")


def datagrams(**options) -> Datagrams:
    return Datagrams(
        "127.0.0.1", listen="127.0.0.1", insecure=True, client_rate=5e6, server_rate=2e7, **options
    )


@contextmanager
def bad_network(up: Conditions, down: Conditions, server: Datagrams, seed: int = 0):
    """A relay in a thread of its own, under whose address the server is then known."""
    ready, over, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def run() -> None:
        async with Relay("127.0.0.1", ("127.0.0.1", server.port), up, down, seed) as relay:
            server.public_port = relay.port
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    server.open()
    thread.start()
    ready.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_round_in_datagrams_is_the_round_in_frames(tmp_path):
    apps = {node: good_app() for node in NODES}
    expected = play(tmp_path / "frames", apps, rounds=3, config=CONFIG)
    found = play(tmp_path / "datagrams", apps, rounds=3, config=CONFIG, datagrams=datagrams())
    assert [line["arrived"] for line in found] == [[0, 1, 2]] * 3
    for name in ("train_loss", "density", "support", "churn", "layers", "arrived", "stand_ins"):
        assert [line[name] for line in found] == [line[name] for line in expected], name
    assert all(line["blocks"]["0"]["share"] == 1.0 for line in found)
    assert all("forged" not in line["datagrams"] for line in found)


def test_the_control_channel_carries_no_model(tmp_path):
    grid = Loopback({node: good_app() for node in NODES})
    strategy = SafariStrategy(net(), 3, config=CONFIG, datagrams=datagrams())
    strategy.start(grid, num_rounds=2, timeout=20)
    assert len(grid.sent) == 6
    secrets = set()
    for message in grid.sent:
        assert not message.content.array_records
        config = message.content["config"]
        assert config["safari.net.client"] == f"node-{message.metadata.dst_node_id}"
        assert config["safari.net.deadline"] == 20.0
        secrets.add(config["safari.net.secret"])
    # One for each client and round.
    assert len(secrets) == 6


def test_the_functions_inside_see_a_model_and_no_secret():
    seen = []

    def look(message, context, call_next):
        seen.append((dict(message.content["config"]), list(message.content["arrays"])))
        return call_next(message, context)

    app = ClientApp(mods=[sparse_mod(Net), look])

    @app.train()
    def train(message, context):
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        masked(torch.optim.SGD(model.parameters(), lr=0.1), model, masks_of(message))
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    grid = Loopback(dict.fromkeys(NODES, app))
    strategy = SafariStrategy(net(), 3, config=CONFIG, datagrams=datagrams())
    strategy.start(grid, num_rounds=1, timeout=20)
    assert len(seen) == 3
    for config, arrays in seen:
        assert not any("secret" in name or "session" in name for name in config)
        assert "one.weight" in arrays


def test_over_a_network_that_loses_a_third_training_goes_on_block_by_block(tmp_path):
    server = datagrams()
    weather = Conditions(loss=0.34)
    big = {node: big_app() for node in NODES}
    with bad_network(weather, weather, server):
        lines = play(
            tmp_path, big, rounds=3, module=BigNet(), datagrams=server, timeout=30, rule="safari",
            config={"pruning": {"scope": "erk"}},
        )  # fmt: skip
    assert all(line["arrived"] == [0, 1, 2] for line in lines)
    shares = [block["share"] for line in lines for block in line["blocks"].values()]
    assert len(shares) == 9
    assert all(0 < share < 1 for share in shares)
    packets = [(block["packets"], block["of"]) for line in lines for block in line["blocks"].values()]
    assert all(0 < came < of for came, of in packets)
    came, of = (sum(column) for column in zip(*packets, strict=True))
    # Five standard deviations: which packets are lost depends on when they were sent.
    assert came / of == pytest.approx(0.66, abs=5 * (0.66 * 0.34 / of) ** 0.5)
    # Coordinates, too: ranges of what came, of each client others.
    sizes = {
        sum(count for _, count in block["ranges"]) for line in lines for block in line["blocks"].values()
    }
    assert len(sizes) > 3
    assert all(set(line["parts"]) == {"0", "1", "2"} for line in lines)


def test_a_client_that_gets_no_model_sits_out_and_one_that_is_cut_off_is_stood_in_for(tmp_path):
    server = datagrams()
    with bad_network(Conditions(), Conditions(loss=1.0), server):
        (line,) = play(
            tmp_path / "down", {70: good_app()}, clients=1, datagrams=server, timeout=1.0, give_up=None
        )
    assert line["lost"]
    assert line["reasons"] == {"0": "error 1002: 0 of 1 symbols of the model came in 1 s"}

    server, calls = datagrams(), []

    def falls_silent(message, context):
        calls.append(message)
        return good_app()(message, context) if len(calls) == 1 else None

    apps = {70: good_app(), 30: falls_silent, 50: good_app()}
    lines = play(tmp_path / "silent", apps, rounds=2, datagrams=server, timeout=1)
    assert lines[1]["missing"] == [0]
    assert lines[1]["reasons"] == {"0": "no reply within 1 s"}


def test_a_model_whose_reply_is_lost_still_counts(tmp_path):
    calls = []

    def app(message, context):
        reply = good_app()(message, context)
        calls.append(reply)
        return reply if len(calls) == 1 else None

    apps = {70: good_app(), 30: app, 50: good_app()}
    lines = play(tmp_path, apps, rounds=2, datagrams=datagrams(), timeout=1)
    # Its update is there; only its numbers are not.
    assert lines[1]["arrived"] == [0, 1, 2]
    assert lines[1]["blocks"]["0"]["share"] == 1.0


def test_packets_without_a_reply_from_an_unknown_node_are_ignored(tmp_path):
    def app(message, context):
        good_app()(message, context)

    apps = {70: good_app(), 30: app, 50: good_app()}
    lines = play(tmp_path, apps, datagrams=datagrams(), timeout=1)
    assert lines[0]["arrived"] == [1, 2]


def test_without_tls_no_secret_leaves():
    with pytest.raises(ConfigError, match="secrets go through the control channel, which must speak TLS"):
        Datagrams("127.0.0.1")


@contextmanager
def tls_server(folder, speaks_tls: bool):
    """A port with or without TLS, under certificates of our own."""
    if not (folder / "ca.crt").exists():
        make_certificates(folder, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                plain, _ = listener.accept()
                with plain:
                    if speaks_tls:
                        context.wrap_socket(plain, server_side=True).close()
                    else:
                        plain.sendall(b"HTTP/1.1 400 no TLS here\r\n\r\n")
            except OSError:
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_the_control_channel_is_asked_for_its_certificate(tmp_path):
    with tls_server(tmp_path, speaks_tls=True) as port:
        check_tls(f"127.0.0.1:{port}", tmp_path / "ca.crt")
    with (
        tls_server(tmp_path, speaks_tls=False) as port,
        pytest.raises(SafariError, match="must speak TLS"),
    ):
        check_tls(f"127.0.0.1:{port}", tmp_path / "ca.crt")
    # Certificates of another authority.
    stranger = tmp_path / "stranger"
    make_certificates(stranger, ["127.0.0.1"])
    with (
        tls_server(tmp_path, speaks_tls=True) as port,
        pytest.raises(SafariError, match="must speak TLS"),
    ):
        check_tls(f"127.0.0.1:{port}", stranger / "ca.crt")
    with pytest.raises(SafariError, match="cannot be reached"):
        check_tls("127.0.0.1:1", tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match="superlink must be host:port, got 'nowhere'"):
        check_tls("nowhere", tmp_path / "ca.crt")
    with pytest.raises(SafariError, match=r"root_certificates .* cannot be read"):
        check_tls("127.0.0.1:1", tmp_path / "no such file")


def test_an_authority_is_known_by_its_fingerprint(tmp_path):
    ca = make_certificates(tmp_path, ["127.0.0.1"]).authority.read_bytes()
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600
    with tls_server(tmp_path, speaks_tls=True) as port:
        assert fetch_authority("127.0.0.1", port, fingerprint(ca).upper()) == ca
    with (
        tls_server(tmp_path, speaks_tls=True) as port,
        pytest.raises(SafariError, match="fingerprint must be of a certificate that 127"),
    ):
        fetch_authority("127.0.0.1", port, "00" * 32)
    with pytest.raises(SafariError, match="no certificate can be had from 127"):
        fetch_authority("127.0.0.1", 1, "00" * 32)
    with pytest.raises(SafariError, match="the certificate cannot be read"):
        fingerprint(b"nonsense")


def test_an_insecure_control_channel_stops_the_strategy_before_anything_is_sent(tmp_path):
    with tls_server(tmp_path, speaks_tls=False) as port:
        server = Datagrams("127.0.0.1", superlink=f"127.0.0.1:{port}", root_certificates=tmp_path / "ca.crt")
        grid = Loopback({node: good_app() for node in NODES})
        with pytest.raises(SafariError, match="or no secret is sent"):
            SafariStrategy(net(), 3, datagrams=server).start(grid, num_rounds=1, timeout=5)
        assert grid.sent == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"download": "dense"}, "download must be 'frame' with datagrams, got 'dense'"),
        ({"upload": "dense"}, "upload must be 'frame' with datagrams, got 'dense'"),
    ],
)
def test_what_does_not_go_together_is_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        SafariStrategy(net(), 3, datagrams=datagrams(), **options)


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="client_rate must be at least 0, got -1"):
        Datagrams("127.0.0.1", insecure=True, client_rate=-1)
    with pytest.raises(ConfigError, match="port must lie between 0 and 65535, got 70000"):
        Datagrams("127.0.0.1", 70000, insecure=True)
