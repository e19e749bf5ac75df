"""What pytest leaves out where an optional library is not installed."""

from __future__ import annotations

from importlib.util import find_spec

# The doctests of a room that cannot be imported; the room's tests say why they are skipped.
collect_ignore = ["src/safari/flower", "tests/flower/kit.py", "tests/flower/deploy.py"]
if find_spec("flwr"):
    collect_ignore = []
