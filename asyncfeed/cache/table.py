"""What a sealed file holds, as arrays: saved in the file itself, so that opening it needs no HDF5."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfeed.cache.records import Entry, dtype_of, dtype_text
from asyncfeed.cache.values import DIGEST_NBYTES
from asyncfeed.planning.strings import Strings

__all__ = ["Entries", "Form", "Table"]

Form = tuple[np.dtype[Any], tuple[int, ...]]
"""dtype and shape."""

NO_DIGEST = bytes(DIGEST_NBYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A struct of arrays over items, in the order in which they were written."""

    ids: Strings
    offset: NDArray[np.int64]
    """Of the first byte in the file; -1 if it can only be had through HDF5."""
    nbytes: NDArray[np.int64]
    form: NDArray[np.int32]
    """Index into ``forms``."""
    forms: Sequence[Form | None]
    """None: only HDF5 knows."""
    checksum: NDArray[np.int64]
    """-1 if there is none."""
    digest: NDArray[np.uint8]
    """Of the arguments, (items, 16); zeros if there is none."""

    def __len__(self) -> int:
        return self.offset.size

    def digest_of(self, row: int) -> bytes:
        """The digest of the arguments of an item; empty if there is none."""
        found = self.digest[row].tobytes()
        return b"" if found == NO_DIGEST else found

    def to_archive(self) -> NDArray[np.uint8]:
        """The table as the bytes of a numpy ``.npz`` archive."""
        forms = [form for form in self.forms if form is not None]
        dtypes = list(dict.fromkeys(dtype for dtype, _ in forms))
        archive = io.BytesIO()
        np.savez(
            archive,
            blob=self.ids.blob,
            ends=self.ids.ends,
            offset=self.offset,
            nbytes=self.nbytes,
            form=self.form,
            checksum=self.checksum,
            digest=self.digest,
            dtypes=np.array([dtype_text(dtype) for dtype in dtypes], np.str_),
            form_dtype=np.array([dtypes.index(dtype) for dtype, _ in forms], np.int32),
            form_ndim=np.array([len(shape) for _, shape in forms], np.int32),
            form_shape=np.array([n for _, shape in forms for n in shape], np.int64),
        )
        return np.frombuffer(archive.getbuffer(), np.uint8)

    @classmethod
    def from_archive(cls, data: NDArray[np.uint8]) -> Table:
        with np.load(io.BytesIO(data.data)) as arrays:
            dtypes = [dtype_of(text) for text in arrays["dtypes"].tolist()]
            ends = np.cumsum(arrays["form_ndim"]).tolist()
            shapes = arrays["form_shape"].tolist()
            starts = [0, *ends]
            return cls(
                Strings(arrays["blob"], arrays["ends"]),
                arrays["offset"],
                arrays["nbytes"],
                arrays["form"],
                [
                    (dtypes[dtype], tuple(shapes[start:end]))
                    for dtype, start, end in zip(arrays["form_dtype"].tolist(), starts, ends, strict=False)
                ],
                arrays["checksum"],
                arrays["digest"],
            )


class Entries(Mapping[str, Entry]):
    """The items of a journal, as columns that grow: an object per item would be work for every garbage collection.

    One thread may add while others read.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._offset, self._nbytes, self._checksum = array("q"), array("q"), array("q")
        self._form = array("i")
        self._number: dict[Form, int] = {}
        self._forms: list[Form] = []
        self._digest = bytearray()

    def __setitem__(self, uid: str, entry: Entry) -> None:
        form = (entry.dtype, entry.shape)
        number = self._number.get(form)
        if number is None:
            number = self._number[form] = len(self._forms)
            self._forms.append(form)
        row = len(self._offset)
        self._form.append(number)
        self._nbytes.append(entry.nbytes)
        self._checksum.append(entry.checksum)
        self._digest += entry.digest or NO_DIGEST
        self._offset.append(entry.offset)
        self._rows[uid] = row  # last: who finds it finds all of it

    def __getitem__(self, uid: str) -> Entry:
        row = self._rows[uid]
        digest = bytes(self._digest[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES])
        return Entry(
            self._offset[row],
            self._nbytes[row],
            *self._forms[self._form[row]],
            self._checksum[row],
            b"" if digest == NO_DIGEST else digest,
        )

    def __contains__(self, uid: object) -> bool:
        return uid in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def to_table(self) -> Table:
        """The current entry of every id. For when nothing is being added."""
        rows = np.fromiter(self._rows.values(), np.int64, len(self._rows))
        return Table(
            Strings.of(self._rows),
            np.array(self._offset, np.int64)[rows],
            np.array(self._nbytes, np.int64)[rows],
            np.array(self._form, np.int32)[rows],
            list(self._forms),
            np.array(self._checksum, np.int64)[rows],
            np.frombuffer(bytes(self._digest), np.uint8).reshape(-1, DIGEST_NBYTES)[rows],
        )
