"""Many strings in two arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Strings"]

_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # HDF5 link names may hold any bytes but NUL


STEP = 1 << 14
"""Strings that are worked on at a time."""

MULTIPLIER = 0x9E3779B97F4A7C15
"""Of hashes: odd, and far from any pattern; 2**64 divided by the golden ratio."""


class Strings(Sequence[str]):
    """An immutable sequence of strings: one byte blob and one array of end positions.

    A million ids of 20 characters take 28 MB instead of the 80 MB that a list of str does, and load from disk without
    making a single object. Items are decoded when asked for; bytes that are not UTF-8 survive as surrogate escapes.
    """

    __slots__ = ("blob", "ends")

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        strings = strings if isinstance(strings, list | tuple) else list(strings)
        joined = "".join(strings)
        if joined.isascii():
            ends = np.cumsum(np.fromiter(map(len, strings), np.int64, len(strings)), dtype=np.int64)
            return cls(np.frombuffer(joined.encode(), np.uint8), ends)
        encoded = [s.encode(_ENCODING, _ERRORS) for s in strings]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    @classmethod
    def concatenate(cls, parts: Sequence[Strings]) -> Strings:
        if len(parts) == 1:
            return parts[0]
        sizes = [p.blob.size for p in parts]
        shifts = np.cumsum([0, *sizes])[: len(parts)]
        ends = [p.ends + shift for p, shift in zip(parts, shifts, strict=True)]
        return cls(
            np.concatenate([p.blob for p in parts]) if parts else np.empty(0, np.uint8),
            np.concatenate(ends) if parts else np.empty(0, np.int64),
        )

    def __len__(self) -> int:
        return self.ends.size

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.pick(np.arange(*index.indices(len(self))))
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self.ends[index - 1] if index else 0
        return self.blob[start : self.ends[index]].tobytes().decode(_ENCODING, _ERRORS)

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), STEP):
            yield from self[start : start + STEP]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Strings):
            return NotImplemented
        return np.array_equal(self.ends, other.ends) and np.array_equal(self.blob, other.blob)

    __hash__ = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.blob.nbytes + self.ends.nbytes

    def pick(self, rows: NDArray[np.integer]) -> list[str]:
        """The strings at ``rows``, decoded."""
        ends = self.ends[rows]
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        blob = self.blob.data
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return [str(blob[start:end], _ENCODING, _ERRORS) for start, end in spans]

    def find(self, wanted: Sequence[str]) -> NDArray[np.int64]:
        """The row of each of the strings; -1 for one that is not there, and any row of one that is there twice.

        By hashes, sorted, and without an object per string of ours: a dict takes three times as long and as much memory.
        """
        hashes = np.concatenate([np.empty(0, np.uint64), *(part._hashes() for part in self._parts())])
        order = np.argsort(hashes)
        hashes, found = hashes[order], np.full(len(wanted), -1, np.int64)
        for start in range(0, len(wanted) if len(self) else 0, STEP):
            some = wanted[start : start + STEP]
            theirs = Strings.of(some)
            sought = theirs._hashes()
            in_turn = np.argsort(sought)  # neighbours are found together, in cache
            places = np.empty(len(some), np.int64)
            places[in_turn] = np.searchsorted(hashes, sought[in_turn])
            rows = order[np.minimum(places, order.size - 1)]
            if self.take(rows) != theirs:
                rows = np.array([self._row(order, hashes, k, s) for k, s in zip(places.tolist(), some, strict=True)])
            found[start : start + STEP] = rows
        return found

    def _row(self, order: NDArray[np.int64], hashes: NDArray[np.uint64], place: int, string: str) -> int:
        """The row of one string: it may not be there, or stand behind another one with the same hash, from ``place`` on."""
        same = itertools.takewhile(lambda k: hashes[k] == hashes[place], range(place, order.size))
        return next((row for row in map(int, order[list(same)]) if self[row] == string), -1)

    def _parts(self) -> Iterator[Strings]:
        """Some at a time."""
        for start in range(0, len(self), STEP):
            ends = self.ends[start : start + STEP]
            begin = int(self.ends[start - 1]) if start else 0
            yield Strings(self.blob[begin : int(ends[-1])], ends - begin)

    def _hashes(self) -> NDArray[np.uint64]:
        """Of every string: its bytes as the digits of a number, modulo 2**64."""
        starts = np.concatenate(([0], self.ends))[:-1]
        sizes = self.ends - starts
        powers = np.cumprod(np.full(int(sizes.max(initial=0)), MULTIPLIER, np.uint64))
        digits = (self.blob.astype(np.uint64) + np.uint64(1)) * powers[
            np.arange(self.blob.size) - np.repeat(starts, sizes)
        ]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(digits, dtype=np.uint64)))
        hashes: NDArray[np.uint64] = sums[self.ends] - sums[starts]
        return hashes

    def take(self, rows: NDArray[np.integer]) -> Strings:
        """The strings at ``rows``, still packed."""
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        sizes = self.ends[rows] - starts
        ends = np.cumsum(sizes, dtype=np.int64)
        where = np.arange(int(sizes.sum())) + np.repeat(starts - (ends - sizes), sizes)
        return Strings(self.blob[where], ends)
