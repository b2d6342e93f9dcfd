"""All sealed files of a cache as one: where every item is, and the reading of it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfeed.cache.generation import Generation
from asyncfeed.cache.records import ALIGNMENT, Entry, checksum_of, raw
from asyncfeed.cache.table import Form
from asyncfeed.cache.values import to_array
from asyncfeed.errors import DamagedFileError, ItemTypeError, UnreadableDatasetError
from asyncfeed.planning.coalesce import Reads, coalesce
from asyncfeed.process import call_in_child
from asyncfeed.storage.direct import DirectReader
from asyncfeed.storage.hdf5file import translate

__all__ = ["Reader", "View", "intact", "read_cached", "read_item"]

NOWAIT = getattr(os, "RWF_NOWAIT", 0)
"""Of preadv2(2): give only what is in memory already."""


class View:
    """What a set of generations holds. Immutable: when there are other generations, there is another view."""

    def __init__(self, generations: Sequence[Generation] = ()) -> None:
        self.generations = tuple(generations)
        tables = [generation.table for generation in generations]
        starts = np.cumsum([0, *map(len, tables)])
        self._starts = starts.tolist()
        self.rows: dict[str, int] = {}
        for start, table in zip(self._starts, tables, strict=False):
            self.rows.update(zip(table.ids, range(start, start + len(table)), strict=True))
        first_form = np.cumsum([0, *(len(t.forms) for t in tables)]).tolist()
        self._forms = [form for t in tables for form in t.forms]
        # As memoryviews: an element of one is a Python int at once.
        self._file = _column([np.full(len(t), i, np.int64) for i, t in enumerate(tables)])
        self._offset = _column([t.offset for t in tables])
        self._nbytes = _column([t.nbytes for t in tables])
        self._form = _column([t.form.astype(np.int64) + n for t, n in zip(tables, first_form, strict=False)])
        self._checksum = _column([t.checksum for t in tables])

    def place(self, row: int) -> tuple[int, Entry | None]:
        """The descriptor and the entry of an item; None if only HDF5 can read it."""
        form = self._forms[self._form[row]]
        generation = self.generations[self._file[row]]
        if form is None or self._offset[row] < 0 < self._nbytes[row]:
            return generation.fd, None
        return generation.fd, Entry(self._offset[row], self._nbytes[row], *form, self._checksum[row])

    def form(self, row: int) -> Form | None:
        """dtype and shape of an item; None if only HDF5 knows."""
        return self._forms[self._form[row]]

    def item_nbytes(self, row: int) -> int:
        """Of one item, in memory; 0 if only HDF5 knows."""
        return self._nbytes[row]

    def checksum(self, row: int) -> int:
        """Of the bytes of an item; -1 if there is none."""
        return self._checksum[row]

    def digest(self, row: int) -> bytes:
        """Of the arguments of an item; empty if there is none."""
        number = self._file[row]
        return self.generations[number].table.digest_of(row - self._starts[number])

    @property
    def nbytes(self) -> int:
        """Of all items that are not replaced, in memory."""
        return sum(map(self._nbytes.__getitem__, self.rows.values()))

    def path(self, row: int) -> str:
        """The file of an item, for messages."""
        return self.generations[self._file[row]].path

    def read_cached(self, row: int) -> NDArray[Any] | None:
        """An item whose bytes are in the page cache; None if they are not, or if it is not known."""
        offset, nbytes = self._offset[row], self._nbytes[row]
        form = self._forms[self._form[row]]
        if offset < 0 or form is None:
            return None
        return read_cached(self.generations[self._file[row]].fd, offset, nbytes, form)

    def read(self, row: int, uid: str) -> NDArray[Any]:
        """An item, wherever its bytes are. Blocks."""
        fd, entry = self.place(row)
        if entry is None:
            array, form = self._converted(row, uid), self._forms[self._form[row]]
            return array if form is None else array.view(form[0])  # HDF5 does not know all of them by name
        return read_item(fd, entry, uid, self.path(row))

    def read_as_is(self, row: int, uid: str) -> NDArray[Any]:
        """An item as HDF5 gives it, text and all."""
        return self.generations[self._file[row]].read_through_hdf5(uid)

    def _converted(self, row: int, uid: str) -> NDArray[Any]:
        """An item that HDF5 has to read."""
        try:
            return to_array(self.generations[self._file[row]].read_through_hdf5(uid))
        except ItemTypeError as error:
            raise UnreadableDatasetError(
                f"item {uid!r} in {self.path(row)} is no array of numbers: {error}; read it with h5py"
            ) from error


def _column(parts: list[NDArray[np.int64]]) -> memoryview:
    return np.concatenate([np.empty(0, np.int64), *parts]).data


def _empty(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this process, aligned: copies to other places are slower on many processors."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def read_cached(fd: int, offset: int, nbytes: int, form: Form) -> NDArray[Any] | None:
    """The array at a place of a file, if its bytes are in the page cache; None if not. Always copies. Never blocks."""
    if not NOWAIT:
        return None
    memory = _empty(nbytes)
    if nbytes:
        try:
            if os.preadv(fd, [memory.data], offset, NOWAIT) != nbytes:
                return None
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINTR, errno.EINVAL):
                return None
            raise
    return memory.view(form[0]).reshape(form[1]) if nbytes else np.empty(form[1], form[0])


def read_item(fd: int, entry: Entry, uid: str, path: str) -> NDArray[Any]:
    """The array that an entry describes. Always copies: it is the caller's own.

    Raises:
        DamagedFileError: the file ends within it.
        ReadError: the operating system reports an error.
    """
    memory, done = _empty(entry.nbytes), 0
    while done < entry.nbytes:
        try:
            count = os.preadv(fd, [memory[done:].data], entry.offset + done)
        except OSError as error:
            raise translate(error, path, f"read item {uid!r}") from error
        if count == 0:
            raise DamagedFileError(
                f"{path} ends before the end of item {uid!r}; it is truncated: copy or make it again"
            )
        done += count
    return memory.view(entry.dtype).reshape(entry.shape) if entry.nbytes else np.empty(entry.shape, entry.dtype)


class Reader:
    """Reads many items in a few system calls. One caller at a time; others wait. In a forked child, too."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.forked()
        call_in_child(self)

    def forked(self) -> None:
        """In a forked child: the parent's context is not ours, nor is its lock ever released here."""
        self._lock = threading.Lock()
        self._direct = DirectReader(self, lambda: False)

    def __getitem__(self, file: int) -> int:
        return self._fds[file]

    def check(self, file: int) -> None:
        """Sealed files do not change; the descriptor is of the one that was opened."""

    def path(self, file: int) -> str:
        """Of a file, for messages."""
        return f"file {file} of the cache"

    def read(self, places: Sequence[tuple[int, Entry, str]]) -> list[NDArray[Any]]:
        """The arrays of entries in the files behind descriptors; the ids are for error messages.

        Always copies. The arrays share one block of memory: one that is kept keeps it.
        """
        if not places:
            return []
        entries = [entry for _, entry, _ in places]
        nbytes = np.array([e.nbytes for e in entries], np.int64)
        dest = np.cumsum(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        memory = _empty(int(dest[-1]))
        dest = np.append(0, dest[:-1])
        wanted = np.flatnonzero(nbytes)
        with self._lock:
            self._fds = list(dict.fromkeys(fd for fd, _, _ in places))
            number = {fd: n for n, fd in enumerate(self._fds)}
            reads = Reads(
                np.array([number[fd] for fd, _, _ in places], np.int32)[wanted],
                np.array([e.offset for e in entries], np.int64)[wanted],
                nbytes[wanted],
                dest[wanted],
                wanted,
            )
            self._direct.read(coalesce(reads), memory, lambda owner: places[owner][2])
        return [
            memory[start : start + e.nbytes].view(e.dtype).reshape(e.shape) if e.nbytes else np.empty(e.shape, e.dtype)
            for start, e in zip(dest.tolist(), entries, strict=True)
        ]

    def close(self) -> None:
        """Give back what the kernel lent."""
        with self._lock:
            self._direct.close()


def intact(array: NDArray[Any], checksum: int) -> bool:
    """Whether an array has the bytes that were written."""
    return checksum < 0 or checksum_of(raw(np.ascontiguousarray(array))) == checksum
