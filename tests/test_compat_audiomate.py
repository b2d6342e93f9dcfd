"""audiomate's loaders under their own names: what they give, and in which order.

Three witnesses: values that audiomate 6.0.0 gave, a slow and plain account of its order, and audiomate itself where it
is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncfeed
from asyncfeed.compat import audiomate as ours
from asyncfeed.compat.audiomate.arguments import storage_nbytes
from asyncfeed.planning.audiomate import feature_plan, pack_frames
from asyncfeed.planning.catalog import FileStamp
from asyncfeed.planning.planner import make_plan
from asyncfeed.storage.library import open_library

SEEDS = [0, 12, 2**32 - 1]
SIZES = ["100", "0.5k", "1m"]


class Box:
    """A container with the interface of audiomate's."""

    def __init__(self, path, mode="r"):
        self.path, self._file = str(path), h5py.File(path, mode)

    def keys(self):
        return sorted(self._file.keys())

    def close(self):
        self._file.close()
        self._file = None


class Features(Box):
    """One that holds features."""

    sampling_rate = 16_000


class Corpus:
    """A corpus with the interface of audiomate's."""

    def __init__(self, ids):
        self.utterances = dict.fromkeys(ids)


def numbered(dim, num=20, dtype="f4"):
    """Utterances of 0 to 12 frames that count all their values through."""
    arrays, first = {}, 0
    for i in range(num):
        length = 7 * i % 13
        arrays[f"utt{i:02d}"] = np.arange(first, first + length * dim, dtype=dtype).reshape(length, dim)
        first += length * dim
    return arrays


def digest(anything):
    return hashlib.sha256(json.dumps(anything).encode()).hexdigest()[:16]


@pytest.fixture
def files(make):
    """Open files: four features a frame, and two targets."""
    with h5py.File(make(numbered(4), "mel.h5")) as mel, h5py.File(make(numbered(2), "targets.h5")) as targets:
        yield [mel, targets]


@pytest.fixture
def mel(files):
    return files[0]


@pytest.fixture
def original():
    """audiomate's own module, where it is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is from another time
        pytest.importorskip("audiomate", exc_type=ImportError)
        return importlib.import_module("audiomate.feeding")


@pytest.fixture
def boxes(files):
    """audiomate's own containers over the same files."""
    containers = importlib.import_module("audiomate.containers")
    opened = [containers.Container(file.filename, "r") for file in files]
    for box in opened:
        box.open()
    yield opened
    for box in opened:
        box.close()


def plain(items):
    """Triplets, or lists of arrays and lengths, as JSON has them."""
    return [[x.tolist() if isinstance(x, np.ndarray | np.generic) else x for x in item] for item in items]


# -- a plain account of the order ----------------------------------------------------------------------------------------


def partitions_of(utts, limit):
    """Frame by frame: ``(utt, index)`` by partition. ``utts`` are ``(id, frames, bytes per frame)``."""
    utts = [utt for utt in utts if utt[1]]
    partitions, free = [[]], limit
    for utt, after in itertools.zip_longest(utts, utts[1:]):
        name, length, width = utt
        for index in range(length):
            partitions[-1].append((name, index))
            free -= width
            last = index == length - 1
            if free < width or (last and (after is None or free < after[2])):
                partitions.append([])
                free = limit
    return [partition for partition in partitions if partition]


def frames_in_order(utts, limit, *, shuffle, seed):
    """What a feature iterator gives: everything begins at the seed anew."""
    utts = list(utts)
    if shuffle:
        np.random.RandomState(seed).shuffle(utts)
    partitions = partitions_of(utts, limit)
    if not shuffle:
        return [frame for partition in partitions for frame in partition]
    order = list(range(len(partitions)))
    np.random.RandomState(seed).shuffle(order)
    return [
        partitions[p][k] for p in order for k in np.random.RandomState(seed).permutation(len(partitions[p])).tolist()
    ]


class Scheme:
    """What a loader does with ids and sizes."""

    def __init__(self, sizes, limit, *, shuffle, seed):
        self.sizes, self.limit, self.shuffle = sizes, limit, shuffle
        self.rand = random.Random()
        self.rand.seed(seed)

    def reload(self):
        ids = sorted(self.sizes)
        if self.shuffle:
            self.rand.shuffle(ids)
        partitions = [[]]
        for utt in ids:
            if sum(self.sizes[u] for u in partitions[-1]) + self.sizes[utt] > self.limit:
                partitions.append([])
            partitions[-1].append(utt)
        if not sum(self.sizes[u] for u in partitions[-1]):
            partitions.pop()
        return partitions


def chunks_in_order(lengths, sizes, limit, frames_per_chunk, epochs, *, shuffle, seed):
    """What a multi-frame iterator gives, in the epochs of several ``for`` loops: ``(utt, first frame)``."""
    rand = random.Random(seed)
    scheme = Scheme(sizes, limit, shuffle=shuffle, seed=rand.random())
    scheme.reload()
    given = []
    for _ in range(epochs):
        given.append([])
        for partition in scheme.reload():
            chunks = [(utt, start) for utt in partition for start in range(0, lengths[utt], frames_per_chunk)]
            order, again = list(range(len(chunks))), random.Random(rand.random())
            if shuffle:
                again.shuffle(order)
            given[-1] += [chunks[k] for k in order]
    return given


# -- triplets ------------------------------------------------------------------------------------------------------------

GOLDEN = {
    (0, "100"): "5660c8665ba97112",
    (0, "0.5k"): "f86935898e190c65",
    (0, "1m"): "454107506f1a0841",
    (12, "100"): "392128ca4000e327",
    (12, "0.5k"): "35902599844d2813",
    (12, "1m"): "7e743068e8cb296b",
    (2**32 - 1, "100"): "49bad9f4c23c8428",
    (2**32 - 1, "0.5k"): "215232144d12e942",
    (2**32 - 1, "1m"): "449bc346dfe7f1b1",
}
"""What audiomate 6.0.0 gave for `numbered`, by seed and partition size."""


def told(iterator):
    return [(utt, index, float(frame[0])) for utt, index, frame in iterator]


@pytest.mark.parametrize(("seed", "size"), GOLDEN)
def test_shuffled_triplets_come_as_they_came_from_audiomate(mel, seed, size):
    iterator = ours.PartitioningFeatureIterator(mel, size, shuffle=True, seed=seed)

    assert digest(told(iterator)) == GOLDEN[seed, size]


@pytest.mark.parametrize("size", SIZES)
def test_triplets_in_order_come_as_they_came_from_audiomate(mel, size):
    iterator = ours.PartitioningFeatureIterator(mel, size, shuffle=False, seed=3)

    assert digest(told(iterator)) == "24d7f758f6b2d407"


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [16, *SIZES])
@pytest.mark.parametrize("chosen", [{}, {"includes": ["utt03", "utt07", "none"]}, {"excludes": {"utt03", "utt19"}}])
def test_triplets_are_those_of_audiomate_itself(original, mel, size, seed, shuffle, chosen):
    mine = ours.PartitioningFeatureIterator(mel, size, shuffle, seed, **chosen)
    theirs = original.PartitioningFeatureIterator(mel, size, shuffle, seed, **chosen)

    assert plain(mine) == plain(theirs)


utterances = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=12)


@given(utterances, st.integers(0, 60), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_lengths_and_widths_come_in_the_order_of_the_plain_account(utts, more, shuffle, seed):
    lengths, widths = [n for n, _ in utts], [4 * w for _, w in utts]
    limit = max(widths, default=1) + more
    named = [(place, n, w) for place, (n, w) in enumerate(zip(lengths, widths, strict=True))]

    plan = feature_plan(corpus_of(lengths, widths), partition_nbytes=limit, shuffle=shuffle, seed=seed, unit_nbytes=12)

    assert list(frames_of(plan)) == frames_in_order(named, limit, shuffle=shuffle, seed=seed)
    assert all(size <= limit + 12 * 60 + 64 * 3 * 12 for size in plan.sizes.tolist())


def corpus_of(lengths, widths):
    """A corpus of one field, from nowhere."""
    from asyncfeed.planning.catalog import Catalog, Kind
    from asyncfeed.planning.corpus import Corpus
    from asyncfeed.planning.strings import Strings

    kinds = sorted(set(widths))
    count = len(lengths)
    catalog = Catalog(
        ids=Strings.of(f"{i:03d}" for i in range(count)),
        file=np.zeros(count, np.int32),
        offset=np.zeros(count, np.int64),
        length=np.array(lengths, np.int64),
        kind=np.array([kinds.index(w) for w in widths], np.int32),
        access=np.zeros(count, np.uint8),
        swapped=np.zeros(count, np.bool_),
        files=(FileStamp("nowhere.h5", 0, 0, 0),),
        kinds=tuple(Kind(np.dtype("f4"), (w // 4,)) for w in kinds),
    )
    return Corpus({"": catalog}, named=False)


def frames_of(plan):
    for partition in plan:
        frames = [
            (utt, index)
            for utt, start, stop in zip(partition.utts, partition.starts, partition.stops, strict=True)
            for index in range(start, stop)
        ]
        units = np.arange(len(frames), dtype=np.int32)
        if plan.shuffle:
            plan.order_units(partition, units)
        yield from (frames[unit] for unit in units)


def test_a_partition_that_an_utterance_fills_exactly_ends_even_if_the_next_frame_would_fit():
    packed = pack_frames(np.array([3, 2]), np.array([30, 10]), 100)

    assert packed.edges.tolist() == [0, 1, 2]


def test_two_partitions_of_equal_size_have_the_same_permutation(make):
    with h5py.File(make({"a": np.arange(40.0)[:, None]})) as file:
        got = [index for _, index, _ in ours.PartitioningFeatureIterator(file, 160, seed=5)]

    assert sorted(i % 20 for i in got[:20]) == list(range(20))
    assert [i % 20 for i in got[:20]] == [i % 20 for i in got[20:]]


def test_without_a_seed_every_iterator_has_another_order(mel):
    first, second = (told(ours.PartitioningFeatureIterator(mel, "1m")) for _ in range(2))

    assert first != second
    assert sorted(first) == sorted(second)


def test_includes_goes_before_excludes_and_an_empty_one_means_everything(mel):
    def seen(**chosen):
        return {utt for utt, *_ in ours.PartitioningFeatureIterator(mel, "1m", **chosen)}

    everything = seen()

    assert len(everything) == 18  # of 20, two have no frames
    assert seen(includes=["utt01", "utt02"], excludes=["utt02"]) == {"utt01", "utt02"}
    assert seen(includes=[]) == everything
    assert seen(includes=iter(["utt05"])) == {"utt05"}
    assert seen(excludes=["utt05"]) == everything - {"utt05"}
    with pytest.raises(ValueError, match=r"includes='utt05' is one string"):
        seen(includes="utt05")


def test_it_goes_through_the_file_once(mel):
    iterator = ours.PartitioningFeatureIterator(mel, "1m")

    assert iter(iterator) is iterator
    assert len(list(iterator)) == 108
    assert list(iterator) == []
    with pytest.raises(StopIteration):
        next(iterator)


def test_frames_that_are_kept_stay_as_they_are_and_nobody_warns(mel):
    kept = list(ours.PartitioningFeatureIterator(mel, "100", seed=1))  # warnings are errors here

    assert len(kept) == 108
    assert all(np.array_equal(frame, mel[utt][index]) for utt, index, frame in kept)


def test_leaving_early_ends_the_reading(mel):
    iterator = ours.PartitioningFeatureIterator(mel, "100", seed=1)

    next(iterator)
    iterator.close()

    assert "asyncfeed-reader" not in {thread.name for thread in threading.enumerate()}


def test_a_frame_larger_than_a_partition_is_a_value_error(mel):
    with pytest.raises(ValueError, match="a frame of utterance 'utt01' takes 16 bytes"):
        ours.PartitioningFeatureIterator(mel, 15)


def test_a_partition_may_be_far_larger_than_the_memory_there_is(mel):
    assert len(list(ours.PartitioningFeatureIterator(mel, "999999g"))) == 108


@pytest.mark.parametrize(
    ("written", "meant"),
    [("100", 100), (100, 100), ("1k", 1024), ("1.5K", 1536), ("2m", 2 << 20), ("1G", 1 << 30), (3.7, 3), ("0", 0)],
)
def test_sizes_are_read_as_audiomate_reads_them(written, meant):
    assert storage_nbytes(written) == meant


@pytest.mark.parametrize("wrong", ["", "k", "1 k", "1kb", "1t", "-1", "1.", ".5k", None, "12g\n"])
def test_what_is_no_size_is_a_value_error(files, wrong):
    for make in (ours.PartitioningFeatureIterator, lambda file, size: ours.PartitioningContainerLoader([], file, size)):
        with pytest.raises(ValueError, match="no partition size"):
            make(files[0], wrong)


# -- what audiomate could not read ---------------------------------------------------------------------------------------


def test_frames_may_have_any_number_of_axes(make):
    arrays = {"one": np.arange(3.0), "two": np.ones((2, 4)), "three": np.ones((2, 3, 4), "i2"), "wide": np.ones((2, 0))}
    with h5py.File(make(arrays)) as file:
        for size in ("1m", 32):
            for shuffle in (False, True):
                got = list(ours.PartitioningFeatureIterator(file, size, shuffle=shuffle, seed=1))

                assert len(got) == 9
                for utt, index, frame in got:
                    assert np.shape(frame) == arrays[utt].shape[1:]
                    assert np.array_equal(frame, arrays[utt][index])


def test_utterances_may_lie_in_groups(make):
    with h5py.File(make({"spk/a": np.ones((2, 3)), "spk/b": np.ones((1, 3)), "top": np.ones((1, 3))})) as file:
        got = [item[:2] for item in ours.PartitioningFeatureIterator(file, "1k", shuffle=False)]

        assert got == [("spk/a", 0), ("spk/a", 1), ("spk/b", 0), ("top", 0)]
        assert len(ours.PartitioningContainerLoader(["spk/b"], file, "1k").load_partition_data(0).utt_data) == 1


def test_what_holds_no_frames_gives_none(make):
    for arrays in ({}, {"empty": np.ones((0, 4))}):
        with h5py.File(make(arrays)) as file:
            assert list(ours.PartitioningFeatureIterator(file, 100)) == []


def test_what_is_no_sequence_of_numbers_is_named(make):
    with h5py.File(make({"good": np.ones((2, 3)), "text": np.array([b"a"])})) as file:
        with pytest.raises(asyncfeed.UnreadableDatasetError, match="'text'"):
            ours.PartitioningFeatureIterator(file, "1k")
        assert len(list(ours.PartitioningFeatureIterator(file, "1k", excludes=["text"]))) == 2


# -- how it is read ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": (2, 4), "maxshape": (None, 4)},
    "gzip": {"compression": "gzip", "chunks": (3, 4)},
}


@pytest.mark.parametrize("mode", ["r", "a", "r+"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_and_the_data_are_the_same_however_they_are_read(make, layout, mode):
    arrays = {utt: array for utt, array in numbered(4).items() if len(array) > 2}  # chunks may not be larger
    path = make(arrays, **LAYOUTS[layout])

    with h5py.File(path, mode) as file:
        got = told(ours.PartitioningFeatureIterator(file, "0.5k", seed=12))
        loader = ours.PartitioningContainerLoader(list(arrays), file, "0.5k", seed=12)
        loaded = [loader.load_partition_data(i) for i in range(len(loader.partitions))]

    utts = [(utt, len(array), 16) for utt, array in arrays.items()]
    wanted = frames_in_order(utts, 512, shuffle=True, seed=12)
    assert got == [(utt, index, float(arrays[utt][index][0])) for utt, index in wanted]
    for data in loaded:
        for utt, (array,) in zip(data.info.utt_ids, data.utt_data, strict=True):
            assert np.array_equal(array, arrays[utt])


def test_what_was_written_just_now_is_read(tmp_path):
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file["a"] = np.arange(8.0).reshape(4, 2)

        assert [frame[0] for _, _, frame in ours.PartitioningFeatureIterator(file, 100, shuffle=False)] == [0, 2, 4, 6]


def test_a_file_in_memory_is_read(tmp_path):
    with h5py.File(tmp_path / "nowhere.h5", "w", driver="core", backing_store=False) as file:
        file["a"] = np.arange(8.0).reshape(4, 2)

        assert len(list(ours.PartitioningFeatureIterator(file, 100))) == 4


def test_a_group_is_read_by_the_ids_in_it(make):
    with h5py.File(make({"train/a": np.zeros((2, 3)), "test/b": np.ones((1, 3))})) as file:
        assert [utt for utt, _, _ in ours.PartitioningFeatureIterator(file["train"], 100)] == ["a", "a"]


def test_the_file_is_the_one_that_is_open_and_not_what_has_its_name_by_now(make):
    path = make({"a": np.zeros((2, 3))})
    with h5py.File(path) as file:
        os.replace(make({"b": np.ones((5, 3))}, "other.h5"), path)

        assert [utt for utt, _, _ in ours.PartitioningFeatureIterator(file, 100)] == ["a", "a"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_its_owner_has_closed_can_be_written_to(make, layout):
    path = make({f"u{i}": np.ones((8, 4)) for i in range(20)}, **LAYOUTS[layout])
    with h5py.File(path) as file:
        loader = ours.PartitioningContainerLoader(list(file), file, 600)
        loader.load_partition_data(0)

    with h5py.File(path, "a") as file:
        file["new"] = np.ones(3)


def test_a_closed_container_is_a_value_error(make):
    box = Box(make(numbered(2)))
    box.close()

    for attempt in (ours.PartitioningContainerLoader, ours.Dataset):
        with pytest.raises(ValueError, match="is not open"):
            attempt(["utt01"], box, *["1k"][: attempt is ours.PartitioningContainerLoader])
    with pytest.raises(ValueError, match="is not open"):
        ours.PartitioningFeatureIterator(box, "1k")


def test_what_is_no_container_is_a_value_error():
    with pytest.raises(ValueError, match="a dict is no container"):
        ours.PartitioningContainerLoader(["a"], {"a": 1}, "1k")


def test_audiomate_is_not_imported():
    script = "import sys, asyncfeed.compat.audiomate; sys.exit('audiomate' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


# -- whole utterances ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "known"),
    [(0, "7748864185232590"), (12, "0a9a3ebbc7611967"), ("text", "80cb03a4a8985bd0"), (0.5, "c7b90aea68e1745f")],
)
def test_partitions_are_made_as_audiomate_made_them(files, seed, known):
    loader = ours.PartitioningContainerLoader(list(files[0]), files, "500", shuffle=True, seed=seed)

    schemes = [[info.utt_ids for info in partitions] for partitions in (loader.partitions, loader.reload())]

    assert digest(schemes) == known


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", [None, 3, "x"])
@pytest.mark.parametrize("size", ["300", "1k", "1g"])
def test_a_loader_gives_what_that_of_audiomate_gives(original, boxes, files, size, seed, shuffle):
    ids = [utt for utt in files[0] if utt != "utt04"]
    mine = ours.PartitioningContainerLoader(ids, files, size, shuffle=shuffle, seed=seed)
    theirs = original.PartitioningContainerLoader(ids, boxes, size, shuffle=shuffle, seed=seed)
    if seed is None:
        mine.rand.setstate(theirs.rand.getstate())

    for _ in range(3):
        mine.reload(), theirs.reload()
        assert [vars(info) for info in mine.partitions] == [vars(info) for info in theirs.partitions]
        for i in range(len(mine.partitions)):
            data, expected = mine.load_partition_data(i), theirs.load_partition_data(i)
            assert data.info.total_lengths() == expected.info.total_lengths()
            assert list(map(plain, [data.utt_data])) == list(map(plain, [expected.utt_data])) or all(
                np.array_equal(a, b) and a.dtype == b.dtype
                for a, b in zip(itertools.chain(*data.utt_data), itertools.chain(*expected.utt_data), strict=True)
            )
    assert (mine.utt_sizes, mine.utt_lengths) == (theirs.utt_sizes, theirs.utt_lengths)
    assert mine.partition_size == theirs.partition_size


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(50, 120), st.booleans(), st.integers())
def test_any_sizes_are_divided_as_the_plain_account_says(sizes, limit, shuffle, seed):
    from asyncfeed.planning.audiomate import pack_utterances

    by_id = {f"u{i:02d}": size for i, size in enumerate(sizes)}
    scheme = Scheme(by_id, limit, shuffle=shuffle, seed=seed)
    ids = sorted(by_id)
    if shuffle:
        random.Random(seed).shuffle(ids)

    edges = pack_utterances([by_id[utt] for utt in ids], limit)

    assert [ids[a:b] for a, b in itertools.pairwise(edges)] == scheme.reload()


def test_a_loader_says_what_is_in_a_partition(make):
    with h5py.File(make({"a": np.ones((2, 3), "f4"), "b": np.ones((4, 3), "f4"), "c": np.ones((5, 3), "f4")})) as one:
        with h5py.File(make({"a": np.ones(7, "i2"), "b": np.ones(1, "i2"), "c": np.ones(0, "i2")}, "two.h5")) as two:
            loader = ours.PartitioningContainerLoader(["c", "a", "b"], [one, two], 100, shuffle=False)
            data = loader.load_partition_data(0)

    first, second = loader.partitions
    assert data.info is first
    assert (first.utt_ids, first.utt_lengths, first.size) == (["a", "b"], [(2, 7), (4, 1)], 24 + 14 + 48 + 2)
    assert first.total_lengths() == (6, 8)
    assert (second.utt_ids, second.size) == (["c"], 60)
    assert [[array.shape for array in arrays] for arrays in data.utt_data] == [[(2, 3), (7,)], [(4, 3), (1,)]]
    assert loader.utt_ids == ["c", "a", "b"]
    assert ours.PartitionInfo().total_lengths() == ()


def test_partitions_can_be_loaded_in_any_order_and_again(mel):
    loader = ours.PartitioningContainerLoader(list(mel), mel, 300, seed=3)
    count = len(loader.partitions)
    assert count > 6

    for index in [0, 1, 2, 0, 0, count - 1, 3, 4, 5, -1, -count, 1, 2]:
        data = loader.load_partition_data(index)

        assert data.info is loader.partitions[index]
        assert all(np.array_equal(a, mel[utt][:]) for utt, (a,) in zip(data.info.utt_ids, data.utt_data, strict=True))
    with pytest.raises(IndexError):
        loader.load_partition_data(count)


def test_all_partitions_can_be_kept(mel):
    loader = ours.PartitioningContainerLoader(list(mel), mel, 300, seed=3)

    kept = [loader.load_partition_data(i) for i in range(len(loader.partitions))]

    got = {utt: array for data in kept for utt, (array,) in zip(data.info.utt_ids, data.utt_data, strict=True)}
    assert all(np.array_equal(array, mel[utt][:]) for utt, array in got.items())
    assert len(got) == 20


def test_a_partition_of_an_earlier_division_cannot_be_loaded(mel):
    loader = ours.PartitioningContainerLoader(list(mel), mel, 300)
    earlier = loader.partitions[0]
    loader.reload()
    loader.partitions[0] = earlier

    with pytest.raises(ValueError, match="reload"):
        loader.load_partition_data(0)


def test_a_list_of_partitions_can_be_rearranged(mel):
    loader = ours.PartitioningContainerLoader(list(mel), mel, 300, seed=3)
    loader.partitions.reverse()

    for index, info in enumerate(loader.partitions):
        assert loader.load_partition_data(index).info is info


def test_utterances_without_frames_at_the_end_are_in_no_partition(make):
    with h5py.File(make({"a": np.ones((2, 2)), "b": np.ones((2, 2)), "z": np.ones((0, 2))})) as file:
        assert [i.utt_ids for i in ours.PartitioningContainerLoader(list(file), file, 32, False).partitions] == [
            ["a"],
            ["b", "z"],
        ]
        assert ours.PartitioningContainerLoader(["z"], file, 32).partitions == []
        assert ours.PartitioningContainerLoader([], file, 32).partitions == []


def test_a_corpus_and_a_single_container_are_taken_for_what_they_can_do(files):
    box = Box(files[0].filename)
    loader = ours.PartitioningContainerLoader(Corpus(["utt03", "utt01"]), box, "1k", shuffle=False)

    data = loader.load_partition_data(0)

    assert loader.utt_ids == ["utt03", "utt01"]
    assert loader.containers == [box]
    assert data.info.utt_ids == ["utt01", "utt03"]
    box.close()


def test_missing_utterances_and_containers_are_value_errors(files, make):
    with h5py.File(make({"utt01": np.ones((2, 2))}, "few.h5")) as few:
        with pytest.raises(ValueError, match="'utt99'"):
            ours.PartitioningContainerLoader(["utt01", "utt99"], files, "1k")
        with pytest.raises(ValueError, match="utt02"):
            ours.PartitioningContainerLoader(["utt01", "utt02"], [files[0], few], "1k")
    with pytest.raises(ValueError, match="at least one"):
        ours.PartitioningContainerLoader(["utt01"], [], "1k")
    with pytest.raises(ValueError, match="more than a partition of 111"):
        ours.PartitioningContainerLoader(["utt01"], files[0], 111)


def test_several_threads_may_load(mel):
    from concurrent.futures import ThreadPoolExecutor

    loader = ours.PartitioningContainerLoader(list(mel), mel, 300, seed=3)
    count = len(loader.partitions)

    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(loader.load_partition_data, [i % count for i in range(40)]))

    for data in loaded:
        assert all(np.array_equal(a, mel[utt][:]) for utt, (a,) in zip(data.info.utt_ids, data.utt_data, strict=True))


def test_a_forked_child_loads_for_itself(mel):
    loader = ours.PartitioningContainerLoader(list(mel), mel, 300, seed=3)
    loader.load_partition_data(0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forking beside threads
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            data = loader.load_partition_data(1)
            os._exit(0 if data.info.utt_ids == loader.partitions[1].utt_ids else 1)
        os._exit(2)

    assert os.waitpid(pid, 0)[1] == 0
    assert len(loader.load_partition_data(1).utt_data) == len(loader.partitions[1].utt_ids)


# -- chunks and frames ---------------------------------------------------------------------------------------------------

CHUNKS = {
    0: ("889f922f7398bc8b", "afe19615942c1d43"),
    12: ("7b530b9377aa3cfc", "f8904bd06f8027f1"),
    "text": ("4808659586e15591", "76b25f8926a42f3d"),
    0.5: ("ac0fe4a550521dfe", "94437973cb4938c8"),
}
"""What audiomate 6.0.0 gave in two epochs: chunks of three frames, and frames."""


@pytest.mark.parametrize("seed", CHUNKS)
def test_chunks_and_frames_come_as_they_came_from_audiomate(files, seed):
    chunks = ours.MultiFrameIterator(list(files[0]), files, "500", 3, return_length=True, seed=seed)
    frames = ours.FrameIterator(list(files[0]), files, "500", seed=seed)

    assert digest([plain(chunks) for _ in range(2)]) == CHUNKS[seed][0]
    assert digest([plain(frames) for _ in range(2)]) == CHUNKS[seed][1]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("frames_per_chunk", [1, 4, 100])
@pytest.mark.parametrize("how", [{}, {"pad": True}, {"return_length": True}])
def test_chunks_are_those_of_audiomate_itself(original, boxes, files, frames_per_chunk, how, shuffle):
    arguments = (list(files[0]), boxes, "500", frames_per_chunk)
    mine = ours.MultiFrameIterator(*arguments, shuffle=shuffle, seed=4, **how)
    theirs = original.MultiFrameIterator(*arguments, shuffle=shuffle, seed=4, **how)

    first, expected = plain([next(mine)]), plain([next(theirs)])  # before there was any loop

    assert first == expected
    assert [plain(mine) for _ in range(3)] == [plain(theirs) for _ in range(3)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_chunks_come_in_the_order_of_the_plain_account(files, shuffle):
    mel, lengths = files[0], {utt: len(array) for utt, array in numbered(4).items()}
    iterator = ours.MultiFrameIterator(list(mel), files, 500, 5, shuffle=shuffle, seed=9)
    wanted = chunks_in_order(lengths, {utt: 24 * n for utt, n in lengths.items()}, 500, 5, 2, shuffle=shuffle, seed=9)

    for epoch in wanted:
        for (mine, targets), (utt, start) in zip(iterator, epoch, strict=True):
            assert np.array_equal(mine, mel[utt][start : start + 5])
            assert np.array_equal(targets, files[1][utt][start : start + 5])


def test_what_is_not_float32_becomes_so_and_is_padded_with_zeros(make):
    with h5py.File(make({"a": np.arange(3, dtype="i8")})) as file:
        whole, rest = ours.MultiFrameIterator(["a"], file, "1k", 2, pad=True, shuffle=False)

    assert (whole[0].dtype, whole[0].tolist(), whole[1]) == (np.float32, [0, 1], 2)
    assert (rest[0].tolist(), rest[1]) == ([2, 0], 1)


@pytest.mark.parametrize("how", [{}, {"pad": True}, {"return_length": True}])
def test_utterances_of_different_widths_are_taken_apart_alike(make, how):
    arrays = {f"u{i}": np.arange(12.0 * i).reshape(-1, 1 + i % 3) for i in range(1, 8)}
    alone = ours.MultiFramePartitionData  # chunk by chunk

    with h5py.File(make(arrays)) as file:
        iterator = ours.MultiFrameIterator(list(arrays), file, "1g", 5, shuffle=False, **how)
        chunks = alone(iterator.loader.load_partition_data(0), 5, shuffle=False, **how)

        assert plain(iterator) == plain(chunks[i] for i in range(len(chunks)))
    assert len(chunks) == sum(-(-len(array) // 5) for array in arrays.values())


@pytest.mark.parametrize("how", [{}, {"pad": True}, {"return_length": True}])
def test_many_chunks_at_once_are_what_they_are_one_by_one(files, how):
    loader = ours.PartitioningContainerLoader(list(files[0]), files, "1g", seed=2)
    chunks = ours.MultiFramePartitionData(loader.load_partition_data(0), 5, seed=3, **how)

    assert plain(chunks.block(3, 1000)) == plain(chunks[i] for i in range(3, len(chunks)))


def test_chunks_may_be_written_to(files):
    for chunk in ours.MultiFrameIterator(list(files[0]), files, "1g", 5, pad=True, seed=1):
        chunk[0] += 1
        chunk[1][:] = 7

    assert files[0]["utt01"][0, 0] == 0


def test_an_epoch_that_was_left_is_begun_anew(files):
    left, whole = (ours.FrameIterator(list(files[0]), files, 500, shuffle=False) for _ in range(2))

    for _ in zip(range(30), left, strict=False):
        pass

    assert plain(left) == plain(whole)
    with pytest.raises(StopIteration):
        next(left)


def test_containers_that_disagree_about_a_length_are_a_value_error_when_it_comes_up(make, mel):
    with h5py.File(make({utt: np.ones((len(mel[utt]) + 1, 2)) for utt in mel}, "longer.h5")) as longer:
        iterator = ours.FrameIterator(list(mel), [mel, longer], "1k", shuffle=False)

        with pytest.raises(ValueError, match="utterance 'utt00' has 0 and 1 frames"):
            next(iterator)
        with pytest.raises(ValueError, match="'utt00'"):
            ours.FrameDataset(list(mel), [mel, longer])


def test_chunks_without_frames_are_a_value_error(mel):
    iterator = ours.MultiFrameIterator(list(mel), mel, "1k", 0)

    with pytest.raises(ValueError, match="frames_per_chunk=0"):
        next(iterator)
    with pytest.raises(ValueError, match="frames_per_chunk=0"):
        ours.MultiFrameDataset(list(mel), mel, 0)


def test_a_base_class_leaves_the_work_to_its_heirs(mel):
    iterator, dataset = ours.DataIterator(Corpus(["utt01"]), mel), ours.Dataset(Corpus(["utt02", "utt01"]), mel)

    assert (iterator.utt_ids, iterator.containers) == (["utt01"], [mel])
    assert dataset.utt_ids == ["utt01", "utt02"]
    for call in (iterator.__iter__, iterator.__next__, dataset.__len__, lambda: dataset[0]):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(ValueError, match="at least one"):
        ours.DataIterator(["utt01"], [])


# -- by number -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"pad": True}, {"return_length": True}])
def test_datasets_are_those_of_audiomate_itself(original, boxes, files, how):
    ids = list(files[0])
    pairs = [
        (ours.MultiFrameDataset(ids, boxes, 4, **how), original.MultiFrameDataset(ids, boxes, 4, **how)),
        (ours.UtteranceDataset(ids, boxes, **how), original.UtteranceDataset(ids, boxes, **how)),
        (ours.FrameDataset(ids, boxes), original.FrameDataset(ids, boxes)),
    ]

    for mine, theirs in pairs:
        assert len(mine) == len(theirs)
        assert plain(mine[i] for i in range(len(mine))) == plain(theirs[i] for i in range(len(theirs)))
    for mine, theirs in (pairs[0], pairs[2]):
        assert plain(mine.partitioned_iterator("500", seed=1)) == plain(theirs.partitioned_iterator("500", seed=1))


def test_chunks_can_be_had_by_number(files):
    arrays = numbered(4)
    dataset = ours.MultiFrameDataset(list(files[0]), files, 5, return_length=True)
    wanted = [(utt, start) for utt, array in arrays.items() for start in range(0, len(array), 5)]

    assert len(dataset) == len(wanted)
    for i, (utt, start) in enumerate(wanted):
        mine, targets, length = dataset[i]
        assert np.array_equal(mine, arrays[utt][start : start + 5])
        assert length == len(mine) == len(targets)
    assert plain([dataset[-1]]) == plain([dataset[len(dataset) - 1]])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_dataset_of_frames_ends_where_the_frames_do(files):
    dataset = ours.FrameDataset(list(files[0]), files)

    assert len(dataset) == 108
    assert [frame[0] for frame, _ in dataset] == [float(i) for i in range(0, 4 * 108, 4)]
    assert len(list(dataset.partitioned_iterator("1k"))) == 108


def test_whole_utterances_are_padded_to_the_longest_of_their_container(make, mel):
    with h5py.File(make({utt: np.full(i, i) for i, utt in enumerate(mel)}, "labels.h5")) as labels:
        dataset = ours.UtteranceDataset(list(mel), [mel, labels], pad=True)
        frames, num_frames, label, num_labels = dataset[3]
        alone = ours.UtteranceDataset(["utt03"], mel, return_length=False)[0]

    assert dataset.pad_lengths == [12, 19]
    assert (frames.shape, num_frames, label.tolist(), num_labels) == ((12, 4), 8, [3, 3, 3] + 16 * [0], 3)
    assert np.array_equal(frames[:8], mel["utt03"][:])
    assert not frames[8:].any()
    assert len(alone) == 1
    assert np.array_equal(alone[0], mel["utt03"][:])


class Twice:
    """A processor that doubles."""

    def process_frames(self, data, sampling_rate, offset=0, last=False):
        assert (sampling_rate, offset, last) == (16_000, 0, True)
        return data * 2


def test_features_can_be_transformed_on_their_way(files):
    features = Features(files[0].filename)

    doubled, untouched = ours.UtteranceDataset(["utt03"], [features, files[1]], False, transform=[Twice(), None])[0]

    assert np.array_equal(doubled, files[0]["utt03"][:] * 2)
    assert np.array_equal(untouched, files[1]["utt03"][:])
    with pytest.raises(ValueError, match="no sampling rate"):
        ours.UtteranceDataset(["utt03"], files, transform=[None, Twice()])
    with pytest.raises(ValueError, match="1 transforms for 2 containers"):
        ours.UtteranceDataset(["utt03"], files, transform=Twice())
    features.close()


def test_missing_utterances_in_a_dataset_are_a_value_error(files):
    with pytest.raises(ValueError, match=r"mel\.h5"):
        ours.UtteranceDataset(["utt99"], files)


def test_the_names_on_the_door_are_those_of_audiomate(original):
    names = {name for name, value in vars(original).items() if isinstance(value, type)}

    assert names <= set(ours.__all__)


# -- the seam ------------------------------------------------------------------------------------------------------------


def test_a_plan_of_ours_orders_units_with_its_own_draws(path: Path):
    corpus = open_library(path).corpus
    plan = make_plan(corpus, partition_nbytes=1 << 20, seed=4)
    units, again = np.arange(50, dtype=np.int32), np.arange(50, dtype=np.int32)

    plan.order_units(plan[0], units)
    plan.draws(plan[0]).shuffle(again)

    assert np.array_equal(units, again)
