"""The bytes of a journal: a header, then records, each with checksums.

    0       8192                12288
    | empty | header, pointer   | record | record | ...

The first 8 KiB stay empty until the journal is sealed: they are where HDF5 wants the beginning of a file. Everything
begins at a multiple of 64 bytes; copies to other places are slower on many processors. A record is

    head (36 bytes) | id | description (JSON) | padding | data | padding

The checksum of the head (CRC-32, as in zlib) covers id and description and begins with the nonce of the journal, so that
an old record, or one that is somebody's data, is none. The data have a checksum of their own (63 bits of XXH3, which takes
a tenth of the time that writing them does, where CRC-32 takes as long again).
"""

from __future__ import annotations

import ast
import enum
import functools
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncfeed.cache.fingerprint import Fingerprint

__all__ = [
    "DATA_START",
    "HEADER_START",
    "Entry",
    "Header",
    "Kind",
    "Pointer",
    "Record",
    "checksum_of",
    "encode",
    "padding",
    "raw",
]

HEADER_START = 8192
POINTER_START = 12_224
DATA_START = 12_288
ALIGNMENT = 64

MAGIC = b"asyncfeed cache\n"
_HEADER = struct.Struct("<16s16sII")  # magic, nonce, length and checksum of the fingerprint
_POINTER = struct.Struct("<QQQI")  # table: offset, bytes; size of the file; checksum
_HEAD = struct.Struct("<4sBxxxIIQQI")  # magic, kind, bytes of id, of description, of data; checksums of data, of head
_HEAD_MAGIC = b"rec\x8f"


class Kind(enum.IntEnum):
    """What a record holds."""

    ITEM = 0
    TABLE = 1
    """What a sealed file contains, as one array archive; behind it come the metadata of HDF5."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One item: what it is, and where its bytes are."""

    offset: int
    """Of the first byte in the file; -1 if they can only be had through HDF5."""
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    checksum: int
    digest: bytes = b""
    """Of the arguments it was computed from; empty if none were given."""


class Header(NamedTuple):
    """The beginning of a journal, which stays when it is sealed."""

    nonce: bytes
    fingerprint: Fingerprint

    def encode(self) -> bytes:
        text = self.fingerprint.to_json().encode()
        return _HEADER.pack(MAGIC, self.nonce, len(text), zlib.crc32(text, zlib.crc32(self.nonce))) + text

    @classmethod
    def decode(cls, block: bytes) -> Header | None:
        """The header in the bytes from `HEADER_START` on; None if there is none."""
        if len(block) < _HEADER.size:
            return None
        magic, nonce, nbytes, checksum = _HEADER.unpack_from(block)
        text = block[_HEADER.size : _HEADER.size + nbytes]
        if magic != MAGIC or zlib.crc32(text, zlib.crc32(nonce)) != checksum:
            return None
        return cls(nonce, Fingerprint.from_json(text.decode()))


class Pointer(NamedTuple):
    """Where a sealed file has its table."""

    offset: int
    nbytes: int
    file_nbytes: int
    """Of the sealed file: one that has another size was written to by somebody else."""

    def encode(self) -> bytes:
        fields = _POINTER.pack(*self, 0)[:-4]
        return fields + struct.pack("<I", zlib.crc32(fields))

    @classmethod
    def decode(cls, block: bytes) -> Pointer | None:
        """The pointer in the bytes from `POINTER_START` on; None if the file is not sealed."""
        if len(block) < _POINTER.size:
            return None
        *fields, checksum = _POINTER.unpack_from(block)
        if zlib.crc32(block[: _POINTER.size - 4]) != checksum or not fields[0]:
            return None
        return cls(*fields)


class Record(NamedTuple):
    """A record, as it was found."""

    kind: Kind
    uid: str
    entry: Entry
    stop: int
    """Where the next one begins."""


def checksum_of(data: memoryview) -> int:
    """Of the bytes of an item; never negative."""
    return xxhash.xxh3_64_intdigest(data) & 0x7FFF_FFFF_FFFF_FFFF


def padding(nbytes: int) -> bytes:
    """What has to follow so that the next thing is aligned."""
    return bytes(-nbytes % ALIGNMENT)


def raw(array: NDArray[Any]) -> memoryview:
    """The bytes of an array in C order. Never copies."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def encode(
    nonce: bytes, kind: Kind, uid: str, array: NDArray[Any], digest: bytes, checksum: int
) -> tuple[bytes, memoryview, bytes]:
    """A record as three pieces: everything before the data, the data (not copied), and what follows."""
    data, name = raw(array), uid.encode()
    description: dict[str, Any] = {"dtype": dtype_text(array.dtype), "shape": array.shape}
    if digest:
        description["digest"] = digest.hex()
    text = json.dumps(description).encode()
    head = _HEAD.pack(_HEAD_MAGIC, kind, len(name), len(text), data.nbytes, checksum, 0)[:-4]
    head += struct.pack("<I", zlib.crc32(text, zlib.crc32(name, zlib.crc32(head, zlib.crc32(nonce)))))
    before = head + name + text
    return before + padding(len(before)), data, padding(data.nbytes)


def decode(buffer: Any, position: int, nonce: bytes) -> Record | None:
    """The record at ``position``, its data not looked at; None if there is none, or not all of it."""
    if position + _HEAD.size > len(buffer):
        return None
    magic, kind, name_nbytes, text_nbytes, nbytes, checksum, head_checksum = _HEAD.unpack_from(buffer, position)
    text_start = position + _HEAD.size + name_nbytes
    before = text_start + text_nbytes
    offset = before + len(padding(before))
    if magic != _HEAD_MAGIC or offset + nbytes > len(buffer):
        return None
    name, text = bytes(buffer[position + _HEAD.size : text_start]), bytes(buffer[text_start:before])
    covered = zlib.crc32(bytes(buffer[position : position + _HEAD.size - 4]), zlib.crc32(nonce))
    if zlib.crc32(text, zlib.crc32(name, covered)) != head_checksum:
        return None
    description = json.loads(text)
    entry = Entry(
        offset,
        nbytes,
        dtype_of(description["dtype"]),
        tuple(description["shape"]),
        checksum,
        bytes.fromhex(description.get("digest", "")),
    )
    return Record(Kind(kind), name.decode(), entry, offset + nbytes + len(padding(offset + nbytes)))


def resume(buffer: Any, position: int, nonce: bytes) -> int:
    """Where the next intact record begins, at ``position`` or behind it; the end of the buffer if there is none."""
    while (position := buffer.find(_HEAD_MAGIC, position)) >= 0:
        if position % ALIGNMENT == 0 and decode(buffer, position, nonce) is not None:
            return position
        position += 1
    return len(buffer)


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: np.dtype[Any]) -> str:
    """A dtype as text, in the way of numpy's own file format."""
    return repr(np.lib.format.dtype_to_descr(dtype))


@functools.lru_cache(maxsize=256)
def dtype_of(text: str) -> np.dtype[Any]:
    """The dtype that `dtype_text` wrote down."""
    return np.dtype(np.lib.format.descr_to_dtype(ast.literal_eval(text)))
