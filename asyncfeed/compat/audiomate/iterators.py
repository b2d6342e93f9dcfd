"""Iterators over chunks of frames, and over frames, of several containers side by side."""

from __future__ import annotations

import random
from collections.abc import Iterator

from asyncfeed.compat.audiomate.arguments import Containers, Utterances, containers_of, utt_ids_of
from asyncfeed.compat.audiomate.loader import PartitioningContainerLoader
from asyncfeed.compat.audiomate.partition import Chunk, MultiFramePartitionData
from asyncfeed.planning.audiomate import Seed

__all__ = ["DataIterator", "FrameIterator", "MultiFrameIterator"]

BLOCK_FRAMES = 1024
"""How many frames are copied at a time; who keeps one keeps all of them."""


class DataIterator(Iterator[Chunk]):
    """What the iterators have in common; one of your own defines ``__next__``.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids.
        feature_containers: one container or several, open.
        shuffle: in random order, or sorted by id.
        seed: of that order; None for another one every time.

    Raises:
        ArgumentError: there is no container.
    """

    def __init__(
        self,
        corpus_or_utt_ids: Utterances,
        feature_containers: Containers,
        shuffle: bool = True,
        seed: Seed = None,
    ) -> None:
        self.utt_ids = utt_ids_of(corpus_or_utt_ids)
        self.containers = containers_of(feature_containers)
        self.shuffle = shuffle
        self.rand = random.Random(seed)  # noqa: S311 - its order is the one to reproduce

    def __iter__(self) -> DataIterator:
        raise NotImplementedError

    def __next__(self) -> Chunk:
        raise NotImplementedError


class MultiFrameIterator(DataIterator):
    """An iterator over chunks of consecutive frames: a list with an array of every container.

    Every ``for`` loop over it is another epoch; the order of each depends on how many there were before.
    Arrays are copies, made some 1,024 frames at a time, and float32, whatever the containers hold.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids.
        container: one container or several, open; all with as many frames for an utterance.
        partition_size: what is in memory at a time: bytes, or a number with ``k``, ``m`` or ``g``. The partition that is
            read ahead comes on top.
        frames_per_chunk: frames of a chunk; the last one of an utterance may be shorter.
        return_length: whether a chunk ends with the number of its frames.
        pad: fill up shorter chunks with zeros; their real length is returned then, too.
        shuffle: utterances, and the chunks of each partition, in random order; or sorted by id.
        seed: of that order; None for another one every time.

    Raises:
        ArgumentError: see `PartitioningContainerLoader`; and when a partition comes up whose utterances differ in length
            between the containers, or if ``frames_per_chunk`` is less than 1.
    """

    def __init__(
        self,
        corpus_or_utt_ids: Utterances,
        container: Containers,
        partition_size: str | int,
        frames_per_chunk: int,
        return_length: bool = False,
        pad: bool = False,
        shuffle: bool = True,
        seed: Seed = None,
    ) -> None:
        super().__init__(corpus_or_utt_ids, container, shuffle=shuffle, seed=seed)
        self.partition_size = partition_size
        self.frames_per_chunk = frames_per_chunk
        self.pad = pad
        self.return_length = return_length or pad
        self.loader = PartitioningContainerLoader(
            self.utt_ids, self.containers, partition_size, shuffle=shuffle, seed=self.rand.random()
        )
        self._rewind()

    def _rewind(self) -> None:
        self.current_partition: MultiFramePartitionData | None = None
        self.current_partition_index = -1
        self.current_chunk_index = 0
        self._ready: list[Chunk] = []

    def __iter__(self) -> MultiFrameIterator:
        """Begin another epoch."""
        self._rewind()
        self.loader.reload()
        return self

    def __next__(self) -> Chunk:
        """The next chunk, a copy."""
        while not self._ready:
            self._make_ready()
        self.current_chunk_index += 1
        return self._ready.pop()

    def _make_ready(self) -> None:
        if self.current_partition is None or self.current_chunk_index >= len(self.current_partition):
            self._load_next()
        else:
            size = max(BLOCK_FRAMES // self.frames_per_chunk, 1)
            self._ready = self.current_partition.block(self.current_chunk_index, size)[::-1]

    def _load_next(self) -> None:
        self.current_partition, self.current_chunk_index = None, 0  # let go of the memory before more is asked for
        self.current_partition_index += 1
        if self.current_partition_index >= len(self.loader.partitions):
            raise StopIteration
        self.current_partition = MultiFramePartitionData(
            self.loader.load_partition_data(self.current_partition_index),
            self.frames_per_chunk,
            return_length=self.return_length,
            pad=self.pad,
            shuffle=self.shuffle,
            seed=self.rand.random(),
        )


class FrameIterator(MultiFrameIterator):
    """An iterator over single frames: a list with a frame of every container, copied, as float32.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids.
        container: one container or several, open; all with as many frames for an utterance.
        partition_size: what is in memory at a time, as for `MultiFrameIterator`.
        shuffle: utterances, and the frames of each partition, in random order; or sorted by id.
        seed: of that order; None for another one every time.
    """

    def __init__(
        self,
        corpus_or_utt_ids: Utterances,
        container: Containers,
        partition_size: str | int,
        shuffle: bool = True,
        seed: Seed = None,
    ) -> None:
        super().__init__(corpus_or_utt_ids, container, partition_size, 1, shuffle=shuffle, seed=seed)

    def __next__(self) -> Chunk:
        """The next frame, a copy."""
        return [frames[0] for frames in super().__next__()]
