"""All clients at once: the same rounds as `reference`, with the clients' work stacked.

The same draws, masks, arrivals and stand-ins; models equal up to rounding. A client whose update will not
arrive is not trained: nobody would ever see what it learned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from safari.engine.mail import Mail
from safari.engine.record import MaskCount, Record, Stopwatch, record_of
from safari.engine.reference import network, train
from safari.engine.stack.crew import Crew, threads
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import Stack, stack
from safari.engine.stack.graph import Recorded
from safari.engine.stack.luck import Luck
from safari.engine.stack.masks import STACKED_SCORES, stacked_masks
from safari.engine.stack.train import train_stacked
from safari.engine.state import State
from safari.engine.world import World

# Samples that try out a way of stacking: enough for batch norm's statistics, and an even number.
_TRIAL_SAMPLES = 8
# What a CPU stacks at most, in clients and in numbers of one step's inputs: beyond that activations leave the
# cache, and it no longer matters how long Python takes to start a kernel.
_CPU_CLIENTS, _CPU_INPUTS = 16, 1 << 16
# The largest block from which glibc learns, less what it adds.
_LESSON = 31 << 20

T = TypeVar("T")

_SLOWER = {
    "layers": "clients are stacked layer by layer, without fused kernels",
    "vmap": "clients are stacked by torch.vmap, which is slower than layer by layer",
    "loop": "clients train one after the other",
}


def prepare(world: World) -> Vectorised:
    """The engine for one world: finds out how to stack its module."""
    return Vectorised(world)


class Vectorised:
    """What is found out once for a world: how to stack its module, how many clients fit at once.

    Called with a state, it runs a round.
    """

    def __init__(self, world: World):
        self.world = world
        pick = np.arange(_TRIAL_SAMPLES) % len(world.data.train_y)
        example = world.data.train_x[torch.from_numpy(pick)].to(world.device)
        bfloat16 = world.config.engine.precision == "bfloat16"
        self.stack = stack(world.module, world.layout, example, bfloat16=bfloat16)
        self.chunk = len(world.parts)
        self._crew: Crew | None = None
        if world.device.type == "cpu":
            self._crew = _crew_for(self.stack)
            self.chunk = self._crew.size * _stacked_on_cpu(world) if self._crew else _stacked_on_cpu(world)
            _keep_freed_memory()
        self._frozen = {name for name, p in world.module.named_parameters() if not p.requires_grad}
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
        return f"{_SLOWER[self.stack.way]} ({self.stack.why})" if self.stack.why else ""

    def __call__(self, state: State) -> tuple[State, Record, dict[str, float]]:
        """One round; see `reference.run_round`, whose steps these are."""
        # torch's own threads go on spinning for a while, on the cores that the crew needs next.
        with threads(1) if self._crew else nullcontext():
            return self._round(state)

    def _round(self, state: State) -> tuple[State, Record, dict[str, float]]:
        world, t, x = self.world, state.round, state.server.model
        watch, masks, mail = Stopwatch(world.device), MaskCount(world.layout), Mail(world, x, t)
        cohort = world.cohort(t)
        heard, answered, uplink, downlink = network(world, state)
        arriving = [client for client in cohort if heard[client] and answered[client]]
        shared: Tensor | None = None
        if arriving and not world.pruner.needs_data:
            shared = world.mask(x, arriving[0], t).unsqueeze(0)
            masks.add(shared[0], len(arriving))
            watch.lap("mask")

        def work(group: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
            kept = self._masks(x, group, t) if shared is None else shared
            watch.lap("mask")
            return kept, *self._train(x, kept, group, t)

        models = x.new_empty((len(arriving), world.layout.size))
        losses = x.new_empty(len(arriving))
        place = {client: row for row, client in enumerate(arriving)}
        for group, (kept, sent, lost) in self._in_groups(arriving, work):
            rows = [place[client] for client in group]
            losses[rows] = lost
            watch.lap("train")
            for mask in kept if shared is None else ():
                masks.add(mask)
            if mail.counts or mail.lossy:
                each = kept.expand(len(group), -1)
                sent = torch.stack([mail.up(*letter) for letter in zip(group, sent, each, strict=True)])
            models[rows] = sent
            watch.lap("wire")

        server, outcome = state.server.step_stacked(arriving, models, cohort)
        watch.lap("aggregate")
        scores = world.scores(server.model, t, self._tester(server.model))
        watch.lap("evaluate")
        trained = [client for client in cohort if heard[client]]
        record = record_of(
            world.layout, t, trained, outcome, scores, losses.tolist(), masks, mail.sizes(), x, server.model
        )
        return State(server, uplink, downlink), record, watch.seconds

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
        picks = [world.pruning_draw(client, t) for client in group]
        together = len({len(pick) for pick in picks}) == 1 and self.stack.way != "loop"
        known = world.pruner.score in STACKED_SCORES and world.pruner.iterations == 1
        if not known or not together:
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
        if self._crew is None:
            return self._train_stacked(x, masks, group, t)
        most = _stacked_on_cpu(self.world)
        shares = self._crew.split(range(len(group)), most)
        if len(shares) == 1:
            # A client by itself: torch's own threads help where its kernels are long.
            with threads(self._crew.size if most == 1 else 1):
                return self._train_stacked(x, masks, group, t)
        found = self._crew.map(
            lambda share: self._train_stacked(
                x, masks if len(masks) == 1 else masks[list(share)], [group[i] for i in share], t
            ),
            shares,
        )
        models, losses = zip(*found, strict=True)
        return torch.cat(models), torch.cat(losses)

    def _tester(self, model: Tensor) -> nn.Module | None:
        """What to test a model with instead of the module, where that is faster."""
        if self.world.device.type != "cpu" or self.stack.way != "layers":
            return None
        return _Tester(self.stack, self.world.layout.split(model), self._crew)

    def _train_stacked(self, x: Tensor, masks: Tensor, group: Sequence[int], t: int) -> tuple[Tensor, Tensor]:
        world = self.world
        if self.stack.way == "loop":
            return self._train_one_by_one(x, masks, group, t)
        index, extra = _step_by_step([world.training_draw(client, t) for client in group])
        # The data may stay on the host: then the samples, not their numbers, go to the device.
        inputs = [x, masks, torch.from_numpy(index), *(torch.from_numpy(d) for d in extra)]
        places = [world.device, world.device, world.data.train_x.device, *[world.device] * len(extra)]
        seeds = [world.module_seed(client, t) for client in group]
        luck = Luck(seeds, world.device, world.counters)
        work = partial(self._local_steps, len(group), luck)
        if not self._records_graphs:
            return work(*(i.to(place, non_blocking=True) for i, place in zip(inputs, places, strict=True)))
        key = (len(group), len(masks), len(index))
        if key not in self._recorded:
            pool = next(iter(self._recorded.values())).pool if self._recorded else None
            self._recorded[key] = Recorded(work, [i.to(world.device) for i in inputs], pool)
        models, losses = self._recorded[key](*inputs)
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
        self, clients: int, luck: Luck, x: Tensor, masks: Tensor, index: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 2 for a group: what the device does from the indices on, without asking the host."""
        world, flat, local = self.world, Flat(self.world.layout, clients), self.world.config.local
        mask = flat.spread(masks[0]) if len(masks) == 1 else flat.from_rows(masks)
        batches = (world.gather(index[s], [d[s] for d in extra]) for s in range(len(index)))
        with self._precision():
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
                frozen=self._frozen,
            )
        return flat.to_rows(out), losses


class _Tester(nn.Module):
    """A model in eval mode as a stack of one, the samples shared by the crew."""

    def __init__(self, stack: Stack, tensors: Mapping[str, Tensor], crew: Crew | None):
        super().__init__()
        self._forward = stack.eval
        self._tensors = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
        self._crew = crew

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        if self._crew is None:
            return self._logits(x)
        return torch.cat(self._crew.map(self._logits, x.tensor_split(min(self._crew.size, len(x)))))

    @torch.no_grad()
    def _logits(self, x: Tensor) -> Tensor:
        return self._forward(self._tensors, x, Luck([0], x.device))


def _stacked_on_cpu(world: World) -> int:
    """How many clients a thread trains at once."""
    inputs = world.config.local.batch * math.prod(world.data.input_shape)
    return min(_CPU_CLIENTS, max(1, _CPU_INPUTS // inputs))


def _crew_for(stack: Stack) -> Crew | None:
    """Threads that share the clients, where a pass has nothing in common with another's.

    Other ways than by layers put a client's numbers into the module, and what is random uses the one
    generator that torch has.
    """
    size = torch.get_num_threads()
    return Crew(size) if size > 1 and stack.way == "layers" and not stack.random else None


def _keep_freed_memory() -> None:
    """Let activations lie where those of the step before lay.

    glibc hands freed blocks back to the system, which clears each page when it is touched again: a quarter
    of a small net's round. It stops doing so for blocks up to the largest that was ever freed, so that
    freeing one is enough. Elsewhere this does nothing.
    """
    torch.empty(_LESSON, dtype=torch.uint8)


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
