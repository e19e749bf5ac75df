"""The strategy with real messages and apps in one process: the missing, names, refusals."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import json
import tomllib

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower.kit import NODES, Loopback, Raw, good_app, lines_of, net, objects, play, train_a_bit
from safari.aggregation import Compensation, Decision
from safari.config import parse
from safari.errors import SafariError
from safari.flower import SafariStrategy, sparse
from safari.flower.arrays import FRAME_TYPE, frame_record
from safari.flower.collect import Request, collect
from safari.flower.exchange import exchange
from safari.flower.protocol import PROTOCOL, SAFARI
from safari.runs import RunFolder
from safari.wire.frame import MAGIC


def dense_app(message, context) -> Message:
    """A client of FedAvg: knows nothing of us."""
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    metrics = train_a_bit(model, message, context)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


def answering(content: dict | None) -> ClientApp:
    """An app that gives always the same answer."""
    return lambda message, context: Message(RecordDict(content), reply_to=message)


def test_partitions_are_seats_and_all_arrive(tmp_path):
    configs = {70: {"partition-id": 2}, 30: {"partition-id": 0}, 50: {"partition-id": 1}}
    (line,) = play(tmp_path, dict.fromkeys(NODES, good_app()), configs=configs)
    assert line["arrived"] == [0, 1, 2]
    assert line["nodes"] == {"0": "30", "1": "50", "2": "70"}
    assert line["reasons"] == {}
    assert line["density"] == pytest.approx(0.2, abs=0.02)
    assert line["bytes"]["up"] < line["bytes"]["down"]


def test_silence_and_errors_are_missing_with_their_reasons(tmp_path):
    def broken(message, context):
        raise RuntimeError("no disk left")

    lines = play(tmp_path, {30: good_app(), 50: None, 70: broken}, rounds=2)
    assert [line["arrived"] for line in lines] == [[0], [0]]
    reasons = {"1": "no reply within 0.1 s", "2": "error 2: RuntimeError: no disk left"}
    assert lines[1]["reasons"] == reasons
    assert lines[1]["stand_ins"] == {"1": [0], "2": [0]}


def test_an_error_that_the_superlink_writes_belongs_to_the_node_that_was_asked(tmp_path):
    def gone(message, context):
        reply = Message(Error(5, "node unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    (line,) = play(tmp_path, {30: good_app(), 50: gone, 70: good_app()})
    assert line["arrived"] == [0, 2]
    assert line["reasons"] == {"1": "error 5: node unavailable"}


def test_a_round_without_a_usable_reply_is_lost_and_training_goes_on(tmp_path):
    def second_round_only(message, context):
        if message.content["config"]["server-round"] != 2:
            raise RuntimeError("not yet")
        return good_app()(message, context)

    models = []
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run")
    strategy.start(
        Loopback(dict.fromkeys(NODES, second_round_only)),
        num_rounds=2,
        timeout=0.1,
        evaluate_fn=lambda number, arrays: models.append(strategy.server.model),
    )
    assert [line["lost"] for line in lines_of(tmp_path / "run")] == [True, False]
    assert torch.equal(models[1], strategy.layout.read(net()))
    assert not torch.equal(models[2], models[1])


def failing(message, context):
    raise RuntimeError("no \x1b[31mdata")


def test_a_run_that_brings_nothing_ends_with_the_clients_own_words(tmp_path):
    grid = Loopback(dict.fromkeys(NODES, failing))
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run", give_up=4)
    with pytest.raises(SafariError) as told:
        strategy.start(grid, num_rounds=100, timeout=0.1)
    words = "error 2: RuntimeError: no \\x1b[31mdata (3×)"
    assert str(told.value) == f"4 rounds in a row brought no usable reply. In the last one: {words}"
    assert len(lines_of(tmp_path / "run")) == 4
    # A run of fewer rounds is none that could be taken for trained.
    with pytest.raises(SafariError, match=r"^no round brought a usable reply\. In the last one: error 2"):
        SafariStrategy(net(), 3).start(grid, num_rounds=2, timeout=0.1)
    assert SafariStrategy(net(), 3, give_up=None).start(grid, num_rounds=2, timeout=0.1).arrays is not None


def test_rounds_without_an_arrival_are_counted_in_a_row(tmp_path):
    def every_third(message, context):
        if message.content["config"]["server-round"] % 3:
            raise RuntimeError("not now")
        return good_app()(message, context)

    strategy = SafariStrategy(net(), 3, run=tmp_path / "run", give_up=3)
    strategy.start(Loopback(dict.fromkeys(NODES, every_third)), num_rounds=8, timeout=0.01)
    assert [line["lost"] for line in lines_of(tmp_path / "run")] == [True, True, False] * 2 + [True, True]


def test_a_start_with_too_few_nodes_says_so_and_gives_up(caplog):
    grid = Loopback(dict.fromkeys(NODES[:2], good_app()))
    strategy = SafariStrategy(net(), 3, min_nodes=3, wait=0.2)
    with pytest.raises(SafariError) as told:
        strategy.start(grid, num_rounds=1, timeout=0.1)
    assert str(told.value) == (
        "2 of 3 nodes are connected after 0.2 s (min_nodes, wait). A simulation has as many as "
        "--federation-config 'num-supernodes=3' says"
    )
    assert "waiting for 3 nodes, 2 are connected; for 0 s more" in caplog.text


def other_layout() -> dict:
    app = ClientApp()
    app.train()(sparse(lambda context: torch.nn.Linear(4, 4))(lambda *_: {}))
    return app


def signed(client: str = "1", protocol: int = PROTOCOL) -> ConfigRecord:
    return ConfigRecord({"protocol": protocol, "client": client})


def frame(data: bytes, **record) -> dict:
    return {"arrays": frame_record(data), "metrics": MetricRecord(), SAFARI: signed(**record)}


WRONG = {
    "empty reply": ({}, "the reply holds no model"),
    "no arrays": ({"arrays": ArrayRecord()}, "the reply holds no model"),
    "no frame": (frame(b"nonsense"), f"magic must be {MAGIC.hex()}, got 6e6f6e73 (at byte 0)"),
    "cut short": (frame(b"SAF"), "magic"),
    "wrong version": (frame(MAGIC, protocol=1), "safari.protocol must be 4, the client has 1"),
    "no version": ({"arrays": frame_record(MAGIC)}, "safari.protocol must be 4, the client has None"),
    "no name": (
        frame(MAGIC, client=""),
        "safari.client must be a printable text of 1 to 200 characters, got ''",
    ),
    "dense, wrong names": ({"arrays": ArrayRecord([np.zeros(3)])}, "there is no array 'one.weight'"),
    "dense, wrong shape": (
        {"arrays": ArrayRecord({"one.weight": Array(np.zeros((2, 2)))})},
        "one.weight cannot be read: the shape must be (8, 6), got (2, 2)",
    ),
    "dense, not numbers": (
        {"arrays": ArrayRecord({"one.weight": Array("float32", (8, 6), "numpy.ndarray", b"\x93NUMPY!")})},
        "one.weight cannot be read",
    ),
    "strange type": (
        {"arrays": ArrayRecord({"a": Array("uint8", (3,), FRAME_TYPE.replace("1", "9"), b"abc")})},
        "there is no array 'one.weight'",
    ),
}


@pytest.mark.parametrize(("content", "reason"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_reply_is_refused_and_the_round_goes_on(content, reason, tmp_path):
    lines = play(tmp_path, {30: good_app(), 50: answering(content), 70: good_app()}, rounds=2)
    for line in lines:
        assert line["arrived"] == [0, 2]
        assert reason in line["refused"]["1"]
        assert line["reasons"]["1"] == line["refused"]["1"]


def test_a_client_with_another_layout_says_so(tmp_path):
    lines = play(tmp_path, {30: good_app(), 50: other_layout(), 70: good_app()})
    assert lines[0]["arrived"] == [0, 2]
    assert "layout must be" in lines[0]["reasons"]["1"]


def test_a_model_with_nan_is_refused(tmp_path):
    def mad(message, context):
        model = net()
        state = {name: t.clone() for name, t in model.state_dict().items()}
        state["two.bias"][0] = torch.nan
        return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)

    (line,) = play(tmp_path, {30: good_app(), 50: mad, 70: good_app()}, download="dense")
    assert line["refused"] == {"1": "1 numbers are NaN or infinite"}
    assert line["reasons"] == line["refused"]


def test_a_frame_from_an_earlier_round_is_refused(tmp_path):
    kept = []

    def replay(message, context):
        reply = good_app()(message, context)
        kept.append(reply.content)
        return Message(kept[0], reply_to=message)

    lines = play(tmp_path, {30: good_app(), 50: replay, 70: good_app()}, rounds=2)
    assert lines[0]["arrived"] == [0, 1, 2]
    assert lines[1]["arrived"] == [0, 2]
    assert "round must be 1, got 0" in lines[1]["refused"]["1"]


def test_a_reply_that_nobody_asked_for_is_ignored(tmp_path):
    grid = Loopback(dict.fromkeys(NODES, good_app()))
    strategy = SafariStrategy(net(), 3)
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    replies = exchange(grid, messages, 0.1)
    stranger = Message(RecordDict(), reply_to=messages[0])
    stranger.metadata.__dict__["_reply_to_message_id"] = "never sent"
    stranger.metadata.__dict__["_src_node_id"] = 999
    again = Message(RecordDict(), reply_to=messages[0])
    found = collect(
        strategy.roster,
        Request({m.metadata.message_id: m.metadata.dst_node_id for m in messages}, (), 0.1),
        [stranger, *replies, again],
        strategy._asked.sent,
    )
    assert list(found.replies) == [0, 1, 2]
    assert found.ignored == (
        "node 999: a reply to a message that was not sent in this round",
        "node 30: a second reply",
    )


def test_a_reply_belongs_to_the_node_that_was_asked_whatever_it_says(tmp_path):
    """A node that answers in the name of another's message speaks for itself alone."""
    last = {}

    def note(message, context):
        last["id"] = message.metadata.message_id
        return good_app()(message, context)

    def liar(message, context):
        reply = good_app()(message, context)
        reply.metadata.__dict__["_reply_to_message_id"] = last["id"]
        reply.metadata.__dict__["_src_node_id"] = 30
        return reply

    (line,) = play(tmp_path, {30: note, 50: liar, 70: good_app()})
    assert line["arrived"] == [0, 2]
    assert line["refused"] == {"1": "the reply says that it answers another message"}


def test_a_reply_that_flower_cannot_read_is_refused_alone(tmp_path, caplog):
    def malformed(message, context):
        reply = good_app()(message, context)
        parts = objects(reply)
        name = next(i for i, data in parts.items() if b'"stype"' in data)
        parts[name] = parts[name].replace(b'"shape"', b'"shpae"')
        return Raw(reply.object_id, parts)

    (line,) = play(tmp_path, {30: good_app(), 50: malformed, 70: good_app()})
    assert line["arrived"] == [0, 2]
    assert line["refused"] == {"1": "the reply is malformed: KeyError: 'shape'"}
    assert "Traceback" in caplog.text


def test_a_bug_in_the_reader_costs_one_reply_and_is_in_the_log(tmp_path, caplog, monkeypatch):
    def broken(frame, shared, **options):
        raise RecursionError("a bug\x1b[2J")

    monkeypatch.setattr("safari.flower.reply.decode", broken)
    (line,) = play(tmp_path, {30: dense_app, 50: good_app(), 70: dense_app}, download="dense")
    # Without a name the two others hold the first seats.
    assert line["arrived"] == [0, 1]
    assert line["refused"] == {"2": "the reply could not be read: RecursionError: a bug\\x1b[2J"}
    assert "Traceback" in caplog.text
    assert "\x1b" not in caplog.text


def test_two_nodes_with_one_name_count_once(tmp_path):
    configs = {30: {"partition-id": 0}, 50: {"partition-id": 1}, 70: {"partition-id": 1}}
    (line,) = play(tmp_path, dict.fromkeys(NODES, good_app()), configs=configs)
    assert line["arrived"] == [0, 1]
    assert line["ignored"] == ["node 70: client '1' is node 50, which is connected"]


def test_a_client_too_many_is_ignored(tmp_path):
    (line,) = play(tmp_path, dict.fromkeys(NODES, good_app()), clients=2)
    assert line["arrived"] == [0, 1]
    assert line["ignored"] == [
        "node 70: client '2' is one too many: clients is 2; raise it, or set patience, after which the seats "
        "of silent clients are given away"
    ]


def test_nodes_join_late_leave_and_come_back_as_others(tmp_path):
    app = good_app()
    names = {30: "berlin", 50: "paris", 70: "rome", 71: "rome"}
    grid = Loopback(dict.fromkeys(names, app), {n: {"safari-id": name} for n, name in names.items()})
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run")
    days = [[30], [30, 50, 70], [30, 50], [30, 50, 71]]
    for t, online in enumerate(days):
        grid.online = online
        strategy.start(grid, num_rounds=t + 1, timeout=0.1)
    lines = lines_of(tmp_path / "run")
    assert [line["arrived"] for line in lines] == [[0], [0, 1, 2], [0, 1], [0, 1, 2]]
    assert [line["missing"] for line in lines] == [[], [], [2], []]
    assert lines[2]["reasons"] == {"2": "not connected"}
    assert lines[2]["stand_ins"].keys() == {"2"}
    assert lines[3]["nodes"] == {"0": "30", "1": "50", "2": "71"}


def test_patience_ends(tmp_path):
    grid = Loopback(dict.fromkeys(NODES, good_app()))
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run", patience=1)
    for t, online in enumerate([NODES, [30, 50], [30, 50], NODES]):
        grid.online = online
        strategy.start(grid, num_rounds=t + 1, timeout=0.1)
    assert [line["missing"] for line in lines_of(tmp_path / "run")] == [[], [2], [], []]


def test_names_are_not_believed_when_nodes_are_asked_for(tmp_path):
    configs = {node: {"partition-id": 1} for node in NODES}
    (line,) = play(tmp_path, dict.fromkeys(NODES, good_app()), configs=configs, identify="node")
    assert line["arrived"] == [0, 1, 2]


def test_dense_replies_are_accepted_beside_sparse_ones(tmp_path):
    lines = play(
        tmp_path,
        {30: good_app(), 50: dense_app, 70: dense_app},
        rounds=2,
        download="dense",
        rule="drop",
        config={"pruning": {"sparsity": 0.8}},
    )
    assert [line["arrived"] for line in lines] == [[0, 1, 2], [0, 1, 2]]
    # Two of three cut nothing.
    assert lines[0]["density"] == pytest.approx((0.2 + 1 + 1) / 3, abs=0.01)
    assert lines[0]["nodes"]["0"] == "30"
    assert lines[1]["nodes"] == lines[0]["nodes"]


BAD_COUNTS = [-33.000001, 0, float("nan"), float("inf"), 1e-300, 10**9 + 1]


@pytest.mark.parametrize("count", BAD_COUNTS)
def test_impossible_sample_counts_never_weigh(tmp_path, count):
    """-33.000001 beside 16 and 18 made weights that sum to nearly 0, and a model of 1.8e9."""

    def lying(message, context):
        reply = good_app()(message, context)
        reply.content["metrics"]["num-examples"] = count
        return reply

    apps = {30: good_app(), 50: lying, 70: good_app()}
    words = f"num-examples must lie between 1 and 1000000000, got {count:g}"
    (line,) = play(tmp_path / "samples", apps, config={"aggregation": {"weights": "samples"}})
    assert line["refused"] == {"1": words}
    (line,) = play(tmp_path / "uniform", apps)
    assert line["arrived"] == [0, 1, 2]
    assert line["ignored"] == [f"node 50: {words}"]


def test_metrics_beyond_bounds_stay_out_of_means_and_records(tmp_path):
    def app(loss):
        def answer(message, context):
            reply = good_app()(message, context)
            reply.content["metrics"]["train_loss"] = loss
            return reply

        return answer

    apps = {30: app(0.5), 50: app(1.7e308), 70: app(float("-inf"))}
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run")
    result = strategy.start(Loopback(apps), num_rounds=1, timeout=0.1)
    (line,) = lines_of(tmp_path / "run")
    assert line["arrived"] == [0, 1, 2]
    assert line["train_loss"] == 0.5
    # One of three reports it: too few for a mean that speaks for all.
    assert result.train_metrics_clientapp == {1: MetricRecord()}
    assert line["ignored"] == [
        "node 50: train_loss must lie between ±1e+12, got 1.7e+308",
        "node 70: train_loss must lie between ±1e+12, got -inf",
    ]


def test_no_client_alone_decides_which_metrics_there_are(tmp_path):
    def other(message, context):
        reply = good_app()(message, context)
        del reply.content["metrics"]["train_loss"]
        reply.content["metrics"]["mine"] = 1.0
        return reply

    strategy = SafariStrategy(net(), 3)
    apps = {30: good_app(), 50: other, 70: good_app()}
    result = strategy.start(Loopback(apps), num_rounds=1, timeout=0.1)
    assert set(result.train_metrics_clientapp[1]) == {"train_loss"}


def test_a_mask_denser_than_asked_is_refused(tmp_path):
    def greedy(message, context):
        message.content["config"]["safari.sparsity"] = 0.5
        return good_app()(message, context)

    (line,) = play(tmp_path, {30: good_app(), 50: greedy, 70: good_app()})
    assert line["refused"] == {"1": "the mask must keep at most 14 weights, got 36"}


def test_a_clients_error_text_cannot_control_the_terminal(tmp_path, caplog):
    def rude(message, context):
        raise RuntimeError("\x1b[2J\x1b]0;gone\x07 \u202eoh\r")

    (line,) = play(tmp_path, {30: good_app(), 50: rude, 70: good_app()})
    assert line["reasons"] == {"1": "error 2: RuntimeError: \\x1b[2J\\x1b]0;gone\\x07 \\u202eoh"}
    assert not {"\x1b", "\x07", "\u202e"} & set(caplog.text)


def test_samples_weigh_where_the_config_says_so(tmp_path):
    config = {"aggregation": {"weights": "samples"}, "pruning": {"sparsity": 0.0}}
    received = {}

    def apply(state, round):
        received["weights"] = round.weights.tolist()
        return Decision(round.weights), state

    rule = Compensation(lambda clients, size, device: {}, apply)
    play(tmp_path, dict.fromkeys(NODES, good_app()), config=config, rule=rule)
    assert received["weights"] == pytest.approx([16 / 51, 17 / 51, 18 / 51])


def test_clients_can_test_the_model_too(tmp_path):
    strategy = SafariStrategy(net(), 3, run=tmp_path / "run", evaluate=True)
    result = strategy.start(Loopback(dict.fromkeys(NODES, good_app())), num_rounds=2, timeout=0.1)
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == 0.25
    assert [line["top1"] for line in lines_of(tmp_path / "run")] == [0.25, 0.25]
    assert set(result.train_metrics_clientapp[1]) == {"train_loss"}


def test_a_cohort_is_drawn_anew_each_round(tmp_path):
    grid = Loopback({node: good_app() for node in range(10, 16)})
    lines = play(tmp_path, {}, rounds=6, clients=6, grid=grid, config={"cohort": 2})
    assert all(len(line["arrived"]) == 2 and not line["missing"] for line in lines)
    assert len({tuple(line["arrived"]) for line in lines}) > 1


def test_a_runs_folder_can_be_shown(tmp_path):
    from click.testing import CliRunner

    from safari.cli import cli

    play(tmp_path, dict.fromkeys(NODES, good_app()), rounds=2)
    shown = CliRunner().invoke(cli, ["show", str(tmp_path / "run"), "--json"])
    assert shown.exit_code == 0, shown.output
    (summary,) = json.loads(shown.stdout).values()
    assert summary["arms"]["safari"]["seeds"]["0"]["rounds"] == 2
    assert json.loads((tmp_path / "run/summary.json").read_text()) == summary


WRONG_ARGUMENTS = [
    ({"rule": "safarri"}, "did you mean 'safari'"),
    ({"rule": "perfect"}, "rule must take the network as it is, got perfect, which overrides it"),
    ({"rule": "few"}, "rule must take the network as it is, got few, which overrides it"),
    ({"identify": "face"}, "identify must be one of name, node; got 'face'"),
    ({"download": "slow"}, "download must be one of bf16, dense, fp16, frame, int8, .*; got 'slow'"),
    ({"patience": -1}, "patience must be at least 0, got -1"),
    ({"min_nodes": 4}, r"min_nodes must lie between 1 and clients \(3\), got 4"),
    ({"clients": 0}, "^clients must be at least 1, got 0$"),
    ({"config": {"prunning": {}}}, "prunning is not a field"),
    ({"config": {"pruning": {"sparsty": 0.5}}}, r"pruning\.sparsty is not a field"),
    (
        {"config": {"rounds": 3, "uplink": {"name": "lost"}, "seeds": 2, "wire": {"every": 2}}},
        r"^config\.seeds has no effect here\n"
        r"config\.rounds has no effect here: it is num_rounds of start\n"
        r"config\.uplink has no effect here: it is the client's mod lossy\n"
        r"config\.wire\.every has no effect here\n"
        r"what matters in config: name, seed, cohort, sampling\.name, pruning\.pruner, pruning\.sparsity, "
        r"pruning\.scope, pruning\.dense, pruning\.least, pruning\.allow_dead_layers, pruning\.schedule, "
        r"pruning\.initial, pruning\.begin, pruning\.end, policy\.name, client\.name, local\.optimiser, local\.lr, "
        r"local\.schedule, local\.final, local\.milestones, local\.factor, local\.horizon, wire\.values, "
        r"wire\.bits, wire\.step, wire\.ratio, wire\.fraction, wire\.threshold, wire\.feedback, "
        r"aggregation\.weights, aggregation\.average, aggregation\.steps, aggregation\.gate, "
        r"evaluation\.last, evaluation\.target, checkpoint\.every, checkpoint\.keep$",
    ),
    ({"config": {"pruning": {"pruner": "file.py:mine"}}}, "your own goes into sparse"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(SafariError, match=message):
        SafariStrategy(**{"module": net(), "clients": 3, **options})


def test_a_whole_config_is_recorded_as_it_is(tmp_path):
    whole = parse({"rounds": 9, "uplink": {"name": "lost"}, "pruning": {"sparsity": 0.5}})
    play(tmp_path, dict.fromkeys(NODES, good_app()), config=whole)
    found = RunFolder.open(tmp_path / "run").config
    assert (found.uplink.name, found.pruning.sparsity, found.rounds, found.clients) == ("lost", 0.5, 1, 3)


def test_a_runs_config_claims_nothing_about_the_clients_own_app(tmp_path):
    from safari.view.monitor import setting

    play(tmp_path, {30: dense_app, 50: dense_app, 70: dense_app}, download="dense", rule="safari+")
    text = (tmp_path / "run/config.toml").read_text()
    written = tomllib.loads(text)
    assert text.startswith("# Of a run on Flower: what is not here, such as local training, ")
    assert set(written) == {
        "name", "seed", "rounds", "clients", "cohort", "sampling", "arms", "data", "partition", "model", "pruning",
        "uplink", "downlink", "aggregation", "wire", "evaluation", "checkpoint", "policy", "client",
    }  # fmt: skip
    assert set(written["evaluation"]) == {"last", "target"}
    # Clients without our side cut nothing.
    assert written["pruning"]["sparsity"] == 0.0
    assert "0 % sparsity" in setting(RunFolder.open(tmp_path / "run").config)
    assert lines_of(tmp_path / "run")[0]["density"] == 1.0


def test_how_a_run_is_summed_up_is_a_setting(tmp_path):
    config = {"evaluation": {"last": 1, "target": 0.2}, "name": "mine"}
    play(tmp_path, dict.fromkeys(NODES, good_app()), rounds=2, config=config, evaluate=True)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["name"] == "mine"
    assert summary["arms"]["safari"]["seeds"]["0"]["rounds_to_target"] == 1
