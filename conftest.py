"""What holds for all tests, and what pytest leaves out where an optional library is not installed."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec

from hypothesis import settings

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that
# interrupt a child would wait in vain. Restore what SIGINT means in a terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on who else uses the machine: no test may fail for that.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Plug-ins that tests run are not remembered as the user's own (safari.trust).
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="safari-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# The doctests of a room that cannot be imported; the room's tests say why they are skipped.
collect_ignore = ["src/safari/flower", "tests/flower/kit.py", "tests/flower/deploy.py"]
if find_spec("flwr"):
    collect_ignore = []
