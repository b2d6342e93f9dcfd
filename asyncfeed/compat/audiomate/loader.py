"""Partitions of whole utterances from several containers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfeed.compat.audiomate.arguments import (
    Containers,
    Utterances,
    containers_of,
    open_containers,
    storage_nbytes,
    utt_ids_of,
)
from asyncfeed.compat.audiomate.reader import Reader
from asyncfeed.engine.loaded import LoadedPartition
from asyncfeed.errors import ArgumentError
from asyncfeed.planning.audiomate import Seed, pack_utterances, utterance_plan
from asyncfeed.planning.plan import Plan

__all__ = ["PartitionData", "PartitionInfo", "PartitioningContainerLoader"]

Array = NDArray[Any]


class PartitionInfo:
    """Which utterances a partition has."""

    def __init__(self) -> None:
        self.utt_ids: list[str] = []
        self.utt_lengths: list[tuple[int, ...]] = []
        """For each utterance its length in every container, in the order of the containers."""
        self.size = 0
        """Bytes of its data."""

    def total_lengths(self) -> tuple[int, ...]:
        """The lengths of all utterances together, in every container."""
        return tuple(map(sum, zip(*self.utt_lengths, strict=True)))


class PartitionData:
    """A partition and its data."""

    def __init__(self, info: PartitionInfo) -> None:
        self.info = info
        self.utt_data: list[Sequence[Array]] = []
        """For each utterance of ``info`` a list of arrays, one of each container."""
        self.joined: list[Array | None] = []
        """For each container all of its frames as one array, the same memory; None where its utterances are not alike."""


class PartitioningContainerLoader:
    """Divides utterances into partitions that fit into memory, and loads one at a time.

    While you work on one, the next is read ahead: partitions that are asked for one after the other come fast. The data
    are views of shared memory, which is used again when none of a partition is left.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids.
        feature_containers: one container or several, open: audiomate's, or ``h5py.File`` objects. They stay yours; keep
            them open meanwhile.
        partition_size: what a partition takes at most: bytes, or a number with ``k``, ``m`` or ``g``. The partition that
            is read ahead comes on top.
        shuffle: utterances in random order, another one after every ``reload()``; or sorted by id.
        seed: of that order; None for another one every time.

    Raises:
        ArgumentError: there is no container, one is not open or lacks an utterance, or an utterance is larger than a
            partition.
    """

    def __init__(
        self,
        corpus_or_utt_ids: Utterances,
        feature_containers: Containers,
        partition_size: str | int,
        shuffle: bool = True,
        seed: Seed = None,
    ) -> None:
        self.utt_ids = utt_ids_of(corpus_or_utt_ids)
        self.containers = containers_of(feature_containers)
        self.partition_size = storage_nbytes(partition_size)
        self.shuffle = shuffle
        self.rand = random.Random(seed)  # noqa: S311 - its order is the one to reproduce
        self._reader = Reader(open_containers(self.containers, self.utt_ids))
        self._corpus = corpus = self._reader.library.corpus
        ids = list(corpus.ids)
        self._rows = {utt: row for row, utt in enumerate(ids)}
        self.utt_sizes = dict(zip(ids, corpus.nbytes.tolist(), strict=True))
        lengths = zip(*(catalog.length.tolist() for catalog in corpus.catalogs), strict=True)
        self.utt_lengths: dict[str, tuple[int, ...]] = dict(zip(ids, lengths, strict=True))
        self._check_sizes()
        self._loading = threading.Lock()
        self.partitions: list[PartitionInfo] = []
        self.reload()

    def reload(self) -> list[PartitionInfo]:
        """Divide the utterances anew, which makes a difference if they are shuffled; returns ``self.partitions``."""
        ids = sorted(self.utt_ids)
        if self.shuffle:
            self.rand.shuffle(ids)
        sizes = [self.utt_sizes[utt] for utt in ids]
        edges = pack_utterances(sizes, self.partition_size)
        self.partitions = []
        for start, stop in itertools.pairwise(edges):
            info = PartitionInfo()
            info.utt_ids = ids[start:stop]
            info.utt_lengths = [self.utt_lengths[utt] for utt in info.utt_ids]
            info.size = sum(sizes[start:stop])
            self.partitions.append(info)
        rows = np.array([self._rows[utt] for utt in ids[: edges[-1]]], np.int64)
        with self._loading:
            self._ahead = _Ahead(self._reader, utterance_plan(self._corpus, rows, np.array(edges, np.int64)))
            self._planned = {id(info): (number, info) for number, info in enumerate(self.partitions)}
        return self.partitions

    def load_partition_data(self, index: int) -> PartitionData:
        """Load the partition ``self.partitions[index]``. Arrays are views: not copied from the memory they were read into.

        Raises:
            StorageError: reading failed.
            BudgetError: memory does not suffice, perhaps because the data of many partitions are kept.
        """
        data = PartitionData(self.partitions[index])
        with self._loading:
            loaded = self._ahead.load(self._number_of(data.info))
        columns = [field.arrays for field in loaded.fields]
        data.joined = [field.rows for field in loaded.fields]
        data.utt_data = list(map(list, zip(*columns, strict=True)))
        return data

    def _number_of(self, info: PartitionInfo) -> int:
        """The place of a partition in the plan, wherever it is in the list by now."""
        if id(info) not in self._planned:
            raise ArgumentError("a partition that reload() did not make cannot be loaded; choose one of those it made")
        return self._planned[id(info)][0]

    def _check_sizes(self) -> None:
        for utt, size in self.utt_sizes.items():
            if size > self.partition_size:
                raise ArgumentError(
                    f"utterance {utt!r} takes {size} bytes, more than a partition of {self.partition_size}; make "
                    f"partition_size larger"
                )


class _Ahead:
    """Loads the partitions of a plan, and reads on while they are asked for one after the other."""

    def __init__(self, reader: Reader, plan: Plan) -> None:
        self._reader, self._plan = reader, plan
        self._next = 0
        self._reads_on = False
        reader.end()

    def load(self, number: int) -> LoadedPartition:
        """The partition of this number; from the pass that is under way if it comes next there."""
        running, comes_next = self._reader.under_way, number == self._next
        if running is None or not self._reads_on or not comes_next:
            stop = len(self._plan) if comes_next or number == 0 else number + 1
            running = self._reader.start(_part(self._plan, number, stop))
            self._reads_on = stop > number + 1
        self._next = number + 1
        try:
            loaded = running.next()
        except BaseException:
            self._reads_on = False  # what comes next has to begin anew
            raise
        if loaded is None:
            raise AssertionError("a plan has as many partitions as it says")
        return loaded


def _part(plan: Plan, start: int, stop: int) -> Plan:
    """Some consecutive partitions of a plan."""
    first, last = plan.edges[start], plan.edges[stop]
    return replace(
        plan,
        utts=plan.utts[first:last],
        starts=plan.starts[first:last],
        stops=plan.stops[first:last],
        edges=plan.edges[start : stop + 1] - first,
        sizes=plan.sizes[start:stop],
    )
