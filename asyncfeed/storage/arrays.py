"""Catalogue what lies one after the other in one dataset."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import ArgumentError
from asyncfeed.planning.catalog import Access, Catalog, Skipped
from asyncfeed.planning.spans import spans
from asyncfeed.planning.strings import Strings
from asyncfeed.storage.hdf5file import open_hdf5, translate
from asyncfeed.storage.scan import Progress, scan
from asyncfeed.storage.source import Container, Slices

__all__ = ["scan_slices"]

SHOWN = 8
"""Names that are listed when the one that was given is not there."""

REMEDY = "correct it, or leave the file out"


def scan_slices(
    container: Container, *, progress: Progress | None = None, stop: threading.Event | None = None
) -> Catalog:
    """Catalogue a file or group in which all utterances are slices of one dataset, in the order in which it says so.

    Raises:
        StorageError: the file cannot be opened or walked.
        ArgumentError: a dataset that the source names is not there.
        ClosedError: ``stop`` was set meanwhile.
    """
    assert container.slices is not None
    slices = container.slices
    with _opened(container) as root:
        for path in (slices.data, slices.lengths, slices.offsets, slices.ids):
            _find(root, path)
        whole = scan(replace(container, slices=None), progress=progress, stop=stop)
        if not len(whole):
            return replace(whole, skipped=tuple(replace(each, utt="") for each in whole.skipped))
        try:
            return _divided(whole, container.name, root, slices)
        except ValueError as error:
            reason = f"the utterances in {slices.data!r} cannot be told apart: {error}"
            none = whole.take(np.empty(0, np.int64))
            return replace(none, skipped=(Skipped("", container.path, reason, REMEDY),))


@contextlib.contextmanager
def _opened(container: Container) -> Iterator[h5py.Group]:
    if container.handle is not None:
        yield container.handle
    else:
        with open_hdf5(container.path) as file:
            yield file


def _divided(whole: Catalog, name: str, root: h5py.Group, slices: Slices) -> Catalog:
    """The one row of ``whole`` as a row for each utterance.

    Raises:
        ValueError: what is beside the data does not fit it, or is not what it should be.
    """
    ids = None if slices.ids is None else _read_ids(root, slices.ids)
    lengths, offsets = _read_numbers(root, slices.lengths), _read_numbers(root, slices.offsets)
    num_utts = None if ids is None else len(ids)
    start, length = spans(int(whole.length[0]), lengths=lengths, offsets=offsets, num_utts=num_utts)
    if ids is None:
        before = f"{name}/" if name else ""
        ids = [f"{before}utt{number:08d}" for number in range(start.size)]
    _refuse_twins(ids)
    rows = whole.take(np.zeros(start.size, np.int64), Strings.of(ids))
    offset = rows.offset + start * rows.frame_nbytes if np.any(whole.access == Access.DIRECT) else rows.offset
    return replace(rows, start=start, length=length, offset=offset)


def _refuse_twins(ids: list[str]) -> None:
    if len(set(ids)) < len(ids):
        utt, count = Counter(ids).most_common(1)[0]
        raise ValueError(f"{count} of them have the id {utt!r}")


def _find(root: h5py.Group, path: str | None) -> None:
    """Raise `ArgumentError` if a path is given and leads to no dataset."""
    try:
        if path is None or isinstance(root[path], h5py.Dataset):
            return
    except (KeyError, OSError, RuntimeError, ValueError):
        pass
    names = sorted(root)
    there = ", ".join(map(repr, names[:SHOWN])) + (" and more" if len(names) > SHOWN else "")
    raise ArgumentError(f"there is no dataset {path!r} in {root.file.filename}, which has {there or 'nothing'}")


def _read(root: h5py.Group, path: str) -> NDArray[np.generic]:
    """All of a small dataset, without axes of length 1 beside the longest."""
    try:
        array = np.asarray(root[path][()])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise translate(error, root.file.filename, f"read the dataset {path!r}") from error
    if array.ndim == 0 or max(array.shape) != array.size:
        raise ValueError(f"{path!r} has the shape {array.shape}, not one axis")
    return array.ravel()


def _read_numbers(root: h5py.Group, path: str | None) -> NDArray[np.int64] | None:
    if path is None:
        return None
    array = _read(root, path)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{path!r} holds {array.dtype}, not integers")
    with np.errstate(invalid="ignore"):
        numbers = array.astype(np.int64)
    if np.any(numbers != array):
        raise ValueError(f"{path!r} holds numbers that are not whole")
    return numbers


def _read_ids(root: h5py.Group, path: str) -> list[str]:
    items = _read(root, path).tolist()
    if items and not isinstance(items[0], bytes | str | int):
        raise ValueError(f"{path!r} holds {root[path].dtype}, not text")
    return [each.decode("utf-8", "surrogateescape") if isinstance(each, bytes) else str(each) for each in items]
