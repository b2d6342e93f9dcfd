"""System calls that Python's ``os`` does not offer, or offers only with a Python object per buffer.

Arguments are addresses and numbers; whoever calls keeps the memory alive. Each call lets go of the GIL once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable
from typing import ClassVar

import numpy as np

__all__ = [
    "EVENT",
    "IOCB",
    "IOCB_CMD_PREADV",
    "IOVEC",
    "find_preadv",
    "find_submission",
    "last_error",
    "rename_exclusive",
    "start_writeback",
]

IOVEC = np.dtype([("base", np.uint64), ("nbytes", np.uint64)])
"""``struct iovec`` of readv(2), on 64-bit systems."""

IOCB = np.dtype(
    [
        ("data", np.uint64),
        ("key", np.uint64),
        ("opcode", np.uint16),
        ("priority", np.int16),
        ("fd", np.uint32),
        ("buf", np.uint64),
        ("nbytes", np.uint64),
        ("offset", np.int64),
        ("reserved", np.uint64),
        ("flags", np.uint32),
        ("resfd", np.uint32),
    ]
)
"""``struct iocb`` of include/uapi/linux/aio_abi.h."""

EVENT = np.dtype([("data", np.uint64), ("obj", np.uint64), ("result", np.int64), ("result2", np.int64)])
"""``struct io_event`` of the same."""

IOCB_CMD_PREADV = 7

_SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents, io_submit."""


def last_error() -> OSError:
    """The error of the last call of this thread."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def find_preadv() -> Callable[[int, int, int, int], int] | None:
    """``preadv(fd, address of iovecs, their number, offset)``, or None where there is none."""
    if sys.maxsize < 2**63 - 1:
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        preadv = getattr(libc, "preadv64", None) or libc.preadv
    except (OSError, AttributeError, TypeError):  # not POSIX, or a C library without it
        return None
    preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    preadv.restype = ctypes.c_ssize_t
    return preadv


class Submission:
    """Many reads in one system call: Linux native AIO, io_submit(2).

    Reads of ordinary, buffered files are carried out within the submitting call, one after the other, so this saves no
    time on the disk; it saves the returns to the interpreter between them. io_uring could do it too, but containers
    commonly forbid it.
    """

    MAX_READS = 1024

    SPARE = 2
    """Contexts that are kept for later: taking one back keeps the kernel busy for 17 ms, which is a tenth of many an epoch."""

    _spare: ClassVar[list[Submission]] = []  # of the process, since the kernel counts them so, and gives none to a fork

    @classmethod
    def take(cls) -> Submission:
        """One that was released, or a new one. Raises `OSError` if the system has none to give."""
        while cls._spare:
            with contextlib.suppress(IndexError):  # another thread was faster
                if (found := cls._spare.pop()).pid == os.getpid():
                    return found
        return cls()

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._at_work = False
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._setup, self._destroy, self._getevents, self._submit = _SYSCALLS[platform.machine()]
        self._context = ctypes.c_uint64(0)
        self._call(self._setup, self.MAX_READS, ctypes.addressof(self._context))
        self._events = np.empty(self.MAX_READS, EVENT)

    def release(self) -> None:
        """Leave it to whoever takes one next. Whoever releases it must not use it any longer."""
        if self._at_work or self.pid != os.getpid() or len(self._spare) >= self.SPARE:
            self.close()
        else:
            self._spare.append(self)

    def close(self) -> None:
        """Give the context back to the kernel."""
        if self._context.value and self.pid == os.getpid():
            self._call(self._destroy, self._context.value)
            self._context.value = 0

    def read(self, requests: np.ndarray[tuple[int], np.dtype[np.void]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Carry out up to `MAX_READS` requests (`IOCB`, ``data`` numbered from 0); bytes read or -errno of each.

        Requests that the kernel does not take are answered with 0 bytes.
        """
        results = np.zeros(requests.size, np.int64)
        pointers = requests.ctypes.data + np.arange(requests.size, dtype=np.uint64) * np.uint64(IOCB.itemsize)
        self._at_work = True
        try:
            taken = self._call(self._submit, self._context.value, requests.size, pointers.ctypes.data)
        except OSError:
            self._at_work = False
            return results  # not even the first was taken: some file systems do not offer this
        done = 0
        while done < taken:
            done += (
                got := self._call(
                    self._getevents, self._context.value, taken - done, taken - done, self._events.ctypes.data, 0
                )
            )
            results[self._events["data"][:got]] = self._events["result"][:got]
        self._at_work = False
        return results

    def _call(self, number: int, *arguments: int) -> int:
        while (result := int(self._syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))) < 0:
            error = last_error()
            if error.errno != errno.EINTR:
                raise error
        return result


def find_submission() -> Submission | None:
    """A context for many reads in one call; None where the system has none to give."""
    if sys.platform != "linux" or platform.machine() not in _SYSCALLS:
        return None
    try:
        return Submission.take()
    except OSError:  # forbidden by a sandbox, or all contexts of the machine (fs.aio-max-nr) are taken
        return None


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the kernel begin to bring a part of a file to disk, without waiting for it: sync_file_range(2).

    Does nothing where there is no such call, and says nothing of failures: it is a hint, fsync tells.
    """
    if sys.platform == "linux" and _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, 2)


def rename_exclusive(source: str, target: str) -> None:
    """Give a file another name if nothing has that name yet: renameat2(2) with RENAME_NOREPLACE.

    Where the system or the file system has no such call, two steps have to do, with a moment between them.

    Raises:
        FileExistsError: something has.
        OSError: what `os.rename` raises.
    """
    if _renameat2 is not None:
        if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), 1) == 0:
            return
        error = last_error()
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(error.errno, error.strerror, source, None, target)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)


_AT_FDCWD = -100


def _find(name: str, *argtypes: type) -> Callable[..., int] | None:
    """A function of the C library; None where it has no such."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = argtypes
    return function  # type: ignore[no-any-return]


_renameat2 = _find("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_sync_file_range = _find("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
