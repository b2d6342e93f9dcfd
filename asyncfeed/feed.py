"""`Feed`: the door."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

from asyncfeed.engine.batches import Batch, Batches, Padded
from asyncfeed.engine.forms import Form, Partitions, Triplet, Triplets, Utterances, Window, Windows
from asyncfeed.engine.loaded import LoadedPartition, Rows
from asyncfeed.engine.prefetch import Prefetch
from asyncfeed.engine.session import Session
from asyncfeed.engine.settings import Settings
from asyncfeed.engine.statistics import Statistics
from asyncfeed.engine.thread import run_stoppable
from asyncfeed.errors import ArgumentError, ClosedError, UsageError
from asyncfeed.memory.budget import Budget, MemoryBudget
from asyncfeed.planning.catalog import Skipped
from asyncfeed.planning.even import Even
from asyncfeed.planning.grouping import MAX_WASTE, POOL, Grouping, waste_of
from asyncfeed.planning.orders import BLOCK_NBYTES, Shuffle
from asyncfeed.planning.plan import Plan
from asyncfeed.planning.state import State
from asyncfeed.process import refuse_fork
from asyncfeed.storage.library import Library
from asyncfeed.storage.source import AnySource, holds_handle
from asyncfeed.stream import AsyncItems, Items, PaddedStream, Stream

__all__ = ["Feed"]


class Feed:
    """Streams feature files: reads ahead into shared memory, hands out views.

        async with Feed("feats.h5", memory_budget="2g") as feed:
            async for utt, index, frame in feed: ...

    A feed is an async context manager and a plain one; it and what its methods return can be iterated over with
    ``async for`` (asyncio and trio) and with ``for``. Every iteration is one epoch, each time the next. One iteration at
    a time: a new one ends the one before. Without ``with``, a feed opens when it is first needed and closes when it is
    collected.

    Everything that is handed out except batches is a view of shared memory: it stays as it is for as long as it lives,
    also after the feed is closed, and it may be written to. The memory is used again when no view of its partition is
    left.

    Args:
        source: a path; a list of paths or a glob, over which ids must be unique; an open ``h5py.File`` or
            ``h5py.Group``, read through that handle; a `Source` for other layouts; or a mapping of field names to any of
            these, for several fields side by side. Groups are walked recursively; an id is a dataset's full path.
        memory_budget: of all shared memory together: ``"auto"``, a size (``"2g"``, ``"512MiB"``, bytes), a share of what
            may be used (``"25%"``), or a `MemoryBudget` that several feeds share. A partition gets
            ``budget / (prefetch + 1)``. ``"auto"`` is a power of two, at most 1 GiB.
        shuffle: True (or ``"utterance"``): utterances in random order over the epoch, and frames in random order within
            each partition. ``"block"``: blocks of neighbours in the file in random order, which disks read faster, and
            frames in random order within each partition. ``"interleave"``: like that, and the utterances of all blocks of
            a partition in random order, too. False: all in file order, which is the order in which h5py lists them. A
            sequence of ids: these, in this order, frames in order. A mapping of ids to weights: as many as there are
            utterances are drawn, with replacement, and frames in random order within each partition.
        block_size: of those blocks.
        seed: of all random order, which depends on it, the epoch and the partition size alone. The default is the same
            everywhere.
        includes: ids to stream; unknown ones are ignored. Goes before ``excludes``. Empty means none.
        excludes: ids to leave out.
        prefetch: partitions that are read ahead; at least 1.
        rank: which share of the epoch is streamed here; by default the environment variable ``RANK``, or 0.
        world_size: into how many shares it is divided; by default ``WORLD_SIZE``, or 1. The order of the epoch does not
            depend on it: each rank goes through a part of the same order.
        even: as many items on every rank, known in advance by each without talking: ``"drop"`` leaves out what does not
            come out even, less than one item per rank, and ``"pad"`` repeats some of the first; None gives each what it has.
        unreadable: datasets that cannot be streamed and files that cannot be opened are errors (``"raise"``) or are
            left out and listed in ``skipped`` (``"skip"``).
        index: keep the catalog of each file for the next time (``"auto"``) or scan every time (``"off"``).

    Raises:
        ArgumentError: an argument has no meaning. What has to do with files is found when the feed opens.
    """

    def __init__(
        self,
        source: AnySource,
        *,
        memory_budget: int | str | MemoryBudget = "auto",
        shuffle: Shuffle = True,
        block_size: int | str = BLOCK_NBYTES,
        seed: int = 0,
        includes: Collection[str] | None = None,
        excludes: Collection[str] | None = None,
        prefetch: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        even: Even | None = None,
        unreadable: Literal["raise", "skip"] = "raise",
        index: Literal["auto", "off"] = "auto",
    ) -> None:
        self._settings = Settings.checked(
            source,
            memory_budget=memory_budget,
            shuffle=shuffle,
            block_size=block_size,
            seed=seed,
            includes=includes,
            excludes=excludes,
            prefetch=prefetch,
            rank=rank,
            world_size=world_size,
            even=even,
            unreadable=unreadable,
            index=index,
        )
        self._unopened(epoch=0)

    def _unopened(self, epoch: int) -> None:
        self._session: Session | None = None
        self._closed = False
        self._next_epoch = epoch
        self._resume: State | None = None
        self._opening, self._stop_opening = threading.Lock(), threading.Event()
        self._pid = os.getpid()

    # -- opening and closing -------------------------------------------------------------------------------------

    def open(self) -> Feed:
        """Read the metadata and resolve the budget, unless that is done. ``with`` and iteration do it by themselves.

        Raises:
            StorageError: a file is missing, damaged, locked; a dataset cannot be streamed; fields do not match.
            BudgetError: the memory that may be used does not suffice.
            ClosedError: the feed was closed.
        """
        self._opened()
        return self

    async def aopen(self) -> Feed:
        """Like `open`, in a thread, so that the event loop goes on meanwhile."""
        await self._opened_async()
        return self

    def close(self) -> None:
        """End the iteration that is under way, its thread, and let go of all memory that no view holds. Idempotent."""
        session = self._shut()
        if session is not None:
            session.close()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        session = self._shut()
        if session is not None:
            await session.aclose()

    def __enter__(self) -> Feed:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Feed:
        return await self.aopen()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def _opened(self) -> Session:
        self._check_usable()
        return self._open(threading.Event()) if self._session is None else self._session

    async def _opened_async(self) -> Session:
        self._check_usable()
        return await run_stoppable(self._open) if self._session is None else self._session

    def _open(self, stop: threading.Event) -> Session:
        """Open the feed in this thread; ``stop`` ends that early, and so does closing the feed."""
        with self._opening:
            self._stop_opening = stop
            session = self._session or Session(self._settings, stop)
            self._check_usable()  # it may have been closed meanwhile
            self._session = session
            return session

    def _check_usable(self) -> None:
        refuse_fork(self._pid, "feed")
        if self._closed:
            raise ClosedError("this feed is closed; make a new one, or pickle and unpickle it, to stream again")

    def _shut(self) -> Session | None:
        if os.getpid() != self._pid:
            return None  # the parent's, and not ours to close
        self._closed = True
        self._stop_opening.set()
        session, self._session = self._session, None
        return session

    # -- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Items[Triplet]:
        return iter(self.triplets())

    def __aiter__(self) -> AsyncItems[Triplet]:
        return aiter(self.triplets())

    def __len__(self) -> int:
        """Frames of an epoch on this rank."""
        return len(self.triplets())

    def triplets(self) -> Stream[Triplet]:
        """Single frames: ``(utt, index, frame)``, as from iterating over the feed itself. Never copies."""
        return Stream(self, partial(Triplets, shuffle=self._settings.order.shuffles))

    def utterances(self) -> Stream[tuple[str, Rows]]:
        """Whole utterances: ``(utt, array)``, with ``array`` of shape ``(length, *frame shape)``, or a dict of such.

        Never copies. Iterating raises `BudgetError` if an utterance is larger than a partition.
        """
        return Stream(self, partial(Utterances, shuffle=self._settings.order.shuffles))

    def batches(self, size: int, *, drop_last: bool = False) -> Stream[Batch]:
        """Single frames gathered into batches of exactly ``size``; the last one may be smaller, or is dropped.

        Always copies, once: ``batch.frames`` has the shape ``(size, *frame shape)``, or is a dict of such arrays.
        Iterating raises `ShapeError` if frames differ in shape or dtype.
        """
        if size < 1:
            raise ArgumentError(f"batches of {size} frames make no sense; give at least 1")
        return Stream(self, partial(Batches, size, drop_last, shuffle=self._settings.order.shuffles))

    def padded(
        self,
        *,
        max_frames: int | None = None,
        batch_size: int | None = None,
        buckets: Sequence[int] = (),
        pool: int = POOL,
        max_waste: float = MAX_WASTE,
        sort: bool = True,
        pad_value: float = 0,
    ) -> PaddedStream:
        """Batches of whole utterances of similar length, filled up to the longest: ``(utts, data, lengths)``.

        Always copies, once: ``batch.data`` has the shape ``(utterances, longest, *frame shape)``, or is a dict of such
        arrays. Iterating raises `BudgetError` if a batch is larger than a partition, and `ShapeError` if its frames differ
        in shape or dtype. The batches of an epoch are the same on any number of ranks, which take turns.

        Args:
            max_frames: of a batch, padding included. An utterance that has more is a batch of its own.
            batch_size: utterances of a batch, instead.
            buckets: upper bounds of lengths; utterances come together only with others of their bucket.
            pool: without buckets, so many utterances of the epoch's order are sorted by length together.
            max_waste: with ``max_frames``, the share of a batch that may be padding.
            sort: the longest utterance of a batch first, or as they come.
            pad_value: what is filled in.
        """
        grouping = Grouping.checked(max_frames, batch_size, buckets, pool, max_waste, sort)
        return PaddedStream(self, partial(Padded, grouping, pad_value, shuffle=self._settings.order.shuffles))

    def waste(self, form: Form[Any]) -> float:
        """For `PaddedStream`: the share of padding in the coming epoch."""
        plan = self._opened().plan(form.cut, self.epoch)
        assert plan.groups is not None, "planned with a grouping"
        return waste_of(plan.stops - plan.starts, plan.groups)

    def windows(self, length: int, hop: int | None = None, *, pad: bool = False) -> Stream[Window]:
        """``length`` consecutive frames of one utterance, every ``hop`` frames (by default, ``length``).

        Never copies, except windows that are padded. With ``pad``, the last window of an utterance is filled up with
        zeros so that every frame is in a window; without it, what does not fill a window is left out.
        """
        hop = length if hop is None else hop
        if length < 1 or hop < 1:
            raise ArgumentError(
                f"windows of length={length} every hop={hop} frames make no sense; both must be positive"
            )
        return Stream(self, partial(Windows, length, hop, pad, shuffle=self._settings.order.shuffles))

    def partitions(self) -> Stream[LoadedPartition]:
        """Whole partitions: what is in memory at a time, in utterance order. Never copies."""
        return Stream(self, partial(Partitions, shuffle=self._settings.order.shuffles))

    def start(self, form: Form[Any]) -> Prefetch:
        """For `Stream`: start the next epoch."""
        session = self._opened()
        return session.start(form, *self._take_epoch(form))

    async def start_async(self, form: Form[Any]) -> Prefetch:
        """For `Stream`: start the next epoch, without blocking the event loop."""
        session = await self._opened_async()
        return await session.start_async(form, *self._take_epoch(form))

    def count(self, form: Form[Any]) -> int:
        """For `Stream`: the items of an epoch in a form."""
        session = self._opened()
        return session.count(form, self.epoch, self._resume)

    # -- what there is to know -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated over, or else the one that the next iteration will be; from 0."""
        return self._next_epoch if self._session is None else self._session.epoch(self._next_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch the next iteration is."""
        if epoch < 0:
            raise ArgumentError(f"epoch={epoch} must be at least 0")
        self._next_epoch, self._resume = epoch, None
        if self._session is not None:
            self._session.forget_position()

    def _take_epoch(self, form: Form[Any]) -> tuple[int, State | None]:
        """The epoch that is iterated over next, and where in it to begin."""
        if self._resume is not None:
            self._resume.check_form(form.describe())
        epoch, resume = self._next_epoch, self._resume
        self._next_epoch, self._resume = epoch + 1, None
        return epoch, resume

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: a small dict that JSON takes. At any moment, also between two epochs.

        It counts what was handed out, and not what was read ahead. On several ranks, save it after the same number of steps
        on each; that of one rank then stands for all. Opens the feed, if it is not open.
        """
        return self._opened().state(self._next_epoch, self._resume).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved: the next iteration gives the very next item, and then the rest of its epoch.

        Only what is needed for that is read. Partitions get the size they had. The number of ranks may be another one: what
        was left of the epoch on all ranks is divided anew between those that there are now, each frame once. Opens the
        feed, if it is not open.

        Raises:
            StateError: the state is none, or belongs to other data, another seed or order; the message says what differs.
                Iterating raises it if the form is another one.
            BudgetError: partitions of that size do not fit into the memory that may be used.
        """
        wanted, session = State.from_dict(state), self._opened()
        session.state(self._next_epoch, None).check(wanted)
        session.use_partition_nbytes(wanted.partition_nbytes)
        session.forget_position()
        self._next_epoch, self._resume = wanted.epoch, wanted if wanted.stages else None

    @property
    def num_utterances(self) -> int:
        """Utterances of an epoch on this rank, those without frames included."""
        return self.count(Utterances(shuffle=self._settings.order.shuffles))

    @property
    def nbytes(self) -> int:
        """Bytes of all utterances of all ranks, in memory."""
        return int(self._library.corpus.nbytes.sum())

    @property
    def plan(self) -> Plan:
        """The plan of the epoch (see ``epoch``) for triplets. Windows and whole utterances may divide it elsewhere."""
        return self._opened().plan(Triplets(shuffle=self._settings.order.shuffles).cut, self.epoch)

    @property
    def budget(self) -> Budget:
        """What was measured, what is taken, and why."""
        return self._opened().budget

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was left out: with a reason, and what to do about it."""
        return self._library.skipped

    def statistics(self) -> Statistics:
        """What happened since the feed was opened; a snapshot."""
        return dataclasses.replace(self._opened().statistics)

    @property
    def _library(self) -> Library:
        return self._opened().library

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not open" if self._session is None else f"epoch {self.epoch}"
        return f"Feed({self._settings.source!r}, {state})"

    # -- several processes ---------------------------------------------------------------------------------------

    def part(self, index: int, count: int, *, ranks: tuple[int, int] | None = None) -> Feed:
        """A new feed for one of ``count`` workers that divide between them what this rank streams, and its memory.

        Workers are to a rank what ranks are to the epoch: each goes through a part of the rank's order. Workers that take
        turns hand out whole utterances and padded batches in the order in which this feed has them. It begins with the
        epoch that is next here, from its start.

        Args:
            index: which part, from 0.
            count: how many there are.
            ranks: ``(rank, world_size)`` to use, unless this feed was made with ``rank=`` and ``world_size=``.

        Raises:
            UsageError: this is a forked child, and the source an h5py handle that its parent opened.
        """
        if os.getpid() != self._pid and holds_handle(self._settings.source):
            raise UsageError(
                "a worker cannot read through an open h5py handle: give the feed the path of the file instead"
            )
        feed = Feed.__new__(Feed)
        feed._settings = self._settings.part(index, count, ranks)
        feed._unopened(self._next_epoch)
        return feed

    # -- pickling ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if holds_handle(self._settings.source):
            raise UsageError("a feed over an open h5py handle cannot be pickled: give it the path of the file instead")
        return {"settings": self._settings, "epoch": self.epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings = state["settings"]
        self._unopened(state["epoch"])
