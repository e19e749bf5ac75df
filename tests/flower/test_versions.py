"""Without Flower, or with one that is too old: an error that says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runs.kit import environment

PRETEND = """
import importlib.metadata as metadata
def version(name, real=metadata.version):
    if name != "flwr":
        return real(name)
    {what}
metadata.version = version
try:
    import safari.flower
except Exception as error:
    print(type(error).__name__, error)
"""
CASES = {
    "raise metadata.PackageNotFoundError(name)": (
        "MissingExtraError Flower apps need flwr: pip install 'safari-fl[flower]'"
    ),
    "return '1.29.0'": (
        "SafariError safari.flower needs flwr 1.41 or later, found 1.29.0: pip install 'safari-fl[flower]'"
    ),
    "return '0.9'": (
        "SafariError safari.flower needs flwr 1.41 or later, found 0.9: pip install 'safari-fl[flower]'"
    ),
}


@pytest.mark.parametrize(("what", "told"), CASES.items())
def test_the_error_says_what_to_install(what, told):
    found = subprocess.run(
        [sys.executable, "-c", PRETEND.format(what=what)], env=environment(), capture_output=True, text=True
    )
    assert found.stdout.strip() == told, found.stderr
