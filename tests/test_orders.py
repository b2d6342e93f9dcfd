"""In which order an epoch goes through the utterances, and how well that mixes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfeed import ArgumentError, Feed
from asyncfeed.planning.catalog import Catalog, FileStamp, Kind
from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.orders import Order
from asyncfeed.planning.plan import Cut, Plan
from asyncfeed.planning.planner import make_plan
from asyncfeed.planning.strings import Strings
from asyncfeed.units import MIB

FRAME_NBYTES = 320


def corpus_of(lengths: list[int] | np.ndarray, *, files: int = 1) -> Corpus:
    """Utterances one after the other in some files, 80 floats a frame."""
    lengths = np.asarray(lengths, np.int64)
    num = lengths.size
    file = (np.arange(num) * files // max(num, 1)).astype(np.int32)
    offset = np.zeros(num, np.int64)
    for number in range(files):
        rows = np.flatnonzero(file == number)
        offset[rows] = np.cumsum(lengths[rows] * FRAME_NBYTES) - lengths[rows] * FRAME_NBYTES
    catalog = Catalog(
        ids=Strings.of(f"utt{i:05d}" for i in range(num)),
        file=file,
        offset=offset,
        length=lengths,
        kind=np.zeros(num, np.int32),
        access=np.zeros(num, np.uint8),
        swapped=np.zeros(num, bool),
        files=tuple(FileStamp(f"{n}.h5", 1, 1, 1) for n in range(files)),
        kinds=(Kind(np.dtype("f4"), (80,)),),
    )
    return Corpus({"": catalog}, named=False)


def plan_of(
    corpus: Corpus, shuffle: object, *, partition_nbytes: int = MIB, block_nbytes: int = 1 << 16, **options
) -> Plan:
    return make_plan(corpus, partition_nbytes=partition_nbytes, shuffle=Order.of(shuffle, block_nbytes), **options)


lengths = st.lists(st.integers(0, 300), max_size=60)
kinds = st.sampled_from([False, True, "utterance", "block", "interleave"])


@given(lengths, kinds, st.integers(0, 2**65), st.integers(0, 5), st.integers(1, 1 << 20))
def test_every_utterance_comes_once(lengths, shuffle, seed, epoch, block_nbytes):
    corpus, order = corpus_of(lengths, files=2), Order.of(shuffle, block_nbytes)

    rows = order.rows(corpus, seed=seed, epoch=epoch)

    assert sorted(rows.tolist()) == list(range(len(lengths)))


@given(lengths, kinds, st.integers(0, 2**65), st.sampled_from([Cut(), Cut(whole=True), Cut(length=5, hop=3)]))
def test_every_frame_of_a_plan_comes_once(lengths, shuffle, seed, cut):
    plan = plan_of(corpus_of(lengths), shuffle, seed=seed, cut=cut)

    frames = [(u, f) for u, a, b in zip(plan.utts, plan.starts, plan.stops, strict=True) for f in range(a, b)]
    assert sorted(frames) == [(u, f) for u, n in enumerate(lengths) for f in range(n)]


@pytest.mark.parametrize("shuffle", [True, "block", "interleave"])
def test_orders_repeat_for_a_seed_and_an_epoch_and_differ_between_them(shuffle):
    corpus = corpus_of(np.full(500, 20))

    plans = [
        plan_of(corpus, shuffle, seed=s, epoch=e, cut=Cut(whole=True)) for s, e in [(1, 1), (1, 1), (1, 2), (2, 1)]
    ]

    assert np.array_equal(plans[0].utts, plans[1].utts)
    assert len({tuple(plan.utts.tolist()) for plan in plans}) == 3


def test_a_block_is_a_run_of_neighbours_in_a_file():
    corpus = corpus_of(np.full(400, 10), files=3)
    per_block = 64_000 // (10 * FRAME_NBYTES)

    utts = plan_of(corpus, "block", block_nbytes=64_000, partition_nbytes=1 << 30).utts

    runs = np.split(utts, np.flatnonzero(np.diff(utts) != 1) + 1)
    assert len(runs) > 10
    assert all(run.size <= 2 * per_block for run in runs)
    assert np.mean([run.size for run in runs]) > per_block * 0.9


def test_ranks_cut_at_most_one_block_at_each_end():
    corpus = corpus_of(np.full(400, 10))

    plans = [plan_of(corpus, "block", block_nbytes=64_000, rank=rank, world_size=3) for rank in range(3)]

    blocks = [set(range(start, start + 20)) for start in range(0, 400, 20)]
    for plan in plans:
        utts = set(plan.utts.tolist())
        assert sum(bool(block & utts) and not block <= utts for block in blocks) <= 2


def test_interleaving_mixes_the_utterances_of_the_blocks_that_fit_into_a_partition():
    corpus = corpus_of(np.full(400, 10))

    block = plan_of(corpus, "block", block_nbytes=64_000, partition_nbytes=400_000, cut=Cut(whole=True)).utts
    mixed = plan_of(corpus, "interleave", block_nbytes=64_000, partition_nbytes=400_000, cut=Cut(whole=True)).utts

    neighbours = [int((np.diff(utts) == 1).sum()) for utts in (block, mixed)]
    assert neighbours[0] > 350
    assert neighbours[1] < 50


# -- one's own order, and weights ----------------------------------------------------------------------------------


@pytest.fixture
def path(make) -> Path:
    return make({f"utt{i}": np.full((3, 2), i, "f4") for i in range(10)})


def test_an_order_of_ones_own_is_kept_to_the_frame(path):
    wanted = ["utt7", "utt3", "utt7", "utt0"]

    with Feed(path, shuffle=wanted, index="off") as feed:
        assert [(utt, index) for utt, index, _ in feed] == [(utt, index) for utt in wanted for index in range(3)]
        assert [utt for utt, _ in feed.utterances()] == wanted
        assert len(feed) == 12


def test_an_id_that_is_not_there_is_named(path):
    with (
        Feed(path, shuffle=["utt1", "utt99"], index="off") as feed,
        pytest.raises(ArgumentError, match=r"1 utterances.*'utt99'"),
    ):
        list(feed)


def test_weights_draw_with_replacement_in_their_proportions(make):
    path = make({f"utt{i:03d}": np.zeros((1, 2), "f4") for i in range(900)})
    weights = {"utt000": 6.0, "utt001": 3.0, "utt002": 0.0}

    with Feed(path, shuffle=weights, index="off") as feed:
        first, second = ([utt for utt, _ in feed.utterances()] for _ in range(2))
    drawn = Counter(first)

    assert drawn.total() == 900
    assert set(drawn) == {"utt000", "utt001"}
    assert 500 < drawn["utt000"] < 700
    assert first != second


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=20).filter(any), st.integers(0, 2**32))
def test_what_has_no_weight_is_never_drawn(weights, seed):
    corpus = corpus_of([3] * len(weights))
    order = Order.of(dict(zip(corpus.ids, weights, strict=True)))

    rows = order.rows(corpus, seed=seed, epoch=0)

    assert rows.size == len(weights)
    assert all(weights[row] > 0 for row in rows)


@pytest.mark.parametrize("shuffle", [{"long": 1.0}, ["long"] * 50])
def test_utterances_that_come_again_and_again_need_not_fit_into_what_all_take_once(make, shuffle):
    path = make(
        {"long": np.arange(200, dtype="f4")[:, None]} | {f"short{i}": np.zeros((1, 1), "f4") for i in range(49)}
    )

    for budget in ("auto", "16k", "1m"):
        with Feed(path, shuffle=shuffle, memory_budget=budget, index="off") as feed:
            utterances = [(utt, array[:, 0].tolist()) for utt, array in feed.utterances()]
            frames = Counter(index for _, index, _ in feed)

        assert utterances == [("long", list(range(200)))] * 50
        assert frames == Counter(dict.fromkeys(range(200), 50))


@pytest.mark.parametrize(
    "wrong",
    ["random", 3, None, {"a": -1.0}, {"a": 0.0}, {"a": float("nan")}, {"a": 1e308, "b": 1e308}, {}, [1, 2], b"utt"],
)
def test_what_is_no_order_is_refused(wrong):
    with pytest.raises(ArgumentError, match=r"shuffle"):
        Feed("x.h5", shuffle=wrong)


# -- mixing ------------------------------------------------------------------------------------------------------


def test_file_order_does_not_mix_and_one_partition_mixes_perfectly():
    corpus = corpus_of(np.full(2000, 50))

    assert plan_of(corpus, False).mixing().number < 0.02
    assert plan_of(corpus, True, partition_nbytes=1 << 23).mixing().number < 1
    small = corpus_of(np.full(100, 50))  # fits into the first partition
    assert plan_of(small, True, partition_nbytes=1 << 30).mixing().number == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rest", [1, 20, 300])
def test_a_file_that_is_sorted_by_class_is_mixed_until_the_end(seed, rest):
    """Also if a few utterances are left when the partitions before are full."""
    num_frames, per_partition = 100, 400
    corpus = corpus_of(np.full(4 * per_partition + rest, num_frames))
    cut, overhead = Cut(unit_nbytes=12), 128
    partition_nbytes = per_partition * num_frames * (FRAME_NBYTES + 12) + overhead
    plan = plan_of(corpus, True, partition_nbytes=partition_nbytes, seed=seed, cut=cut)
    classes = []
    for partition in plan:
        order = np.arange(partition.lengths.sum(), dtype=np.int32)
        plan.order_units(partition, order)
        classes.append((np.repeat(partition.utts, partition.lengths) * 10 // len(corpus))[order])

    for window in np.array_split(np.concatenate(classes), len(corpus) * num_frames // 1000):
        shares = np.bincount(window, minlength=10) / window.size
        assert abs(shares - 0.1).max() < 0.09


def test_interleaved_blocks_mix_almost_as_well_as_utterances_and_read_together():
    rng = np.random.default_rng(0)
    corpus = corpus_of(rng.integers(300, 1500, 4000))
    partition = 128 * MIB

    random = plan_of(corpus, True, partition_nbytes=partition).mixing()
    mixed = plan_of(corpus, "interleave", partition_nbytes=partition, block_nbytes=MIB).mixing()
    ordered = plan_of(corpus, False, partition_nbytes=partition).mixing()

    assert mixed.number > 0.9 * random.number
    assert ordered.number < 0.1
    assert random.random_nbytes > 0.7 * random.nbytes
    assert mixed.random_nbytes < 0.1 * mixed.nbytes
    assert ordered.random_nbytes == 0
    assert random.nbytes == mixed.nbytes == ordered.nbytes


def test_the_number_is_what_a_simulation_finds():
    """Shares of tenths of the file among the frames that come together, counted frame by frame."""
    rng = np.random.default_rng(1)
    corpus = corpus_of(rng.integers(1, 60, 300))
    plan = plan_of(corpus, True, partition_nbytes=200_000)

    total = int(corpus.lengths.sum())
    begin = np.cumsum(corpus.lengths) - corpus.lengths
    distances, weights = [], []
    for partition in plan:
        places = np.concatenate(
            [
                begin[u] + np.arange(a, b)
                for u, a, b in zip(partition.utts, partition.starts, partition.stops, strict=True)
            ]
        )
        edges = [total * part // 10 for part in range(11)]
        shares = np.histogram(places, edges)[0] / places.size
        distances.append(np.abs(shares - 0.1).sum() / 2)
        weights.append(places.size)

    assert plan.mixing().number == pytest.approx(1 - np.average(distances, weights=weights) / 0.9)


def test_a_plan_without_frames_mixes_nothing():
    assert plan_of(corpus_of([]), True).mixing() == (0.0, 0, 0)


def test_what_is_streamed_is_in_the_order_of_the_plan(tmp_path):
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as file:
        for i in range(200):
            file[f"utt{i:03d}"] = np.full((5, 3), i, "f4")

    for shuffle in ("block", "interleave"):
        with Feed(path, shuffle=shuffle, block_size=600, memory_budget=2 * 8192, index="off") as feed:
            streamed = [utt for utt, _ in feed.utterances()]
            frames = Counter((utt, index, float(frame[0])) for utt, index, frame in feed)

        assert sorted(streamed) == [f"utt{i:03d}" for i in range(200)]
        assert frames == Counter((f"utt{i:03d}", index, float(i)) for i in range(200) for index in range(5))
