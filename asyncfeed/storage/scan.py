"""Build the catalog of an HDF5 file from its metadata, without reading data."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import h5py
import numpy as np
from h5py import h5, h5d, h5g, h5o, h5p, h5t

from asyncfeed.errors import ClosedError
from asyncfeed.planning.catalog import Access, Catalog, FileStamp, Kind, Skipped
from asyncfeed.planning.strings import Strings
from asyncfeed.storage.direct import available as direct_reads_available
from asyncfeed.storage.hdf5file import can_decode, is_written_here, open_hdf5, stamp, translate
from asyncfeed.storage.source import Container, Key

__all__ = ["Progress", "scan"]

Progress = Callable[[int], None]
"""Called now and then during a scan, with the number of datasets seen since the last call."""

STEP = 1000
"""Datasets between two looks at whether to stop."""

SAMPLES, SAMPLE_NBYTES = 8, 1 << 16
"""How many datasets of a file are compared with HDF5 before it is read directly, and how much of each."""


def scan(container: Container, *, progress: Progress | None = None, stop: threading.Event | None = None) -> Catalog:
    """Catalogue every utterance of a file or group, in the order in which h5py iterates over it.

    Groups are walked recursively, each of them once, however many links lead to it, so that cycles end; every link to
    a dataset is an utterance. Dangling links and named datatypes are listed in ``skipped`` as harmless.

    Raises:
        StorageError: the file cannot be opened or walked.
        ClosedError: ``stop`` was set meanwhile.
    """
    if container.handle is not None:
        return _Scan(container, container.handle, progress, stop).run()
    before = stamp(container.path)
    with open_hdf5(container.path) as file:
        return _Scan(container, file, progress, stop, before).run()


@dataclass(frozen=True, slots=True)
class _Type:
    """What a datatype means to us; made once for every distinct type of a file."""

    dtype: np.dtype[np.generic] | None
    """In native byte order; None if it is not a number."""
    plain: bool = False
    """Whether the bytes in the file are what numpy would hold."""
    swapped: bool = False
    """Whether the byte order in the file is the other one."""
    reason: str = ""


class _Scan:
    """One walk over one file."""

    def __init__(
        self,
        container: Container,
        root: h5py.Group,
        progress: Progress | None,
        stop: threading.Event | None,
        before: FileStamp | None = None,
    ) -> None:
        self.root = root
        self.key = Key(container.key)
        self.pattern = container.key
        self.progress, self.stop = progress, stop
        self.files = [before or _stamp_of_handle(root)]
        self.file_of: dict[str, int] = {root.file.filename: 0}
        self.direct = [_may_read_directly(container, root)]
        self.types: dict[bytes, _Type] = {}
        self.kinds: dict[tuple[np.dtype[np.generic], tuple[int, ...]], tuple[int, int]] = {}
        self.filters: dict[int, bool] = {}
        self.skipped: list[Skipped] = []
        self.ids: list[str] = []
        self.file, self.offset, self.length = array("i"), array("q"), array("q")
        self.kind, self.access, self.swapped = array("i"), array("B"), array("B")

    def run(self) -> Catalog:
        try:
            for seen, (path, dataset, file) in enumerate(self.walk(), 1):
                utt = self.key.utt(path)
                if utt is not None:
                    self.add(utt, dataset, file)
                if seen % STEP == 0:
                    self.breathe()
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise translate(error, self.files[0].path) from error
        if self.progress:
            self.progress(len(self.ids) % STEP)
        return self.verified(self.catalog())

    def breathe(self) -> None:
        if self.stop is not None and self.stop.is_set():
            raise ClosedError("the feed was closed while it was opening")
        if self.progress:
            self.progress(STEP)

    def catalog(self) -> Catalog:
        return Catalog(
            ids=Strings.of(self.ids),
            file=np.array(self.file, np.int32),
            offset=np.array(self.offset, np.int64),
            length=np.array(self.length, np.int64),
            kind=np.array(self.kind, np.int32),
            access=np.array(self.access, np.uint8),
            swapped=np.array(self.swapped, np.bool_),
            files=tuple(self.files),
            kinds=tuple(Kind(*kind) for kind in self.kinds),
            key=self.pattern,
            filters=tuple(self.filters),
            skipped=tuple(self.skipped),
        )

    # -- the walk ------------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[tuple[str, h5d.DatasetID, int]]:
        """Every dataset with its path and the number of the file that holds it."""
        root = self.root.id if isinstance(self.root.id, h5g.GroupID) else h5o.open(self.root.id, b".")
        visited = {_identity(root)}
        stack = [(root, "", 0, iter(_links(root)))]
        while stack:
            group, prefix, file, links = stack[-1]
            name, hard = next(links, (None, False))
            if name is None:
                stack.pop()
                continue
            path = prefix + name.decode("utf-8", "surrogateescape")
            found = self.follow(group, name, path, hard)
            if isinstance(found, h5d.DatasetID):
                yield path, found, file if hard else self.number_of(found)
            elif isinstance(found, h5g.GroupID) and self.key.leads_into(path) and _identity(found) not in visited:
                visited.add(_identity(found))
                inside = file if hard else self.number_of(found)
                stack.append((found, f"{path}/", inside, iter(_links(found))))

    def follow(self, group: h5g.GroupID, name: bytes, path: str, hard: bool) -> h5g.GroupID | h5d.DatasetID | None:
        try:
            found = h5o.open(group, name)
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            if hard:  # which leads to an object in this very file, so there was one
                self.skip(self.key.utt(path) or path, f"its header is damaged ({error})", "copy or make the file again")
            else:
                self.skip(path, f"the link leads nowhere ({error})", "mend or delete the link", harmless=True)
            return None
        if isinstance(found, h5t.TypeID):
            self.skip(path, "it is a named datatype, not data", "nothing needs to be done", harmless=True)
        return found

    def number_of(self, obj: h5g.GroupID | h5d.DatasetID) -> int:
        """The number of the file that a soft or external link led to; a soft one may lead through an external one."""
        return self.number_of_path(os.fsdecode(h5py.h5f.get_name(obj)))

    def number_of_path(self, path: str) -> int:
        if path not in self.file_of:
            self.file_of[path] = len(self.files)
            self.files.append(stamp(path))
            self.direct.append(not is_written_here(path))
        return self.file_of[path]

    # -- one dataset -----------------------------------------------------------------------------------------------

    def add(self, utt: str, dataset: h5d.DatasetID, file: int) -> None:
        stored = self.type_of(dataset)
        if stored.dtype is None:
            return self.skip(utt, stored.reason, "leave it out with excludes=, or store plain numbers")
        shape, offset = dataset.shape, dataset.get_offset()
        if not shape:
            found = "it is a scalar, without a time axis" if shape == () else "it is empty (a null dataspace)"
            return self.skip(utt, found, "leave it out with excludes=, or store at least one axis")
        kind, frame_nbytes = self.kind_of(stored.dtype, shape[1:])
        access = self.access_of(utt, dataset, stored, offset, file)
        if access is None:
            return None
        direct = access == Access.DIRECT
        end = (offset or 0) + shape[0] * frame_nbytes
        if direct and end > self.files[file].size:
            found = f"its bytes would end at {end}, beyond the end of the file at {self.files[file].size}"
            return self.skip(utt, found, "the file is truncated: copy or make it again")
        self.ids.append(utt)
        self.file.append(file if direct else 0)
        self.offset.append(offset if direct else -1)
        self.length.append(shape[0])
        self.kind.append(kind)
        self.access.append(access)
        self.swapped.append(stored.swapped)
        return None

    def access_of(
        self, utt: str, dataset: h5d.DatasetID, stored: _Type, offset: int | None, file: int
    ) -> Access | None:
        """How to read a dataset; None if that is impossible, which has then been noted."""
        if offset is not None:
            if not self.direct[file]:
                return Access.HANDLE
            return Access.DIRECT if stored.plain else Access.CONVERTED
        layout = dataset.get_create_plist()
        kind = layout.get_layout()
        if kind == h5d.CHUNKED:
            return self.chunked(utt, layout)
        if kind == h5d.COMPACT:
            return Access.COMPACT
        if kind == h5d.VIRTUAL:
            return self.elsewhere(utt, Access.VIRTUAL, _virtual_files(layout, self.files[file].path))
        if layout.get_external_count():
            return self.elsewhere(utt, Access.EXTERNAL, _external_files(layout, self.files[file].path))
        return Access.UNALLOCATED

    def chunked(self, utt: str, layout: h5p.PropDCID) -> Access | None:
        filters = [layout.get_filter(i) for i in range(layout.get_nfilters())]
        for code, _, _, name in filters:
            if not self.can_decode(code):
                label = name.decode(errors="replace") or "without a name"
                self.skip(
                    utt,
                    f"it is compressed with filter {code} ({label}), which is not installed",
                    "install it: pip install hdf5plugin",
                )
                return None
        return Access.FILTERED if filters else Access.CHUNKED

    def can_decode(self, code: int) -> bool:
        if code not in self.filters:
            self.filters[code] = can_decode(code)
        return self.filters[code]

    def elsewhere(self, utt: str, access: Access, paths: list[str]) -> Access | None:
        """Data outside the file: HDF5 may put fill values in their place where the files are missing."""
        for path in paths:
            if not os.path.exists(path):
                self.skip(utt, f"its bytes are in {path}, which is not there", "put that file back")
                return None
        for path in paths:
            self.number_of_path(path)  # so that a change of it is a change of ours
        return access

    def kind_of(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> tuple[int, int]:
        """The number of a kind, and its bytes per frame."""
        if (dtype, shape) not in self.kinds:
            self.kinds[dtype, shape] = (len(self.kinds), Kind(dtype, shape).frame_nbytes)
        return self.kinds[dtype, shape]

    def type_of(self, dataset: h5d.DatasetID) -> _Type:
        datatype = dataset.get_type()
        code = datatype.encode()
        if code not in self.types:
            self.types[code] = _examine(datatype)
        return self.types[code]

    def skip(self, utt: str, reason: str, remedy: str, harmless: bool = False) -> None:
        self.skipped.append(Skipped(utt, self.files[0].path, reason, remedy, harmless))

    # -- is the direct way right? -----------------------------------------------------------------------------------

    def verified(self, catalog: Catalog) -> Catalog:
        """The same catalog, without direct reads if a sample of them differs from what HDF5 gives."""
        direct = np.flatnonzero((catalog.access == Access.DIRECT) & (catalog.nbytes > 0))
        for row in direct[np.linspace(0, direct.size - 1, min(SAMPLES, direct.size)).astype(int)].tolist():
            if not self.agrees(catalog, row):
                wrong = catalog.access == Access.DIRECT
                catalog.access[wrong], catalog.offset[wrong], catalog.file[wrong] = Access.UNVERIFIED, -1, 0
                break
        return catalog

    def agrees(self, catalog: Catalog, row: int) -> bool:
        dataset = self.root[self.key.path(catalog.ids[row]).encode("utf-8", "surrogateescape")]
        kind = catalog.kinds[catalog.kind[row]]
        num_frames = min(int(catalog.length[row]), max(SAMPLE_NBYTES // kind.frame_nbytes, 1))
        wanted = dataset[:num_frames].tobytes()
        with open(catalog.files[catalog.file[row]].path, "rb") as file:
            file.seek(int(catalog.offset[row]))
            return bool(file.read(len(wanted)) == wanted)


def _stamp_of_handle(root: h5py.Group) -> FileStamp:
    path = root.file.filename
    return stamp(path) if os.path.exists(path) else FileStamp(path, 0, 0, 0)


def _may_read_directly(container: Container, root: h5py.Group) -> bool:
    if not direct_reads_available():
        return False
    if container.handle is None:
        return not is_written_here(container.path)
    return bool(root.file.mode == "r" and root.file.driver == "sec2" and not is_written_here(root.file.filename))


def _identity(group: h5g.GroupID) -> tuple[int, int]:
    info = h5o.get_info(group)
    return info.fileno, info.addr


def _links(group: h5g.GroupID) -> list[tuple[bytes, bool]]:
    """The names in a group, in h5py's order, and whether each is a hard link."""
    tracked = group.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_TRACKED
    found: list[tuple[bytes, bool]] = []
    group.links.iterate(
        lambda name, info: found.append((name, info.type == h5py.h5l.TYPE_HARD)),
        idx_type=h5.INDEX_CRT_ORDER if tracked else h5.INDEX_NAME,
        info=True,
    )
    return found


def _examine(datatype: h5t.TypeID) -> _Type:
    """What a datatype is to numpy, and whether numpy would hold it as the file does."""
    try:
        dtype = datatype.dtype
    except (TypeError, ValueError, NotImplementedError) as error:
        return _Type(None, reason=f"its type has no equivalent in numpy ({error})")
    kind = datatype.get_class()
    if dtype.kind not in "biufc" or dtype.subdtype is not None or kind in (h5t.VLEN, h5t.REFERENCE):
        return _Type(None, reason=f"its type is {_describe(datatype, dtype)}, not a number")
    plain = kind in (h5t.INTEGER, h5t.FLOAT) and bool(datatype.equal(h5t.py_create(dtype)))
    return _Type(np.dtype(dtype.str).newbyteorder("="), plain, not dtype.isnative)


def _describe(datatype: h5t.TypeID, dtype: np.dtype[np.generic]) -> str:
    names = {
        h5t.VLEN: "variable-length",
        h5t.STRING: "text",
        h5t.COMPOUND: "compound",
        h5t.REFERENCE: "a reference",
        h5t.OPAQUE: "opaque",
        h5t.ARRAY: "an array type",
    }
    return f"{names.get(datatype.get_class(), 'unsuitable')} ({dtype})"


def _external_files(layout: h5p.PropDCID, path: str) -> list[str]:
    """The raw files that hold the bytes of a dataset, where HDF5 looks for them."""
    names = [os.fsdecode(layout.get_external(i)[0]) for i in range(layout.get_external_count())]
    return [os.path.join(_prefix("HDF5_EXTFILE_PREFIX", path), name) for name in names]


def _virtual_files(layout: h5p.PropDCID, path: str) -> list[str]:
    """The files that a virtual dataset draws from, except patterns, which may match any number of files."""
    names = {os.fsdecode(layout.get_virtual_filename(i)) for i in range(layout.get_virtual_count())}
    places = (_prefix("HDF5_VDS_PREFIX", path), os.path.dirname(os.path.abspath(path)), "")
    return [_first_there(places, name) for name in sorted(names) if name != "." and "%" not in name]


def _prefix(variable: str, path: str) -> str:
    """The directory that an environment variable names; HDF5 lets it refer to that of the file."""
    return os.environ.get(variable, "").replace("${ORIGIN}", os.path.dirname(os.path.abspath(path)))


def _first_there(places: tuple[str, ...], name: str) -> str:
    """``name`` in the first of the places that has it; else where it belongs, beside the file."""
    there = [found for place in places if os.path.exists(found := os.path.join(place, name))]
    return there[0] if there else os.path.join(places[1], name)
