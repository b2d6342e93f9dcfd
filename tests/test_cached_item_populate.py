"""`CachedItem.populate`: many rows, some at a time, and a report of what became of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from asyncfeed import ArgumentError, CachedItem, CacheMissError, ItemIdError, ItemTypeError


async def outcome_of(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call gives, or raises."""
    try:
        return await function(*args, **options)
    except Exception as error:  # noqa: BLE001 - an outcome like any other
        return error


async def double(uid: str, value: float = 0.0) -> Any:
    return 2 * value


def counts(report: Any) -> tuple[int, int, list[str]]:
    return report.computed, report.skipped, list(report.failed)


ROWS = [(f"u{i}", float(i)) for i in range(10)]


async def asynchronously(rows: list[Any]) -> AsyncIterator[Any]:
    for row in rows:
        await anyio.lowlevel.checkpoint()
        yield row


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda: ROWS, id="list"),
        pytest.param(lambda: tuple(ROWS), id="tuple"),
        pytest.param(lambda: (row for row in ROWS), id="generator"),
        pytest.param(lambda: asynchronously(ROWS), id="async generator"),
        pytest.param(lambda: dict(ROWS).items(), id="items of a dict"),
        pytest.param(lambda: [list(row) for row in ROWS], id="lists"),
        pytest.param(lambda: zip(*zip(*ROWS, strict=True), strict=True), id="zip"),
    ],
)
def test_rows_come_from_whatever_can_be_iterated_over(run, where, rows):
    async def main():
        async with CachedItem(where, double) as item:
            report = await item.populate(rows())
            return counts(report), {uid: value.item() async for uid, value in item}

    report, items = run(main)

    assert report == (10, 0, [])
    assert items == {uid: 2 * value for uid, value in ROWS}


def test_no_rows_are_no_work(run, where):
    async def main():
        async with CachedItem(where, double) as item:
            return [counts(await item.populate(rows)) for rows in ([], iter([]), asynchronously([]))]

    assert run(main) == [(0, 0, [])] * 3


def test_what_is_there_is_skipped_and_func_not_called_for_it(run, where):
    calls = []

    def func(uid, value):
        calls.append(uid)
        return value

    async def main():
        async with CachedItem(where, func) as item:
            await item.populate(ROWS[:4])
            await item.to_reader()
            await item.to_writer()
            await item.put("u5", 0.0)
            calls.clear()
            return counts(await item.populate(ROWS)), counts(await item.populate(ROWS))

    assert run(main) == ((5, 5, []), (0, 10, []))
    assert sorted(calls) == ["u4", "u6", "u7", "u8", "u9"]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_id_that_comes_twice_is_computed_once(run, where, concurrency):
    calls = []

    async def func(uid):
        calls.append(uid)
        await anyio.lowlevel.checkpoint()
        return 1.0

    async def main():
        async with CachedItem(where, func) as item:
            return counts(await item.populate([("a",), ("a",), ("b",), ("a",), ("b",)], concurrency=concurrency))

    assert run(main) == (2, 3, [])
    assert sorted(calls) == ["a", "b"]


def test_the_first_error_is_raised_as_it_is_and_what_was_computed_is_kept(run, where):
    async def func(uid, value):
        if value == 3:
            raise LookupError("three")
        return value

    async def main():
        async with CachedItem(where, func, concurrency=1) as item:
            error = await outcome_of(item.populate, ROWS)
            return error, sorted(item)

    error, kept = run(main)

    assert repr(error) == "LookupError('three')"
    assert kept == ["u0", "u1", "u2"]


def test_with_skip_every_error_is_in_the_report_under_its_id(run, where):
    async def func(uid, value):
        if value == 3:
            raise LookupError("three")
        return None if value == 5 else value

    async def main():
        async with CachedItem(where, func) as item:
            report = await item.populate([*ROWS, ("", 1.0), (7, 1.0), ("a//b", 1.0)], on_error="skip")
            return report, sorted(item)

    report, kept = run(main)

    assert {uid: type(error) for uid, error in report.failed.items()} == {
        "u3": LookupError,
        "u5": ItemTypeError,
        "": ItemIdError,
        7: ItemIdError,
        "a//b": ItemIdError,
    }
    assert (report.computed, len(kept)) == (8, 8)
    assert "8 computed, 0 there already, 5 failed" in str(report)
    assert "'u3': LookupError: three" in str(report)


@pytest.mark.parametrize("row", ["u1", b"u1", 3, None, (), [], {"uid": "a"}, (["u1"], 2)])
def test_a_row_that_is_none_is_named(run, where, row):
    async def main():
        async with CachedItem(where, double) as item:
            return await outcome_of(item.populate, [("a", 1.0), row])

    error = run(main)

    assert isinstance(error, ArgumentError)
    assert repr(row) in str(error)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("how", ["generator", "async generator"])
def test_rows_that_fail_end_it_whatever_on_error_says(run, where, how, on_error):
    def failing() -> Iterator[Any]:
        yield from ROWS[:3]
        raise OSError("the list of files is gone")

    async def failing_asynchronously() -> AsyncIterator[Any]:
        for row in failing():
            yield row

    async def main():
        async with CachedItem(where, double) as item:
            rows = failing() if how == "generator" else failing_asynchronously()
            return await outcome_of(item.populate, rows, on_error=on_error), item.mode

    error, mode = run(main)

    assert repr(error) == "OSError('the list of files is gone')"
    assert mode == "writer"


def test_rows_that_cannot_be_iterated_over_are_an_error(run, where):
    async def main():
        async with CachedItem(where, double) as item:
            return await outcome_of(item.populate, None)

    assert isinstance(run(main), TypeError)


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"on_error": "ignore"}])
def test_an_option_without_meaning_is_named(run, where, options):
    async def main():
        async with CachedItem(where, double) as item:
            return await outcome_of(item.populate, ROWS, **options)

    error = run(main)

    assert isinstance(error, ArgumentError)
    assert next(iter(options)) in str(error)


def test_without_func_it_says_so_at_once(run, where):
    async def main():
        async with CachedItem(where) as item:
            return await outcome_of(item.populate, [])

    error = run(main)

    assert isinstance(error, CacheMissError)
    assert "func=" in str(error)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_functions_run_at_the_same_time_than_is_said_here(run, where, concurrency):
    running = most = 0

    async def func(uid):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return 1.0

    async def main():
        async with CachedItem(where, func, concurrency=2) as item:
            await item.populate([(f"u{i}",) for i in range(20)], concurrency=concurrency)

    run(main)

    assert most == concurrency


def test_of_endless_rows_no_more_are_taken_than_are_needed_soon(run, where):
    taken = 0

    def endless() -> Iterator[Any]:
        nonlocal taken
        for taken in itertools.count():
            yield (f"u{taken}",)

    async def main():
        running = anyio.Event()

        async def func(uid):
            running.set()
            await anyio.sleep_forever()

        async with CachedItem(where, func) as item:
            async with anyio.create_task_group() as group:
                group.start_soon(item.populate, endless())
                await running.wait()
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()

    run(main)

    assert taken < 1000


def test_rows_that_are_slow_to_come_do_not_hold_up_the_event_loop(run, where):
    asked, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[Any]:
        yield ("a", 1.0)
        asked.set()
        assert go_on.wait(20)
        yield ("b", 2.0)

    async def main():
        reports = []

        async def populate():
            reports.append(await item.populate(slow()))

        async with CachedItem(where, double) as item:
            async with anyio.create_task_group() as group:
                group.start_soon(populate)
                await anyio.to_thread.run_sync(asked.wait)
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
                go_on.set()
            return counts(reports[0])

    assert run(main) == (2, 0, [])


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_one_that_is_cancelled_midway_is_finished_by_running_it_again(run, where, kind):
    calls = []

    async def main():
        stuck, release = anyio.Event(), threading.Event()

        async def func(uid, value):
            calls.append(uid)
            if value == 5 and not release.is_set():
                stuck.set()
                await anyio.sleep_forever()
            return value

        def plain(uid, value):
            calls.append(uid)
            if value == 5 and not release.is_set():
                anyio.from_thread.run_sync(stuck.set)
                assert release.wait(20)
            return value

        async with CachedItem(where, func if kind == "async" else plain, concurrency=1) as item:
            async with anyio.create_task_group() as group:
                group.start_soon(item.populate, ROWS)
                await stuck.wait()
                group.cancel_scope.cancel()
            release.set()
            again = counts(await item.populate(ROWS))
            return again, [value.item() for value in await item.get_many([uid for uid, _ in ROWS])]

    (computed, skipped, failed), values = run(main)

    assert computed + skipped == 10
    assert (skipped >= 5, failed) == (True, [])
    assert values == [value for _, value in ROWS]
    assert all(calls.count(uid) == 1 for uid, value in ROWS if value < 5)


def test_one_that_fails_cancels_the_others_and_leaves_no_task(run, where):
    async def main():
        cancelled = []
        started = anyio.Event()

        async def func(uid):
            if uid == "bad":
                await started.wait()
                raise LookupError("bad")
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.append(uid)

        async with CachedItem(where, func) as item:
            error = await outcome_of(item.populate, [("a",), ("bad",), ("b",)])
            await item.to_reader()
        return error, cancelled

    error, cancelled = run(main)

    assert repr(error) == "LookupError('bad')"
    assert cancelled in (["a"], ["a", "b"], ["b", "a"])


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_ctrl_c_within_func_arrives_by_itself_and_not_in_a_group(run, where, kind):
    def plain(uid):
        raise KeyboardInterrupt

    async def func(uid):
        raise KeyboardInterrupt

    async def main():
        async with CachedItem(where, func if kind == "async" else plain) as item:
            await item.populate([("a",), ("b",)], on_error="skip")

    with pytest.raises(KeyboardInterrupt):
        run(main)


def test_func_may_use_the_cache_that_it_fills(run, where):
    async def func(uid, depth):
        return 1.0 + (await item.compute(f"{uid}'", depth - 1) if depth else 0.0)

    item = CachedItem(where, func, concurrency=1)

    async def main():
        async with item:
            report = await item.populate([("a", 3), ("b", 1)])
            return counts(report), {uid: value.item() async for uid, value in item}

    report, items = run(main)

    assert report == (2, 0, [])
    assert items == {"a'''": 1, "a''": 2, "a'": 3, "a": 4, "b'": 1, "b": 2}


def test_rows_may_look_into_the_cache_that_they_fill(run, where):
    async def main():
        async def rows():
            yield ("a", 1.0)
            yield ("b", (await item.compute("a", 1.0)).item())

        async with CachedItem(where, double) as item:
            return counts(await item.populate(rows())), (await item.get("b")).item()

    (computed, skipped, failed), value = run(main)

    assert (computed + skipped, failed, value) == (2, [], 4.0)


@pytest.mark.parametrize(
    ("rows", "options", "shown"),
    [
        (lambda: [(str(i),) for i in range(7)], {}, "7/7"),
        (lambda: dict.fromkeys("abc", 1.0).items(), {}, "3/3"),
        (lambda: ((str(i),) for i in range(7)), {"total": 9}, "7/9"),
        (lambda: ((str(i),) for i in range(7)), {}, "7item"),
        (lambda: asynchronously([("a",), ("b",)]), {}, "2item"),
    ],
)
def test_the_bar_goes_to_stderr_with_total_rate_and_time_left(run, where, capsys, rows, options, shown):
    async def main():
        async with CachedItem(where, double) as item:
            await item.populate(rows(), progress=True, **options)

    run(main)  # and `nothing_left` looks for the thread that such bars keep
    out, err = capsys.readouterr()

    assert out == ""
    assert shown in err
    assert "item/s" in err


def test_the_bar_counts_what_was_there_and_what_failed_as_well(run, where, capsys):
    async def func(uid):
        if uid == "bad":
            raise LookupError
        return 1.0

    async def main():
        async with CachedItem(where, func) as item:
            await item.put("there", 1.0)
            await item.populate([("there",), ("bad",), ("new",)], progress=True, on_error="skip")

    run(main)

    assert "3/3" in capsys.readouterr().err


def test_without_progress_nothing_is_printed(run, where, capfd):
    async def main():
        async with CachedItem(where, double) as item:
            await item.populate(ROWS)

    run(main)

    assert capfd.readouterr() == ("", "")


def test_large_and_small_items_of_many_shapes_all_arrive(run, where):
    rng = np.random.default_rng(0)
    rows = [(f"u{i}", rng.integers(0, 9, rng.integers(0, 5, rng.integers(0, 4)))) for i in range(200)]

    async def main():
        async with CachedItem(where, lambda uid, value: value) as item:
            await item.populate(iter(rows))
            await item.to_reader()
            return await item.get_many([uid for uid, _ in rows])

    values = run(main)

    assert all(
        np.array_equal(value, wanted) and value.shape == wanted.shape
        for value, (_, wanted) in zip(values, rows, strict=True)
    )
