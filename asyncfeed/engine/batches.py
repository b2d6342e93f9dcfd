"""Frames, or whole utterances, gathered into arrays of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncfeed.engine.forms import TABLES_NBYTES, Block, Form, Frames, Lookup, Pace
from asyncfeed.engine.loaded import Array, LoadedPartition, Rows
from asyncfeed.errors import ArgumentError, ShapeError
from asyncfeed.planning.grouping import Grouping
from asyncfeed.planning.plan import Cut

__all__ = ["Batch", "Batches", "Padded", "PaddedBatch"]

Kinds: TypeAlias = list[tuple[np.dtype[Any], tuple[int, ...]]]


class PaddedBatch(NamedTuple):
    """Whole utterances of similar length, filled up to the longest."""

    utts: list[str]
    data: Rows
    """``(utterances, longest, *frame shape)``; always a copy of its own, that may be kept."""
    lengths: NDArray[np.int64]
    """Frames of every utterance (of its first field) that are real."""


class Padded(Form[PaddedBatch]):
    """`PaddedBatch` after `PaddedBatch`, of whole utterances as a `Grouping` puts them together."""

    def __init__(self, grouping: Grouping, pad_value: float, *, shuffle: bool) -> None:
        super().__init__(shuffle=shuffle)
        self.grouping, self.pad_value = grouping, pad_value

    @property
    def cut(self) -> Cut:
        return Cut(whole=True, grouping=self.grouping)

    def describe(self) -> dict[str, Any]:
        return {"form": "padded", **asdict(self.grouping), "buckets": list(self.grouping.buckets)}

    def blocks(self, partition: LoadedPartition, pace: Pace) -> Iterator[Block[PaddedBatch]]:
        assert partition.groups is not None, "planned with a grouping"
        edges = partition.groups[partition.first_unit : partition.stop_unit + 1].tolist()
        left = iter(edges[:-1])
        items = map(self._gather, repeat(partition), left, edges[1:])
        yield Block(items, len(edges) - 1, left)

    def _gather(self, partition: LoadedPartition, first: int, last: int) -> PaddedBatch:
        columns = [self._fill(field.arrays[first:last], partition.ids[first:last]) for field in partition.fields]
        data = columns[0] if partition.names is None else dict(zip(partition.names, columns, strict=True))
        return PaddedBatch(partition.ids[first:last], data, partition.lengths[first:last].copy())

    def _fill(self, arrays: list[Array], utts: list[str]) -> Array:
        """One array of several, filled up with the pad value."""
        like = next((array for array in arrays if len(array)), arrays[0])
        longest = max(map(len, arrays))
        filled = np.full((len(arrays), longest, *like.shape[1:]), self.pad_value, like.dtype)
        for row, utt, array in zip(filled, utts, arrays, strict=True):
            if len(array) and (array.dtype, array.shape[1:]) != (like.dtype, like.shape[1:]):
                raise ShapeError(
                    f"utterance {utt!r} has frames of {array.dtype} {array.shape[1:]}, and another one of its batch of "
                    f"{like.dtype} {like.shape[1:]}; one batch cannot hold both: leave one sort out with excludes="
                )
            row[: len(array)] = array
        return filled


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

    def add(self, found: Frames, columns: list[Array]) -> None:
        span = slice(len(self.utts), len(self.utts) + found.rows.size)
        self.indices[span] = found.indices
        for mine, column in zip(self.columns, columns, strict=True):
            mine[span] = column[found.rows]
        self.utts += found.utts.tolist()

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
        look_up = Lookup(partition, shuffled=self.shuffle)
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

    def _whole(self, found: Frames, columns: list[Array], names: tuple[str, ...] | None) -> Block[Batch]:
        """Batches that one partition fills. What can be looked up for many at once has been.

        Not a generator, which a second consumer could not enter while the first is in it; nor maps within maps, which the
        second may free while the first, gathering, has let go of the GIL: a function is held by its frame.
        """

        def gather(utts: list[str], indices: NDArray[np.int64], rows: Array) -> Batch:
            # clip: without looking for indices that are out of bounds, which ours are not
            return _batch(utts, indices, [column.take(rows, axis=0, mode="clip") for column in columns], names)

        utts = found.utts.reshape(-1, self.size).tolist()
        left = iter(utts)
        items = map(gather, left, found.indices.reshape(-1, self.size), found.rows.reshape(-1, self.size))
        return Block(items, len(utts), left)

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
