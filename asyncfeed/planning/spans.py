"""Which frames of one long array each utterance has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["spans"]

Integers = NDArray[np.int64]


def spans(
    num_frames: int, *, lengths: Integers | None = None, offsets: Integers | None = None, num_utts: int | None = None
) -> tuple[Integers, Integers]:
    """The first frame and the number of frames of every utterance.

    Args:
        num_frames: of the array.
        lengths: frames of each utterance. Alone, they must add up to ``num_frames``.
        offsets: first frames; or where each ends; or, with one entry more, both: 0, and where each ends. Which of them
            is found out. Together with ``lengths``, first frames, and then frames may be left out or shared.
        num_utts: how many there are, where that is known from their ids.

    Raises:
        ValueError: they contradict each other, or fit in two ways; the message says what was found.
    """
    if offsets is None:
        assert lengths is not None
        found = _from_lengths(lengths, num_frames)
    elif lengths is None:
        found = _from_offsets(offsets, num_frames, num_utts)
    else:
        found = _from_both(offsets, lengths, num_frames)
    if num_utts is not None and found[1].size != num_utts:
        raise ValueError(f"there are {num_utts} ids for {found[1].size} utterances")
    return found


def _from_lengths(lengths: Integers, num_frames: int) -> tuple[Integers, Integers]:
    ends = np.cumsum(_not_negative(lengths))
    total = int(ends[-1]) if ends.size else 0
    if total != num_frames:
        raise ValueError(f"the lengths add up to {total} frames, but the array has {num_frames}")
    return ends - lengths, lengths


def _from_both(offsets: Integers, lengths: Integers, num_frames: int) -> tuple[Integers, Integers]:
    starts = offsets[:-1] if offsets.size == lengths.size + 1 else offsets
    if starts.size != lengths.size:
        raise ValueError(f"there are {offsets.size} offsets for {lengths.size} lengths")
    _not_negative(lengths)
    outside = np.flatnonzero((starts < 0) | (starts > num_frames - lengths))
    if outside.size:
        row = int(outside[0])
        stop = int(starts[row] + lengths[row])
        raise ValueError(f"utterance {row} has the frames {starts[row]}:{stop}, but the array has {num_frames}")
    return starts, lengths


def _from_offsets(offsets: Integers, num_frames: int, num_utts: int | None) -> tuple[Integers, Integers]:
    if not offsets.size:
        if num_frames:
            raise ValueError(f"there are no offsets, but the array has {num_frames} frames")
        return offsets, offsets
    first, last = int(offsets[0]), int(offsets[-1])
    steps = np.diff(offsets)
    if np.any(steps < 0):
        raise ValueError("the offsets do not ascend; with lengths beside them they may have any order")
    if first < 0 or last > num_frames:
        raise ValueError(f"the offsets go from {first} to {last}, but the array has {num_frames} frames")
    begins, ends = first == 0, last == num_frames
    if begins and ends and num_utts in (None, offsets.size - 1):
        return offsets[:-1], steps
    if begins and ends and num_frames:
        raise ValueError("the offsets may be where utterances begin or where they end; give lengths beside them")
    if begins:
        return offsets, np.append(steps, num_frames - last)
    if ends:
        return np.append(0, offsets[:-1]), np.append(first, steps)
    raise ValueError(
        f"the offsets go from {first} to {last}, so they are neither where utterances begin (from 0) nor where they end "
        f"(to {num_frames}, the frames of the array); give lengths beside them"
    )


def _not_negative(lengths: Integers) -> Integers:
    if lengths.size and int(lengths.min()) < 0:
        raise ValueError(f"the length of utterance {int(lengths.argmin())} is {int(lengths.min())}")
    return lengths
