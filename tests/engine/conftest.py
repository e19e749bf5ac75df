"""Fixtures that several files of this folder use."""

from __future__ import annotations

import pytest

from engine.own_parts import PLUGINS
from safari.engine import vectorised
from safari.engine.stack.forward import Stack
from safari.engine.stack.thread_pool import ThreadPool, threads


@pytest.fixture
def two_threads(tmp_path, monkeypatch):
    """The engine finds two threads when it is built; everything else goes on with one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PLUGINS)
    real = vectorised.pool_for

    def with_two(stack: Stack) -> ThreadPool | None:
        with threads(2):
            return real(stack)

    monkeypatch.setattr(vectorised, "pool_for", with_two)
    with threads(1):
        yield
