"""Messages out, replies in, until all have answered or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

# Between two looks: at first short, for nodes that answer at once, then longer and longer.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5
_GROWTH = 1.3


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Message]:
    """Every reply that came within `timeout` seconds.

    Flower's own `send_and_receive` looks every three seconds, and not once more at the end: what arrived
    in the last of them would be lost, and a round of 0.3 seconds would take three.
    """
    if not messages:
        return []
    end, pause = clock() + timeout, _FIRST_PAUSE
    waiting = {str(i) for i in grid.push_messages(messages) if i}
    replies: list[Message] = []
    while waiting:
        over = clock() >= end
        found = list(grid.pull_messages(waiting))
        replies += found
        waiting -= {reply.metadata.reply_to_message_id for reply in found}
        if over or not waiting:
            break
        if not found:
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)
        sleep(max(0.0, min(pause, end - clock())))
    return replies


def wait_for_nodes(
    grid: Grid,
    wanted: int,
    timeout: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[int]:
    """The nodes that are connected, ascending; waits for `wanted` of them, at most `timeout` seconds."""
    end = clock() + timeout
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= wanted or clock() >= end:
            return nodes
        sleep(max(0.0, min(_LONGEST_PAUSE, end - clock())))
