"""The strict reader: what numpy.save writes comes back, anything else is refused in words."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import io
import pickle
import zipfile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from safari.errors import SafariError
from safari.flower.npy import read_npy

TYPES = ["<f4", ">f4", "<f2", "<f8", ">f8", "|i1", "<i8", ">i2", "|u1", "<u4"]


def saved(array: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)
    return buffer.getvalue()


@given(st.sampled_from(TYPES), array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5), st.data())
def test_what_numpy_writes_is_read(kind, shape, data):
    array = data.draw(arrays(np.dtype(kind), shape))
    if data.draw(st.booleans()):
        array = array.copy(order="F")
    found = read_npy(saved(array, version=data.draw(st.sampled_from([(1, 0), (2, 0)]))), shape)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array, equal_nan=array.dtype.kind == "f")


GOOD = saved(np.zeros((2, 3), np.float32))


def with_header(text: str, rest: bytes = bytes(24)) -> bytes:
    head = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + rest


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a.npy", GOOD)
    return buffer.getvalue()


def header(descr="'<f4'", fortran="False", shape="(2, 3)") -> bytes:
    return with_header(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n")


HEADER = "the header must be as numpy.save writes it"
WRONG = {
    "nothing": (b"", "must begin with 934e554d5059, got nothing"),
    "a zip archive": (archive(), "must begin with 934e554d5059, got 504b03041400"),
    "a pickle": (pickle.dumps([1.0]), "must begin with 934e554d5059"),
    "the magic alone": (GOOD[:6], r"version must be 1.0 or 2.0, got $"),
    "version 3": (GOOD[:6] + b"\x03\x00" + GOOD[8:], "version must be 1.0 or 2.0, got 3.0"),
    "no length": (GOOD[:9], "the header is cut short"),
    "half a header": (GOOD[:40], "the header is cut short"),
    "a long header": (with_header(" " * 3000), "at most 2048 bytes, got 3000"),
    "an endless header": (GOOD[:6] + b"\x02\x00\xff\xff\xff\xff", "at most 2048 bytes, got 4294967295"),
    "deep": (with_header("(" * 2000), HEADER),
    "deep, closed": (with_header("(" * 900 + ")" * 900), HEADER),
    "many signs": (with_header("{'descr': '<f4', 'shape': " + "-" * 1500 + "1}"), HEADER),
    "a call": (with_header("{'descr': __import__('os').system('true')}"), HEADER),
    "no dict": (with_header("3"), HEADER),
    "nul bytes": (with_header("\0" * 64), HEADER),
    "not ASCII": (with_header("{'descr': 'é4', 'fortran_order': False, 'shape': (2, 3), }"), HEADER),
    "other digits": (header(shape="(²,)"), HEADER),
    "objects": (header(descr="'|O'"), HEADER),
    "sized objects": (header(descr="'|O8'"), HEADER),
    "records": (header(descr="[('a', '<f4')]"), HEADER),
    "text": (header(descr="'<U4'"), HEADER),
    "complex": (header(descr="'<c8'"), "numbers must be one of f2, .*, got '<c8'"),
    "long doubles": (header(descr="'<f16'"), "got '<f16'"),
    "bools": (header(descr="'|b1'"), "got '|b1'"),
    "odd floats": (header(descr="'<f3'"), "got '<f3'"),
    "a negative shape": (header(shape="(-2, 3)"), HEADER),
    "another shape": (header(shape="(3, 2)"), r"shape must be \(2, 3\), got \(3, 2\)"),
    "a huge shape": (header(shape=f"({'9' * 60},)"), r"shape must be \(2, 3\), got \(999"),
    "many dimensions": (header(shape=f"({'1, ' * 600})"), r"shape must be \(2, 3\), got \(1, 1, "),
    "a float for a shape": (header(shape="2.0"), HEADER),
    "too few bytes": (GOOD[:-1], "24 bytes must follow the header, got 23"),
    "too many bytes": (GOOD + b"\0", "24 bytes must follow the header, got 25"),
    "another size of numbers": (header(descr="'<f8'"), "48 bytes must follow the header, got 24"),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=list(WRONG))
def test_anything_else_is_refused(data, message):
    with pytest.raises(SafariError, match=message):
        read_npy(data, (2, 3))


def outcome(data: bytes) -> str:
    """The words of a refusal, or nothing where the bytes are an array; any other exception is a failure."""
    try:
        assert read_npy(data, (2, 3)).shape == (2, 3)
    except SafariError as error:
        return str(error)
    return ""


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_raise_anything_else(data, begin_well):
    assert outcome(GOOD[:10] + data if begin_well else data).isprintable()


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 7))
def test_no_flipped_bit_raises_anything_else(place, bit):
    data = bytearray(GOOD)
    data[place] ^= 1 << bit
    assert outcome(bytes(data)).isprintable()
