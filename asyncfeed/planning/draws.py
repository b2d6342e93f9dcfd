"""Random draws, each with a key of its own."""

from __future__ import annotations

import enum

import numpy as np

__all__ = ["Purpose", "generator"]


class Purpose(enum.IntEnum):
    """What a random stream decides. The numbers are part of the order that a seed stands for: never reuse one."""

    UTTERANCES = 1
    """The order of the utterances over an epoch."""
    FRAMES = 2
    """The order of frames, or windows, within a partition."""
    BLOCKS = 3
    """The order of blocks of neighbouring utterances."""
    RESIDENT = 4
    """The order of the utterances within a partition, where several blocks are in it."""
    WEIGHTS = 5
    """Which utterances are drawn, where they have weights."""
    BATCHES = 6
    """The order of batches of whole utterances."""


def generator(seed: int, epoch: int, purpose: Purpose, partition: int = 0) -> np.random.Generator:
    """A random stream that depends on its four arguments alone.

    Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed through numpy's
    SeedSequence, so that neighbouring keys give unrelated streams on every platform.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, int(purpose), partition))))
