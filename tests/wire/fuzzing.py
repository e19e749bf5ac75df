"""Mutated and truncated frames and packets: only `WireError` or a valid model may come out.

The default tests run some thousands; `python -m wire.fuzzing --cases 10000000` in tests/ runs the rest.
"""

from __future__ import annotations

import argparse
import random
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from safari.errors import WireError
from safari.wire import Shared, decode, decode_packet, encode, packets
from wire.samples import (
    LOSSY_MODES,
    MASK_MODES,
    NEW_MODES,
    layout_of,
    lossy,
    small_layout,
    small_model,
    wide_layout,
    wide_model,
)

INTERESTING = (0, 1, 2, 7, 8, 24, 25, 31, 32, 63, 64, 127, 128, 159, 160, 254, 255)


@dataclass(frozen=True, eq=False)
class Seed:
    """A valid frame or packet and what its receiver holds."""

    name: str
    data: bytes
    shared: Shared
    packet: bool


@dataclass
class Outcome:
    """What came of it, and the slowest call of each kind in seconds."""

    counts: Counter = field(default_factory=Counter)
    slowest: float = 0.0
    slowest_of: str = ""


def seeds_of(vector, mask, reference, predicted, layout, limit):
    """Frames and packets of one model in every mode."""
    out = []
    for values in ("absolute", "difference", *LOSSY_MODES, *NEW_MODES):
        for mask_mode in MASK_MODES:
            for relative in (True, False):
                if relative == (values == "absolute") or (values == "difference" and not relative):
                    continue
                shared = Shared(
                    layout,
                    reference if relative else None,
                    {"known": mask, "coded": None}.get(mask_mode, predicted),
                )
                choices = {"values": values, "mask_mode": mask_mode, "lossy": lossy()}
                name = f"{values} {mask_mode}{' relative' if relative else ''}"
                out.append(Seed(name, encode(vector, mask, shared, **choices), shared, False))
                datagrams = packets(vector, mask, shared, limit=limit, **choices)
                out += [Seed(f"{name} packet", data, shared, True) for data in datagrams[:3]]
    return out


def small_seeds():
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    out = seeds_of(vector, mask, reference, predicted, layout, limit=160)
    # Blank bytes and neighbours that move alike: what the modelled masks and the tables of packets are for.
    wide = wide_layout()
    vector, mask, reference = wide_model(wide)
    return out + seeds_of(vector, mask, reference, np.roll(mask, 8), wide, limit=250)


def large_seeds(d=270_000):
    layout = layout_of([432] + [(d - 1500) // 8] * 8, [True] * 9)
    vector, mask, reference, predicted = small_model(layout)
    return seeds_of(vector, mask, reference, predicted, layout, limit=1200)


def sealed(data: bytes, seed: Seed) -> bytes:
    """The same bytes with the right checksum, so that damage reaches the decoders behind it."""
    at = 3 if seed.packet else 14
    context = b""
    if seed.packet:
        context = seed.shared.contexts[bool(data[1] & 64), data[1] >> 4 & 3 != 2]
        data = data[:2] + context[:1] + data[3:]
    check = zlib.crc32(context + data[:at] + data[at + 4 :])
    return data[:at] + check.to_bytes(4, "little") + data[at + 4 :]


def mutated(rng: random.Random, seed: Seed, other: Seed) -> bytes:
    """One damaged copy."""
    data = bytearray(seed.data)
    body = 7 if seed.packet else 18
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        # Half of the damage goes where tags, counts and lengths are.
        near = min(len(data), body + 80) if rng.random() < 0.5 else len(data)
        at = rng.randrange(near) if near else 0
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at] = rng.choice(INTERESTING)
        elif kind == 2 and data:
            data[at] = rng.randrange(256)
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 5:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            start = rng.randrange(len(other.data))
            piece = other.data[start : start + rng.randrange(1, 40)]
            data[at : at + len(piece)] = piece
    changed = bytes(data)
    return sealed(changed, seed) if rng.random() < 0.95 and len(changed) > 18 else changed


def attack(seeds: list[Seed], cases: int, seed: int) -> Outcome:
    """Decode this many damaged copies; anything but `WireError` or a valid model raises."""
    rng = random.Random(seed)
    outcome = Outcome()
    for _ in range(cases):
        chosen = rng.choice(seeds)
        data = mutated(rng, chosen, rng.choice(seeds))
        # Time of this thread alone: on a busy machine the clock on the wall tells of others.
        start = time.thread_time()
        try:
            found = (decode_packet if chosen.packet else decode)(data, chosen.shared)
        except WireError as error:
            result = "refused"
            if not 0 <= error.offset <= len(data):
                raise AssertionError(f"offset {error.offset} of {len(data)} bytes") from error
        else:
            result = "decoded"
            check_valid(found, chosen)
        took = time.thread_time() - start
        outcome.counts[result] += 1
        if took > outcome.slowest:
            outcome.slowest, outcome.slowest_of = took, chosen.name
    return outcome


def check_valid(found, seed: Seed) -> None:
    if found.vector.dtype != np.float32 or found.mask.dtype != np.bool_:
        raise AssertionError("a model of other types came out")
    if found.vector.shape != found.mask.shape or found.vector.size > seed.shared.layout.d:
        raise AssertionError("a model of other sizes came out")
    if np.count_nonzero(found.vector != 0) > np.count_nonzero(found.mask):
        raise AssertionError("a number that is cut came out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="how many in all")
    parser.add_argument("--large", type=float, default=0.01, help="which share on a model of 270,000 numbers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    large = round(arguments.cases * arguments.large)
    for name, seeds, cases in (
        ("small", small_seeds(), arguments.cases - large),
        ("large", large_seeds(), large),
    ):
        start = time.perf_counter()
        outcome = attack(seeds, cases, arguments.seed)
        print(
            f"{name}: {cases} cases in {time.perf_counter() - start:.0f} s, {dict(outcome.counts)}, "
            f"slowest call {outcome.slowest * 1e3:.1f} ms ({outcome.slowest_of})"
        )


if __name__ == "__main__":
    main()
