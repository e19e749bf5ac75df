"""Processes and their descendants, which may have sessions of their own.

Run as a program, with the number of its parent and a command, this module is a supervisor: it starts the command, and
ends it and all that it started when the parent is gone. A parent that is killed (`kill -9`) cannot do that itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

# Seconds before a process that was asked to end is ended, and between two looks for the parent.
GRACE, _LOOK = 10.0, 1.0


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came: a command ends as after Ctrl-C."""


def supervised(command: Sequence[object]) -> list[str]:
    """The command under a supervisor, so that it ends when this process ends, in whichever way."""
    # By path, and with -P: the supervisor imports neither the package nor anything from the folder in which it runs.
    return [sys.executable, "-P", __file__, str(os.getpid()), *map(str, command)]


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


def _supervise(parent: int, command: Sequence[str]) -> int:
    # SIGTERM as an exception, so that `finally` ends the command.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = subprocess.Popen(command)
    try:
        while os.getppid() == parent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK)
        return 1
    finally:
        if process.poll() is None:
            end_family(process)


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), sys.argv[2:]))
