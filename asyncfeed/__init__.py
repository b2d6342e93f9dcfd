"""asyncfeed: feed training loops from HDF5.

See `asyncfeed.Feed` and `asyncfeed.CachedItem`.
"""

from asyncfeed.cache.item import CachedItem
from asyncfeed.cache.journal import Recovery
from asyncfeed.cache.populate import PopulateReport
from asyncfeed.cache.store import Verification
from asyncfeed.engine.batches import Batch, PaddedBatch
from asyncfeed.engine.forms import Window
from asyncfeed.engine.loaded import LoadedPartition
from asyncfeed.engine.statistics import Statistics
from asyncfeed.errors import (
    ArgumentError,
    AsyncFeedError,
    BudgetError,
    CacheExistsError,
    CacheMissError,
    ChangedFileError,
    ClosedError,
    ConsumerError,
    DamagedFileError,
    FieldMismatchError,
    ForkError,
    ItemIdError,
    ItemTypeError,
    LockedFileError,
    ModeError,
    NotHDF5Error,
    ReadError,
    ShapeError,
    SourceAccessError,
    SourceMissingError,
    StaleCacheError,
    StateError,
    StorageError,
    UnreadableDatasetError,
    UsageError,
    WriteError,
)
from asyncfeed.feed import Feed
from asyncfeed.memory.budget import Budget, MemoryBudget
from asyncfeed.planning.catalog import Skipped
from asyncfeed.planning.plan import Partition, Plan
from asyncfeed.storage.source import Source

__all__ = [
    "ArgumentError",
    "AsyncFeedError",
    "Batch",
    "Budget",
    "BudgetError",
    "CacheExistsError",
    "CacheMissError",
    "CachedItem",
    "ChangedFileError",
    "ClosedError",
    "ConsumerError",
    "DamagedFileError",
    "Feed",
    "FieldMismatchError",
    "ForkError",
    "ItemIdError",
    "ItemTypeError",
    "LoadedPartition",
    "LockedFileError",
    "MemoryBudget",
    "ModeError",
    "NotHDF5Error",
    "PaddedBatch",
    "Partition",
    "Plan",
    "PopulateReport",
    "ReadError",
    "Recovery",
    "ShapeError",
    "Skipped",
    "Source",
    "SourceAccessError",
    "SourceMissingError",
    "StaleCacheError",
    "StateError",
    "Statistics",
    "StorageError",
    "UnreadableDatasetError",
    "UsageError",
    "Verification",
    "Window",
    "WriteError",
]
