"""Room on the disk for HDF5, taken before it writes: where it finds a disk full, it leaves disorder, or crashes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import h5py
import numpy as np

from asyncfeed.cache.ids import Groups
from asyncfeed.cache.journal import DiskErrors
from asyncfeed.cache.table import Table
from asyncfeed.cache.values import type_id

__all__ = ["Room", "data_nbytes", "hdf5_errors", "metadata_nbytes"]

BASE, PER_DATASET, PER_GROUP, PER_CHUNK = 1 << 16, 1024, 4096, 1024
"""Bytes of metadata, generously; measured were 390 per dataset and 1,100 per group."""


def metadata_nbytes(table: Table) -> int:
    """What HDF5 needs for datasets of these ids at most, beside their data."""
    types = [len(type_id(form[0]).encode()) for form in table.forms if form is not None]
    names = table.ids.blob.size + int(np.bincount(table.form, minlength=len(types)) @ np.array(types, np.int64))
    groups = len(Groups(table.ids)) if np.any(table.ids.blob == ord("/")) else 0
    return BASE + len(table) * PER_DATASET + groups * PER_GROUP + 4 * names


def data_nbytes(dataset: h5py.Dataset) -> int:
    """What the data of a dataset take at most: whole chunks, and what compressing adds where it does not succeed."""
    if dataset.chunks is None:
        return int(dataset.nbytes)
    chunks = 1
    for length, chunk in zip(dataset.shape, dataset.chunks, strict=True):
        chunks *= -(-length // chunk)
    nbytes = int(dataset.dtype.itemsize)
    for chunk in dataset.chunks:
        nbytes *= chunk
    return chunks * (nbytes + nbytes // 256 + PER_CHUNK)


class Room:
    """Disk space for a file that is being written through HDF5. What is left over goes when the file is truncated."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._end = 0

    def take(self, start: int, stop: int) -> None:
        """Have space for this part of the file.

        Raises:
            OSError: there is not so much left.
        """
        start = max(start, self._end)
        if start < stop and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, start, stop - start)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # this file system cannot tell
                    raise
            self._end = stop

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def hdf5_errors(path: str) -> Iterator[None]:
    """Make an error that HDF5 meets when it writes a `WriteError`: it is of the disk, or of the file system."""
    with DiskErrors(path, "made"):
        try:
            yield
        except RuntimeError as error:
            raise OSError(f"HDF5 failed ({error})") from error
