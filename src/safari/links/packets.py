"""Packet-level links: a model travels in packets, and some of them arrive.

A `Link` delivers a message or does not. A `PacketLink` decides for each packet of a message, so that a model may
arrive in part. `recover` says what is done with the part:

    whole     a model arrives if all its packets do
    fec       ... if as many of them arrive as the model has, of more that were sent (an erasure code)
    blocks    what arrives counts, and stand-ins speak for the rest (`safari.aggregation.blocks`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from safari.bounds import at_least
from safari.errors import ConfigError, one_of
from safari.links.link import Bools, Floats, Setting, State, probabilities, spread

Ints = NDArray[np.int64]
# What arrived from each client: (first coordinate, count) in wire order. Clients without any are left out.
Ranges = Mapping[int, Sequence[tuple[int, int]]]

WHOLE, FEC, BLOCKS = "whole", "fec", "blocks"
RECOVER = (WHOLE, FEC, BLOCKS)

# Beyond these a rate is 0 or infinite in float64, and the packets of one model fill the memory.
_WIDEST_SPREAD, _MOST_REPAIR = 10.0, 1000.0


@dataclass(frozen=True)
class PacketLink:
    """`init(setting) -> state`; `apply(state, round, counts, rng) -> (delivered, state)`.

    `counts` says how many packets each client's model has. `delivered` holds for each client a bool for
    each of them; `rng` is fresh every round. `sent(count)` is how many packets go out for a model of
    `count`. `limit` is the most bytes of a packet. `whole`: models are not cut at all, and none of this is asked.
    `ranges(state, round)`: for a link that knows what arrives by coordinates; `apply` is not asked then.
    `rounds(state)`: for a link that ends, how many rounds it has.
    """

    init: Callable[[Setting], State]
    apply: Callable[[State, int, Ints, np.random.Generator], tuple[list[Bools], State]]
    sent: Callable[[int], int]
    limit: int = 1155
    whole: bool = False
    ranges: Callable[[State, int], Ranges] | None = None
    rounds: Callable[[State], int] | None = None


def none() -> PacketLink:
    """Uploads arrive whole, where the uplink lets them through."""

    def apply(state: State, t: int, counts: Ints, rng: np.random.Generator) -> tuple[list[Bools], State]:
        return [np.ones(count, np.bool_) for count in counts.tolist()], state

    return PacketLink(lambda setting: {}, apply, lambda count: count, whole=True)


def lossy(
    *,
    loss: float | Sequence[float] = 0.05,
    burst: float = 1.0,
    rate: float | Sequence[float] = 0.0,
    spread_of_rates: float = 0.0,
    queue: float = 64_000.0,
    pace: float = 0.0,
    latency: float = 0.0,
    deadline: float = 0.0,
    size: int = 1155,
    recover: str = BLOCKS,
    repair: float = 0.0,
) -> PacketLink:
    """Packets lost at random or in bursts, and behind a queue that is slow or full.

    Args:
        loss: The share of packets that is lost on the way: a number, or a list that is repeated.
        burst: How many in a row are lost on average; 1: each independently of the others.
        rate: Bytes a second that leave a client's queue: a number, or a list that is repeated; 0: no queue.
        spread_of_rates: The standard deviation of the logarithm of the rate, drawn for each client and round.
        queue: Bytes that the queue holds; packets that come beyond are lost.
        pace: Bytes a second at which a client sends into the queue; 0: as fast as it empties.
        latency: Seconds on the way behind the queue.
        deadline: Seconds after which packets are too late; 0: none is.
        size: The most bytes of a packet, without the headers of the datagram.
        recover: What counts: `whole`, `fec` or `blocks`.
        repair: With `fec`, how many packets are sent beyond those of the model, as a share of them.
    """
    probabilities("loss", loss)
    rates = np.atleast_1d(np.asarray(rate, np.float64))
    _check(burst=burst, rates=rates, loss=loss, recover=recover, repair=repair)
    named = {"spread_of_rates": spread_of_rates, "queue": queue, "pace": pace}
    named |= {"latency": latency, "deadline": deadline}
    problems = [f"{name} must be at least 0, got {value}" for name, value in named.items() if not value >= 0]
    if spread_of_rates > _WIDEST_SPREAD:
        problems.append(f"spread_of_rates must be at most {_WIDEST_SPREAD:g}, got {spread_of_rates}")
    if not 100 <= size <= 65_000:
        problems.append(f"size must lie between 100 and 65000, got {size}")
    if problems:
        raise ConfigError(problems)

    def sent(count: int) -> int:
        return count + math.ceil(repair * count) if recover == FEC else count

    def init(setting: Setting) -> State:
        if setting.clients % len(rates):
            raise ConfigError(
                f"rate must hold one number or a list whose length divides the {setting.clients} clients; "
                f"got {len(rates)} numbers"
            )
        return {
            "loss": spread("loss", loss, setting.clients),
            "rate": np.tile(rates, setting.clients // len(rates)),
        }

    def apply(state: State, t: int, counts: Ints, rng: np.random.Generator) -> tuple[list[Bools], State]:
        # One stream a client: how long a model is changes nothing for the others.
        streams = rng.spawn(len(counts))
        out = []
        for count, own, speed, stream in zip(
            counts.tolist(), state["loss"], state["rate"], streams, strict=True
        ):
            through = ~lost_packets(sent(count), float(own), burst, stream)
            if speed:
                now = speed * math.exp(spread_of_rates * stream.standard_normal() - spread_of_rates**2 / 2)
                times = queue_delays(sent(count), size, now, queue, pace) + latency
                # Packets leave in random order, so that it is not always the same layers that are late.
                late = ~np.isfinite(times) if not deadline else ~(times <= deadline)
                through &= ~late[stream.permutation(sent(count))]
            elif deadline and latency > deadline:
                through[:] = False
            out.append(recovered(through, count, recover))
        return out, state

    return PacketLink(init, apply, sent, limit=size)


def lost_packets(count: int, loss: float, burst: float, rng: np.random.Generator) -> Bools:
    """True where one of `count` packets is lost: independently, or by a two-state chain (Gilbert, 1960).

    >>> lost_packets(8, 0.5, 4.0, np.random.default_rng(1)).astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1]
    """
    bad, draws = bool(rng.random() < loss), rng.random(count)
    if burst == 1 or not 0 < loss < 1:
        return np.asarray(draws < loss)
    leave = (loss / (1 - loss) / burst, 1 / burst)
    out = np.empty(count, np.bool_)
    for i, draw in enumerate(draws.tolist()):
        bad ^= draw < leave[bad]
        out[i] = bad
    return out


def queue_delays(count: int, size: int, rate: float, queue: float, pace: float) -> Floats:
    """When each of `count` packets, sent one after the other from time 0 on, has left a queue; infinite where
    the queue was full.

    >>> queue_delays(4, 1000, 1000.0, 1500.0, 4000.0).tolist()
    [1.0, 2.0, 3.0, inf]
    """
    step = size / (pace or rate)
    out, free = np.full(count, np.inf), 0.0
    for i in range(count):
        start = max(free, i * step)
        if (start - i * step) * rate <= queue:
            out[i] = free = start + size / rate
    return out


def recovered(through: Bools, count: int, recover: str) -> Bools:
    """True for each of a model's `count` packets that can be used, given those sent that arrived."""
    if recover == BLOCKS:
        return through
    enough = int(through.sum()) >= count if recover == FEC else bool(through.all())
    return np.full(count, enough)


def _check(burst: float, rates: Floats, loss: float | Sequence[float], recover: str, repair: float) -> None:
    at_least("burst", burst, 1)
    most = burst / (1 + burst)
    for value in probabilities("loss", loss).tolist():
        if burst > 1 and most < value < 1:
            raise ConfigError(f"loss must be at most {most:.3g} in bursts of {burst}, got {value}")
    if not len(rates) or not ((rates >= 0) & (rates < np.inf)).all():
        raise ConfigError(f"rate must be at least 0 and finite, got {rates.tolist()}")
    if recover not in RECOVER:
        raise ConfigError(one_of("recover", recover, RECOVER))
    if not 0 <= repair <= _MOST_REPAIR or (repair and recover != FEC):
        raise ConfigError(
            f"repair must lie between 0 and {_MOST_REPAIR:g}, and be 0 unless recover is fec; got {repair}"
        )
