"""Text files as data: next-token prediction on text of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from safari.bounds import below, path_of
from safari.data.dataset import Data
from safari.data.text import Ids, Level, Vocabulary, check_length, next_token_windows
from safari.errors import DataError

# Tokens are kept as 8-byte integers, inputs and labels: 16 bytes for a letter.
MOST_BYTES = 1 << 29

Pieces: TypeAlias = str | list[str]


def text(*, source: str, holdout: float = 0.1, tokens: Level = "characters", length: int = 80) -> Data:
    """A `.txt` file, or a folder of them, in UTF-8: predict the next token.

    The last `holdout` of each file is the test set. `tokens` says what a token is: characters, bytes or words;
    `length` is the number of tokens in a sample. With the partition `natural` each file of a folder is a client.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("to be or not to be")
    ...     data = text(source=folder, length=5)
    >>> data.train_x.shape, data.test_x.shape, data.vocabulary[2:5]
    (torch.Size([3, 5]), torch.Size([1, 5]), (' ', 'b', 'e'))
    """
    check_length(length)
    below("holdout", holdout, 1)
    files = _files(path_of("source", source))
    texts = [_read(file) for file in files]
    if sum(map(len, texts)) > MOST_BYTES:
        raise DataError(f"{source}: text must have at most {MOST_BYTES} characters, found more")
    halves = [_halves(file, content, tokens, holdout) for file, content in zip(files, texts, strict=True)]
    vocabulary = Vocabulary.of([train for train, _ in halves], tokens)
    train, test = (
        [next_token_windows(vocabulary.encode(part), length) for part in parts]
        for parts in zip(*halves, strict=True)
    )
    counts = [len(inputs) for inputs, _ in train]
    (train_x, train_y), (test_x, test_y) = _joined(train), _joined(test)
    whose = torch.from_numpy(np.repeat(np.arange(len(files)), counts)) if len(files) > 1 else None
    return Data(
        "text", train_x, train_y, test_x, test_y, len(vocabulary.tokens), whose, vocabulary=vocabulary.tokens
    )


def _halves(file: Path, content: str, tokens: Level, holdout: float) -> tuple[Pieces, Pieces]:
    """Split a text for training and testing: the test part is the end, so that no test sentence was trained on."""
    pieces: Pieces = content.split() if tokens == "words" else content
    # Both parts need a token to begin with and one that follows it.
    cut = len(pieces) - max(2, round(holdout * len(pieces)))
    if cut < 2:
        raise DataError(f"{file}: needs at least 4 {tokens} for training and testing, found {len(pieces)}")
    return pieces[:cut], pieces[cut:]


def _files(path: Path) -> list[Path]:
    """The files to read, by name; plain ones only, because a pipe would be waited for."""
    if path.is_dir():
        files = sorted(file for file in path.glob("*.txt") if file.is_file())
        if not files:
            raise DataError(f"{path}: no .txt files here")
        return files
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    return [path]


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise DataError(f"{file}: must have at most {MOST_BYTES} bytes, found {file.stat().st_size}")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: must be text in UTF-8, found another byte at {error.start}") from error
    except OSError as error:
        raise DataError(f"{file}: could not be read: {error.strerror or error}") from error


def _joined(windows: list[tuple[Ids, Ids]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*windows, strict=True)
    return torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(labels))
