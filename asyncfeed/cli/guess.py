"""What ``asyncfeed inspect`` suggests: look at names and shapes, and at the few numbers that divide an array."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from glob import escape

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import NotHDF5Error, StorageError
from asyncfeed.planning.catalog import Catalog, Skipped
from asyncfeed.planning.layouts import Dataset, Suggestion, may_be_one_utterance, suggest, suggest_for_many
from asyncfeed.storage.generations import Generations
from asyncfeed.storage.hdf5file import open_hdf5
from asyncfeed.storage.paths import expand
from asyncfeed.storage.scan import scan
from asyncfeed.storage.source import Container

__all__ = ["as_glob", "guess", "guess_for_many"]

EXTENSIONS = (".h5", ".hdf5", ".hdf", ".he5", ".h5py", ".nc")

SAMPLE_FILES, SAMPLE_DATASETS = 16, 50_000
"""Files, of many, that are looked at, and datasets from either end of a large one."""

FEW, MAX_NUMBERS = 64, 1 << 24
"""In a file with so few datasets the integers of those with one axis are read, if they are no more than that."""


def as_glob(path: str) -> str:
    """A glob for the HDF5 files in a directory, or anywhere below it if it has none; any other path as it is.

    Raises:
        NotHDF5Error: there are none.
    """
    if not os.path.isdir(path) or Generations(path):
        return path
    everywhere = (name for _, _, names in os.walk(path) for name in names)
    for below, found in (("", _extension(os.listdir(path))), ("**", _extension(everywhere))):
        if found:
            return os.path.join(escape(path), below, f"*{found}")
    raise NotHDF5Error(f"{path} is a directory without HDF5 files ({', '.join(EXTENSIONS)})")


def _extension(names: Iterable[str]) -> str:
    """The commonest one that an HDF5 file has; empty if there is none."""
    extensions = (os.path.splitext(name)[1] for name in names)
    found = Counter(each for each in extensions if each.lower() in EXTENSIONS)
    return found.most_common(1)[0][0] if found else ""


def guess(path: str, catalog: Catalog, skipped: Sequence[Skipped]) -> list[Suggestion]:
    """How to stream a file that has been scanned, the likeliest way first.

    If it may be one of many that hold an utterance each, a few files beside it are looked at, too.
    """
    datasets = _datasets(path, catalog, skipped)
    found = suggest(path, datasets)
    if not may_be_one_utterance(datasets):
        return found
    directory, name = os.path.split(path)
    glob = os.path.join(escape(directory), f"*{os.path.splitext(name)[1]}")
    beside = guess_for_many(glob, [each for each, _ in expand(glob)])
    return [*(each for each in beside if each.is_per_file), *found]


def guess_for_many(glob: str, paths: Sequence[str]) -> list[Suggestion]:
    """How to stream many files, judged by the first few that can be opened."""
    files: dict[str, list[Dataset]] = {}
    for path in paths[:SAMPLE_FILES]:
        with contextlib.suppress(StorageError):
            catalog = scan(Container(path, "{utt}"))
            files[path] = _datasets(path, catalog, catalog.skipped)
        if sum(map(len, files.values())) > SAMPLE_DATASETS:
            break
    return suggest_for_many(glob, files) if files else []


def _datasets(path: str, catalog: Catalog, skipped: Sequence[Skipped]) -> list[Dataset]:
    """What a file holds; of a large one the first and the last."""
    size, most = len(catalog), SAMPLE_DATASETS
    rows = np.arange(size) if size <= 2 * most else np.r_[:most, size - most : size]
    kinds = [catalog.kinds[kind] for kind in catalog.kind[rows].tolist()]
    columns = zip(catalog.ids.pick(rows), catalog.length[rows].tolist(), kinds, strict=True)
    frames = [Dataset(name, (length, *kind.shape), str(kind.dtype)) for name, length, kind in columns]
    strangers = [each.utt for each in skipped if each.utt and not each.harmless][:most]
    with open_hdf5(path) as file:
        if size <= FEW:
            frames = [each._replace(values=_numbers(file, each)) for each in frames]
        return [*frames, *(found for name in strangers if (found := _stranger(file, name)))]


def _numbers(file: h5py.File, dataset: Dataset) -> NDArray[np.int64] | None:
    """What is in a dataset, if it may be lengths or offsets."""
    if len(dataset.shape) != 1 or np.dtype(dataset.dtype).kind not in "iu" or dataset.shape[0] > MAX_NUMBERS:
        return None
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):
        return np.asarray(file[dataset.path][()]).astype(np.int64)
    return None


def _stranger(file: h5py.File, name: str) -> Dataset | None:
    """A dataset that cannot be streamed; None if it cannot even be looked at."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        found = file[name.encode("utf-8", "surrogateescape")]
        text = h5py.check_string_dtype(found.dtype) is not None
        return Dataset(name, found.shape or (), "text" if text else "")
    return None
