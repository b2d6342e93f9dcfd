"""What is where: every utterance of a source, as arrays."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.strings import Strings

__all__ = ["Access", "Catalog", "FileStamp", "Kind", "Skipped"]


class Access(enum.IntEnum):
    """How the bytes of a dataset are reached. Everything but `DIRECT` goes through the HDF5 library."""

    DIRECT = 0
    """Contiguous, unfiltered, allocated, inside the file, of a plain numeric type: read at its byte offset."""
    CHUNKED = 1
    """Stored in chunks, without filters."""
    FILTERED = 2
    """Stored in chunks that are compressed, shuffled or checksummed."""
    COMPACT = 3
    """Small, stored inside the object header."""
    VIRTUAL = 4
    """Assembled by HDF5 from other datasets."""
    EXTERNAL = 5
    """The bytes are in a raw file beside the HDF5 file."""
    UNALLOCATED = 6
    """Never written: all fill value."""
    CONVERTED = 7
    """Stored in a type that numpy does not have, converted by HDF5."""
    HANDLE = 8
    """Reached through an open handle whose file may hold unwritten data."""
    UNVERIFIED = 9
    """A direct read of a sample did not equal what HDF5 gives, so the file is not read directly."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the frames of an utterance look like."""

    dtype: np.dtype[np.generic]
    """In native byte order, as users get it."""
    shape: tuple[int, ...]
    """Of one frame; empty for one-dimensional data, whose frames are scalars."""

    @property
    def frame_nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} x {'x'.join(map(str, self.shape)) or '1'}"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file and the state it was in when it was catalogued."""

    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something in a source that cannot be streamed."""

    utt: str
    """The utterance id, or the empty string for a whole file."""
    path: str
    reason: str
    """What was found."""
    remedy: str
    """What to do about it."""
    harmless: bool = False
    """Passed over in any case: a dangling link or a named datatype holds no utterance."""
    lasting: bool = True
    """Whether it follows from the file alone, and not from what is installed, or lies beside it, today."""

    def __str__(self) -> str:
        what = f"{self.utt!r} in {self.path}" if self.utt else self.path
        return f"{what}: {self.reason}; {self.remedy}"


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """A struct of arrays over the utterances of one field; row i of every array describes utterance i.

    There is no Python object per utterance: a million of them cost about 27 MB and their ids.
    """

    ids: Strings
    file: NDArray[np.int32]
    """Index into ``files``: where the bytes are (`Access.DIRECT`) or where to open the dataset (otherwise)."""
    offset: NDArray[np.int64]
    """Of the first byte in the file, for `Access.DIRECT`; otherwise -1."""
    length: NDArray[np.int64]
    """Frames: the size of the first axis."""
    kind: NDArray[np.int32]
    """Index into ``kinds``."""
    access: NDArray[np.uint8]
    """An `Access`."""
    swapped: NDArray[np.bool_]
    """Whether the stored byte order is the other one."""
    files: tuple[FileStamp, ...]
    """The file itself, then those that its links, virtual datasets and external raw data lead to."""
    kinds: tuple[Kind, ...]
    key: str = "{utt}"
    """The path of an utterance's dataset in its file; without ``{utt}``, that of the one dataset there."""
    start: NDArray[np.int64] | None = None
    """The first frame of an utterance within its dataset, which others share; None if each has one of its own."""
    filters: tuple[int, ...] = ()
    """HDF5's numbers of the filters that its datasets passed through."""
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return self.length.size

    @property
    def frame_nbytes(self) -> NDArray[np.int64]:
        """Bytes per frame of every utterance."""
        return np.array([k.frame_nbytes for k in self.kinds], np.int64)[self.kind]

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of every utterance, in memory."""
        return self.length * self.frame_nbytes

    def take(self, rows: NDArray[np.integer], ids: Strings | None = None) -> Catalog:
        """The catalog of ``rows`` only, in that order; ``ids`` saves picking them when they are known."""
        return replace(
            self,
            ids=self.ids.take(rows) if ids is None else ids,
            file=self.file[rows],
            offset=self.offset[rows],
            length=self.length[rows],
            kind=self.kind[rows],
            access=self.access[rows],
            swapped=self.swapped[rows],
            start=None if self.start is None else self.start[rows],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Catalog]) -> Catalog:
        """One catalog over several files of the same ``key``."""
        if len(parts) == 1:
            return parts[0]
        kinds = tuple(dict.fromkeys(k for p in parts for k in p.kinds))
        number = {k: i for i, k in enumerate(kinds)}
        first_file = np.cumsum([0] + [len(p.files) for p in parts])
        renumber = [np.array([number[k] for k in p.kinds], np.int32) for p in parts]
        starts = [p.start for p in parts if p.start is not None]
        return cls(
            ids=Strings.concatenate([p.ids for p in parts]),
            file=np.concatenate([p.file + np.int32(n) for p, n in zip(parts, first_file, strict=False)]),
            offset=np.concatenate([p.offset for p in parts]),
            length=np.concatenate([p.length for p in parts]),
            kind=np.concatenate([new[p.kind] for p, new in zip(parts, renumber, strict=True)]),
            access=np.concatenate([p.access for p in parts]),
            swapped=np.concatenate([p.swapped for p in parts]),
            files=tuple(f for p in parts for f in p.files),
            kinds=kinds,
            key=parts[0].key,
            start=np.concatenate(starts) if starts else None,
            filters=tuple(dict.fromkeys(f for p in parts for f in p.filters)),
            skipped=tuple(s for p in parts for s in p.skipped),
        )
