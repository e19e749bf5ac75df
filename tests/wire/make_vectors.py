"""Add to tests/vectors/ what is missing there: `python -m wire.make_vectors` in tests/.

Files that exist are never written again: they show that what was once written can still be read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from safari.wire import Identity, Shared, decode, decode_packet, encode, encode_mask, packets
from wire.samples import (
    EXACT_MODES,
    EXTREMES,
    LOSSY_MODES,
    MASK_MODES,
    NEW_MODES,
    lossy,
    small_layout,
    small_model,
    wide_layout,
    wide_model,
)

FOLDER = Path(__file__).parents[1] / "vectors"
AS_PACKETS = {
    "calm-absolute-coded",
    "calm-difference-flips",
    "calm-int8-flips-relative",
    "calm-step-coded",
    "two-sizes-absolute-coded",
    "named-difference-flips",
    "calm-sign-flips-relative",
    "calm-threshold-flips-relative",
    "calm-unbiased-flips-relative",
}
# What the vectors state whose names begin so.
IDENTITIES = {"named": Identity("Gerät 7", 300, bytes(range(8)))}


def cases():
    """Name, vector, mask, and the arguments that say how to encode them."""
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    wild = vector.copy()
    wild[np.flatnonzero(mask)[: EXTREMES.size]] = EXTREMES.view(np.float32)
    two_sizes = np.where(np.arange(layout.d) % 3, 1e-20, 1.0).astype(np.float32)
    yield "two-sizes-absolute-coded", two_sizes, two_sizes > 0, "absolute", Shared(layout), "coded"
    for name, numbers in (("calm", vector), ("wild", wild)):
        for values in EXACT_MODES:
            for mode in MASK_MODES:
                guess = {"known": mask, "coded": None}.get(mode, predicted)
                shared = Shared(layout, reference if values == "difference" else None, guess)
                yield f"{name}-{values}-{mode}", numbers, mask, values, shared, mode
    shared = Shared(layout, reference, predicted)
    yield "named-difference-flips", vector, mask, "difference", shared, "flips"
    wide = wide_layout()
    for name in ("blanks", "stripes"):
        numbers, kept, base = wide_model(wide, name == "stripes")
        yield f"{name}-step-coded", numbers, kept, "step", Shared(wide, base), "coded"
    for values in (*LOSSY_MODES, *NEW_MODES):
        yield f"calm-{values}-coded", vector, mask, values, Shared(layout), "coded"
        shared = Shared(layout, reference, predicted)
        yield f"calm-{values}-flips-relative", vector, mask, values, shared, "flips"


def add_mask(files):
    """A mask alone."""
    layout = small_layout()
    _, mask, _, predicted = small_model(layout)
    name = "mask-none-swaps.bin"
    if name not in files:
        (FOLDER / name).write_bytes(encode_mask(mask, layout, predicted, mask_mode="swaps"))
        needs = {"layout": "small", "reference": False, "predicted": digits(predicted), "first": None}
        files[name] = needs | {"vector": hexadecimal(np.zeros(layout.d)), "mask": digits(mask)}


def hexadecimal(vector):
    return vector.astype("<f4").tobytes().hex()


def digits(mask):
    return "".join("01"[bit] for bit in mask.astype(int))


def main():
    index = json.loads((FOLDER / "index.json").read_text())
    files = index["files"]
    layouts = {
        name: {"names": layout.names, "sizes": layout.sizes, "prunable": layout.prunable}
        | {"reference": hexadecimal(model[2])}
        for name, layout, model in (
            ("small", small_layout(), small_model(small_layout())),
            ("blanks", wide_layout(), wide_model(wide_layout())),
            ("stripes", wide_layout(), wide_model(wide_layout(), True)),
        )
    }
    assert index["layouts"] == json.loads(json.dumps(layouts))
    for name, vector, mask, values, shared, mask_mode in cases():
        if f"{name}.bin" in files:
            continue
        needs = {
            "layout": name.split("-")[0] if name.split("-")[0] in layouts else "small",
            "reference": shared.reference is not None,
            "predicted": None if shared.predicted_mask is None else digits(shared.predicted_mask),
        }
        identity = IDENTITIES.get(name.split("-")[0])
        if identity is not None:
            needs["identity"] = [identity.client, identity.round, identity.model.hex()]
        choices = {"values": values, "mask_mode": mask_mode, "identity": identity}
        frame = encode(vector, mask, shared, lossy=lossy(), **choices)
        (FOLDER / f"{name}.bin").write_bytes(frame)
        decoded = decode(frame, shared, expect=identity)
        says = {"first": None, "vector": hexadecimal(decoded.vector), "mask": digits(decoded.mask)}
        files[f"{name}.bin"] = needs | says
        if name in AS_PACKETS:
            for number, data in enumerate(packets(vector, mask, shared, limit=250, lossy=lossy(), **choices)):
                (FOLDER / f"{name}.{number}.bin").write_bytes(data)
                part = decode_packet(data, shared, expect=identity)
                says = {"first": part.first, "vector": hexadecimal(part.vector), "mask": digits(part.mask)}
                files[f"{name}.{number}.bin"] = needs | says
    add_mask(files)
    (FOLDER / "index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
