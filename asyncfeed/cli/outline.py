"""``asyncfeed plan``: what an epoch would read, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from asyncfeed.feed import Feed
from asyncfeed.memory.budget import Budget
from asyncfeed.planning.mixing import Mixing
from asyncfeed.planning.orders import Kind
from asyncfeed.planning.plan import Plan

__all__ = ["Outline", "Row", "compare_orders", "outline"]

SHOWN = (8, 2)
"""Partitions shown from the beginning and from the end of a plan that has more than both together."""


@dataclass(frozen=True, slots=True)
class Row:
    """One partition."""

    number: int
    utterances: int
    frames: int
    nbytes: int
    first: str
    """The id of the utterance that it begins with."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A plan and the memory that carrying it out takes."""

    plan: Plan
    budget: Budget
    num_segments: int
    segment_nbytes: int
    num_cut: int
    """Utterances that are larger than a partition and are streamed in pieces."""
    first: tuple[Row, ...]
    last: tuple[Row, ...]
    """Partitions in order; those between ``first`` and ``last`` are not shown."""

    @property
    def peak_nbytes(self) -> int:
        """Shared memory that an epoch takes, unless the loop keeps frames of earlier partitions."""
        return self.num_segments * self.segment_nbytes

    @property
    def num_hidden(self) -> int:
        return len(self.plan) - len(self.first) - len(self.last)


def outline(feed: Feed) -> Outline:
    """Plan the coming epoch of a feed. Reads metadata, never data, and makes no shared memory.

    Raises:
        AsyncFeedError: whatever opening the feed and planning raise.
    """
    plan, budget, session = feed.plan, feed.budget, feed._opened()
    first = min(len(plan), SHOWN[0]) if len(plan) > sum(SHOWN) else len(plan)
    last = range(max(len(plan) - SHOWN[1], first), len(plan))
    return Outline(
        plan=plan,
        budget=budget,
        num_segments=min(budget.nbytes // budget.partition_nbytes, len(plan)),
        segment_nbytes=session.segment_nbytes,
        num_cut=int(
            np.unique(plan.utts[1:][plan.starts[1:] > 0]).size
        ),  # the first one may be shared with another rank
        first=tuple(_row(feed, plan, number) for number in range(first)),
        last=tuple(_row(feed, plan, number) for number in last),
    )


def compare_orders(feed: Feed) -> dict[Kind, Mixing]:
    """How well each order that needs no more than a name would mix the coming epoch, and what it would cost."""
    session, plan = feed._opened(), feed.plan
    return {
        kind: session.plan(plan.cut, plan.epoch, replace(plan.order, kind=kind)).mixing()
        for kind in ("file", "block", "interleave", "utterance")
    }


def _row(feed: Feed, plan: Plan, number: int) -> Row:
    partition = plan[number]
    frames, first = int(partition.lengths.sum()), feed._library.corpus.ids[int(partition.utts[0])]
    return Row(number, len(partition), frames, partition.nbytes, first)
