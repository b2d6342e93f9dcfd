"""`CachedItem`: what values, ids and arguments become, and when a cache is stale."""

from __future__ import annotations

import asyncio
import decimal
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncfeed import (
    CachedItem,
    CacheMissError,
    Feed,
    ItemIdError,
    ItemTypeError,
    StaleCacheError,
    UnreadableDatasetError,
)


async def outcome_of(function: Callable[..., Any], *args: Any) -> Any:
    """What a call gives, or raises."""
    try:
        return await function(*args)
    except Exception as error:  # noqa: BLE001 - an outcome like any other
        return error


# -- values ----------------------------------------------------------------------------------------------------------


class WithArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(6, dtype="f4").reshape(2, 3)


class WithDLPack:
    """Nothing but DLPack, as some libraries for GPUs have it."""

    def __init__(self) -> None:
        self._array = np.arange(6, dtype="f4").reshape(2, 3)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


ARRAY = np.arange(6, dtype="f4").reshape(2, 3)
BFLOAT = np.array([1.5, -2.0, 3e38, 1e-40, np.inf], ml_dtypes.bfloat16)
VALUES = {
    "float": (2.5, np.float64(2.5)),
    "int": (7, np.int64(7)),
    "bool": (True, np.bool_(True)),
    "complex": (1 + 2j, np.complex128(1 + 2j)),
    "list": ([1, 2, 3], np.array([1, 2, 3])),
    "nested": ([[1.0, 2.0], [3.0, 4.0]], np.array([[1.0, 2.0], [3.0, 4.0]])),
    "tuple": ((1.0, 2.0), np.array([1.0, 2.0])),
    "range": (range(4), np.arange(4)),
    "no elements": ([], np.array([])),
    "0-d": (np.array(3, "i2"), np.array(3, "i2")),
    "numpy scalar": (np.float32(1.25), np.array(1.25, "f4")),
    "f2": (np.arange(5, dtype="f2"), np.arange(5, dtype="f2")),
    "f4": (ARRAY, ARRAY),
    "c8": (ARRAY.astype("c8") * 1j, ARRAY.astype("c8") * 1j),
    "u1": (np.arange(256, dtype="u1"), np.arange(256, dtype="u1")),
    "bools": (np.array([True, False]), np.array([True, False])),
    "big-endian": (np.arange(5, dtype=">f4"), np.arange(5, dtype="f4")),
    "big-endian i2": (np.arange(5, dtype=">i2"), np.arange(5, dtype="i2")),
    "Fortran order": (np.asfortranarray(ARRAY), ARRAY),
    "every other": (np.arange(12.0)[::-2], np.arange(12.0)[::-2].copy()),
    "empty": (np.zeros((0, 40), "f4"), np.zeros((0, 40), "f4")),
    "no features": (np.zeros((3, 0), "f4"), np.zeros((3, 0), "f4")),
    "not a number": (np.array([np.nan, -0.0, np.inf]), np.array([np.nan, -0.0, np.inf])),
    "structured": (np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")])),
    "times": (np.array(["2020-01-01"], "M8[s]"), np.array(["2020-01-01"], "M8[s]")),
    "bfloat16": (BFLOAT, BFLOAT.astype("f4")),
    "__array__": (WithArray(), ARRAY),
    "DLPack": (WithDLPack(), ARRAY),
}


def same(a: np.ndarray, b: Any) -> bool:
    b = np.asarray(b)
    return type(a) is np.ndarray and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_value_is_the_same_array_on_miss_and_hit_in_journal_and_file(where, compression):
    async def found_by(item):
        found = []
        for name in VALUES:
            found += [(name, array) for array in (await item.compute(name), await item.get(name), item[name])]
        found += zip(VALUES, await item.get_many(VALUES), strict=True)
        found += [pair async for pair in item]
        return found

    async def main():
        async with CachedItem(where, lambda uid: VALUES[uid][0], compression=compression) as item:
            for name in list(VALUES)[::2]:
                await item.put(name, VALUES[name][0])
            found = await found_by(item)
            await item.to_reader()
            return found + await found_by(item)

    found = asyncio.run(main())

    assert len(found) == 10 * len(VALUES)
    assert [name for name, array in found if not same(array, VALUES[name][1])] == []
    assert all(a.flags.c_contiguous and a.flags.writeable and a.dtype.isnative for _, a in found)


def test_tensors_of_torch_are_kept_exactly(where):
    torch = pytest.importorskip("torch")
    tensors = {
        "f4": (torch.arange(6.0).reshape(2, 3), ARRAY),
        "needs a gradient": (torch.arange(6.0).reshape(2, 3).requires_grad_(), ARRAY),
        "bf16": (torch.tensor([1.5, -2.0, 3e38, 1e-40, torch.inf], dtype=torch.bfloat16), BFLOAT.astype("f4")),
        "f2": (torch.arange(5, dtype=torch.float16), np.arange(5, dtype="f2")),
        "bool": (torch.tensor([True, False]), np.array([True, False])),
        "0-d": (torch.tensor(3), np.array(3)),
        "transposed": (torch.arange(6.0).reshape(3, 2).T, np.arange(6, dtype="f4").reshape(3, 2).T.copy()),
        "conjugate": (torch.tensor([1 + 2j]).conj(), np.array([1 - 2j], "c8")),
    }

    async def main():
        async with CachedItem(where, lambda uid: tensors[uid][0]) as item:
            missed = {uid: await item.compute(uid) for uid in tensors}
            await item.to_reader()
            sparse = torch.eye(2).to_sparse()
            await item.to_writer()
            return missed, {uid: await item.compute(uid) for uid in tensors}, await outcome_of(item.put, "z", sparse)

    missed, hit, error = asyncio.run(main())

    assert all(same(missed[uid], wanted) and same(hit[uid], wanted) for uid, (_, wanted) in tensors.items())
    assert isinstance(error, ItemTypeError)
    assert "Tensor" in str(error)


class Opaque:
    pass


REFUSED = {
    "None": (None, "NoneType"),
    "str": ("abc", "str"),
    "bytes": (b"abc", "bytes"),
    "dict": ({"a": 1}, "dict"),
    "set": ({1, 2}, "set"),
    "frozenset": (frozenset({1}), "frozenset"),
    "ragged": ([[1, 2], [3]], "list"),
    "strings": (["a", "b"], "list"),
    "object array": (np.array([1, None], object), "ndarray"),
    "array of str": (np.array(["a", "b"]), "ndarray"),
    "masked": (np.ma.masked_array([1, 2], mask=[True, False]), "MaskedArray"),
    "object": (Opaque(), "Opaque"),
    "generator": ((i for i in range(3)), "generator"),
    "decimal": (decimal.Decimal(1), "Decimal"),
    "objects within": (np.array([(1, None)], [("a", "i4"), ("b", object)]), "ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_array_of_numbers_is_refused_on_write_and_its_type_named(where, name):
    value, type_name = REFUSED[name]

    async def main():
        async with CachedItem(where, lambda uid: value) as item:
            errors = [await outcome_of(item.compute, "x"), await outcome_of(item.put, "y", value)]
            return errors, len(item)

    errors, num = asyncio.run(main())

    assert num == 0
    assert all(isinstance(error, ItemTypeError) and f"a {type_name} " in str(error) for error in errors)


@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_handed_out_is_the_callers_own(run, where, sealed):
    async def main():
        given = np.arange(4.0)
        async with CachedItem(where, lambda uid: given) as item:
            await item.put("put", given)
            first = await item.compute("computed")
            given[:] = first[:] = -1
            if sealed:
                await item.to_reader()
            for _ in range(2):
                many = await item.get_many(["put", "computed", "put"])
                many[0][:] = -2
                intact = [array.tolist() for array in many[1:]]
                for array in [await item.get("put"), item["computed"], await item.compute("put"), *many]:
                    array[:] = -3
            return intact, [array.tolist() async for _, array in item]

    intact, after = run(main)

    assert intact == after == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_a_scalar_in_a_cache_is_an_item_and_no_utterance(where):
    """D4: a feed says so when it opens."""

    async def main():
        async with CachedItem(where) as item:
            await item.put("utt", np.ones((3, 2)))
            await item.put("scalar", 1.0)
            await item.to_reader()

    asyncio.run(main())

    with pytest.raises(UnreadableDatasetError, match="'scalar'"):
        Feed(where).open()
    with Feed(where, unreadable="skip") as feed:
        assert len(list(feed)) == 3


# -- ids -------------------------------------------------------------------------------------------------------------

NFC, NFD = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
IDS = {
    "plain": "utt-1",
    "slash": "a/b",
    "deep": "spk/chapter/utt",
    "leading slash": "/a",
    "trailing slash": "a/",
    "two slashes": "a//b",
    "only a slash": "/",
    "dot": ".",
    "two dots": "..",
    "dot first": "./a",
    "dots within": "a/../b",
    "dotted": "a.b..c",
    "three dots": "...",
    "space": " ",
    "newline": "a\nb",
    "tab": "\t",
    "NUL": "a\0b",
    "only NUL": "\0",
    "quotes": "'\"",
    "backslash": "a\\b",
    "NFC": NFC,
    "NFD": NFD,
    "emoji": "\U0001f600",
    "right to left": "\u202eabc",
    "a lone surrogate": "a\ud800",
    "70,000 characters": "x" * 70_000,
    "50,000 characters": "y" * 50_000,
    "70,000 characters in parts": "/".join(["z" * 100] * 700),
    "percent": "%s%d{}",
    "the name of the attribute": "asyncfeed",
}


@pytest.mark.parametrize("name", IDS)
def test_an_id_comes_back_as_itself_or_is_refused_on_write(where, name):
    uid = IDS[name]

    async def main():
        async with CachedItem(where, lambda uid: 1.0) as item:
            error = await outcome_of(item.put, uid, 2.0)
            if error is not None:
                return error, await outcome_of(item.compute, uid), await outcome_of(item.get, uid), list(item)
            before = list(item), (await item.get(uid)).item()
            await item.to_reader()
        async with CachedItem(where, mode="r") as item:
            return error, before, (list(item), (await item.get(uid)).item()), [uid async for uid, _ in item]

    error, second, third, keys = asyncio.run(main())

    if error is None:
        assert second == third == ([uid], 2.0)
        assert keys == [uid]
        with Feed(where, unreadable="skip") as feed:
            assert [skipped.utt for skipped in feed.skipped] == [uid]
    else:
        assert isinstance(error, ItemIdError)
        assert isinstance(error, ValueError)
        assert isinstance(second, ItemIdError)
        assert isinstance(third, CacheMissError)
        assert keys == []


@pytest.mark.parametrize("uid", ["", None, 3, b"a", ("a",), 1.5])
def test_what_is_no_id_is_refused_on_write_and_absent_on_reading(where, uid):
    async def main():
        async with CachedItem(where, lambda uid: 1.0) as item:
            errors = [await outcome_of(item.put, uid, 1.0), await outcome_of(item.compute, uid)]
            return errors, uid in item, await item.missing([uid])

    errors, there, missing = asyncio.run(main())

    assert all(isinstance(error, ItemIdError) for error in errors)
    assert (there, missing) == (False, [uid])


def test_two_ids_never_share_an_entry(run, where):
    uids = [uid for uid in IDS.values() if "\0" not in uid]

    async def main():
        async with CachedItem(where) as item:
            kept = [uid for i, uid in enumerate(uids) if await outcome_of(item.put, uid, i) is None]
            await item.to_reader()
            return kept, {uid: value.item() async for uid, value in item}, [item[uid].item() for uid in kept]

    kept, items, values = run(main)

    assert {NFC, NFD, "a/b", "asyncfeed", "..."} <= set(kept)
    assert list(items) == kept
    assert values == list(items.values()) == [uids.index(uid) for uid in kept]


@pytest.mark.parametrize("sealed", [False, True])
def test_the_prefix_of_an_id_is_a_miss_and_cannot_be_an_item_as_well(run, where, sealed):
    async def main():
        async with CachedItem(where, lambda uid: 1.0) as item:
            await item.put("spk/utt", 1.0)
            await item.put("solo", 1.0)
            if sealed:
                await item.to_reader()
            misses = [await outcome_of(item.get, uid) for uid in ("spk", "spk/", "spk/ut", "s", "solo/x")]
            if sealed:
                await item.to_writer()
            clashes = [await outcome_of(item.put, uid, 2.0) for uid in ("spk", "spk/utt/more", "solo/x")]
            return misses, clashes, sorted(item)

    misses, clashes, held = run(main)

    assert all(isinstance(error, CacheMissError) for error in misses)
    assert all(isinstance(error, ItemIdError) for error in clashes)
    assert held == ["solo", "spk/utt"]


# -- arguments -------------------------------------------------------------------------------------------------------


def counting(result: Callable[..., Any] = lambda uid, *args: float(sum(map(np.sum, args)))) -> Any:
    """A function and the calls it gets."""
    calls: list[Any] = []

    def func(uid: str, *args: Any) -> Any:
        calls.append((uid, *args))
        return result(uid, *args)

    return func, calls


def test_other_arguments_are_computed_again_and_the_same_are_not(run, where):
    """Q1: an old result is not served in silence."""

    async def main():
        func, calls = counting()
        async with CachedItem(where, func, check_inputs=True) as item:
            values = [(await item.compute("x", *args)).item() for args in [(1.0,), (1.0,), (2.0,), (2.0,), (1.0, 1.0)]]
            report = await item.populate([("x", 1.0, 1.0), ("x", 5.0), ("y", 1.0)])
            held = (await item.get("x")).item()
        return values, len(calls), (report.computed, report.skipped), held

    assert run(main) == ([1.0, 1.0, 2.0, 2.0, 2.0], 5, (2, 1), 5.0)


def test_without_check_inputs_the_first_result_stays(run, where):
    async def main():
        func, calls = counting()
        async with CachedItem(where, func) as item:
            return [(await item.compute("x", arg)).item() for arg in (1.0, 2.0)], len(calls)

    assert run(main) == ([1.0, 1.0], 1)


def test_a_reader_refuses_other_arguments_and_still_gets_the_item(run, where):
    async def main():
        func, calls = counting()
        async with CachedItem(where, func, check_inputs=True) as item:
            await item.compute("x", np.arange(3.0))
            await item.put("y", 7.0)
            await item.to_reader()
            calls.clear()
            return [
                (await item.compute("x", np.arange(3.0))).item(),
                await outcome_of(item.compute, "x", np.arange(4.0)),
                (await item.get("x")).item(),
                (await item.compute("y", "whatever")).item(),  # what was put belongs to no arguments
                await outcome_of(item.compute, "z", 1.0),
            ], calls

    (hit, stale, got, put, miss), calls = run(main)

    assert (hit, got, put, calls) == (3.0, 3.0, 7.0, [])
    assert isinstance(stale, StaleCacheError)
    assert "'x'" in str(stale)
    assert "other arguments" in str(stale)
    assert isinstance(miss, CacheMissError)


def test_what_was_put_is_taken_whatever_the_arguments(run, where):
    async def main():
        func, calls = counting()
        async with CachedItem(where, func, check_inputs=True) as item:
            await item.compute("x", 1.0)
            await item.put("x", 9.0)
            return (await item.compute("x", 2.0)).item(), len(calls)

    assert run(main) == (9.0, 1)


def test_concurrent_calls_with_other_arguments_are_computations_of_their_own(run, where):
    async def main():
        func, calls = counting()
        async with CachedItem(where, func, check_inputs=True) as item:
            report = await item.populate([("x", 1.0), ("x", 2.0), ("x", 3.0)])
        return len(calls), report.computed

    assert run(main) == (3, 3)


def test_an_argument_that_has_no_digest_is_refused_and_named(run, where):
    async def main():
        func, calls = counting()
        async with CachedItem(where, func, check_inputs=True) as item:
            return await outcome_of(item.compute, "x", Opaque()), calls

    error, calls = run(main)

    assert isinstance(error, ItemTypeError)
    assert "Opaque" in str(error)
    assert calls == []


IN_ANOTHER_PROCESS = """
import asyncio, pathlib, sys
import numpy as np
from asyncfeed import CachedItem

ARGS = [1, 1.5, True, None, "text", b"bytes", 1j, [1, (2, 3)], {"b": 1, "a": {2, 3, 4}}, {"x", "y", "z"},
        pathlib.PurePosixPath("a/b"), np.arange(6.0).reshape(2, 3), np.float32(1.5), np.arange(3, dtype=">i4")]
calls = []

async def main(where, **options):
    async with CachedItem(where, lambda uid, *args: calls.append(uid) or 1.0, check_inputs=True, **options) as item:
        for number, arg in enumerate(ARGS):
            await item.compute(str(number), arg, arg)
        if options.get("mode") != "r":
            await item.to_reader()
    print(len(calls))

asyncio.run(main(sys.argv[1], **eval(sys.argv[2])))
"""


def in_another_process(where: Path, seed: int, options: str = "{}") -> str:
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, where, options],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env={"PYTHONHASHSEED": str(seed)},
    )
    assert done.stderr == ""
    return done.stdout


def test_arguments_are_the_same_in_every_process_and_with_every_hash_seed(where):
    """Q2: nothing harmless is a reason to compute again."""
    first = in_another_process(where, 1)

    others = [
        in_another_process(where, 2, "{'compression': 'gzip', 'concurrency': 1}"),
        in_another_process(where, 3, "{'mode': 'r', 'durability': 'fsync', 'writer': 'other'}"),
    ]

    assert (first, others) == ("14\n", ["0\n", "0\n"])


# -- staleness -------------------------------------------------------------------------------------------------------

MADE_WITH = {"version": "v1", "takes": ("id", "sig"), "provides": ("feats",)}
OTHERS = {
    "version": {**MADE_WITH, "version": "v2"},
    "number": {**MADE_WITH, "version": 1},
    "takes": {**MADE_WITH, "takes": ("id", "wav")},
    "order": {**MADE_WITH, "takes": ("sig", "id")},
    "provides": {**MADE_WITH, "provides": ("feats", "length")},
    "nothing": {},
}


async def made(where: Path, seal: bool = True, **options: Any) -> None:
    async with CachedItem(where, **{**MADE_WITH, **options}) as item:
        await item.put("x", 1.0)
        if seal:
            await item.to_reader()


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "journal"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_writer_that_states_something_else_is_told_both_and_the_choices(where, other, sealed):
    async def main():
        await made(where, sealed)
        error = await outcome_of(CachedItem(where, **OTHERS[other]).__aenter__)
        async with CachedItem(where, **MADE_WITH) as item:
            return error, list(item)

    error, held = asyncio.run(main())

    assert isinstance(error, StaleCacheError)
    assert str(dict(MADE_WITH)["version"]) in str(error)
    assert all(repr(value) in str(error) for value in OTHERS[other].values())
    assert "on_stale='discard'" in str(error)
    assert "on_stale='ignore'" in str(error)
    assert held == ["x"]


@pytest.mark.parametrize("other", OTHERS)
def test_a_reader_compares_what_it_states_and_takes_the_rest(where, other):
    async def main():
        await made(where)
        item = CachedItem(where, mode="r", **OTHERS[other])
        error = await outcome_of(item.__aenter__)
        if not isinstance(error, Exception):
            value = (await item.get("x")).item()
            await item.aclose()
            return value
        return error

    found = asyncio.run(main())

    if other == "nothing":
        assert found == 1.0
    else:
        assert isinstance(found, StaleCacheError)


@pytest.mark.parametrize("stated", ["version", "takes", "provides"])
def test_a_reader_that_states_one_thing_rightly_is_content(run, where, stated):
    async def main():
        await made(where)
        async with CachedItem(where, mode="r", **{stated: MADE_WITH[stated]}) as item:
            return list(item)

    assert run(main) == ["x"]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "journal"])
def test_discard_deletes_what_is_stale_when_a_writer_opens(run, where, sealed):
    async def main():
        await made(where, sealed)
        func, calls = counting()
        async with CachedItem(where, func, **OTHERS["version"], on_stale="discard") as item:
            empty = list(item)
            await item.compute("x", 5.0)
            await item.to_reader()
            held = (await item.get("x")).item()
        return empty, held, len(calls), await outcome_of(CachedItem(where, mode="r", **MADE_WITH).__aenter__)

    empty, held, num_calls, error = run(main)

    assert (empty, held, num_calls) == ([], 5.0, 1)
    assert isinstance(error, StaleCacheError)


def test_discard_passes_over_what_is_stale_when_a_reader_opens_and_deletes_nothing(run, where):
    async def main():
        await made(where)
        async with CachedItem(where, mode="r", version="v2", on_stale="discard") as item:
            seen = list(item), await outcome_of(item.get, "x")
        async with CachedItem(where, mode="r", version="v1") as item:
            return seen, list(item)

    (keys, error), after = run(main)

    assert (keys, after) == ([], ["x"])
    assert isinstance(error, CacheMissError)


@pytest.mark.parametrize("mode", ["w", "r"])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "journal"])
def test_ignore_uses_what_is_there(run, where, mode, sealed):
    async def main():
        await made(where, sealed)
        func, calls = counting()
        if mode == "r" and not sealed:
            pytest.skip("a reader sees sealed files only")
        async with CachedItem(where, func, mode=mode, **OTHERS["version"], on_stale="ignore") as item:
            return (await item.compute("x", 5.0)).item(), len(calls)

    assert run(main) == (1.0, 0)


def test_compression_concurrency_and_the_like_are_never_a_reason_to_compute_again(run, where):
    """Q2."""

    async def main():
        func, calls = counting()
        await made(where)
        for options in [
            {"compression": "gzip"},
            {"compression": 9},
            {"concurrency": 1},
            {"writer": "other"},
            {"durability": "fsync"},
            {"check_inputs": True},
            {"locking": False},
            {"on_stale": "discard"},
            {"takes": list(MADE_WITH["takes"])},
        ]:
            async with CachedItem(where, func, **{**MADE_WITH, **options}) as item:
                await item.compute("x", 5.0)
                await item.to_reader()
                await item.compute("x", 6.0)
        return calls

    assert run(main) == []


@pytest.mark.parametrize("compression", [None, "gzip", "lzf", 3])
def test_every_compression_gives_the_same_back_and_can_be_mixed(run, where, compression):
    arrays = {f"u{i}": np.tile(np.arange(50, dtype="f4"), (i, 1)) for i in range(5)}

    async def main():
        async with CachedItem(where, compression=compression) as item:
            for uid, array in arrays.items():
                await item.put(uid, array)
            await item.to_reader()
        async with CachedItem(where) as item:
            await item.put("more", np.ones((2, 50), "f4"))
            await item.to_reader()
            return dict(zip(item, await item.get_many(item), strict=True)), await item.verify()

    items, found = run(main)

    assert all(same(items[uid], array) for uid, array in arrays.items())
    assert (len(items), found.checked, found.ok) == (6, 6, True)
    with Feed(where) as feed:
        assert len(feed) == sum(map(len, items.values()))
