"""What holds for every round: who trains, who counts, what is recorded, what never changes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import safari
from engine.kit import SMALL, StopAfter, play, records, world_of, write_trace
from safari.config import parse
from safari.engine import assemble, load_data
from safari.engine.network import deliver
from safari.engine.state import initial
from safari.errors import ConfigError
from safari.runs import RunFolder


def files(run):
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in (*run.rglob("rounds.jsonl"), *run.rglob("*.safetensors"), run / "summary.json")
    }


def test_two_runs_are_bit_equal_and_another_seed_is_not(tmp_path):
    config = {**SMALL, "arms": ["perfect", "drop", "safari"], "pruning": {"pruner": "snip"}}
    config["local"] = {**SMALL["local"], "augment": "crop-flip"}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        safari.run({**config, "seed": seed}, tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    first, other = (
        RunFolder.open(tmp_path / name).trial("drop", seed).records() for name, seed in (("a", 3), ("c", 4))
    )
    assert [r["loss"] for r in first] != [r["loss"] for r in other]


def test_a_seed_means_the_same_alone_and_among_others(tmp_path):
    safari.run({**SMALL, "seed": 0, "seeds": 3}, tmp_path / "three")
    safari.run({**SMALL, "seed": 2}, tmp_path / "one")
    name = "trials/safari/seed-2/rounds.jsonl"
    assert (tmp_path / "three" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_the_global_random_state_is_neither_used_nor_moved():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = records(SMALL)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    torch.manual_seed(2)
    np.random.seed(2)
    assert records(SMALL) == first


FIXED = """
import numpy as np

def twenty_each(labels, clients, rng):
    return [np.arange(20 * client, 20 * client + 20) for client in range(clients)]
"""


@pytest.mark.parametrize(
    "uplink",
    [
        {"name": "bernoulli", "p": 0.4},
        {"name": "staircase", "p": 0.9, "every": 2},
        {"name": "sine", "period": 5},
        {"name": "labels"},
        {"name": "gilbert-elliott", "p": 0.4},
    ],
    ids=lambda uplink: uplink["name"],
)
def test_one_more_client_changes_nothing_for_the_others(tmp_path, uplink):
    (tmp_path / "fixed.py").write_text(FIXED)
    base = {
        **SMALL,
        "partition": {"name": f"{tmp_path}/fixed.py:twenty_each"},
        "pruning": {"pruner": "snip", "batch": 6},
        "uplink": uplink,
        "downlink": {"name": "gilbert-elliott", "p": 0.7},
    }
    base["local"] = {**SMALL["local"], "augment": "crop-flip"}
    ten, eleven = (world_of({**base, "clients": clients}) for clients in (10, 11))
    random_state = []
    for world in (ten, eleven):
        fed = world.federation(safari.Compensation(lambda *_: {}, None))
        state = initial(world, fed)
        rows = []
        for t in range(8):
            delivery, state = deliver(world, state, fed.rule, range(10))
            rows.append(
                [[client in some for client in range(10)] for some in (delivery.hear, delivery.arriving)]
            )
            state = replace(state, round=t + 1)
        random_state.append(rows)
    assert random_state[0] == random_state[1]
    assert any(not all(row) for pair in random_state[0] for row in pair), "nothing was ever lost"
    for client in range(10):
        for t in (0, 7):
            batches = [world.training_batches(client, t) for world in (ten, eleven)]
            looks = [[world.pruning_batch(client, t)] for world in (ten, eleven)]
            for one, other in zip(batches[0] + looks[0], batches[1] + looks[1], strict=True):
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])


def test_clients_and_rounds_have_batches_of_their_own(tmp_path):
    (tmp_path / "same.py").write_text(
        "def all(labels, clients, rng):\n    return [list(range(50))] * clients\n"
    )
    world = world_of({**SMALL, "partition": {"name": f"{tmp_path}/same.py:all"}})
    seen = {(c, t): world.training_batches(c, t)[0][0] for c in range(3) for t in range(3)}
    pairs = [(a, b) for a in seen for b in seen if a < b]
    assert not any(torch.equal(seen[a], seen[b]) for a, b in pairs)


def test_arms_see_the_same_arrivals(tmp_path):
    config = {**SMALL, "rounds": 12, "arms": ["drop", "safari", {"name": "again", "rule": "drop"}]}
    config |= {"uplink": {"name": "bernoulli", "p": 0.6}, "downlink": {"name": "bernoulli", "p": 0.7}}
    config["cohort"] = 4
    safari.run(config, tmp_path / "run")
    arms = [RunFolder.open(tmp_path / "run").trial(arm, 0).records() for arm in ("drop", "safari", "again")]
    fates = [[(r["trained"], r["arrived"], r["missing"]) for r in arm] for arm in arms]
    assert fates[0] == fates[1]
    assert len({json.dumps(fate) for fate in fates[0]}) > 5, "the fate was always the same"
    assert arms[0] == arms[2]
    assert [r["loss"] for r in arms[0]] != [r["loss"] for r in arms[1]]


def test_perfect_ignores_both_links():
    config = {**SMALL, "arms": ["perfect"]}
    bad = records({**config, "uplink": {"name": "lost"}, "downlink": {"name": "bernoulli", "p": 0.2}})
    good = records({**config, "uplink": {"name": "perfect"}})
    assert bad == good
    everybody = list(range(5))
    assert all((r["trained"], r["arrived"], r["missing"]) == (everybody, everybody, []) for r in bad)


def test_whom_the_broadcast_did_not_reach_does_not_train_and_is_missing(tmp_path):
    down, up = ["11011", "00000", "01111"], ["11111", "11111", "10111"]
    config = {
        **SMALL,
        "rounds": 3,
        "downlink": {"name": "trace", "file": write_trace(tmp_path / "down.csv", down)},
        "uplink": {"name": "trace", "file": write_trace(tmp_path / "up.csv", up)},
    }
    first, second, third = records(config)
    assert first["trained"] == first["arrived"] == [0, 1, 3, 4]
    assert first["missing"] == [2]
    assert (second["trained"], second["arrived"], second["missing"]) == ([], [], [0, 1, 2, 3, 4])
    assert (second["train_loss"], second["density"], second["agreement"]) == (None, None, None)
    assert second["lost"] is True
    assert third["trained"] == [1, 2, 3, 4], "1 trains, though its answer will be lost"
    assert (third["arrived"], third["missing"]) == ([2, 3, 4], [0, 1])


@pytest.mark.parametrize("links", [("lost", "perfect"), ("perfect", "lost")])
@pytest.mark.parametrize("rule", ["drop", "safari"])
def test_when_all_is_lost_the_model_never_changes(links, rule):
    config = {**SMALL, "arms": [rule], "uplink": {"name": links[0]}, "downlink": {"name": links[1]}}
    world = world_of(config)
    for _, after, record in play(config):
        assert torch.equal(after.model, world.start)
        assert record["lost"] is True
        assert (record["arrived"], record["missing"]) == ([], [0, 1, 2, 3, 4])
        assert (record["churn"], record["support"]) == (0, 1)
        assert record["stand_ins"] == {}


def test_a_cohort_is_sampled_anew_each_round_and_only_it_is_asked():
    config = {**SMALL, "clients": 10, "cohort": 3, "rounds": 40, "uplink": {"name": "bernoulli", "p": 0.5}}
    config["arms"] = ["drop"]
    found = records(config)
    cohorts = [tuple(sorted(r["arrived"] + r["missing"])) for r in found]
    assert all(len(cohort) == 3 for cohort in cohorts)
    assert [r["trained"] for r in found] == [list(cohort) for cohort in cohorts]
    assert len(set(cohorts)) > 20
    # 120 places for 10 clients: 12 each, give or take 4.4 standard deviations.
    counts = np.bincount(np.concatenate(cohorts), minlength=10)
    assert counts.min() > 0
    assert counts.max() < 28


def test_a_cohort_of_everybody_is_everybody():
    assert records({**SMALL, "cohort": 5}) == records({**SMALL, "cohort": 0})


UNEQUAL = """
import numpy as np

def one_two_three(labels, clients, rng):
    ends = np.cumsum([0, 40, 80, 120])
    return [np.arange(a, b) for a, b in zip(ends, ends[1:])]
"""


@pytest.fixture
def unequal(tmp_path):
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    return {
        **SMALL,
        "clients": 3,
        "rounds": 1,
        "partition": {"name": f"{tmp_path}/unequal.py:one_two_three"},
        "uplink": {"name": "trace", "file": write_trace(tmp_path / "up.csv", ["101"])},
        "pruning": {"sparsity": 0.0},
    }


def test_weights_by_samples(unequal, tmp_path):
    def model(rule, up, weights):
        link = {"name": "trace", "file": write_trace(tmp_path / f"{up}.csv", [up])}
        config = {**unequal, "arms": [rule], "uplink": link, "aggregation": {"weights": weights}}
        return next(play(config))[1].model.double()

    alone = [model("drop", up, "uniform") for up in ("100", "010", "001")]
    cases = {
        ("drop", "111", "uniform"): (1 / 3, 1 / 3, 1 / 3),
        ("drop", "111", "samples"): (1 / 6, 2 / 6, 3 / 6),
        ("drop", "101", "samples"): (1 / 4, 0, 3 / 4),
        ("safari", "101", "uniform"): (1 / 2, 0, 1 / 2),  # nobody knows 1, so both speak for it
        ("safari", "101", "samples"): (2 / 6, 0, 4 / 6),
    }
    for case, shares in cases.items():
        expected = sum(share * each for share, each in zip(shares, alone, strict=True))
        torch.testing.assert_close(model(*case), expected, rtol=0, atol=1e-7)


def test_epochs_count_passes_over_each_clients_own_data(unequal):
    world = world_of({**unequal, "local": {"epochs": 2.0, "batch": 16, "steps": 99}})
    assert [world.steps(client) for client in range(3)] == [5, 10, 15]  # 2 · 40 / 16, and so on
    for client, size in enumerate((40, 80, 120)):
        drawn = torch.cat([x for x, _ in world.training_batches(client, 0)])
        unique, counts = drawn.flatten(1).unique(dim=0, return_counts=True)
        own = world.data.train_x[world.parts[client]].flatten(1).unique(dim=0)
        assert len(drawn) == 2 * size
        assert torch.equal(unique, own)
        assert int(counts.min()) >= 2, "two whole passes see each sample twice"
    few = world_of({**unequal, "local": {"epochs": 0.01, "batch": 16}})
    assert [few.steps(client) for client in range(3)] == [1, 1, 1], "never less than a step"
    assert world_of(unequal).steps(0) == 2


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_fednova_with_different_numbers_of_steps_is_its_formula(unequal, tmp_path, weights):
    """x + τ_eff Σ p_i (w_i - x) / τ_i, from the clients' models as FedAvg leaves them: each arrives alone once."""
    config = {
        **unequal,
        "rounds": 1,
        "arms": ["drop"],
        "aggregation": {"weights": weights},
        "local": {"epochs": 2.0, "batch": 16, "optimiser": "sgd", "lr": 0.5},
    }

    def model(client: str, arrive: str) -> Tensor:
        trace = write_trace(tmp_path / f"{arrive}.csv", [arrive])
        link = {"name": "trace", "file": trace}
        ((_, after, _),) = play({**config, "client": {"name": client}, "uplink": link})
        return after.model.double()

    x, taus = world_of(config).start.double(), torch.tensor([5.0, 10.0, 15.0]).double()
    alone = torch.stack([model("fedavg", arrive) for arrive in ("100", "010", "001")])
    shares = torch.tensor([1.0, 2.0, 3.0] if weights == "samples" else [1.0, 1.0, 1.0]).double()
    shares /= shares.sum()
    expected = x + (shares @ taus) * (shares / taus) @ (alone - x)
    torch.testing.assert_close(model("fednova", "111"), expected, rtol=0, atol=1e-6)
    assert float((model("fedavg", "111") - expected).abs().max()) > 1e-4, "it is not FedAvg"


@pytest.mark.parametrize(
    ("schedule", "tested"),
    [
        ({}, [3, 6, 8]),
        ({"pairs": True}, [2, 3, 5, 6, 7, 8]),
        ({"last": 3, "last_every": 1}, [3, 6, 7, 8]),
        ({"last": 4, "last_every": 2, "pairs": True}, [2, 3, 5, 6, 7, 8]),
    ],
)
def test_evaluation_every_so_often_and_always_at_the_end(schedule, tested):
    every = records({**SMALL, "rounds": 8, "evaluation": {"every": 1}})
    third = records({**SMALL, "rounds": 8, "evaluation": {"every": 3, **schedule}})
    assert [r["round"] for r in third if r["top1"] is not None] == tested
    for full, sparse in zip(every, third, strict=True):
        scores = ("loss", "top1", "top5")
        if sparse["top1"] is None:
            assert [sparse[key] for key in scores] == [None, None, None]
            assert "by_class" not in sparse
            assert {**sparse, **{key: full[key] for key in (*scores, "by_class")}} == full
        else:
            assert sparse == full, "evaluating changes nothing"


def test_scores_are_those_of_the_new_model_on_the_test_split():
    config = {**SMALL, "rounds": 2, "evaluation": {"batch": 100}}
    world = world_of(config)
    *_, (_, after, record) = play(config)
    world.layout.write(world.module, after.model)
    with torch.no_grad():
        logits = world.module.eval()(world.data.test_x)
    y = world.data.test_y
    assert record["top1"] == float((logits.argmax(1) == y).double().mean())
    higher = (logits > logits.gather(1, y[:, None])).sum(1)
    assert record["top5"] == float((higher < 5).double().mean())
    assert record["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)


NAN = """
import torch
from torch import nn

class Fragile(nn.Module):
    '''Overflows for clients whose pictures are marked.'''
    def __init__(self, shape, classes):
        super().__init__()
        self.inner = nn.Linear(4, classes)
    def forward(self, x):
        return self.inner(x) * torch.where(x[:, :1] > 100, torch.inf, 1.0)

def net(shape, classes):
    return Fragile(shape, classes)

def data():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=draw)
    y = torch.arange(40) % 2
    x[:10, 0] = 1000.0
    return (x[:30], y[:30]), (x[30:], y[30:])

def three(labels, clients, rng):
    import numpy as np
    return np.split(np.arange(30), 3)
"""


def test_a_run_from_a_file_is_the_same_as_from_its_tables(tmp_path):
    (tmp_path / "mine.toml").write_text('rounds = 1\nclients = 5\narms = ["drop"]\n[model]\nname = "mlp"\n')
    tables = {"rounds": 1, "clients": 5, "arms": ["drop"], "model": {"name": "mlp"}}
    both = [safari.run(c, tmp_path / f"run{k}") for k, c in enumerate((str(tmp_path / "mine.toml"), tables))]
    assert both[0] == both[1]
    with pytest.raises(ConfigError, match=r"a table or the path of a TOML file, got 3$"):
        safari.run(3, tmp_path / "x")
    with pytest.raises(ConfigError, match=r"^cannot read nix\.toml: "):
        safari.run("nix.toml", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("rule", ["perfect", "drop", "safari"])
def test_an_update_that_became_nan_is_refused_recorded_and_the_run_goes_on(tmp_path, rule):
    (tmp_path / "nan.py").write_text(NAN)
    plug = {
        kind: {"name": f"{tmp_path}/nan.py:{name}"}
        for kind, name in (("model", "net"), ("data", "data"), ("partition", "three"))
    }
    config = {**SMALL, **plug, "clients": 3, "rounds": 3, "arms": [rule], "uplink": {"name": "perfect"}}
    config["pruning"] = {"sparsity": 0.5}
    summary = safari.run(config, tmp_path / "run")
    found = RunFolder.open(tmp_path / "run").trial(rule, 0).records()
    assert len(found) == 3
    for record in found:
        assert record["trained"] == [0, 1, 2]
        assert (record["arrived"], record["missing"]) == ([1, 2], [0])
        assert list(record["refused"]) == ["0"]
        assert record["refused"]["0"].endswith("numbers are NaN or infinite")
        assert record["train_loss"] > 0, "of those whose updates were used"
        assert math.isfinite(record["loss"])
        assert record["stand_ins"] == ({"0": [1, 2]} if rule == "safari" else {})
    assert summary["arms"][rule]["seeds"]["0"]["refused"] == 3


COUNTER = """
import torch
from torch import nn

def cumulative(shape, classes):
    '''Without a momentum, the norm's running mean hangs on how many batches it has seen.'''
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, momentum=None), nn.Linear(64, classes))
"""


def test_what_a_module_counts_does_not_leak_from_client_to_client(tmp_path):
    (tmp_path / "counter.py").write_text(COUNTER)
    config = {**SMALL, "model": {"name": f"{tmp_path}/counter.py:cumulative"}, "checkpoint": {"every": 2}}
    safari.run({**config, "arms": ["perfect", "drop"]}, tmp_path / "both")
    safari.run({**config, "arms": ["drop"]}, tmp_path / "alone")
    name = "trials/drop/seed-0/rounds.jsonl"
    assert (tmp_path / "both" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_module_that_counts_can_be_resumed(tmp_path):
    (tmp_path / "counter.py").write_text(COUNTER)
    config = {**SMALL, "arms": ["drop"], "checkpoint": {"every": 2}}
    config["model"] = {"name": f"{tmp_path}/counter.py:cumulative"}
    safari.run(config, tmp_path / "at once")
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, tmp_path / "halves", [StopAfter(3)])
    safari.resume(tmp_path / "halves")
    assert files(tmp_path / "halves") == files(tmp_path / "at once")


def test_dropout_is_seeded_by_client_and_round(tmp_path):
    (tmp_path / "drop.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))\n"
    )
    config = {**SMALL, "model": {"name": f"{tmp_path}/drop.py:net"}}
    assert records(config) == records(config)


def test_data_is_read_once_for_a_run(tmp_path):
    (tmp_path / "once.py").write_text(
        "from safari.data import digits\ncalls = []\n"
        "def data():\n    calls.append(1)\n    return digits()\n"
        "def count(shape, classes):\n    raise ValueError(f'read {len(calls)} times')\n"
    )
    config = parse({**SMALL, "rounds": 1, "seeds": 2, "data": {"name": f"{tmp_path}/once.py:data"}})
    safari.run(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="read 1 times"):
        assemble(parse({**SMALL, "model": {"name": f"{tmp_path}/once.py:count"}}), 0, load_data(parse({})))


@pytest.mark.parametrize(
    ("lr", "packets"), [(1e18, {"name": "none"}), (1e30, {"name": "lossy", "loss": 0.3, "size": 100})]
)
@pytest.mark.parametrize("gate", ["off", "norm"])
def test_a_diverging_run_goes_on_to_its_end(gate, lr, packets):
    """Products of such updates overflow float32, which ended `safari+` with a linear-algebra error; where all that
    came in part is refused, a rule sees a round without arrivals."""
    local = {**SMALL["local"], "lr": lr}
    for rule in ("safari", "safari+", "blue", "cluster-fedvarp", "fdms", "geometric-median", "trimmed-mean"):
        config = {**SMALL, "arms": [rule], "local": local, "aggregation": {"gate": gate}, "packets": packets}
        for _, after, _ in play(config):
            assert bool(torch.isfinite(after.model).all()), rule
