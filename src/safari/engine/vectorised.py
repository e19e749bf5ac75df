"""All clients at once: the same rounds as `reference`, with the clients' work stacked.

The same draws, masks, arrivals and stand-ins; models equal up to rounding. A client whose update will not
arrive is not trained: nobody would ever see what it learned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from safari.engine.mail import Mail
from safari.engine.record import MaskCount, Record, Stopwatch, record_of
from safari.engine.reference import network
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import Luck, stack
from safari.engine.stack.graph import Recorded
from safari.engine.stack.masks import STACKED_SCORES, stacked_masks
from safari.engine.stack.train import train_stacked
from safari.engine.state import State
from safari.engine.world import World
from safari.seeds import derive
from safari.training import evaluate

# Samples that try out a way of stacking: enough for batch norm's statistics, and an even number.
_TRIAL_SAMPLES = 8
# On the CPU more clients at once only leave the cache.
_CPU_CHUNK = 16

Trained = tuple[Tensor, Tensor, Tensor]


def prepare(world: World) -> Callable[[State], tuple[State, Record, dict[str, float]]]:
    """The engine for one world: finds out how to stack its module."""
    return Vectorised(world).run_round


class Vectorised:
    """What is found out once for a world: how to stack its module, how many clients fit at once."""

    def __init__(self, world: World):
        self.world = world
        pick = np.arange(_TRIAL_SAMPLES) % len(world.data.train_y)
        example = world.data.train_x[torch.from_numpy(pick)].to(world.device)
        bfloat16 = world.config.engine.precision == "bfloat16"
        self.stack = stack(world.module, world.layout, example, bfloat16=bfloat16)
        self.chunk = len(world.parts) if world.device.type == "cuda" else _CPU_CHUNK
        self._recorded: dict[tuple[int, ...], Recorded] = {}
        # What draws random numbers of its own, or asks the host in between, cannot be replayed.
        self._records_graphs = (
            world.config.engine.graph
            and world.device.type == "cuda"
            and self.stack.way == "layers"
            and not self.stack.random
            and world.data.train_x.is_cuda
        )

    @property
    def note(self) -> str:
        """One line about the way taken, when it is not the fast one."""
        return f"clients are stacked by {self.stack.way} ({self.stack.why})" if self.stack.why else ""

    def run_round(self, state: State) -> tuple[State, Record, dict[str, float]]:
        """One round; see `reference.run_round`, whose steps these are."""
        world, t, x = self.world, state.round, state.server.model
        watch, masks, mail = Stopwatch(world.device), MaskCount(world.layout), Mail(world, x, t)
        cohort = world.cohort(t)
        heard, answered, uplink, downlink = network(world, state)
        arriving = [client for client in cohort if heard[client] and answered[client]]

        models = x.new_empty((len(arriving), world.layout.size))
        losses = x.new_empty(len(arriving))
        place = {client: row for row, client in enumerate(arriving)}
        for group in self._groups(arriving):
            kept = self._masks(x, group, t)
            for mask in kept:
                masks.add(mask, 1 if world.pruner.needs_data else len(group))
            watch.lap("mask")
            rows = [place[client] for client in group]
            sent, losses[rows] = self._train(x, kept, group, t)
            watch.lap("train")
            if mail.counts or mail.lossy:
                each = kept.expand(len(group), -1)
                sent = torch.stack([mail.up(*letter) for letter in zip(group, sent, each, strict=True)])
            models[rows] = sent
            watch.lap("wire")

        server, outcome = state.server.step_stacked(arriving, models, cohort)
        watch.lap("aggregate")
        scores = None
        if world.evaluates(t):
            world.layout.write(world.module, server.model)
            scores = evaluate(
                world.module, world.data.test_x, world.data.test_y, world.config.evaluation.batch
            )
        watch.lap("evaluate")
        trained = [client for client in cohort if heard[client]]
        record = record_of(
            world.layout, t, trained, outcome, scores, losses.tolist(), masks, mail.sizes(), x, server.model
        )
        return State(server, uplink, downlink), record, watch.seconds

    def _groups(self, clients: Sequence[int]) -> list[list[int]]:
        """Clients that can be stacked (the same number of steps), no more at once than fit."""
        alike: dict[int, list[int]] = defaultdict(list)
        for client in clients:
            alike[self.world.steps(client)].append(client)
        return [
            group[i : i + self.chunk] for group in alike.values() for i in range(0, len(group), self.chunk)
        ]

    def _masks(self, x: Tensor, group: Sequence[int], t: int) -> Tensor:
        """`bool[clients, size]`, or one row where all have the same."""
        world = self.world
        if not world.pruner.needs_data:
            return world.mask(x, group[0], t).unsqueeze(0)
        picks = [world.pruning_draw(client, t) for client in group]
        together = len({len(pick) for pick in picks}) == 1 and self.stack.way != "loop"
        if world.pruner.score not in STACKED_SCORES or not together:
            return torch.stack([world.mask(x, client, t) for client in group])
        pick = torch.from_numpy(np.concatenate(picks)).to(world.data.train_x.device)
        return stacked_masks(
            world.pruner.score,
            self.stack.eval,
            Flat(world.layout, len(group)),
            x,
            world.data.train_x[pick].to(world.device),
            world.data.train_y[pick].to(world.device),
            world.config.pruning.sparsity,
            t,
        )

    def _train(self, x: Tensor, masks: Tensor, group: Sequence[int], t: int) -> tuple[Tensor, Tensor]:
        """The group's models after their local steps, and their mean losses."""
        world = self.world
        index, extra = _step_by_step([world.training_draw(client, t) for client in group])
        # The data may stay on the host: then the samples, not their numbers, go to the device.
        inputs = [x, masks, torch.from_numpy(index), *(torch.from_numpy(d) for d in extra)]
        seeds = [derive(world.seed, "module", client, t) >> 1 for client in group]
        luck = Luck(seeds, world.device, world.counters)
        work = partial(self._local_steps, len(group), luck)
        if not self._records_graphs:
            return work(*(tensor.to(world.device, non_blocking=True) for tensor in inputs))
        key = (len(group), len(masks), len(index))
        if key not in self._recorded:
            pool = next(iter(self._recorded.values())).pool if self._recorded else None
            self._recorded[key] = Recorded(work, [i.to(world.device) for i in inputs], pool)
        models, losses = self._recorded[key](*inputs)
        return models, losses

    def _local_steps(
        self, clients: int, luck: Luck, x: Tensor, masks: Tensor, index: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 2 for a group: what the device does from the indices on, without asking the host."""
        world, flat, local = self.world, Flat(self.world.layout, clients), self.world.config.local
        mask = flat.spread(masks[0]) if len(masks) == 1 else flat.from_rows(masks)
        batches = (world.gather(index[s], [d[s] for d in extra]) for s in range(len(index)))
        bfloat16 = world.config.engine.precision == "bfloat16"
        with torch.autocast(world.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            out, losses = train_stacked(
                self.stack.train,
                flat,
                flat.spread(x),
                mask,
                batches,
                len(index),
                optimiser=local.optimiser,
                lr=local.lr,
                luck=luck,
            )
        return flat.to_rows(out), losses


def _step_by_step(
    draws: Sequence[tuple[np.ndarray, tuple[np.ndarray, ...]]],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Clients' draws as `[steps, clients · batch, ...]`: what each step needs lies together."""
    index = np.stack([index for index, _ in draws], axis=1)
    steps, clients, batch = index.shape
    extra = []
    for column in zip(*(rest for _, rest in draws), strict=True):
        whole = np.stack([d.reshape(steps, batch, *d.shape[1:]) for d in column], axis=1)
        extra.append(whole.reshape(steps, clients * batch, *whole.shape[3:]))
    return index.reshape(steps, clients * batch), extra
