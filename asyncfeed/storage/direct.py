"""Read byte ranges of files straight into memory: vectored, planned, without a Python object per range.

Why not ``os.preadv``: it wants a Python list of buffers. The tables here are made by numpy and handed to the C library's
``preadv(2)`` as they are; ctypes lets go of the GIL once per call. Each return to the interpreter may wait as long as
its switch interval (5 ms) while another thread runs Python, so what counts is calls, not microseconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import DamagedFileError, StorageError
from asyncfeed.planning.coalesce import MAX_GAP, Calls
from asyncfeed.storage.files import Descriptors
from asyncfeed.storage.hdf5file import translate

__all__ = ["DirectReader", "available"]

IOVEC = np.dtype([("base", np.uintp), ("nbytes", np.uintp)])
"""``struct iovec`` of readv(2)."""


def _find_preadv() -> Callable[[int, int, int, int], int] | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        preadv = getattr(libc, "preadv64", None) or libc.preadv
    except (OSError, AttributeError, TypeError):  # not POSIX, or a C library without it
        return None
    preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    preadv.restype = ctypes.c_ssize_t
    return preadv


_preadv = _find_preadv()


def available() -> bool:
    """Whether this system can read directly; if not, everything goes through HDF5."""
    return _preadv is not None


class DirectReader:
    """Carries out planned calls. Not thread-safe; made and used by one reader thread.

    Its memory is one scratch buffer of `MAX_GAP` bytes, which swallows what lies between wanted ranges, and 16 bytes
    per range of a partition.
    """

    def __init__(self, descriptors: Descriptors, stopped: Callable[[], bool]) -> None:
        self.descriptors = descriptors
        self.stopped = stopped
        self.num_calls = 0
        self._scratch = np.empty(MAX_GAP, np.uint8)

    def read(self, calls: Calls, memory: NDArray[np.uint8], name_of: Callable[[int], str]) -> None:
        """Fill ``memory`` with what ``calls`` describe. Stops between two calls once ``stopped()`` is true.

        ``name_of`` gives the utterance id of an owner, for error messages.

        Raises:
            ChangedFileError: a file was changed before or while it was read.
            DamagedFileError: a file ends within an utterance.
            ReadError: the operating system reports an error.
        """
        wanted = calls.dest >= 0
        fits = calls.dest + calls.nbytes <= memory.size
        if not np.all(np.where(wanted, fits, calls.nbytes <= self._scratch.size)):
            raise AssertionError("a planned read does not fit its segment")  # never write beyond our memory
        pieces = np.empty(calls.dest.size, IOVEC)
        pieces["base"] = np.where(wanted, calls.dest + memory.ctypes.data, self._scratch.ctypes.data)
        pieces["nbytes"] = calls.nbytes
        for call, file in enumerate(calls.file.tolist()):
            if self.stopped():
                return
            part = slice(calls.edges[call], calls.edges[call + 1])
            try:
                self._call(self.descriptors[file], pieces[part], int(calls.offset[call]))
            except EOFError:
                self.descriptors.check(file)
                path, utt = self.descriptors.path(file), name_of(int(calls.owner[part.stop - 1]))
                raise DamagedFileError(
                    f"{path} ends before the end of utterance {utt!r}; the file is truncated: copy or make it again"
                ) from None
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                path, utt = self.descriptors.path(file), name_of(int(calls.owner[part.start]))
                raise translate(error, path, f"read utterance {utt!r}") from error
        for file in np.unique(calls.file).tolist():
            self.descriptors.check(file)

    def _call(self, fd: int, pieces: NDArray[np.void], offset: int) -> None:
        """One vectored read; again for what is left when the kernel gives less than asked for."""
        assert _preadv is not None
        left = int(pieces["nbytes"].sum())
        while left:
            self.num_calls += 1
            done = _preadv(fd, pieces.ctypes.data, len(pieces), offset)
            if done == left:
                return
            if done < 0:
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                raise OSError(code, os.strerror(code))
            if done == 0:
                raise EOFError
            offset, left = offset + done, left - done
            pieces = _rest(pieces, done)


def _rest(pieces: NDArray[np.void], done: int) -> NDArray[np.void]:
    """What remains of ``pieces`` after the first ``done`` bytes."""
    ends = np.cumsum(pieces["nbytes"])
    first = int(np.searchsorted(ends, done, side="right"))
    rest = pieces[first:].copy()
    used = done - (int(ends[first - 1]) if first else 0)
    rest["base"][0] += used
    rest["nbytes"][0] -= used
    return rest
