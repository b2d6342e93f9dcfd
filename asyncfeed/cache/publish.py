"""Give sealed files the names that readers look for: after writing, and after merging what is there."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.generation import Generation
from asyncfeed.cache.ids import Groups
from asyncfeed.cache.journal import DiskErrors, Durability, Journal, read_header, sync_directory, synced_meanwhile
from asyncfeed.cache.lock import PATIENCE, Lock
from asyncfeed.cache.seal import Compression, UnexpectedLayoutError, seal, seal_copy
from asyncfeed.cache.table import Table
from asyncfeed.cache.view import View, intact, read_item
from asyncfeed.errors import ChangedFileError, DamagedFileError, LockedFileError, StaleCacheError, StorageError
from asyncfeed.planning.catalog import Catalog
from asyncfeed.storage.generations import COMPACTING, Generations
from asyncfeed.storage.hdf5file import open_hdf5, stamp
from asyncfeed.storage.index import beside, save_index
from asyncfeed.storage.libc import rename_exclusive
from asyncfeed.storage.scan import scan
from asyncfeed.storage.source import Container

__all__ = [
    "OnStale",
    "Settings",
    "clear_merging",
    "journal_path",
    "lock_cache",
    "lock_path",
    "lock_writer",
    "merge",
    "publish",
    "remove",
    "remove_unfinished",
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
    unmarked: bool = False
    """Whether a file without a fingerprint, which another tool has written, is taken for one that fits."""

    def accepts(self, found: Fingerprint | None, *, writing: bool) -> bool:
        """Whether a sealed file with the fingerprint ``found`` (None: it has none) may be used."""
        if self.on_stale == "ignore" or (self.unmarked and found is None):
            return True
        return self.fingerprint.accepts(found, writing=writing)


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
    except BaseException:
        _take_back(journal, end)
        raise
    sync_directory(published)
    if path != journal.path:
        remove(journal.path)
    _keep_index(catalog, published)
    return published


def _take_back(journal: Journal, end: int) -> None:
    """Make a journal again of what was being published, unless it has its new name already."""
    remove_unfinished(journal.path)
    if journal.is_at_its_path():
        journal.rewind(end)
    else:
        journal.close()  # nobody may write to it any more


def _sealed(settings: Settings, journal: Journal) -> tuple[str, Catalog]:
    """Make an HDF5 file of a journal, in place if that is possible: its path, and what HDF5 finds in it."""
    if settings.compression is None:
        end = journal.end
        with contextlib.suppress(UnexpectedLayoutError):
            table = seal(journal)
            with synced_meanwhile(journal.fd, journal.path):
                return journal.path, _inspected(journal.path, table)
        journal.rewind(end)
    path = f"{journal.path}.copy"
    seal_copy(
        path,
        journal.header,
        journal.entries,
        lambda uid: read_item(journal.fd, journal.entries[uid], uid, journal.path),
        settings.compression,
    )
    return path, _inspected(path)


# -- merging -----------------------------------------------------------------------------------------------------


def merge(settings: Settings, view: View) -> None:
    """Make one generation of all of a view, and remove the others. The caller holds the lock of `COMPACTING`.

    Raises:
        ChangedFileError: another process discarded a generation meanwhile; nothing is changed.
        DamagedFileError: an item's bytes are not those that were written; nothing is changed.
        ItemIdError: writers have used ids that one file cannot hold; nothing is changed.
        StaleCacheError: what would be merged was made by different things; nothing is changed.
        WriteError: the disk is full; nothing is changed.
    """
    path = journal_path(settings, COMPACTING)
    _clear(path)  # of a process that was killed
    if len(view.generations) < 2 and not _has_holes(view):
        return
    if settings.on_stale != "ignore":
        _check_same([g for g in view.generations if g.fingerprint is not None or not settings.unmarked])
    target = _target(settings.generations, view)
    try:
        merged, catalog = _merged(settings, view, path)
        with lock_cache(settings), DiskErrors(merged, "published"):
            _check_there(view)
            os.replace(merged, target)
            sync_directory(target)
            _remove_sealed_journals(settings, view)
            for generation in view.generations:  # the oldest first: what is left always ends with the newest
                if generation.path != target:
                    remove(generation.path)
    finally:
        _clear(path)
    _keep_index(catalog, target)


def _remove_sealed_journals(settings: Settings, view: View) -> None:
    """Remove journals that were sealed by copying them, and are still there because the process was killed then: with the
    generation it will be forgotten that their items are old."""
    nonces = {generation.nonce for generation in view.generations}
    for path in settings.generations.journals():
        header = read_header(path)
        if header is not None and header.nonce in nonces:
            remove(path)


def clear_merging(settings: Settings) -> None:
    """Remove what a process left that was killed while it merged: it may be as large as the cache."""
    path = journal_path(settings, COMPACTING)
    if settings.locking and any(map(os.path.lexists, (path, f"{path}.copy", f"{path}.scratch"))):
        with contextlib.suppress(LockedFileError), lock_writer(settings, COMPACTING):
            _clear(path)


def _clear(path: str) -> None:
    """Remove an attempt to merge: it holds nothing that is not elsewhere, too."""
    remove(path)
    remove_unfinished(path)


def _check_same(generations: Sequence[Generation]) -> None:
    """Raise `StaleCacheError` if merging would give items the fingerprint of other ones."""
    for first, other in itertools.pairwise(generations):
        if other.fingerprint != first.fingerprint:
            raise StaleCacheError(
                f"{first.path} was made with {first.fingerprint}, and {other.path} with {other.fingerprint}: what is merged "
                f"would be taken for one of both. Choose on_stale='ignore' to do it all the same"
            )


def _target(generations: Generations, view: View) -> str:
    """Where what is merged goes: to the first generation, unless that is a stale one, which is left alone."""
    first = generations.path
    ours = first in {generation.path for generation in view.generations}
    return first if ours or not os.path.lexists(first) else view.generations[0].path


def _check_there(view: View) -> None:
    """Raise `ChangedFileError` if a path of the view does not lead to what was merged."""
    for generation in view.generations:
        if not os.path.exists(generation.path) or stamp(generation.path) != generation.stamp:
            raise ChangedFileError(
                f"{generation.path} was replaced while it was being merged; nothing has been changed: compact again"
            )


def _merged(settings: Settings, view: View, path: str) -> tuple[str, Catalog]:
    """Write all items into one sealed file; its path, and what HDF5 finds in it."""
    newest = view.generations[-1].fingerprint or settings.fingerprint
    groups = Groups()
    with contextlib.closing(Journal(path, newest)) as journal:
        for uid, row in view.rows.items():
            array = view.read(row, uid)
            if not intact(array, view.checksum(row)):
                raise DamagedFileError(
                    f"item {uid!r} in {view.path(row)} is damaged; replace it (in writer mode, with put()) and seal, then "
                    f"compact"
                )
            groups.check(uid, journal.entries)
            groups.add(uid)
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


def remove_unfinished(journal: str) -> None:
    """Remove what is left beside a journal when a process is killed while it seals."""
    remove(f"{journal}.copy")
    remove(f"{journal}.scratch")


def _inspected(path: str, table: Table | None = None) -> Catalog:
    """What HDF5 finds in a file that was just sealed, compared with a table of where things are.

    Raises:
        UnexpectedLayoutError: something else than was put there.
    """
    try:
        catalog = scan(Container(path, "{utt}"))
    except StorageError as error:
        raise UnexpectedLayoutError("HDF5 cannot read what was made of its metadata") from error
    if table is not None:
        found = dict(zip(catalog.ids, catalog.offset.tolist(), strict=True))
        wanted = zip(table.ids, table.offset.tolist(), table.nbytes.tolist(), strict=True)
        elsewhere = {uid: offset for uid, offset, nbytes in wanted if nbytes and found.get(uid) != offset}
        if elsewhere:
            _look_up(path, elsewhere)
    return catalog


def _look_up(path: str, places: Mapping[str, int]) -> None:
    """Ask HDF5 itself for what a catalog does not place: it is no number to a feed, or converted on the way."""
    try:
        with open_hdf5(path) as file:
            wrong = next((uid for uid, offset in places.items() if file[uid].id.get_offset() != offset), None)
    except (OSError, KeyError, RuntimeError, ValueError, AttributeError) as error:
        raise UnexpectedLayoutError("HDF5 cannot read what was made of its metadata") from error
    if wrong is not None:
        raise UnexpectedLayoutError(f"HDF5 does not find item {wrong!r} where it is")


def _keep_index(catalog: Catalog, path: str) -> None:
    """Put the catalog of a sealed file beside it, so that a feed need not scan it."""
    # The state in which it was scanned: what is at that path by now may be what another process has merged.
    with contextlib.suppress(OSError):
        files = (replace(catalog.files[0], path=path),)
        skipped = tuple(replace(each, path=path) for each in catalog.skipped)
        save_index(replace(catalog, files=files, skipped=skipped), beside(path))


def _has_holes(view: View) -> bool:
    """Whether a noticeable part of a file is taken by items that were replaced."""
    size = sum(g.stamp.size for g in view.generations)
    return (size - view.nbytes) * 20 > size
