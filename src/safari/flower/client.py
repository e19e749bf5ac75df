"""The client's end: unpack, mask, train inside the mask, pack. The user's code sees an ordinary module."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from safari.errors import SafariError
from safari.flower.arrays import (
    MASK,
    VECTOR,
    VOTES,
    beside_of,
    chain_of,
    dense_record,
    dense_vector,
    frame_of,
    frame_record,
    packets_record,
    state_names,
    with_beside,
)
from safari.flower.broadcast import ARRAYS, CONFIG, mask_known_by, predict_mask, predictor
from safari.flower.chain import follow, remember, remembered
from safari.flower.datagram_client import carry
from safari.flower.mask_memory import decode_with_mask, remember_mask
from safari.flower.masking import inside
from safari.flower.protocol import (
    NET_CLIENT,
    OWN,
    PACKETS,
    REMEMBER,
    SAFARI,
    SHARED,
    ClientInfo,
    Instructions,
    identity,
    known_pruner,
)
from safari.flower.residual import read_residual, write_residual
from safari.models import Layout
from safari.pruning import (
    Batch,
    Masks,
    Pruner,
    Score,
    as_pruner,
    budget_for,
    compute_mask,
    for_task,
    weight_entries,
)
from safari.pruning.policies.regrow import OwnMask, Steepest, votes_for
from safari.rounds.beside import encode_vector, rounded, votes_to_bytes, wire_layout
from safari.rounds.masks import mask_and_votes, masked_gradient
from safari.seeds import generator, torch_generator
from safari.tasks import Task, classification
from safari.text import visible
from safari.wire import (
    Identity,
    Lossy,
    Shared,
    decode,
    decode_mask,
    decode_packet,
    encode,
    merge,
    packets,
    reference_digest,
    settle,
    with_residual,
)
from safari.wire.packet import covered_range

METRICS = "metrics"
# Entries of a message's config by which `sparse_mod` hands the mask to the function: the bits, and the names
# of the parameters that they are of, one after the other.
MASK_BITS, MASKED = "safari.mask", "safari.masked"

Build = type[nn.Module] | Callable[[Context], nn.Module]
BatchOf = Callable[[Message, Context], Batch]
Train = Callable[[nn.Module, Message, Context], Mapping[str, float] | RecordDict | None]


@dataclass(frozen=True)
class Job:
    """One round at one client: the model as it came, the mask to train in, and how to answer.

    `received` is the global model as this client holds it, on the module's device. `votes` is what it reports to
    the mask policy (None: nothing); `down` are the vectors of the client algorithm that came with the model, as
    they travel.
    `state` is the client's own, which lasts from round to round. `offered_as`: the name under which it was
    offered datagrams.
    """

    module: nn.Module
    layout: Layout
    instructions: Instructions
    mask: Tensor
    shared: Shared
    client: str
    state: RecordDict
    received: Tensor
    votes: Tensor | None = None
    down: Mapping[str, bytes] = field(default_factory=dict)
    offered_as: str = ""

    @property
    def masks(self) -> dict[str, Tensor]:
        """The mask by parameter, for those that may be cut."""
        parts = self.layout.split(self.mask)
        return {e.name: parts[e.name] for e in self.layout.entries if e.kind == "weight"}

    def pack(
        self, vector: Tensor, remask: bool = False, up: Mapping[str, Tensor] | None = None
    ) -> ArrayRecord:
        """A trained model as the record of the reply, with its extra payloads.

        `remask`: set weights that the mask cuts to 0, where they are not; otherwise that is an error. `up`: the
        vectors of the client algorithm, one row each.
        """
        vector = vector.cpu()
        if not bool(torch.isfinite(vector).all()):
            raise SafariError("the trained model holds NaN or infinite numbers")
        grown = int((vector[~self.mask] != 0).sum())
        if grown and not remask:
            raise SafariError(
                f"{grown} weights that the mask cuts are not 0 after training: "
                "wrap the optimiser, masked(optimizer, model, masks_of(message))"
            )
        # Filled once more, because -0 is a 0 that would not come back.
        vector = vector.masked_fill(~self.mask, 0.0)
        if up and self.instructions.upload != "frame":
            how, sent = self.instructions.upload, ", ".join(up)
            raise SafariError(
                f"the client algorithm must send nothing beside its model with upload {how!r}, got {sent}"
            )
        if self.instructions.upload == "dense":
            names = state_names(self.module, self.layout)
            return dense_record(self.layout, vector, _counters(self.module, names), names)
        if self.instructions.upload == PACKETS:
            return packets_record(self._packets(vector))
        return with_beside(frame_record(self._encode(vector)), self._beside(up or {}))

    def _beside(self, up: Mapping[str, Tensor]) -> dict[str, bytes]:
        inside = self.mask[: self.layout.parameters]
        found = {f"{VECTOR}{n}": encode_vector(rows[0].cpu(), inside, self.layout) for n, rows in up.items()}
        if self.votes is not None:
            found[VOTES] = votes_to_bytes(self.votes, self.layout)
        return found

    def info(self) -> ClientInfo:
        """Client information for the reply. A frame holds its mask, plain arrays do not."""
        if self.instructions.upload == "dense":
            return ClientInfo(self.client, np.packbits(self.mask[self.layout.prunable].numpy()).tobytes())
        return ClientInfo(self.client)

    @property
    def _lossy(self) -> Lossy:
        # The draws of our own engines, where a client is a number.
        client = int(self.client) if self.client.isdecimal() else self.client
        rng = generator(self.instructions.seed, "wire", client, self.instructions.round)
        return Lossy.of(self.instructions, rng)

    def _packets(self, vector: Tensor) -> list[bytes]:
        from safari.net.client import PACKET

        reference = self.shared.reference
        model = b"" if reference is None else reference_digest(reference)
        identity = Identity(self.offered_as, self.instructions.round, model)
        told, mask, wire = self.instructions, self.mask.numpy(), self.shared.layout
        send = functools.partial(
            packets, limit=PACKET, values=told.values, lossy=self._lossy, identity=identity
        )
        if not told.feedback:
            return send(vector.numpy(), mask, self.shared)
        before = read_residual(self.state, self.layout.parameters, told.heard, told.came, wire)
        target = with_residual(vector.numpy(), mask, before)
        found = send(target, mask, self.shared)
        decoded = merge((decode_packet(data, self.shared, expect=identity) for data in found), self.shared)
        after = settle(before, target, decoded.vector, mask, True)
        ranges = [covered_range(data, wire) for data in found]
        write_residual(self.state, before, after, told.round, ranges)
        return found

    def _encode(self, vector: Tensor) -> bytes:
        lossy = self._lossy
        model, mask, values = vector.numpy(), self.mask.numpy(), self.instructions.values
        whose = Identity(self.client, self.instructions.round, self.shared.reference_digest)
        # Where each client moves the mask by itself, a few weights of it differ from what the server expects.
        mode = "best" if self.instructions.masks == OWN else "auto"
        send = functools.partial(encode, values=values, mask_mode=mode, lossy=lossy, identity=whose)
        if not self.instructions.feedback:
            return send(model, mask, self.shared)
        before = read_residual(self.state, self.layout.parameters, self.instructions.heard)
        target = with_residual(model, mask, before)
        frame = send(target, mask, self.shared)
        after = settle(before, target, decode(frame, self.shared).vector, mask, True)
        write_residual(self.state, before, after, self.instructions.round)
        return frame


def sparse(
    build: Build,
    *,
    batch: BatchOf | None = None,
    pruner: str | Pruner | Score | None = None,
    task: Task | None = None,
) -> Callable[[Train], ClientAppCallable]:
    """Make a ClientApp's function out of one that trains (or tests) an ordinary module.

    `build` is a module class, or a function of the context that makes the module. `batch(message, context)`
    gives inputs and labels to the pruners that want them (snip and grasp; synflow looks at their shape) and to
    mask policies that ask for a gradient. `pruner` overrides the one that the server names. `task` has the loss
    of such gradients and of scores that look at one: classification by default.

    The function gets the module, the message and the context. For `train` messages the module is masked and
    its gradients are, so that any loop and any optimiser keep it sparse; what the function returns (a dict
    of numbers such as "num-examples") travels as metrics beside the model, or, if it is a RecordDict, all of
    its records do. For others it gets the global model, and only these go back.
    """

    chosen = None if pruner is None else as_pruner(pruner)

    def decorate(train: Train) -> ClientAppCallable:
        @functools.wraps(train)
        def answer(message: Message, context: Context) -> Message:
            return carry(message, context, inner)

        def inner(message: Message, context: Context) -> Message:
            module = make_module(build, context)
            if not is_training(message):
                _load(module, message, context)
                return Message(_records(train(module, message, context)), reply_to=message)
            job = open_job(module, message, context, batch=batch, pruner=chosen, task=task)
            _refuse_algorithm(job.instructions)
            with inside(module, job.masks):
                records = _records(train(module, message, context))
            return reply_with(job, job.pack(job.layout.read(module)), records, ARRAYS, message)

        return answer

    return decorate


def sparse_mod(
    build: Build,
    *,
    batch: BatchOf | None = None,
    pruner: str | Pruner | Score | None = None,
    task: Task | None = None,
    remask: bool = False,
) -> Mod:
    """`sparse` as a mod, for a ClientApp whose functions stay as they are: dense arrays in, dense arrays out.

    The function finds the masked model under "arrays", as from FedAvg, and its masks by `masks_of(message)`;
    it has to train inside them: `masked(optimizer, model, masks_of(message))`. All other records of its reply
    travel as they are.

    `build`, `batch`, `pruner` and `task` as in `sparse`. `remask`: set what the mask cuts to 0 afterwards, whatever
    the function did. Otherwise a weight that left its mask is an error, because a loop that forgets the mask
    trains something else than it sends. For mods that come after this one and add noise: `LocalDpMod`.
    """

    chosen = None if pruner is None else as_pruner(pruner)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return carry(message, context, lambda m, c: inner(m, c, call_next))

    def inner(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if ARRAYS not in message.content.array_records:
            return call_next(message, context)
        module = make_module(build, context)
        if not is_training(message):
            model = _load(module, message, context)
            message.content[ARRAYS] = _dense(module, model.layout, model.vector)
            return call_next(message, context)
        job = open_job(module, message, context, batch=batch, pruner=chosen, task=task)
        _refuse_algorithm(job.instructions)
        message.content[ARRAYS] = _dense(module, job.layout, job.layout.read(module))
        config = message.content.config_records[CONFIG]
        config[MASKED] = list(job.masks)
        config[MASK_BITS] = np.packbits(job.mask[job.layout.prunable].numpy()).tobytes()
        reply = call_next(message, context)
        if not reply.has_content():
            return reply
        records = reply.content.array_records
        name = next(iter(records)) if len(records) == 1 else ARRAYS
        if name not in records:
            raise SafariError(f"the training function's reply holds no record {ARRAYS!r}")
        vector = dense_vector(records[name], job.layout)
        return reply_with(job, job.pack(vector, remask), reply.content, name, message)

    return mod


def masks_of(message: Message) -> dict[str, Tensor]:
    """The masks that `sparse_mod` put into a message: parameter name to bool tensor, True where kept."""
    config = _config(message)
    names, packed = config.get(MASKED), config.get(MASK_BITS)
    if not isinstance(names, list) or not isinstance(packed, bytes):
        raise SafariError("the message holds no masks: put sparse_mod into the ClientApp's mods")
    shapes = {name: message.content.array_records[ARRAYS][name].shape for name in names}
    sizes = [math.prod(shape) for shape in shapes.values()]
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=sum(sizes)).astype(np.bool_)
    parts = torch.from_numpy(bits).split(sizes)
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def open_job(
    module: nn.Module,
    message: Message,
    context: Context,
    *,
    batch: BatchOf | None = None,
    pruner: str | Pruner | Score | None = None,
    task: Task | None = None,
) -> Job:
    """Unpack a round's message into the module, and mask it (Algorithm 2, lines 1 and 2)."""
    instructions = Instructions.read(_config(message))
    model = _load(module, message, context)
    layout = model.layout
    if pruner is None:
        known_pruner(instructions.pruner)
    judge = for_task(as_pruner(instructions.pruner if pruner is None else pruner), task or classification())
    x = model.vector.to(next(module.parameters()).device)
    base = None if model.mask is None else model.mask.to(x.device)
    if instructions.announced:
        if model.mask is None or base is None:
            raise SafariError("the message announces a mask and holds none")
        remember_mask(context.state, model.mask)
        x = x.masked_fill(~base, 0.0)
    budget = budget_for(
        layout,
        instructions.sparsity,
        instructions.scope,
        dense=instructions.dense_layers(),
        least=instructions.least,
    )
    expected = base
    if expected is None or not instructions.announced:
        named, seed = instructions.pruner, instructions.seed
        expected = predict_mask(module, layout, x, instructions.round, budget, named, seed)

    def by_score(support: Tensor | None) -> Tensor:
        if judge is predictor(instructions.pruner) and not instructions.announced:
            return expected
        data, draws = (
            None if batch is None else batch(message, context),
            torch_generator(instructions.seed, "pruner"),
        )
        return compute_mask(module, layout, x, judge, budget, data, draws, support)

    def gradient() -> Tensor:
        if batch is None:
            raise SafariError(
                "the server's mask policy asks for a gradient on this client's data: give inputs and labels by batch="
            )
        data = batch(message, context)
        return masked_gradient(module, layout, x, base, data, task or classification())

    mask, votes = mask_and_votes(_told_masks(instructions, layout, x, base), gradient, by_score)
    layout.write(module, x.masked_fill(~mask, 0.0))
    shared = _shared(layout, x.cpu(), expected.cpu(), instructions)
    return Job(
        module,
        layout,
        instructions,
        mask.cpu(),
        shared,
        identity(context),
        context.state,
        x,
        None if votes is None else rounded(votes.cpu()),
        model.down,
        str(_config(message).get(NET_CLIENT, "")),
    )


def _told_masks(instructions: Instructions, layout: Layout, x: Tensor, base: Tensor | None) -> Masks:
    """The mask policy's answer as the server has sent it; `base` is the mask that was announced."""
    if not instructions.announced or base is None:
        # After the first round, what is 0 stays cut: the policy that needs no announcement.
        return Masks(support=None if instructions.round == 0 else x != 0)
    layers = len(weight_entries(layout))
    counts, moves = instructions.counts("votes", layers), instructions.counts("moves", layers)
    votes = None if counts is None else votes_for(base, layout, counts)
    own = OwnMask(Steepest(base, layout, moves), x) if instructions.masks == OWN and moves else None
    if instructions.masks == OWN and own is None:
        raise SafariError(
            "the server asks for a mask of this client's own and does not say how many weights move"
        )
    return Masks(base if instructions.masks == SHARED else None, base, own, votes, announced=True)


def _refuse_algorithm(instructions: Instructions) -> None:
    """SafariError where the server asks for more than a user's own loop can do."""
    if instructions.client != "fedavg":
        raise SafariError(
            f"the server asks for the client algorithm {visible(instructions.client, 60)!r}, which is a training loop "
            "of its own: use safari.flower.local_training in the place of sparse or sparse_mod"
        )


def _shared(layout: Layout, x: Tensor, expected: Tensor, instructions: Instructions) -> Shared:
    """Shared state of both ends: the received model, and the predicted mask if both expect the same one."""
    reference, wire = x.numpy(), wire_layout(layout)
    shared = Shared(wire, reference, expected.numpy())
    # Where this end expects another mask than the server, which rounding might do, it travels in full.
    return shared if shared.mask_digest == instructions.predicted else Shared(wire, reference)


@dataclass(frozen=True)
class Received:
    """A model as it came: the vector, which is in the module, the mask that came with it, where one did, and the
    vectors of the client algorithm as they travel."""

    layout: Layout
    vector: Tensor
    mask: Tensor | None
    down: Mapping[str, bytes]


def _load(module: nn.Module, message: Message, context: Context) -> Received:
    """Load a message's model into the module, and return all that the message holds."""
    layout = Layout.of(module)
    wire = wire_layout(layout)
    arrays = message.content.array_records.get(ARRAYS)
    if arrays is None:
        raise SafariError(f"the message holds no record {ARRAYS!r}")
    frame, frames, beside = frame_of(arrays), chain_of(arrays), beside_of(arrays)
    mask = None
    if frame is not None:
        vector, mask = decode_with_mask(frame, wire, context.state)
    elif frames is not None:
        held = remembered(context.state, layout.size)
        target = Instructions.read(_config(message)).model
        vector = torch.from_numpy(follow(frames, wire, held, target))
    else:
        vector = dense_vector(arrays, layout)
    if MASK in beside:
        mask = torch.from_numpy(decode_mask(beside[MASK], mask_known_by(vector, layout, wire)))
    layout.write(module, vector.to(next(module.parameters()).device))
    if _config(message).get(REMEMBER) is True:
        remember(context.state, vector.numpy())
    down = {name.removeprefix(VECTOR): data for name, data in beside.items() if name.startswith(VECTOR)}
    return Received(layout, vector, mask, down)


def reply_with(job: Job, arrays: ArrayRecord, records: RecordDict, name: str, message: Message) -> Message:
    """The reply to a training message: all of these records, with the model under this name."""
    content = RecordDict({**records, name: arrays, SAFARI: job.info().record()})
    return Message(content, reply_to=message)


def _records(found: Mapping[str, float] | RecordDict | None) -> RecordDict:
    return found if isinstance(found, RecordDict) else RecordDict({METRICS: MetricRecord({**(found or {})})})


def _dense(module: nn.Module, layout: Layout, vector: Tensor) -> ArrayRecord:
    names = state_names(module, layout)
    return dense_record(layout, vector, _counters(module, names), names)


def _config(message: Message) -> Mapping[str, Any]:
    found: Mapping[str, Any] = message.content.config_records.get(CONFIG) or {}
    return found


def make_module(build: Build, context: Context) -> nn.Module:
    """The module of this client."""
    return build() if isinstance(build, type) else build(context)


def _counters(module: nn.Module, names: Mapping[str, str | None]) -> dict[str, Array]:
    state = module.state_dict()
    return {name: Array(state[name].cpu().numpy()) for name, held in names.items() if held is None}


def is_training(message: Message) -> bool:
    """Is the client asked to train, and not to test?"""
    kind: str = message.metadata.message_type
    return kind.partition(".")[0] == "train"
