"""`CachedItem`: the door to a cache."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence, Sized
from types import TracebackType
from typing import Any, Literal, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from tqdm import tqdm

from asyncfeed.cache.flight import Flights
from asyncfeed.cache.gate import Gate
from asyncfeed.cache.journal import Durability, Recovery
from asyncfeed.cache.modes import Mode, check_call, check_step, mode_of
from asyncfeed.cache.populate import OnError, Outcome, PopulateReport, Rows, populate
from asyncfeed.cache.seal import Compression
from asyncfeed.cache.settings import checked_settings
from asyncfeed.cache.store import OnStale, Store, Verification
from asyncfeed.cache.values import digest_of, to_array
from asyncfeed.engine.thread import run_stoppable
from asyncfeed.errors import ArgumentError, CacheMissError, ModeError, StaleCacheError
from asyncfeed.process import call_in_child
from asyncfeed.storage.generations import DEFAULT_FILENAME, Generations
from asyncfeed.units import MIB

__all__ = ["CachedItem"]

LONGEST_TURN = 0.005
"""Seconds after which ``get`` lets other tasks run, even if items are in memory all the time."""

CONCURRENCY = 4
"""Functions that run at the same time, unless something else is asked for."""

MAX_THREADS = 8
"""Threads that read and write for one cache at the same time."""

ITERATION_NBYTES = 16 * MIB
"""Of items that are read at a time when all are gone through."""

Result = TypeVar("Result")
Function = Callable[..., Any]


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
        self.func = func
        self._first_mode = mode_of(mode)
        self._concurrency, self._check_inputs = concurrency, check_inputs
        self._mode = Mode.CLOSED
        self._unopened()

    def _unopened(self) -> None:
        self._store: Store | None = None
        self._ready: Store | None = None
        self._turn = 0.0
        self._new_loop()
        call_in_child(self)

    def _new_loop(self) -> None:
        """What belongs to an event loop is made anew when the cache is opened."""
        self._gate = Gate()
        self._flights = Flights(self._gate.enter, self._gate.leave)
        self._limiters: dict[int, anyio.CapacityLimiter] = {}

    def forked(self) -> None:
        """In a forked child: whatever was in flight is the parent's."""
        self._new_loop()
        self._ready = self._store

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
        return self._mode.value

    @property
    def recovered(self) -> Recovery | None:
        """What was found in the journal that an earlier session of this writer left; None if it left none."""
        return None if self._store is None else self._store.recovery

    async def __aenter__(self) -> CachedItem:
        check_step(self._mode, self._first_mode)
        self._new_loop()
        async with self._switch(self._first_mode):
            self._store = await self._run(functools.partial(self._open, self._first_mode))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None:
            self._flights.cancel()
        with anyio.CancelScope(shield=True):
            await self.aclose()

    async def aclose(self) -> None:
        """Wait for what is in flight, then close. What was written and not sealed stays in the journal. Idempotent."""
        if self._mode is not Mode.CLOSED:
            async with self._switch(Mode.CLOSED):
                store, self._store = self._store, None
                if store is not None:
                    await self._run(store.close)

    async def to_reader(self) -> None:
        """Wait for what is in flight, seal what was written, and read from then on; see `CachedItem`.

        Writers of this machine that have ended without sealing are helped to it. Without anything written, nothing is
        made.

        Raises:
            ModeError: the cache is not in writer mode.
            WriteError: the disk is full; the cache stays in writer mode, and all items in the journal.
        """
        async with self._switch(Mode.READER):
            await self._run(self._open_store.seal)

    async def to_writer(self) -> None:
        """Wait for what is in flight, and open a journal for further items.

        Raises:
            ModeError: the cache is not in reader mode, or not opened by ``async with``.
            LockedFileError: another process writes under this writer id; the cache stays in reader mode.
            StaleCacheError: what is there was made by something else than is stated here.
        """
        async with self._switch(Mode.WRITER):
            reader = self._store
            self._store = await self._run(functools.partial(self._open, Mode.WRITER))
            if reader is not None:
                await self._run(reader.close)

    def _open(self, mode: Mode) -> Store:
        return Store(self._settings, writing=mode is Mode.WRITER)

    @contextlib.asynccontextmanager
    async def _switch(self, wanted: Mode) -> AsyncIterator[None]:
        """Go to another mode if the block ends well; stay in this one if not."""
        check_step(self._mode, wanted)
        async with self._gate.switch():
            check_step(self._mode, wanted)  # another switch may have come first
            self._ready = None
            try:
                yield
                self._mode = wanted
            finally:
                self._ready = self._store

    # -- getting -------------------------------------------------------------------------------------------------

    async def get(self, uid: str) -> NDArray[Any]:
        """An item. Always copies, once.

        Raises:
            CacheMissError: it is not there.
            ModeError: the cache is closed.
            DamagedFileError, ReadError: its bytes cannot be had.
        """
        value = self._cached(uid)
        if value is None:
            return await self._call("get", self._read, uid)
        if time.perf_counter() > self._turn:
            await self._yield()
        return value

    async def get_many(self, uids: Iterable[str]) -> list[NDArray[Any]]:
        """Items, in the order asked for, read in a few system calls.

        Always copies, once. The arrays of one call share one block of memory: copy what is kept for long.

        Raises:
            CacheMissError: some of them are not there.
            ModeError: the cache is closed.
            DamagedFileError, ReadError: their bytes cannot be had.
        """
        return await self._call("get_many", self._read_many, list(uids))

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
        if not self._check_inputs:
            value = self._cached(uid)
            if value is not None:
                if time.perf_counter() > self._turn:
                    await self._yield()
                return value
        async with self._calling("compute"):
            return await self._compute(uid, args, self._limiter(self._concurrency))

    __call__ = compute

    async def put(self, uid: str, value: object) -> None:
        """Keep a value under an id; one that is there is replaced. When this returns, it is kept.

        Raises:
            ItemIdError, ItemTypeError: it cannot be kept under this id, or is no array.
            ModeError: the cache is not in writer mode.
            WriteError: the disk is full; all that was acknowledged before is kept.
        """
        async with self._calling("put") as store:
            store.check_id(uid)
            await self._run(lambda: store.append(uid, to_array(value)))

    def __getitem__(self, uid: str) -> NDArray[Any]:
        """Like `get`, for plain code, as in a ``Dataset`` of torch: blocks while the item comes from disk."""
        store = self._opened("get")
        return self._read(store, uid)

    def _cached(self, uid: str) -> NDArray[Any] | None:
        """An item that need not be waited for."""
        return None if self._ready is None else self._ready.read_cached(uid)

    async def _yield(self) -> None:
        await checkpoint()
        self._turn = time.perf_counter() + LONGEST_TURN

    def _read(self, store: Store, uid: str) -> NDArray[Any]:
        self._look_again(store, [uid])
        return store.read(uid)

    def _read_many(self, store: Store, uids: list[str]) -> list[NDArray[Any]]:
        self._look_again(store, uids)
        return store.read_many(uids)

    def _look_again(self, store: Store, uids: Iterable[str]) -> None:
        """If something is missing, another writer may have sealed it in the meantime."""
        if not all(uid in store for uid in uids):
            store.refresh()

    # -- computing -----------------------------------------------------------------------------------------------

    async def _compute(self, uid: str, args: tuple[Any, ...], limiter: anyio.CapacityLimiter) -> NDArray[Any]:
        store, digest = self._open_store, await self._digest(args)
        if await self._holds(store, uid, digest):
            return await self._run(lambda: store.read(uid))
        return await self._share(store, uid, args, digest, limiter)

    async def _digest(self, args: tuple[Any, ...]) -> bytes:
        return await self._run(lambda: digest_of(args)) if self._check_inputs else b""

    async def _holds(self, store: Store, uid: str, digest: bytes) -> bool:
        """Whether an item is there and comes from these arguments; false only where it may be computed."""
        if uid not in store and self._mode is Mode.READER:
            await self._run(store.refresh)
        there = uid in store
        if there and not self._differs(store, uid, digest):
            return True
        if self._mode is Mode.READER:
            if not there:
                raise store.missing_error([uid])
            raise StaleCacheError(
                f"item {uid!r} in {self._settings.generations.path} was computed from other arguments; compute it again "
                f"in writer mode, or pass check_inputs=False to take what is there"
            )
        return False

    async def _share(
        self, store: Store, uid: str, args: tuple[Any, ...], digest: bytes, limiter: anyio.CapacityLimiter
    ) -> NDArray[Any]:
        """What the function gives, once for all who ask."""
        store.check_id(uid)
        func = self._function(uid)
        return await self._flights.share(
            (uid, digest), lambda: self._compute_and_keep(func, uid, args, digest, limiter)
        )

    def _differs(self, store: Store, uid: str, digest: bytes) -> bool:
        """Whether an item is known to come from other arguments."""
        return bool(digest) and store.digest(uid) not in (b"", digest)

    def _function(self, uid: str) -> Function:
        if self.func is None:
            raise CacheMissError(
                f"item {uid!r} is not in the cache {self._settings.generations.path}, and there is nothing to compute it "
                f"with: pass func= to CachedItem, or put() the item"
            )
        return self.func

    async def _compute_and_keep(
        self, func: Function, uid: str, args: tuple[Any, ...], digest: bytes, limiter: anyio.CapacityLimiter
    ) -> NDArray[Any]:
        store = self._open_store

        def keep(value: object) -> NDArray[Any]:
            array = to_array(value).copy()  # the function may use the memory again
            store.append(uid, array, digest)
            return array

        async with contextlib.AsyncExitStack() as stack:
            if _is_async(func):
                await stack.enter_async_context(limiter)
                value = await func(uid, *args)
            else:
                value, kept = await to_thread.run_sync(_call_plain, func, (uid, *args), keep, limiter=limiter)
                if kept is not None:
                    return kept
                await stack.enter_async_context(limiter)
                value = await value
        return await self._run(lambda: keep(value))

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
            digest = await self._digest(args)
            if await self._holds(store, uid, digest):
                return "skipped"
            await self._share(store, uid, args, digest, limiter)
            return "computed"

        async with self._calling("populate") as store:
            self._function("")
            total = len(rows) if total is None and isinstance(rows, Sized) else total
            with tqdm(total=total, unit="item", smoothing=0.05, disable=not progress) as bar:
                return await populate(
                    rows,
                    lambda uid: not self._check_inputs and uid in store,
                    work,
                    concurrency=concurrency,
                    on_error=on_error,
                    landed=bar.update,
                )

    # -- what is there -------------------------------------------------------------------------------------------

    async def missing(self, uids: Iterable[str]) -> list[str]:
        """Those of the ids that are not there, in their order."""

        def look(store: Store, uids: list[str]) -> list[str]:
            self._look_again(store, uids)
            return [uid for uid in uids if uid not in store]

        return await self._call("missing", look, list(uids))

    async def verify(self) -> Verification:
        """Read every item and compare its checksum with that of what was written."""
        async with self._calling("verify") as store:
            return await run_stoppable(store.verify)

    async def compact(self) -> None:
        """Merge all generations into one file, and free the space of what was replaced.

        Takes as much room again while it works. Readers that are open go on with what they have. Items that were not
        sealed are left alone.

        Raises:
            LockedFileError: another process does that just now.
            DamagedFileError: an item is damaged; nothing is changed.
            WriteError: the disk is full; nothing is changed.
        """
        async with self._calling("compact") as store:
            await self._run(store.compact)

    async def refresh(self) -> bool:
        """Look whether other writers have sealed something, so that ``in``, ``len`` and ``keys`` know; whether they have.

        Reading an item that is not there does this by itself.
        """
        return await self._call("refresh", Store.refresh)

    def __contains__(self, uid: object) -> bool:
        return uid in self._opened("keys")

    def __len__(self) -> int:
        return len(self._opened("keys"))

    def keys(self) -> list[str]:
        """All ids, in the order in which they were first written."""
        return self._opened("keys").keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    async def __aiter__(self) -> AsyncIterator[tuple[str, NDArray[Any]]]:
        """Every id and its item, in the order in which they were first written. Always copies, once."""
        for uids in self._opened("items").in_batches(ITERATION_NBYTES):
            for pair in zip(uids, await self._call("items", Store.read_many, uids), strict=True):
                yield pair

    def as_source(self) -> Generations:
        """For ``Feed(item)``: what it streams.

        Raises:
            ModeError: the cache is in writer mode, where what was written is not sealed yet.
        """
        check_call("stream", self._mode)
        return self._settings.generations

    def __repr__(self) -> str:
        return f"CachedItem({self._settings.generations.path!r}, {self._mode.value})"

    # -- calls and threads ---------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _calling(self, call: str) -> AsyncIterator[Store]:
        """Be in flight; waits while the mode is being switched."""
        async with self._gate.call():
            if self._store is None and self._mode is Mode.READER:
                await self._run(lambda: self._opened(call))
            yield self._opened(call)

    async def _call(self, call: str, function: Callable[..., Result], *args: Any) -> Result:
        """Call ``function(store, *args)`` in a thread."""
        async with self._calling(call) as store:
            return await self._run(functools.partial(function, store, *args))

    async def _run(self, function: Callable[[], Result]) -> Result:
        return await to_thread.run_sync(function, limiter=self._limiter(0))

    def _limiter(self, concurrency: int) -> anyio.CapacityLimiter:
        """One for the functions, and one (0) for reading and writing: those of the event loop may all be taken."""
        limiter = self._limiters.get(concurrency)
        if limiter is None:
            limiter = self._limiters[concurrency] = anyio.CapacityLimiter(concurrency or MAX_THREADS)
        return limiter

    @property
    def _open_store(self) -> Store:
        assert self._store is not None, "within a call, or a step from an open mode"
        return self._store

    def _opened(self, call: str) -> Store:
        check_call(call, self._mode)
        if self._store is None:  # a reader that came by pickle
            self._store = self._ready = self._open(self._mode)
        return self._store

    # -- pickling ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._mode is Mode.WRITER:
            raise ModeError(
                "a cache in writer mode cannot be pickled: its journal belongs to one process. Call to_reader() first; or "
                "make a CachedItem with a writer id of its own (writer=...) in the other process"
            )
        state = {name: self.__dict__[name] for name in PICKLED}
        state["func"] = self.func if self._mode is Mode.CLOSED and _can_pickle(self.func) else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._unopened()


PICKLED = ("_settings", "_first_mode", "_concurrency", "_check_inputs", "_mode")


def _can_pickle(func: Function | None) -> bool:
    """Whether another process can find a function; a decorated one it cannot, as its name means the cache."""
    try:
        pickle.dumps(func)
    except Exception:  # noqa: BLE001 - what __reduce__ of others raises is no closed list
        return False
    return True


def _is_async(func: Function) -> bool:
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _call_plain(
    func: Function, args: tuple[Any, ...], keep: Callable[[object], NDArray[Any]]
) -> tuple[Any, NDArray[Any] | None]:
    """In a thread: what a function gives, kept at once, or else a thing to be awaited."""
    value = func(*args)
    if inspect.isawaitable(value):
        return value, None
    return None, keep(value)
