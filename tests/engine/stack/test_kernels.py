"""The Triton kernels: really on a GPU, and interpreted on the CPU where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import safari
from engine.kit import play, world_of
from engine.own_parts import PICTURES
from safari.engine.stack.trial import CannotStack

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_interpreted_in_float32():
    paths = [str(Path(safari.__file__).parents[1]), str(HERE.parents[1])]
    done = subprocess.run(
        [sys.executable, str(HERE / "kernel_check.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all right\n"


@pytest.mark.gpu
@needs_triton
def test_conv_norm_on_a_gpu_in_bfloat16():
    """A result of bfloat16 is off by 2^-9 at most; through a norm and its gradient that becomes some 1%."""
    from engine.stack.kernel_check import CASES, WIDE_CASES, conv_norm_errors

    for name, case in (CASES | WIDE_CASES).items():
        errors = conv_norm_errors(case, "cuda", torch.bfloat16)
        for what, error in errors.items():
            # The running statistics are taken from sums in float32, before anything is rounded.
            assert error < (1e-4 if what in ("mean", "var") else 0.02), (
                f"{name}: {what} is off by {error:.2g}"
            )


@pytest.mark.gpu
@needs_triton
def test_every_tile_on_a_gpu_in_bfloat16():
    from engine.stack.kernel_check import tile_errors

    for what, error in tile_errors("cuda", torch.bfloat16).items():
        assert error < 0.01, f"{what} is off by {error:.2g}"


@pytest.mark.gpu
@needs_triton
def test_a_shared_convolution_on_a_gpu_in_bfloat16():
    from engine.stack.kernel_check import CASES, shared_conv_errors

    for name, case in CASES.items():
        for what, error in shared_conv_errors(case, "cuda", torch.bfloat16).items():
            assert error < 0.02, f"{name}: {what} is off by {error:.2g}"


@pytest.mark.gpu
@needs_triton
def test_adam_on_a_gpu():
    from engine.stack.kernel_check import adam_errors

    assert max(adam_errors("cuda").values()) < 1e-6


CONFIG: dict[str, Any] = {
    "rounds": 3,
    "clients": 6,
    "arms": ["safari"],
    "model": {"name": "cnn", "width": 16},
    "local": {"steps": 3, "batch": 8, "augment": "crop-flip", "optimiser": "sgd", "lr": 0.1},
    "uplink": {"name": "bernoulli", "p": 0.7},
    "engine": {"device": "cuda", "compile": "always"},
}
FATE = ("trained", "arrived", "missing", "stand_ins", "density")
DROPOUT = """
from torch import nn
def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, classes))
"""


@pytest.fixture
def exact_products():
    """Without TF32, which has 10 bits and would hide what is compared."""
    places = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = False
    yield
    for place, value in zip(places, before, strict=True):
        place.allow_tf32 = value


def resnet(folder: Path) -> dict[str, Any]:
    """A ResNet on pictures of its own; sgd, for Adam makes steps of rounding."""
    (folder / "mine.py").write_text(PICTURES)
    return {
        **CONFIG,
        "clients": 4,
        "data": {"name": f"{folder}/mine.py:pictures"},
        "model": {"name": "resnet20", "width": 16},
        "local": {**CONFIG["local"], "lr": 0.02},
    }


def apart(config: dict[str, Any], **engine: Any) -> list[float]:
    """How far the vectorised models are from the reference's, round by round; fates must be the same."""
    ours = {**config, "engine": {**config["engine"], "name": "vectorised", **engine}}
    theirs = {**config, "engine": {**config["engine"], "name": "reference"}}
    found = []
    for (_, a, mine), (_, b, yours) in zip(play(ours), play(theirs), strict=True):
        assert {key: mine[key] for key in FATE} == {key: yours[key] for key in FATE}
        found.append(float((a.model - b.model).norm() / b.model.norm()))
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("pruner", ["mag", "snip", "grasp"])
def test_the_engines_agree_on_a_gpu_in_float32(pruner, graph):
    assert max(apart({**CONFIG, "pruning": {"pruner": pruner}}, graph=graph)) < 1e-4


UNEVEN: dict[str, Any] = {
    **CONFIG,
    "partition": {"name": "dirichlet", "alpha": 0.3, "minimum": 10},
    "local": {"epochs": 0.4, "batch": 8, "augment": "crop-flip", "optimiser": "sgd", "lr": 0.1},
}


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("client", ["fedavg", "mime", "scaffold", "bvr-l-sgd", "fednova"])
def test_the_engines_agree_on_a_gpu_where_clients_make_different_numbers_of_steps(client, schedule):
    from safari.engine.vectorised import Vectorised

    config = {
        **UNEVEN,
        "client": {"name": client},
        "local": {**UNEVEN["local"], "schedule": schedule, "lr": 0.02 if client == "mime" else 0.1},
    }
    world = world_of(config)
    assert len({world.steps(k) for k in range(6)}) > 2, "the clients were even"
    assert Vectorised(world)._step_by_step
    assert max(apart(config)) < 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
def test_adam_counts_on_in_a_replayed_step():
    """Few and small steps: Adam makes whole steps out of rounding where a gradient is near 0."""
    local = {**UNEVEN["local"], "optimiser": "adam", "lr": 1e-3}
    assert max(apart({**UNEVEN, "local": local})) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
def test_dropout_draws_the_same_numbers_in_replayed_steps(tmp_path):
    (tmp_path / "mine.py").write_text(DROPOUT)
    assert max(apart({**UNEVEN, "model": {"name": f"{tmp_path}/mine.py:net"}})) < 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
def test_dropout_draws_the_same_numbers_on_a_gpu(tmp_path):
    (tmp_path / "mine.py").write_text(DROPOUT)
    config = {**CONFIG, "model": {"name": f"{tmp_path}/mine.py:net"}}
    from safari.engine.vectorised import Vectorised

    assert Vectorised(world_of(config)).stack.way == "layers"
    assert max(apart(config)) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_the_engines_agree_on_a_gpu_in_bfloat16(tmp_path, graph):
    """A ResNet through the fused kernels: 8 bits, three rounds."""
    config = resnet(tmp_path)
    from safari.engine.vectorised import Vectorised

    engine = Vectorised(
        world_of({**config, "engine": {**CONFIG["engine"], "precision": "bfloat16", "graph": graph}})
    )
    assert engine.note == ""
    errors = apart(config, precision="bfloat16", graph=graph)
    assert max(errors) < 0.05
    assert min(errors) > 1e-6, "that was not bfloat16"


@pytest.mark.gpu
def test_a_resnet_that_is_not_stacked_layer_by_layer_trains_in_bfloat16_on_a_gpu(tmp_path, monkeypatch):
    """Under vmap torch 2.11 has no gradient of a batch norm in bfloat16 there."""

    def cannot(module, training, fuse=False):
        raise CannotStack("no")

    monkeypatch.setattr("safari.engine.stack.forward.by_layers", cannot)
    config = resnet(tmp_path)
    assert max(apart(config, precision="bfloat16")) < 0.05


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("pruner", ["snip", "grasp"])
def test_masks_in_bfloat16_are_near_those_in_float32(tmp_path, pruner, graph):
    """Fewer bits move the weights whose scores lie at the border from one side to the other, and no more."""
    from safari.engine.vectorised import Vectorised

    (tmp_path / "mine.py").write_text(PICTURES)
    config = {
        **CONFIG,
        "data": {"name": f"{tmp_path}/mine.py:pictures"},
        "model": {"name": "resnet20", "width": 16},
        "pruning": {"pruner": pruner, "batch": 20},
    }
    found = []
    for precision in ("float32", "bfloat16"):
        engine = {**CONFIG["engine"], "precision": precision, "graph": graph}
        prepared = Vectorised(world_of({**config, "engine": engine}))
        assert prepared.note == ""
        world = prepared.world
        policy = world.first_masks(world.start, 0)
        masks, again = (prepared._masks(policy, world.start, range(6), 0)[0] for _ in range(2))
        # A GPU adds in any order it likes: a few weights at the border may change sides.
        same = (masks == again).float().mean()
        assert same > 0.999, "a recording gave something else than the pass that it recorded"
        found.append(masks[:, world.layout.prunable])
    exact, rough = found
    assert torch.equal(exact.sum(1), rough.sum(1))
    shared = (exact & rough).sum(1) / exact.sum(1)
    assert float(shared.min()) > 0.8, shared.tolist()


@pytest.mark.gpu
def test_data_on_the_host_give_the_same_on_a_gpu(monkeypatch):
    here = [after.model for _, after, _ in play(CONFIG)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    assert not world_of(CONFIG).data.train_x.is_cuda
    there = [after.model for _, after, _ in play(CONFIG)]
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
