"""Reads plans ahead, within what memory there is."""

from __future__ import annotations

import os
from functools import partial

from asyncfeed.engine.prefetch import Prefetch
from asyncfeed.engine.statistics import Statistics
from asyncfeed.errors import BudgetError, ClosedError
from asyncfeed.memory.budget import measure
from asyncfeed.memory.pool import SegmentPool
from asyncfeed.memory.segment import MAKERS, NAMED_MOUNT, pick_maker
from asyncfeed.planning.passage import Passage
from asyncfeed.planning.plan import Plan
from asyncfeed.storage.library import Library
from asyncfeed.units import PAGE_NBYTES, format_nbytes

__all__ = ["Reader"]


class Reader:
    """One library and the pass over it that is under way. Not thread-safe.

    There are two segments, one to read into while the other is in use; where memory is too short for that, a single one.
    Memory that somebody keeps views of stays as it is, and more is taken for what comes after, as far as there is any.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._pass: Prefetch | None = None
        self._pool: SegmentPool | None = None
        self._pid = os.getpid()

    def start(self, plan: Plan) -> Prefetch:
        """Start a pass over a plan, after ending the one that is under way.

        Raises:
            BudgetError: not even the largest partition fits into memory.
        """
        if self._pid != os.getpid():  # what we had is the parent's
            self._pass, self._pool, self._pid = None, None, os.getpid()
        if not self.end() or self._pool is None or self._pool.segment_nbytes < plan.partition_nbytes:
            self._pool = _pool_for(plan)
        self._pass = Prefetch(self.library, lambda: Passage.of(plan), self._pool, Statistics())
        return self._pass

    @property
    def under_way(self) -> Prefetch | None:
        """The pass that was started last; None if there is none, or if it is that of a parent process."""
        return self._pass if self._pid == os.getpid() else None

    def end(self) -> bool:
        """End the pass that is under way; whether its thread has ended, which one that is stuck in a file does not."""
        earlier, self._pass = self._pass, None
        if earlier is None:
            return True
        earlier.end(ClosedError("a newer pass over these containers has begun, which ended this one"))
        return earlier.close()


def _pool_for(plan: Plan) -> SegmentPool:
    maker = pick_maker()
    may_use = partial(measure, mount=NAMED_MOUNT if maker == "named" else None)
    nbytes = -(-max(plan.partition_nbytes, 1) // PAGE_NBYTES) * PAGE_NBYTES
    measured = may_use()
    if nbytes > measured.available:
        raise BudgetError(
            f"the largest partition takes {format_nbytes(nbytes)}, but this process may use "
            f"{format_nbytes(measured.available)}: {measured}; make partition_size smaller"
        )
    size = 2 if 2 * nbytes <= measured.available else 1
    return SegmentPool(size, nbytes, MAKERS[maker], lambda: may_use().available, quiet=True)
