"""The modes of a cache, and what is allowed in each. All of it is here."""

from __future__ import annotations

import enum

from asyncfeed.errors import ArgumentError, ModeError

__all__ = ["Mode", "check_call", "check_step", "mode_of"]


class Mode(enum.Enum):
    """What a cache is open for."""

    CLOSED = "closed"
    """Not open; nothing is held."""
    WRITER = "writer"
    """Items are added to a journal, and read; one process for each writer id."""
    READER = "reader"
    """Sealed items are read, by any number of processes."""


STEPS = {
    Mode.CLOSED: {Mode.WRITER, Mode.READER},
    Mode.WRITER: {Mode.READER, Mode.CLOSED},
    Mode.READER: {Mode.WRITER, Mode.CLOSED},
}

READING = {Mode.WRITER, Mode.READER}
CALLS = {
    "compact": READING,
    "compute": READING,
    "get": READING,
    "get_many": READING,
    "items": READING,
    "keys": READING,
    "missing": READING,
    "populate": {Mode.WRITER},
    "put": {Mode.WRITER},
    "refresh": READING,
    "stream": {Mode.CLOSED, Mode.READER},
    "verify": READING,
}

HOW = {
    Mode.CLOSED: "leave the 'async with' block",
    Mode.WRITER: "open it with mode='w', or call to_writer()",
    Mode.READER: "open it with mode='r', or call to_reader()",
}

NAMES = {"w": Mode.WRITER, "writer": Mode.WRITER, "r": Mode.READER, "reader": Mode.READER}


def mode_of(name: object) -> Mode:
    """The mode that a user's ``mode=`` means.

    Raises:
        ArgumentError: it means none.
    """
    if isinstance(name, str) and name in NAMES:
        return NAMES[name]
    raise ArgumentError(f"mode={name!r} must be 'w' (writer; keeps what is there) or 'r' (reader)")


def check_call(call: str, mode: Mode) -> None:
    """Raise `ModeError` if a call is not allowed in a mode."""
    if mode not in CALLS[call]:
        wanted = sorted((m for m in CALLS[call]), key=lambda m: m.value)
        raise ModeError(
            f"{call}() wants the cache in {' or '.join(m.value for m in wanted)} mode, and it is in {mode.value} mode; "
            + (f"use it within 'async with'; or {HOW[wanted[-1]]}" if mode is Mode.CLOSED else HOW[wanted[-1]])
        )


def check_step(mode: Mode, wanted: Mode, *, opening: bool = False) -> None:
    """Raise `ModeError` if no step leads from one mode to another; ``opening`` leads from closed, and nothing else does."""
    if opening and mode is not Mode.CLOSED:
        raise ModeError(
            f"the cache is in {mode.value} mode already, and cannot be opened in {wanted.value} mode; close it first"
        )
    if mode is Mode.CLOSED and wanted is not Mode.CLOSED and not opening:
        raise ModeError(
            f"to_{wanted.value}() leads from one open mode to the other, and the cache is in closed mode; open it with "
            f"'async with'"
        )
    if wanted not in STEPS[mode]:
        raise ModeError(
            f"the cache is in {mode.value} mode, from which no step leads to {wanted.value} mode; "
            f"from here it can go to {' or '.join(sorted(m.value for m in STEPS[mode]))} mode"
        )
