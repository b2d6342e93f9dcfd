"""Open HDF5 files: the one place where h5py's errors become ours."""

from __future__ import annotations

import os

import h5py
from h5py import h5f, h5z

from asyncfeed.errors import (
    AsyncFeedError,
    DamagedFileError,
    LockedFileError,
    NotHDF5Error,
    ReadError,
    SourceAccessError,
    SourceMissingError,
)
from asyncfeed.planning.catalog import FileStamp

__all__ = ["can_decode", "is_written_here", "open_hdf5", "stamp", "translate"]


def stamp(path: str, of: int | None = None) -> FileStamp:
    """The state of a file, or of the open descriptor ``of``."""
    try:
        stat = os.stat(path) if of is None else os.fstat(of)
    except OSError as error:
        raise translate(error, path) from error
    return FileStamp(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def open_hdf5(path: str) -> h5py.File:
    """Open a file for reading, whether or not its file system can lock.

    Raises:
        StorageError: the branch that fits, naming the file and what to do.
    """
    try:
        try:
            return h5py.File(path, "r", locking="best-effort")
        except OSError as error:
            # Network file systems answer the lock call with ENOLCK (37) or ENOTSUPP (524); HDF5 then gives up.
            if "unable to lock file" not in str(error) or "errno = 11" in str(error):
                raise
            return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise translate(error, path) from error


def is_written_here(path: str) -> bool:
    """Whether this very process has the file open for writing through HDF5."""
    try:
        wanted = os.stat(path)
    except OSError:
        return False
    for file in h5f.get_obj_ids(h5f.OBJ_ALL, h5f.OBJ_FILE):
        try:
            if file.get_intent() & h5f.ACC_RDWR and os.path.samestat(os.stat(h5f.get_name(file)), wanted):
                return True
        except (OSError, ValueError):  # closed meanwhile, or a file that has no name on disk
            continue
    return False


def can_decode(code: int) -> bool:
    """Whether HDF5 has the filter with this number; hdf5plugin, where installed, is imported for its filters."""
    if not h5z.filter_avail(code):
        try:
            import hdf5plugin  # noqa: F401, PLC0415 - registers further codecs with HDF5
        except ImportError:
            return False
    return bool(h5z.filter_avail(code))


def translate(error: BaseException, path: str, doing: str = "open") -> AsyncFeedError:
    """The error of ours that says what an error of the operating system or of HDF5 means."""
    text = str(error)
    if isinstance(error, FileNotFoundError):
        return SourceMissingError(f"there is no file {path!r} (looked in {os.getcwd()})")
    if isinstance(error, PermissionError):
        return SourceAccessError(f"{path} may not be read by this user; check its permissions (ls -l)")
    if isinstance(error, IsADirectoryError):
        return NotHDF5Error(f"{path} is a directory, not an HDF5 file")
    if "file signature not found" in text:
        empty = os.path.exists(path) and os.path.getsize(path) == 0
        found = "is empty" if empty else "is not an HDF5 file (its signature was not found)"
        return NotHDF5Error(f"{path} {found}; write features into it with h5py first")
    if "unable to lock file" in text:
        return LockedFileError(
            f"{path} is locked: another process has it open for writing, or the file system does not lock; "
            f"close the writer, or set HDF5_USE_FILE_LOCKING=FALSE if there is none"
        )
    if "already open for write" in text or "SWMR" in text:
        return LockedFileError(
            f"{path} is marked as being written: a writer is at work, or died; "
            f"close the writer, or clear the mark with h5clear -s after a crash"
        )
    if "truncated file" in text:
        return DamagedFileError(f"{path} is truncated; copy or make it again ({text})")
    if doing == "open":
        return DamagedFileError(f"{path} cannot be opened as HDF5 and seems damaged; copy or make it again ({text})")
    return ReadError(f"could not {doing} in {path}: {text or type(error).__name__}")
