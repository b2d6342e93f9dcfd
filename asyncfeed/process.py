"""Which process something was made in, and what becomes of it in a forked child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from asyncfeed.errors import ForkError

__all__ = ["Forking", "Inherited", "call_at_fork", "call_in_child", "refuse_fork"]


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


class Forking(Protocol):
    """Something that must learn that this process is being forked."""

    def forking(self) -> None:
        """Called in the parent just before a fork, and again just after: what changes hands in between is in between."""


def call_in_child(inherited: Inherited) -> None:
    """Call ``inherited.forked()`` in forked children, for as long as it lives."""
    _inherited.add(inherited)


def call_at_fork(forking: Forking) -> None:
    """Call ``forking.forking()`` around every fork, for as long as it lives."""
    _forking.add(forking)


# The operating system knows one process, and what is registered with os.register_at_fork is there for good: therefore
# these two belong to the module.
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_forking: weakref.WeakSet[Forking] = weakref.WeakSet()


def _tell_parent() -> None:
    for forking in list(_forking):
        forking.forking()


def _tell_child() -> None:
    for inherited in list(_inherited):
        inherited.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_tell_parent, after_in_parent=_tell_parent, after_in_child=_tell_child)
