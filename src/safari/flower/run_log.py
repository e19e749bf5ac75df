"""Run folder of a Flower run, with a checkpoint from which a new process resumes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from safari.aggregation import to_tensors
from safari.config import Config
from safari.errors import RunError, SafariError
from safari.federation import Federation, State
from safari.federation.record import finite
from safari.flower.broadcast import Broadcast
from safari.flower.collect import Collected
from safari.flower.roster import Roster
from safari.flower.rule_state import grown, grown_half, inside
from safari.flower.scores import metrics_with
from safari.pruning import POLICIES
from safari.rounds.resume import checked_rule_state, fitting, meaning, refuse_changes, saved_server
from safari.runs import RunFolder, Saved, Trial, read_checkpoint, seeds_of, spacing, summarise
from safari.runs.elsewhere import decided, undecided
from safari.runs.environment import environment
from safari.runs.folder import FAILURE
from safari.runs.metrics import CLASSIFICATION, metrics_text
from safari.runs.metrics import FILE as METRICS_FILE
from safari.runs.record import RoundRecord
from safari.sampling import SAMPLINGS
from safari.text import utc_now, visible
from safari.toml import to_toml

# Where a checkpoint holds what the mask policy carries from round to round.
_POLICY = "policy."
# And what the sampling does.
_SAMPLING = "sampling."
_LONGEST_FAILURE = 1000


@dataclass(frozen=True)
class RunLog:
    """A run's folder while it is being written."""

    run: RunFolder
    trial: Trial
    fed: Federation

    @classmethod
    def open(cls, path: Path, config: Config, fed: Federation) -> RunLog:
        """The folder, new or as an earlier process left it; one that is there is only looked at."""
        arm, seed = config.arms[0].name, config.seed
        trial = Trial(arm, seed, path / "trials" / arm / f"seed-{seed}")
        if not (path / "config.toml").exists():
            run = RunFolder.create(path, config)
            run.write("config.toml", _text(config))
            table = {**environment(torch.device("cpu")), "flwr": version("flwr")}
            run.write("environment.json", json.dumps(table, indent=2) + "\n")
            return cls(run, trial, fed)
        there = RunFolder.open(path)
        if there.trials():
            _refuse_another(there, config, trial)
        # Asked for fewer rounds than are done, the run is as long as it is.
        config = replace(config, rounds=max(config.rounds, trial.done()))
        return cls(RunFolder(path, config), trial, fed)

    def check(self, first: State, roster: Roster) -> None:
        """RunError where the last checkpoint does not fit. Nothing in the folder changes."""
        if self.trial.checkpoint.exists():
            self._found(read_checkpoint(self.trial.checkpoint), first)

    def load(self, first: State, roster: Roster) -> tuple[State, Roster]:
        """The run as of the last checkpoint; as it is at first where there is none.

        Nothing in the folder changes before all of the checkpoint is found to fit.
        """
        found = first, roster
        if self.trial.checkpoint.exists():
            found = self._found(read_checkpoint(self.trial.checkpoint), first)
        there = RunFolder.open(self.run.path)
        now = self.run.config
        wanted = replace(there.config, rounds=now.rounds, clients=now.clients) if there.trials() else now
        self.run.trial(self.trial.arm, self.trial.seed).load()
        if there.config != wanted:
            self.run.write("config.toml", _text(wanted))
        return found

    def _found(self, saved: Saved, first: State) -> tuple[State, Roster]:
        model = saved.tensors.get("model")
        if saved.facts.get("layout") != self.fed.layout.digest or model is None:
            raise RunError(
                f"{self.trial.checkpoint} is of another model: names, shapes or kinds of its tensors differ"
            )
        try:
            known = Roster.from_json(saved.facts["roster"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.trial.checkpoint} holds no readable roster: {error!r}") from error
        clients = self.run.config.clients
        if clients < known.clients:
            raise RunError(
                f"{self.trial.checkpoint}: clients was {known.clients} and is {clients}: a run's clients can "
                "become more, not fewer"
            )
        refuse_changes(saved, replace(self.run.config, clients=known.clients), self.trial)
        if clients > known.clients:
            half, parameters = self.fed.algorithm.server, self.fed.parameters
            tensors = grown_half(saved.tensors, half, clients, parameters)
            saved = replace(saved, tensors=tensors)
        before = self.fed.server()
        server = saved_server(saved, before, self.run.config, self.trial)
        if clients > known.clients:
            server, known = grown(server, clients), replace(known, clients=clients)
        state = self.fed.after(first, checked_rule_state(server, before, self.run.config, self.trial))
        if (mask := saved.tensors.get("mask")) is not None:
            mask = fitting(self.trial, "mask", mask, first.model.bool())
            state = state.put("model", {**state["model"], "mask": mask})
        if self.fed.policy is not None:
            state = state.put("policy", self._policy(saved, first["policy"]))
        return state.put("sampling", self._sampled(saved, first["sampling"])), known

    def _sampled(self, saved: Saved, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Restore the sampling's state, with rows for new clients; RunError where it has another form."""
        found = {n.removeprefix(_SAMPLING): t for n, t in saved.tensors.items() if n.startswith(_SAMPLING)}
        wider = {n: inside(n, t, first, "sampling") for n, t in found.items() if n in first}
        if self.run.config.sampling.name not in SAMPLINGS:
            return found | wider
        return {n: fitting(self.trial, f"{_SAMPLING}{n}", wider.get(n), like) for n, like in first.items()}

    def _policy(self, saved: Saved, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mask policy's state; RunError where that of a built-in one has another form.

        A user's own may change the form of its tensors, drop some and add others.
        """
        found = {n.removeprefix(_POLICY): t for n, t in saved.tensors.items() if n.startswith(_POLICY)}
        if self.run.config.policy.name not in POLICIES:
            return found
        return {n: fitting(self.trial, f"{_POLICY}{n}", found.get(n), like) for n, like in first.items()}

    def write(self, record: RoundRecord, seconds: Mapping[str, float]) -> None:
        """Add a round's line; metrics that the run did not have so far are noted first."""
        found, known = [name for name, value in record.metrics.items() if value is not None], self.run.metrics
        if set(found) - set(known.names):
            first = not (self.run.path / METRICS_FILE).exists()
            self.run.write(METRICS_FILE, metrics_text(metrics_with(known, found, first=first)))
        self.trial.append(record, seconds)

    def every(self, state: State, roster: Roster) -> int:
        """Rounds between two checkpoints."""
        return spacing(self.run.config.checkpoint.every, 1, self._saved(state, roster))

    def save(self, state: State, roster: Roster) -> None:
        """Make a checkpoint of the round that is done."""
        self.trial.save(self._saved(state, roster), self.run.config.checkpoint.keep)

    def _saved(self, state: State, roster: Roster) -> Saved:
        facts = {
            "layout": self.fed.layout.digest,
            "config": meaning(self.run.config, self.trial.arm),
            "roster": roster.to_json(),
        }
        tensors = to_tensors(self.fed.server(state))
        tensors |= {f"{_POLICY}{name}": tensor for name, tensor in state["policy"].items()}
        tensors |= {f"{_SAMPLING}{name}": tensor for name, tensor in state["sampling"].items()}
        if state.mask is not None:
            tensors["mask"] = state.mask
        return Saved(state.round, tensors, facts)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Sum up the run when the `with` block ends; an error that ended it is written to `failure.txt`."""
        failure = self.run.path / FAILURE
        failure.unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, SafariError) else f"{type(error).__name__}: "
            # Clients may have chosen parts of it: nothing that a terminal would act on.
            why = visible(f"{kind}{error}", _LONGEST_FAILURE)
            self.run.write(FAILURE, f"{utc_now()}, after round {self.trial.done()}: {why}\n")
            raise
        finally:
            self._sum_up()

    def _sum_up(self) -> None:
        self.run.write("summary.json", json.dumps(summarise(self.run), indent=2) + "\n")


def round_record(record: RoundRecord, sent: Broadcast, collected: Collected, resumed: bool) -> RoundRecord:
    """A round's record with what a transport knows, and beside it what only a real network has.

    `reasons` says why each of the missing is; `nodes` which node was which client, and `names` what its operator
    calls it; `ignored` names replies
    that belong to nobody; `resumed` marks the first round of a process that found a checkpoint; `evaluation`
    says who was asked to test the new model, where anybody was.
    """
    arrived = [collected.replies[seat] for seat in record.arrived]
    # Losses that clients state are for the record alone.
    losses = [reply.metrics.loss for reply in arrived if reply.metrics.loss is not None]
    reasons = {**collected.reasons, **record.refused}
    record = replace(
        record,
        metrics=dict.fromkeys(CLASSIFICATION.names),
        train_loss=finite(fmean(losses)) if losses else None,
        bytes={"up": _mean([r.size for r in arrived]), "down": float(sent.size)},
        modes=dict(sorted(Counter(reply.mode for reply in arrived).items())),
        reasons={seat: reasons[seat] for seat in sorted(reasons)},
        nodes={seat: str(node) for seat, node in collected.nodes.items()},
        names=collected.roster.names_of(collected.cohort),
        ignored=tuple(collected.ignored),
        resumed=resumed,
    )
    return record.with_extra(evaluation=None)


def _text(config: Config) -> str:
    """A config file that says nothing about what the clients' own app decides."""
    head = "# Of a run on Flower: what is not here, such as local training, the clients' own app decides.\n"
    return (head if undecided(config) else "") + to_toml(config, values=decided(config))


def _refuse_another(there: RunFolder, config: Config, trial: Trial) -> None:
    """RunError where a run that has begun is not this one; what a checkpoint says is looked at later."""
    arms = [arm.name for arm in there.config.arms]
    if trial.arm not in arms:
        raise RunError(
            f"{there.path} holds a run of {', '.join(arms)}; rule is {trial.arm}: choose another run"
        )
    if trial.seed not in seeds_of(there.config):
        raise RunError(
            f"{there.path} holds a run of seed {there.config.seed}; seed is {trial.seed}: choose another run"
        )
    now = meaning(config, trial.arm)
    before = meaning(there.config, trial.arm)
    changed = [name for name in now if before[name] != now[name]]
    if changed and not trial.checkpoint.exists():
        raise RunError(
            f"{there.path} holds a run of another config, which differs in {', '.join(changed)}: "
            "choose another run"
        )


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
