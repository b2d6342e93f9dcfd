"""The fields of a feed, side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import ArgumentError, FieldMismatchError
from asyncfeed.planning.catalog import Catalog, Skipped
from asyncfeed.planning.strings import Strings

__all__ = ["Corpus", "align", "select"]


@dataclass(frozen=True)
class Corpus:
    """One or more catalogs whose rows stand for the same utterances."""

    fields: Mapping[str, Catalog]
    """Field name to catalog; the same ids in the same order in each."""
    named: bool = True
    """Whether frames are handed out as a dict by field name; a lone source has a single field without a name."""

    @property
    def catalogs(self) -> tuple[Catalog, ...]:
        return tuple(self.fields.values())

    @property
    def ids(self) -> Strings:
        return self.catalogs[0].ids

    def __len__(self) -> int:
        return len(self.catalogs[0])

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of every utterance, all fields together."""
        return sum((c.nbytes for c in self.catalogs), np.zeros(len(self), np.int64))

    @cached_property
    def frame_nbytes(self) -> NDArray[np.int64]:
        """Bytes of one frame of every utterance, all fields together."""
        return sum((c.frame_nbytes for c in self.catalogs), np.zeros(len(self), np.int64))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Frames of every utterance.

        Raises:
            FieldMismatchError: the fields of an utterance differ in length, so that it has no frames in common.
        """
        first, *others = self.fields.items()
        for name, catalog in others:
            wrong = np.flatnonzero(catalog.length != first[1].length)
            if wrong.size:
                row = int(wrong[0])
                raise FieldMismatchError(
                    f"utterance {self.ids[row]!r} has {first[1].length[row]} frames in field {first[0]!r} but "
                    f"{catalog.length[row]} in field {name!r}, so they cannot be streamed frame by frame "
                    f"({wrong.size} such utterances); use feed.utterances(), or leave them out with excludes="
                )
        return first[1].length

    @cached_property
    def _found(self) -> list[tuple[tuple[str, ...], NDArray[np.int64]]]:
        return []

    def find(self, ids: tuple[str, ...]) -> NDArray[np.int64]:
        """The rows of some utterances, -1 for those that are not there. Remembered, for every epoch asks for the same."""
        for known, rows in self._found:
            if known is ids:
                return rows
        self._found[:] = [(ids, self.ids.find(ids))]
        return self._found[0][1]

    @cached_property
    def fingerprint(self) -> str:
        """Of what there is to stream: ids, lengths, and what frames look like. Where the files lie does not matter."""
        state = hashlib.blake2b(digest_size=16)
        state.update(self.ids.blob.tobytes())
        state.update(self.ids.ends.astype("<i8").tobytes())
        for name, catalog in self.fields.items():
            kinds = [str(kind) for kind in catalog.kinds]
            state.update(repr((name, kinds)).encode())
            state.update(catalog.length.astype("<i8").tobytes())
            state.update(catalog.kind.astype("<i4").tobytes())
        return state.hexdigest()

    @cached_property
    def mixed(self) -> bool:
        """Whether some field has utterances whose frames differ in shape or dtype."""
        return any(c.kind.size and np.any(c.kind != c.kind[0]) for c in self.catalogs)


def align(fields: Mapping[str, Catalog], *, unreadable: str) -> tuple[Mapping[str, Catalog], tuple[Skipped, ...]]:
    """Bring the utterances of all fields into the order of the first; with ``"skip"``, drop those that a field lacks.

    Returns:
        The aligned fields, and what had to be left out.

    Raises:
        FieldMismatchError: a field lacks an utterance that another has, and ``unreadable`` is ``"raise"``.
    """
    first, *others = fields.items()
    if all(c.ids == first[1].ids for _, c in others):
        return fields, ()
    rows = {name: {utt: row for row, utt in enumerate(c.ids)} for name, c in fields.items()}
    everywhere = set.intersection(*(set(r) for r in rows.values()))
    skipped = tuple(
        Skipped(utt, _paths(fields[name]), f"the field {name!r} has it, but not all fields do", "add or exclude it")
        for name, known in rows.items()
        for utt in known
        if utt not in everywhere
    )
    if skipped and unreadable == "raise":
        raise FieldMismatchError(
            f"{skipped[0]} ({len(skipped)} such utterances); "
            f"leave them out with includes=/excludes=, or pass unreadable='skip'"
        )
    kept = [utt for utt in rows[first[0]] if utt in everywhere]
    ids = Strings.of(kept)
    return {
        name: c.take(np.array([rows[name][utt] for utt in kept], np.int64), ids) for name, c in fields.items()
    }, skipped


def select(catalog: Catalog, includes: Collection[str] | None, excludes: Collection[str] | None) -> Catalog:
    """The utterances that ``includes`` names, or else all but those that ``excludes`` names, in file order.

    Ids that the catalog does not have are ignored. An empty ``includes`` selects nothing.

    Raises:
        ArgumentError: one of them is a bare string, which would mean its letters.
    """
    for name, value in (("includes", includes), ("excludes", excludes)):
        if isinstance(value, str | bytes):
            raise ArgumentError(f"{name}={value!r} is one string; pass a list of utterance ids: {name}=[{value!r}]")
    if includes is None and not excludes:
        return catalog
    wanted, unwanted = (None if includes is None else set(includes)), set(excludes or ())
    keep = [
        row for row, utt in enumerate(catalog.ids) if (utt in wanted if wanted is not None else utt not in unwanted)
    ]
    return catalog.take(np.array(keep, np.int64))


def _paths(catalog: Catalog) -> str:
    names = [f.path for f in catalog.files]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
