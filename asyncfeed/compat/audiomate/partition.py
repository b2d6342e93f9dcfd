"""Chunks of frames in what is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncfeed.compat.audiomate.loader import PartitionData
from asyncfeed.errors import ArgumentError
from asyncfeed.planning.audiomate import Seed, shuffled

__all__ = ["Chunk", "Chunks", "MultiFramePartitionData", "Region", "check_frames_per_chunk"]

Region: TypeAlias = tuple[int, int, Sequence[Any]]
"""The number of an utterance's first chunk, how many it has, and its data in every container."""

Chunk: TypeAlias = list[Any]
"""An array for each container, and perhaps the number of frames that are real."""


class Chunks:
    """Utterances, one after the other, in chunks of some frames; the last chunk of each may be shorter.

    Args:
        utterances: ids, and the data in every container: arrays, or datasets, which are read chunk by chunk.
        frames_per_chunk: frames of a chunk.
        return_length: whether a chunk ends with the number of its frames.
        pad: whether shorter chunks are filled up with zeros.

    Raises:
        ArgumentError: the containers disagree about the length of an utterance.
    """

    def __init__(
        self, utterances: Iterable[tuple[str, Sequence[Any]]], frames_per_chunk: int, *, return_length: bool, pad: bool
    ) -> None:
        self.frames_per_chunk, self.return_length, self.pad = frames_per_chunk, return_length, pad
        self.regions: list[Region] = []
        self.count = 0
        """Chunks of all utterances."""
        all_lengths = []
        for utt, parts in utterances:
            lengths = [part.shape[0] for part in parts]
            if len(set(lengths)) != 1:
                raise ArgumentError(
                    f"utterance {utt!r} has {' and '.join(map(str, lengths))} frames in the containers; give it one frame in "
                    f"each for every frame in the others, or leave it out"
                )
            num_chunks = -(-lengths[0] // frames_per_chunk)
            self.regions.append((self.count, num_chunks, parts))
            self.count += num_chunks
            all_lengths.append(lengths[0])
        self.offsets = [first for first, _, _ in self.regions]
        self._lengths = np.array(all_lengths, np.int64)

    def __getitem__(self, number: int) -> Chunk:
        """A chunk, copied, as float32."""
        first, _, parts = self.regions[bisect_right(self.offsets, number) - 1]
        start = (number - first) * self.frames_per_chunk
        chunk: Chunk = [part[start : start + self.frames_per_chunk].astype(np.float32) for part in parts]
        length = len(chunk[0])
        if self.pad and length < self.frames_per_chunk:
            chunk = [self._padded(frames) for frames in chunk]
        if self.return_length:
            chunk.append(length)
        return chunk

    def many(self, numbers: Sequence[int], joined: Sequence[NDArray[Any]]) -> list[Chunk]:
        """Several chunks, gathered from ``joined``: for each container all frames of all utterances. Copies, as float32."""
        wanted, offsets = np.asarray(numbers, np.int64), np.array(self.offsets, np.int64)
        owners = np.searchsorted(offsets, wanted, side="right") - 1
        starts = (wanted - offsets[owners]) * self.frames_per_chunk
        lengths = np.minimum(self._lengths[owners] - starts, self.frames_per_chunk)
        rows = (np.cumsum(self._lengths) - self._lengths)[owners] + starts
        places = rows[:, None] + np.arange(self.frames_per_chunk)
        columns: list[Any] = [self._gathered(frames, places, lengths) for frames in joined]
        if self.return_length:
            columns.append(lengths.tolist())
        return list(map(list, zip(*columns, strict=True)))

    def _gathered(
        self, frames: NDArray[Any], places: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> Iterable[NDArray[np.float32]]:
        """Chunks of one container; beyond the ``lengths`` of an utterance other frames lie, which are none of theirs."""
        block = frames.take(places, axis=0, mode="clip").astype(np.float32, copy=False)
        short: list[int] = np.flatnonzero(lengths < self.frames_per_chunk).tolist()
        chunks: list[NDArray[np.float32]] = list(block)
        for k in short:
            if self.pad:
                chunks[k][lengths[k] :] = 0
            else:
                chunks[k] = chunks[k][: lengths[k]]
        return chunks

    def _padded(self, frames: NDArray[np.float32]) -> NDArray[np.float32]:
        padded = np.zeros((self.frames_per_chunk, *frames.shape[1:]), np.float32)
        padded[: len(frames)] = frames
        return padded


class MultiFramePartitionData:
    """The chunks of a loaded partition, by their number in a shuffled order, or in order.

    Args:
        partition_data: what `PartitioningContainerLoader.load_partition_data` gave.
        frames_per_chunk: frames of a chunk; the last of an utterance may be shorter.
        return_length: whether a chunk ends with the number of its frames.
        pad: fill up shorter chunks with zeros; their real length is returned then, too.
        shuffle: chunks in random order.
        seed: of that order.

    Raises:
        ArgumentError: ``frames_per_chunk`` is less than 1, or containers disagree about the length of an utterance.
    """

    def __init__(
        self,
        partition_data: PartitionData,
        frames_per_chunk: int,
        return_length: bool = False,
        pad: bool = False,
        shuffle: bool = True,
        seed: Seed = None,
    ) -> None:
        check_frames_per_chunk(frames_per_chunk)
        self.data = partition_data
        self.frames_per_chunk = frames_per_chunk
        self.pad = pad
        self.return_length = return_length or pad
        self.shuffle = shuffle
        self.regions = self.get_utt_regions()
        self.region_offsets = self._chunks.offsets
        count = self._chunks.count
        self.sampling: Sequence[int] = shuffled(count, seed) if shuffle else range(count)

    def __len__(self) -> int:
        return self._chunks.count

    def __getitem__(self, item: int) -> Chunk:
        """A list with the frames in every container, copied, as float32."""
        return self._chunks[self.sampling[item]]

    def block(self, start: int, size: int) -> list[Chunk]:
        """Up to ``size`` chunks from the number ``start`` on: what they are one by one, but faster."""
        numbers = self.sampling[start : start + size]
        joined = [frames for frames in self.data.joined if frames is not None]
        if joined and len(joined) == len(self.data.joined):
            return self._chunks.many(numbers, joined)
        return [self._chunks[number] for number in numbers]

    def get_utt_regions(self) -> list[Region]:
        """For every utterance the number of its first chunk, how many it has, and its data."""
        utterances = zip(self.data.info.utt_ids, self.data.utt_data, strict=True)
        self._chunks = Chunks(utterances, self.frames_per_chunk, return_length=self.return_length, pad=self.pad)
        return self._chunks.regions


def check_frames_per_chunk(frames_per_chunk: int) -> None:
    """Raise `ArgumentError` if chunks would have no frames."""
    if frames_per_chunk < 1:
        raise ArgumentError(f"frames_per_chunk={frames_per_chunk} makes no sense; give at least 1")
