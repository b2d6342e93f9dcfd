"""Every iteration form gives exactly what plain h5py gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import h5py
import numpy as np
import psutil
import pytest
import trio

from asyncfeed import Batch, Feed, FieldMismatchError, LoadedPartition, ShapeError, Source, Window

SMALLEST = 8192
"""The smallest budget: two segments of one page."""


def waves(num=16, *, longest=140, frame=(8,), dtype="f4", seed=1):
    """Utterances of 0 to ``longest`` frames, some of them larger than the smallest partition."""
    rng = np.random.default_rng(seed)
    lengths = [0, longest, *rng.integers(0, longest, num - 3).tolist(), 0]
    return {f"utt{i:03d}": (rng.random((n, *frame)) * 200).astype(dtype) for i, n in enumerate(lengths)}


def kept(item):
    """A copy of an item, so that no segment is held."""
    if isinstance(item, np.ndarray):
        return item.copy()
    if isinstance(item, dict):
        return {name: kept(value) for name, value in item.items()}
    if isinstance(item, tuple):
        values = [kept(value) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    return item.ids if isinstance(item, LoadedPartition) else item


def by_for(stream):
    return [kept(item) for item in stream]


async def gather(stream):
    return [kept(item) async for item in stream]


def by_asyncio(stream):
    return asyncio.run(gather(stream))


def by_trio(stream):
    return trio.run(gather, stream)


@pytest.fixture(params=[by_for, by_asyncio, by_trio], ids=["for", "asyncio", "trio"])
def collect(request):
    """All items of an epoch, gathered with ``for``, or with ``async for`` on either event loop."""
    return request.param


@pytest.fixture(params=[False, True], ids=["in_order", "shuffled"])
def shuffle(request):
    return request.param


@pytest.fixture(params=[SMALLEST, 20_000, "auto"])
def budget(request):
    return request.param


def same(found, wanted):
    """Equal to the last byte, in dtype and in shape."""
    return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def plain(path):
    """What h5py gives, in its order."""
    with h5py.File(path) as file:
        return {name: dataset[()] for name, dataset in file.items()}


def frames_of(arrays):
    return [(utt, index) for utt, array in arrays.items() for index in range(len(array))]


class TestTriplets:
    def test_are_the_frames_of_h5py(self, make, collect, shuffle, budget):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget=budget) as feed:
            found = collect(feed)

        wanted = plain(path)
        assert all(type(index) is int and same(frame, wanted[utt][index]) for utt, index, frame in found)
        order = [(utt, index) for utt, index, _ in found]
        assert sorted(order) == frames_of(wanted)
        assert (order == frames_of(wanted)) is not shuffle

    def test_are_the_same_for_every_kind_of_loop(self, make, shuffle):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget=SMALLEST) as feed:
            epochs = []
            for collect in (by_for, by_asyncio, by_trio):
                feed.set_epoch(3)
                epochs.append([(utt, index, frame.tobytes()) for utt, index, frame in collect(feed)])

        assert epochs[0] == epochs[1] == epochs[2]

    def test_of_compressed_utterances_that_had_to_be_cut(self, make, collect, shuffle):
        arrays = {utt: array for utt, array in waves(6, longest=1000).items() if len(array) > 7}
        path = make(arrays, chunks=(7, 3), compression="gzip", shuffle=True)

        with Feed(path, shuffle=shuffle, memory_budget=SMALLEST) as feed:
            found = collect(feed)
            assert any(partition.starts.any() for partition in feed.plan)

        wanted = plain(path)
        assert sorted((utt, index) for utt, index, _ in found) == frames_of(wanted)
        assert all(same(frame, wanted[utt][index]) for utt, index, frame in found)

    def test_are_as_many_as_len_says(self, make, shuffle):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget=SMALLEST) as feed:
            assert len(feed) == sum(map(len, plain(path).values())) == len(by_for(feed))

    def test_of_waveforms_are_samples(self, make, collect, shuffle):
        """One-dimensional data: a frame is a scalar of the stored dtype."""
        path = make(waves(5, longest=3000, frame=(), dtype="i2"))

        with Feed(path, shuffle=shuffle, memory_budget=SMALLEST) as feed:
            found = collect(feed)

        wanted = plain(path)
        assert sorted((utt, index) for utt, index, _ in found) == frames_of(wanted)
        assert all(isinstance(sample, np.int16) and sample == wanted[utt][index] for utt, index, sample in found)

    @pytest.mark.parametrize("frame", [(3, 2), (2, 3, 4)], ids=["rank3", "rank4"])
    def test_of_any_rank(self, make, collect, shuffle, frame):
        path = make(waves(8, longest=60, frame=frame))

        with Feed(path, shuffle=shuffle, memory_budget=SMALLEST) as feed:
            found = collect(feed)

        wanted = plain(path)
        assert sorted((utt, index) for utt, index, _ in found) == frames_of(wanted)
        assert all(same(frame, wanted[utt][index]) for utt, index, frame in found)

    def test_may_differ_in_shape_and_dtype(self, make, collect, shuffle):
        arrays = {
            "a": np.arange(60, dtype="f4").reshape(20, 3),
            "b": np.arange(14, dtype="i2").reshape(7, 2),
            "c": np.arange(9, dtype="u1"),
            "d": np.arange(40, dtype=">f8").reshape(2, 4, 5),
            "e": np.zeros((0, 9), "c8"),
        }
        path = make(arrays)

        with Feed(path, shuffle=shuffle) as feed:
            found = collect(feed)

        assert sorted((utt, index) for utt, index, _ in found) == frames_of(arrays)
        native = {utt: array.astype(array.dtype.newbyteorder("=")) for utt, array in arrays.items()}
        assert all(same(np.asarray(frame), np.asarray(native[utt][index])) for utt, index, frame in found)

    def test_without_width_still_count(self, make, collect, shuffle):
        """Shape (3, 0): three frames without values."""
        path = make({"a": np.zeros((3, 0), "f4"), "b": np.zeros((2, 0), "f4")})

        with Feed(path, shuffle=shuffle) as feed:
            found = collect(feed)

        assert sorted((utt, index) for utt, index, _ in found) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
        assert all(frame.shape == (0,) for _, _, frame in found)

    def test_may_be_written_to(self, make):
        path = make(waves())

        with Feed(path) as feed:
            for _, _, frame in feed:
                np.add(frame, 1, out=frame)

            wanted = plain(path)
            assert all(same(frame, wanted[utt][index]) for utt, index, frame in feed)


class TestUtterances:
    def test_are_the_datasets_of_h5py(self, make, collect, shuffle):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget="16k") as feed:
            found = collect(feed.utterances())
            assert len(feed.utterances()) == feed.num_utterances == len(found)

        wanted = plain(path)
        assert sorted(utt for utt, _ in found) == list(wanted)
        assert ([utt for utt, _ in found] == list(wanted)) is not shuffle
        assert all(same(array, wanted[utt]) for utt, array in found)

    @pytest.mark.parametrize("place", [0, 1, 2, None], ids=["first", "middle", "last", "alone"])
    def test_of_no_frames_are_not_lost(self, make, collect, shuffle, place):
        arrays = {str(i): np.full((0 if place in (i, None) else 2, 40), i, "f4") for i in range(3)}
        path = make(arrays)

        with Feed(path, shuffle=shuffle) as feed:
            found = collect(feed.utterances())
            assert len(feed) == len(collect(feed)) == sum(map(len, arrays.values()))

        assert sorted((utt, array.shape) for utt, array in found) == [(utt, a.shape) for utt, a in arrays.items()]

    def test_without_frames_keep_their_own_shape(self, make, shuffle):
        arrays = {"a": np.ones((4, 3), "f4"), "b": np.zeros((0, 40), "i2"), "c": np.zeros((0,), "f8")}
        path = make(arrays)

        with Feed(path, shuffle=shuffle) as feed:
            assert all(same(array, arrays[utt]) for utt, array in feed.utterances())


class TestBatches:
    @pytest.mark.parametrize("size", [1, 7, 256, 10_000])
    def test_are_of_exactly_the_size_asked_for_but_the_last(self, make, collect, shuffle, size):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget=20_000) as feed:
            found = collect(feed.batches(size))
            assert len(feed.batches(size)) == len(found)

        wanted = plain(path)
        num_frames = sum(map(len, wanted.values()))
        assert [len(b.frames) for b in found] == [size] * (num_frames // size) + [num_frames % size] * bool(
            num_frames % size
        )
        assert all(
            isinstance(batch, Batch) and len(batch.utts) == len(batch.indices) == len(batch.frames) for batch in found
        )
        rows = [row for batch in found for row in zip(batch.utts, batch.indices.tolist(), batch.frames, strict=True)]
        assert sorted((utt, index) for utt, index, _ in rows) == frames_of(wanted)
        assert all(same(frame, wanted[utt][index]) for utt, index, frame in rows)

    def test_drop_the_last_when_asked_to(self, make, collect, shuffle):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget=20_000) as feed:
            found = collect(feed.batches(100, drop_last=True))
            assert len(feed.batches(100, drop_last=True)) == len(found) == len(feed) // 100

        assert {batch.frames.shape for batch in found} == {(100, 8)}
        drawn = [pair for batch in found for pair in zip(batch.utts, batch.indices.tolist(), strict=True)]
        assert len(set(drawn)) == len(drawn) == len(found) * 100

    def test_that_divide_the_frames_evenly_have_no_rest(self, make, collect):
        path = make({"a": np.zeros((6, 2), "f4"), "b": np.zeros((4, 2), "f4")})

        with Feed(path) as feed:
            assert [len(batch.frames) for batch in collect(feed.batches(5))] == [5, 5]

    def test_hold_the_triplets_in_their_order(self, make, shuffle):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget=SMALLEST) as feed:
            triplets = [(utt, index) for utt, index, _ in feed]
            feed.set_epoch(0)
            batches = list(feed.batches(13))

        assert [pair for b in batches for pair in zip(b.utts, b.indices.tolist(), strict=True)] == triplets

    def test_may_be_kept(self, make):
        """A batch is a copy: keeping all of them holds no segment."""
        path = make(waves())

        with Feed(path, memory_budget=SMALLEST) as feed:
            batches = list(feed.batches(50))
            assert feed.statistics().segments <= 2

        wanted = plain(path)
        rows = [row for b in batches for row in zip(b.utts, b.indices.tolist(), b.frames, strict=True)]
        assert all(same(frame, wanted[utt][index]) for utt, index, frame in rows)

    @pytest.mark.parametrize("budget", [SMALLEST, "auto"], ids=["apart", "together"])
    def test_name_the_utterance_that_does_not_fit(self, make, collect, budget):
        """Whether the odd one is in the same partition or in another."""
        path = make({"a": np.zeros((900, 1), "f4"), "b": np.zeros((900, 1), "f4"), "odd": np.zeros((450, 2), "f4")})

        with Feed(path, shuffle=False, memory_budget=budget) as feed, pytest.raises(ShapeError, match="'odd'"):
            collect(feed.batches(10))

    def test_do_not_mind_the_shape_of_what_has_no_frames(self, make, collect, shuffle):
        path = make({"a": np.ones((4, 3), "f4"), "b": np.zeros((0, 40), "i2"), "c": np.ones((2, 3), "f4")})

        with Feed(path, shuffle=shuffle) as feed:
            assert [batch.frames.shape for batch in collect(feed.batches(6))] == [(6, 3)]


def windows_by_hand(arrays, length, hop, pad):
    """The definition, spelt out."""
    found = []
    for utt, array in arrays.items():
        for start in range(0, len(array), hop):
            piece = array[start : start + length]
            covered = start > 0 and start - hop + length >= len(array)
            if len(piece) == length or (pad and not covered):
                padding = np.zeros((length - len(piece), *array.shape[1:]), array.dtype)
                found.append((utt, start, len(piece), np.concatenate([piece, padding])))
            if len(piece) < length or covered:
                break
    return found


class TestWindows:
    @pytest.mark.parametrize("pad", [False, True], ids=["complete", "padded"])
    @pytest.mark.parametrize(("length", "hop"), [(20, 10), (5, None), (7, 3), (1, 1), (4, 9), (30, 1)])
    @pytest.mark.parametrize("budget", [SMALLEST, "auto"])
    def test_are_the_slices_of_h5py(self, make, shuffle, length, hop, pad, budget):
        path = make(waves())

        with Feed(path, shuffle=shuffle, memory_budget=budget) as feed:
            windows = feed.windows(length, hop, pad=pad)
            num_windows, found = len(windows), by_for(windows)

        wanted = windows_by_hand(plain(path), length, hop or length, pad)
        assert num_windows == len(found) == len(wanted)
        if shuffle:
            assert [(w.utt, w.start) for w in found] != [w[:2] for w in wanted]
            found.sort(key=lambda window: window[:2])
        assert [w[:3] for w in found] == [w[:3] for w in wanted]
        assert all(same(window.frames, frames) for window, (*_, frames) in zip(found, wanted, strict=True))

    def test_are_the_same_for_every_kind_of_loop(self, make, collect):
        path = make(waves())

        with Feed(path, shuffle=False) as feed:
            found = collect(feed.windows(length=20, hop=10))

        wanted = windows_by_hand(plain(path), 20, 10, pad=False)
        assert all(isinstance(window, Window) for window in found)
        assert [w[:3] for w in found] == [w[:3] for w in wanted]

    def test_with_padding_cover_every_frame(self, make):
        path = make(waves())

        with Feed(path, memory_budget=SMALLEST) as feed:
            covered = {
                (w.utt, i) for w in feed.windows(length=9, hop=4, pad=True) for i in range(w.start, w.start + w.length)
            }

        assert covered == set(frames_of(plain(path)))

    def test_may_have_several_fields(self, make, collect):
        a, b = waves(frame=(2,), seed=3), waves(frame=(), dtype="i4", seed=3)
        source = {"a": make(a, name="a.h5"), "b": make(b, name="b.h5")}

        with Feed(source, shuffle=False) as feed:
            found = collect(feed.windows(10, pad=True))

        for name, arrays in (("a", a), ("b", b)):
            wanted = windows_by_hand(arrays, 10, 10, pad=True)
            assert all(same(w.frames[name], frames) for w, (*_, frames) in zip(found, wanted, strict=True))


class TestPartitions:
    def test_hold_the_utterances_of_h5py(self, make, collect, shuffle, budget):
        path, wanted = make(waves()), waves()
        pieces = {utt: [] for utt in wanted}

        def take(partition):
            assert len(partition) == len(partition.ids) == len(partition.arrays)
            assert partition.frames.tobytes() == b"".join(array.tobytes() for array in partition.arrays)
            for utt, start, length, array in zip(
                partition.ids, partition.starts.tolist(), partition.lengths.tolist(), partition.arrays, strict=True
            ):
                assert len(array) == length
                pieces[utt].append((start, array.copy()))

        async def take_all(stream):
            async for partition in stream:
                take(partition)

        with Feed(path, shuffle=shuffle, memory_budget=budget) as feed:
            match collect:
                case _ if collect is by_for:
                    for partition in feed.partitions():
                        take(partition)
                        del partition
                case _ if collect is by_asyncio:
                    asyncio.run(take_all(feed.partitions()))
                case _:
                    trio.run(take_all, feed.partitions())

        for utt, array in wanted.items():
            pieces[utt].sort(key=lambda piece: piece[0])
            assert same(np.concatenate([piece for _, piece in pieces[utt]]), array)

    def test_are_those_of_the_plan(self, make):
        path = make(waves())

        with Feed(path, memory_budget=SMALLEST, shuffle=False) as feed:
            planned = [(p.number, p.starts.tolist(), p.lengths.tolist()) for p in feed.plan]
            found = [(p.number, p.starts.tolist(), p.lengths.tolist()) for p in feed.partitions()]

        assert found == planned
        assert len(found) > 3

    def test_of_mixed_frames_have_arrays_but_no_single_one(self, make):
        path = make({"a": np.ones((2, 3), "f4"), "b": np.ones((4,), "i2")})

        with Feed(path, shuffle=False) as feed:
            for partition in feed.partitions():
                assert [array.shape for array in partition.arrays] == [(2, 3), (4,)]
                with pytest.raises(ShapeError, match="'b'"):
                    _ = partition.frames


class TestFields:
    @pytest.fixture
    def fields(self):
        return {"mel": waves(frame=(6,), seed=5), "pitch": waves(frame=(), dtype=">f8", seed=5)}

    @pytest.fixture
    def source(self, fields, make):
        return {name: make(arrays, name=f"{name}.h5") for name, arrays in fields.items()}

    def test_come_as_dicts_of_rows(self, fields, source, collect, shuffle, budget):
        with Feed(source, shuffle=shuffle, memory_budget=budget) as feed:
            found = collect(feed)

        assert sorted((utt, index) for utt, index, _ in found) == frames_of(fields["mel"])
        assert all(list(row) == ["mel", "pitch"] for *_, row in found)
        assert all(same(row["mel"], fields["mel"][utt][index]) for utt, index, row in found)
        assert all(row["pitch"] == fields["pitch"][utt][index] for utt, index, row in found)

    def test_come_as_dicts_of_arrays(self, fields, source, collect, shuffle):
        with Feed(source, shuffle=shuffle, memory_budget="32k") as feed:
            found = dict(collect(feed.utterances()))

        assert sorted(found) == list(fields["mel"])
        assert all(same(found[utt]["mel"], array) for utt, array in fields["mel"].items())
        assert all(same(found[utt]["pitch"], array.astype("f8")) for utt, array in fields["pitch"].items())

    def test_are_batched_side_by_side(self, fields, source, collect, shuffle):
        with Feed(source, shuffle=shuffle, memory_budget=SMALLEST) as feed:
            found = collect(feed.batches(64))

        for batch in found:
            for k, (utt, index) in enumerate(zip(batch.utts, batch.indices.tolist(), strict=True)):
                assert same(batch.frames["mel"][k], fields["mel"][utt][index])
                assert batch.frames["pitch"][k] == fields["pitch"][utt][index]
        assert sum(len(batch.utts) for batch in found) == len(frames_of(fields["mel"]))

    def test_may_lie_in_one_file(self, tmp_path, collect, shuffle):
        path = tmp_path / "demos.h5"
        rng = np.random.default_rng(0)
        with h5py.File(path, "w") as file:
            for i in range(12):
                group = file.create_group(f"data/demo_{i}")
                group["actions"], group["obs/image"] = (
                    rng.random((10 + i, 7)),
                    rng.integers(0, 255, (10 + i, 4, 4, 3), "u1"),
                )
                group["obs/state"] = np.arange(3)
        source = {
            "actions": Source(path, key="data/{utt}/actions"),
            "image": Source(path, key="data/{utt}/obs/image"),
        }

        with Feed(source, shuffle=shuffle, memory_budget="32k") as feed:
            found = collect(feed)

        assert len(found) == sum(10 + i for i in range(12))
        with h5py.File(path) as file:
            for utt, index, row in found:
                assert same(row["actions"], file[f"data/{utt}/actions"][index])
                assert same(row["image"], file[f"data/{utt}/obs/image"][index])

    def test_in_another_order_are_brought_together(self, tmp_path, fields):
        with h5py.File(tmp_path / "b.h5", "w", track_order=True) as file:
            for utt in reversed(list(fields["pitch"])):
                file[utt] = fields["pitch"][utt]
        with h5py.File(tmp_path / "a.h5", "w") as file:
            for utt, array in fields["mel"].items():
                file[utt] = array

        with Feed({"a": tmp_path / "a.h5", "b": tmp_path / "b.h5"}, shuffle=False) as feed:
            found = by_for(feed.utterances())

        assert [utt for utt, _ in found] == list(fields["mel"])
        assert all(same(row["b"], fields["pitch"][utt].astype("f8")) for utt, row in found)

    def test_of_different_lengths_can_be_had_as_utterances_only(self, make, collect):
        long, short = np.ones((9, 2), "f4"), np.ones((3,), "i2")
        source = {"a": make({"u": long}, name="a.h5"), "b": make({"u": short}, name="b.h5")}

        with Feed(source) as feed:
            ((utt, arrays),) = collect(feed.utterances())
            assert (utt, arrays["a"].shape, arrays["b"].shape) == ("u", (9, 2), (3,))
            for stream in (feed, feed.batches(2), feed.windows(2)):
                with pytest.raises(FieldMismatchError, match="'u' has 9 frames in field 'a' but 3 in field 'b'"):
                    collect(stream)

    def test_one_that_is_named_comes_as_a_dict_too(self, make, collect):
        path = make({"u": np.ones((2, 2), "f4")})

        with Feed({"mel": path}) as feed:
            assert all(list(row) == ["mel"] for *_, row in collect(feed))


class TestEpochs:
    @staticmethod
    def order(feed):
        return [(utt, index) for utt, index, _ in feed]

    def test_differ_and_repeat(self, make):
        path = make(waves())

        with Feed(path, seed=7, memory_budget=SMALLEST) as feed:
            first, second = self.order(feed), self.order(feed)
            feed.set_epoch(0)
            again = self.order(feed)
        with Feed(path, seed=7, memory_budget=SMALLEST) as feed:
            feed.set_epoch(1)
            elsewhere = self.order(feed)

        assert first != second
        assert sorted(first) == sorted(second)
        assert again == first
        assert elsewhere == second

    def test_mix_the_utterances_of_a_partition_anew(self, make):
        path = make(waves())

        with Feed(path, memory_budget="16k") as feed:
            together = [{frozenset(p.ids) for p in feed.partitions()} for _ in range(2)]

        assert together[0] != together[1]

    def test_of_another_seed_are_others(self, make):
        path = make(waves())
        orders = []
        for seed in (0, 1):
            with Feed(path, seed=seed) as feed:
                orders.append(self.order(feed))

        assert orders[0] != orders[1]

    def test_are_counted(self, make):
        path = make(waves())

        with Feed(path) as feed:
            assert feed.epoch == 0
            iterator = iter(feed)
            next(iterator)
            assert feed.epoch == 0
            by_for(iterator)
            assert feed.epoch == 1
            feed.set_epoch(5)
            assert feed.epoch == 5
            by_for(feed)
            assert feed.epoch == 6

    def test_in_file_order_are_all_alike(self, make):
        path = make(waves())

        with Feed(path, shuffle=False) as feed:
            assert self.order(feed) == self.order(feed)

    def test_neither_prefetch_nor_free_memory_decide_about_utterances(self, make):
        path = make(waves(longest=60))
        orders = []
        for prefetch, budget in ((1, "16k"), (3, "16k"), (1, "256k"), (2, "auto")):
            with Feed(path, seed=3, prefetch=prefetch, memory_budget=budget) as feed:
                orders.append([utt for utt, _ in feed.utterances()])

        assert all(order == orders[0] for order in orders)

    def test_frame_order_depends_on_the_partition_size_alone(self, make):
        """Twice the budget with twice the segments is the same plan."""
        path = make(waves())
        orders = []
        for prefetch, budget in ((1, "16k"), (3, "32k")):
            with Feed(path, prefetch=prefetch, memory_budget=budget) as feed:
                orders.append(self.order(feed))

        assert orders[0] == orders[1]

    def test_automatic_budget_does_not_follow_the_free_memory(self, make, monkeypatch):
        path = make(waves())
        memory = psutil.virtual_memory()
        orders = []
        for gib in (2, 900):
            monkeypatch.setattr(psutil, "virtual_memory", lambda gib=gib: memory._replace(available=gib << 30))
            with Feed(path) as feed:
                orders.append((feed.budget.nbytes, self.order(feed)))

        assert orders[0] == orders[1]


class TestRanks:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 20])
    def test_are_disjoint_and_complete(self, make, shuffle, world_size):
        path = make(waves())
        shares = []
        for rank in range(world_size):
            with Feed(path, shuffle=shuffle, rank=rank, world_size=world_size, memory_budget="32k") as feed:
                assert len(feed.utterances()) == feed.num_utterances
                num_frames, share = len(feed), [utt for utt, _ in feed.utterances()]
                feed.set_epoch(0)
                assert len(by_for(feed)) == num_frames
                shares.append(share)

        assert sorted(itertools.chain.from_iterable(shares)) == list(waves())
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_come_from_the_environment(self, make, monkeypatch):
        path = make(waves())
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")

        with Feed(path) as from_environment, Feed(path, rank=1, world_size=2) as given:
            assert [u for u, _ in from_environment.utterances()] == [u for u, _ in given.utterances()]
            assert from_environment.num_utterances == len(waves()) // 2

    def test_change_shares_from_epoch_to_epoch(self, make):
        path = make(waves())

        with Feed(path, rank=0, world_size=2) as feed:
            shares = [{utt for utt, _ in feed.utterances()} for _ in range(2)]

        assert shares[0] != shares[1]


class TestSelection:
    @pytest.mark.parametrize(
        ("includes", "excludes", "wanted"),
        [
            (None, None, ["a", "b", "c"]),
            (["c", "a"], None, ["a", "c"]),
            (["a", "nobody"], None, ["a"]),
            ([], None, []),
            ({"nobody"}, None, []),
            (None, ["b"], ["a", "c"]),
            (None, ("b", "nobody"), ["a", "c"]),
            (None, [], ["a", "b", "c"]),
            (["a", "b"], ["b", "c"], ["a", "b"]),
            ((utt for utt in "ab"), None, ["a", "b"]),
        ],
    )
    def test_follows_the_rules(self, make, includes, excludes, wanted):
        path = make({utt: np.ones((2, 3), "f4") for utt in "abc"})

        with Feed(path, includes=includes, excludes=excludes, shuffle=False) as feed:
            assert [utt for utt, _ in feed.utterances()] == wanted
            assert feed.num_utterances == len(wanted)
            assert len(feed) == len(by_for(feed)) == 2 * len(wanted)
            assert len(by_for(feed.batches(4))) == len(feed.batches(4)) == -(-2 * len(wanted) // 4)

    def test_applies_to_all_fields(self, make):
        """Utterances that only one field has do not matter when they are not asked for."""
        one, two = np.ones((2, 3), "f4"), np.ones((2,), "f4")
        source = {"a": make({"u": one, "v": one}, name="a.h5"), "b": make({"u": two}, name="b.h5")}

        with Feed(source, includes=["u"]) as feed:
            assert [utt for utt, _ in feed.utterances()] == ["u"]


class TestLeavingEarly:
    @pytest.mark.parametrize("form", ["triplets", "utterances", "batches", "windows", "partitions"])
    def test_lets_the_next_epoch_be_complete(self, make, form):
        path = make(waves())

        def stream(feed):
            forms = {
                "triplets": lambda: feed,
                "utterances": feed.utterances,
                "batches": lambda: feed.batches(10),
                "windows": lambda: feed.windows(5),
                "partitions": feed.partitions,
            }
            return forms[form]()

        async def leave_and_return():
            async with Feed(path, memory_budget="32k", shuffle=False) as feed:
                async with contextlib.aclosing(aiter(stream(feed))) as items:
                    async for item in items:
                        del item
                        break
                return len(await gather(stream(feed)))

        with Feed(path, memory_budget="32k", shuffle=False) as feed:
            for item in stream(feed):
                del item
                break
            complete = len(by_for(stream(feed)))

        assert asyncio.run(leave_and_return()) == trio.run(leave_and_return) == complete > 1


@pytest.mark.parametrize("form", ["triplets", "windows"])
def test_the_order_does_not_depend_on_how_much_of_it_is_worked_on_at_a_time(path, monkeypatch, form):
    def order():
        with Feed(path) as feed:
            items = feed if form == "triplets" else feed.windows(5, 2)
            return [item[:2] for item in items]

    at_once = order()
    monkeypatch.setattr("asyncfeed.engine.loader.SCRATCH_UNITS", 7)

    assert order() == at_once
    assert len(set(at_once)) == len(at_once)
