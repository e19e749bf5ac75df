"""Rows to one buffer, tensor by tensor, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from safari.engine.stack.flat import Flat
from safari.models import Layout
from safari.models.layout import Entry

shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@st.composite
def flats(draw: st.DrawFn) -> Flat:
    """Any layout: parameters first, buffers after them."""
    entries, offset = [], 0
    for kind, those in (("weight", draw(shapes)), ("buffer", draw(st.just([]) | shapes))):
        for shape in those:
            entries.append(Entry(f"{kind}{len(entries)}", shape, offset, kind))
            offset = entries[-1].end
    return Flat(Layout(tuple(entries)), draw(st.integers(1, 4)))


def numbered(flat: Flat) -> torch.Tensor:
    return torch.arange(flat.clients * flat.layout.size).view(flat.clients, flat.layout.size)


@given(flats())
def test_from_rows_and_back(flat):
    rows = numbered(flat)
    buffer = flat.from_rows(rows)
    assert torch.equal(flat.to_rows(buffer), rows)
    assert sorted(buffer.tolist()) == list(range(rows.numel())), "nothing twice, nothing lost"


@given(flats(), st.randoms(use_true_random=False))
def test_places_are_those_of_the_kept_parameters(flat, random):
    for rows in (1, flat.clients):
        masks = torch.tensor([[random.random() < 0.5 for _ in range(flat.layout.size)] for _ in range(rows)])
        wanted = flat.from_rows(masks.expand(flat.clients, -1))[: flat.parameters].nonzero().squeeze(1)
        assert sorted(flat.places(masks).tolist()) == wanted.tolist()


@given(flats())
def test_views_are_each_clients_tensors_without_a_copy(flat):
    rows = numbered(flat)
    buffer = flat.from_rows(rows)
    views = flat.views(buffer[: flat.parameters], buffer[flat.parameters :])
    assert list(views) == [e.name for e in flat.layout.entries]
    for client, row in enumerate(rows):
        for name, tensor in flat.layout.split(row).items():
            assert torch.equal(views[name][client], tensor)
    for view in views.values():
        assert view.is_contiguous()
        view.fill_(-1)
    assert bool((buffer == -1).all()), "a view was a copy"


def test_by_hand():
    flat = Flat(Layout.of(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2, affine=False))), 2)
    rows = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]])
    # weight, weight', bias, bias', mean, mean', variance, variance'
    expected = [1, 2, 11, 12, 3, 4, 13, 14, 5, 6, 15, 16, 7, 8, 17, 18]
    assert flat.from_rows(rows).tolist() == expected
    assert flat.parameters == 8
