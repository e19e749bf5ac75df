"""A round's replies, matched to the clients that were asked: who arrived, who is missing, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flwr.app import Error, Message

from safari.errors import SafariError
from safari.flower.broadcast import Broadcast
from safari.flower.log import log
from safari.flower.protocol import DOWNLINK_LOST, UNREADABLE, UPLINK_LOST
from safari.flower.reply import NothingCameError, Reply, read_parts, read_reply
from safari.flower.roster import NoSeatError, Roster
from safari.flower.text import last_line, visible_traceback
from safari.text import visible

if TYPE_CHECKING:
    from safari.net.blocks import Delivery


@dataclass(frozen=True)
class Request:
    """Requests of a round, with which its replies are matched.

    `messages`: message id to node. `absent`: seats of clients that count as missing because they are not
    connected. `timeout`: the round's deadline in seconds. `online`: all nodes that were connected. `spare`:
    seats that nodes without a name may hold when no seat is free. `patience`: rounds of silence after which a
    client's name and seat are no longer its own; None: they always are.
    """

    messages: Mapping[str, int]
    absent: tuple[int, ...]
    timeout: float
    online: frozenset[int] = frozenset()
    spare: tuple[int, ...] = ()
    patience: int | None = None


@dataclass(frozen=True)
class Collected:
    """Outcome of a round, by seat.

    `replies` can be used; `refused` came and cannot; `reasons` says for each of the missing why it is.
    `trained` are those that are known to have had the model, `failed` those that answered with an error of
    their own. `ignored` are replies that belong to nobody, and parts of replies that do not count;
    `turned_away` are the names for which no seat was left.
    """

    roster: Roster
    cohort: tuple[int, ...]
    replies: Mapping[int, Reply]
    refused: Mapping[int, str]
    reasons: Mapping[int, str]
    trained: tuple[int, ...]
    failed: tuple[int, ...]
    ignored: tuple[str, ...]
    turned_away: tuple[str, ...]
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
    turned_away: list[str] = field(default_factory=list)


def collect(
    roster: Roster,
    request: Request,
    replies: Iterable[Message],
    sent: Broadcast,
    *,
    by_name: bool = True,
    weighted: bool = False,
    deliveries: Mapping[int, Delivery] | None = None,
) -> Collected:
    """Match the replies to the clients that were asked; the others are missing.

    `by_name`: believe the names that clients give, within what the roster allows. `weighted`: sample counts
    weigh the models, so that a reply with an impossible one is refused. `deliveries`: what came of each
    node's model in datagrams, where replies hold none.

    A reply is matched by the message that it answers, never by what it says of its sender: error replies
    that the SuperLink writes have an id of their own.
    """
    notes = _Notes()
    for node, message in _by_node(roster, request, replies, notes):
        _look(node, message, _reader(sent, by_name, weighted, deliveries), notes)
    roster = _admit(roster, request, sent.instructions.round, notes)
    # Seats of clients that have answered, or were asked, are not available to nodes without a name.
    asked = set(request.messages.values()) - notes.doubles
    held = {roster.names[roster.nodes[node]] for node in asked if node in roster.nodes}
    seats = roster.seats(asked, [seat for seat in request.spare if seat not in held])
    return _collected(roster, request, seats, notes)


def _admit(roster: Roster, request: Request, round: int, notes: _Notes) -> Roster:
    """The roster after all good replies; those that cannot have the name that they give are ignored."""
    online = request.online | set(request.messages.values())
    for node, reply in list(notes.good.items()):
        try:
            roster = roster.admit(
                node,
                reply.name,
                round,
                online=online,
                patience=request.patience,
                weight=reply.metrics.examples,
                came=reply.packets,
            )
        except SafariError as error:
            del notes.good[node]
            if node in roster.nodes:
                # A client that is known and does not answer as itself is missing.
                _refuse(node, str(error), notes)
                continue
            notes.doubles.add(node)
            notes.ignored.append(f"node {node}: {visible(str(error))}")
            if isinstance(error, NoSeatError):
                notes.turned_away.append(reply.name)
    return roster


def _by_node(
    roster: Roster, request: Request, replies: Iterable[Message], notes: _Notes
) -> list[tuple[int, Message]]:
    """Replies with the nodes that were asked, in an order that does not depend on who was faster."""
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


def _reader(
    sent: Broadcast, by_name: bool, weighted: bool, deliveries: Mapping[int, Delivery] | None
) -> Callable[[Message, int], Reply]:
    def read(message: Message, node: int) -> Reply:
        if deliveries is None:
            return read_reply(message, node, sent, by_name=by_name, weighted=weighted)
        return read_parts(message, node, sent, deliveries.get(node), by_name=by_name, weighted=weighted)

    return read


def _look(node: int, message: Message, read: Callable[[Message, int], Reply], notes: _Notes) -> None:
    """Read one reply. An unusable one does not end the round."""
    if message.has_error():
        _look_at_error(node, message.error, notes)
        return
    notes.trained.add(node)
    try:
        reply = read(message, node)
    except NothingCameError as error:
        notes.bad[node] = str(error)
    except SafariError as error:
        _refuse(node, str(error), notes)
    except Exception as error:
        # The readers should not let anything else through. Where one does, the client is refused and the
        # traceback is in the log.
        log.error("the reply of node %s could not be read\n%s", node, visible_traceback())
        _refuse(node, f"the reply could not be read: {type(error).__name__}: {error}", notes)
    else:
        notes.good[node] = reply
        wrong = reply.metrics.wrong_examples
        told = (*((wrong,) if wrong else ()), *reply.metrics.ignored)
        notes.ignored += [f"node {node}: {visible(line)}" for line in told]


def _look_at_error(node: int, error: Error, notes: _Notes) -> None:
    words = last_line(error.reason or "") or "no reason given"
    if error.code == UNREADABLE:
        _refuse(node, words, notes)
        return
    notes.bad[node] = f"error {error.code}: {words}"
    if error.code == UPLINK_LOST:
        notes.trained.add(node)
    elif error.code != DOWNLINK_LOST:
        notes.failed.add(node)


def _refuse(node: int, reason: str, notes: _Notes) -> None:
    notes.bad[node] = visible(reason)
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
        turned_away=tuple(notes.turned_away),
        nodes={seat: node for node, seat in sorted(seats.items(), key=lambda item: item[1])},
    )
