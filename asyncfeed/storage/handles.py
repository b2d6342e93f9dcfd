"""Handles that users have open, through which they may write.

What HDF5 has not written yet is written before the file is looked at; after that its bytes are where HDF5 says, for as long
as nothing is written. That is seen from the state of the file, which is looked at before and after each reading. A file
that was written to is left to HDF5.
"""

from __future__ import annotations

import os
import time

import h5py

from asyncfeed.planning.catalog import Access, Catalog, FileStamp
from asyncfeed.storage.hdf5file import stamp, translate

__all__ = ["can_write", "flushed_stamp", "stamp_of", "without_written"]

TICK_NS = 20_000_000
"""The times that file systems note may be as coarse as this."""


def can_write(handle: h5py.Group) -> bool:
    """Whether the user may write through a handle, to a file that can be looked at beside HDF5."""
    return bool(handle.file.mode == "r+" and handle.file.driver == "sec2")


def stamp_of(handle: h5py.Group) -> FileStamp:
    """The state of its file, such that every later change makes it another one."""
    path = handle.file.filename
    if not can_write(handle):
        return stamp(path) if os.path.exists(path) else FileStamp(path, 0, 0, 0)
    young = flushed_stamp(handle, path).mtime_ns + TICK_NS - time.time_ns()
    if young > 0:  # a change that came now could bear the same time
        time.sleep(min(young, TICK_NS) / 1e9)
    return flushed_stamp(handle, path)


def flushed_stamp(handle: h5py.Group, path: str) -> FileStamp:
    """The state of its file, after all that was written through HDF5 has gone to it."""
    try:
        handle.file.flush()
    except (OSError, RuntimeError, ValueError) as error:
        raise translate(error, path, "flush what was written") from error
    return stamp(path, handle.file.id.get_vfd_handle())  # and not what has its name by now


def without_written(catalog: Catalog, handle: h5py.Group) -> Catalog:
    """A catalog that was just made, without direct reads if the file was written to meanwhile."""
    before = catalog.files[0]
    if can_write(handle):
        found = flushed_stamp(handle, before.path)
        if found != before or found.mtime_ns + TICK_NS > time.time_ns():
            direct = (catalog.access == Access.DIRECT) & (catalog.file == 0)
            catalog.access[direct], catalog.offset[direct] = Access.HANDLE, -1
    return catalog
