"""Run a blocking function in a thread of its own while an event loop goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio

from asyncfeed.engine.signal import Signal

__all__ = ["run_stoppable"]

PATIENCE = 1.0
"""Seconds that a cancelled task waits for the thread to stop."""

Result = TypeVar("Result")


async def run_stoppable(function: Callable[[threading.Event], Result]) -> Result:
    """Call ``function(stop)`` in a new thread; if the task is cancelled, ``stop`` is set and the thread waited for, at most
    `PATIENCE` seconds: one that is stuck in the file system ends by itself, later.

    Not in the loop's executor, whose few threads may all be busy, or waiting for us.
    """
    stop, done = threading.Event(), Signal()
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function(stop))
        except BaseException as error:  # noqa: BLE001 - raised again where it belongs
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="asyncfeed-open").start()
    try:
        await done.wait_async()
    except GeneratorExit:  # the event loop is gone, and with it the way to wait
        stop.set()
        raise
    except BaseException:
        stop.set()
        with anyio.move_on_after(PATIENCE, shield=True):
            await done.wait_async()
        raise
    if failure:
        raise failure[0]
    return outcome[0]
