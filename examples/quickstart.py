"""Write a small feature file, then stream it in every form.

python examples/quickstart.py
"""

import asyncio
import tempfile
from pathlib import Path

import h5py
import numpy as np

from asyncfeed import Feed


def write_features(path: Path) -> None:
    """Forty utterances of 100 to 400 frames, 80 float32 each; one dataset per utterance, in a group per speaker."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(40):
            frames = rng.normal(size=(rng.integers(100, 400), 80))
            file[f"speaker{number % 4}/utt{number:03d}"] = frames.astype("float32")


async def triplets(feed: Feed) -> str:
    total = 0.0
    async for _utt, _index, frame in feed:  # frame: a view of 80 floats
        total += float(frame[0])
    return f"{len(feed)} frames, whose first features add up to {total:.2f}"


async def utterances(feed: Feed) -> str:
    longest = ("", 0)
    async for utt, array in feed.utterances():  # array: a view, (length, 80)
        longest = max(longest, (utt, len(array)), key=lambda pair: pair[1])
    return f"{feed.num_utterances}, the longest is {longest[0]} with {longest[1]} frames"


async def batches(feed: Feed) -> str:
    sizes = [len(batch.utts) async for batch in feed.batches(256)]  # batch.frames: a copy, (256, 80)
    return f"{len(sizes)} of {sizes[0]} frames, the last of {sizes[-1]}"


async def windows(feed: Feed) -> str:
    shapes = [window.frames.shape async for window in feed.windows(length=20, hop=10)]  # views, (20, 80)
    return f"{len(shapes)}, each {shapes[0]}"


async def partitions(feed: Feed) -> str:
    shapes = [partition.frames.shape async for partition in feed.partitions()]  # what is in memory together
    return f"{len(shapes)}: {shapes}"


async def every_form(path: Path) -> None:
    """Every ``async for`` is one epoch, each time the next, with an order of its own."""
    async with Feed(path, seed=1, index="off") as feed:  # this file will not be opened on another day
        print(f"budget:     {feed.budget}")
        print(f"plan:       {feed.plan}")
        for form in (triplets, utterances, batches, windows, partitions):
            print(f"{form.__name__ + ':':11} {await form(feed)}")
        print(f"statistics: {feed.statistics()}")


def without_async(path: Path) -> None:
    """The same in an ordinary loop."""
    with Feed(path, shuffle=False, index="off") as feed:
        for utt, index, frame in feed:
            print(f"plain for:  the first triplet in file order is ({utt!r}, {index}, {frame.dtype} {frame.shape})")
            break


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "feats.h5")
        write_features(path)
        asyncio.run(every_form(path))
        without_async(path)


if __name__ == "__main__":
    main()
