"""Processes and their descendants, which may have sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

# Seconds before a process that was asked to end is ended.
GRACE = 10.0


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started. A second Ctrl-C, or SIGTERM, does not keep it from that."""
    with _ignoring_stops():
        pids = family(process.pid)
        for what in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, what)
            limit = time.monotonic() + GRACE
            while time.monotonic() < limit and any(map(_is_there, pids)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)


def when_orphaned(parent: int, act: Callable[[], None]) -> None:
    """Call `act`, in a thread, once this process is no longer a child of that one: it has ended, however that was."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        act()

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextlib.contextmanager
def _ignoring_stops() -> Iterator[None]:
    """Ignore the signals that ask a process to end; only its main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def family(pid: int) -> list[int]:
    """A process and its descendants; parents first."""
    if not _is_there(pid):
        return []
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found
