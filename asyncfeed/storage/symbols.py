"""Is every name of a group where HDF5 looks for it?

HDF5 lists a group of the old format by walking all of its B-tree, but finds a name by the keys in the nodes. In a
damaged file it may therefore list what it cannot find. Asking it for each name costs ten microseconds; to look at all
keys at once costs a tenth of that.

Names and places of fields are those of the *HDF5 File Format Specification Version 3.0*: III.A.1 version 1 B-trees,
III.B symbol table nodes, III.D local heaps.
"""

from __future__ import annotations

import operator
import struct
from itertools import islice
from typing import NamedTuple

import numpy as np

from asyncfeed.storage.blocks import Blocks, Integers, numbers
from asyncfeed.units import MIB

__all__ = ["all_are_found"]

MAX_LEVELS = 16
MAX_HEAP_NBYTES = 64 * MIB
"""Names of a million utterances and more; those of a larger group are looked up one by one."""

HEAP, HEAP_NBYTES = b"HEAP\0\0\0\0", 32
TREE, TREE_NBYTES = b"TREE\0", 24
SNOD, SNOD_NBYTES = b"SNOD\1\0", 8


class _Level(NamedTuple):
    """All nodes at one height of a B-tree."""

    used: Integers
    """Children of each node."""
    left: Integers
    """The key to the left of every child, as its place in the heap,"""
    right: Integers
    """and the one to the right."""


def all_are_found(blocks: Blocks, tree: int, heap: int, names: list[bytes]) -> bool:
    """Whether HDF5 finds each of ``names``, all that a group holds in the order in which it lists them.

    False also means that there is no telling.
    """
    if not all(map(operator.lt, names, islice(names, 1, None))):
        return False
    strings = _heap(blocks, heap)
    levels, counts = _levels(blocks, tree)
    if not strings or not counts.all() or counts.sum() != len(names):
        return False
    for level in reversed(levels):
        stops = np.cumsum(counts)
        if not _enclose(strings, level, (stops - counts).tolist(), stops.tolist(), names):
            return False
        counts = np.add.reduceat(counts, np.cumsum(level.used) - level.used)
    return True


def _heap(blocks: Blocks, address: int) -> bytes:
    """The names of a group, each ended by NUL; empty if there is no such heap."""
    prefix = blocks.read_one(address, HEAP_NBYTES)
    if len(prefix) < HEAP_NBYTES or not prefix.startswith(HEAP):
        return b""
    nbytes, _, place = struct.unpack_from("<QQQ", prefix, 8)
    strings = blocks.read_one(place, nbytes) if nbytes <= MAX_HEAP_NBYTES else b""
    return strings if len(strings) == nbytes else b""


def _levels(blocks: Blocks, root: int) -> tuple[list[_Level], Integers]:
    """A B-tree from the root down, and how many names each symbol table node below it holds; none if it is damaged."""
    levels: list[_Level] = []
    nothing = levels, np.zeros(0, np.int64)
    addresses = np.array([root], np.int64)
    for _ in range(MAX_LEVELS):
        nodes, there = blocks.read(addresses, TREE_NBYTES + 16 * blocks.max_children + 8)
        if (there < nodes.shape[1]).any() or (nodes[:, : len(TREE)] != np.frombuffer(TREE, np.uint8)).any():
            return nothing
        used = numbers(nodes, 6, 1, "<u2")[:, 0].astype(np.int64)
        if (nodes[:, 5] != nodes[0, 5]).any() or not ((used > 0) & (used <= blocks.max_children)).all():
            return nothing
        pairs = numbers(nodes, TREE_NBYTES, 2 * blocks.max_children + 1, "<u8").astype(np.int64)
        held = np.arange(blocks.max_children) < used[:, None]
        levels.append(_Level(used, pairs[:, 0:-1:2][held], pairs[:, 2::2][held]))
        addresses = pairs[:, 1::2][held]
        if nodes[0, 5] == 0:
            return levels, _counts(blocks, addresses)
    return nothing


def _counts(blocks: Blocks, addresses: Integers) -> Integers:
    """How many names each symbol table node holds; 0 if it is none."""
    nodes, there = blocks.read(addresses, SNOD_NBYTES)
    sound = (there == SNOD_NBYTES) & (nodes[:, : len(SNOD)] == np.frombuffer(SNOD, np.uint8)).all(axis=1)
    return np.where(sound, numbers(nodes, 6, 1, "<u2")[:, 0], 0).astype(np.int64)


def _enclose(strings: bytes, level: _Level, starts: list[int], stops: list[int], names: list[bytes]) -> bool:
    """Whether the names of every child are greater than the key to its left, and none greater than that to its right."""
    for left, right, start, stop in zip(level.left.tolist(), level.right.tolist(), starts, stops, strict=True):
        if not (0 <= left < len(strings) and 0 <= right < len(strings)):
            return False
        if not _string(strings, left) < names[start] or names[stop - 1] > _string(strings, right):
            return False
    return True


def _string(strings: bytes, at: int) -> bytes:
    end = strings.find(b"\0", at)
    return strings[at : end if end >= 0 else None]
