"""What a cache can keep, under which ids, and how it knows what made it."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from datetime import datetime
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest

from asyncfeed import ArgumentError, ItemIdError, ItemTypeError
from asyncfeed.cache.fingerprint import MAX_NBYTES, Fingerprint
from asyncfeed.cache.ids import MAX_ID_NBYTES, Groups, check_id
from asyncfeed.cache.values import MAX_NDIM, digest_of, to_array, type_id

# -- values ------------------------------------------------------------------------------------------------------


class OnlyArray:
    """Offers ``__array__`` and nothing else."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.arange(3, dtype="i2")


class OnlyDLPack:
    """Offers DLPack and nothing else."""

    def __init__(self, inner: np.ndarray) -> None:
        self.inner = inner

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


STRUCT = np.dtype([("a", "u1"), ("b", "f4", (2, 3)), ("c", [("d", "c8"), ("e", "?")]), ("s", "S3")])
PADDED = np.dtype([("a", "u1"), ("b", "f8")], align=True)

KEPT = [
    *(np.zeros((2, 3), dtype) for dtype in ("?", "u1", "i8", "f2", "f4", "f8", "g", "F", "D", "G", "M8[ns]", "m8[us]")),
    np.zeros(3, STRUCT),
    np.zeros(3, PADDED),
    np.zeros(3, "V5"),
    np.zeros((0, 4), "f4"),
    np.zeros((), "f4"),
    np.zeros((1,) * MAX_NDIM, "f4"),
]


@pytest.mark.parametrize("value", KEPT, ids=lambda value: f"{value.dtype.kind}{value.dtype.itemsize}-{value.shape}")
def test_an_array_without_objects_stays_as_it_is(value: np.ndarray):
    kept = to_array(value)

    assert (kept.dtype, kept.shape, kept.tobytes()) == (value.dtype, value.shape, value.tobytes())


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (3, np.array(3)),
        (2.5, np.array(2.5)),
        (True, np.array(True)),
        (1j, np.array(1j)),
        (np.float32(2), np.array(2, "f4")),
        ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
        (range(3), np.arange(3)),
        (array("d", [1, 2]), np.array([1.0, 2.0])),
        (memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)),
        (OnlyArray(), np.arange(3, dtype="i2")),
        (OnlyDLPack(np.arange(4.0)), np.arange(4.0)),
        (np.zeros(2, [("a", "f4")]).view(np.recarray), np.zeros(2, [("a", "f4")])),
    ],
    ids=repr,
)
def test_what_becomes_an_array_without_loss_is_one(value: object, wanted: np.ndarray):
    kept = to_array(value)

    assert type(kept) is np.ndarray
    assert (kept.dtype, kept.shape, kept.tolist()) == (wanted.dtype, wanted.shape, wanted.tolist())


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">M8[s]", [("a", ">f4"), ("b", [("c", ">i2")])]], ids=str)
def test_a_foreign_byte_order_is_made_native(dtype: Any):
    value = np.frombuffer(bytes(range(24)), np.dtype(dtype))

    kept = to_array(value)

    assert kept.dtype == np.dtype(dtype).newbyteorder("=")
    assert kept.dtype.isnative
    assert kept.tolist() == value.tolist()


@pytest.mark.parametrize("value", [np.arange(12).reshape(3, 4).T, np.arange(12)[::-1], np.broadcast_to(7, (2, 3))])
def test_whatever_its_strides_an_array_is_kept_in_c_order(value: np.ndarray):
    kept = to_array(value)

    assert kept.flags.c_contiguous
    assert np.array_equal(kept, value)


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [(ml_dtypes.bfloat16, "f4"), (ml_dtypes.float8_e4m3fn, "f4"), (ml_dtypes.int4, "i1")],
)
def test_dtypes_that_numpy_lacks_are_widened_exactly(dtype: Any, wider: str):
    value = np.array([0, 1, 2.5, 7], dtype)

    kept = to_array(value)

    assert kept.dtype == wider
    assert np.array_equal(kept.astype(dtype), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        b"bytes",
        ["a", "b"],
        [[1, 2], [3]],
        [None, 1],
        {"a": 1},
        {1, 2},
        object(),
        datetime(2026, 1, 1),
        2**70,
        np.array([object()]),
        np.array(["a"]),
        np.array([b"a"]),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.zeros(2, [("name", "U3")]),
        np.zeros(2, [("when", "M8[s]")]),
        np.zeros(2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
        np.zeros(2, "V0"),
        np.zeros(2, [(f"a_field_of_many_{i}", "f4") for i in range(1000)]),
        (i for i in range(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_come_back_as_it_is_is_refused_and_its_type_named(value: object):
    with pytest.raises(ItemTypeError, match=type(value).__name__) as caught:
        to_array(value)

    assert isinstance(caught.value, TypeError)


def test_more_dimensions_than_hdf5_has_are_refused():
    try:
        value = np.zeros((1,) * (MAX_NDIM + 1))
    except ValueError:
        pytest.skip("numpy 1 has no more either")

    with pytest.raises(ItemTypeError, match="33 dimensions"):
        to_array(value)


def test_an_enum_of_h5py_is_an_integer_and_does_not_make_enums_of_others():
    """numpy takes a dtype with metadata for the same as one without; h5py does not."""
    enum = np.zeros(3, h5py.enum_dtype({"a": 0, "b": 1}, basetype="i4"))

    kept = to_array(enum)

    assert kept.dtype.metadata is None
    assert isinstance(type_id(to_array(np.zeros(3, "i4")).dtype), h5py.h5t.TypeIntegerID)


# -- digests of arguments ----------------------------------------------------------------------------------------


class Colour(IntEnum):
    RED = 1


ARGUMENTS: list[tuple[object, ...]] = [
    (),
    (None,),
    (1,),
    (1.0,),
    (True,),
    (1 + 0j,),
    ("1",),
    (b"1",),
    ("a", "b"),
    ("ab", ""),
    (["a", "b"],),
    ([["a"], "b"],),
    ({"a": 1},),
    ([("a", 1)],),
    (["dict", ("a", 1)],),
    ({1, 2},),
    ([1, 2],),
    ([2, 1],),
    (Path("/tmp/x"),),
    (["path", "/tmp/x"],),
    ("/tmp/x",),
    (float("nan"),),
    ("\ud800",),
    ("\U0001fae8",),
    (np.zeros(3, "f4"),),
    (np.zeros(3, "f8"),),
    (np.zeros((3, 1), "f4"),),
    (np.zeros((0, 3), "f4"),),
    (np.zeros((3, 0), "f4"),),
    (np.zeros(3, "M8[s]"),),
    (np.zeros(3, [("a", "f4")]),),
]


def test_different_arguments_have_different_digests():
    digests = [digest_of(arguments) for arguments in ARGUMENTS]

    assert len(set(digests)) == len(ARGUMENTS)
    assert {len(digest) for digest in digests} == {16}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 3, 1}),
        (frozenset({1}), {1}),
        (b"x", bytearray(b"x")),
        (Path("/x"), PurePosixPath("/x")),
        (np.arange(3, dtype=">f4"), np.arange(3, dtype="<f4")),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (np.float64(0.1), 0.1),
        (np.str_("x"), "x"),
        (Colour.RED, 1),
        (float("nan"), float("nan")),
    ],
)
def test_equal_arguments_have_one_digest_however_they_are_spelt(one: object, other: object):
    assert digest_of((one,)) == digest_of((other,))


def test_a_digest_is_the_same_in_another_process_with_other_hashes():
    code = (
        "from asyncfeed.cache.values import digest_of; import numpy as np;"
        "print(digest_of(({'a', 'b', 'c'}, {'x': 1.5}, 'é', np.arange(3, dtype='f4'))).hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }

    assert printed == {digest_of(({"a", "b", "c"}, {"x": 1.5}, "é", np.arange(3, dtype="f4"))).hex() + "\n"}


@pytest.mark.parametrize("value", [object(), [object()], {"a": object()}, print, np.array([object()])], ids=repr)
def test_an_argument_without_a_value_of_its_own_is_refused(value: object):
    with pytest.raises(ItemTypeError, match="check_inputs"):
        digest_of((1, value))


# -- ids ---------------------------------------------------------------------------------------------------------

GOOD_IDS = ["a", "spk/utt", "a.b", "...", ".a", "a b", "é", "e\u0301", "\n", "-", "a\\b", "x" * MAX_ID_NBYTES]
BAD_IDS = ["", "/", "/a", "a/", "a//b", ".", "..", "a/./b", "a/..", "a\0b", "\ud800", "x" * 70_000, "é" * 40_000]


@pytest.mark.parametrize("uid", GOOD_IDS, ids=lambda uid: repr(uid[:10]))
def test_a_good_id_is_itself(uid: str):
    assert check_id(uid) == uid


@pytest.mark.parametrize("uid", BAD_IDS, ids=lambda uid: repr(uid[:10]))
def test_an_id_that_would_not_come_back_is_refused(uid: str):
    with pytest.raises(ItemIdError) as caught:
        check_id(uid)

    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("uid", [None, 3, b"a", ("a",)])
def test_an_id_is_a_string(uid: object):
    with pytest.raises(ItemIdError, match=type(uid).__name__):
        check_id(uid)


@pytest.mark.parametrize(
    ("first", "second"), [("a/b", "a"), ("a/b/c", "a"), ("a/b/c", "a/b"), ("a", "a/b"), ("a", "a/b/c")]
)
def test_an_id_that_lies_below_another_cannot_stand_beside_it(first: str, second: str):
    groups = Groups([first])

    with pytest.raises(ItemIdError, match="group or a dataset"):
        groups.check(second, {first})


@pytest.mark.parametrize("second", ["ab", "a/c", "a/b", "b/a"])
def test_ids_of_one_group_stand_side_by_side(second: str):
    groups = Groups(["a/b"])

    groups.check(second, {"a/b"})
    groups.add(second)

    groups.check("c", {"a/b", second})


# -- fingerprints ------------------------------------------------------------------------------------------------

MADE = Fingerprint("v1", ("id", "sig"), ("feats",))


@pytest.mark.parametrize("version", [None, "v1", 3, 2.5, "é\n", ""])
def test_a_fingerprint_comes_back_from_its_text(version: Any):
    made = Fingerprint.checked(version, ("id", "sig"), None)

    assert Fingerprint.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["provides"] is None


@pytest.mark.parametrize("version", [True, b"v1", ("a",), np.int64(3), float("nan"), "x" * MAX_NBYTES])
def test_a_version_that_cannot_be_written_down_or_compared_is_refused(version: Any):
    with pytest.raises(ArgumentError):
        Fingerprint.checked(version, None, None)


OTHERS = [
    None,
    Fingerprint("v2", ("id", "sig"), ("feats",)),
    Fingerprint("v1", ("id",), ("feats",)),
    Fingerprint("v1", ("id", "sig"), ("other",)),
]


@pytest.mark.parametrize("found", OTHERS, ids=str)
def test_what_differs_in_anything_is_accepted_by_nobody(found: Fingerprint | None):
    assert not MADE.accepts(found, writing=True)
    assert not MADE.accepts(found, writing=False)


def test_the_same_is_accepted_by_all():
    assert MADE.accepts(Fingerprint("v1", ("id", "sig"), ("feats",)), writing=True)
    assert MADE.accepts(Fingerprint("v1", ("id", "sig"), ("feats",)), writing=False)


@pytest.mark.parametrize("found", [MADE, None, Fingerprint()], ids=str)
def test_a_reader_that_states_nothing_takes_what_is_there_and_a_writer_only_its_like(found: Fingerprint | None):
    assert Fingerprint().accepts(found, writing=False)
    assert Fingerprint().accepts(found, writing=True) == (found == Fingerprint())
