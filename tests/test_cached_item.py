"""`CachedItem`: its modes, and what it says about what it holds."""

from __future__ import annotations

import asyncio
import errno
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import h5py
import numpy as np
import pytest
import trio

from asyncfeed import (
    ArgumentError,
    CachedItem,
    CacheMissError,
    Feed,
    LockedFileError,
    ModeError,
    SourceMissingError,
    WriteError,
)
from asyncfeed.cache import publish


async def ones(uid: str, length: int = 3) -> np.ndarray:
    return np.ones(length, "f4")


async def fill(where: Path, items: dict[str, Any], **options: Any) -> None:
    """One writing session that ends sealed."""
    async with CachedItem(where, **options) as item:
        for uid, value in items.items():
            await item.put(uid, value)
        await item.to_reader()


async def outcome_of(function: Callable[..., Any], *args: Any) -> Any:
    """What a call gives, or raises."""
    try:
        return await function(*args)
    except Exception as error:  # noqa: BLE001 - an outcome like any other
        return error


async def in_mode(item: CachedItem, mode: str) -> CachedItem:
    """Bring a cache that is open as a writer, and holds something, to a mode."""
    if mode == "reader":
        await item.to_reader()
    elif mode == "closed":
        await item.aclose()
    return item


# -- modes -----------------------------------------------------------------------------------------------------------


def test_a_cache_goes_from_writer_to_reader_and_back_and_holds_everything_on_the_way(run, where):
    async def main():
        item = CachedItem(where, ones)
        modes = [item.mode]
        async with item:
            modes.append(item.mode)
            await item.put("a", 1.0)
            await item.to_reader()
            modes.append(item.mode)
            await item.to_writer()
            modes.append(item.mode)
            held = [sorted(item)]
            await item.put("b", 2.0)
            await item.to_reader()
            held.append(sorted(item))
        return [*modes, item.mode], held

    modes, held = run(main)

    assert modes == ["closed", "writer", "reader", "writer", "closed"]
    assert held == [["a"], ["a", "b"]]


STEPS = {
    "open": lambda item: item.__aenter__(),
    "to_reader": lambda item: item.to_reader(),
    "to_writer": lambda item: item.to_writer(),
}


@pytest.mark.parametrize(
    ("mode", "step", "wanted"),
    [
        ("closed", "to_reader", None),  # the step there is is that of `async with`
        ("closed", "to_writer", None),
        ("writer", "to_writer", "writer"),
        ("writer", "open", "writer"),
        ("reader", "to_reader", "reader"),
        ("reader", "open", "writer"),
    ],
)
def test_a_wrong_step_names_both_modes_and_changes_nothing(run, where, mode, step, wanted):
    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 1.0)
            await in_mode(item, mode)
            error = await outcome_of(STEPS[step], item)
            return error, item.mode, item.mode == "closed" or (await item.get("a")).item()

    error, after, value = run(main)

    assert isinstance(error, ModeError)
    assert mode in str(error)
    assert wanted is None or f"{wanted} mode" in str(error)
    assert (after, value) == (mode, True if mode == "closed" else 1.0)


CALLS = {
    "aiter": (lambda item: anext(aiter(item)), "items"),
    "as_source": (lambda item: sync(item.as_source), "stream"),
    "compact": (lambda item: item.compact(), "compact"),
    "compute": (lambda item: item.compute("a"), "compute"),
    "contains": (lambda item: sync(lambda: "a" in item), "keys"),
    "get": (lambda item: item.get("a"), "get"),
    "get_many": (lambda item: item.get_many(["a"]), "get_many"),
    "getitem": (lambda item: sync(lambda: item["a"]), "get"),
    "iter": (lambda item: sync(lambda: list(item)), "keys"),
    "keys": (lambda item: sync(item.keys), "keys"),
    "len": (lambda item: sync(lambda: len(item)), "keys"),
    "missing": (lambda item: item.missing(["a"]), "missing"),
    "populate": (lambda item: item.populate([("a",)]), "populate"),
    "put": (lambda item: item.put("b", 1.0), "put"),
    "refresh": (lambda item: item.refresh(), "refresh"),
    "verify": (lambda item: item.verify(), "verify"),
}
WRITING = {"populate", "put"}


async def sync(function: Callable[[], Any]) -> Any:
    """Call what does not wait."""
    return function()


@pytest.mark.parametrize("mode", ["closed", "writer", "reader"])
def test_a_call_works_in_its_modes_and_in_others_names_itself_and_the_mode(run, where, mode):
    async def main():
        async with CachedItem(where, ones) as item:
            await item.put("a", np.ones(3, "f4"))
            await in_mode(item, mode)
            return {call: await outcome_of(function, item) for call, (function, _) in CALLS.items()}

    found = run(main)

    everything = set(CALLS)
    refused = {"closed": everything - {"as_source"}, "writer": {"as_source"}, "reader": WRITING}[mode]
    errors = {call: error for call, error in found.items() if isinstance(error, Exception)}
    assert errors.keys() == refused
    for call, error in errors.items():
        assert isinstance(error, ModeError)
        assert f"{CALLS[call][1]}()" in str(error)
        assert f"it is in {mode} mode" in str(error)


def test_a_closed_cache_can_be_opened_again_and_goes_on_where_it_was(run, where):
    async def main():
        item = CachedItem(where, ones)
        async with item:
            await item.compute("a")
        async with item:
            await item.compute("b")
            await item.to_reader()
        async with item:
            return sorted(item), item.mode

    assert run(main) == (["a", "b"], "writer")


def test_one_cache_serves_asyncio_and_trio_in_turn_open_all_the_time(where):
    item = CachedItem(where, ones)

    async def use(uid):
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(item.compute, uid)
            await item.missing([uid])
            await item.to_reader()
            await item.to_writer()

    asyncio.run(item.__aenter__())
    asyncio.run(use("0"))
    trio.run(use, "1")
    asyncio.run(use("2"))
    trio.run(use, "3")
    held = sorted(item)
    trio.run(item.aclose)

    assert held == ["0", "1", "2", "3"]


def test_without_async_with_the_error_says_to_use_it(run, where):
    error = run(outcome_of, CachedItem(where, ones).compute, "a")

    assert isinstance(error, ModeError)
    assert "async with" in str(error)


def test_a_reader_of_nothing_says_how_to_fill_it_and_stays_closed(run, where):
    item = CachedItem(where, mode="r")

    error = run(outcome_of, item.__aenter__)

    assert isinstance(error, SourceMissingError)
    assert "mode='w'" in str(error)
    assert item.mode == "closed"


def test_a_reader_of_what_is_not_sealed_names_the_journal(run, where):
    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 1.0)
        return await outcome_of(CachedItem(where, mode="r").__aenter__)

    error = run(main)

    assert isinstance(error, SourceMissingError)
    assert "cache.hdf5.main.journal" in str(error)
    assert "to_reader()" in str(error)


def test_sealing_nothing_makes_no_file_and_the_reader_is_empty(run, where):
    async def main():
        async with CachedItem(where) as item:
            await item.to_reader()
            empty = len(item), list(item), await outcome_of(item.get, "a")
            await item.to_writer()
            await item.put("a", 1.0)
            await item.to_reader()
            return empty, list(item)

    (num, keys, error), after = run(main)

    assert (num, keys, after) == (0, [], ["a"])
    assert isinstance(error, CacheMissError)
    assert [path.name for path in where.glob("*.hdf5")] == ["cache.hdf5"]


def test_a_disk_that_fills_while_sealing_leaves_writer_mode_working(run, where, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main():
        async with CachedItem(where) as item:
            await item.put("a", np.arange(5))
            with monkeypatch.context() as patch:
                patch.setattr(publish, "rename_exclusive", full)
                error = await outcome_of(item.to_reader)
            mode = item.mode
            await item.put("b", np.arange(6))
            values = [await item.get("a"), await item.get("b")]
            await item.to_reader()
            return error, mode, values, await item.get_many(["a", "b"])

    error, mode, before, after = run(main)

    assert isinstance(error, WriteError)
    assert "No space left" in str(error)
    assert mode == "writer"
    assert [v.tolist() for v in before] == [v.tolist() for v in after] == [[*range(5)], [*range(6)]]


def test_a_second_writer_of_one_id_is_refused_and_names_the_holder(run, where):
    async def main():
        async with CachedItem(where):
            return await outcome_of(CachedItem(where).__aenter__)

    error = run(main)

    assert isinstance(error, LockedFileError)
    assert "process " in str(error)
    assert "writer=" in str(error)


def test_a_reader_that_cannot_become_the_writer_stays_a_reader(run, where):
    async def main():
        await fill(where, {"a": 1.0})
        async with CachedItem(where, mode="r") as reader, CachedItem(where):
            error = await outcome_of(reader.to_writer)
            return error, reader.mode, (await reader.get("a")).item()

    error, mode, value = run(main)

    assert isinstance(error, LockedFileError)
    assert (mode, value) == ("reader", 1.0)


def test_items_that_are_kept_do_not_stand_in_the_way_of_a_switch(run, where):
    async def main():
        await fill(where, {"a": np.arange(1000)})
        async with CachedItem(where, mode="r") as item:
            kept = [await item.get("a"), *await item.get_many(["a", "a"]), item["a"]]
            await item.to_writer()
            await item.put("a", np.zeros(1000))
            await item.to_reader()
            return kept, await item.get("a")

    kept, now = run(main)

    assert all(np.array_equal(each, np.arange(1000)) for each in kept)
    assert not now.any()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "a"},
        {"mode": None},
        {"func": 3},
        {"concurrency": 0},
        {"filename": "a/b.hdf5"},
        {"filename": ""},
        {"compression": "zip"},
        {"compression": 10},
        {"writer": "a/b"},
        {"writer": ""},
        {"writer": "compact"},
        {"takes": "id"},
        {"provides": (1,)},
        {"version": ("a", "b")},
        {"version": "x" * 5000},
        {"durability": "always"},
        {"on_stale": "recompute"},
    ],
)
def test_an_argument_without_meaning_is_named(where, options):
    ((name, value),) = options.items()

    with pytest.raises(ArgumentError, match=name) as caught:
        CachedItem(where, **options)

    assert isinstance(caught.value, ValueError)
    assert repr(value) in str(caught.value) or len(repr(value)) > 1000
    assert not where.exists()


def test_making_a_cache_touches_no_file(where):
    CachedItem(where, ones)

    assert not where.exists()


def test_the_writer_id_follows_the_rank(run, where, monkeypatch):
    monkeypatch.setenv("RANK", "3")

    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 1.0)

    run(main)

    assert (where / "cache.hdf5.rank3.journal").exists()


def test_the_place_is_meant_from_where_the_cache_was_made(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    item = CachedItem("feats")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    async def main():
        async with item:
            await item.put("a", 1.0)
            await item.to_reader()

    run(main)

    assert (tmp_path / "feats" / "cache.hdf5").exists()


# -- what is there ---------------------------------------------------------------------------------------------------

ITEMS = {f"utt{i}": np.full((i, 2), i, "f4") for i in range(8)}


@pytest.fixture(params=["journal", "sealed", "both"])
def holding(request: pytest.FixtureRequest, where: Path) -> Callable[[], Any]:
    """Open a cache of `ITEMS`, which lie in a journal, in a sealed file, or in both."""
    num_sealed = {"journal": 0, "sealed": len(ITEMS), "both": 5}[request.param]

    async def opened() -> CachedItem:
        pairs = list(ITEMS.items())
        if num_sealed:
            await fill(where, dict(pairs[:num_sealed]))
        item = CachedItem(where, ones)
        await item.__aenter__()
        for uid, value in pairs[num_sealed:]:
            await item.put(uid, value)
        return item

    return opened


def test_len_in_and_keys_know_every_item_in_the_order_of_writing(run, holding):
    async def main():
        item = await holding()
        try:
            return len(item), item.keys(), list(item), [uid in item for uid in [*ITEMS, "utt", "utt00", 3, None]]
        finally:
            await item.aclose()

    assert run(main) == (8, list(ITEMS), list(ITEMS), [True] * 8 + [False] * 4)


def test_items_are_iterated_over_with_async_for(run, holding):
    async def main():
        item = await holding()
        try:
            return [pair async for pair in item]
        finally:
            await item.aclose()

    pairs = run(main)

    assert [uid for uid, _ in pairs] == list(ITEMS)
    assert all(np.array_equal(value, ITEMS[uid]) for uid, value in pairs)


def test_get_many_gives_the_order_asked_for_and_each_duplicate_an_array_of_its_own(run, holding):
    async def main():
        item = await holding()
        try:
            wanted = ["utt7", "utt2", "utt7", "utt0", "utt7"]
            values = await item.get_many(iter(wanted))
            values[0][:] = -1.0
            return wanted, values, await item.get_many([])
        finally:
            await item.aclose()

    wanted, values, none = run(main)

    assert none == []
    assert (values[0] == -1).all()
    assert all(np.array_equal(value, ITEMS[uid]) for uid, value in list(zip(wanted, values, strict=True))[1:])


def test_misses_name_the_first_and_count_the_rest(run, holding):
    async def main():
        item = await holding()
        try:
            return [
                await outcome_of(item.get_many, ["utt1", "no", "utt2", "nope", "never"]),
                await outcome_of(item.get, "utt"),
                await outcome_of(sync, lambda: item["utt11"]),
                await item.missing(["x", "utt3", "a", "x"]),
            ]
        finally:
            await item.aclose()

    many, one, plain, missing = run(main)

    assert all(isinstance(error, CacheMissError) for error in (many, one, plain))
    assert isinstance(one, KeyError)
    assert "'no' and 2 more" in str(many)
    assert "'utt' is not in the cache" in str(one)
    assert "'utt11'" in str(plain)
    assert missing == ["x", "a", "x"]


def test_items_are_read_without_an_event_loop_by_subscript(run, holding):
    async def main():
        return await holding()

    item = run(main)

    values = {uid: item[uid] for uid in item}
    run(item.aclose)

    assert all(np.array_equal(values[uid], value) for uid, value in ITEMS.items())


def test_verify_finds_every_item_good(run, holding):
    async def main():
        item = await holding()
        try:
            return await item.verify()
        finally:
            await item.aclose()

    found = run(main)

    assert (found.checked, found.unchecked, found.damaged, found.ok) == (8, 0, (), True)


def test_verify_names_the_item_whose_bytes_are_not_those_that_were_written(run, where):
    async def main():
        await fill(where, {f"u{i}": np.full(100, i, "u1") for i in range(5)})
        with open(where / "cache.hdf5", "r+b") as file:
            file.seek(file.read().index(bytes([3] * 100)) + 50)
            file.write(b"!")
        async with CachedItem(where, mode="r") as item:
            return await item.verify()

    found = run(main)

    assert (found.checked, found.damaged, found.ok) == (4, ("u3",), False)


def test_iterating_goes_on_over_a_switch(run, where, monkeypatch):
    monkeypatch.setattr("asyncfeed.cache.iteration.BATCH_NBYTES", 1)  # one item at a time

    async def main():
        await fill(where, {f"u{i}": i for i in range(4)})
        found = []
        async with CachedItem(where, mode="r") as item:
            async for uid, value in item:
                found.append((uid, value.item()))
                await (item.to_writer() if item.mode == "reader" else item.to_reader())
        return found

    assert run(main) == [(f"u{i}", i) for i in range(4)]


def test_a_switch_loses_sight_of_nothing_for_calls_that_do_not_wait(run, where, monkeypatch):
    seen = []

    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 1.0)
            real = publish.rename_exclusive
            close = type(item._session.store.journal).close

            def look(*args):
                seen.append(("a" in item, len(item), item["a"].item()))

            monkeypatch.setattr(publish, "rename_exclusive", lambda *args: (look(), real(*args), look()))
            monkeypatch.setattr(type(item._session.store.journal), "close", lambda journal: (look(), close(journal)))
            await item.to_reader()
            look()
            monkeypatch.undo()

    run(main)

    assert seen == [(True, 1, 1.0)] * 4


# -- replacing and compacting ----------------------------------------------------------------------------------------


def test_compacting_leaves_one_file_with_the_last_value_of_everything(run, where):
    async def main():
        for i in range(3):
            await fill(where, {"same": np.full(1000, i), f"own{i}": np.full(10, i)})
        async with CachedItem(where, mode="r") as item:
            before = sorted(path.name for path in where.glob("*.hdf5"))
            await item.compact()
            after = sorted(path.name for path in where.glob("*.hdf5"))
            return before, after, {uid: value async for uid, value in item}

    before, after, values = run(main)

    assert (len(before), after) == (3, ["cache.hdf5"])
    assert {uid: value[0] for uid, value in values.items()} == {"same": 2, "own0": 0, "own1": 1, "own2": 2}


def test_items_that_are_computed_ten_times_do_not_make_the_file_grow(where):
    """Q5: what was replaced is freed by compacting."""
    live = 100 * 4000

    async def main():
        for i in range(10):
            await fill(where, {f"u{n}": np.full(1000 + i % 2, i, "f4") for n in range(100)})
        async with CachedItem(where, mode="r") as item:
            await item.compact()
            values = await item.get_many(item)
        return values, sum(path.stat().st_size for path in where.iterdir())

    values, nbytes = asyncio.run(main())

    assert all((value == 9).all() for value in values)
    assert nbytes < 2 * live


def test_compacting_in_writer_mode_keeps_what_is_not_sealed_and_writing_goes_on(run, where):
    async def main():
        await fill(where, {"a": 1, "b": 1})
        await fill(where, {"a": 2})
        async with CachedItem(where) as item:
            await item.put("b", 3)
            await item.compact()
            await item.put("c", 4)
            before = {uid: value.item() async for uid, value in item}
            await item.to_reader()
            return before, {uid: value.item() async for uid, value in item}

    before, after = run(main)

    assert before == after == {"a": 2, "b": 3, "c": 4}


# -- several writers, and readers that stay ---------------------------------------------------------------------------


def test_writers_of_their_own_ids_work_side_by_side_and_one_reader_sees_all(run, where):
    async def main():
        async with CachedItem(where, writer="a") as a, CachedItem(where, writer="b") as b:
            await a.put("from a", 1)
            await b.put("from b", 2)
            await a.to_reader()
            seen = sorted(a)
            await b.to_reader()
        async with CachedItem(where, mode="r") as reader:
            return seen, sorted(reader)

    assert run(main) == (["from a"], ["from a", "from b"])


def test_a_reader_finds_what_others_sealed_after_it_opened(run, where):
    async def main():
        await fill(where, {"a": 1})
        async with CachedItem(where, mode="r") as reader:
            await fill(where, {"b": 2}, writer="other")
            blind = "b" in reader, len(reader)
            news = await reader.refresh(), await reader.refresh()
            seeing = "b" in reader, len(reader)
            await fill(where, {"c": 3, "d": 4, "e": 5}, writer="other")
            return (
                blind,
                news,
                seeing,
                [
                    (await reader.get("c")).item(),
                    (await reader.compute("d")).item(),
                    await reader.missing(["e", "f"]),
                ],
            )

    blind, news, seeing, values = run(main)

    assert (blind, seeing) == ((False, 1), (True, 2))
    assert news == (True, False)
    assert values == [3, 4, ["f"]]


def test_a_reader_goes_on_with_what_it_has_while_others_compact(run, where):
    async def main():
        await fill(where, {"a": np.arange(100)})
        await fill(where, {"a": np.zeros(100), "b": np.ones(100)})
        async with CachedItem(where, mode="r") as reader, CachedItem(where, mode="r") as other:
            await other.compact()
            old = await reader.get_many(["a", "b"])
            await reader.refresh()
            return [*old, *await reader.get_many(["a", "b"])], len(list(where.glob("*.hdf5")))

    values, num_files = run(main)

    assert num_files == 1
    assert [value.sum() for value in values] == [0, 100, 0, 100]


def test_what_a_writer_left_unsealed_is_sealed_by_the_next_one_that_seals(run, where, caplog):
    async def main():
        async with CachedItem(where, writer="gone") as item:
            await item.put("a", 1)
        await fill(where, {"b": 2}, writer="main")
        async with CachedItem(where, mode="r") as reader:
            return sorted(reader)

    assert run(main) == ["a", "b"]
    assert "1 items of an earlier session kept" in caplog.text
    assert not list(where.glob("*.journal"))


# -- streaming it ----------------------------------------------------------------------------------------------------

STREAMED = {"a": np.zeros((4, 2), "f4"), "b": np.ones((5, 2), "f4"), "c": np.full((6, 2), 2, "f4")}


def streamed(source: Any) -> dict[str, np.ndarray]:
    with Feed(source, shuffle=False, memory_budget="1m") as feed:
        pairs = [(utt, rows.copy()) for utt, rows in feed.utterances()]
    assert len({utt for utt, _ in pairs}) == len(pairs)
    return dict(pairs)


async def three_generations(where: Path) -> None:
    await fill(where, {"a": np.full((9, 2), 7, "f4"), "b": STREAMED["b"]})
    await fill(where, {"c": np.full((1, 2), 9, "f4")})
    await fill(where, {"a": STREAMED["a"], "c": STREAMED["c"]})


@pytest.mark.parametrize("what", ["closed item", "reader", "directory", "text"])
def test_a_feed_streams_every_item_of_all_generations_once_and_the_last_one_wins(run, where, what):
    async def main():
        await three_generations(where)
        item = CachedItem(where, mode="r")
        if what == "reader":
            async with item:
                return streamed(item)
        return streamed({"closed item": item, "directory": where, "text": str(where)}[what])

    found = run(main)

    assert found.keys() == STREAMED.keys()
    assert all(np.array_equal(found[utt], rows) for utt, rows in STREAMED.items())


def test_a_feed_of_a_writer_is_refused_and_says_what_to_do(run, where):
    async def main():
        async with CachedItem(where) as item:
            await item.put("a", np.ones((2, 2)))
            with pytest.raises(ModeError, match=r"stream\(\).*writer mode.*to_reader"):
                Feed(item)

    run(main)


def test_a_feed_of_a_cache_is_sent_by_pickle_and_streams_what_is_sealed_by_then(run, where):
    async def main():
        await fill(where, {"a": STREAMED["a"]})
        async with CachedItem(where, mode="r") as item:
            feed = pickle.loads(pickle.dumps(Feed(item, memory_budget="1m")))
        await fill(where, {"b": STREAMED["b"]})
        with feed:
            return sorted({utt for utt, _, _ in feed})

    assert run(main) == ["a", "b"]


def test_a_feed_of_a_cache_of_another_name_streams_it(run, where):
    async def main():
        await fill(where, {"a": STREAMED["a"]}, filename="wavlm.h5")
        await fill(where, {"b": STREAMED["b"]}, filename="wavlm.h5")
        await fill(where, {"c": STREAMED["c"]})
        return streamed(CachedItem(where, filename="wavlm.h5"))

    assert run(main).keys() == {"a", "b"}


def test_sealed_files_are_plain_hdf5_with_one_dataset_per_id_in_write_order(run, where):
    async def main():
        await fill(where, {"z": np.arange(4, dtype="f4"), "spk/a": np.arange(3), "m": 2.5})

    run(main)

    with h5py.File(where / "cache.hdf5") as file:
        assert file["z"][:].tolist() == [0, 1, 2, 3]
        assert file["spk/a"][:].tolist() == [0, 1, 2]
        assert file["m"][()] == 2.5
        assert file["z"].id.get_offset() < file["spk/a"].id.get_offset() < file["m"].id.get_offset()


# -- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["writer", "reader"])
def test_a_cache_that_is_dropped_open_lets_go_of_everything(run, where, mode):
    async def main():
        item = CachedItem(where, ones)
        await item.__aenter__()
        await item.compute("a")
        await item.compute("b")
        await in_mode(item, mode)
        await item.get("a")

    run(main)  # and `nothing_left` looks for threads and descriptors
    gc.collect()

    assert run(fill, where, {"c": 3}) is None, "the lock is free"


def test_closing_is_idempotent_also_by_several_at_once(run, where):
    async def main():
        release = anyio.Event()

        async def func(uid):
            await release.wait()
            return 1.0

        item = CachedItem(where, func)
        await item.__aenter__()
        found = []

        async def close():
            found.append(await outcome_of(item.aclose))

        async with anyio.create_task_group() as group:
            group.start_soon(item.compute, "a")
            await anyio.wait_all_tasks_blocked()
            group.start_soon(close)
            group.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            release.set()
        await item.aclose()
        return found, item.mode

    assert run(main) == ([None, None], "closed")


def test_two_tasks_cannot_open_one_cache_twice(run, where):
    found = []

    async def main():
        item = CachedItem(where, ones)

        async def use():
            found.append(await outcome_of(item.__aenter__))

        async with anyio.create_task_group() as group:
            group.start_soon(use)
            group.start_soon(use)
        await item.put("a", 1.0)
        await item.aclose()

    run(main)

    assert sorted(type(each).__name__ for each in found) == ["CachedItem", "ModeError"]


def test_an_error_of_the_user_arrives_unchanged_and_the_cache_is_closed(run, where):
    async def main():
        item = CachedItem(where, ones)

        async def fail():
            async with item:
                await item.compute("a")
                raise LookupError("mine")

        error = await outcome_of(fail)
        async with item:
            return error, item.mode, list(item)

    error, mode, held = run(main)

    assert (repr(error), mode, held) == ("LookupError('mine')", "writer", ["a"])


def test_a_program_that_uses_a_cache_well_or_badly_prints_no_warning(where):
    code = """
import asyncio, gc, sys, threading, warnings
import numpy as np
from asyncfeed import CachedItem, Feed

def plain(uid):
    return np.ones((3, 2))

async def main(where):
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no fault of the program
    async with CachedItem(where, plain) as item:
        await item.populate([(str(i),) for i in range(10)])
        await item.to_reader()
        await item.get("3")
    dropped = CachedItem(where, plain, writer="other")
    await dropped.__aenter__()
    await dropped.compute("new")
    del dropped

asyncio.run(main(sys.argv[1]))
gc.collect()
print(sum(1 for _ in Feed(sys.argv[1])))
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code, where],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "30\n", "")


def test_the_representation_says_where_it_is_and_in_which_mode(run, where):
    async def main():
        async with CachedItem(where) as item:
            return repr(item)

    assert run(main) == f"CachedItem('{where}/cache.hdf5', writer)"


def test_a_cache_is_used_from_the_thread_of_its_loop_while_others_read_by_subscript(run, where):
    async def main():
        await fill(where, {f"u{i}": np.full(100, i) for i in range(20)})
        async with CachedItem(where, mode="r") as item:
            wrong = []

            def read():
                wrong.extend(i for i in range(20) if not (item[f"u{i}"] == i).all())

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            values = await item.get_many(item)
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join)
            return wrong, [value[0] for value in values]

    assert run(main) == ([], [*range(20)])
