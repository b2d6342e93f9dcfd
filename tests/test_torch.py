"""Feeds as data sets of torch: tensors, workers, ranks, epochs, positions."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from asyncfeed import ArgumentError, Feed, MemoryBudget, StateError  # noqa: E402
from asyncfeed.torch import FeedDataset, TensorPartition, to_tensors  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than there are cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's own affair
]

SMALL = 32768
"""A budget of several partitions, also when it is divided between two workers."""

FORMS: dict[str, Callable[[Feed], Any]] = {
    "triplets": lambda feed: feed,
    "utterances": lambda feed: feed.utterances(),
    "batches": lambda feed: feed.batches(16),
    "padded": lambda feed: feed.padded(max_frames=120),
    "windows": lambda feed: feed.windows(20, pad=True),
    "partitions": lambda feed: feed.partitions(),
}

every_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def dataset(path) -> Callable[..., FeedDataset]:
    """``dataset("batches", num_workers=2, seed=3)``: over the corpus, with options of the feed."""

    def dataset(form: str = "triplets", num_workers: int = 0, **options: Any) -> FeedDataset:
        feed = Feed(path, **{"memory_budget": SMALL, **options})
        return FeedDataset(FORMS[form](feed), num_workers=num_workers)

    return dataset


def load(data: FeedDataset, num_workers: int = 2, method: str = "fork", kind: type = DataLoader, **options: Any) -> Any:
    """A loader as one would make it; single frames come sixteen at a time."""
    triplets = data._stream._form().describe()["form"] == "triplets"
    context = {"multiprocessing_context": method} if num_workers else {}
    return kind(data, batch_size=16 if triplets else None, num_workers=num_workers, **context, **options)


def frames_of(item: Any) -> Iterator[tuple[str, int, bytes]]:
    """The frames of whatever a data set or loader hands out."""
    for utt, index, frame in _triplets(item):
        yield utt, int(index), frame.numpy().tobytes()


def _triplets(item: Any) -> Iterator[tuple[str, int, Any]]:
    match type(item).__name__:
        case "Batch":
            yield from zip(item.utts, item.indices, item.frames, strict=True)
        case "PaddedBatch":
            for utt, rows, length in zip(item.utts, item.data, item.lengths, strict=True):
                yield from ((utt, index, row) for index, row in enumerate(rows[:length]))
        case "Window":
            yield from ((item.utt, item.start + n, row) for n, row in enumerate(item.frames[: item.length]))
        case "TensorPartition":
            rows = iter(item.frames)
            for utt, start, length in zip(item.utts, item.starts.tolist(), item.lengths.tolist(), strict=True):
                yield from ((utt, start + n, next(rows)) for n in range(length))
        case _ if len(item) == 2:
            yield from ((item[0], index, row) for index, row in enumerate(item[1]))
        case _ if isinstance(item[0], str):
            yield item
        case _:
            yield from zip(*item, strict=True)


def epoch_of(items: Any) -> list[tuple[str, int, bytes]]:
    """Every frame of an epoch, in the order in which they came."""
    return [frame for item in items for frame in frames_of(item)]


def everything(corpus) -> list[tuple[str, int, bytes]]:
    return sorted((utt, index, row.tobytes()) for utt, array in corpus.items() for index, row in enumerate(array))


# -- tensors -----------------------------------------------------------------------------------------------------


@every_form
def test_a_plain_loop_gets_every_frame_once_in_the_order_of_the_feed(dataset, path, corpus, form):
    items = list(dataset(form))

    with Feed(path, memory_budget=SMALL) as feed:
        assert epoch_of(items) == epoch_of(map(to_tensors, FORMS[form](feed)))
    assert sorted(epoch_of(items)) == everything(corpus)


@pytest.mark.parametrize("form", ["triplets", "utterances", "windows", "partitions"])
def test_tensors_are_views_of_what_the_feed_hands_out(path, form):
    with Feed(path) as feed:
        for item in FORMS[form](feed):
            tensor = next(t for t in to_tensors(item) if isinstance(t, torch.Tensor))
            array = item.frames if form in ("windows", "partitions") else item[-1]

            assert tensor.data_ptr() == array.ctypes.data


def test_what_is_written_to_a_tensor_is_in_no_file_and_no_later_epoch(dataset, corpus):
    data = dataset("utterances")

    for _, tensor in data:
        tensor.add_(1)
    del tensor

    assert sorted(epoch_of(data)) == everything(corpus)


def test_a_tensor_that_is_kept_stays_as_it_is(dataset, corpus):
    data = dataset("utterances", memory_budget=2 * SMALL, prefetch=3)

    kept = next(iter(data))
    epoch_of(data)
    data.close()

    assert np.array_equal(kept[1].numpy(), corpus[kept[0]])


def test_fields_come_as_dicts_of_tensors_in_every_form(make, corpus):
    fields = {"mel": make(corpus, "a.h5"), "double": make({utt: 2 * a for utt, a in corpus.items()}, "b.h5")}

    for form in FORMS.values():
        item = next(iter(FeedDataset(form(Feed(fields)))))
        frames = next(part for part in item if isinstance(part, dict))

        assert list(frames) == ["mel", "double"]
        assert torch.equal(2 * frames["mel"], frames["double"])


def test_a_loader_stacks_frames_of_several_fields(make, corpus):
    fields = {"mel": make(corpus, "a.h5"), "double": make({utt: 2 * a for utt, a in corpus.items()}, "b.h5")}

    _, indices, frames = next(iter(load(FeedDataset(Feed(fields)))))

    assert indices.shape == (16,)
    assert frames["mel"].shape == (16, 8)
    assert torch.equal(2 * frames["mel"], frames["double"])


@pytest.mark.parametrize("dtype", [">f4", "<f2", "u1", "i8", "?"])
def test_numbers_of_every_byte_order_keep_their_values(make, dtype):
    arrays = {"utt": (np.arange(12).reshape(4, 3) % 5).astype(dtype)}

    ((_, tensor),) = FeedDataset(Feed(make(arrays)).utterances())

    assert tensor.tolist() == arrays["utt"].tolist()


def test_frames_without_axes_are_tensors_without_axes(make):
    items = list(FeedDataset(Feed(make({"utt": np.arange(3, dtype="f4")}), shuffle=False)))

    assert [(index, tensor.shape, tensor.item()) for _, index, tensor in items] == [(n, (), float(n)) for n in range(3)]


def test_a_partition_has_numbers_of_its_own(dataset):
    data = dataset("partitions")

    first = next(iter(data))
    lengths = first.lengths.tolist()
    first.lengths.zero_()
    data.set_epoch(0)

    assert isinstance(first, TensorPartition)
    assert next(iter(data)).lengths.tolist() == lengths


def test_what_no_feed_hands_out_is_refused():
    with pytest.raises(ArgumentError, match="ndarray"):
        to_tensors(np.zeros(3))


def test_what_is_no_feed_is_refused(path):
    with pytest.raises(ArgumentError, match=r"feed\.utterances\(\)"):
        FeedDataset(str(path))


# -- workers -----------------------------------------------------------------------------------------------------


@every_form
def test_workers_of_all_ranks_together_give_every_frame_once(dataset, corpus, form):
    ranks = [dataset(form, rank=rank, world_size=2) for rank in range(2)]

    got = [frame for data in ranks for frame in epoch_of(load(data))]

    assert sorted(got) == everything(corpus)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_inherit_nothing_give_every_frame_once_in_every_epoch(dataset, corpus, method):
    data = dataset("utterances")
    data.set_epoch(3)
    loader = load(data, method=method, persistent_workers=True)

    epochs = [epoch_of(loader) for _ in range(2)]

    assert [sorted(epoch) for epoch in epochs] == [everything(corpus)] * 2
    assert data.epoch == 5
    data.set_epoch(3)
    assert epochs == [epoch_of(data), epoch_of(data)]


@pytest.mark.parametrize("form", ["utterances", "padded"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_whole_utterances_come_in_the_same_order_with_workers_as_without(dataset, form, num_workers):
    ranks = {"rank": 1, "world_size": 2}

    assert epoch_of(load(dataset(form, **ranks), num_workers)) == epoch_of(dataset(form, **ranks))


def test_workers_may_be_forked_by_a_process_that_is_in_the_middle_of_an_epoch(dataset, corpus):
    data = dataset("utterances")
    mine = iter(data)
    first = [next(mine), next(mine)]

    theirs = epoch_of(load(data, num_workers=4))

    assert sorted(theirs) == everything(corpus)
    assert sorted(epoch_of(first) + epoch_of(mine)) == everything(corpus)


def test_a_pickle_starts_at_the_next_epoch_and_leaves_the_original_going(dataset, corpus):
    data = dataset("utterances")
    mine = iter(data)
    first = [next(mine)]

    copy = pickle.loads(pickle.dumps(data))

    assert (copy.epoch, sorted(epoch_of(copy))) == (1, everything(corpus))
    assert sorted(epoch_of(first) + epoch_of(mine)) == everything(corpus)


def test_an_open_handle_is_read_here_and_refused_in_workers(path, corpus):
    with h5py.File(path) as file:
        data = FeedDataset(Feed(file).utterances())

        assert sorted(epoch_of(data)) == everything(corpus)
        loop = iter(load(data))
        with pytest.raises(Exception, match="open h5py handle"):
            next(loop)
        loop._shutdown_workers()  # the error refers to the loop, which would end them late


def test_a_loop_that_leaves_early_leaves_nothing_behind(dataset, corpus):
    data = dataset("utterances")

    for _ in load(data):
        break

    assert sorted(epoch_of(load(data))) == everything(corpus)


class _Probed(FeedDataset):
    """Tells what its worker has reserved."""

    def __iter__(self) -> Iterator[int]:
        yield self._own_feed().budget.nbytes


@pytest.mark.parametrize("budget", [1 << 20, MemoryBudget("2m", feeds=2)])
def test_workers_divide_the_memory_between_them(path, budget):
    data = _Probed(Feed(path, memory_budget=budget))

    assert list(load(data, num_workers=4)) == [1 << 18] * 4
    assert list(data) == [1 << 20]


# -- ranks and lengths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("even", ["drop", "pad", None])
@pytest.mark.parametrize("form", ["triplets", "utterances", "batches", "padded", "windows"])
def test_the_length_is_what_comes(dataset, form, even):
    ranks = [dataset(form, num_workers=3, even=even, rank=rank, world_size=2) for rank in range(2)]

    said = [len(data) for data in ranks]
    came = [sum(len(item[0]) if form == "triplets" else 1 for item in load(data, num_workers=3)) for data in ranks]

    assert said == came
    assert said[0] == said[1] or even is None


def test_the_length_without_workers_is_the_ranks_own(dataset, path):
    with Feed(path, rank=1, world_size=3) as feed:
        assert len(dataset(rank=1, world_size=3)) == len(feed)


def test_how_many_partitions_there_are_is_not_said(dataset):
    with pytest.raises(TypeError, match="partitions"):
        len(dataset("partitions"))


@pytest.fixture
def second_of_three() -> Iterator[None]:
    """This process is rank 1 of 3, as torch has it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield
    distributed.destroy_process_group()


def test_ranks_are_those_of_torch_distributed_unless_the_feed_was_told_its_own(dataset, path, second_of_three):
    with Feed(path, rank=1, world_size=3) as feed:
        assert epoch_of(dataset("utterances")) == epoch_of(map(to_tensors, feed.utterances()))
    with Feed(path, rank=0, world_size=1) as feed:
        assert epoch_of(dataset("utterances", rank=0, world_size=1)) == epoch_of(map(to_tensors, feed.utterances()))


# -- epochs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_every_iteration_is_the_next_epoch_in_all_workers(dataset, corpus, persistent):
    data = dataset("utterances")
    reference = [epoch_of(data) for _ in range(3)]
    data.set_epoch(0)
    loader = load(data, persistent_workers=persistent)

    epochs = [epoch_of(loader) for _ in range(3)]

    assert epochs == reference
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert data.epoch == 3


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_an_epoch_that_was_set_is_that_of_all_workers(dataset, persistent):
    data = dataset("utterances")
    loader = load(data, persistent_workers=persistent)
    epochs = []

    for epoch in (4, 4, 2):
        data.set_epoch(epoch)
        epochs.append(epoch_of(loader))

    assert epochs[0] == epochs[1] != epochs[2]
    data.set_epoch(4)
    assert epoch_of(data) == epochs[0]


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_an_epoch_that_was_broken_off_counts(dataset, persistent):
    data = dataset("utterances")
    reference = [epoch_of(data) for _ in range(2)][1]
    data.set_epoch(0)
    loader = load(data, persistent_workers=persistent)

    for _ in loader:
        break

    assert epoch_of(loader) == reference


def test_seeding_torch_the_same_every_time_does_not_repeat_an_epoch(dataset):
    data, epochs = dataset("utterances"), []

    for _ in range(3):
        torch.manual_seed(1)
        epochs.append(epoch_of(load(data)))

    assert len({tuple(epoch) for epoch in epochs}) == 3
    data.set_epoch(0)
    assert epochs == [epoch_of(data) for _ in range(3)]


# -- positions ---------------------------------------------------------------------------------------------------


@every_form
def test_a_loop_goes_on_where_its_state_was_saved_and_the_epochs_after_are_whole(dataset, form):
    data = dataset(form)
    reference = [epoch_of(data) for _ in range(3)]
    data.set_epoch(1)
    loop = iter(data)
    before = epoch_of([next(loop), next(loop)])

    state = json.loads(json.dumps(data.state_dict()))
    resumed = dataset(form)
    resumed.load_state_dict(state)

    assert before + epoch_of(resumed) == reference[1]
    assert epoch_of(resumed) == reference[2]


def test_a_state_saved_after_an_epoch_goes_on_with_the_next(dataset):
    data, other = dataset("utterances"), dataset("utterances")
    epoch_of(data)

    other.load_state_dict(data.state_dict())

    assert other.epoch == 1
    assert epoch_of(other) == epoch_of(data)


def test_a_state_follows_an_epoch_that_was_set_after_a_loop_was_left(dataset):
    data, other = dataset("utterances"), dataset("utterances")
    next(iter(data))

    data.set_epoch(5)
    other.load_state_dict(data.state_dict())

    assert other.epoch == 5
    assert epoch_of(other) == epoch_of(data)


def test_states_of_feeds_and_data_sets_are_the_same(dataset, path):
    data = dataset("utterances")
    loop = iter(data)
    before = epoch_of(next(loop) for _ in range(3))

    with Feed(path, memory_budget=SMALL) as feed:
        feed.load_state_dict(data.state_dict())
        rest = epoch_of(map(to_tensors, feed.utterances()))

    assert before + rest == epoch_of(dataset("utterances"))


def test_workers_divide_what_was_left_by_a_loop_without_them(dataset, corpus):
    data, other = dataset("utterances"), dataset("utterances")
    loop = iter(data)
    before = epoch_of(next(loop) for _ in range(7))

    other.load_state_dict(data.state_dict())
    loader = load(other)

    assert before + epoch_of(loader) == epoch_of(dataset("utterances"))
    assert sorted(epoch_of(loader)) == everything(corpus)


def test_whole_partitions_that_were_left_cannot_be_divided(dataset):
    data, other = dataset("partitions"), dataset("partitions", rank=0, world_size=2)
    loop = iter(data)
    next(loop)

    other.load_state_dict(data.state_dict())

    with pytest.raises(StateError, match="whole partitions on 1 ranks, and 2 ranks cannot"):
        next(iter(other))


def test_a_state_of_other_data_is_refused(dataset, make):
    other = FeedDataset(Feed(make({"utt": np.ones((3, 2), "f4")})))

    with pytest.raises(StateError, match="the data"):
        other.load_state_dict(dataset().state_dict())


@pytest.fixture
def stateful() -> Callable[..., Any]:
    """Makes loaders that can be saved."""
    return partial(load, kind=pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader)


@pytest.mark.parametrize(
    ("form", "num_workers"),
    [*((form, 0) for form in FORMS), ("triplets", 2), ("batches", 2), ("padded", 2), ("partitions", 2)],
)
def test_a_stateful_loader_goes_on_where_it_was_and_the_epochs_after_are_whole(dataset, stateful, form, num_workers):
    loader = stateful(dataset(form), num_workers)
    reference = [[epoch_of([item]) for item in loader] for _ in range(3)]
    steps = len(reference[1])

    for step in (1, steps - 1, steps):
        saving = stateful(dataset(form), num_workers)
        epoch_of(saving)
        loop = iter(saving)
        before = [epoch_of([next(loop)]) for _ in range(step)]
        state = saving.state_dict()
        del loop, saving
        resumed = stateful(dataset(form), num_workers)
        resumed.load_state_dict(state)

        assert before + [epoch_of([item]) for item in resumed] == reference[1]
        assert [epoch_of([item]) for item in resumed] == reference[2]


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_a_stateful_loader_may_be_saved_again_and_again_within_one_epoch(dataset, stateful, persistent):
    got, state = [], None

    for _ in range(4):
        loader = stateful(dataset("utterances"), persistent_workers=persistent)
        if state is not None:
            loader.load_state_dict(state)
        loop = iter(loader)
        got += epoch_of(next(loop) for _ in range(5))
        state = loader.state_dict()

    assert got == epoch_of(dataset("utterances"))
    assert list(loop) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_that_was_saved_after_an_epoch_begins_the_next(dataset, stateful, num_workers):
    loader, other = stateful(dataset("utterances"), num_workers), stateful(dataset("utterances"), num_workers)
    epoch_of(loader)

    other.load_state_dict(loader.state_dict())

    assert epoch_of(other) == epoch_of(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_goes_back_to_a_state_of_its_own(dataset, stateful, corpus, num_workers):
    loader = stateful(dataset("utterances"), num_workers)
    loop = iter(loader)
    before = epoch_of(next(loop) for _ in range(3))
    state = loader.state_dict()
    rest = epoch_of(loop)

    loader.load_state_dict(state)

    assert epoch_of(loader) == rest
    assert before + rest == epoch_of(dataset("utterances"))
    assert sorted(epoch_of(loader)) == everything(corpus)
