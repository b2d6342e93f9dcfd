"""What is handed out stays as it is for as long as it lives, and its memory goes with it."""

from __future__ import annotations

import asyncio
import collections
import errno
import gc
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import asyncfeed
from asyncfeed.engine import session as session_module
from asyncfeed.memory import segment
from asyncfeed.memory.pool import SegmentPool
from asyncfeed.memory.segment import MAKERS, make_anonymous, pick_maker

NUM, LENGTH, DIM = 12, 50, 16
PARTITION = 4096
"""One of the utterances below fits, two do not."""

PATIENT = 30.0


@pytest.fixture
def corpus() -> dict[str, np.ndarray]:
    """Utterances of equal length; every value in them is unique."""
    values = np.arange(NUM * LENGTH * DIM, dtype="f4").reshape(NUM, LENGTH, DIM)
    return {f"utt{i:03d}": array for i, array in enumerate(values)}


def small(path: Path, *, prefetch: int = 1, **options: Any) -> asyncfeed.Feed:
    """A feed with a partition for every utterance."""
    return asyncfeed.Feed(path, memory_budget=PARTITION * (prefetch + 1), prefetch=prefetch, **options)


def mapped() -> int:
    """Segments that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:asyncfeed")


def go_through(feed: asyncfeed.Feed, epochs: int = 1) -> None:
    """Use every segment several times."""
    for _ in range(epochs):
        for _utt, array in feed.utterances():
            array[:] = -1


# -- views -------------------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "a slice": lambda array: array[3:5],
    "one row": lambda array: array[7],
    "a slice of a slice": lambda array: array[2:][1:3],
    "a transposed array": lambda array: array.T,
    "a reshaped array": lambda array: array.reshape(-1, 2),
    "a view of another type": lambda array: array.view(np.uint32),
    "np.asarray of a slice": lambda array: np.asarray(array[3:5]),
    "a memoryview": memoryview,
    "a memoryview cast to bytes": lambda array: memoryview(array).cast("B"),
    "np.frombuffer over a memoryview": lambda array: np.frombuffer(memoryview(array), "f4"),
    "as_strided": lambda array: np.lib.stride_tricks.as_strided(array, (4, 8), (128, 4)),
    "a sliding window": lambda array: np.lib.stride_tricks.sliding_window_view(array, 3, axis=0),
    "DLPack, as torch and jax use it": np.from_dlpack,
    "an iterator over rows": iter,
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_refers_to_a_partition_keeps_it(path, way):
    with small(path, prefetch=2, shuffle=False) as feed:
        iterator = iter(feed.utterances())
        _utt, array = next(iterator)
        kept = WAYS[way](array)
        expected = np.array(list(kept) if way == "an iterator over rows" else kept)
        kept = WAYS[way](array)
        del array

        go_through(feed, 3)

        now = np.array(list(kept) if way == "an iterator over rows" else kept)
        assert np.array_equal(now, expected)
        assert feed.statistics().segments <= 3


def test_frames_of_every_form_outlive_their_iteration(path, corpus):
    with small(path, prefetch=2) as feed:
        _utt, index, frame = next(iter(feed))
        window = next(iter(feed.windows(5)))
        batch = next(iter(feed.batches(7)))
        (utt, rows), expected = next(iter(feed.utterances())), None
        expected = corpus[utt]

        assert np.array_equal(frame, corpus[_utt][index])
        assert np.array_equal(window.frames, corpus[window.utt][window.start : window.start + 5])
        assert all(np.array_equal(f, corpus[u][i]) for u, i, f in zip(*batch, strict=True))
        assert np.array_equal(rows, expected)


@pytest.mark.parametrize("loop", ["plain", "asyncio"])
def test_keeping_all_frames_is_right_and_warns_once(path, corpus, loop):
    async def collect(feed):
        return [item async for item in feed]

    feed = small(path)

    with pytest.warns(ResourceWarning, match=r"held by frames that are kept.*frame\.copy\(\)") as caught:
        kept = list(feed) if loop == "plain" else asyncio.run(collect(feed))

    assert len(caught) == 1
    assert Path(caught[0].filename).suffix == ".py"
    assert len(kept) == NUM * LENGTH
    assert all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = list(feed)
    assert all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in kept + more)
    feed.close()


def test_memory_beyond_the_budget_is_given_back_when_the_frames_go(path):
    with small(path) as feed:
        with pytest.warns(ResourceWarning):
            kept = list(feed)
        most = mapped()
        del kept
        go_through(feed)

        assert most >= NUM
        assert mapped() <= 2


def test_keeping_frames_with_no_memory_left_is_an_error_that_says_what_to_do(path, corpus, monkeypatch):
    feed = small(path, shuffle=False).open()
    monkeypatch.setattr(feed._session._pool, "may_use", lambda: 100)
    kept: list[Any] = []

    with pytest.raises(asyncfeed.BudgetError, match=r"2 segments of 4 KiB are held.*only 100 .*copy what you keep"):
        kept.extend(feed)

    assert len(kept) == 2 * LENGTH
    assert all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in kept)
    kept.clear()
    feed.close()


# -- closing with live views -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "aclose", "forget"])
def test_a_frame_outlives_its_feed_and_its_memory_goes_with_it(path, corpus, way):
    feed = small(path)
    iterator = iter(feed)
    utt, index, frame = next(iterator)

    if way == "close":
        feed.close()
    elif way == "aclose":
        asyncio.run(feed.aclose())
    del iterator, feed
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("asyncfeed"):
            thread.join(PATIENT)

    assert np.array_equal(frame, corpus[utt][index])
    frame += 1
    assert np.array_equal(frame, corpus[utt][index] + 1)
    assert mapped() == 1
    del frame
    assert mapped() == 0


def test_a_closed_feed_holds_no_memory_even_if_it_and_its_streams_live_on(path):
    feed = small(path)
    stream = feed.utterances()
    for _item in stream:
        pass
    del _item

    feed.close()

    assert mapped() == 0
    assert stream is not None


def test_an_error_that_is_kept_does_not_keep_a_segment(make, corpus):
    path = make(corpus, compression="gzip")
    with h5py.File(path) as file:
        chunk = file["utt004"].id.get_chunk_info(0)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    feed = small(path, shuffle=False)

    with pytest.raises(asyncfeed.ReadError) as caught:
        collections.deque(feed, maxlen=0)

    feed.close()
    assert mapped() == 0
    assert caught.value.__cause__ is not None


def test_frames_may_be_written_to_and_the_next_epoch_is_as_in_the_file(path, corpus):
    with small(path, shuffle=False) as feed:
        for partition in feed.partitions():
            frames = partition.frames
            frames += 1
            assert np.array_equal(partition.arrays[0], frames)
        del partition, frames

        again = {utt: array.copy() for utt, array in feed.utterances()}

    assert all(np.array_equal(again[utt], array) for utt, array in corpus.items())


# -- how many segments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_prefetch_and_one_segments_are_made_and_used_again(path, corpus, prefetch):
    with small(path, prefetch=prefetch) as feed:
        for _epoch in range(4):
            for utt, array in feed.utterances():
                while feed.statistics().partitions < prefetch + 1:  # hold the first one until the others are full
                    threading.Event().wait(0.001)
                assert np.array_equal(array, corpus[utt])
                array[:] = -1
        statistics, budget = feed.statistics(), feed.budget

    assert statistics.segments == prefetch + 1
    assert statistics.peak_shared_nbytes <= budget.nbytes


@pytest.mark.parametrize("maker", ["memfd", "named", "anonymous"])
@pytest.mark.parametrize("loop", ["plain", "asyncio"])
def test_every_sort_of_segment_serves(path, corpus, monkeypatch, segments, maker, loop):
    monkeypatch.setattr(session_module, "pick_maker", lambda: maker)
    before = segments()

    async def collect(feed):
        return [(utt, index, frame.copy()) async for utt, index, frame in feed]

    with small(path) as feed:
        for _epoch in range(2):
            got = asyncio.run(collect(feed)) if loop == "asyncio" else [(u, i, f.copy()) for u, i, f in feed]
            assert len(got) == NUM * LENGTH
            assert all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in got)
        kept = next(iter(feed))
        assert segments() == before

    assert np.array_equal(kept[2], corpus[kept[0]][kept[1]])


@pytest.mark.parametrize("maker", MAKERS)
def test_a_new_segment_is_writable_zero_and_has_the_size_that_was_asked_for(maker):
    made = MAKERS[maker](3 * PARTITION)

    array = np.frombuffer(made, np.uint8)
    assert array.size == 3 * PARTITION
    assert not array.any()
    array[:] = 7


def test_where_memfd_is_forbidden_or_missing_others_stand_in(monkeypatch, tmp_path):
    def forbidden(*args: object) -> int:
        raise OSError(errno.EPERM, "not in this sandbox")

    assert pick_maker() == "memfd"
    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert pick_maker() == "named"
    monkeypatch.delattr(os, "memfd_create")
    assert pick_maker() == "named"
    monkeypatch.setattr(segment, "NAMED_MOUNT", str(tmp_path / "nowhere"))
    assert pick_maker() == "anonymous"


# -- the pool alone ----------------------------------------------------------------------------------------------------


def never() -> bool:
    return False


def always() -> bool:
    return True


def pool_of(size: int, may_use: int = 0) -> SegmentPool:
    return SegmentPool(size, PARTITION, make_anonymous, lambda: may_use)


def test_a_segment_comes_back_only_when_the_last_view_is_gone():
    pool = pool_of(1)
    anchor = pool.take(never, never)
    address = anchor.ctypes.data
    view = anchor[10:20].reshape(2, 5)
    del anchor

    with pytest.raises(asyncfeed.BudgetError, match=r"1 segments .* are held"):
        pool.take(never, always)
    del view
    again = pool.take(never, always)

    assert again.ctypes.data == address
    assert pool.num_made == 1


def test_a_reader_waits_for_a_segment_until_another_thread_drops_the_last_view():
    pool, taken = pool_of(1), []
    views = [pool.take(never, never)[5:]]
    looked = threading.Event()

    def stopped():
        looked.set()
        return False

    reader = threading.Thread(target=lambda: taken.append(pool.take(stopped, never)))
    reader.start()
    assert looked.wait(PATIENT)
    assert not taken
    views.clear()
    reader.join(PATIENT)

    assert taken[0].size == PARTITION
    assert pool.num_made == 1


def test_a_reader_that_waits_for_a_segment_can_be_told_to_stop():
    pool, stop, outcome = pool_of(1), threading.Event(), []
    kept = pool.take(never, never)
    reader = threading.Thread(target=lambda: outcome.append(pool.take(stop.is_set, never)))
    reader.start()

    stop.set()
    pool.inbox.nudge()

    reader.join(PATIENT)
    assert outcome == [None]
    assert kept.size == PARTITION


def test_one_more_segment_is_made_for_a_starving_consumer_and_the_warning_comes_once():
    pool = pool_of(1, may_use=10 * PARTITION)
    kept = [pool.take(never, always) for _ in range(4)]

    assert len({anchor.ctypes.data for anchor in kept}) == 4
    assert "1 segments of 4 KiB are held" in pool.take_warning()
    assert pool.take_warning() is None
    assert pool.num_held == 4
    assert pool.peak_nbytes == 4 * PARTITION


def test_of_the_segments_beyond_its_size_a_pool_lets_go():
    pool = pool_of(2, may_use=10 * PARTITION)
    kept = [pool.take(never, always) for _ in range(6)]
    del kept
    again = [pool.take(never, never) for _ in range(2)]

    assert pool.num_made == 6
    assert pool.num_held == len(again)
    assert not pool._free


def test_what_finalizers_call_runs_no_python_code_in_which_ctrl_c_could_be_lost():
    assert type(pool_of(1).inbox.returned) is type(len)


def test_views_dropped_within_the_garbage_collector_come_back_too():
    pool = pool_of(1)
    cycle: list[Any] = [pool.take(never, never)]
    cycle.append(cycle)
    del cycle
    gc.collect()

    assert pool.take(never, always).size == PARTITION
    assert pool.num_made == 1
