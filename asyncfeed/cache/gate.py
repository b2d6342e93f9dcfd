"""Calls, and switches that wait until none is in flight."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar, Token

import anyio

from asyncfeed.errors import ModeError

__all__ = ["Call", "Gate"]

_passed: ContextVar[tuple[Gate, ...]] = ContextVar("asyncfeed_gates", default=())
"""The gates that this task is inside of, and whoever it has called: a call within a call must not wait for a switch that
waits for the outer one."""


class Call:
    """Being in flight, as a context. A class, as it is in the way of every single item: a generator takes 10 us."""

    __slots__ = ("_gate", "_token")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._token: Token[tuple[Gate, ...]] | None = None

    async def __aenter__(self) -> None:
        passed = _passed.get()
        if self._gate not in passed:
            await self._gate.wait_open()
            self._gate.enter()
            self._token = _passed.set((*passed, self._gate))

    async def __aexit__(self, *exc_info: object) -> None:
        if self._token is not None:
            _passed.reset(self._token)
            self._gate.leave()


class Gate:
    """Lets any number of calls in, or one switch. For one event loop at a time."""

    def __init__(self) -> None:
        self._inside = 0
        self._switching = False
        self._changed = anyio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a call would be let in at once."""
        return not self._switching

    async def wait_open(self) -> None:
        """Wait until no switch is under way."""
        while self._switching:
            await self._changed.wait()

    def enter(self) -> None:
        """Count something as in flight, on behalf of a call that is inside."""
        self._inside += 1

    def leave(self) -> None:
        """It has ended."""
        self._inside -= 1
        if self._switching:
            self._notify()

    def call(self) -> Call:
        """An asynchronous context: wait for a switch that is under way, then be in flight."""
        return Call(self)

    @contextlib.asynccontextmanager
    async def switch(self) -> AsyncIterator[None]:
        """Keep new calls out, wait until all are out, and have the cache for oneself.

        Raises:
            ModeError: this is within a call, and so waits for itself.
        """
        if self in _passed.get():
            raise ModeError("the mode cannot be switched from within compute() or populate(), which have to end first")
        await self.wait_open()
        self._switching = True
        try:
            while self._inside:
                await self._changed.wait()
            yield
        finally:
            self._switching = False
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
