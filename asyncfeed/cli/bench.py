"""``asyncfeed bench``: one file through plain h5py and through asyncfeed, in one run."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncfeed.cli.epoch import take
from asyncfeed.engine.loaded import Array
from asyncfeed.errors import ArgumentError, BudgetError, UsageError
from asyncfeed.feed import Feed
from asyncfeed.planning.catalog import Catalog
from asyncfeed.planning.plan import Partition, Plan
from asyncfeed.storage.hdf5file import open_hdf5, translate
from asyncfeed.storage.source import Container, Key, Source, containers_of

__all__ = ["BATCH_SIZE", "Bench", "Contest", "HDF5Loops", "bench", "by_hand"]

BATCH_SIZE = 256

Make = Callable[[], Iterable[Any]]
"""Starts an epoch."""

Read = Callable[[str, int, int], Array]
"""Reads frames of an utterance: its id, the first of them within its dataset, and one past the last."""


@dataclass(frozen=True, slots=True)
class Contest:
    """One kind of work, done both ways."""

    work: str
    unit: str
    items: int
    """That each pass gave."""
    nbytes: int
    hdf5_seconds: tuple[float, ...]
    feed_seconds: tuple[float, ...]
    """Of every round."""
    trouble: str = ""
    """Why it could not be done; there are no figures then."""

    @property
    def hdf5(self) -> float:
        """Seconds that plain h5py takes: the median round."""
        return statistics.median(self.hdf5_seconds)

    @property
    def feed(self) -> float:
        """Seconds that asyncfeed takes: the median round."""
        return statistics.median(self.feed_seconds)

    @property
    def ratio(self) -> float:
        """How many times as fast asyncfeed is."""
        return self.hdf5 / self.feed


@dataclass(frozen=True, slots=True)
class Bench:
    """What a whole run came to."""

    path: str
    shuffle: bool
    rounds: int
    utterances: int
    """That were measured: from the beginning of the file, as many as plain h5py read during the warm-up."""
    all_utterances: int
    nbytes: int
    """Of those measured."""
    contests: tuple[Contest, ...]


def bench(
    source: Source,
    *,
    seconds: float = 1.0,
    rounds: int = 3,
    shuffle: bool = True,
    report: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> Bench:
    """Read a file in three ways, each with plain h5py and with asyncfeed by turns.

    Both read the same utterances, in the same partitions, from a file that they have open already. How many utterances
    that are is found by letting plain h5py read for ``seconds``, which also warms up the page cache.

    Args:
        source: a single file, or any number of which each holds one utterance.
        seconds: about what one pass of plain h5py over the utterances takes.
        rounds: passes of each; the median counts.
        shuffle: in random order, as in training, or in file order.
        report: is told what is being done now.
        settings: further arguments for the feed.

    Raises:
        AsyncFeedError: the file cannot be streamed, or has nothing in it.
    """
    containers = containers_of(source)
    first = containers[0]
    if len(containers) > 1 and not _hold_one_utterance(containers):
        raise ArgumentError(f"{len(containers)} files match; bench compares on one of them, so name it")
    path = first.path if len(containers) == 1 else str(source.path)
    settings |= {"rank": 0, "world_size": 1}  # the whole file, also within a distributed run
    report("warming up")
    with Feed(source, shuffle=False, **settings) as feed:
        (catalog,) = feed._library.corpus.catalogs
    if not catalog.nbytes.any():
        where = f"key={first.key!r}" if first.slices is None else f"data={first.key!r}"
        raise UsageError(f"{path} has no frames under {where}, so there is nothing to compare")
    with by_hand(containers) as read:
        num = _read_for(seconds, read, catalog)
        with Feed(source, shuffle=shuffle, **{**settings, "includes": catalog.ids[:num]}) as feed:
            contests = tuple(_contests(feed, HDF5Loops(read, feed), rounds, report))
    return Bench(path, shuffle, rounds, num, len(catalog), int(catalog.nbytes[:num].sum()), contests)


def _hold_one_utterance(containers: Sequence[Container]) -> bool:
    return all(each.slices is None and Key(each.key).fixed for each in containers)


def _read_for(seconds: float, read: Read, catalog: Catalog) -> int:
    """How many utterances plain h5py reads in about that time; at least one."""
    spans = _whole(catalog, np.arange(len(catalog)))
    end = time.perf_counter() + seconds
    num = 0
    for span in spans:
        read(*span)
        num += 1
        if time.perf_counter() > end:
            break
    return num


def _contests(feed: Feed, loops: HDF5Loops, rounds: int, report: Callable[[str], None]) -> Iterator[Contest]:
    work: tuple[tuple[str, str, Callable[[], int], Make, Make], ...] = (
        ("whole utterances", "utterances", lambda: feed.num_utterances, loops.utterances, feed.utterances),
        ("triplets", "frames", lambda: len(feed), loops.triplets, lambda: feed),
        (f"batches of {BATCH_SIZE}", "frames", lambda: len(feed), loops.batches, lambda: feed.batches(BATCH_SIZE)),
    )
    for name, unit, num_items, plain, ours in work:
        report(f"{name}: warming up")
        try:
            _timed(feed, ours)  # makes the shared memory, and touches it for the first time
            plain_seconds, our_seconds = [], []
            for number in range(1, rounds + 1):
                report(f"{name}: round {number} of {rounds}")
                plain_seconds.append(_timed(feed, plain))
                our_seconds.append(_timed(feed, ours))
            yield Contest(name, unit, num_items(), feed.nbytes, tuple(plain_seconds), tuple(our_seconds))
        except (BudgetError, UsageError) as error:
            yield Contest(name, unit, 0, 0, (), (), trouble=str(error))


def _timed(feed: Feed, make: Make) -> float:
    """The seconds of an epoch. Always of the same one, so that everybody reads in the same order."""
    feed.set_epoch(0)
    began = time.perf_counter()
    take(iter(make()))
    return time.perf_counter() - began


class HDF5Loops:
    """What one writes by hand over h5py: the good way to do it, with numpy, a partition at a time.

    Walks the partitions that a feed plans, so that both hold equally much in memory.
    """

    def __init__(self, read: Read, feed: Feed) -> None:
        self._read, self._feed = read, feed
        self._corpus = feed._library.corpus
        (self._catalog,) = self._corpus.catalogs

    def utterances(self) -> Iterator[tuple[str, Array]]:
        """``(utt, array)``."""
        plan = self._feed.plan
        for utt, start, stop in _whole(self._catalog, plan.utts[plan.starts == 0]):
            yield utt, self._read(utt, start, stop)

    def triplets(self) -> Iterator[tuple[str, int, Any]]:
        """``(utt, index, frame)``."""
        plan = self._feed.plan
        return chain.from_iterable(self._triplets(plan, partition) for partition in plan)

    def batches(self) -> Iterator[tuple[list[str], Array, Array]]:
        """``(utts, indices, frames)``; the last batch of every partition may be smaller. Frames must be alike."""
        plan = self._feed.plan
        for partition in plan:
            names, indices, arrays = self._load(partition)
            rows = np.concatenate(arrays)
            order = _order(plan, partition)
            for start in range(0, len(order), BATCH_SIZE):
                units = order[start : start + BATCH_SIZE]
                yield names[units].tolist(), indices[units], rows.take(units, axis=0)

    def _triplets(self, plan: Plan, partition: Partition) -> Iterator[tuple[str, int, Any]]:
        names, indices, arrays = self._load(partition)
        rows: Sequence[Any] | Array = (
            list(chain.from_iterable(arrays)) if self._corpus.mixed else np.concatenate(arrays)
        )
        if not plan.shuffle:
            return zip(names.tolist(), indices.tolist(), rows, strict=True)
        order = _order(plan, partition)
        return zip(names[order].tolist(), indices[order].tolist(), map(rows.__getitem__, order.tolist()), strict=True)

    def _load(self, partition: Partition) -> tuple[Array, Array, list[Array]]:
        """The utterance of every frame, its number in there, and the frames of every utterance."""
        spans = _spans(self._catalog, partition.utts, partition.starts, partition.stops)
        names = np.repeat(np.array([utt for utt, _, _ in spans], object), partition.lengths)
        ranges = zip(partition.starts.tolist(), partition.stops.tolist(), strict=True)
        indices = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        return names, indices, [self._read(*span) for span in spans]


def _order(plan: Plan, partition: Partition) -> Array:
    num_frames = int(partition.lengths.sum())
    return plan.draws(partition).permutation(num_frames) if plan.shuffle else np.arange(num_frames)


def _whole(catalog: Catalog, rows: NDArray[np.int64]) -> list[tuple[str, int, int]]:
    return _spans(catalog, rows, np.zeros_like(rows), catalog.length[rows])


def _spans(
    catalog: Catalog, rows: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> list[tuple[str, int, int]]:
    """What to read for slices of utterances: ids, and frames counted from the beginning of their datasets."""
    begin = np.int64(0) if catalog.start is None else catalog.start[rows]
    return list(zip(catalog.ids.pick(rows), (begin + starts).tolist(), (begin + stops).tolist(), strict=True))


@contextlib.contextmanager
def by_hand(containers: Sequence[Container]) -> Iterator[Read]:
    """Read as one does with h5py: a single file stays open, and so does an array that holds everything.

    Files of one utterance each are opened and closed again for every one of them.
    """
    first = containers[0]
    if len(containers) > 1:
        paths = {each.name: each.path for each in containers}
        yield lambda utt, start, stop: _open_and_read(paths[utt], first.key, start, stop)
        return
    with open_hdf5(first.path) as file:
        if first.slices is None:
            key = Key(first.key)
            yield lambda utt, start, stop: _read(file, key.path(utt), start, stop)
        else:
            array = file[first.key]
            yield lambda _, start, stop: _read(file, first.key, start, stop, array)


def _open_and_read(file: str, path: str, start: int, stop: int) -> Array:
    with open_hdf5(file) as opened:
        return _read(opened, path, start, stop)


def _read(file: h5py.File, path: str, start: int, stop: int, dataset: h5py.Dataset | None = None) -> Array:
    """``file[path][start:stop]``, with errors that name the file and the dataset; or of one that is open already."""
    try:
        found = file[path.encode("utf-8", "surrogateescape")] if dataset is None else dataset
        array: Array = found[start:stop]
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise translate(error, file.filename, f"read the dataset {path!r}") from error
    return array
