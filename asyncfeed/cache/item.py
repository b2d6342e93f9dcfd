"""`CachedItem`: the door to a cache."""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence, Sized
from types import TracebackType
from typing import Any, Literal

import anyio
from numpy.typing import NDArray

from asyncfeed.cache.computing import Computing, Function
from asyncfeed.cache.iteration import Items
from asyncfeed.cache.journal import Durability, Recovery
from asyncfeed.cache.modes import Mode, check_call, mode_of
from asyncfeed.cache.populate import OnError, Outcome, PopulateReport, ProgressBar, Rows, populate
from asyncfeed.cache.publish import OnStale
from asyncfeed.cache.seal import Compression
from asyncfeed.cache.session import Session
from asyncfeed.cache.settings import checked_settings
from asyncfeed.cache.store import Store, Verification
from asyncfeed.errors import ArgumentError, ModeError
from asyncfeed.storage.generations import DEFAULT_FILENAME, Generations

__all__ = ["CachedItem"]

CONCURRENCY = 4
"""Functions that run at the same time, unless something else is asked for."""


class CachedItem:
    """Computes an expensive feature once and keeps it in HDF5.

        item = CachedItem("exp/feats", ssl_features, version="wav2vec2-large/layer9", mode="w")
        async with item:
            feats = await item.compute("utt-1", signal)  # get it, or compute and keep it
            await item.to_reader()                       # seal it: a plain HDF5 file
            feats = await item.get("utt-1")

    For asyncio and trio, one event loop at a time. In writer mode items go to a journal, from which they survive the end
    of the process at any instant; sealing makes an HDF5 file of it, with one dataset per id, which is never written to
    again: what later sessions seal lies beside it, and readers see all of it as one. Any number of processes may read;
    each that writes has a writer id of its own.

    Arrays that are handed out are always the caller's own (copied once, from the file), writable, C-contiguous, in
    native byte order.

    Args:
        cache_location: the directory.
        func: what computes an item from ``(uid, *args)``: ``async def``, or plain, which then runs in a thread.
        takes: the names of its arguments, the id first.
        provides: the names of what it gives.
        version: what else decides about the result: a model, a layer, a commit. With ``takes`` and ``provides`` it is
            kept in every file, and compared when one is opened; a reader that states nothing takes what is there.
        mode: what ``async with`` opens it for: ``"w"`` (writer; what is there is kept) or ``"r"`` (reader).
        filename: of the first sealed file.
        compression: of sealed files: ``"gzip"``, ``"lzf"``, 0 to 9 for gzip of that level, or None, which is the fastest
            by far: such items are not read through HDF5.
        writer: the id of this writer; by default ``"rank"`` and the environment variable ``RANK``, or ``"main"``.
        concurrency: functions that run at the same time.
        durability: whether an item that was acknowledged is safe from the end of the process, or with ``"fsync"`` of the
            machine as well.
        check_inputs: keep a digest of the arguments with every item; when an id comes with other arguments it is computed
            again, or refused by a reader. Items that were ``put`` have none, and are taken as they are.
        on_stale: what to do about files that something else has made: ``"error"``, ``"discard"`` (delete them in writer
            mode; a reader passes them over), or ``"ignore"`` (use them).
        locking: False on a file system that has no locks; nobody then notices two writers of one id.

    Raises:
        ArgumentError: an argument has no meaning.
    """

    def __init__(
        self,
        cache_location: str | os.PathLike[str],
        func: Function | None = None,
        takes: Sequence[str] | None = None,
        provides: Sequence[str] | None = None,
        *,
        version: str | float | None = None,
        mode: Literal["w", "r", "writer", "reader"] = "w",
        filename: str = DEFAULT_FILENAME,
        compression: Compression = None,
        writer: str | None = None,
        concurrency: int = CONCURRENCY,
        durability: Durability = "process",
        check_inputs: bool = False,
        on_stale: OnStale = "error",
        locking: bool = True,
    ) -> None:
        self._settings = checked_settings(
            cache_location,
            takes=takes,
            provides=provides,
            version=version,
            filename=filename,
            compression=compression,
            writer=writer,
            durability=durability,
            on_stale=on_stale,
            locking=locking,
        )
        if func is not None and not callable(func):
            raise ArgumentError(f"func={func!r} is not callable")
        if concurrency < 1:
            raise ArgumentError(f"concurrency={concurrency} must be at least 1")
        self._first_mode, self._concurrency = mode_of(mode), concurrency
        self._begin(Mode.CLOSED, func, check_inputs)

    def _begin(self, mode: Mode, func: Function | None, check_inputs: bool) -> None:
        self._session = Session(self._settings, self._concurrency, mode)
        self._computing = Computing(self._session, func, check_inputs)

    @property
    def func(self) -> Function | None:
        """What computes items."""
        return self._computing.func

    @classmethod
    def cache(cls, cache_location: str | os.PathLike[str], **options: Any) -> Callable[[Function], CachedItem]:
        """A decorator that makes a cache of a function; the options are those of the constructor.

        @CachedItem.cache("exp/feats", version="v1")
        def ssl_features(id, sig): ...
        """

        def decorate(func: Function) -> CachedItem:
            item = cls(cache_location, func, **options)
            functools.update_wrapper(item, func, updated=())
            return item

        return decorate

    # -- modes ---------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """``"closed"``, ``"writer"`` or ``"reader"``."""
        return self._session.mode.value

    @property
    def recovered(self) -> Recovery | None:
        """What was found in the journal that an earlier session of this writer left; None if it left none."""
        return None if self._session.store is None else self._session.store.recovery

    async def __aenter__(self) -> CachedItem:
        await self._session.enter(self._first_mode)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None:
            self._session.flights.cancel()
        with anyio.CancelScope(shield=True):
            try:
                await self.aclose()
            except anyio.get_cancelled_exc_class():  # that of asyncio goes through the shield: wait for nothing more
                self._session.flights.cancel()
                await self.aclose()
                raise

    async def aclose(self) -> None:
        """Wait for what is in flight, then close. What was written and not sealed stays in the journal. Idempotent."""
        await self._session.leave()

    async def to_reader(self) -> None:
        """Wait for what is in flight, seal what was written, and read from then on.

        Writers of this machine that have ended without sealing are helped to it. Without anything written, nothing is
        made.

        Raises:
            ModeError: the cache is not in writer mode.
            WriteError: the disk is full; the cache stays in writer mode, and all items in the journal.
        """
        await self._session.to_reader()

    async def to_writer(self) -> None:
        """Wait for what is in flight, and open a journal for further items.

        Raises:
            ModeError: the cache is not in reader mode.
            LockedFileError: another process writes under this writer id; the cache stays in reader mode.
            StaleCacheError: what is there was made by something else than is stated here.
        """
        await self._session.to_writer()

    # -- getting -------------------------------------------------------------------------------------------------

    async def get(self, uid: str) -> NDArray[Any]:
        """An item. Always copies, once.

        Raises:
            CacheMissError: it is not there.
            ModeError: the cache is closed.
            DamagedFileError, ReadError: its bytes cannot be had.
        """
        value = self._session.cached(uid)
        if value is None:
            return await self._session.call("get", _read, uid)
        await self._session.breathe()
        return value

    async def get_many(self, uids: Iterable[str]) -> list[NDArray[Any]]:
        """Items, in the order asked for, read in a few system calls.

        Always copies, once. The arrays of one call share one block of memory: copy what is kept for long.

        Raises:
            CacheMissError: some of them are not there.
            ModeError: the cache is closed.
            DamagedFileError, ReadError: their bytes cannot be had.
        """
        return await self._session.call("get_many", _read_many, list(uids))

    async def compute(self, uid: str, *args: Any) -> NDArray[Any]:
        """An item: what is there, or else what ``func(uid, *args)`` gives, which is kept. Always copies.

        However many ask for the same item at the same time, it is computed once; if that fails, all of them see the error,
        and the next call tries again. One that is cancelled does not cancel the others.

        Raises:
            CacheMissError: it is not there, and this is a reader, which computes nothing; or there is no ``func``.
            StaleCacheError: with ``check_inputs``, a reader holds it for other arguments.
            ItemIdError, ItemTypeError: it cannot be kept under this id, or is no array.
            WriteError: the disk is full.
            Exception: whatever ``func`` raises.
        """
        if not self._computing.check_inputs:
            value = self._session.cached(uid)
            if value is not None:
                await self._session.breathe()
                return value
        async with self._session.calling("compute") as store:
            digest = await self._computing.digest(args)
            if await self._computing.is_there(store, uid, digest):
                return await self._session.run(lambda: store.read(uid))
            return await self._computing.compute(store, uid, args, digest, self._session.functions)

    __call__ = compute

    async def put(self, uid: str, value: object) -> None:
        """Keep a value under an id; one that is there is replaced. When this returns, it is kept.

        Raises:
            ItemIdError, ItemTypeError: it cannot be kept under this id, or is no array.
            ModeError: the cache is not in writer mode.
            WriteError: the disk is full; all that was acknowledged before is kept.
        """
        async with self._session.calling("put") as store:
            store.check_id(uid)
            array = await self._computing.to_array(value)
            await self._session.write(lambda: store.append(uid, array))

    def __getitem__(self, uid: str) -> NDArray[Any]:
        """Like `get`, for plain code, as in a ``Dataset`` of torch: blocks while the item comes from disk."""
        return _read(self._session.opened("get"), uid)

    # -- computing -----------------------------------------------------------------------------------------------

    async def populate(
        self,
        rows: Rows,
        *,
        concurrency: int | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
        total: int | None = None,
    ) -> PopulateReport:
        """Compute and keep all items that are not there. Run it again after a crash: it goes on where it was.

        Args:
            rows: ``(uid, *args)``, from something iterable or asynchronously iterable. What is not a list or a tuple is
                iterated over in a thread. The next rows come while functions run and results are written.
            concurrency: functions that run at the same time; by default that of the cache.
            on_error: raise the first error and cancel the rest, or skip what fails and put it into the report.
            progress: show a bar with rate and time left.
            total: rows to come, for the bar; by default their ``len``, if they have one.

        Raises:
            ModeError: the cache is not in writer mode.
            Exception: with ``on_error="raise"``, the first that a row, ``func`` or the writing raised; what was computed
                before is kept.
        """
        concurrency = self._concurrency if concurrency is None else concurrency
        if concurrency < 1:
            raise ArgumentError(f"concurrency={concurrency} must be at least 1")
        if on_error not in ("raise", "skip"):
            raise ArgumentError(f"on_error={on_error!r} must be 'raise' or 'skip'")
        limiter = anyio.CapacityLimiter(concurrency)

        async def work(uid: str, args: tuple[Any, ...]) -> Outcome:
            digest = await self._computing.digest(args)
            if await self._computing.is_there(store, uid, digest):
                return "skipped"
            twice = self._computing.is_under_way(uid, digest)
            await self._computing.compute(store, uid, args, digest, limiter)
            return "skipped" if twice else "computed"

        async with self._session.calling("populate") as store:
            self._computing.function("")
            total = len(rows) if total is None and isinstance(rows, Sized) else total
            with ProgressBar(total=total, unit="item", smoothing=0.05, disable=not progress) as bar:
                return await populate(
                    rows,
                    lambda uid: not self._computing.check_inputs and uid in store,
                    work,
                    concurrency=concurrency,
                    on_error=on_error,
                    landed=bar.update,
                )

    # -- what is there -------------------------------------------------------------------------------------------

    async def missing(self, uids: Iterable[str]) -> list[str]:
        """Those of the ids that are not there, in their order."""

        return await self._session.call("missing", _missing, list(uids))

    async def verify(self) -> Verification:
        """Read every item and compare its checksum with that of what was written."""
        stop = threading.Event()
        async with self._session.calling("verify") as store:
            return await self._session.run(lambda: store.verify(stop), cancel=stop.set)

    async def compact(self) -> None:
        """Merge all generations into one file, and free the space of what was replaced.

        Takes as much room again while it works. Readers that are open go on with what they have. Items that were not
        sealed are left alone.

        Raises:
            LockedFileError: another process does that just now.
            DamagedFileError: an item is damaged; nothing is changed.
            WriteError: the disk is full; nothing is changed.
        """
        await self._session.call("compact", Store.compact)

    async def refresh(self) -> bool:
        """Look whether other writers have sealed something, so that ``in``, ``len`` and ``keys`` know; whether they have.

        Reading an item that is not there does this by itself.
        """
        return await self._session.call("refresh", Store.refresh)

    def __contains__(self, uid: object) -> bool:
        return uid in self._session.opened("keys")

    def __len__(self) -> int:
        return len(self._session.opened("keys"))

    def keys(self) -> list[str]:
        """All ids, in the order in which they were first written."""
        return self._session.opened("keys").keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __aiter__(self) -> AsyncIterator[tuple[str, NDArray[Any]]]:
        """Every id and its item, in the order in which they were first written. Always copies, once.

        May be left at any time, and goes on over a switch of modes: with what was there when it began.
        """
        return Items(self._session)

    def as_source(self) -> Generations:
        """For ``Feed(item)``: what it streams.

        Raises:
            ModeError: the cache is in writer mode, where what was written is not sealed yet.
        """
        check_call("stream", self._session.mode)
        return self._settings.generations

    def __repr__(self) -> str:
        return f"CachedItem({self._settings.generations.path!r}, {self.mode})"

    # -- pickling ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._session.mode is Mode.WRITER:
            raise ModeError(
                "a cache in writer mode cannot be pickled: its journal belongs to one process. Call to_reader() first; or "
                "make a CachedItem with a writer id of its own (writer=...) in the other process"
            )
        func = self._computing.func
        keep_func = self._session.mode is Mode.CLOSED and _can_pickle(func)
        return {
            "settings": self._settings,
            "first_mode": self._first_mode if self._session.mode is Mode.CLOSED else self._session.mode,
            "concurrency": self._concurrency,
            "begin": (self._session.mode, func if keep_func else None, self._computing.check_inputs),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings, self._first_mode = state["settings"], state["first_mode"]
        self._concurrency = state["concurrency"]
        self._begin(*state["begin"])


def _can_pickle(func: Function | None) -> bool:
    """Whether another process can find a function; a decorated one it cannot, as its name means the cache."""
    try:
        pickle.dumps(func)
    except Exception:  # noqa: BLE001 - what __reduce__ of others raises is no closed list
        return False
    return True


def _read(store: Store, uid: str) -> NDArray[Any]:
    _look_again(store, [uid])
    return store.read(uid)


def _read_many(store: Store, uids: list[str]) -> list[NDArray[Any]]:
    _look_again(store, uids)
    return store.read_many(uids)


def _missing(store: Store, uids: list[str]) -> list[str]:
    _look_again(store, uids)
    return [uid for uid in uids if uid not in store]


def _look_again(store: Store, uids: Iterable[str]) -> None:
    """If something is missing, another writer may have sealed it in the meantime."""
    if not all(uid in store for uid in uids):
        store.refresh()
