"""What is left of an epoch, and whose it is: for resuming, on as many ranks as before or on another number.

A *passage* is what one rank goes through: pieces of partitions, one after the other. An epoch begins with one passage per
rank. When it was interrupted after each rank had handed out so and so many units, what is left of all of them is laid end
to end and divided anew, into equal parts, between the ranks that go on: each unit is handed out once, whatever the number
of ranks was and is. At most one partition per rank is loaded twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.even import Even, even_count
from asyncfeed.planning.plan import Partition, Plan

__all__ = ["UNKNOWN", "Passage", "Stage", "divide", "go_through", "make_even"]


Integers = NDArray[np.int64]


UNKNOWN = -1
"""Units of a stage that handed out whole partitions: they differ in size, on every rank otherwise."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of an epoch that ran on a fixed number of ranks."""

    world_size: int
    units: int
    """That each rank handed out, or `UNKNOWN`."""


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Pieces of partitions of some plans. Row k of each array is piece k."""

    plans: Sequence[Plan]
    plan: Integers
    partition: Integers
    first: Integers
    """First unit of each piece."""
    stop: Integers
    """One past its last unit."""

    @classmethod
    def of(cls, plan: Plan) -> Passage:
        """All of a plan."""
        units = plan.num_units
        return cls((plan,), np.zeros_like(units), np.arange(units.size), np.zeros_like(units), units)

    @classmethod
    def concatenate(cls, passages: Sequence[Passage]) -> Passage:
        """One after the other. All refer to the same plans, or each to its own."""
        plans = list({id(plan): plan for p in passages for plan in p.plans}.values())
        number = {id(plan): n for n, plan in enumerate(plans)}
        renumbered = [np.array([number[id(plan)] for plan in p.plans], np.int64)[p.plan] for p in passages]
        columns = (renumbered, *([getattr(p, name) for p in passages] for name in ("partition", "first", "stop")))
        return cls(plans, *map(np.concatenate, columns))

    @property
    def num_units(self) -> int:
        """Units that are handed out."""
        return int((self.stop - self.first).sum())

    def between(self, start: int, stop: int) -> Passage:
        """The units ``start:stop`` of it."""
        ends = np.cumsum(self.stop - self.first)
        begins = ends - (self.stop - self.first)
        kept = np.flatnonzero((ends > start) & (begins < stop))
        return replace(
            self,
            plan=self.plan[kept],
            partition=self.partition[kept],
            first=self.first[kept] + np.maximum(start - begins[kept], 0),
            stop=self.stop[kept] - np.maximum(ends[kept] - stop, 0),
        )

    def pieces(self, start: int) -> Passage:
        """All of it but the first pieces."""
        columns = {name: getattr(self, name)[start:] for name in ("plan", "partition", "first", "stop")}
        return replace(self, **columns)

    def __len__(self) -> int:
        return self.partition.size

    def __iter__(self) -> Iterator[tuple[Plan, Partition]]:
        for plan, number, first, stop in zip(
            self.plan.tolist(), self.partition.tolist(), self.first.tolist(), self.stop.tolist(), strict=True
        ):
            partition = self.plans[plan][number]
            yield self.plans[plan], replace(partition, first_unit=first, stop_unit=stop)


def divide(passages: Sequence[Passage], world_size: int) -> list[Passage]:
    """Lay passages end to end and divide them into parts that differ by one unit at most."""
    whole = Passage.concatenate(passages)
    edges = [whole.num_units * n // world_size for n in range(world_size + 1)]
    return [whole.between(start, stop) for start, stop in pairwise(edges)]


def go_through(passages: Sequence[Passage], stages: Sequence[Stage], world_size: int) -> list[Passage]:
    """What the ranks go through after what the ``stages`` have handed out, ``passages`` being those of the first."""
    found = list(passages)
    for stage, following in zip(stages, [*(s.world_size for s in stages[1:]), world_size], strict=True):
        found = [passage.between(stage.units, passage.num_units) for passage in found]
        if following != stage.world_size:
            found = divide(found, following)
    return found


def make_even(passages: Sequence[Passage], even: Even) -> list[Passage]:
    """As many units on every rank: of what does not come out even the last units are left out (``"drop"``), or ranks that
    have one less repeat one of the first of all (``"pad"``)."""
    found = _level(passages)
    each = even_count(sum(passage.num_units for passage in found), even, len(found))
    if even == "drop" or not each:
        return [passage.between(0, each) for passage in found]
    first = Passage.concatenate(found).between(0, len(found))
    short = [rank for rank, passage in enumerate(found) if passage.num_units < each]
    for nth, rank in enumerate(short):
        repeated = nth % first.num_units
        found[rank] = Passage.concatenate([found[rank], first.between(repeated, repeated + 1)])
    return found


def _level(passages: Sequence[Passage]) -> list[Passage]:
    """Move units from the ends of those that have more to the ends of those that have fewer, until all have as many, or one
    more."""
    counts = [passage.num_units for passage in passages]
    least, more = divmod(sum(counts), len(counts))
    wanted = [least] * len(counts)
    for rank in sorted(range(len(counts)), key=counts.__getitem__)[len(counts) - more :]:
        wanted[rank] += 1
    spare = Passage.concatenate(
        [passage.between(n, passage.num_units) for passage, n in zip(passages, wanted, strict=True)]
    )
    given, found = 0, []
    for passage, n in zip(passages, wanted, strict=True):
        own, missing = passage.between(0, n), max(n - passage.num_units, 0)
        found.append(Passage.concatenate([own, spare.between(given, given + missing)]) if missing else own)
        given += missing
    return found
