"""``asyncfeed demo``: make a small feature file, stream it twice, tell what happened."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
import h5py
import numpy as np

from asyncfeed.engine.loaded import Array
from asyncfeed.engine.statistics import Statistics
from asyncfeed.feed import Feed
from asyncfeed.planning.plan import Plan

__all__ = ["BUDGET", "DIM", "EpochSeen", "Story", "demonstrate", "make_features"]

NUM_UTTERANCES, MEAN_LENGTH, DIM = 120, 400, 80

BUDGET = "8m"
"""About half of what the file holds, so that there is something to read ahead."""

NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class EpochSeen:
    """What one pass of ``async for utt, index, frame in feed`` gave."""

    epoch: int
    plan: Plan
    frames: int
    distinct: int
    """Frames that differ in utterance or index: all of them, unless one came twice."""
    wrong: int
    """Frames that are not what h5py reads at that place."""
    first: tuple[tuple[str, int], ...]
    """Utterance and index of the frames that came first."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Story:
    """What the demonstration did."""

    name: str
    nbytes: int
    epochs: tuple[EpochSeen, ...]
    statistics: Statistics


def demonstrate(num_epochs: int = 2) -> Story:
    """Make a feature file in a temporary directory, stream it on an event loop, and take the directory away again."""
    with tempfile.TemporaryDirectory(prefix="asyncfeed-demo-") as directory:
        path = make_features(Path(directory, "features.h5"))
        nbytes = path.stat().st_size
        epochs, statistics = anyio.run(_stream, path, num_epochs)
    return Story(path.name, nbytes, epochs, statistics)


def make_features(path: Path) -> Path:
    """Write random utterances of varying lengths, shaped like log-mel features: one dataset each."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number, length in enumerate(rng.integers(MEAN_LENGTH // 2, MEAN_LENGTH * 3 // 2, NUM_UTTERANCES).tolist()):
            file[f"speaker{number % 6}-{number:03d}"] = rng.standard_normal((length, DIM), np.float32)
    return path


async def _stream(path: Path, num_epochs: int) -> tuple[tuple[EpochSeen, ...], Statistics]:
    with h5py.File(path, "r") as file:
        wanted = {utt: dataset[:] for utt, dataset in file.items()}
    async with Feed(path, memory_budget=BUDGET, rank=0, world_size=1, index="off") as feed:
        epochs = [await _stream_epoch(feed, wanted) for _ in range(num_epochs)]
        return tuple(epochs), feed.statistics()


async def _stream_epoch(feed: Feed, wanted: dict[str, Array]) -> EpochSeen:
    number, plan = feed.epoch, feed.plan
    seen: list[tuple[str, int]] = []
    wrong, began = 0, time.perf_counter()
    async for utt, index, frame in feed:
        seen.append((utt, index))
        wrong += not np.array_equal(frame, wanted[utt][index])
    seconds = time.perf_counter() - began
    return EpochSeen(number, plan, len(seen), len(set(seen)), wrong, tuple(seen[:NUM_SHOWN]), seconds)
