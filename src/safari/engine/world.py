"""Everything that stays the same in a run of one seed: data, clients, model, parts, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from safari.aggregation import Compensation, Gate, ServerStep
from safari.config import Config
from safari.data import Augmentation, Data
from safari.federation import Federation, State, cohort, masks_of
from safari.links import Link, PacketLink, Setting
from safari.models import Layout
from safari.pruning import (
    PRUNERS,
    Batch,
    Budget,
    MaskPolicy,
    Masks,
    Pruner,
    compute_mask,
    settled_mask,
)
from safari.rounds.masks import budget_of, mask_and_votes, masked_gradient, sparsity_of
from safari.rounds.rate import adapted_levels, learning_rate
from safari.runs.record import MOST_BY_CLASS
from safari.sampling import Sampling
from safari.seeds import derive, generator, torch_generator
from safari.tasks import Task, Units
from safari.training import ClientAlgorithm, Known, Scores, draw_batches, evaluate, gather_norms


@dataclass(frozen=True)
class World:
    """Everything that does not change while a run goes on. `module` is scratch space for one client;
    `counters` are its buffers that no vector holds, as it was built with them."""

    config: Config
    seed: int
    device: torch.device
    data: Data
    task: Task
    parts: tuple[np.ndarray, ...]
    label_counts: np.ndarray
    module: nn.Module
    layout: Layout
    counters: Mapping[str, Tensor]
    start: Tensor
    pruner: Pruner
    policy: MaskPolicy
    client: ClientAlgorithm
    sampling: Sampling
    known: Known
    augmentation: Augmentation
    uplink: Link
    downlink: Link
    packets: PacketLink
    rules: Mapping[str, Compensation]
    server_steps: Sequence[ServerStep] = ()
    gate: Gate | str = "norm"
    # The training samples that each client holds out, to test models on; empty where clients do not.
    held: tuple[np.ndarray, ...] = ()
    # Those of the labels, where models learn them standardised.
    units: Units | None = None

    def federation(self, rule: Compensation | None = None) -> Federation:
        """The server's side with one of the rules; by default with that of the first arm."""
        config = self.config
        return Federation(
            model=self.start,
            clients=len(self.parts),
            layout=self.layout,
            rounds=config.rounds,
            seed=self.seed,
            rule=next(iter(self.rules.values())) if rule is None else rule,
            gate=self.gate,
            steps=self.server_steps,
            algorithm=self.client,
            policy=self.policy,
            sampling=self.sampling,
            cohort=config.cohort,
            weights=self.client_weights,
            lr=self.lr,
            budget=self.budget,
            score=None if self.pruner.needs_data else self.score_mask,
            levels=None if config.wire.adapt == "none" else partial(adapted_levels, config.wire),
        )

    def setting(self, direction: str) -> Setting:
        """Facts that the link in this direction may use, with its own random generator."""
        return Setting(len(self.parts), self.label_counts, generator(self.seed, direction))

    @property
    def client_weights(self) -> list[float] | None:
        """Weight of each client in the average; None: all the same."""
        if self.config.aggregation.weights == "samples":
            return [float(len(part)) for part in self.parts]
        return None

    def budget(self, t: int) -> Budget:
        """Budget of the masks of round t."""
        sparsity = sparsity_of(self.config.pruning, t)
        if sparsity not in self._budgets:
            self._budgets[sparsity] = budget_of(self.layout, self.config.pruning, sparsity)
        return self._budgets[sparsity]

    @cached_property
    def _budgets(self) -> dict[float, Budget]:
        return {}

    def first_masks(self, x: Tensor, t: int) -> Masks:
        """The masks of round t on a model, by a policy that has no past."""
        first = State(t, {"policy": self.policy.init(self.layout, self.device)})
        return masks_of(self.federation(), first, x)[0]

    def mask(self, x: Tensor, client: int, t: int) -> Tensor:
        """A client's mask of such a round."""
        return self.client_mask(self.first_masks(x, t), x, client, t)[0]

    def score_mask(
        self, x: Tensor, t: int, support: Tensor | None, client: int = 0, pruner: Pruner | None = None
    ) -> Tensor:
        """A mask of x by the configured score (or another pruner's), within a support (None: everywhere)."""
        # Before anything was trained, all clients and arms have the same mask when it needs no data.
        if t == 0 and support is None and pruner is None and not self.pruner.needs_data:
            return self._first_mask
        if pruner is None and not self.pruner.needs_data and support is not None:
            # From the second round on nothing is left to be scored, unless a schedule cuts further.
            settled = settled_mask(self.layout, self.budget(t), support)
            if settled is not None:
                return settled
        if pruner is None and not self.pruner.needs_data and self._is_untrained(x, support):
            key = (sparsity_of(self.config.pruning, t), support is None)
            if key not in self._untrained_masks:
                self._untrained_masks[key] = self._score_mask(x, t, support, client, self.pruner)
            return self._untrained_masks[key]
        return self._score_mask(x, t, support, client, pruner or self.pruner)

    def _is_untrained(self, x: Tensor, support: Tensor | None) -> bool:
        """Is this still the first model, because nothing has arrived yet? Then its mask is scored once: SynFlow
        takes longer than the rest of a round."""
        return torch.equal(x, self.start) and (support is None or torch.equal(support, self.start != 0))

    @cached_property
    def _untrained_masks(self) -> dict[tuple[float, bool], Tensor]:
        return {}

    @cached_property
    def _first_mask(self) -> Tensor:
        return self._score_mask(self.start, 0, None, 0, self.pruner)

    def _score_mask(self, x: Tensor, t: int, support: Tensor | None, client: int, pruner: Pruner) -> Tensor:
        batch, draws = self.pruning_batch(client, t), torch_generator(self.seed, "pruner")
        make = partial(
            compute_mask, self.fresh_module(), self.layout, x, pruner, self.budget(t), batch, draws, support
        )
        name = self.config.pruning.pruner
        own = pruner is self.pruner and name not in PRUNERS
        return PRUNERS.call(name, make) if own else make()

    def client_mask(self, masks: Masks, x: Tensor, client: int, t: int) -> tuple[Tensor, Tensor | None]:
        """A client's mask in round t, and what it reports to the policy (None: nothing)."""
        return mask_and_votes(
            masks,
            partial(self.client_gradient, masks, x, client, t),
            lambda support: self.score_mask(x, t, support, client),
        )

    def client_gradient(self, masks: Masks, x: Tensor, client: int, t: int) -> Tensor:
        """The gradient of a client's loss at the masked global model: see `masked_gradient`."""
        batch = self.samples(self.pruning_draw(client, t))
        return masked_gradient(self.fresh_module(), self.layout, x, masks.base, batch, self.task)

    def fresh_module(self) -> nn.Module:
        """The scratch module without what the last client's training counted in it.

        A norm without momentum depends on such counts: left alone, they would carry over from client to
        client and from arm to arm, and a resumed run would miss them.
        """
        self.layout.put_back(self.module, self.counters)
        return self.module

    def module_seed(self, client: int, t: int) -> int:
        """The seed of what is random inside a client's module in round t."""
        return derive(self.seed, "module", client, t) >> 1

    def lr(self, t: int) -> float:
        """The learning rate of round t."""
        return learning_rate(self.config, t)

    def steps(self, client: int) -> int:
        """Number of local steps that a client makes in a round."""
        local = self.config.local
        if local.epochs > 0:
            return max(1, round(local.epochs * len(self.parts[client]) / local.batch))
        return local.steps

    def scores(
        self,
        model: Tensor,
        t: int,
        memory_format: torch.memory_format = torch.preserve_format,
        tester: nn.Module | None = None,
    ) -> Scores | None:
        """The test of a model after round t, or None where the config asks for none.

        `tester`: what runs the module in a way of its own.
        """
        evaluation = self.config.evaluation
        if not evaluation.is_due(t + 1, self.config.rounds):
            return None
        self.layout.write(self.module, model)
        module = self.fresh_module()
        if evaluation.norms == "gathered":
            gather_norms(module, (batch.to(memory_format=memory_format) for batch in self._norm_batches()))
        return evaluate(
            module if tester is None else tester,
            self.data.test_x,
            self.data.test_y,
            evaluation.batch,
            memory_format,
            task=self.task,
            classes=self.data.classes if self.data.classes <= MOST_BY_CLASS else 0,
        )

    def _norm_batches(self) -> Iterator[Tensor]:
        """All clients' training samples, shuffled: in order of clients each batch would have labels of its own."""
        index = generator(self.seed, "norms").permutation(np.concatenate(self.parts))
        for start in range(0, len(index), self.config.evaluation.batch):
            yield self.samples(index[start : start + self.config.evaluation.batch])[0]

    def client_scores(
        self,
        model: Tensor,
        memory_format: torch.memory_format = torch.preserve_format,
        tester: nn.Module | None = None,
    ) -> list[float]:
        """The score of a model on the samples that each client holds out."""
        self.layout.write(self.module, model)
        module = self.fresh_module()
        batch, found = self.config.evaluation.batch, []
        for held in self.held:
            x, y = self.samples(held)
            scores = evaluate(
                module if tester is None else tester, x, y, batch, memory_format, task=self.task
            )
            found.append(scores[self.task.score])
        return found

    def cohort(self, t: int) -> list[int]:
        """Clients asked in round t, ascending, by a sampling in its initial state."""
        first = State(
            t, {"sampling": self.sampling.init(len(self.parts), self.layout.parameters, self.device)}
        )
        return list(cohort(self.federation(), first)[0].clients)

    def training_draw(self, client: int, t: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Indices of a client's samples in round t, `int64[steps, batch]`, and the draws of its augmentation,
        which have a row a sample, in the same order."""
        rng = generator(self.seed, "batches", client, t)
        part = self.parts[client]
        index = part[draw_batches(rng, len(part), self.config.local.batch, self.steps(client))]
        return index, self.augmentation.draw(rng, index.size, self.data.input_shape)

    def batch(self, index: np.ndarray, draws: Sequence[np.ndarray]) -> Batch:
        """Training samples by index, augmented, on the run's device."""
        return self.gather(torch.from_numpy(index), *(torch.from_numpy(d) for d in draws))

    def gather(self, index: Tensor, *draws: Tensor) -> Batch:
        """`batch` with indices and draws as tensors, on any device."""
        pick = index.to(self.data.train_x.device)
        return self.augmented(self.data.train_x[pick], self.data.train_y[pick], *draws)

    def augmented(self, x: Tensor, y: Tensor, *draws: Tensor) -> Batch:
        """Samples that are in hand, augmented, on the run's device."""
        x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
        return self.augmentation.apply(x, *(d.to(self.device) for d in draws)), y

    def training_batches(self, client: int, t: int) -> list[Batch]:
        """Batches that a client trains on in round t, one a step."""
        index, draws = self.training_draw(client, t)
        size = index.shape[1]
        return [
            self.batch(pick, [d[s * size : (s + 1) * size] for d in draws]) for s, pick in enumerate(index)
        ]

    def pruning_draw(self, client: int, t: int) -> np.ndarray:
        """Indices of the samples that a client's pruner uses in round t."""
        part = self.parts[client]
        rng = generator(self.seed, "pruning", client, t)
        return part[rng.choice(len(part), min(self.config.pruning.batch, len(part)), replace=False)]

    def pruning_batch(self, client: int, t: int) -> Batch:
        """Samples for a client's pruner in round t: a single one if the pruner needs only their shape."""
        return self.samples(self.pruning_draw(client, t) if self.pruner.needs_data else np.arange(1))

    def samples(self, index: np.ndarray) -> Batch:
        """Training samples as they are, on the run's device."""
        pick = torch.from_numpy(index).to(self.data.train_x.device)
        return self.data.train_x[pick].to(self.device), self.data.train_y[pick].to(self.device)
