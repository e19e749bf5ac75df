"""What tests with real processes share: free ports, and waiting that ends."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(what: str, done: Callable[[], T], seconds: float, pause: float = 0.2) -> T:
    """Poll until `done()` is true, and return its result; fail after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := done():
            return found
        time.sleep(pause)
    raise AssertionError(f"{what}: not within {seconds:g} s")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def free_port() -> int:
    """One of them."""
    (port,) = free_ports(1)
    return port
