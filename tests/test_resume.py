"""A state that was saved goes on with the very next item, on any number of ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfeed import ArgumentError, BudgetError, Feed, StateError

BUDGET = 2 * 8192


def features(num: int, *, mean: int = 25, seed: int = 0) -> dict[str, np.ndarray]:
    """Utterances of random lengths."""
    rng = np.random.default_rng(seed)
    return {f"utt{i:03d}": rng.random((int(n), 8)).astype("f4") for i, n in enumerate(rng.integers(1, 2 * mean, num))}


FORMS: dict[str, Callable[[Feed], object]] = {
    "triplets": lambda feed: feed,
    "utterances": lambda feed: feed.utterances(),
    "batches": lambda feed: feed.batches(7),
    "full batches": lambda feed: feed.batches(7, drop_last=True),
    "windows": lambda feed: feed.windows(length=5, hop=3),
    "padded": lambda feed: feed.padded(max_frames=200),
}
ORDERS = (True, False, "block", "interleave")


def name_of(item: tuple) -> object:
    """What an item is, without its data."""
    utts, indices = item[0], item[1]
    if isinstance(utts, list):
        second = indices.tolist() if len(indices) == len(utts) and np.ndim(indices) == 1 else []
        return tuple(zip(utts, second, strict=True)) if second else tuple(utts)
    return (utts, int(indices)) if np.ndim(indices) == 0 else utts


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred utterances, and three without frames."""
    arrays = features(100)
    arrays |= {f"none{i}": np.empty((0, 8), "f4") for i in range(3)}
    path = tmp_path_factory.mktemp("resume") / "feats.h5"
    with h5py.File(path, "w") as opened:
        for utt, array in arrays.items():
            opened[utt] = array
    return path


def feed_of(file: Path, **options: object) -> Feed:
    return Feed(file, **{"memory_budget": BUDGET, "block_size": 2000, "index": "off", **options})


def names(feed: Feed, form: str) -> list[object]:
    return [name_of(item) for item in FORMS[form](feed)]


def interrupted(feed: Feed, form: str, count: int) -> tuple[list[object], dict]:
    """The first ``count`` items of an epoch, and the state while the last of them is at hand."""
    items = iter(FORMS[form](feed))
    got = [name_of(next(items)) for _ in range(count)]
    return got, json.loads(json.dumps(feed.state_dict()))


# -- one rank ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_the_next_item_comes_next_and_the_epochs_after_it_are_whole(file, form, shuffle):
    with feed_of(file, shuffle=shuffle) as feed:
        epochs = [names(feed, form) for _ in range(3)]
    total = len(epochs[0])

    for count in {0, 1, total // 3, total // 2, total - 1, total}:
        with feed_of(file, shuffle=shuffle) as feed:
            got, state = interrupted(feed, form, count)
        with feed_of(file, shuffle=shuffle) as feed:
            feed.load_state_dict(state)
            left = len(FORMS[form](feed))
            rest = names(feed, form)

            assert got + rest == epochs[0]
            assert left == len(rest)
            assert [names(feed, form) for _ in range(2)] == epochs[1:]


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 400), max_size=6), form=st.sampled_from(sorted(FORMS)), seed=st.integers(0, 2**70))
def test_saved_and_loaded_again_and_again_an_epoch_is_the_epoch(file, cuts, form, seed):
    with feed_of(file, seed=seed) as feed:
        reference = names(feed, form)
    got, state = [], None

    for cut in cuts:
        with feed_of(file, seed=seed) as feed:
            if state is not None:
                feed.load_state_dict(state)
            items = iter(FORMS[form](feed))
            got += [name_of(item) for item in itertools.islice(items, min(cut, len(reference) - len(got)))]
            state = feed.state_dict()
    with feed_of(file, seed=seed) as feed:
        if state is not None:
            feed.load_state_dict(state)
        got += names(feed, form)

    assert got == reference


def test_asynchronous_iteration_counts_as_well(file):
    async def some(feed: Feed, count: int) -> list[object]:
        got = []
        async with contextlib.aclosing(aiter(feed)) as items:
            async for item in items:
                got.append(name_of(item))
                if len(got) == count:
                    break
        return got

    with feed_of(file) as feed:
        reference = names(feed, "triplets")
    for backend in ("asyncio", "trio"):
        with feed_of(file) as feed:
            got = anyio.run(some, feed, 500, backend=backend)
            state = feed.state_dict()
        with feed_of(file) as feed:
            feed.load_state_dict(state)

            assert got + anyio.run(some, feed, 10**9, backend=backend) == reference


def test_the_state_counts_what_was_handed_out_and_not_what_was_read_ahead(file):
    with feed_of(file, prefetch=3) as feed:
        items = iter(feed)
        for _ in range(100):
            next(items)

        assert feed.state_dict()["items"] == 100


def test_between_two_epochs_the_state_is_the_beginning_of_the_next(file):
    with feed_of(file) as feed:
        before = feed.state_dict()
        names(feed, "triplets")
        between = feed.state_dict()
        second = names(feed, "batches")  # no epoch has begun: any form will do
    with feed_of(file) as feed:
        feed.load_state_dict(between)

        assert (before["epoch"], between["epoch"]) == (0, 1)
        assert names(feed, "batches") == second


def test_a_state_is_small_and_plain(file):
    with feed_of(file) as feed:
        state = interrupted(feed, "padded", 3)[1]

    assert len(json.dumps(state)) < 1000


def test_only_what_is_needed_is_read_again(file):
    with feed_of(file) as feed:
        total = len(names(feed, "triplets"))
        whole = feed.statistics()
        state = interrupted(feed, "triplets", total * 9 // 10)[1]
    with feed_of(file) as feed:
        feed.load_state_dict(state)
        rest = names(feed, "triplets")
        read = feed.statistics()

    assert len(rest) == total - total * 9 // 10
    assert read.partitions <= whole.partitions // 10 + 2
    assert read.nbytes < whole.nbytes / 4


def test_setting_the_epoch_lets_a_state_go(file):
    with feed_of(file) as feed:
        whole = names(feed, "triplets")
        state = interrupted(feed, "triplets", 10)[1]
        feed.load_state_dict(state)
        feed.set_epoch(0)

        assert names(feed, "triplets") == whole


def test_the_partitions_keep_the_size_that_they_had(file):
    with feed_of(file) as feed:
        got, state = interrupted(feed, "triplets", 300)
        plain = names(feed, "triplets")  # the next epoch
    with feed_of(file, memory_budget=4 * BUDGET) as feed:
        feed.load_state_dict(state)
        rest = names(feed, "triplets")

        assert feed.budget.partition_nbytes == state["partition_nbytes"]
        assert names(feed, "triplets") == plain
        assert len(got + rest) == len(plain)


def test_partitions_that_do_not_fit_into_memory_are_an_error(file):
    with feed_of(file) as feed:
        state = interrupted(feed, "triplets", 3)[1] | {"partition_nbytes": 1 << 50}

        with pytest.raises(BudgetError, match="saved with partitions of 1024 TiB"):
            feed.load_state_dict(state)


# -- what does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"seed": 1}, "seed: 0 in the state, 1 here"),
        ({"shuffle": False}, "shuffle: "),
        ({"even": "drop"}, "even: None"),
    ],
)
def test_a_state_of_another_order_says_what_differs(file, options, difference):
    with feed_of(file) as feed:
        state = interrupted(feed, "triplets", 3)[1]

    with feed_of(file, **options) as feed, pytest.raises(StateError, match=difference):
        feed.load_state_dict(state)


def test_a_state_of_other_data_is_refused(file, make):
    with feed_of(file) as feed:
        state = interrupted(feed, "triplets", 3)[1]

    with feed_of(make(features(100, seed=1))) as feed, pytest.raises(StateError, match="the data"):
        feed.load_state_dict(state)


def test_the_same_data_in_another_file_are_the_same(file, tmp_path):
    copy = tmp_path / "elsewhere.h5"
    copy.write_bytes(file.read_bytes())
    with feed_of(file) as feed:
        got, state = interrupted(feed, "triplets", 3)
    with feed_of(copy) as feed:
        feed.load_state_dict(state)

        assert len(got + names(feed, "triplets")) == len(feed)


def test_an_epoch_does_not_go_on_in_another_form(file):
    with feed_of(file) as feed:
        state = interrupted(feed, "batches", 3)[1]
        feed.load_state_dict(state)

        with pytest.raises(StateError, match=r"batches\(size=7, drop_last=False\).*batches\(size=8"):
            next(iter(feed.batches(8)))


@pytest.mark.parametrize("wrong", [{}, {"version": 99}, {"version": 1, "epoch": 3}, {"version": 1, "stages": 5}])
def test_what_is_no_state_is_refused(file, wrong):
    with feed_of(file) as feed, pytest.raises(StateError):
        feed.load_state_dict(wrong)


# -- ranks -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks(file: Path, world_size: int, state: dict | None = None, **options: object) -> Iterator[list[Feed]]:
    with contextlib.ExitStack() as stack:
        feeds = [
            stack.enter_context(feed_of(file, rank=rank, world_size=world_size, **options))
            for rank in range(world_size)
        ]
        for feed in feeds:
            if state is not None:
                feed.load_state_dict(state)
        yield feeds


def frames_of(items: list[object], form: str) -> list[object]:
    """Single frames, or what else must come exactly once."""
    return [frame for item in items for frame in item] if form in ("batches", "padded") else items


@settings(max_examples=30)
@given(
    form=st.sampled_from(["triplets", "utterances", "batches", "windows", "padded"]),
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    steps=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    shuffle=st.sampled_from(ORDERS),
    seed=st.integers(0, 99),
    pages=st.integers(4, 20),
    even=st.sampled_from([None, "drop", "pad"]),
)
def test_on_another_number_of_ranks_every_frame_comes_once(file, form, worlds, steps, shuffle, seed, pages, even):
    """But for those that make the ranks even: less than one step each time that the number changes."""
    options = {"shuffle": shuffle, "seed": seed, "memory_budget": pages * 4096, "even": even}
    with feed_of(file, **options) as feed:
        items = names(feed, form)
    everything = Counter(frames_of(items, form))
    largest = max(len(frames_of([item], form)) for item in items) if form == "padded" else 1
    got, state = [], None

    for world_size, wanted in zip(worlds, steps, strict=False):
        with ranks(file, world_size, state, **options) as feeds:
            number = min(wanted, *(len(FORMS[form](feed)) for feed in feeds))
            iterators = [iter(FORMS[form](feed)) for feed in feeds]
            for _ in range(number):
                got += [name_of(next(items)) for items in iterators]
            state = feeds[-1].state_dict()
    with ranks(file, worlds[-1] % 3 + 1, state, **options) as feeds:
        for feed in feeds:
            got += names(feed, form)

    found = Counter(frames_of(got, form))
    assert not found - everything or even == "pad"
    assert not everything - found or even == "drop"
    assert max((found - everything).total(), (everything - found).total()) <= 4 * 3 * largest


@pytest.mark.parametrize("even", ["drop", "pad"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 100])
def test_even_ranks_get_as_much_as_their_length_says(file, form, world_size, even):
    with feed_of(file) as feed:
        whole = len(names(feed, form))
    each = []
    for rank in range(min(world_size, 8)):
        with feed_of(file, rank=rank, world_size=world_size, even=even) as feed:
            each.append((len(FORMS[form](feed)), len(names(feed, form))))

    assert len({count for pair in each for count in pair}) == 1
    if even == "pad":
        assert each[0][0] > 0
        assert each[0][0] * world_size >= whole - world_size


@pytest.mark.parametrize("even", ["drop", "pad"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [3, 150])
def test_even_ranks_get_as_much_as_their_length_says_in_order_too(file, form, world_size, even):
    counts = []
    for rank in (0, 1, world_size - 1):
        with feed_of(file, rank=rank, world_size=world_size, even=even, shuffle=False) as feed:
            counts += [len(FORMS[form](feed)), len(names(feed, form))]

    assert len(set(counts)) == 1


@pytest.mark.parametrize("shuffle", ORDERS)
@pytest.mark.parametrize("even", ["drop", "pad"])
def test_even_ranks_leave_out_or_repeat_less_than_one_step(file, even, shuffle):
    with feed_of(file, shuffle=shuffle) as feed:
        everything = Counter(names(feed, "triplets"))
    with ranks(file, 3, even=even, shuffle=shuffle) as feeds:
        got = Counter(itertools.chain.from_iterable(names(feed, "triplets") for feed in feeds))

    difference = got - everything if even == "pad" else everything - got
    assert difference.total() <= 2
    assert not (everything - got if even == "pad" else got - everything)


@pytest.mark.parametrize("shuffle", ORDERS)
@pytest.mark.parametrize("form", ["triplets", "windows"])
def test_every_rank_hands_out_a_part_of_one_order_of_frames(file, form, shuffle):
    with feed_of(file, shuffle=shuffle) as feed:
        place = {name: n for n, name in enumerate(keyed(feed, form))}
    for world_size in (2, 3, 5):
        with ranks(file, world_size, shuffle=shuffle) as feeds:
            places = [[place[name] for name in keyed(feed, form)] for feed in feeds]

        assert sorted(itertools.chain.from_iterable(places)) == list(range(len(place)))
        assert all(each == sorted(each) for each in places)


def keyed(feed: Feed, form: str, count: int | None = None) -> list[tuple]:
    """The first items by what is in them: the bytes are those of the frames that the names say."""
    items = itertools.islice(iter(FORMS[form](feed)), count)
    if form == "triplets":
        return [(utt, index, frame.tobytes()) for utt, index, frame in items]
    return [(window.utt, window.start, window.frames.tobytes()) for window in items]


@pytest.mark.parametrize("worlds", [(2, 3), (3, 2, 4), (5, 1)])
@pytest.mark.parametrize("form", ["triplets", "windows"])
def test_in_order_every_rank_keeps_to_the_order_also_on_another_number(file, form, worlds):
    with feed_of(file, shuffle=False) as feed:
        place = {name: n for n, name in enumerate(keyed(feed, form))}
    got, state = [], None

    for world_size in worlds:
        with ranks(file, world_size, state, shuffle=False) as feeds:
            got += [keyed(feed, form, 60) for feed in feeds]
            state = feeds[0].state_dict()
    with ranks(file, 2, state, shuffle=False) as feeds:
        left = [keyed(feed, form) for feed in feeds]

    places = [[place[name] for name in part] for part in [*got, *left]]
    assert sorted(itertools.chain.from_iterable(places)) == list(range(len(place)))
    assert all(part == sorted(part) for part in places)
    # Utterances are dealt out anew in their order: no rank is far ahead of another one.
    begins = [part[0] for part in places[-2:]]
    assert max(begins) - min(begins) < 100


def test_partitions_are_handed_out_once_whatever_even_says(file):
    with feed_of(file) as feed:
        everything = Counter(names(feed, "triplets"))
    for even in (None, "drop", "pad"):
        with ranks(file, 3, even=even) as feeds:
            loaded = [
                (utt, start + i)
                for feed in feeds
                for partition in feed.partitions()
                for utt, start, length in zip(partition.ids, partition.starts, partition.lengths, strict=True)
                for i in range(length)
            ]

        assert Counter(loaded) == everything


def test_ranks_read_no_more_than_one_rank_does(file):
    """A partition that belongs to two ranks is read by each in part."""
    with feed_of(file) as feed:
        names(feed, "triplets")
        alone = feed.statistics().nbytes
    for world_size in (2, 5):
        with ranks(file, world_size) as feeds:
            for feed in feeds:
                names(feed, "triplets")

            assert sum(feed.statistics().nbytes for feed in feeds) == alone


def test_ranks_that_have_more_pass_only_their_last_frames_on(file):
    """So an order that means something stays as it is, as long as there is some of it on every rank."""
    with ranks(file, 3, shuffle=False) as feeds:
        uneven = [names(feed, "triplets") for feed in feeds]
    with ranks(file, 3, shuffle=False, even="drop") as feeds:
        for feed, before in zip(feeds, uneven, strict=True):
            after = names(feed, "triplets")
            kept = min(len(before), len(after))

            assert after[:kept] == before[:kept]


@pytest.mark.parametrize("form", ["utterances", "padded"])
def test_whole_utterances_come_in_one_order_whatever_the_number_of_ranks(file, form):
    with feed_of(file) as feed:
        reference = names(feed, form)
    for world_size in (2, 3, 5):
        with ranks(file, world_size) as feeds:
            lists = [names(feed, form) for feed in feeds]
        turns = [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]

        assert turns == reference


def test_a_rank_without_utterances_still_steps(make):
    path = make({"only": np.ones((2, 3), "f4")})
    for rank in range(4):
        with Feed(path, rank=rank, world_size=4, even="pad", index="off") as feed:
            assert len(list(feed)) == len(feed) == 1


def test_even_is_checked():
    with pytest.raises(ArgumentError, match="even='equal' must be one of 'drop', 'pad'"):
        Feed("x.h5", even="equal")


def test_the_file_is_as_it_was_read(file):
    with h5py.File(file) as opened:
        assert len(opened) == 103
