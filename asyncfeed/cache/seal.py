"""Make a complete HDF5 file of a journal.

The data are not copied. HDF5 is asked for a file of the same datasets in which the place of the data is taken by one
large block that nobody writes, so that everything it writes itself lies before and behind that block; these metadata,
with the true places of the data entered, are put around the records of the journal. Sealing thereby costs some hundred
bytes per item, and the wait until all is on disk.

The format is that of the HDF5 File Format Specification, version 3: object headers of version 1 (IV.A.1.a), which have no
checksum, and data layout messages of version 3 (IV.A.2.i), in which the address of contiguous data stands.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import h5py
import numpy as np
from h5py import h5d, h5o, h5p, h5s, h5t
from numpy.typing import NDArray

from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.journal import DiskErrors, Journal, synced_meanwhile, write_all
from asyncfeed.cache.records import DATA_START, HEADER_START, POINTER_START, Header, Pointer
from asyncfeed.cache.room import Room, data_nbytes, hdf5_errors, metadata_nbytes
from asyncfeed.cache.table import Entries, Table
from asyncfeed.cache.values import type_id

__all__ = ["ATTRIBUTE", "Compression", "UnexpectedLayoutError", "seal", "seal_copy"]

Compression: TypeAlias = "str | int | None"

ATTRIBUTE = "asyncfeed"
"""Of the root group: the fingerprint, for whoever looks with other tools."""


class UnexpectedLayoutError(Exception):
    """This version of HDF5 writes something else than the one that was tried; the data have to be copied then."""


FLUSH_EVERY = 5_000
"""Datasets between two writings of metadata: closing a file does the rest, and holds the GIL meanwhile."""

LAYOUT_MESSAGE = 8
SUPERBLOCK_VERSION, SUPERBLOCK_END = 8, 40
"""Where these stand in a file (II.A)."""
UNDEFINED = 0xFFFF_FFFF_FFFF_FFFF

LAYOUT = np.dtype([("version", "u1"), ("class", "u1"), ("address", "<u8"), ("nbytes", "<u8")])
"""The data layout message of contiguous data."""


def seal(journal: Journal) -> Table:
    """Turn a journal into an HDF5 file, in place; what it holds. It still has its name, and on failure it is a journal.

    What is written last has still to be brought to disk.

    Raises:
        WriteError: the disk is full.
        UnexpectedLayoutError: this cannot be done with this HDF5; `seal_copy` can.
    """
    end = journal.end
    scratch = f"{journal.path}.scratch"
    try:
        table = journal.entries.to_table()
        archive = journal.append_table(table.to_archive())
        with synced_meanwhile(journal.fd, journal.path):  # the data, while HDF5 makes what it keeps of them
            head, tail = _metadata(scratch, table, journal.end, journal.header.fingerprint)
        pointer = Pointer(archive.offset, archive.nbytes, journal.end + len(tail))
        with DiskErrors(journal.path, "sealed"):
            write_all(journal.fd, [tail], journal.end)
            os.pwrite(journal.fd, pointer.encode(), POINTER_START)
            os.pwrite(journal.fd, head, 0)
    except BaseException:
        journal.rewind(end)
        raise
    return table


def _metadata(path: str, table: Table, end: int, fingerprint: Fingerprint) -> tuple[bytes, bytes]:
    """What HDF5 writes for these datasets: before `HEADER_START`, and from ``end`` on."""
    try:
        with hdf5_errors(path), _file_around(path, end, fingerprint) as file, Room(path) as room:
            room.take(end, end + metadata_nbytes(table))
            addresses = _create_datasets(file, table)
        with open(path, "rb") as scratch:
            head = bytearray(scratch.read(HEADER_START))
            scratch.seek(end)
            tail = bytearray(scratch.read(max(_end_in(head) - end, 0)))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    if not tail:  # all of it has found room at the beginning, and HDF5 takes the file to end there
        struct.pack_into("<Q", head, SUPERBLOCK_END, end)
    metadata = np.frombuffer(head + tail, np.uint8)
    # HDF5 puts the first headers into what is left of the block that it began the file with.
    headers = np.where(addresses < HEADER_START, addresses, addresses - end + HEADER_START)
    _enter_places(metadata, headers, table)
    return metadata[:HEADER_START].tobytes(), metadata[HEADER_START:].tobytes()


@contextlib.contextmanager
def _file_around(path: str, end: int, fingerprint: Fingerprint) -> Iterator[h5py.File]:
    """A new HDF5 file that leaves everything between `HEADER_START` and ``end`` alone."""
    with h5py.File(path, "w", libver="earliest", locking=False) as file:
        # As bytes: text needs a converter, which h5py takes down when the interpreter exits, before some seal what is open.
        file.attrs[ATTRIBUTE] = np.bytes_(fingerprint.to_json())
        early = h5p.create(h5p.DATASET_CREATE)
        early.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        early.set_fill_time(h5d.FILL_TIME_NEVER)
        # Without a name: it is gone when the file is closed, and the space stays.
        block = h5d.create(file.id, None, h5t.NATIVE_UINT8, h5s.create_simple((end,)), early)
        if block.get_offset() > HEADER_START:
            raise UnexpectedLayoutError("HDF5 takes more room at the beginning of a file than is left to it")
        yield file
        del block


def _create_datasets(file: h5py.File, table: Table) -> NDArray[np.int64]:
    """Create a dataset without data for each item; the addresses of their headers."""
    settings = h5p.create(h5p.DATASET_CREATE)
    settings.set_alloc_time(h5d.ALLOC_TIME_LATE)
    settings.set_fill_time(h5d.FILL_TIME_NEVER)
    settings.set_obj_track_times(False)
    groups = h5p.create(h5p.LINK_CREATE)
    groups.set_create_intermediate_group(True)
    forms = [(type_id(form[0]), form[1]) for form in table.forms if form is not None]
    spaces: dict[int, h5s.SpaceID] = {0: h5s.create(h5s.SCALAR)}
    root, addresses = file.id, np.empty(len(table), np.int64)
    for row, (uid, form) in enumerate(zip(table.ids, table.form.tolist(), strict=True)):
        if row % FLUSH_EVERY == FLUSH_EVERY - 1:
            file.flush()
        datatype, shape = forms[form]
        space = spaces.get(len(shape))
        if space is None:
            space = spaces[len(shape)] = h5s.create_simple(shape)
        elif shape:
            space.set_extent_simple(shape)  # a fifth of what making one takes
        dataset = h5d.create(root, uid.encode(), datatype, space, settings, groups if "/" in uid else None)
        addresses[row] = h5o.get_info(dataset).addr
    return addresses


def _end_in(metadata: bytes | bytearray) -> int:
    """Where the file ends, as the superblock says."""
    if metadata[SUPERBLOCK_VERSION] != 0:
        raise UnexpectedLayoutError("HDF5 begins a file otherwise than expected")
    (end,) = struct.unpack_from("<Q", metadata, SUPERBLOCK_END)
    return int(end)


def _enter_places(metadata: NDArray[np.uint8], headers: NDArray[np.int64], table: Table) -> None:
    """Write into the object header of every dataset where its data are."""
    layouts = headers + _layouts_in(metadata, headers, table)
    filled = np.flatnonzero(table.nbytes)
    layouts = layouts[filled]
    expected = np.zeros(filled.size, LAYOUT)
    expected["version"], expected["class"] = 3, 1
    expected["address"], expected["nbytes"] = UNDEFINED, table.nbytes[filled]
    places = layouts[:, None] + np.arange(LAYOUT.itemsize)
    if not np.array_equal(metadata[places], expected.view(np.uint8).reshape(places.shape)):
        raise UnexpectedLayoutError("HDF5 lays out a dataset otherwise than expected")
    expected["address"] = table.offset[filled]
    metadata[places] = expected.view(np.uint8).reshape(places.shape)


def _layouts_in(metadata: NDArray[np.uint8], headers: NDArray[np.int64], table: Table) -> NDArray[np.int64]:
    """Where in its object header the data layout message of every dataset begins: where it does for all like it."""
    kinds: dict[tuple[Any, int], int] = {}
    number = [kinds.setdefault((form[0], len(form[1])), len(kinds)) for form in table.forms if form is not None]
    kind = np.array(number, np.int64)[table.form]
    _, firsts = np.unique(kind, return_index=True)
    found: NDArray[np.int64] = np.array([_layout_in(metadata, header) - header for header in headers[firsts].tolist()])[
        kind
    ]
    return found


def _layout_in(metadata: NDArray[np.uint8], header: int) -> int:
    """Where the data layout message of an object header begins."""
    version, num_messages = struct.unpack_from("<BxH", metadata.data, header)
    position = header + 16
    for _ in range(num_messages if version == 1 else 0):
        kind, nbytes = struct.unpack_from("<HH", metadata.data, position)
        position += 8
        if kind == LAYOUT_MESSAGE:
            return position
        position += nbytes
    raise UnexpectedLayoutError("HDF5 writes object headers otherwise than expected")


def seal_copy(
    path: str,
    header: Header,
    entries: Entries,
    read: Callable[[str], NDArray[Any]],
    compression: Compression,
) -> None:
    """Write a complete HDF5 file at ``path``, its data copied, and compressed if that is wanted.

    Raises:
        WriteError: the disk is full.
    """
    table = entries.to_table()
    table.offset.fill(-1)
    archive = table.to_archive()
    start, metadata = DATA_START + archive.size, metadata_nbytes(table)
    try:
        with hdf5_errors(path):
            with _file_around(path, start, header.fingerprint) as file, Room(path) as room:
                room.take(0, start)
                for row, uid in enumerate(entries):
                    offset = _create_filled(file, uid, read(uid), compression, room, metadata)
                    table.offset[row] = -1 if offset is None else offset
            with open(path, "r+b", buffering=0) as sealed:
                archive = table.to_archive()  # of the same size: numbers take the same room
                size = max(_end_in(sealed.read(HEADER_START)), start)
                pointer = Pointer(DATA_START, archive.size, size)
                os.ftruncate(sealed.fileno(), size)
                write_all(sealed.fileno(), [archive.data], DATA_START)
                os.pwrite(sealed.fileno(), pointer.encode(), POINTER_START)
                os.pwrite(sealed.fileno(), header.encode(), HEADER_START)
                os.fsync(sealed.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _create_filled(
    file: h5py.File, uid: str, array: NDArray[Any], compression: Compression, room: Room, metadata: int
) -> int | None:
    """Write an item; where its bytes are, if they are in one place."""
    if array.dtype.kind in "mM":
        array = array.astype(h5py.opaque_dtype(array.dtype))
    filters = {"compression": compression} if compression is not None and array.size and array.ndim else {}
    room.take(0, file.id.get_filesize() + metadata)
    dataset = file.create_dataset(uid, array.shape, array.dtype, **filters)
    room.take(0, file.id.get_filesize() + metadata + data_nbytes(dataset))
    if array.size:
        dataset.id.write(h5s.ALL, h5s.ALL, array)
    offset: int | None = dataset.id.get_offset()
    return offset
