"""What produced a cache: compared whenever one is opened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from asyncfeed.errors import ArgumentError, StaleCacheError

__all__ = ["Fingerprint", "stale_error"]

MAX_NBYTES = 3000
"""Of the JSON text; it has its place in the first kilobytes of every file."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the user stated about the function whose results are kept; None where nothing was stated."""

    version: str | int | float | None = None
    takes: tuple[str, ...] | None = None
    provides: tuple[str, ...] | None = None

    @classmethod
    def checked(cls, version: Any, takes: tuple[str, ...] | None, provides: tuple[str, ...] | None) -> Fingerprint:
        """Raises `ArgumentError` if this cannot be written down."""
        if version is not None and (isinstance(version, bool) or not isinstance(version, str | int | float)):
            raise ArgumentError(f"version={version!r} must be a string or a number: it is written into every file")
        if version != version:
            raise ArgumentError("version=nan equals nothing, itself included, so that every cache would be stale")
        made = cls(version, takes, provides)
        if len(made.to_json()) > MAX_NBYTES:
            raise ArgumentError(
                f"version, takes and provides take {len(made.to_json()):,} bytes together, and {MAX_NBYTES:,} is the most; "
                f"use a digest as version"
            )
        return made

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        found = json.loads(text)
        names = {key: None if found.get(key) is None else tuple(found[key]) for key in ("takes", "provides")}
        return cls(found.get("version"), **names)

    def accepts(self, found: Fingerprint | None, *, writing: bool) -> bool:
        """Whether a file with the fingerprint ``found`` (None: it has none) may be used under this one.

        A reader that states nothing about something takes what is there. A writer would mix what it adds with it, so for
        a writer everything has to be the same.
        """
        if writing:
            return found == self
        stated = [(getattr(self, name), found and getattr(found, name)) for name in ("version", "takes", "provides")]
        return all(ours is None or ours == theirs for ours, theirs in stated)

    def __str__(self) -> str:
        return f"version={self.version!r}, takes={self.takes!r}, provides={self.provides!r}"


def stale_error(path: str, found: Fingerprint | None, ours: Fingerprint) -> StaleCacheError:
    """The error that shows both fingerprints, and what can be done."""
    was = f"made with {found}" if found is not None else "not made by asyncfeed, so that it is unknown what made it"
    return StaleCacheError(
        f"{path} was {was}; it is opened with {ours}. Choose: state what it was made with; on_stale='discard' to delete it "
        f"(in writer mode) and compute its items again; on_stale='ignore' to use it as it is; or another place for the cache"
    )
