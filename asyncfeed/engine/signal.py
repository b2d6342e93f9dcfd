"""Tell a waiting thread or task, from any thread, that something happened."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import anyio
from anyio.lowlevel import current_token

__all__ = ["Signal"]


class Signal:
    """A flag that is set once, by any thread, and can be waited for by threads and by tasks (asyncio and trio).

    ``anyio.from_thread`` would make the setting thread wait for the event loop, which a training loop may block for
    seconds; this one schedules the wake-up and goes on. Setting it for a loop that has ended does nothing.
    """

    __slots__ = ("_flag", "_wakers")

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._wakers: deque[Callable[[], None]] = deque()

    def set(self) -> None:
        """Raise the flag and wake everybody."""
        self._flag.set()
        with contextlib.suppress(IndexError):
            while True:
                self._wakers.popleft()()

    def is_set(self) -> bool:
        return self._flag.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the flag is up, at most ``timeout`` seconds; whether it is."""
        return self._flag.wait(timeout)

    async def wait_async(self) -> None:
        """Suspend this task until the flag is up."""
        event = anyio.Event()
        # Appended before looking at the flag: set() raises the flag before it looks at the wakers.
        self._wakers.append(partial(_schedule, current_token().native_token, event.set))
        if not self._flag.is_set():
            await event.wait()


def _schedule(loop: object, callback: Callable[[], object]) -> None:
    """Have an event loop call something soon, from any thread, without waiting for it."""
    schedule = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon  # type: ignore[attr-defined]
    # asyncio raises RuntimeError when the loop is closed, and so does trio (RunFinishedError); nobody waits there then.
    with contextlib.suppress(RuntimeError):
        schedule(callback)
