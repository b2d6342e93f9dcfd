"""Make plans: order the utterances, divide them between the ranks, cut the large ones, pack partitions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import BudgetError
from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.draws import Purpose, generator
from asyncfeed.planning.even import Even, even_count
from asyncfeed.planning.grouping import Grouping
from asyncfeed.planning.orders import Order
from asyncfeed.planning.passage import Turns
from asyncfeed.planning.plan import ALIGNMENT, Cut, Plan
from asyncfeed.planning.shares import are_runs, share_of
from asyncfeed.units import MIB, PAGE_NBYTES, format_nbytes

__all__ = ["make_plan", "needed_nbytes"]

FIRST_PARTITION_NBYTES = 16 * MIB
"""The first partition is this small and every next one twice as large, so that the first frame comes early."""

SINGLE_FRAMES = Cut()

Integers = NDArray[np.int64]


def make_plan(
    corpus: Corpus,
    *,
    partition_nbytes: int,
    shuffle: bool | Order = True,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    cut: Cut = SINGLE_FRAMES,
    segments: int = 2,
    skip: int = 0,
    even: Even | None = None,
    turns: Turns | None = None,
) -> Plan:
    """Plan one epoch: order the utterances, take this rank's share, pack them greedily into partitions.

    Time and memory are linear in the number of utterances of the corpus, without a Python object per utterance.

    Args:
        segments: how many partitions the budget is divided into; only an error message needs it.
        skip: whole utterances, or batches of them, that all ranks together have behind them.
        even: as many of these on every rank.
        turns: what this rank has of frames or windows for which ranks take turns, if it is not every ``world_size``-th
            utterance.

    Raises:
        BudgetError: an utterance (or a single unit of it, where it may be cut) is larger than a partition.
        FieldMismatchError: utterances would have to be cut into frames, but their fields differ in length.
    """
    order = shuffle if isinstance(shuffle, Order) else Order.of(shuffle)
    runs = are_runs(order, cut)
    own = (0, 1) if runs else (rank, world_size)
    groups = None
    if cut.whole:
        utts, groups = _whole_share(corpus, order, cut.grouping, seed, epoch, own, skip, even, partition_nbytes)
        stops = corpus.catalogs[0].length[utts]
        starts = np.zeros_like(stops)
    else:
        utts, starts, stops = _slices(corpus, order.rows(corpus, seed=seed, epoch=epoch), cut, own, turns)
    limits = _Limits(partition_nbytes, partition_nbytes - ALIGNMENT * (len(corpus.fields) + 1), segments)
    units = np.zeros_like(stops) if cut.whole else cut.count(stops - starts)
    pieces = _Pieces(utts, starts, stops, _charge(corpus)[utts] + units * cut.unit_nbytes)
    if groups is None:
        pieces = _fitting(corpus, pieces, units, cut, limits)
        edges, sizes = _pack(pieces.charge, limits)
    else:
        edges, sizes = _pack(_charge_of_groups(corpus, pieces, groups, limits), limits)
        edges = groups[edges]
    plan = Plan(
        pieces.utts,
        pieces.starts,
        pieces.stops,
        edges,
        sizes,
        partition_nbytes,
        order,
        seed,
        epoch,
        *own,
        cut,
        corpus,
        groups,
    )
    return share_of(plan, rank, world_size) if runs else plan


@dataclass(frozen=True, slots=True)
class _Limits:
    """How large partitions may be, in bytes."""

    partition_nbytes: int
    room: int
    """What is left of that for slices and their tables."""
    segments: int

    def refuse(self, corpus: Corpus, row: int, need: int, of: str) -> BudgetError:
        """What to say of an utterance, or something ``of`` it, that needs so much room."""
        need += self.partition_nbytes - self.room
        need = -(-need // PAGE_NBYTES) * PAGE_NBYTES
        budget, had = need * self.segments, self.partition_nbytes * self.segments
        return BudgetError(
            f"{of}utterance {corpus.ids[row]!r} takes {need} bytes in a partition, and a budget of {had} bytes "
            f"({format_nbytes(had)}) for {self.segments} partitions (prefetch + 1) gives each {self.partition_nbytes}; "
            f"the smallest sufficient budget is memory_budget={budget} ({format_nbytes(budget)})"
        )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Utterances, or parts of them, and the bytes that each takes."""

    utts: Integers
    starts: Integers
    stops: Integers
    charge: Integers


def _slices(
    corpus: Corpus, rows: Integers, cut: Cut, own: tuple[int, int], turns: Turns | None
) -> tuple[Integers, Integers, Integers]:
    """Utterances, of which frames or windows are taken, with the first and last frame of each."""
    rank, world_size = own
    utts = rows[rank::world_size] if turns is None else rows[turns.place]
    lengths = corpus.lengths[utts]
    if turns is None:
        return utts, np.zeros_like(lengths), lengths
    return utts, turns.first * cut.hop, cut.end(turns.stop, lengths)


def _whole_share(
    corpus: Corpus,
    order: Order,
    grouping: Grouping | None,
    seed: int,
    epoch: int,
    ranks: tuple[int, int],
    skip: int,
    even: Even | None,
    nbytes: int,
) -> tuple[Integers, Integers | None]:
    """Whole utterances of one rank, and where their batches begin and end."""
    rank, world_size = ranks
    utts = order.rows(corpus, seed=seed, epoch=epoch)
    if order.kind == "interleave":
        utts = _interleaved(corpus, utts, nbytes, seed, epoch)
    if grouping is None:
        return utts[_strided(utts.size, rank, world_size, skip, even)], None
    positions, edges = grouping.group(corpus.catalogs[0].length[utts], shuffle=order.shuffles, seed=seed, epoch=epoch)
    mine = _strided(edges.size - 1, rank, world_size, skip, even)
    sizes = np.diff(edges)[mine]
    groups = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    within = np.arange(int(groups[-1])) - np.repeat(groups[:-1], sizes)
    return utts[positions[np.repeat(edges[mine], sizes) + within]], groups


def _strided(count: int, rank: int, world_size: int, skip: int, even: Even | None) -> Integers:
    """Every ``world_size``-th of so many units, after the first ``skip``."""
    units = np.arange(skip, count, dtype=np.int64)
    if even is not None and units.size:
        units = np.resize(units, even_count(units.size, even, world_size) * world_size)  # repeats from the beginning
    return units[rank::world_size]


def _charge_of_groups(corpus: Corpus, pieces: _Pieces, groups: Integers, limits: _Limits) -> Integers:
    """The bytes of every batch. Raises `BudgetError` if one is larger than a partition."""
    charge = np.diff(np.concatenate(([0], np.cumsum(pieces.charge)))[groups])
    if charge.size and charge.max() > limits.room:
        worst = int(np.argmax(charge))
        of = f"the batch of {groups[worst + 1] - groups[worst]} utterances that begins with "
        raise limits.refuse(corpus, int(pieces.utts[groups[worst]]), int(charge[worst]), of)
    return charge


def _fitting(corpus: Corpus, pieces: _Pieces, units: Integers, cut: Cut, limits: _Limits) -> _Pieces:
    """The pieces, those cut that are larger than a partition. Raises `BudgetError` if one may not be, or not so far."""
    large = np.flatnonzero(pieces.charge > limits.room)
    if not large.size:
        return pieces
    need = pieces.charge[large] if cut.whole else _least(corpus, pieces, units, large, cut)
    worst = int(np.argmax(need))
    if need[worst] > limits.room:
        of = "" if cut.whole else "one frame of " if cut.length == 1 else "one window of "
        raise limits.refuse(corpus, int(pieces.utts[large[worst]]), int(need[worst]), of)
    return _cut(corpus, pieces, units, large, limits.room, cut)


def _interleaved(corpus: Corpus, utts: Integers, nbytes: int, seed: int, epoch: int) -> Integers:
    """The utterances of all blocks that fit into ``nbytes`` together, in random order; then those of the next."""
    total = np.cumsum(corpus.nbytes[utts])
    share = (total - corpus.nbytes[utts]) // max(nbytes, 1)
    edges = np.flatnonzero(np.diff(share, prepend=-1, append=-1)) if utts.size else np.zeros(1, np.int64)
    parts = [
        utts[first + generator(seed, epoch, Purpose.RESIDENT, number).permutation(last - first)]
        for number, (first, last) in enumerate(pairwise(edges.tolist()))
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


def needed_nbytes(corpus: Corpus, unit_nbytes: int) -> int:
    """Bytes of a single partition that holds the whole corpus, with ``unit_nbytes`` of tables per frame."""
    frames = int(corpus.catalogs[0].length.sum())
    return int(_charge(corpus).sum()) + frames * unit_nbytes + ALIGNMENT * (len(corpus.fields) + 1)


def _charge(corpus: Corpus) -> Integers:
    """Bytes that every utterance takes in a segment: packed where all are alike, else aligned one by one."""
    if not corpus.mixed:
        return corpus.nbytes
    return sum((_aligned(c.nbytes) for c in corpus.catalogs), np.zeros(len(corpus), np.int64))


def _aligned(nbytes: Integers) -> Integers:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _least(corpus: Corpus, pieces: _Pieces, units: Integers, large: Integers, cut: Cut) -> Integers:
    """Bytes that each ``large`` piece takes at least: those of one unit, or of all of it where that is less."""
    one_unit = cut.length * corpus.frame_nbytes[pieces.utts[large]] + cut.unit_nbytes + _slack(corpus)
    return np.where(units[large] > 0, np.minimum(one_unit, pieces.charge[large]), 0)


def _cut(corpus: Corpus, pieces: _Pieces, units: Integers, large: Integers, room: int, cut: Cut) -> _Pieces:
    """Cut the ``large`` pieces into smaller ones of as many units as fit; the others stay as they are.

    Of the large ones, frames that are in no unit are not loaded.
    """
    utts, lengths, charge = pieces.utts, pieces.stops - pieces.starts, pieces.charge
    frame_nbytes, slack = corpus.frame_nbytes[utts], _slack(corpus)
    fixed = (cut.length - cut.hop) * frame_nbytes[large] + slack  # a piece of m units takes m * per_unit + fixed
    per_unit = cut.hop * frame_nbytes[large] + cut.unit_nbytes
    per_piece = np.maximum(units, 1)
    per_piece[large] = np.maximum((room - fixed) // np.maximum(per_unit, 1), 1)
    counts = np.maximum(-(-units // per_piece), 1)
    rows = np.repeat(np.arange(utts.size), counts)
    nth = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = nth * per_piece[rows] * cut.hop
    loaded = np.minimum(units[rows] - nth * per_piece[rows], per_piece[rows])
    ends = np.minimum(starts + (loaded - 1) * cut.hop + cut.length, lengths[rows])
    stops = np.where(loaded > 0, ends, starts)
    whole = np.isin(rows, large, invert=True)
    stops[whole] = lengths[rows[whole]]
    costs = (stops - starts) * frame_nbytes[rows] + loaded * cut.unit_nbytes + slack
    costs[whole] = charge[rows[whole]]
    before = pieces.starts[rows]
    return _Pieces(utts[rows], before + starts, before + stops, costs)


def _slack(corpus: Corpus) -> int:
    """Bytes that aligning a piece of an utterance may take; packed pieces need none."""
    return ALIGNMENT * len(corpus.fields) if corpus.mixed else 0


def _pack(charge: Integers, limits: _Limits) -> tuple[Integers, Integers]:
    """Partition edges by next-fit: each partition takes slices until the next one would not fit.

    The last two share what there is for them: frames are mixed with those of their partition, and a last one of a few
    utterances would mix badly.
    """
    total = np.concatenate(([0], np.cumsum(charge)))
    room = limits.room
    edges, limit = [0], min(FIRST_PARTITION_NBYTES, room)
    while edges[-1] < charge.size:
        first = edges[-1]
        last = int(np.searchsorted(total, total[first] + limit, side="right")) - 1
        edges.append(max(last, first + 1))
        limit = min(2 * limit, room)
    if len(edges) > 2:
        begin, _, end = total[edges[-3:]].tolist()
        middle = int(np.searchsorted(total, (begin + end) / 2))
        if edges[-3] < middle < edges[-2] and end - total[middle] <= room:
            edges[-2] = middle
    inner = np.array(edges, np.int64)
    return inner, np.diff(total[inner]) + (limits.partition_nbytes - room)
