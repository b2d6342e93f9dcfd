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
from asyncfeed.errors import ArgumentError, ShapeError
from asyncfeed.planning.passage import Passage
from asyncfeed.planning.plan import Cut

__all__ = [
    "Batch",
    "Batches",
    "Block",
    "Form",
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
Kinds: TypeAlias = list[tuple[np.dtype[Any], tuple[int, ...]]]

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


class _Frames(NamedTuple):
    """Some frames of a partition."""

    utts: list[str]
    indices: NDArray[np.int64]
    """Their numbers in their utterances."""
    rows: NDArray[Any]
    """Where they are in the partition."""
    owners: NDArray[Any]
    """Which of the partition's utterances each is of."""


class _Lookup:
    """Says which frames are at some places in the order of a partition, and whose they are."""

    def __init__(self, partition: LoadedPartition, *, shuffled: bool) -> None:
        self.partition, self.shuffled = partition, shuffled
        self.ids = np.array(partition.ids, object)
        self.ends = np.cumsum(partition.lengths)
        self.to_index: NDArray[np.int64] = partition.starts - (self.ends - partition.lengths)

    def __call__(self, start: int, stop: int) -> _Frames:
        if self.shuffled:
            return self._found(self.partition.order[start:stop], self.partition.owners[start:stop])
        rows = np.arange(start, stop)
        return self._found(rows, np.searchsorted(self.ends, rows, side="right"))

    def _found(self, rows: NDArray[Any], owners: NDArray[Any]) -> _Frames:
        return _Frames(self.ids.take(owners).tolist(), self.to_index.take(owners) + rows, rows, owners)


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
        look_up, done = _Lookup(partition, shuffled=True), partition.first_unit
        total = min(partition.order.size, partition.stop_unit)
        while done < total:
            found = look_up(done, min(done + pace.size, total))
            left = iter(found.utts)
            items = zip(left, found.indices.tolist(), _frames_at(partition, found), strict=False)
            yield Block(items, len(found.utts), left)
            done += len(found.utts)


def _all_frames(partition: LoadedPartition, first: int) -> Iterator[Any]:
    """Every frame of a partition from ``first`` on, in order."""
    columns: list[Iterator[Any]] = []
    for field in partition.fields:
        rows = field.rows
        columns.append(
            iter(rows[first:]) if rows is not None else islice(chain.from_iterable(field.arrays), first, None)
        )
    return _named(partition, columns)


def _named(partition: LoadedPartition, columns: list[Iterator[Any]]) -> Iterator[Any]:
    """Iterate over one field as it is, over several as dicts."""
    if partition.names is None:
        return columns[0]
    return map(dict, map(zip, repeat(partition.names), zip(*columns, strict=False)))


def _frames_at(partition: LoadedPartition, found: _Frames) -> Iterator[Any]:
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
    return _named(partition, columns)


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

    @property
    def cut(self) -> Cut:
        return Cut()

    def describe(self) -> dict[str, Any]:
        return {"form": "partitions"}

    def units(self, items: int) -> int:
        raise TypeError("partitions have no common size")

    def items(self, units: int) -> int:
        raise TypeError("how many partitions there are is in feed.plan")

    def after(self, passage: Passage, items: int) -> Passage:
        return passage.pieces(items)

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


class Batch(NamedTuple):
    """Frames gathered into one array."""

    utts: list[str]
    """The utterance of every frame."""
    indices: NDArray[np.int64]
    """Its number in that utterance."""
    frames: Rows
    """``(batch size, *frame shape)``; always a copy of its own, that may be kept."""


class _Gathering:
    """A batch in the making, for as long as partitions end within it."""

    def __init__(self, size: int, columns: list[Array]) -> None:
        self.utts: list[str] = []
        self.indices = np.empty(size, np.int64)
        self.columns = [np.empty((size, *rows.shape[1:]), rows.dtype) for rows in columns]

    def add(self, found: _Frames, columns: list[Array]) -> None:
        span = slice(len(self.utts), len(self.utts) + len(found.utts))
        self.indices[span] = found.indices
        for mine, column in zip(self.columns, columns, strict=True):
            mine[span] = column[found.rows]
        self.utts += found.utts

    def batch(self, names: tuple[str, ...] | None) -> Batch:
        filled = len(self.utts)
        columns = [column[:filled] for column in self.columns]
        return _batch(self.utts, self.indices[:filled], columns, names)


class Batches(Form[Batch]):
    """`Batch` after `Batch` of exactly ``size`` frames, over the ends of partitions; only the last may be smaller."""

    def __init__(self, size: int, drop_last: bool, *, shuffle: bool) -> None:
        super().__init__(shuffle=shuffle)
        if size < 1:
            raise ArgumentError(f"batches of {size} frames make no sense; give at least 1")
        self.size, self.drop_last = size, drop_last
        self._gathering: _Gathering | None = None
        self._names: tuple[str, ...] | None = None
        self._like: tuple[str, Kinds] | None = None

    @property
    def cut(self) -> Cut:
        return Cut(unit_nbytes=TABLES_NBYTES if self.shuffle else 0)

    def describe(self) -> dict[str, Any]:
        return {"form": "batches", "size": self.size, "drop_last": self.drop_last}

    def units(self, items: int) -> int:
        return items * self.size

    def items(self, units: int) -> int:
        return units // self.size if self.drop_last else -(-units // self.size)

    def blocks(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[Batch]]:
        total, done = min(partition.num_frames, partition.stop_unit), partition.first_unit
        if done >= total:
            return
        columns = [partition.uniform(field) for field in partition.fields]
        self._check(partition, columns)
        look_up = _Lookup(partition, shuffled=self.shuffle)
        while done < total:
            if self._gathering is None and total - done >= self.size:
                num_batches = min((total - done) // self.size, max(pace.size // self.size, 1))
                stop = done + num_batches * self.size
                yield self._whole(look_up(done, stop), columns, partition.names)
            else:
                gathering = self._gathering = self._gathering or _Gathering(self.size, columns)
                stop = min(done + self.size - len(gathering.utts), total)
                gathering.add(look_up(done, stop), columns)
                if len(gathering.utts) == self.size:
                    self._gathering = None
                    yield _one(gathering.batch(partition.names))
            done = stop

    def _whole(self, found: _Frames, columns: list[Array], names: tuple[str, ...] | None) -> Block[Batch]:
        """Batches that one partition fills. What can be looked up for many at once has been.

        Not a generator, which a second consumer could not enter while the first is in it.
        """

        def gather(start: int) -> Batch:
            span = slice(start, start + self.size)
            rows = found.rows[span]
            # clip: without looking for indices that are out of bounds, which ours are not
            gathered = [column.take(rows, axis=0, mode="clip") for column in columns]
            return _batch(found.utts[span], found.indices[span], gathered, names)

        starts = range(0, len(found.utts), self.size)
        left = iter(starts)
        return Block(map(gather, left), len(starts), left)

    def rest(self) -> Iterator[Block[Batch]]:
        gathering, self._gathering = self._gathering, None
        if gathering is not None and not self.drop_last:
            yield _one(gathering.batch(self._names))

    def _check(self, partition: LoadedPartition, columns: list[Array]) -> None:
        """Raise `ShapeError` if frames of this partition do not fit those of the ones before."""
        self._names = partition.names
        kinds = [(rows.dtype, rows.shape[1:]) for rows in columns]
        if self._like is None:
            self._like = (partition.ids[partition.first], kinds)
        elif self._like[1] != kinds:
            raise ShapeError(
                f"utterance {partition.ids[partition.first]!r} has frames of {_show(kinds)}, but {self._like[0]!r} has "
                f"{_show(self._like[1])}; one batch cannot hold both: leave one sort out with excludes="
            )


def _one(batch: Batch) -> Block[Batch]:
    left = iter([batch])
    return Block(left, 1, left)


def _batch(utts: list[str], indices: NDArray[np.int64], columns: list[Array], names: tuple[str, ...] | None) -> Batch:
    return Batch(utts, indices, columns[0] if names is None else dict(zip(names, columns, strict=True)))


def _show(kinds: Kinds) -> str:
    return " and ".join(f"{dtype} {shape}" for dtype, shape in kinds)
