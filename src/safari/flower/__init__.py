"""SAFARI on Flower: a strategy, the client's side, and loss on demand (extra: flower)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from safari.errors import MissingExtraError, SafariError

# The versions that the tests of this package have been run against.
TESTED = (1, 41)


def _check() -> None:
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise MissingExtraError("flwr", "flower", "Flower apps") from error
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < TESTED:
        raise SafariError(
            f"safari.flower needs flwr {'.'.join(map(str, TESTED))} or later, found {found}: "
            "pip install 'safari-fl[flower]'"
        )


_check()

from safari.flower.client import masks_of, sparse, sparse_mod  # noqa: E402
from safari.flower.link_mod import lossy  # noqa: E402
from safari.flower.local import local_training  # noqa: E402
from safari.flower.masking import masked  # noqa: E402
from safari.flower.strategy import SafariStrategy  # noqa: E402

__all__ = [
    "Datagrams",
    "SafariStrategy",
    "local_training",
    "lossy",
    "masked",
    "masks_of",
    "sparse",
    "sparse_mod",
]


def __getattr__(name: str) -> Any:
    """`Datagrams` on demand: it needs the extra net."""
    if name == "Datagrams":
        from safari.flower.datagrams import Datagrams

        return Datagrams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
