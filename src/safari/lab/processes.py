"""Processes and their descendants, which may have sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

# Seconds before a process that was asked to end is ended.
GRACE = 10.0


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    pids = family(process.pid)
    for what in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)
        limit = time.monotonic() + GRACE
        while time.monotonic() < limit and any(map(_is_there, pids)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)


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
