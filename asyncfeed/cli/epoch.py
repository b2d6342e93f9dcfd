"""``asyncfeed stream``: one epoch at full speed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from asyncfeed.engine.statistics import Statistics
from asyncfeed.feed import Feed

__all__ = ["Epoch", "stream", "take"]

FRAMES, BATCHES = 8192, 16
"""Items between two looks at the clock: some milliseconds of them."""

Advance = Callable[[int], None]
"""Is told how many items have come since the last call."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """What streaming one epoch came to."""

    unit: str
    """What was counted: frames, or batches of so many frames."""
    items: int
    seconds: float
    """From asking for the first item to having the last one."""
    statistics: Statistics


def stream(feed: Feed, batch_size: int | None = None, advance: Advance = lambda _: None) -> Epoch:
    """Take one epoch out of a feed as fast as it comes, as triplets or as batches, and do nothing with it.

    Raises:
        AsyncFeedError: whatever the feed raises.
    """
    feed.open()
    began, total = time.perf_counter(), 0
    items: Iterator[Any]
    if batch_size is None:
        items, step, unit = iter(feed), FRAMES, "frames"
    else:
        items, step, unit = iter(feed.batches(batch_size)), BATCHES, f"batches of {batch_size} frames"
    while taken := take(items, step):
        total += taken
        advance(taken)
    return Epoch(unit, total, time.perf_counter() - began, feed.statistics())


def take(items: Iterator[Any], most: int | None = None) -> int:
    """Take at most ``most`` items, and keep none; how many there were. No Python code runs between two items."""
    counter = count()
    deque(zip(islice(items, most), counter, strict=False), maxlen=0)
    return next(counter)
