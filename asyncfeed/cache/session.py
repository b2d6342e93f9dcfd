"""A cache and the event loop: modes, calls in flight, threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint, current_token
from numpy.typing import NDArray

from asyncfeed.cache.flight import Flights
from asyncfeed.cache.gate import Call, Gate
from asyncfeed.cache.modes import Mode, check_call, check_step
from asyncfeed.cache.publish import Settings
from asyncfeed.cache.store import Store
from asyncfeed.cache.threads import Threads
from asyncfeed.cache.worker import Worker
from asyncfeed.process import call_in_child

__all__ = ["Session"]

LONGEST_TURN = 0.005
"""Seconds after which calls that need not wait let other tasks run all the same."""

Result = TypeVar("Result")


class Session:
    """What a `CachedItem` is open as. For one event loop at a time.

    Args:
        settings: of the cache.
        concurrency: functions that run at the same time.
        mode: closed, or reader: then it opens when it is first used, as in a process that it came to by pickle.
    """

    def __init__(self, settings: Settings, concurrency: int, mode: Mode = Mode.CLOSED) -> None:
        self.settings, self.mode = settings, mode
        self._concurrency = concurrency
        self.store: Store | None = None
        self._ready: Store | None = None
        self._turn = 0.0
        self._begin()
        call_in_child(self)

    def _begin(self) -> None:
        self._writer, self._threads = Worker("asyncfeed-writer"), Threads()
        self._begin_in(None)

    def _begin_in(self, loop: object) -> None:
        """What belongs to an event loop is made anew in another one; what was in flight in one that has ended is gone."""
        self._loop = loop
        self._gate = Gate()
        self.flights = Flights(self._gate)
        self._functions: anyio.CapacityLimiter | None = None

    def _gate_here(self) -> Gate:
        loop = current_token().native_token
        if self._loop is not loop:
            self._begin_in(loop)
        return self._gate

    def forked(self) -> None:
        """In a forked child: whatever was in flight is the parent's."""
        self._begin()
        self._ready = self.store

    # -- modes ---------------------------------------------------------------------------------------------------

    async def enter(self, mode: Mode) -> None:
        """Open it."""
        opened = False
        if self.mode is Mode.READER and self.store is None:  # it has come by pickle, and not been used yet
            mode, self.mode = Mode.READER, Mode.CLOSED

        def open_store() -> None:
            nonlocal opened
            self.store = self._open(mode)
            opened = True

        try:
            await self._switch(mode, open_store, opening=True)
        except BaseException:
            if opened:  # and cancelled: nobody will close it
                with anyio.CancelScope(shield=True):
                    await self.leave()
            self._end_threads()
            raise

    async def leave(self) -> None:
        """Wait for what is in flight, then close. What was written and not sealed stays in the journal. Idempotent."""

        def close_store() -> None:
            store, self.store = self.store, None
            if store is not None:
                store.close()

        if self.mode is not Mode.CLOSED:
            try:
                await self._switch(Mode.CLOSED, close_store)
            finally:  # a task that was cancelled meanwhile has closed it all the same, or has not begun
                self._end_threads()

    def _end_threads(self) -> None:
        """If it is closed."""
        if self.mode is Mode.CLOSED:
            self._threads.shut_down()
            writer, self._writer = self._writer, Worker("asyncfeed-writer")
            writer.close()

    async def to_reader(self) -> None:
        """Wait for what is in flight, then seal."""

        def seal() -> None:
            self.opened_store.seal()

        await self._switch(Mode.READER, seal)

    async def to_writer(self) -> None:
        """Wait for what is in flight, then open a journal; the reader stays open until that has succeeded."""

        def open_writer() -> None:
            reader, self.store = self.store, self._open(Mode.WRITER)
            if reader is not None:
                reader.close()

        await self._switch(Mode.WRITER, open_writer)

    def _open(self, mode: Mode) -> Store:
        return Store(self.settings, writing=mode is Mode.WRITER)

    async def _switch(self, wanted: Mode, step: Callable[[], object], *, opening: bool = False) -> None:
        """Go to another mode if ``step()``, called in a thread, ends well; stay in this one if not.

        A task that is cancelled meanwhile leaves behind one or the other, and nothing between.
        """

        def take_step() -> None:
            step()
            self.mode = wanted

        check_step(self.mode, wanted, opening=opening)
        async with self._gate_here().switch():
            if self.mode is wanted is Mode.CLOSED:
                return  # two have closed it at the same time
            check_step(self.mode, wanted, opening=opening)  # another switch may have come first
            self._ready = None
            try:
                await self._writer.settle()  # what cancelled tasks have left to be written
                await self.run(take_step)
            finally:
                self._ready = self.store

    # -- calls ---------------------------------------------------------------------------------------------------

    def calling(self, call: str) -> _Calling:
        """An asynchronous context: be in flight, with the store; waits while the mode is being switched.

        Raises:
            ModeError: the mode does not allow this call.
        """
        return _Calling(self, self._gate_here(), call)

    async def call(self, call: str, function: Callable[..., Result], *args: Any) -> Result:
        """Call ``function(store, *args)`` in a thread."""
        async with self.calling(call) as store:
            return await self.run(functools.partial(function, store, *args))

    def opened(self, call: str) -> Store:
        """The store, for a call that does not wait."""
        check_call(call, self.mode)
        if self.store is None:
            self.store = self._ready = self._open(self.mode)
        return self.store

    @property
    def opened_store(self) -> Store:
        """The store, within a call."""
        assert self.store is not None, "it is open within a call, and before a step from an open mode"
        return self.store

    def cached(self, uid: str) -> NDArray[Any] | None:
        """An item that need not be waited for; None if it must, or is not there."""
        return None if self._ready is None else self._ready.read_cached(uid)

    # -- threads -------------------------------------------------------------------------------------------------

    @property
    def functions(self) -> anyio.CapacityLimiter:
        """Limits how many functions run at the same time."""
        if self._functions is None:
            self._functions = anyio.CapacityLimiter(self._concurrency)
        return self._functions

    async def run(self, function: Callable[[], Result], cancel: Callable[[], object] | None = None) -> Result:
        """Call a function in a thread; see `Threads.run`."""
        return await self._threads.run(function, cancel)

    async def write(self, function: Callable[[], Result]) -> Result:
        """Call a function in the thread that writes.

        With ``durability="fsync"`` in one of several, which wait for the disk together.
        """
        if self.settings.durability == "fsync":
            return await self.run(function)
        result = await self._writer.do(function)
        await self.breathe()
        return result

    async def breathe(self) -> None:
        """Let other tasks run, if this one has for a while."""
        if time.perf_counter() > self._turn:
            await checkpoint()
            self._turn = time.perf_counter() + LONGEST_TURN


class _Calling(Call):
    """A call that is in flight, with the store that it wants."""

    __slots__ = ("_call", "_session")

    def __init__(self, session: Session, gate: Gate, call: str) -> None:
        super().__init__(gate)
        self._session, self._call = session, call

    async def __aenter__(self) -> Store:  # type: ignore[override]
        await super().__aenter__()
        try:
            if self._session.store is None and self._session.mode is Mode.READER:
                await self._session.run(lambda: self._session.opened(self._call))
            return self._session.opened(self._call)
        except BaseException:
            await super().__aexit__()
            raise
