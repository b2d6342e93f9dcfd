"""An open feed: the catalog, the memory, and the pass that is under way."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import tqdm

from asyncfeed.engine.forms import TABLES_NBYTES, Form
from asyncfeed.engine.prefetch import Prefetch
from asyncfeed.engine.settings import Settings
from asyncfeed.engine.statistics import Statistics
from asyncfeed.errors import ClosedError, ConsumerError
from asyncfeed.memory.budget import measure, resolve
from asyncfeed.memory.pool import SegmentPool
from asyncfeed.memory.segment import MAKERS, NAMED_MOUNT, pick_maker
from asyncfeed.planning.plan import Cut, Plan, make_plan, needed_nbytes, share_of_rank
from asyncfeed.storage.library import open_library
from asyncfeed.storage.scan import Progress
from asyncfeed.units import PAGE_NBYTES

__all__ = ["Session"]

SECONDS_BEFORE_BAR = 2.0
"""A scan that takes longer shows a progress bar, where the error output is a terminal."""


class _Bar(tqdm.tqdm):  # type: ignore[type-arg]
    """A progress bar without the monitor thread that tqdm would leave running."""

    monitor_interval = 0


class Session:
    """What there is between opening a feed and closing it.

    Opening reads all metadata and measures the memory, but starts no thread and makes no segment yet.
    """

    def __init__(self, settings: Settings, stop: threading.Event | None = None) -> None:
        self.settings = settings
        with _Bar(unit=" datasets", desc="cataloguing", delay=SECONDS_BEFORE_BAR, leave=False, disable=None) as bar:
            self.library = open_library(
                settings.source,
                includes=settings.includes,
                excludes=settings.excludes,
                unreadable=settings.unreadable,
                index=settings.index,
                progress=_progress(bar),
                stop=stop,
            )
        maker = pick_maker()
        self._may_use = partial(measure, mount=NAMED_MOUNT if maker == "named" else None)
        needed = needed_nbytes(self.library.corpus, TABLES_NBYTES if settings.shuffle else 0)
        self.budget = resolve(
            settings.memory_budget, needed=needed, prefetch=settings.prefetch, measured=self._may_use()
        )
        self._give_back = weakref.finalize(self, self.budget.give_back)
        self.statistics = Statistics()
        self.segment_nbytes = _whole_pages(min(self.budget.partition_nbytes, needed))
        self._make = MAKERS[maker]
        self._pool = self._new_pool()
        self._pass: Prefetch | None = None
        self._pass_epoch = 0
        self._closed = False
        self._starting = threading.Lock()

    # -- the epoch -----------------------------------------------------------------------------------------------

    def epoch(self, next_epoch: int) -> int:
        """The epoch that is under way, or else the next one."""
        return self._pass_epoch if self._pass is not None and not self._pass.over else next_epoch

    def plan(self, cut: Cut, epoch: int) -> Plan:
        """The plan of an epoch for a form that cuts utterances like this."""
        s = self.settings
        return make_plan(
            self.library.corpus,
            partition_nbytes=self.budget.partition_nbytes,
            shuffle=s.shuffle,
            seed=s.seed,
            epoch=epoch,
            rank=s.rank,
            world_size=s.world_size,
            cut=cut,
            segments=s.prefetch + 1,
        )

    def count(self, form: Form[Any], epoch: int) -> int:
        """Items that an epoch gives on this rank."""
        s, corpus = self.settings, self.library.corpus
        lengths = corpus.catalogs[0].length if form.cut.whole else corpus.lengths
        if s.world_size > 1:
            lengths = lengths[
                share_of_rank(
                    len(corpus), shuffle=s.shuffle, seed=s.seed, epoch=epoch, rank=s.rank, world_size=s.world_size
                )
            ]
        return form.count(lengths)

    # -- passes --------------------------------------------------------------------------------------------------

    def start(self, form: Form[Any], epoch: int) -> Prefetch:
        """Start an epoch, after ending the one that is under way.

        Raises:
            ClosedError: the session was closed meanwhile.
        """
        while True:
            earlier = self._pass
            ended = earlier is None or self._replaced(earlier).close()
            if (started := self._started(form, epoch, earlier, ended)) is not None:
                return started

    async def start_async(self, form: Form[Any], epoch: int) -> Prefetch:
        """Like `start`, without blocking the event loop while the pass before ends."""
        while True:
            earlier = self._pass
            ended = earlier is None or await self._replaced(earlier).aclose()
            if (started := self._started(form, epoch, earlier, ended)) is not None:
                return started

    def close(self) -> None:
        """End the pass that is under way and let go of the memory. Frames that somebody keeps stay as they are."""
        last = self._shut()
        try:
            if last is None or last.close():
                self._pool.let_go()
        finally:
            self._give_back()  # now, and not when we are collected: the traceback of an error may refer to us

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        last = self._shut()
        try:
            if last is None or await last.aclose():
                self._pool.let_go()
        finally:
            self._give_back()

    def _started(self, form: Form[Any], epoch: int, earlier: Prefetch | None, ended: bool) -> Prefetch | None:
        """Start a pass; None if another one was started while ``earlier`` was waited for, and must be ended first.

        A pool has one reader at a time. A reader that is stuck in the file system does not let go of its own.
        """
        with self._starting:
            if self._closed:
                raise ClosedError("the feed was closed while an iteration over it was about to begin")
            if self._pass is not earlier:
                return None
            if not ended:
                self._pool = self._new_pool()
            self._pass = Prefetch(self.library, partial(self.plan, form.cut, epoch), self._pool, self.statistics)
            self._pass_epoch = epoch
            return self._pass

    def _shut(self) -> Prefetch | None:
        """Start no further pass, and stop the one that is under way."""
        with self._starting:
            self._closed = True
        if self._pass is not None:
            self._pass.end(ClosedError("the feed was closed while it was being iterated over"))
        return self._pass

    def _new_pool(self) -> SegmentPool:
        may_use = self._may_use
        return SegmentPool(self.settings.prefetch + 1, self.segment_nbytes, self._make, lambda: may_use().available)

    @staticmethod
    def _replaced(earlier: Prefetch) -> Prefetch:
        earlier.end(
            ConsumerError(
                "a newer iteration over this feed has begun, which ended this one; a feed has one iteration at a time: "
                "use a second Feed, and share a MemoryBudget between them"
            )
        )
        return earlier


def _progress(bar: _Bar) -> Progress:
    def advance(datasets: int) -> None:
        bar.update(datasets)

    return advance


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
