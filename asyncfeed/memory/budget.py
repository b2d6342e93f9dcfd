"""How much memory may be used, measured; and how much of it a feed takes, promised."""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncfeed.errors import ArgumentError, BudgetError
from asyncfeed.units import GIB, PAGE_NBYTES, format_nbytes, parse_nbytes, parse_share

__all__ = ["MAX_AUTO", "Budget", "Limit", "Measurement", "MemoryBudget", "check_request", "measure", "resolve"]

MAX_AUTO = GIB
"""What ``memory_budget="auto"`` takes at most."""

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63; nobody has this much."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that limits memory."""

    name: str
    available: int
    """Bytes that it still allows."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What all limits together allow at one moment."""

    limits: tuple[Limit, ...]
    local_ranks: int
    """Processes of this run on this machine, which share it."""

    @property
    def tightest(self) -> Limit:
        return min(self.limits, key=lambda limit: limit.available)

    @property
    def available(self) -> int:
        """Bytes that this process may use."""
        return self.tightest.available // self.local_ranks

    def __str__(self) -> str:
        shared = f", shared by {self.local_ranks} local ranks" if self.local_ranks > 1 else ""
        return f"{format_nbytes(self.tightest.available)} available ({self.tightest.name}{shared})"


def measure(
    *,
    mount: str | None = None,
    environ: Mapping[str, str] = os.environ,
    cgroups: Path = CGROUPS,
    membership: Path = MEMBERSHIP,
) -> Measurement:
    """Measure the memory that may be used now: the least of all limits, divided among local ranks.

    Args:
        mount: where named segments are made, if they are: its free space is a limit too.
        environ: ``LOCAL_WORLD_SIZE`` is read from it.
        cgroups, membership: the cgroup file system, and the file that says which groups this process is in.
    """
    limits = [Limit("memory of the machine, by psutil", psutil.virtual_memory().available)]
    limits += _cgroup_limits(cgroups, membership)
    if mount is not None:
        space = os.statvfs(mount)
        limits.append(Limit(f"free space of {mount}", space.f_bavail * space.f_frsize))
    return Measurement(tuple(limits), max(_integer(environ.get("LOCAL_WORLD_SIZE", "")) or 1, 1))


def _cgroup_limits(cgroups: Path, membership: Path) -> list[Limit]:
    """What every cgroup from the root down to this process still allows, versions 1 and 2.

    Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for root in (cgroups, cgroups / "unified"):
                limits += _path_limits(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _path_limits(cgroups / "memory", path, *names)
    return limits


def _path_limits(root: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> list[Limit]:
    """The limits of a group and of all groups above it; in a container the path may begin outside what is mounted."""
    limits = []
    relative = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(relative), -1, -1):
        group = root.joinpath(*relative[:depth])
        limit, usage = _read(group / limit_name), _read(group / usage_name)
        if limit is None or usage is None or limit >= NO_LIMIT:
            continue
        # Page cache that nobody has used lately is given back before anything is killed.
        usage -= min(_statistic(group / "memory.stat", reclaimable), usage)
        limits.append(Limit(f"cgroup {group}", max(limit - usage, 0)))
    return limits


def _read(path: Path) -> int | None:
    """The number in a file; None if it says "max" or is not there."""
    try:
        return _integer(path.read_text())
    except OSError:
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _integer(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


class MemoryBudget:
    """A budget that several feeds share, each in equal parts: ``MemoryBudget("4g", feeds=2)``.

    The parts are fixed beforehand, so that what a feed takes, and with it the order of its frames, does not depend on
    which other feeds are open.

    Args:
        size: what the ``memory_budget`` of a feed takes: ``"auto"``, a size, or a share.
        feeds: how many feeds may be open at a time.
    """

    def __init__(self, size: int | str = "auto", *, feeds: int = 2) -> None:
        if feeds < 1:
            raise ArgumentError(f"feeds={feeds} leaves the budget to nobody; give at least 1")
        self.size, self.feeds = size, feeds
        # Not a counter and a lock: shares come back from finalizers, which may run while this very thread takes one.
        self._shares: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(feeds):
            self._shares.put(None)

    def _take(self) -> None:
        try:
            self._shares.get_nowait()
        except queue.Empty:
            raise BudgetError(
                f"this MemoryBudget is shared by {self.feeds} feeds, which are open already; close one of them, or "
                f"make it with feeds={self.feeds + 1}"
            ) from None

    def _give_back(self) -> None:
        self._shares.put(None)

    def __reduce__(self) -> tuple[object, ...]:
        return _remake, (self.size, self.feeds)


def _remake(size: int | str, feeds: int) -> MemoryBudget:
    return MemoryBudget(size, feeds=feeds)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a feed takes, and why."""

    nbytes: int
    """Of all segments together."""
    partition_nbytes: int
    """Of one segment: ``nbytes / (prefetch + 1)``, in whole pages."""
    measured: Measurement
    reason: str
    _shared: MemoryBudget | None = field(default=None, repr=False)

    def give_back(self) -> None:
        """Let other feeds use the share of a common budget."""
        if self._shared is not None:
            self._shared._give_back()

    def __str__(self) -> str:
        return (
            f"{format_nbytes(self.nbytes)} for segments of {format_nbytes(self.partition_nbytes)}: {self.reason}; "
            f"{self.measured}"
        )


def check_request(wanted: int | str | MemoryBudget) -> None:
    """Raise `ArgumentError` if a request for memory has no meaning, however much memory there is."""
    size = wanted.size if isinstance(wanted, MemoryBudget) else wanted
    if isinstance(size, str) and (size.strip().lower() == "auto" or parse_share(size) is not None):
        return
    parse_nbytes(size)


def resolve(wanted: int | str | MemoryBudget, *, needed: int, prefetch: int, measured: Measurement) -> Budget:
    """Decide how much memory a feed takes.

    Args:
        wanted: what the user asked for.
        needed: bytes of all data of an epoch, tables included.
        prefetch: partitions that are read ahead.
        measured: what may be used.

    ``"auto"`` is a power of two: at most `MAX_AUTO`, half of what may be used, and what lets all data lie in memory at
    once, so that every machine with memory to spare makes the same plan. A share is of what may be used.

    Raises:
        BudgetError: there is not that much, or nothing at all.
        ArgumentError: the request has no meaning.
    """
    shared = wanted if isinstance(wanted, MemoryBudget) else None
    size, feeds = (shared.size, shared.feeds) if shared else (wanted, 1)
    pages = -(-max(needed, 1) // PAGE_NBYTES) * PAGE_NBYTES  # segments are whole pages, however few the data are
    nbytes, reason = _nbytes(size, feeds, _power_of_two_above(pages * (prefetch + 1)), measured)  # type: ignore[arg-type]
    if nbytes > measured.available:
        raise BudgetError(
            f"memory_budget={size!r} asks for {format_nbytes(nbytes)} but this process may use "
            f"{format_nbytes(measured.available)}: {measured}; ask for less, or pass 'auto'"
        )
    partition_nbytes = nbytes // (prefetch + 1) // PAGE_NBYTES * PAGE_NBYTES
    if not partition_nbytes:
        raise BudgetError(
            f"memory_budget={size!r} gives each of {prefetch + 1} partitions {nbytes // (prefetch + 1)} bytes, less than a "
            f"page of memory; ask for at least {PAGE_NBYTES * (prefetch + 1)}, better for many megabytes"
        )
    if shared:
        shared._take()
    return Budget(nbytes, partition_nbytes, measured, reason, shared)


def _nbytes(size: int | str, feeds: int, enough: int, measured: Measurement) -> tuple[int, str]:
    if isinstance(size, str) and size.strip().lower() == "auto":
        limits = {
            f"at most {format_nbytes(MAX_AUTO)}": MAX_AUTO,
            "half of what may be used": measured.available // (2 * feeds),
            "what the data need": enough,
        }
        reason, least = min(limits.items(), key=lambda item: item[1])
        if not least:
            raise BudgetError(f"there is no memory to use: {measured}")
        return 1 << (least.bit_length() - 1), f"'auto' is a power of two of {reason}"
    share = parse_share(size) if isinstance(size, str) else None
    if share is not None:
        return int(measured.available * share) // feeds, f"{size} of what may be used"
    return parse_nbytes(size) // feeds, f"{size!r} as asked"


def _power_of_two_above(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
