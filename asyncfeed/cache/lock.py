"""Locks between processes, which end with their holder.

flock(2), and not a package: what is wanted beside the lock itself is that a forked child does not go on holding it, and
that who is refused learns who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from typing import Any

from asyncfeed.errors import LockedFileError, WriteError
from asyncfeed.process import call_in_child

__all__ = ["Lock"]

PATIENCE = 2.0
"""Seconds that `Lock.hold` waits for something that others hold for moments only."""


class Lock:
    """A lock file, held from when this is made until it is closed, or until the process ends, however it ends.

    The file stays: if it were removed, two processes could hold two files of the same name.

    Args:
        path: of the lock file.
        what: what is locked, for the message.
        patience: seconds to go on trying.
        advice: what somebody who is refused can do.
        locking: false on a file system that has no locks; nothing is then held.

    Raises:
        LockedFileError: another process holds it, or the file system has no locks.
        WriteError: the lock file cannot be made.
    """

    def __init__(self, path: str, what: str, *, advice: str, patience: float = 0.0, locking: bool = True) -> None:
        self._fd: int | None = None
        if not locking:
            return
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise WriteError(f"the lock file {path} cannot be made ({error.strerror}); check the directory") from error
        self._fd = fd
        call_in_child(self)  # first, as another thread may be about to fork
        try:
            _acquire(fd, path, what, advice, patience)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @staticmethod
    def was_here(path: str) -> bool:
        """Whether it was a process of this machine that had a lock last, so that the lock tells whether it has ended.

        The machine is that of the same name, or of the same boot: containers have a name of their own every time.
        """
        with contextlib.suppress(OSError), open(path, "rb") as file:
            note = _note(file.fileno())
            return any(note.get(name) == value for name, value in _machine().items())
        return False

    def forked(self) -> None:
        """In a forked child: the parent holds it, and the child must not keep it held after the parent's death."""
        self.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _acquire(fd: int, path: str, what: str, advice: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise LockedFileError(
                    f"{path} cannot be locked ({error.strerror}): this file system has no locks; pass locking=False, and "
                    f"see to it that no two processes write under one writer id"
                ) from error
            if time.monotonic() >= deadline:
                raise LockedFileError(f"{what} is held by {_holder(fd)}; {advice}") from error
        time.sleep(0.005)  # there is nobody to notify us: flock can wait, but then without end
    os.ftruncate(fd, 0)
    with contextlib.suppress(OSError):  # the note is for others; a full disk is no reason not to lock
        os.pwrite(fd, json.dumps({"pid": os.getpid(), **_machine()}).encode(), 0)


def _machine() -> dict[str, str]:
    """What tells this machine from others."""
    machine = {"host": socket.gethostname()}
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        machine["boot"] = file.read().strip()
    return machine


def _holder(fd: int) -> str:
    note = _note(fd)
    return f"process {note['pid']} on {note['host']}" if note else "another process"


def _note(fd: int) -> dict[str, Any]:
    """Who wrote the note; empty if nobody did, or is just doing it."""
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(os.pread(fd, 4096, 0))
        if isinstance(note, dict) and {"pid", "host"} <= note.keys():
            return note
    return {}
