"""Decide whether an item has to be computed, and do it once for all who ask."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import anyio
import numpy as np
from anyio import to_thread
from numpy.typing import NDArray

from asyncfeed.cache.modes import Mode
from asyncfeed.cache.session import Session
from asyncfeed.cache.store import Store
from asyncfeed.cache.values import digest_of, to_array
from asyncfeed.errors import CacheMissError, StaleCacheError, UsageError

__all__ = ["Computing", "Function"]

Function = Callable[..., Any]

_computed: ContextVar[tuple[tuple[Computing, str, bytes], ...]] = ContextVar("asyncfeed_computed", default=())
"""What is being computed by whoever has called this, from the outside in."""


class Computing:
    """The function of a cache, at work. For use within a call.

    Args:
        session: of the cache.
        func: the function; None if there is none.
        check_inputs: whether items belong to the arguments that they were computed from.
    """

    def __init__(self, session: Session, func: Function | None, check_inputs: bool) -> None:
        self._session, self.func, self.check_inputs = session, func, check_inputs

    async def digest(self, args: tuple[Any, ...]) -> bytes:
        """Of arguments; empty if they are not looked at."""
        return await self._session.run(lambda: digest_of(args)) if self.check_inputs else b""

    async def is_there(self, store: Store, uid: str, digest: bytes) -> bool:
        """Whether an item is there and comes from these arguments; false only where it may be computed.

        Raises:
            CacheMissError: it is not there, and this is a reader.
            StaleCacheError: it comes from other arguments, and this is a reader.
        """
        reading = self._session.mode is Mode.READER
        if uid not in store and reading:
            await self._session.run(store.refresh)
        there = uid in store
        if there and (not digest or store.digest(uid) in (b"", digest)):
            return True
        if reading and not there:
            raise store.missing_error([uid])
        if reading:
            raise StaleCacheError(
                f"item {uid!r} in {self._session.settings.generations.path} was computed from other arguments; compute it "
                f"again in writer mode, or pass check_inputs=False to take what is there"
            )
        return False

    async def compute(
        self, store: Store, uid: str, args: tuple[Any, ...], digest: bytes, limiter: anyio.CapacityLimiter
    ) -> NDArray[Any]:
        """What the function gives, kept; called once for all who ask for it at the same time."""
        store.check_id(uid)
        func = self.function(uid)
        outer, inner = _computed.get(), (self, uid, digest)
        if inner in outer:
            raise UsageError(f"item {uid!r} is computed from itself: func has asked for it before giving it")
        nested = any(computing is self for computing, *_ in outer)

        async def fly() -> NDArray[Any]:
            _computed.set((*outer, inner))
            # What a function asks for runs in the place of that function, which waits for it.
            async with contextlib.nullcontext() if nested else limiter:
                value = await _result_of(func, uid, *args)
            with anyio.CancelScope(
                shield=True
            ):  # what a function has given is kept, whether anybody still wants it or not
                array = (await self.to_array(value)).copy()  # the function may use its memory again
                await self._session.write(lambda: store.append(uid, array, digest))
            return array

        return await self._session.flights.share((uid, digest), fly)

    def is_under_way(self, uid: str, digest: bytes) -> bool:
        """Whether the function is at work on an item just now."""
        return (uid, digest) in self._session.flights

    def function(self, uid: str) -> Function:
        """The function. Raises `CacheMissError` if there is none to compute ``uid`` with."""
        if self.func is None:
            raise CacheMissError(
                f"item {uid!r} is not in the cache {self._session.settings.generations.path}, and there is nothing to "
                f"compute it with: pass func= to CachedItem, or put() the item"
            )
        return self.func

    async def to_array(self, value: object) -> NDArray[Any]:
        """An array at once; what may have to come from another device, in a thread."""
        return to_array(value) if isinstance(value, np.ndarray) else await self._session.run(lambda: to_array(value))


async def _result_of(func: Function, *args: Any) -> Any:
    """Await an asynchronous function; call a plain one in a thread, and await what it gives if that is awaitable."""
    if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None)):  # noqa: B004
        return await func(*args)
    # A limiter of its own: how many run at a time is decided above, and the threads of the event loop may all be taken.
    # In a list, as trio takes a coroutine that comes from a thread for a mistake.
    [result] = await to_thread.run_sync(lambda: [func(*args)], limiter=anyio.CapacityLimiter(1))
    return await result if inspect.isawaitable(result) else result
