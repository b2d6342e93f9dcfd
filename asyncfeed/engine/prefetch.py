"""Read the partitions of a plan ahead of their consumer, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import anyio

from asyncfeed.engine.loaded import LoadedPartition
from asyncfeed.engine.loader import Loader
from asyncfeed.engine.signal import Signal
from asyncfeed.engine.statistics import Statistics
from asyncfeed.errors import AsyncFeedError, ClosedError, ReadError
from asyncfeed.memory.pool import SegmentPool
from asyncfeed.planning.passage import Passage
from asyncfeed.process import refuse_fork
from asyncfeed.storage.library import Library

__all__ = ["Prefetch"]

PATIENCE = 1.0
"""Seconds that closing waits for a read in progress. A reader stuck in the file system ends by itself, later."""

PATIENCE_AT_EXIT = 1.5
"""Seconds that the exit of the interpreter waits for one."""

PATIENCE_WITH_HDF5 = 30.0
"""The same for a reader inside HDF5, where going on would crash the process."""

Item = LoadedPartition | AsyncFeedError | Literal["end"]


@dataclass(slots=True)
class _Exchange:
    """What the two halves of a pass share. Each step on it is atomic: there is no lock that one could die with."""

    pool: SegmentPool
    loader: Loader | None = None
    ready: deque[Item] = field(default_factory=deque)
    hungry: Signal | None = None
    """Left by a consumer before it waits; raised by whoever adds to ``ready``."""
    ended: Signal = field(default_factory=Signal)
    stop: bool = False

    def stopped(self) -> bool:
        return self.stop

    def starving(self) -> bool:
        """Whether the consumer waits for the reader, and not the other way round."""
        return self.hungry is not None and not self.ready

    def publish(self, item: Item) -> None:
        self.ready.append(item)
        hungry, self.hungry = self.hungry, None
        if hungry is not None:
            hungry.set()

    def end(self, reason: AsyncFeedError) -> None:
        """Make the reader stop and a waiting consumer fail. Any thread, any number of times, also from finalizers."""
        self.stop = True
        self.ready.clear()
        self.pool.inbox.nudge()
        self.publish(reason)


def _read_ahead(
    exchange: _Exchange, library: Library, plan_passage: Callable[[], Passage], statistics: Statistics, leave: _Leave
) -> None:
    """The reader thread: walks the plan by itself and tells the consumer once per partition."""
    try:
        with contextlib.closing(Loader(library, exchange.stopped)) as exchange.loader:
            _read_partitions(exchange, exchange.loader, plan_passage(), statistics)
    except AsyncFeedError as error:
        exchange.publish(_without_views(error))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it
        unforeseen = ReadError(f"the reader thread failed: {type(error).__name__}: {error}")
        unforeseen.__cause__ = error
        exchange.publish(_without_views(unforeseen))
    finally:
        leave.at_exit.detach()
        exchange.loader = None  # it refers to the exchange, and so to the pool
        exchange.ended.set()


def _without_views(error: AsyncFeedError) -> AsyncFeedError:
    """Clear what the tracebacks of an error refer to: who keeps it would keep a segment as well."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return error


def _read_partitions(exchange: _Exchange, loader: Loader, passage: Passage, statistics: Statistics) -> None:
    pool = exchange.pool
    for plan, partition in passage:
        anchor = pool.take(exchange.stopped, exchange.starving)
        if anchor is None:
            return
        calls, started = loader.direct.num_calls, time.perf_counter()
        loaded = loader.load(plan, partition, anchor)
        del anchor  # a segment comes back when nothing refers to it: not even this thread
        if exchange.stop:
            return
        statistics.read_seconds += time.perf_counter() - started
        statistics.calls += loader.direct.num_calls - calls
        statistics.nbytes += loaded.nbytes
        statistics.partitions += 1
        statistics.segments, statistics.peak_shared_nbytes = pool.num_made, pool.peak_nbytes
        exchange.publish(loaded)
        if exchange.stop:  # after the check above, perhaps: nobody may be left holding the segment
            with contextlib.suppress(ValueError):
                exchange.ready.remove(loaded)
        del loaded
    exchange.publish("end")


class _Leave:
    """Ends a pass from outside of it: when it is collected, and when the interpreter exits."""

    def __init__(self, exchange: _Exchange, thread: threading.Thread) -> None:
        self.exchange, self.pid = exchange, os.getpid()
        self.thread = thread
        self.at_exit = weakref.finalize(thread, self)

    def tell(self) -> None:
        """Make the reader stop, without waiting for it."""
        if os.getpid() == self.pid:  # a forked child has no reader
            self.exchange.end(ClosedError("the iterator is gone"))

    def __call__(self) -> None:
        """At exit: a thread inside h5py while Python goes away hangs or crashes the process, so wait for it."""
        self.tell()
        if os.getpid() == self.pid and self.thread.ident is not None:  # started; if not, it finds that it is to stop
            self.thread.join(PATIENCE_AT_EXIT)
            loader = self.exchange.loader
            if loader is not None and loader.in_hdf5:
                self.thread.join(PATIENCE_WITH_HDF5)


# Registers weakref's exit hook now, before the program registers its own, which may still iterate and run first then.
weakref.finalize(_Leave, int)


def _refuse_exit() -> None:
    """Raise `ClosedError` once the interpreter is going away: no thread but this one runs then, so it would wait forever."""
    if sys.is_finalizing():
        raise ClosedError("there is no reader thread any longer: the interpreter is going away")


class Prefetch:
    """One pass over a plan, which the reader thread makes: the consumer's half.

    The reader thread has no reference to it, so that a pass that nobody wants any longer is collected, which stops the
    thread. Not for several consumers at a time.

    Raises:
        ClosedError: the interpreter is shutting down and starts no threads.
    """

    def __init__(
        self, library: Library, plan_passage: Callable[[], Passage], pool: SegmentPool, statistics: Statistics
    ) -> None:
        self.statistics = statistics
        self._exchange = exchange = _Exchange(pool)
        self._pid = os.getpid()
        self._over = False
        self._handed_over = time.perf_counter()
        thread = threading.Thread(
            target=lambda: _read_ahead(exchange, library, plan_passage, statistics, leave),
            name="asyncfeed-reader",
            daemon=True,  # the interpreter waits for other threads before it calls its exit hooks
        )
        _refuse_exit()
        leave = _Leave(exchange, thread)
        weakref.finalize(self, leave.tell).atexit = False
        try:
            thread.start()
        except RuntimeError as error:
            leave.at_exit.detach()
            exchange.ended.set()
            raise ClosedError(f"no reader thread can be started: {error}") from error

    @property
    def over(self) -> bool:
        """Whether there is nothing more to come."""
        return self._over or self._exchange.stop

    def next(self) -> LoadedPartition | None:
        """Wait for the next partition; None after the last. The caller must have let go of the one before.

        Raises:
            AsyncFeedError: what the reader met, after all partitions before it; the pass is over then.
        """
        asked = self._ask()
        while (item := self._take()) is None:
            hungry = self._hunger()
            if hungry is not None:
                hungry.wait()
        return self._deliver(item, asked)

    async def next_async(self) -> LoadedPartition | None:
        """Like `next`, for asyncio and trio. Returns at once, without a checkpoint, if the partition is there."""
        asked = self._ask()
        while (item := self._take()) is None:
            hungry = self._hunger()
            if hungry is not None:
                await hungry.wait_async()
        return self._deliver(item, asked)

    def end(self, reason: AsyncFeedError) -> None:
        """Stop the reader without waiting for it; a consumer that comes, or waits, gets ``reason``. Idempotent."""
        if not self.over and os.getpid() == self._pid:
            self._exchange.end(reason)

    def close(self) -> bool:
        """Stop the reader and wait for it, at most `PATIENCE` seconds; whether it has ended."""
        self.end(ClosedError("the iteration was closed"))
        return os.getpid() != self._pid or self._exchange.ended.wait(PATIENCE)

    async def aclose(self) -> bool:
        """Like `close`, for asyncio and trio; completes also when the task is being cancelled."""
        self.end(ClosedError("the iteration was closed"))
        if os.getpid() != self._pid:
            return True
        with anyio.move_on_after(PATIENCE, shield=True):
            await self._exchange.ended.wait_async()
        return self._exchange.ended.is_set()

    def _ask(self) -> float:
        refuse_fork(self._pid, "iterator")
        now = time.perf_counter()
        self.statistics.loop_seconds += now - self._handed_over
        return now

    def _take(self) -> Item | None:
        if self._over:
            return "end"
        try:
            return self._exchange.ready.popleft()
        except IndexError:
            return None

    def _hunger(self) -> Signal | None:
        """Leave a signal to wait for; None if something has come in the meantime."""
        _refuse_exit()
        signal = self._exchange.hungry = Signal()
        if self._exchange.ready:
            self._exchange.hungry = None
            return None
        self._exchange.pool.inbox.nudge()  # views may hold every segment: the reader has to know that we wait
        return signal

    def _deliver(self, item: Item, asked: float) -> LoadedPartition | None:
        self._handed_over = time.perf_counter()
        self.statistics.wait_seconds += self._handed_over - asked
        warning = self._exchange.pool.take_warning()
        if warning is not None:
            warnings.warn(warning, ResourceWarning, stacklevel=4)
        if isinstance(item, LoadedPartition):
            return item
        self._over = True
        if isinstance(item, AsyncFeedError):
            raise item
        return None
