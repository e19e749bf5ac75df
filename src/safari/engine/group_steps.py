"""Local steps of a group of stacked clients.

Once the random numbers are drawn nothing is transferred to the host, so that a GPU can replay the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from safari.data.augment import padding
from safari.engine.stack.compile_policy import crops_run, kernels_run
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import Stack
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.train import LocalSteps, StackedTraining, train_stacked
from safari.engine.world import World
from safari.pruning import Batch
from safari.training import ClientSide, Known


@dataclass(frozen=True)
class GroupTraining:
    """A group after its local steps, a row a client; see `train_stacked`."""

    models: Tensor
    losses: Tensor
    state: Mapping[str, Tensor]
    up: Mapping[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a group's local steps: tensors in a fixed order, so that a recording can take new ones."""

    start: Tensor
    masks: Tensor
    picked: Sequence[Tensor]
    draws: Sequence[Tensor]
    side: ClientSide
    lr: float | Tensor

    def tensors(self) -> list[Tensor]:
        """All tensors of the inputs, as one list."""
        side, rate = self.side, [self.lr] if isinstance(self.lr, Tensor) else []
        known = [side.known.label_counts, side.known.samples]
        beside = [*side.state.values(), *side.down.values(), *known, *rate]
        return [self.start, self.masks, *self.picked, *self.draws, *beside]

    def filled(self, tensors: Sequence[Tensor]) -> Inputs:
        """A copy with these tensors in place of its own, in the order of `tensors`."""
        rest = iter(tensors)

        def take(count: int) -> list[Tensor]:
            return [next(rest) for _ in range(count)]

        start, masks = take(2)
        picked, draws = take(len(self.picked)), take(len(self.draws))
        state = dict(zip(self.side.state, take(len(self.side.state)), strict=True))
        down = dict(zip(self.side.down, take(len(self.side.down)), strict=True))
        side = ClientSide(state, down, Known(*take(2)))
        lr = take(1)[0] if isinstance(self.lr, Tensor) else self.lr
        return Inputs(start, masks, picked, draws, side, lr)

    def padded(self, steps: int) -> Inputs:
        """A copy with samples and draws padded with zeros to this many steps."""

        def longer(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor.new_zeros(steps - len(tensor), *tensor.shape[1:])])

        picked, draws = [longer(t) for t in self.picked], [longer(t) for t in self.draws]
        return replace(self, picked=picked, draws=draws)

    def described(self) -> Inputs:
        """The form without the numbers: what a recording keeps of its first inputs."""
        return self.filled([torch.empty(0) for _ in self.tensors()])


class GroupSteps:
    """Algorithm 2 for groups of a world's clients. `compiled`: with kernels of its own (CUDA)."""

    def __init__(self, world: World, stack: Stack, compiled: bool):
        self.world, self.stack = world, stack
        self._compiled = compiled and kernels_run(world.device)
        data, cropped = world.data.train_x, world.config.local.augment == "crop-flip"
        self._crops = self._compiled and cropped and data.device == world.device and crops_run(data)
        self._frozen = {name for name, p in world.module.named_parameters() if not p.requires_grad}

    def precision(self) -> torch.autocast:
        """Autocast as the config has it."""
        bfloat16 = self.world.config.engine.precision == "bfloat16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False)

    def run(self, clients: int, inputs: Inputs, draws: RandomState, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All local steps of a group; `inputs` says what the tensors are. Gives what `named` takes."""
        given = inputs.filled(tensors)
        samples = [*given.picked, *given.draws]
        steps, flat = len(samples[0]), Flat(self.world.layout, clients)
        batches = (self.batch(given, *(d[s] for d in samples)) for s in range(steps))
        with self.precision():
            found = train_stacked(
                self.stack.train,
                flat,
                given.start,
                given.masks,
                batches,
                steps,
                **self.options(given, draws),
            )
        return self.outputs(flat, found)

    def batch(self, given: Inputs, *samples: Tensor) -> Batch:
        """Batch of one step: samples already gathered, or picked by index."""
        if len(given.picked) > 1:
            return self.world.augmented(*samples)
        if self._crops:
            from safari.engine.stack import fused

            data, (index, shift, flip) = self.world.data, samples
            return fused.crops(data.train_x, index, shift, flip, padding(data.input_shape)), data.train_y[
                index
            ]
        return self.world.gather(*samples)

    def options(self, given: Inputs, draws: RandomState) -> dict[str, Any]:
        """Arguments common to all steps, from the config and the inputs."""
        world, local = self.world, self.world.config.local
        return {
            "optimiser": local.optimiser,
            "lr": given.lr,
            "random_state": draws,
            "task": world.task,
            "algorithm": world.client,
            "side": given.side,
            "frozen": self._frozen,
            "compiled": self._compiled,
        }

    def outputs(self, flat: Flat, found: StackedTraining) -> tuple[Tensor, ...]:
        """The end of a group's round as plain tensors, in an order that `named` knows."""
        state = [found.state[name] for name in self.world.client.init(0, 0, self.world.device)]
        return flat.to_rows(found.models), found.losses, *state, *found.up.values()

    def named(self, found: Sequence[Tensor], replayed: bool) -> GroupTraining:
        """Outputs of `run` by name; those needed after the next replay, which overwrites them, are copied."""
        models, losses, *rest = found
        states = list(self.world.client.init(0, 0, self.world.device))
        if replayed:
            rest = [tensor.clone() for tensor in rest]
        sends = self.world.client.sends(self.world.layout.parameters)
        up = dict(zip(sends, rest[len(states) :], strict=True))
        return GroupTraining(models, losses, dict(zip(states, rest, strict=False)), up)


class ReplayableSteps:
    """A group's local steps, recorded one by one (`RecordedSteps`). Begins with the first step."""

    def __init__(
        self,
        group_steps: GroupSteps,
        clients: int,
        inputs: Inputs,
        draws: RandomState,
        steps: Tensor,
        *tensors: Tensor,
    ):
        self._group, self._flat = group_steps, Flat(group_steps.world.layout, clients)
        self._given, self._steps = inputs.filled(tensors), steps
        given = self._given
        with group_steps.precision():
            self._local = LocalSteps(
                group_steps.stack.train,
                self._flat,
                given.start,
                given.masks,
                steps,
                **group_steps.options(given, draws),
            )
            self._at = torch.zeros(1, dtype=torch.int64, device=given.start.device)
            self._losses = self._local.step(*self._next_batch()).clone()

    def again(self) -> None:
        """Another step."""
        with self._group.precision():
            self._losses.add_(self._local.step_in_place(*self._next_batch()))

    def end(self) -> tuple[Tensor, ...]:
        """Outputs as from `GroupSteps.run`."""
        with self._group.precision():
            found = self._local.finish((self._losses / self._steps).float())
        return self._group.outputs(self._flat, found)

    def _next_batch(self) -> Batch:
        given = self._given
        # By an index on the device: the same recording takes another row each time.
        rows = [d.index_select(0, self._at).squeeze(0) for d in (*given.picked, *given.draws)]
        self._at.add_(1)
        return self._group.batch(given, *rows)
