"""Which process something was made in, and what becomes of it in a forked child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from asyncfeed.errors import ForkError

__all__ = ["Inherited", "call_in_child", "num_forks", "refuse_fork"]


def refuse_fork(pid: int, what: str) -> None:
    """Raise `ForkError` if something made in process ``pid`` is used in another one."""
    if os.getpid() != pid:
        raise ForkError(
            f"this {what} was made in process {pid} and has no reader thread here; make a new Feed after the fork, "
            f"or send one by pickle, which carries its settings"
        )


class Inherited(Protocol):
    """Something that must learn that it is now in a forked child."""

    def forked(self) -> None:
        """Called once in the child, in the only thread there is, before ``os.fork`` returns. Must not fail or wait."""


def call_in_child(inherited: Inherited) -> None:
    """Call ``inherited.forked()`` in forked children, for as long as it lives."""
    _inherited.add(inherited)


def num_forks() -> int:
    """Grows with every fork. What was lent out at another count may be seen by a child, too."""
    return _forks.count


# The operating system knows one process, and what is registered with os.register_at_fork is there for good: therefore
# these two belong to the module.
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


class _Forks:
    count = 0


_forks = _Forks()


def _forking() -> None:
    _forks.count += 1


def _forked() -> None:
    for inherited in list(_inherited):
        inherited.forked()


if hasattr(os, "register_at_fork"):
    # Counted before and after: whatever changes hands in between differs from both.
    os.register_at_fork(before=_forking, after_in_parent=_forking, after_in_child=_forked)
