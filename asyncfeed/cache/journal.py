"""Append items to a file so that what was appended survives the end of the process, at whatever instant."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncfeed.cache import records
from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.records import DATA_START, HEADER_START, Entry, Header, Kind, checksum_of
from asyncfeed.cache.table import Entries
from asyncfeed.errors import AsyncFeedError, ClosedError, DamagedFileError, WriteError
from asyncfeed.storage.libc import start_writeback
from asyncfeed.units import MIB, format_nbytes

__all__ = [
    "DiskErrors",
    "Durability",
    "Journal",
    "Recovery",
    "read_header",
    "sync_directory",
    "synced_meanwhile",
    "write_all",
]

Durability = Literal["process", "fsync"]

WRITEBACK_NBYTES = 8 * MIB
"""So often the kernel is told to bring to disk what was appended, so that sealing need not wait for all of it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found in a journal that an earlier session left."""

    path: str
    kept: int
    """Items that are intact, and there."""
    damaged: int
    """Items that were found but whose bytes do not match their checksum. They are gone, and will be computed again."""
    dropped_nbytes: int
    """Of the torn end that was cut off: an item whose writing had begun and was not acknowledged."""

    def __str__(self) -> str:
        lost = f", {self.damaged} damaged items left out" if self.damaged else ""
        torn = f", a torn end of {format_nbytes(self.dropped_nbytes)} cut off" if self.dropped_nbytes else ""
        return f"{self.path}: {self.kept} items of an earlier session kept{lost}{torn}"


def read_header(path: str) -> Header | None:
    """What a journal or a sealed file says it is; None if it is neither, or cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        return Header.decode(os.pread(file.fileno(), DATA_START - HEADER_START, HEADER_START))
    return None


class Journal:
    """A journal that is open for appending, and read from at the same time. Any thread.

    Opening one that exists replays it: every intact item is kept, and a torn end is cut off.

    Args:
        path: of the journal; the caller holds the lock that goes with it.
        fingerprint: for a new one. Whether it fits an existing one, the caller has to check.
        durability: whether an item is safe from the end of the process when `append` returns, or of the machine as well.

    Raises:
        WriteError: it cannot be made.
        DamagedFileError: it is no journal.
    """

    def __init__(self, path: str, fingerprint: Fingerprint, durability: Durability = "process") -> None:
        self.path = path
        self.recovery: Recovery | None = None
        self.entries = Entries()
        self._durability = durability
        self._failed = self._closed = False
        self._appending, self._syncing = threading.Lock(), threading.Lock()
        with DiskErrors(path, "opened for writing"):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Not in close(): another thread may be reading an item just now. Nor at exit, where some seal what is open.
        weakref.finalize(self, os.close, self.fd).atexit = False
        if os.fstat(self.fd).st_size <= DATA_START:
            self._begin(fingerprint)
        else:
            self._replay()
        self._synced = self._written_back = self._end

    def _begin(self, fingerprint: Fingerprint) -> None:
        """Write the header; whatever is there holds no item, from a session that ended at once."""
        self.header = Header(os.urandom(16), fingerprint)
        text = self.header.encode()
        with DiskErrors(self.path, "begun"):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, text, HEADER_START)
            os.ftruncate(self.fd, DATA_START)  # last: who finds this size finds a header
            if self._durability == "fsync":
                os.fsync(self.fd)
                sync_directory(self.path)
        self._end = DATA_START

    def _replay(self) -> None:
        header = Header.decode(os.pread(self.fd, DATA_START - HEADER_START, HEADER_START))
        if header is None:
            raise DamagedFileError(
                f"{self.path} is no journal of a cache, or its header is damaged; move it away to begin a new one"
            )
        self.header = header
        with mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ) as content:
            end, damaged, sealing = self._find_entries(content)
            size = len(content)
        if end != size:
            with DiskErrors(self.path, "cut to its intact part"):
                os.ftruncate(self.fd, end)
        self._end = end
        # A table comes last, when sealing has begun: all that was to be kept lies before it.
        self.recovery = Recovery(self.path, len(self.entries), damaged, 0 if sealing else max(0, size - end))

    def _find_entries(self, content: mmap.mmap) -> tuple[int, int, bool]:
        """Note every intact entry; where the last one ends, how many were damaged, and whether sealing had begun."""
        end = position = DATA_START
        damaged = 0
        while position < len(content):
            record = records.decode(content, position, self.header.nonce)
            if record is None:
                position = records.resume(content, position + 1, self.header.nonce)
                damaged += position < len(content)
                continue
            if record.kind is Kind.TABLE:
                return end, damaged, True
            position = record.stop
            entry = record.entry
            if _checksum_of(content, entry) == entry.checksum:
                self.entries[record.uid] = entry
                end = record.stop  # the padding may be torn off, and comes back
            elif record.stop < len(content):
                damaged += 1
        return end, damaged, False

    def append(self, uid: str, array: NDArray[Any], digest: bytes = b"") -> Entry:
        """Write an item; when this returns, no end of the process loses it. An earlier one of the same id is replaced.

        Raises:
            WriteError: the disk is full, or failed; the journal is as it was before.
        """
        checksum = checksum_of(records.raw(array))
        with self._appending:
            entry = self._write(Kind.ITEM, uid, array, digest, checksum)
            self.entries[uid] = entry
        return entry

    def commit(self) -> None:
        """Bring to disk what was appended, with ``durability="fsync"``. Threads that wait find it done together.

        Raises:
            WriteError: the disk failed, now or before; what was appended and not committed may or may not be kept.
        """
        if self._durability != "fsync":
            return
        end = self._end
        with self._syncing:
            if self._synced >= end:
                return
            if self._failed:
                raise WriteError(
                    f"{self.path} could not be brought to disk before, and what is written to it now may get lost as well: "
                    f"close the cache and open it again, which looks at what is there"
                )
            reached = self._end
            self._failed = True  # the kernel reports a failure once, and then takes for written what is not
            with DiskErrors(self.path, "brought to disk"):
                os.fdatasync(self.fd)
            self._failed = self._closed = False
            self._synced = reached

    def append_table(self, archive: NDArray[np.uint8]) -> Entry:
        """Write what comes last: the table of a file that is being sealed."""
        with self._appending:
            return self._write(Kind.TABLE, "", archive, b"", checksum_of(archive.data))

    def _write(self, kind: Kind, uid: str, array: NDArray[Any], digest: bytes, checksum: int) -> Entry:
        if self._closed:
            raise ClosedError(f"nothing is written to {self.path} any more: it was sealed, or the cache was closed")
        start = self._end
        pieces = records.encode(self.header.nonce, kind, uid, array, digest, checksum)
        with DiskErrors(self.path, f"written to (item {uid!r})", lambda: os.ftruncate(self.fd, start)):
            self._end = start + write_all(self.fd, pieces, start)
        if self._end - self._written_back >= WRITEBACK_NBYTES:
            start_writeback(self.fd, self._written_back, self._end - self._written_back)
            self._written_back = self._end
        return Entry(start + len(pieces[0]), pieces[1].nbytes, array.dtype, array.shape, checksum, digest)

    @property
    def end(self) -> int:
        """The size of all records, and of what comes before them."""
        return self._end

    def is_at_its_path(self) -> bool:
        """Whether it still has the name of a journal; publishing gives it another."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        return False

    def rewind(self, end: int) -> None:
        """Take back everything from ``end`` on: sealing failed."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, end)
        self._end = end

    def close(self) -> None:
        """Write nothing any more; the file stays as it is, and is closed when nobody refers to this. Idempotent."""
        self._closed = True


def _checksum_of(content: mmap.mmap, entry: Entry) -> int:
    with memoryview(content) as view, view[entry.offset : entry.offset + entry.nbytes] as data:
        return checksum_of(data)


def write_all(fd: int, pieces: Sequence[Any], position: int) -> int:
    """Write pieces one after the other, in one call if the kernel takes all of it; the bytes they have together."""
    nbytes = sum(map(len, pieces))
    done = os.pwritev(fd, pieces, position)
    while done < nbytes:
        views = [memoryview(piece) for piece in pieces]
        skip = done
        while skip >= len(views[0]):
            skip -= len(views.pop(0))
        views[0] = views[0][skip:]
        done += os.pwritev(fd, views, position + done)
    return nbytes


@contextlib.contextmanager
def synced_meanwhile(fd: int, path: str) -> Iterator[None]:
    """Bring a file to disk while the block does something else; it is there when the block has ended well.

    Raises:
        WriteError: it could not be brought to disk.
    """
    failures: list[OSError] = []

    def sync() -> None:
        try:
            os.fsync(fd)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=sync, name="asyncfeed-sync")
    started = True
    try:
        thread.start()
    except RuntimeError:  # the interpreter is going away, and starts no threads any more
        started = False
    try:
        yield
    finally:
        if started:
            thread.join()
    if not started:
        sync()
    with DiskErrors(path, "brought to disk"):
        if failures:
            raise failures[0]


def sync_directory(path: str) -> None:
    """Bring to disk that a file of this path is there."""
    with contextlib.suppress(OSError):  # some network file systems cannot, and do not need to
        fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DiskErrors:
    """A context that makes the errors of the operating system ours; ``undo`` restores what was there."""

    __slots__ = ("_doing", "_path", "_undo")

    def __init__(self, path: str, doing: str, undo: Callable[[], object] | None = None) -> None:
        self._path, self._doing, self._undo = path, doing, undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            return
        if self._undo is not None:  # also after Ctrl-C between two calls
            with contextlib.suppress(OSError):
                self._undo()
        if isinstance(error, OSError) and not isinstance(error, AsyncFeedError):
            raise WriteError(
                f"{self._path} could not be {self._doing}: {error.strerror or error}; everything that was acknowledged is "
                f"kept. Make room, or give the cache another place"
            ) from error
