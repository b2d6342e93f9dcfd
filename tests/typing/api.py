"""Ordinary use, checked by ``mypy --strict`` and never run: if it reads well, the interface does."""

from __future__ import annotations

from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, assert_type

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncfeed import (
    AsyncFeedError,
    Batch,
    Budget,
    BudgetError,
    CachedItem,
    CacheMissError,
    Feed,
    LoadedPartition,
    MemoryBudget,
    PaddedBatch,
    Partition,
    Plan,
    PopulateReport,
    Recovery,
    Skipped,
    Source,
    Statistics,
    StorageError,
    UnreadableDatasetError,
    UsageError,
    Verification,
    Window,
)
from asyncfeed.compat.audiomate import (
    MultiFrameIterator,
    PartitionData,
    PartitioningContainerLoader,
    PartitioningFeatureIterator,
)


async def train(path: Path) -> None:
    async with Feed(path, memory_budget="2g", seed=7) as feed:
        assert_type(feed, Feed)
        async for utt, index, frame in feed:
            assert_type(utt, str)
            assert_type(index, int)
            frame.sum()

        async for utt, array in feed.utterances():
            assert_type(utt, str)
            np.asarray(array)

        async for batch in feed.batches(256, drop_last=True):
            assert_type(batch, Batch)
            assert_type(batch.utts, list[str])
            assert_type(batch.indices, NDArray[np.int64])
            utts, indices, frames = batch
            np.asarray(frames), len(utts), indices.max()

        async for window in feed.windows(length=20, hop=10, pad=True):
            assert_type(window, Window)
            assert_type(window.start, int)
            utt, start, length, frames = window
            np.asarray(frames), utt, start + length

        async for padded in feed.padded(max_frames=6000, sort=False):
            assert_type(padded, PaddedBatch)
            utts, data, lengths = padded
            np.asarray(data), len(utts), lengths.max()
        assert_type(feed.padded(batch_size=16).waste, float)

        async for partition in feed.partitions():
            assert_type(partition, LoadedPartition)
            assert_type(partition.ids, list[str])
            assert_type(partition.num_frames, int)


def train_without_a_loop(path: str) -> None:
    with Feed(path, shuffle=False) as feed:
        for utt, index, _frame in feed:
            assert_type((utt, index), tuple[str, int])
        for batch in feed.batches(64):
            assert_type(batch, Batch)
        for window in feed.windows(20):
            assert_type(window.length, int)
        assert_type(len(feed), int)
        assert_type(len(feed.batches(64)), int)
        assert_type([utt for utt, _ in feed.utterances()], list[str])


async def stop_early(feed: Feed) -> str | None:
    async with aclosing(aiter(feed)) as frames:
        async for utt, _, _ in frames:
            return utt
    with closing(iter(feed.utterances())) as utterances:
        utt, _ = next(utterances)
    return utt


def sources(handle: h5py.File) -> list[Feed]:
    """Whatever can be streamed."""
    return [
        Feed("feats-*.h5"),
        Feed([Path("a.h5"), "b.h5"]),
        Feed(handle),
        Feed(handle["train"]),
        Feed(Source("robot.h5", key="data/{utt}/actions")),
        Feed(Source(["a.h5", "b.h5"], key="{utt}/mel")),
        Feed(Source("dump/{utt}.h5", key="feats")),
        Feed(Source("all.h5", data="feats", lengths="lengths", ids="ids")),
        Feed({"mel": "mel.h5", "text": Source("targets.h5", "{utt}/text"), "image": handle}),
    ]


def settings(shared: MemoryBudget) -> Feed:
    return Feed(
        "feats.h5",
        memory_budget=shared,
        shuffle=True,
        seed=1,
        includes={"utt1", "utt2"},
        excludes=["utt3"],
        prefetch=2,
        rank=0,
        world_size=4,
        unreadable="skip",
        index="off",
    )


def budgets() -> None:
    shared = MemoryBudget("25%", feeds=2)
    for size in ("auto", "512MiB", 1 << 30, shared):
        Feed("feats.h5", memory_budget=size)


def what_there_is_to_know(feed: Feed) -> None:
    assert_type(feed.epoch, int)
    feed.set_epoch(3)
    assert_type(feed.num_utterances, int)
    assert_type(feed.nbytes, int)

    assert_type(feed.plan, Plan)
    assert_type(feed.plan[0], Partition)
    assert_type(feed.plan[:2], list[Partition])
    assert_type([len(partition) for partition in feed.plan], list[int])

    assert_type(feed.budget, Budget)
    assert_type(feed.budget.partition_nbytes, int)
    assert_type(feed.skipped, tuple[Skipped, ...])
    assert_type([f"{s.utt}: {s.reason}" for s in feed.skipped], list[str])

    statistics = feed.statistics()
    assert_type(statistics, Statistics)
    assert_type(statistics.verdict, str)


def errors(path: str) -> str:
    try:
        feed = Feed(path).open()
    except UnreadableDatasetError as error:
        return f"left out: {error}"
    except (StorageError, BudgetError) as error:
        return f"not now: {error}"
    except UsageError:
        raise
    except AsyncFeedError:
        return "something else"
    except (FileNotFoundError, ValueError, MemoryError):
        return "and as Python calls them"
    feed.close()
    return "opened"


def mistakes(feed: Feed) -> None:
    """What a type checker finds before anything runs; an ignore that is not needed is an error, too."""
    feed.batches("256")  # type: ignore[arg-type]
    feed.epoch = 3  # type: ignore[misc]
    Feed("feats.h5", "2g")  # type: ignore[call-arg]
    Feed("feats.h5", unreadable="ignore")  # type: ignore[arg-type]
    MemoryBudget("2g", 2)  # type: ignore[call-arg]


def features(uid: str, signal: NDArray[np.float32]) -> NDArray[np.float32]:
    return signal * 2


async def cache(rows: list[tuple[str, NDArray[np.float32]]]) -> None:
    item = CachedItem("exp/feats", features, takes=("id", "signal"), provides=("feats",), version="v1", mode="w")
    async with item:
        assert_type(item.recovered, Recovery | None)
        assert_type(await item.compute("utt-1", rows[0][1]), NDArray[Any])
        assert_type(await item.populate(rows, concurrency=2, on_error="skip"), PopulateReport)
        await item.put("utt-2", [1.0, 2.0])
        await item.to_reader()
        try:
            (await item.get("utt-3")).mean()
        except CacheMissError:
            assert_type(await item.missing(["utt-3"]), list[str])
        assert_type(await item.get_many(item.keys()), list[NDArray[Any]])
        assert_type(await item.verify(), Verification)
        async for uid, value in item:
            assert_type(uid, str)
            value.mean()
        async with Feed(item) as feed:
            async for utt, index, frame in feed:
                frame.sum(), utt, index
        await item.compact()
        "utt-1" in item, len(item), item["utt-1"].sum()


@CachedItem.cache("exp/decorated", version=2)
def decorated(uid: str, signal: NDArray[np.float32]) -> NDArray[np.float32]:
    return signal


async def call(signal: NDArray[np.float32]) -> None:
    async with decorated:
        assert_type(await decorated("utt-1", signal), NDArray[Any])


def names_of_audiomate(file: h5py.File) -> None:
    for triplet in PartitioningFeatureIterator(file, "2g", shuffle=True, seed=12, excludes={"utt3"}):
        assert_type(triplet, tuple[str, int, Any])
    loader = PartitioningContainerLoader(["utt1", "utt2"], [file, file], "1g", seed=3)
    for number, info in enumerate(loader.partitions):
        assert_type(info.utt_ids, list[str])
        assert_type(info.total_lengths(), tuple[int, ...])
        assert_type(loader.load_partition_data(number), PartitionData)
    for chunk in MultiFrameIterator(["utt1"], file, "1g", 20, pad=True):
        assert_type(chunk, list[Any])


def resume(path: Path) -> None:
    with Feed(path, shuffle="interleave", block_size="4m", even="drop", rank=0, world_size=2) as feed:
        state = feed.state_dict()
        assert_type(state, dict[str, Any])
        feed.load_state_dict(state)
        print(feed.plan.mixing().number)
    Feed(path, shuffle=["utt-2", "utt-1"])
    Feed(path, shuffle={"utt-1": 2.0, "utt-2": 0.5})
