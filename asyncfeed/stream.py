"""Iterate over a feed: with ``for`` or with ``async for``, on asyncio or trio."""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from anyio.lowlevel import checkpoint

from asyncfeed.engine.forms import Form, Pace
from asyncfeed.engine.prefetch import Prefetch
from asyncfeed.errors import ConsumerError

__all__ = ["AsyncItems", "Host", "Items", "Stream"]

Item = TypeVar("Item")

LONGEST_TURN = 0.010
"""Seconds after which an ``async for`` lets other tasks run, even if frames are there all the time."""


class Host(Protocol):
    """What a stream wants of its feed."""

    def start(self, form: Form[Any]) -> Prefetch:
        """Start the next epoch; an iteration that is under way ends."""

    async def start_async(self, form: Form[Any]) -> Prefetch:
        """Like `start`, without blocking the event loop while the feed opens."""

    def count(self, form: Form[Any]) -> int:
        """Items of the coming epoch."""


class Stream(Generic[Item]):
    """One way to iterate over a feed, as often as you like: every iteration is one epoch, each time the next.

    ``len`` is the number of items of the coming epoch, so that ``tqdm(stream)`` works.
    """

    def __init__(self, host: Host, form: Callable[[], Form[Item]]) -> None:
        self._host, self._form = host, form

    def __iter__(self) -> Items[Item]:
        return Items(self._host.start, self._form())

    def __aiter__(self) -> AsyncItems[Item]:
        return AsyncItems(self._host.start_async, self._form())

    def __len__(self) -> int:
        return self._host.count(self._form())


class Items(Iterator[Item]):
    """An iterator over one epoch.

    ``__next__`` is a slot that holds the step of a C iterator: between two frames no Python code runs but the
    consumer's. While that waits for a partition, the slot holds something that refuses a second consumer.
    """

    __slots__ = ("__next__", "__weakref__", "_blocks")

    if TYPE_CHECKING:

        def __next__(self) -> Item: ...

    def __init__(self, start: Callable[[Form[Item]], Prefetch], form: Form[Item]) -> None:
        gate = _Gate(self, "__next__")
        self._blocks = _blocks(start, form, gate)
        gate.open(chain.from_iterable(self._blocks).__next__)

    def close(self) -> None:
        """End the iteration and its reader thread. Idempotent."""
        self._blocks.close()


class AsyncItems(AsyncIterator[Item]):
    """An asynchronous iterator over one epoch. ``__anext__`` is a slot that holds that of an async generator.

    To end an epoch early, ``async with aclosing(aiter(feed)) as frames`` ends the reader thread at once; a mere
    ``break`` leaves that to the event loop, which does it a moment later.
    """

    __slots__ = ("__anext__", "__weakref__", "_generator", "_prefetch")

    if TYPE_CHECKING:

        def __anext__(self) -> Awaitable[Item]: ...

    def __init__(self, start: Callable[[Form[Item]], Awaitable[Prefetch]], form: Form[Item]) -> None:
        gate = _Gate(self, "__anext__")
        self._prefetch: list[Prefetch] = []
        self._generator = _items(start, form, gate, self._prefetch)
        gate.open(self._generator.__anext__)

    async def aclose(self) -> None:
        """End the iteration and its reader thread; a task that waits in this iterator fails. Idempotent."""
        for prefetch in self._prefetch:
            await prefetch.aclose()
        if not self._generator.ag_running:  # type: ignore[attr-defined]
            await self._generator.aclose()


class _Gate:
    """Lets one consumer at a time into an iterator, at no cost between partitions.

    Refers to the iterator weakly: the generator inside it must not keep it alive.
    """

    __slots__ = ("_iterator", "_slot", "_step")

    def __init__(self, iterator: object, slot: str) -> None:
        self._iterator, self._slot = weakref.ref(iterator), slot
        self._step: Callable[[], object] | None = None

    def open(self, step: Callable[[], object] | None = None) -> None:
        """Let consumers step on; ``step`` is remembered weakly enough: it is in the slot whenever the gate is open."""
        iterator = self._iterator()
        if iterator is not None:
            setattr(iterator, self._slot, step or self._step)
            self._step = None

    def shut(self) -> None:
        """Refuse consumers; one is inside already."""
        iterator = self._iterator()
        if iterator is not None:
            self._step = getattr(iterator, self._slot)
            setattr(iterator, self._slot, _refuse)


def _refuse() -> NoReturn:
    raise ConsumerError(
        "another consumer is waiting in this iterator; give each a feed of its own, or let one iterate and hand out what "
        "it gets through a queue"
    )


def _blocks(
    start: Callable[[Form[Item]], Prefetch], form: Form[Item], gate: _Gate
) -> Generator[Iterable[Item], None, None]:
    gate.shut()
    prefetch, pace = start(form), Pace(Pace.LARGEST)
    try:
        while (partition := prefetch.next()) is not None:
            gate.open()
            yield from form.blocks(partition, pace)
            del partition  # what is referred to does not come back, and we are about to wait for the next
            gate.shut()
        gate.open()
        yield from form.rest()
    finally:
        gate.open()
        prefetch.close()


async def _items(
    start: Callable[[Form[Item]], Awaitable[Prefetch]], form: Form[Item], gate: _Gate, share: list[Prefetch]
) -> AsyncGenerator[Item, None]:
    gate.shut()
    try:
        prefetch, pace = await start(form), Pace()
        share.append(prefetch)
        try:
            turn = time.perf_counter()
            while (partition := await prefetch.next_async()) is not None:
                gate.open()
                for block in form.blocks(partition, pace):
                    started = time.perf_counter()
                    for item in block:
                        yield item
                    now = time.perf_counter()
                    pace.lasted(now - started)
                    if now - turn > LONGEST_TURN:
                        gate.shut()
                        await checkpoint()
                        gate.open()
                        turn = time.perf_counter()
                partition = block = item = None  # type: ignore[assignment]  # as in _blocks
                gate.shut()
            gate.open()
            for block in form.rest():
                for item in block:
                    yield item
        finally:
            await prefetch.aclose()
    finally:
        gate.open()
