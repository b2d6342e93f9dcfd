"""What `CachedItem` reaches: every figure is a ratio of two things measured in turn, in one run, on one machine.

python benchmarks/cache.py                  # all rows; about eight minutes
python benchmarks/cache.py writing kill     # rows whose name begins so
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import h5py
import numpy as np
from figures import Figure, arguments_of, in_turn, run, seconds, warm_up

from asyncfeed import CachedItem
from asyncfeed.storage.generations import Generations

NUM, SHAPE = 10_000, (250, 100)
"""Items, and their shape: 100 KB of float32 each, 1 GB together."""

RUNS = 200
"""Processes that are killed."""

uids = [f"utt{i:06d}" for i in range(NUM)]


def values() -> list[np.ndarray]:
    """Some different values; more would not fit in the processor's caches for either side."""
    rng = np.random.default_rng(0)
    return [rng.random(SHAPE, dtype="f4") for _ in range(16)]


def clean(directory: Path) -> Path:
    """An empty directory, and nothing left to be written to disk on behalf of earlier rounds."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.sync()
    return directory


# -- writing and sealing -------------------------------------------------------------------------------------------


def writing(data: Path) -> Iterator[Figure]:
    """writing, sealing: 10,000 items of 100 KB."""
    arrays = values()
    sealed: list[float] = []

    async def ours() -> float:
        async with CachedItem(clean(data / "writing"), mode="w") as item:
            started = time.perf_counter()
            for i, uid in enumerate(uids):
                await item.put(uid, arrays[i % len(arrays)])
            written = time.perf_counter() - started
            started = time.perf_counter()
            await item.to_reader()
            sealed.append(time.perf_counter() - started)
        return written

    def h5py_loop() -> float:
        path = clean(data / "h5py") / "cache.hdf5"
        with h5py.File(path, "w") as file:
            return seconds(
                lambda: [file.create_dataset(uid, data=arrays[i % len(arrays)]) for i, uid in enumerate(uids)]
            )

    pairs = in_turn(lambda: asyncio.run(ours()), h5py_loop, rounds=3, warm=1)
    yield Figure(
        "writing", "rate of put against h5py create_dataset without flush", ">= 1.0", [o / h for h, o in pairs]
    )

    def copy() -> float:
        target = clean(data / "copy") / "cache.hdf5"
        return seconds(lambda: shutil.copyfile(data / "writing" / "cache.hdf5", target))

    copied = [copy() for _ in range(4)][1:]
    yield Figure(
        "sealing",
        "rate of sealing against shutil.copyfile of the same bytes",
        ">= 0.3",
        [c / s for c, s in zip(copied, sealed[1:], strict=True)],
    )
    for name in ("writing", "h5py", "copy"):
        shutil.rmtree(data / name)


# -- reading -------------------------------------------------------------------------------------------------------


async def fill(directory: Path) -> None:
    """Items of 100 KB, sealed; made once."""
    async with CachedItem(directory, mode="w") as item:
        arrays = values()
        if len(item) < NUM:
            for i, uid in enumerate(uids):
                await item.put(uid, arrays[i % len(arrays)])
        await item.to_reader()


def reading(data: Path) -> Iterator[Figure]:
    """get, get-many, hit: random order, warm."""
    directory = data / "reading"
    asyncio.run(fill(directory))
    path = directory / "cache.hdf5"
    warm_up(path)
    order = random.Random(0).sample(uids, NUM)
    batches = [order[i : i + 100] for i in range(0, NUM, 100)]

    def h5py_loop() -> float:
        with h5py.File(path) as file:
            return seconds(lambda: [file[uid][:] is None for uid in order])

    async def timed(work: str) -> float:
        async with CachedItem(directory, mode="r") as item:
            started = time.perf_counter()
            if work == "get":
                for uid in order:
                    await item.get(uid)
            elif work == "compute":
                for uid in order:
                    await item.compute(uid, None)
            else:
                for batch in batches:
                    await item.get_many(batch)
            return time.perf_counter() - started

    gets = in_turn(lambda: asyncio.run(timed("get")), h5py_loop, rounds=5, warm=1)
    yield Figure("get", "rate of get against f[uid][:], random order", ">= 1.5", [h / o for o, h in gets])
    many = in_turn(lambda: asyncio.run(timed("many")), h5py_loop, rounds=5, warm=1)
    yield Figure("get-many", "rate of get_many(100) against f[uid][:]", ">= 3.0", [h / o for o, h in many])
    hits = in_turn(lambda: asyncio.run(timed("compute")), lambda: asyncio.run(timed("get")), rounds=7, warm=1)
    yield Figure("hit", "cost of compute on a hit over get", "<= 1.3", [c / g for c, g in hits])


# -- populating ----------------------------------------------------------------------------------------------------


def populating(data: Path) -> Iterator[Figure]:
    """populate: rows that take 5 ms each to arrive, a 10 ms function that a lock serialises, items of 400 KB."""
    num, gpu, result = 200, threading.Lock(), np.ones((1000, 100), "f4")
    spent: list[float] = []

    def func(_: str, signal: int) -> np.ndarray:
        with gpu:
            started = time.perf_counter()
            time.sleep(0.010)
            spent.append(time.perf_counter() - started)
        return result + signal

    def blocking_rows() -> Iterator[tuple[str, int]]:
        for i in range(num):
            time.sleep(0.005)
            yield f"utt{i}", i

    async def async_rows() -> AsyncIterator[tuple[str, int]]:
        for i in range(num):
            await asyncio.sleep(0.005)
            yield f"utt{i}", i

    async def once(rows: object) -> float:
        spent.clear()
        async with CachedItem(clean(data / "populating"), func, mode="w") as item:
            started = time.perf_counter()
            await item.populate(rows, concurrency=4)
            return (time.perf_counter() - started) / sum(spent)

    for name, rows in (("blocking", blocking_rows), ("async", async_rows)):
        asyncio.run(once(rows()))
        ratios = [asyncio.run(once(rows())) for _ in range(5)]
        yield Figure(f"populate-{name}", f"wall time over the sum of func, {name} rows", "<= 1.15", ratios)


# -- the event loop ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """The longest gap between two turns of a 5 ms ticker."""
    gaps = [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps[0], last = max(gaps[0], now - last), now

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    try:
        yield gaps
    finally:
        await asyncio.sleep(0.02)
        task.cancel()


def event_loop(data: Path) -> Iterator[Figure]:
    """gap-*: 100,000 items of 4 KB."""
    num, array = 100_000, np.ones((50, 20), "f4")

    async def measure() -> dict[str, float]:
        gaps: dict[str, float] = {}
        directory = clean(data / "loop")
        item = CachedItem(directory, mode="w")
        async with item:
            async with ticking() as gap:
                for i in range(num):
                    await item.put(f"utt{i:06d}", array)
            gaps["writing"] = gap[0]
        async with ticking() as gap, item:  # replays the journal
            gaps["replaying"] = gap[0]
        async with item:
            async with ticking() as gap:
                await item.to_reader()
            gaps["sealing"] = gap[0]
        async with ticking() as gap, CachedItem(directory, mode="r") as reader:
            assert len(reader) == num
        gaps["opening"] = gap[0]
        async with CachedItem(directory, mode="r") as reader, ticking() as gap:
            async for _ in reader:
                pass
        gaps["iterating"] = gap[0]
        return gaps

    rounds = [asyncio.run(measure()) for _ in range(2)]
    for name in rounds[0]:
        yield Figure(
            f"gap-{name}", "longest gap of a 5 ms ticker, ms, 100,000 items", "< 100", [1e3 * r[name] for r in rounds]
        )
    shutil.rmtree(data / "loop")


# -- kill -9 -------------------------------------------------------------------------------------------------------


def value_of(number: int) -> np.ndarray:
    """What is kept as item ``number``: it can be checked without knowing more."""
    return np.random.default_rng(number).random((1 + number % 500, 20), dtype="f4")


async def write_for_ever(directory: str, first: int, acknowledge: int) -> None:
    """Write, seal, write on, compact; say so whenever an item was acknowledged."""
    number, dice = first, random.Random(first)
    async with CachedItem(directory, mode="w", version=1) as item:
        while True:
            for _ in range(dice.randrange(60)):
                await item.put(f"spk{number % 7}/utt{number}", value_of(number))
                os.write(acknowledge, struct.pack("<q", number))
                number += 1
            await item.to_reader()
            if dice.random() < 0.5:
                await item.compact()
            await item.to_writer()


def killed_run(directory: str, first: int, delay: float) -> set[int]:
    """Start a process that writes, kill it after ``delay``, and return what it said it had written."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        try:
            asyncio.run(write_for_ever(directory, first, said))
        finally:
            os._exit(1)
    os.close(said)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(heard, "rb") as pipe:
        told = pipe.read()
    return {number for (number,) in struct.iter_unpack("<q", told[: len(told) // 8 * 8])}


async def lost_of(directory: str, acknowledged: set[int]) -> int:
    """How many items are gone or differ, for a writer, for a reader, and for h5py after sealing."""
    wrong = 0
    async with CachedItem(directory, mode="w", version=1) as item:
        for step in ("writer", "reader"):
            if step == "reader":
                await item.to_reader()
            for number in acknowledged:
                uid = f"spk{number % 7}/utt{number}"
                wrong += uid not in item or not np.array_equal(await item.get(uid), value_of(number))
    found = set()
    for path in Generations(directory).paths():
        with h5py.File(path) as file:
            found |= {number for number in acknowledged if f"spk{number % 7}/utt{number}" in file}
    return wrong + len(acknowledged - found)


def kill(data: Path) -> Iterator[Figure]:
    """lost, manual: a process is killed at a random moment, over and over."""
    lost = manual = total = 0
    dice = random.Random(os.urandom(8))
    for number in range(RUNS):
        directory = data / "killed"
        if number % 10 == 0:
            clean(directory)
            acknowledged: set[int] = set()
        acknowledged |= killed_run(str(directory), number * 1_000_000, dice.uniform(0.01, 0.6))
        total += len(acknowledged)
        try:
            lost += asyncio.run(lost_of(str(directory), acknowledged))
        except Exception as error:  # noqa: BLE001 - it is what is counted
            manual += 1
            print(f"run {number}: {type(error).__name__}: {error}")
            clean(directory)
            acknowledged = set()
    note = f"{RUNS} runs, {total:,} acknowledged items looked for"
    yield Figure("lost", "acknowledged items lost to kill -9", "= 0", [lost], note)
    yield Figure("manual", "runs that need a manual step", "= 0", [manual])


ROWS = (kill, writing, reading, populating, event_loop)


def main() -> None:
    arguments = arguments_of(__doc__, ROWS).parse_args()
    run(ROWS, arguments.rows, arguments.data)


if __name__ == "__main__":
    main()
