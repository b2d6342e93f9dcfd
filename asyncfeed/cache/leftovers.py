"""What is in the directory of a cache when one comes to it: journals of writers that have ended, and all the rest."""

from __future__ import annotations

import contextlib
import logging
import os

from asyncfeed.cache.journal import Journal, read_header
from asyncfeed.cache.lock import PATIENCE, Lock
from asyncfeed.cache.publish import Settings, lock_cache, lock_path, lock_writer, publish, remove
from asyncfeed.errors import LockedFileError

__all__ = ["adopt", "discard", "remove_sealed_journal"]

log = logging.getLogger("asyncfeed")


def adopt(settings: Settings, *, but: str | None = None) -> None:
    """Seal what writers of this machine have left that ended without doing it; the others keep theirs.

    Args:
        settings: of the cache; journals that something else has made stay as they are.
        but: a writer id that the caller has itself.

    Raises:
        WriteError: the disk is full, or this may not write here; what is left stays as it is.
    """
    if not settings.locking:
        return  # nothing tells that they have ended
    if not _journals(settings, but):
        return
    # Who comes while another one is at it waits, and then finds the items.
    with contextlib.suppress(LockedFileError), _lock_leftovers(settings):
        for path in _journals(settings, but):
            if _may_be_left(settings, path):
                with contextlib.suppress(LockedFileError), lock_writer(settings, _writer_of(settings, path)):
                    _seal(settings, path)


def _journals(settings: Settings, but: str | None) -> list[str]:
    return [path for path in settings.generations.journals() if _writer_of(settings, path) != but]


def _may_be_left(settings: Settings, path: str) -> bool:
    """Whether a journal is ours to adopt, if its writer has ended."""
    header = read_header(path)
    here = Lock.was_here(lock_path(settings, _writer_of(settings, path)))
    return here and header is not None and header.fingerprint == settings.fingerprint


def _seal(settings: Settings, path: str) -> None:
    remove_sealed_journal(settings, path)
    if os.path.exists(path):
        with contextlib.closing(Journal(path, settings.fingerprint)) as journal:
            log.warning("sealing what an ended writer left: %s", journal.recovery)
            if journal.entries:
                publish(settings, journal)
            else:
                remove(path)


def remove_sealed_journal(settings: Settings, path: str) -> None:
    """Remove a journal whose items were sealed by copying them, when the process ended before it did that itself."""
    header = read_header(path)
    if header is not None and any(
        (found := read_header(p)) and found.nonce == header.nonce for p in settings.generations.paths()
    ):
        remove(path)


def discard(settings: Settings) -> None:
    """Remove all that a cache holds, sealed or not.

    Raises:
        LockedFileError: a process is writing to it; nothing is removed.
    """
    generations = settings.generations
    if not generations and not generations.journals():
        return
    with contextlib.ExitStack() as locks:
        for path in generations.journals():
            locks.enter_context(lock_writer(settings, _writer_of(settings, path)))
        locks.enter_context(lock_cache(settings))
        for path in [*generations.journals(), *generations.paths()]:
            remove(path)


def _writer_of(settings: Settings, journal: str) -> str:
    return journal[len(settings.generations.path) + 1 : -len(".journal")]


def _lock_leftovers(settings: Settings) -> Lock:
    return Lock(
        settings.generations.beside("leftovers.all.lock"),  # no writer id has a dot in it
        f"what ended writers of the cache {settings.generations.path} have left",
        advice="another process seals it; try again",
        patience=10 * PATIENCE,
    )
