"""Rows that come one after the other, work on several of them, and a report of what became of them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from tqdm import tqdm

from asyncfeed.errors import ArgumentError

__all__ = ["OnError", "Outcome", "PopulateReport", "ProgressBar", "Rows", "populate"]

OnError = Literal["raise", "skip"]
Row: TypeAlias = "Sequence[Any]"
Rows: TypeAlias = "Iterable[Row] | AsyncIterable[Row]"

Outcome = Literal["computed", "skipped"]

TURN = 0.002
"""Seconds that are spent on quick rows before the event loop gets its turn."""

MAX_ROWS = 256
"""Rows taken from an iterator at a time, if they come that quickly."""


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """A bar without the thread that tqdm keeps to look after those that stand still, even if none is shown."""

    monitor_interval = 0


@dataclass(slots=True)
class PopulateReport:
    """What `CachedItem.populate` did."""

    computed: int = 0
    """Items that were computed and kept."""
    skipped: int = 0
    """Items that were there already."""
    failed: dict[str, Exception] = field(default_factory=dict)
    """The error of every item that could not be computed or kept, with ``on_error="skip"``."""
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.computed / self.seconds if self.seconds else 0.0
        failures = "".join(f"\n  {uid!r}: {type(e).__name__}: {e}" for uid, e in list(self.failed.items())[:5])
        more = f"\n  ... and {len(self.failed) - 5} more" if len(self.failed) > 5 else ""
        return (
            f"{self.computed} computed, {self.skipped} there already, {len(self.failed)} failed in {self.seconds:.1f} s "
            f"({rate:.1f} items/s){failures}{more}"
        )


async def populate(
    rows: Rows,
    is_there: Callable[[str], bool],
    work: Callable[[str, tuple[Any, ...]], Awaitable[Outcome]],
    *,
    concurrency: int,
    on_error: OnError,
    landed: Callable[[], object],
) -> PopulateReport:
    """Carry out ``work(uid, args)`` for all rows, ``concurrency`` of them at a time; the next rows come meanwhile.

    Args:
        rows: ``(uid, *args)``, from something iterable or asynchronously iterable. What is not a list or a tuple is
            iterated over in a thread, so that reading audio there does not hold up the event loop.
        is_there: whether nothing is to be done for an id, quickly.
        landed: called after every row.

    Raises:
        ArgumentError: a row is none.
        Exception: with ``on_error="raise"`` that of the first item that failed; whatever the rows raise.
    """
    began = time.perf_counter()
    populating = _Populating(work, on_error, landed)
    send, receive = anyio.create_memory_object_stream[_Task](concurrency)
    with send, receive:
        async with anyio.create_task_group() as group:
            populating.cancel = group.cancel_scope.cancel
            for _ in range(concurrency):
                group.start_soon(populating.work_off, receive)
            await populating.hand_out(rows, is_there, send)
    if populating.failure is not None:
        raise populating.failure
    populating.report.seconds = time.perf_counter() - began
    return populating.report


_Task: TypeAlias = "tuple[str, tuple[Any, ...]]"


class _Populating:
    """What those who hand out work and those who do it know together."""

    def __init__(
        self,
        work: Callable[[str, tuple[Any, ...]], Awaitable[Outcome]],
        on_error: OnError,
        landed: Callable[[], object],
    ) -> None:
        self.report = PopulateReport()
        self.failure: BaseException | None = None
        self.cancel: Callable[[], object] = lambda: None
        self._work, self._on_error, self._landed = work, on_error, landed

    async def hand_out(self, rows: Rows, is_there: Callable[[str], bool], send: MemoryObjectSendStream[_Task]) -> None:
        """Go through the rows and pass on those that something is to be done for, then close the stream."""
        turn = time.perf_counter() + TURN
        with send:
            try:
                async with aclosing(_rows_of(rows)) as found:
                    async for row in found:
                        uid, args = _parts_of(row)
                        if is_there(uid):
                            self._note("skipped")
                        else:
                            await send.send((uid, args))
                        if time.perf_counter() > turn:
                            await checkpoint()
                            turn = time.perf_counter() + TURN
            except Exception as error:  # noqa: BLE001 - raised by populate, and not in a group of one
                self._fail(error)

    async def work_off(self, receive: MemoryObjectReceiveStream[_Task]) -> None:
        """Do what is handed out until there is no more."""
        async for uid, args in receive:
            try:
                outcome = await self._work(uid, args)
            except Exception as error:  # noqa: BLE001 - of whatever kind, it is in the report or raised
                if self._on_error == "raise":
                    self._fail(error)
                    return
                self.report.failed[uid] = error
                self._landed()
            except (KeyboardInterrupt, SystemExit) as error:  # not in a group, where nobody would look for it
                self._fail(error)
                return
            else:
                self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        setattr(self.report, outcome, getattr(self.report, outcome) + 1)
        self._landed()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.cancel()


def _parts_of(row: Row) -> tuple[str, tuple[Any, ...]]:
    if isinstance(row, str | bytes) or not isinstance(row, Sequence) or not row or type(row[0]).__hash__ is None:
        raise ArgumentError(f"a row must be (uid, *args), and one is {row!r}")
    return row[0], tuple(row[1:])


async def _rows_of(rows: Rows) -> AsyncGenerator[Row, None]:
    if isinstance(rows, AsyncIterable):
        iterator = aiter(rows)
        try:
            async for row in iterator:
                yield row
        finally:
            if hasattr(iterator, "aclose"):  # a generator wants to be told, not collected
                await iterator.aclose()
    elif isinstance(rows, list | tuple):
        for row in rows:
            yield row
    else:
        source = iter(rows)
        limiter = anyio.CapacityLimiter(1)  # the threads of the default one may all be busy
        while batch := await to_thread.run_sync(_next_rows, source, limiter=limiter):
            for row in batch:
                yield row


def _next_rows(iterator: Iterator[Row]) -> list[Row]:
    """Some rows, as many as come within a moment; at least one, unless there are no more."""
    batch: list[Row] = []
    deadline = time.perf_counter() + TURN
    for row in iterator:
        batch.append(row)
        if len(batch) == MAX_ROWS or time.perf_counter() > deadline:
            break
    return batch
