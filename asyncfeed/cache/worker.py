"""A thread that does one thing after the other, and answers quickly."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio

from asyncfeed.engine.signal import Signal

__all__ = ["Worker"]

PATIENCE = 0.001
"""Seconds that the event loop is held for an answer. Two threads hand over to each other in 20 us; to wake a task takes
100 us more, which is as long as writing 100 KB does. An answer that takes longer is awaited."""

Result = TypeVar("Result")


class _Job(Generic[Result]):
    """Something to do, and what became of it."""

    __slots__ = ("_done", "_finished", "_signal", "error", "function", "result")

    def __init__(self, function: Callable[[], Result]) -> None:
        self.function = function
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self._finished = False
        self._signal: Signal | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        self._finished = True  # before looking for a signal, as wait() leaves one before it looks here
        self._done.release()
        if self._signal is not None:
            self._signal.set()

    async def wait(self, patience: float) -> bool:
        """Wait until it is done; whether that took no longer than ``patience`` seconds."""
        if self._done.acquire(timeout=patience):
            return True
        self._signal = Signal()
        if not self._finished:
            await self._signal.wait_async()
        return False

    async def settle(self) -> None:
        """Wait until it is done, also when the task is cancelled once more."""
        with anyio.CancelScope(shield=True):
            while not self._finished:
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await self.wait(0.0)


class Worker:
    """A thread of its own, started when it is first needed. Ends when it is closed or collected, or with the interpreter.

    Jobs must not call HDF5: a thread that is inside of it when the interpreter goes away crashes the process.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._patience = PATIENCE
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._started = False
        self._end = weakref.finalize(self, self._jobs.put, None)

    async def do(self, function: Callable[[], Result]) -> Result:
        """Call a function in the thread, after all that was asked for before.

        A task that is cancelled meanwhile waits until it is done: it may be at work on memory of the caller's.
        """
        if not self._started:
            self._started = True
            self._thread.start()
        job = _Job(function)
        self._jobs.put(job)
        try:
            quick = await job.wait(self._patience)
        except GeneratorExit:  # the event loop is gone, and with it the way to wait
            raise
        except BaseException:
            await job.settle()
            raise
        self._patience = PATIENCE if quick or not self._patience else 0.0  # a slow disk must not hold up the event loop
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    async def settle(self) -> None:
        """Wait until everything is done that was asked for, by whomever."""
        if self._started:
            await self.do(lambda: None)

    def close(self) -> None:
        """Let it finish what it was asked for, and end. Idempotent. Blocks meanwhile."""
        self._end()
        if self._started and self._thread is not threading.current_thread():
            self._thread.join()


def _work(jobs: queue.SimpleQueue[_Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job
