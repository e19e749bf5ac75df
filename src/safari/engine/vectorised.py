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

from safari.engine.clients import Arriving, put_rows, sent_mask, side_of
from safari.engine.codec import RoundCodec
from safari.engine.group_steps import GroupSteps, GroupTraining, Inputs, ReplayableSteps
from safari.engine.measure import Round, Stopwatch, Testing, end_round
from safari.engine.network import deliver
from safari.engine.reference import train
from safari.engine.stack.compile_policy import FORECAST, compiles
from safari.engine.stack.cpu import TURNS, Tester, keep_freed_memory, pool_for, stacked_at_once
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import stack
from safari.engine.stack.graph import Recorded, RecordedSteps, Work
from safari.engine.stack.masks import (
    Scoring,
    gradient_score,
    score_clients,
    stacked_masks,
    stacked_score,
)
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.sample_draws import Draws, step_by_step
from safari.engine.stack.thread_pool import ThreadPool, finished, threads
from safari.engine.stack.trial import picture_format
from safari.engine.world import World
from safari.federation import Broadcast, Federation, State, Tensors, begin
from safari.federation.forms import index_of
from safari.pruning import Masks
from safari.sampling import SAMPLINGS
from safari.training import CLIENTS, ClientSide

# Samples that try out a way of stacking: enough for batch norm's statistics, and an even number.
_TRIAL_SAMPLES = 8

T = TypeVar("T")

# Waits for a group's training; also the seconds from the first start to the end.
Training = Callable[[], "tuple[GroupTraining, float]"]

_SLOWER = {
    "layers": "clients are stacked layer by layer, without fused kernels",
    "vmap": "clients are stacked by torch.vmap, which is slower than layer by layer",
    "loop": "clients train one after the other",
}


def prepare(world: World) -> Vectorised:
    """The engine for one world: finds out how to stack its module."""
    return Vectorised(world)


def forecast(world: World) -> str:
    """Notice of a long wait before the first round, in one line; empty when there is none."""
    return FORECAST if compiles(world.config, world.device.type) else ""


class Vectorised:
    """Vectorised engine of one world: a stacked module, and the number of clients that fit at once.

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
        self._pool: ThreadPool | None = None
        self._tester: Tester | None = None
        if world.device.type == "cpu":
            keep_freed_memory()
            self._pool = pool_for(self.stack)
            self.chunk = self._stacked * (self._pool.size * TURNS if self._pool else 1)
            if self.stack.way == "layers":
                self._tester = Tester(world.module, self._pool, example)
        self._steps = GroupSteps(world, self.stack, self._compiled)
        self._test_format = picture_format(world.module, example)
        self._recorded: dict[tuple[int, ...], Recorded] = {}
        self._recorded_steps: dict[tuple[int, ...], RecordedSteps] = {}
        self._random: dict[int, RandomState] = {}
        # While a GPU computes the host has nothing else to do; a CPU has.
        foreseen = world.sampling.learn is None and world.config.sampling.name in SAMPLINGS
        ahead = world.cohort if world.device.type == "cuda" and foreseen else None
        self._training_draws = Draws(world.training_draw, ahead)
        needed = world.pruner.needs_data and world.config.policy.name == "static"
        self._pruning_draws = Draws(world.pruning_draw, ahead if needed else None)
        # Work that needs the host in between cannot be replayed.
        self._records_graphs = (
            world.config.engine.graph and world.device.type == "cuda" and self.stack.way == "layers"
        )
        counts = {world.steps(client) for client in range(len(world.parts))}
        self._most_steps = max(counts)
        # A user's own client algorithm may do something else in every step.
        self._step_by_step = len(counts) > 1 and world.config.client.name in CLIENTS

    @property
    def note(self) -> str:
        """One line about the way taken, when it is not the fast one."""
        return f"{_SLOWER[self.stack.way]} ({self.stack.why})" if self.stack.why else ""

    def __call__(self, fed: Federation, state: State) -> Round:
        """One round; see `reference.run_round`, whose steps these are."""
        (found,) = self.side_by_side([(fed, state)])
        return found

    def side_by_side(self, arms: Sequence[tuple[Federation, State]]) -> Iterator[Round]:
        """A round of each arm, in order. While one arm's models are averaged and tested, a thread pool trains the
        clients of the next; what comes out is the same as without the others.
        """
        if self._pool is None:
            for fed, state in arms:
                yield from finished([self._round(fed, state)])
            return
        # torch's own threads go on spinning for a while, on the cores that the thread pool needs next.
        with threads(1):
            try:
                yield from finished([self._round(fed, state) for fed, state in arms])
            finally:
                self._pool.drop()

    def _round(self, fed: Federation, state: State) -> Generator[None, None, Round]:
        """Stops wherever it would have to wait for the thread pool."""
        world, t, before = self.world, state.round, state
        watch = Stopwatch(world.device)
        state, sent = begin(fed, state)
        delivery, state = deliver(world, state, fed.rule, sent.draw.clients)
        codec, arriving = RoundCodec.of(world, state, sent), set(delivery.arriving)
        # Nobody sees anything of an upload that is lost, unless its client remembers what it did.
        training = delivery.hear if world.client.keeps_state else delivery.arriving
        watch.lap("mask")

        def work(group: Sequence[int]) -> tuple[Tensor, Tensor | None, Training]:
            kept, votes = self._masks(sent.masks, sent.model, group, t)
            watch.lap("mask")
            side = side_of(world, before["client"], sent.along, group)
            return kept, votes, self._begin(sent.model, kept, group, t, side)

        uploads, clients = Arriving(world, sent, delivery.arriving), before["client"]
        for group, (kept, votes, training_of) in self._in_groups(training, work):
            yield
            found, seconds = training_of()
            watch.charge("train", seconds)
            clients = put_rows(world, clients, found.state, group)
            arrives = [row for row, client in enumerate(group) if client in arriving]
            ids, here = [group[row] for row in arrives], index_of(arrives)
            own = sent_mask(world, kept if len(kept) == 1 else kept[here])
            uploads.add(
                ids,
                codec.up(ids, found.models[here], own),
                own,
                found.losses[here],
                {name: vectors[here] for name, vectors in found.up.items()},
                None if votes is None else votes[here],
            )
            watch.lap("wire")

        testing = Testing(
            model=partial(world.scores, t=t, memory_format=self._test_format, tester=self._tester),
            clients=partial(world.client_scores, memory_format=self._test_format, tester=self._tester),
            everyone=partial(self._everyone, before["client"], sent),
        )
        state = state.put("client", clients)
        got = uploads.uploads(delivery.hear)
        return end_round(world, fed, before, state, sent, got, codec, testing, watch)

    def _everyone(self, state: Tensors, sent: Broadcast, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The models and masks of these clients in the round, whatever the network does to them."""
        world, t, x, masks = self.world, sent.round, sent.model, sent.masks

        def work(group: Sequence[int]) -> tuple[Tensor, Tensor]:
            kept, _ = self._masks(masks, x, group, t)
            side = side_of(world, state, sent.along, group)
            return self._train(x, kept, group, t, side).models, kept

        row = {client: k for k, client in enumerate(clients)}
        models = x.new_empty((len(clients), world.layout.size))
        shared = masks.shared is not None
        every = models.new_empty((1, world.layout.size) if shared else models.shape, dtype=torch.bool)
        for group, (found, kept) in self._in_groups(clients, work):
            rows = [row[client] for client in group]
            models[rows] = found
            every[[0] if shared else rows] = kept
        return models, every

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
            self._recorded_steps.clear()
            torch.cuda.empty_cache()
            waiting.append(whole)

    def _masks(self, masks: Masks, x: Tensor, group: Sequence[int], t: int) -> tuple[Tensor, Tensor | None]:
        """`bool[clients, size]`, or one row for all: the masks of a group; and its votes, where there are any."""
        if masks.shared is not None and masks.votes is None:
            return masks.shared[None], None
        most = self._stacked * self._pool.size if self._pool is not None else len(group)
        parts = [self._own_masks(masks, x, group[i : i + most], t) for i in range(0, len(group), most)]
        kept = masks.shared[None] if masks.shared is not None else torch.cat([kept for kept, _ in parts])
        return kept, None if masks.votes is None else torch.cat([votes for _, votes in parts])

    def _own_masks(self, masks: Masks, x: Tensor, group: Sequence[int], t: int) -> tuple[Tensor, Tensor]:
        """The group's masks and votes (an empty row a client where it does not vote), from its own data."""
        world = self.world
        picks = self._pruning_draws(group, t)
        together = len({len(pick) for pick in picks}) == 1 and self.stack.way != "loop"
        score = gradient_score if masks.needs_gradient else stacked_score(world.pruner.score)
        if not together or score is None or (world.pruner.iterations > 1 and not masks.needs_gradient):
            each = [world.client_mask(masks, x, client, t) for client in group]
            votes = [x.new_empty(0) if vote is None else vote for _, vote in each]
            return torch.stack([mask for mask, _ in each]), torch.stack(votes)
        pick = torch.from_numpy(np.concatenate(picks)).to(world.data.train_x.device)
        x_each = world.data.train_x[pick].to(world.device)
        y_each = world.data.train_y[pick].to(world.device)
        flat = Flat(world.layout, len(group))
        scoring = score_clients(score, self.stack.eval, flat, world.device, world.task)
        if self._records_graphs:
            scoring = self._recorded_scoring(scoring, (int(masks.needs_gradient), len(group), len(pick)))
        if not masks.needs_gradient:
            kept = stacked_masks(flat, x, x_each, y_each, world.budget(t), masks.support, scoring)
            return kept, x.new_empty(len(group), 0)
        base = x if masks.base is None else x.masked_fill(~masks.base, 0.0)
        gradient = x.new_zeros(len(group), world.layout.size)
        gradient[:, world.layout.prunable.to(x.device)] = scoring(base, x_each, y_each)
        kept = masks.own(gradient) if masks.own is not None else x.new_empty(len(group), 0)
        return kept, masks.votes(gradient) if masks.votes is not None else x.new_empty(len(group), 0)

    def _recorded_scoring(self, scoring: Scoring, key: tuple[int, ...]) -> Scoring:
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
            placed = [i.to(self.world.device) for i in inputs]
            self._recorded[key] = Recorded(work, placed, self._graph_memory(), generators)
        return self._recorded[key]

    def _graph_memory(self) -> object:
        """The memory of the recordings so far, none of which run at the same time."""
        recorded: list[Recorded | RecordedSteps] = [*self._recorded.values(), *self._recorded_steps.values()]
        return recorded[0].pool if recorded else None

    def _train(
        self, x: Tensor, masks: Tensor, group: Sequence[int], t: int, side: ClientSide | None = None
    ) -> GroupTraining:
        """The group after its local steps; without `side`, clients that have neither state nor label counts."""
        if side is None:
            world = self.world
            state = world.client.init(len(world.parts), world.layout.parameters, world.device)
            side = side_of(world, state, {}, group)
        with threads(1) if self._pool else nullcontext():
            return self._begin(x, masks, group, t, side)()[0]

    def _begin(self, x: Tensor, masks: Tensor, group: Sequence[int], t: int, side: ClientSide) -> Training:
        """Begin a group's training: in the thread pool, or else at once."""

        def train(share: Sequence[int]) -> tuple[GroupTraining, float, float]:
            rows, start = list(share), time.perf_counter()
            own = masks if len(masks) == 1 else masks[rows]
            beside = side if len(rows) == len(group) else side.rows(rows)
            found = self._train_stacked(x, own, [group[i] for i in share], t, beside)
            return found, start, time.perf_counter()

        pool, everybody = self._pool, range(len(group))
        if pool is None:
            found = [train(everybody)]
            return lambda: _together(found)
        self._training_draws(group, t)  # here, so that no two threads do it
        # By the config alone: the split must not depend on the progress of other arms.
        arms = len(self.world.config.arms)
        shares = pool.split(everybody, self._stacked, among=arms)
        # A client by itself: torch's own threads help where its kernels are long, and no core is busy.
        alone = self._stacked == 1 and len(shares) % pool.size == 1 and arms == 1
        begun = pool.submit(train, shares[:-1] if alone else shares)

        def finish() -> tuple[GroupTraining, float]:
            found = [share.result() for share in begun]
            if alone:
                with threads(pool.size):
                    found.append(train(shares[-1]))
            return _together(found)

        return finish

    def _train_stacked(
        self, x: Tensor, masks: Tensor, group: Sequence[int], t: int, side: ClientSide
    ) -> GroupTraining:
        world = self.world
        if self.stack.way == "loop":
            return self._train_one_by_one(x, masks, group, t, side)
        start = x
        if not world.config.pruning.masks_gradient:
            # Algorithm 2 as it is printed: masked once, at the start.
            start, masks = x.masked_fill(~masks, 0.0), torch.ones_like(masks[:1])
        index, extra = step_by_step(self._training_draws(group, t))
        # The data may stay on the host: then the samples, not their numbers, go to the device.
        picked = [torch.from_numpy(index)]
        if world.data.train_x.device != world.device:
            picked = [world.data.train_x[picked[0]], world.data.train_y[picked[0]]]
        inputs = Inputs(start, masks, picked, [torch.from_numpy(d) for d in extra], side, self._lr(t))
        seeds = [world.module_seed(client, t) for client in group]
        if not self._records_graphs:
            draws = RandomState(seeds, world.device, world.counters)
            tensors = [i.to(world.device, non_blocking=True) for i in inputs.tensors()]
            return self._steps.named(self._steps.run(len(group), inputs, draws, *tensors), replayed=False)
        # A recording goes on using the generators that it was made with.
        draws = self._random.setdefault(len(group), RandomState(seeds, world.device, world.counters))
        generators = draws.generators if self.stack.random else ()
        work = (
            self._recorded_one_by_one(len(group), len(index), inputs, draws, generators)
            if self._step_by_step
            else self._record(
                (2, len(group), len(masks), len(index)),
                partial(self._steps.run, len(group), inputs.described(), draws),
                inputs.tensors(),
                generators,
            )
        )
        draws.begin(seeds)
        return self._steps.named(work(*inputs.tensors()), replayed=True)

    def _recorded_one_by_one(
        self,
        clients: int,
        steps: int,
        inputs: Inputs,
        draws: RandomState,
        generators: Sequence[torch.Generator],
    ) -> Work:
        """A round of this many steps, from recordings of single ones."""
        key, number = (clients, len(inputs.masks)), partial(torch.tensor, dtype=torch.float64)
        if key not in self._recorded_steps:
            begin = partial(ReplayableSteps, self._steps, clients, inputs.described(), draws)
            longest = [number(1.0), *inputs.padded(self._most_steps).tensors()]
            placed = [i.to(self.world.device) for i in longest]
            self._recorded_steps[key] = RecordedSteps(begin, placed, self._graph_memory(), generators)
        return partial(self._recorded_steps[key], steps - 1, number(float(steps)))

    def _lr(self, t: int) -> float | Tensor:
        """The round's learning rate: a tensor where it changes and rounds are replayed."""
        lr = self.world.lr(t)
        changes = self.world.config.local.schedule != "constant"
        return torch.tensor(lr) if changes and self._records_graphs else lr

    def _train_one_by_one(
        self, x: Tensor, masks: Tensor, group: Sequence[int], t: int, side: ClientSide
    ) -> GroupTraining:
        """Train clients one after the other, as the reference does, for modules that cannot be stacked."""
        each = masks.expand(len(group), -1)
        with self._steps.precision():
            found = [
                train(self.world, x, mask, client, t, side.rows([k]))
                for k, (client, mask) in enumerate(zip(group, each, strict=True))
            ]
        return GroupTraining(
            torch.stack([one.model for one in found]),
            x.new_tensor([one.loss for one in found]),
            {n: torch.cat([one.state[n] for one in found]) for n in found[0].state},
            {n: torch.cat([one.up[n] for one in found]) for n in found[0].up},
        )


def _together(found: Sequence[tuple[GroupTraining, float, float]]) -> tuple[GroupTraining, float]:
    groups, starts, ends = zip(*found, strict=True)
    if len(groups) == 1:
        return groups[0], ends[0] - starts[0]
    whole = GroupTraining(
        torch.cat([g.models for g in groups]),
        torch.cat([g.losses for g in groups]),
        {name: torch.cat([g.state[name] for g in groups]) for name in groups[0].state},
        {name: torch.cat([g.up[name] for g in groups]) for name in groups[0].up},
    )
    return whole, max(ends) - min(starts)
