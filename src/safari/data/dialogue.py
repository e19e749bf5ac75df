"""Made-up talk of many speakers, for next-character prediction: generated, so that it can be shipped.

A sentence is a template (a sequence of word classes and punctuation) filled with words. Everybody speaks the
same language: the templates and the words of each class. Speakers differ in how often they use each. No word
belongs to two classes and no two templates look alike, so a text has one reading, and its probability, and with
it the least perplexity that any model can reach, is known exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from safari.bounds import at_least, at_most, within
from safari.data.dataset import Data
from safari.data.text import Vocabulary, check_length, next_token_windows

Floats = npt.NDArray[np.float64]

_LEXICON = """
greeting: hello hey morning evening listen look well welcome
name: anna ben clara david emma felix greta henry ida jonas karla leo mina nora otto paula
article: the a my your our this that every
adjective: old new small big red blue green cold warm quiet loud heavy light dark bright broken clean
adjective: dirty empty full gentle hungry lazy lucky proud round sharp slow soft strange tired young
noun: apple boat bread bridge candle cat chair clock cloud coat dog door field fire fish flower garden
noun: hammer hill horse house key kitchen lamp letter market mirror mountain neighbour night paper river
noun: road rope sailor school ship shoe song stone storm street table teacher tower train tree village
noun: window winter
verb: sees finds takes brings likes wants needs paints sells buys loses keeps opens closes holds cleans
verb: hears follows forgets remembers carries mends
action: sleeps waits sings works runs laughs dances swims falls rests shines travels grows returns
adverb: slowly quickly often always never today again soon outside upstairs together alone here there
link: and but because while
question: where why when how
"""


def _words() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _LEXICON.split("\n")[1:-1]:
        kind, _, words = line.partition(": ")
        found[kind] = (*found.get(kind, ()), *words.split())
    return found


WORDS = _words()

TEMPLATES: tuple[tuple[str, ...], ...] = tuple(
    tuple(line.split())
    for line in (
        "article noun verb article noun .",
        "article adjective noun action adverb .",
        "name verb article noun .",
        "name verb article adjective noun adverb .",
        "greeting , name !",
        "greeting , article noun action .",
        "question action article noun ?",
        "question action name ?",
        "name action link article noun action .",
        "article noun verb article noun link name action .",
        "article noun action .",
        "adverb , name verb article noun .",
        "name , article adjective noun action !",
        "name link name verb article noun .",
    )
)
_PUNCTUATION = ".,!?"
# How even habits are, as parameters of Dirichlet distributions: what is common, and what is one's own.
_COMMON, _OWN = 2.0, 0.3
# All is generated in memory: a sentence has about 30 characters, and each of them 16 bytes.
MOST_SPEAKERS, MOST_SENTENCES, MOST_CHARACTERS = 100_000, 10_000_000, 300_000_000


@dataclass(frozen=True)
class Speaker:
    """Probabilities of the templates, and of the words of each class."""

    templates: Floats
    words: dict[str, Floats]

    @cached_property
    def entropy(self) -> float:
        """Nats in a sentence: H(templates) + Σ_t p_t Σ_{c ∈ t} H(words of c)."""
        inside = [sum(_entropy(self.words[c]) for c in template if c in WORDS) for template in TEMPLATES]
        return _entropy(self.templates) + float(self.templates @ inside)

    @cached_property
    def length(self) -> float:
        """Characters in a sentence, on average, with the space behind it."""
        mean = {c: float(p @ [len(word) for word in WORDS[c]]) for c, p in self.words.items()}
        # Every word has a space before it or is the first; the last mark is followed by a space.
        lengths = [sum(mean[part] + 1 if part in WORDS else 1 for part in template) for template in TEMPLATES]
        return float(self.templates @ lengths)

    def say(self, sentences: int, rng: np.random.Generator) -> str:
        """Draw this many sentences."""
        chosen = [TEMPLATES[k] for k in _draw(self.templates, sentences, rng)]
        # All words of a class are drawn at once, and used one after the other.
        needed = Counter(part for template in chosen for part in template)
        drawn = {kind: iter(_draw(p, needed[kind], rng)) for kind, p in self.words.items()}
        said = []
        for template in chosen:
            pieces = [f" {WORDS[part][next(drawn[part])]}" if part in WORDS else part for part in template]
            said.append("".join(pieces)[1:] + " ")
        return "".join(said)


def make_speakers(count: int, dialects: int, apart: float, own: float, seed: int) -> list[Speaker]:
    """Speakers in dialects, one after the other: speaker s has dialect s mod `dialects`.

    A dialect's habits are (1 − apart) of what is common and `apart` of its own; a speaker's are (1 − own) of
    the dialect's and `own` of their own. Each of these is drawn from a Dirichlet distribution.
    """
    for field, number in (("speakers", count), ("dialects", dialects)):
        at_most(field, at_least(field, number, 1), MOST_SPEAKERS)
    for field, share in (("apart", apart), ("own", own)):
        within(field, share, 0, 1)
    at_least("seed", seed, 0)
    rng = np.random.default_rng([seed, 0])
    common = _habits(rng, _COMMON)
    spoken = [_mixed(common, _habits(rng, _OWN), apart) for _ in range(dialects)]
    return [_mixed(spoken[s % dialects], _habits(rng, _OWN), own) for s in range(count)]


def dialogue(
    *,
    speakers: int = 100,
    sentences: int = 120,
    dialects: int = 5,
    apart: float = 0.6,
    own: float = 0.3,
    length: int = 64,
    seed: int = 0,
) -> Data:
    """Made-up talk of many speakers, generated, for predicting the next character; clients by speaker.

    Every speaker says `sentences` sentences to train on and a quarter as many to test on, cut into windows of
    `length` characters. Speakers of one of the `dialects` talk alike; see `apart` and `own`: 0 is no difference
    between dialects, or between the speakers of one, 1 is nothing in common. `seed` is the text's, so that
    all seeds of a run have the same text. `perplexity_bound` says what no model can be better than.

    >>> data = dialogue(speakers=3, sentences=4, length=40)
    >>> data.input_shape, data.label_kind, data.owners.unique().tolist()
    ((40,), 'tokens', [0, 1, 2])
    """
    check_length(length)
    at_least("sentences", sentences, 4)
    # Everybody has a window of this length or more.
    for field, size, most in (("sentences", sentences, MOST_SENTENCES), ("length", length, MOST_CHARACTERS)):
        at_most(f"{field} · speakers", speakers * size, most)
    people = make_speakers(speakers, dialects, apart, own, seed)
    vocabulary = Vocabulary.of(["".join(sum(WORDS.values(), ())), f" {_PUNCTUATION}"], "characters")
    train, test, owners = [], [], []
    for number, person in enumerate(people):
        # Each from a generator of their own: more speakers change nothing for the first ones.
        rng = np.random.default_rng([seed, 1, number])
        windows = next_token_windows(vocabulary.encode(person.say(sentences, rng)), length)
        train.append(windows)
        owners.append(np.full(len(windows[0]), number))
        test.append(next_token_windows(vocabulary.encode(person.say(sentences // 4, rng)), length))
    (train_x, train_y), (test_x, test_y) = (
        (torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True))
        for found in (train, test)
    )
    return Data(
        "dialogue",
        train_x,
        train_y,
        test_x,
        test_y,
        len(vocabulary.tokens),
        torch.from_numpy(np.concatenate(owners)),
        vocabulary.tokens,
    )


def perplexity_bound(
    *, speakers: int = 100, dialects: int = 5, apart: float = 0.6, own: float = 0.3, seed: int = 0
) -> float:
    """The perplexity, by character, of a model that knows each speaker's habits and all that was said before.

    exp(Σ_s H_s / Σ_s E[characters of a sentence of s]): on average no model is better. One that sees windows is
    worse, since at a window's start it knows neither the speaker nor the sentence.
    """
    people = make_speakers(speakers, dialects, apart, own, seed)
    return math.exp(sum(p.entropy for p in people) / sum(p.length for p in people))


def _draw(p: Floats, count: int, rng: np.random.Generator) -> list[int]:
    """Draw indices with the probabilities `p`."""
    found: list[int] = np.searchsorted(np.cumsum(p)[:-1], rng.random(count), side="right").tolist()
    return found


def _habits(rng: np.random.Generator, alpha: float) -> Speaker:
    return Speaker(
        rng.dirichlet(np.full(len(TEMPLATES), alpha)),
        {kind: rng.dirichlet(np.full(len(words), alpha)) for kind, words in WORDS.items()},
    )


def _mixed(one: Speaker, other: Speaker, share: float) -> Speaker:
    def mix(a: Floats, b: Floats) -> Floats:
        found: Floats = (1 - share) * a + share * b
        found /= found.sum()
        return found

    return Speaker(
        mix(one.templates, other.templates),
        {kind: mix(p, other.words[kind]) for kind, p in one.words.items()},
    )


def _entropy(p: Floats) -> float:
    kept = p[p > 0]
    return float(-(kept * np.log(kept)).sum())
