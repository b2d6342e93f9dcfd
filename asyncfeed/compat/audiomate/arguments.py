"""What audiomate's loaders are given: corpora, containers and sizes, known by what they can do and not by their class."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import h5py

from asyncfeed.errors import ArgumentError, FieldMismatchError
from asyncfeed.storage.hdf5file import is_written_here
from asyncfeed.storage.library import Library, open_library

__all__ = [
    "AnyContainer",
    "Container",
    "Containers",
    "Corpus",
    "Utterances",
    "containers_of",
    "file_of",
    "open_containers",
    "open_file",
    "storage_nbytes",
    "utt_ids_of",
]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmg]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Corpus(Protocol):
    """A corpus of audiomate's, or a view of one."""

    @property
    def utterances(self) -> Mapping[str, Any]:
        """The utterances by id."""


class Container(Protocol):
    """A container of audiomate's."""

    _file: h5py.File | None
    """The open file; None while the container is closed."""


AnyContainer: TypeAlias = "Container | h5py.Group"
Containers: TypeAlias = "AnyContainer | Sequence[AnyContainer]"
Utterances: TypeAlias = "Corpus | Collection[str]"


def storage_nbytes(size: object) -> int:
    """``"1.5k"``, ``"2G"``, ``"100"`` or a number, as bytes; other than `parse_nbytes`, without blanks, ``B`` or ``t``.

    Raises:
        ArgumentError: it is none of these.
    """
    match = _SIZE.fullmatch(str(size))
    if match is None:
        raise ArgumentError(f"{size!r} is no partition size; write it like '512m', '1.5g' or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def utt_ids_of(corpus_or_utt_ids: Utterances) -> Any:
    """The ids of a corpus; a collection of ids as it is."""
    utterances = getattr(corpus_or_utt_ids, "utterances", None)
    return corpus_or_utt_ids if utterances is None else list(utterances.keys())


def containers_of(containers: Any) -> Any:
    """A list of containers: of the one that was given, or those of a list as they are.

    Raises:
        ArgumentError: there is none.
    """
    if hasattr(containers, "keys"):
        return [containers]
    if len(containers) == 0:
        raise ArgumentError("the list of containers is empty; give it at least one")
    return containers


def file_of(container: AnyContainer) -> h5py.Group:
    """The open file of a container.

    Raises:
        ArgumentError: it is not open, or no container.
    """
    if not isinstance(container, h5py.Group) and not hasattr(container, "_file"):
        raise ArgumentError(
            f"a {type(container).__name__} is no container; pass one of audiomate's, an h5py.File or an h5py.Group"
        )
    file = container if isinstance(container, h5py.Group) else container._file
    if not file:
        raise ArgumentError(f"the container {getattr(container, 'path', '')!r} is not open; open it first")
    return file


def open_containers(containers: Sequence[AnyContainer], utt_ids: Collection[str]) -> Library:
    """A library with a field for each container, and these utterances.

    Raises:
        ArgumentError: an utterance is missing in one of them.
        UnreadableDatasetError: one is no sequence of numbers.
    """
    files = {f"container {number}": file_of(container) for number, container in enumerate(containers)}
    sources = {name: _source(file) for name, file in files.items()}
    wanted = frozenset(utt_ids)
    try:
        library = open_library(sources, includes=wanted)
    except FieldMismatchError as error:
        raise ArgumentError(f"the containers do not have all the utterances: {error}") from error
    missing = wanted.difference(library.corpus.ids)
    if missing:
        raise ArgumentError(
            f"the containers have no data for {len(missing)} of the {len(wanted)} utterances, {min(missing)!r} among "
            f"them; leave those out of the ids"
        )
    return _through(files.values(), library)


def open_file(file: h5py.Group, includes: Collection[str], excludes: Collection[str]) -> Library:
    """A library of one file, or of those datasets in it that are wanted; no ``includes`` means all.

    Raises:
        StorageError: a dataset is no sequence of numbers.
    """
    return _through([file], open_library(_source(file), includes=includes or None, excludes=excludes))


def _source(file: h5py.Group) -> Any:
    """The path of a file that nobody writes to here, of which there is an index, or can be; else the file itself."""
    path = file.file.filename
    plain = file.name == "/" and file.file.mode == "r" and file.file.driver == "sec2" and not file.file.swmr_mode
    if not plain or is_written_here(path):
        return file
    try:
        same = os.path.samestat(os.stat(path), os.fstat(file.file.id.get_vfd_handle()))
    except OSError:  # moved, or deleted
        return file
    return path if same else file


def _through(files: Collection[h5py.Group], library: Library) -> Library:
    """The same library, but read through the files that are open: directly, by their descriptors, or by HDF5.

    So nothing is opened a second time, which would keep the user from opening it for writing.
    """
    handles = dict(library.handles)
    for file in files:
        for number, known in enumerate(library.files):
            if known.path == file.file.filename:
                handles.setdefault(number, file)
    return replace(library, handles=handles)
