"""Segments come back when the last view dies, wherever that happens, and not before."""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import weakref

import numpy as np
import pytest

from asyncfeed.errors import BudgetError
from asyncfeed.memory.pool import SegmentPool
from asyncfeed.memory.segment import MAKERS, make_anonymous, pick_maker

NBYTES = 1 << 16


def never() -> bool:
    return False


def always() -> bool:
    return True


def pool_of(size: int = 2, *, make=make_anonymous, available: int = 1 << 30) -> SegmentPool:
    return SegmentPool(size, NBYTES, make, lambda: available)


def take_nowait(pool: SegmentPool) -> np.ndarray | None:
    """Take a segment if one is free or may be made."""
    waits = threading.Event()

    def starving() -> bool:
        """Asked last, right before waiting."""
        waits.set()
        pool.inbox.nudge()
        return False

    return pool.take(waits.is_set, starving)


def take(pool: SegmentPool) -> np.ndarray:
    anchor = take_nowait(pool)
    assert anchor is not None
    return anchor


def hungry(pool: SegmentPool) -> np.ndarray:
    anchor = pool.take(never, always)
    assert anchor is not None
    return anchor


def in_thread(work) -> None:
    """Run something in another thread and wait for its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


class Taker:
    """A thread that waits for a segment."""

    def __init__(self, pool: SegmentPool, starving=never) -> None:
        self.stopped = threading.Event()
        self.waiting = threading.Event()
        self.found: queue.SimpleQueue = queue.SimpleQueue()
        self.pool = pool
        self.starving = starving
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        def starving() -> bool:
            self.waiting.set()  # asked last, right before waiting
            return self.starving()

        try:
            self.found.put(self.pool.take(self.stopped.is_set, starving))
        except BudgetError as error:
            self.found.put(error)

    def result(self):
        found = self.found.get(timeout=20)
        self.thread.join(20)
        return found


# -- coming back -------------------------------------------------------------------------------------------------


def test_a_segment_that_comes_back_just_before_the_consumer_waits_is_used_again():
    pool = pool_of(size=1)
    kept = [take(pool)]

    def starving() -> bool:
        """The consumer lets go of the last frame, and then waits: after the reader looked for what has come back."""
        kept.clear()
        return True

    assert pool.take(never, starving) is not None
    assert (pool.num_made, pool.take_warning()) == (1, None)


def test_a_segment_is_reclaimed_only_after_the_last_view():
    pool = pool_of(size=1)
    anchor = take(pool)
    views = [anchor[100:200], anchor.view("f4").reshape(-1, 8)[3:], memoryview(anchor)[5:]]
    del anchor

    while views:
        views.pop()
        gc.collect()
        left = take_nowait(pool)
        assert (left is None) == bool(views)

    assert pool.num_made == 1


def test_a_view_of_a_view_refers_to_the_anchor_alone():
    anchor = take(pool_of())

    view = anchor.view("f4").reshape(-1, 4)[2:9][::-1].T[1]

    assert view.base is anchor


def test_what_somebody_keeps_is_never_overwritten():
    pool = pool_of(size=2)
    kept = take(pool)[:10]
    kept[:] = 7

    for _ in range(5):
        take(pool)[:] = 0

    assert kept.tolist() == [7] * 10
    assert pool.num_made == 2


def test_a_segment_is_used_again_and_not_made_anew():
    pool = pool_of()

    for _ in range(20):
        take(pool)

    assert pool.num_made == 1
    assert pool.peak_nbytes == NBYTES


def test_a_segment_comes_back_from_whatever_thread_drops_the_last_view():
    pool = pool_of(size=1)
    handed_over = [take(pool)[5:10]]
    taker = Taker(pool)
    assert taker.waiting.wait(20)

    in_thread(handed_over.clear)

    assert taker.result() is not None
    assert pool.num_made == 1


def test_views_that_die_in_many_threads_at_once_all_come_back():
    pool = pool_of(size=8)
    start = threading.Barrier(8)
    views = [[take(pool)[i:]] for i in range(8)]

    def drop(own: list) -> None:
        start.wait(20)
        own.clear()

    threads = [threading.Thread(target=drop, args=(own,)) for own in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    anchors = [take(pool) for _ in range(8)]
    assert pool.num_made == 8
    assert len({a.ctypes.data for a in anchors}) == 8


def test_a_view_in_a_cycle_comes_back_with_the_garbage():
    pool = pool_of(size=1)

    class Node:
        pass

    node = Node()
    node.itself, node.frame = node, take(pool)[1:]
    del node

    assert take_nowait(pool) is None
    gc.collect()
    assert take(pool) is not None


def test_garbage_that_is_collected_while_the_inbox_is_in_use_comes_back_too():
    pool = pool_of(size=4)
    threshold = gc.get_threshold()

    class Node:
        def __init__(self, frame: np.ndarray) -> None:
            self.itself, self.frame = self, frame

    gc.set_threshold(1)  # now every allocation collects: also those inside the pool and its queue
    try:
        for _ in range(300):
            anchor = take_nowait(pool)
            if anchor is not None:
                Node(anchor)
            del anchor
    finally:
        gc.set_threshold(*threshold)
    gc.collect()

    anchors = [take(pool) for _ in range(4)]
    assert len(anchors) == pool.num_made == 4


def test_frames_outlive_their_pool():
    pool = pool_of()
    frame = take(pool)[:4]
    frame[:] = 9

    del pool
    gc.collect()

    assert frame.tolist() == [9] * 4


def test_frames_may_be_written_to():
    assert take(pool_of()).flags.writeable


# -- hunger ------------------------------------------------------------------------------------------------------


def test_a_hungry_consumer_that_holds_everything_gets_one_more_and_a_warning():
    pool = pool_of(size=2)
    kept = [take(pool), take(pool)]

    kept.append(hungry(pool))

    assert pool.num_made == 3
    assert pool.peak_nbytes == 3 * NBYTES
    assert "2 segments of 64 KiB are held by frames that are kept" in pool.take_warning()


def test_the_warning_comes_once():
    pool = pool_of(size=1)
    kept = [take(pool), hungry(pool)]
    first = pool.take_warning()

    kept.append(hungry(pool))

    assert first is not None
    assert pool.take_warning() is None


def test_a_consumer_that_is_not_hungry_lets_the_pool_wait():
    pool = pool_of(size=1)
    kept = [take(pool)]
    taker = Taker(pool)
    assert taker.waiting.wait(20)

    assert pool.num_made == 1
    kept.clear()
    assert taker.result() is not None
    assert pool.num_made == 1


def test_hunger_that_begins_while_the_pool_waits_is_heard():
    pool = pool_of(size=1)
    kept = [take(pool)]
    hunger = threading.Event()
    taker = Taker(pool, starving=hunger.is_set)
    assert taker.waiting.wait(20)

    hunger.set()
    pool.inbox.nudge()

    kept.append(taker.result())
    assert pool.num_made == 2


def test_the_pool_shrinks_again_when_everything_comes_back():
    pool = pool_of(size=2)
    kept = [take(pool), take(pool), hungry(pool), hungry(pool)]
    segments = [weakref.ref(segment) for _, segment, *_ in pool._lent.values()]

    kept.clear()
    both = [take(pool), take(pool)]

    assert len(both) == 2
    assert pool.num_made == 4
    assert sum(segment() is not None for segment in segments) == 2


def test_a_loop_that_goes_on_keeping_does_not_make_a_segment_for_every_step():
    pool = pool_of(size=2)
    kept = [take(pool), take(pool), hungry(pool)]

    for _ in range(20):
        kept.pop(0)
        kept.append(hungry(pool))

    assert pool.num_made == 3


def test_without_memory_for_one_more_hunger_is_an_error_that_says_what_to_do():
    pool = pool_of(size=1, available=NBYTES - 1)
    kept = take(pool)

    with pytest.raises(BudgetError, match=r"held by frames that are kept, and only .* more may be used; copy"):
        pool.take(never, always)

    del kept
    assert take(pool) is not None


# -- stopping ----------------------------------------------------------------------------------------------------


def test_stop_wakes_a_waiter():
    pool = pool_of(size=1)
    kept = take(pool)
    taker = Taker(pool)
    assert taker.waiting.wait(20)

    taker.stopped.set()
    pool.inbox.nudge()

    assert taker.result() is None
    assert kept is not None


def test_a_pool_that_is_stopped_makes_nothing():
    pool = pool_of()

    assert pool.take(always, always) is None
    assert pool.num_made == 0


def test_a_maker_that_fails_leaves_the_pool_usable():
    failures = [BudgetError("no space")]

    def make(nbytes: int):
        if failures:
            raise failures.pop()
        return make_anonymous(nbytes)

    pool = pool_of(make=make)

    with pytest.raises(BudgetError, match="no space"):
        pool.take(never, never)
    assert take(pool) is not None
    assert pool.num_made == 1


# -- segments ----------------------------------------------------------------------------------------------------

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /dev/shm are of Linux")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "anonymous" else needs_linux) for n in MAKERS])
def test_every_maker_gives_zeros_that_can_be_written(name):
    pool = pool_of(make=MAKERS[name])

    anchor = take(pool)

    assert anchor.size == NBYTES
    assert not anchor.any()
    anchor[:] = 1
    assert anchor.all()


def test_the_best_maker_here_works():
    anchor = take(pool_of(make=MAKERS[pick_maker()]))

    anchor[-1] = 3

    assert anchor[-1] == 3


def fork_and_wait():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def test_a_segment_that_came_back_before_a_fork_is_used_again_after_it():
    pool = SegmentPool(1, 4096, make_anonymous, lambda: 0)
    anchor = pool.take(lambda: False, lambda: False)
    del anchor

    fork_and_wait()

    assert pool.take(lambda: False, lambda: False) is not None
    assert pool.num_made == 1


def test_a_segment_that_was_lent_out_during_a_fork_is_not_used_again():
    pool = SegmentPool(1, 4096, make_anonymous, lambda: 0)
    anchor = pool.take(lambda: False, lambda: False)

    fork_and_wait()
    del anchor

    assert pool.take(lambda: False, lambda: False) is not None
    assert pool.num_made == 2
