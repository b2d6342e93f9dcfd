"""Iterate over a feed: with ``for`` or with ``async for``, on asyncio or trio."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from anyio.lowlevel import checkpoint

from asyncfeed.engine.batches import PaddedBatch
from asyncfeed.engine.forms import Form, Pace
from asyncfeed.engine.prefetch import Prefetch
from asyncfeed.errors import ClosedError, ConsumerError
from asyncfeed.process import call_in_child, refuse_fork

__all__ = ["AsyncItems", "Host", "Items", "PaddedStream", "Stream"]

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

    def waste(self, form: Form[Any]) -> float:
        """The share of padding in the coming epoch."""


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

    @property
    def host(self) -> Host:
        """The feed that this iterates over."""
        return self._host

    def over(self, host: Host) -> Stream[Item]:
        """The same form over another feed."""
        return type(self)(host, self._form)


class PaddedStream(Stream[PaddedBatch]):
    """Iterates over padded batches, and says how much of them is padding."""

    @property
    def waste(self) -> float:
        """The share of padding in the batches of the coming epoch on this rank, from 0 to 1. Reads no data."""
        return self._host.waste(self._form())


class Items(Iterator[Item]):
    """An iterator over one epoch.

    ``__next__`` is a slot that holds the step of a C iterator: between two frames no Python code runs but the
    consumer's. While that waits for a partition, the slot holds something that refuses a second consumer.
    """

    __slots__ = ("__next__", "__weakref__", "_blocks", "_share")

    if TYPE_CHECKING:

        def __next__(self) -> Item: ...

    def __init__(self, start: Callable[[Form[Item]], Prefetch], form: Form[Item]) -> None:
        gate = _Gate(self, "__next__", _refuse)
        self._share = _Share()
        self._blocks = _blocks(start, form, gate, self._share)
        gate.open(chain.from_iterable(self._blocks).__next__)

    def close(self) -> None:
        """End the iteration and its reader thread; a thread that waits in this iterator fails. Idempotent."""
        prefetch = self._share.close()
        if prefetch is not None:
            prefetch.close()
        with contextlib.suppress(ValueError):  # a consumer is inside; the error that waits for it there leads it out
            self._blocks.close()


class AsyncItems(AsyncIterator[Item]):
    """An asynchronous iterator over one epoch. ``__anext__`` is a slot that holds that of an async generator.

    To end an epoch early, ``async with aclosing(aiter(feed)) as frames`` waits for the end of the reader thread; a mere
    ``break`` tells it to end, as soon as nothing refers to the iterator, and does not wait.
    """

    __slots__ = ("__anext__", "__weakref__", "_generator", "_share")

    if TYPE_CHECKING:

        def __anext__(self) -> Awaitable[Item]: ...

    def __init__(self, start: Callable[[Form[Item]], Awaitable[Prefetch]], form: Form[Item]) -> None:
        gate = _Gate(self, "__anext__", _refuse_async)
        self._share = _Share()
        self._generator = _items(start, form, gate, self._share)
        gate.open(partial(_first_step, self._generator, gate))

    async def aclose(self) -> None:
        """End the iteration and its reader thread; a task that waits in this iterator fails. Idempotent."""
        prefetch = self._share.close()
        if prefetch is not None:
            await prefetch.aclose()
        if not self._generator.ag_running:  # type: ignore[attr-defined]
            await self._generator.aclose()


class _Share:
    """What an iterator and the generator inside it both know: the pass, once there is one."""

    __slots__ = ("_closed", "_prefetch")

    def __init__(self) -> None:
        self._prefetch: Prefetch | None = None
        self._closed = False

    def begin(self, prefetch: Prefetch) -> Prefetch:
        """The pass has started; if the iterator was closed before that, the pass is over."""
        self._prefetch = prefetch  # before looking at the flag, as close() sets the flag before it looks here
        if self._closed:
            prefetch.end(ClosedError("the iterator was closed before its first item"))
        return prefetch

    def close(self) -> Prefetch | None:
        """The pass that is to be closed, if there is one by now."""
        self._closed = True
        return self._prefetch


class _Gate:
    """Lets one consumer at a time into an iterator, at no cost between two frames of a block.

    Refers to the iterator weakly: the generator inside it must not keep it alive. In a forked child it refuses everybody.
    """

    __slots__ = ("__weakref__", "_iterator", "_refuse", "_slot", "_step")

    def __init__(self, iterator: object, slot: str, refuse: Callable[[], object]) -> None:
        self._iterator, self._slot, self._refuse = weakref.ref(iterator), slot, refuse
        self._step: Callable[[], object] | None = None
        call_in_child(self)

    def open(self, step: Callable[[], object] | None = None) -> None:
        """Let consumers step on; ``step`` is remembered weakly enough: it is in the slot whenever the gate is open."""
        step, self._step = step or self._step, None
        iterator = self._iterator()
        if iterator is not None and step is not None:
            setattr(iterator, self._slot, step)

    def shut(self) -> None:
        """Refuse consumers; one is inside already."""
        iterator = self._iterator()
        if iterator is not None and self._step is None:
            self._step = getattr(iterator, self._slot)
            setattr(iterator, self._slot, self._refuse)

    def forked(self) -> None:
        """In a forked child: the parent goes on in this iterator, so nobody does here."""
        iterator = self._iterator()
        if iterator is not None:
            step = _refuse_child if self._refuse is _refuse else _refuse_child_async
            setattr(iterator, self._slot, partial(step, os.getppid()))


def _refuse() -> NoReturn:
    raise ConsumerError(
        "another consumer is waiting in this iterator; give each a feed of its own, or let one iterate and hand out what "
        "it gets through a queue"
    )


def _first_step(generator: AsyncGenerator[Item, None], gate: _Gate) -> Awaitable[Item]:
    """Step into the generator without showing it to the event loop.

    Loops want to see generators in order to close them in a task when they are collected, and trio warns about each.
    This one closes without waiting for anything.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        step = generator.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)
    gate.open(generator.__anext__)
    return step


async def _refuse_async() -> NoReturn:
    """Raises when awaited: CPython 3.11 crashes if the call itself fails within ``anext(iterator, default)``."""
    _refuse()


def _refuse_child(parent: int) -> None:
    refuse_fork(parent, "iterator")


async def _refuse_child_async(parent: int) -> None:
    refuse_fork(parent, "iterator")


def _blocks(
    start: Callable[[Form[Item]], Prefetch], form: Form[Item], gate: _Gate, share: _Share
) -> Generator[Iterable[Item], None, None]:
    gate.shut()
    try:
        prefetch, pace = share.begin(start(form)), Pace(Pace.LARGEST)
        try:
            while (partition := prefetch.next()) is not None:
                for block in form.blocks(partition, pace):
                    gate.open()
                    yield form.enter(block)
                    gate.shut()  # a second thread in here would end the iteration of the first
                partition = block = None  # type: ignore[assignment]  # what is referred to does not come back
            for block in form.rest():
                gate.open()
                yield form.enter(block)
                gate.shut()
            form.finished = True
        finally:
            prefetch.close()
    finally:
        gate.open()


async def _items(
    start: Callable[[Form[Item]], Awaitable[Prefetch]], form: Form[Item], gate: _Gate, share: _Share
) -> AsyncGenerator[Item, None]:
    gate.shut()
    try:
        prefetch, pace = share.begin(await start(form)), Pace()
        try:
            turn = time.perf_counter()
            while (partition := await prefetch.next_async()) is not None:
                gate.open()
                for block in form.blocks(partition, pace):
                    started = time.perf_counter()
                    for item in form.enter(block):
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
                for item in form.enter(block):
                    yield item
            form.finished = True
        except GeneratorExit:  # collected, or closed by aclose(), which waits
            prefetch.end(ClosedError("the iterator is gone"))
            raise
        except BaseException:
            await prefetch.aclose()
            raise
        await prefetch.aclose()
    finally:
        gate.open()
