"""All clients at once: the same rounds as `reference`, with the clients' work stacked.

The same draws, masks, arrivals and stand-ins; models equal up to rounding. A client whose update will not
arrive is not trained: nobody would ever see what it learned.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from safari.engine.closing import close_round
from safari.engine.mail import Mail
from safari.engine.reference import network, train
from safari.engine.stack.cpu import TURNS, Tester, crew_for, keep_freed_memory, stacked_at_once
from safari.engine.stack.crew import Crew, finished, threads
from safari.engine.stack.draws import Draws, step_by_step
from safari.engine.stack.effort import FORECAST, compiles
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import stack
from safari.engine.stack.graph import Recorded, Work
from safari.engine.stack.luck import Luck
from safari.engine.stack.masks import STACKED_SCORES, Scoring, score_clients, stacked_masks
from safari.engine.stack.train import train_stacked
from safari.engine.stack.trial import picture_format
from safari.engine.state import State
from safari.engine.world import World
from safari.runs.measure import MaskCount, Stopwatch
from safari.runs.record import RoundRecord

# Samples that try out a way of stacking: enough for batch norm's statistics, and an even number.
_TRIAL_SAMPLES = 8

T = TypeVar("T")

Round = tuple[State, RoundRecord, dict[str, float]]
# Waits for a group's training: the models, the mean losses, and the seconds from the first start to the end.
Training = Callable[[], tuple[Tensor, Tensor, float]]

_SLOWER = {
    "layers": "clients are stacked layer by layer, without fused kernels",
    "vmap": "clients are stacked by torch.vmap, which is slower than layer by layer",
    "loop": "clients train one after the other",
}


def prepare(world: World) -> Vectorised:
    """The engine for one world: finds out how to stack its module."""
    return Vectorised(world)


def forecast(world: World) -> str:
    """What takes long before the first round, in one line; empty when nothing does."""
    return FORECAST if compiles(world.config, world.device.type) else ""


class Vectorised:
    """What is found out once for a world: how to stack its module, how many clients fit at once.

    Called with a state, it runs a round.
    """

    def __init__(self, world: World):
        self.world = world
        pick = np.arange(_TRIAL_SAMPLES) % len(world.data.train_y)
        example = world.data.train_x[torch.from_numpy(pick)].to(world.device)
        self._compiled = compiles(world.config, world.device.type)
        bfloat16 = world.config.engine.precision == "bfloat16"
        self.stack = stack(world.module, world.layout, example, bfloat16=bfloat16, fuse=self._compiled)
        self.chunk = len(world.parts)
        self._stacked = stacked_at_once(world.config.local.batch * math.prod(world.data.input_shape))
        self._crew: Crew | None = None
        self._tester: Tester | None = None
        if world.device.type == "cpu":
            keep_freed_memory()
            self._crew = crew_for(self.stack)
            self.chunk = self._stacked * (self._crew.size * TURNS if self._crew else 1)
            if self.stack.way == "layers":
                self._tester = Tester(world.module, self._crew, example)
        self._frozen = {name for name, p in world.module.named_parameters() if not p.requires_grad}
        self._test_format = picture_format(world.module, example)
        self._recorded: dict[tuple[int, ...], Recorded] = {}
        self._luck: dict[int, Luck] = {}
        # While a GPU computes the host has nothing else to do; a CPU has.
        ahead = world.cohort if world.device.type == "cuda" else None
        self._training_draws = Draws(world.training_draw, ahead)
        self._pruning_draws = Draws(world.pruning_draw, ahead if world.pruner.needs_data else None)
        # What asks the host in between cannot be replayed.
        self._records_graphs = (
            world.config.engine.graph and world.device.type == "cuda" and self.stack.way == "layers"
        )

    @property
    def note(self) -> str:
        """One line about the way taken, when it is not the fast one."""
        return f"{_SLOWER[self.stack.way]} ({self.stack.why})" if self.stack.why else ""

    def __call__(self, state: State) -> Round:
        """One round; see `reference.run_round`, whose steps these are."""
        (found,) = self.side_by_side([state])
        return found

    def side_by_side(self, states: Sequence[State]) -> Iterator[Round]:
        """A round of each arm, in order. While one arm's models are averaged and tested, a crew trains the
        clients of the next; what comes out is the same as without the others.
        """
        if self._crew is None:
            for state in states:
                yield from finished([self._round(state)])
            return
        # torch's own threads go on spinning for a while, on the cores that the crew needs next.
        with threads(1):
            try:
                yield from finished([self._round(state) for state in states])
            finally:
                self._crew.drop()

    def _round(self, state: State) -> Generator[None, None, Round]:
        """Stops wherever it would have to wait for the crew."""
        world, t, x = self.world, state.round, state.server.model
        watch, masks = Stopwatch(world.device), MaskCount(world.layout)
        mail = Mail(world, x, t, state.residual)
        cohort = world.cohort(t)
        heard, answered, uplink, downlink = network(world, state)
        arriving = [client for client in cohort if heard[client] and answered[client]]
        shared: Tensor | None = None
        if arriving and not world.pruner.needs_data:
            shared = world.mask(x, arriving[0], t).unsqueeze(0)
            masks.add(shared[0], len(arriving))
            watch.lap("mask")

        def work(group: Sequence[int]) -> tuple[Tensor, Training]:
            kept = self._masks(x, group, t) if shared is None else shared
            watch.lap("mask")
            return kept, self._begin(x, kept, group, t)

        models = x.new_empty((len(arriving), world.layout.size))
        every_mask = shared
        if every_mask is None:
            every_mask = torch.empty(models.shape, dtype=torch.bool, device=models.device)
        losses = x.new_empty(len(arriving))
        place = {client: row for row, client in enumerate(arriving)}
        for group, (kept, training) in self._in_groups(arriving, work):
            yield
            sent, lost, seconds = training()
            watch.charge("train", seconds)
            rows = [place[client] for client in group]
            losses[rows] = lost
            if shared is None:
                masks.add_rows(kept)
                every_mask[rows] = kept
            models[rows] = mail.up(group, sent, kept)
            watch.lap("wire")

        server, outcome = state.server.step_stacked(arriving, models, cohort, every_mask)
        return close_round(
            world,
            state,
            server,
            outcome,
            links=(uplink, downlink),
            trained=[client for client in cohort if heard[client]],
            losses=losses.tolist(),
            masks=masks,
            mail=mail,
            watch=watch,
            test=partial(world.scores, t=t, memory_format=self._test_format, tester=self._tester),
            everyone=partial(self._everyone, x, t),
        )

    def _everyone(self, x: Tensor, t: int, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The models and masks of these clients in round t, whatever the network does to them."""
        world = self.world
        shared = None if world.pruner.needs_data else world.mask(x, clients[0], t).unsqueeze(0)

        def work(group: Sequence[int]) -> tuple[Tensor, Tensor]:
            masks = self._masks(x, group, t) if shared is None else shared
            return self._train(x, masks, group, t)[0], masks

        row = {client: k for k, client in enumerate(clients)}
        models = x.new_empty((len(clients), world.layout.size))
        kept = models.new_empty(models.shape if shared is None else (1, world.layout.size), dtype=torch.bool)
        for group, (found, masks) in self._in_groups(clients, work):
            rows = [row[client] for client in group]
            models[rows] = found
            kept[rows if shared is None else [0]] = masks
        return models, kept

    def _in_groups(
        self, clients: Sequence[int], work: Callable[[Sequence[int]], T]
    ) -> Iterator[tuple[Sequence[int], T]]:
        """`work` for groups of clients that can be stacked (the same number of steps) and fit at once.

        When the device's memory is too small, fewer at once from then on. Nothing is lost: work is pure.
        """
        alike: dict[int, list[int]] = defaultdict(list)
        for client in clients:
            alike[self.world.steps(client)].append(client)
        waiting = list(alike.values())
        while waiting:
            whole = waiting.pop()
            group, rest = whole[: self.chunk], whole[self.chunk :]
            try:
                result = work(group)
            except torch.cuda.OutOfMemoryError:
                if len(group) == 1:
                    raise
            else:
                yield group, result
                waiting += [rest] if rest else []
                continue
            # Only now, when the error no longer holds what the attempt had made.
            self.chunk = len(group) // 2
            self._recorded.clear()
            torch.cuda.empty_cache()
            waiting.append(whole)

    def _masks(self, x: Tensor, group: Sequence[int], t: int) -> Tensor:
        """`bool[clients, size]`: the masks of clients whose pruner looks at their data."""
        world = self.world
        if self._crew is not None and len(group) > self._stacked * self._crew.size:
            most = self._stacked * self._crew.size
            return torch.cat([self._masks(x, group[i : i + most], t) for i in range(0, len(group), most)])
        picks = self._pruning_draws(group, t)
        together = len({len(pick) for pick in picks}) == 1 and self.stack.way != "loop"
        known = world.pruner.score in STACKED_SCORES and world.pruner.iterations == 1
        if not known or not together:
            return torch.stack([world.mask(x, client, t) for client in group])
        pick = torch.from_numpy(np.concatenate(picks)).to(world.data.train_x.device)
        x_each = world.data.train_x[pick].to(world.device)
        y_each = world.data.train_y[pick].to(world.device)
        flat = Flat(world.layout, len(group))
        scoring = score_clients(world.pruner.score, self.stack.eval, flat, world.device)
        if self._records_graphs:
            scoring = self._recorded_scoring(scoring, (len(group), len(pick)))
        return stacked_masks(flat, x, x_each, y_each, world.config.pruning.sparsity, t, scoring)

    def _recorded_scoring(self, scoring: Scoring, key: tuple[int, int]) -> Scoring:
        def replayed(*inputs: Tensor) -> Tensor:
            return self._record(key, lambda *i: (scoring(*i),), inputs)(*inputs)[0]

        return replayed

    def _record(
        self,
        key: tuple[int, ...],
        work: Work,
        inputs: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> Recorded:
        """The recording of this work on inputs of these shapes, made when it is needed first."""
        if key not in self._recorded:
            pool = next(iter(self._recorded.values())).pool if self._recorded else None
            placed = [i.to(self.world.device) for i in inputs]
            self._recorded[key] = Recorded(work, placed, pool, generators)
        return self._recorded[key]

    def _train(self, x: Tensor, masks: Tensor, group: Sequence[int], t: int) -> tuple[Tensor, Tensor]:
        """The group's models after their local steps, and their mean losses."""
        with threads(1) if self._crew else nullcontext():
            return self._begin(x, masks, group, t)()[:2]

    def _begin(self, x: Tensor, masks: Tensor, group: Sequence[int], t: int) -> Training:
        """Begin a group's training: by the crew, or else at once."""

        def train(share: Sequence[int]) -> tuple[Tensor, Tensor, float, float]:
            own, start = masks if len(masks) == 1 else masks[list(share)], time.perf_counter()
            found = self._train_stacked(x, own, [group[i] for i in share], t)
            return *found, start, time.perf_counter()

        crew, everybody = self._crew, range(len(group))
        if crew is None:
            found = [train(everybody)]
            return lambda: _together(found)
        self._training_draws(group, t)  # here, so that no two threads do it
        # By the config alone: a share must not hang on how far other arms are.
        arms = len(self.world.config.arms)
        shares = crew.split(everybody, self._stacked, among=arms)
        # A client by itself: torch's own threads help where its kernels are long, and nobody else needs them.
        alone = self._stacked == 1 and len(shares) % crew.size == 1 and arms == 1
        begun = crew.submit(train, shares[:-1] if alone else shares)

        def finish() -> tuple[Tensor, Tensor, float]:
            found = [share.result() for share in begun]
            if alone:
                with threads(crew.size):
                    found.append(train(shares[-1]))
            return _together(found)

        return finish

    def _train_stacked(self, x: Tensor, masks: Tensor, group: Sequence[int], t: int) -> tuple[Tensor, Tensor]:
        world = self.world
        if self.stack.way == "loop":
            return self._train_one_by_one(x, masks, group, t)
        index, extra = step_by_step(self._training_draws(group, t))
        # The data may stay on the host: then the samples, not their numbers, go to the device.
        picked = [torch.from_numpy(index)]
        if world.data.train_x.device != world.device:
            picked = [world.data.train_x[picked[0]], world.data.train_y[picked[0]]]
        inputs = [x, masks, *picked, *(torch.from_numpy(d) for d in extra)]
        seeds = [world.module_seed(client, t) for client in group]
        if not self._records_graphs:
            luck = Luck(seeds, world.device, world.counters)
            placed = [i.to(world.device, non_blocking=True) for i in inputs]
            return self._local_steps(len(group), len(picked), luck, *placed)
        # A recording goes on using the generators that it was made with.
        luck = self._luck.setdefault(len(group), Luck(seeds, world.device, world.counters))
        generators = luck.generators if self.stack.random else ()
        recorded = self._record(
            (len(group), len(masks), len(index)),
            partial(self._local_steps, len(group), len(picked), luck),
            inputs,
            generators,
        )
        luck.begin(seeds)
        models, losses = recorded(*inputs)
        return models, losses

    def _train_one_by_one(
        self, x: Tensor, masks: Tensor, group: Sequence[int], t: int
    ) -> tuple[Tensor, Tensor]:
        """The same as the reference does it, for modules that cannot be stacked."""
        each = masks.expand(len(group), -1)
        with self._precision():
            found = [train(self.world, x, mask, client, t) for client, mask in zip(group, each, strict=True)]
        return torch.stack([model for model, _ in found]), x.new_tensor([loss for _, loss in found])

    def _precision(self) -> torch.autocast:
        bfloat16 = self.world.config.engine.precision == "bfloat16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False)

    def _local_steps(
        self, clients: int, picked: int, luck: Luck, x: Tensor, masks: Tensor, *draws: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 2 for a group: what the device does from the draws on, without asking the host.

        The first of the draws, `picked` of them, are indices of samples, or samples and labels.
        """
        world, flat, local = self.world, Flat(self.world.layout, clients), self.world.config.local
        steps = len(draws[0])
        get = world.gather if picked == 1 else world.augmented
        batches = (get(*(d[s] for d in draws)) for s in range(steps))
        with self._precision():
            out, losses = train_stacked(
                self.stack.train,
                flat,
                x,
                masks,
                batches,
                steps,
                optimiser=local.optimiser,
                lr=local.lr,
                luck=luck,
                frozen=self._frozen,
                compiled=self._compiled,
            )
        return flat.to_rows(out), losses


def _together(found: Sequence[tuple[Tensor, Tensor, float, float]]) -> tuple[Tensor, Tensor, float]:
    models, losses, starts, ends = zip(*found, strict=True)
    if len(found) == 1:
        return models[0], losses[0], ends[0] - starts[0]
    return torch.cat(models), torch.cat(losses), max(ends) - min(starts)
