from __future__ import annotations

import numpy as np
import pytest
import torch

import safari
from safari.config import parse
from safari.engine.assembly import assemble
from safari.engine.codec import RoundCodec
from safari.engine.parts import load_data
from safari.engine.sample import next_upload
from safari.pruning import Masks
from safari.rounds.beside import wire_layout
from safari.runs import RunFolder
from safari.wire import Shared, decode, encode

SMALL = {
    "rounds": 5,
    "clients": 5,
    "arms": ["safari"],
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"steps": 2, "batch": 8},
}


def world_of(**changes):
    config = parse(SMALL | changes)
    return assemble(config, 0, load_data(config))


def records(folder, **changes):
    safari.run(SMALL | changes, folder)
    return RunFolder.open(folder).trials()[0].records()


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(
    ("every", "counted"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (3, [1, 4, 5]), (0, [])]
)
def test_bytes_are_counted_in_these_rounds_and_otherwise_said_to_be_unknown(tmp_path, engine, every, counted):
    lines = records(tmp_path / "run", wire={"every": every}, engine={"name": engine})
    assert [line["round"] for line in lines if line["bytes"]["down"] is not None] == counted
    assert all(line["bytes"].keys() == {"up", "down"} for line in lines)
    for line in lines:
        if line["round"] not in counted:
            assert line["modes"] is None
        else:
            assert sum(line["modes"].values()) == len(line["arrived"])
            assert set(line["modes"]) <= {"absolute, mask known", "difference, mask known"}


def test_an_announced_mask_travels_as_what_changed():
    world = world_of()
    prunable = world.layout.prunable
    mask = (torch.rand(len(world.start), generator=torch.Generator().manual_seed(0)) < 0.2) | ~prunable
    other = mask.clone()
    other[prunable.nonzero()[::40, 0]] ^= True
    masks = Masks(shared=mask, announced=True)

    def down(world, held):
        return RoundCodec(world, world.start, 0, masks, held=held).sizes()["down"]

    whole, same, few = (down(world, held) for held in (None, mask, other))
    model = (world.start * mask).numpy()
    known = Shared(wire_layout(world.layout), None, mask.numpy())
    assert same == len(encode(model, mask.numpy(), known, values="absolute"))
    assert same < few < 0.98 * whole
    # A client that may have missed the last one, or was not asked, needs all of it.
    for changes in ({"downlink": {"name": "bernoulli", "p": 0.9}}, {"cohort": 3}):
        assert down(world_of(**changes), mask) == whole


def test_the_count_is_the_length_of_the_frames(tmp_path):
    world = world_of()
    x = world.start
    mail = RoundCodec(world, x, 0)
    mask = world.mask(x, 0, 0)
    models = [x * mask * scale for scale in (1.0, 1.5)]
    sent = torch.stack(models)
    assert torch.equal(mail.up([0, 1], sent, mask[None]), sent)
    lengths = [len(encode(m.numpy(), mask.numpy(), mail.shared)) for m in models]
    dense = encode(x.numpy(), np.ones(len(x), dtype=bool), wire_layout(world.layout), values="absolute")
    assert mail.sizes() == {"up": sum(lengths) / 2, "down": len(dense)}


def test_counting_changes_nothing_else(tmp_path):
    counted = records(tmp_path / "counted", wire={"every": 1})
    plain = records(tmp_path / "plain", wire={"every": 0})
    uncounted = {"bytes": None, "modes": None}
    assert [{**line, **uncounted} for line in counted] == [{**line, **uncounted} for line in plain]


@pytest.mark.parametrize("pruner", ["mag", "snip"])
def test_an_exact_upload_comes_back_bit_for_bit(pruner):
    world = world_of(pruning={"pruner": pruner})
    x = world.start
    mask = world.mask(x, 2, 0)
    mail = RoundCodec(world, x, 0)
    model = x * mask + 0.01 * mask
    frame = encode(model.numpy(), mask.numpy(), mail.shared)
    got = decode(frame, mail.shared)
    assert np.array_equal(got.vector.view(np.uint32), model.numpy().view(np.uint32))
    assert np.array_equal(got.mask, mask.numpy())
    # Without data both ends know the mask; with data the client's own travels.
    assert (got.info.modes.mask == "known") == (pruner == "mag")


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(("values", "most"), [("bf16", 4e-3), ("int8", 2e-2), ("qsgd", 1.0), ("step", 1.0)])
def test_the_server_gets_what_a_lossy_frame_holds(engine, values, most):
    world = world_of(wire={"values": values, "every": 0})
    x = world.start
    mask = world.mask(x, 0, 0)
    generator = torch.Generator().manual_seed(0)
    model = (x + 0.01 * torch.randn(x.shape, generator=generator)) * mask
    got = RoundCodec(world, x, 0).up([0], model[None], mask[None])[0]
    off = float((got - model).norm() / (model - x * mask).norm())
    assert 0 < off < most
    assert not got[~mask].any()
    assert torch.equal(RoundCodec(world, x, 0).up([0], model[None], mask[None])[0], got)


def test_lossy_uploads_change_the_run_and_two_runs_are_equal(tmp_path):
    step = {"values": "step", "every": 1}
    first, second = (records(tmp_path / name, wire=step) for name in ("a", "b"))
    exact = records(tmp_path / "exact", wire={"every": 1})
    assert first == second
    assert [line["loss"] for line in first] != [line["loss"] for line in exact]
    assert all(f["bytes"]["up"] < e["bytes"]["up"] / 2 for f, e in zip(first, exact, strict=True))


def test_an_update_with_nan_is_left_for_the_server_to_refuse():
    world = world_of(wire={"values": "int8"})
    broken = torch.full_like(world.start, float("nan"))
    fine = world.start + 1e-3 * world.start.sign()
    masks = torch.ones(1, len(broken), dtype=torch.bool)
    mail = RoundCodec(world, world.start, 0)
    got = mail.up([0, 1], torch.stack([broken, fine]), masks)
    assert got[0].isnan().all()
    assert (got[1] - fine).abs().max() < 1e-4
    frame = encode(fine.numpy(), masks[0].numpy(), mail.shared, values="int8")
    assert mail.sizes()["up"] == len(frame)


def test_the_next_upload_is_what_the_next_round_sends(tmp_path):
    safari.run(SMALL | {"uplink": {"name": "perfect"}}, tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    upload = next_upload(run, "safari", client=3)
    assert not upload.vector[~upload.mask].any()
    assert np.array_equal(upload.shared.reference, run.trials()[0].load().tensors["model"].numpy())
    assert [int(np.prod(shape)) for shape in upload.shapes] == list(upload.shared.layout.sizes)
    for wrong, text in (
        ({"arm": "x"}, "arm must be one of safari; got 'x'"),
        ({"client": 5}, "between 0 and 4"),
    ):
        with pytest.raises(safari.SafariError, match=text):
            next_upload(run, **wrong)
