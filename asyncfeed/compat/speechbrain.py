"""`CachedHDF5DynamicItem`: SpeechBrain's class of this name, by changing one import.

Needs the extra ``speechbrain``. Without it this module can be imported, and the class says what to install.
"""

from __future__ import annotations

import copy
import importlib
import logging
import operator
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from asyncfeed.cache.publish import OnStale, Settings
from asyncfeed.cache.seal import Compression
from asyncfeed.cache.settings import checked_settings
from asyncfeed.cache.values import digest_of, to_array
from asyncfeed.compat.itemfile import ItemFile
from asyncfeed.compat.shelf import Shelf
from asyncfeed.errors import CacheMissError, ItemTypeError, ModeError, StaleCacheError
from asyncfeed.storage.generations import DEFAULT_FILENAME, Generations

_missing: Exception | None = None
try:
    from speechbrain.utils.data_pipeline import CachedDynamicItem, DynamicItem
except (ImportError, OSError) as error:  # OSError: of a torchaudio whose libraries do not fit the torch that is there
    _missing = error
    CachedDynamicItem = DynamicItem = object

__all__ = ["CachedHDF5DynamicItem"]

log = logging.getLogger("asyncfeed")


class CachedHDF5DynamicItem(CachedDynamicItem):  # type: ignore[misc]  # SpeechBrain has no type information
    """A `DynamicItem` whose results are computed once and kept in HDF5.

        @CachedHDF5DynamicItem.cache("exp/feats", version="wav2vec2-large/layer9")
        @takes("id", "signal")
        @provides("feats")
        def feats(id, signal): ...

    For `DynamicItemDataset`, data loaders and their workers. What a call returns is a numpy array of the caller's own,
    whether it was computed or found. An item that was returned is kept, even if the process is killed the moment after.
    In other processes a copy reads what is there and, if this is open for writing, writes to a file of its own.

    Args:
        cache_location: the directory.
        file_mode: as of `h5py.File`: ``"a"`` to add to what is there, ``"r+"`` likewise, but it must be there, ``"w"`` to
            delete what is there, ``"x"`` or ``"w-"`` for what must not be there, ``"r"`` for reading only: nothing is
            computed then.
        cache_filename: of the sealed file.
        compression: of sealed files: ``"gzip"``, ``"lzf"``, 0 to 9, or None, which is the fastest by far.
        *args: takes, func and provides, as of `DynamicItem`.
        version: what else decides about the result: a model, a layer, a commit. It is kept in the file, and compared when
            the file is opened. None means that a file without any, which SpeechBrain's own class wrote, is welcome.
        check_inputs: whether an item belongs to the arguments that it was computed from: with others it is computed again,
            or refused where nothing is computed. Costs a digest of the arguments with every call. Arguments that have no
            digest, and items of SpeechBrain's own class, are not compared.
        on_stale: what to do about files that something else has made: ``"error"``, ``"discard"`` or ``"ignore"``.
        locking: False on a file system that has no locks.
        **kwargs: takes, func and provides by name.

    Raises:
        ImportError: SpeechBrain is not installed.
        ValueError: the first of ``takes`` is not ``"id"``; an argument has no meaning.
        SourceMissingError, CacheExistsError: ``file_mode`` does not allow for what is there.
        StaleCacheError: what is there was made by something else.
    """

    def __init__(
        self,
        cache_location: str | os.PathLike[str],
        file_mode: str = "a",
        cache_filename: str | os.PathLike[str] = DEFAULT_FILENAME,
        compression: Compression = None,
        *args: Any,
        version: str | float | None = None,
        check_inputs: bool = True,
        on_stale: OnStale = "error",
        locking: bool = True,
        **kwargs: Any,
    ) -> None:
        _require_speechbrain()
        super().__init__(cache_location, *args, **kwargs)
        self.compression, self.cache_filename = compression, Path(cache_filename)
        self.check_inputs = check_inputs
        settings = self._settings(version=version, on_stale=on_stale, locking=locking)
        self._shelf = Shelf(settings, file_mode)
        self.hdf5file = ItemFile(self._shelf)
        self._told = False

    def _settings(self, **options: Any) -> Settings:
        path = self.hdf5_path
        settings = checked_settings(
            path.parent,
            filename=path.name,
            takes=_names(self.takes),
            provides=_names(self.provides),
            compression=self.compression,
            writer=None,
            durability="process",
            **options,
        )
        return replace(settings, unmarked=settings.fingerprint.version is None)

    @classmethod
    def cache(
        cls,
        cache_location: str | os.PathLike[str],
        file_mode: str = "a",
        cache_filename: str | os.PathLike[str] = DEFAULT_FILENAME,
        compression: Compression = None,
        **options: Any,
    ) -> Callable[[Any], CachedHDF5DynamicItem]:
        """A decorator that makes a cache of a `DynamicItem`; the options are those of the constructor.

        Raises:
            ImportError: SpeechBrain is not installed.
            ValueError: what is decorated is no `DynamicItem`.
        """
        _require_speechbrain()

        def decorate(item: Any) -> CachedHDF5DynamicItem:
            if not isinstance(item, DynamicItem):
                raise ValueError(
                    f"Can only cache a DynamicItem, and this is a {type(item).__name__}: @takes(...) and @provides(...) "
                    f"belong below @{cls.__name__}.cache(...)"
                )
            return cls(
                cache_location,
                file_mode,
                cache_filename,
                compression,
                takes=item.takes,
                func=item.func,
                provides=item.provides,
                **options,
            )

        return decorate

    # -- calling -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> NDArray[Any]:
        """The item of an id: what is there, or else what the function gives, which is kept. Always copies.

        Raises:
            CacheMissError: it is not there, and this is open for reading only, or has no function.
            StaleCacheError: it was computed from other arguments, and this is open for reading only.
            ItemIdError, ItemTypeError: it cannot be kept under this id, or is no array.
            ClosedError: this is closed.
            WriteError: the disk is full.
            Exception: whatever the function raises.
        """
        uid, digest = args[0], self._digest(args[1:])
        if self._is_cached(uid) and self._is_current(uid, digest):
            return self._load(uid)
        if not self._shelf.writing:
            return self._load_late(uid, digest)
        if self.func is None:
            raise CacheMissError(
                f"item {uid!r} is not in the cache {self.hdf5_path}, and there is nothing to compute it with: pass func="
            )
        self._shelf.expect(uid)
        array = to_array(self.func(*args)).copy()  # the function may use its memory again
        self._cache(array, uid, digest)
        return array

    def _load_late(self, uid: str, digest: bytes) -> NDArray[Any]:
        """An item that was not there at first: another process may be just sealing it."""
        if not self._shelf.came(uid):
            raise self._shelf.missing_error(uid)
        if not self._is_current(uid, digest):
            raise StaleCacheError(
                f"item {uid!r} in {self.hdf5_path} was computed from other arguments; compute it again "
                f"(change_file_mode('a')), or pass check_inputs=False to take what is there"
            )
        return self._load(uid)

    def _digest(self, inputs: Sequence[Any]) -> bytes:
        """Of arguments; empty if they are not looked at, or cannot be."""
        if self.check_inputs:
            try:
                return digest_of(tuple(inputs))
            except ItemTypeError as error:
                self._tell(f"{error}. The arguments of {self._name} are not compared")
        return b""

    def _is_current(self, uid: str, digest: bytes) -> bool:
        """Whether an item that is there comes from these arguments, as far as one can tell."""
        current = not digest or self._shelf.digest(uid) in (b"", digest)
        if not current and self._shelf.writing:
            self._tell(
                f"item {uid!r} in {self.hdf5_path} was computed from other arguments, and is computed again, as will be others. "
                f"If arguments of {self._name} differ each time without a meaning, pass check_inputs=False"
            )
        return current

    def _tell(self, what: str) -> None:
        """Say something once: a training loop would say it with every item."""
        if not self._told:
            self._told = True
            log.warning("%s", what)

    @property
    def _name(self) -> str:
        return getattr(self.func, "__name__", None) or type(self).__name__

    def _is_cached(self, uid: object) -> bool:
        """Whether an item is there."""
        return uid in self._shelf

    def _load(self, uid: str) -> NDArray[Any]:
        """An item that is there. Always copies."""
        return self._shelf.read(uid)

    def _cache(self, result: object, uid: str, digest: bytes = b"") -> None:
        """Keep an item."""
        self._shelf.write(uid, to_array(result), digest)

    # -- files and modes -----------------------------------------------------------------------------------------

    @property
    def hdf5_path(self) -> Path:
        """The path of the sealed file; of the first one, if there are several."""
        return Path(self.cache_location) / self.cache_filename

    @property
    def file_mode(self) -> str:
        """What it was opened with last."""
        return self._shelf.mode

    def change_file_mode(self, new_file_mode: str) -> None:
        """Seal what was written, and open it in another mode. Copies in this process, as in datasets, go with it.

        What workers have left that have ended is sealed as well. With ``"r"``, what is not large is made one file;
        `compact` does it for what is.

        Raises:
            WriteError: the disk is full; nothing is lost.
            Exception: as of the constructor; it is closed then.
        """
        self._shelf.open(new_file_mode)

    def compact(self) -> None:
        """Make one file of all that is sealed, and free the space of what was replaced.

        Raises:
            StorageError: nothing is changed.
        """
        self._shelf.compact()

    def as_source(self) -> Generations:
        """For ``Feed(item)``: what it streams.

        Raises:
            ModeError: what was written may not be sealed yet.
        """
        if self._shelf.writing:
            raise ModeError(
                f"{self.hdf5_path} is open for writing; change_file_mode('r') seals it, then it can be streamed"
            )
        return self._shelf.generations

    # -- copies --------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedHDF5DynamicItem:
        # Not by way of pickle, which wants functions that have a name; the shelf is shared.
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __copy__(self) -> CachedHDF5DynamicItem:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"func": _portable(self.func, needed=self._shelf.writing)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.hdf5_path)!r}, {self.file_mode!r})"


def _names(keys: Any) -> tuple[str, ...]:
    """The keys that an item takes or provides, of whatever nesting SpeechBrain allows for."""
    return (keys,) if isinstance(keys, str) else tuple(name for key in keys for name in _names(key))


@dataclass(frozen=True)
class _Named:
    """A decorated function: in another process it is found by its name, which there too means what was made of it."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return self.item().func(*args)

    def item(self) -> Any:
        return operator.attrgetter(self.name)(importlib.import_module(self.module))


def _portable(func: Any, *, needed: bool) -> Any:
    """What pickle takes for a function; None if it takes none, and no copy will call it."""
    named = _Named(getattr(func, "__module__", ""), getattr(func, "__qualname__", ""))
    try:
        item = named.item()
    except (ImportError, AttributeError, ValueError):
        item = None
    if isinstance(item, DynamicItem) and item.func is func:
        return named
    return func if needed or _can_pickle(func) else None


def _can_pickle(func: Any) -> bool:
    try:
        pickle.dumps(func)
    except Exception:  # noqa: BLE001 - what __reduce__ of others raises is no closed list
        return False
    return True


def _require_speechbrain() -> None:
    if _missing is not None:
        raise ImportError(
            f"CachedHDF5DynamicItem is made for SpeechBrain 1.1 or later, which cannot be imported here ({_missing}): "
            f'pip install "asyncfeed[speechbrain]"'
        ) from _missing
