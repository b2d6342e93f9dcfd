"""An open feed: the catalog, the memory, and the pass that is under way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tqdm
from numpy.typing import NDArray

from asyncfeed.engine.forms import TABLES_NBYTES, Form
from asyncfeed.engine.prefetch import Prefetch
from asyncfeed.engine.settings import Settings
from asyncfeed.engine.statistics import Statistics
from asyncfeed.errors import BudgetError, ClosedError, ConsumerError
from asyncfeed.memory.budget import measure, resolve
from asyncfeed.memory.pool import SegmentPool
from asyncfeed.memory.segment import MAKERS, NAMED_MOUNT, pick_maker
from asyncfeed.planning.even import even_count
from asyncfeed.planning.orders import Order
from asyncfeed.planning.passage import Passage, Pieces, Stage, Turns, deal, divide, go_through, make_even
from asyncfeed.planning.plan import Cut, Plan
from asyncfeed.planning.planner import make_plan, needed_nbytes
from asyncfeed.planning.shares import are_runs, run_of, shares_of
from asyncfeed.planning.state import State
from asyncfeed.storage.library import open_library
from asyncfeed.storage.scan import Progress
from asyncfeed.units import PAGE_NBYTES, format_nbytes

__all__ = ["Session"]

Integers = NDArray[np.int64]
Some = TypeVar("Some", bound=Pieces)

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
        order = settings.order
        times = order.most_times(len(self.library.corpus))
        needed = self._needed = times * needed_nbytes(self.library.corpus, TABLES_NBYTES if order.shuffles else 0)
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
        self._form: Form[Any] | None = None
        self._stages: tuple[Stage, ...] = ()
        self._closed = False
        self._starting = threading.Lock()

    # -- the epoch -----------------------------------------------------------------------------------------------

    def epoch(self, next_epoch: int) -> int:
        """The epoch that is under way, or else the next one."""
        return self._pass_epoch if self._pass is not None and not self._pass.over else next_epoch

    def plan(self, cut: Cut, epoch: int, order: Order | None = None) -> Plan:
        """The plan of an epoch for a form that cuts utterances like this; in another order than the feed's, perhaps."""
        return make_plan(rank=self._rank(cut, order), **self._wanted(cut, epoch, order))

    def _wanted(self, cut: Cut, epoch: int, order: Order | None = None) -> dict[str, Any]:
        """What plans are made from."""
        s = self.settings
        return {
            "corpus": self.library.corpus,
            "partition_nbytes": self.budget.partition_nbytes,
            "shuffle": order or s.order,
            "seed": s.seed,
            "epoch": epoch,
            "world_size": s.world_size,
            "cut": cut,
            "segments": s.prefetch + 1,
            "even": s.even,
        }

    def _rank(self, cut: Cut, order: Order | None = None) -> int:
        """This rank, among those that divide a plan between them."""
        return self.settings.place if are_runs(order or self.settings.order, cut) else self.settings.rank

    def _passage(self, form: Form[Any], epoch: int, stages: Sequence[Stage], items: int) -> Passage:
        """What is gone through on this rank, after the stages that are over, and so many items of this one."""
        s, wanted = self.settings, self._wanted(form.cut, epoch)
        rank, first = self._rank(form.cut), stages[0].world_size if stages else s.world_size
        if form.cut.whole:
            wanted["skip"] = sum(stage.world_size * stage.units for stage in stages)
        elif not stages and (s.even is None or not form.divisible):
            pass
        elif are_runs(s.order, form.cut):
            whole = make_plan(**{**wanted, "world_size": 1})
            runs = [Passage.of(share) for share in shares_of(whole, first)]
            return form.after(self._after(stages, runs, divide)[rank], items)
        else:
            units = form.cut.count(self.library.corpus.lengths[self._rows(epoch)])
            wanted["turns"] = self._after(stages, deal([Turns.of(units)], first), deal)[rank]
        return form.after(Passage.of(make_plan(rank=rank, **wanted)), items)

    def _after(
        self, stages: Sequence[Stage], pieces: list[Some], divide: Callable[[Sequence[Some], int], list[Some]]
    ) -> list[Some]:
        """What each rank has after the stages that are over, of what each of the first had."""
        even = self.settings.even
        if even is None:
            return go_through(pieces, stages, self.settings.world_size, divide)

        def divide_evenly(left: Sequence[Some], world_size: int) -> list[Some]:
            return make_even(divide(left, world_size), even)

        return go_through(make_even(pieces, even), stages, self.settings.world_size, divide_evenly)

    def _rows(self, epoch: int) -> Integers:
        """The utterances of an epoch in the order that all ranks agree on."""
        return self.settings.order.rows(self.library.corpus, seed=self.settings.seed, epoch=epoch)

    def count(self, form: Form[Any], epoch: int, resume: State | None) -> int:
        """Items that an epoch, or what is left of it, gives on this rank."""
        s, corpus, cut = self.settings, self.library.corpus, form.cut
        if resume is not None and resume.stages:
            return form.items(self._passage(form, epoch, *resume.on(s.world_size)).num_units)
        if cut.whole:
            return int(self.plan(cut, epoch).num_units.sum())
        runs = are_runs(s.order, cut)
        rows = self._rows(epoch)
        if not runs and s.even is None:
            rows = rows[s.rank :: s.world_size]
        units = int(cut.count(corpus.lengths[rows]).sum())
        if s.even is not None:
            units = even_count(units, s.even, s.world_size)
        elif runs:
            start, stop = run_of(units, s.place, s.world_size)
            units = stop - start
        return form.items(units)

    # -- positions -----------------------------------------------------------------------------------------------

    def state(self, next_epoch: int, resume: State | None) -> State:
        """Where the consumer is."""
        s = self.settings
        fixed = (self.library.corpus.fingerprint, s.order.describe(), s.seed, s.even, self.budget.partition_nbytes)
        if self._form is None or self._form.finished or resume is not None:
            return State(*fixed, next_epoch, {}) if resume is None else resume
        items = self._form.handed_out
        stages = (*self._stages, Stage(s.world_size, self._form.units(items)))
        return State(*fixed, self._pass_epoch, self._form.describe(), stages, items)

    def forget_position(self) -> None:
        """An epoch that a loop has left is not gone on with, and the consumer is where the next one begins."""
        if self._pass is None or self._pass.over:
            self._form = None

    def use_partition_nbytes(self, nbytes: int) -> None:
        """Plan with partitions of another size, that of a state. Raises `BudgetError` if there is not so much memory."""
        if nbytes == self.budget.partition_nbytes:
            return
        total, may_use = nbytes * (self.settings.prefetch + 1), self._may_use().available
        if total > may_use:
            raise BudgetError(
                f"the state was saved with partitions of {format_nbytes(nbytes)}, which take {format_nbytes(total)} together, "
                f"and this process may use {format_nbytes(may_use)}; free memory, or begin the epoch anew with set_epoch()"
            )
        self.budget = replace(
            self.budget, nbytes=total, partition_nbytes=nbytes, reason="as in the state that was loaded"
        )
        self.segment_nbytes = _whole_pages(min(nbytes, self._needed))
        self._pool = self._new_pool()

    # -- passes --------------------------------------------------------------------------------------------------

    def start(self, form: Form[Any], epoch: int, resume: State | None = None) -> Prefetch:
        """Start an epoch, or go on with one, after ending the one that is under way.

        Raises:
            ClosedError: the session was closed meanwhile.
        """
        while True:
            earlier = self._pass
            ended = earlier is None or self._replaced(earlier).close()
            if (started := self._started(form, epoch, resume, earlier, ended)) is not None:
                return started

    async def start_async(self, form: Form[Any], epoch: int, resume: State | None = None) -> Prefetch:
        """Like `start`, without blocking the event loop while the pass before ends."""
        while True:
            earlier = self._pass
            ended = earlier is None or await self._replaced(earlier).aclose()
            if (started := self._started(form, epoch, resume, earlier, ended)) is not None:
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

    def _started(
        self, form: Form[Any], epoch: int, resume: State | None, earlier: Prefetch | None, ended: bool
    ) -> Prefetch | None:
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
            self._stages, items = ((), 0) if resume is None else resume.on(self.settings.world_size)
            form.resume(items)
            passage = partial(self._passage, form, epoch, self._stages, items)
            self._pass = Prefetch(self.library, passage, self._pool, self.statistics)
            self._pass_epoch, self._form = epoch, form
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
