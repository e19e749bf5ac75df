"""SAFARI as a Flower strategy: a thin adapter around `safari.aggregation`, with a memory on disk."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from safari.aggregation import GATES, RULES, Compensation, Server
from safari.aggregation.steps import steps_of
from safari.config import Config
from safari.errors import ConfigError, RunError, SafariError
from safari.federation import Broadcast as Sent
from safari.federation import Federation, State, Uploads, finish, init
from safari.federation.algorithm import running_average_of
from safari.flower.arrays import dense_record, dense_vector, others_of, state_names
from safari.flower.broadcast import Broadcast, broadcast
from safari.flower.chain import Downloads
from safari.flower.collect import Collected, Request, collect
from safari.flower.evaluation import Evaluation, collect_evaluation
from safari.flower.exchange import exchange, of_a_node, wait_for_nodes
from safari.flower.log import log
from safari.flower.methods import STATIC, Methods, Plan
from safari.flower.parts import blocks_record, check_datagrams, complete_masks, reply_without_words
from safari.flower.protocol import PACKETS
from safari.flower.reply import mean_metrics
from safari.flower.residual import NEVER
from safari.flower.roster import Roster
from safari.flower.run_log import RunLog, round_record
from safari.flower.scores import scored
from safari.flower.selection import Selection, select, select_drawn
from safari.flower.settings import check_arguments, settings
from safari.flower.text import last_line
from safari.models import Layout
from safari.pruning import PRUNERS, Batch, Masks, compute_mask
from safari.rounds.beside import rounded
from safari.rounds.masks import budget_of, sparsity_of
from safari.rounds.rate import learning_rate
from safari.runs.record import RoundRecord
from safari.sampling import SAMPLINGS, Draw, SamplingRound
from safari.seeds import generator, torch_generator
from safari.wire import ValueMode

if TYPE_CHECKING:
    from safari.flower.datagrams import Datagrams
    from safari.net.blocks import Delivery

# Lines of a round in the log; the records hold all.
_MOST_TOLD = 10
# Seconds between two attempts at a round in which nobody answers: as long as a SuperLink takes to notice that a node
# is gone.
_LONGEST_PAUSE = 60.0

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True)
class Asked:
    """A round under way: who was asked, with what, and the state that `finish` goes on from.

    `online`: all nodes that were connected.
    """

    state: State
    chosen: Selection
    online: frozenset[int]
    sent: Broadcast
    messages: tuple[Message, ...]

    def request(self, timeout: float, patience: int | None) -> Request:
        """Request with which replies are matched. Messages get their ids when they are sent."""
        return Request(
            messages={m.metadata.message_id: m.metadata.dst_node_id for m in self.messages},
            absent=self.chosen.absent,
            timeout=timeout,
            online=self.online,
            spare=self.chosen.spare,
            patience=patience,
        )


class SafariStrategy(Strategy):
    """Sparse training, compact messages, and stand-ins for the clients that did not answer.

    `module`: gives the names, shapes and kinds of the model's tensors, and the first model unless `start` is
    given one. `clients`: how many there are in all, connected or not; more than before when a run goes on.
    `rule`: what to do about the missing: a name, a table such as `{"rule": "file.py:mine", "option": 1}`, or
    a Compensation. `config`: whatever else of a `Config` matters here, as plain tables; what would have no
    effect is refused. In a whole `Config`, that of an experiment which Flower repeats, it is only recorded.

    `run`: the folder for records and checkpoints. A new process that finds one there goes on after it.
    `identify`: "name" believes the name that a client gives (`safari-id` or `partition-id` of its node's
    config), as long as no other node has it; "node" takes its node id, which is worth more where nodes
    authenticate with registered keys. `patience`: after this many rounds of silence a client that is not
    connected is no longer counted among the missing, and its seat may be given to a newcomer; None: never.

    `download`: "frame", which is exact; "dense" where some clients do not use our client side, and then
    nothing is cut unless `config` says so; or a lossy mode of the wire format such as "step", for which
    clients remember a model. `upload`: "frame", or "dense" where a strategy around this one, or a mod around
    our client side, reads the clients' arrays. `evaluate`: ask the clients to test each new model, too.

    `min_nodes`: how many connected nodes the first round waits for, and `wait`: how many seconds it waits before it
    gives up. `quorum`: later rounds wait until so many nodes are connected, however long that takes. A round in
    which no node gives an answer of its own does not count, and is begun again. `give_up`: after so many rounds in
    a row without any arrival `start` ends with an error; None: never. `datagrams`: move models
    in datagrams beside Flower, and count what of them arrives by the deadline (`safari.flower.Datagrams`).
    `batch`: inputs and labels of which a score at the server sees the shape: synflow, where a mask policy begins
    with it.

    A strategy around this one, such as Flower's differential privacy, is respected: a model that it hands to
    `configure_train` is the one that is sent and stepped from. `run` then has no effect and is refused.
    """

    def __init__(
        self,
        module: nn.Module,
        clients: int,
        rule: str | Mapping[str, Any] | Compensation = "safari",
        *,
        config: Config | Mapping[str, Any] | None = None,
        run: str | Path | None = None,
        identify: str = "name",
        patience: int | None = None,
        download: str = "frame",
        upload: str = "frame",
        evaluate: bool = False,
        min_nodes: int = 1,
        wait: float = 600.0,
        quorum: int = 1,
        give_up: int | None = 10,
        datagrams: Datagrams | None = None,
        batch: Batch | None = None,
        **others: Any,
    ):
        check_arguments(
            clients, identify, patience, download, upload, min_nodes, wait, quorum, give_up, others
        )
        self.config = settings(module, clients, rule, config, download, upload)
        check_datagrams(datagrams, download, upload)
        self._methods = Methods.of(self.config, Layout.of(module))
        self._methods.check(download, upload, datagrams is not None)
        self.datagrams = datagrams
        arm = self.config.arms[0].rule
        self.rule = rule if isinstance(rule, Compensation) else RULES.build(arm.name, arm.options)
        if self.rule.overrides_network:
            raise ConfigError(
                f"rule must take the network as it is, got {self.config.arms[0].name}, which overrides it: "
                "only our own engines can; use drop"
            )
        # A copy, because masks are worked out in it.
        self.module, self.layout = copy.deepcopy(module).cpu(), Layout.of(module)
        self.run = None if run is None else Path(run)
        self.by_name, self.patience = identify == "name", patience
        self.download, self.upload, self.evaluate = download, upload, evaluate
        self.min_nodes, self.wait, self.quorum, self.give_up = min_nodes, wait, quorum, give_up
        self.roster = Roster(clients)
        self._names = state_names(self.module, self.layout)
        self._others = others_of(ArrayRecord(dict(self.module.state_dict())), self._names)
        self._batch = batch
        self._fed = self._federation(self.layout.read(self.module))
        # After the last round that counted; and the one under way, which may be begun again.
        self._state: State | None = None
        self._asked: Asked | None = None
        self._handed_in: Tensor | None = None
        self._downloads = Downloads(download) if download in tuple(ValueMode) else None
        self._evaluation: Evaluation | None = None
        self._timeout = math.inf
        # `start` is ours, not that of a strategy around this one.
        self._starting = False
        self._begun = False
        self._resumed = False
        # Of a run that is resumed: no client that it knows has answered yet.
        self._among_strangers = False
        self._lost_in_a_row = 0
        # How often the round under way was begun and brought no answer.
        self._silent = 0
        self._line = RoundRecord(round=1, arrived=(), missing=(), metrics={})

    @property
    def state(self) -> State:
        """State that lasts from round to round, apart from the clients' names."""
        if self._state is None:
            raise SafariError("the strategy has no model yet: call start, or configure_train with one")
        return self._state

    @property
    def server(self) -> Server:
        """The aggregating server as of this state."""
        return self._fed.server(self.state)

    @property
    def arrays(self) -> ArrayRecord:
        """The global model as a state_dict's arrays, in its order."""
        return self._dense(self.state.model)

    @property
    def averaged(self) -> ArrayRecord | None:
        """The running average of the models likewise; None where `aggregation.average` asks for none."""
        average = None if self._state is None else self._state.average
        return None if average is None else self._dense(average)

    def summary(self) -> None:
        """Log what the strategy was asked to do."""
        c = self.config
        cut = f"{c.pruning.pruner}, {100 * c.pruning.sparsity:.0f} % of the weights cut"
        log.info("\t├──> SAFARI: %s clients, rule %s", c.clients, c.arms[0].name)
        log.info("\t├──> Masks: %s", cut if c.pruning.sparsity else "none, clients train all weights")
        log.info("\t├──> Mask policy: %s; client algorithm: %s", c.policy.name, c.client.name)
        uploads = c.wire.values if self.upload == "frame" else self.upload
        log.info("\t├──> Uploads: %s; downloads: %s", uploads, self.download)
        log.info("\t└──> Run folder: %s", self.run or "none (no records, no checkpoints)")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
        average_fn: Evaluate | None = None,
    ) -> Result:
        """All rounds, or those that an earlier process has not done; `timeout` is each round's deadline.

        `average_fn` tests the running average of the models, as `evaluate_fn` tests the newest one.
        SafariError where too few nodes connect, or too many rounds in a row bring nothing.
        """
        result = Result()
        self._timeout, self._begun, self._lost_in_a_row = timeout, False, 0
        arrived_ever = False
        log.info("Starting SafariStrategy:")
        self.summary()
        with self._run_log(initial_arrays, num_rounds) as folder:
            first = self.state.round
            if evaluate_fn is not None and first == 0:
                _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, self.arrays))
            every = 1 if folder is None else folder.every(self.state, self.roster)
            if every > max(1, self.config.checkpoint.every):
                log.info("Checkpoints are large: one every %s rounds (checkpoint.every)", every)
            while self.state.round < num_rounds:
                tests = evaluate_fn, average_fn
                seconds = self._round(
                    grid, result, train_config or {}, evaluate_config or {}, tests, num_rounds
                )
                if folder is not None:
                    folder.write(self._line, seconds)
                    done = self.state.round
                    if done % every == 0 or done == num_rounds:
                        folder.save(self.state, self.roster)
                arrived_ever = arrived_ever or not self._line["lost"]
                self._count_lost()
            if self.state.round > first and not arrived_ever and self.give_up is not None:
                raise SafariError(self._nothing_came("no round brought a usable reply"))
        result.arrays = self.arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's messages; `arrays`, where there are any, are the model to go on with."""
        self._take_over(arrays)
        online = wait_for_nodes(grid, self.quorum) if self._begun else self._wait_for_all(grid)
        self._begun = True
        self._publish()
        chosen, state = self._select(online)
        plan, state = self._methods.plan(self._fed, state)
        sent, messages = self._prepare(chosen.nodes, config, server_round, MessageType.TRAIN, plan)
        if self.datagrams is not None:
            messages = self.datagrams.announce(messages, sent, self._timeout)
        self._asked = Asked(state, chosen, frozenset(online), sent, tuple(messages))
        log.info(
            "configure_train: asking %s nodes, %.0f bytes each; %s clients are not connected",
            len(chosen.nodes),
            sent.size,
            len(chosen.absent),
        )
        return messages

    def _select(self, online: Sequence[int]) -> tuple[Selection, State]:
        """Draw the clients of this round, and return the state with what the sampling remembers of them."""
        state, number = self.state, self.state.round
        # Begun again, a round asks others: those who were drawn may be the ones that are away.
        again = (self._silent,) if self._silent else ()
        rng = generator(self.config.seed, "cohort", number, *again)
        if self.config.sampling.name == "uniform":
            cohort = self.config.cohort
            return select(self.roster, online, number, cohort=cohort, patience=self.patience, rng=rng), state

        def draw(weights: np.ndarray) -> Draw:
            nonlocal state
            view = SamplingRound(number, self.config.cohort or self.config.clients, weights, rng)
            drawn, after = self._fed.sampling.apply(state["sampling"], view)
            state = state.put("sampling", dict(after))
            return drawn

        weighted = self.config.aggregation.weights == "samples"
        weights = self.roster.shares() if weighted else [1.0] * self.config.clients
        return select_drawn(self.roster, online, number, draw, weights, patience=self.patience), state

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sort the replies, let arrivals stand in for the missing, average."""
        if self._asked is None:
            raise SafariError("aggregate_train needs a round that configure_train has begun")
        asked, sent = self._asked, self._asked.sent
        weighted = self.config.aggregation.weights == "samples"
        replies, deliveries = self._deliveries(list(replies), sent)
        collected = collect(
            self.roster,
            asked.request(self._timeout, self.patience),
            replies,
            sent,
            by_name=self.by_name,
            weighted=weighted,
            deliveries=deliveries,
        )
        self._refuse_strangers(collected)
        if self._one_mask(sent.plan) and sent.shared.predicted_mask is not None:
            expected = torch.from_numpy(sent.shared.predicted_mask)
            collected = replace(collected, replies=complete_masks(collected.replies, expected))
        changed = collected.roster.changed_seats(self.roster)
        self.roster, self._asked = collected.roster, None
        self._note_downloads(collected)
        self._state, record = self._finish(asked, collected, changed)
        self._line = round_record(record, sent, collected, self._resumed)
        if self.datagrams is not None and deliveries is not None:
            blocks = blocks_record(deliveries, collected.nodes)
            self._line = self._line.with_extra(blocks=blocks, datagrams=self.datagrams.counts)
        self._resumed = False
        self._evaluation = Evaluation({collected.nodes[seat]: seat for seat in record.arrived})
        self._tell()
        arrived = [collected.replies[seat].metrics for seat in record.arrived]
        return self.arrays, mean_metrics(arrived)

    def _federation(self, model: Tensor) -> Federation:
        config, client = self.config, self._methods.client
        gate, sampling, pruner = config.aggregation.gate, config.sampling, PRUNERS[config.pruning.pruner]
        return Federation(
            model=model,
            clients=config.clients,
            layout=self.layout,
            rounds=config.rounds,
            seed=config.seed,
            rule=self.rule,
            gate=GATES.build(gate.name, gate.options),
            steps=steps_of(
                [(plug.name, plug.options) for plug in config.aggregation.steps],
                running_average_of(client, config.aggregation.average),
            ),
            algorithm=client,
            policy=None if config.policy.name == STATIC else self._methods.policy,
            sampling=SAMPLINGS.build(sampling.name, sampling.options),
            cohort=config.cohort,
            weights=None,
            lr=partial(learning_rate, config),
            budget=lambda t: budget_of(self.layout, config.pruning, sparsity_of(config.pruning, t)),
            score=None if pruner.needs_data else self._score,
        )

    def _score(self, x: Tensor, t: int, support: Tensor | None) -> Tensor:
        """The configured score's mask of a model, as the server works it out."""
        pruner, draws = PRUNERS[self.config.pruning.pruner], torch_generator(self.config.seed, "pruner")
        return compute_mask(
            self.module, self.layout, x, pruner, self._fed.budget(t), self._batch, draws, support
        )

    def _finish(
        self, asked: Asked, collected: Collected, changed: Sequence[int]
    ) -> tuple[State, RoundRecord]:
        """The state and the record after the round, of what came."""
        fed, state, plan = self._fed, asked.state, asked.sent.plan
        # Nobody was there to be asked: the round is lost, and no client's fault.
        cohort = collected.cohort or tuple(range(self.config.clients))
        replies, x = collected.replies, state.model
        masks = torch.stack([reply.mask for reply in replies.values()]) if replies else x.bool()[None][:0]
        votes = [reply.votes for reply in replies.values() if reply.votes is not None]
        received = None
        if any(reply.came is not None for reply in replies.values()):
            rows = [torch.ones_like(r.mask) if r.came is None else r.came for r in replies.values()]
            received = torch.stack(rows)
        # A mask that has to be the announced one stands for all; plain arrays may have left it.
        if plan.shared is not None and self.upload == "frame":
            masks = plan.shared[None]
        names = next((reply.up.keys() for reply in replies.values()), ())
        got = Uploads(
            asked=cohort,
            ids=list(replies),
            models=torch.stack([r.vector for r in replies.values()]) if replies else x.new_empty((0, len(x))),
            masks=masks,
            received=received,
            along={name: torch.stack([reply.up[name] for reply in replies.values()]) for name in names},
            votes=rounded(torch.stack(votes)) if votes else None,
            same_mask=self._same_mask(plan, masks),
            shares=asked.chosen.shares(cohort, collected.nodes),
            weights=self.roster.shares() if self.config.aggregation.weights == "samples" else None,
            trained=collected.trained,
            refused=collected.refused,
            new=changed,
        )
        sent = Sent(
            round=state.round,
            lr=fed.lr(state.round),
            model=plan.received(x),
            masks=plan.masks or Masks(),
            along=plan.down,
            draw=Draw(tuple(cohort)),
        )
        return finish(fed, state, sent, got)

    def _same_mask(self, plan: Plan, masks: Tensor) -> bool:
        """Do all clients have one mask, those that are missing included?"""
        if len(masks) != 1 and bool((masks[1:] != masks[:1]).any()):
            return False
        return self._one_mask(plan)

    def _one_mask(self, plan: Plan) -> bool:
        """Is every client asked for the same mask?"""
        by_model_alone = plan.masks is None and not PRUNERS[self.config.pruning.pruner].needs_data
        return plan.shared is not None or by_model_alone

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The new model to those who have just answered, where `evaluate` is set.

        To them alone: a node that did not answer in this round would be waited for a second time.
        """
        if not self.evaluate or self._evaluation is None:
            return []
        self._take_over(arrays)
        self._publish()
        nodes, alone = sorted(self._evaluation.seats), self._methods.alone(self.state.round)
        sent, messages = self._prepare(nodes, config, server_round, MessageType.EVALUATE, alone)
        self._evaluation = replace(self._evaluation, messages=tuple(messages), size=sent.size)
        log.info("configure_evaluate: asking %s nodes, %.0f bytes each", len(nodes), sent.size)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of the clients' metrics, weighted by "num-examples"."""
        if self._evaluation is None or not self._evaluation.messages:
            return None
        found = collect_evaluation(self._evaluation, replies, self._timeout)
        self._evaluation = None
        self._line = self._line.with_extra(evaluation=found.record)
        if self._downloads is not None:
            # They hold the model that the next round begins with.
            names = [self.roster.nodes[node] for node in found.nodes if node in self.roster.nodes]
            self._downloads = self._downloads.noted(self.state.round, names, ())
        return mean_metrics(found.metrics)

    def _round(
        self,
        grid: Grid,
        result: Result,
        train_config: Mapping[str, Any],
        evaluate_config: Mapping[str, Any],
        tests: tuple[Evaluate | None, Evaluate | None],
        num_rounds: int,
    ) -> dict[str, float]:
        """One round; returns the seconds of each part."""
        number, watch = self.state.round + 1, _Watch()
        log.info("")
        log.info("[ROUND %s/%s]", number, num_rounds)
        replies = self._ask(grid, number, train_config, watch)
        arrays, metrics = self.aggregate_train(number, replies)
        watch.lap("aggregate")
        _keep(result.train_metrics_clientapp, number, metrics)
        asked = list(self.configure_evaluate(number, ArrayRecord(), ConfigRecord({**evaluate_config}), grid))
        federated = self.aggregate_evaluate(number, exchange(grid, asked, self._timeout))
        _keep(result.evaluate_metrics_clientapp, number, federated)
        evaluate_fn, average_fn = tests
        central = evaluate_fn(number, arrays or ArrayRecord()) if evaluate_fn is not None else None
        _keep(result.evaluate_metrics_serverapp, number, central)
        of_average = average_fn(number, averaged) if average_fn and (averaged := self.averaged) else None
        self._line = scored(self._line, central, federated, of_average)
        watch.lap("evaluate")
        return watch.seconds

    def _ask(self, grid: Grid, number: int, config: Mapping[str, Any], watch: _Watch) -> list[Message]:
        """The replies of a round. One in which no node answers does not count: it is begun again after a while."""
        self._silent = 0
        while True:
            messages = list(self.configure_train(number, ArrayRecord(), ConfigRecord({**config}), grid))
            watch.lap("wire")
            deadline = time.monotonic() + self._timeout
            replies = exchange(grid, messages, self._timeout)
            if self.datagrams is not None:
                self.datagrams.settle(replies, deadline)
            watch.lap("train")
            if any(map(of_a_node, replies)) or (self.datagrams is not None and self.datagrams.heard):
                return replies
            self._silent += 1
            reasons = [last_line(reply.error.reason or "") for reply in replies]
            silence = [f"no reply within {self._timeout:g} s"] * (len(messages) - len(replies))
            if self.give_up is not None and self._silent >= self.give_up:
                raise SafariError(
                    nothing_came(f"{self.give_up} rounds in a row brought no reply", reasons + silence)
                )
            pause = min(2.0 ** (self._silent - 1), _LONGEST_PAUSE)
            log.warning(
                "round %s does not count: none of %s nodes answered. It begins again in %g s",
                number, len(messages), pause,
            )  # fmt: skip
            time.sleep(pause)
            watch.restart()

    def check_run(self, num_rounds: int) -> None:
        """RunError where `start` would refuse the run's folder, because it was made under another config.

        Nothing in the folder changes; one that is not there is fine.
        """
        if self.run is None or not (self.run / "config.toml").exists():
            return
        self.config = replace(self.config, rounds=num_rounds)
        self._begin(None)
        self._open_log(self.run).check(self.state, self.roster)

    def _open_log(self, run: Path) -> RunLog:
        return RunLog.open(run, self.config, self._fed)

    @contextmanager
    def _run_log(self, initial: ArrayRecord | None, num_rounds: int) -> Iterator[RunLog | None]:
        """The run's folder, held for this process; the state is then what it was when the last one ended."""
        self.config = replace(self.config, rounds=num_rounds)
        self._begin(initial)
        self._starting = True
        try:
            if self.run is None:
                yield None
                return
            folder = self._open_log(self.run)
            with folder.run.writing():
                self._state, self.roster = folder.load(self.state, self.roster)
                self._resumed = self._among_strangers = self.state.round > 0
                if self._resumed:
                    log.info("Going on after round %s of %s", self.state.round, self.run)
                with folder.ending():
                    yield folder
        finally:
            self._starting = False
            if self.datagrams is not None:
                self.datagrams.close()

    def _begin(self, initial: ArrayRecord | None) -> None:
        vector = self._fed.model
        if initial is not None and len(initial):
            vector = dense_vector(initial, self.layout)
            self._others |= others_of(initial, self._names)
        self._fed = self._federation(vector)
        self._state = init(self._fed)

    def _take_over(self, arrays: ArrayRecord) -> None:
        """Go on with the model that a strategy around this one hands in; our own `start` hands in none."""
        if not self._starting:
            self._check_wrapped()
        if self._state is None:
            self._begin(arrays)
        if not len(arrays):
            return
        vector = dense_vector(arrays, self.layout)
        if self._handed_in is not None and torch.equal(vector, self._handed_in):
            return
        self._handed_in = vector
        self._others |= others_of(arrays, self._names)
        self._hand_over(vector)

    def _hand_over(self, model: Tensor) -> None:
        self._state = self.state.put("model", {**self.state["model"], "model": model})

    def _check_wrapped(self) -> None:
        """Refuse, at its first round, what cannot work inside another strategy."""
        if self.run is not None:
            raise ConfigError(
                f"run must be None inside another strategy, got {self.run}: records and checkpoints need "
                "SafariStrategy's own start"
            )
        if self.config.policy.name != STATIC:
            raise ConfigError(
                f"policy.name must be {STATIC!r} inside another strategy, got {self.config.policy.name!r}: only "
                "SafariStrategy's own start knows how many rounds there will be"
            )
        if self._methods.client.plain_steps and self.config.local.schedule in ("cosine", "steps"):
            raise ConfigError(
                f"local.schedule must be 'constant' or 'inverse-sqrt' inside another strategy for client.name "
                f"{self.config.client.name}, got {self.config.local.schedule!r}: only SafariStrategy's own start knows "
                "how many rounds there will be"
            )
        if not self._begun and self.upload == "frame":
            log.warning(
                "A strategy is wrapped around SafariStrategy. If it reads the clients' arrays, as "
                "server-side clipping does, it needs SafariStrategy(..., download='dense', upload='dense')"
            )

    def _wait_for_all(self, grid: Grid) -> list[int]:
        """The nodes with which the first round begins; SafariError where too few come.

        A run that goes on had its nodes before: it begins with those that are there, and waits for a quorum.
        """
        nodes = wait_for_nodes(grid, self.min_nodes, self.wait)
        if self._resumed and len(nodes) < self.min_nodes:
            return wait_for_nodes(grid, self.quorum)
        if len(nodes) < self.min_nodes:
            raise SafariError(
                f"{len(nodes)} of {self.min_nodes} nodes are connected after {self.wait:g} s (min_nodes, "
                "wait). A simulation has as many as "
                f"--federation-config 'num-supernodes={self.min_nodes}' says"
            )
        return nodes

    def _prepare(
        self, nodes: Iterable[int], config: Mapping[str, Any], server_round: int, kind: str, plan: Plan
    ) -> tuple[Broadcast, list[Message]]:
        """The model in the shortest form that each node can read; the broadcast's size is their mean."""
        nodes = list(nodes)
        sent = broadcast(
            self.module,
            self.layout,
            self.state.model,
            self.config,
            plan,
            dense=self._dense(self.state.model) if self.download == "dense" else None,
            held=self._held_mask(nodes) if kind == MessageType.TRAIN else None,
            remember=self._downloads is not None,
            upload=PACKETS if self.datagrams is not None and kind == MessageType.TRAIN else self.upload,
        )
        # Nobody should begin to work for a round that is over. A little longer than the round itself: a
        # message that expires while it is waited for comes back as an error.
        ttl = 1.1 * self._timeout + 5 if math.isfinite(self._timeout) else None
        messages: list[Message] = []
        sizes: list[float] = []
        for (frames, heard, came, seat), group in self._by_news(nodes, bool(sent.plan.each)).items():
            own = sent.own_of(seat)
            content = sent.content(config, server_round, frames, heard, came, own)
            messages += [Message(content, dst_node_id=node, message_type=kind, ttl=ttl) for node in group]
            sizes += [sent.bytes_with(frames, own)] * len(group)
        return replace(sent, size=sum(sizes) / len(sizes) if sizes else sent.size), messages

    def _publish(self) -> None:
        """Go on from the model as clients will hold it, where downloads are lossy; once in a round."""
        if self._downloads is not None:
            state = self.state
            model, self._downloads = self._downloads.publish(
                state.model, state.round, self.layout, self.config
            )
            self._hand_over(model)

    def _held_mask(self, nodes: Sequence[int]) -> Tensor | None:
        """The mask of the round before, where all of these nodes are known to hold it: they have answered that round.

        After a restart they may be processes without a memory. Of datagrams more may arrive than was answered; of a
        round that is begun again they may hold the mask already.
        """
        mask = self.state.mask
        if mask is None or self._resumed or self._silent or self.datagrams is not None:
            return None
        names = [self.roster.nodes.get(node) for node in nodes]
        last = self.state.round - 1
        return mask if all(n is not None and self.roster.heard.get(n) == last for n in names) else None

    def _by_news(
        self, nodes: Sequence[int], each: bool
    ) -> dict[tuple[tuple[bytes, ...] | None, int, bytes, int | None], list[int]]:
        """Nodes by the frames that each needs (None: the model in full), where clients want to know what arrived
        by the round in which each was last heard and the packets that came then, and where each gets something of its
        own by its seat."""
        groups: dict[tuple[tuple[bytes, ...] | None, int, bytes, int | None], list[int]] = {}
        seats = self.roster.seats(nodes) if each else {}
        for node in nodes:
            name = self.roster.nodes.get(node)
            frames = self._downloads.frames_for(name) if self._downloads else None
            heard, came = NEVER, b""
            if name is not None and self.config.wire.feeds_back:
                heard, came = self.roster.heard.get(name, NEVER), self.roster.came.get(name, b"")
            groups.setdefault((frames, heard, came, seats.get(node)), []).append(node)
        return groups

    def _dense(self, vector: Tensor) -> ArrayRecord:
        return dense_record(self.layout, vector, self._others, self._names)

    def _deliveries(
        self, replies: list[Message], sent: Broadcast
    ) -> tuple[list[Message], dict[int, Delivery] | None]:
        """Collect the models sent in datagrams; add silent nodes whose packets arrived to the replies."""
        if self.datagrams is None:
            return replies, None
        silent = self.datagrams.unanswered(replies)
        deliveries = self.datagrams.collect(sent)
        # It is unknown which client a node is before it has been heard.
        replies += [
            reply_without_words(message, self.roster.nodes[node])
            for node, message in silent.items()
            if node in self.roster.nodes and deliveries[node].packets
        ]
        return replies, deliveries

    def _refuse_strangers(self, collected: Collected) -> None:
        """RunError where a run is resumed with clients other than its own: every round would be lost."""
        if self._among_strangers and not collected.replies and collected.turned_away:
            known = ", ".join(map(repr, islice(self.roster.names, _MOST_TOLD)))
            others = ", ".join(map(repr, collected.turned_away[:_MOST_TOLD]))
            raise RunError(
                f"{self.run} is a run of the clients {known}, of whom none has answered. {others} have, and "
                "there is no seat for them. Names last where nodes have a safari-id or a partition-id. "
                "Choose another run, raise clients, or give the seats away with patience=0"
            )
        self._among_strangers = self._among_strangers and not collected.replies

    def _note_downloads(self, collected: Collected) -> None:
        if self._downloads is not None:
            names = {seat: name for name, seat in self.roster.names.items()}
            arrived = [reply.name for reply in collected.replies.values()]
            failed = [names[seat] for seat in collected.failed if seat in names]
            self._downloads = self._downloads.noted(self.state.round, arrived, failed)

    def _count_lost(self) -> None:
        """SafariError after too many rounds in a row without any arrival."""
        self._lost_in_a_row = self._lost_in_a_row + 1 if self._line["lost"] else 0
        if self.give_up is not None and self._lost_in_a_row >= self.give_up:
            raise SafariError(self._nothing_came(f"{self.give_up} rounds in a row brought no usable reply"))

    def _nothing_came(self, what: str) -> str:
        return nothing_came(what, [*self._line["reasons"].values(), *self._line["ignored"]])

    def _tell(self) -> None:
        line = self._line
        log.info("aggregate_train: %s arrived, %s missing", len(line["arrived"]), len(line["missing"]))
        names = line["names"]

        def called(client: str) -> str:
            return (
                f"{names[client]} (client {client})"
                if names.get(client, client) != client
                else f"client {client}"
            )

        for seat, reason in islice(line["reasons"].items(), _MOST_TOLD):
            who = ", ".join(called(str(other)) for other in line["stand_ins"].get(seat, ())[:_MOST_TOLD])
            log.info("\t> %s is missing: %s%s", called(seat), reason, who and f" (stood in for by {who})")
        if len(line["reasons"]) > _MOST_TOLD:
            log.info("\t> and %s more", len(line["reasons"]) - _MOST_TOLD)
        for reason in line["ignored"][:_MOST_TOLD]:
            log.warning("\t> ignored: %s", reason)


def nothing_came(what: str, reasons: Iterable[str]) -> str:
    """Extend an error message by the reasons in its last round, the most frequent first."""
    counted = [f"{reason} ({count}×)" for reason, count in Counter(reasons).most_common(3)]
    return f"{what}. In the last one: {'; '.join(counted) or 'no node was connected'}"


class _Watch:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Charge the time since the last lap to nothing."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to `part`."""
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


def _keep(place: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        place[number] = metrics
        # As Flower's own strategies do.
        log.info("\t└──> MetricRecord: %s", metrics)
