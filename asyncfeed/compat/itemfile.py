"""A cache that looks like an open `h5py.File` with one dataset for each item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from asyncfeed.compat.shelf import Shelf

__all__ = ["Item", "ItemFile"]


class Item:
    """One item, as a dataset: ``item[:]``, ``item[()]``, ``item.shape``, ``item.dtype``, ``numpy.asarray(item)``."""

    def __init__(self, shelf: Shelf, uid: str) -> None:
        self._shelf, self._uid = shelf, uid

    @property
    def name(self) -> str:
        """Its path in the file."""
        return f"/{self._uid}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its values."""
        return self._shelf.form(self._uid)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self._shelf.form(self._uid)[1]

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many values it holds."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __getitem__(self, selection: Any) -> Any:
        """A part of it, or all; reads all. Always copies."""
        return self._shelf.read(self._uid)[selection]

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        array = self._shelf.read(self._uid)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<item {self._uid!r}: shape {self.shape}, type {self.dtype.str!r}>"


class ItemFile(Mapping[str, Item]):
    """All items: ``uid in file``, ``file[uid][:]``, ``file.keys()``, ``len(file)``, ``file.close()``; true while it is open.

    An id is a whole name: groups, which ``"speaker/utt"`` makes in HDF5, are none.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    @property
    def filename(self) -> str:
        """The path of the first sealed file."""
        return self._shelf.generations.path

    @property
    def mode(self) -> str:
        """``"r"`` or ``"r+"``, as h5py says it."""
        return "r+" if self._shelf.writing else "r"

    def close(self) -> None:
        """Seal what was written, and close. Idempotent.

        Raises:
            WriteError: the disk is full; it stays open.
        """
        self._shelf.close()

    def __enter__(self) -> ItemFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return not self._shelf.closed

    def __contains__(self, uid: object) -> bool:
        return uid in self._shelf

    def __getitem__(self, uid: str) -> Item:
        if uid not in self._shelf:
            raise self._shelf.missing_error(uid)
        return Item(self._shelf, uid)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shelf.keys())

    def __len__(self) -> int:
        return len(self._shelf)

    # Two files are equal if they are one, as in h5py, and not if their items are.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{'closed' if not self else 'open'} cache {self.filename!r} (mode {self.mode})>"
