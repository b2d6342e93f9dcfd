"""Threads that are waited for, whatever becomes of the task that asked."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import anyio

from asyncfeed.engine.signal import Signal

__all__ = ["Threads"]

MAX_THREADS = 8
"""That read and write for one cache at the same time."""

Result = TypeVar("Result")


class Threads:
    """Some threads, started when they are needed, which end when this is shut down or collected.

    Not those of the event loop, which may all be taken; and not those of anyio, which asyncio's own cancellation (that of
    ``asyncio.timeout``, or Ctrl-C) leaves at work behind the back of whoever closes files then.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[[], Result], cancel: Callable[[], object] | None = None) -> Result:
        """Call a function in a thread. A task that is cancelled meanwhile waits until it has ended, if it had begun.

        ``cancel`` is called in that case, and can make it end sooner.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_THREADS, "asyncfeed-cache")
        future = self._pool.submit(contextvars.copy_context().run, function)
        landed = Signal()
        future.add_done_callback(lambda _: landed.set())
        try:
            await landed.wait_async()
        except GeneratorExit:  # the event loop is gone, and with it the way to wait
            raise
        except BaseException:
            if not future.cancel():
                if cancel is not None:
                    cancel()
                await _settle(future, landed)
            raise
        return future.result()

    def shut_down(self) -> None:
        """End the threads once they have done what they were asked for."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


async def _settle(future: Future[Result], landed: Signal) -> None:
    """Wait for the end of what cannot be stopped, also when the task is cancelled once more."""
    with anyio.CancelScope(shield=True):
        while not future.done():
            with contextlib.suppress(anyio.get_cancelled_exc_class()):
                await landed.wait_async()
