"""An experiment as validated data. Every field says what it means, so that the reference page,
the commented template and the errors all come from here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from safari.aliases import field_of, renamed
from safari.errors import ConfigError, brief, did_you_mean, not_there, one_of
from safari.modes import ValueMode
from safari.plugins import fits, spell, type_hints
from safari.presets import RECIPE, RECIPE_RULE, recipe


def _f(default: Any, doc: str, **limits: Any) -> Any:
    """A field with its documentation and limits: `least`, `most`, `above`, `below`, `choices`."""
    metadata = {"doc": doc, **limits}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Plug:
    """A plug-in by name, with its options: a table with `name` and whatever the plug-in takes."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _plug(name: str, doc: str, **options: Any) -> Any:
    return field(default_factory=lambda: Plug(name, dict(options)), metadata={"doc": doc})


@dataclass(frozen=True)
class Arm:
    """One way of treating the missing, under a name of its own; `set` holds the tables in which it differs from
    the other arms."""

    name: str
    rule: Plug
    set: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pruning:
    """Which weights are trained and sent."""

    pruner: str = _f("mag", "rand, mag, snip, grasp, synflow, or your own as file.py:name")
    options: Mapping[str, Any] = _f(
        {}, "the keyword-only arguments of a score function of your own; the built-in ones have none"
    )
    sparsity: float = _f(0.8, "fraction of the prunable weights that is cut", least=0.0, below=1.0)
    batch: int = _f(
        64,
        "samples that snip, grasp and policies that ask for gradients look at, drawn anew each round",
        least=1,
    )
    scope: str = _f(
        "global",
        "how the cut is divided between layers: global: one ranking of all weights (the paper); uniform: the "
        "same density in each layer; erk: Erdős–Rényi-kernel, small layers are denser. Always exactly the "
        "same number in all",
        choices=("global", "uniform", "erk"),
    )
    dense: tuple[str, ...] = _f(
        (), 'layers of which nothing is cut: "first", "last", or names; the others are cut more'
    )
    least: float = _f(
        0.0, "smallest density of a layer: a little keeps a layer from being cut whole", least=0.0, most=1.0
    )
    allow_dead_layers: bool = _f(
        False, "run although a first mask keeps nothing of a layer, so that nothing passes there"
    )
    schedule: str = _f(
        "constant",
        "constant: the sparsity holds from the first round on (the paper); wait: from round `begin` on; "
        "cubic: it grows from `initial` in round `begin` to `sparsity` in round `end`",
        choices=("constant", "wait", "cubic"),
    )
    initial: float = _f(0.0, "sparsity before round `begin`, with wait and cubic", least=0.0, below=1.0)
    begin: int = _f(0, "round in which cutting begins, with wait and cubic", least=0)
    end: int = _f(0, "round in which `sparsity` is reached, with cubic", least=0)
    masks_gradient: bool = _f(
        True,
        "clients train inside their mask; false: Algorithm 2 as it is printed, where only the model that a "
        "client begins with is masked",
    )


# Of any round: less is 0 in float32 once it is divided by the steps.
_LEAST_LR = 1e-30


@dataclass(frozen=True)
class Local:
    """Local training of a client in a round (Algorithm 2)."""

    steps: int = _f(5, "local steps τ in a round", least=1)
    epochs: float = _f(0.0, "passes over the client's own data instead of `steps`; 0: use `steps`", least=0.0)
    batch: int = _f(32, "samples in a step", least=1)
    optimiser: str = _f("adam", "adam (lr) or sgd (lr/τ, as in the paper)", choices=("adam", "sgd"))
    # Far beyond, it is 0 or infinite in float32, and a run would silently train nothing.
    lr: float = _f(0.001, "learning rate η", least=_LEAST_LR, most=1e30)
    schedule: str = _f(
        "constant",
        "learning rate over the rounds: constant; cosine: down to `final` · lr; steps: times `factor` after "
        "each of the `milestones`; inverse-sqrt: lr / √(1 + t / `horizon`) in round t",
        choices=("constant", "cosine", "steps", "inverse-sqrt"),
    )
    final: float = _f(0.0, "where a cosine ends, as a fraction of lr", least=0.0, most=1.0)
    milestones: tuple[float, ...] = _f((0.5, 0.75), "parts of the run after which the rate drops, with steps")
    factor: float = _f(0.1, "what the rate is multiplied by at a milestone", above=0.0, most=1.0)
    horizon: int = _f(10, "rounds after which inverse-sqrt is down to lr / √2", least=1)
    augment: str = _f("none", "none, or crop-flip for pictures", choices=("none", "crop-flip"))


@dataclass(frozen=True)
class Aggregation:
    """Averaging of the models."""

    weights: str = _f(
        "uniform", "uniform, or samples: by each client's sample count", choices=("uniform", "samples")
    )
    average: float = _f(
        0.0,
        "keep and test a running average of the global models, too: the weight that the past keeps in each "
        "round, such as 0.9; 0: none. It changes nothing else (docs/algorithm.md)",
        least=0.0,
        below=1.0,
    )
    steps: tuple[Plug, ...] = _f(
        (),
        "what the server does with the change that the weighted sum gave, in this order: steps by name, or "
        'tables such as {name = "fedadam", lr = 0.01} (docs/algorithm.md)',
    )
    gate: Plug = _plug(
        "norm",
        "which updates the rule gets to see: norm: all but absurdly large ones; off: all that are finite; or a "
        'table such as {name = "norm", factor = 3.0, action = "clip"} (docs/algorithm.md)',
    )


@dataclass(frozen=True)
class Engine:
    """Implementation that computes the rounds."""

    name: str = _f(
        "vectorised",
        "vectorised: all clients at once; reference: one after the other, as Algorithm 1 reads",
        choices=("vectorised", "reference"),
    )
    precision: str = _f(
        "float32",
        "float32, or bfloat16 for the clients' training and the scores of snip and grasp (weights and sums "
        "stay float32, and so do tests of the model)",
        choices=("float32", "bfloat16"),
    )
    compile: str = _f(
        "auto",
        "compile kernels for the model (bfloat16 on CUDA, with Triton): auto: in runs of 100 rounds or more; "
        "always; never",
        choices=("auto", "always", "never"),
    )
    graph: bool = _f(True, "replay a round's training as one CUDA graph where that is possible")
    device: str = _f("auto", "cpu, cuda, or auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    threads: int = _f(0, "CPU threads for torch; 0: its own choice", least=0, most=1024)


@dataclass(frozen=True)
class Wire:
    """Encoding of models as bytes (docs/wire.md)."""

    values: str = _f(
        "auto",
        "numbers of an upload: exact (auto: the smallest; absolute, difference), or lossy (bf16, fp16, int8, "
        "qsgd, step, sign, top-k, unbiased, threshold), and then the server averages what it decodes",
        choices=tuple(mode.value for mode in ValueMode),
    )
    bits: int = _f(4, "bits of a number with qsgd", least=2, most=8)
    adapt: str = _f(
        "none",
        "levels of qsgd from round to round: none: always those of `bits`; loss: AdaQuantFL, their number grows by "
        "the factor by which the root of the training loss, as the server has heard it, has fallen since round 1; "
        "in the simulator only",
        choices=("none", "loss"),
    )
    step: float = _f(1.0, "one step of the mode step, in units of the difference's rms", above=0.0)
    ratio: float = _f(
        60.0,
        "the mode step rounds more coarsely where a message would be more than 1/ratio of the dense model; "
        "0: never",
        least=0.0,
    )
    fraction: float = _f(
        0.05, "share of the kept weights that top-k sends, and unbiased on average", above=0.0, most=1.0
    )
    threshold: float = _f(
        0.005,
        "the mode threshold sends a change of a weight that is beyond this, and as this: about the largest "
        "change of a round",
        above=0.0,
    )
    feedback: Literal["auto"] | bool = _f(
        "auto",
        "error feedback: a client adds to its next upload what lossy values left out of the parameters in "
        "those that arrived; auto: with step, sign, top-k and threshold, which would otherwise swallow small "
        "changes for good",
    )
    every: int = _f(
        10,
        "rounds between two in which messages are encoded to count their bytes; 0: never. Lossy values are "
        "rounded in every round",
        least=0,
    )

    @property
    def feeds_back(self) -> bool:
        """Whether clients keep what their uploads left out.

        >>> Wire().feeds_back, Wire("step").feeds_back, Wire("step", feedback=False).feeds_back
        (False, True, False)
        """
        return ValueMode(self.values).feeds_back if self.feedback == "auto" else self.feedback


_USUAL_TARGET = 0.85


@dataclass(frozen=True)
class Evaluation:
    """When and how the global model is tested."""

    every: int = _f(1, "rounds between two evaluations; the last round is always evaluated", least=1)
    pairs: bool = _f(
        False,
        "also evaluate the round before each evaluated one: averaging may alternate from round to round, and "
        "an even `every` alone would see one phase of it",
    )
    batch: int = _f(1000, "test samples in one forward pass", least=1)
    norms: str = _f(
        "averaged",
        "running statistics of batch norms in a test: averaged, as they travel with the models; or gathered anew "
        "over all clients' training samples before each test, as HeteroFL's static batch norm has them",
        choices=("averaged", "gathered"),
    )
    validation: float = _f(
        0.0,
        "fraction of the training samples that is held out, drawn by the seed; models are then tested on it "
        "instead of the test set, so that settings can be chosen without having seen that. 0: none",
        least=0.0,
        below=1.0,
    )
    clients: float = _f(
        0.0,
        "fraction of each client's own samples that it does not train on; the global model is then tested on "
        "them, client by client, in the rounds in which it is tested: mean, worst and spread of the score. 0: none",
        least=0.0,
        below=1.0,
    )
    last: int = _f(
        20, "how many of the last rounds give the final accuracy, as the mean of their evaluations", least=1
    )
    last_every: int = _f(
        0,
        "rounds between two evaluations within those last rounds: a long run can be tested rarely and still end "
        "with a score over many tests. 0: `every`",
        least=0,
    )
    target: Literal["auto"] | float = _f(
        "auto",
        "the task's score for 'rounds to target'; an accuracy is a fraction. auto: 0.85 where the score is a fraction, "
        "and none elsewhere",
        above=0.0,
    )

    def is_due(self, done: int, rounds: int) -> bool:
        """Whether the model is tested after `done` of `rounds` rounds.

        >>> [done for done in range(1, 12) if Evaluation(every=4, pairs=True).is_due(done, 11)]
        [3, 4, 7, 8, 10, 11]
        >>> [done for done in range(1, 13) if Evaluation(every=4, last=4, last_every=2).is_due(done, 12)]
        [4, 8, 10, 12]
        """
        return any(
            after % (self.final_every if after > rounds - self.last else self.every) == 0 or after == rounds
            for after in (done, done + 1)[: 1 + self.pairs]
        )

    def goal(self, percent: bool) -> float | None:
        """The target for a score, `percent` where that is a fraction; None: there is none.

        >>> Evaluation().goal(True), Evaluation().goal(False), Evaluation(target=3.0).goal(False)
        (0.85, None, 3.0)
        """
        if self.target == "auto":
            return _USUAL_TARGET if percent else None
        return self.target

    @property
    def final_every(self) -> int:
        """Rounds between two evaluations within the last rounds."""
        return self.last_every or self.every


@dataclass(frozen=True)
class Diagnostics:
    """The quantities of the theory (docs/runs.md): a simulation can train the missing, too."""

    every: int = _f(0, "rounds between two diagnoses, each of which costs a whole round; 0: never", least=0)


@dataclass(frozen=True)
class Checkpoint:
    """When the state is saved, so that `safari resume` can go on."""

    every: int = _f(
        0,
        "rounds between two checkpoints; 0: 10 (on Flower 1), and more where a checkpoint is larger than 0.5 GB for "
        "each of them; the last round always has one",
        least=0,
    )
    keep: int = _f(
        3,
        "checkpoints kept for each arm and seed, the newest included: `safari resume --from ROUND` goes back "
        "to one; each holds the model and the state of rule, links and clients",
        least=1,
        most=1000,
    )
    best: bool = _f(
        False,
        "also keep the model with the best score so far, as best.safetensors: with evaluation.validation, "
        "or it is chosen by the test set",
    )


@dataclass(frozen=True)
class Track:
    """Experiment trackers, through their own libraries."""

    tensorboard: bool = _f(False, "write TensorBoard event files into the run's folder (extra: tensorboard)")
    mlflow: str = _f("", "MLflow tracking URI, or a folder; empty: off (extra: mlflow)")


@dataclass(frozen=True)
class Config:
    """A whole experiment: arms × seeds under one setting. The defaults are the demo.

    >>> Config().pruning.sparsity
    0.8
    >>> parse({"rounds": 5, "pruning": {"pruner": "snip"}}).pruning.pruner
    'snip'
    """

    name: str = _f("demo", "a name for the run's folder and report")
    # Larger ones are slips of the keyboard. Seeds are in names of folders, which are read back with 19 digits at most.
    seed: int = _f(0, "the first seed; everything random follows from it", least=0, most=10**18)
    seeds: int = _f(1, "how many seeds: seed, seed + 1, ...", least=1, most=100_000)
    rounds: int = _f(150, "rounds T", least=1, most=10**9)
    clients: int = _f(10, "clients m", least=1)
    cohort: int = _f(
        0, "clients asked in a round, sampled anew each time (`sampling`); 0: as many as there are", least=0
    )
    arms: tuple[Arm, ...] = field(
        default_factory=lambda: tuple(
            Arm(rule, Plug(rule)) for rule in ("perfect", "drop", "safari", "safari+")
        ),
        metadata={
            "doc": "what the server does about the missing, compared side by side: rules by name, recipe (the clients, "
            "masks and rule of --preset best), or tables "
            'such as {name = "mine", rule = "file.py:rule", option = 1}; with set = {client = {name = "scaffold"}} '
            "an arm has settings of its own"
        },
    )
    data: Plug = _plug(
        "digits",
        "the data set: digits, cifar10, dialogue, leaf, text (a .txt file), hf:NAME (the Hugging Face "
        "hub, or a path), or your own",
    )
    partition: Plug = _plug(
        "groups",
        "who holds which samples: groups, iid, shards, dirichlet, natural, or one of Flower's (flwr-...)",
        groups=2,
    )
    model: Plug = _plug(
        "cnn", "the model: cnn, mlp, resnet20, resnet18, pfl_cnn, gru, lstm, transformer, lora, or your own"
    )
    sampling: Plug = _plug(
        "uniform",
        "which clients are asked where `cohort` is smaller than `clients`: uniform: different ones, all equally "
        "likely; multinomial: by weight, with replacement; clustered-size, clustered-similarity: one from each of "
        "`cohort` distributions; or your own",
    )
    task: Plug = _plug("classification", "what is learned: classification, tokens, multilabel, regression")
    pruning: Pruning = field(default_factory=Pruning)
    policy: Plug = _plug(
        "static",
        "which weights are trained in each round: static: what was cut stays cut (the paper); set, rigl, "
        "sparse-momentum, feddst, fedrts: masks that move; early-bird: cut when masks rest; or your own",
    )
    local: Local = field(default_factory=Local)
    client: Plug = _plug(
        "fedavg",
        "what clients do besides plain local steps: fedavg, calibrated, masked-loss, fedprox, scaffold, mime, "
        "feddyn, fednova, dane, bvr-l-sgd, fedpbc, fedawe, or your own",
    )
    uplink: Plug = _plug(
        "bernoulli", "how updates get lost on the way to the server", p=[1, 0.3, 0.3, 0.3, 0.3]
    )
    downlink: Plug = _plug("perfect", "how the broadcast gets lost on the way to the clients")
    packets: Plug = _plug(
        "none",
        "how uploads are cut into packets of which some get lost: none: they arrive whole, or not at all; "
        "lossy: some packets arrive; recorded: as in a run over datagrams (docs/net.md)",
    )
    aggregation: Aggregation = field(default_factory=Aggregation)
    wire: Wire = field(default_factory=Wire)
    engine: Engine = field(default_factory=Engine)
    evaluation: Evaluation = field(default_factory=Evaluation)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    track: Track = field(default_factory=Track)

    def to_dict(self) -> dict[str, Any]:
        """The complete config as plain tables: `parse(config.to_dict()) == config`."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def for_arm(self, arm: Arm) -> Config:
        """The config of one arm: with its own settings, and no other arm."""
        return dataclasses.replace(self._with(arm.set), arms=(arm,))

    def arm_groups(self) -> list[Config]:
        """A config for each group of arms that have the same settings; the arms stay in order.

        >>> mine = {"name": "mine", "rule": "drop", "set": {"pruning": {"sparsity": 0.5}}}
        >>> groups = parse({"arms": ["drop", mine, "safari"]}).arm_groups()
        >>> [([arm.name for arm in group.arms], group.pruning.sparsity) for group in groups]
        [(['drop', 'safari'], 0.8), (['mine'], 0.5)]
        """
        groups: dict[str, list[Arm]] = {}
        for arm in self.arms:
            groups.setdefault(json.dumps(_plain(arm.set), sort_keys=True), []).append(arm)
        return [dataclasses.replace(self._with(arms[0].set), arms=tuple(arms)) for arms in groups.values()]

    def _with(self, tables: Mapping[str, Any]) -> Config:
        return parse(_merged(self.to_dict(), tables)) if tables else self

    @property
    def digest(self) -> str:
        """A hash of everything that is in the config."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


# The tables in which arms of one run may differ: the data, the model and the clients are the same for all.
ARM_TABLES = (
    "aggregation", "client", "downlink", "local", "packets", "policy", "pruning", "sampling", "uplink", "wire",
)  # fmt: skip

# How a plug-in of the user's own is named.
_OWN = '"file.py:NAME" or "__main__:NAME"'
# A longer text is no mistyped name.
_LONGEST_HINT = 80
# Each takes its share of every round.
MOST_ARMS = 1000
# The fields that name a plug-in, with what they name by default.
_PLUGS = {
    f.name: plug for f in dataclasses.fields(Config) if isinstance(plug := getattr(Config(), f.name), Plug)
}


def parse(table: Mapping[str, Any]) -> Config:
    """A Config from plain tables; ConfigError lists every problem at once.

    >>> parse({"ronuds": 3, "clients": 0})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: ronuds is not a field (did you mean 'rounds'?)
    clients must be at least 1, got 0
    """
    config, problems = examine(table)
    if problems:
        raise ConfigError(problems)
    return config


def examine(table: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """A Config in which everything wrong has its default, and what is wrong: to look on for more problems."""
    problems: list[str] = []
    try:
        table = renamed(table)
    except ConfigError as error:
        problems += error.problems
    values = _read(Config, _without_dates(table, "", problems), "", problems)
    clients, cohort = values.get("clients", 10), values.get("cohort", 0)
    if cohort > clients and ("clients" in values or "clients" not in table):
        problems.append(f"cohort must be at most clients ({clients}), got {cohort}")
        del values["cohort"]
    problems += _schedule_problems(values.get("pruning", Pruning()))
    problems += _rate_problems(values.get("local", Local()))
    wire = values.get("wire", Wire())
    if wire.feeds_back and ValueMode(wire.values).exact:
        problems.append(f"wire.feedback needs lossy wire.values, got {wire.values!r}")
    if wire.adapt != "none" and wire.values != ValueMode.QSGD:
        problems.append(f"wire.adapt = {wire.adapt!r} needs wire.values = 'qsgd', got {wire.values!r}")
    problems += _address_problems(values.get("track", Track()))
    names = [arm.name for arm in values.get("arms", ())]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    problems += [f"arms: the name {brief(n)} is used twice" for n in twice]
    problems += [
        f"arms: a name may hold letters, digits, and . _ + - only, got {brief(n)}"
        for n in names
        if not _is_plain(n)
    ]
    problems += _arm_problems(table, values.get("arms", ())) if not problems else []
    name = values.get("name", "demo")
    if not _is_plain(name):
        problems.append(f"name may hold letters, digits, and . _ + - only, got {brief(name)}")
    return Config(**values), problems


def _without_dates(value: Any, path: str, problems: list[str]) -> Any:
    """Copy a value without dates and times, and report these: TOML has them, but no field or record does."""
    if isinstance(value, Mapping):
        inner = {key: (f"{path}.{key}" if path else str(key), held) for key, held in value.items()}
        return {
            key: _without_dates(held, where, problems)
            for key, (where, held) in inner.items()
            if not _is_date(where, held, problems)
        }
    if isinstance(value, list | tuple):
        return [_without_dates(held, path, problems) for held in value if not _is_date(path, held, problems)]
    return value


def _is_date(path: str, value: Any, problems: list[str]) -> bool:
    if isinstance(value, date | time):
        problems.append(
            f"{path} must be a text, a number, true or false, a list or a table, got the date {value}"
        )
        return True
    return False


def _address_problems(track: Track) -> list[str]:
    try:
        urlsplit(track.mlflow)
    except ValueError as error:
        return [f"track.mlflow must be an address or a folder, got {track.mlflow!r} ({error})"]
    return []


def _arm_problems(table: Mapping[str, Any], arms: Sequence[Arm]) -> list[str]:
    """Problems with the settings that arms have of their own, a line each."""
    problems = []
    for arm in (arm for arm in arms if arm.set):
        field = f"arms: {arm.name}.set"
        known = [key for key in arm.set if key in ARM_TABLES]
        problems += [one_of(field, key, ARM_TABLES) for key in arm.set if key not in ARM_TABLES]
        own = {key: arm.set[key] for key in known}
        whole = {key: value for key, value in table.items() if key != "arms"}
        problems += [f"{field}: {line}" for line in examine(_merged(whole, own))[1]]
    return problems


def _merged(table: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with others laid over them, key by key; naming another plug-in drops the options of the one before."""
    out = dict(table)
    for head, own in tables.items():
        held = out.get(head, {})
        if not isinstance(own, Mapping) or not isinstance(held, Mapping):
            out[head] = own
        elif head in _PLUGS and own.get("name", held.get("name")) != held.get("name", _PLUGS[head].name):
            out[head] = dict(own)
        else:
            out[head] = {**held, **own}
    return out


def _schedule_problems(pruning: Pruning) -> list[str]:
    if pruning.schedule == "cubic" and pruning.end <= pruning.begin:
        return [f"pruning.end must be above pruning.begin ({pruning.begin}) with cubic, got {pruning.end}"]
    if pruning.schedule != "constant" and pruning.initial > pruning.sparsity:
        return [
            f"pruning.initial must be at most pruning.sparsity ({pruning.sparsity}), got {pruning.initial}"
        ]
    return []


def _rate_problems(local: Local) -> list[str]:
    """A rate that falls so far that clients train nothing any more, and say nothing of it."""
    drops = sum(part < 1 for part in local.milestones)
    last = local.lr * local.factor**drops
    if local.schedule != "steps" or last >= _LEAST_LR:
        return []
    return [
        f"local.factor must leave a learning rate of at least {_LEAST_LR:g}: after {drops} milestones, "
        f"{local.lr:g} is {last:g}; got {local.factor:g}"
    ]


def _plugin_of(name: object) -> object:
    """The plug-in of a name: `hf` of all that begins with `hf:`, and otherwise the name itself."""
    return "hf" if str(name).startswith("hf:") else name


def override(table: Mapping[str, Any], settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The tables with `("pruning.sparsity", 0.9)` and the like put in.

    Naming another plug-in drops the options of the one before, but none that `settings` itself put in:
    their order does not matter.

    >>> override({"uplink": {"name": "bernoulli", "p": 0.3}}, [("uplink.name", "lost")])
    {'uplink': {'name': 'lost'}}
    """
    out: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}
    given: set[str] = set()
    for name, value in settings:
        key = field_of(name)
        head, _, rest = key.partition(".")
        given.add(key)
        if not rest:
            out[head] = value
            continue
        inner = out.setdefault(head, {})
        if not isinstance(inner, dict):
            meant = _meant(head, inner, Plug) if head in _PLUGS else ""
            raise ConfigError(f"{key}: {head} is not a table{meant}")
        if rest == "name" and head in _PLUGS:
            before = inner.get("name", _PLUGS[head].name)
            if _plugin_of(before) != _plugin_of(value):
                inner = out[head] = {k: v for k, v in inner.items() if f"{head}.{k}" in given}
            elif before != value and f"{head}.source" not in given:
                # Both are data of hf, and the new name holds another source.
                inner.pop("source", None)
        inner[rest] = value
    return out


def _read(cls: type, table: Mapping[str, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    hints = type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = [f"{prefix}{key}" for key in table if key not in fields]
    problems += not_there(
        prefix.rstrip(".") or "the config",
        unknown,
        lambda name: f"is not a field{did_you_mean(name[len(prefix) :], fields)}",
    )
    values: dict[str, Any] = {}
    for name, f in fields.items():
        if name not in table:
            continue
        path, value, hint = prefix + name, table[name], hints[name]
        if dataclasses.is_dataclass(hint):
            if hint is Plug and prefix and isinstance(value, str):
                value = {"name": value}
            if not isinstance(value, Mapping):
                form = "a name or a table" if hint is Plug and prefix else "a table"
                problems.append(f"{path} must be {form}, got {brief(value)}{_meant(path, value, hint)}")
            elif hint is Plug:
                default = cast(Callable[[], Plug], f.default_factory)()
                values[name] = _read_plug(path, value, default, problems)
            else:
                section = cast(type, hint)
                values[name] = section(**_read(section, value, path + ".", problems))
        elif name == "arms":
            values[name] = _read_arms(value, table, problems)
        elif hint == tuple[Plug, ...]:
            values[name] = _read_plugs(path, value, problems)
        elif not fits(value, hint):
            form = _name_form(value) if path == "pruning.pruner" else spell(hint)
            problems.append(f"{path} must be {form}, got {brief(value)}")
        else:
            problem = _beyond(path, value, f.metadata)
            if problem:
                problems.append(problem)
            else:
                values[name] = _converted(value, hint)
    return values


def _meant(path: str, value: object, hint: Any) -> str:
    """Guess which field a value in a table's place was meant for; empty where the table has no name."""
    if hint is not Plug and "name" not in {f.name for f in dataclasses.fields(hint)}:
        return ""
    if isinstance(value, str):
        return f" (did you mean {path}.name={value}?)" if 0 < len(value) <= _LONGEST_HINT else ""
    # No file holds a function or an array: the object itself was passed, from Python.
    itself = hint is Plug and not _is_of_a_file(value)
    return f"; your own goes in by its name, as {path}.name = {_OWN}" if itself else ""


def _is_of_a_file(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_of_a_file, value))
    return value is None or isinstance(value, str | int | float | Mapping)


def _name_form(value: object) -> str:
    return f"a text such as {_OWN}" if callable(value) else "a text"


def _as_a_name(value: object) -> str:
    return f"; your own goes in by its name, as {_OWN}" if callable(value) else ""


def _converted(value: Any, hint: Any) -> Any:
    """A value that fits, as the field holds it: TOML has neither tuples nor, for whole numbers, floats."""
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    number = hint is float or float in typing.get_args(hint)
    return float(value) if number and not isinstance(value, str) else value


def _read_plug(path: str, table: Mapping[str, Any], default: Plug, problems: list[str]) -> Plug:
    name = table.get("name", default.name)
    if not isinstance(name, str) or not name:
        problems.append(f"{path}.name must be {_name_form(name)}, got {brief(name)}")
        return default
    options = {key: value for key, value in table.items() if key != "name"}
    head, colon, source = name.partition(":")
    if path == "data" and head == "hf" and colon:
        if "source" in options:
            problems.append(f"data.source must be left out where data.name has it, {brief(name)}")
        return Plug(head, {"source": source, **options})
    return Plug(name, options if "name" in table else {**default.options, **options})


def _read_plugs(path: str, value: object, problems: list[str]) -> tuple[Plug, ...]:
    if not isinstance(value, list | tuple):
        problems.append(f"{path} must be a list of names and tables, got {brief(value)}")
        return ()
    plugs = []
    for k, item in enumerate(value):
        table = {"name": item} if isinstance(item, str) else item
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str) or not table["name"]:
            form = 'a name or a table with "name"'
            problems.append(f"{path}[{k}] must be {form}, got {brief(item)}{_as_a_name(item)}")
            continue
        plugs.append(Plug(table["name"], {key: v for key, v in table.items() if key != "name"}))
    return tuple(plugs)


def _read_arms(value: object, config: Mapping[str, Any], problems: list[str]) -> tuple[Arm, ...]:
    if not isinstance(value, list | tuple):
        problems.append(f"arms must be a list of rules, got {brief(value)}")
        return ()
    if not value:
        problems.append("arms must name at least one rule, got none")
    if len(value) > MOST_ARMS:
        problems.append(f"arms must name at most {MOST_ARMS} rules, got {len(value)}")
        return ()
    arms = []
    for item in value:
        if item == RECIPE:
            arms.append(Arm(RECIPE, Plug(RECIPE_RULE), recipe(config)))
        elif isinstance(item, str):
            short = item.rpartition(":")[2]
            arms.append(Arm(short, Plug(item)))
        elif isinstance(item, Mapping) and isinstance(item.get("rule"), str):
            options = {key: v for key, v in item.items() if key not in ("name", "rule", "set")}
            name, own = str(item.get("name", item["rule"].rpartition(":")[2])), item.get("set", {})
            if not isinstance(own, Mapping):
                problems.append(f"arms: {name}.set must be a table, got {brief(own)}")
                own = {}
            arms.append(Arm(name, Plug(item["rule"], options), dict(own)))
        else:
            form = 'a rule\'s name or a table with "rule"'
            problems.append(f"arms: each must be {form}, got {brief(item)}{_as_a_name(item)}")
    return tuple(arms)


def _beyond(path: str, value: Any, limits: Mapping[str, Any]) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{path} must be a finite number, got {brief(value)}"
    if "choices" in limits and value not in limits["choices"]:
        return one_of(path, value, limits["choices"])
    if isinstance(value, str):
        return None
    if "least" in limits and value < limits["least"]:
        return f"{path} must be at least {limits['least']}, got {brief(value)}"
    if "above" in limits and value <= limits["above"]:
        return f"{path} must be above {limits['above']}, got {brief(value)}"
    if "below" in limits and value >= limits["below"]:
        return f"{path} must be below {limits['below']}, got {brief(value)}"
    if "most" in limits and value > limits["most"]:
        return f"{path} must be at most {limits['most']}, got {brief(value)}"
    return None


def _is_plain(name: str) -> bool:
    return bool(name) and name[0] != "." and all(c.isascii() and (c.isalnum() or c in "._+-") for c in name)


def _plain(value: Any) -> Any:
    if isinstance(value, Plug):
        return {"name": value.name, **{k: _plain(v) for k, v in value.options.items()}}
    if isinstance(value, Arm):
        if value.rule.options or value.set or value.name != value.rule.name:
            own = {"set": _plain(value.set)} if value.set else {}
            return {"name": value.name, "rule": value.rule.name, **_plain(dict(value.rule.options)), **own}
        return value.name
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(_bare(getattr(value, f.name))) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(_bare(item)) for item in value]
    return value


def _bare(value: Any) -> Any:
    """A plug-in without options as its name, which is all there is to write inside a table or a list."""
    return value.name if isinstance(value, Plug) and not value.options else value
