"""What a loaded partition is taken apart into: triplets, utterances, batches, windows, or nothing.

A form turns each partition into *blocks*, iterators over items whose steps run in C: between two frames there is no
Python code but the consumer's own. ``pace.size`` says how many items the next block may have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain, islice, repeat
from operator import getitem, length_hint
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncfeed.engine.loaded import Array, LoadedPartition, Rows
from asyncfeed.errors import ArgumentError
from asyncfeed.planning.passage import UNKNOWN, Passage
from asyncfeed.planning.plan import Cut

__all__ = [
    "Block",
    "Form",
    "Frames",
    "Lookup",
    "Pace",
    "Partitions",
    "Triplet",
    "Triplets",
    "Utterances",
    "Window",
    "Windows",
]

Item = TypeVar("Item")
Triplet: TypeAlias = tuple[str, int, Any]

TABLES_NBYTES = 12
"""Per unit of a shuffled partition: its place in the order, its owner, and room to make the two, int32 each."""


class Pace:
    """How many items a block has: as many as a loop gets through in a few milliseconds.

    After each block an event loop gets its turn, so blocks must not last; yet each costs some microseconds to make.
    """

    SMALLEST, LARGEST = 16, 8192
    SHORT, LONG = 0.004, 0.010
    """Seconds: blocks that last less are doubled, those that last longer are halved."""

    __slots__ = ("size",)

    def __init__(self, size: int = 256) -> None:
        self.size = size

    def lasted(self, seconds: float) -> None:
        """Adapt to how long the last block took."""
        if seconds < self.SHORT:
            self.size = min(self.size * 2, self.LARGEST)
        elif seconds > self.LONG:
            self.size = max(self.size // 2, self.SMALLEST)


class Block(Generic[Item]):
    """Some items, and how many of them have been handed out: counted by a list iterator that they pull along, in C."""

    __slots__ = ("_items", "_left", "num_items")

    def __init__(self, items: Iterator[Item], num_items: int, left: object) -> None:
        self._items: Iterator[Item] | None = items
        self.num_items, self._left = num_items, left

    def take(self) -> Iterator[Item]:
        """The items, once: they refer to the partition, which must not be kept by whoever counts."""
        items, self._items = self._items, None
        assert items is not None, "a block is handed out once"
        return items

    @property
    def handed_out(self) -> int:
        """Items that a consumer has got."""
        return self.num_items - length_hint(self._left)


class Form(ABC, Generic[Item]):
    """One way to iterate over a feed. Holds the state of one epoch: how much of it has been handed out, and what more there
    is."""

    divisible = True
    """Whether its items are so small that all ranks can have as many."""

    def __init__(self, *, shuffle: bool) -> None:
        self.shuffle = shuffle
        self.finished = False
        """Whether the consumer knows that there is no more."""
        self._before = 0
        self._block: Block[Item] | None = None

    @property
    def handed_out(self) -> int:
        """Items of this epoch that the consumer has got, here or before the epoch was resumed here."""
        return self._before + (self._block.handed_out if self._block is not None else 0)

    def resume(self, items: int) -> None:
        """So many items were handed out before."""
        self._before = items

    def enter(self, block: Block[Item]) -> Iterator[Item]:
        """The items of the next block, which is about to be handed out."""
        if self._block is not None:
            self._before += self._block.num_items
        self._block = block
        return block.take()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What has to be the same for a position in it to mean the same."""

    def units(self, items: int) -> int:
        """The units that so many items take."""
        return items

    def items(self, units: int) -> int:
        """The items that so many units give."""
        return units

    def after(self, passage: Passage, items: int) -> Passage:
        """What is left of a passage when so many items have been handed out."""
        return passage.between(self.units(items), passage.num_units)

    @property
    @abstractmethod
    def cut(self) -> Cut:
        """How utterances may be taken apart."""

    @abstractmethod
    def blocks(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[Item]]:
        """The items of a partition, from its first unit on until its last. Keeps no reference to it afterwards."""

    def rest(self) -> Iterator[Block[Item]]:
        """What is left after the last partition."""
        return iter(())


class Frames(NamedTuple):
    """Some frames of a partition."""

    utts: NDArray[Any]
    """The id of each one's utterance."""
    indices: NDArray[np.int64]
    """Their numbers in their utterances."""
    rows: NDArray[Any]
    """Where they are in the partition."""
    owners: NDArray[Any]
    """Which of the partition's utterances each is of."""


class Lookup:
    """Says which frames are at some places in the order of a partition, and whose they are."""

    def __init__(self, partition: LoadedPartition, *, shuffled: bool) -> None:
        self.partition, self.shuffled = partition, shuffled
        self.ids = np.array(partition.ids, object)
        self.ends = np.cumsum(partition.lengths)
        self.to_index: NDArray[np.int64] = partition.starts - (self.ends - partition.lengths)

    def __call__(self, start: int, stop: int) -> Frames:
        if self.shuffled:
            return self._found(self.partition.order[start:stop], self.partition.owners[start:stop])
        rows = np.arange(start, stop)
        return self._found(rows, np.searchsorted(self.ends, rows, side="right"))

    def _found(self, rows: NDArray[Any], owners: NDArray[Any]) -> Frames:
        return Frames(self.ids.take(owners), self.to_index.take(owners) + rows, rows, owners)


class Triplets(Form[Triplet]):
    """``(utt, index, frame)``: the id, the number of the frame in its utterance, and a view of it."""

    @property
    def cut(self) -> Cut:
        return Cut(unit_nbytes=TABLES_NBYTES if self.shuffle else 0)

    def describe(self) -> dict[str, Any]:
        return {"form": "triplets"}

    def blocks(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[Triplet]]:
        return self._shuffled(partition, pace) if self.shuffle else self._in_order(partition, pace)

    def _in_order(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[Triplet]]:
        lengths, starts = partition.lengths.tolist(), partition.starts.tolist()
        stops = map(int.__add__, starts, lengths)
        done, total = partition.first_unit, min(partition.num_frames, partition.stop_unit)
        utts = islice(chain.from_iterable(map(repeat, partition.ids, lengths)), done, None)
        indices = islice(chain.from_iterable(map(range, starts, stops)), done, None)
        frames = _all_frames(partition, done)
        while done < total:
            block = list(islice(utts, min(pace.size, total - done)))
            left = iter(block)
            yield Block(zip(left, indices, frames, strict=False), len(block), left)
            done += len(block)

    def _shuffled(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[Triplet]]:
        look_up, done = Lookup(partition, shuffled=True), partition.first_unit
        total = min(partition.order.size, partition.stop_unit)
        while done < total:
            found = look_up(done, min(done + pace.size, total))
            left = iter(found.utts.tolist())
            items = zip(left, found.indices.tolist(), _frames_at(partition, found), strict=False)
            yield Block(items, found.rows.size, left)
            done += found.rows.size


def _all_frames(partition: LoadedPartition, first: int) -> Iterator[Any]:
    """Every frame of a partition from ``first`` on, in order."""
    columns: list[Iterator[Any]] = []
    for field in partition.fields:
        rows = field.rows
        columns.append(
            iter(rows[first:]) if rows is not None else islice(chain.from_iterable(field.arrays), first, None)
        )
    return _with_names(partition.names, columns)


def _with_names(names: tuple[str, ...] | None, columns: list[Iterator[Any]]) -> Iterator[Any]:
    """Iterate over one field as it is, over several as dicts."""
    if names is None:
        return columns[0]
    return map(dict, map(zip, repeat(names), zip(*columns, strict=False)))


def _frames_at(partition: LoadedPartition, found: Frames) -> Iterator[Any]:
    """The frames themselves, whether the utterances of a field are alike or not."""
    listed = found.rows.tolist()
    columns: list[Iterator[Any]] = []
    for field in partition.fields:
        rows = field.rows
        if rows is not None:
            columns.append(map(getitem, repeat(rows), listed))  # 20 ns less than rows.__getitem__
        else:
            arrays = map(field.arrays.__getitem__, found.owners.tolist())
            inside = found.indices - partition.starts.take(found.owners)
            columns.append(map(getitem, arrays, inside.tolist()))
    return _with_names(partition.names, columns)


class Utterances(Form[tuple[str, Rows]]):
    """``(utt, array)``: whole utterances."""

    @property
    def cut(self) -> Cut:
        return Cut(whole=True)

    def describe(self) -> dict[str, Any]:
        return {"form": "utterances"}

    def blocks(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[tuple[str, Rows]]]:
        done, total = partition.first_unit, min(len(partition), partition.stop_unit)
        arrays = islice(partition.arrays, done, None)
        while done < total:
            utts = partition.ids[done : min(done + pace.size, total)]
            left = iter(utts)
            yield Block(zip(left, arrays, strict=False), len(utts), left)
            done += len(utts)


class Partitions(Form[LoadedPartition]):
    """Whole partitions, as they are."""

    divisible = False

    @property
    def cut(self) -> Cut:
        return Cut()

    def describe(self) -> dict[str, Any]:
        return {"form": "partitions"}

    def units(self, items: int) -> int:
        return UNKNOWN

    def items(self, units: int) -> int:
        raise TypeError("how many partitions there are is in feed.plan")

    def after(self, passage: Passage, items: int) -> Passage:
        return passage.at(slice(items, None))

    def blocks(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[LoadedPartition]]:
        left = iter([partition])
        yield Block(left, 1, left)


class Window(NamedTuple):
    """Consecutive frames of one utterance."""

    utt: str
    start: int
    """Number of the first frame in its utterance."""
    length: int
    """Frames that are real; less than ``len(frames)`` if the end of the utterance was padded with zeros."""
    frames: Rows
    """``(window length, *frame shape)``; a view, or a copy if it was padded."""


class Windows(Form[Window]):
    """`Window` after `Window`: ``length`` frames, every ``hop`` frames, shuffled within the partition or in order.

    Without ``pad`` only complete windows count. With it, the last window of an utterance is filled up with zeros, so
    that every frame is in some window.
    """

    def __init__(self, length: int, hop: int | None, pad: bool, *, shuffle: bool) -> None:
        super().__init__(shuffle=shuffle)
        hop = length if hop is None else hop
        if length < 1 or hop < 1:
            raise ArgumentError(
                f"windows of length={length} every hop={hop} frames make no sense; both must be positive"
            )
        self.length, self.hop, self.pad = length, hop, pad

    @property
    def cut(self) -> Cut:
        return Cut(self.length, self.hop, self.pad, unit_nbytes=TABLES_NBYTES if self.shuffle else 0)

    def describe(self) -> dict[str, Any]:
        return {"form": "windows", "length": self.length, "hop": self.hop, "pad": self.pad}

    def blocks(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[Window]]:
        counts = self.cut.count(partition.lengths)
        first = np.cumsum(counts) - counts  # number of every utterance's first window
        total, done = min(int(counts.sum()), partition.stop_unit), partition.first_unit
        owner_of = partition.owners if self.shuffle else np.repeat(np.arange(counts.size), counts)
        while done < total:
            stop = min(done + pace.size, total)
            units = partition.order[done:stop] if self.shuffle else np.arange(done, stop)
            owners = owner_of[done:stop]
            starts = (units - first[owners]) * self.hop
            left = iter(owners.tolist())
            yield Block(map(self._window, repeat(partition), left, starts.tolist()), stop - done, left)
            done = stop

    def _window(self, partition: LoadedPartition, owner: int, start: int) -> Window:
        length = min(self.length, int(partition.lengths[owner]) - start)
        columns = [self._padded(field.arrays[owner][start : start + length]) for field in partition.fields]
        frames = columns[0] if partition.names is None else dict(zip(partition.names, columns, strict=True))
        return Window(partition.ids[owner], int(partition.starts[owner]) + start, length, frames)

    def _padded(self, frames: Array) -> Array:
        if len(frames) == self.length:
            return frames
        padded = np.zeros((self.length, *frames.shape[1:]), frames.dtype)
        padded[: len(frames)] = frames
        return padded
