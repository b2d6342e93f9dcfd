"""What `Feed` reaches: every figure is a ratio of two things measured in turn, in one run, on one machine.

python benchmarks/feed.py                  # all rows; about five minutes
python benchmarks/feed.py gil tiny         # rows whose name begins so
python benchmarks/feed.py --data DIR       # keep the files (about 2 GB) for the next time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path

import h5py
import numpy as np
from figures import ROUNDS, Clock, Figure, arguments_of, feature_file, in_turn, run, seconds
from h5py import h5s, h5t

from asyncfeed import Feed


def exhaust(items: Iterable[object]) -> None:
    """A loop that does nothing with what it gets."""
    for _ in items:
        pass


async def exhaust_async(items: object) -> None:
    """The same, asynchronously."""
    async for _ in items:  # type: ignore[attr-defined]
        pass


def aligned(nbytes: int) -> mmap.mmap:
    """Memory that begins at a page: some processors copy into other places at a third of the speed."""
    return mmap.mmap(-1, nbytes)


# -- data ----------------------------------------------------------------------------------------------------------


def large(data: Path) -> Path:
    """2,000 utterances of about 380 KB: 0.76 GB."""
    return feature_file(data / "large.h5", 2000, 1190, 80)


def medium(data: Path) -> Path:
    """600 utterances: 0.23 GB."""
    return feature_file(data / "medium.h5", 600, 1190, 80)


def tiny(data: Path) -> Path:
    """100,000 utterances of about 1 KB."""
    return feature_file(data / "tiny.h5", 100_000, 20, 13)


def gzipped(data: Path) -> Path:
    """20,000 compressed utterances of about 16 KB."""
    return feature_file(data / "gzip.h5", 20_000, 50, 80, compression="gzip", compression_opts=1)


# -- what people write by hand ---------------------------------------------------------------------------------------


class HandWritten:
    """The best loop that we know how to write over h5py: a partition at a time into one reused buffer.

    ``DatasetID.read`` is h5py's fastest way to read; frames are shuffled with a permutation per partition.
    """

    def __init__(self, path: Path, partition_nbytes: int, *, shuffle: bool) -> None:
        self.path, self.shuffle = path, shuffle
        self.rng = np.random.default_rng(0)
        with h5py.File(path) as file:
            self.keys = list(file)
            self.lengths = {key: file[key].shape[0] for key in self.keys}
            self.dim = file[self.keys[0]].shape[1]
        num_rows = partition_nbytes // (4 * self.dim)
        self.rows = np.frombuffer(aligned(partition_nbytes), "f4")[: num_rows * self.dim].reshape(num_rows, self.dim)

    def partitions(self) -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
        keys = list(self.keys)
        if self.shuffle:
            self.rng.shuffle(keys)
        memory_type = h5t.py_create(self.rows.dtype)
        with h5py.File(self.path) as file:
            part, filled = [], 0
            for key in keys:
                length = self.lengths[key]
                if filled + length > len(self.rows):
                    yield self.loaded(part, filled)
                    part, filled = [], 0
                file[key].id.read(h5s.ALL, h5s.ALL, self.rows[filled : filled + length], memory_type)
                part.append(key)
                filled += length
            yield self.loaded(part, filled)

    def loaded(self, keys: list[str], filled: int) -> tuple[list[str], np.ndarray, np.ndarray]:
        order = self.rng.permutation(filled) if self.shuffle else np.arange(filled)
        return keys, np.array([self.lengths[key] for key in keys]), order

    def triplets(self) -> Iterator[tuple[str, int, np.ndarray]]:
        for keys, lengths, order in self.partitions():
            owners = np.repeat(np.arange(len(keys)), lengths)[order]
            names = np.array(keys, object)[owners].tolist()
            indices = (order - (np.cumsum(lengths) - lengths)[owners]).tolist()
            yield from zip(names, indices, map(self.rows.__getitem__, order.tolist()), strict=True)

    def batches(self, size: int) -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
        for keys, lengths, order in self.partitions():
            all_owners = np.repeat(np.arange(len(keys)), lengths)
            first, names = np.cumsum(lengths) - lengths, np.array(keys, object)
            for start in range(0, len(order), size):
                rows = order[start : start + size]
                owners = all_owners[rows]
                yield names[owners].tolist(), rows - first[owners], np.take(self.rows, rows, axis=0)


def h5py_loop(path: Path) -> None:
    """What the h5py documentation suggests."""
    with h5py.File(path) as file:
        for key in file:
            file[key][:]


def preadv_sequential(path: Path, nbytes: int) -> Clock:
    """The limit: the same number of bytes, in order, into one reused buffer."""
    buffer, fd = aligned(1 << 26), os.open(path, os.O_RDONLY)

    def read() -> None:
        position = 0
        while position < nbytes:
            position += os.preadv(fd, [buffer], position)

    return lambda: seconds(read)


def preadv_per_utterance(path: Path) -> Clock:
    """The limit for random order: one call per utterance, into a reused arena of 256 MiB."""
    arena, fd = memoryview(aligned(1 << 28)), os.open(path, os.O_RDONLY)
    with h5py.File(path) as file:
        places = [(file[key].id.get_offset(), file[key].nbytes) for key in file]
    np.random.default_rng(0).shuffle(places)

    def read() -> None:
        position = 0
        for offset, nbytes in places:
            if position + nbytes > len(arena):
                position = 0
            os.preadv(fd, [arena[position : position + nbytes]], offset)
            position += nbytes

    return lambda: seconds(read)


# -- the rows ----------------------------------------------------------------------------------------------------------


def triplets_async(data: Path) -> Iterator[Figure]:
    """async-shuffled, async-ordered: what a triplet costs over the cheapest thing that Python can yield."""
    for shuffle, wanted in ((True, "<= 4.0"), (False, "<= 3.5")):
        with Feed(medium(data), shuffle=shuffle) as feed:
            frames, one = len(feed), ("utt", 1, np.zeros(80, "f4"))

            async def bare(frames: int = frames, one: object = one) -> object:
                for each in repeat(one, frames):
                    yield each

            def floor(bare: Callable[[], object] = bare) -> float:
                return seconds(lambda: asyncio.run(exhaust_async(bare())))

            rounds = in_turn(lambda: seconds(lambda: asyncio.run(exhaust_async(feed))), floor)
        name = "async-shuffled" if shuffle else "async-ordered"
        cost = statistics.median(ours for ours, _ in rounds) / frames * 1e6
        what = "async triplets, time over a bare async generator of a prebuilt tuple"
        yield Figure(name, what, wanted, [ours / other for ours, other in rounds], f"{cost:.2f} us a frame")


def triplets_for(data: Path) -> Iterator[Figure]:
    """for-shuffled, batches: against the best hand-written loop over the same partitions."""
    path = large(data)
    hand = HandWritten(path, 128 << 20, shuffle=True)
    with Feed(path, memory_budget="256m") as feed:
        rounds = in_turn(lambda: seconds(lambda: exhaust(feed)), lambda: seconds(lambda: exhaust(hand.triplets())))
        rate = len(feed) / statistics.median(ours for ours, _ in rounds) / 1e6
        what = "triplets, plain for, shuffled: rate against the best hand-written loop"
        yield Figure("for-shuffled", what, ">= 1.3", [hand / ours for ours, hand in rounds], f"{rate:.2f} M frames/s")
        rounds = in_turn(
            lambda: seconds(lambda: exhaust(feed.batches(256))), lambda: seconds(lambda: exhaust(hand.batches(256)))
        )
        rate = len(feed) / statistics.median(ours for ours, _ in rounds) / 1e6
        what = "batches(256), shuffled: rate against the same loop with np.take"
        yield Figure("batches", what, ">= 2", [hand / ours for ours, hand in rounds], f"{rate:.2f} M frames/s")


class Slice:
    """An utterance in memory, as audiomate's iterator keeps it."""

    def __init__(self, key: str, rows: np.ndarray) -> None:
        self.key, self.rows, self.length = key, rows, len(rows)


def linear_scan(data: Path) -> Iterator[Figure]:
    """linear-scan: how audiomate's iterator finds the utterance of a frame, with 1,000 utterances in memory."""
    path = feature_file(data / "thousand.h5", 1000, 300, 80)
    with h5py.File(path) as file:
        slices = [Slice(key, file[key][:]) for key in file]
    sample = np.random.default_rng(0).permutation(sum(each.length for each in slices))[:5000]

    async def scanned() -> object:
        for place in sample:
            index = place
            for each in slices:
                if index < each.length:
                    yield each.key, index, each.rows[index]
                    break
                index -= each.length

    with Feed(path, memory_budget="1g") as feed:
        frames = len(feed)
        rounds = in_turn(
            lambda: seconds(lambda: asyncio.run(exhaust_async(feed))) / frames,
            lambda: seconds(lambda: asyncio.run(exhaust_async(scanned()))) / len(sample),
        )
    what = "async triplets against a linear scan over 1,000 utterances per partition"
    yield Figure("linear-scan", what, ">= 50", [scan / ours for ours, scan in rounds])


def utterances(data: Path) -> Iterator[Figure]:
    """utterances-ordered, utterances-shuffled, h5py: whole utterances against the limits, and against h5py."""
    path = large(data)
    with Feed(path, shuffle=False) as feed:
        nbytes = feed.nbytes
        rounds = in_turn(lambda: seconds(lambda: exhaust(feed.utterances())), preadv_sequential(path, nbytes))
        rate = nbytes / statistics.median(ours for ours, _ in rounds) / 1e9
        what = "utterances in order: share of sequential preadv into one reused buffer"
        yield Figure("utterances-ordered", what, ">= 0.6", [raw / ours for ours, raw in rounds], f"{rate:.1f} GB/s")
        rounds = in_turn(
            lambda: seconds(lambda: exhaust(feed.utterances())), lambda: seconds(lambda: h5py_loop(path)), rounds=3
        )
        what = "utterances in order: rate against `for k in f: f[k][:]`"
        yield Figure("utterances-h5py", what, ">= 2.5", [other / ours for ours, other in rounds])
    with Feed(path, shuffle=True) as feed:
        rounds = in_turn(lambda: seconds(lambda: exhaust(feed.utterances())), preadv_per_utterance(path))
        what = "utterances shuffled: share of one preadv per utterance into a reused arena"
        yield Figure("utterances-shuffled", what, ">= 0.6", [raw / ours for ours, raw in rounds])
        yield from data_loader(path, feed)


def data_loader(path: Path, feed: Feed) -> Iterator[Figure]:
    """data-loader: torch's DataLoader with two workers over a map-style dataset that opens the file in each."""
    try:
        import torch.utils.data  # noqa: PLC0415 - not everybody has it
    except ImportError:
        print("data-loader        left out: torch is not installed", file=sys.stderr)
        return

    class Utterances(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.file = None
            with h5py.File(path) as file:
                self.keys = list(file)

        def __len__(self) -> int:
            return len(self.keys)

        def __getitem__(self, index: int) -> tuple[str, np.ndarray]:
            self.file = self.file or h5py.File(path)
            return self.keys[index], self.file[self.keys[index]][:]

    loader = torch.utils.data.DataLoader(Utterances(), batch_size=None, shuffle=True, num_workers=2)
    rounds = in_turn(
        lambda: seconds(lambda: exhaust(feed.utterances())), lambda: seconds(lambda: exhaust(loader)), rounds=3, warm=1
    )
    what = "utterances shuffled: rate against torch's DataLoader with two workers"
    yield Figure("data-loader", what, ">= 8", [other / ours for ours, other in rounds])


def tiny_utterances(data: Path) -> Iterator[Figure]:
    """tiny, open: 100,000 utterances of 1 KB, from opening to the end of the epoch, and opening alone."""
    path = tiny(data)
    Feed(path).open().close()  # leaves the index

    def ours() -> None:
        with Feed(path, shuffle=False) as feed:
            exhaust(feed.utterances())

    rounds = in_turn(lambda: seconds(ours), lambda: seconds(lambda: h5py_loop(path)), rounds=3, warm=1)
    what = "100,000 utterances of 1 KB, open to end of epoch, against the h5py loop"
    yield Figure("tiny", what, ">= 20", [other / mine for mine, other in rounds])

    def scan() -> None:
        with h5py.File(path) as file:
            for key in file:
                dataset = file[key]
                _ = dataset.shape, dataset.dtype

    rounds = in_turn(lambda: seconds(lambda: Feed(path).open().close()), lambda: seconds(scan), rounds=3, warm=1)
    what = "opening with a valid index against scanning with h5py, 100,000 utterances"
    yield Figure("open", what, ">= 20", [other / mine for mine, other in rounds])


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Another thread that runs pure Python without pause."""
    stop = False

    def spin() -> None:
        number = 0
        while not stop:
            number += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def gil(data: Path) -> Iterator[Figure]:
    """gil: reading while another thread keeps the interpreter busy."""
    path = large(data)
    with Feed(path, shuffle=False) as feed:
        exhaust(feed.utterances())
        exhaust(feed.utterances())
        with busy_thread():
            rounds = in_turn(
                lambda: seconds(lambda: exhaust(feed.utterances())),
                lambda: seconds(lambda: h5py_loop(path)),
                rounds=3,
                warm=1,
            )
    what = "in order, while another thread runs pure Python: rate against the h5py loop"
    yield Figure("gil-ordered", what, ">= 10", [other / ours for ours, other in rounds])


def overlap(data: Path) -> Iterator[Figure]:
    """overlap: an event loop that is never free, because every partition blocks it for as long as reading one takes."""
    with Feed(large(data), shuffle=False, memory_budget="64m") as feed:
        ratios = []
        for attempt in range(ROUNDS + 2):
            before = feed.statistics()
            exhaust(feed.partitions())
            after = feed.statistics()
            rate = (after.nbytes - before.nbytes) / (after.read_seconds - before.read_seconds)
            slept, wall = asyncio.run(sleep_through(feed, rate))
            if attempt >= 2:
                ratios.append(wall / slept)
    what = "epoch with a blocking sleep per partition of its read time, over the sum of the sleeps"
    yield Figure("overlap", what, "<= 1.15", ratios)


async def sleep_through(feed: Feed, rate: float) -> tuple[float, float]:
    """Block the loop for each partition's read time; the sum of that, and the time it took."""
    slept, started = 0.0, time.perf_counter()
    async for partition in feed.partitions():
        begun = time.perf_counter()
        time.sleep(partition.nbytes / rate)  # noqa: ASYNC251 - the point of it
        slept += time.perf_counter() - begun
    return slept, time.perf_counter() - started


def memory(data: Path) -> Iterator[Figure]:
    """segments, peak, rss: in a process of its own, three epochs of 20,000 compressed utterances."""
    out = subprocess.run(
        [sys.executable, __file__, "--measure-memory", str(gzipped(data))], check=True, capture_output=True, text=True
    ).stdout.split()
    segments, peak, growth = map(float, out)
    yield Figure("segments", "segments made over three epochs, over prefetch + 1", "= 1", [segments / 2])
    yield Figure("peak", "peak shared bytes over the budget", "<= 1.0", [peak])
    yield Figure("rss", "growth of RSS beyond shared memory over three epochs of gzip, MB", "< 60", [growth])


def measure_memory(path: Path) -> None:
    """Print segments made, peak shared bytes over budget, and growth of private memory in MB."""
    with Feed(path, memory_budget="40m") as feed:
        feed.open()
        gc.collect()
        before = private_nbytes()
        most = before
        for _ in range(3):
            for _ in feed.partitions():
                most = max(most, private_nbytes())
        seen = feed.statistics()
        print(seen.segments, seen.peak_shared_nbytes / feed.budget.nbytes, (most - before) / 1e6)


def private_nbytes() -> int:
    """Resident memory that is not shared."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


ROWS = (triplets_async, triplets_for, linear_scan, utterances, tiny_utterances, gil, overlap, memory)


def main() -> None:
    parser = arguments_of(__doc__, ROWS)
    parser.add_argument("--measure-memory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_memory:
        measure_memory(arguments.measure_memory)
    else:
        run(ROWS, arguments.rows, arguments.data)


if __name__ == "__main__":
    main()
