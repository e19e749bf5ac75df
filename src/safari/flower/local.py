"""Local training by a client algorithm that the server names: SCAFFOLD, FedProx, FedDyn and the others on Flower.

A client algorithm changes the steps themselves, so that it brings its own loop (`safari.training.train_local`,
the one of our engines); the user gives the data. Its state stays with the client, in Flower's `context.state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from safari.errors import SafariError, one_of
from safari.flower.broadcast import ARRAYS
from safari.flower.client import METRICS, BatchOf, Build, Job, is_training, make_module, open_job, reply_with
from safari.flower.datagram_client import carry
from safari.flower.protocol import Instructions
from safari.pruning import Batch, Pruner, Score, as_pruner
from safari.rounds.beside import decode_vector
from safari.seeds import derive
from safari.tasks import Task, classification
from safari.text import visible
from safari.training import CLIENTS, OPTIMISERS, ClientAlgorithm, ClientSide, Known, train_local

MEMORY = "safari.client"
_DEFAULT_LR = 0.001

BatchesOf = Callable[[Message, Context], Sequence[Batch]]


def local_training(
    build: Build,
    batches: BatchesOf,
    *,
    lr: float | Callable[[Message, Context], float] | None = None,
    optimiser: str = "adam",
    algorithm: ClientAlgorithm | None = None,
    label_counts: Callable[[Context], Sequence[int]] | None = None,
    batch: BatchOf | None = None,
    pruner: str | Pruner | Score | None = None,
    task: Task | None = None,
) -> ClientAppCallable:
    """A ClientApp's function for `train` messages that does all of the local training.

    `build` is a module class, or a function of the context that makes the module. `batches(message, context)`
    gives the round's mini-batches, a local step each. `lr`: the learning rate, or a function of message and context
    that gives it; None: the one that the server states, which it does where it reads gradients off the updates
    (mime), and 0.001 elsewhere. A rate that differs from what the server states is an error. `optimiser`: "adam", or
    "sgd" with lr/τ. `algorithm`: one of your own; by default the
    built-in that the server names. `label_counts(context)`: how many samples of each class this client has, for
    algorithms that look at them. `batch`, `pruner` and `task` as in `sparse`; the task has the training loss, too.
    """
    if optimiser not in OPTIMISERS:
        raise SafariError(one_of("optimiser", optimiser, OPTIMISERS))
    chosen, task = None if pruner is None else as_pruner(pruner), task or classification()

    def answer(message: Message, context: Context) -> Message:
        return carry(message, context, inner)

    def inner(message: Message, context: Context) -> Message:
        if not is_training(message):
            raise SafariError("local_training answers train messages: use sparse for app.evaluate")
        job = open_job(make_module(build, context), message, context, batch=batch, pruner=chosen, task=task)
        method = _algorithm(algorithm, job.instructions, task)
        if method.plain_steps and optimiser != "sgd":
            raise SafariError(
                f"optimiser must be 'sgd' for the client algorithm {visible(job.instructions.client, 60)!r}, got "
                f"{optimiser!r}"
            )
        given = batches(message, context)
        counts = None if label_counts is None else list(label_counts(context))
        if method.counts_labels and counts is None:
            raise SafariError(
                f"the client algorithm {visible(job.instructions.client, 60)!r} looks at this client's labels: give "
                "label_counts="
            )
        samples = sum(len(y) for _, y in given) if counts is None else sum(counts)
        side = ClientSide(_read_state(method, job), _down(method, job), _known(counts, samples, job.received))
        trained = train_local(
            job.module,
            job.layout,
            job.received,
            job.mask.to(job.received.device),
            given,
            optimiser=optimiser,
            lr=_rate(lr(message, context) if callable(lr) else lr, job.instructions),
            seed=_module_seed(job),
            task=task,
            algorithm=method,
            side=side,
        )
        # Kept whether or not the upload arrives, which the client does not learn.
        _write_state(job.state, {name: trained.state[name] for name in side.state})
        metrics = MetricRecord({"num-examples": samples, "train_loss": trained.loss})
        return reply_with(
            job, job.pack(trained.model, up=trained.up), RecordDict({METRICS: metrics}), ARRAYS, message
        )

    return answer


def _algorithm(own: ClientAlgorithm | None, instructions: Instructions, task: Task) -> ClientAlgorithm:
    """The user's algorithm or the built-in that the server names: nothing that a network names is imported."""
    name = instructions.client
    if own is None and name not in CLIENTS:
        raise SafariError(
            one_of("client", name, CLIENTS) + "; your own goes into local_training(..., algorithm=)"
        )
    if own is None:
        own = CLIENTS.build(name, instructions.client_options())
    own.check(task)
    return own


def _rate(own: float | None, instructions: Instructions) -> float:
    """The round's learning rate; SafariError where the client's own is not the one that the server relies on."""
    stated = instructions.lr
    if not stated:
        return _DEFAULT_LR if own is None else own
    # Two machines may round a schedule differently.
    if own is not None and not math.isclose(own, stated, rel_tol=1e-6):
        raise SafariError(
            f"lr must be {stated:g} in round {instructions.round + 1}, which the server's config states (local.lr, "
            f"local.schedule) and its client algorithm {visible(instructions.client, 60)!r} relies on, got {own:g}: "
            "leave lr out of local_training"
        )
    return stated


def _down(algorithm: ClientAlgorithm, job: Job) -> dict[str, Tensor]:
    """The vectors that came with the model: those that the algorithm looks for."""
    server, parameters = algorithm.server, job.layout.parameters
    wanted = {} if server is None else server.down(server.init(1, parameters, torch.device("cpu")))
    if set(wanted) != set(job.down):
        raise SafariError(
            f"the message must hold {', '.join(wanted) or 'nothing'} beside its model, got "
            f"{visible(', '.join(job.down) or 'nothing', 100)}: server and client must have the same algorithm"
        )
    found: dict[str, Tensor] = {}
    for name, like in wanted.items():
        vector = decode_vector(job.down[name], like.shape[-1], job.layout).to(job.received.device)
        # What each client gets for itself is a stack of one.
        found[name] = vector if like.ndim == 1 else vector[None]
    return found


def _known(counts: Sequence[int] | None, samples: int, like: Tensor) -> Known:
    labels = like.new_zeros(1, 0) if counts is None else like.new_tensor([counts], dtype=torch.float32)
    return Known(labels, like.new_tensor([float(samples)]))


def _module_seed(job: Job) -> int:
    """The seed of what is random inside the module: that of our own engines, where a client is a number."""
    client = int(job.client) if job.client.isdecimal() else job.client
    return derive(job.instructions.seed, "module", client, job.instructions.round) >> 1


def _read_state(algorithm: ClientAlgorithm, job: Job) -> dict[str, Tensor]:
    """The client's state; as before the first round where there is none, or one of another algorithm."""
    device = job.received.device
    first = dict(algorithm.init(1, job.layout.parameters, device))
    record = job.state.get(MEMORY)
    if not isinstance(record, ArrayRecord) or set(record) != set(first):
        return first
    found = {name: torch.from_numpy(record[name].numpy().copy()).to(device) for name in first}
    fits = all(found[n].shape == t.shape and found[n].dtype == t.dtype for n, t in first.items())
    return found if fits else first


def _write_state(state: RecordDict, after: Mapping[str, Tensor]) -> None:
    if after:
        state[MEMORY] = ArrayRecord({name: Array(tensor.cpu().numpy()) for name, tensor in after.items()})
