"""The main path, end to end."""

import asyncio

import numpy as np

import asyncfeed


def test_every_frame_arrives_once(path, corpus):
    async def collect():
        async with asyncfeed.Feed(path) as feed:
            return [(utt, index, frame.copy()) async for utt, index, frame in feed]

    triplets = asyncio.run(collect())

    assert sorted((utt, index) for utt, index, _ in triplets) == [
        (u, i) for u, a in corpus.items() for i in range(len(a))
    ]
    assert all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in triplets)
