"""Which whole utterances make a batch: those of similar length, so that little has to be padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import ArgumentError
from asyncfeed.planning.draws import Purpose, generator

__all__ = ["MAX_WASTE", "POOL", "Grouping", "Groups", "waste_of"]

POOL = 4096
"""Utterances that are sorted by length together. More make less padding, and batches that are more alike every epoch."""

MAX_WASTE = 0.1
"""Of a batch that is limited by its frames: the share that may be padding."""

Integers = NDArray[np.int64]


class Groups(NamedTuple):
    """Utterances in the order of their batches."""

    positions: Integers
    """Places in the order that the epoch has."""
    edges: Integers
    """Batch i is made of ``positions[edges[i]:edges[i + 1]]``."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """How utterances are put into batches. Either ``max_frames`` or ``batch_size`` is given."""

    max_frames: int | None = None
    """Of a batch, padding included; an utterance that has more is a batch of its own."""
    batch_size: int | None = None
    """Utterances of a batch; the last ones of a pool or bucket may be fewer."""
    buckets: tuple[int, ...] = ()
    """Upper bounds of lengths: only utterances of the same bucket come together. Without any, utterances are sorted within
    pools."""
    pool: int = POOL
    max_waste: float = MAX_WASTE
    sort: bool = True
    """The longest utterance of a batch first; if not, in the order of the epoch."""

    @classmethod
    def checked(
        cls,
        max_frames: int | None,
        batch_size: int | None,
        buckets: Sequence[int],
        pool: int,
        max_waste: float,
        sort: bool,
    ) -> Grouping:
        """Raises `ArgumentError` if one of them has no meaning."""
        if (max_frames is None) == (batch_size is None):
            raise ArgumentError(f"max_frames={max_frames} and batch_size={batch_size}: give one of the two")
        for name, value in (("max_frames", max_frames), ("batch_size", batch_size), ("pool", pool)):
            if value is not None and value < 1:
                raise ArgumentError(f"{name}={value} must be at least 1")
        bounds = tuple(int(bound) for bound in buckets)
        if list(bounds) != sorted(set(bounds)) or any(bound < 1 for bound in bounds):
            raise ArgumentError(f"buckets={buckets!r} must be lengths that rise, such as [200, 400, 800]")
        if not 0 <= max_waste <= 1:
            raise ArgumentError(f"max_waste={max_waste} is a share: from 0 to 1")
        return cls(max_frames, batch_size, bounds, pool, max_waste, sort)

    def group(self, lengths: Integers, *, shuffle: bool, seed: int, epoch: int) -> Groups:
        """Put utterances of these lengths, in the order of the epoch, into batches; these in random order, or not."""
        pools = list(self._pools(lengths))
        sizes = np.array([size for pool in pools for size in self._sizes(lengths[pool].tolist())], np.int64)
        positions = np.concatenate([np.empty(0, np.int64), *pools])
        begins = np.cumsum(sizes) - sizes
        if shuffle:
            order = generator(seed, epoch, Purpose.BATCHES).permutation(sizes.size)
            begins, sizes = begins[order], sizes[order]
        edges = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        positions = positions[np.arange(positions.size) + np.repeat(begins - edges[:-1], sizes)]
        if not self.sort:
            positions = positions[np.lexsort((positions, np.repeat(np.arange(sizes.size), sizes)))]
        return Groups(positions, edges)

    def _pools(self, lengths: Integers) -> Iterator[Integers]:
        """Positions that may come together, the longest first."""
        if self.buckets:
            bucket = np.searchsorted(self.buckets, lengths, side="left")
            for number in range(len(self.buckets) + 1):
                yield self._longest_first(np.flatnonzero(bucket == number), lengths)
            return
        pool = self.pool if self.batch_size is None else max(self.pool // self.batch_size, 1) * self.batch_size
        for start in range(0, lengths.size, pool):
            yield self._longest_first(np.arange(start, min(start + pool, lengths.size)), lengths)

    @staticmethod
    def _longest_first(positions: Integers, lengths: Integers) -> Integers:
        return positions[np.argsort(-lengths[positions], kind="stable")]

    def _sizes(self, lengths: list[int]) -> Iterator[int]:
        """How many utterances, the longest first, make each batch. Plain integers: a batch takes a microsecond."""
        left = len(lengths)
        if self.batch_size is not None:
            yield from (min(self.batch_size, left - start) for start in range(0, left, self.batch_size))
            return
        assert self.max_frames is not None, "one of the two is given"
        ends = list(accumulate(lengths, initial=0))
        start = 0
        while start < left:
            longest = max(lengths[start], 1)
            size = min(max(self.max_frames // longest, 1), left - start)
            least = 1 - self.max_waste
            while size > 1 and ends[start + size] - ends[start] < least * longest * size:
                size -= 1  # every further utterance is shorter, and so wastes more
            yield size
            start += size


def waste_of(lengths: Integers, edges: Integers) -> float:
    """The share of padding in batches of utterances of these lengths."""
    if edges.size < 2:
        return 0.0
    longest = np.maximum.reduceat(lengths, edges[:-1])
    padded = int((longest * np.diff(edges)).sum())
    return 1 - int(lengths.sum()) / padded if padded else 0.0
