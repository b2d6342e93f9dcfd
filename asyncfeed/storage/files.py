"""Files held open while partitions are read from them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Generic, TypeVar

import h5py

from asyncfeed.errors import ChangedFileError, ClosedError, LockedFileError
from asyncfeed.planning.catalog import FileStamp
from asyncfeed.storage.handles import can_write, flushed_stamp
from asyncfeed.storage.hdf5file import is_written_here, open_hdf5, stamp, translate

__all__ = ["MAX_OPEN", "Descriptors", "HDF5Files", "check_unchanged"]

MAX_OPEN = 64
"""Files of each sort held open at once; a source may have thousands."""

Opened = TypeVar("Opened")


class _OpenFiles(ABC, Generic[Opened]):
    """At most `MAX_OPEN` open things by file number; the one not used for longest is closed for a new one."""

    def __init__(self, files: tuple[FileStamp, ...], handles: Mapping[int, h5py.Group]) -> None:
        self._files, self._handles = files, handles
        self._open: OrderedDict[int, Opened] = OrderedDict()

    @abstractmethod
    def _open_one(self, file: int) -> Opened: ...

    @abstractmethod
    def _close_one(self, opened: Opened) -> None: ...

    def __getitem__(self, file: int) -> Opened:
        if file not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._close_one(self._open.popitem(last=False)[1])
            self._open[file] = self._open_one(file)
        self._open.move_to_end(file)
        return self._open[file]

    def drop(self, file: int) -> None:
        """Close one of them."""
        if file in self._open:
            self._close_one(self._open.pop(file))

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._close_one(self._open.popitem()[1])


class Descriptors(_OpenFiles[int]):
    """File descriptors for direct reads; a handle's own descriptor where the user gave a handle."""

    def _open_one(self, file: int) -> int:
        """Open a file that is still the one in the catalog.

        Raises:
            ChangedFileError: it is another one by now.
            LockedFileError: a process that locks as HDF5 does has it open for writing.
            StorageError: it cannot be opened.
        """
        path = self._files[file].path
        if file in self._handles:
            return _again(_still_open(self._handles[file], path).file.id.get_vfd_handle())
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise translate(error, path) from error
        try:
            check_unchanged(self._files[file], fd)
            _refuse_writers(path, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _close_one(self, opened: int) -> None:
        os.close(opened)

    def check(self, file: int) -> None:
        """Raise `ChangedFileError` if the file is no longer what the catalog describes."""
        expected = self._files[file]
        found = self._flushed(file) if file in self.writable else stamp(expected.path, self[file])
        _compare(expected, found)

    def written(self) -> set[int]:
        """Files that the user has written to, through a handle, since they were catalogued."""
        return {file for file in self.writable if self._flushed(file) != self._files[file]}

    def _flushed(self, file: int) -> FileStamp:
        path = self._files[file].path
        return flushed_stamp(_still_open(self._handles[file], path), path)

    @cached_property
    def writable(self) -> set[int]:
        """Files of which the user's handle can write."""
        return {file for file, handle in self._handles.items() if handle and can_write(handle)}

    def path(self, file: int) -> str:
        """The path of a file, for messages."""
        return self._files[file].path


class HDF5Files(_OpenFiles[h5py.Group]):
    """Files open in h5py; the user's own handles are passed on and never closed."""

    def _open_one(self, file: int) -> h5py.Group:
        if file in self._handles:
            return _still_open(self._handles[file], self._files[file].path)
        self.check(file)
        return open_hdf5(self._files[file].path)

    def _close_one(self, opened: h5py.Group) -> None:
        if not any(opened is handle for handle in self._handles.values()):
            opened.close()

    def check(self, file: int) -> None:
        """Raise `ChangedFileError` if the file is no longer what the catalog describes.

        What this process itself is writing is read through HDF5's own view of it, and may grow.
        """
        if file not in self._handles and not is_written_here(self._files[file].path):
            check_unchanged(self._files[file])


def _again(fd: int) -> int:
    """A descriptor of the same file. Not a duplicate, where that can be avoided: it would share the lock that HDF5 holds on
    the file, and keep it when the user has closed the handle."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no Linux, or no longer readable
        return os.dup(fd)


def _still_open(handle: h5py.Group, path: str) -> h5py.Group:
    if not handle:
        raise ClosedError(
            f"the h5py handle of {path} was closed while the feed was open; keep it open until the feed is closed"
        )
    return handle


def check_unchanged(expected: FileStamp, fd: int | None = None) -> None:
    """Compare a file, or an open descriptor of it, with its stamp."""
    _compare(expected, stamp(expected.path, fd))


def _compare(expected: FileStamp, found: FileStamp) -> None:
    if found == expected:
        return
    changes = [
        f"{what} {getattr(expected, what)} -> {getattr(found, what)}"
        for what in ("size", "mtime_ns", "inode")
        if getattr(expected, what) != getattr(found, what)
    ]
    raise ChangedFileError(
        f"{expected.path} changed while the feed was open ({', '.join(changes)}); close the feed and open it again, and "
        f"write new data into another file"
    )


def _refuse_writers(path: str, fd: int) -> None:
    """Try the shared lock that HDF5 readers take, and let go of it: who writes through HDF5 holds it exclusively."""
    if os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0"):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise LockedFileError(
                f"{path} is open for writing in another process; close the writer, "
                f"or set HDF5_USE_FILE_LOCKING=FALSE to read beside it"
            ) from error
        return  # a file system without locks
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
