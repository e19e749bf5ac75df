"""A decoder written from docs/wire.md alone, number by number, to show that the page is complete.

It imports nothing from the package and nothing beyond the standard library. Numbers are lists; a model is
`d` binary32 values as unsigned bits, so that NaN payloads and -0 can be compared.
"""

from __future__ import annotations

import hashlib
import struct
import zlib


def sha8(data):
    return hashlib.sha256(data).digest()[:8]


def layout_digest(names, sizes, prunable):
    text = ""
    for name, size, flag in zip(names, sizes, prunable, strict=True):
        text += f"{len(name.encode())}:{name},{size},{1 if flag else 0};"
    return sha8(text.encode())


def pack_bits(bits):
    out = bytearray((len(bits) + 7) // 8)
    for i, bit in enumerate(bits):
        out[i // 8] |= bit << (i % 8)
    return bytes(out)


class Input:
    def __init__(self, data, at):
        self.data, self.bit = data, 8 * at

    def align(self):
        self.bit = (self.bit + 7) // 8 * 8

    def field(self, width):
        value = 0
        for i in range(width):
            value |= (self.data[self.bit // 8] >> (self.bit % 8) & 1) << i
            self.bit += 1
        return value

    def byte(self):
        return self.field(8)

    def take(self, size):
        at = self.bit // 8
        assert at + size <= len(self.data)
        self.bit += 8 * size
        return self.data[at : at + size]

    def varint(self):
        value, shift = 0, 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def unary(self):
        zeros = 0
        while not self.field(1):
            zeros += 1
        return zeros


def decode(data, names, sizes, prunable, reference=None, predicted=None, identity=None):
    """(first coordinate, mask bits, value bits) of a frame or packet, over its coordinates in wire order.

    `reference` are value bits and `predicted` mask bits, both in the order of the layout. `identity` is
    (client's name, round, model digest), None where none may be stated.
    """
    order = [i for i, flag in enumerate(prunable) if flag] + [
        i for i, flag in enumerate(prunable) if not flag
    ]
    total = sum(sizes)
    limit = sum(size for size, flag in zip(sizes, prunable, strict=True) if flag)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    places = [starts[i] + j for i in order for j in range(sizes[i])]
    wire_reference = None if reference is None else [reference[p] for p in places]
    wire_predicted = None if predicted is None else [predicted[p] for p in places][:limit]

    digest = layout_digest(names, sizes, prunable)
    mode, code, mask_mode, relative, at = read_head(data, digest, reference, wire_predicted, identity)
    source, first, span = Input(data, at), 0, total
    if data[:3] != b"SAF":
        first, span = source.varint(), source.varint()

    inside, edge = [], 0
    for i in order:
        low, high = max(edge, first), min(edge + sizes[i], first + span)
        if low < high:
            inside.append((low, high))
        edge += sizes[i]
    segments = [(low, high) for low, high in inside if low < limit]
    mask = read_mask(source, mask_mode, first, span, segments, wire_predicted)
    kept = [first + i for i in range(span) if mask[i]]
    base = [wire_reference[i] for i in kept] if relative else None
    numbers = values(source, mode, code, kept, inside, base)
    source.align()
    assert source.bit == 8 * len(data)
    out = [0] * span
    for i, bits in zip(kept, numbers, strict=True):
        out[i - first] = bits
    return first, mask, out


def read_mask(source, mask_mode, first, span, segments, predicted):
    end = segments[-1][1] if segments else first
    held = [0] * (end - first) if mask_mode == 2 else predicted[first:end]
    changed = [0] * len(held)
    if mask_mode == 3:
        order = [i for i, bit in enumerate(held) if bit] + [i for i, bit in enumerate(held) if not bit]
        sizes = [sum(held)] + [sum(1 - held[i - first] for i in range(low, high)) for low, high in segments]
        for i, bit in zip(order, bitmap(source, [size for size in sizes if size]), strict=True):
            changed[i] = bit
    elif mask_mode > 0:
        changed = bitmap(source, [high - low for low, high in segments])
    return [a ^ b for a, b in zip(held, changed, strict=True)] + [1] * (first + span - end)


def read_head(data, digest, reference, wire_predicted, identity):
    """(value mode, code, mask mode, relative, where the rest begins), with everything checked."""
    frame = data[:4] == b"SAF\x02"
    modes, code = (data[4], data[5]) if frame else (data[1], data[0] & 15)
    mode, mask_mode, relative = modes & 15, modes >> 4 & 3, bool(modes & 64)
    digests = [digest]
    if relative:
        digests.append(sha8(struct.pack(f"<{len(reference)}I", *reference)))
    if mask_mode != 2:
        digests.append(sha8(pack_bits(wire_predicted)))
    assert bool(modes & 128) == (identity is not None)
    stated = b""
    if identity is not None:
        client, number, model = identity
        stated = sha8(client.encode()) + struct.pack("<I", number) + model
    context = b"" if frame else sha8(b"".join(digests))
    if stated and not frame:
        context = sha8(context + stated)
    check_at = 14 if frame else 3
    check = int.from_bytes(data[check_at : check_at + 4], "little")
    assert check == zlib.crc32(context + data[:check_at] + data[check_at + 4 :])
    if frame:
        expected = b"".join([*digests[1:], stated])
        assert data[6:14] == digests[0]
        assert data[18 : 18 + len(expected)] == expected
        return mode, code, mask_mode, relative, 18 + len(expected)
    assert data[0] >> 4 == 0xB
    assert data[2] == context[0]
    source = Input(data, 7)
    if stated:
        assert source.take(4) == stated[:4]
        assert source.varint() == identity[1]
    return mode, code, mask_mode, relative, source.bit // 8


def bitmap(source, sizes):
    packed, modelled, riced = [], [], []
    for number, size in enumerate(sizes):
        tag = source.byte()
        if tag == 31:
            packed.append(number)
        elif tag & 127 == 32:
            modelled.append((number, tag >> 7, source.byte(), source.byte()))
        else:
            riced.append((number, tag & 127, tag >> 7, source.varint()))
        assert size > 0
    bits = [None] * len(sizes)
    if packed:
        plain = Input(zlib.decompress(source.take(source.varint()), -15), 0)
        for number in packed:
            bits[number] = [plain.field(1) for _ in range(sizes[number])]
            plain.align()
    for number, complement, density, blanks in modelled:
        words = mask_words(density, blanks)
        row = Input(bytes(words_of(source, words, (sizes[number] + 7) // 8)), 0)
        bits[number] = [row.field(1) ^ complement for _ in range(sizes[number])]
    source.align()
    counts = sum(count for *_, count in riced)
    quotients = [source.unary() for _ in range(counts)]
    source.align()
    for number, k, complement, count in riced:
        bits[number] = [complement] * sizes[number]
        place = -1
        for _ in range(count):
            place += 1 + (quotients.pop(0) << k) + source.field(k)
            bits[number][place] = 1 - complement
    source.align()
    return [bit for segment in bits for bit in segment]


def code_words(weights):
    """Canonical Huffman: (length, word) -> symbol."""
    used = [s for s in range(len(weights)) if weights[s]]
    floor = max(1, sum(weights) // 2**15)
    while True:
        lengths = depths([max(weights[s], floor) for s in used])
        if max(lengths) <= 15:
            break
        floor *= 2
    words, word, before = {}, 0, 0
    for length, symbol in sorted(zip(lengths, used, strict=True)):
        word <<= length - before
        words[length, word] = symbol
        word, before = word + 1, length
    return words


def depths(weights):
    if len(weights) == 1:
        return [1]
    nodes = [(weight, number, [number]) for number, weight in enumerate(weights)]
    out = [0] * len(weights)
    made = len(weights)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[:2])
        a, b, *nodes = nodes
        for leaf in a[2] + b[2]:
            out[leaf] += 1
        nodes.append((a[0] + b[0], made, a[2] + b[2]))
        made += 1
    return out


def words_of(source, words, count):
    row = []
    for _ in range(count):
        length, word = 0, 0
        while (length, word) not in words:
            length, word = length + 1, word << 1 | source.field(1)
        row.append(words[length, word])
    return row


def mask_words(density, blanks):
    weights = []
    for byte in range(256):
        k = bin(byte).count("1")
        weights.append((64 - blanks) * density**k * (128 - density) ** (8 - k))
    weights[0] += blanks * 2**56
    return code_words(weights)


LEVELS = [65536, 46341, 32768, 23170, 16384, 11585, 8192, 5793, 4096, 2896, 1448, 724, 362, 181, 64, 0]


def table(source, count):
    levels = [source.field(4) for _ in range(count)]
    source.align()
    return [LEVELS[level] for level in levels]


def row_of_symbols(source, count):
    if count == 0:
        return []
    coder = source.byte()
    if coder == 0:
        row = list(zlib.decompress(source.take(source.varint()), -15))
        assert len(row) == count
        return row
    if coder in (1, 2):
        if coder == 1:
            first, more = source.byte(), source.byte()
            weights = [0] * first + table(source, more + 1)
        else:
            halves = table(source, 16)
            weights = [halves[byte % 16] * halves[byte // 16] for byte in range(256)]
        row = words_of(source, code_words(weights), count)
        source.align()
        return row
    k, centre = coder - 8, source.byte()
    quotients = [source.unary() for _ in range(count)]
    source.align()
    row = []
    for quotient in quotients:
        z = (quotient << k) + source.field(k)
        row.append((centre + (z // 2 if z % 2 == 0 else -(z + 1) // 2)) % 256)
    source.align()
    return row


def alphabet(code, s):
    if code == 4:
        return (s, 0) if s < 12 else ((12, 4), (28, 8), (284, 16), (65820, 32))[s - 12]
    if s < 1 << code:
        return s, 0
    v = (s >> code) - 1
    return ((1 << code) + s % (1 << code)) << v, v


def unzigzag(z):
    return z // 2 if z % 2 == 0 else -(z + 1) // 2


def as_float(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def as_bits(number):
    try:
        return struct.unpack("<I", struct.pack("<f", number))[0]
    except OverflowError:
        return 0x7F800000 if number > 0 else 0xFF800000


def sparse(source, kept, inside, base):
    each = [sum(low <= i < high for i in kept) for low, high in inside]
    sent = bitmap(source, [count for count in each if count])
    inner = source.byte()
    assert inner & 15 not in (7, 9)
    chosen = [i for i, bit in enumerate(sent) if bit]
    own = None if base is None else [base[i] for i in chosen]
    numbers = values(source, inner & 15, inner >> 4, [kept[i] for i in chosen], inside, own)
    out = [0] * len(kept) if base is None else list(base)
    for i, number in zip(chosen, numbers, strict=True):
        out[i] = number
    return out


def signs(source, kept, inside, base):
    scales = [as_float(source.field(16) << 16) for _ in inside]
    out = []
    for i, place in enumerate(kept):
        scale = next(x for x, (low, high) in zip(scales, inside, strict=True) if low <= place < high)
        number = -scale if source.field(1) else scale
        out.append(as_bits(number if base is None else as_float(base[i]) + number))
    return out


def values(source, mode, code, kept, inside, base):
    n = len(kept)
    if mode in OTHERS:
        return OTHERS[mode](source, kept, inside, base)
    scales = []
    if mode in (4, 5):
        scales = [as_float(source.field(16) << 16) for _ in inside]
    elif mode == 6:
        scales = [as_float(source.field(16) << 16)]
    if mode >= 4 and code == 4:
        symbols = [half for byte in row_of_symbols(source, (n + 1) // 2) for half in (byte & 15, byte >> 4)][
            :n
        ]
    else:
        symbols = row_of_symbols(source, n)
    out = []
    negative = False
    for i, s in enumerate(symbols):
        if mode == 0:
            field = source.field(24)
            out.append((field & 1) << 31 | s << 23 | field >> 1)
            continue
        if mode == 1:
            if s:
                s = (s - 1 - ((base[i] >> 23) % 256 << code)) % 255 + 1
            start, width = alphabet(code, s)
            ordered = base[i] + 2**31 if base[i] < 2**31 else 2**32 - 1 - base[i]
            ordered = (ordered + unzigzag(start + source.field(width))) % 2**32
            out.append(ordered - 2**31 if ordered >= 2**31 else 2**32 - 1 - ordered)
            continue
        if mode == 2:
            field = source.field(8)
            number = as_float((field & 1) << 31 | s << 23 | field >> 1 << 16)
        elif mode == 3:
            turned = s << 8 | source.field(8)
            number = struct.unpack("<e", struct.pack("<H", turned >> 1 | (turned & 1) << 15))[0]
        else:
            start, width = alphabet(code, s)
            scale = scales[0]
            if mode < 6:
                scale = next(
                    x for x, (low, high) in zip(scales, inside, strict=True) if low <= kept[i] < high
                )
            whole = unzigzag(start + source.field(width))
            negative ^= whole < 0
            number = (-abs(whole) if negative else abs(whole)) * scale
        out.append(as_bits(number if base is None else as_float(base[i]) + number))
    return out


OTHERS = {7: lambda source, kept, inside, base: [0] * len(kept), 8: signs, 9: sparse}
