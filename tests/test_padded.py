"""Batches of whole utterances of similar length."""

from __future__ import annotations

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfeed import ArgumentError, BudgetError, Feed, ShapeError
from asyncfeed.planning.grouping import Grouping, waste_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("padded") / "feats.h5"
    with h5py.File(path, "w") as file:
        for i, n in enumerate(rng.integers(1, 90, 150).tolist()):
            file[f"utt{i:03d}"] = rng.random((n, 4)).astype("f4")
        file["none"] = np.empty((0, 4), "f4")
    return path


# -- grouping ----------------------------------------------------------------------------------------------------

lengths = st.lists(st.integers(0, 500), max_size=80)
groupings = st.builds(
    Grouping,
    max_frames=st.integers(1, 3000),
    buckets=st.just(()) | st.lists(st.integers(1, 500), unique=True, max_size=4).map(lambda b: tuple(sorted(b))),
    pool=st.integers(1, 100),
    max_waste=st.floats(0, 1),
    sort=st.booleans(),
) | st.builds(Grouping, batch_size=st.integers(1, 30), pool=st.integers(1, 100), sort=st.booleans())


@given(lengths, groupings, st.booleans(), st.integers(0, 2**70))
def test_every_utterance_is_in_one_batch_and_limits_hold(lengths, grouping, shuffle, seed):
    lengths = np.array(lengths, np.int64)

    positions, edges = grouping.group(lengths, shuffle=shuffle, seed=seed, epoch=0)

    assert sorted(positions.tolist()) == list(range(lengths.size))
    assert (np.diff(edges) > 0).all()
    for first, last in itertools.pairwise(edges):
        batch = lengths[positions[first:last]]
        if grouping.batch_size is not None:
            assert batch.size <= grouping.batch_size
        elif batch.size > 1:
            padded = batch.size * max(batch.max(), 1)
            assert padded <= grouping.max_frames
            assert 1 - batch.sum() / padded <= grouping.max_waste + 1e-9
        if grouping.sort:
            assert (np.diff(batch) <= 0).all()
        else:
            assert (np.diff(positions[first:last]) > 0).all()
        if grouping.buckets:
            assert np.unique(np.searchsorted(grouping.buckets, batch)).size == 1


@given(lengths, groupings)
def test_batches_repeat_for_a_seed_and_an_epoch(lengths, grouping):
    lengths = np.array(lengths, np.int64)

    one, other = (grouping.group(lengths, shuffle=True, seed=3, epoch=4) for _ in range(2))

    assert np.array_equal(one.positions, other.positions)
    assert np.array_equal(one.edges, other.edges)


def test_little_is_padded_of_lengths_like_those_of_librispeech():
    seconds = np.clip(np.random.default_rng(0).lognormal(np.log(12), 0.5, 20_000), 2, 35)
    frames = (100 * seconds).astype(np.int64)

    for grouping in (
        Grouping(max_frames=6000),
        Grouping(batch_size=16),
        Grouping(max_frames=6000, buckets=(500, 1000, 2000)),
    ):
        positions, edges = grouping.group(frames, shuffle=True, seed=0, epoch=0)

        assert waste_of(frames[positions], edges) < 0.05


# -- feeds -------------------------------------------------------------------------------------------------------


def test_a_batch_holds_what_the_file_holds_and_the_pad_value(path):
    with Feed(path, index="off") as feed, h5py.File(path) as file:
        seen = []
        for utts, data, lengths in feed.padded(max_frames=400, pad_value=-1):
            assert data.shape == (len(utts), lengths.max(), 4)
            assert data.dtype == np.float32
            for utt, rows, length in zip(utts, data, lengths, strict=True):
                assert np.array_equal(rows[:length], file[utt][:])
                assert (rows[length:] == -1).all()
            seen += utts

        assert sorted(seen) == sorted(file)


def test_waste_is_what_is_padded(path):
    with Feed(path, index="off") as feed:
        padded = feed.padded(batch_size=7, pool=30)
        said, number = padded.waste, len(padded)
        batches = list(padded)

    real = sum(int(batch.lengths.sum()) for batch in batches)
    assert said == pytest.approx(1 - real / sum(batch.data.shape[0] * batch.data.shape[1] for batch in batches))
    assert number == len(batches)


def test_batches_are_ones_own(path):
    with Feed(path, memory_budget=2 * 4096 * 4, index="off") as feed:
        kept = list(feed.padded(batch_size=4))  # from many partitions: no warning that segments are held
        copies = [batch.data.copy() for batch in kept]
        list(feed.padded(batch_size=4))

        assert all(np.array_equal(batch.data, copy) for batch, copy in zip(kept, copies, strict=True))
        assert feed.statistics().segments == 2


def test_in_file_order_batches_come_in_file_order(path):
    with Feed(path, shuffle=False, index="off") as feed:
        batches = [batch.utts for batch in feed.padded(batch_size=5, pool=5, sort=False)]

    assert [utt for utts in batches for utt in utts] == sorted(utt for utts in batches for utt in utts)


def test_fields_side_by_side_are_padded_each(make):
    mel = make({f"u{i}": np.full((i + 1, 3), i, "f4") for i in range(6)}, name="mel.h5")
    text = make({f"u{i}": np.full(2 * i + 1, i, "i8") for i in range(6)}, name="text.h5")

    with Feed({"mel": mel, "text": text}, index="off") as feed:
        for batch in feed.padded(batch_size=3):
            assert batch.data["mel"].shape[:2] == (3, batch.lengths.max())
            assert batch.data["text"].shape == (3, 2 * (batch.lengths.max() - 1) + 1)


def test_frames_of_different_shapes_are_an_error(make):
    path = make({"a": np.ones((3, 2), "f4"), "b": np.ones((3, 4), "f4")})

    with Feed(path, index="off") as feed, pytest.raises(ShapeError, match="one batch cannot hold both"):
        list(feed.padded(batch_size=2))


def test_a_batch_larger_than_a_partition_says_what_would_do(path):
    with (
        Feed(path, memory_budget=2 * 4096, index="off") as feed,
        pytest.raises(BudgetError, match=r"the batch of \d+ utterances"),
    ):
        list(feed.padded(batch_size=100))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"max_frames": 3, "batch_size": 3},
        {"max_frames": 0},
        {"batch_size": -1},
        {"batch_size": 2, "buckets": [5, 3]},
        {"batch_size": 2, "max_waste": 2},
        {"batch_size": 2, "pool": 0},
    ],
)
def test_arguments_without_meaning_are_refused(path, wrong):
    with Feed(path, index="off") as feed, pytest.raises(ArgumentError):
        feed.padded(**wrong)


def test_an_empty_file_has_no_batches(make):
    with Feed(make({"none": np.empty((0, 2), "f4")}), index="off") as feed:
        (batch,) = feed.padded(max_frames=10)

        assert batch.data.shape == (1, 0, 2)
        assert feed.padded(max_frames=10).waste == 0
