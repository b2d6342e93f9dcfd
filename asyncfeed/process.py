"""Which process something was made in."""

from __future__ import annotations

import os

from asyncfeed.errors import ForkError

__all__ = ["refuse_fork"]


def refuse_fork(pid: int, what: str) -> None:
    """Raise `ForkError` if something made in process ``pid`` is used in another one."""
    if os.getpid() != pid:
        raise ForkError(
            f"this {what} was made in process {pid} and has no reader thread here; make a new Feed after the fork, "
            f"or send one by pickle, which carries its settings"
        )
