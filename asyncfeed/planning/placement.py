"""Where the slices of a partition lie in its segment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.catalog import Catalog, Kind
from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.plan import ALIGNMENT, Cut, Partition

__all__ = ["FieldPlacement", "Placement", "place"]

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class FieldPlacement:
    """Where the slices of one field lie; row k of each array is slice k of the partition."""

    begin: Integers
    """Byte position in the segment."""
    lengths: Integers
    """Frames; of whole utterances each field has its own number."""
    nbytes: Integers
    kind: Kind | None
    """What all slices that have frames look like, which are then packed as the rows of one array; None if they differ."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Positions in a segment, in bytes."""

    fields: tuple[FieldPlacement, ...]
    tables: int
    """Where the tables of a shuffled order begin: two int32 per unit, and room for a third; none if in order."""
    num_units: int
    nbytes: int
    """Bytes of the segment that are in use."""

    def tables_of(self, memory: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Views of the two tables: the units in their shuffled order, and the slice that each is of."""
        tables = memory[self.tables : self.nbytes].view(np.int32)
        return tables[: self.num_units], tables[self.num_units : 2 * self.num_units]

    def order_of(self, memory: NDArray[np.uint8], num_units: int) -> NDArray[np.int32]:
        """A view of the order of the partition on all ranks, of which this one has a part: where the tables are."""
        return memory[self.tables :].view(np.int32)[:num_units]

    def spare_of(self, memory: NDArray[np.uint8]) -> NDArray[np.int32]:
        """A view of as much room again as one of the tables has, for making them."""
        return memory[self.tables : self.nbytes].view(np.int32)[2 * self.num_units :]


def place(partition: Partition, corpus: Corpus, cut: Cut) -> Placement:
    """Lay out the slices of a partition: field after field, the slices in plan order."""
    position, fields = 0, []
    for catalog in corpus.catalogs:
        lengths = catalog.length[partition.utts] if cut.whole else partition.lengths
        placed, position = _place_field(partition.utts, lengths, catalog, position)
        fields.append(placed)
    num_units = int(cut.count(partition.lengths).sum()) if cut.unit_nbytes else 0
    return Placement(tuple(fields), position, num_units, position + num_units * cut.unit_nbytes)


def _place_field(utts: Integers, lengths: Integers, catalog: Catalog, position: int) -> tuple[FieldPlacement, int]:
    kinds = catalog.kind[utts]
    seen = kinds[lengths > 0] if lengths.any() else kinds  # what has no frames fits any array of frames
    alike = bool(seen.size) and not np.any(seen != seen[0])
    frame_nbytes = np.array([k.frame_nbytes for k in catalog.kinds], np.int64)[kinds]
    nbytes = lengths * frame_nbytes
    room = nbytes if alike else -(-nbytes // ALIGNMENT) * ALIGNMENT
    ends = position + np.cumsum(room, dtype=np.int64)
    begin = ends - room
    end = int(ends[-1]) if ends.size else position
    kind = catalog.kinds[seen[0]] if alike else None
    return FieldPlacement(begin, lengths, nbytes, kind), -(-end // ALIGNMENT) * ALIGNMENT
