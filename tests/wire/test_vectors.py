"""Golden files: both the library and a decoder written from the page alone read what was once written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from safari.wire import (
    Identity,
    Shared,
    WireLayout,
    decode,
    decode_mask,
    decode_packet,
    encode,
    inspect,
    packets,
)
from safari.wire.bitmap import MAX_RICE, MODELLED, PACKED
from safari.wire.symbols import DEFLATED, LISTED, PAIRED, RICED
from safari.wire.values import CODINGS
from wire import plain_decoder
from wire.samples import small_layout, small_model

FOLDER = Path(__file__).parents[1] / "vectors"
INDEX = json.loads((FOLDER / "index.json").read_text())


def layout_of(case):
    table = INDEX["layouts"][case["layout"]]
    return WireLayout(table["names"], table["sizes"], table["prunable"])


def reference_of(case):
    return bits_of(INDEX["layouts"][case["layout"]]["reference"]) if case["reference"] else None


def bits_of(text):
    return np.frombuffer(bytes.fromhex(text), "<u4").astype(np.uint32)


def mask_of(text):
    return np.array([digit == "1" for digit in text], bool)


def shared_of(case):
    return Shared(
        layout_of(case),
        reference_of(case).view(np.float32) if case["reference"] else None,
        None if case["predicted"] is None else mask_of(case["predicted"]),
    )


def identity_of(case):
    if "identity" not in case:
        return None
    client, number, model = case["identity"]
    return Identity(client, number, bytes.fromhex(model))


@pytest.mark.parametrize("name", INDEX["files"])
def test_library_reads_what_was_written(name):
    case = INDEX["files"][name]
    data = (FOLDER / name).read_bytes()
    if "none" in name:
        assert decode_mask(data, shared_of(case)).tolist() == mask_of(case["mask"]).tolist()
        return
    if case["first"] is None:
        found = decode(data, shared_of(case), expect=identity_of(case))
    else:
        found = decode_packet(data, shared_of(case), expect=identity_of(case))
        assert found.first == case["first"]
    assert found.mask.tolist() == mask_of(case["mask"]).tolist()
    assert found.vector.view(np.uint32).tolist() == bits_of(case["vector"]).tolist()


@pytest.mark.parametrize("name", INDEX["files"])
def test_page_is_enough_to_read_what_was_written(name):
    case = INDEX["files"][name]
    layout, identity = layout_of(case), identity_of(case)
    first, mask, bits = plain_decoder.decode(
        (FOLDER / name).read_bytes(),
        layout.names,
        layout.sizes,
        layout.prunable,
        reference_of(case).tolist() if case["reference"] else None,
        None if case["predicted"] is None else mask_of(case["predicted"]).astype(int).tolist(),
        identity and (identity.client, identity.round, identity.model),
    )
    expected_bits, expected_mask = bits_of(case["vector"]), mask_of(case["mask"])
    if case["first"] is None:
        expected_bits, expected_mask = layout.to_wire(expected_bits), layout.to_wire(expected_mask)
    assert first == (case["first"] or 0)
    assert mask == expected_mask.astype(int).tolist()
    assert bits == expected_bits.tolist()


def test_golden_files_show_every_mode_and_coder():
    seen = {
        name: inspect((FOLDER / name).read_bytes(), shared_of(case), expect=identity_of(case))
        for name, case in INDEX["files"].items()
    }
    assert {s.modes.identified for s in seen.values()} == {False, True}
    assert {s.modes.values for s in seen.values()} == set(CODINGS)
    assert {s.modes.mask for s in seen.values()} == {"known", "flips", "coded", "swaps"}
    assert {s.modes.relative for s in seen.values() if s.modes.values == "step"} == {False, True}
    tags = set()
    coders = set()
    for name, s in seen.items():
        data = (FOLDER / name).read_bytes()
        if s.modes.mask != "known":
            tags.add(data[s.parts["head"]] & 127)
        if s.parts["symbols"] and s.modes.values != "sparse":
            coders.add(min(data[s.parts["head"] + s.parts["mask"] + s.parts["scales"]], RICED))
    assert {PACKED, MODELLED} <= tags
    assert min(tags) <= MAX_RICE
    assert coders == {DEFLATED, LISTED, PAIRED, RICED}


def test_examples_on_the_page_run():
    page = (FOLDER.parents[1] / "docs" / "wire.md").read_text()
    for example in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(example, "docs/wire.md", "exec"), {})


def test_plain_decoder_reads_fresh_frames_and_packets():
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout, seed=5, density=0.6)
    shared = Shared(layout, reference, predicted)
    wire_bits = layout.to_wire(vector).view(np.uint32)
    arguments = (layout.names, layout.sizes, layout.prunable, reference.view(np.uint32).tolist())
    for data in [encode(vector, mask, shared), *packets(vector, mask, shared, limit=200)]:
        first, kept, bits = plain_decoder.decode(data, *arguments, predicted.astype(int).tolist())
        assert bits == wire_bits[first : first + len(bits)].tolist()
        assert kept == layout.to_wire(mask)[first : first + len(bits)].astype(int).tolist()
