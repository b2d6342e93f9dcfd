"""``asyncfeed inspect``: what is in a source, and how it would be read."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncfeed.cli.guess import as_glob, guess, guess_for_many
from asyncfeed.errors import ArgumentError
from asyncfeed.planning.catalog import Access, FileStamp, Kind, Skipped
from asyncfeed.planning.layouts import Suggestion
from asyncfeed.storage.library import open_library
from asyncfeed.storage.scan import Progress
from asyncfeed.storage.source import Source, containers_of

__all__ = ["WHY", "Contents", "Lengths", "Obstacle", "Share", "inspect"]

Key = TypeVar("Key")

WHY = {
    Access.DIRECT: "directly, at its byte offset",
    Access.CHUNKED: "by HDF5: stored in chunks",
    Access.FILTERED: "by HDF5: compressed or checksummed",
    Access.COMPACT: "by HDF5: inside the object header",
    Access.VIRTUAL: "by HDF5: assembled from other datasets",
    Access.EXTERNAL: "by HDF5: the bytes are in a raw file",
    Access.UNALLOCATED: "by HDF5: nothing was ever written",
    Access.CONVERTED: "by HDF5: a type that numpy does not have",
    Access.HANDLE: "by HDF5: this process writes the file",
    Access.UNVERIFIED: "by HDF5: a direct read did not equal it",
}
"""How the bytes of each sort of dataset are read, and why so."""


@dataclass(frozen=True, slots=True)
class Share:
    """Utterances that have something in common."""

    utterances: int
    frames: int
    nbytes: int
    """In memory, decoded."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Frames per utterance."""

    least: int
    median: float
    most: int
    num_empty: int
    """Utterances without any frame."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason why things cannot be streamed, and all that it keeps out."""

    reason: str
    remedy: str
    harmless: bool
    names: tuple[str, ...]
    """Utterance ids, or paths of whole files."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What ``inspect`` found."""

    files: tuple[FileStamp, ...]
    key: str
    total: Share
    lengths: Lengths | None
    """None if there are no utterances."""
    kinds: dict[Kind, Share]
    """By dtype and frame shape, most bytes first."""
    access: dict[Access, Share]
    """By how they are read, most bytes first."""
    obstacles: tuple[Obstacle, ...]
    """What keeps datasets from being streamed; first those for which a feed refuses the file."""
    suggestions: tuple[Suggestion, ...] = ()
    """Ways to stream it, the likeliest first; none if a key was given."""

    @property
    def direct(self) -> float:
        """Which part of all bytes is read directly."""
        share = self.access.get(Access.DIRECT)
        return share.nbytes / self.total.nbytes if share and self.total.nbytes else 0.0


def inspect(source: Source, progress: Progress | None = None) -> Contents:
    """Look at the metadata of a source. Always scans, so that nothing an old index left out is missed.

    A directory stands for the HDF5 files in it. Files in which the default key finds the same ids are looked at in the
    likeliest way that they can be streamed in.

    Raises:
        StorageError: a file is missing, or none can be opened. Datasets that cannot be streamed are no error here.
        ArgumentError: an id appears in two files, and there is no way to tell what they are.
    """
    path = source.path
    if source != Source(path) or not isinstance(path, str):
        return _look(source, progress)
    path = as_glob(path)
    paths = [each.path for each in containers_of(path)]
    if len(paths) == 1 or os.path.isdir(path):
        return _look(Source(path), progress, suggesting=path == paths[0])
    suggestions = guess_for_many(path, paths)
    try:
        contents = _look(_likeliest(path, suggestions), progress)
    except ArgumentError as error:
        raise ArgumentError(f"{error}{_advice(suggestions)}") from error
    return replace(contents, suggestions=tuple(suggestions))


def _likeliest(path: str, suggestions: list[Suggestion]) -> Source:
    """The first that has a single field; the default if there is none."""
    for each in suggestions:
        if len(each.fields) == 1:
            _, where, arguments = each.fields[0]
            return Source(where, **arguments)
    return Source(path)


def _advice(suggestions: list[Suggestion]) -> str:
    return "".join(f"; it looks like {each.line}: {each.reason}" for each in suggestions[:1])


def _look(source: Source, progress: Progress | None, *, suggesting: bool = False) -> Contents:
    library = open_library(source, unreadable="skip", index="off", progress=progress)
    (catalog,) = library.corpus.catalogs
    share_of = _shares(catalog.length, catalog.nbytes)
    return Contents(
        files=library.files,
        key=catalog.key,
        total=share_of(np.ones(len(catalog), np.bool_)),
        lengths=_lengths(catalog.length),
        kinds=_largest_first({kind: share_of(catalog.kind == k) for k, kind in enumerate(catalog.kinds)}),
        access=_largest_first({access: share_of(catalog.access == access) for access in Access}),
        obstacles=_obstacles(library.skipped),
        suggestions=tuple(guess(str(source.path), catalog, library.skipped)) if suggesting else (),
    )


def _shares(length: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Callable[[NDArray[np.bool_]], Share]:
    def share_of(rows: NDArray[np.bool_]) -> Share:
        return Share(int(np.count_nonzero(rows)), int(length[rows].sum()), int(nbytes[rows].sum()))

    return share_of


def _lengths(length: NDArray[np.int64]) -> Lengths | None:
    if not length.size:
        return None
    empty = int(np.count_nonzero(length == 0))
    return Lengths(int(length.min()), float(np.median(length)), int(length.max()), empty)


def _largest_first(shares: dict[Key, Share]) -> dict[Key, Share]:
    found = [(key, share) for key, share in shares.items() if share.utterances]
    return dict(sorted(found, key=lambda item: -item[1].nbytes))


def _obstacles(skipped: tuple[Skipped, ...]) -> tuple[Obstacle, ...]:
    names: dict[tuple[bool, str, str], list[str]] = defaultdict(list)
    for each in skipped:
        names[each.harmless, each.reason, each.remedy].append(each.utt or each.path)
    return tuple(
        Obstacle(reason, remedy, harmless, tuple(found))
        for (harmless, reason, remedy), found in sorted(names.items(), key=lambda item: (item[0][0], -len(item[1])))
    )
