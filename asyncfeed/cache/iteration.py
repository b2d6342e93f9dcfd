"""Go through all items of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from asyncfeed.cache.session import Session
from asyncfeed.cache.store import Store
from asyncfeed.units import MIB

__all__ = ["Items"]

BATCH_NBYTES = 16 * MIB
"""Of items that are read at a time."""

Pair = tuple[str, NDArray[Any]]


class Items:
    """Every id and its item. A class, as a generator that is left early wants to be closed (trio says so aloud)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._batches: Iterator[list[str]] | None = None
        self._pairs: Iterator[Pair] = iter(())

    def __aiter__(self) -> Items:
        return self

    async def __anext__(self) -> Pair:
        if self._batches is None:
            self._batches = iter(await self._session.call("items", _batches))
        while (pair := next(self._pairs, None)) is None:
            uids = next(self._batches, None)
            if uids is None:
                raise StopAsyncIteration
            arrays = await self._session.call("items", Store.read_many, uids)
            self._pairs = iter(zip(uids, arrays, strict=True))
        await self._session.breathe()
        return pair


def _batches(store: Store) -> list[list[str]]:
    """All ids at once: another store may have taken the place of this one when the next batch is due."""
    return list(store.in_batches(BATCH_NBYTES))
