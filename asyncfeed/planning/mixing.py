"""How well an order mixes, as one number, and what it costs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.coalesce import MAX_GAP
from asyncfeed.units import MIB, format_nbytes

if TYPE_CHECKING:
    from asyncfeed.planning.plan import Plan

__all__ = ["Mixing", "mixing_of"]

PARTS = 10
"""The file is divided into so many parts, of equally many frames."""

WINDOW = 1000
"""Frames that are looked at together, where they come in the order of the plan."""

RANDOM_NBYTES = MIB // 2
"""What lies together for less than this is a random read."""

Integers = NDArray[np.int64]


class Mixing(NamedTuple):
    """What `Plan.mixing` found."""

    number: float
    """0 for file order, 1 for a perfect shuffle.

    The file is divided into ten parts of equally many frames. Of frames that come one after the other, as many should be of
    each: the number is 1 - d / 0.9, where d is the mean total variation distance between the shares of the ten parts and a
    tenth each, over all partitions if frames are shuffled within each (exactly, without the noise of a sample), and over
    windows of 1,000 frames if they are not.
    """
    random_nbytes: int
    """Bytes that are read in pieces of less than 512 KiB that do not lie side by side."""
    nbytes: int
    """All bytes that are read."""

    def __str__(self) -> str:
        share = self.random_nbytes / self.nbytes if self.nbytes else 0.0
        return f"{self.number:.3f}; {format_nbytes(self.random_nbytes)} of random reads ({share:.0%})"


def mixing_of(plan: Plan) -> Mixing:
    """See `Mixing`. Time and memory are linear in the slices of the plan, but for sorting them."""
    lengths = plan.stops - plan.starts
    if not lengths.sum():
        return Mixing(0.0, 0, 0)
    partition = np.repeat(np.arange(len(plan)), np.diff(plan.edges))
    window = partition if plan.shuffle and not plan.cut.whole else _windows(lengths)
    shares = np.zeros((int(window[-1]) + 1, PARTS))
    for part, frames in enumerate(_frames_of_parts(plan, lengths)):
        np.add.at(shares[:, part], window, frames)
    totals = shares.sum(axis=1)
    seen = totals > 0
    distance = np.abs(shares[seen] / totals[seen, None] - 1 / PARTS).sum(axis=1) / 2
    number = 1 - float(np.average(distance, weights=totals[seen])) / (1 - 1 / PARTS)
    return Mixing(max(number, 0.0), *_random_reads(plan, partition, lengths))


def _windows(lengths: Integers) -> Integers:
    """Which window of the plan's order each slice lies in; a slice belongs to where it begins."""
    begins = np.cumsum(lengths) - lengths
    return begins // max(min(WINDOW, int(lengths.sum()) // (10 * PARTS)), 1)


def _frames_of_parts(plan: Plan, lengths: Integers) -> list[Integers]:
    """Frames of every slice in each part of the file."""
    rows = np.lexsort((plan.starts, plan.utts))
    ends = np.empty_like(lengths)
    ends[rows] = np.cumsum(lengths[rows])
    begins, total = ends - lengths, int(lengths.sum())
    edges = [total * part // PARTS for part in range(PARTS + 1)]
    return [np.maximum(np.minimum(ends, stop) - np.maximum(begins, start), 0) for start, stop in pairwise(edges)]


def _random_reads(plan: Plan, partition: Integers, lengths: Integers) -> tuple[int, int]:
    """Bytes of reads that are small and stand alone, and of all, over all fields."""
    random = total = 0
    for catalog in plan.corpus.catalogs:
        frame_nbytes = catalog.frame_nbytes[plan.utts]
        nbytes = lengths * frame_nbytes
        file, offset = catalog.file[plan.utts], catalog.offset[plan.utts] + plan.starts * frame_nbytes
        order = np.lexsort((offset, file, partition))
        gap = offset[order][1:] - (offset + nbytes)[order][:-1]
        same = (partition[order][1:] == partition[order][:-1]) & (file[order][1:] == file[order][:-1])
        joined = same & (gap >= 0) & (gap <= MAX_GAP) & (catalog.offset[plan.utts][order][1:] >= 0)
        run = np.cumsum(np.append(0, ~joined))
        runs = np.bincount(run, nbytes[order]).astype(np.int64)
        random += int(runs[runs < RANDOM_NBYTES].sum())
        total += int(nbytes.sum())
    return random, total
