"""Blocks of shared memory that nothing can leak.

None of them has a name once it exists, so that none is left behind, whatever ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Iterator

from asyncfeed.errors import BudgetError
from asyncfeed.units import format_nbytes

__all__ = ["MAKERS", "NAMED_MOUNT", "make_anonymous", "make_memfd", "make_named", "pick_maker"]

Maker = Callable[[int], mmap.mmap]
"""Makes a readable and writable shared mapping of a number of bytes, filled with zeros."""

NAMED_MOUNT = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux


def make_memfd(nbytes: int) -> mmap.mmap:
    """memfd_create(2): bounded by memory alone, not by the size of a mount."""
    fd = os.memfd_create("asyncfeed", os.MFD_CLOEXEC)
    with _closing(fd):
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)


def make_named(nbytes: int) -> mmap.mmap:
    """POSIX shared memory, whose name is gone as soon as it is mapped.

    Raises:
        BudgetError: the mount has too little space. Without asking first, writing to it would kill the process (SIGBUS).
    """
    path = f"{NAMED_MOUNT}/asyncfeed-{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with _closing(fd):
        os.unlink(path)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            space = os.statvfs(NAMED_MOUNT)
            raise BudgetError(
                f"{NAMED_MOUNT} has {format_nbytes(space.f_bavail * space.f_frsize)} free of "
                f"{format_nbytes(space.f_blocks * space.f_frsize)}, but a segment of {format_nbytes(nbytes)} is wanted; "
                f"enlarge it (mount -o remount,size=..., or docker run --shm-size), or lower memory_budget"
            ) from error
        return mmap.mmap(fd, nbytes)


def make_anonymous(nbytes: int) -> mmap.mmap:
    """A mapping without any file; forked children still share it."""
    return mmap.mmap(-1, nbytes)


MAKERS: dict[str, Maker] = {"memfd": make_memfd, "named": make_named, "anonymous": make_anonymous}


def pick_maker() -> str:
    """The name of the best maker that works here."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # forbidden by some sandboxes
            make_memfd(mmap.PAGESIZE).close()
            return "memfd"
    if os.path.isdir(NAMED_MOUNT) and hasattr(os, "posix_fallocate"):
        with contextlib.suppress(OSError, BudgetError):
            make_named(mmap.PAGESIZE).close()
            return "named"
    return "anonymous"


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)  # the mapping keeps the memory
