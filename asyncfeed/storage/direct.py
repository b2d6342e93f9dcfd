"""Read byte ranges of files straight into memory: vectored, planned, without a Python object per range.

Why not ``os.preadv``: it wants a Python list of buffers. The tables here are made by numpy and handed to the kernel as
they are; ctypes lets go of the GIL once per call. Each return to the interpreter may wait as long as its switch interval
(5 ms) while another thread runs Python, so what counts is calls, not microseconds: many are submitted as one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import DamagedFileError, StorageError
from asyncfeed.planning.coalesce import MAX_CALL_NBYTES, MAX_GAP, Calls
from asyncfeed.storage.files import MAX_OPEN
from asyncfeed.storage.hdf5file import translate
from asyncfeed.storage.libc import IOCB, IOCB_CMD_PREADV, IOVEC, Submission, find_preadv, find_submission, last_error

__all__ = ["DirectReader", "OpenFiles", "available"]

FEW = 4
"""Up to so many calls are made one by one: fewer than the two that a submission takes would hardly be saved."""

COLD = 1e9
"""Bytes per second. A disk is slower and the page cache faster: below it, the kernel is told beforehand what comes."""

_preadv = find_preadv()


def available() -> bool:
    """Whether this system can read directly; if not, everything goes through HDF5."""
    return _preadv is not None


class OpenFiles(Protocol):
    """Where a `DirectReader` gets its descriptors: `Descriptors`, or something else that holds files open."""

    def __getitem__(self, file: int) -> int:
        """The descriptor of a file. Raises `StorageError` if it cannot be had."""

    def check(self, file: int) -> None:
        """Called before and after a file is read: raises `ChangedFileError` if it is no longer what is expected."""

    def path(self, file: int) -> str:
        """The path of a file, for messages."""


class DirectReader:
    """Carries out planned calls. Not thread-safe; made and used by one reader thread.

    Its memory is one scratch buffer of `MAX_GAP` bytes, which swallows what lies between wanted ranges, and 16 bytes
    per range of a partition.
    """

    def __init__(self, descriptors: OpenFiles, stopped: Callable[[], bool]) -> None:
        self.descriptors = descriptors
        self.stopped = stopped
        self.num_calls = 0
        self._scratch = np.empty(MAX_GAP, np.uint8)
        self._cold = True

    def close(self) -> None:
        """Give back what was lent."""
        submission = self.__dict__.get("_submission")
        if submission is not None:
            submission.release()

    @cached_property
    def _submission(self) -> Submission | None:
        """Taken when it is first wanted."""
        return find_submission()

    def read(self, calls: Calls, memory: NDArray[np.uint8], name_of: Callable[[int], str]) -> None:
        """Fill ``memory`` with what ``calls`` describe. Stops between two calls once ``stopped()`` is true.

        ``name_of`` gives the utterance id of an owner, for error messages.

        Raises:
            ChangedFileError: a file was changed before or while it was read.
            DamagedFileError: a file ends within an utterance.
            ReadError: the operating system reports an error.
        """
        pieces = self._pieces(calls, memory)
        edges = _batches(calls)
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            began = time.perf_counter()
            left: Sequence[int] = range(start, stop)
            scattered = stop - start > FEW and not self.stopped()
            if scattered and self._cold and hasattr(os, "posix_fadvise"):
                self._advise(calls, left)
            if scattered and self._submission is not None:
                left = self._submit(self._submission, calls, pieces, start, stop)
            for call in left:
                if self.stopped():
                    return
                self._read_one(calls, call, pieces[calls.edges[call] : calls.edges[call + 1]], name_of)
            for file in np.unique(calls.file[start:stop]).tolist():
                self.descriptors.check(file)
            nbytes = calls.nbytes[calls.edges[start] : calls.edges[stop]].sum()
            self._cold = nbytes < COLD * (time.perf_counter() - began)

    def _pieces(self, calls: Calls, memory: NDArray[np.uint8]) -> NDArray[np.void]:
        """Where the kernel shall write."""
        wanted = calls.dest >= 0
        fits = np.where(wanted, calls.dest + calls.nbytes <= memory.size, calls.nbytes <= self._scratch.size)
        if not fits.all():
            raise AssertionError("a planned read does not fit its segment")  # never write beyond our memory
        pieces = np.empty(calls.dest.size, IOVEC)
        pieces["base"] = np.where(wanted, calls.dest + memory.ctypes.data, self._scratch.ctypes.data)
        pieces["nbytes"] = calls.nbytes
        return pieces

    def _advise(self, calls: Calls, which: Sequence[int]) -> None:
        """Let the disk work on all pieces at once, instead of on one after the other."""
        nbytes = np.add.reduceat(calls.nbytes, calls.edges[:-1])
        for call in which:
            with contextlib.suppress(OSError):  # file systems without a page cache have no use for advice
                fd = self.descriptors[int(calls.file[call])]
                os.posix_fadvise(fd, int(calls.offset[call]), int(nbytes[call]), os.POSIX_FADV_WILLNEED)

    def _submit(
        self, submission: Submission, calls: Calls, pieces: NDArray[np.void], start: int, stop: int
    ) -> list[int]:
        """Make a batch of calls at once; those that did not bring all they should, and why, is found out one by one."""
        requests = np.zeros(stop - start, IOCB)
        requests["data"] = np.arange(stop - start)
        requests["opcode"] = IOCB_CMD_PREADV
        requests["fd"] = [self.descriptors[file] for file in calls.file[start:stop].tolist()]
        requests["buf"] = pieces.ctypes.data + calls.edges[start:stop] * IOVEC.itemsize
        requests["nbytes"] = np.diff(calls.edges[start : stop + 1])
        requests["offset"] = calls.offset[start:stop]
        expected = np.add.reduceat(calls.nbytes, calls.edges[start:stop])
        self.num_calls += 2
        return (start + np.flatnonzero(submission.read(requests) != expected)).tolist()

    def _read_one(self, calls: Calls, call: int, pieces: NDArray[np.void], name_of: Callable[[int], str]) -> None:
        file = int(calls.file[call])
        try:
            self._call(self.descriptors[file], pieces, int(calls.offset[call]))
        except EOFError as end:
            self.descriptors.check(file)
            done = end.args[0] - int(calls.offset[call])
            piece = int(calls.edges[call] + np.searchsorted(np.cumsum(pieces["nbytes"]), done, side="right"))
            path, utt = self.descriptors.path(file), name_of(int(calls.owner[piece]))
            raise DamagedFileError(
                f"{path} ends before the end of utterance {utt!r}; the file is truncated: copy or make it again"
            ) from None
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            path, utt = self.descriptors.path(file), name_of(int(calls.owner[calls.edges[call]]))
            raise translate(error, path, f"read utterance {utt!r}") from error

    def _call(self, fd: int, pieces: NDArray[np.void], offset: int) -> None:
        """One vectored read; again for what is left when the kernel gives less than asked for.

        Raises:
            EOFError: the file ends at the position given as its argument.
        """
        assert _preadv is not None
        left = int(pieces["nbytes"].sum())
        while left:
            self.num_calls += 1
            done = _preadv(fd, pieces.ctypes.data, len(pieces), offset)
            if done == left:
                return
            if done < 0:
                error = last_error()
                if error.errno == errno.EINTR:
                    continue
                raise error
            if done == 0:
                raise EOFError(offset)
            offset, left = offset + done, left - done
            pieces = _rest(pieces, done)


def _batches(calls: Calls) -> NDArray[np.int64]:
    """Edges of groups of calls that can be submitted together: not too many, nor too much, nor of too many files."""
    if not len(calls):
        return np.zeros(1, np.int64)
    nbytes = np.add.reduceat(calls.nbytes, calls.edges[:-1])
    files = np.cumsum(np.append(0, calls.file[1:] != calls.file[:-1]))
    share = (
        np.arange(len(calls)) // Submission.MAX_READS,
        (np.cumsum(nbytes) - nbytes) // MAX_CALL_NBYTES,
        files // MAX_OPEN,
    )
    changed = np.any([s[1:] != s[:-1] for s in share], axis=0)
    return np.concatenate(([0], np.flatnonzero(changed) + 1, [len(calls)]))


def _rest(pieces: NDArray[np.void], done: int) -> NDArray[np.void]:
    """What remains of ``pieces`` after the first ``done`` bytes."""
    ends = np.cumsum(pieces["nbytes"])
    first = int(np.searchsorted(ends, done, side="right"))
    rest = pieces[first:].copy()
    used = done - (int(ends[first - 1]) if first else 0)
    rest["base"][0] += used
    rest["nbytes"][0] -= used
    return rest
