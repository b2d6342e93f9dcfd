"""Utterances, chunks and frames by number. What is asked for is read at once, through the containers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import h5py
import numpy as np

from asyncfeed.compat.audiomate.arguments import (
    AnyContainer,
    Containers,
    Utterances,
    containers_of,
    file_of,
    utt_ids_of,
)
from asyncfeed.compat.audiomate.iterators import FrameIterator, MultiFrameIterator
from asyncfeed.compat.audiomate.partition import Chunk, Chunks, Region, check_frames_per_chunk
from asyncfeed.errors import ArgumentError
from asyncfeed.planning.audiomate import Seed

__all__ = ["Dataset", "FrameDataset", "MultiFrameDataset", "Processor", "UtteranceDataset"]


class Processor(Protocol):
    """A processor of audiomate's: something done to features when they are read."""

    def process_frames(self, data: Any, sampling_rate: int, offset: int = 0, last: bool = False) -> Any:
        """The features made of these."""


class Dataset:
    """What the datasets have in common; one of your own defines ``__len__`` and ``__getitem__``.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids; sorted here.
        feature_containers: one container or several, open.

    Raises:
        ArgumentError: there is no container, or one is not open or lacks an utterance.
    """

    def __init__(self, corpus_or_utt_ids: Utterances, feature_containers: Containers) -> None:
        self.utt_ids: list[str] = sorted(utt_ids_of(corpus_or_utt_ids))
        self.containers = containers_of(feature_containers)
        for container in self.containers:
            if not self.container_has_utterances(container, self.utt_ids):
                path = getattr(container, "path", None) or file_of(container).file.filename
                raise ArgumentError(f"the container {path!r} lacks utterances; add them, or leave them out of the ids")

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, item: int) -> list[Any]:
        raise NotImplementedError

    @staticmethod
    def container_has_utterances(container: AnyContainer, keys: Iterable[str]) -> bool:
        """Whether a container has all these utterances."""
        return set(file_of(container).keys()).issuperset(keys)


class UtteranceDataset(Dataset):
    """Whole utterances: a list with the array of every container, each followed by its length, if that is wanted.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids.
        source_containers: one container or several, open.
        return_length: whether lengths are returned.
        pad: fill up with zeros to the length of the longest utterance in that container; lengths are returned then, too.
        transform: a processor for each container, None for those whose data are taken as they are.

    Raises:
        ArgumentError: as for `Dataset`; and if there are not as many transforms as containers, or a container that is to
            be transformed has no sampling rate.
    """

    def __init__(
        self,
        corpus_or_utt_ids: Utterances,
        source_containers: Containers,
        return_length: bool = True,
        pad: bool = False,
        transform: Processor | Sequence[Processor | None] | None = None,
    ) -> None:
        super().__init__(corpus_or_utt_ids, source_containers)
        self.pad = pad
        self.return_length = return_length or pad
        self.transform = self._transforms(transform)
        self.pad_lengths = self.longest_utterances_per_container()

    def __len__(self) -> int:
        return len(self.utt_ids)

    def __getitem__(self, item: int) -> list[Any]:
        """An utterance: a list of arrays of its own, and lengths."""
        utt, sample = self.utt_ids[item], []
        for number, container in enumerate(self.containers):
            data = file_of(container)[utt][()]
            transform = self.transform[number] if self.transform else None
            if transform is not None:
                data = transform.process_frames(data, container.sampling_rate, offset=0, last=True)
            length, missing = data.shape[0], self.pad_lengths[number] - data.shape[0]
            if self.pad and missing > 0:
                data = np.pad(data, [(0, missing), *[(0, 0)] * (data.ndim - 1)])
            sample += [data, length] if self.return_length else [data]
        return sample

    def longest_utterances_per_container(self) -> list[int]:
        """The length of the longest utterance in every container."""
        files = map(file_of, self.containers)
        return [max((file[utt].shape[0] for utt in self.utt_ids), default=0) for file in files]

    def _transforms(self, given: Any) -> Sequence[Processor | None]:
        if given is None:
            return []
        transforms: Sequence[Any] = [given] if hasattr(given, "process_frames") else given
        if len(transforms) != len(self.containers):
            raise ArgumentError(
                f"there are {len(transforms)} transforms for {len(self.containers)} containers; give one for each, "
                f"None where there is nothing to do"
            )
        for number, (transform, container) in enumerate(zip(transforms, self.containers, strict=True)):
            if transform is not None and not hasattr(type(container), "sampling_rate"):
                raise ArgumentError(
                    f"transform {number} is for a container that has no sampling rate; only those of features do"
                )
        return transforms


class MultiFrameDataset(Dataset):
    """Chunks of consecutive frames of one utterance: a list with an array of every container, copied, as float32.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids.
        container: one container or several, open; all with as many frames for an utterance.
        frames_per_chunk: frames of a chunk; the last one of an utterance may be shorter.
        return_length: whether a chunk ends with the number of its frames.
        pad: fill up shorter chunks with zeros; their real length is returned then, too.

    Raises:
        ArgumentError: as for `Dataset`; and if ``frames_per_chunk`` is less than 1, or the containers disagree about the
            length of an utterance.
    """

    def __init__(
        self,
        corpus_or_utt_ids: Utterances,
        container: Containers,
        frames_per_chunk: int,
        return_length: bool = False,
        pad: bool = False,
    ) -> None:
        super().__init__(corpus_or_utt_ids, container)
        check_frames_per_chunk(frames_per_chunk)
        self.frames_per_chunk = frames_per_chunk
        self.pad = pad
        self.return_length = return_length or pad
        self.regions = self.get_utt_regions()
        self.region_offsets = self._chunks.offsets

    def __len__(self) -> int:
        return self._chunks.count

    def __getitem__(self, item: int) -> Chunk:
        """A chunk, copied. Counts from the end below zero; there is none beyond it."""
        return self._chunks[range(self._chunks.count)[item]]

    def partitioned_iterator(
        self, partition_size: str | int, shuffle: bool = True, seed: Seed = None
    ) -> MultiFrameIterator:
        """An iterator over the same chunks that reads ahead, partition by partition."""
        return MultiFrameIterator(
            self.utt_ids,
            self.containers,
            partition_size,
            self.frames_per_chunk,
            return_length=self.return_length,
            pad=self.pad,
            shuffle=shuffle,
            seed=seed,
        )

    def get_utt_regions(self) -> list[Region]:
        """For every utterance the number of its first chunk, how many it has, and its datasets."""
        files: list[h5py.Group] = [file_of(container) for container in self.containers]
        utterances = ((utt, [file[utt] for file in files]) for utt in self.utt_ids)
        self._chunks = Chunks(utterances, self.frames_per_chunk, return_length=self.return_length, pad=self.pad)
        return self._chunks.regions


class FrameDataset(MultiFrameDataset):
    """Single frames: a list with a frame of every container, copied, as float32.

    Args:
        corpus_or_utt_ids: a corpus, all of whose utterances are meant, or a list of ids.
        container: one container or several, open; all with as many frames for an utterance.
    """

    def __init__(self, corpus_or_utt_ids: Utterances, container: Containers) -> None:
        super().__init__(corpus_or_utt_ids, container, 1)

    def __getitem__(self, item: int) -> Chunk:
        """A frame, copied. Counts from the end below zero; there is none beyond it."""
        return [frames[0] for frames in super().__getitem__(item)]

    def partitioned_iterator(self, partition_size: str | int, shuffle: bool = True, seed: Seed = None) -> FrameIterator:
        """An iterator over the same frames that reads ahead, partition by partition."""
        return FrameIterator(self.utt_ids, self.containers, partition_size, shuffle=shuffle, seed=seed)
