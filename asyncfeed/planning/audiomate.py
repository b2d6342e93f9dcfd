"""The orders of audiomate's loaders, reproduced: the same seed gives the same order, to the frame.

They come from two generators, both a Mersenne Twister: numpy's ``RandomState`` orders what the feature iterator gives,
Python's ``random.Random`` everything else.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.orders import Order
from asyncfeed.planning.plan import ALIGNMENT, Cut, Partition, Plan

__all__ = ["FeaturePlan", "Seed", "feature_plan", "pack_frames", "pack_utterances", "shuffled", "utterance_plan"]

Integers = NDArray[np.int64]
Seed: TypeAlias = Any
"""Whatever the generator in question takes; None for another order every time."""


def shuffled(count: int, seed: Seed) -> list[int]:
    """The numbers below ``count`` in the order that a new ``random.Random`` with this seed brings them into."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)  # noqa: S311 - nothing secret
    return numbers


def pack_utterances(sizes: Iterable[int], partition_nbytes: int) -> list[int]:
    """Edges of partitions of whole utterances: each takes what comes next until it would not fit.

    Utterances without any bytes that come after the last full partition are in none; the number of partitions, and so
    the number of random draws, depends on that.
    """
    edges, used, row = [0], 0, 0
    for row, size in enumerate(sizes, 1):
        if used + size > partition_nbytes:
            edges.append(row - 1)
            used = 0
        used += size
    return edges + [row] * bool(used)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Slices of utterances, by their place in some order, and the edges of the partitions that they fall into."""

    places: Integers
    starts: Integers
    stops: Integers
    edges: Integers


def pack_frames(lengths: Integers, widths: Integers, partition_nbytes: int) -> _Pieces:
    """Fill partitions with frames, cutting utterances where a partition is full.

    A partition ends when not one more frame of the utterance fits, or else, after an utterance, when none of the next
    one does. ``widths`` are bytes per frame, each at most ``partition_nbytes``; frames without bytes always fit.
    Utterances without frames are passed over.
    """
    filled = np.flatnonzero(lengths)
    lengths, widths = lengths[filled], widths[filled]
    before = np.concatenate(([0], np.cumsum(lengths * widths, dtype=np.int64)))
    # A partition ends in the first utterance after which there is less room than this; nothing fits after the last one.
    room = np.maximum(widths, np.append(widths[1:], partition_nbytes + 1)[: widths.size])
    # Utterances of earlier partitions cannot be found: they and a frame more would fit in front of this one.
    ends = np.maximum.accumulate(before[1:] + room)
    bounds: list[tuple[int, int, int, int]] = []
    first, start = 0, 0
    while first < filled.size:
        limit = int(before[first] + start * widths[first]) + partition_nbytes
        last = int(np.searchsorted(ends, limit, side="right"))
        length, width = int(lengths[last]), int(widths[last])
        begun = start if last == first else 0
        fitting = (limit - int(before[last]) - begun * width) // width if width else length
        stop = min(begun + fitting, length)
        bounds.append((first, start, last, stop))
        first, start = (last + 1, 0) if stop == length else (last, stop)
    return _pieces(filled, lengths, np.array(bounds, np.int64).reshape(-1, 4))


def _pieces(filled: Integers, lengths: Integers, bounds: Integers) -> _Pieces:
    """All slices of partitions of which each has the first utterance, its first frame, the last one and its end."""
    first, start, last, stop = bounds.T
    counts = last - first + 1
    edges = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    which = np.arange(edges[-1]) + np.repeat(first - edges[:-1], counts)
    starts, stops = np.zeros_like(which), lengths[which]
    starts[edges[:-1]], stops[edges[1:] - 1] = start, stop
    return _Pieces(filled[which], starts, stops, edges)


@dataclass(frozen=True, slots=True, eq=False)
class FeaturePlan(Plan):
    """The plan of a feature iterator: utterances, partitions and the frames of each are shuffled with one seed."""

    state: Seed = None

    def order_units(self, partition: Partition, units: NDArray[np.int32]) -> None:
        """Every partition begins at the seed anew, so that two of equal size have the same permutation."""
        _random_state(self.state).shuffle(units)


def feature_plan(corpus: Corpus, *, partition_nbytes: int, shuffle: bool, seed: Seed, unit_nbytes: int) -> FeaturePlan:
    """One pass of a feature iterator over a corpus of one field.

    ``unit_nbytes`` are the bytes per frame that the tables of a shuffled order take, beyond ``partition_nbytes``.
    """
    rows = np.arange(len(corpus))
    if shuffle:
        _random_state(seed).shuffle(rows)
    lengths, widths = corpus.lengths[rows], corpus.frame_nbytes[rows]
    pieces = pack_frames(lengths, widths, partition_nbytes)
    order = np.arange(pieces.edges.size - 1)
    if shuffle:
        _random_state(seed).shuffle(order)
    picked, edges = _regrouped(pieces.edges, order)
    places, starts, stops = pieces.places[picked], pieces.starts[picked], pieces.stops[picked]
    units = stops - starts
    unit_nbytes *= shuffle
    nbytes = units * (widths[places] + unit_nbytes)
    cut = Cut(unit_nbytes=unit_nbytes)
    sizes = _sizes(corpus, nbytes, edges)
    most, order_of = int(sizes.max(initial=0)), Order.of(bool(shuffle))
    utts = rows[places]
    return FeaturePlan(utts, starts, stops, edges, sizes, most, order_of, 0, 0, 0, 1, cut, corpus, state=seed)


def utterance_plan(corpus: Corpus, rows: Integers, edges: Integers) -> Plan:
    """Whole utterances in a given order, in given partitions."""
    sizes = _sizes(corpus, corpus.nbytes[rows], edges)
    stops = corpus.catalogs[0].length[rows]
    most = int(sizes.max(initial=0))
    starts, cut = np.zeros_like(stops), Cut(whole=True)
    return Plan(rows, starts, stops, edges, sizes, most, Order.of(False), 0, 0, 0, 1, cut, corpus)


def _random_state(seed: Seed) -> np.random.RandomState:
    return np.random.RandomState(seed)


def _regrouped(edges: Integers, order: Integers) -> tuple[Integers, Integers]:
    """Which slices come when, if the partitions come in another order; and where those end then."""
    counts = np.diff(edges)[order]
    ends = np.cumsum(counts, dtype=np.int64)
    shifts = edges[:-1][order] - (ends - counts)
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(shifts, counts), np.concatenate(([0], ends))


def _sizes(corpus: Corpus, nbytes: Integers, edges: Integers) -> Integers:
    """Bytes of memory that each partition takes at most, where its slices take ``nbytes`` of their own."""
    num_fields = len(corpus.fields)
    slack = ALIGNMENT * num_fields if corpus.mixed else 0
    total = np.concatenate(([0], np.cumsum(nbytes + slack, dtype=np.int64)))
    return np.diff(total[edges]) + ALIGNMENT * (num_fields + 1)
