"""What is worth its price: compiling kernels takes a while, and pays only in a long run."""

from __future__ import annotations

from importlib.util import find_spec

from safari.config import Config

# A first compilation takes some seconds to a minute, and saves tens of milliseconds a round of each arm;
# afterwards Triton keeps the kernels on disk. Arms do not count: kernels round differently, and an arm's
# result must not depend on the arms that run beside it.
ROUNDS_WORTH_COMPILING = 100

FORECAST = "compiling kernels for this model; that is done once, and the first round waits for it"


def compiles(config: Config, device: str) -> bool:
    """Will this run compile kernels of its own? They exist for bfloat16 on CUDA, through Triton."""
    engine = config.engine
    if engine.compile == "never" or engine.precision != "bfloat16" or device != "cuda":
        return False
    if find_spec("triton") is None:
        return False
    return engine.compile == "always" or config.rounds >= ROUNDS_WORTH_COMPILING
