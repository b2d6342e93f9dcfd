"""asyncfeed: feed training loops from HDF5.

See `asyncfeed.Feed`.
"""

from asyncfeed.engine.forms import Batch, Window
from asyncfeed.engine.loaded import LoadedPartition
from asyncfeed.engine.statistics import Statistics
from asyncfeed.errors import (
    ArgumentError,
    AsyncFeedError,
    BudgetError,
    ChangedFileError,
    ClosedError,
    ConsumerError,
    DamagedFileError,
    FieldMismatchError,
    ForkError,
    LockedFileError,
    NotHDF5Error,
    ReadError,
    ShapeError,
    SourceAccessError,
    SourceMissingError,
    StorageError,
    UnreadableDatasetError,
    UsageError,
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
    "ChangedFileError",
    "ClosedError",
    "ConsumerError",
    "DamagedFileError",
    "Feed",
    "FieldMismatchError",
    "ForkError",
    "LoadedPartition",
    "LockedFileError",
    "MemoryBudget",
    "NotHDF5Error",
    "Partition",
    "Plan",
    "ReadError",
    "ShapeError",
    "Skipped",
    "Source",
    "SourceAccessError",
    "SourceMissingError",
    "Statistics",
    "StorageError",
    "UnreadableDatasetError",
    "UsageError",
    "Window",
]
