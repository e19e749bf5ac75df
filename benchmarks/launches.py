"""What the server's part of a round asks of a device: operations started, and waits for the device, counted on a CPU.

    python benchmarks/launches.py --round rand --out results/engine/launches.json

On a GPU the server's step of a small model is not arithmetic: it is the number of kernels that are started, and of
times that the host waits for what they found. Both can be counted without a GPU. Here tensors pretend to be on a
device (their numbers are on the CPU), so that every copy between host and device, and every look at a number of the
device, is seen:

- operations: those with a tensor of the device in them that compute something; views are none.
- waits: copies from the device, numbers read (`item`, `tolist`, `bool`), indices of bools, `nonzero`, and copies to
  the device that are not `non_blocking`.

Ten clients send models of ResNet-20's size inside one mask, once everybody and once seven of them. With `--round`
and the names of pruners that see no data (rand, mag, synflow), a whole round of the vectorised engine, by the parts
of its stopwatch: training and evaluation aside, "record" is what comes after them. An operation may be more than one
kernel. `host` is the time of `Server.step_stacked` on a tiny model on the CPU: what the host does by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from safari.aggregation import RULES, Server
from safari.engine.measure import Stopwatch
from safari.engine.state import initial
from safari.engine.vectorised import GroupTraining, Vectorised
from safari.training import ClientSide, Known

CLIENTS, SIZE, PARAMETERS = 10, 272_474, 271_000
DENSITY = 0.2
# A device that every build of torch can name. Tensors only say that they are there.
DEVICE = torch.device("meta")
aten = torch.ops.aten
_WAITS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.is_nonzero}
_FREE = {aten.detach, aten.alias, aten.lift_fresh, aten.empty, aten.empty_like, aten.new_empty}


class OnDevice(Tensor):
    """A tensor that says it is on the device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, numbers.shape, numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=DEVICE
        )
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __matmul__(self, other: Tensor) -> Tensor:
        # torch squeezes the product in place, which a wrapper does not notice.
        return torch.mv(other.T, self) if self.ndim == 1 and other.ndim == 2 else torch.matmul(self, other)

    def __repr__(self) -> str:
        return f"OnDevice({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} outside of the counter")

    __torch_function__ = torch._C._disabled_torch_function_impl


class Launches(TorchDispatchMode):
    """Counts operations and waits, by name, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        packet, name = function.overloadpacket, str(function.overloadpacket).removeprefix("aten.")
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        here = any(isinstance(t, OnDevice) for t in tensors)
        if any(t.is_meta and not isinstance(t, OnDevice) for t in tensors):
            # Assigning to rows by a list makes their numbers where the counter does not see it.
            raise RuntimeError(f"{function} with a tensor without numbers")
        asked = kwargs.get("device")
        to_host = packet is aten._to_copy and here and asked is not None and torch.device(asked).type == "cpu"
        to_device = asked is not None and torch.device(asked).type == DEVICE.type and not here
        if asked is not None:
            kwargs["device"] = "cpu"
        if here or to_device:
            self._count(packet, name, args, kwargs, to_host, to_device)
        given = {id(t.numbers): t for t in tensors if isinstance(t, OnDevice)}
        args, kwargs = tree_map_only(OnDevice, lambda t: t.numbers, (args, kwargs))
        found = function(*args, **kwargs)
        if to_host or not (here or to_device):
            return found
        return tree_map_only(Tensor, lambda t: given[id(t)] if id(t) in given else OnDevice(t), found)

    def _count(self, packet: Any, name: str, args: Any, kwargs: Any, to_host: bool, to_device: bool) -> None:
        if to_host:
            self.waits[f"{name} to the host"] += 1
            return
        if packet is aten._to_copy and to_device:
            if kwargs.get("non_blocking"):
                self.operations[f"{name} to the device"] += 1
            else:
                self.waits[f"{name} to the device"] += 1
            return
        if packet is aten.copy_:
            first, second = isinstance(args[0], OnDevice), isinstance(args[1], OnDevice)
            if first != second and not (first and (kwargs.get("non_blocking") or args[2:] == (True,))):
                self.waits[name] += 1
                return
        if packet in _WAITS:
            self.waits[name] += 1
            if packet is aten._local_scalar_dense:
                return
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype == torch.bool for i in indices):
                self.waits[f"{name} with bools"] += 1
            elif any(not isinstance(i, OnDevice) for i in indices):
                self.waits[f"{name} with indices of the host"] += 1
        if packet not in _FREE and not _is_view(packet):
            self.operations[name] += 1


def _is_view(packet: Any) -> bool:
    return getattr(packet, packet.overloads()[0]).is_view or packet in (aten._reshape_alias, aten.view_as)


@contextmanager
def counted() -> Iterator[Launches]:
    """Counts what happens inside."""
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        # By itself it would make a tensor without numbers.
        made = make(data, **options)
        return made if device is None else made.to(device)

    with patch("torch.tensor", tensor), Launches() as found:
        yield found


def arrivals(size: int, parameters: int, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The global model, the models that arrive, and the mask that all of them have."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(1, size, generator=generator) < DENSITY
    mask[:, parameters:] = True
    first = torch.randn(size, generator=generator).abs() * mask[0]
    models = (first + 0.1 * torch.randn(len(ids), size, generator=generator).abs()) * mask
    return first, models, mask


def count_step(rule: str, ids: Sequence[int]) -> dict[str, object]:
    """Operations and waits of the third round, in which rules have a memory."""
    first, models, mask = arrivals(SIZE, PARAMETERS, ids)
    with counted():
        server = Server.start(OnDevice(first), CLIENTS, RULES[rule](), parameters=PARAMETERS)
        for _ in range(2):
            server, _ = server.step_stacked(
                range(CLIENTS), OnDevice(models[[0] * CLIENTS]), None, OnDevice(mask), same_mask=True
            )
    with counted() as found:
        server.step_stacked(ids, OnDevice(models), None, OnDevice(mask), same_mask=True)
    return summary(found) | {"rule": rule, "arrived": len(ids)}


def count_round(pruner: str) -> list[dict[str, object]]:
    """The same of a round of the vectorised engine under the arm `perfect`, by the parts of its stopwatch.

    Training is left out: it gives back what it is told to.
    """
    from engine import random_pictures, world_of

    data = random_pictures(200, 10)
    tables = {"pruning": {"pruner": pruner}, "wire": {"every": 0}, "evaluation": {"every": 1000}}
    world = world_of(CLIENTS, data, "cpu", **tables)
    engine = Vectorised(world)
    engine._pool = engine._tester = None
    engine.chunk = CLIENTS

    def train(x: Tensor, masks: Tensor, group: Sequence[int], t: int, side: ClientSide) -> GroupTraining:
        each = torch.where(masks, 1.01 * x, 0.0).expand(len(group), -1).clone()
        return GroupTraining(each, each[:, 0].clone(), {}, {})

    engine._train_stacked = train  # type: ignore[method-assign]
    # In the second round masks are found from what is left of the model.
    fed = world.federation()
    state, _, _ = engine(fed, initial(world, fed))
    known = Known(OnDevice(world.known.label_counts), OnDevice(world.known.samples))
    engine.world = replace(world, device=DEVICE, start=OnDevice(world.start), known=known)
    state = state.put("model", {**state["model"], "model": OnDevice(state.model)})
    rows: list[dict[str, object]] = []
    with counted() as found:

        def lap(watch: Stopwatch, part: str) -> None:
            rows.append(summary(found) | {"pruner": pruner, "part": part})
            found.operations.clear()
            found.waits.clear()

        with patch.object(Stopwatch, "lap", lap):
            # What is kept for a device is there from the first round on.
            state, _, _ = engine(fed, state)
            lap(Stopwatch(DEVICE), "record")
            rows.clear()
            engine(fed, state)
        rows.append(summary(found) | {"pruner": pruner, "part": "record"})
    return rows


def summary(found: Launches) -> dict[str, object]:
    """Totals, and what they consist of."""
    return {
        "operations": sum(found.operations.values()),
        "waits": sum(found.waits.values()),
        "operations by name": dict(found.operations.most_common()),
        "waits by name": dict(found.waits.most_common()),
    }


def host_time(rule: str, ids: Sequence[int], rounds: int) -> dict[str, float]:
    """Microseconds of a step on a model of a hundred numbers: median and quartiles."""
    first, models, mask = arrivals(100, 90, ids)
    server = Server.start(first, CLIENTS, RULES[rule](), parameters=90)
    seconds = []
    for _ in range(rounds + 20):
        start = time.perf_counter()
        server, _ = server.step_stacked(ids, models, None, mask, same_mask=True)
        seconds.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles(seconds[20:], n=4)
    return {"median": round(middle * 1e6), "q1": round(low * 1e6), "q3": round(high * 1e6), "n": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="*", default=["perfect", "drop", "safari", "safari+"])
    parser.add_argument("--rounds", type=int, default=200, help="rounds of which the host's time is taken")
    parser.add_argument("--round", nargs="*", default=[], metavar="PRUNER", help="whole rounds, too")
    parser.add_argument("--names", action="store_true", help="which operations and waits they are")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for rule in options.rules:
        for ids in (range(CLIENTS), range(7)):
            row = count_step(rule, ids) | {"host": host_time(rule, ids, options.rounds)}
            if not options.names:
                row = {name: value for name, value in row.items() if not name.endswith("by name")}
            rows.append(row)
            print(json.dumps(row), flush=True)
    for pruner in options.round:
        for row in count_round(pruner):
            if not options.names:
                row = {name: value for name, value in row.items() if not name.endswith("by name")}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
