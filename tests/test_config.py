"""An experiment as data: every limit in words, all errors at once, plug-ins, and what a setting replaces."""

from __future__ import annotations

import dataclasses
import math
import time
import tomllib
import typing
from typing import Any

import numpy as np
import pytest

from safari.config import Arm, Config, Plug, override, parse
from safari.errors import ConfigError

SECTIONS = {
    name: hint
    for name, hint in typing.get_type_hints(Config).items()
    if dataclasses.is_dataclass(hint) and hint is not Plug
}


def problems(table: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(table)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def nested(path: str, value: Any) -> dict[str, Any]:
    section, dot, name = path.partition(".")
    return {section: {name: value}} if dot else {section: value}


# --- defaults


def test_the_defaults_are_the_demo() -> None:
    config = parse({})
    assert config == Config()
    assert [arm.name for arm in config.arms] == ["perfect", "drop", "safari", "safari+"]
    assert config.data == Plug("digits")
    assert config.partition == Plug("groups", {"groups": 2})
    assert config.uplink == Plug("bernoulli", {"p": [1, 0.3, 0.3, 0.3, 0.3]})
    assert config.downlink == Plug("perfect")
    assert (config.pruning.pruner, config.pruning.sparsity, config.clients) == ("mag", 0.8, 10)


def test_every_field_is_documented() -> None:
    for cls in (Config, *SECTIONS.values()):
        for f in dataclasses.fields(cls):
            if f.name not in SECTIONS:
                assert f.metadata.get("doc"), (cls, f.name)
        assert cls.__doc__


def test_a_default_may_be_written_out() -> None:
    """Every default is within its own limits."""
    assert parse(Config().to_dict()) == Config()


def test_defaults_are_not_shared() -> None:
    assert Config().uplink.options is not Config().uplink.options


# --- limits

SCHEDULE = "pruning.schedule must be one of constant, cubic, wait; got 'cubik' (did you mean 'cubic'?)"
LIMITS = [
    ("seed", -1, "seed must be at least 0, got -1"),
    ("seed", 2**80, f"seed must be at most {10**18}, got {2**80}"),
    ("seeds", 0, "seeds must be at least 1, got 0"),
    ("seeds", 10**12, f"seeds must be at most 100000, got {10**12}"),
    ("rounds", 0, "rounds must be at least 1, got 0"),
    ("rounds", 10**23, f"rounds must be at most {10**9}, got {10**23}"),
    ("clients", 0, "clients must be at least 1, got 0"),
    ("cohort", -1, "cohort must be at least 0, got -1"),
    ("pruning.sparsity", -0.1, "pruning.sparsity must be at least 0.0, got -0.1"),
    ("pruning.sparsity", 1, "pruning.sparsity must be below 1.0, got 1"),
    ("pruning.sparsity", 1.0, "pruning.sparsity must be below 1.0, got 1.0"),
    ("pruning.sparsity", math.nan, "pruning.sparsity must be a finite number, got nan"),
    ("pruning.batch", 0, "pruning.batch must be at least 1, got 0"),
    ("local.steps", 0, "local.steps must be at least 1, got 0"),
    ("local.epochs", -1, "local.epochs must be at least 0.0, got -1"),
    ("local.batch", 0, "local.batch must be at least 1, got 0"),
    ("local.optimiser", "adm", "local.optimiser must be one of adam, sgd; got 'adm' (did you mean 'adam'?)"),
    ("local.optimiser", "rmsprop", "local.optimiser must be one of adam, sgd; got 'rmsprop'"),
    ("local.lr", 0.0, "local.lr must be at least 1e-30, got 0.0"),
    ("local.lr", 1e-50, "local.lr must be at least 1e-30, got 1e-50"),
    ("local.lr", 1e40, "local.lr must be at most 1e+30, got 1e+40"),
    ("local.lr", math.inf, "local.lr must be a finite number, got inf"),
    (
        "local.augment",
        "cropflip",
        "local.augment must be one of crop-flip, none; got 'cropflip' (did you mean 'crop-flip'?)",
    ),
    (
        "aggregation.weights",
        "sample",
        "aggregation.weights must be one of samples, uniform; got 'sample' (did you mean 'samples'?)",
    ),
    ("aggregation.average", 1.0, "aggregation.average must be below 1.0, got 1.0"),
    ("aggregation.average", -0.1, "aggregation.average must be at least 0.0, got -0.1"),
    ("aggregation.average", math.nan, "aggregation.average must be a finite number, got nan"),
    (
        "engine.device",
        "gpu",
        "engine.device must be one of auto, cpu, cuda; got 'gpu' (did you mean 'cpu'?)",
    ),
    (
        "engine.name",
        "refrence",
        "engine.name must be one of reference, vectorised; got 'refrence' (did you mean 'reference'?)",
    ),
    (
        "engine.precision",
        "float16",
        "engine.precision must be one of bfloat16, float32; got 'float16' (did you mean 'bfloat16'?)",
    ),
    (
        "engine.compile",
        "alway",
        "engine.compile must be one of always, auto, never; got 'alway' (did you mean 'always'?)",
    ),
    ("engine.threads", -1, "engine.threads must be at least 0, got -1"),
    ("wire.every", -1, "wire.every must be at least 0, got -1"),
    ("wire.bits", 9, "wire.bits must be at most 8, got 9"),
    ("wire.bits", 1, "wire.bits must be at least 2, got 1"),
    ("wire.step", 0, "wire.step must be above 0.0, got 0"),
    ("wire.ratio", -1, "wire.ratio must be at least 0.0, got -1"),
    ("wire.fraction", 0, "wire.fraction must be above 0.0, got 0"),
    ("wire.fraction", 1.5, "wire.fraction must be at most 1.0, got 1.5"),
    ("wire.threshold", 0, "wire.threshold must be above 0.0, got 0"),
    ("wire.adapt", "time", "wire.adapt must be one of loss, none; got 'time'"),
    (
        "wire.values",
        "stepp",
        "wire.values must be one of absolute, auto, bf16, difference, fp16, int8, qsgd, sign, step, "
        "threshold, top-k, unbiased; "
        "got 'stepp' (did you mean 'step'?)",
    ),
    ("evaluation.every", 0, "evaluation.every must be at least 1, got 0"),
    ("evaluation.norms", "static", "evaluation.norms must be one of averaged, gathered; got 'static'"),
    ("evaluation.batch", 0, "evaluation.batch must be at least 1, got 0"),
    ("evaluation.validation", -0.1, "evaluation.validation must be at least 0.0, got -0.1"),
    ("evaluation.validation", 1, "evaluation.validation must be below 1.0, got 1"),
    ("evaluation.clients", 1, "evaluation.clients must be below 1.0, got 1"),
    ("evaluation.last", 0, "evaluation.last must be at least 1, got 0"),
    ("evaluation.last_every", -1, "evaluation.last_every must be at least 0, got -1"),
    ("evaluation.target", 0, "evaluation.target must be above 0.0, got 0"),
    ("pruning.scope", "erdos", "pruning.scope must be one of erk, global, uniform; got 'erdos'"),
    ("pruning.least", 1.5, "pruning.least must be at most 1.0, got 1.5"),
    ("pruning.schedule", "cubik", SCHEDULE),
    ("pruning.initial", 1, "pruning.initial must be below 1.0, got 1"),
    ("pruning.begin", -1, "pruning.begin must be at least 0, got -1"),
    ("pruning.end", -1, "pruning.end must be at least 0, got -1"),
    ("local.factor", 2, "local.factor must be at most 1.0, got 2"),
    (
        "local.schedule",
        "step",
        "local.schedule must be one of constant, cosine, inverse-sqrt, steps; got 'step' (did you mean 'steps'?)",
    ),
    ("local.horizon", 0, "local.horizon must be at least 1, got 0"),
    ("local.final", 2, "local.final must be at most 1.0, got 2"),
    ("local.factor", 0, "local.factor must be above 0.0, got 0"),
    ("checkpoint.keep", 0, "checkpoint.keep must be at least 1, got 0"),
    ("checkpoint.every", -1, "checkpoint.every must be at least 0, got -1"),
    ("checkpoint.keep", 0, "checkpoint.keep must be at least 1, got 0"),
    ("diagnostics.every", -1, "diagnostics.every must be at least 0, got -1"),
]


@pytest.mark.parametrize(("path", "value", "text"), LIMITS)
def test_a_limit_in_words(path: str, value: Any, text: str) -> None:
    assert problems(nested(path, value)) == [text]


def test_a_rate_that_falls_to_nothing_is_refused() -> None:
    steps = {"schedule": "steps", "factor": 1e-300}
    text = (
        "local.factor must leave a learning rate of at least 1e-30: after {} milestones, 0.001 is {}; got {}"
    )
    assert problems({"local": steps}) == [text.format(2, 0, "1e-300")]
    many = {"schedule": "steps", "milestones": [k / 100 for k in range(50)]}
    assert problems({"local": many}) == [text.format(50, "1e-53", 0.1)]
    assert problems({"arms": [{"name": "a", "rule": "drop", "set": {"local": steps}}]}) == [
        "arms: a.set: " + text.format(2, 0, "1e-300")
    ]
    # It never falls: the milestones are not reached, or there are none.
    parse({"local": {**steps, "milestones": [1.0, 2.0]}})
    parse({"local": {"factor": 1e-300}})


def test_every_limit_is_in_the_table() -> None:
    tested = {path for path, _, _ in LIMITS}
    limited = set()
    for prefix, cls in (("", Config), *((f"{name}.", cls) for name, cls in SECTIONS.items())):
        limited |= {prefix + f.name for f in dataclasses.fields(cls) if set(f.metadata) - {"doc"}}
    assert limited == tested


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pruning.sparsity", 0),
        ("pruning.sparsity", 0.999999),
        ("evaluation.target", 1),
        ("cohort", 10),
        ("local.lr", 1e-30),
        ("local.lr", 1e30),
        ("seed", 10**18),
    ],
)
def test_the_edge_is_within(path: str, value: Any) -> None:
    config: Any = parse(nested(path, value))
    for part in path.split("."):
        config = getattr(config, part)
    assert config == value
    if isinstance(value, int) and path not in ("cohort", "seed"):
        assert isinstance(config, float)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("name", 3, "name must be a text, got 3"),
        ("rounds", 1.0, "rounds must be a whole number, got 1.0"),
        ("rounds", "5", "rounds must be a whole number, got '5'"),
        ("rounds", True, "rounds must be a whole number, got True"),
        ("local.lr", "fast", "local.lr must be a number, got 'fast'"),
        ("local.lr", True, "local.lr must be a number, got True"),
        ("local.lr", [1], "local.lr must be a number, got [1]"),
        ("track.tensorboard", 1, "track.tensorboard must be true or false, got 1"),
        ("track.mlflow", False, "track.mlflow must be a text, got False"),
        ("pruning", "mag", "pruning must be a table, got 'mag'"),
        ("uplink", "lost", "uplink must be a table, got 'lost' (did you mean uplink.name=lost?)"),
        (
            "engine",
            "reference",
            "engine must be a table, got 'reference' (did you mean engine.name=reference?)",
        ),
        ("uplink", 3, "uplink must be a table, got 3"),
        ("uplink", "", "uplink must be a table, got ''"),
        ("uplink.name", 3, "uplink.name must be a text, got 3"),
        ("uplink.name", "", "uplink.name must be a text, got ''"),
        ("arms", "drop", "arms must be a list of rules, got 'drop'"),
        ("arms", [], "arms must name at least one rule, got none"),
        ("arms", [3], 'arms: each must be a rule\'s name or a table with "rule", got 3'),
        (
            "arms",
            [{"name": "mine"}],
            "arms: each must be a rule's name or a table with \"rule\", got {'name': 'mine'}",
        ),
        ("arms", ["drop", "safari", "drop"], "arms: the name 'drop' is used twice"),
        (
            "arms",
            [{"rule": "drop", "name": "a b"}],
            "arms: a name may hold letters, digits, and . _ + - only, got 'a b'",
        ),
        (
            "arms",
            [{"rule": "drop", "name": "../x"}],
            "arms: a name may hold letters, digits, and . _ + - only, got '../x'",
        ),
        ("name", "", "name may hold letters, digits, and . _ + - only, got ''"),
        ("name", "a/b", "name may hold letters, digits, and . _ + - only, got 'a/b'"),
        ("name", ".hidden", "name may hold letters, digits, and . _ + - only, got '.hidden'"),
        ("name", "é", "name may hold letters, digits, and . _ + - only, got 'é'"),
        ("cohort", 11, "cohort must be at most clients (10), got 11"),
    ],
)
def test_values_of_another_kind(path: str, value: Any, text: str) -> None:
    assert problems(nested(path, value)) == [text]


def test_a_whole_number_without_a_float_is_refused() -> None:
    huge = 10**400
    assert problems({"local": {"lr": huge}}) == [f"local.lr must be a number, got 1{'0' * 96}..."]


def test_a_config_full_of_nonsense_is_refused_at_once_and_in_few_words() -> None:
    """Every line of these took time that grew with all others."""
    begin = time.monotonic()
    many = {f"k{k}": k for k in range(200_000)}
    found = problems(many | {"local": many})
    assert found[:2] == ["k0 is not a field", "k1 is not a field"]
    assert found[20] == "the config has 199,980 more names that do not exist"
    assert found[41] == "local has 199,980 more names that do not exist"
    assert len(found) == 42
    assert problems({"arms": [f"a{k}" for k in range(100_000)]}) == [
        "arms must name at most 1000 rules, got 100000"
    ]
    assert problems({"arms": ["drop"] * 1000}) == ["arms: the name 'drop' is used twice"]
    assert max(map(len, problems({"name": "x\x1b" * 10**6, "arms": ["y " * 10**6], "z" * 10**6: 1}))) < 200
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"ronuds": 3}, "ronuds is not a field (did you mean 'rounds'?)"),
        ({"pruning": {"sparcity": 3}}, "pruning.sparcity is not a field (did you mean 'sparsity'?)"),
        ({"zzz": {}}, "zzz is not a field"),
        ({"checkpoint": {"name": "x"}}, "checkpoint.name is not a field"),
    ],
)
def test_unknown_fields_and_the_nearest_spelling(table: dict[str, Any], text: str) -> None:
    assert problems(table) == [text]


def test_all_errors_at_once() -> None:
    found = problems(
        {
            "ronuds": 3,
            "clients": 4,
            "cohort": 9,
            "name": "a b",
            "arms": [],
            "uplink": {"name": 1},
            "pruning": {"sparsity": 2, "batsch": 1},
            "local": {"optimiser": "sdg", "lr": -1},
        }
    )
    assert found == [
        "ronuds is not a field (did you mean 'rounds'?)",
        "arms must name at least one rule, got none",
        "pruning.batsch is not a field (did you mean 'batch'?)",
        "pruning.sparsity must be below 1.0, got 2",
        "local.optimiser must be one of adam, sgd; got 'sdg' (did you mean 'sgd'?)",
        "local.lr must be at least 1e-30, got -1",
        "uplink.name must be a text, got 1",
        "cohort must be at most clients (4), got 9",
        "name may hold letters, digits, and . _ + - only, got 'a b'",
    ]


def test_a_wrong_number_of_clients_brings_no_error_about_the_cohort() -> None:
    assert problems({"clients": "50", "cohort": 20}) == ["clients must be a whole number, got '50'"]


# --- plug-ins and arms


def test_options_without_a_name_change_the_default_plug_in() -> None:
    assert parse({"partition": {"groups": 5}}).partition == Plug("groups", {"groups": 5})
    assert parse({"uplink": {"q": 1}}).uplink == Plug("bernoulli", {"p": [1, 0.3, 0.3, 0.3, 0.3], "q": 1})


def test_a_name_brings_only_its_own_options() -> None:
    assert parse({"uplink": {"name": "lost"}}).uplink == Plug("lost", {})
    assert parse({"uplink": {"name": "bernoulli"}}).uplink == Plug("bernoulli", {})


def test_arms_by_name_by_table_and_by_file() -> None:
    config = parse(
        {
            "arms": [
                "drop",
                "my/rules.py:blend",
                {"rule": "safari"},
                {"rule": "package.module:mix", "name": "mix-2", "share": 0.5},
            ]
        }
    )
    assert config.arms == (
        Arm("drop", Plug("drop")),
        Arm("blend", Plug("my/rules.py:blend")),
        Arm("safari", Plug("safari")),
        Arm("mix-2", Plug("package.module:mix", {"share": 0.5})),
    )
    assert parse(config.to_dict()) == config


# --- digest


def test_the_digest_follows_everything() -> None:
    digests = {parse({}).digest}
    for table in (
        {"rounds": 151},
        {"name": "other"},
        {"local": {"lr": 0.002}},
        {"uplink": {"p": 0.5}},
        {"arms": ["drop"]},
        {"arms": ["drop", "perfect", "safari"]},
        {"track": {"tensorboard": True}},
    ):
        digests.add(parse(table).digest)
    assert len(digests) == 8
    assert parse({"rounds": 150}).digest == parse({}).digest


# --- what --set replaces


@pytest.mark.parametrize(
    ("table", "settings", "expected"),
    [
        ({}, [("rounds", 5)], {"rounds": 5}),
        ({"rounds": 1}, [("rounds", 5), ("rounds", 6)], {"rounds": 6}),
        (
            {"pruning": {"batch": 3}},
            [("pruning.sparsity", 0.9)],
            {"pruning": {"batch": 3, "sparsity": 0.9}},
        ),
        # Another plug-in drops the options of the one before; the same one keeps them.
        ({"uplink": {"name": "sine", "period": 3}}, [("uplink.name", "lost")], {"uplink": {"name": "lost"}}),
        (
            {"uplink": {"name": "sine", "period": 3}},
            [("uplink.name", "sine")],
            {"uplink": {"name": "sine", "period": 3}},
        ),
        # A table without a name means the default plug-in, so that naming it changes nothing.
        (
            {"uplink": {"p": 0.5}},
            [("uplink.name", "bernoulli")],
            {"uplink": {"p": 0.5, "name": "bernoulli"}},
        ),
        ({"uplink": {"p": 0.5}}, [("uplink.name", "sine")], {"uplink": {"name": "sine"}}),
        # On the command line the order does not matter.
        ({}, [("uplink.name", "sine"), ("uplink.period", 9)], {"uplink": {"name": "sine", "period": 9}}),
        ({}, [("uplink.period", 9), ("uplink.name", "sine")], {"uplink": {"name": "sine", "period": 9}}),
        (
            {"uplink": {"name": "lost", "x": 1}},
            [("uplink.period", 9), ("uplink.name", "sine")],
            {"uplink": {"name": "sine", "period": 9}},
        ),
        # A section that has a name among its fields is no plug-in.
        (
            {"engine": {"device": "cpu"}},
            [("engine.name", "reference")],
            {"engine": {"device": "cpu", "name": "reference"}},
        ),
        ({"uplink": {"name": "sine"}}, [("uplink", {"name": "lost"})], {"uplink": {"name": "lost"}}),
    ],
)
def test_what_a_setting_replaces(
    table: dict[str, Any], settings: list[tuple[str, Any]], expected: dict[str, Any]
) -> None:
    before = copied(table)
    assert override(table, settings) == expected
    assert table == before


def copied(table: dict[str, Any]) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, dict) else v for k, v in table.items()}


def test_a_setting_inside_what_is_no_table() -> None:
    with pytest.raises(ConfigError) as error:
        override({"rounds": 3}, [("rounds.x", 1)])
    assert str(error.value) == "rounds.x: rounds is not a table"
    with pytest.raises(ConfigError) as error:
        override({}, [("uplink", "gilbert-elliott"), ("uplink.p", 0.3)])
    assert str(error.value) == ("uplink.p: uplink is not a table (did you mean uplink.name=gilbert-elliott?)")


def own_data():
    """What a user wrote, given itself and not by its name."""


NAMED = '"file.py:NAME" or "__main__:NAME"'


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("data.name", own_data, f"data.name must be a text such as {NAMED}, got {own_data!r}"),
        ("pruning.pruner", own_data, f"pruning.pruner must be a text such as {NAMED}, got {own_data!r}"),
        (
            "data",
            own_data,
            f"data must be a table, got {own_data!r}; your own goes in by its name, as data.name = {NAMED}",
        ),
        (
            "arms",
            [own_data],
            f'arms: each must be a rule\'s name or a table with "rule", got {own_data!r}; '
            f"your own goes in by its name, as {NAMED}",
        ),
        (
            "aggregation.steps",
            [own_data],
            f'aggregation.steps[0] must be a name or a table with "name", got {own_data!r}; '
            f"your own goes in by its name, as {NAMED}",
        ),
    ],
)
def test_a_function_in_the_place_of_its_name(path, value, text):
    assert problems(nested(path, value)) == [text]


def test_arrays_are_not_poured_into_the_message():
    x, y = np.zeros((300, 8, 8)), np.arange(300)
    (problem,) = problems({"data": ((x, y), (x, y))})
    assert problem.startswith("data must be a table, got [[array([[[0., 0., 0.,")
    assert problem.endswith(f"...; your own goes in by its name, as data.name = {NAMED}")
    assert "\n" not in problem
    assert len(problem) < 250


@pytest.mark.parametrize(
    "value",
    [[1.5] * 10**6, {"k" * 10**6: 1}, "x" * 10**6, 10**4000, 10**5000, np.zeros(900), np.zeros((50, 50))],
    ids=["list", "table", "text", "number", "endless", "array", "matrix"],
)
def test_a_long_value_is_cut_in_every_message(value):
    for table in ({"rounds": value}, {"arms": value}, {"name": [value]}, {"arms": [["x", value]]},
                  {"aggregation": {"steps": [["x", value]]}}, {"uplink": {"name": [value]}}):  # fmt: skip
        for problem in problems(table):
            assert len(problem) < 400
            assert "\n" not in problem


def test_dates_are_reported_wherever_they_are():
    """TOML has them; no field, no option and no record can hold one."""
    table = tomllib.loads(
        'rounds = 2020-01-01\narms = ["drop", {rule = "safari", when = 10:00:00}]\n[model]\nname = "mlp"\n'
        "hidden = [8, 2020-01-01T00:00:00Z]\n"
    )
    words = "must be a text, a number, true or false, a list or a table, got the date"
    with pytest.raises(ConfigError) as error:
        parse(table)
    assert error.value.problems == [
        f"rounds {words} 2020-01-01",
        f"arms.when {words} 10:00:00",
        f"model.hidden {words} 2020-01-01 00:00:00+00:00",
    ]


def test_an_address_that_is_none():
    with pytest.raises(ConfigError, match=r"^track.mlflow must be an address or a folder, got 'http://\['"):
        parse({"track": {"mlflow": "http://["}})
