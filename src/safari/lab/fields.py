"""Count the fields of a protobuf message in its bytes: a parser makes an object of each."""

from __future__ import annotations

from typing import Any

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT = 10


class MalformedError(ValueError):
    """The bytes are no message, or have more fields than allowed."""


def count_fields(data: bytes, descriptor: Any, most: int) -> int:
    """The fields of a message and of those in it; MalformedError for more than `most`, and then nothing more is read.

    Args:
        data: the message as it was sent.
        descriptor: its type, which says what in it is a message again.
        most: how many fields it may have.

    >>> from google.protobuf.descriptor_pb2 import DescriptorProto
    >>> message = DescriptorProto(name="outer", nested_type=[DescriptorProto(name="inner"), DescriptorProto()])
    >>> count_fields(message.SerializeToString(), DescriptorProto.DESCRIPTOR, 4)
    4
    """
    count = 0
    todo = [(0, len(data), descriptor)]
    while todo:
        at, end, kind = todo.pop()
        while at < end:
            count += 1
            if count > most:
                raise MalformedError(f"has more than {most:,} fields")
            tag, at = _varint(data, at, end)
            form = tag & 7
            if form == _BYTES:
                size, at = _varint(data, at, end)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    todo.append((at, at + size, field.message_type))
                at += size
            elif form == _VARINT:
                _, at = _varint(data, at, end)
            elif form in (_EIGHT, _FOUR):
                at += 8 if form == _EIGHT else 4
            else:
                raise MalformedError(f"has a field of the form {form}, which no call has")
            if at > end:
                raise MalformedError("ends within a field")
    return count


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(min(_LONGEST_VARINT, end - at)):
        byte = data[at + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise MalformedError("ends within a number")
