"""A run's model as a module of its own: raw inputs in, predictions out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from safari.config import Config
from safari.errors import RunError, brief
from safari.models import MODELS, Layout
from safari.plugins import named_arguments
from safari.runs import RunFolder, Trial
from safari.runs.record import RoundRecord

FILE = "data.json"
"""What a run says of its data: shapes, scaling, names of the classes."""

# A file that somebody sent must not ask for a model that fills the memory.
_MOST = {"input_shape": 10**8, "classes": 10**6, "tokens": 10**7}


class TrainedModel(nn.Module):
    """A trained model with the conversions from raw data to its inputs.

    Inputs are pixels from 0 to 1, columns as they were read, or tokens; outputs are those of the model, in the
    labels' own units where labels are numbers.

    Parameters
    ----------
    net: the model as it was trained.
    facts: what the run's `data.json` says: shapes, names of the classes, scaling of inputs and labels.
    """

    mean: Tensor
    scale: Tensor
    label_mean: Tensor
    label_scale: Tensor

    def __init__(self, net: nn.Module, facts: Mapping[str, Any]):
        super().__init__()
        self.net = net
        self.classes: tuple[str, ...] = tuple(facts.get("class_names", ()))
        self.vocabulary: tuple[str, ...] = tuple(facts.get("vocabulary", ()))
        inner = (1,) * (len(facts["input_shape"]) - 1)
        for prefix, what, shape in (("", "inputs", inner), ("label_", "labels", ())):
            scaling = facts.get(what) or {"mean": [0.0], "scale": [1.0]}
            for name in ("mean", "scale"):
                self.register_buffer(prefix + name, torch.tensor(scaling[name]).reshape(-1, *shape))
        self._scaled = bool(facts.get("inputs"))

    def forward(self, x: Tensor) -> Tensor:
        """The model's outputs for raw inputs `[n, ...]`."""
        outputs: Tensor = self.net((x - self.mean) / self.scale if self._scaled else x)
        return outputs * self.label_scale + self.label_mean


@dataclass(frozen=True)
class Picked:
    """A model of a run, with what is known about it."""

    run: RunFolder
    trial: Trial
    round: int
    vector: Tensor
    module: TrainedModel
    layout: Layout
    facts: Mapping[str, Any]
    record: RoundRecord | None
    average: bool


def saved_model(trial: Trial, *, average: bool, best: bool) -> tuple[int, Tensor]:
    """The round and the vector of a trial's newest model, of its running average, or of its best model."""
    saved = trial.read_best() if best else trial.read_checkpoint()
    name = "average" if average else "model"
    if name not in saved.tensors:
        raise RunError(f"{trial.path} keeps no running average: aggregation.average is off")
    return saved.round, saved.tensors[name]


def pick(
    run: RunFolder, trial: Trial, *, average: bool = False, best: bool = False, net: nn.Module | None = None
) -> Picked:
    """The model of a trial's newest checkpoint, or the one with the best score; see `Run.module`."""
    done, vector = saved_model(trial, average=average, best=best)
    facts = _checked(run.read(FILE), run)
    arm = next(each for each in run.config.arms if each.name == trial.arm)
    net = _built(run.config.for_arm(arm), facts) if net is None else net
    layout = Layout.of(net)
    if len(vector) != layout.size:
        raise RunError(
            f"net must have {len(vector)} numbers, as the model of {trial.path}, got {layout.size}"
        )
    layout.write(net, vector)
    record = next((each for each in trial.records() if each.round == done), None)
    module = TrainedModel(net, facts).eval()
    return Picked(run, trial, done, vector, module, layout, facts, record, average)


def _checked(facts: Mapping[str, Any], run: RunFolder) -> Mapping[str, Any]:
    """Check the contents of `data.json`; RunError where no model can be made for such data."""
    if not facts:
        raise RunError(f"{run.path} has no {FILE}, which says what shape its data have")
    shape: Any = facts.get("input_shape")
    numbers = {
        "input_shape": math.prod(shape) if _whole(shape) else None,
        **{name: facts[name] if _whole([facts.get(name)]) else None for name in ("classes", "tokens")},
    }
    for name, number in numbers.items():
        if number is None or not (name == "tokens") <= number + (name == "tokens") <= _MOST[name]:
            most = _MOST[name]
            raise RunError(
                f"{run.path / FILE}: {name} must be whole and at most {most}, got {brief(facts.get(name))}"
            )
    if facts.get("label_kind") not in ("class", "tokens", "numbers"):
        kind = brief(facts.get("label_kind"))
        raise RunError(f"{run.path / FILE}: label_kind must be class, tokens or numbers, got {kind}")
    for name in ("inputs", "labels"):
        if facts.get(name) is not None and not _is_scaling(facts[name]):
            raise RunError(
                f"{run.path / FILE}: {name} must have mean and scale, lists of as many numbers, got "
                f"{brief(facts[name])}"
            )
    for name in ("class_names", "vocabulary"):
        if not isinstance(facts.get(name, []), list):
            raise RunError(f"{run.path / FILE}: {name} must be a list of texts, got {brief(facts[name])}")
    return facts


def _is_scaling(value: Any) -> bool:
    """Mean and scale, as `safari.data.Scaling` has them."""
    rows: list[Any] = (
        [value.get(name) for name in ("mean", "scale")] if isinstance(value, Mapping) else [None]
    )
    numbers = all(isinstance(row, list) and row and all(type(x) in (int, float) for x in row) for row in rows)
    return numbers and len({len(row) for row in rows}) == 1


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _built(config: Config, facts: Mapping[str, Any]) -> nn.Module:
    """A model that comes with the package, for data of this shape."""
    plug = config.model
    if plug.name not in MODELS or str(plug.options.get("base", "")).find(":") >= 0:
        raise RunError(
            f"model.name is {plug.name!r}, code of your own, which is not run here: give an instance of it, "
            "as run.module(arm, net=mine())"
        )
    make = MODELS[plug.name]
    extra = named_arguments(make, tokens=facts["tokens"], labels=facts["label_kind"])
    return make(tuple(facts["input_shape"]), facts["classes"], **extra, **dict(plug.options))
