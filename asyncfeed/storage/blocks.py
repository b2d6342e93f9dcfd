"""Read many small blocks of an HDF5 file with few calls.

The superblock is that of the *HDF5 File Format Specification Version 3.0*, II.A, in its versions 0 and 1.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import ClosedError
from asyncfeed.planning.catalog import FileStamp
from asyncfeed.planning.coalesce import Reads, coalesce
from asyncfeed.storage.direct import DirectReader
from asyncfeed.storage.files import Descriptors

__all__ = ["Blocks", "Bytes", "Integers", "numbers"]

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

SIGNATURE = b"\x89HDF\r\n\x1a\n"
SUPERBLOCK_NBYTES = 64
INTERNAL_K_AT = 18
END_OF_FILE_AT = {0: 40, 1: 44}
"""Where the superblock keeps the end-of-file address, by its version; later ones come with other metadata."""


class Blocks:
    """The metadata of one file that is open in HDF5 for reading; nothing is opened before it is asked for.

    Addresses are HDF5's own, which count from the superblock. Not thread-safe.
    """

    def __init__(self, file: FileStamp, hdf5: h5py.File, stopped: Callable[[], bool]) -> None:
        settings = hdf5.id.get_create_plist()
        self.base = int(settings.get_userblock())
        """Where the superblock is."""
        self.max_children = 0
        """Of a node of the B-tree of a group; known once ``end`` is."""
        self._wide = settings.get_sizes() == (8, 8)
        self._nbytes = file.size
        self._end: int | None = None
        self._memory = np.empty(0, np.uint8)
        self._stopped = stopped
        self._descriptors = Descriptors((file,), {})
        self._reader = DirectReader(self._descriptors, stopped)

    def close(self) -> None:
        """Close the file; without effect the second time."""
        self._reader.close()
        self._descriptors.close()

    @property
    def end(self) -> int:
        """The first address beyond the file, both for HDF5 and in fact; 0 if the file is not of the kind we know."""
        if self._end is None:
            self._end = self._find_end() if self._wide else 0
        return self._end

    def _find_end(self) -> int:
        superblock = os.pread(self._descriptors[0], SUPERBLOCK_NBYTES, self.base)
        if len(superblock) < SUPERBLOCK_NBYTES or superblock[:8] != SIGNATURE or superblock[8] not in END_OF_FILE_AT:
            return 0
        (half,) = struct.unpack_from("<H", superblock, INTERNAL_K_AT)
        (end,) = struct.unpack_from("<Q", superblock, END_OF_FILE_AT[superblock[8]])
        self.max_children = 2 * half
        return max(min(int(end), self._nbytes) - self.base, 0)

    def read_one(self, address: int, nbytes: int) -> bytes:
        """One block; fewer bytes than asked for if the file ends before."""
        if not 0 <= address < self.end:
            return b""
        return os.pread(self._descriptors[0], min(nbytes, self.end - address), self.base + address)

    def read(self, addresses: Integers, nbytes: int) -> tuple[Bytes, Integers]:
        """One block a row, and how many bytes of each were read: none beyond the end of the file, none of them twice.

        The rows are overwritten by the next reading.

        Raises:
            StorageError: the file cannot be read, or changed meanwhile.
            ClosedError: ``stopped()`` became true meanwhile.
        """
        if self._memory.size < addresses.size * nbytes:
            self._memory = np.empty(addresses.size * nbytes, np.uint8)
        order = np.argsort(addresses, kind="stable")
        place = addresses[order]
        there = np.empty_like(addresses)
        there[order] = np.clip(np.minimum(np.append(place[1:], self.end), self.end) - place, 0, nbytes)
        there[addresses < 0] = 0
        rows = np.flatnonzero(there)
        reads = Reads(np.zeros(rows.size, np.int32), addresses[rows] + self.base, there[rows], rows * nbytes, rows)
        self._reader.read(coalesce(reads), self._memory, lambda row: f"(metadata, block {row})")
        if self._stopped():  # so that not everything has been read
            raise ClosedError("the feed was closed while it was opening")
        return self._memory[: addresses.size * nbytes].reshape(-1, nbytes), there


def numbers(memory: Bytes, at: int, count: int, dtype: str) -> NDArray[np.unsignedinteger]:
    """``count`` numbers from column ``at`` of every row on."""
    return np.ascontiguousarray(memory[:, at : at + count * np.dtype(dtype).itemsize]).view(dtype)
