"""A cache as one process sees it, for plain code that knows nothing of modes but the letters of `h5py.File`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import multiprocessing
import os
import re
import socket
import threading
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

from numpy.typing import NDArray

from asyncfeed.cache.leftovers import adopt, discard
from asyncfeed.cache.publish import Settings
from asyncfeed.cache.store import Store
from asyncfeed.cache.table import Form
from asyncfeed.cache.view import View
from asyncfeed.errors import (
    ArgumentError,
    AsyncFeedError,
    CacheExistsError,
    CacheMissError,
    ClosedError,
    LockedFileError,
    ModeError,
    SourceMissingError,
    StorageError,
    UnreadableDatasetError,
)
from asyncfeed.process import call_in_child
from asyncfeed.storage.generations import Generations
from asyncfeed.units import MIB

__all__ = ["Shelf"]

log = logging.getLogger("asyncfeed")

WRITING = ("a", "r+", "w", "w-", "x")
MODES = ("r", *WRITING)

SOON_MERGED = 256 * MIB
"""What is no larger than this is made one file whenever something was added; it takes about a second."""

AT_THE_END = -100
"""Negative, so that when a process ends its children have ended before it."""

NEVER = -1


class Shelf:
    """Holds what is sealed and, from the first item that this process writes, a journal of its own.

    Any thread. A forked child, and a process to which this comes by pickle, sees what was written here before, and writes
    under an id of its own, so that no two processes ever write one file. What was written is sealed when this is closed or
    collected, and when the process ends; what a killed process leaves is sealed by the next one that opens the cache.

    Args:
        settings: of the cache; the writer id is chosen here.
        mode: as of `h5py.File`.

    Raises:
        ArgumentError: there is no such mode.
        SourceMissingError: there is nothing, and the mode is ``"r"`` or ``"r+"``.
        CacheExistsError: there is something, and the mode is ``"x"`` or ``"w-"``.
        LockedFileError: another process writes, and the mode is ``"w"``.
        StaleCacheError: what is there was made by something else.
        StorageError: a file cannot be opened, or is damaged.
    """

    def __init__(self, settings: Settings, mode: str) -> None:
        self._settings, self._mode, self._closed = settings, "", True
        self._begin()
        self.open(mode)

    def _begin(self) -> None:
        """As in a process that has just come to it."""
        self._lock = threading.RLock()
        self._store: Store | None = None
        self._inherited: Store | None = None
        self._end: Finalize | None = None
        self._looked = NEVER
        call_in_child(self)

    # -- modes ---------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """What it was opened with last."""
        return self._mode

    @property
    def writing(self) -> bool:
        """Whether items may be added."""
        return not self._closed and self._mode in WRITING

    @property
    def closed(self) -> bool:
        """Whether it was closed, and not opened again."""
        return self._closed

    def open(self, mode: str) -> None:
        """Seal what was written, then open it in a mode; when it cannot be opened, it is closed afterwards."""
        if mode not in MODES:
            raise ArgumentError(f"file_mode={mode!r} must be one of {', '.join(map(repr, MODES))}")
        with self._lock:
            wrote = self.writing
            self._shut()
            _prepare(self._settings, mode, wrote)
            self._mode, self._closed = mode, False
            try:
                self._open(wrote)
            except BaseException:
                self._shut()
                raise

    def _open(self, wrote: bool) -> None:
        self._look_again()
        if self._store is None:
            return
        if self.writing and not _fits_a_writer(self._store):
            self._own()  # says what is stale, or discards it, now and not with the first item
        elif wrote:
            _tidy(self._store)

    def close(self) -> None:
        """Seal what was written, and close. Idempotent.

        Raises:
            WriteError: the disk is full; it stays open.
        """
        with self._lock:
            self.seal()
            if self._store is not None and self.writing:
                _tidy(self._store)
            self._shut()

    def _shut(self) -> None:
        self.seal()
        for store in self._stores():
            store.close()
        self._store = self._inherited = None
        self._closed, self._looked = True, NEVER

    def seal(self) -> None:
        """Publish what this process has written, if it has.

        Raises:
            WriteError: the disk is full; all that was written is kept.
        """
        with self._lock:
            if self._store is not None and self._store.journal is not None:
                self._store.seal()
                end, self._end = self._end, None
                if end is not None:
                    end.cancel()

    def compact(self) -> None:
        """Merge all sealed files into one; see `Store.compact`."""
        with self._lock:
            self._check_open()
            self.seal()
            adopt(self._settings)
            self._look_again()
            if self._store is not None:
                self._store.compact()

    # -- what is there -------------------------------------------------------------------------------------------

    @property
    def generations(self) -> Generations:
        """The sealed files."""
        return self._settings.generations

    def __contains__(self, uid: object) -> bool:
        with self._lock:
            return self._holder(uid) is not None

    def __len__(self) -> int:
        with self._lock:
            self._check_open()
            self._look_again()
            stores = self._stores()
            return len(stores[0]) if len(stores) == 1 else len(self.keys())

    def keys(self) -> list[str]:
        """All ids, in the order in which they were first written."""
        with self._lock:
            self._check_open()
            self._look_again()
            return list(dict.fromkeys(itertools.chain(*(store.keys() for store in reversed(self._stores())))))

    def digest(self, uid: str) -> bytes:
        """Of the arguments that an item was computed from; empty if it is unknown."""
        with self._lock:
            return self._found(uid).digest(uid)

    def form(self, uid: str) -> Form:
        """dtype and shape of an item. May have to read it.

        Raises:
            CacheMissError: it is not there.
        """
        with self._lock:
            store = self._found(uid)
            form = store.form(uid)
            if form is None:
                array = self.read(uid)
                form = array.dtype, array.shape
            return form

    def read(self, uid: str) -> NDArray[Any]:
        """An item. Always copies.

        Raises:
            CacheMissError: it is not there.
            DamagedFileError, ReadError: its bytes cannot be had.
        """
        with self._lock:
            store = self._found(uid)
            try:
                return store.read(uid)
            except UnreadableDatasetError:  # text, which SpeechBrain's own class kept
                return store.view.read_as_is(store.view.rows[uid], uid)

    def came(self, uid: str) -> bool:
        """Whether an item that was missing has been sealed meanwhile. Looks closely, and helps writers that have ended."""
        with self._lock:
            _adopt_if_possible(self._settings)
            self._looked = NEVER
            return uid in self

    def _stores(self) -> list[Store]:
        return [store for store in (self._store, self._inherited) if store is not None]

    def _holder(self, uid: object) -> Store | None:
        self._check_open()
        for store in self._stores():
            if uid in store:
                return store
        if self._look_again() and self._store is not None and uid in self._store:
            return self._store
        return None

    def _found(self, uid: str) -> Store:
        store = self._holder(uid)
        if store is None:
            raise self.missing_error(uid)
        return store

    def _look_again(self) -> bool:
        """Read what others have sealed since the last look; whether there may be something new."""
        changed = _last_change(self._settings.generations.directory)
        if changed == self._looked:
            return False
        if self._store is not None:
            self._store.refresh()
        elif self._settings.generations:
            self._store = Store(self._settings, writing=False)
        self._looked = changed
        return True

    def missing_error(self, uid: str) -> CacheMissError:
        """The error that says what is not there, and how it comes there."""
        how = (
            "call the item, which computes it"
            if self.writing
            else "it is open for reading (file_mode='r'), where nothing is computed: fill it with change_file_mode('a') and "
            "iterate_once() of the dataset, then change_file_mode('r')"
        )
        return CacheMissError(f"item {uid!r} is not in the cache {self.generations.path} ({len(self):,} items); {how}")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the cache {self.generations.path} is closed; change_file_mode() opens it again")

    # -- writing -------------------------------------------------------------------------------------------------

    def expect(self, uid: str) -> None:
        """Raise what would prevent an item from being written, before it is computed.

        Raises:
            ItemIdError: it cannot be kept under this id.
            ModeError: this is open for reading.
            StorageError: nothing can be written there.
        """
        with self._lock:
            self._own().check_id(uid)

    def write(self, uid: str, array: NDArray[Any], digest: bytes = b"") -> None:
        """Write an item; when this returns, it is kept. An earlier one of the same id is replaced.

        Raises:
            ItemIdError: it cannot be kept under this id.
            ModeError: this is open for reading.
            WriteError: the disk is full; all that was written before is kept.
        """
        with self._lock:
            self._own().append(uid, array, digest)

    def _own(self) -> Store:
        """The store that this process writes to, opened when it is first needed."""
        self._check_open()
        if not self.writing:
            raise ModeError(
                f"the cache {self.generations.path} is open for reading (file_mode={self._mode!r}); "
                f"change_file_mode('a') lets it be written to"
            )
        if self._store is None or self._store.journal is None:
            reader, self._store = self._store, _open_writer(self._settings)
            self._end = Finalize(self, _finish, args=(self._store,), exitpriority=AT_THE_END)
            if reader is not None:
                reader.close()
        return self._store

    # -- other processes -----------------------------------------------------------------------------------------

    def forked(self) -> None:
        """In a forked child: the journal is the parent's, and what it held at this moment can be read here."""
        self._lock, self._end = threading.RLock(), None
        if self._store is not None and self._store.journal is not None:
            self._inherited, self._store, self._looked = self._store, None, NEVER

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            try:
                self.seal()  # so that the copy finds it
            except StorageError as error:
                log.warning("a copy of the cache will not see what was written last: %s", str(error))
            return {"settings": self._settings, "mode": self._mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not opened as by open(): a copy neither begins anew nor minds what is there.
        self._settings, self._mode, self._closed = state["settings"], state["mode"], False
        self._begin()

    def __copy__(self) -> Shelf:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Shelf:
        """Itself: copies of a dataset in one process share one cache, and go to another mode together."""
        return self


def _prepare(settings: Settings, mode: str, wrote: bool) -> None:
    """What a mode asks of a cache before it is opened in it."""
    generations = settings.generations
    if mode == "w":
        discard(settings)
        return
    _adopt_if_possible(settings)
    if mode in ("x", "w-") and (generations or generations.journals()):
        raise CacheExistsError(f"there is a cache {generations.path} already, and file_mode={mode!r} wants a new one")
    if mode in ("r", "r+") and not wrote and not generations:
        journals = generations.journals()
        raise SourceMissingError(
            f"there is no sealed cache {generations.path} for file_mode={mode!r}; "
            + (
                f"{', '.join(journals)} is being written, or was left by another machine or another version: close its "
                f"writer, or open it as it did"
                if journals
                else "fill it with file_mode='a' first"
            )
        )


def _adopt_if_possible(settings: Settings) -> None:
    """Seal what ended writers have left; a reader who may not write, or a full disk, goes on without."""
    try:
        adopt(settings)
    except StorageError as error:
        log.warning("what an ended writer left in %s cannot be sealed: %s", settings.generations.directory, str(error))


def _open_writer(settings: Settings) -> Store:
    """Write under the first id of this machine that nobody uses now. They are few, as each leaves its lock file."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]
    if not settings.locking:
        return Store(replace(settings, writer=f"{host}-pid{os.getpid()}"), writing=True)
    number = 0
    while True:
        try:
            return Store(replace(settings, writer=f"{host}-{number}"), writing=True)
        except LockedFileError as error:
            if not _is_taken(error):
                raise
        number += 1


def _is_taken(error: LockedFileError) -> bool:
    """Whether another process is the writer, rather than that there are no locks."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EWOULDBLOCK, errno.EACCES)


def _fits_a_writer(store: Store) -> bool:
    return all(store.settings.accepts(g.fingerprint, writing=True) for g in store.view.generations)


def _finish(store: Store) -> None:
    """Seal what is left when nobody can any more: the owner is gone, or the process ends."""
    try:
        if store.journal is not None:
            store.seal()
            _tidy(store)
    except Exception:
        log.exception(
            "what was written to %s is kept, and will be sealed when it is opened next", store.generations.path
        )
    finally:
        store.close()


def _tidy(store: Store) -> None:
    """Make one file of what is sealed, where that is soon done or worth it; not in worker processes, which are many."""
    if multiprocessing.parent_process() is None and _is_worth_merging(store.view):
        try:
            store.compact()
        except AsyncFeedError as error:
            log.warning("the files of %s are not merged: %s", store.generations.path, str(error))


def _is_worth_merging(view: View) -> bool:
    """Whether merging is quick, or what was added is as much as there was before: so it is paid for by writing.

    A file of another tool is left as it is.
    """
    sizes = [generation.stamp.size for generation in view.generations]
    if len(sizes) < 2 or any(generation.fingerprint is None for generation in view.generations):
        return False
    return sum(sizes) <= SOON_MERGED or sum(sizes[1:]) >= sizes[0]


def _last_change(directory: str) -> int:
    """When something appeared in a directory, or went away."""
    with contextlib.suppress(OSError):
        return os.stat(directory).st_mtime_ns
    return NEVER
