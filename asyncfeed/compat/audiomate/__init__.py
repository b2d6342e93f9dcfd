"""audiomate's loaders under their own names, over asyncfeed's engine.

Replace ``from audiomate.feeding import ...`` by ``from asyncfeed.compat.audiomate import ...``: same constructors, same
attributes and, for the same seed, the same order to the frame. audiomate itself is not needed, nor imported.
"""

from asyncfeed.compat.audiomate.datasets import Dataset, FrameDataset, MultiFrameDataset, UtteranceDataset
from asyncfeed.compat.audiomate.features import PartitioningFeatureIterator
from asyncfeed.compat.audiomate.iterators import DataIterator, FrameIterator, MultiFrameIterator
from asyncfeed.compat.audiomate.loader import PartitionData, PartitionInfo, PartitioningContainerLoader
from asyncfeed.compat.audiomate.partition import MultiFramePartitionData

__all__ = [
    "DataIterator",
    "Dataset",
    "FrameDataset",
    "FrameIterator",
    "MultiFrameDataset",
    "MultiFrameIterator",
    "MultiFramePartitionData",
    "PartitionData",
    "PartitionInfo",
    "PartitioningContainerLoader",
    "PartitioningFeatureIterator",
    "UtteranceDataset",
]
