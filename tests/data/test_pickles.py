from __future__ import annotations

import builtins
import os
import pickle
import struct
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safari.data.pickles import load_arrays
from safari.errors import DataError

ARRAY = np.arange(6, dtype=np.uint8).reshape(2, 3)


def python_2_pickle(array: np.ndarray, labels: list[int], module: bytes = b"numpy.core.multiarray") -> bytes:
    """What Python 2's cPickle wrote, opcode by opcode: its strings are bytes without an encoding."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    raw = array.tobytes()
    shape = number(array.shape[0]) + number(array.shape[1]) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + short(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    return b"".join(
        [
            b"\x80\x02}(",
            short(b"batch_label") + short(b"training batch 1 of 5"),
            short(b"labels") + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            short(b"data") + b"c" + module + b"\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b"),
            b"\x87R(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb",
            b"u.",
        ]
    )


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_what_python_2_wrote(module):
    found = load_arrays(python_2_pickle(ARRAY, [3, 1], module), "f")
    assert list(found) == ["batch_label", "labels", "data"]
    assert found["batch_label"] == b"training batch 1 of 5"
    assert found["labels"] == [3, 1]
    np.testing.assert_array_equal(found["data"], ARRAY)
    assert found["data"].dtype == np.uint8


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("array", [ARRAY, np.asfortranarray(ARRAY), ARRAY[:, ::2]])
def test_what_python_3_writes_with_any_protocol(protocol, array):
    found = load_arrays(pickle.dumps({"data": array, b"labels": [1]}, protocol=protocol), "f")
    np.testing.assert_array_equal(found["data"], array)
    assert found["labels"] == [1]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_old_spelling_of_numpy(protocol):
    new = pickle.dumps({"data": ARRAY}, protocol=protocol)
    old = new.replace(b"numpy._core", b"numpy.core")
    # Protocol 4 and later give the length of a name before it, and of a frame before that.
    old = old.replace(b"\x8c\x16numpy.core", b"\x8c\x15numpy.core")
    old = old.replace(b"\x8c\x13numpy.core", b"\x8c\x12numpy.core")
    if protocol >= 4:
        old = old[:3] + struct.pack("<Q", len(old) - 11) + old[11:]
    assert b"numpy.core" in old
    np.testing.assert_array_equal(load_arrays(old, "f")["data"], ARRAY)


class Calls:
    """Pickles as a call of `function` with `args`."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def refused(value: object, protocol: int = 2) -> str:
    with pytest.raises(DataError) as error:
        load_arrays(value if isinstance(value, bytes) else pickle.dumps(value, protocol=protocol), "f")
    message = str(error.value)
    assert message.startswith("f: not a pickle of plain values and uint8 arrays: ")
    return message.split("arrays: ", 1)[1]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_and_does_not_run(protocol, tmp_path):
    trace = tmp_path / "ran"
    system = {"data": Calls(os.system, f"touch {trace}")}
    assert refused(system, protocol) == f"refused the name {os.system.__module__}.system"
    evaluated = {"data": Calls(builtins.eval, f"open({str(trace)!r}, 'w')")}
    # Protocols before 3 write the name that the module had in Python 2.
    name = "builtins" if protocol >= 3 else "__builtin__"
    assert refused(evaluated, protocol) == f"refused the name {name}.eval"
    assert not trace.exists()


@pytest.mark.parametrize("name", ["numpy.load", "numpy.ndarray.tofile", "builtins.getattr", "pickle.loads"])
def test_other_names_are_refused(name):
    module, _, attribute = name.partition(".")
    raw = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    raw += b"\x8c" + bytes([len(attribute)]) + attribute.encode() + b"\x93."
    assert refused(raw) == f"refused the name {name}"


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.array([None, "x"], dtype=object), "O8"),
        (np.array([1.5]), "f8"),
        (np.array([1], np.int8), "i1"),
        (np.zeros(2, dtype=[("a", "u1")]), "V1"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_of_anything_else_are_refused(array, kind, protocol):
    assert refused({"data": array}, protocol) == f"refused an array that is not of uint8: dtype {kind!r}"


def test_a_uint8_array_with_objects_inside_is_refused():
    good = python_2_pickle(ARRAY, [0, 1])
    raw = b"T" + struct.pack("<i", 6) + ARRAY.tobytes()
    assert refused(good.replace(raw, b"](K\x01K\x02e")) == "an array must come as bytes, got list"


def test_an_array_that_claims_another_size_is_refused():
    good = python_2_pickle(ARRAY, [0, 1])
    claimed = good.replace(b"J\x02\x00\x00\x00J\x03", b"J\x02\x00\x00\x00J\x7f")
    assert refused(claimed) == "an array of shape [2, 127] must have as many bytes, got 6"
    negative = good.replace(b"J\x02\x00\x00\x00J\x03\x00\x00\x00", b"J\xff\xff\xff\xffJ\xfa\xff\xff\xff")
    assert refused(negative) == "an array's shape must be a tuple of sizes"


def test_names_are_only_what_arrays_need_them_for():
    # BUILD with a dictionary of slots would set attributes of a plain function.
    assert refused(b"\x80\x02cnumpy\ndtype\nN}U\x05_callK\x01s\x86b.") == "refused to change Name"
    assert refused(b"\x80\x02cnumpy\nndarray\n)R.") == "refused to call numpy.ndarray"
    assert refused(b"\x80\x02K\x01)R.") == "refused to call int"
    assert refused(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aU\x05utf-7\x86R.") == (
        "refused an encoding other than latin1"
    )
    assert refused(b"\x80\x02(cnumpy\ndtype\no.") == "refused the instruction OBJ"
    np.testing.assert_array_equal(load_arrays(python_2_pickle(ARRAY, [0]), "f")["data"], ARRAY)


@pytest.mark.parametrize("raw", [b"\x80\x02}r\xff\xff\xff\x7f.", b"}p2147483647\n."])
def test_a_high_index_costs_nothing(raw):
    assert load_arrays(raw, "f") == {}


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        # A tuple of a tuple of a tuple: as a key it was hashed by recursion, to the end of the C stack.
        (b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.", "expected names as keys, found tuple"),
        (b"\x80\x02}U\x01a)" + b"\x85" * 200_000 + b"s.", "expected plain values, lists of them and arrays"),
        (b"\x80\x02}U\x01a" + b"]" * 120_000 + b"a" * 119_999 + b"s.", "expected plain values, lists of"),
        # The product of huge sizes takes as long as their digits are many, squared.
        (
            python_2_pickle(ARRAY, [0]).replace(
                b"J\x02\x00\x00\x00", b"\x8b" + struct.pack("<i", 10_000) + b"\x7f" * 10_000
            ),
            "a whole number must have at most 64 bits",
        ),
        (
            python_2_pickle(ARRAY, [0]).replace(b"\x86cnumpy\ndtype", b"\x86\x85cnumpy\ndtype"),
            "an array's shape must be a tuple of sizes",
        ),
        # One long text, and many calls that each make another copy of it.
        (
            b"\x80\x02}U\x01ac_codecs\nencode\nq\x00X"
            + struct.pack("<I", 100_000)
            + b"x" * 100_000
            + b"q\x01U\x06latin1q\x02\x87"
            + b"h\x00h\x01h\x02\x86R" * 1000
            + b".",
            "its texts are longer together than the file",
        ),
        # The same text as a name, again and again.
        (
            b"\x80\x02}U"
            + b"\x05abcdeq\x000T"
            + struct.pack("<i", 100_000)
            + b"x" * 100_000
            + b"q\x000"
            + b"h\x00K\x01s" * 1000
            + b".",
            "a name must have at most 200 letters, got 100000",
        ),
        (b"\x80\x02}" + b"K\x010" * 150_000 + b".", "at most 250000 instructions are read"),
        (b"\x80\x02" + b"(" * 120_000 + b"t" * 120_000 + b".", "expected a dict, found tuple"),
        (b"\x80\x02}(K\x01", "pickle exhausted before seeing STOP"),
        (b"\x80\x02}(0.", "an instruction needs more values than there are"),
        (b"\x80\x02}u.", "a group ends that did not begin"),
        (b"\x80\x02h\x07.", "7"),
    ],
    ids=range(13),
)
def test_bombs_are_refused_for_what_their_bytes_cost(raw, problem):
    start = time.thread_time()
    assert refused(raw).startswith(problem)
    assert time.thread_time() - start < 5


def test_many_calls_for_one_text_take_no_more_memory_than_the_file():
    raw = b"\x80\x02}U\x01ac_codecs\nencode\nq\x00X" + struct.pack("<I", 1_000_000) + b"x" * 1_000_000
    raw += b"q\x01U\x06latin1q\x02\x87" + b"h\x00h\x01h\x02\x86R" * 1000 + b"."
    tracemalloc.start()
    try:
        refused(raw)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(raw)
    finally:
        tracemalloc.stop()


def test_an_array_of_many_dimensions_is_refused():
    raw = b"\x80\x02}U\x01acnumpy._core.multiarray\n_reconstruct\n)R(K\x01(" + b"K\x01" * 5
    raw += b"tcnumpy\ndtype\nU\x02u1\x85R\x89U\x01xtbs."
    assert refused(raw) == "an array must have at most 4 dimensions, got 5"


def test_what_an_error_shows_of_the_file_is_short_and_printable():
    raw = b"\x80\x02c" + b"\x1b[31m" + b"m" * 5000 + b"\nname\n."
    shown = refused(raw)
    assert shown.startswith("refused the name \\x1b[31mmmm")
    assert len(shown) < 300


def test_sizes_beyond_the_end_are_refused():
    assert "expected" in refused(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.")


def test_what_is_no_dictionary_of_names_is_refused():
    assert refused([1, 2]) == "expected a dict, found list"
    assert refused({1: 2}) == "expected names as keys, found int"
    assert (
        refused(b"\x80\x02}U\x01acnumpy._core.multiarray\n_reconstruct\n)Rs.") == "an array without contents"
    )


@given(st.binary(max_size=200))
def test_noise_gives_a_data_error_or_a_dictionary(raw):
    with suppress(DataError):
        assert isinstance(load_arrays(b"\x80\x02" + raw, "f"), dict)


@given(st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=300)
def test_one_changed_byte_gives_a_data_error_or_a_dictionary(place, value):
    raw = bytearray(python_2_pickle(ARRAY, [0, 1]))
    raw[place % len(raw)] = value
    with suppress(DataError):
        assert isinstance(load_arrays(bytes(raw), "f"), dict)
