"""Fields of protobuf messages are counted as a parser would make them."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as AnyMessage

from safari.lab.fields import MalformedError, count_fields


def parsed_fields(message: AnyMessage) -> int:
    """The same by protobuf's own parser: a field each, and what is in it."""
    count = 0
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.message_type is not None:
            count += sum(1 + parsed_fields(inner) for inner in values)
        else:
            count += 1
    return count


def request(rng: random.Random) -> PushMessagesRequest:
    def tree(depth: int) -> ObjectTree:
        return ObjectTree(
            object_id=str(rng.random()),
            children=[tree(depth - 1) for _ in range(rng.randrange(4) if depth else 0)],
        )

    return PushMessagesRequest(
        node=Node(node_id=rng.randrange(1, 2**63)),
        messages_list=[
            Message(
                metadata=Metadata(src_node_id=rng.randrange(1, 2**63), message_type="x" * rng.randrange(300))
            )
            for _ in range(rng.randrange(5))
        ],
        message_object_trees=[tree(3) for _ in range(rng.randrange(4))],
        clientapp_runtime_list=[0.5] * rng.randrange(4),
    )


def test_as_many_as_protobuf_finds():
    rng = random.Random(0)
    for _ in range(100):
        message = request(rng)
        data, expected = message.SerializeToString(), parsed_fields(message)
        assert count_fields(data, message.DESCRIPTOR, expected) == expected
        with pytest.raises(MalformedError, match=f"has more than {expected - 1:,} fields"):
            count_fields(data, message.DESCRIPTOR, expected - 1)


def test_damaged_bytes_are_refused_or_counted_in_bounded_steps():
    """Whatever protobuf's parser takes has been counted, so that no number of objects escapes."""
    rng, refused, taken = random.Random(1), 0, 0
    for _ in range(5000):
        data = bytearray(request(rng).SerializeToString())
        data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            message = PushMessagesRequest.FromString(bytes(data))
        except DecodeError:
            message = None
        try:
            count = count_fields(bytes(data), PushMessagesRequest.DESCRIPTOR, 10_000)
        except MalformedError:
            refused += 1
            continue
        taken += 1
        assert message is None or parsed_fields(message) <= count
    assert min(refused, taken) > 100


@pytest.mark.parametrize("data", [b"\x0b", b"\x0c", b"\xff" * 11, b"\x12\x05ab", b"\x09\x00", b"\x12"])
def test_what_is_no_message(data):
    """Groups, numbers of too many bytes, and fields that end too late."""
    with pytest.raises(MalformedError):
        count_fields(data, PushMessagesRequest.DESCRIPTOR, 100)
