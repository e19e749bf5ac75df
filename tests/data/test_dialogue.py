"""The made-up talk: one reading, exact probabilities, and text that follows them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from safari.data import DATASETS, dialogue, perplexity_bound
from safari.data.dialogue import TEMPLATES, WORDS, Speaker, make_speakers
from safari.errors import ConfigError


def test_a_text_has_one_reading() -> None:
    words = [word for kind in WORDS.values() for word in kind]
    assert len(set(words)) == len(words)
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert len(set(TEMPLATES)) == len(TEMPLATES)
    # A sentence ends at its only mark that ends one.
    assert all(t[-1] in ".!?" and not set(t[:-1]) & set(".!?") for t in TEMPLATES)


def log_probability(person: Speaker, text: str) -> float:
    """The logarithm of the probability of whole sentences, as `Speaker.say` makes them."""
    found = 0.0
    places = {word: (c, k) for c, words in WORDS.items() for k, word in enumerate(words)}
    rest = text
    while rest:
        end = min(rest.index(mark) for mark in ".!?" if mark in rest) + 1
        pieces = rest[:end].replace(",", " ,").replace(rest[end - 1], f" {rest[end - 1]}").split()
        classes = tuple(places[piece][0] if piece in places else piece for piece in pieces)
        found += math.log(person.templates[TEMPLATES.index(classes)])
        for piece in pieces:
            if piece in places:
                kind, number = places[piece]
                found += math.log(person.words[kind][number])
        rest = rest[end + 1 :]
    return found


def test_the_bound_is_what_the_text_s_own_probability_comes_to() -> None:
    """A law of large numbers: −log p of what is said, by character, against the exact entropy rate."""
    people = make_speakers(6, dialects=2, apart=0.6, own=0.3, seed=0)
    said = [person.say(1500, np.random.default_rng(number)) for number, person in enumerate(people)]
    nats = [-log_probability(person, text) for person, text in zip(people, said, strict=True)]
    for person, text, found in zip(people, said, nats, strict=True):
        assert len(text) / 1500 == pytest.approx(person.length, rel=0.02)
        assert found / 1500 == pytest.approx(person.entropy, rel=0.03)
    rate = sum(nats) / sum(map(len, said))
    bound = math.log(perplexity_bound(speakers=6, dialects=2))
    assert rate == pytest.approx(bound, rel=0.015)


def test_one_speaker_by_hand() -> None:
    (person,) = make_speakers(1, dialects=1, apart=0.0, own=0.0, seed=3)
    text = "hello, anna! "
    p = person.templates[TEMPLATES.index(("greeting", ",", "name", "!"))]
    expected = math.log(p * person.words["greeting"][0] * person.words["name"][0])
    assert log_probability(person, text) == pytest.approx(expected)
    assert log_probability(person, text + text) == pytest.approx(2 * expected)


def test_speakers_of_a_dialect_talk_alike() -> None:
    people = make_speakers(8, dialects=2, apart=0.8, own=0.2, seed=0)
    nouns = np.array([person.words["noun"] for person in people])
    distance = np.abs(nouns[:, None] - nouns).sum(2)
    same = np.arange(8)[:, None] % 2 == np.arange(8) % 2
    assert distance[same].max() < distance[~same].min()
    one, other = make_speakers(2, dialects=1, apart=0.8, own=0.0, seed=0)
    assert one.words.keys() == other.words.keys()
    assert all((one.words[kind] == other.words[kind]).all() for kind in one.words)


def test_the_data_are_windows_by_speaker_and_follow_from_the_options_alone() -> None:
    data, again, other = (dialogue(speakers=4, sentences=12, length=30, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(data.train_x, again.train_x)
    assert not torch.equal(data.train_x[:20], other.train_x[:20])
    assert data.owners is not None
    assert data.owners.unique().tolist() == [0, 1, 2, 3]
    # More speakers change nothing for the first ones.
    more = dialogue(speakers=6, sentences=12, length=30)
    assert torch.equal(more.train_x[: len(data.train_x)], data.train_x)
    text = "".join(data.vocabulary[i] for i in data.train_x[data.owners == 2].flatten())
    said = make_speakers(4, 5, 0.6, 0.3, 0)[2].say(12, np.random.default_rng([0, 1, 2]))
    assert text == said[:-1]
    assert int((data.test_y >= 0).sum()) == pytest.approx(int((data.train_y >= 0).sum()) / 4, rel=0.3)
    assert DATASETS["dialogue"] is dialogue


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speakers": 0}, "speakers must be at least 1, got 0"),
        ({"dialects": 0}, "dialects must be at least 1, got 0"),
        ({"apart": 1.5}, r"apart must lie between 0 and 1, got 1\.5"),
        ({"own": -0.1}, r"own must lie between 0 and 1, got -0\.1"),
        ({"sentences": 3}, "sentences must be at least 4, got 3"),
        ({"length": 0}, "length must be at least 1, got 0"),
        (
            {"speakers": 10**9, "sentences": 4, "length": 1},
            r"sentences · speakers must be at most 10000000, got 4",
        ),
        ({"speakers": 10**6, "sentences": 5, "length": 8}, "speakers must be at most 100000, got 1000000"),
        ({"dialects": 10**9}, "dialects must be at most 100000, got 1000000000"),
        ({"sentences": 10**6}, "sentences · speakers must be at most 10000000, got 100000000"),
        ({"length": 10**9}, "length must be at most 1000000, got 1000000000"),
        ({"length": 10**6, "speakers": 1000}, "length · speakers must be at most 300000000, got 1000000000"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_options_that_make_no_talk(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dialogue(**options)  # type: ignore[arg-type]
