"""The drop-in for SpeechBrain's cache, against SpeechBrain itself with torch on the CPU.

SpeechBrain imports torchaudio, which need not fit the torch that is installed. Where it cannot be imported, an empty module of
that name stands in for it: nothing of it is used by what is tested here, which is SpeechBrain's own `data_pipeline`, `dataset`,
`dataloader` and `CachedHDF5DynamicItem`. Without SpeechBrain only the tests of what is then said are run.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import asyncfeed
from asyncfeed import CacheMissError, ItemIdError, ItemTypeError, ModeError, StaleCacheError

PATIENT = 100.0

STUB = '__version__ = "2.11.0"\n'


# -- without SpeechBrain -------------------------------------------------------------------------------------------------

WITHOUT = """
import sys

from asyncfeed.compat.speechbrain import CachedHDF5DynamicItem

for use in (
    lambda: CachedHDF5DynamicItem(sys.argv[1], takes=["id"], func=len, provides=["x"]),
    lambda: CachedHDF5DynamicItem.cache(sys.argv[1]),
):
    try:
        use()
    except ImportError as error:
        print(error, type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_without_speechbrain_the_module_is_imported_and_the_class_says_what_to_install(tmp_path, kind):
    # Not installed, or with a library that does not fit, as an interpreter sees it that looks for it here first.
    (tmp_path / "speechbrain.py").write_text(f"raise {kind}('it cannot be loaded')")
    (tmp_path / "uses.py").write_text(WITHOUT)

    done = subprocess.run(
        [sys.executable, tmp_path / "uses.py", tmp_path / "feats"],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENT,
    )

    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all('(it cannot be loaded): pip install "asyncfeed[speechbrain]"' in line for line in lines)
    assert all(line.endswith(f" {kind}") for line in lines)
    assert not (tmp_path / "feats").exists()


def test_asyncfeed_imports_no_speechbrain_by_itself():
    code = "import asyncfeed, sys; print('speechbrain' in sys.modules, 'torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=PATIENT)

    assert done.stdout == "False False\n"


# -- with it -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is on the path where torchaudio cannot be imported; processes that are started find it there, too."""
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        try:
            import torchaudio  # noqa: F401
        except (ImportError, OSError):
            directory = tmp_path_factory.mktemp("stub")
            (directory / "torchaudio.py").write_text(STUB)
            patch.syspath_prepend(directory)
            patch.setenv("PYTHONPATH", str(directory), prepend=":")
        yield


@pytest.fixture(scope="module")
def sb(stub: None) -> Iterator[Any]:
    """What is used of SpeechBrain and torch, and both classes."""
    pytest.importorskip("speechbrain", minversion="1.1")
    import torch
    import tqdm
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataloader import make_dataloader
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.integrations.hdf5.cached_item import CachedHDF5DynamicItem as Theirs
    from speechbrain.utils.data_pipeline import CachedDynamicItem, provides, takes

    from asyncfeed.compat.speechbrain import CachedHDF5DynamicItem as Ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread for bars that are not even shown
        yield SimpleNamespace(
            torch=torch,
            PaddedBatch=PaddedBatch,
            make_dataloader=make_dataloader,
            DynamicItemDataset=DynamicItemDataset,
            CachedDynamicItem=CachedDynamicItem,
            takes=takes,
            provides=provides,
            Theirs=Theirs,
            Ours=Ours,
        )


class Calls:
    """A function that remembers what it was called with."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.args = func, []

    def __call__(self, *args: Any) -> Any:
        self.args.append(args)
        return self.func(*args)

    @property
    def ids(self) -> list[str]:
        return [args[0] for args in self.args]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "feats"


@pytest.fixture
def count() -> Calls:
    """``count("utt", 3)`` gives 0, 1, 2."""
    return Calls(lambda uid, limit: np.arange(int(limit)))


@pytest.fixture
def make(sb: Any, place: Path, count: Calls) -> Callable[..., Any]:
    """Makes the drop-in: ``make("r", version="v1")``."""

    def make(file_mode: str = "a", func: Any = count, takes: Any = ("id", "limit"), **options: Any) -> Any:
        return sb.Ours(place, file_mode, takes=takes, func=func, provides=("counted",), **options)

    return make


def in_hdf5(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return sorted(file)


# -- construction --------------------------------------------------------------------------------------------------------


def test_it_is_what_speechbrain_takes_it_for(sb, make, place):
    item = make()

    assert isinstance(item, sb.CachedDynamicItem)
    assert (item.takes, item.provides, item.file_mode, item.compression) == (("id", "limit"), ("counted",), "a", None)
    assert (item.hdf5_path, item.cache_filename) == (place / "cache.hdf5", Path("cache.hdf5"))
    assert item.hdf5file
    item.hdf5file.close()


def test_the_decorator_goes_where_theirs_goes(sb, place):
    @sb.Ours.cache(place, compression="gzip", cache_filename="counts.h5")
    @sb.takes("id", "limit")
    @sb.provides("counted")
    def counted(uid, limit):
        return np.arange(limit)

    assert counted("utt", 3).tolist() == [0, 1, 2]
    assert (counted.takes, counted.provides) == (("id", "limit"), ("counted",))
    counted.hdf5file.close()
    with h5py.File(place / "counts.h5") as file:
        assert file["utt"].compression == "gzip"


def test_positional_arguments_are_in_the_order_of_theirs(sb, place, count):
    item = sb.Ours(place, "a", "counts.h5", 4, ["id", "limit"], count, ["counted"])

    assert (item.compression, item.takes, item.func, item.provides) == (4, ["id", "limit"], count, ["counted"])
    assert item.hdf5_path == place / "counts.h5"
    item.hdf5file.close()


@pytest.mark.parametrize("which", ["Theirs", "Ours"])
def test_what_cannot_be_cached_is_the_same_error_as_theirs(sb, place, which):
    cls = getattr(sb, which)

    with pytest.raises(ValueError, match="Can only cache a DynamicItem"):
        cls.cache(place)(len)
    with pytest.raises(ValueError, match="'id'"):
        cls(place, takes=["text", "id"], func=len)
    with pytest.raises(ValueError, match="empty"):
        cls(place, takes=[], func=len)


@pytest.mark.parametrize("mode", ["q", "rw", None])
def test_a_mode_that_h5py_does_not_have_is_a_value_error(make, mode):
    with pytest.raises(ValueError, match="file_mode"):
        make(mode)


def test_a_reader_of_nothing_is_no_such_file(make):
    with pytest.raises(FileNotFoundError, match="fill it with file_mode='a'"):
        make("r")


# -- values ------------------------------------------------------------------------------------------------------------

VALUES = {
    "tensor": lambda torch: torch.arange(6.0).reshape(2, 3),
    "tensor that wants gradients": lambda torch: torch.ones(2, requires_grad=True),
    "bfloat16": lambda torch: torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "0-d tensor": lambda torch: torch.tensor(7),
    "number": lambda torch: 1.5,
    "list": lambda torch: [[1, 2], [3, 4]],
    "empty": lambda torch: np.empty((0, 80), "f4"),
    "bool": lambda torch: np.array([True, False]),
    "Fortran order": lambda torch: np.asfortranarray(np.arange(6).reshape(2, 3)),
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_hit_is_what_the_miss_was(sb, make, value, compression):
    func = Calls(lambda uid, limit: VALUES[value](sb.torch))
    item = make(func=func, compression=compression)

    got = [item("utt", 1), item("utt", 1)]
    item.change_file_mode("r")
    got.append(item("utt", 1))
    item.hdf5file.close()

    expected = VALUES[value](sb.torch)
    expected = (
        expected.detach().float().numpy()
        if value == "bfloat16"
        else np.asarray(expected.detach() if sb.torch.is_tensor(expected) else expected)
    )
    assert {(type(array), array.dtype, array.shape) for array in got} == {(np.ndarray, expected.dtype, expected.shape)}
    assert all(np.array_equal(array, expected) and array.flags.writeable for array in got)
    assert func.ids == ["utt"]


def test_what_is_returned_is_the_callers_own(make):
    memory = np.zeros(3)
    item = make(func=lambda uid, limit: memory)

    item("utt", 1)[:] = 5
    item("utt", 1)[:] = 6
    memory[:] = 7

    assert item("utt", 1).tolist() == [0, 0, 0]
    item.hdf5file.close()


@pytest.mark.parametrize("value", [None, "text", ["some", "text"], {}, [[1], [2, 3]]])
def test_what_cannot_be_kept_is_refused_and_is_no_hit_later(make, value):
    item = make(func=lambda uid, limit: value)

    with pytest.raises(ItemTypeError):
        item("utt", 1)
    assert "utt" not in item.hdf5file
    item.hdf5file.close()


def test_an_id_that_cannot_be_kept_is_refused_before_anything_is_computed(make, count):
    item = make()

    with pytest.raises(ItemIdError):
        item("a//b", 1)
    assert count.ids == []
    item.hdf5file.close()


def test_an_error_of_the_function_is_raised_and_the_next_call_tries_again(make):
    outcomes = [OSError("no such wav"), np.arange(2)]

    def func(uid, limit):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    item = make(func=func)

    with pytest.raises(OSError, match="no such wav"):
        item("utt", 1)
    assert item("utt", 1).tolist() == [0, 1]
    item.hdf5file.close()


# -- what is stale -----------------------------------------------------------------------------------------------------


def test_other_arguments_are_computed_again_and_that_is_said_once(make, count, caplog):
    item = make()
    item("a", 5)
    item("b", 5)

    assert (item("a", 10).size, item("b", 10).size, item("a", 10).size) == (10, 10, 10)
    assert count.args == [("a", 5), ("b", 5), ("a", 10), ("b", 10)]
    assert len([r for r in caplog.records if "other arguments" in r.getMessage()]) == 1
    item.change_file_mode("r")
    assert (item("a", 10).size, len(item.hdf5file)) == (10, 2)
    item.hdf5file.close()


def test_a_reader_refuses_other_arguments_unless_they_are_not_to_be_looked_at(make):
    item = make()
    item("utt", 5)
    item.change_file_mode("r")

    with pytest.raises(StaleCacheError, match=r"check_inputs=False"):
        item("utt", 10)
    assert item("utt", 5).size == 5
    item.hdf5file.close()
    trusting = make("r", check_inputs=False)
    assert trusting("utt", 10).size == 5
    trusting.hdf5file.close()


def test_equal_arguments_are_equal_in_another_process_and_as_another_kind_of_array(sb, make, count):
    item = make(takes=("id", "signal"), func=Calls(lambda uid, signal: signal * 2))
    item("utt", sb.torch.arange(3.0))

    assert item("utt", np.arange(3, dtype="f4")).tolist() == [0, 2, 4]
    assert item.func.ids == ["utt"]
    item.hdf5file.close()


def test_arguments_without_a_digest_are_not_compared_and_that_is_said_once(make, count, caplog):
    item = make()
    for limit in (Limit(2), Limit(3), Limit(4)):
        assert item("utt", limit).size == 2

    assert len([r for r in caplog.records if "are not compared" in r.getMessage()]) == 1
    assert count.ids == ["utt"]
    item.hdf5file.close()


class Limit:
    """An argument of the user's own making."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __index__(self) -> int:
        return self.limit


@pytest.mark.parametrize("change", [{"version": "layer12"}, {"takes": ("id", "other")}])
@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_cache_that_something_else_has_made_is_an_error_that_says_what_can_be_done(make, change, mode):
    item = make(version="layer9")
    item("utt", 3)
    item.hdf5file.close()

    with pytest.raises(StaleCacheError, match=r"layer9.*on_stale='discard'"):
        make(mode, **{"version": "layer9"} | change)


def test_a_cache_that_something_else_has_made_is_discarded_where_that_is_wanted(make, count):
    item = make(version="layer9")
    item("utt", 3)
    item.hdf5file.close()

    item = make(version="layer12", on_stale="discard")
    item("utt", 3)

    assert count.ids == ["utt", "utt"]
    item.hdf5file.close()


# -- misses ------------------------------------------------------------------------------------------------------------


def test_a_reader_computes_nothing_and_says_how_to_fill(make, count):
    item = make()
    item("utt", 3)
    item.change_file_mode("r")

    with pytest.raises(CacheMissError, match=r"change_file_mode\('a'\)") as caught:
        item("other", 3)
    assert isinstance(caught.value, KeyError)
    assert count.ids == ["utt"]
    item.hdf5file.close()


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_miss_without_a_function_is_a_miss(make, mode):
    item = make()
    item("utt", 3)
    item.hdf5file.close()

    item = make(mode, func=None)

    assert item("utt", 3).size == 3
    with pytest.raises(CacheMissError, match="'other' is not in the cache"):
        item("other", 3)
    item.hdf5file.close()


def test_the_beginning_of_an_id_is_a_miss(make):
    item = make()
    item("spk1/utt1", 3)

    assert ("spk1/utt1" in item.hdf5file, "spk1" in item.hdf5file, item._is_cached("spk")) == (True, False, False)
    item.hdf5file.close()


# -- their methods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["Theirs", "Ours"])
def test_a_session_as_theirs_goes(sb, place, count, which):
    item = getattr(sb, which)(place, takes=["id", "limit"], func=count, provides=["counted"])
    before = "utt" in item.hdf5file
    computed = item("utt", 5)
    item._cache(np.ones(2, "f4"), "put")
    after = "utt" in item.hdf5file, item._is_cached("put"), item._is_cached("other")
    found = item._load("put"), item("utt", 5), item.hdf5file["utt"][:]
    item.change_file_mode("r")
    keys = sorted(item.hdf5file.keys()), len(item.hdf5file), bool(item.hdf5file)
    item.hdf5file.close()

    assert (before, after) == (False, (True, True, False))
    assert (computed.tolist(), [array.tolist() for array in found]) == (
        [0, 1, 2, 3, 4],
        [[1, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
    )
    assert (keys, bool(item.hdf5file), item.file_mode) == ((["put", "utt"], 2, True), False, "r")
    assert in_hdf5(item.hdf5_path) == ["put", "utt"]


def test_nothing_is_put_into_a_reader(make):
    item = make()
    item("utt", 3)
    item.change_file_mode("r")

    with pytest.raises(ModeError):
        item._cache(np.ones(2), "put")
    item.hdf5file.close()


def test_a_feed_streams_it_once_it_is_sealed(make):
    item = make()
    item("utt", 3)

    with pytest.raises(ModeError, match="change_file_mode"), asyncfeed.Feed(item) as feed:
        next(iter(feed))
    item.change_file_mode("r")
    with asyncfeed.Feed(item) as feed:
        assert [(utt, frame.item()) for utt, _, frame in feed] == [("utt", 0), ("utt", 1), ("utt", 2)]
    item.hdf5file.close()


# -- existing files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(sb: Any, place: Path) -> Path:
    """A file that SpeechBrain's class has written: arrays, a number, and text."""
    item = sb.Theirs(place, takes=["id", "limit"], func=lambda uid, limit: np.arange(limit), provides=["counted"])
    item("old", 3)
    item._cache(2.5, "number")
    item._cache(["some", "text"], "text")
    item.hdf5file.close()
    return place / "cache.hdf5"


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_their_files_open_without_complaint(make, theirs, count, caplog, mode):
    item = make(mode)

    assert (item("old", 3).tolist(), item("old", 99).tolist()) == ([0, 1, 2], [0, 1, 2])
    assert (item._load("number"), item._load("text").tolist()) == (2.5, [b"some", b"text"])
    assert (sorted(item.hdf5file), item.hdf5file["text"].shape) == (["number", "old", "text"], (2,))
    assert (count.ids, caplog.messages) == ([], [])
    item.hdf5file.close()


def test_what_is_added_to_their_file_goes_beside_it_and_theirs_is_not_touched(make, theirs):
    before = theirs.read_bytes()
    item = make()
    item("new", 2)
    item.change_file_mode("r")

    assert (item("new", 2).tolist(), item("old", 3).tolist()) == ([0, 1], [0, 1, 2])
    assert sorted(path.name for path in theirs.parent.glob("*.hdf5")) == ["cache.000002.hdf5", "cache.hdf5"]
    assert theirs.read_bytes() == before
    item.hdf5file.close()


def test_their_class_reads_ours(sb, make, place, count):
    item = make()
    item("utt", 3)
    item.change_file_mode("a")
    item("spk/utt", 4)
    item.hdf5file.close()

    back = sb.Theirs(place, "r", takes=["id", "limit"], func=None)
    assert (back("utt", 3).tolist(), back("spk/utt", 4).tolist()) == ([0, 1, 2], [0, 1, 2, 3])
    back.hdf5file.close()


def test_their_file_is_merged_where_that_is_asked_for(sb, make, place):
    old = sb.Theirs(place, takes=["id", "limit"], func=lambda uid, limit: np.arange(limit))
    old("old", 3)
    old.hdf5file.close()
    item = make()
    item("new", 2)
    item.compact()

    assert [path.name for path in place.glob("*.hdf5")] == ["cache.hdf5"]
    assert in_hdf5(place / "cache.hdf5") == ["new", "old"]
    assert item("old", 3).size == 3
    item.hdf5file.close()


def test_their_file_is_not_taken_for_a_version_that_is_stated(make, theirs):
    with pytest.raises(StaleCacheError, match="not made by asyncfeed"):
        make("r", version="layer9")
    item = make("r", version="layer9", on_stale="ignore")
    assert item("old", 3).size == 3
    item.hdf5file.close()


def test_their_empty_file_is_a_cache_without_items(sb, make, place):
    sb.Theirs(place, takes=["id", "limit"], func=None).hdf5file.close()

    item = make("r")
    assert len(item.hdf5file) == 0
    item.change_file_mode("a")
    assert item("utt", 2).size == 2
    item.hdf5file.close()


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["a", "r"])
def test_pickling_leaves_the_original_open(make, mode):
    item = make(func=None)
    item._cache(np.arange(3), "utt")
    item.change_file_mode(mode)

    twin = pickle.loads(pickle.dumps(item))

    assert item.hdf5file
    assert item("utt", 3).tolist() == twin("utt", 3).tolist() == [0, 1, 2]
    assert (twin.file_mode, twin.hdf5_path, twin.takes) == (mode, item.hdf5_path, item.takes)
    twin.hdf5file.close()
    assert item("utt", 3).tolist() == [0, 1, 2]
    item.hdf5file.close()


def test_a_function_that_cannot_be_pickled_keeps_no_reader_from_it(make):
    item = make(func=lambda uid, limit: np.arange(limit))
    item("utt", 3)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(item)
    item.change_file_mode("r")

    twin = pickle.loads(pickle.dumps(item))

    assert twin("utt", 3).tolist() == [0, 1, 2]
    twin.hdf5file.close()
    item.hdf5file.close()


def test_copies_share_files_and_modes_and_nothing_else(make, count):
    item = make()
    item("utt", 3)
    twins = [copy.deepcopy(item), copy.copy(item)]
    twins[0]("other", 4)
    item.change_file_mode("r")

    assert [twin.file_mode for twin in twins] == ["r", "r"]
    assert item("other", 4).size == 4
    assert twins[0].func is not item.func
    item.hdf5file.close()


# -- datasets ----------------------------------------------------------------------------------------------------------

NUM = 12


@pytest.fixture
def dataset(sb: Any, make: Callable[..., Any]) -> Any:
    """A dataset of counted arrays of different lengths, and what depends on them."""
    data = {f"utt{i:02d}": {"limit": (i * 5) % NUM + 1} for i in range(NUM)}
    size = {"func": len, "takes": ["counted"], "provides": "size"}
    tensor = {"func": sb.torch.from_numpy, "takes": ["counted"], "provides": "tensor"}
    made = sb.DynamicItemDataset(data, [make(), size, tensor], ["id", "counted"])
    yield made
    item_of(made).hdf5file.close()


def item_of(dataset: Any) -> Any:
    return dataset.pipeline.dynamic_items[0]


def test_a_dataset_fills_it_and_reads_it(dataset, count):
    dataset.iterate_once(progressbar=False)
    first = len(count.ids)
    item_of(dataset).change_file_mode("r")

    rows = [dataset[i] for i in range(len(dataset))]

    assert (first, len(count.ids)) == (NUM, NUM)
    assert all(row["counted"].tolist() == list(range(int(row["id"][3:]) * 5 % NUM + 1)) for row in rows)


def test_filtered_and_sorted_datasets_leave_the_original_usable(dataset, count):
    short = dataset.filtered_sorted(key_max_value={"size": 6}, sort_key="size")
    sizes = [len(short[i]["counted"]) for i in range(len(short))]
    again = [len(dataset[i]["counted"]) for i in range(len(dataset))]
    item_of(dataset).change_file_mode("r")

    assert sizes == [1, 2, 3, 4, 5, 6]
    assert sorted(again) == list(range(1, NUM + 1))
    assert item_of(short).file_mode == "r"
    assert [len(short[i]["counted"]) for i in range(len(short))] == sizes
    assert len(count.ids) == NUM


def test_output_keys_decide_whether_it_is_asked_at_all(dataset, count):
    with dataset.output_keys_as(["limit"]):
        dataset[0]
    assert count.ids == []
    with dataset.output_keys_as({"how_many": "size"}):
        assert dataset[0] == {"how_many": 1}
    assert count.ids == ["utt00"]


def test_several_keys_come_back_as_they_went(sb, place):
    func = Calls(lambda uid: (np.arange(3), np.arange(3) * 10))
    item = sb.Ours(place, takes=["id"], func=func, provides=["left", "right"])
    dataset = sb.DynamicItemDataset({"utt": {}}, [item], ["left", "right"])

    rows = [dataset[0], dataset[0]]

    assert [(row["left"].tolist(), row["right"].tolist()) for row in rows] == [([0, 1, 2], [0, 10, 20])] * 2
    assert func.ids == ["utt"]
    item.hdf5file.close()


@pytest.mark.parametrize("mode", ["a", "r"])
def test_batches_are_those_of_their_class(sb, dataset, count, mode):
    dataset.set_output_keys(["id", "tensor"])
    dataset.iterate_once(progressbar=False)
    item_of(dataset).change_file_mode(mode)

    batches = list(sb.make_dataloader(dataset, batch_size=5))

    assert [len(batch.id) for batch in batches] == [5, 5, 2]
    assert all(isinstance(batch, sb.PaddedBatch) for batch in batches)
    lengths = {
        uid: round(float(share) * batch.tensor.data.shape[1])
        for batch in batches
        for uid, share in zip(batch.id, batch.tensor.lengths, strict=True)
    }
    assert lengths == {f"utt{i:02d}": i * 5 % NUM + 1 for i in range(NUM)}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_workers_fill_it_and_the_next_ones_find_everything(sb, dataset, count, place):
    item = item_of(dataset)
    dataset[0]  # written, and not sealed
    epochs = [
        {uid: len(x) for batch in loader for uid, x in zip(batch["id"], batch["counted"], strict=True)}
        for loader in [sb.torch.utils.data.DataLoader(dataset, 4, num_workers=2, collate_fn=columns)]
        for _ in range(2)
    ]

    assert epochs[0] == epochs[1] == {f"utt{i:02d}": i * 5 % NUM + 1 for i in range(NUM)}
    item.func = None  # whatever is missing here would have to be computed
    assert len([dataset[i] for i in range(NUM)]) == NUM
    item.change_file_mode("r")
    assert in_hdf5(place / "cache.hdf5") == sorted(epochs[0])
    assert not list(place.glob("*.journal"))


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


RECIPE = """
import sys
from pathlib import Path
import numpy as np
from speechbrain.utils.data_pipeline import provides, takes
from asyncfeed.compat.speechbrain import CachedHDF5DynamicItem

here = Path(__file__).parent

@CachedHDF5DynamicItem.cache(here / "feats")
@takes("id", "limit")
@provides("counted")
def counted(uid, limit):
    with open(here / "computed", "a") as file:
        file.write(f"{uid}\\n")
    return np.arange(limit)

def columns(rows):
    return {key: [row[key] for row in rows] for key in rows[0]}
"""

LOADERS = """
from recipe import columns, counted
from speechbrain.dataio.dataset import DynamicItemDataset
from torch.utils.data import DataLoader

if __name__ == "__main__":
    data = {f"utt{i}": {"limit": i + 1} for i in range(8)}
    dataset = DynamicItemDataset(data, [counted], ["id", "counted"])
    dataset[0]
    for mode, method in [("a", "spawn"), ("r", "forkserver")]:
        counted.change_file_mode(mode)
        loader = DataLoader(dataset, 2, num_workers=1, collate_fn=columns, multiprocessing_context=method)
        print({uid: len(x) for batch in loader for uid, x in zip(batch["id"], batch["counted"])})
    print(bool(counted.hdf5file), sorted(path.name for path in counted.cache_location.glob("*.hdf5")))
"""


def test_workers_that_are_started_anew_fill_it_and_read_it(sb, tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "loaders.py").write_text(LOADERS)

    done = subprocess.run(
        [sys.executable, tmp_path / "loaders.py"], check=False, capture_output=True, text=True, timeout=PATIENT
    )

    assert done.returncode == 0, done.stderr
    expected = str({f"utt{i}": i + 1 for i in range(8)})
    assert done.stdout.splitlines() == [expected, expected, "True ['cache.hdf5']"]
    assert sorted((tmp_path / "computed").read_text().split()) == [f"utt{i}" for i in range(8)]
