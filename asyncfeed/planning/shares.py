"""What each rank has of the plan that all agree on.

Where units are shuffled within partitions, the utterances come in random order anyway, and each rank has a run of the plan:
the runs differ by one unit at most, nothing is loaded twice, and what is shuffled together is the same whatever the number
of ranks. Where a partition lies in two runs, each rank goes through its own units in the order that the partition has as a
whole. Everywhere else, ranks take turns, which keeps an order that means something.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.orders import Order
from asyncfeed.planning.plan import Cut, Plan

__all__ = ["are_runs", "run_of", "share_of", "shares_of"]

Integers = NDArray[np.int64]


def are_runs(order: Order, cut: Cut) -> bool:
    """Whether ranks have runs of a plan; if not, they take turns."""
    return order.shuffles and not cut.whole


def run_of(num_units: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which units are in the run of a rank: the first, and one past the last.

    The runs of the ranks ``n * k`` to ``n * k + k - 1`` of ``world_size * k`` are together the run of rank ``n``.
    """
    return num_units * rank // world_size, num_units * (rank + 1) // world_size


def share_of(plan: Plan, rank: int, world_size: int) -> Plan:
    """The run of one rank of a plan that was made for all. Copies what it takes of it."""
    return plan if world_size == 1 else _run(plan, _bounds(plan), rank, world_size)


def shares_of(plan: Plan, world_size: int) -> list[Plan]:
    """The runs of all ranks."""
    bounds = _bounds(plan)
    return [_run(plan, bounds, rank, world_size) for rank in range(world_size)]


def _bounds(plan: Plan) -> Integers:
    """Number of the first unit of every slice, and of all."""
    return np.concatenate(([0], np.cumsum(plan.cut.count(plan.stops - plan.starts))))


def _run(plan: Plan, bounds: Integers, rank: int, world_size: int) -> Plan:
    start, stop = run_of(int(bounds[-1]), rank, world_size)
    first, last = _slices(bounds, start, stop, is_last=rank == world_size - 1)
    own = replace(plan, rank=rank, world_size=world_size)
    if first == last:
        none = np.zeros(0, np.int64)
        return replace(own, utts=none, starts=none, stops=none, sizes=none, edges=np.zeros(1, np.int64))
    starts, stops = plan.starts[first:last].copy(), plan.stops[first:last].copy()
    starts[0] += max(start - int(bounds[first]), 0) * plan.cut.hop
    if bounds[last] > stop:
        begun = plan.starts[last - 1]
        stops[-1] = begun + plan.cut.end(stop - bounds[last - 1], stops[-1] - begun)
    low = int(np.searchsorted(plan.edges, first, side="right")) - 1
    high = int(np.searchsorted(plan.edges, last))
    own = replace(
        own,
        utts=plan.utts[first:last].copy(),
        starts=starts,
        stops=stops,
        edges=np.clip(plan.edges[low : high + 1], first, last) - first,
        sizes=plan.sizes[low:high].copy(),
        first=low,
        before=start - int(bounds[plan.edges[low]]),
        after=int(bounds[plan.edges[high]]) - stop,
    )
    for number in {0, len(own) - 1}:  # which may be parts; tables are needed for the whole of them
        own.sizes[number] -= _nbytes(plan, low + number) - _nbytes(own, number)
    return own


def _nbytes(plan: Plan, number: int) -> int:
    """Bytes of the frames of a partition."""
    part = slice(plan.edges[number], plan.edges[number + 1])
    return int(((plan.stops[part] - plan.starts[part]) * plan.corpus.frame_nbytes[plan.utts[part]]).sum())


def _slices(bounds: Integers, start: int, stop: int, *, is_last: bool) -> tuple[int, int]:
    """The slices that have the units ``start:stop``: the first, and one past the last.

    Slices without any unit go with the unit that follows them, or else to the last rank.
    """
    begins = bounds[:-1]
    first = int(np.searchsorted(begins, start))
    if first and bounds[first] > start:
        first -= 1
    if is_last:
        return first, begins.size
    return first, int(np.searchsorted(begins, stop)) if start < stop else first
