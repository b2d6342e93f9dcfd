"""Calls, and switches that wait until none is in flight."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar

import anyio

from asyncfeed.errors import ModeError

__all__ = ["Gate"]

_passed: ContextVar[tuple[Gate, ...]] = ContextVar("asyncfeed_gates", default=())
"""The gates that this task is inside of, and whoever it has called: a call within a call must not wait for a switch that
waits for the outer one."""


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

    def enter(self) -> None:
        """Count something as in flight, on behalf of a call that is inside."""
        self._inside += 1

    def leave(self) -> None:
        """It has ended."""
        self._inside -= 1
        if self._switching:
            self._notify()

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Wait for a switch that is under way, then be in flight."""
        if self in _passed.get():
            yield
            return
        while self._switching:
            await self._changed.wait()
        self.enter()
        token = _passed.set((*_passed.get(), self))
        try:
            yield
        finally:
            _passed.reset(token)
            self.leave()

    @contextlib.asynccontextmanager
    async def switch(self) -> AsyncIterator[None]:
        """Keep new calls out, wait until all are out, and have the cache for oneself.

        Raises:
            ModeError: this is within a call, and so waits for itself.
        """
        if self in _passed.get():
            raise ModeError("the mode cannot be switched from within compute() or populate(), which have to end first")
        while self._switching:
            await self._changed.wait()
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
