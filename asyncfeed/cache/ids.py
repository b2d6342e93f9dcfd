"""Which ids a cache can keep: those that name one dataset in an HDF5 file, and come back as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from asyncfeed.errors import ItemIdError

__all__ = ["MAX_ID_NBYTES", "Groups", "check_id"]

MAX_ID_NBYTES = 60_000
"""Of an id in UTF-8; HDF5 keeps the length of some messages in 16 bits."""


def check_id(uid: object) -> str:
    """The id itself, if an item can be kept under it.

    Raises:
        ItemIdError: it is no string, is empty or too long, holds NUL or a lone surrogate, or a component that is empty,
            ``.`` or ``..``: HDF5 would take another path than the one that is written.
    """
    if not isinstance(uid, str):
        raise ItemIdError(f"an id must be a string, not {uid!r} ({type(uid).__name__}); pass str(...) of it")
    if not uid:
        raise ItemIdError("an id must not be the empty string")
    try:
        nbytes = len(uid.encode())
    except UnicodeEncodeError:
        raise ItemIdError(f"the id {uid!r} holds a lone surrogate, which UTF-8 cannot express") from None
    if nbytes > MAX_ID_NBYTES:
        raise ItemIdError(
            f"the id {uid[:40]!r}... takes {nbytes:,} bytes and {MAX_ID_NBYTES:,} is the most; use a digest of it"
        )
    if "\0" in uid:
        raise ItemIdError(f"the id {uid!r} holds a NUL character, where HDF5 would end it")
    if ("/" in uid or "." in uid) and any(part in ("", ".", "..") for part in uid.split("/")):
        raise ItemIdError(
            f"the id {uid!r} has a component that is empty, '.' or '..' between its slashes, which does not come back as "
            f"it is from an HDF5 path; leave it out or write it otherwise"
        )
    return uid


def _above(uid: str) -> Iterator[str]:
    """The groups that a dataset of this id lies in."""
    end = uid.find("/")
    while end >= 0:
        yield uid[:end]
        end = uid.find("/", end + 1)


class Groups:
    """What is a group in the file, because ids lie below it, and so cannot be an item as well."""

    def __init__(self, uids: Iterable[str] = ()) -> None:
        self._groups: set[str] = set()
        for uid in uids:
            self.add(uid)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, uid: str) -> None:
        if "/" in uid:
            self._groups.update(_above(uid))

    def check(self, uid: str, held: Collection[str]) -> None:
        """Raise `ItemIdError` if ``uid`` cannot stand beside the ids ``held``."""
        if uid in self._groups:
            raise ItemIdError(
                f"the id {uid!r} cannot be kept: ids that begin with {uid + '/'!r} are, and HDF5 has one thing of a name, "
                f"a group or a dataset; use other ids, or another cache"
            )
        clash = next((above for above in _above(uid) if above in held), None) if "/" in uid else None
        if clash is not None:
            raise ItemIdError(
                f"the id {uid!r} cannot be kept: {clash!r} is, and HDF5 has one thing of a name, a group or a dataset; "
                f"use other ids, or another cache"
            )
