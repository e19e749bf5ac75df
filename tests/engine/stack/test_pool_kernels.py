"""Convolution and ReLU, with or without max pooling, as one step; SGD and augmentation; on a GPU.

`test_kernels` runs them interpreted, with the others.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from engine.kit import world_of
from engine.stack.test_kernels import CONFIG, apart, resnet
from safari.engine.stack.flat import Flat
from safari.engine.stack.forward import by_layers
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.train import train_stacked
from safari.models import Layout
from safari.training import CLIENTS, ClientSide, Known

mime = CLIENTS["mime"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def test_conv_pool_in_bfloat16():
    """Whole numbers to the last bit, ties and zeros included; others up to the rounding of bfloat16."""
    from engine.stack.kernel_check import check_conv_pool

    check_conv_pool("cuda", torch.bfloat16, 0.02)


def test_conv_relu_in_bfloat16():
    """Up to the rounding of bfloat16."""
    from engine.stack.kernel_check import check_conv_relu

    check_conv_relu("cuda", torch.bfloat16, 0.02)


def test_what_is_no_number_stays_none():
    from engine.stack.kernel_check import check_nan

    check_nan("cuda", torch.bfloat16)


@pytest.mark.parametrize("name", ["fedawe_cnn", "cnn", "plain"])
def test_a_whole_net_through_the_fused_steps(name):
    from engine.stack.kernel_check import check_fused_net

    with torch.autocast("cuda", torch.bfloat16):
        output, gradient = check_fused_net("cuda", name)
    # Ties and ReLUs near 0 send gradients elsewhere in either way.
    assert output < 0.02
    assert gradient < 0.2


def test_sgd():
    from engine.stack.kernel_check import sgd_error

    for size, rate in ((3000, 0.1), (3001, 0.1), (3000, torch.tensor(0.1))):
        assert sgd_error("cuda", size, rate) < 1e-6


def test_scaled_sgd():
    from engine.stack.kernel_check import scaled_sgd_error

    for rate in (0.1, torch.tensor(0.1)):
        assert scaled_sgd_error("cuda", rate) < 1e-6


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_mimes_direction_in_the_step_is_that_of_a_pass_of_its_own(lr):
    """Moments as in the middle of a run: at the start all of them are 0, and steps are signs of rounding."""
    draw = torch.Generator().manual_seed(8)
    net = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).cuda()
    layout, cuda = Layout.of(net), torch.device("cuda")
    masks = ((torch.rand(3, layout.size, generator=draw) < 0.5) | ~layout.prunable).cuda()
    moments = torch.randn(layout.parameters, generator=draw), torch.rand(layout.parameters, generator=draw)
    down = {"momentum": 0.1 * moments[0].cuda(), "second": 0.01 * moments[1].cuda()}
    known = Known(torch.ones(3, 3, device=cuda), torch.ones(3, device=cuda))
    batches = [
        (torch.randn(12, 40, generator=draw).cuda(), torch.arange(12, device=cuda) % 3) for _ in range(4)
    ]
    found = [
        train_stacked(
            by_layers(net, True), Flat(layout, 3), layout.read(net), masks, batches, 4, optimiser="sgd",
            lr=lr.cuda() if isinstance(lr, torch.Tensor) else lr, random_state=RandomState(range(3), cuda),
            algorithm=algorithm, side=ClientSide({}, down, known), compiled=True,
        ).models
        for algorithm in (mime(), replace(mime(), scaled=None))
    ]  # fmt: skip
    assert not torch.equal(found[1], Flat(layout, 3).from_rows(layout.read(net).masked_fill(~masks, 0.0)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_crops_and_flips():
    from engine.stack.kernel_check import check_crops

    check_crops("cuda")


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "inverse-sqrt"])
def test_the_engines_agree(tmp_path, graph, schedule):
    """With a schedule the learning rate of a recorded round is a tensor, which the kernel reads."""
    config = resnet(tmp_path)
    local = {**config["local"], "schedule": schedule}
    config |= {"model": {"name": "fedawe_cnn"}, "local": local}
    from safari.engine.vectorised import Vectorised

    engine = Vectorised(
        world_of({**config, "engine": {**CONFIG["engine"], "precision": "bfloat16", "graph": graph}})
    )
    assert engine.note == ""
    assert engine._steps._crops, "samples are not picked and cropped by the kernel"
    errors = apart(config, precision="bfloat16", graph=graph)
    assert max(errors) < 0.05
    assert min(errors) > 1e-6, "that was not bfloat16"


def test_data_on_the_device_are_known_to_be_there():
    """Else every round's samples would be picked, and copied to the recording, as if they lay on the host."""
    world = world_of(CONFIG)
    assert world.data.train_x.device == world.device == torch.zeros(1).to(world.device).device
