"""Build the catalog of an HDF5 file from its metadata, without reading data."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import h5py
import numpy as np
from h5py import h5, h5d, h5g, h5o, h5p, h5t
from numpy.typing import NDArray

from asyncfeed.errors import ClosedError
from asyncfeed.planning.catalog import Access, Catalog, FileStamp, Kind, Skipped
from asyncfeed.planning.strings import Strings
from asyncfeed.storage.blocks import Blocks
from asyncfeed.storage.datatypes import Stored, examine
from asyncfeed.storage.direct import available as direct_reads_available
from asyncfeed.storage.handles import can_write, stamp_of, without_written
from asyncfeed.storage.hdf5file import can_decode, is_written_here, open_hdf5, stamp, translate
from asyncfeed.storage.headers import Header, Headers, HeadersError
from asyncfeed.storage.source import Container, Key

__all__ = ["Progress", "scan"]

Progress = Callable[[int], None]
"""Called now and then during a scan, with the number of datasets seen since the last call."""

STEP = 1000
"""Datasets between two looks at whether to stop."""

FEW = 32
"""In a group with fewer links datasets are opened one by one, which is as fast."""

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
        return without_written(_Scan(container, container.handle, progress, stop).run(), container.handle)
    before = stamp(container.path)
    with open_hdf5(container.path) as file:
        if _lies_open(container, file):
            stopped = stop.is_set if stop is not None else lambda: False
            with (
                contextlib.suppress(HeadersError),  # which are no more than a shortcut
                contextlib.closing(Blocks(before, file, stopped)) as blocks,
            ):
                return _Scan(container, file, progress, stop, before, Headers(blocks)).run()
        return _Scan(container, file, progress, stop, before).run()


class _Found(NamedTuple):
    """A dataset: opened in HDF5, known from its header, or both if it is to tell what its template means."""

    path: str
    file: int
    dataset: h5d.DatasetID | None
    header: Header | None


class _Scan:
    """One walk over one file."""

    def __init__(
        self,
        container: Container,
        root: h5py.Group,
        progress: Progress | None,
        stop: threading.Event | None,
        before: FileStamp | None = None,
        headers: Headers | None = None,
    ) -> None:
        self.root = root
        self.key = Key(container.key, container.name)
        self.pattern = container.key
        self.progress, self.stop = progress, stop
        self.files = [before or stamp_of(root)]
        self.file_of: dict[str, int] = {root.file.filename: 0}
        self.direct = [_lies_open(container, root)]
        self.headers = headers
        self.templates: dict[int, Stored] = {}
        self.unopened = array("q")
        self.types: dict[bytes, Stored] = {}
        self.kinds: dict[tuple[np.dtype[np.generic], tuple[int, ...]], tuple[int, int]] = {}
        self.filters: dict[int, bool] = {}
        self.skipped: list[Skipped] = []
        self.ids: list[str] = []
        self.file, self.offset, self.length = array("i"), array("q"), array("q")
        self.kind, self.access, self.swapped = array("i"), array("B"), array("B")

    def run(self) -> Catalog:
        try:
            for seen, found in enumerate(self.walk(), 1):
                utt = self.key.utt(found.path)
                if utt is not None:
                    self.add(utt, found)
                if seen % STEP == 0:
                    self.breathe()
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise translate(error, self.files[0].path) from error
        if self.progress:
            self.progress(len(self.ids) % STEP)
        self.verify_headers()
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

    def walk(self) -> Iterator[_Found]:
        """Every dataset with its path and the number of the file that holds it."""
        if self.key.fixed:
            yield from self.only(self.key.prefix)
            return
        root = h5o.open(self.root.id, b".")  # of a file, its root group: only that knows whether order is tracked
        visited = {_identity(root)}
        stack = [(root, "", 0, self.members(root, 0))]
        while stack:
            group, prefix, file, members = stack[-1]
            name, address, header = next(members, (None, None, None))
            if name is None:
                stack.pop()
                continue
            path = prefix + name.decode("utf-8", "surrogateescape")
            if header is not None and header.template in self.templates:
                yield _Found(path, file, None, header)
                continue
            hard = address is not None
            found = self.follow(group, name, path, hard)
            if isinstance(found, h5d.DatasetID):
                yield _Found(path, file if hard else self.number_of(found), found, header)
            elif isinstance(found, h5g.GroupID) and self.key.leads_into(path) and _identity(found) not in visited:
                visited.add(_identity(found))
                inside = file if hard else self.number_of(found)
                stack.append((found, f"{path}/", inside, self.members(found, inside)))

    def only(self, path: str) -> Iterator[_Found]:
        """The dataset at a path, without looking at anything else."""
        try:
            found = h5o.open(self.root.id, path.encode("utf-8", "surrogateescape"))
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            return self.skip(self.key.name, f"there is no {path!r} in it ({error})", "leave it out, or change the key")
        if not isinstance(found, h5d.DatasetID):
            return self.skip(self.key.name, f"{path!r} in it is no dataset", f"try key='{path}/{{utt}}'")
        yield _Found(path, self.number_of(found), found, None)

    def members(self, group: h5g.GroupID, file: int) -> Iterator[tuple[bytes, int | None, Header | None]]:
        """The links of a group, with the headers of those datasets that can be read without HDF5."""
        names, addresses = _links(group)
        if self.headers is None or file != 0 or len(names) < FEW:
            return zip(names, addresses, itertools.repeat(None))
        headers = self.headers.read(addresses)
        if not self.headers.finds_all(_identity(group)[1], names):
            headers = map(partial(_if_found, group), names, addresses, headers)
        return zip(names, addresses, headers, strict=True)

    def follow(self, group: h5g.GroupID, name: bytes, path: str, hard: bool) -> h5g.GroupID | h5d.DatasetID | None:
        try:
            found = h5o.open(group, name)
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            if hard:  # which leads to an object in this very file, so there was one
                self.skip(self.key.utt(path) or path, f"its header is damaged ({error})", "copy or make the file again")
            else:
                self.skip(
                    path, f"the link leads nowhere ({error})", "mend or delete the link", harmless=True, lasting=False
                )
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

    def add(self, utt: str, found: _Found) -> None:
        stored = self.stored(found)
        if stored.dtype is None:
            return self.skip(utt, stored.reason, "leave it out with excludes=, or store plain numbers")
        shape, offset = _shape_and_offset(found)
        if not shape:
            reason = "it is a scalar, without a time axis" if shape == () else "it is empty (a null dataspace)"
            return self.skip(utt, reason, "leave it out with excludes=, or store at least one axis")
        kind, frame_nbytes = self.kind_of(stored.dtype, shape[1:])
        file, access = found.file, self.access_of(utt, found, stored, offset)
        if access is None:
            return None
        direct = access == Access.DIRECT
        end = (offset or 0) + shape[0] * frame_nbytes
        if direct and end > self.files[file].size:
            reason = f"its bytes would end at {end}, beyond the end of the file at {self.files[file].size}"
            return self.skip(utt, reason, "the file is truncated: copy or make it again")
        if found.dataset is None:
            self.unopened.append(len(self.ids))
        self.ids.append(utt)
        self.file.append(file if direct else 0)
        self.offset.append(offset if direct and offset is not None else -1)
        self.length.append(shape[0])
        self.kind.append(kind)
        self.access.append(access)
        self.swapped.append(stored.swapped)
        return None

    def stored(self, found: _Found) -> Stored:
        """What the datatype of a dataset means to us; the first of a template tells it for all that follow."""
        header, dataset = found.header, found.dataset
        if header is not None and (dataset is None or header.template in self.templates):
            return self.templates[header.template]
        assert dataset is not None
        stored = self.type_of(dataset)
        if header is not None:
            if (header.shape, header.offset) != (dataset.shape, dataset.get_offset()):
                raise HeadersError(f"the header of {found.path!r} does not say what HDF5 says")
            self.templates[header.template] = stored
        return stored

    def access_of(self, utt: str, found: _Found, stored: Stored, offset: int | None) -> Access | None:
        """How to read a dataset; None if that is impossible, which has then been noted."""
        file = found.file
        if offset is not None:
            if not self.direct[file]:
                return Access.HANDLE
            return Access.DIRECT if stored.plain else Access.CONVERTED
        assert found.dataset is not None
        layout = found.dataset.get_create_plist()
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
                    lasting=False,
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
                self.skip(utt, f"its bytes are in {path}, which is not there", "put that file back", lasting=False)
                return None
        for path in paths:
            self.number_of_path(path)  # so that a change of it is a change of ours
        return access

    def kind_of(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> tuple[int, int]:
        """The number of a kind, and its bytes per frame."""
        if (dtype, shape) not in self.kinds:
            self.kinds[dtype, shape] = (len(self.kinds), Kind(dtype, shape).frame_nbytes)
        return self.kinds[dtype, shape]

    def type_of(self, dataset: h5d.DatasetID) -> Stored:
        datatype = dataset.get_type()
        code = datatype.encode()
        if code not in self.types:
            self.types[code] = examine(datatype)
        return self.types[code]

    def skip(self, utt: str, reason: str, remedy: str, *, harmless: bool = False, lasting: bool = True) -> None:
        self.skipped.append(Skipped(utt, self.files[0].path, reason, remedy, harmless, lasting))

    # -- is the direct way right? -----------------------------------------------------------------------------------

    def verify_headers(self) -> None:
        """Compare a sample of what was catalogued without HDF5 with what HDF5 says.

        Raises:
            HeadersError: they differ.
        """
        for row in _sample(np.array(self.unopened, np.int64)):
            try:
                agreed = self.header_agrees(row)
            except (KeyError, OSError, RuntimeError, ValueError) as error:
                raise HeadersError(f"HDF5 cannot open {self.ids[row]!r}") from error
            if not agreed:
                raise HeadersError(f"the header of {self.ids[row]!r} does not say what HDF5 says")

    def header_agrees(self, row: int) -> bool:
        dataset, (dtype, shape) = self.open(self.ids[row]), tuple(self.kinds)[self.kind[row]]
        stored = self.type_of(dataset)
        offset = dataset.get_offset() if stored.plain else -1
        found = (stored.dtype, stored.swapped, dataset.shape, offset)
        return found == (dtype, bool(self.swapped[row]), (self.length[row], *shape), self.offset[row])

    def open(self, utt: str) -> h5d.DatasetID:
        return h5d.open(self.root.id, self.key.path(utt).encode("utf-8", "surrogateescape"))

    def verified(self, catalog: Catalog) -> Catalog:
        """The same catalog, without direct reads if a sample of them differs from what HDF5 gives."""
        direct = np.flatnonzero((catalog.access == Access.DIRECT) & (catalog.nbytes > 0))
        for row in _sample(direct):
            if not self.agrees(catalog, row):
                wrong = catalog.access == Access.DIRECT
                catalog.access[wrong], catalog.offset[wrong], catalog.file[wrong] = Access.UNVERIFIED, -1, 0
                break
        return catalog

    def agrees(self, catalog: Catalog, row: int) -> bool:
        kind = catalog.kinds[catalog.kind[row]]
        num_frames = min(int(catalog.length[row]), max(SAMPLE_NBYTES // kind.frame_nbytes, 1))
        try:
            wanted = h5py.Dataset(self.open(catalog.ids[row]))[:num_frames].tobytes()
        except (KeyError, OSError, RuntimeError, ValueError):  # as it will be again, and explained, when it is read
            return False
        with open(catalog.files[catalog.file[row]].path, "rb") as file:
            file.seek(int(catalog.offset[row]))
            return bool(file.read(len(wanted)) == wanted)


def _lies_open(container: Container, root: h5py.Group) -> bool:
    """Whether the bytes of a file may be read beside HDF5."""
    if not direct_reads_available() or root.file.driver != "sec2":
        return False
    return (container.handle is not None and can_write(root)) or not is_written_here(container.path)


def _identity(group: h5g.GroupID) -> tuple[int, int]:
    info = h5o.get_info(group)
    return info.fileno, info.addr


def _links(group: h5g.GroupID) -> tuple[list[bytes], list[int | None]]:
    """The names in a group, in h5py's order, and the address that each leads to if it is a hard link."""
    tracked = group.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_TRACKED
    names: list[bytes] = []
    addresses: list[int | None] = []

    def note(name: bytes, info: h5py.h5l.LinkInfo) -> None:
        names.append(name)
        addresses.append(info.u if info.type == h5py.h5l.TYPE_HARD else None)

    group.links.iterate(note, idx_type=h5.INDEX_CRT_ORDER if tracked else h5.INDEX_NAME, info=True)
    return names, addresses


def _if_found(group: h5g.GroupID, name: bytes, address: int | None, header: Header | None) -> Header | None:
    """The header, if HDF5 finds the name too; in a damaged group it may not find all that it lists."""
    try:
        return header if header and group.links.get_info(name).u == address else None
    except (KeyError, OSError, RuntimeError, ValueError):
        return None


def _shape_and_offset(found: _Found) -> tuple[tuple[int, ...] | None, int | None]:
    if found.dataset is not None:
        return found.dataset.shape, found.dataset.get_offset()
    assert found.header is not None
    return found.header.shape, found.header.offset


def _sample(rows: NDArray[np.int64]) -> list[int]:
    """A few rows, the first and the last among them."""
    few = rows if rows.size <= SAMPLES else rows[np.linspace(0, rows.size - 1, SAMPLES).astype(int)]
    return list(map(int, few))


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
