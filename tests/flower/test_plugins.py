"""The plug-ins of docs/plugins.md in both engines and on Flower."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import sys

from engine.kit import world_of
from flower.test_equality import TABLE
from flower.test_methods import assert_same
from flower.twin import on_flower, our_loop
from safari.engine import vectorised
from safari.engine.state import initial
from safari.plugins import resolve
from safari.training import CLIENTS
from test_docs import DOCS, blocks_of

PLUGINS = {
    "FedProx": {"client": {"name": "my_client.py:prox", "mu": 0.5}},
    "SCAFFOLD": {"client": {"name": "my_client.py:scaffold"}},
    "RigL": {"policy": {"name": "my_policy.py:regrow", "every": 2}},
    "FedAdam": {"aggregation": {"steps": [{"name": "my_step.py:adam", "lr": 0.02}]}},
    "a task of tokens": {
        "task": {"name": "my_tags.py:focal", "gamma": 2.0},
        "data": {"name": "my_tags.py:rises", "samples": 300},
        "model": {"name": "my_tags.py:tagger", "hidden": 16},
        "partition": {"name": "iid"},
        "pruning": {"pruner": "snip", "sparsity": 0.5},
    },
    "all of them": {
        "client": {"name": "my_client.py:scaffold"},
        "policy": {"name": "my_policy.py:regrow", "every": 1},
        "aggregation": {"steps": [{"name": "my_step.py:adam"}]},
    },
}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's files, in a folder of their own."""
    for block in blocks_of(DOCS / "plugins.md"):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize("tables", PLUGINS.values(), ids=PLUGINS)
def test_a_plug_in_of_the_page_runs_everywhere(tables, page):
    table = {**TABLE, "rounds": 5, "model": {"name": "mlp", "hidden": [8]}, "arms": ["drop"], **tables}
    world = world_of(table)
    name = world.config.client.name
    algorithm = None
    if name not in CLIENTS:
        # What a client runs is its own code: no name that came over a network is ever imported.
        algorithm = resolve("client", "client.name", name, CLIENTS)(**world.config.client.options)
    strategy, lines, models = on_flower(world, our_loop(world, algorithm), page / "run")
    assert_same(world, strategy, lines, models)

    fed = world.federation()
    engine, state = vectorised.prepare(world), initial(world, fed)
    for line in lines:
        state, record, _ = engine(fed, state)
        for field in ("arrived", "missing", "density"):
            assert record[field] == line[field]
        assert (record["churn"] > 0) == (line["churn"] > 0)
    every = world.config.policy.options.get("every")
    if every:
        counts = {
            round(line["density"] * world.layout.prunable_count, 6) for line in lines if line["arrived"]
        }
        assert counts == {world.budget(0).total}
        reported = [not line["lost"] for line in lines]
        moves = [t for t in range(1, 5) if t % every == 0 and reported[t - 1]]
        assert moves
        assert all(lines[t]["churn"] > 0 for t in moves)
