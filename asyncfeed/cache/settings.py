"""The arguments of a cache, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.publish import Settings
from asyncfeed.errors import ArgumentError
from asyncfeed.storage.generations import COMPACTING, Generations

__all__ = ["checked_settings"]

WRITER = re.compile(r"[A-Za-z0-9_-]{1,100}")

COMPRESSIONS = ("gzip", "lzf", "szip")


def checked_settings(
    cache_location: str | os.PathLike[str],
    *,
    takes: Sequence[str] | None,
    provides: Sequence[str] | None,
    version: Any,
    filename: str,
    compression: Any,
    writer: str | None,
    durability: Any,
    on_stale: Any,
    locking: bool,
) -> Settings:
    """What the arguments of a cache mean.

    Raises:
        ArgumentError: one of them has no meaning.
    """
    if os.path.basename(filename) != filename or not os.path.splitext(filename)[0]:
        raise ArgumentError(f"filename={filename!r} must be a plain file name; the directory is cache_location")
    if writer is None:
        rank = os.environ.get("RANK", "")
        writer = f"rank{rank}" if rank else "main"
    if not isinstance(writer, str) or not WRITER.fullmatch(writer) or writer == COMPACTING:
        raise ArgumentError(
            f"writer={writer!r} becomes part of a file name: letters, digits, '-' and '_', and not {COMPACTING!r}"
        )
    known = compression is None or compression in COMPRESSIONS
    if not known and not (isinstance(compression, int) and not isinstance(compression, bool) and 0 <= compression <= 9):
        raise ArgumentError(f"compression={compression!r} must be one of {COMPRESSIONS}, 0 to 9 (gzip), or None")
    _one_of("durability", durability, ("process", "fsync"))
    _one_of("on_stale", on_stale, ("error", "discard", "ignore"))
    return Settings(
        Generations(os.path.abspath(cache_location), filename),
        Fingerprint.checked(version, _names("takes", takes), _names("provides", provides)),
        writer,
        compression,
        durability,
        on_stale,
        locking,
    )


def _names(what: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{what}={names!r} must be a sequence of names: {what}=('id', 'sig')")
    return tuple(names)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
