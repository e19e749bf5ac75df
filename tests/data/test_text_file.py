"""Text files of one's own, for next-token prediction."""

from __future__ import annotations

import pytest
import torch

import safari
from safari.data import IGNORED, text
from safari.errors import ConfigError, DataError


def _decoded(data, x):
    return "".join(data.vocabulary[token] for token in x if token)


def test_train_and_test_are_the_beginning_and_the_end_of_the_file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("abcdefghij" * 2)
    data = text(source=str(file), holdout=0.2, length=5)
    assert [_decoded(data, x) for x in data.train_x] == ["abcde", "fghij", "abcde"]
    assert [_decoded(data, y) for y in data.train_y] == ["bcdef", "ghija", "bcdef"]
    assert [_decoded(data, x) for x in data.test_x] == ["ghi"]
    assert data.test_y[0, 3:].tolist() == [IGNORED, IGNORED]
    assert data.label_kind == "tokens"
    assert data.owners is None


def test_a_word_that_only_the_test_part_has_is_unknown(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("one two one two one two one dodo")
    data = text(source=str(file), holdout=0.25, tokens="words", length=3)
    assert "dodo" not in data.vocabulary
    assert data.test_y[0, 0] == 1


def test_the_files_of_a_folder_are_owners(tmp_path):
    for name, content in (("b.txt", "b" * 20), ("a.txt", "a" * 40), ("c.md", "c" * 90)):
        (tmp_path / name).write_text(content)
    data = text(source=str(tmp_path), length=10)
    assert data.owners is not None
    assert torch.bincount(data.owners).tolist() == [4, 2]
    assert _decoded(data, data.train_x[0]) == "a" * 10


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"abc", "at least 4"), (b"\xff\xfe\xff", "UTF-8"), (None, "no such file")],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, words):
    file = tmp_path / "book.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=words):
        text(source=str(file))


def test_options_out_of_range_are_named(tmp_path):
    for options, field in (({"holdout": 1.0}, "holdout"), ({"length": 0}, "length")):
        with pytest.raises(ConfigError, match=field):
            text(source=str(tmp_path), **options)


def test_a_run_learns_from_a_file(tmp_path):
    (tmp_path / "book.txt").write_text("the cat sat on the mat. " * 60)
    config = {
        "rounds": 4,
        "clients": 5,
        "arms": ["safari"],
        "task": {"name": "tokens"},
        "data": {"name": "text", "source": str(tmp_path / "book.txt"), "length": 16},
        "partition": {"name": "iid"},
        "model": {"name": "gru", "hidden": 16},
        "local": {"lr": 0.01},
        "evaluation": {"every": 1, "last": 1},
    }
    summary = safari.run(config, tmp_path / "run", progress=False, report=False)
    assert summary["arms"]["safari"]["perplexity"]["mean"] < 15
