"""Read the headers of many contiguous datasets at once, without opening each of them in HDF5.

To open a dataset costs HDF5 and h5py a tenth of a millisecond, which is most of the time that cataloguing takes. Here
the object headers of thousands of datasets are read with a few calls and compared by numpy.

What is understood is the header of version 1, which HDF5 writes unless a later format is asked for. Names and places
of fields are those of the *HDF5 File Format Specification Version 3.0*: IV.A.1.a object header prefix, IV.A.2.b
dataspace message, IV.A.2.d datatype message, IV.A.2.i data layout message, IV.A.2.r symbol table message.

No header is trusted on its own. Headers that are equal byte for byte, apart from the fields that are read here and from
what HDF5 does not look at when it opens a dataset, share a *template*; whoever uses them opens the first dataset of
every template in HDF5 and compares. Everything else, from chunks and committed types to a flipped bit, either gets no
answer or is a template of its own, and is thus HDF5's affair.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import StorageError
from asyncfeed.storage.blocks import Blocks, Bytes, Integers, numbers
from asyncfeed.storage.symbols import all_are_found

__all__ = ["Header", "Headers", "HeadersError"]

HEADER_NBYTES = 512
"""How much of a header is read. h5py's take 272, and a few hundred more where attributes were known from the start."""

BATCH = 1 << 14
"""Headers in memory at once: 8 MiB of them, and about as much again while they are compared."""

MAX_STRUCTURES, MAX_TEMPLATES = 64, 1 << 12
"""Past these a file is so varied that comparing would cost more than it saves."""

MAX_NUMBER, MAX_BITS = 1 << 48, 60
"""Of single numbers, and of products of them, so that 64 bits hold them without a thought about overflow."""

PREFIX_NBYTES, MESSAGE_NBYTES = 16, 8
NIL, DATASPACE, DATATYPE, OLD_FILL, FILL, LAYOUT, ATTRIBUTE, SYMBOLS, MODIFIED = (
    0x0,
    0x1,
    0x3,
    0x4,
    0x5,
    0x8,
    0xC,
    0x11,
    0x12,
)
UNDERSTOOD = {NIL, DATASPACE, DATATYPE, OLD_FILL, FILL, LAYOUT, ATTRIBUTE, MODIFIED}
CONSTANT = 1
"""The one message flag that changes nothing for a reader; others say that the message is kept elsewhere."""


class HeadersError(Exception):
    """Headers were not what HDF5 says they are, or could not be read; the file is catalogued without them."""


class Header(NamedTuple):
    """What the header of one contiguous, allocated dataset says."""

    template: int
    """The number that it shares with all headers that differ only in ``shape`` and ``offset``."""
    shape: tuple[int, ...]
    offset: int
    """Of the first byte of its data in the file."""


class Headers:
    """The headers of one file.

    Its memory is that of one batch, whatever the size of the file. Not thread-safe.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._structures: list[_Structure] = []
        self._numbers = itertools.count()

    def read(self, addresses: Sequence[int | None]) -> Iterator[Header | None]:
        """The header at each address, in the same order; None where there is no address or no certainty.

        Raises:
            HeadersError: the file cannot be read, or changed meanwhile.
            ClosedError: the blocks were told to stop.
        """
        for start in range(0, len(addresses), BATCH):
            with _translated():
                columns = self._read_batch(addresses[start : start + BATCH])
            for template, shape, offset in zip(*columns, strict=True):
                yield None if template < 0 else Header(template, shape, offset)

    def finds_all(self, group: int, names: list[bytes]) -> bool:
        """Whether HDF5 is sure to find all names that it lists in the group at an address; False if in doubt.

        Raises:
            HeadersError, ClosedError: as above.
        """
        with _translated():
            messages = _messages_of(header := self._blocks.read_one(group, HEADER_NBYTES)) or []
            places = [m.at for m in messages if m.kind == SYMBOLS and m.nbytes >= 16 and not m.flags & ~CONSTANT]
            if len(places) != 1:
                return False
            tree, heap = struct.unpack_from("<qq", header, places[0])
            return all_are_found(self._blocks, tree, heap, names)

    def _read_batch(self, addresses: Sequence[int | None]) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
        """Templates, shapes and offsets; the template is -1 where the rest has no meaning."""
        templates, offsets = [-1] * len(addresses), [-1] * len(addresses)
        shapes: list[tuple[int, ...]] = [()] * len(addresses)
        end = self._blocks.end
        at = np.array([-1 if a is None or a > end else a for a in addresses], np.int64)
        memory, nbytes = self._blocks.read(at, HEADER_NBYTES)
        for structure, rows in self._sorted(memory, nbytes):
            for row, template, shape, offset in self._headers(structure, rows, memory):
                templates[row], shapes[row], offsets[row] = template, shape, offset
        return templates, shapes, offsets

    def _sorted(self, memory: Bytes, nbytes: Integers) -> Iterator[tuple[_Structure, Integers]]:
        """The rows of every structure that can be made use of."""
        left = np.flatnonzero(nbytes >= PREFIX_NBYTES)
        for number in range(MAX_STRUCTURES):
            if number == len(self._structures):
                left = self._discover(left, memory, nbytes)
            if not left.size or number == len(self._structures):
                return
            structure = self._structures[number]
            fits = (nbytes[left] >= structure.nbytes) & (
                memory[left[:, None], structure.fixed] == structure.values
            ).all(axis=1)
            if structure.usable:
                yield structure, left[fits]
            left = left[~fits]

    def _discover(self, left: Integers, memory: Bytes, nbytes: Integers) -> Integers:
        """Add the structure of the first of the rows that has one; the rows before it are left out."""
        for skipped, row in enumerate(left.tolist()):
            structure = _structure_of(memory[row, : nbytes[row]])
            if structure is not None:
                self._structures.append(structure)
                return left[skipped:]
        return left[:0]

    def _headers(
        self, structure: _Structure, rows: Integers, memory: Bytes
    ) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
        """Row, template, shape and offset of each of the headers of one structure that are beyond doubt."""
        memory = memory[rows, : structure.nbytes]
        shape, address, certain = structure.fields(memory, self._blocks.end)
        kept = np.ascontiguousarray(memory[certain][:, structure.kept]).view(f"V{structure.kept.size}").ravel()
        shapes = zip(*shape[certain].T.tolist(), strict=True)
        offsets = (address[certain] + self._blocks.base).tolist()
        for row, key, dims, offset in zip(rows[certain].tolist(), kept.tolist(), shapes, offsets, strict=True):
            template = structure.templates.get(key)
            if template is None:
                if len(structure.templates) == MAX_TEMPLATES:
                    continue
                template = structure.templates[key] = next(self._numbers)
            yield row, template, dims, offset


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Numbers from a damaged file may surprise numpy too; HDF5 will find the words for what is wrong with it."""
    try:
        yield
    except (StorageError, OSError, ArithmeticError, LookupError, ValueError, struct.error) as error:
        raise HeadersError(str(error)) from error


class _Message(NamedTuple):
    """A message of an object header, and where its body begins."""

    kind: int
    nbytes: int
    flags: int
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class _Structure:
    """A sequence of messages: their kinds and sizes, the rank of the data and the class of the layout."""

    nbytes: int
    fixed: Integers
    """Columns that say that a header has this structure,"""
    values: Bytes
    """and what is in them."""
    usable: bool = False
    """Whether it is a contiguous dataset, and nothing in it is unknown. If not, there is nothing below."""
    space: int = 0
    """Where the bodies of the messages that matter begin: of the dataspace,"""
    rank: int = 0
    bounded: bool = False
    """... which may give largest sizes besides the actual ones,"""
    datatype: int = 0
    layout: int = 0
    kept: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    """Columns in which headers of one template are equal: all but those that vary from dataset to dataset."""
    templates: dict[bytes, int] = field(default_factory=dict)

    def fields(self, memory: Bytes, end: int) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Shape, address of the data, and whether they are beyond doubt, of each row of ``memory``.

        Sizes must agree with each other, and the data lie within a file that ends at ``end``.
        """
        dims = numbers(memory, self.space + 8, self.rank, "<u8")
        itemsize = numbers(memory, self.datatype + 4, 1, "<u4")[:, 0].astype(np.int64)
        address, nbytes = numbers(memory, self.layout + 2, 2, "<u8").T
        certain = ((dims > 0) & (dims < MAX_NUMBER)).all(axis=1) & (address < MAX_NUMBER) & (nbytes < MAX_NUMBER)
        if self.bounded:
            certain &= (dims == numbers(memory, self.space + 8 + 8 * self.rank, self.rank, "<u8")).all(axis=1)
        shape = np.where(certain[:, None], dims, 1).astype(np.int64)
        place, size = np.where(certain, address, 0).astype(np.int64), np.where(certain, nbytes, 0).astype(np.int64)
        certain &= np.log2(np.column_stack([shape, np.maximum(itemsize, 1)])).sum(axis=1) < MAX_BITS
        certain &= (shape.prod(axis=1) * itemsize == size) & (size > 0) & (place + size <= end)
        return shape, place, certain


def _messages_of(header: bytes) -> list[_Message] | None:
    """The messages of a header of version 1 that is complete; None if it is anything else."""
    if len(header) < PREFIX_NBYTES:
        return None
    version, _, count, _, nbytes = struct.unpack_from("<BBHII", header)
    at, end = PREFIX_NBYTES, PREFIX_NBYTES + nbytes
    if version != 1 or end > len(header):
        return None
    messages = []
    while at + MESSAGE_NBYTES <= end:
        kind, size, flags = struct.unpack_from("<HHB", header, at)
        messages.append(_Message(kind, size, flags, at + MESSAGE_NBYTES))
        at += MESSAGE_NBYTES + size
    return messages if at == end and len(messages) == count else None


def _structure_of(row: Bytes) -> _Structure | None:
    """The structure of a header; None if it is no complete header of version 1."""
    header = row.tobytes()
    messages = _messages_of(header)
    if messages is None:
        return None
    end = messages[-1].at + messages[-1].nbytes if messages else PREFIX_NBYTES
    fixed = np.concatenate([np.arange(PREFIX_NBYTES), *(np.arange(*_fixed_of(m)) for m in messages)])
    one = {m.kind: m for m in messages}
    if not _is_contiguous(header, messages, one):
        return _Structure(end, fixed, row[fixed])
    space, layout = one[DATASPACE], one[LAYOUT]
    rank, bounded = header[space.at + 1], bool(header[space.at + 2])
    return _Structure(
        end,
        fixed,
        row[fixed],
        usable=True,
        space=space.at,
        rank=rank,
        bounded=bounded,
        datatype=one[DATATYPE].at,
        layout=layout.at,
        kept=np.setdiff1d(
            np.arange(end), np.concatenate([np.arange(*_varying_of(m, rank, bounded)) for m in messages])
        ),
    )


def _fixed_of(message: _Message) -> tuple[int, int]:
    """The part of a message that belongs to the structure: its own header, and what tells the form of its body."""
    told = {DATASPACE: 8, LAYOUT: 2}.get(message.kind, 0)
    return message.at - MESSAGE_NBYTES, message.at + min(told, message.nbytes)


def _varying_of(message: _Message, rank: int, bounded: bool) -> tuple[int, int]:
    """The part of a message that may differ within a template: what is read, and what HDF5 does not look at."""
    parts = {
        NIL: (0, message.nbytes),
        ATTRIBUTE: (0, message.nbytes),
        MODIFIED: (4, max(message.nbytes, 4)),
        DATASPACE: (8, 8 + 8 * rank * (1 + bounded)),
        LAYOUT: (2, 18),
    }
    start, stop = parts.get(message.kind, (0, 0))
    return message.at + start, message.at + stop


def _is_contiguous(header: bytes, messages: list[_Message], one: dict[int, _Message]) -> bool:
    """Whether a header describes a contiguous dataset with at least one axis, and holds nothing that is not understood."""
    kinds = [m.kind for m in messages]
    if not UNDERSTOOD.issuperset(kinds) or any(m.flags & ~CONSTANT for m in messages):
        return False
    if any(kinds.count(kind) != 1 for kind in (DATASPACE, DATATYPE, LAYOUT)):
        return False
    space, datatype, layout = one[DATASPACE], one[DATATYPE], one[LAYOUT]
    if space.nbytes < 8 or datatype.nbytes < 8 or layout.nbytes < 18:
        return False
    version, rank, flags = header[space.at : space.at + 3]
    fits = version == 1 and rank >= 1 and flags in (0, 1) and space.nbytes >= 8 + 8 * rank * (1 + flags)
    return fits and tuple(header[layout.at : layout.at + 2]) == (3, 1)
