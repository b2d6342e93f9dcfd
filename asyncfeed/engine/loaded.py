"""A partition in memory, as users see it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import ShapeError
from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.placement import Placement
from asyncfeed.planning.plan import Partition

__all__ = ["Array", "FieldView", "LoadedPartition", "Rows"]

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = "Array | Mapping[str, Array]"
"""An array, or one array per field where the fields have names."""


class FieldView:
    """One field of a loaded partition: views of its segment, made when asked for. Never copies."""

    def __init__(self, partition: Partition, corpus: Corpus, name: str, placement: Placement, anchor: Array) -> None:
        number = list(corpus.fields).index(name)
        self.name = name
        self._catalog = corpus.fields[name]
        self._utts = partition.utts
        self._placed = placement.fields[number]
        self._lengths = self._placed.lengths
        self._anchor = anchor

    @cached_property
    def rows(self) -> Array | None:
        """All frames of the field as one array, ``(frames, *frame shape)``; None if they differ in shape or dtype."""
        kind = self._placed.kind
        if kind is None:
            return None
        start, nbytes = int(self._placed.begin[0]), int(self._placed.nbytes.sum())
        num_rows = int(self._lengths.sum())
        rows: Array = self._anchor[start : start + nbytes].view(kind.dtype).reshape(num_rows, *kind.shape)
        return rows

    @cached_property
    def arrays(self) -> list[Array]:
        """The frames of every slice, ``(frames, *frame shape)``."""
        rows = self.rows
        if rows is None:
            return [self.array(k) for k in range(self._utts.size)]
        stops = np.cumsum(self._lengths)
        starts = stops - self._lengths
        arrays: list[Array] = [rows[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        for k in self._without_frames():
            arrays[k] = self.array(k)  # in its own shape and dtype
        return arrays

    def _without_frames(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._lengths == 0).tolist()
        return found

    def array(self, k: int) -> Array:
        """The frames of slice ``k``."""
        kind = self._catalog.kinds[self._catalog.kind[self._utts[k]]]
        start, nbytes = int(self._placed.begin[k]), int(self._placed.nbytes[k])
        array: Array = self._anchor[start : start + nbytes].view(kind.dtype).reshape(int(self._lengths[k]), *kind.shape)
        return array


class LoadedPartition:
    """Utterances that are in memory together. Everything here is a view: never a copy.

    The memory stays as it is for as long as any array taken from it lives, and is used again afterwards.
    """

    def __init__(self, partition: Partition, corpus: Corpus, placement: Placement, anchor: Array) -> None:
        self.number = partition.number
        """Place in the plan of the epoch."""
        self.starts = partition.starts
        """First frame of every utterance, int64; 0 unless it was cut because it is larger than a partition."""
        self.lengths = partition.lengths
        """Frames of every utterance (of its first field), int64."""
        self.groups = partition.groups
        self.first_unit, self.stop_unit = partition.first_unit, partition.stop_unit
        self._rows_of_ids, self._corpus = partition.utts, corpus
        self._fields = [FieldView(partition, corpus, name, placement, anchor) for name in corpus.fields]
        self.nbytes = sum(int(placed.nbytes.sum()) for placed in placement.fields)
        """Bytes of its frames."""
        self.order, self.owners = placement.tables_of(anchor)

    def __len__(self) -> int:
        return self._rows_of_ids.size

    def __repr__(self) -> str:
        return f"LoadedPartition({self.number}: {len(self)} utterances, {self.num_frames} frames)"

    @property
    def first(self) -> int:
        """The first utterance that has frames; 0 if none has."""
        return int(np.argmax(self.lengths > 0)) if len(self) else 0

    @property
    def num_frames(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def ids(self) -> list[str]:
        """The id of every utterance."""
        return self._corpus.ids.pick(self._rows_of_ids)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the fields; None for a single field without a name."""
        return tuple(self._corpus.fields) if self._corpus.named else None

    @property
    def fields(self) -> list[FieldView]:
        """The fields, in the order of the source."""
        return self._fields

    @property
    def frames(self) -> Rows:
        """All frames as one array, ``(num_frames, *frame shape)``, or one per field. Never copies.

        Raises:
            ShapeError: the utterances differ in frame shape or dtype; ``arrays`` has them one by one.
        """
        columns = [self.uniform(field) for field in self._fields]
        return columns[0] if self.names is None else dict(zip(self.names, columns, strict=True))

    @property
    def arrays(self) -> list[Rows]:
        """The frames of every utterance, ``(length, *frame shape)``, or one such array per field. Never copies."""
        if self.names is None:
            return list(self._fields[0].arrays)
        columns = zip(*(field.arrays for field in self._fields), strict=True)
        return [dict(zip(self.names, column, strict=True)) for column in columns]

    def uniform(self, field: FieldView) -> Array:
        """All frames of a field as one array. Never copies.

        Raises:
            ShapeError: its utterances differ in frame shape or dtype.
        """
        rows = field.rows
        if rows is not None:
            return rows
        first = field.array(self.first)
        for k, utt in enumerate(self.ids):
            array = field.array(k)
            if len(array) and (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
                named = f" in field {field.name!r}" if field.name else ""
                raise ShapeError(
                    f"utterance {utt!r}{named} has frames of {array.dtype} {array.shape[1:]}, but {self.ids[self.first]!r} has "
                    f"{first.dtype} {first.shape[1:]}; one array cannot hold both: iterate over the feed itself or over "
                    f"feed.utterances(), or leave one sort out with excludes="
                )
        raise AssertionError("a partition is uniform or it is not")
