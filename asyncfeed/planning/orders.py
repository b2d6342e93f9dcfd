"""In which order an epoch goes through the utterances."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncfeed.errors import ArgumentError
from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.draws import Purpose, generator
from asyncfeed.units import MIB

__all__ = ["BLOCK_NBYTES", "Kind", "Order", "Shuffle"]

Kind = Literal["file", "utterance", "block", "interleave", "own", "weighted"]
Shuffle: TypeAlias = 'bool | Literal["utterance", "block", "interleave"] | Sequence[str] | Mapping[str, float]'

BLOCK_NBYTES = MIB
"""Of a block: large enough that disks read it as fast as they can, and small enough that many fit into a partition."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of utterances, for every seed and epoch."""

    kind: Kind
    block_nbytes: int = BLOCK_NBYTES
    ids: tuple[str, ...] = ()
    """With ``"own"``: the utterances, in order; with ``"weighted"``: those that have a weight."""
    weights: tuple[float, ...] = ()
    digest: str = field(init=False)
    """Of the two."""

    def __post_init__(self) -> None:
        text = repr((self.ids, self.weights)).encode(errors="surrogateescape")
        object.__setattr__(self, "digest", hashlib.blake2b(text, digest_size=8).hexdigest())

    @classmethod
    def of(cls, shuffle: Any, block_nbytes: int = BLOCK_NBYTES) -> Order:
        """What the argument ``shuffle`` of a feed means.

        Raises:
            ArgumentError: nothing.
        """
        if isinstance(shuffle, bool):
            return cls("utterance" if shuffle else "file", block_nbytes)
        if isinstance(shuffle, str):
            if shuffle in ("utterance", "block", "interleave"):
                return cls(shuffle, block_nbytes)  # type: ignore[arg-type]
        elif isinstance(shuffle, Mapping):
            return cls("weighted", block_nbytes, *_checked_weights(shuffle))
        elif (
            isinstance(shuffle, Sequence)
            and not isinstance(shuffle, bytes)
            and all(isinstance(u, str) for u in shuffle)
        ):
            return cls("own", block_nbytes, tuple(shuffle))
        raise ArgumentError(
            f"shuffle={shuffle!r} must be False, True or 'utterance', 'block', 'interleave', a sequence of utterance ids, "
            f"or a mapping of ids to weights"
        )

    @property
    def shuffles(self) -> bool:
        """Whether the units of a partition come in random order."""
        return self.kind not in ("file", "own")

    def most_times(self, num_utterances: int) -> int:
        """How often an utterance may come in an epoch at most."""
        if self.kind == "weighted":
            return num_utterances
        return max(Counter(self.ids).values(), default=1) if self.kind == "own" else 1

    def describe(self) -> Any:
        """As plain values, small: for comparing with a saved state."""
        if self.kind in ("own", "weighted"):
            return [self.kind, len(self.ids), self.digest]
        return [self.kind, self.block_nbytes] if self.kind in ("block", "interleave") else self.kind

    def rows(self, corpus: Corpus, *, seed: int, epoch: int) -> Integers:
        """The utterances of an epoch, in the order that all ranks agree on, as rows of the corpus."""
        rows = np.arange(len(corpus), dtype=np.int64)
        if self.kind in ("block", "interleave"):
            return self._blocks(corpus, generator(seed, epoch, Purpose.BLOCKS))
        if self.kind == "utterance":
            generator(seed, epoch, Purpose.UTTERANCES).shuffle(rows)
        elif self.kind == "own":
            return self._named(corpus)
        elif self.kind == "weighted":
            return self._named(corpus)[self._drawn(generator(seed, epoch, Purpose.WEIGHTS), rows.size)]
        return rows

    def _named(self, corpus: Corpus) -> Integers:
        """Raises `ArgumentError` if there is no utterance of an id."""
        rows = corpus.find(self.ids)
        unknown = np.flatnonzero(rows < 0)
        if unknown.size:
            raise ArgumentError(
                f"shuffle= names {unknown.size} utterances that are not there, such as {self.ids[unknown[0]]!r}; leave them out"
            )
        return rows

    def _drawn(self, draws: np.random.Generator, count: int) -> Integers:
        """Numbers of ids, drawn by their weights: like ``draws.choice``, in a third of the time."""
        total = np.cumsum(self.weights)
        drawn = draws.random(count) * total[-1]
        rising = np.argsort(drawn)
        last = np.searchsorted(total, total[-1])  # what was rounded up to the total is this one, too
        numbers: Integers = np.empty(count, np.int64)
        numbers[rising] = np.minimum(np.searchsorted(total, drawn[rising], side="right"), last)
        return numbers

    def _blocks(self, corpus: Corpus, draws: np.random.Generator) -> Integers:
        """Neighbours in the file stay together, in blocks of about ``block_nbytes``; the blocks come in random order."""
        stored = in_storage_order(corpus)
        nbytes = corpus.nbytes[stored]
        block = (np.cumsum(nbytes) - nbytes) // self.block_nbytes
        edges = np.flatnonzero(np.diff(block, prepend=-1, append=-1))
        starts, sizes = edges[:-1], np.diff(edges)
        order = draws.permutation(starts.size)
        ends = np.cumsum(sizes[order])
        within = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - sizes[order], sizes[order])
        rows: Integers = stored[np.repeat(starts[order], sizes[order]) + within]
        return rows


def in_storage_order(corpus: Corpus) -> Integers:
    """The rows of a corpus in the order in which the bytes of its first field lie in its files."""
    first = corpus.catalogs[0]
    return np.lexsort((np.arange(len(corpus)), first.offset, first.file)).astype(np.int64)


def _checked_weights(weights: Mapping[Any, Any]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    ids, values = tuple(weights), tuple(map(float, weights.values()))
    if not all(isinstance(utt, str) for utt in ids) or not ids:
        raise ArgumentError("shuffle= as weights must map utterance ids to numbers, and at least one")
    if not all(v >= 0 for v in values) or not 0 < sum(values) < np.inf:
        raise ArgumentError("weights in shuffle= must be finite, also all together, not negative, and not all zero")
    return ids, values
