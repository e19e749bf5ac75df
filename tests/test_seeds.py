"""Randomness depends on the seed and on its purpose, and on nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safari.seeds import derive, generator, torch_generator

WORDS = st.text("abcdefgh", min_size=1, max_size=6)
PATHS = st.lists(WORDS | st.integers(0, 10**6), max_size=4)


@given(seed=st.integers(0, 2**70), path=PATHS)
def test_derive_is_64_bits_of_a_hash_of_the_path(seed: int, path: list[str | int]) -> None:
    text = "/".join([str(seed), *(("str:" if isinstance(p, str) else "int:") + str(p) for p in path)])
    expected = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    assert derive(seed, *path) == expected
    assert 0 <= expected < 2**64


@given(one=st.tuples(st.integers(0, 50), PATHS), two=st.tuples(st.integers(0, 50), PATHS))
def test_other_seeds_and_paths_give_other_numbers(
    one: tuple[int, list[str | int]], two: tuple[int, list[str | int]]
) -> None:
    assert (derive(one[0], *one[1]) == derive(two[0], *two[1])) == (one == two)


def test_a_number_is_not_its_text_and_parts_do_not_run_together() -> None:
    paths = [("a", 1), ("a", "1"), ("a1",), ("a", 1, 1), ("a", 11), (1, "a"), ()]
    assert len({derive(0, *path) for path in paths}) == len(paths)
    assert derive(0, 1) != derive(1, 0)


def test_numbers_stay_as_they_are() -> None:
    """Recorded runs depend on these: a change here changes every result."""
    assert derive(0, "batches", 3, 7) == 10_878_048_670_099_114_956
    assert generator(0, "uplink", 5).random(2).tolist() == [0.40649596660496723, 0.9999329607616754]
    assert torch.rand(2, generator=torch_generator(0, "pruner")).tolist() == [
        0.30040937662124634,
        0.8964434266090393,
    ]


def test_generators_are_fresh_and_independent_of_each_other() -> None:
    first = generator(3, "a").random(5)
    generator(3, "b").random(100)
    assert np.array_equal(first, generator(3, "a").random(5))
    assert not np.array_equal(first, generator(3, "b").random(5))
    assert not np.array_equal(first, generator(4, "a").random(5))
    one = torch.rand(5, generator=torch_generator(3, "a"))
    assert torch.equal(one, torch.rand(5, generator=torch_generator(3, "a")))
    assert not torch.equal(one, torch.rand(5, generator=torch_generator(3, "b")))


def test_global_generators_are_left_alone() -> None:
    torch_before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    generator(0, "x").random()
    torch.rand(1, generator=torch_generator(0, "x"))
    assert torch.equal(torch_before, torch.random.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 + 1, 10**30])
def test_any_seed_will_do(seed: int) -> None:
    torch_generator(seed, "x")
    generator(seed, "x")
