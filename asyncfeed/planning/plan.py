"""Which utterances are in memory together, and in which order: pure data, no I/O."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.draws import Purpose, generator
from asyncfeed.planning.grouping import Grouping
from asyncfeed.planning.mixing import Mixing, mixing_of
from asyncfeed.planning.orders import Order
from asyncfeed.units import format_nbytes

__all__ = ["ALIGNMENT", "Cut", "Partition", "Plan"]

ALIGNMENT = 64
"""Arrays in a segment start at multiples of this: a cache line, and what vector instructions like."""

ORDERS = {
    "file": "in file order",
    "utterance": "shuffled with seed {seed}",
    "block": "in random blocks with seed {seed}",
    "interleave": "interleaved from random blocks with seed {seed}",
    "own": "in an order of your own",
    "weighted": "drawn by weights with seed {seed}",
}

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """What an iteration form takes utterances apart into: units of ``length`` frames that start every ``hop`` frames.

    Triplets and batches take single frames; windows take windows. An utterance larger than a partition is cut
    between units, so that no unit is lost, doubled or torn.
    """

    length: int = 1
    hop: int = 1
    pad: bool = False
    """Whether a last, incomplete unit counts."""
    whole: bool = False
    """Utterances may not be cut at all."""
    grouping: Grouping | None = None
    """Whole utterances come in batches, each of which is one unit."""
    unit_nbytes: int = 0
    """Bytes that the form keeps per unit beside the frames: its part in the tables of a shuffled order."""

    def count(self, lengths: Integers) -> Integers:
        """Units in utterances of these lengths."""
        if self.pad:
            beyond = np.maximum(lengths - max(self.length, self.hop), 0)  # a unit that begins after the end is none
            return np.where(lengths > 0, -(-beyond // self.hop) + 1, 0)
        beyond = np.maximum(lengths - self.length, 0)
        return np.where(lengths >= self.length, beyond // self.hop + 1, 0)

    def end(self, stop: Integers, lengths: Integers) -> Integers:
        """One past the last frame of the units before ``stop``, in utterances of these lengths."""
        ends: Integers = np.minimum(np.maximum(stop - 1, 0) * self.hop + self.length, lengths)
        return ends


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Slices of utterances that are in memory together. Row k of each array describes slice k."""

    number: int
    utts: Integers
    """Rows of the corpus."""
    starts: Integers
    """First frame of each slice; 0 unless the utterance had to be cut."""
    stops: Integers
    """One past its last frame."""
    nbytes: int
    """Bytes of memory it takes, tables and alignment included: an upper bound."""
    first_unit: int = 0
    """Units at its beginning that are not handed out: they were, before the epoch was resumed."""
    stop_unit: int = sys.maxsize
    """One past the last unit that is handed out; the others are another rank's, or dropped."""
    groups: Integers | None = None
    """Where units begin and end, of slices that come in batches: unit i is ``groups[i]:groups[i + 1]``."""
    before: int = 0
    """Units of the partition, unshuffled, that are in front of those here, and on a rank before this one."""
    after: int = 0
    """Those that are behind, and on a rank after it."""

    def __len__(self) -> int:
        return self.utts.size

    @property
    def lengths(self) -> Integers:
        """Frames of each slice."""
        return self.stops - self.starts

    def __repr__(self) -> str:
        return f"Partition({self.number}: {len(self)} utterances, {self.lengths.sum()} frames, {format_nbytes(self.nbytes)})"


@dataclass(frozen=True, slots=True, eq=False)
class Plan(Sequence[Partition]):
    """One epoch on one rank: a sequence of partitions.

    An epoch has one order, whatever the number of ranks, and each rank goes through a part of it in that order. The order
    of the utterances depends on the seed and the epoch only; where partitions end depends on their size as well, and
    never on the free memory of the moment.
    """

    utts: Integers
    starts: Integers
    stops: Integers
    edges: Integers
    """Partition i holds the slices ``edges[i]:edges[i + 1]``."""
    sizes: Integers
    """Bytes of every partition."""
    partition_nbytes: int
    """What no partition exceeds."""
    order: Order
    seed: int
    epoch: int
    rank: int
    world_size: int
    cut: Cut
    corpus: Corpus
    """What ``utts`` are rows of."""
    groups: Integers | None = None
    """Where batches of whole utterances begin and end."""
    first: int = 0
    """Number of its first partition in the plan of all ranks, of which this may be a part."""
    before: int = 0
    """Units of that partition that an earlier rank has."""
    after: int = 0
    """Units of its last one that a later rank has."""

    @property
    def shuffle(self) -> bool:
        """Whether the units of a partition come in random order."""
        return self.order.shuffles

    def mixing(self) -> Mixing:
        """How well this order mixes, as one number, and the random reads that it costs."""
        return mixing_of(self)

    def __len__(self) -> int:
        return self.sizes.size

    @overload
    def __getitem__(self, index: int) -> Partition: ...
    @overload
    def __getitem__(self, index: slice) -> list[Partition]: ...
    def __getitem__(self, index: int | slice) -> Partition | list[Partition]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        part = slice(self.edges[number], self.edges[number + 1])
        groups = None
        if self.groups is not None:
            first, last = np.searchsorted(self.groups, self.edges[number : number + 2]).tolist()
            groups = self.groups[first : last + 1] - self.groups[first]
        return Partition(
            number,
            self.utts[part],
            self.starts[part],
            self.stops[part],
            int(self.sizes[number]),
            groups=groups,
            before=self.before if number == 0 else 0,
            after=self.after if number == len(self) - 1 else 0,
        )

    def __iter__(self) -> Iterator[Partition]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        mine, theirs = ((p.utts, p.starts, p.stops, p.edges, p.sizes) for p in (self, other))
        same = all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        return same and self._settings() == other._settings()

    __hash__ = None  # type: ignore[assignment]

    def _settings(self) -> tuple[object, ...]:
        own = (self.rank, self.world_size, self.first, self.before, self.after)
        return (self.partition_nbytes, self.order, self.seed, self.epoch, self.cut, *own)

    @property
    def num_units(self) -> Integers:
        """Units of every partition."""
        if self.groups is not None:
            return np.diff(np.searchsorted(self.groups, self.edges))
        counts = np.ones_like(self.utts) if self.cut.whole else self.cut.count(self.stops - self.starts)
        return np.diff(np.concatenate(([0], np.cumsum(counts)))[self.edges])

    @property
    def num_utterances(self) -> int:
        """Utterances of the epoch on this rank; one that was cut counts once."""
        return int(np.count_nonzero(self.starts == 0))

    @property
    def num_frames(self) -> int:
        """Frames loaded, those that overlapping cuts load twice included."""
        return int((self.stops - self.starts).sum())

    @property
    def max_partition_nbytes(self) -> int:
        """Bytes of the largest partition."""
        return int(self.sizes.max(initial=0))

    def draws(self, partition: Partition) -> np.random.Generator:
        """The random stream that shuffles the units of a partition, those of all ranks."""
        return generator(self.seed, self.epoch, Purpose.FRAMES, self.first + partition.number)

    def order_units(self, partition: Partition, units: NDArray[np.int32]) -> None:
        """Bring the units of a partition, on all ranks, which come as 0, 1, 2 ..., into their shuffled order, in place.

        A plan whose order is not ours to choose has its own way here.
        """
        self.draws(partition).shuffle(units)

    def __str__(self) -> str:
        order = ORDERS[self.order.kind].format(seed=self.seed)
        ranks = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return (
            f"epoch {self.epoch}{ranks}: {self.num_utterances} utterances, {self.num_frames} frames, {order}, in "
            f"{len(self)} partitions of at most {format_nbytes(self.partition_nbytes)} "
            f"(the largest takes {format_nbytes(self.max_partition_nbytes)})"
        )
