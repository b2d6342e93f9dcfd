"""Give sealed files the names that readers look for: after writing, and after merging what is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.journal import DiskErrors, Durability, Journal, sync_directory
from asyncfeed.cache.lock import PATIENCE, Lock
from asyncfeed.cache.records import Entry
from asyncfeed.cache.seal import Compression, UnexpectedLayoutError, seal, seal_copy
from asyncfeed.cache.view import View, intact, read_item
from asyncfeed.errors import DamagedFileError, StorageError
from asyncfeed.planning.catalog import Catalog
from asyncfeed.storage.generations import COMPACTING, Generations
from asyncfeed.storage.hdf5file import stamp
from asyncfeed.storage.index import beside, save_index
from asyncfeed.storage.libc import rename_exclusive
from asyncfeed.storage.scan import scan
from asyncfeed.storage.source import Container

__all__ = [
    "OnStale",
    "Settings",
    "journal_path",
    "lock_cache",
    "lock_path",
    "lock_writer",
    "merge",
    "publish",
    "remove",
]

OnStale = Literal["error", "discard", "ignore"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store needs to know; can be sent to other processes."""

    generations: Generations
    fingerprint: Fingerprint
    writer: str = "main"
    compression: Compression = None
    durability: Durability = "process"
    on_stale: OnStale = "error"
    locking: bool = True


# -- names and locks ---------------------------------------------------------------------------------------------


def journal_path(settings: Settings, writer: str) -> str:
    """Of the journal of a writer."""
    return settings.generations.beside(f"{writer}.journal")


def lock_path(settings: Settings, writer: str) -> str:
    """Of the lock that goes with it."""
    return settings.generations.beside(f"{writer}.lock")


def lock_writer(settings: Settings, writer: str) -> Lock:
    """Be this writer, for as long as the lock is held."""
    return Lock(
        lock_path(settings, writer),
        f"writer {writer!r} of the cache {settings.generations.path}",
        advice="give every process that writes a writer id of its own (writer='rank1'), or wait until it has ended",
        locking=settings.locking,
    )


def lock_cache(settings: Settings) -> Lock:
    """Held for moments: while files appear under names that readers look for, or disappear."""
    return Lock(
        settings.generations.beside("lock"),
        f"the cache {settings.generations.path}",
        advice="it publishes or removes files there; try again",
        patience=10 * PATIENCE,
        locking=settings.locking,
    )


# -- publishing --------------------------------------------------------------------------------------------------


def publish(settings: Settings, journal: Journal) -> str:
    """Seal a journal and give it the name of the next generation; its path. On failure the journal is as it was.

    Raises:
        WriteError: the disk is full.
    """
    end = journal.end
    try:
        path, catalog = _sealed(settings, journal)
        with lock_cache(settings), DiskErrors(path, "published"):
            published = _rename_to_next(path, settings.generations)
            sync_directory(published)
    except BaseException:
        journal.rewind(end)
        raise
    if path != journal.path:
        remove(journal.path)
    _keep_index(catalog, published)
    return published


def _sealed(settings: Settings, journal: Journal) -> tuple[str, Catalog]:
    """Make an HDF5 file of a journal, in place if that is possible: its path, and what HDF5 finds in it."""
    if settings.compression is None:
        end = journal.end
        with contextlib.suppress(UnexpectedLayoutError):
            seal(journal)
            return journal.path, _inspected(journal.path, journal.entries)
        journal.rewind(end)
    path = f"{journal.path}.copy"
    seal_copy(
        path,
        journal.header,
        journal.entries,
        lambda uid: read_item(journal.fd, journal.entries[uid], uid, journal.path),
        settings.compression,
    )
    return path, _inspected(path, {})


# -- merging -----------------------------------------------------------------------------------------------------


def merge(settings: Settings, view: View) -> None:
    """Make one generation of all of a view, and remove the others. The caller holds the lock of `COMPACTING`.

    Raises:
        DamagedFileError: an item's bytes are not those that were written; nothing is changed.
        WriteError: the disk is full; nothing is changed.
    """
    if len(view.generations) < 2 and not _has_holes(view):
        return
    path = journal_path(settings, COMPACTING)
    for left in (path, f"{path}.copy"):
        remove(left)
    merged, catalog = _merged(settings, view, path)
    with lock_cache(settings), DiskErrors(merged, "published"):
        os.replace(merged, settings.generations.path)
        sync_directory(merged)
        for generation in view.generations:  # the oldest first: what is left always ends with the newest
            if generation.path != settings.generations.path:
                remove(generation.path)
    remove(path)
    _keep_index(catalog, settings.generations.path)


def _merged(settings: Settings, view: View, path: str) -> tuple[str, Catalog]:
    """Write all items into one sealed file; its path, and what HDF5 finds in it."""
    newest = view.generations[-1].fingerprint or settings.fingerprint
    with contextlib.closing(Journal(path, newest)) as journal:
        for uid, row in view.rows.items():
            array = view.read(row, uid)
            if not intact(array, view.checksum(row)):
                raise DamagedFileError(
                    f"item {uid!r} in {view.path(row)} is damaged; replace it (in writer mode, with put()) and seal, then "
                    f"compact"
                )
            journal.append(uid, array, view.digest(row))
        return _sealed(settings, journal)


def _rename_to_next(path: str, generations: Generations) -> str:
    """Give a sealed file the name of the next generation."""
    while True:
        target = generations.numbered(max(generations.numbers(), default=0) + 1)
        with contextlib.suppress(FileExistsError):
            rename_exclusive(path, target)
            return target


def remove(path: str) -> None:
    """Remove a file of a cache, and its index, if they are there."""
    for each in (path, beside(path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def _inspected(path: str, entries: Mapping[str, Entry]) -> Catalog:
    """What HDF5 finds in a file that was just sealed.

    Raises:
        UnexpectedLayoutError: something else than was put there.
    """
    catalog = scan(Container(path, "{utt}"))
    found = dict(zip(catalog.ids, catalog.offset.tolist(), strict=True))
    skipped = {s.utt for s in catalog.skipped}
    for uid, entry in entries.items():
        if found.get(uid) != entry.offset and entry.nbytes and uid not in skipped:
            raise UnexpectedLayoutError(f"HDF5 does not find item {uid!r} where it is")
    return catalog


def _keep_index(catalog: Catalog, path: str) -> None:
    """Put the catalog of a sealed file beside it, so that a feed need not scan it."""
    with contextlib.suppress(StorageError, OSError):
        save_index(replace(catalog, files=(stamp(path),)), beside(path))


def _has_holes(view: View) -> bool:
    """Whether a noticeable part of a file is taken by items that were replaced."""
    size = sum(g.stamp.size for g in view.generations)
    return (size - view.nbytes) * 20 > size
