"""Everything that asyncfeed raises.

    AsyncFeedError
    ├── StorageError                 what the weather did: a file, a disk, another process
    │   ├── SourceMissingError           (FileNotFoundError) no such file, or a pattern that matches none
    │   ├── SourceAccessError            (PermissionError) the file may not be read
    │   ├── NotHDF5Error                 a directory, an empty file, another format
    │   ├── DamagedFileError             truncated, or its metadata do not hold together
    │   ├── LockedFileError              another process has it open for writing
    │   ├── ChangedFileError             it changed while the feed was open
    │   ├── UnreadableDatasetError       an utterance that cannot be a sequence of numeric frames
    │   ├── FieldMismatchError           fields that do not fit each other
    │   ├── ReadError                    reading a partition failed midway
    │   ├── StaleCacheError              a cache was made by something else
    │   └── WriteError                   (OSError) what was to be kept could not be written: the disk is full
    ├── BudgetError                  (MemoryError) the memory there is does not suffice
    └── UsageError                   what the caller did
        ├── ArgumentError                (ValueError) an argument that has no meaning
        ├── ShapeError                   (ValueError) frames of different shapes asked for as one array
        ├── CacheExistsError             (FileExistsError) a cache that was to be new is there already
        ├── CacheMissError               (KeyError) the cache does not hold that item
        ├── ClosedError                  used after close
        ├── ConsumerError                two consumers where there can be one
        ├── ForkError                    made in another process
        ├── ItemIdError                  (ValueError) an id that cannot be kept
        ├── ItemTypeError                (TypeError) a value that cannot be kept
        ├── ModeError                    a call, or a step, that the mode does not allow
        └── StateError                   (ValueError) a saved state that does not fit

A message says what was found, what was wanted, and what to do. The library's own exceptions (h5py, the
operating system) are kept as ``__cause__``.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "AsyncFeedError",
    "BudgetError",
    "CacheExistsError",
    "CacheMissError",
    "ChangedFileError",
    "ClosedError",
    "ConsumerError",
    "DamagedFileError",
    "FieldMismatchError",
    "ForkError",
    "ItemIdError",
    "ItemTypeError",
    "LockedFileError",
    "ModeError",
    "NotHDF5Error",
    "ReadError",
    "ShapeError",
    "SourceAccessError",
    "SourceMissingError",
    "StaleCacheError",
    "StateError",
    "StorageError",
    "UnreadableDatasetError",
    "UsageError",
    "WriteError",
]


class AsyncFeedError(Exception):
    """The root of all errors that asyncfeed raises on purpose."""


class StorageError(AsyncFeedError):
    """Something outside the program is not as it was expected: a file, a disk, another process."""


class SourceMissingError(StorageError, FileNotFoundError):
    """There is no such file, or a pattern matches none."""

    # OSError would show its arguments as "[Errno ...]"; these carry one finished sentence.
    __str__ = Exception.__str__


class SourceAccessError(StorageError, PermissionError):
    """The file exists but may not be read."""

    __str__ = Exception.__str__


class NotHDF5Error(StorageError):
    """The path holds something else than an HDF5 file."""


class DamagedFileError(StorageError):
    """The file begins like HDF5 but is truncated or inconsistent."""


class LockedFileError(StorageError):
    """Another process holds the file open for writing, or the file system cannot lock."""


class ChangedFileError(StorageError):
    """The file is not the one that was catalogued: it changed while the feed was open."""


class UnreadableDatasetError(StorageError):
    """One or more datasets cannot be streamed as numeric frames. ``unreadable="skip"`` leaves them out."""


class FieldMismatchError(StorageError):
    """Fields that are streamed side by side disagree about an utterance."""


class ReadError(StorageError):
    """Reading a partition failed midway. All frames of the partitions before it were delivered."""


class StaleCacheError(StorageError):
    """A cache was made by another version, or for other inputs, than it is opened with."""


class WriteError(StorageError, OSError):
    """Something could not be written: the disk is full, or a quota reached. What was acknowledged before is kept."""

    __str__ = Exception.__str__


class BudgetError(AsyncFeedError, MemoryError):
    """The memory budget, or the memory that may be used, does not suffice."""


class UsageError(AsyncFeedError):
    """The call cannot be carried out in this state, or makes no sense."""


class ArgumentError(UsageError, ValueError):
    """An argument has no meaning."""


class ShapeError(UsageError, ValueError):
    """Frames of different shapes or dtypes were asked for as one array."""


class CacheExistsError(UsageError, FileExistsError):
    """A cache was to be made, and there is one."""

    __str__ = Exception.__str__


class CacheMissError(UsageError, KeyError):
    """The cache does not hold this item, and may not or cannot compute it here."""

    __str__ = Exception.__str__  # KeyError would show the repr of its argument


class ClosedError(UsageError):
    """The feed, or the cache, is closed."""


class ConsumerError(UsageError):
    """Two consumers share one iterator, or an iterator was replaced by a newer one."""


class ForkError(UsageError):
    """The object was made in another process; after a fork it has no reader thread."""


class ItemIdError(UsageError, ValueError):
    """An item cannot be kept under this id."""


class ItemTypeError(UsageError, TypeError):
    """A value cannot be kept as an array, or an argument has no digest."""


class ModeError(UsageError):
    """The mode that the cache is in does not allow this call, or this step to another mode."""


class StateError(UsageError, ValueError):
    """A saved state does not fit the feed that loads it: other data, another seed, another form."""
