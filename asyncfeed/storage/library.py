"""Open sources: from what the user named to a corpus that can be planned and read."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import h5py
import numpy as np

from asyncfeed.errors import (
    ArgumentError,
    DamagedFileError,
    LockedFileError,
    NotHDF5Error,
    SourceAccessError,
    StorageError,
    UnreadableDatasetError,
)
from asyncfeed.planning.catalog import Catalog, FileStamp, Skipped
from asyncfeed.planning.corpus import Corpus, align, select
from asyncfeed.storage.arrays import scan_slices
from asyncfeed.storage.hdf5file import is_written_here
from asyncfeed.storage.index import in_cache, load_index, load_joint_index, save_index, save_joint_index
from asyncfeed.storage.scan import Progress, scan
from asyncfeed.storage.source import AnySource, Container, fields_of

__all__ = ["Library", "catalogue", "open_library"]

SHOWN = 5
"""Unreadable datasets that an error message names; the rest is counted."""

MANY, SMALL = 16, 1000
"""More files than that, with fewer utterances each, share one index: to look for thousands takes as long as to scan."""


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """A corpus and the way to its bytes."""

    corpus: Corpus
    files: tuple[FileStamp, ...]
    """What the ``file`` columns of the corpus point into, for all fields alike."""
    handles: dict[int, h5py.Group]
    """Files that are read through a handle of the user's."""
    linked: tuple[int, ...]
    """Files that HDF5 opens by itself on behalf of others, and would miss or confuse without a word."""
    skipped: tuple[Skipped, ...]


def open_library(
    source: AnySource,
    *,
    includes: Collection[str] | None = None,
    excludes: Collection[str] | None = None,
    unreadable: Literal["raise", "skip"] = "raise",
    index: Literal["auto", "off"] = "auto",
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Library:
    """Catalogue all containers of a source and bring their fields side by side. Reads metadata, never data.

    Raises:
        StorageError: the branch that fits: a file is missing, damaged, locked; a dataset cannot be streamed.
        ArgumentError: an id appears in two files, or an argument has no meaning.
    """
    fields, named = fields_of(source)
    catalogs: dict[str, Catalog] = {}
    handles: dict[str, list[h5py.Group | None]] = {}
    skipped: list[Skipped] = []
    for name, containers in fields.items():
        merged, handles[name], passed = _catalogue_field(containers, unreadable, index, progress, stop)
        skipped += [*passed, *_wanted(merged.skipped, includes, excludes)]
        catalogs[name] = select(merged, includes, excludes)
    fatal = [s for s in skipped if not s.harmless]
    if fatal and unreadable == "raise":
        raise _unreadable(fatal)
    aligned, unmatched = align(catalogs, unreadable=unreadable)
    numbered, files, handle_of = _number_files(aligned, handles)
    opened = {container.path for containers in fields.values() for container in containers}
    linked = tuple(number for number, file in enumerate(files) if file.path not in opened)
    return Library(Corpus(numbered, named), files, handle_of, linked, (*skipped, *unmatched))


def _catalogue_field(
    containers: list[Container], unreadable: str, index: str, progress: Progress | None, stop: threading.Event | None
) -> tuple[Catalog, list[h5py.Group | None], list[Skipped]]:
    """The catalog over all files of a field, the handle that each of its files is read through, and what was skipped."""
    many = index == "auto" and len(containers) > MANY and not any(c.handle or c.cache for c in containers)
    known = load_joint_index(containers) if many else None
    if known is not None and not any(is_written_here(f.path) for f in known.files):
        return known, [None] * len(known.files), []
    parts: list[Catalog] = []
    caches: list[str] = []
    handles: list[h5py.Group | None] = []
    skipped: list[Skipped] = []
    for container in containers:
        # Without its only file there is nothing to go on with: that error says best what is wrong.
        part = _catalogue_or_skip(
            container, unreadable if len(containers) > 1 else "raise", index, SMALL if many else 0, progress, stop
        )
        if isinstance(part, Skipped):
            skipped.append(part)
        else:
            parts.append(part)
            caches.append(container.cache)
            handles += [container.handle] + [None] * (len(part.files) - 1)
    if not parts:
        raise StorageError(f"none of the {len(containers)} files can be read; the last: {skipped[-1].reason}")
    merged = _merge(_without_replaced(parts, caches))
    if many and not skipped and len(merged) < SMALL * len(containers) and _lasts(merged):
        with contextlib.suppress(OSError):  # as in catalogue
            save_joint_index(merged, containers)
    return merged, handles, skipped


def _catalogue_or_skip(
    container: Container,
    unreadable: str,
    index: str,
    least: int,
    progress: Progress | None,
    stop: threading.Event | None,
) -> Catalog | Skipped:
    """The catalog of one container, or, with ``unreadable="skip"``, why it has none."""
    try:
        return catalogue(container, index=index, least=least, progress=progress, stop=stop)
    except (DamagedFileError, NotHDF5Error, SourceAccessError, LockedFileError) as error:
        if unreadable == "raise":
            raise
        return Skipped("", container.path, str(error), "copy or make it again")


def catalogue(
    container: Container,
    *,
    index: str = "auto",
    least: int = 0,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Catalog:
    """The catalog of one container: kept, or scanned and then kept, if it has at least ``least`` utterances.

    Raises:
        StorageError: it cannot be opened or walked.
    """
    keep = index == "auto" and container.handle is None and not is_written_here(container.path)
    known = load_index(container.path, container.layout) if keep else None
    if known is not None and not any(is_written_here(f.path) for f in known.files[1:]):
        return known
    look = scan if container.slices is None else scan_slices
    catalog = look(container, progress=progress, stop=stop)
    if keep and len(catalog) >= least and _lasts(catalog):
        with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to stop
            save_index(catalog, in_cache(container.path, container.layout), container.layout)
    return catalog


def _lasts(catalog: Catalog) -> bool:
    """Whether a catalog is all that can be said about its files, now and later."""
    return all(s.lasting for s in catalog.skipped) and not any(is_written_here(f.path) for f in catalog.files)


def _without_replaced(parts: list[Catalog], caches: list[str]) -> list[Catalog]:
    """The catalogs of generations of a cache without the items that a later generation of it has, too."""
    newer: dict[str, set[str]] = {}
    kept = []
    for part, cache in zip(reversed(parts), reversed(caches), strict=True):
        if cache:
            known = newer.setdefault(cache, set())
            current = np.flatnonzero([utt not in known for utt in part.ids])
            skipped = tuple(s for s in part.skipped if s.utt not in known)
            known.update(part.ids, (s.utt for s in part.skipped))
            if current.size < len(part) or len(skipped) < len(part.skipped):
                part = replace(part.take(current), skipped=skipped)  # noqa: PLW2901
        kept.append(part)
    return kept[::-1]


def _merge(parts: list[Catalog]) -> Catalog:
    """One catalog over all files of a field.

    Raises:
        ArgumentError: an id appears twice.
    """
    catalog = Catalog.concatenate(parts)
    if len(parts) > 1:
        count = Counter(catalog.ids)
        if len(count) < len(catalog):
            utt = next(utt for utt, n in count.items() if n > 1)
            paths = [p.files[0].path for p in parts if utt in set(p.ids)]
            raise ArgumentError(
                f"utterance {utt!r} is in {' and in '.join(paths[:2])} ({len(catalog) - len(count)} such ids); ids must be "
                f"unique over all files of a source: pass them as fields of a mapping if they belong side by side"
            )
    return catalog


def _wanted(
    skipped: tuple[Skipped, ...], includes: Collection[str] | None, excludes: Collection[str] | None
) -> list[Skipped]:
    """What stands in the way of utterances that the user has not left out."""
    if includes is not None:
        wanted = set(includes)
        wanted |= {
            utt[:end] for utt in includes for end, letter in enumerate(utt) if letter == "/"
        }  # groups above them
        return [s for s in skipped if not s.utt or s.utt in wanted]
    unwanted = set(excludes or ())
    return [s for s in skipped if s.utt not in unwanted]


def _unreadable(found: list[Skipped]) -> StorageError:
    more = f"\n  ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    listed = "".join(f"\n  {each}" for each in found[:SHOWN])
    return UnreadableDatasetError(
        f"{len(found)} of the datasets cannot be streamed; pass unreadable='skip' to go on without them:{listed}{more}"
    )


def _number_files(
    catalogs: Mapping[str, Catalog], handles: Mapping[str, list[h5py.Group | None]]
) -> tuple[dict[str, Catalog], tuple[FileStamp, ...], dict[int, h5py.Group]]:
    """Number the files of all fields together, so that fields that share a file are read from it together."""
    files: list[FileStamp] = []
    known: dict[tuple[str, int], int] = {}
    handle_of: dict[int, h5py.Group] = {}
    numbered = {}
    for name, catalog in catalogs.items():
        numbers = []
        for file, handle in zip(catalog.files, handles[name], strict=True):
            number = known.setdefault((file.path, id(handle)), len(files))
            if number == len(files):
                files.append(file)
            if handle is not None:
                handle_of[number] = handle
            numbers.append(number)
        numbered[name] = replace(catalog, file=np.array(numbers, np.int32)[catalog.file])
    return numbered, tuple(files), handle_of
