"""Messages out, replies in, until all have answered or the time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import httpx
from flwr.app import Error, Message
from flwr.serverapp import Grid

from safari.flower.log import log
from safari.flower.protocol import UNREADABLE
from safari.flower.text import visible_traceback

# Between two looks: at first short, for nodes that answer at once, then longer and longer.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5
_GROWTH = 1.3
# Seconds between two lines of the log that say what is waited for: at first, and at most.
_BETWEEN_LINES, _LONGEST_BETWEEN_LINES = 30.0, 1800.0
# Flower's codes of errors that the SuperLink writes in the place of a node: a message, a reply or a node is gone.
_OF_THE_SUPERLINK = {3, 4, 5}
# The connection to the SuperLink itself is broken: no client's fault.
_TRANSPORT_ERRORS = (OSError, httpx.HTTPError)


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Message]:
    """Every reply that came within `timeout` seconds.

    Unlike Flower's own `send_and_receive`, which looks every three seconds for all replies at once, this
    - looks more often, and once more at the end: a round of 0.3 seconds takes 0.3 seconds;
    - asks for one reply at a time. A reply states for itself which message it answers, and a malformed one
      raises inside Flower and takes all others of the same request with it. This way it is known whose reply
      it is, whatever it says, and a malformed one becomes an error reply with the exception's words.
    """
    if not messages:
        return []
    end, pause = clock() + timeout, _FIRST_PAUSE
    pushed = {str(i) for i in grid.push_messages(messages) if i}
    waiting = {m.metadata.message_id: m for m in messages if m.metadata.message_id in pushed}
    replies = [_refusal(m, "the SuperLink did not take the message") for m in messages
               if m.metadata.message_id not in pushed]  # fmt: skip
    while waiting:
        began = clock()
        found = [reply for m in waiting.values() if (reply := _pull(grid, m)) is not None]
        replies += found
        for reply in found:
            del waiting[reply.metadata.reply_to_message_id]
        if began >= end or not waiting:
            break
        if not found:
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)
        # With many nodes a look takes long: at most half of the SuperLink's time is for looks.
        sleep(max(0.0, min(max(pause, clock() - began), end - clock())))
    return replies


def of_a_node(reply: Message) -> bool:
    """Is the reply, an error perhaps, a node's own and not the SuperLink's word that there is none?"""
    return not reply.has_error() or reply.error.code not in _OF_THE_SUPERLINK


def wait_for_nodes(
    grid: Grid,
    wanted: int,
    timeout: float = math.inf,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[int]:
    """The nodes that are connected, ascending; waits for `wanted` of them, at most `timeout` seconds.

    Says what it waits for at once, after half a minute, and then less and less often, at least every half hour.
    """
    begin = clock()
    tell, between = begin, _BETWEEN_LINES
    while True:
        nodes, now = sorted(grid.get_node_ids()), clock()
        if len(nodes) >= wanted or now - begin >= timeout:
            return nodes
        if now >= tell:
            left = f"for {begin + timeout - now:.0f} s more" if math.isfinite(timeout) else "without end"
            log.info("waiting for %s nodes, %s are connected; %s", wanted, len(nodes), left)
            tell, between = tell + between, min(2 * between, _LONGEST_BETWEEN_LINES)
        sleep(max(0.0, min(_LONGEST_PAUSE, begin + timeout - now)))


def _pull(grid: Grid, message: Message) -> Message | None:
    """The reply to a message, if there is one yet."""
    asked = message.metadata.message_id
    try:
        found = list(grid.pull_messages([asked]))
    except _TRANSPORT_ERRORS:
        raise
    except Exception as error:
        log.warning(
            "the reply of node %s is malformed\n%s", message.metadata.dst_node_id, visible_traceback()
        )
        return _refusal(message, f"the reply is malformed: {type(error).__name__}: {error}")
    if not found:
        return None
    if len(found) > 1 or found[0].metadata.reply_to_message_id != asked:
        return _refusal(message, "the reply says that it answers another message")
    return found[0]


def _refusal(message: Message, reason: str) -> Message:
    return Message(Error(UNREADABLE, reason), reply_to=message)
