"""Lossy uploads as the server decodes them, computed on the models' device for many clients at once.

Bit for bit what `safari.wire` gives back from its own bytes: the numbers are rounded in the same order and
precision. So every round has the losses of the format, and encoding is needed only where bytes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from safari.engine.signs import Signs
from safari.engine.steps import stepped, upward
from safari.wire import Lossy, Shared, WireLayout, roundtrip
from safari.wire.rounding.levels import INT8_LEVELS, levels_of
from safari.wire.values import INTEGER

# Differences from here on have no scale that is a number; nobody decodes them, and the server refuses them.
TOO_LARGE = 1e38
# The modes that are worked out below; all others by the wire's own code.
ON_TENSORS = frozenset({"bf16", "fp16", "int8", "qsgd", "step"})


def encodable(models: Tensor, x: Tensor) -> Tensor:
    """`bool[clients]`: which models a lossy format can write."""
    return (models - x).abs().amax(dim=1) < TOO_LARGE


def as_decoded(
    models: Tensor,
    masks: Tensor,
    x: Tensor,
    layout: WireLayout,
    values: str,
    choices: Sequence[Lossy],
    predicted: Tensor,
) -> Tensor:
    """Models as the server decodes them (see `seen`), on a CPU by the wire's own code: it is faster there."""
    if models.device.type == "cpu":
        return _in_numpy(models, masks.expand(len(models), -1), x, layout, values, choices, predicted)
    return seen(models, masks, x, layout, values, choices, predicted)


def seen(
    models: Tensor,
    masks: Tensor,
    x: Tensor,
    layout: WireLayout,
    values: str,
    choices: Sequence[Lossy],
    predicted: Tensor | None = None,
) -> Tensor:
    """`models` (`float32[clients, d]`) as they come back from frames with these values, relative to `x`.

    `masks` is `bool[clients, d]`, or `bool[1, d]` where all have the same; `choices` has an item a client;
    `predicted` (`bool[1, d]`) is the mask that the server expects, if it expects one.
    """
    kept = masks.expand(len(models), -1)
    if values not in ON_TENSORS:
        return _in_numpy(models, kept, x, layout, values, choices, predicted)
    target = torch.where(kept, models.double() - x.double(), 0.0)
    signs = Signs.read(models, x, layout)
    if values == "step":
        change = stepped(target, masks, layout, choices[0], predicted, signs)
    elif values in INTEGER:
        change = _multiples(target, masks, layout, values, choices, signs)
    else:
        narrow = target.float()
        change = signs.keep_halves(narrow.bfloat16() if values == "bf16" else narrow.half()).double()
    return torch.where(kept, x.double() + change, 0.0).float()


def _in_numpy(
    models: Tensor,
    kept: Tensor,
    x: Tensor,
    layout: WireLayout,
    values: str,
    choices: Sequence[Lossy],
    predicted: Tensor | None,
) -> Tensor:
    """Round trips by the wire's own code, a client at a time; models that nobody can write stay as they are."""
    shared = Shared(layout, x.cpu().numpy(), None if predicted is None else predicted[0].cpu().numpy())
    out = models.clone()
    rows = zip(models.cpu().numpy(), kept.cpu().numpy(), choices, encodable(models, x).tolist(), strict=True)
    for client, (vector, mask, lossy, fits) in enumerate(rows):
        if fits:
            out[client] = torch.from_numpy(roundtrip(vector, mask, shared, values, lossy)).to(out.device)
    return out


def _multiples(
    target: Tensor, masks: Tensor, layout: WireLayout, values: str, choices: Sequence[Lossy], signs: Signs
) -> Tensor:
    most = INT8_LEVELS if values == "int8" else levels_of(choices[0])
    entry = torch.repeat_interleave(
        torch.arange(len(layout.sizes), device=target.device),
        torch.tensor(layout.sizes, device=target.device),
    ).expand(len(target), -1)
    largest = target.new_zeros(len(target), len(layout.sizes))
    largest = largest.scatter_reduce(1, entry, target.abs(), "amax")
    scales = upward(largest / most).gather(1, entry).double()
    exact = torch.where(scales > 0, target / scales, 0.0)
    whole = (exact + _draws(masks, layout, choices)).floor() if values == "qsgd" else exact.round()
    # Adding 0 makes a plus of the minus that rounding leaves on a zero.
    return signs.keep_multiples(whole.clamp(-most, most) + 0.0, scales) * scales


def _draws(masks: Tensor, layout: WireLayout, choices: Sequence[Lossy]) -> Tensor:
    """The random numbers that round, each at the place for which the encoder would draw it."""
    out = np.zeros((len(choices), layout.d))
    places = [layout.places(np.flatnonzero(layout.to_wire(mask))) for mask in masks.cpu().numpy()]
    for row, choice in enumerate(choices):
        if choice.rng is not None:
            here = places[row % len(places)]
            out[row, here] = choice.rng.random(here.size)
    return torch.from_numpy(out).to(masks.device)
