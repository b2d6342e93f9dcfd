"""A cache without its event loop: sealed generations, and in writer mode a journal. Plain Python, any thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from asyncfeed.cache.fingerprint import stale_error
from asyncfeed.cache.generation import Generation
from asyncfeed.cache.ids import Groups, check_id
from asyncfeed.cache.journal import DiskErrors, Journal, Recovery, read_header
from asyncfeed.cache.leftovers import adopt, remove_sealed_journal
from asyncfeed.cache.lock import Lock
from asyncfeed.cache.publish import (
    Settings,
    clear_merging,
    journal_path,
    lock_cache,
    lock_writer,
    merge,
    publish,
    remove,
    remove_unfinished,
)
from asyncfeed.cache.records import DATA_START, Entry
from asyncfeed.cache.table import Form
from asyncfeed.cache.view import Reader, View, intact, read_cached, read_item
from asyncfeed.errors import (
    CacheMissError,
    ChangedFileError,
    SourceMissingError,
    StorageError,
)
from asyncfeed.planning.catalog import FileStamp
from asyncfeed.process import refuse_fork
from asyncfeed.storage.generations import COMPACTING
from asyncfeed.storage.hdf5file import stamp

__all__ = ["Store", "Verification"]

log = logging.getLogger("asyncfeed")

ATTEMPTS = 10
"""To open the files of a cache while others publish and merge."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What `CachedItem.verify` found."""

    checked: int
    """Items whose checksum is that of their bytes."""
    unchecked: int
    """Items that were read but have no checksum: another tool wrote them."""
    damaged: tuple[str, ...]
    """Ids of items whose bytes are not those that were written, or that cannot be read."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


class Store:
    """An open cache.

    Args:
        settings: where it is and what it holds.
        writing: whether to open a journal, so that items can be added.

    Raises:
        StaleCacheError: something there was made by something else.
        LockedFileError: another process writes under this writer id.
        SourceMissingError: nothing is sealed yet, and this is not for writing.
        StorageError: a file cannot be opened, or is damaged.
    """

    def __init__(self, settings: Settings, *, writing: bool) -> None:
        self.settings = settings
        self.generations = settings.generations
        self.view = View()
        self.journal: Journal | None = None
        self._pid = os.getpid()
        self._lock: Lock | None = None
        self._reader = Reader()
        self._groups = Groups()
        self._appending = threading.Lock()
        if writing:
            self._open_writer()
        else:
            self._load(writing=False)

    # -- opening and closing -------------------------------------------------------------------------------------

    def _open_writer(self) -> None:
        settings = self.settings
        with DiskErrors(self.generations.directory, "made"):
            os.makedirs(self.generations.directory, exist_ok=True)
        self._lock = lock_writer(settings, settings.writer)
        try:
            path = journal_path(settings, settings.writer)
            clear_merging(settings)
            remove_unfinished(path)
            remove_sealed_journal(settings, path)
            self._check_journal(path)
            self._load(writing=True)
            self.journal = Journal(path, settings.fingerprint, settings.durability)
            self._groups = Groups([*self.view.rows, *self.journal.entries])
        except BaseException:
            self.close()
            raise
        if self.recovery is not None and (self.recovery.damaged or self.recovery.dropped_nbytes):
            log.warning("%s", self.recovery)

    @property
    def recovery(self) -> Recovery | None:
        """What an earlier session of this writer left; None if nothing."""
        return self.journal.recovery if self.journal is not None else None

    def _load(self, *, writing: bool, strict: bool = True) -> None:
        """Look which generations there are, and open those that are new.

        Not ``strict``, when the cache is open already: others may go on without what cannot be used, which is passed over.
        """
        fitting = tuple(g for g in self._opened(writing, strict) if self._fits(g, writing, strict))
        if fitting != self.view.generations:
            self.view = View(fitting)
            self._groups = Groups([*self.view.rows, *self._written])

    def _paths(self, writing: bool) -> list[str]:
        return self.generations.paths() if writing else self.generations.existing()

    def _opened(self, writing: bool, strict: bool) -> list[Generation]:
        """The generations there are at one moment."""
        known: dict[FileStamp, Generation | None] = {g.stamp: g for g in self.view.generations}
        for _ in range(ATTEMPTS):
            paths = self._paths(writing)
            with contextlib.suppress(SourceMissingError):  # compacting took it away just now
                stamps = [stamp(path) for path in paths]
                known |= {each: _open(each, strict) for each in stamps if each not in known}
                # Compacting and publishing may have changed what is there since the first was opened: then look again.
                if paths == self._paths(writing) and stamps == [stamp(path) for path in paths]:
                    return [g for each in stamps if (g := known[each]) is not None]
        raise ChangedFileError(
            f"the files of {self.generations.path} change whenever they are opened; wait until they are written, and try again"
        )

    def _fits(self, generation: Generation, writing: bool, strict: bool) -> bool:
        """Whether to use a generation; one that is stale is an error, is discarded, or is used all the same."""
        settings, found = self.settings, generation.fingerprint
        if settings.accepts(found, writing=writing):
            return True
        stale = stale_error(generation.path, found, settings.fingerprint)
        if not strict:
            log.warning("passed over: %s", str(stale))
        elif settings.on_stale == "error":
            raise stale
        elif writing:
            self._discard(generation)
        return False

    def _discard(self, generation: Generation) -> None:
        """Delete a stale file, unless somebody has put another one in its place meanwhile."""
        with lock_cache(self.settings), contextlib.suppress(SourceMissingError):
            if stamp(generation.path) == generation.stamp:
                remove(generation.path)

    def _check_journal(self, path: str) -> None:
        header = read_header(path)
        ours, choice = self.settings.fingerprint, self.settings.on_stale
        if header is None or ours.accepts(header.fingerprint, writing=True) or choice == "ignore":
            return
        if os.path.getsize(path) <= DATA_START:  # it holds nothing, and is begun again
            return
        if choice == "error":
            raise stale_error(path, header.fingerprint, ours)
        remove(path)

    def refresh(self) -> bool:
        """Look whether other writers have sealed something; whether they have."""
        before = self.view
        with contextlib.suppress(SourceMissingError):
            self._load(writing=self.journal is not None, strict=False)
        return self.view is not before

    def close(self) -> None:
        """Close all files. What was written and not sealed stays in the journal. Idempotent."""
        journal, self.journal = self.journal, None
        if journal is not None:
            journal.close()
        self.view = View()
        self._reader.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def __del__(self) -> None:
        if hasattr(self, "_reader"):
            self.close()

    # -- what is there -------------------------------------------------------------------------------------------

    @property
    def _written(self) -> Mapping[str, Entry]:
        return {} if self.journal is None else self.journal.entries

    def __contains__(self, uid: object) -> bool:
        return uid in self.view.rows or uid in self._written

    def __len__(self) -> int:
        written = self._written
        return len(self.view.rows) + sum(uid not in self.view.rows for uid in list(written))

    def in_batches(self, nbytes: int) -> Iterator[list[str]]:
        """All ids, so many at a time that their items take about ``nbytes``."""
        batch: list[str] = []
        total = 0
        for uid in self.keys():
            entry = self._written.get(uid)
            size = self.view.item_nbytes(self.view.rows[uid]) if entry is None else entry.nbytes
            if batch and total + size > nbytes:
                yield batch
                batch, total = [], 0
            batch.append(uid)
            total += size
        if batch:
            yield batch

    def keys(self) -> list[str]:
        """All ids, in the order in which they were first written."""
        return list(dict.fromkeys([*self.view.rows, *self._written]))

    def digest(self, uid: str) -> bytes:
        """Of the arguments that an item was computed from; empty if it is unknown."""
        entry = self._written.get(uid)
        return entry.digest if entry is not None else self.view.digest(self.view.rows[uid])

    def form(self, uid: str) -> Form | None:
        """dtype and shape of an item; None if it has to be read to know them."""
        entry = self._written.get(uid)
        return self.view.form(self.view.rows[uid]) if entry is None else (entry.dtype, entry.shape)

    # -- reading -------------------------------------------------------------------------------------------------

    def read_cached(self, uid: str) -> NDArray[Any] | None:
        """An item that is in the page cache; None if it has to be waited for, or is not there. Never blocks."""
        journal, view = self.journal, self.view
        if journal is not None and (entry := journal.entries.get(uid)) is not None:
            return read_cached(journal.fd, entry.offset, entry.nbytes, (entry.dtype, entry.shape))
        row = view.rows.get(uid)
        return None if row is None else view.read_cached(row)

    def read(self, uid: str) -> NDArray[Any]:
        """An item. Always copies. Blocks while it comes from disk.

        Raises:
            CacheMissError: it is not there.
            DamagedFileError, ReadError: its bytes cannot be had.
        """
        journal, view = self.journal, self.view
        if journal is not None and (entry := journal.entries.get(uid)) is not None:
            return read_item(journal.fd, entry, uid, journal.path)
        row = view.rows.get(uid)
        if row is None:
            raise self.missing_error([uid])
        return view.read(row, uid)

    def read_many(self, uids: Sequence[str]) -> list[NDArray[Any]]:
        """Items, in the order asked for. Always copies; see `Reader.read`.

        Raises:
            CacheMissError: some are not there.
            DamagedFileError, ReadError: bytes cannot be had.
        """
        view, journal = self.view, self.journal
        places: dict[str, tuple[int, Entry, str]] = {}
        others: dict[str, NDArray[Any]] = {}
        missing = []
        for uid in uids:
            if journal is not None and (entry := journal.entries.get(uid)) is not None:
                places[uid] = (journal.fd, entry, uid)
            elif (row := view.rows.get(uid)) is None:
                missing.append(uid)
            else:
                fd, found = view.place(row)
                if found is None:
                    others[uid] = view.read(row, uid)
                else:
                    places[uid] = (fd, found, uid)
        if missing:
            raise self.missing_error(missing)
        arrays = dict(zip(places, self._reader.read(list(places.values())), strict=True)) | others
        return _each_its_own(uids, arrays)

    def missing_error(self, uids: Sequence[str]) -> CacheMissError:
        """The error that says what is not there, and how it comes there."""
        more = f" and {len(uids) - 1:,} more are" if len(uids) > 1 else " is"
        how = (
            "put() or compute() it"
            if self.journal is not None
            else "fill the cache in writer mode (to_writer(), then compute(), put() or populate()) and seal it with "
            "to_reader(); missing() lists what is absent"
        )
        return CacheMissError(
            f"item {uids[0]!r}{more} not in the cache {self.generations.path} ({len(self):,} items); {how}"
        )

    def verify(self, stop: threading.Event) -> Verification:
        """Read everything and compare checksums, until ``stop`` is set."""
        checked = unchecked = 0
        damaged = []
        for uid in self.keys():
            if stop.is_set():
                break
            entry = self._written.get(uid)
            row = self.view.rows.get(uid, -1)
            checksum = entry.checksum if entry is not None else self.view.checksum(row)
            try:
                good = intact(self.read(uid), checksum)
            except StorageError:
                good = False
            if not good:
                damaged.append(uid)
            elif checksum < 0:
                unchecked += 1
            else:
                checked += 1
        return Verification(checked, unchecked, tuple(damaged))

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, uid: str, array: NDArray[Any], digest: bytes = b"") -> None:
        """Write an item; when this returns, it is kept.

        Raises:
            ItemIdError: it cannot be kept under this id.
            WriteError: the disk is full; all that was acknowledged is kept.
        """
        refuse_fork(self._pid, "cache writer")
        journal = self.journal
        assert journal is not None, "only called in writer mode"
        with self._appending:  # of two ids that exclude each other, one comes first
            self.check_id(uid)
            journal.append(uid, array, digest)
            self._groups.add(uid)
        journal.commit()

    def check_id(self, uid: str) -> None:
        """Raise `ItemIdError` if an item cannot be kept under this id."""
        check_id(uid)
        self._groups.check(uid, self)  # type: ignore[arg-type]

    def seal(self) -> str | None:
        """Publish what the journal holds as a generation, and begin to read it; its path, or None if there is nothing.

        Raises:
            WriteError: the disk is full; the journal is as it was.
        """
        refuse_fork(self._pid, "cache writer")
        assert self.journal is not None, "only called in writer mode"
        journal = self.journal
        adopt(self.settings, but=self.settings.writer)
        sealed = publish(self.settings, journal) if journal.entries else None
        if sealed is None:
            remove(journal.path)
        try:
            if self.generations:
                self._load(writing=False, strict=False)
        finally:  # not before: whoever looks meanwhile finds every item, here or there
            self.journal = None
            journal.close()
            self._lock, lock = None, self._lock
            if lock is not None:
                lock.close()
        return sealed

    # -- merging -------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Merge all generations into one, and free the space of what was replaced. Readers go on with what they have.

        Raises:
            LockedFileError: another process does that just now.
            ChangedFileError: another process discarded a generation meanwhile; nothing is changed.
            DamagedFileError: an item's bytes are not those that were written; nothing is changed.
            ItemIdError: writers have used ids that one file cannot hold; nothing is changed.
            StaleCacheError: what would be merged was made by different things; nothing is changed.
            WriteError: the disk is full; nothing is changed.
        """
        refuse_fork(self._pid, "cache")
        writing = self.journal is not None
        with lock_writer(self.settings, COMPACTING):
            self._load(writing=writing)
            merge(self.settings, self.view)
        self._load(writing=writing)


def _open(found: FileStamp, strict: bool) -> Generation | None:
    """A generation; None if it cannot be used, or is not the one that was found any more."""
    try:
        generation = Generation(found.path)
    except SourceMissingError:
        raise
    except StorageError as error:
        if strict:
            raise
        log.warning("passed over: %s", str(error))
        return None
    return generation if generation.stamp == found else None


def _each_its_own(uids: Sequence[str], arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """In the order asked for; an id that is asked for twice is not the same array twice."""
    left = dict(arrays)
    return [left.pop(uid) if uid in left else arrays[uid].copy() for uid in uids]
