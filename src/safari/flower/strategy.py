"""SAFARI as a Flower strategy: a thin adapter around `safari.aggregation`, with a memory on disk."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from safari.aggregation import Compensation, Server
from safari.config import Config
from safari.engine.average import begin_average, next_average
from safari.engine.world import rule_of
from safari.errors import ConfigError, SafariError
from safari.flower.arrays import dense_record, dense_vector, others_of
from safari.flower.broadcast import Broadcast, broadcast
from safari.flower.chain import Downloads
from safari.flower.collect import Collected, Request, collect
from safari.flower.exchange import exchange, wait_for_nodes
from safari.flower.reply import mean_metrics, read_metrics
from safari.flower.residual import NEVER
from safari.flower.roster import Roster
from safari.flower.run_log import RunLog, round_record, with_scores
from safari.flower.settings import check_arguments, settings
from safari.models import Layout
from safari.runs.record import RoundRecord
from safari.seeds import generator
from safari.wire import VALUE_MODES

_log = logging.getLogger("flwr")
# Lines of a round in the log; the records hold all.
_MOST_TOLD = 10

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class SafariStrategy(Strategy):
    """Sparse training, compact messages, and stand-ins for the clients that did not answer.

    `module` gives the names, shapes and kinds of the model's tensors; `clients` is how many there are in
    all, connected or not. `rule` says what to do about the missing: a name, a table such as
    `{"rule": "file.py:mine", "option": 1}`, or a Compensation. `config` holds whatever else of a `Config`
    matters here, as plain tables: `pruning`, `wire` (of uploads), `aggregation`, `cohort`, `seed`,
    `checkpoint`, `evaluation.last` and `.target` (of summaries), `name`; what would have no effect is
    refused. In a whole `Config`, that of an experiment which Flower repeats, it is only recorded.

    `run` is the folder for records and checkpoints: a new process that finds one there goes on after it.
    `identify`: "name" believes the name that a client gives (`safari-id` or `partition-id` of its node's
    config), "node" takes its node id, which is worth more where nodes authenticate with registered keys.
    `patience`: after so many rounds of silence a client that is not connected is no longer counted among
    the missing; None: it always is. `download`: "frame", which is exact; "dense" where some clients do not
    use our client side; or a lossy mode of the wire format such as "step", for which clients remember a
    model. `evaluate`: ask the clients to test each new model, too. `min_nodes`: how many the first round
    waits for; later ones start with whoever is there, or comes before their deadline.
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
        evaluate: bool = False,
        min_nodes: int = 1,
    ):
        check_arguments(clients, identify, patience, download, min_nodes)
        self.config = settings(module, clients, rule, config)
        self.rule = rule if isinstance(rule, Compensation) else rule_of(self.config.arms[0].rule)
        if self.rule.overrides_network:
            raise ConfigError(
                f"rule must take the network as it is, got {self.config.arms[0].name}, which overrides it: "
                "only our own engines can; use drop"
            )
        # A copy, because masks are worked out in it.
        self.module, self.layout = copy.deepcopy(module).cpu(), Layout.of(module)
        self._first = self.layout.read(self.module)
        self.run = None if run is None else Path(run)
        self.by_name, self.patience, self.download = identify == "name", patience, download
        self.evaluate, self.min_nodes = evaluate, min_nodes
        self.roster = Roster(clients)
        self._server: Server | None = None
        self._average: Tensor | None = None
        self._others = others_of(ArrayRecord(dict(module.state_dict())), self.layout)
        self._sent: Broadcast | None = None
        self._downloads = Downloads(download) if download in VALUE_MODES else None
        self._messages: list[Message] = []
        self._absent: tuple[int, ...] = ()
        self._timeout = math.inf
        self._started = False
        self._resumed = False
        self._line = RoundRecord(round=1, arrived=(), missing=(), metrics={})

    @property
    def server(self) -> Server:
        """The aggregation's whole state."""
        if self._server is None:
            raise SafariError("the strategy has no model yet: call start, or configure_train with one")
        return self._server

    def summary(self) -> None:
        """Log what the strategy was asked to do."""
        c = self.config
        _log.info("\t├──> SAFARI: %s clients, rule %s", c.clients, c.arms[0].name)
        _log.info("\t├──> Masks: %s, %.0f %% of the weights cut", c.pruning.pruner, 100 * c.pruning.sparsity)
        _log.info("\t├──> Uploads: %s; downloads: %s", c.wire.values, self.download)
        _log.info("\t└──> Run folder: %s", self.run or "none (no records, no checkpoints)")

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
        """
        result = Result()
        self._timeout, self._started = timeout, False
        _log.info("Starting SafariStrategy:")
        self.summary()
        with self._run_log(initial_arrays, num_rounds) as log:
            if evaluate_fn is not None and self.server.round == 0:
                _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, self.arrays))
            while self.server.round < num_rounds:
                tests = evaluate_fn, average_fn
                seconds = self._round(
                    grid, result, train_config or {}, evaluate_config or {}, tests, num_rounds
                )
                if log is not None:
                    log.write(self._line, seconds)
                    done = self.server.round
                    if done % self.config.checkpoint.every == 0 or done == num_rounds:
                        log.save(self.server, self.roster, self._average)
        result.arrays = self.arrays
        return result

    @property
    def arrays(self) -> ArrayRecord:
        """The global model as a state_dict's arrays."""
        return dense_record(self.layout, self.server.model, self._others)

    @property
    def averaged(self) -> ArrayRecord | None:
        """Their running average likewise; None where `aggregation.average` asks for none."""
        return None if self._average is None else dense_record(self.layout, self._average, self._others)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's messages. The model is the strategy's own; `arrays` matters only before the first."""
        if self._server is None:
            self._begin(arrays)
        if self._started:
            online = wait_for_nodes(grid, 1, self._timeout)
        else:
            online = wait_for_nodes(grid, self.min_nodes, math.inf)
        self._started = True
        nodes, self._absent = self._choose(online)
        if self._downloads is not None:
            self._server, self._downloads = self._downloads.publish(self.server, self.layout, self.config)
        self._sent = self._broadcast()
        self._messages, sizes = [], []
        for (frames, heard), group in self._by_news(nodes).items():
            content = self._sent.content(config, server_round, frames, heard)
            self._messages += self._to(group, content, MessageType.TRAIN)
            sizes += [self._sent.size if frames is None else sum(map(len, frames))] * len(group)
        self._sent = replace(self._sent, size=sum(sizes) // len(sizes) if sizes else self._sent.size)
        _log.info(
            "configure_train: asking %s nodes, %s bytes each; %s clients are not connected",
            len(nodes),
            self._sent.size,
            len(self._absent),
        )
        return self._messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Judge the replies, let arrivals stand in for the missing, average."""
        if self._sent is None:
            raise SafariError("aggregate_train needs a round that configure_train has begun")
        sent, before = self._sent, self.server.model
        request = Request(
            {m.metadata.message_id: m.metadata.dst_node_id for m in self._messages},
            self._absent,
            self._timeout,
        )
        weighted = self.config.aggregation.weights == "samples"
        collected = collect(self.roster, request, replies, sent, by_name=self.by_name, weighted=weighted)
        self.roster, self._messages, self._sent = collected.roster, [], None
        server = self.server
        if weighted:
            shares = server.weights.new_tensor(self.roster.shares())
            server = replace(server, weights=shares)
        # Nobody was there to be asked: the round is lost, and no client's fault.
        cohort = collected.cohort or tuple(range(self.config.clients))
        self._note_downloads(collected)
        received = {seat: reply.vector for seat, reply in collected.replies.items()}
        masks = {seat: reply.mask for seat, reply in collected.replies.items()}
        self._server, outcome = server.step(received, cohort, masks)
        self._average = next_average(self._average, self.server.model, server.round, self.config)
        outcome = replace(outcome, refused={**collected.refused, **outcome.refused})
        self._line = round_record(
            self.layout, sent, collected, outcome, before.cpu(), self.server.model.cpu(), self._resumed
        )
        self._resumed = False
        self._tell()
        arrived = [collected.replies[seat].metrics for seat in outcome.arrived]
        return self.arrays, mean_metrics(arrived)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The new model to all that are connected, where `evaluate` is set."""
        if not self.evaluate:
            return []
        content = self._broadcast().content(config, server_round)
        return self._to(sorted(grid.get_node_ids()), content, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of the clients' metrics, weighted by "num-examples"."""
        return mean_metrics([read_metrics(reply.content) for reply in replies if reply.has_content()])

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
        number, watch = self.server.round + 1, _Watch()
        _log.info("")
        _log.info("[ROUND %s/%s]", number, num_rounds)
        messages = list(self.configure_train(number, ArrayRecord(), ConfigRecord({**train_config}), grid))
        watch.lap("wire")
        replies = exchange(grid, messages, self._timeout)
        watch.lap("train")
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
        self._line = with_scores(self._line, central or federated, of_average)
        watch.lap("evaluate")
        return watch.seconds

    @contextmanager
    def _run_log(self, initial: ArrayRecord | None, num_rounds: int) -> Iterator[RunLog | None]:
        """The run's folder, held for this process; the state is then what it was when the last one ended."""
        self.config = replace(self.config, rounds=num_rounds)
        self._begin(initial)
        if self.run is None:
            yield None
            return
        log = RunLog.open(self.run, self.config, self.layout)
        with log.run.writing():
            self._server, self.roster, self._average = log.load(self.server, self.roster, self._average)
            self._resumed = self.server.round > 0
            if self._resumed:
                _log.info("Going on after round %s of %s", self.server.round, self.run)
            try:
                yield log
            finally:
                log.close()

    def _begin(self, initial: ArrayRecord | None) -> None:
        vector = self._first
        if initial is not None and len(initial):
            vector = dense_vector(initial, self.layout)
            self._others = others_of(initial, self.layout)
        self._server = Server.start(vector, self.config.clients, self.rule, parameters=self.layout.parameters)
        self._average = begin_average(self._server.model, self.config)

    def _choose(self, online: list[int]) -> tuple[list[int], tuple[int, ...]]:
        """The nodes to ask, and the clients that would have been asked, had they been there."""
        seats = self.roster.seats(online)
        absent = self.roster.absent(online, self.server.round, self.patience)
        cohort = self.config.cohort
        everybody = sorted({*seats.values(), *absent})
        if cohort and cohort < len(everybody):
            rng = generator(self.config.seed, "cohort", self.server.round)
            drawn = set(rng.choice(everybody, cohort, replace=False).tolist())
            return [n for n in seats if seats[n] in drawn], tuple(s for s in absent if s in drawn)
        return online, tuple(absent)

    def _broadcast(self) -> Broadcast:
        x, t = self.server.model, self.server.round
        return broadcast(
            self.module,
            self.layout,
            x,
            t,
            self.config,
            dense=self._others if self.download == "dense" else None,
            remember=self._downloads is not None,
        )

    def _by_news(self, nodes: Iterable[int]) -> dict[tuple[tuple[bytes, ...] | None, int], list[int]]:
        """Nodes by the frames that each needs (None: the model in full) and, where clients want to know what
        arrived, by the round in which each was last heard."""
        groups: dict[tuple[tuple[bytes, ...] | None, int], list[int]] = {}
        for node in nodes:
            name = self.roster.nodes.get(node)
            frames = self._downloads.frames_for(name) if self._downloads else None
            heard = NEVER
            if name is not None and self.config.wire.feeds_back:
                heard = self.roster.heard.get(name, NEVER)
            groups.setdefault((frames, heard), []).append(node)
        return groups

    def _note_downloads(self, collected: Collected) -> None:
        if self._downloads is not None:
            names = {seat: name for name, seat in self.roster.names.items()}
            arrived = [reply.name for reply in collected.replies.values()]
            failed = [names[seat] for seat in collected.failed if seat in names]
            self._downloads = self._downloads.noted(self.server.round, arrived, failed)

    def _to(self, nodes: Iterable[int], content: RecordDict, kind: str) -> list[Message]:
        # Nobody should begin to work for a round that is over. A little longer than the round itself: a
        # message that expires while it is waited for comes back as an error.
        ttl = 1.1 * self._timeout + 5 if math.isfinite(self._timeout) else None
        return [Message(content, dst_node_id=node, message_type=kind, ttl=ttl) for node in nodes]

    def _tell(self) -> None:
        line = self._line
        _log.info("aggregate_train: %s arrived, %s missing", len(line["arrived"]), len(line["missing"]))
        for seat, reason in islice(line["reasons"].items(), _MOST_TOLD):
            who = ", ".join(map(str, line["stand_ins"].get(seat, ())[:_MOST_TOLD]))
            _log.info("\t> client %s is missing: %s%s", seat, reason, who and f" (stood in for by {who})")
        if len(line["reasons"]) > _MOST_TOLD:
            _log.info("\t> and %s more", len(line["reasons"]) - _MOST_TOLD)
        for reason in line["ignored"][:_MOST_TOLD]:
            _log.warning("\t> ignored: %s", reason)


class _Watch:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to `part`."""
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


def _keep(place: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        place[number] = metrics
