"""What a sealed file holds, as arrays: saved in the file itself, so that opening it needs no HDF5."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfeed.cache.records import Entry, dtype_of, dtype_text
from asyncfeed.cache.values import DIGEST_NBYTES
from asyncfeed.planning.strings import Strings

__all__ = ["Form", "Table"]

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

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Table:
        number: dict[Form, int] = {}
        form = [number.setdefault((e.dtype, e.shape), len(number)) for e in entries.values()]
        digests = b"".join(e.digest or NO_DIGEST for e in entries.values())
        return cls(
            Strings.of(entries),
            np.array([e.offset for e in entries.values()], np.int64),
            np.array([e.nbytes for e in entries.values()], np.int64),
            np.array(form, np.int32),
            list(number),
            np.array([e.checksum for e in entries.values()], np.int64),
            np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES),
        )

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
