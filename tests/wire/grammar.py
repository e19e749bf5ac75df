"""Frames and packets built field by field from docs/wire.md, with choices that no sensible encoder makes.

`build` gives a valid message as named fields. `disturb` changes one of them, and the checksum is made
for the result, so that the damage reaches the decoder that it is meant for.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from safari.wire import Identity, Shared
from safari.wire.bitmap import MAX_RICE, MODELLED, PACKED
from safari.wire.bits import pack_fields, rice_encode, varint
from safari.wire.huffman import LEVELS, MOST_BYTES, encode_rows, listed_code, paired_code, sparse_code
from safari.wire.symbols import alphabet, pair

ABSOLUTE, DIFFERENCE, BF16, FP16, INT8, QSGD, STEP, NONE, SIGN, SPARSE = range(10)
KNOWN, FLIPS, CODED, SWAPS = range(4)
MAX_CODE = dict.fromkeys(range(10), 0) | {DIFFERENCE: 3, INT8: 4, QSGD: 4, STEP: 4}
IDENTITY = Identity("fuzz", 3, bytes(8))
SIZES = (0, 1, 2, 127, 128, 16383, 16384, 2**21, 2**31, 2**32 - 1, 2**35 - 1)
BOMB = zlib.compress(bytes(1 << 24), 9)[2:-4]


@dataclass(frozen=True)
class Message:
    """A frame or a packet in pieces; `head` ends where the checksum stands."""

    shared: Shared
    packet: bool
    identity: Identity | None
    head: bytes
    fields: tuple[tuple[str, bytes], ...]

    def sealed(self) -> bytes:
        """The bytes, with the checksum that belongs to them."""
        rest = b"".join(data for _, data in self.fields)
        context = b""
        head = self.head
        if self.packet:
            modes = head[1]
            context = self.shared.contexts[bool(modes & 64), modes >> 4 & 3 != CODED]
            if self.identity is not None:
                context = self.identity.context(context)
            head = head[:2] + context[:1]
        check = zlib.crc32(context + head + rest)
        return head + check.to_bytes(4, "little") + rest


def build(rng: random.Random, shared: Shared, packet: bool) -> Message:
    """A valid message with random choices; `shared` has a reference and a predicted mask."""
    layout = shared.layout
    draw = np.random.default_rng(rng.getrandbits(32))
    mode, mask_mode = rng.choice([m for m in range(10) if m != NONE or not packet]), rng.randrange(4)
    relative = mode == DIFFERENCE or (mode not in (ABSOLUTE, NONE) and rng.random() < 0.5)
    identity = IDENTITY if rng.random() < 0.2 else None
    first, span = 0, layout.d
    if packet and layout.d:
        first = rng.randrange(layout.d)
        span = rng.choice([1, layout.d - first, rng.randint(1, layout.d - first)])
    prunable = max(0, min(first + span, layout.prunable_total) - first)
    edges = np.unique(np.clip(layout.wire_edges - first, 0, span))
    fields: list[tuple[str, bytes]] = []
    if packet:
        if identity is not None:
            fields += [("client", identity.label.client[:4]), ("round", varint(identity.round))]
        fields += [("first", varint(first)), ("span", varint(span))]
    else:
        fields.append(("reference", shared.reference_digest if relative else b""))
        fields.append(("predicted", shared.mask_digest if mask_mode != CODED else b""))
        fields.append(("identity", identity.header if identity is not None else b""))
    keep = np.ones(span, bool)
    keep[:prunable] = False
    if mask_mode != CODED:
        keep[:prunable] = shared.mask_bits[first : first + prunable]
    if mask_mode != KNOWN and prunable:
        bits = random_bits(rng, draw, prunable)
        keep[:prunable] ^= bits
        sizes = np.diff(edges[edges <= prunable])
        if mask_mode == SWAPS:
            held = shared.mask_bits[first : first + prunable]
            bits = np.concatenate([bits[held], bits[~held]])
            cut = [np.count_nonzero(~piece) for piece in np.split(held, np.cumsum(sizes)[:-1])]
            sizes = np.array([np.count_nonzero(held), *cut])
        fields += bitmap(rng, bits, sizes[sizes > 0])
    base = shared.wire_reference[first : first + span][keep].view(np.uint32)
    counts = np.array([np.count_nonzero(keep[low:high]) for low, high in pairwise(edges.tolist())], int)
    write = sparse if mode == SPARSE else values
    code, numbers = write(rng, draw, mode, counts, base, relative)
    flags = mask_mode << 4 | relative << 6 | (identity is not None) << 7
    if packet:
        head = bytes([0xB0 | code, mode | flags, 0])
    else:
        head = b"SAF\x02" + bytes([mode | flags, code]) + layout.digest
    return Message(shared, packet, identity, head, tuple(fields + numbers))


def random_bits(rng, draw, size):
    density = rng.choice([0.0, 1e-3, 0.02, 0.2, 0.5, 0.9, 1.0])
    bits = draw.random(size) < density
    if rng.random() < 0.3:
        bits &= np.repeat(draw.random(-(-size // 8)) < 0.5, 8)[:size]
    return bits


def bitmap(rng, bits, sizes):
    """The bitmap of section 4: a way for each segment at random."""
    pieces = np.split(bits, np.cumsum(sizes)[:-1])
    usual = rng.choice([None, PACKED, MODELLED, 0, 0])
    tags, packed, modelled, riced = [], [], [], []
    words = 0
    for piece in pieces:
        way = usual if usual is not None else rng.choice([PACKED, MODELLED, 0])
        flip = rng.random() < 0.5
        row = np.packbits(piece ^ flip, bitorder="little")
        if flip and piece.size % 8:
            row[-1] &= (1 << piece.size % 8) - 1
        if way == MODELLED and words + row.size <= MOST_BYTES:
            words += row.size
            model = rng.randint(1, 127), rng.randint(0, 63)
            tags.append(("tag", bytes([MODELLED | flip << 7, *model])))
            modelled.append((row, sparse_code(*model)))
        elif way == PACKED:
            tags.append(("tag", bytes([PACKED])))
            packed.append(np.packbits(piece, bitorder="little"))
        else:
            places = np.flatnonzero(piece ^ flip)
            # A small parameter makes long quotients, a large one useless remainders.
            k = rng.choice([0, 1, 4, MAX_RICE, rng.randint(0, MAX_RICE)])
            tags += [("tag", bytes([k | flip << 7])), ("count", varint(places.size))]
            riced.append((np.diff(places, prepend=-1) - 1, np.full(places.size, k, np.uint8)))
    out = tags
    if packed:
        stream = deflated(rng, np.concatenate(packed).tobytes())
        out += [("length", varint(len(stream))), ("deflate", stream)]
    if modelled:
        out.append(("words", encode_rows(*zip(*modelled, strict=True))))
    if riced:
        unary, remainders = rice_encode(*(np.concatenate(column) for column in zip(*riced, strict=True)))
        out += [("unary", unary), ("remainders", remainders)]
    return out


def deflated(rng, data):
    """A deflate stream that no longer than it may be: stored, fixed or dynamic, whole or in blocks."""
    coder = zlib.compressobj(
        rng.choice([0, 1, 9]), zlib.DEFLATED, -15, 9, rng.choice([0, zlib.Z_HUFFMAN_ONLY])
    )
    out = coder.compress(data)
    for _ in range(rng.choice([0, 0, 3])):
        out += coder.flush(zlib.Z_FULL_FLUSH)
    out += coder.flush()
    return out if len(out) <= 2 * len(data) + 64 else zlib.compress(data, 9)[2:-4]


def sparse(rng, draw, mode, counts, base, relative):
    """(code, fields) of numbers of which only some are there."""
    sent = random_bits(rng, draw, int(counts.sum()))
    inner = rng.choice([ABSOLUTE, BF16, FP16, INT8, QSGD, STEP, SIGN, *([DIFFERENCE] if relative else [])])
    pieces = np.split(sent, np.cumsum(counts)[:-1])
    each = np.array([np.count_nonzero(piece) for piece in pieces], int)
    code, fields = values(rng, draw, inner, each, base[sent], relative)
    which = bitmap(rng, sent, counts[counts > 0]) if sent.size else []
    return 0, [*which, ("inner", bytes([inner | code << 4])), *fields]


def values(rng, draw, mode, counts, base, relative):
    """(code, fields) of section 5 for these counts of numbers in each entry."""
    n = int(counts.sum())
    code = rng.randint(0, MAX_CODE[mode])
    fields = []
    if mode == NONE:
        return code, fields
    if mode >= INT8:
        scales = draw.integers(0, 0x7F80, 1 if mode == STEP else counts.size).astype("<u2")
        fields.append(("scales", scales.tobytes()))
    if mode == SIGN:
        return code, [*fields, ("raw", np.packbits(draw.random(n) < 0.5, bitorder="little").tobytes())]
    if mode in (ABSOLUTE, BF16, FP16):
        row = draw.integers(0, rng.choice([1, 2, 17, 256]), n).astype(np.uint8)
        raw = draw.bytes(n * (3 if mode == ABSOLUTE else 1))
        return code, fields + symbols(rng, row, False) + [("raw", raw)]
    table = alphabet(code)
    top = rng.choice([1, 4, 12, table.base.size])
    chosen = draw.integers(0, min(top, table.base.size), n)
    widths = table.width.take(chosen)
    raw = draw.integers(0, 2**32, n, dtype=np.uint64) & ((1 << widths.astype(np.uint64)) - np.uint64(1))
    if rng.random() < 0.5:
        # The largest number of each symbol: the last one of all stands for -2^31.
        raw = (np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1)
    over = table.base.take(chosen) + raw > 0xFFFFFFFF
    raw[over] = 0xFFFFFFFF - table.base.take(chosen)[over]
    if mode == DIFFERENCE:
        turned = (chosen - 1 + (((base >> 23) & 255).astype(np.int64) << code)) % 255 + 1
        chosen = np.where(chosen > 0, turned, 0)
    row = chosen.astype(np.uint8)
    fields += symbols(rng, pair(row) if mode >= INT8 and code == 4 else row, mode >= INT8 and code == 4)
    return code, [*fields, ("raw", pack_fields(raw.astype(np.uint32), widths))]


def symbols(rng, row, paired):
    """A row of symbols in a way that can write it."""
    if not row.size:
        return []
    ways = ["deflate"]
    if row.size <= MOST_BYTES:
        ways += ["rice", "rice", "paired" if paired else "listed"]
    way = rng.choice(ways)
    if way == "deflate":
        stream = deflated(rng, row.tobytes())
        return [("coder", b"\0"), ("length", varint(len(stream))), ("deflate", stream)]
    if way == "rice":
        k, centre = rng.choice([0, 3, 7, rng.randint(0, 7)]), rng.randrange(256)
        away = (row - np.uint8(centre)).view(np.int8).astype(np.int64)
        folded = np.where(away >= 0, 2 * away, -2 * away - 1)
        unary, remainders = rice_encode(folded, k)
        head = [("coder", bytes([8 + k])), ("centre", bytes([centre]))]
        return [*head, ("unary", unary), ("remainders", remainders)]
    levels = tuple(rng.randrange(len(LEVELS) - 1) for _ in range(16))
    if way == "paired":
        table = pack_fields(np.array(levels, np.uint32), 4)
        return [("coder", b"\2"), ("table", table), ("words", encode_rows([row], [paired_code(levels)]))]
    low = int(row.min())
    levels = tuple(rng.randrange(len(LEVELS) - 1) for _ in range(int(row.max()) - low + 1))
    table = pack_fields(np.array(levels, np.uint32), 4)
    words = encode_rows([row], [listed_code(low, levels)])
    head = [("coder", b"\1"), ("bounds", bytes([low, len(levels) - 1])), ("table", table)]
    return [*head, ("words", words)]


def disturb(rng: random.Random, message: Message, other: Message) -> Message:
    """The same with one field changed: to a limit, to nonsense, to another message's, or gone."""
    if not message.fields or rng.random() < 0.1:
        return replace(message, head=other_head(rng, message))
    place = rng.randrange(len(message.fields))
    name, data = message.fields[place]
    data = by_name(rng, name, data) if rng.random() < 0.6 else by_length(rng, name, data, other)
    fields = (*message.fields[:place], (name, data), *message.fields[place + 1 :])
    return replace(message, fields=fields)


def other_head(rng, message):
    """One bit of the modes or of the code changed."""
    head = bytearray(message.head)
    if message.packet and rng.random() < 0.5:
        head[0] ^= 1 << rng.randrange(4)
    else:
        head[(1 if message.packet else rng.choice([4, 5]))] ^= 1 << rng.randrange(8)
    return bytes(head)


def by_name(rng, name, data):
    """A value that is wrong for a field of this name, or at its limit."""
    if name in ("count", "length", "first", "span", "round"):
        return varint(rng.choice([*SIZES, rng.getrandbits(17), rng.getrandbits(8)]))
    if name in ("tag", "coder", "centre", "bounds", "inner"):
        return bytes([rng.randrange(256)]) + data[1:]
    if name == "deflate":
        return rng.choice([BOMB, data + data, b"\x00\x00\x00\xff\xff" * 50 + data])
    return rng.choice([bytes(len(data)), b"\xff" * len(data), rng.randbytes(len(data))])


def by_length(rng, name, data, other):
    """More or fewer bytes, one bit that is wrong, or what another message says there."""
    kind = rng.randrange(5)
    if kind == 0:
        return bytes([rng.choice([0, 255])]) * rng.choice([2 * len(data), len(data) + 5000])
    if kind == 1:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 2:
        return data + rng.randbytes(rng.randint(1, 40))
    if kind == 3:
        return rng.choice([theirs for field, theirs in other.fields if field == name] or [b""])
    changed = bytearray(data or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)
