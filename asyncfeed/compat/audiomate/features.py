"""Every frame of a file, shuffled within partitions."""

from __future__ import annotations

from collections.abc import Iterable

import h5py

from asyncfeed.compat.audiomate.arguments import AnyContainer, file_of, open_file, storage_nbytes
from asyncfeed.compat.audiomate.reader import Reader
from asyncfeed.engine.forms import TABLES_NBYTES, Form, Triplet, Triplets
from asyncfeed.engine.prefetch import Prefetch
from asyncfeed.errors import ArgumentError
from asyncfeed.planning.audiomate import Seed, feature_plan
from asyncfeed.planning.corpus import Corpus
from asyncfeed.stream import Items

__all__ = ["PartitioningFeatureIterator"]


class PartitioningFeatureIterator(Items[Triplet]):
    """An iterator over ``(utterance id, number of the frame in it, frame)``, once through the file.

    Frames are views of shared memory, which is used again when none of a partition is left; copy the few that you keep.

    Args:
        hdf5file: an open ``h5py.File`` or ``h5py.Group``, or an open container. It stays yours; keep it open meanwhile.
        partition_size: what is in memory at a time: bytes, or a number with ``k``, ``m`` or ``g``. The partition that is
            read ahead, and 12 bytes per frame for a shuffled order, come on top.
        shuffle: utterances, then partitions, then the frames of each partition in random order; or all in file order.
        seed: of all three; None for another order every time.
        includes: ids to go through; all, if it is None or empty. Goes before ``excludes``.
        excludes: ids to leave out.

    Raises:
        ArgumentError: a single frame is larger than a partition, or an argument has no meaning.
        StorageError: a dataset is no sequence of numbers.
        BudgetError: from the first step, if memory does not suffice for a partition.
    """

    def __init__(
        self,
        hdf5file: h5py.Group | AnyContainer,
        partition_size: str | int,
        shuffle: bool = True,
        seed: Seed = None,
        includes: Iterable[str] | None = None,
        excludes: Iterable[str] | None = None,
    ) -> None:
        nbytes = storage_nbytes(partition_size)
        library = open_file(file_of(hdf5file), _ids("includes", includes), _ids("excludes", excludes))
        _check_frames(library.corpus, nbytes)
        plan = feature_plan(
            library.corpus, partition_nbytes=nbytes, shuffle=bool(shuffle), seed=seed, unit_nbytes=TABLES_NBYTES
        )
        reader = Reader(library)

        def start(_: Form[Triplet]) -> Prefetch:
            return reader.start(plan)

        super().__init__(start, Triplets(shuffle=bool(shuffle)))


def _ids(name: str, ids: Iterable[str] | None) -> frozenset[str]:
    if isinstance(ids, str | bytes):
        raise ArgumentError(f"{name}={ids!r} is one string; pass a list of utterance ids: {name}=[{ids!r}]")
    return frozenset(ids or ())


def _check_frames(corpus: Corpus, partition_nbytes: int) -> None:
    large = (corpus.frame_nbytes > partition_nbytes) & (corpus.lengths > 0)
    if large.any():
        row = int(large.argmax())
        raise ArgumentError(
            f"a frame of utterance {corpus.ids[row]!r} takes {corpus.frame_nbytes[row]} bytes, more than a partition of "
            f"{partition_nbytes}; make partition_size larger"
        )
