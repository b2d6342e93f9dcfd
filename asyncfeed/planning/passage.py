"""What is left of an epoch, and whose it is: for resuming, on as many ranks as before or on another number.

Each rank goes through *pieces*, one after the other: of partitions, where ranks have runs of the plan, and of utterances,
where they take turns. When an epoch was interrupted after each rank had handed out so and so many units, what is left of
all of them is divided anew between the ranks that go on: each unit is handed out once, whatever the number of ranks was and
is. Runs are laid end to end and cut into equal parts, so at most one partition per rank is loaded twice; utterances are dealt
out again in their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.even import Even, even_count
from asyncfeed.planning.plan import Partition, Plan
from asyncfeed.planning.shares import run_of

__all__ = ["UNKNOWN", "Passage", "Pieces", "Stage", "Turns", "deal", "divide", "go_through", "make_even"]


Integers = NDArray[np.int64]
Some = TypeVar("Some", bound="Pieces")


UNKNOWN = -1
"""Units of a stage that handed out whole partitions: they differ in size, on every rank otherwise."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of an epoch that ran on a fixed number of ranks."""

    world_size: int
    units: int
    """That each rank handed out, or `UNKNOWN`."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(ABC):
    """Units of something. Row k of each array is piece k."""

    first: Integers
    """First unit of each piece."""
    stop: Integers
    """One past its last unit."""

    @property
    def num_units(self) -> int:
        """Units that are handed out."""
        return int((self.stop - self.first).sum())

    @abstractmethod
    def at(self, rows: slice | Integers) -> Self:
        """Some of the pieces."""

    @classmethod
    @abstractmethod
    def concatenate(cls, several: Sequence[Self]) -> Self:
        """One after the other."""

    def between(self, start: int, stop: int) -> Self:
        """The units ``start:stop`` of all."""
        ends = np.cumsum(self.stop - self.first)
        begins = ends - (self.stop - self.first)
        kept = np.flatnonzero((ends > start) & (begins < stop))
        found = self.at(kept)
        return replace(
            found,
            first=found.first + np.maximum(start - begins[kept], 0),
            stop=found.stop - np.maximum(ends[kept] - stop, 0),
        )

    def __len__(self) -> int:
        return self.first.size


@dataclass(frozen=True, slots=True, eq=False)
class Turns(Pieces):
    """Pieces of utterances."""

    place: Integers
    """Which utterance, in the order that all ranks agree on."""

    def at(self, rows: slice | Integers) -> Self:
        return type(self)(self.first[rows], self.stop[rows], self.place[rows])

    @classmethod
    def concatenate(cls, several: Sequence[Self]) -> Self:
        columns = ([getattr(turns, name) for turns in several] for name in ("first", "stop", "place"))
        return cls(*map(np.concatenate, columns))

    @classmethod
    def of(cls, units: Integers) -> Self:
        """All utterances of an epoch, which have so many units."""
        return cls(np.zeros_like(units), units, np.arange(units.size))


@dataclass(frozen=True, slots=True, eq=False)
class Passage(Pieces):
    """Pieces of partitions of some plans."""

    plans: Sequence[Plan]
    plan: Integers
    """Which of the plans."""
    partition: Integers
    """Which of its partitions."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """All of a plan."""
        units = plan.num_units
        return cls(np.zeros_like(units), units, (plan,), np.zeros_like(units), np.arange(units.size))

    @classmethod
    def concatenate(cls, several: Sequence[Self]) -> Self:
        plans = list({id(plan): plan for passage in several for plan in passage.plans}.values())
        number = {id(plan): n for n, plan in enumerate(plans)}
        renumbered = [np.array([number[id(plan)] for plan in p.plans], np.int64)[p.plan] for p in several]
        first, stop, partition = (
            np.concatenate([getattr(passage, name) for passage in several]) for name in ("first", "stop", "partition")
        )
        return cls(first, stop, plans, np.concatenate(renumbered), partition)

    def at(self, rows: slice | Integers) -> Self:
        return type(self)(self.first[rows], self.stop[rows], self.plans, self.plan[rows], self.partition[rows])

    def __iter__(self) -> Iterator[tuple[Plan, Partition]]:
        for plan, number, first, stop in zip(
            self.plan.tolist(), self.partition.tolist(), self.first.tolist(), self.stop.tolist(), strict=True
        ):
            partition = self.plans[plan][number]
            yield self.plans[plan], replace(partition, first_unit=first, stop_unit=stop)


def divide(passages: Sequence[Passage], world_size: int) -> list[Passage]:
    """Lay passages end to end and divide them into parts that differ by one unit at most."""
    whole = Passage.concatenate(passages)
    return [whole.between(*run_of(whole.num_units, rank, world_size)) for rank in range(world_size)]


def deal(turns: Sequence[Turns], world_size: int) -> list[Turns]:
    """Deal out the utterances that are left, or what is left of them, one by one in their order."""
    whole = Turns.concatenate(turns)
    order = np.lexsort((whole.first, whole.place))
    return [whole.at(order[rank::world_size]) for rank in range(world_size)]


def go_through(
    pieces: Sequence[Some],
    stages: Sequence[Stage],
    world_size: int,
    divide: Callable[[Sequence[Some], int], list[Some]],
) -> list[Some]:
    """What the ranks go through after what the ``stages`` have handed out, ``pieces`` being those of the first."""
    found = list(pieces)
    for stage, following in zip(stages, [*(s.world_size for s in stages), world_size][1:], strict=True):
        found = [each.between(stage.units, each.num_units) for each in found]
        if following != stage.world_size:
            found = divide(found, following)
    return found


def make_even(pieces: Sequence[Some], even: Even) -> list[Some]:
    """As many units on every rank: of what does not come out even the last units are left out (``"drop"``), or ranks that
    have one less repeat one of the first of all (``"pad"``)."""
    join = type(pieces[0]).concatenate
    found = _level(pieces)
    each = even_count(sum(some.num_units for some in found), even, len(found))
    if even == "drop" or not each:
        return [some.between(0, each) for some in found]
    first = join(found).between(0, len(found))
    short = [rank for rank, some in enumerate(found) if some.num_units < each]
    for nth, rank in enumerate(short):
        repeated = nth % first.num_units
        found[rank] = join([found[rank], first.between(repeated, repeated + 1)])
    return found


def _level(pieces: Sequence[Some]) -> list[Some]:
    """Move units from the ends of those that have more to the ends of those that have fewer, until all have as many, or one
    more."""
    join, counts = type(pieces[0]).concatenate, [some.num_units for some in pieces]
    least, more = divmod(sum(counts), len(counts))
    wanted = [least] * len(counts)
    for rank in sorted(range(len(counts)), key=counts.__getitem__)[len(counts) - more :]:
        wanted[rank] += 1
    spare = join([some.between(n, some.num_units) for some, n in zip(pieces, wanted, strict=True)])
    given, found = 0, []
    for some, n in zip(pieces, wanted, strict=True):
        own, missing = some.between(0, n), max(n - some.num_units, 0)
        found.append(join([own, spare.between(given, given + missing)]) if missing else own)
        given += missing
    return found
