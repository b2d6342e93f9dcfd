"""Compute each item once, however many wait for it, and whoever of them gives up."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

import anyio
from anyio.lowlevel import current_token
from numpy.typing import NDArray

from asyncfeed.cache.gate import Call, Gate
from asyncfeed.errors import ClosedError

__all__ = ["Flights"]

Compute = Callable[[], Awaitable[NDArray[Any]]]

_tasks: set[object] = set()
"""asyncio refers to its tasks weakly; what runs must not be collected."""


def _spawn(function: Callable[[], Any]) -> None:
    """Run a coroutine function in a task that belongs to the event loop, and not to the task that asked for it; it sees
    the context variables of that one.

    anyio has task groups only, which would tie it to the scope of one of those who wait.
    """
    loop: Any = current_token().native_token
    if hasattr(loop, "create_task"):
        task = loop.create_task(function())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
    else:
        sys.modules["trio"].lowlevel.spawn_system_task(function, context=contextvars.copy_context())


class _Flight:
    """One computation under way."""

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.scope = anyio.CancelScope()
        self.waiting = 0
        self.value: NDArray[Any] | None = None
        self.error: BaseException | None = None


class Flights:
    """The computations under way. For one event loop at a time.

    Each is a call of its own: it may last longer than any of those who wait for it.
    """

    def __init__(self, gate: Gate) -> None:
        self._flights: dict[Hashable, _Flight] = {}
        self._gate = gate

    async def share(self, key: Hashable, compute: Compute) -> NDArray[Any]:
        """What ``compute()`` gives, which is called once for all who wait for the same key, in a task of its own.

        Everybody gets an array of their own. When nobody waits any longer it is cancelled; if it cannot be, because it
        is in a thread, it is brought to its end.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            call = self._gate.call()
            call.begin()
            _spawn(lambda: self._fly(key, flight, call, compute))
        flight.waiting += 1
        try:
            await flight.landed.wait()
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.landed.is_set():
                self._forget(key, flight)
                flight.scope.cancel()
        if flight.error is not None:
            raise flight.error
        assert flight.value is not None
        # The last one takes it: the others have copied it before anybody could change it.
        return flight.value.copy() if flight.waiting else flight.value

    def __contains__(self, key: object) -> bool:
        return key in self._flights

    def cancel(self) -> None:
        """Cancel all of them, whoever waits."""
        for key, flight in list(self._flights.items()):
            self._forget(key, flight)
            flight.scope.cancel()

    async def _fly(self, key: Hashable, flight: _Flight, call: Call, compute: Compute) -> None:
        call.mark()
        flight.error = ClosedError(
            "the computation was cancelled: the cache was closed"
        )  # unless something else happens
        try:
            with flight.scope:
                flight.value = await compute()
                flight.error = None
        except anyio.get_cancelled_exc_class():  # the event loop ends
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to those who wait
            flight.error = error
        finally:
            self._forget(key, flight)
            flight.landed.set()
            call.end()

    def _forget(self, key: Hashable, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
