"""A supervisor of a run on Flower: SuperLink and ServerApp are started again until all rounds are done.

Imports nothing of Flower or torch: it is there for as long as the run, beside processes that need the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safari.errors import SafariError
from safari.processes import end_family, supervised
from safari.text import utc_now, visible

# Starts in a row that bring no new round, after which it gives up; seconds before the second of them, and at most.
MOST_STARTS = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
# Seconds for a SuperLink that was just started, and for `flwr`, to answer.
_START, _ANSWER = 120.0, 120.0
# Between two looks at the processes; and, while no round is recorded, at the run's state.
_LOOK, _LOOK_AT_STATE = 1.0, 20.0


class _EndedError(SafariError):
    """The SuperLink or the run has ended, or does not answer; the message says which, and why."""


@dataclass
class Keeper:
    """A run that is to be completed even if processes die on the way.

    Args:
        app: The folder of the Flower app.
        connection: The SuperLink's name in Flower's own configuration.
        run: The folder in which the app's strategy keeps its records and checkpoints.
        run_config: As of `flwr run --run-config`.
        superlink: The command that starts the SuperLink; empty: somebody else starts it.
        tell: Is given a line for each thing that happens.
        pause: Seconds before the second start in a row that brought no round; each further one waits twice as long.
    """

    app: Path
    connection: str
    run: Path
    run_config: tuple[str, ...] = ()
    superlink: tuple[str, ...] = ()
    tell: Callable[[str], None] = print
    pause: float = _FIRST_PAUSE
    _link: subprocess.Popen[bytes] | None = field(default=None, init=False)
    # Bytes of the longest records so far: more of them is progress, and the same again is not.
    _most: int = field(default=0, init=False)

    def keep(self) -> None:
        """Return when the run is complete; SafariError where `MOST_STARTS` starts in a row brought no new round."""
        starts, self._most = 0, self._recorded()
        try:
            while True:
                before = self._most
                try:
                    self._start_superlink()
                    self._follow(self._submit())
                    self._say("the run is complete")
                    return
                except _EndedError as error:
                    why = str(error)
                starts = 1 if self._grown() or self._most > before else starts + 1
                if starts >= MOST_STARTS:
                    raise SafariError(f"{starts} starts in a row brought no new round; at the last one {why}")
                pause = min(self.pause * 2 ** (starts - 1), _LONGEST_PAUSE)
                self._say(f"{why}; starting again in {pause:g} s")
                time.sleep(pause)
        finally:
            if self._link is not None:
                end_family(self._link)

    @property
    def _number(self) -> Path:
        """File with the id of the newest run, for a keeper that takes over."""
        return self.run.with_name(f"{self.run.name}.run-id")

    def _start_superlink(self) -> None:
        """Have a SuperLink that answers: a new process where ours has ended, and as long as it takes where it is not
        ours."""
        if self.superlink and (self._link is None or self._link.poll() is not None):
            self._say("starting the SuperLink")
            self._link = subprocess.Popen(
                supervised(self.superlink),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        begin, told = time.monotonic(), 0.0
        while True:
            try:
                self._flwr("list", self.connection, "--limit", 1)
                return
            except _EndedError as error:
                self._check_superlink()
                if self.superlink and time.monotonic() - begin > _START:
                    end_family(self._link)  # type: ignore[arg-type]
                    raise _EndedError(
                        f"the SuperLink does not answer within {_START:g} s: {error}"
                    ) from error
                if not told or time.monotonic() - told > _START:
                    told = time.monotonic()
                    self._say(f"waiting for the SuperLink: {error}")
            time.sleep(_LOOK)

    def _check_superlink(self) -> None:
        code = None if self._link is None else self._link.poll()
        if code is not None:
            raise _EndedError(f"the SuperLink has ended with exit code {code}")

    def _submit(self) -> int:
        """Submit the app and return the run's id; the run before it, if it still counts as running, is stopped."""
        with contextlib.suppress(OSError, ValueError, _EndedError):
            # Otherwise nodes would go on with what it has asked for, until its heartbeat is missed.
            self._flwr("stop", int(self._number.read_text(encoding="ascii")), self.connection)
        config = [part for text in self.run_config for part in ("--run-config", text)]
        number = self._flwr("run", self.app, self.connection, *config).get("run-id")
        try:
            found = int(str(number))
        except ValueError as error:
            raise _EndedError(f"flwr run must name the run's id, got {visible(str(number), 60)}") from error
        self._number.parent.mkdir(parents=True, exist_ok=True)
        self._number.write_text(f"{found}\n", encoding="ascii")
        self._say(f"run {found} is submitted")
        return found

    def _follow(self, number: int) -> None:
        """Return when the run is complete; _EndedError when it has ended before, or the SuperLink has."""
        begin, looked = time.time(), time.monotonic()
        while True:
            time.sleep(_LOOK)
            self._check_superlink()
            if self._grown():
                looked = time.monotonic()
            elif time.monotonic() - looked > _LOOK_AT_STATE:
                looked = time.monotonic()
                status = self._status(number)
                if status == "finished:completed":
                    return
                if status.startswith("finished"):
                    raise _EndedError(f"run {number} is {status}: {self._reason(number, begin)}")

    def _status(self, number: int) -> str:
        runs = self._flwr("list", self.connection, "--run-id", number).get("runs") or [{}]
        return str(runs[0].get("status", ""))

    def _reason(self, number: int, begin: float) -> str:
        """Why a run that was submitted at `begin` has ended, as its strategy says."""
        failure = self.run / "failure.txt"
        with contextlib.suppress(OSError):
            if failure.stat().st_mtime >= begin:
                return visible(failure.read_text(encoding="utf-8", errors="replace").strip(), 2000)
        return f"it did not say why; see flwr log {number} {self.connection} --show"

    def _recorded(self) -> int:
        return sum(path.stat().st_size for path in self.run.glob("trials/*/*/rounds.jsonl"))

    def _grown(self) -> bool:
        """Is there a round that was not there at the last look?"""
        before, self._most = self._most, max(self._most, self._recorded())
        return self._most > before

    def _flwr(self, *arguments: object) -> dict[str, Any]:
        """Run `flwr` and return its answer; _EndedError where it fails."""
        command = [_program("flwr"), *map(str, arguments), "--format", "json"]
        try:
            found = subprocess.run(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ANSWER,
            )
        except subprocess.TimeoutExpired as error:
            raise _EndedError(f"flwr {arguments[0]} does not answer within {_ANSWER:g} s") from error
        words = visible((found.stdout + found.stderr).strip()[-300:])
        if found.returncode:
            raise _EndedError(f"flwr {arguments[0]} failed: {words}")
        try:
            table = json.loads(found.stdout[found.stdout.index("{") :])
        except ValueError:
            return {}
        if not isinstance(table, dict) or table.get("success") is False:
            raise _EndedError(f"flwr {arguments[0]} failed: {words}")
        return table

    def _say(self, text: str) -> None:
        self.tell(f"{utc_now()} {text}")


def _program(name: str) -> str:
    found = shutil.which(name, path=_environment()["PATH"])
    if found is None:
        raise SafariError(f"{name} must be installed: pip install 'safari-fl[flower]'")
    return found


def _environment() -> dict[str, str]:
    """Ours, with this Python's own programs first: SuperLinks start others by name."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return os.environ | {"PATH": path, "NO_COLOR": "1"}
