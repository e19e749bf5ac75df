"""Text as tokens: a vocabulary, and sequences of one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from safari.bounds import at_least, at_most
from safari.data.dataset import IGNORED

Level = Literal["characters", "bytes", "words"]
Ids = npt.NDArray[np.int64]

PADDING, UNKNOWN = 0, 1
_SPECIAL = ("", "\N{REPLACEMENT CHARACTER}")
MOST_WORDS = 30_000
# Tokens of a sample: it is in memory whole, and so is what a model computes of it.
MOST_LENGTH = 1_000_000


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a text, and their numbers. Number 0 is padding, 1 what the vocabulary does not hold.

    >>> vocabulary = Vocabulary.of(["abba", "cab"], "characters")
    >>> vocabulary.tokens
    ('', '�', 'a', 'b', 'c')
    >>> vocabulary.encode("bad").tolist(), vocabulary.decode([3, 2, 1])
    ([3, 2, 1], 'ba�')
    """

    level: Level
    tokens: tuple[str, ...]

    @classmethod
    def of(cls, texts: Iterable[str | Sequence[str]], level: Level) -> Vocabulary:
        """The vocabulary of these texts: all characters in order, all bytes, or the most frequent words."""
        if level == "bytes":
            return cls(level, (*_SPECIAL, *(chr(byte) for byte in range(256))))
        if level == "characters":
            found: set[str] = set()
            for text in texts:
                found.update(text)
            return cls(level, (*_SPECIAL, *sorted(found)))
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split() if isinstance(text, str) else text)
        # By frequency, equal ones by spelling, so that the order of the texts does not matter.
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(level, (*_SPECIAL, *ranked[:MOST_WORDS]))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens) if number > UNKNOWN}

    def encode(self, text: str | Sequence[str]) -> Ids:
        """The numbers of a text's tokens; a list of words is one already."""
        if self.level == "bytes" and isinstance(text, str):
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) + len(_SPECIAL)
        pieces = text.split() if self.level == "words" and isinstance(text, str) else text
        return np.fromiter((self._numbers.get(piece, UNKNOWN) for piece in pieces), np.int64, len(pieces))

    def length(self, text: str | Sequence[str]) -> int:
        """Number of tokens in a text."""
        if not isinstance(text, str) or self.level == "characters":
            return len(text)
        return len(text.encode("utf-8")) if self.level == "bytes" else len(text.split())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of such numbers; padding is left out."""
        numbers = [int(number) for number in ids]
        if self.level == "bytes":
            return bytes(n - len(_SPECIAL) for n in numbers if n > UNKNOWN).decode("utf-8", "replace")
        pieces = [self.tokens[number] for number in numbers if number != PADDING]
        return (" " if self.level == "words" else "").join(pieces)


def padded(ids: Ids, length: int, fill: int = PADDING) -> Ids:
    """The first `length` of the numbers, filled up at the end.

    >>> padded(np.array([5, 6, 7]), 5).tolist(), padded(np.array([5, 6, 7]), 2).tolist()
    ([5, 6, 7, 0, 0], [5, 6])
    """
    out = np.full(length, fill, np.int64)
    kept = ids[:length]
    out[: len(kept)] = kept
    return out


def window_count(tokens: int, length: int) -> int:
    """Number of windows that `next_token_windows` makes of a text of this many tokens.

    >>> [window_count(n, 4) for n in (0, 1, 2, 5, 6)]
    [0, 0, 1, 1, 2]
    """
    return max(0, -(-(tokens - 1) // length))


def next_token_windows(ids: Ids, length: int) -> tuple[Ids, Ids]:
    """A text cut into windows: inputs and, for each, the token that follows; both `[windows, length]`.

    Every token but the first is asked for once. The last window is padded; nothing is asked there.

    >>> x, y = next_token_windows(np.array([2, 3, 4, 5]), 2)
    >>> x.tolist(), y.tolist()
    ([[2, 3], [4, 0]], [[3, 4], [5, -100]])
    """
    count = window_count(len(ids), length)
    x = np.full((count, length), PADDING, np.int64)
    y = np.full((count, length), IGNORED, np.int64)
    if count:
        x.reshape(-1)[: len(ids) - 1] = ids[:-1]
        y.reshape(-1)[: len(ids) - 1] = ids[1:]
    return x, y


def check_length(length: int) -> None:
    """ConfigError unless windows can have this length."""
    at_most("length", at_least("length", length, 1), MOST_LENGTH)
