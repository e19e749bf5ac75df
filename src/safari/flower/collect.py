"""Who was asked, who answered, what came of each: a round's replies, judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from safari.errors import SafariError
from safari.flower.broadcast import Broadcast
from safari.flower.link_mod import DOWNLINK_LOST, UPLINK_LOST
from safari.flower.reply import Reply, read_reply
from safari.flower.roster import Roster

EXAMPLES = "num-examples"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Request:
    """What was asked in a round: message id to node, and who could not be asked because it was not there."""

    messages: Mapping[str, int]
    absent: tuple[int, ...]
    timeout: float


@dataclass(frozen=True)
class Collected:
    """What came of a round, by seat.

    `replies` can be used; `refused` came and cannot; `reasons` says for each of the missing why it is.
    `trained` are those that are known to have had the model, `failed` those that answered with an error of
    their own. `ignored` are replies that belong to nobody.
    """

    roster: Roster
    cohort: tuple[int, ...]
    replies: Mapping[int, Reply]
    refused: Mapping[int, str]
    reasons: Mapping[int, str]
    trained: tuple[int, ...]
    failed: tuple[int, ...]
    ignored: tuple[str, ...]
    nodes: Mapping[int, int]


@dataclass
class _Notes:
    good: dict[int, Reply] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    doubles: set[int] = field(default_factory=set)


def collect(
    roster: Roster,
    request: Request,
    replies: Iterable[Message],
    sent: Broadcast,
    *,
    by_name: bool = True,
) -> Collected:
    """Match the replies to those who were asked; whoever is left is missing.

    A reply is matched by the message that it answers, never by what it says of its sender: error replies
    that the SuperLink writes have an id of their own.
    """
    notes = _Notes()
    for node, message in _by_node(roster, request, replies, notes):
        _look(node, message, sent, by_name, notes)
    taken: dict[str, int] = {}
    for node, reply in list(notes.good.items()):
        if reply.name in taken:
            del notes.good[node]
            notes.doubles.add(node)
            notes.ignored.append(f"node {node}: client {reply.name!r} has answered already, as another node")
            continue
        try:
            roster = roster.meet(node, reply.name, sent.instructions.round, reply.metrics.get(EXAMPLES))
            taken[reply.name] = node
        except SafariError as error:
            del notes.good[node]
            notes.doubles.add(node)
            notes.ignored.append(f"node {node}: {error}")
    seats = roster.seats(set(request.messages.values()) - notes.doubles)
    return _collected(roster, request, seats, notes)


def _by_node(
    roster: Roster, request: Request, replies: Iterable[Message], notes: _Notes
) -> list[tuple[int, Message]]:
    """Replies with the nodes that were asked, in an order that does not hang on who was faster."""
    found: dict[int, Message] = {}
    for message in replies:
        node = request.messages.get(message.metadata.reply_to_message_id)
        if node is None:
            notes.ignored.append(
                f"node {message.metadata.src_node_id}: a reply to a message that was not sent in this round"
            )
        elif node in found:
            notes.ignored.append(f"node {node}: a second reply")
        else:
            found[node] = message
    # Who had a name before keeps it against a newcomer that claims it.
    return sorted(found.items(), key=lambda item: (item[0] not in roster.nodes, item[0]))


def _look(node: int, message: Message, sent: Broadcast, by_name: bool, notes: _Notes) -> None:
    if message.has_error():
        error = message.error
        notes.bad[node] = f"error {error.code}: {_short(error.reason or 'no reason given')}"
        if error.code == UPLINK_LOST:
            notes.trained.add(node)
        elif error.code != DOWNLINK_LOST:
            notes.failed.add(node)
        return
    notes.trained.add(node)
    try:
        notes.good[node] = read_reply(message, node, sent, by_name)
    except SafariError as error:
        notes.bad[node] = _short(str(error))
        notes.refused.add(node)


def _collected(roster: Roster, request: Request, seats: Mapping[int, int], notes: _Notes) -> Collected:
    good = {seats[node]: reply for node, reply in notes.good.items()}
    silent = f"no reply within {request.timeout:g} s"
    reasons = {seat: "not connected" for seat in request.absent if seat not in good}
    for node, seat in seats.items():
        if seat not in good:
            reasons[seat] = notes.bad.get(node, silent)
    return Collected(
        roster=roster,
        cohort=tuple(sorted({*seats.values(), *request.absent})),
        replies=dict(sorted(good.items())),
        refused={seats[node]: notes.bad[node] for node in sorted(notes.refused) if node in seats},
        reasons=dict(sorted(reasons.items())),
        trained=tuple(sorted({seats[node] for node in notes.trained if node in seats})),
        failed=tuple(sorted({seats[node] for node in notes.failed if node in seats})),
        ignored=tuple(notes.ignored),
        nodes={seat: node for node, seat in sorted(seats.items(), key=lambda item: item[1])},
    )


def _short(text: str) -> str:
    """The last line of a traceback says what happened."""
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."
