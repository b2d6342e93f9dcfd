"""Segments that come back when the last view of them dies.

A partition is lent out as one *anchor*: an array over the whole segment, made by ``np.frombuffer``. numpy makes every
view's ``base`` the array that owns the memory, never the view it was taken from, so all slices, reshapes and tensors of
a partition refer to its anchor and to nothing else of ours. When the last of them is gone, so is the anchor, and the
callback of a weak reference puts the news into the pool's inbox.

That callback runs in whatever thread drops the last view, in the middle of anything, perhaps within a lock. It does one
thing, ``queue.SimpleQueue.put``, which is reentrant by design.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import BudgetError
from asyncfeed.process import call_at_fork
from asyncfeed.units import format_nbytes

__all__ = ["Inbox", "SegmentPool"]

Anchor = NDArray[np.uint8]
Reference = weakref.ReferenceType[Any]
Message = Reference | Literal["nudge", "fork"]


class Inbox:
    """Where a reader thread waits: for a segment that comes back, or for being told something."""

    __slots__ = ("__weakref__", "_queue", "returned")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        call_at_fork(self)
        self.returned: Callable[[Reference], None] = self._queue.put
        """A segment is free. Called from finalizers, and therefore written in C: in Python code a Ctrl-C might arrive,
        and be lost with the segment."""

    def nudge(self) -> None:
        """Make whoever waits look around."""
        self._queue.put("nudge")

    def forking(self) -> None:
        """The process forks: what was returned before is told from what is lent out meanwhile by its place in the queue."""
        self._queue.put("fork")

    def wait(self) -> Message:
        """The next message."""
        return self._queue.get()

    def pending(self) -> Iterator[Message]:
        """All messages there are now, without waiting."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._queue.get_nowait()


@dataclass(slots=True)
class SegmentPool:
    """At most ``size`` segments of ``segment_nbytes`` each, made when first needed and used again and again.

    Only one reader thread at a time takes segments out.
    """

    size: int
    segment_nbytes: int
    make: Callable[[int], mmap.mmap]
    may_use: Callable[[], int]
    """Measures what memory may be used now; asked only when more than ``size`` segments are wanted."""
    inbox: Inbox = field(default_factory=Inbox)
    warning: str | None = None
    """Something that the consumer should hear, once, in its own thread."""
    num_made: int = 0
    peak_nbytes: int = 0
    _free: list[mmap.mmap] = field(default_factory=list)
    _lent: dict[int, tuple[Reference, mmap.mmap]] = field(default_factory=dict)
    _seen_by_child: set[int] = field(default_factory=set)
    _warned: bool = False

    @property
    def num_held(self) -> int:
        """Segments that somebody still has views of."""
        return len(self._lent)

    def take(self, stopped: Callable[[], bool], starving: Callable[[], bool]) -> Anchor | None:
        """Wait for a free segment and lend it out.

        Args:
            stopped: says that nobody wants it any longer; checked after every message.
            starving: says that the consumer is waiting and nothing is ready for it. Then all segments are held by
                views that somebody keeps, and one more is made, within what may be used.

        Returns:
            An array over the segment, or None if stopped.

        Raises:
            BudgetError: one more is needed, and there is no memory for it.
        """
        while not stopped():
            self._hear_all()
            if self._free:
                return self._lend(self._free.pop())
            if len(self._lent) < self.size:
                return self._lend(self._new())
            if not starving():
                self._hear(self.inbox.wait())
            elif not self._hear_all():  # what the consumer let go of since we looked, just before it began to wait
                self._make_room()
                return self._lend(self._new())
        return None

    def let_go(self) -> None:
        """Forget all segments: those that nobody sees are gone at once, the others with their last view.

        Only when no reader thread uses the pool any longer.
        """
        self._free.clear()
        self._lent.clear()
        self._seen_by_child.clear()

    def take_warning(self) -> str | None:
        """The warning, if there is one that was not taken yet."""
        warning, self.warning = self.warning, None
        return warning

    def _new(self) -> mmap.mmap:
        segment = self.make(self.segment_nbytes)
        self.num_made += 1
        return segment

    def _lend(self, segment: mmap.mmap) -> Anchor:
        anchor = np.frombuffer(segment, np.uint8)
        reference = weakref.ref(anchor, self.inbox.returned)
        self._lent[id(reference)] = (reference, segment)
        held = self.segment_nbytes * (len(self._lent) + len(self._free))
        self.peak_nbytes = max(self.peak_nbytes, held)
        return anchor

    def _hear_all(self) -> bool:
        """Take all messages that there are; whether there were any."""
        messages = list(self.inbox.pending())
        for message in messages:
            self._hear(message)
        return bool(messages)

    def _hear(self, message: Message) -> None:
        if message == "fork":  # views of what is lent out now may live on in the child
            self._seen_by_child.update(self._lent)
        elif message != "nudge":
            self._back(message)

    def _back(self, reference: Reference) -> None:
        """Keep a segment that came back; but only one beyond ``size``, for a loop that goes on keeping frames.

        One that was lent out during a fork is let go of.
        """
        _, segment = self._lent.pop(id(reference), (None, None))
        if segment is None or id(reference) in self._seen_by_child:
            self._seen_by_child.discard(id(reference))
        elif not self._free or len(self._lent) + len(self._free) < self.size:
            self._free.append(segment)

    def _make_room(self) -> None:
        """Allow one segment beyond the budget, for a loop that keeps what it is given."""
        held = f"{len(self._lent)} segments of {format_nbytes(self.segment_nbytes)} are held by frames that are kept"
        cure = "copy what you keep (frame.copy()), or let go of it"
        available = self.may_use()
        if available < self.segment_nbytes:
            raise BudgetError(f"{held}, and only {format_nbytes(available)} more may be used; {cure}")
        if not self._warned:
            self._warned = True
            self.warning = f"{held}, so more memory than the budget is used; {cure}"
