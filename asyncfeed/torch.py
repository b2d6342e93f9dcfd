"""Feeds for torch: `FeedDataset` hands out tensors, alone or in the workers of a ``DataLoader``.

Needs the extra ``torch``. Nothing else in asyncfeed imports it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

try:
    import torch
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise ImportError('asyncfeed.torch needs torch: pip install "asyncfeed[torch]"') from missing
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, get_worker_info

from asyncfeed.engine.batches import Batch, PaddedBatch
from asyncfeed.engine.forms import Window
from asyncfeed.engine.loaded import LoadedPartition
from asyncfeed.epochs import Epochs, Party, Turn
from asyncfeed.errors import ArgumentError
from asyncfeed.feed import Feed
from asyncfeed.stream import Stream

__all__ = ["FeedDataset", "TensorPartition", "to_tensors"]


class TensorPartition(NamedTuple):
    """What is in memory together, as tensors."""

    utts: list[str]
    frames: Tensor | dict[str, Tensor]
    """All frames of all utterances, ``(frames, *frame shape)``; a view, or one view per field."""
    starts: Tensor
    """First frame of every utterance; 0 unless it was cut because it is larger than a partition."""
    lengths: Tensor
    """Frames of every utterance."""


def to_tensors(item: Any) -> Any:
    """What a feed hands out, with tensors in place of arrays: views of the same memory, which they keep as arrays do.

    Arrays in a foreign byte order, which torch does not know, are copied. Triplets and utterances stay tuples, `Batch`,
    `PaddedBatch` and `Window` stay what they are, and a `LoadedPartition` becomes a `TensorPartition`.

    Raises:
        ArgumentError: it is none of these.
        ShapeError: the utterances of a partition differ in frame shape or dtype.
        TypeError: torch has no such dtype.
    """
    if type(item) is tuple:  # first, as there are so many
        return (*item[:-1], _tensors(item[-1]))
    if isinstance(item, Batch):
        return Batch(item.utts, _tensor(item.indices), _tensors(item.frames))
    if isinstance(item, PaddedBatch):
        return PaddedBatch(item.utts, _tensors(item.data), _tensor(item.lengths))
    if isinstance(item, Window):
        return Window(item.utt, item.start, item.length, _tensors(item.frames))
    if isinstance(item, LoadedPartition):
        own = _tensor(item.starts.copy()), _tensor(item.lengths.copy())  # the plan's, which nobody may write to
        return TensorPartition(list(item.ids), _tensors(item.frames), *own)
    raise ArgumentError(f"a {type(item).__name__} is nothing that a feed hands out")


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensor(array) for name, array in value.items()}
    return _tensor(value)


def _tensor(array: Any) -> Tensor:
    if not isinstance(array, np.ndarray):  # a single number, of data that has no further axes
        array = np.array(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


class _Position(Enum):
    """Where the iteration in this process is."""

    NEXT = auto()
    """Before the epoch that is next."""
    WITHIN = auto()
    """In an epoch, or where a loop left it."""
    FINISHED = auto()
    """In a worker, at the end of an epoch that others may not have finished."""
    LOADED = auto()
    """In a worker, where its state says, within an epoch."""
    LOADED_FINISHED = auto()
    """In a worker, where its state says, at the end of an epoch."""


class FeedDataset(IterableDataset):
    """Iterates over a feed and hands out tensors; each iteration is one epoch, each time the next.

        feed = asyncfeed.Feed("feats.h5", even="drop")
        dataset = FeedDataset(feed.padded(max_frames=6000))
        loader = DataLoader(dataset, batch_size=None, num_workers=2)

    In this process tensors are views of the feed's shared memory, except where the form copies. From a worker, the loader
    sends copies. Give ``batch_size=None`` to the loader where the form makes batches, or else a ``batch_size``, which the
    loader gathers: a single frame is too little to send.

    ``N`` ranks with ``W`` workers each divide the epoch between all ``N * W`` of them; ``even=`` of the feed makes the
    counts of all equal. A rank's workers together stream what the rank streams without workers; whole utterances and
    padded batches even in the same order. Each worker reads ahead by itself, in an equal part of the memory budget.

    The feed itself is neither opened nor iterated over: its settings are what counts. The data set can be pickled, forked
    and spawned, also after it was iterated over.

    Args:
        source: a feed, for triplets, or one of its forms: ``feed.utterances()``, ``feed.batches(256)``,
            ``feed.padded(...)``, ``feed.windows(...)``, ``feed.partitions()``.
        num_workers: that of the loader. Only ``len`` needs it, and only if the feed is ``even`` or the form is
            ``batches``, where the number of items depends on it.

    The rank is that which the feed was given; or else that of ``torch.distributed``, if it is initialised by now; or else
    that of the environment, ``RANK`` and ``WORLD_SIZE``.

    Raises:
        ArgumentError: the source is neither a feed nor a form of one.
    """

    def __init__(self, source: Feed | Stream[Any], *, num_workers: int = 0) -> None:
        super().__init__()
        stream = source.triplets() if isinstance(source, Feed) else source
        if not isinstance(stream, Stream) or not isinstance(stream.host, Feed):
            raise ArgumentError(
                f"a {type(source).__name__} cannot be iterated over as tensors; pass a Feed, or a form of one, such as "
                f"feed.utterances()"
            )
        if num_workers < 0:
            raise ArgumentError(f"num_workers={num_workers} must be at least 0")
        self.num_workers = num_workers
        self._stream, self._source = stream, stream.host
        self._ranks = _distributed_ranks()
        self._epochs = Epochs(stream.host.epoch)
        self._begin_here()

    def _begin_here(self) -> None:
        """Nothing was iterated over in this process yet."""
        self._pid = os.getpid()
        self._feed: Feed | None = None
        self._turns = 0
        self._position = _Position.NEXT

    # -- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """One epoch. In a worker it begins now, in all of them; else when its first item is asked for."""
        feed = self._own_feed()
        if get_worker_info() is None:
            return self._items(feed)
        self._turns += 1
        self._begin_in_worker(feed)
        return self._items_in_worker(feed)

    def _items(self, feed: Feed) -> Iterator[Any]:
        _place(feed, self._epochs.begin(os.getpid()))
        self._position = _Position.WITHIN
        yield from map(to_tensors, self._stream.over(feed))
        self._position = _Position.NEXT

    def _items_in_worker(self, feed: Feed) -> Iterator[Any]:
        if self._position is not _Position.FINISHED:
            yield from map(_to_shared_tensors, self._stream.over(feed))
            self._position = _Position.FINISHED

    def _begin_in_worker(self, feed: Feed) -> None:
        """Take the epoch that all workers of this iteration take, unless this one was told where to go on."""
        if self._position is _Position.LOADED:
            self._position = _Position.WITHIN
        elif self._position is _Position.LOADED_FINISHED:
            self._position = _Position.FINISHED
        else:
            info = get_worker_info()
            party = Party((info.seed - info.id, self._turns, info.num_workers), info.id)
            _place(feed, self._epochs.begin(_main_pid(), party))
            self._position = _Position.WITHIN

    def __len__(self) -> int:
        """Items of the coming epoch on this rank, of all workers together. Opens the feed."""
        if self.num_workers < 2:
            feed = self._own_feed()
            if self._position is _Position.NEXT:
                _place(feed, self._epochs.next(_main_pid()))
            return len(self._stream.over(feed))
        return sum(map(self._count_part, range(self.num_workers)))

    def _count_part(self, worker: int) -> int:
        with self._source.part(worker, self.num_workers, ranks=self._ranks) as feed:
            _place(feed, self._epochs.next(_main_pid()))
            return len(self._stream.over(feed))

    # -- epochs and positions ------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return self._epochs.next(_main_pid()).epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch the next iteration is, in all workers. Call it in the main process, between iterations."""
        if epoch < 0:
            raise ArgumentError(f"epoch={epoch} must be at least 0")
        self._epochs.set(_main_pid(), epoch)
        self._position = _Position.NEXT

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, as `Feed.state_dict` says it: a small dict that JSON takes. Opens the feed.

        In the main process it is the position of a loop over the data set itself, or over a loader without workers, and a
        feed takes it, too. Workers have positions of their own, which ``StatefulDataLoader`` of torchdata asks them for.
        """
        feed = self._own_feed()
        if get_worker_info() is not None:
            return {**feed.state_dict(), "finished": self._position is _Position.FINISHED}
        if self._position is _Position.NEXT:
            _place(feed, self._epochs.next(os.getpid()))
        return feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved: the next iteration gives the very next item, and then the rest of its epoch.

        The state of a loop without workers may be gone on with by workers: what was left is divided between them.

        Raises:
            StateError, BudgetError: as `Feed.load_state_dict`.
        """
        values, feed = dict(state), self._own_feed()
        finished = values.pop("finished", False)
        feed.load_state_dict(values)
        if get_worker_info() is None:
            self._epochs.set(os.getpid(), values["epoch"], values)
            self._position = _Position.NEXT
        else:
            # A worker that had finished its part waits for the others, and what it is at is the epoch after.
            self._epochs.set(_main_pid(), values["epoch"] if finished else values["epoch"] + 1)
            self._position = _Position.LOADED_FINISHED if finished else _Position.LOADED

    # -- processes -----------------------------------------------------------------------------------------------

    def _own_feed(self) -> Feed:
        """The feed of this process, which is made here: a worker has its share, and inherits nothing."""
        if self._pid != os.getpid():
            self._begin_here()
        if self._feed is None:
            info = get_worker_info()
            worker, count = (0, 1) if info is None else (info.id, info.num_workers)
            self._feed = self._source.part(worker, count, ranks=self._ranks)
        return self._feed

    def close(self) -> None:
        """End the iteration that is under way here, and let go of its memory. Iterating opens all of it again."""
        feed, self._feed = (self._own_feed() if self._feed is not None else None), None
        if feed is not None:
            feed.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "stream": self._stream,
            "ranks": self._ranks,
            "num_workers": self.num_workers,
            "epochs": self._epochs,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._stream, self._ranks, self.num_workers = state["stream"], state["ranks"], state["num_workers"]
        self._source, self._epochs = state["source"], state["epochs"]
        self._begin_here()

    def __repr__(self) -> str:
        return f"FeedDataset({self._source!r})"


def _place(feed: Feed, turn: Turn) -> None:
    """Have a feed iterate over this next."""
    if turn.state is None:
        feed.set_epoch(turn.epoch)
    else:
        feed.load_state_dict(turn.state)


def _to_shared_tensors(item: Any) -> Any:
    """As `to_tensors`, ready for being sent to another process.

    A partition is copied at once, into memory that torch shares. The queue would do that later, in a thread of its own, and
    keep so many segments meanwhile that the reader had none left. It copies all else soon enough.
    """
    tensors = to_tensors(item)
    if isinstance(tensors, TensorPartition):
        frames = tensors.frames
        for each in frames.values() if isinstance(frames, dict) else (frames,):
            each.share_memory_()
    return tensors


def _main_pid() -> int:
    """The process that has the data loader."""
    parent = multiprocessing.parent_process() if get_worker_info() is not None else None
    return os.getpid() if parent is None or parent.pid is None else parent.pid


def _distributed_ranks() -> tuple[int, int] | None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()
