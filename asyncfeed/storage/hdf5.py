"""Read datasets through the HDF5 library: chunked, compressed, converted, or behind a user's handle."""

from __future__ import annotations

from collections.abc import Mapping

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t
from numpy.typing import NDArray

from asyncfeed.errors import ChangedFileError
from asyncfeed.planning.catalog import FileStamp
from asyncfeed.storage.files import HDF5Files
from asyncfeed.storage.hdf5file import translate

__all__ = ["REOPEN_EVERY", "HDF5Reader"]

REOPEN_EVERY = 500
"""Datasets read from a file before it is closed and opened again. libhdf5 keeps about 15 KB for every chunked dataset
that a file has seen; closing the file gives it back (20,000 datasets: +307 MB of RSS with one open file, +13 MB so)."""


class HDF5Reader:
    """Reads slices of datasets. Not thread-safe; made, used and closed by one reader thread.

    Uses h5py's low-level calls: ``Dataset.read_direct`` costs about ten times as much.
    """

    def __init__(self, files: tuple[FileStamp, ...], handles: Mapping[int, h5py.Group]) -> None:
        self._stamps, self._handles = files, handles
        self._files = HDF5Files(files, handles)
        self._reads: dict[int, int] = {}
        self._kept: tuple[int, str, h5d.DatasetID] | None = None

    def read(self, file: int, path: str, start: int, out: NDArray[np.generic], *, cut: bool) -> None:
        """Read the frames from ``start`` on of the dataset at ``path`` into ``out``, as many as that has.

        ``cut`` says that this is not the whole dataset.
        The bytes come in the byte order of the file: HDF5 swaps a hundred times slower than numpy.

        Raises:
            ReadError: HDF5 could not read or decode it.
            ChangedFileError: the file is another one by now.
        """
        try:
            if out.size == 0:
                return
            dataset = self._dataset(file, path, cut)
            dtype = dataset.dtype  # once: it is made anew for every look
            self._check_dataset(file, path, dataset.shape, dtype, start, out, cut)
            out.fill(0)  # HDF5 leaves memory alone where nothing was written and fill values are off; h5py gives zeros
            space = h5s.ALL
            if cut:
                space = dataset.get_space()
                space.select_hyperslab((start, *[0] * (out.ndim - 1)), out.shape)
            # Never ALL for the memory: should the dataset grow just now, HDF5 would write beyond ours.
            dataset.read(h5s.create_simple(out.shape), space, out, h5t.py_create(dtype))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            self.check(file)  # that it changed would explain everything
            raise translate(error, self._stamps[file].path, f"read the dataset {path!r}") from error

    def check(self, file: int) -> None:
        """Raise `ChangedFileError` if the file is no longer what the catalog describes."""
        self._files.check(file)

    def close(self) -> None:
        """Close all files that this reader opened."""
        self._kept = None
        self._files.close()

    def _check_dataset(
        self,
        file: int,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[np.generic],
        start: int,
        out: NDArray[np.generic],
        cut: bool,
    ) -> None:
        """Raise `ChangedFileError` if a dataset cannot hold what the catalog says: it was resized or made anew."""
        same_frames = shape[1:] == out.shape[1:] and np.dtype(dtype.str).newbyteorder("=") == out.dtype
        if same_frames and (shape[0] >= start + len(out) if cut else shape == out.shape):
            return
        raise ChangedFileError(
            f"the dataset {path!r} in {self._stamps[file].path} changed while the feed was open (it has {dtype} {shape} "
            f"now, and {out.dtype} {out.shape} was to be read from frame {start} on); close the feed and open it again"
        )

    def _dataset(self, file: int, path: str, cut: bool) -> h5d.DatasetID:
        """Open a dataset, or find the one that is still open from its previous slice."""
        if self._kept and self._kept[:2] == (file, path):
            return self._kept[2]
        self._kept = None
        if file not in self._handles and self._reads.get(file, 0) >= REOPEN_EVERY:
            self._files.drop(file)
            self._reads[file] = 0
        self._reads[file] = self._reads.get(file, 0) + 1
        name = path.encode("utf-8", "surrogateescape")
        group = self._files[file].id
        if not cut:
            return h5d.open(group, name)
        # Opened twice, one after the other: who opens a dataset first decides about its cache.
        dataset = h5d.open(group, name, _room_for_slices(h5d.open(group, name)))
        self._kept = (file, path, dataset)
        return dataset


def _room_for_slices(dataset: h5d.DatasetID) -> h5p.PropDAID:
    """Cache settings that keep one row of chunks, so that a chunk which two slices share is decoded once."""
    access, layout = h5p.create(h5p.DATASET_ACCESS), dataset.get_create_plist()
    if layout.get_layout() == h5d.CHUNKED:
        chunk = np.array(layout.get_chunk())
        in_a_row = int(np.prod(-(-np.array(dataset.shape[1:], int) // chunk[1:]), dtype=int))
        nbytes = int(np.prod(chunk, dtype=int)) * dataset.dtype.itemsize * in_a_row
        slots, default, _ = access.get_chunk_cache()
        access.set_chunk_cache(max(slots, 10 * in_a_row + 1), max(nbytes, default), 1.0)
    return access
