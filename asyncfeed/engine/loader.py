"""Fill a segment with a partition, each dataset in the fastest way that is right for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncfeed.engine.loaded import Array, LoadedPartition
from asyncfeed.errors import ChangedFileError
from asyncfeed.planning.catalog import Access, Catalog
from asyncfeed.planning.coalesce import Reads, coalesce
from asyncfeed.planning.placement import FieldPlacement, Placement, place
from asyncfeed.planning.plan import Partition, Plan
from asyncfeed.storage.direct import DirectReader
from asyncfeed.storage.files import Descriptors
from asyncfeed.storage.hdf5 import HDF5Reader
from asyncfeed.storage.library import Library
from asyncfeed.storage.source import Key

__all__ = ["Loader"]

SCRATCH_UNITS = 1 << 20
"""Units whose order is worked on at a time; each takes some 16 bytes beside the segment."""


class Loader:
    """Loads partitions. Made, used and closed by one reader thread.

    Args:
        library: what is where.
        stopped: true once nobody wants the rest; loading then ends early, with undefined contents.
    """

    def __init__(self, library: Library, stopped: Callable[[], bool]) -> None:
        self.library, self.stopped = library, stopped
        self.descriptors = Descriptors(library.files, library.handles)
        self.direct = DirectReader(self.descriptors, stopped)
        self.hdf5 = HDF5Reader(library.files, library.handles)
        self.in_hdf5 = False
        """Whether this thread is inside the HDF5 library, or about to be."""
        self.written: set[int] = set()
        """Files that the user has written to, through the handle that we have: what is where may have changed."""

    def load(self, plan: Plan, partition: Partition, anchor: Array) -> LoadedPartition:
        """Read a partition of a plan into the memory of ``anchor`` and return the views of it."""
        corpus = self.library.corpus
        placement = place(partition, corpus, plan.cut)
        self._read_directly(partition, placement, anchor)
        written = list(self.written)
        for catalog, placed in zip(corpus.catalogs, placement.fields, strict=True):
            self.in_hdf5 = True
            self._read_through_hdf5(partition, catalog, placed, anchor, written)
            self.in_hdf5 = False
            _make_native(partition, catalog, placed, anchor)
        loaded = LoadedPartition(partition, corpus, placement, anchor)
        if placement.num_units:
            _shuffle(plan, partition, placement, anchor)
        return loaded

    def close(self) -> None:
        """Close all files."""
        self.direct.close()
        self.descriptors.close()
        self.in_hdf5 = True
        self.hdf5.close()
        self.in_hdf5 = False

    def _read_directly(self, partition: Partition, placement: Placement, anchor: Array) -> None:
        """Read what may be read directly, which is less when the user writes in the meantime."""
        self.in_hdf5 = bool(self.descriptors.writable)
        self.written |= self.descriptors.written()
        while True:
            try:
                self._read_at_offsets(partition, placement, anchor)
                break
            except ChangedFileError:
                if not (written := self.descriptors.written() - self.written):
                    raise
                self.written |= written
        self.in_hdf5 = False

    def _read_at_offsets(self, partition: Partition, placement: Placement, anchor: Array) -> None:
        corpus, written = self.library.corpus, list(self.written)
        found = [
            _direct_reads(partition, catalog, placed, written)
            for catalog, placed in zip(corpus.catalogs, placement.fields, strict=True)
        ]
        columns = zip(*found, strict=True)
        reads = Reads(*(parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in columns))
        if reads.file.size:
            self.direct.read(coalesce(reads), anchor, lambda k: corpus.ids[int(partition.utts[k])])

    def _read_through_hdf5(
        self, partition: Partition, catalog: Catalog, placed: FieldPlacement, anchor: Array, written: list[int]
    ) -> None:
        others = np.flatnonzero(~_may_be_direct(partition, catalog, written) & (placed.nbytes > 0))
        if not others.size:
            return
        key, lengths = Key(catalog.key), placed.lengths
        file = catalog.file[partition.utts]
        self._check_linked()
        others = others[np.lexsort((partition.utts[others], file[others]))]
        for k in others.tolist():
            if self.stopped():
                return
            row = int(partition.utts[k])
            kind = catalog.kinds[catalog.kind[row]]
            start = int(placed.begin[k])
            out = anchor[start : start + int(placed.nbytes[k])].view(kind.dtype)
            out = out.reshape(int(lengths[k]), *kind.shape)
            first, cut = int(partition.starts[k]), len(out) != catalog.length[row]
            if catalog.start is not None:
                first, cut = first + int(catalog.start[row]), True
            self.hdf5.read(int(file[k]), key.path(catalog.ids[row]), first, out, cut=cut)
        for number in np.unique(file[others]).tolist():
            self.hdf5.check(number)
        self._check_linked()

    def _check_linked(self) -> None:
        """Where such a file is missing, HDF5 may give fill values without a word."""
        for number in self.library.linked:
            self.hdf5.check(number)


def _shuffle(plan: Plan, partition: Partition, placement: Placement, anchor: Array) -> None:
    """Write the tables of a shuffled order into the segment: which unit comes when, and which slice each is of.

    Step by step, since numpy makes wide copies of what it is given: no memory is taken but the segment's and theirs.
    """
    order, owners = placement.tables_of(anchor)
    num_units = order.size
    everyones = placement.order_of(anchor, partition.before + num_units + partition.after)
    for step in _steps(everyones.size):
        everyones[step] = np.arange(step.start, step.stop, dtype=np.int32)
    plan.order_units(partition, everyones)
    if everyones.size > num_units:
        _pick(everyones, partition.before, num_units)
    owner_of = placement.spare_of(anchor)
    ends = np.cumsum(plan.cut.count(partition.lengths))
    for step in _steps(num_units):
        owner_of[step] = _owners(ends, step.start, step.stop)
    for step in _steps(num_units):
        owner_of.take(order[step], out=owners[step], mode="clip")


def _steps(size: int) -> list[slice]:
    return [slice(start, min(start + SCRATCH_UNITS, size)) for start in range(0, size, SCRATCH_UNITS)]


def _pick(units: Array, first: int, count: int) -> None:
    """Bring the units from ``first`` on, ``count`` of them, to the front, in the order that they have, counted from 0."""
    done = 0
    for step in _steps(units.size):
        found = units[step] - np.int32(first)
        found = found[(found >= 0) & (found < count)]
        units[done : done + found.size] = found
        done += found.size


def _owners(ends: Array, start: int, stop: int) -> Array:
    """The slices that the units ``start:stop`` belong to, where slice k holds those before ``ends[k]``."""
    first, last = np.searchsorted(ends, (start, stop - 1), side="right").tolist()
    bounds = np.clip(ends[first : last + 1], start, stop)
    return np.repeat(np.arange(first, last + 1, dtype=np.int32), np.diff(bounds, prepend=start))


def _may_be_direct(partition: Partition, catalog: Catalog, written: list[int]) -> Array:
    """Of every slice, whether it lies where the catalog says, and as numpy has it."""
    direct: Array = catalog.access[partition.utts] == Access.DIRECT
    return direct & ~np.isin(catalog.file[partition.utts], written) if written else direct


def _direct_reads(
    partition: Partition, catalog: Catalog, placed: FieldPlacement, written: list[int]
) -> tuple[Array, ...]:
    """The columns of `Reads` for one field."""
    k = np.flatnonzero(_may_be_direct(partition, catalog, written) & (placed.nbytes > 0))
    utts = partition.utts[k]
    frame_nbytes = placed.nbytes[k] // np.maximum(placed.lengths[k], 1)
    offset = catalog.offset[utts] + partition.starts[k] * frame_nbytes
    return catalog.file[utts], offset, placed.nbytes[k], placed.begin[k], k


def _make_native(partition: Partition, catalog: Catalog, placed: FieldPlacement, anchor: Array) -> None:
    """Swap the bytes of what is stored in the other byte order, in place."""
    swapped = catalog.swapped[partition.utts]
    if not swapped.any():
        return
    if swapped.all() and placed.kind is not None:
        start = int(placed.begin[0])
        anchor[start : start + int(placed.nbytes.sum())].view(placed.kind.dtype).byteswap(inplace=True)
        return
    for k in np.flatnonzero(swapped).tolist():
        dtype = catalog.kinds[catalog.kind[partition.utts[k]]].dtype
        start = int(placed.begin[k])
        anchor[start : start + int(placed.nbytes[k])].view(dtype).byteswap(inplace=True)
