"""``asyncfeed index``: put the catalog of a file beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncfeed.errors import SourceAccessError, UnreadableDatasetError
from asyncfeed.planning.catalog import Catalog
from asyncfeed.storage.arrays import scan_slices
from asyncfeed.storage.index import beside, save_index
from asyncfeed.storage.scan import Progress, scan
from asyncfeed.storage.source import Container, Source, containers_of

__all__ = ["Written", "write_indexes"]


@dataclass(frozen=True, slots=True)
class Written:
    """One index that was written."""

    source: str
    place: Path
    nbytes: int
    utterances: int
    key: str
    seconds: float
    """What scanning took, and what every feed saves from now on."""


def write_indexes(source: Source, progress: Progress | None = None) -> Iterator[Written]:
    """Scan every file of a source and write what was found beside it, in place of an earlier index; one at a time.

    Raises:
        StorageError: a file cannot be opened.
        UnreadableDatasetError: nothing in a file can be streamed, or something cannot for a reason that lies outside of
            it. That may change while the file does not, and a feed that finds an index would not look again.
        SourceAccessError: the directory of a file cannot be written.
    """
    for container in containers_of(source):
        yield _write_index(container, progress)


def _write_index(container: Container, progress: Progress | None) -> Written:
    began = time.perf_counter()
    catalog = (scan if container.slices is None else scan_slices)(container, progress=progress)
    seconds = time.perf_counter() - began
    _refuse_gaps(container, catalog)
    place = beside(container.path)
    try:
        save_index(catalog, place, container.layout)
        nbytes = place.stat().st_size
    except OSError as error:
        raise SourceAccessError(
            f"{place} cannot be written ({error.strerror or error}); without it, feeds keep their index under the "
            f"user's cache directory"
        ) from error
    return Written(container.path, place, nbytes, len(catalog), container.key, seconds)


def _refuse_gaps(container: Container, catalog: Catalog) -> None:
    found = [each for each in catalog.skipped if not each.lasting]
    if not len(catalog):
        found += [each for each in catalog.skipped if each.lasting and not each.harmless]
    if found:
        what = found[0]
        raise UnreadableDatasetError(
            f"{container.path} gets no index, because {what.utt or container.key!r} cannot be streamed ({what.reason}; "
            f"{len(found)} such): {what.remedy}. asyncfeed inspect lists all"
        )
