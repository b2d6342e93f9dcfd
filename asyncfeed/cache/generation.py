"""One sealed file, open for reading: ours, or one that another tool wrote."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import weakref
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.records import DATA_START, HEADER_START, POINTER_START, Header, Pointer
from asyncfeed.cache.seal import ATTRIBUTE
from asyncfeed.cache.table import Form, Table
from asyncfeed.cache.values import DIGEST_NBYTES
from asyncfeed.errors import DamagedFileError, SourceMissingError
from asyncfeed.planning.catalog import Access, Catalog, FileStamp
from asyncfeed.planning.strings import Strings
from asyncfeed.process import call_in_child
from asyncfeed.storage.hdf5 import REOPEN_EVERY
from asyncfeed.storage.hdf5file import open_hdf5, stamp, translate
from asyncfeed.storage.library import catalogue
from asyncfeed.storage.source import Container

__all__ = ["Generation"]


class Generation:
    """A sealed file and what it holds. Any thread; in a forked child, too.

    Raises:
        StorageError: it cannot be opened, or is damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise translate(error, path) from error
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False  # some merge what is open then
        self.stamp = stamp(path, self.fd)
        self.nonce, self.fingerprint, self.table = self._identify()
        self._datasets = _Datasets(self.stamp, self.fd)

    def _identify(self) -> tuple[bytes, Fingerprint | None, Table]:
        header = Header.decode(os.pread(self.fd, POINTER_START - HEADER_START, HEADER_START))
        pointer = Pointer.decode(os.pread(self.fd, DATA_START - POINTER_START, POINTER_START))
        if header is None or pointer is None or pointer.file_nbytes != self.stamp.size:
            fingerprint = _attribute(self.path)
            if header is not None and pointer is not None and self.stamp.size < pointer.file_nbytes:
                raise DamagedFileError(
                    f"{self.path} has {self.stamp.size:,} bytes and was sealed with {pointer.file_nbytes:,}; it is "
                    f"truncated: copy it again"
                )
            return b"", fingerprint, _foreign_table(self.path)
        archive = np.empty(pointer.nbytes, np.uint8)
        try:
            if os.preadv(self.fd, [archive.data], pointer.offset) != pointer.nbytes:
                raise EOFError("it ends within it")
            return header.nonce, header.fingerprint, Table.from_archive(archive)
        except Exception as error:  # what numpy raises over foreign bytes is no closed list
            raise DamagedFileError(
                f"the table of {self.path} cannot be read ({error}); copy the file again, or remove it to compute its "
                f"items again"
            ) from error

    def read_through_hdf5(self, uid: str) -> NDArray[Any]:
        """Read an item that has no place of its own in the file: compressed, converted, or from another tool."""
        return self._datasets.read(uid)

    def close(self) -> None:
        """Close the file. Idempotent; done when this is collected, if not before."""
        self._close()
        self._datasets.close()


class _Datasets:
    """The file open in h5py, where that is needed; opened again now and then, as HDF5 keeps memory for all it has seen."""

    def __init__(self, found: FileStamp, fd: int) -> None:
        self._stamp, self._fd = found, fd
        self.path = found.path
        self.forked()
        call_in_child(self)

    def forked(self) -> None:
        """In a forked child: whatever the parent's threads were doing, here is nothing open."""
        self._file: h5py.File | None = None
        self._lock = threading.Lock()
        self._reads = 0

    def read(self, uid: str) -> NDArray[Any]:
        with self._lock:
            try:
                if self._file is None or self._reads % REOPEN_EVERY == 0:
                    self._shut()
                    self._file = self._opened()
                self._reads += 1
                return np.asarray(self._file[uid][()])
            except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise translate(error, self.path, f"read item {uid!r}") from error

    def _opened(self) -> h5py.File:
        with contextlib.suppress(SourceMissingError):
            file = open_hdf5(self.path)
            if stamp(self.path) == self._stamp:
                return file
            file.close()
        # Merging took it away or put another one in its place, but whoever has it open goes on with it.
        content = io.FileIO(os.dup(self._fd))
        file = h5py.File(content, "r")
        weakref.finalize(file, content.close).atexit = False
        return file

    def close(self) -> None:
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _attribute(path: str) -> Fingerprint | None:
    """The fingerprint in a file that went through other hands; None if there is none."""
    with open_hdf5(path) as file:
        text = file.attrs.get(ATTRIBUTE)
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        return Fingerprint.from_json(text)
    return None


def _foreign_table(path: str) -> Table:
    """The table of a file that another tool wrote, from its catalog."""
    catalog = catalogue(Container(path, "{utt}"), index="auto")
    others = [skipped.utt for skipped in catalog.skipped if skipped.utt and not skipped.harmless]
    direct = (catalog.access == Access.DIRECT) & ~catalog.swapped & (catalog.file == 0)
    forms, form = _forms(catalog)
    num = len(catalog) + len(others)
    last = np.full(len(others), len(forms), np.int32)
    return Table(
        Strings.concatenate([catalog.ids, Strings.of(others)]),
        np.append(np.where(direct, catalog.offset, -1), np.full(len(others), -1)),
        np.append(catalog.nbytes, np.zeros(len(others), np.int64)),
        np.append(form, last),
        [*forms, None],
        np.full(num, -1, np.int64),
        np.zeros((num, DIGEST_NBYTES), np.uint8),
    )


def _forms(catalog: Catalog) -> tuple[list[Form], NDArray[np.int32]]:
    pairs = np.stack([catalog.kind.astype(np.int64), catalog.length], axis=1)
    unique, form = np.unique(pairs, axis=0, return_inverse=True)
    kinds = catalog.kinds
    forms: list[Form] = [(kinds[k].dtype, (length, *kinds[k].shape)) for k, length in unique.tolist()]
    return forms, form.reshape(-1).astype(np.int32)
