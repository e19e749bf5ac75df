"""Libraries of the Hugging Face hub, kept to this machine where what is wanted lies here."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from safari.bounds import path_of
from safari.errors import MissingExtraError
from safari.trust import contact

# Where these libraries keep, once imported, whether the hub may be asked; the last is that of transformers 4.
_SWITCHES = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("transformers.utils.hub", "_is_offline_mode"),
)


def library(name: str, extra: str, purpose: str) -> Any:
    """An optional library; importing it contacts nobody."""
    # Otherwise some architectures of transformers fetch native code from the hub and run it.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(name, extra, purpose) from error


def permit_hub(source: str) -> None:
    """TrustError when the hub must not be asked for this."""
    contact(source, "would be fetched from the Hugging Face hub")


def is_path(option: str, source: str) -> bool:
    """Is it a path, there or not, rather than a name on the hub?"""
    return source.startswith((".", "/", "~")) or path_of(option, source).exists()


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keep those libraries that are imported from contacting the hub inside, in all threads."""
    with contextlib.ExitStack() as stack:
        for module, switch in _SWITCHES:
            if hasattr(sys.modules.get(module), switch):
                stack.enter_context(patch.object(sys.modules[module], switch, True))
        yield
