"""Iterations begin and end, in every order and in every way, and leave nothing behind."""

from __future__ import annotations

import asyncio
import collections
import gc
import io
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import h5py
import numpy as np
import pytest
import trio

import asyncfeed
from asyncfeed.engine import prefetch as prefetch_module
from asyncfeed.engine import session as session_module
from asyncfeed.engine import thread as thread_module
from asyncfeed.engine.signal import Signal
from asyncfeed.storage import direct

NUM, LENGTH, DIM = 20, 50, 16
PARTITION = 4096
"""One of the utterances below fits, two do not."""

PATIENT = 30.0
"""Seconds until a test that waits for another thread gives up."""


def numbered(num: int = NUM) -> dict[str, np.ndarray]:
    """Utterances of equal length; every value in them is unique."""
    values = np.arange(num * LENGTH * DIM, dtype="f4").reshape(num, LENGTH, DIM)
    return {f"utt{i:03d}": array for i, array in enumerate(values)}


def small(path: Path, *, prefetch: int = 1, **options: Any) -> asyncfeed.Feed:
    """A feed with a partition for every utterance."""
    return asyncfeed.Feed(path, memory_budget=PARTITION * (prefetch + 1), prefetch=prefetch, **options)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncfeed")]


def ended(threads: list[threading.Thread]) -> bool:
    """Whether these threads end, without anything further being done."""
    for thread in threads:
        thread.join(PATIENT)
    return not any(thread.is_alive() for thread in threads)


def equal(corpus: dict[str, np.ndarray], triplets: list[tuple[str, int, np.ndarray]]) -> bool:
    """Whether all frames of a corpus are there, each once and right."""
    keys = sorted((utt, index) for utt, index, _ in triplets)
    complete = keys == [(utt, index) for utt, array in sorted(corpus.items()) for index in range(len(array))]
    return complete and all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in triplets)


class Held:
    """A function whose calls wait, from a certain one on, until they are released. Counts those that are done.

    Concerns calls from threads of this name only: opening a feed reads, too.
    """

    def __init__(self, function: Callable[..., Any], free: int, thread: str) -> None:
        self.function, self.free, self.thread = function, free, thread
        self.begun = self.done = 0
        self.entered, self.release = Signal(), threading.Event()
        self.changed = threading.Condition()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name != self.thread:
            return self.function(*args, **kwargs)
        self.begun += 1
        if self.begun > self.free:
            self.entered.set()
            assert self.release.wait(PATIENT)
        result = self.function(*args, **kwargs)
        with self.changed:
            self.done += 1
            self.changed.notify_all()
        return result

    def wait_for(self, done: int) -> None:
        """Block until so many calls are done."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.done >= done, PATIENT)


@pytest.fixture
def corpus() -> dict[str, np.ndarray]:
    return numbered()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Held]]:
    """``hold(module, name, free=n)``: calls of a function wait after the first n, at the latest until the test ends."""
    helds: list[Held] = []

    def hold(module: Any, name: str, free: int = 0, thread: str = "asyncfeed-reader") -> Held:
        held = Held(getattr(module, name), free, thread)
        monkeypatch.setattr(module, name, held)
        helds.append(held)
        return held

    yield hold
    for held in helds:
        held.release.set()


@pytest.fixture
def reads(hold: Callable[..., Held]) -> Held:
    """All direct reads wait: the disk is slow."""
    return hold(direct, "_preadv")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait long for a reader that is stuck."""
    monkeypatch.setattr(prefetch_module, "PATIENCE", 0.02)


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run an async function on one of the event loops."""
    if request.param == "trio":
        return trio.run
    return lambda function, *args: asyncio.run(function(*args))


async def until(signal: Signal) -> None:
    """Wait for another thread while the event loop goes on."""
    with anyio.fail_after(PATIENT):
        await signal.wait_async()


# -- leaving early -----------------------------------------------------------------------------------------------------


def test_breaking_out_fifty_times_ends_every_reader_at_once_with_aclose(run, path):
    async def main():
        async with small(path) as feed:
            for _ in range(50):
                async with aclosing(aiter(feed)) as frames:
                    async for _frame in frames:
                        break
                assert ended(readers())

    run(main)

    assert ended(readers())


def test_breaking_out_fifty_times_ends_every_reader_when_the_iterator_is_collected(run, path):
    feeds = [small(path) for _ in range(50)]

    async def main():
        for feed in feeds:
            async for _frame in feed:
                break
            assert ended(readers())  # without a turn of the event loop

    run(main)


def test_breaking_out_of_a_plain_loop_ends_the_reader(path):
    feed = small(path)
    for _ in range(50):
        for _frame in feed:
            break
        assert ended(readers())


def test_an_iterator_that_was_never_started_has_no_reader(run, path):
    async def main():
        feed = small(path)
        iterator = aiter(feed)
        await iterator.aclose()
        return [item async for item in iterator]

    assert run(main) == []
    assert list(iter_closed(small(path))) == []
    assert ended(readers())


def iter_closed(feed: asyncfeed.Feed) -> Iterator[Any]:
    iterator = iter(feed)
    iterator.close()
    return iterator


@pytest.mark.parametrize("shape", ["many partitions", "one partition", "one utterance"])
def test_closing_the_outermost_of_nested_generators_ends_the_reader(run, make, shape):
    path = make(numbered(1 if shape == "one utterance" else NUM))
    budget = "auto" if shape == "one partition" else 2 * PARTITION

    async def inner(feed: asyncfeed.Feed) -> AsyncIterator[Any]:
        async with aclosing(aiter(feed)) as frames:
            async for frame in frames:
                yield frame

    async def outer(feed: asyncfeed.Feed) -> AsyncIterator[Any]:
        async with aclosing(inner(feed)) as frames:
            async for frame in frames:
                yield frame

    async def main():
        feed = asyncfeed.Feed(path, memory_budget=budget)
        async with aclosing(outer(feed)) as frames:
            async for _frame in frames:
                break
        return ended(readers())

    assert run(main)


def test_an_exception_of_the_users_leaves_the_feed_unchanged_and_the_frame_readable(run, path, corpus):
    mine, kept = ValueError("mine"), []

    async def main():
        async with small(path) as feed:
            async for triplet in feed:
                kept.append(triplet)
                raise mine

    with pytest.raises(ValueError, match="mine") as caught:
        run(main)

    assert caught.value is mine
    assert (mine.__cause__, mine.__context__) == (None, None)
    utt, index, frame = kept[0]
    assert np.array_equal(frame, corpus[utt][index])
    assert ended(readers())
    mine.__traceback__ = None


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_cancelling_while_waiting_for_the_first_partition_returns(run, path, reads, impatient):
    got = []

    async def consume(feed):
        async for frame in feed:
            got.append(frame)

    async def main():
        async with small(path) as feed:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume, feed)
                await until(reads.entered)
                tasks.cancel_scope.cancel()

    run(main)

    assert got == []
    reads.release.set()
    assert ended(readers())


def test_cancelling_while_the_reader_is_parked_returns(run, path, hold):
    reads = hold(direct, "_preadv", free=NUM)
    parked, cancelled = Signal(), []

    async def consume(feed):
        async for _frame in feed:
            reads.wait_for(2)  # both segments are full
            parked.set()
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.append(True)

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, small(path))
            await until(parked)
            tasks.cancel_scope.cancel()

    run(main)

    gc.collect()
    assert cancelled == [True]
    assert ended(readers())


def test_cancelling_while_the_feed_opens_stops_the_scan(run, path, hold):
    opening = hold(session_module, "open_library", thread="asyncfeed-open")

    async def consume(feed):
        async for _frame in feed:
            raise AssertionError("it was cancelled")

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, small(path))
            await until(opening.entered)
            tasks.cancel_scope.cancel()
            opening.release.set()

    run(main)

    assert ended(readers())


def test_after_a_cancelled_step_two_concurrent_closings_both_return(run, path, reads, impatient):
    closed = []

    async def step(iterator, scope):
        with scope:
            await anext(iterator)

    async def close(iterator):
        await iterator.aclose()
        closed.append(True)

    async def main():
        iterator, scope = aiter(small(path)), anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step, iterator, scope)
            await until(reads.entered)
            scope.cancel()
            tasks.start_soon(close, iterator)
            tasks.start_soon(close, iterator)
        return await anext(iterator, "end")

    assert run(main) == "end"
    assert closed == [True, True]


def test_a_task_that_waits_in_a_closed_iterator_fails(run, path, reads, impatient):
    async def step(iterator):
        with pytest.raises(asyncfeed.ClosedError, match="closed"):
            await anext(iterator)

    async def main():
        iterator = aiter(small(path))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step, iterator)
            await until(reads.entered)
            await iterator.aclose()

    run(main)


def test_an_iterator_closed_while_its_feed_opens_does_not_begin(run, path, hold):
    opening = hold(session_module, "open_library", thread="asyncfeed-open")

    async def step(iterator):
        with pytest.raises(asyncfeed.ClosedError, match="before its first item"):
            await anext(iterator)

    async def main():
        iterator = aiter(small(path))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step, iterator)
            await until(opening.entered)
            await iterator.aclose()
            opening.release.set()

    run(main)

    assert ended(readers())


def test_cancelling_does_not_wait_for_a_scan_that_is_stuck(run, path, hold, monkeypatch):
    monkeypatch.setattr(thread_module, "PATIENCE", 0.02)
    opening = hold(session_module, "open_library", thread="asyncfeed-open")
    feed = small(path)

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first_of, feed)
            await until(opening.entered)
            tasks.cancel_scope.cancel()

    run(main)

    opening.release.set()
    assert ended(readers())
    feed.close()


# -- two where there can be one ----------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_while_the_first_waits(path, corpus, reads):
    iterator = iter(small(path))
    got: list[Any] = []
    first = threading.Thread(target=lambda: got.extend((utt, index, frame.copy()) for utt, index, frame in iterator))
    first.start()
    assert reads.entered.wait(PATIENT)

    with pytest.raises(asyncfeed.ConsumerError, match="another consumer"):
        next(iterator)

    reads.release.set()
    first.join(PATIENT)
    assert equal(corpus, got)


def test_a_second_task_is_refused_while_the_first_waits(run, path, corpus, reads):
    got = []

    async def first(iterator):
        async for utt, index, frame in iterator:
            got.append((utt, index, frame.copy()))

    async def main():
        iterator = aiter(small(path))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first, iterator)
            await until(reads.entered)
            with pytest.raises(asyncfeed.ConsumerError, match="another consumer"):
                await anext(iterator)
            with pytest.raises(asyncfeed.ConsumerError, match="another consumer"):
                await anext(iterator, "default")
            reads.release.set()

    run(main)

    assert equal(corpus, got)


def test_two_threads_in_one_iterator_lose_nothing_in_silence(path):
    def consume(iterator, counts, errors):
        try:
            for batch in iterator:
                counts.append(len(batch.utts))
        except asyncfeed.ConsumerError as error:
            errors.append(error)

    feed = small(path)
    for _ in range(8):
        iterator, counts, errors = iter(feed.batches(8)), [], []
        threads = [threading.Thread(target=consume, args=(iterator, counts, errors)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert ended(threads)

        assert len(errors) <= 1
        assert sum(counts) == NUM * LENGTH


def test_a_newer_iteration_ends_the_older_one(run, path, corpus):
    async def main():
        async with small(path, prefetch=2) as feed:  # one segment is the older one's
            older, newer = aiter(feed), aiter(feed)
            await anext(older)
            got = [(utt, index, frame.copy()) async for utt, index, frame in newer]
            with pytest.raises(asyncfeed.ConsumerError, match="newer iteration"):
                async for _frame in older:
                    pass
            return got, await anext(older, "end")

    got, after = run(main)

    assert equal(corpus, got)
    assert after == "end"


def test_a_newer_plain_iteration_ends_the_older_one(path, corpus):
    with small(path, prefetch=2) as feed:
        older = iter(feed)
        next(older)
        got = [(utt, index, frame.copy()) for utt, index, frame in feed]

        with pytest.raises(asyncfeed.ConsumerError, match="newer iteration"):
            collections.deque(older, maxlen=0)

    assert equal(corpus, got)
    assert list(older) == []


def test_of_iterations_that_begin_at_once_the_last_one_goes_on_and_the_others_hear_of_it(run, path, corpus):
    outcomes: list[Any] = []

    async def consume(feed):
        try:
            outcomes.append([(utt, index, frame.copy()) async for utt, index, frame in feed])
        except asyncfeed.ConsumerError as error:
            outcomes.append(str(error))

    async def main():
        async with small(path, prefetch=5) as feed:  # a segment for each, while they hear of it
            first = aiter(feed)
            await anext(first)  # the others have to wait for its end
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(consume, feed)
            await first.aclose()

    run(main)

    complete = [outcome for outcome in outcomes if isinstance(outcome, list)]
    assert len(outcomes) == 4
    assert len(complete) == 1
    assert equal(corpus, complete[0])


def test_of_plain_iterations_that_begin_at_once_one_goes_on(path, corpus):
    outcomes: list[Any] = []

    def consume(feed, together):
        together.wait()
        try:
            outcomes.append([(utt, index, frame.copy()) for utt, index, frame in feed])
        except asyncfeed.ConsumerError as error:
            outcomes.append(str(error))

    with small(path, prefetch=5) as feed:
        first, together = iter(feed), threading.Barrier(4)
        next(first)
        threads = [threading.Thread(target=consume, args=(feed, together)) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert ended(threads)

    assert all(isinstance(outcome, str) or equal(corpus, outcome) for outcome in outcomes)
    assert any(isinstance(outcome, list) for outcome in outcomes)
    first.close()


# -- closing -----------------------------------------------------------------------------------------------------------


USES: dict[str, Callable[[asyncfeed.Feed], Any]] = {
    "iter": lambda feed: next(iter(feed)),
    "aiter": lambda feed: asyncio.run(first_of(feed)),
    "utterances": lambda feed: next(iter(feed.utterances())),
    "batches": lambda feed: next(iter(feed.batches(4))),
    "windows": lambda feed: next(iter(feed.windows(4))),
    "partitions": lambda feed: next(iter(feed.partitions())),
    "len": len,
    "plan": lambda feed: feed.plan,
    "budget": lambda feed: feed.budget,
    "skipped": lambda feed: feed.skipped,
    "num_utterances": lambda feed: feed.num_utterances,
    "nbytes": lambda feed: feed.nbytes,
    "statistics": lambda feed: feed.statistics(),
    "open": lambda feed: feed.open(),
    "aopen": lambda feed: asyncio.run(feed.aopen()),
    "with": lambda feed: feed.__enter__(),
}


def test_a_closed_feed_refuses_to_be_used_in_any_way(path):
    feed = small(path).open()
    feed.close()

    for use in USES.values():
        with pytest.raises(asyncfeed.ClosedError, match="closed"):
            use(feed)


async def first_of(feed: asyncfeed.Feed) -> Any:
    return await anext(aiter(feed))


def test_closing_is_idempotent_in_both_spellings_and_at_once(run, path):
    async def main():
        feed = await small(path).aopen()
        iterator = aiter(feed)
        await anext(iterator)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.aclose)
            tasks.start_soon(feed.aclose)
            tasks.start_soon(iterator.aclose)
        feed.close()
        await feed.aclose()
        return repr(feed)

    assert "closed" in run(main)
    assert ended(readers())


def test_a_loop_hears_that_its_feed_was_closed_after_the_frames_it_has(path, corpus):
    feed = small(path, shuffle=False)
    iterator = iter(feed)
    got = [next(iterator)]

    feed.close()

    with pytest.raises(asyncfeed.ClosedError, match="closed while"):
        got.extend((utt, index, frame.copy()) for utt, index, frame in iterator)
    assert all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in got)
    assert list(iterator) == []


@pytest.mark.parametrize("who", ["the feed", "the iterator"])
def test_a_thread_that_waits_hears_that_another_one_closed(path, reads, impatient, who):
    feed = small(path)
    iterator = iter(feed)
    outcome: list[Exception] = []

    def consume():
        try:
            next(iterator)
        except asyncfeed.AsyncFeedError as error:
            outcome.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert reads.entered.wait(PATIENT)

    (feed if who == "the feed" else iterator).close()

    consumer.join(PATIENT)
    assert isinstance(outcome[0], asyncfeed.ClosedError)
    assert next(iterator, "end") == "end"
    reads.release.set()
    assert ended(readers())


def test_a_feed_closed_while_it_opens_does_not_begin(run, path, hold):
    opening = hold(session_module, "open_library", thread="asyncfeed-open")
    feed = small(path)

    async def step():
        with pytest.raises(asyncfeed.ClosedError):
            await first_of(feed)

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
            await until(opening.entered)
            await feed.aclose()
            opening.release.set()

    run(main)

    assert ended(readers())
    assert "closed" in repr(feed)


def test_an_iterator_stays_finished(run, path):
    async def main():
        iterator = aiter(small(path))
        num = 0
        async for _frame in iterator:
            num += 1
        return num, [await anext(iterator, "end") for _ in range(3)]

    plain = iter(small(path))

    assert sum(1 for _ in plain) == NUM * LENGTH
    assert [next(plain, "end") for _ in range(3)] == ["end"] * 3
    assert run(main) == (NUM * LENGTH, ["end"] * 3)


def test_an_iterator_that_could_not_begin_is_finished_and_the_feed_can_be_used_later(run, tmp_path):
    feed = asyncfeed.Feed(tmp_path / "later.h5")
    plain = iter(feed)

    async def main():
        iterator = aiter(feed)
        with pytest.raises(asyncfeed.SourceMissingError):
            await anext(iterator)
        return await anext(iterator, "end")

    with pytest.raises(asyncfeed.SourceMissingError):
        next(plain)
    assert next(plain, "end") == "end"
    assert run(main) == "end"
    with h5py.File(tmp_path / "later.h5", "w") as file:
        file["a"] = np.ones((3, 2), "f4")
    assert len(list(feed)) == 3
    feed.close()


def test_nothing_of_the_file_stays_open_when_a_feed_was_closed(make, corpus):
    path = make(corpus, compression="gzip")
    with small(path) as feed:
        kept = next(iter(feed))

    with h5py.File(path, "r+") as file:
        file["more"] = np.ones(3)

    assert np.array_equal(kept[2], corpus[kept[0]][kept[1]])


def test_between_two_epochs_no_file_is_open(make, corpus):
    path = make(corpus, compression="gzip")
    with small(path) as feed:
        list(feed.batches(100))

        with h5py.File(path, "r+"):
            pass


# -- a reader that fails -----------------------------------------------------------------------------------------------


def everything(
    feed: asyncfeed.Feed, after_first: Callable[[], None] = lambda: None
) -> tuple[list[Any], Any, list[Any]]:
    """All triplets up to an error, the error, and what comes after it."""
    got: list[Any] = []
    iterator = iter(feed)
    try:
        for utt, index, frame in iterator:
            got.append((utt, index, frame.copy()))
            if len(got) == 1:
                after_first()
    except asyncfeed.AsyncFeedError as error:
        return got, error, list(iterator)
    return got, None, list(iterator)


async def everything_async(
    feed: asyncfeed.Feed, after_first: Callable[[], None] = lambda: None
) -> tuple[list[Any], Any, list[Any]]:
    got: list[Any] = []
    iterator = aiter(feed)
    try:
        async for utt, index, frame in iterator:
            got.append((utt, index, frame.copy()))
            if len(got) == 1:
                after_first()
    except asyncfeed.AsyncFeedError as error:
        return got, error, [item async for item in iterator]
    return got, None, [item async for item in iterator]


@pytest.fixture(params=["plain", "asyncio", "trio"])
def collect(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Go through a feed in each of the three ways: ``collect(feed, after_first)``."""
    if request.param == "plain":
        return everything
    if request.param == "trio":
        return lambda *args: trio.run(everything_async, *args)
    return lambda *args: asyncio.run(everything_async(*args))


def in_order(corpus: dict[str, np.ndarray], got: list[Any]) -> bool:
    """Whether these are the first frames of a corpus, in file order."""
    expected = [(utt, index, frame) for utt, array in corpus.items() for index, frame in enumerate(array)]
    return len(got) <= len(expected) and all(
        (a[0], a[1]) == (b[0], b[1]) and np.array_equal(a[2], b[2]) for a, b in zip(got, expected, strict=False)
    )


def test_a_damaged_chunk_comes_after_all_frames_before_it_and_is_the_end(make, corpus, collect):
    path = make(corpus, compression="gzip")
    with h5py.File(path) as file:
        chunk = file["utt007"].id.get_chunk_info(0)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)

    got, error, after = collect(small(path, shuffle=False))

    assert isinstance(error, asyncfeed.ReadError)
    assert "utt007" in str(error)
    assert str(path) in str(error)
    assert error.__cause__ is not None
    assert len(got) == 7 * LENGTH
    assert in_order(corpus, got)
    assert after == []


@pytest.mark.parametrize("change", ["truncate", "overwrite", "replace"])
def test_a_file_that_changes_is_an_error_after_what_was_read_before(path, corpus, collect, change, hold):
    reads = hold(direct, "_preadv", free=NUM)

    def alter():
        reads.wait_for(2)  # then both segments are taken
        if change == "truncate":
            os.truncate(path, 5000)
        elif change == "overwrite":
            with path.open("r+b") as file:
                file.write(b"something else")
            os.utime(path, ns=(1, 1))
        else:
            other = path.with_name("other")
            other.write_bytes(path.read_bytes())
            os.replace(other, path)
            os.utime(path, ns=(1, 1))

    feed = small(path, shuffle=False)
    got, error, after = collect(feed, alter)

    assert isinstance(error, asyncfeed.ChangedFileError) or (change == "replace" and error is None)
    assert len(got) >= LENGTH
    assert in_order(corpus, got)
    assert after == []
    if change != "replace":  # an open descriptor still reads the file that was replaced
        assert len(got) < NUM * LENGTH
    with pytest.raises(asyncfeed.ChangedFileError, match=path.name):
        collections.deque(feed, maxlen=0)


def test_whatever_fails_in_the_reader_reaches_the_consumer(path, monkeypatch):
    def broken(*args: object) -> int:
        raise RuntimeError("a wire came loose")

    feed = small(path).open()
    monkeypatch.setattr(direct, "_preadv", broken)

    with pytest.raises(asyncfeed.ReadError, match="a wire came loose") as caught:
        list(feed)

    assert isinstance(caught.value.__cause__, RuntimeError)


# -- event loops -------------------------------------------------------------------------------------------------------


def test_one_feed_serves_asyncio_trio_and_plain_loops_in_turn(path, corpus):
    async def epoch(feed):
        return [(utt, index, frame.copy()) async for utt, index, frame in feed]

    feed = small(path)
    epochs = [asyncio.run(epoch(feed)), trio.run(epoch, feed), [(u, i, f.copy()) for u, i, f in feed]]
    epochs += [asyncio.run(epoch(feed))]

    assert all(equal(corpus, epoch) for epoch in epochs)
    assert feed.epoch == 4
    feed.close()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_loop_that_ended_without_closing_does_not_disturb_the_next(path, corpus, hold, monkeypatch, waiting):
    reads = hold(direct, "_preadv", free=0 if waiting else NUM)
    noise: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", noise.append)
    feed = small(path, prefetch=2)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # asyncio says that a task was pending; so it was
    iterator = aiter(feed)
    if waiting:
        task = loop.create_task(anext(iterator))
        loop.run_until_complete(until(reads.entered))
    else:
        task = loop.run_until_complete(anext(iterator))
    loop.close()
    reads.release.set()
    if waiting:
        reads.wait_for(1)  # and now the reader tells a loop that is closed

    async def epoch():
        return [(utt, index, frame.copy()) async for utt, index, frame in feed]

    assert equal(corpus, asyncio.run(epoch()))
    del task, iterator
    gc.collect()
    assert noise == []
    assert ended(readers())
    feed.close()


def test_other_tasks_get_turns_while_frames_are_there_all_the_time(run, make):
    path = make({"a": np.zeros((200_000, 1), "f4")})
    turns, inside = [], []

    async def tick():
        while True:
            await anyio.lowlevel.checkpoint()
            turns.extend(inside)

    async def main():
        async with asyncfeed.Feed(path, shuffle=False) as feed, anyio.create_task_group() as tasks:
            assert len(feed.plan) == 1
            tasks.start_soon(tick)
            num = 0
            async for _frame in feed:
                if not num:
                    inside.append(True)  # from here on nothing is waited for
                num += 1
            inside.clear()
            tasks.cancel_scope.cancel()
        return num

    assert run(main) == 200_000
    assert turns


def test_partitions_are_read_while_the_event_loop_is_blocked(run, path, corpus, hold):
    reads = hold(direct, "_preadv", free=NUM)

    async def main():
        got = []
        async with small(path, prefetch=3) as feed:
            async for utt, index, frame in feed:
                got.append((utt, index, frame.copy()))
                if len(got) == 1:
                    reads.wait_for(4)  # in the thread of the event loop, which does not run meanwhile
        return got

    assert equal(corpus, run(main))


def test_many_feeds_share_a_loop_whose_executor_has_one_thread_which_is_busy(path, corpus):
    busy = threading.Event()
    complete = []

    async def consume():
        async with small(path) as feed:
            complete.append(equal(corpus, [(u, i, f.copy()) async for u, i, f in feed]))

    async def main():
        from concurrent.futures import ThreadPoolExecutor

        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        blocked = loop.run_in_executor(None, busy.wait, PATIENT)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(consume())
        busy.set()
        await blocked

    asyncio.run(main())

    assert complete == [True] * 8


# -- partitions and segments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_every_frame_is_right_for_any_number_of_partitions_and_segments(make, collect, prefetch):
    for num in (1, 2, 3, 4, 5, 7):
        corpus = numbered(num)
        with small(make(corpus, name=f"{num}.h5"), prefetch=prefetch) as feed:
            assert len(feed.plan) == num
            epochs = [collect(feed), collect(feed)]
            segments = feed.statistics().segments

        assert all(equal(corpus, got) for got, _error, _after in epochs)
        assert segments <= prefetch + 1


def test_objects_that_act_like_files_are_refused(path):
    for source in (io.BytesIO(path.read_bytes()), path.open("rb")):
        with pytest.raises(asyncfeed.ArgumentError, match="file objects"):
            asyncfeed.Feed(source).open()
        source.close()
