"""What a feed was asked to do: checked, complete, and picklable."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from asyncfeed.errors import ArgumentError
from asyncfeed.memory.budget import MemoryBudget, check_request
from asyncfeed.planning.even import Even
from asyncfeed.planning.orders import Order, Shuffle
from asyncfeed.storage.source import AnySource, anchored
from asyncfeed.units import parse_nbytes

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a `Feed`, as documented there."""

    source: AnySource
    memory_budget: int | str | MemoryBudget
    order: Order
    seed: int
    includes: Collection[str] | None
    excludes: Collection[str] | None
    prefetch: int
    rank: int
    world_size: int
    even: Even | None
    unreadable: Literal["raise", "skip"]
    index: Literal["auto", "off"]
    own_ranks: bool
    """Whether the caller said which rank this is; if not, the environment did."""
    workers: int = 1
    """Into how many parts each rank is divided; they count as ranks."""

    @classmethod
    def checked(
        cls,
        source: AnySource,
        *,
        memory_budget: int | str | MemoryBudget,
        shuffle: Shuffle,
        block_size: int | str,
        seed: int,
        includes: Collection[str] | None,
        excludes: Collection[str] | None,
        prefetch: int,
        rank: int | None,
        world_size: int | None,
        even: Even | None,
        unreadable: Literal["raise", "skip"],
        index: Literal["auto", "off"],
    ) -> Settings:
        """Check every argument that can be checked without looking at a file.

        Raises:
            ArgumentError: one has no meaning; the message names it.
        """
        if (rank is None) != (world_size is None):
            raise ArgumentError(
                f"rank={rank} and world_size={world_size}: give both, or neither to take them from RANK and WORLD_SIZE"
            )
        own_ranks = rank is not None
        rank = _whole("rank", _from_environment("RANK", 0) if rank is None else rank)
        world_size = _whole("world_size", _from_environment("WORLD_SIZE", 1) if world_size is None else world_size, 1)
        if rank >= world_size:
            raise ArgumentError(f"rank={rank} is not below world_size={world_size}; ranks count from 0")
        for name, value in (("includes", includes), ("excludes", excludes)):
            if isinstance(value, str | bytes):
                raise ArgumentError(f"{name}={value!r} is one string; pass a list of utterance ids: {name}=[{value!r}]")
        check_request(memory_budget)
        if even is not None:
            _one_of("even", even, ("drop", "pad"))
        _one_of("unreadable", unreadable, ("raise", "skip"))
        _one_of("index", index, ("auto", "off"))
        return cls(
            source=anchored(source),
            memory_budget=memory_budget,
            order=Order.of(shuffle, _block_nbytes(block_size)),
            seed=_whole("seed", seed),
            includes=None if includes is None else frozenset(includes),
            excludes=None if excludes is None else frozenset(excludes),
            prefetch=_whole("prefetch", prefetch, 1),
            rank=rank,
            world_size=world_size,
            even=even,
            unreadable=unreadable,
            index=index,
            own_ranks=own_ranks,
        )

    def part(self, index: int, count: int, ranks: tuple[int, int] | None) -> Settings:
        """Those of one of ``count`` workers of this rank, or of the rank that ``ranks`` says if the caller did not.

        Worker ``index`` counts after all ranks of the workers before it: so its turns are among those of the rank, which
        the workers' shares make up together. Where shares are runs, see `place`.
        """
        if not 0 <= index < count:
            raise ArgumentError(f"part {index} of {count} is none; parts count from 0")
        rank, world_size = (self.rank, self.world_size) if self.own_ranks or ranks is None else ranks
        wanted = self.memory_budget
        if count > 1:
            size, feeds = (wanted.size, wanted.feeds) if isinstance(wanted, MemoryBudget) else (wanted, 1)
            wanted = MemoryBudget(size, feeds=feeds * count)
        rank, world_size = index * world_size + rank, count * world_size
        return replace(self, rank=rank, world_size=world_size, workers=count * self.workers, memory_budget=wanted)

    @property
    def place(self) -> int:
        """Which run of the plan is this rank's, where ranks have runs: those of a rank's workers lie side by side."""
        worker, rank = divmod(self.rank, self.world_size // self.workers)
        return rank * self.workers + worker


def _block_nbytes(size: int | str) -> int:
    nbytes = parse_nbytes(size)
    if nbytes < 1:
        raise ArgumentError(f"block_size={size!r} must be at least one byte")
    return nbytes


def _whole(name: str, value: object, least: int = 0) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{name}={value!r} is not a whole number") from None
    if number < least:
        raise ArgumentError(f"{name}={number} must be at least {least}")
    return number


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"the environment variable {name}={text!r} is not a whole number") from None
