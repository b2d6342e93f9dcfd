"""Calls, and switches that wait until none is in flight."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar, Token

import anyio

from asyncfeed.errors import ModeError

__all__ = ["Call", "Gate"]

_calls: ContextVar[tuple[Call, ...]] = ContextVar("asyncfeed_calls", default=())
"""The calls that this task is within, itself or by whoever started it. A call within a call must not wait for a switch,
which waits for the outer one."""


class Call:
    """Being in flight, as a context. A class, as it is in the way of every single item: a generator takes 10 us."""

    __slots__ = ("_token", "gate", "in_flight")

    def __init__(self, gate: Gate) -> None:
        self.gate, self.in_flight = gate, False
        self._token: Token[tuple[Call, ...]] | None = None

    async def __aenter__(self) -> None:
        if not self.gate.is_within():
            await self.gate.wait_open()
            self.begin()
            self.mark()

    async def __aexit__(self, *exc_info: object) -> None:
        if self._token is not None:
            _calls.reset(self._token)
            self.end()

    def begin(self) -> None:
        """Count as in flight, whether or not a switch is waiting: for what belongs to a call that is."""
        self.in_flight = True
        self.gate.num_in_flight += 1

    def mark(self) -> None:
        """Let this task, and those that it starts, know that they are within this call."""
        self._token = _calls.set((*_calls.get(), self))

    def end(self) -> None:
        """It has landed."""
        self.in_flight = False
        self.gate.num_in_flight -= 1
        if self.gate.switching:
            self.gate.notify()


class Gate:
    """Lets any number of calls in, or one switch. For one event loop at a time."""

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.switching = False
        self._changed = anyio.Event()

    def is_within(self) -> bool:
        """Whether this task is within a call that is in flight."""
        return any(call.gate is self and call.in_flight for call in _calls.get())

    async def wait_open(self) -> None:
        """Wait until no switch is under way."""
        while self.switching:
            await self._changed.wait()

    def call(self) -> Call:
        """An asynchronous context: wait for a switch that is under way, then be in flight."""
        return Call(self)

    @contextlib.asynccontextmanager
    async def switch(self) -> AsyncIterator[None]:
        """Keep new calls out, wait until all are out, and have the cache for oneself.

        Raises:
            ModeError: this is within a call, and so waits for itself.
        """
        if self.is_within():
            raise ModeError("the mode cannot be switched from within compute() or populate(), which have to end first")
        await self.wait_open()
        self.switching = True
        try:
            while self.num_in_flight:
                await self._changed.wait()
            yield
        finally:
            self.switching = False
            self.notify()

    def notify(self) -> None:
        """Wake those who wait."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
