"""Turn many reads into few calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncfeed.units import KIB, MIB

__all__ = ["MAX_GAP", "Calls", "Reads", "coalesce"]

MAX_GAP = 16 * KIB
"""Bytes between two pieces that are read and thrown away rather than skipped with a further call: about a microsecond
of memory bandwidth, where a call costs as much and may wait 5 ms for the GIL. Object headers are far smaller."""

MAX_PIECES = 1022
"""Pieces of one call; Linux takes 1,024."""

MAX_CALL_NBYTES = 128 * MIB
"""Bytes of one call, so that a reader of a slow disk still notices within a moment that it should stop."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Byte ranges wanted; row i of each array is one of them."""

    file: NDArray[np.int32]
    offset: Integers
    """Position in the file."""
    nbytes: Integers
    dest: Integers
    """Position in the segment."""
    owner: Integers
    """Slice of the partition that it belongs to."""


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Vectored reads. Call c fills the pieces ``edges[c]:edges[c + 1]`` from ``offset[c]`` of file ``file[c]`` on."""

    file: NDArray[np.int32]
    offset: Integers
    edges: Integers
    dest: Integers
    """Where each piece goes in the segment; -1 for a gap between two wanted ranges, which nobody wants."""
    nbytes: Integers
    """Bytes of each piece."""
    owner: Integers
    """Slice of the partition that each piece belongs to, or that follows a gap."""

    def __len__(self) -> int:
        return self.file.size


def coalesce(
    reads: Reads, *, max_gap: int = MAX_GAP, max_pieces: int = MAX_PIECES, max_nbytes: int = MAX_CALL_NBYTES
) -> Calls:
    """Sort reads by place and join neighbours into calls, across gaps of at most ``max_gap`` bytes.

    Overlapping and repeated ranges are fine: they start a new call. A single piece larger than ``max_nbytes`` stays one.
    """
    order = np.lexsort((reads.offset, reads.file))
    file, offset, nbytes = reads.file[order], reads.offset[order], reads.nbytes[order]
    gap = np.zeros_like(offset)
    gap[1:] = offset[1:] - (offset[:-1] + nbytes[:-1])
    joined = (gap >= 0) & (gap <= max_gap)
    joined[1:] &= file[1:] == file[:-1]
    joined[:1] = False
    bridged = joined & (gap > 0)

    place = np.arange(order.size) + np.cumsum(bridged)  # of every wanted piece among all pieces
    total = int(place[-1]) + 1 if place.size else 0
    bridge = place[bridged] - 1
    piece_dest, piece_nbytes = np.full(total, -1, np.int64), np.empty(total, np.int64)
    piece_dest[place], piece_nbytes[place] = reads.dest[order], nbytes
    piece_nbytes[bridge] = gap[bridged]
    piece_offset, piece_owner = np.empty(total, np.int64), np.empty(total, np.int64)
    piece_offset[place], piece_owner[place] = offset, reads.owner[order]
    piece_offset[bridge] = offset[bridged] - gap[bridged]
    piece_owner[bridge] = piece_owner[place[bridged]]
    piece_file = np.empty(total, np.int32)
    piece_file[place] = file
    piece_file[bridge] = file[bridged]

    first = _starts_call(place[~joined], piece_nbytes, max_pieces, max_nbytes)
    return Calls(
        piece_file[first],
        piece_offset[first],
        np.append(first, total),
        piece_dest,
        piece_nbytes,
        piece_owner,
    )


def _starts_call(run_starts: Integers, nbytes: Integers, max_pieces: int, max_nbytes: int) -> Integers:
    """The pieces that start a call: the first of every run of joined pieces, and where a run has grown too large."""
    if not nbytes.size:
        return np.empty(0, np.int64)
    run = np.zeros(nbytes.size, np.int64)
    run[run_starts] = 1
    run = run_starts[np.cumsum(run) - 1]  # for every piece the first one of its run
    before = np.cumsum(nbytes) - nbytes
    share = np.stack([run, (np.arange(nbytes.size) - run) // max_pieces, (before - before[run]) // max_nbytes])
    changed = np.any(share[:, 1:] != share[:, :-1], axis=0)
    return np.concatenate(([0], np.flatnonzero(changed) + 1))
