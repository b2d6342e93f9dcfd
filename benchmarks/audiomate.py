"""What the drop-in for audiomate's loaders reaches, against audiomate's own algorithms.

python benchmarks/audiomate.py                  # all rows; about a minute
python benchmarks/audiomate.py --data DIR       # keep the files (about 1 GB) for the next time
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import h5py
import numpy as np
from feed import Slice, exhaust, feature_file, large
from figures import Figure, arguments_of, in_turn, run, seconds

from asyncfeed.compat.audiomate import PartitioningContainerLoader, PartitioningFeatureIterator

SEED = 7


class Scanning:
    """audiomate's feature iterator where one partition holds everything: a permutation, and for each frame a scan over
    the utterances from the first on."""

    def __init__(self, file: h5py.File) -> None:
        keys = list(file)
        np.random.RandomState(SEED).shuffle(keys)
        self.slices = [Slice(key, file[key][:]) for key in keys]
        self.order = np.random.RandomState(SEED).permutation(sum(each.length for each in self.slices))
        self.done = 0

    def __iter__(self) -> Scanning:
        return self

    def __next__(self) -> tuple[str, int, np.ndarray]:
        if self.done == len(self.order):
            raise StopIteration
        index = self.order[self.done]
        for each in self.slices:
            if index >= each.length:
                index -= each.length
                continue
            self.done += 1
            return each.key, index, each.rows[index]
        raise AssertionError


def feature_iterator(data: Path) -> Iterator[Figure]:
    """feature-iterator: frames shuffled, 1,000 utterances in a partition; both give the same, and both load it first."""
    with h5py.File(feature_file(data / "thousand.h5", 1000, 300, 80)) as file:
        sample = 20_000
        pairs = zip(PartitioningFeatureIterator(file, "1g", seed=SEED), islice(Scanning(file), sample), strict=False)
        assert all(ours[:2] == theirs[:2] and (ours[2] == theirs[2]).all() for ours, theirs in pairs)
        frames = sum(len(each) for each in file.values())

        def ours() -> float:
            return seconds(lambda: exhaust(PartitioningFeatureIterator(file, "1g", seed=SEED))) / frames

        def theirs() -> float:
            loaded = time.perf_counter()
            scanning = Scanning(file)
            loading = time.perf_counter() - loaded
            return loading / frames + seconds(lambda: exhaust(islice(scanning, sample))) / sample

        rounds = in_turn(ours, theirs, rounds=5, warm=1)
    cost = statistics.median(mine for mine, _ in rounds) * 1e6
    what = (
        "PartitioningFeatureIterator against audiomate's algorithm, 1,000 utterances a partition, same frames in order"
    )
    yield Figure("feature-iterator", what, ">= 20", [other / mine for mine, other in rounds], f"{cost:.2f} us a frame")


def container_loader(data: Path) -> Iterator[Figure]:
    """container-loader: all partitions of an epoch, one after the other; open for reading, and as audiomate opens it."""
    for mode in ("r", "a"):
        with h5py.File(large(data), mode) as file:
            yield _container_loader(file, mode)


def _container_loader(file: h5py.File, mode: str) -> Figure:
    loader = PartitioningContainerLoader(list(file), file, "128m", seed=SEED)

    def ours() -> None:
        for index in range(len(loader.partitions)):
            loader.load_partition_data(index)

    def theirs() -> None:
        for info in loader.partitions:
            _ = [file[utt][:] for utt in info.utt_ids]

    rounds = in_turn(lambda: seconds(ours), lambda: seconds(theirs), rounds=5)
    rate = sum(info.size for info in loader.partitions) / statistics.median(mine for mine, _ in rounds) / 1e9
    what = f"load_partition_data against [f[u][:] for u in ids], open with mode={mode!r}"
    return Figure(
        f"container-loader-{mode}", what, ">= 2", [other / mine for mine, other in rounds], f"{rate:.1f} GB/s"
    )


ROWS = (feature_iterator, container_loader)


def main() -> None:
    arguments = arguments_of(__doc__, ROWS).parse_args()
    run(ROWS, arguments.rows, arguments.data)


if __name__ == "__main__":
    main()
