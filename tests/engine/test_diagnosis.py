"""The quantities of the theory, against plain arithmetic on what a perfect network's server sees."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kit import SMALL, play, records, world_of, write_trace
from safari.aggregation import RULES, Compensation
from safari.engine.reference import run_round

DIAGNOSED = {**SMALL, "diagnostics": {"every": 1}}
# Masks of each client's own, or one for all; clients that count differently; a client that hears nothing.
SETTINGS = {
    "shared masks": {"pruning": {"pruner": "mag"}},
    "own masks": {"pruning": {"pruner": "snip", "batch": 16}},
    "weights": {"aggregation": {"weights": "samples"}, "partition": {"name": "dirichlet", "alpha": 0.5}},
    "cohort": {"cohort": 3},
    "downlink": {"downlink": {"name": "bernoulli", "p": 0.5}},
    "steps": {"local": {"epochs": 0.05, "batch": 8}, "partition": {"name": "dirichlet", "alpha": 0.5}},
}


def seen_by_a_perfect_server(config: dict, state):
    """The models and weights of the whole cohort in a round that begins with this state."""
    seen = []

    def apply(rule_state, round):
        seen.append(round)
        return RULES["drop"]().apply({}, round)[0], rule_state

    world = world_of(config)
    spy = world.federation(Compensation(lambda clients, size, device: {}, apply, overrides_network=True))
    run_round(world, spy, state.put("rule", {}))
    (round,) = seen
    return world, round


def by_hand(config: dict, before, after, record) -> dict[str, float | None]:
    world, round = seen_by_a_perfect_server(config, before)
    n = world.layout.parameters
    x = before.model[:n].double().numpy()
    ids = round.cohort.tolist()
    weight = dict(zip(ids, round.weights.tolist(), strict=True))
    delta = {c: round.models[k, :n].double().numpy() - x for k, c in enumerate(ids)}
    mean = sum(weight[c] * delta[c] for c in ids)
    new = after.model[:n].double().numpy()
    above = below = 0.0
    for missing, who in record["stand_ins"].items():
        j = int(missing)
        given = np.mean([delta[c] for c in who], axis=0)
        above += weight[j] * np.sum((given - delta[j]) ** 2)
        below += weight[j] * np.sum(delta[j] ** 2)
    masks = [world.mask(before.model, c, before.round)[:n].numpy() for c in ids]
    return {
        "error": np.sum((new - x - mean) ** 2) / np.sum(mean**2),
        "phi": above / below if below else None,
        "delta": np.mean([np.linalg.norm(x[~mask]) for mask in masks]) / np.linalg.norm(x),
        "dissimilarity": sum(weight[c] * np.sum((delta[c] - mean) ** 2) for c in ids) / np.sum(mean**2),
    }


def close(ours: dict, theirs: dict, **tolerance: float) -> bool:
    """Numbers near each other, and nothing where there is nothing."""
    return ours.keys() == theirs.keys() and all(
        ours[key] == (None if value is None else pytest.approx(value, **tolerance))
        for key, value in theirs.items()
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_number_is_its_formula(setting: str) -> None:
    config = {**DIAGNOSED, "rounds": 3, **SETTINGS[setting]}
    for before, after, record in play(config):
        assert close(record["diagnosis"], by_hand(config, before, after, record), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_engines_find_the_same(setting: str) -> None:
    config = {**DIAGNOSED, "rounds": 2, **SETTINGS[setting]}
    one = records(config)
    two = records({**config, "engine": {**SMALL["engine"], "name": "vectorised"}})
    for ours, theirs in zip(one, two, strict=True):
        # An error that is 0 is 0 up to the rounding of either.
        assert close(ours["diagnosis"], theirs["diagnosis"], rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize("pruner", ["mag", "snip"])
def test_a_diagnosis_changes_nothing_else(engine: str, pruner: str) -> None:
    config = {**SMALL, "engine": {**SMALL["engine"], "name": engine}, "pruning": {"pruner": pruner}}
    plain, diagnosed = records(config), records({**config, "diagnostics": {"every": 2}})
    assert [r["diagnosis"] is not None for r in diagnosed] == [False, True, False, True, False]
    assert [{**r, "diagnosis": None} for r in diagnosed] == plain


def test_a_perfect_network_has_no_error_and_no_stand_ins() -> None:
    for record in records({**DIAGNOSED, "arms": ["perfect"]}):
        assert record["diagnosis"]["error"] < 1e-9
        assert record["diagnosis"]["phi"] is None


def test_a_round_in_which_nobody_arrives_has_error_1(tmp_path) -> None:
    trace = write_trace(tmp_path / "none.csv", ["00000"])
    (record,) = records({**DIAGNOSED, "rounds": 1, "arms": ["drop"], "pruning": {"sparsity": 0.0},
                         "uplink": {"name": "trace", "file": trace}})  # fmt: skip
    assert record["lost"]
    assert record["diagnosis"]["error"] == pytest.approx(1.0)
    assert record["diagnosis"]["delta"] == 0.0
