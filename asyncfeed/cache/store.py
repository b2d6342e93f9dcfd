"""A cache without its event loop: sealed generations, and in writer mode a journal. Plain Python, any thread."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import NDArray

from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.generation import Generation
from asyncfeed.cache.ids import Groups, check_id
from asyncfeed.cache.journal import Durability, Journal, Recovery, read_header, sync_directory, writing
from asyncfeed.cache.lock import PATIENCE, Lock
from asyncfeed.cache.records import Entry
from asyncfeed.cache.seal import Compression, UnexpectedLayoutError, seal, seal_copy
from asyncfeed.cache.view import Reader, View, intact, read_cached, read_item
from asyncfeed.errors import (
    CacheMissError,
    DamagedFileError,
    LockedFileError,
    SourceMissingError,
    StaleCacheError,
    StorageError,
)
from asyncfeed.planning.catalog import Catalog
from asyncfeed.process import refuse_fork
from asyncfeed.storage.generations import COMPACTING, Generations
from asyncfeed.storage.hdf5file import stamp
from asyncfeed.storage.index import beside, save_index
from asyncfeed.storage.libc import rename_exclusive
from asyncfeed.storage.scan import scan
from asyncfeed.storage.source import Container

__all__ = ["OnStale", "Settings", "Store", "Verification"]

OnStale = Literal["error", "discard", "ignore"]

log = logging.getLogger("asyncfeed")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store needs to know; can be sent to other processes."""

    generations: Generations
    fingerprint: Fingerprint
    writer: str = "main"
    compression: Compression = None
    durability: Durability = "process"
    on_stale: OnStale = "error"
    locking: bool = True


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
        if writing:
            self._open_writer()
        else:
            self._load(writing=False)

    # -- opening and closing -------------------------------------------------------------------------------------

    def _open_writer(self) -> None:
        settings = self.settings
        with writing(self.generations.directory, "made"):
            os.makedirs(self.generations.directory, exist_ok=True)
        self._lock = self._lock_writer(settings.writer)
        try:
            path = self._journal_path(settings.writer)
            self._remove_sealed_journal(path)
            with self._lock_cache():
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

    def _load(self, *, writing: bool) -> None:
        """Look which generations there are, and open those that are new."""
        known = {g.stamp: g for g in self.view.generations}
        generations = [self._opened(path, known) for path in self._paths(writing)]
        fitting = [g for g in generations if self._fits(g, writing)]
        self.view = View(fitting)

    def _paths(self, writing: bool) -> list[str]:
        return self.generations.paths() if writing else self.generations.existing()

    def _opened(self, path: str, known: dict[Any, Generation]) -> Generation:
        for _ in range(10):
            try:
                generation = Generation(path)
                break
            except SourceMissingError:
                # Compacting took it away just now: what it held is in the first generation, which is looked at again.
                path = self.generations.path
        else:
            raise SourceMissingError(f"the files of {self.generations.path} go away while they are opened; try again")
        kept = known.get(generation.stamp)
        return generation if kept is None else kept

    def _fits(self, generation: Generation, writing: bool) -> bool:
        """Whether to use a generation; one that is stale is an error, is discarded, or is used all the same."""
        ours, found = self.settings.fingerprint, generation.fingerprint
        if ours.accepts(found, writing=writing) or self.settings.on_stale == "ignore":
            return True
        if self.settings.on_stale == "error":
            raise _stale(generation.path, found, ours)
        if writing:
            _remove(generation.path)
        return False

    def _check_journal(self, path: str) -> None:
        header = read_header(path)
        ours, choice = self.settings.fingerprint, self.settings.on_stale
        if header is None or ours.accepts(header.fingerprint, writing=True) or choice == "ignore":
            return
        if choice == "error":
            raise _stale(path, header.fingerprint, ours)
        _remove(path)

    def _remove_sealed_journal(self, path: str) -> None:
        """Remove a journal whose items were sealed by copying them, when the process ended before it did that itself."""
        header = read_header(path)
        if header is not None and any(
            (found := read_header(p)) and found.nonce == header.nonce for p in self._paths(True)
        ):
            _remove(path)

    def refresh(self) -> bool:
        """Look whether other writers have sealed something; whether they have."""
        before = [g.stamp for g in self.view.generations]
        with contextlib.suppress(SourceMissingError):
            self._load(writing=self.journal is not None)
        return [g.stamp for g in self.view.generations] != before

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
    def _written(self) -> dict[str, Entry]:
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
            except DamagedFileError:
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
        assert self.journal is not None, "only called in writer mode"
        self.check_id(uid)
        self.journal.append(uid, array, digest)
        self._groups.add(uid)

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
        self._adopt_all()
        sealed = self._publish(journal) if journal.entries else None
        if sealed is None:
            _remove(journal.path)
        self.journal = None
        journal.close()
        self._lock, lock = None, self._lock
        if lock is not None:
            lock.close()
        if self.generations:
            self._load(writing=False)
        return sealed

    def _publish(self, journal: Journal) -> str:
        """Give a journal's items a name that readers look for. On failure the journal is as it was."""
        end = journal.end
        try:
            path, catalog = self._sealed(journal)
            with self._lock_cache(), writing(path, "published"):
                published = _rename_to_next(path, self.generations)
                sync_directory(published)
        except BaseException:
            journal.rewind(end)
            raise
        if path != journal.path:
            _remove(journal.path)
        _keep_index(catalog, published)
        return published

    def _sealed(self, journal: Journal) -> tuple[str, Catalog]:
        """Make an HDF5 file of a journal, in place if that is possible: its path, and what HDF5 finds in it."""
        if self.settings.compression is None:
            end = journal.end
            with contextlib.suppress(UnexpectedLayoutError):
                seal(journal)
                return journal.path, _inspected(journal.path, journal.entries)
            journal.rewind(end)
        path = f"{journal.path}.copy"
        seal_copy(
            path,
            journal.header,
            journal.entries,
            lambda uid: read_item(journal.fd, journal.entries[uid], uid, journal.path),
            self.settings.compression,
        )
        return path, _inspected(path, {})

    # -- merging -------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Merge all generations into one, and free the space of what was replaced. Readers go on with what they have.

        Raises:
            LockedFileError: another process does that just now.
            DamagedFileError: an item's bytes are not those that were written; nothing is changed.
            WriteError: the disk is full; nothing is changed.
        """
        refuse_fork(self._pid, "cache")
        with self._lock_writer(COMPACTING):
            self._load(writing=self.journal is not None)
            old = self.view.generations
            if len(old) < 2 and not _has_holes(self.view):
                return
            merged, catalog = self._merge()
            with self._lock_cache(), writing(merged, "published"):
                os.replace(merged, self.generations.path)
                sync_directory(merged)
                for generation in old:  # the oldest first: what is left always ends with the newest
                    if generation.path != self.generations.path:
                        _remove(generation.path)
            _remove(self._journal_path(COMPACTING))
            _keep_index(catalog, self.generations.path)
        self._load(writing=self.journal is not None)

    def _merge(self) -> tuple[str, Catalog]:
        """Write all items into one sealed file; its path, and what HDF5 finds in it."""
        view, path = self.view, self._journal_path(COMPACTING)
        for left in (path, f"{path}.copy"):
            _remove(left)
        newest = view.generations[-1].fingerprint or self.settings.fingerprint
        with contextlib.closing(Journal(path, newest)) as journal:
            for uid, row in view.rows.items():
                array = view.read(row, uid)
                if not intact(array, view.checksum(row)):
                    raise DamagedFileError(
                        f"item {uid!r} in {view.path(row)} is damaged; replace it (in writer mode, with put()) and seal, "
                        f"then compact"
                    )
                journal.append(uid, array, view.digest(row))
            return self._sealed(journal)

    # -- other writers -------------------------------------------------------------------------------------------

    def _adopt_all(self) -> None:
        """Seal what writers of this machine have left that ended without doing it; the others keep theirs."""
        for path in self.generations.journals():
            writer = path[len(self.generations.path) + 1 : -len(".journal")]
            header = read_header(path)
            here = Lock.host(self._lock_path(writer)) == socket.gethostname()
            if writer != self.settings.writer and here and header and header.fingerprint == self.settings.fingerprint:
                with contextlib.suppress(LockedFileError), self._lock_writer(writer):
                    self._adopt(path)

    def _adopt(self, path: str) -> None:
        self._remove_sealed_journal(path)
        if os.path.exists(path):
            with contextlib.closing(Journal(path, self.settings.fingerprint)) as journal:
                log.warning("sealing what an ended writer left: %s", journal.recovery)
                if journal.entries:
                    self._publish(journal)
                else:
                    _remove(path)

    # -- names and locks -----------------------------------------------------------------------------------------

    def _journal_path(self, writer: str) -> str:
        return self.generations.beside(f"{writer}.journal")

    def _lock_path(self, writer: str) -> str:
        return self.generations.beside(f"{writer}.lock")

    def _lock_writer(self, writer: str) -> Lock:
        return Lock(
            self._lock_path(writer),
            f"writer {writer!r} of the cache {self.generations.path}",
            advice="give every process that writes a writer id of its own (writer='rank1'), or wait until it has ended",
            locking=self.settings.locking,
        )

    def _lock_cache(self) -> Lock:
        """Held for moments: while files appear under names that readers look for, or disappear."""
        return Lock(
            self.generations.beside("lock"),
            f"the cache {self.generations.path}",
            advice="it publishes or removes files there; try again",
            patience=10 * PATIENCE,
            locking=self.settings.locking,
        )


def _stale(path: str, found: Fingerprint | None, ours: Fingerprint) -> StaleCacheError:
    was = f"made with {found}" if found is not None else "not made by asyncfeed, so that it is unknown what made it"
    return StaleCacheError(
        f"{path} was {was}; it is opened with {ours}. Choose: state what it was made with; on_stale='discard' to delete it "
        f"(in writer mode) and compute its items again; on_stale='ignore' to use it as it is; or another place for the cache"
    )


def _rename_to_next(path: str, generations: Generations) -> str:
    """Give a sealed file the name of the next generation."""
    while True:
        target = generations.numbered(max(generations.numbers(), default=0) + 1)
        with contextlib.suppress(FileExistsError):
            rename_exclusive(path, target)
            return target


def _remove(path: str) -> None:
    """Remove a file of a cache, and its index, if they are there."""
    for each in (path, beside(path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def _inspected(path: str, entries: Mapping[str, Entry]) -> Catalog:
    """What HDF5 finds in a file that was just sealed.

    Raises:
        UnexpectedLayoutError: something else than was put there.
    """
    catalog = scan(Container(path, "{utt}"))
    found = dict(zip(catalog.ids, catalog.offset.tolist(), strict=True))
    skipped = {s.utt for s in catalog.skipped}
    for uid, entry in entries.items():
        if found.get(uid) != entry.offset and entry.nbytes and uid not in skipped:
            raise UnexpectedLayoutError(f"HDF5 does not find item {uid!r} where it is")
    return catalog


def _keep_index(catalog: Catalog, path: str) -> None:
    """Put the catalog of a sealed file beside it, so that a feed need not scan it."""
    with contextlib.suppress(StorageError, OSError):
        save_index(replace(catalog, files=(stamp(path),)), beside(path))


def _has_holes(view: View) -> bool:
    """Whether a noticeable part of a file is taken by items that were replaced."""
    size = sum(g.stamp.size for g in view.generations)
    return (size - view.nbytes) * 20 > size


def _each_its_own(uids: Sequence[str], arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """In the order asked for; an id that is asked for twice is not the same array twice."""
    left = dict(arrays)
    return [left.pop(uid) if uid in left else arrays[uid].copy() for uid in uids]
