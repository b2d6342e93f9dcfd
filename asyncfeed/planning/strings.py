"""Many strings in two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Strings"]

_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # HDF5 link names may hold any bytes but NUL


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
        step = 1 << 16
        for start in range(0, len(self), step):
            yield from self[start : start + step]

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

    def take(self, rows: NDArray[np.integer]) -> Strings:
        """The strings at ``rows``, still packed."""
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        sizes = self.ends[rows] - starts
        ends = np.cumsum(sizes, dtype=np.int64)
        where = np.arange(int(sizes.sum())) + np.repeat(starts - (ends - sizes), sizes)
        return Strings(self.blob[where], ends)
