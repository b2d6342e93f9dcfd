"""Which epoch is next: one number that the main process and the workers of a data loader agree on.

A data loader starts its workers anew for every epoch, or lets them go on; and nobody tells the data set in the main
process that an epoch begins. So the workers find out between them: the first one of an iteration takes the next epoch, the
others join it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any, NamedTuple

__all__ = ["Epochs", "Party", "Turn"]

KEPT = 8
"""Iterations that are remembered, for workers of an abandoned one that come after the next has begun."""


@dataclass(frozen=True, slots=True)
class Party:
    """The workers that iterate together, and one of them."""

    key: tuple[int, ...]
    """The same for all of them."""
    worker: int
    """Its number: one that joins a second time is of another iteration, even if the key is the same."""


class Turn(NamedTuple):
    """What one iteration goes through."""

    epoch: int
    state: Mapping[str, Any] | None
    """Where in it to begin, if not at its start."""


class Epochs:
    """Counts the epochs of one main process: shared with those that it forks or spawns.

    It lies in a file without a name, which goes with the last process that has it open, however that ends; so does its
    lock. A process that is no worker of a data loader (another rank, say) counts for itself, from where it was started.
    """

    def __init__(self, epoch: int = 0, state: Mapping[str, Any] | None = None) -> None:
        self._open(_file_without_name(), Turn(epoch, state))

    def _open(self, fd: int, first: Turn) -> None:
        self._fd, self._first = fd, first
        weakref.finalize(self, os.close, fd).atexit = False

    def next(self, main: int) -> Turn:
        """What the next iteration of a main process, given by its process id, will be."""
        with self._record(main) as record:
            return Turn(record["epoch"], record["state"])

    def set(self, main: int, epoch: int, state: Mapping[str, Any] | None = None) -> None:
        """Choose what it will be."""
        with self._record(main) as record:
            record["epoch"], record["state"] = epoch, state
        if main == os.getpid():
            self._first = Turn(epoch, state)  # for ranks that this process starts, which count for themselves

    def begin(self, main: int, party: Party | None = None) -> Turn:
        """Begin the next iteration; or join it, if another one of the party has begun it."""
        with self._record(main) as record:
            begun = _joined(record["begun"], party)
            if begun is None:
                begun = {"epoch": record["epoch"], "state": record["state"], "key": None, "workers": []}
                if party is not None:
                    begun |= {"key": list(party.key), "workers": [party.worker]}
                    record["begun"] = [begun, *record["begun"]][:KEPT]
                record["epoch"], record["state"] = record["epoch"] + 1, None
            return Turn(begun["epoch"], begun["state"])

    @contextlib.contextmanager
    def _record(self, main: int) -> Iterator[dict[str, Any]]:
        """The record of a main process, locked; changes are written at the end."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            text = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            records = json.loads(text) if text else {}
            fresh: dict[str, Any] = {"epoch": self._first.epoch, "state": self._first.state, "begun": []}
            yield records.setdefault(str(main), fresh)
            changed = json.dumps(records).encode()
            if changed != text:
                os.pwrite(self._fd, changed, 0)
                os.ftruncate(self._fd, len(changed))
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is being spawned, the file itself; in any other pickle, what is next."""
        spawning = context.get_spawning_popen() is not None
        return {"fd": reduction.DupFd(self._fd) if spawning else None, "first": tuple(self.next(os.getpid()))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = _file_without_name() if state["fd"] is None else state["fd"].detach()
        self._open(fd, Turn(*state["first"]))


def _joined(records: list[dict[str, Any]], party: Party | None) -> dict[str, Any] | None:
    """The iteration that this one of the party belongs to, and has joined now; None if it is the first of a new one."""
    if party is None:
        return None
    for begun in records:
        if begun["key"] == list(party.key) and party.worker not in begun["workers"]:
            begun["workers"].append(party.worker)
            return begun
    return None


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("asyncfeed-epochs")
    with tempfile.TemporaryFile(prefix="asyncfeed") as file:
        return os.dup(file.fileno())
