"""Convolution, ReLU and max pooling as one step, SGD and augmentation, on a GPU.

`test_kernels` runs them interpreted, with the others.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from engine.kit import world_of
from engine.stack.test_kernels import CONFIG, apart, resnet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def test_conv_pool_in_bfloat16():
    """Whole numbers to the last bit, ties and zeros included; others up to the rounding of bfloat16."""
    from engine.stack.kernel_check import check_conv_pool

    check_conv_pool("cuda", torch.bfloat16, 0.02)


def test_a_whole_net_through_the_fused_steps():
    from engine.stack.kernel_check import check_fused_net

    with torch.autocast("cuda", torch.bfloat16):
        output, gradient = check_fused_net("cuda")
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


def test_crops_and_flips():
    from engine.stack.kernel_check import check_crops

    check_crops("cuda")


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("client", "schedule"), [("fedavg", "constant"), ("fedavg", "inverse-sqrt"), ("mime", "inverse-sqrt")]
)
def test_the_engines_agree(tmp_path, graph, client, schedule):
    """With a schedule the learning rate of a recorded round is a tensor, which the kernel reads."""
    config = resnet(tmp_path)
    local = {**config["local"], "schedule": schedule}
    config |= {"model": {"name": "fedawe_cnn"}, "local": local, "client": {"name": client}}
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
