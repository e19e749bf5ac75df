"""Models that arrive in part: what each client algorithm's server half makes of numbers that came from nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from safari.aggregation import RULES, Server
from safari.federation.algorithm import half_step
from safari.training import CLIENTS

CLIENT_COUNT, SIZE, PARAMETERS = 4, 9, 7
# Every algorithm with a server half: what it reads off the models, number by number. What a client sends beside its
# model, and what the server knows of clients, does not depend on which numbers of the models came.
READ_OFF: dict[str, tuple[str, ...]] = {
    "scaffold": (),
    "mime": ("momentum", "second"),
    "feddyn": (),
    "fednova": (),
    "dane": (),
    "bvr-l-sgd": (),
    "fedpbc": (),
    "fedawe": (),
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in READ_OFF),
    ("scaffold", {"memory": "stand-in"}),
    ("scaffold", {"memory": "arrived"}),
    ("mime", {"scale": "clients"}),
]


def test_the_table_has_every_server_half() -> None:
    assert READ_OFF.keys() == {name for name, make in CLIENTS.items() if make().server is not None}


def step(server: Server, name: str, seed: int, lost: Tensor | None = None) -> Server:
    """A round in which clients 0, 1 and 3 arrive; without the numbers of `lost`."""
    draw = torch.Generator().manual_seed(seed)
    ids = [0, 1, 3]
    models = torch.randn(len(ids), SIZE, generator=draw)
    up = {
        key: torch.rand(len(ids), count, generator=draw) + 0.5
        for key, count in CLIENTS[name]().sends(PARAMETERS).items()
    }
    came = None if lost is None else (~lost).expand(len(ids), SIZE)
    return server.step_stacked(ids, models, came=came, up=up, lr=0.1)[0]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    gone=st.lists(st.booleans(), min_size=SIZE, max_size=SIZE).filter(lambda gone: not all(gone)),
    seed=st.integers(0, 99),
)
def test_a_number_that_nobody_sent_does_not_count_as_a_gradient_of_0(
    name: str, options: dict[str, Any], gone: list[bool], seed: int
) -> None:
    half = CLIENTS[name](**options).server
    assert half is not None
    model = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    algorithm = half_step(half, CLIENT_COUNT, PARAMETERS)
    server = Server.start(model, CLIENT_COUNT, RULES["drop"](), parameters=PARAMETERS, algorithm=algorithm)
    server = step(step(server, name, seed), name, seed + 1)
    lost = torch.tensor(gone)
    found, whole = step(server, name, seed + 2, lost), step(server, name, seed + 2)
    assert torch.equal(found.model[lost], server.model[lost])
    assert torch.allclose(found.model[~lost], whole.model[~lost], atol=1e-5)
    for key, tensor in found.algorithm_state.items():
        if key in READ_OFF[name]:
            assert torch.equal(tensor[lost[:PARAMETERS]], server.algorithm_state[key][lost[:PARAMETERS]]), key
            assert torch.allclose(
                tensor[~lost[:PARAMETERS]], whole.algorithm_state[key][~lost[:PARAMETERS]]
            ), key
        else:
            assert torch.equal(tensor, whole.algorithm_state[key]), key
