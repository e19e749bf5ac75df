"""The client's end: unpack, mask, train inside the mask, pack. The user's code sees an ordinary module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from safari.engine.codec import wire_layout
from safari.errors import SafariError
from safari.flower.arrays import chain_of, dense_record, dense_vector, frame_of, frame_record, others_of
from safari.flower.broadcast import ARRAYS, predict_mask
from safari.flower.chain import follow, remember, remembered
from safari.flower.masking import inside
from safari.flower.protocol import SAFARI, ClientInfo, Instructions, identity, known_pruner
from safari.flower.residual import read_residual, write_residual
from safari.models import Layout
from safari.pruning import PRUNERS, Batch, Pruner, Score, as_pruner, compute_mask
from safari.seeds import generator, torch_generator
from safari.wire import Lossy, Shared, decode, encode, settle, with_residual

MASK = "safari.mask"
METRICS = "metrics"

Build = type[nn.Module] | Callable[[Context], nn.Module]
BatchOf = Callable[[Message, Context], Batch]
Train = Callable[[nn.Module, Message, Context], Mapping[str, float] | None]


@dataclass(frozen=True)
class Job:
    """One round at one client: the model as it came, the mask to train in, and how to answer. `state` is the
    client's own, which lasts from round to round."""

    module: nn.Module
    layout: Layout
    instructions: Instructions
    mask: Tensor
    shared: Shared
    client: str
    state: RecordDict

    @property
    def masks(self) -> dict[str, Tensor]:
        """The mask by parameter, for those that may be cut."""
        parts = self.layout.split(self.mask)
        return {e.name: parts[e.name] for e in self.layout.entries if e.kind == "weight"}

    def pack(self, vector: Tensor) -> ArrayRecord:
        """A trained model as the frame that goes back."""
        vector = vector.cpu()
        if not bool(torch.isfinite(vector).all()):
            raise SafariError("the trained model holds NaN or infinite numbers")
        grown = int((vector[~self.mask] != 0).sum())
        if grown:
            raise SafariError(
                f"{grown} weights that the mask cuts are not 0 after training: "
                "wrap the optimiser, masked(optimizer, model, masks_of(message))"
            )
        # Filled once more, because -0 is a 0 that would not come back.
        vector = vector.masked_fill(~self.mask, 0.0)
        # The draws of our own engines, where a client is a number.
        client = int(self.client) if self.client.isdecimal() else self.client
        luck = generator(self.instructions.seed, "wire", client, self.instructions.round)
        lossy = Lossy(self.instructions.bits, self.instructions.step, luck, self.instructions.ratio)
        model, mask = vector.numpy(), self.mask.numpy()
        if not self.instructions.feedback:
            return frame_record(
                encode(model, mask, self.shared, values=self.instructions.values, lossy=lossy)
            )
        before = read_residual(self.state, self.layout.parameters, self.instructions.heard)
        target = with_residual(model, mask, before)
        frame = encode(target, mask, self.shared, values=self.instructions.values, lossy=lossy)
        after = settle(before, target, decode(frame, self.shared).vector, mask, True)
        write_residual(self.state, before, after, self.instructions.round)
        return frame_record(frame)


def sparse(
    build: Build, *, batch: BatchOf | None = None, pruner: str | Pruner | Score | None = None
) -> Callable[[Train], ClientAppCallable]:
    """Make a ClientApp's function out of one that trains (or tests) an ordinary module.

    `build` is a module class, or a function of the context that makes the module. `batch(message, context)`
    gives inputs and labels to the pruners that want them: snip and grasp; synflow looks at their shape.
    `pruner` overrides the one that the server names.

    The function gets the module, the message and the context. For `train` messages the module is masked and
    its gradients are, so that any loop and any optimiser keep it sparse; what the function returns (a dict
    of numbers such as "num-examples") travels as metrics beside the model. For others it gets the global
    model, and only metrics go back.
    """

    chosen = None if pruner is None else as_pruner(pruner)

    def decorate(train: Train) -> ClientAppCallable:
        @functools.wraps(train)
        def answer(message: Message, context: Context) -> Message:
            module = _make(build, context)
            if not _is_training(message):
                _load(module, message, context)
                metrics = _metrics(train(module, message, context))
                return Message(RecordDict({METRICS: metrics}), reply_to=message)
            job = open_job(module, message, context, batch=batch, pruner=chosen)
            with inside(module, job.masks):
                metrics = _metrics(train(module, message, context))
            return _reply(job, job.layout.read(module), metrics, message)

        return answer

    return decorate


def sparse_mod(
    build: Build, *, batch: BatchOf | None = None, pruner: str | Pruner | Score | None = None
) -> Mod:
    """The same as a mod, for a ClientApp whose functions stay as they are: dense arrays in, dense arrays out.

    The function finds the masked model under "arrays", as from FedAvg, and its masks by `masks_of(message)`;
    it has to train inside them: `masked(optimizer, model, masks_of(message))`.
    """

    chosen = None if pruner is None else as_pruner(pruner)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if ARRAYS not in message.content.array_records:
            return call_next(message, context)
        module = _make(build, context)
        if not _is_training(message):
            layout, vector = _load(module, message, context)
            message.content[ARRAYS] = dense_record(layout, vector, _counters(module, layout))
            return call_next(message, context)
        job = open_job(module, message, context, batch=batch, pruner=chosen)
        others = _counters(module, job.layout)
        message.content[ARRAYS] = dense_record(job.layout, job.layout.read(module), others)
        message.content[MASK] = ArrayRecord(
            {n: Array(m.numpy().astype(np.uint8)) for n, m in job.masks.items()}
        )
        reply = call_next(message, context)
        if not reply.has_content():
            return reply
        trained = reply.content.array_records.get(ARRAYS)
        if trained is None:
            raise SafariError(f"the training function's reply holds no record {ARRAYS!r}")
        vector = dense_vector(trained, job.layout)
        metrics = next(iter(reply.content.metric_records.values()), MetricRecord())
        return _reply(job, vector, metrics, message)

    return mod


def masks_of(message: Message) -> dict[str, Tensor]:
    """The masks that `sparse_mod` put into a message: parameter name to bool tensor, True where kept."""
    if MASK not in message.content:
        raise SafariError("the message holds no masks: put sparse_mod into the ClientApp's mods")
    record = message.content.array_records[MASK]
    return {name: torch.from_numpy(array.numpy().astype(np.bool_)) for name, array in record.items()}


def open_job(
    module: nn.Module,
    message: Message,
    context: Context,
    *,
    batch: BatchOf | None = None,
    pruner: str | Pruner | Score | None = None,
) -> Job:
    """Unpack a round's message into the module, and mask it (Algorithm 2, lines 1 and 2)."""
    instructions = Instructions.read(message.content.config_records.get(SAFARI))
    layout, x = _load(module, message, context)
    if instructions.remember:
        remember(context.state, x.numpy())
    if pruner is None:
        known_pruner(instructions.pruner)
    judge = as_pruner(instructions.pruner if pruner is None else pruner)
    here = x.to(next(module.parameters()).device)
    expected = predict_mask(module, layout, here, instructions.round, instructions.sparsity)
    mask = expected
    if judge is not PRUNERS["mag"]:
        mask = compute_mask(
            module,
            layout,
            here,
            judge,
            instructions.sparsity,
            None if batch is None else batch(message, context),
            torch_generator(instructions.seed, "pruner"),
            # After the first round, what is 0 stays cut.
            support=None if instructions.round == 0 else here != 0,
        )
    layout.write(module, here.masked_fill(~mask, 0.0))
    shared = _shared(layout, x, expected.cpu(), instructions)
    return Job(module, layout, instructions, mask.cpu(), shared, identity(context), context.state)


def _shared(layout: Layout, x: Tensor, expected: Tensor, instructions: Instructions) -> Shared:
    """What both ends hold."""
    reference, wire = x.numpy(), wire_layout(layout)
    shared = Shared(wire, reference, expected.numpy())
    # Where this end expects another mask than the server, which rounding might do, it travels in full.
    return shared if shared.mask_digest == instructions.predicted else Shared(wire, reference)


def _load(module: nn.Module, message: Message, context: Context) -> tuple[Layout, Tensor]:
    """The module's layout and the vector that came, which is then in the module."""
    layout = Layout.of(module)
    arrays = message.content.array_records.get(ARRAYS)
    if arrays is None:
        raise SafariError(f"the message holds no record {ARRAYS!r}")
    frame, frames = frame_of(arrays), chain_of(arrays)
    if frame is not None:
        vector = torch.from_numpy(decode(frame, wire_layout(layout)).vector)
    elif frames is not None:
        held = remembered(context.state, layout.size)
        vector = torch.from_numpy(follow(frames, wire_layout(layout), held))
    else:
        vector = dense_vector(arrays, layout)
    layout.write(module, vector.to(next(module.parameters()).device))
    return layout, vector


def _reply(job: Job, vector: Tensor, metrics: MetricRecord, message: Message) -> Message:
    client_info = ClientInfo(job.client).record()
    content = RecordDict({ARRAYS: job.pack(vector), METRICS: metrics, SAFARI: client_info})
    return Message(content, reply_to=message)


def _metrics(found: Mapping[str, float] | None) -> MetricRecord:
    return MetricRecord({**(found or {})})


def _make(build: Build, context: Context) -> nn.Module:
    return build() if isinstance(build, type) else build(context)


def _counters(module: nn.Module, layout: Layout) -> dict[str, Array]:
    return others_of(ArrayRecord(dict(module.state_dict())), layout)


def _is_training(message: Message) -> bool:
    kind: str = message.metadata.message_type
    return kind.partition(".")[0] == "train"
