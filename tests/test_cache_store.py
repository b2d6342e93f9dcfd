"""A cache without its event loop: written, sealed, merged, shared by processes, and readable by everybody."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import asyncfeed
from asyncfeed import (
    CacheMissError,
    ChangedFileError,
    DamagedFileError,
    ForkError,
    ItemIdError,
    LockedFileError,
    SourceMissingError,
    StaleCacheError,
    StorageError,
    UnreadableDatasetError,
    WriteError,
)
from asyncfeed.cache import publish, seal, store
from asyncfeed.cache.settings import checked_settings
from asyncfeed.cache.store import Store, Verification
from asyncfeed.cache.values import to_array
from asyncfeed.storage import library, scan
from asyncfeed.storage.generations import Generations
from asyncfeed.storage.index import load_index

Arrays = Mapping[str, np.ndarray]

DEFAULTS: dict[str, Any] = {
    "takes": ("id",),
    "provides": ("feats",),
    "version": "v1",
    "filename": "cache.hdf5",
    "compression": None,
    "writer": "main",
    "durability": "process",
    "on_stale": "error",
    "locking": True,
}


def settings_of(directory: Path | str, **options: Any) -> publish.Settings:
    return checked_settings(str(directory), **DEFAULTS | options)


@contextlib.contextmanager
def writer(directory: Path, **options: Any) -> Iterator[Store]:
    with contextlib.closing(Store(settings_of(directory, **options), writing=True)) as opened:
        yield opened


@contextlib.contextmanager
def reader(directory: Path, **options: Any) -> Iterator[Store]:
    with contextlib.closing(Store(settings_of(directory, **options), writing=False)) as opened:
        yield opened


def fill(directory: Path, arrays: Arrays, **options: Any) -> str:
    """Write items and seal them; the path of the generation."""
    with writer(directory, **options) as opened:
        for uid, array in arrays.items():
            opened.append(uid, to_array(array))
        sealed = opened.seal()
    assert sealed is not None
    return sealed


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def holds(opened: Store, arrays: Arrays) -> bool:
    """Whether a store gives exactly these items, one by one and together."""
    together = opened.read_many(list(arrays))
    one_by_one = [opened.read(uid) for uid in arrays]
    cached = [opened.read_cached(uid) for uid in arrays]
    return (
        sorted(opened.keys()) == sorted(arrays)
        and len(opened) == len(arrays)
        and all(map(same, together, arrays.values()))
        and all(map(same, one_by_one, arrays.values()))
        and all(c is None or same(c, a) for c, a in zip(cached, arrays.values(), strict=True))
    )


def in_hdf5(path: Path | str) -> dict[str, np.ndarray]:
    """What plain h5py finds in a file, in any group."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, each: found.update({name: each[()]}) if isinstance(each, h5py.Dataset) else None)
    return {name: np.asarray(array) for name, array in found.items()}


def verified(opened: Store) -> Verification:
    return opened.verify(threading.Event())


def flip(path: Path | str, offset: int) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def items(*numbers: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Items of different shapes, in two groups."""
    return {f"spk{n % 2}/utt{n}": (np.arange(3 * n) * scale).reshape(n, 3).astype("f4") for n in numbers}


def names(directory: Path) -> list[str]:
    """What lies there, except locks, which stay."""
    return sorted(name for name in os.listdir(directory) if not name.endswith("lock"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a cache may be made."""
    return tmp_path / "exp" / "feats"


# -- write, read, seal, and again ----------------------------------------------------------------------------------


def test_items_are_read_back_before_sealing_after_it_and_in_another_store(place: Path):
    wanted = items(1, 2, 3)
    with writer(place) as opened:
        for uid, array in wanted.items():
            opened.append(uid, array)
        before = holds(opened, wanted)
        path = opened.seal()
        after = holds(opened, wanted)

    with reader(place) as again:
        assert (before, after, holds(again, wanted)) == (True, True, True)
    assert path == str(place / "cache.hdf5")
    assert names(place) == ["cache.hdf5", "cache.hdf5.asyncfeed"]


def test_what_was_not_sealed_waits_in_the_journal(place: Path):
    with writer(place) as opened:
        opened.append("a", np.arange(3))
    with pytest.raises(SourceMissingError, match=r"main\.journal waits to be sealed"):
        Store(settings_of(place), writing=False)

    with writer(place) as opened:
        assert holds(opened, {"a": np.arange(3)})
        assert opened.recovery is not None
        assert opened.recovery.kept == 1


def test_later_sessions_make_further_generations_that_are_read_as_one(place: Path):
    paths = [fill(place, items(n, n + 1, scale=n)) for n in (1, 2, 3)]

    with reader(place) as opened:
        assert holds(opened, items(1, scale=1) | items(2, scale=2) | items(3, 4, scale=3))
        assert opened.keys() == [f"spk{n % 2}/utt{n}" for n in (1, 2, 3, 4)]
    assert [Path(path).name for path in paths] == ["cache.hdf5", "cache.000002.hdf5", "cache.000003.hdf5"]


def test_a_session_that_writes_nothing_leaves_nothing(place: Path):
    with writer(place) as opened:
        assert opened.seal() is None
        assert len(opened) == 0

    assert names(place) == []


def test_a_writer_reads_what_is_sealed_and_replaces_it(place: Path):
    fill(place, items(1, 2))
    with writer(place) as opened:
        opened.append("spk0/utt2", np.zeros(5))

        assert holds(opened, items(1) | {"spk0/utt2": np.zeros(5)})
        assert len(opened) == 2
        opened.seal()
        assert holds(opened, items(1) | {"spk0/utt2": np.zeros(5)})


def test_what_is_absent_is_a_miss_that_says_how_it_comes_there(place: Path):
    fill(place, items(1))
    with reader(place) as opened:
        for read in (opened.read, lambda uid: opened.read_many(["spk1/utt1", uid])):
            for uid in ("spk1", "spk1/utt", "spk1/utt11", "other", ""):
                with pytest.raises(CacheMissError, match="to_writer"):
                    read(uid)
                assert uid not in opened
                assert opened.read_cached(uid) is None


def test_what_is_asked_for_twice_is_two_arrays(place: Path):
    fill(place, items(1, 2))
    with reader(place) as opened:
        one, other, _ = opened.read_many(["spk1/utt1", "spk1/utt1", "spk0/utt2"])
        one[:] = 9

        assert same(other, items(1)["spk1/utt1"])
        assert same(opened.read("spk1/utt1"), items(1)["spk1/utt1"])
        assert opened.read_many([]) == []


def test_items_stay_when_the_store_is_closed(place: Path):
    fill(place, items(1, 2))
    with reader(place) as opened:
        kept = [opened.read("spk1/utt1"), *opened.read_many(list(items(1, 2)))]

    assert [array.sum() for array in kept] == [3, 3, 15]


def test_ids_of_which_one_is_a_group_of_the_other_exclude_each_other_wherever_the_first_is(place: Path):
    fill(place, {"sealed/x": np.zeros(1), "alone": np.zeros(1)})
    with writer(place) as opened:
        opened.append("new/x", np.zeros(1))
        for uid in ("sealed", "alone/x", "new", "new/x/y", "sealed/x/y/z"):
            with pytest.raises(ItemIdError, match="group or a dataset"):
                opened.append(uid, np.zeros(1))
        opened.append("sealed/y", np.zeros(1))
        opened.seal()

        assert sorted(opened.keys()) == ["alone", "new/x", "sealed/x", "sealed/y"]


def test_digests_of_arguments_stay_with_their_items(place: Path):
    with writer(place) as opened:
        opened.append("a", np.zeros(1), b"\1" * 16)
        opened.append("b", np.zeros(1))
        digests = [opened.digest("a"), opened.digest("b")]
        opened.seal()
        digests += [opened.digest("a"), opened.digest("b")]
    fill(place, {"c": np.zeros(1)})
    with writer(place) as opened:
        opened.compact()
        digests += [opened.digest("a"), opened.digest("b")]

    assert digests == [b"\1" * 16, b""] * 3


# -- what others see -----------------------------------------------------------------------------------------------

STRUCT = np.dtype([("a", "u1"), ("b", "f4", (2, 3)), ("c", [("d", "c8"), ("e", "?")]), ("s", "S3")])
DTYPES: list[Any] = ["?", "u1", "i2", "i8", "f2", "f4", "f8", "g", "F", "D", "M8[ns]", "m8[us]", "V5", STRUCT]
DTYPES += [np.dtype([("a", "u1"), ("b", "f8")], align=True)]
SHAPES: list[tuple[int, ...]] = [(), (3,), (0, 4), (2, 0), (2, 3), (1, 2, 3, 1)]


def everything() -> dict[str, np.ndarray]:
    """Arrays of all dtypes and shapes, and no zeros in them."""
    made = {}
    for number, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            array = np.zeros(shape, dtype)
            if array.dtype.kind in "fc":
                array[...] = 1.5
            else:
                array.reshape(-1).view(np.uint8)[:] = 1
            made[f"{number}/{len(made)}"] = array
    return made


def ordinary() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {f"utt{i}": rng.random((1 + i * 7 % 100, 1 + i % 9), dtype="f4") for i in range(100)}
    return made | {"large": rng.random((250, 100), dtype="f4")}


def named() -> dict[str, np.ndarray]:
    uids = ["é", "e\u0301", "x" * 60_000, "日本/語", "a/b/c/d/e/f", "a/b2", "...", "a b\n", "\\", "-"]
    return {uid: np.full(3, number) for number, uid in enumerate(uids)}


CONTENTS = {
    "dtypes": everything,
    "ordinary": ordinary,
    "names": named,
    "one": lambda: {"a": np.arange(3)},
    "empty": lambda: {"a": np.empty((0, 4), "f4")},
    "scalar": lambda: {"a": np.array(3)},
    "small": lambda: {f"u{i}": np.array([i], "u1") for i in range(40)},
}

parametrized = pytest.mark.parametrize("made", CONTENTS.values(), ids=CONTENTS)


@parametrized
@pytest.mark.parametrize("compression", [None, "gzip", "lzf", 4])
def test_plain_h5py_finds_every_item_as_it_was_put(place: Path, made: Callable[[], Arrays], compression: Any):
    wanted = made()
    path = fill(place, wanted, compression=compression)

    found = in_hdf5(path)

    assert found.keys() == wanted.keys()
    for uid, array in wanted.items():
        # h5py has no names for times, and their units are in its tag for them; the padding of long doubles is its own
        assert (found[uid].dtype, found[uid].shape) == (array.dtype, array.shape)
        assert found[uid].tobytes() == array.tobytes() or np.array_equal(found[uid], array)
    with h5py.File(path) as file:
        assert all(same(file[uid][:], array) for uid, array in wanted.items() if array.ndim and array.dtype.kind != "g")
    with reader(place) as opened:
        assert holds(opened, wanted)
        assert verified(opened) == Verification(len(wanted), 0, ())


@parametrized
def test_the_data_are_packed_in_the_order_in_which_they_were_written(place: Path, made: Callable[[], Arrays]):
    wanted = made()
    path = fill(place, wanted)

    with h5py.File(path) as file:
        spans = [(file[uid].id.get_offset(), array.nbytes) for uid, array in wanted.items() if array.size]
        contiguous = all(file[uid].chunks is None for uid in wanted)

    assert contiguous
    assert [offset for offset, _ in spans] == sorted(offset for offset, _ in spans)
    assert all(offset % 64 == 0 for offset, _ in spans)
    assert all(one + nbytes <= other for (one, nbytes), (other, _) in itertools.pairwise(spans))


@parametrized
def test_a_sealed_file_ends_where_hdf5_says_that_it_does(place: Path, made: Callable[[], Arrays]):
    """Otherwise somebody who adds to it would write over what is there."""
    path = fill(place, made())

    with h5py.File(path) as file:
        assert file.id.get_filesize() == os.path.getsize(path)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_feed_streams_all_generations_without_a_scan(
    place: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
):
    fill(place, items(1, 2, 3, scale=5), compression=compression)
    fill(place, items(3, 4), compression=compression)
    monkeypatch.setattr(library, "scan", lambda *args, **options: pytest.fail("it scans"))

    async def streamed() -> dict[str, np.ndarray]:
        async with asyncfeed.Feed(place) as feed:
            return {uid: array.copy() async for uid, array in feed.utterances()}

    found = asyncio.run(streamed())

    wanted = items(1, 2, scale=5) | items(3, 4)
    assert found.keys() == wanted.keys()
    assert all(same(found[uid], array) for uid, array in wanted.items())


def test_the_index_of_a_file_says_nothing_about_the_one_that_comes_in_its_place(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another process merges between the renaming and the saving of the index."""
    other = fill(tmp_path / "other", items(5))
    monkeypatch.setattr(publish, "sync_directory", lambda path: os.replace(other, path))

    path = fill(place, items(1, 2))

    assert load_index(path, "{utt}") is None


def test_where_hdf5_lays_out_files_otherwise_the_data_are_copied(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seal, "LAYOUT_MESSAGE", 1000)
    wanted = everything()

    path = fill(place, wanted)

    assert in_hdf5(path).keys() == wanted.keys()
    assert names(place) == ["cache.hdf5", "cache.hdf5.asyncfeed"]
    with reader(place) as opened:
        assert holds(opened, wanted)
        assert verified(opened) == Verification(len(wanted), 0, ())


def test_where_hdf5_cannot_read_what_was_made_the_data_are_copied(place: Path, monkeypatch: pytest.MonkeyPatch):
    real = scan.scan
    asked: list[str] = []

    def damaged_first(container: Any) -> Any:
        asked.append(container.path)
        if len(asked) == 1:
            raise DamagedFileError("as if")
        return real(container)

    monkeypatch.setattr(publish, "scan", damaged_first)

    path = fill(place, items(1, 2))

    assert [Path(each).name for each in asked] == ["cache.hdf5.main.journal", "cache.hdf5.main.journal.copy"]
    assert in_hdf5(path).keys() == items(1, 2).keys()


# -- merging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_compacting_leaves_one_file_with_the_same_items(place: Path, compression: str | None):
    for n in (1, 2, 3):
        fill(place, items(n, n + 1, scale=n), compression=compression)
    wanted = items(1, scale=1) | items(2, scale=2) | items(3, 4, scale=3)
    with reader(place, compression=compression) as opened, reader(place) as other:
        opened.compact()

        assert holds(opened, wanted)
        assert holds(other, wanted)
        assert other.refresh()
        assert holds(other, wanted)
    assert names(place) == ["cache.hdf5", "cache.hdf5.asyncfeed"]
    assert in_hdf5(place / "cache.hdf5").keys() == wanted.keys()
    assert load_index(str(place / "cache.hdf5"), "{utt}") is not None


def test_compacting_frees_the_space_of_what_was_replaced(place: Path):
    with writer(place) as opened:
        for n in range(10):
            for uid in ("a", "b"):
                opened.append(uid, np.full(10_000, n, "f8"))
        opened.seal()
        before = (place / "cache.hdf5").stat().st_size
        opened.compact()

        assert holds(opened, {uid: np.full(10_000, 9, "f8") for uid in ("a", "b")})
    after = (place / "cache.hdf5").stat().st_size
    assert before > 1_600_000
    assert 160_000 < after < 200_000


def test_compacting_goes_on_beside_a_writer_that_has_a_journal(place: Path):
    fill(place, items(1))
    fill(place, items(2))
    with writer(place) as opened:
        opened.append("spk1/utt3", items(3)["spk1/utt3"])
        opened.compact()
        opened.append("spk0/utt4", items(4)["spk0/utt4"])

        assert holds(opened, items(1, 2, 3, 4))
        opened.seal()
        assert holds(opened, items(1, 2, 3, 4))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_whoever_has_the_files_open_reads_on_after_they_were_merged_and_replaced(place: Path, compression: str | None):
    for n in (1, 2):
        fill(place, items(n, scale=n), compression=compression)
    with reader(place) as opened, reader(place) as other:
        other.compact()
        fill(place, items(1, 2, scale=7), compression=compression)

        assert holds(opened, items(1, scale=1) | items(2, scale=2))
        assert opened.refresh()
        assert holds(opened, items(1, 2, scale=7))


def test_what_was_sealed_by_copying_does_not_come_back_after_compacting(place: Path):
    """A process killed between publishing a compressed file and removing its journal leaves items that are old by then."""
    journal = place / "cache.hdf5.main.journal"
    with writer(place, compression="gzip") as opened:
        for uid, array in items(1, 2).items():
            opened.append(uid, array)
        left = journal.read_bytes()
        opened.seal()
    journal.write_bytes(left)
    newer = items(1, 2, scale=2.0)
    fill(place, newer, compression="gzip", writer="other")

    with reader(place) as opened:
        opened.compact()

    assert not journal.exists()
    with writer(place) as opened:
        assert holds(opened, newer)
        assert not opened.journal.entries


def test_a_damaged_item_is_found_and_not_merged(place: Path):
    path = fill(place, items(10, 20, 30))
    fill(place, items(5))
    with h5py.File(path) as file:
        offset = file["spk0/utt20"].id.get_offset()
    flip(path, offset + 100)
    before = names(place)

    with reader(place) as opened:
        assert verified(opened) == Verification(3, 0, ("spk0/utt20",))
        with pytest.raises(DamagedFileError, match="utt20"):
            opened.compact()
        assert names(place) == before

    with writer(place) as opened:
        opened.append("spk0/utt20", items(20)["spk0/utt20"])
        opened.seal()
        opened.compact()
        assert holds(opened, items(5, 10, 20, 30))
        assert verified(opened).ok


def test_a_damaged_compressed_item_is_found(place: Path):
    path = fill(place, {"a": np.arange(5000.0), "b": np.arange(100.0)}, compression="gzip")
    with h5py.File(path) as file:
        chunk = file["a"].id.get_chunk_info(0)
    flip(path, chunk.byte_offset + chunk.size // 2)

    with reader(place) as opened:
        assert verified(opened) == Verification(1, 0, ("a",))
        with pytest.raises(StorageError, match="'a'"):
            opened.read("a")


def test_two_do_not_compact_at_the_same_time(place: Path):
    fill(place, items(1))
    fill(place, items(2))
    with reader(place) as opened, publish.lock_writer(opened.settings, "compact"):
        with pytest.raises(LockedFileError, match=f"process {os.getpid()} "):
            opened.compact()


def test_what_a_killed_process_left_of_merging_is_removed_by_the_next(place: Path):
    fill(place, items(1))
    fill(place, items(2))
    for suffix in ("", ".copy", ".scratch"):
        (place / f"cache.hdf5.compact.journal{suffix}").write_bytes(bytes(20_000))

    with reader(place) as opened:
        opened.compact()

    assert names(place) == ["cache.hdf5", "cache.hdf5.asyncfeed"]


def test_ids_of_several_writers_that_one_file_cannot_hold_are_read_but_not_merged(place: Path):
    with writer(place, writer="one") as one, writer(place, writer="two") as two:
        one.append("a", np.zeros(1))
        two.append("a/b", np.ones(1))
        one.seal()
        two.seal()
    before = names(place)

    with reader(place) as opened:
        with pytest.raises(ItemIdError, match="'a/b'"):
            opened.compact()

        assert names(place) == before
        assert holds(opened, {"a": np.zeros(1), "a/b": np.ones(1)})


def test_what_was_made_by_different_things_is_merged_only_by_who_ignores_it(place: Path):
    fill(place, items(1), version="v1")
    fill(place, items(2), version="v2", on_stale="ignore")
    anything: dict[str, Any] = {"version": None, "takes": None, "provides": None}

    with reader(place, **anything) as opened:
        assert holds(opened, items(1, 2))
        with pytest.raises(StaleCacheError, match=r"'v1'.*'v2'"):
            opened.compact()
        assert holds(opened, items(1, 2))

    with reader(place, **anything, on_stale="ignore") as opened:
        opened.compact()
        assert holds(opened, items(1, 2))
    assert Generations(str(place)).paths() == [str(place / "cache.hdf5")]


def test_a_generation_that_came_in_the_place_of_a_merged_one_is_not_removed(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    """A writer with on_stale='discard' deletes a generation and publishes its own while others are merged."""
    for n in (1, 2):
        fill(place, items(n))
    real = publish._merged

    def slow(*args: Any) -> Any:
        merged = real(*args)
        with writer(place, version="v2", on_stale="discard", writer="other") as opened:
            opened.append("new", np.arange(3))
            opened.seal()
        return merged

    monkeypatch.setattr(publish, "_merged", slow)
    with reader(place) as opened, pytest.raises(ChangedFileError, match="compact again"):
        opened.compact()

    with reader(place, version="v2") as opened:
        assert holds(opened, {"new": np.arange(3)})
    assert names(place) == ["cache.hdf5", "cache.hdf5.asyncfeed"]


# -- several processes ---------------------------------------------------------------------------------------------


def test_refreshing_finds_what_others_have_sealed_meanwhile(place: Path):
    fill(place, items(1))
    with reader(place) as opened:
        assert not opened.refresh()
        fill(place, items(2))
        before = holds(opened, items(1))

        assert opened.refresh()
        assert before
        assert holds(opened, items(1, 2))
        assert not opened.refresh()


def test_a_writer_id_belongs_to_one_process_and_others_have_their_own(place: Path):
    with writer(place) as opened:
        with pytest.raises(LockedFileError, match=f"process {os.getpid()} "):
            Store(settings_of(place), writing=True)
        with writer(place, writer="rank1") as other:
            opened.append("a", np.zeros(1))
            other.append("b", np.zeros(2))

            assert (opened.seal(), other.seal()) == (
                str(place / "cache.hdf5"),
                str(place / "cache.000002.hdf5"),
            )
    with reader(place) as found:
        assert holds(found, {"a": np.zeros(1), "b": np.zeros(2)})


CHILD = """
import contextlib, os, sys
import numpy as np
from asyncfeed.cache.settings import checked_settings
from asyncfeed.cache.store import Store

def open_writer(directory, **options):
    given = dict(takes=("id",), provides=("feats",), version="v1", filename="cache.hdf5", compression=None,
                 writer="main", durability="process", on_stale="error", locking=True)
    return Store(checked_settings(directory, **given | options), writing=True)

directory = sys.argv[1]
"""


def start(code: str, *args: object) -> subprocess.Popen[str]:
    """Start a process that may write: its lines come after `CHILD`."""
    command = [sys.executable, "-c", CHILD + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_several_processes_that_seal_at_the_same_time_each_have_their_generation(place: Path):
    code = """
        rank = int(sys.argv[2])
        with contextlib.closing(open_writer(directory, writer=f"rank{rank}")) as store:
            for i in range(50):
                store.append(f"{rank}/{i}", np.full(i, rank))
            print("written", flush=True)
            sys.stdin.read(1)
            print(store.seal(), flush=True)
    """
    processes = [start(code, place, rank) for rank in range(4)]
    assert [line_of(process) for process in processes] == ["written"] * 4
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # all of them go on at once

    sealed = [line_of(process) for process in processes]

    for process in processes:
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()
    wanted = {f"{rank}/{i}": np.full(i, rank) for rank in range(4) for i in range(50)}
    assert sorted(sealed) == sorted(Generations(str(place)).paths())
    with reader(place) as opened:
        assert holds(opened, wanted)
        opened.compact()
        assert holds(opened, wanted)


def killed_writer(place: Path, **options: Any) -> None:
    """A process that has written an item, was killed, and sealed nothing."""
    code = f"""
        store = open_writer(directory, **{options!r})
        store.append("left", np.arange(5))
        print("written", flush=True)
        sys.stdin.read(1)
    """
    with start(code, place) as process:
        assert line_of(process) == "written"
        process.send_signal(signal.SIGKILL)


def test_what_a_killed_writer_left_is_there_for_the_next_of_its_id(place: Path):
    killed_writer(place)

    with writer(place) as opened:
        assert holds(opened, {"left": np.arange(5)})
        opened.seal()

    with reader(place) as opened:
        assert holds(opened, {"left": np.arange(5)})


def test_what_a_killed_writer_left_is_sealed_by_another_one(place: Path):
    killed_writer(place, writer="rank1")

    fill(place, items(1))

    with reader(place) as opened:
        assert holds(opened, {"left": np.arange(5)} | items(1))
    assert not Generations(str(place)).journals()


@pytest.mark.parametrize("options", [{"version": "v2"}, {"locking": False}], ids=str)
def test_a_journal_that_may_be_anothers_is_left_alone(place: Path, options: dict[str, Any]):
    killed_writer(place, writer="rank1")

    fill(place, items(1), **options)

    assert Generations(str(place)).journals() == [str(place / "cache.hdf5.rank1.journal")]


def test_the_journal_of_a_living_writer_is_left_alone(place: Path):
    with writer(place, writer="rank1") as other:
        other.append("mine", np.zeros(1))

        fill(place, items(1))

        other.append("too", np.zeros(1))
        assert other.seal() is not None
    with reader(place) as opened:
        assert sorted(opened.keys()) == ["mine", "spk1/utt1", "too"]


def test_a_forked_child_reads_and_does_not_write(place: Path):
    fill(place, items(1))
    with writer(place) as opened:
        opened.append("new", np.arange(3))
        pid = os.fork()
        if pid == 0:
            right = holds(opened, items(1) | {"new": np.arange(3)})
            for write in (lambda: opened.append("x", np.zeros(1)), opened.seal, opened.compact):
                try:
                    write()
                    right = False
                except ForkError:
                    pass
            os._exit(0 if right else 1)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert holds(opened, items(1) | {"new": np.arange(3)})


def test_whoever_opens_a_cache_that_is_merged_and_added_to_meanwhile_finds_all_of_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second generation is merged into the first, which was opened before, and another one is called like it."""
    for n in (1, 2):
        fill(place, items(n))
    real, done = store.Generation, threading.Event()

    def slow(path: str) -> Any:
        opened = real(path)
        if not done.is_set():
            done.set()
            with reader(place) as other:
                other.compact()
            fill(place, items(3))
        return opened

    monkeypatch.setattr(store, "Generation", slow)

    with reader(place) as opened:
        assert holds(opened, items(1, 2, 3))


# -- stale ---------------------------------------------------------------------------------------------------------

STALE = [{"version": "v2"}, {"takes": ("id", "sig")}, {"provides": ("other",)}, {"version": None}]


@pytest.mark.parametrize("other", STALE, ids=str)
def test_what_something_else_has_made_is_an_error_that_shows_both(place: Path, other: dict[str, Any]):
    fill(place, items(1))

    with pytest.raises(StaleCacheError, match=r"'v1'.*on_stale='discard'.*'ignore'") as caught:
        Store(settings_of(place, **other), writing=True)

    assert str(settings_of(place, **other).fingerprint) in str(caught.value)
    assert str(settings_of(place).fingerprint) in str(caught.value)
    with reader(place) as opened:
        assert holds(opened, items(1))


@pytest.mark.parametrize("sealed", [True, False])
def test_what_is_stale_is_an_error_or_deleted_or_used(place: Path, sealed: bool):
    def make() -> None:
        with writer(place) as opened:
            opened.append("a", np.arange(3))
            if sealed:
                opened.seal()

    make()
    with pytest.raises(StaleCacheError, match="'v1'"):
        Store(settings_of(place, version="v2"), writing=True)

    with writer(place, version="v2", on_stale="ignore") as opened:
        used = holds(opened, {"a": np.arange(3)})
    with writer(place, version="v2", on_stale="discard") as opened:
        discarded = len(opened) == 0
        opened.append("b", np.zeros(1))
        opened.seal()

    assert (used, discarded) == (True, True)
    with reader(place, version="v2") as opened:
        assert holds(opened, {"b": np.zeros(1)})


def test_a_reader_deletes_nothing(place: Path):
    fill(place, items(1))
    with reader(place, version="v2", on_stale="discard") as opened:
        assert len(opened) == 0

    with reader(place, version="v2", on_stale="ignore") as opened:
        assert holds(opened, items(1))
    with reader(place) as opened:
        assert holds(opened, items(1))


def test_a_journal_in_which_nothing_is_written_is_not_stale(place: Path):
    with writer(place):
        pass

    with writer(place, version="v2") as opened:
        opened.append("a", np.zeros(1))
        opened.seal()

    with reader(place, version="v2") as opened:
        assert holds(opened, {"a": np.zeros(1)})


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"durability": "fsync"}, {"writer": "rank3"}], ids=str)
def test_how_items_are_kept_is_no_reason_to_make_them_again(place: Path, options: dict[str, Any]):
    fill(place, items(1))

    fill(place, items(2), **options)

    with reader(place, **options) as opened:
        assert holds(opened, items(1, 2))


def test_a_file_that_came_in_the_place_of_a_stale_one_is_not_discarded(place: Path, monkeypatch: pytest.MonkeyPatch):
    fill(place, items(1))
    real, done = store.lock_cache, threading.Event()

    def slow(settings: publish.Settings) -> Any:
        if not done.is_set():
            done.set()
            with writer(place, version="v2", on_stale="discard", writer="quick") as other:
                other.append("new", np.arange(3))
                other.seal()
        return real(settings)

    monkeypatch.setattr(store, "lock_cache", slow)
    with writer(place, version="v2", on_stale="discard") as opened:
        opened.refresh()

        assert holds(opened, {"new": np.arange(3)})


# -- files of other tools ------------------------------------------------------------------------------------------


def foreign(path: Path, *, compression: str | None = None) -> dict[str, np.ndarray]:
    """A file such as SpeechBrain's class writes it, and some that others write."""
    path.parent.mkdir(parents=True)
    wanted = {
        "utt1": np.arange(12, dtype="f4").reshape(4, 3),
        "spk/utt2": np.arange(5),
        "spk/deep/utt3": np.arange(3, dtype=">i2"),
        "big": np.arange(6, dtype=">f8").reshape(2, 3),
        "scalar": np.array(2.5),
        "truth": np.array([True, False]),
        "complex": np.array([1 + 2j]),
        "struct": np.zeros(2, STRUCT),
        "bigstruct": np.ones(2, [("a", ">f4"), ("b", ">i2")]),
        "empty": np.empty((0, 3), "f4"),
    }
    with h5py.File(path, "w") as file:
        for uid, array in wanted.items():
            filters = {"compression": compression} if array.ndim and array.size else {}
            file.create_dataset(uid, data=array, **filters)
    return {uid: array.astype(array.dtype.newbyteorder("=")) for uid, array in wanted.items()}


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
def test_a_file_of_another_tool_is_read_by_who_states_nothing(place: Path, compression: str | None):
    wanted = foreign(place / "cache.hdf5", compression=compression)

    with reader(place, version=None, takes=None, provides=None) as opened:
        assert holds(opened, wanted)
        assert verified(opened) == Verification(0, len(wanted), ())


def test_a_file_of_another_tool_is_stale_to_who_states_something(place: Path):
    foreign(place / "cache.hdf5")

    for writing in (True, False):
        with pytest.raises(StaleCacheError, match="not made by asyncfeed"):
            Store(settings_of(place), writing=writing)


def test_a_file_of_another_tool_is_added_to_and_merged_by_who_ignores_that(place: Path):
    wanted = foreign(place / "cache.hdf5") | items(1)
    path = fill(place, items(1), on_stale="ignore")
    with reader(place, on_stale="ignore") as opened:
        before = holds(opened, wanted)
        opened.compact()

        assert holds(opened, wanted)
        assert verified(opened) == Verification(len(wanted), 0, ())
    assert before
    assert not os.path.exists(path)


def test_what_is_no_array_of_numbers_is_an_error_when_it_is_read_and_not_before(place: Path):
    foreign(place / "cache.hdf5")
    with h5py.File(place / "cache.hdf5", "a") as file:
        file["text"] = "some text"
        file["null"] = h5py.Empty("f4")

    with reader(place, version=None, takes=None, provides=None) as opened:
        for uid in ("text", "null"):
            assert uid in opened
            with pytest.raises(UnreadableDatasetError, match=uid):
                opened.read(uid)
        assert verified(opened).damaged == ("text", "null") or verified(opened).damaged == ("null", "text")


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("num", [1, 40])
def test_what_another_tool_adds_to_a_sealed_file_is_read_and_so_is_all_else(
    place: Path, compression: str | None, num: int
):
    wanted = items(*range(1, num + 1))
    path = fill(place, wanted, compression=compression)
    with h5py.File(path, "a") as file:
        file["added"] = np.arange(1000.0)
        del file["spk1/utt1"]
        file["spk1/utt1"] = np.zeros(7)
        file.create_group("a group")
    wanted |= {"added": np.arange(1000.0), "spk1/utt1": np.zeros(7)}

    found = in_hdf5(path)

    assert all(same(found[uid], array) for uid, array in wanted.items())
    with writer(place) as opened:
        assert holds(opened, wanted)
        opened.append("later", np.zeros(1))
        opened.seal()
        opened.compact()
        assert holds(opened, wanted | {"later": np.zeros(1)})


def test_a_truncated_file_is_an_error_that_names_it(place: Path):
    path = fill(place, ordinary())
    size = os.path.getsize(path)
    for left in (size - 1, size * 2 // 3, 20_000, 12_000, 100):
        os.truncate(path, left)
        for writing in (True, False):
            with pytest.raises(StorageError, match=r"cache\.hdf5"):
                Store(settings_of(place), writing=writing)


# -- a full disk, and other failures -------------------------------------------------------------------------------

FULL = """
disk = os.path.dirname(directory)

def leave(nbytes):
    stat = os.statvfs(disk)
    with open(f"{disk}/other", "wb") as file:
        file.write(bytes(max(stat.f_bavail * stat.f_bsize - nbytes, 0)))

def right(store):
    return all((store.read(uid) == array).all() for uid, array in written.items()) and len(store) == len(written)

def try_with_little_room(function):
    failures = 0
    for nbytes in range(0, 4_000_000, 300_000 if compression else 60_000):
        leave(nbytes)
        try:
            function()
            return failures
        except WriteError as error:
            failures += 1
            assert "disk is" in str(error) or "space" in str(error).lower(), error
        finally:
            os.unlink(f"{disk}/other")
        left = {name for name in os.listdir(directory) if "scratch" in name or "copy" in name or "compact.j" in name}
        assert right(store) and not left, left

from asyncfeed import WriteError
compression = sys.argv[2] or None
store = open_writer(directory, compression=compression)
rng = np.random.default_rng(0)
written = {}

def append(first, num):
    for i in range(first, first + num):
        array = rng.integers(0, 2**32, 500 + i, "u4")
        store.append(f"spk{i % 3}/{i}", array)
        written[f"spk{i % 3}/{i}"] = array
"""

may_mount = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs the right to mount",
)


@may_mount
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_on_a_full_disk_sealing_and_merging_fail_with_nothing_changed_until_there_is_room(
    tmp_path: Path, compression: str | None
):
    code = """
        append(0, 100)
        failures = try_with_little_room(store.seal)
        assert failures > 1 and right(store), failures
        store.close()

        store = open_writer(directory, compression=compression)
        append(90, 60)
        def seal_after_more():
            append(len(written), 1)
            store.seal()
        failures = try_with_little_room(seal_after_more)
        assert failures > 1 and right(store), failures

        failures = try_with_little_room(store.compact)
        assert failures > 1 and right(store), failures
        store.close()
        print(len(written), os.listdir(directory))
    """
    script = 'mount -t tmpfs -o size=8m tmpfs "$0" && mkdir "$0/cache" && exec "$@" "$0/cache" ' + repr(
        compression or ""
    )
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        script,
        str(tmp_path),
        sys.executable,
        "-c",
        CHILD + FULL + textwrap.dedent(code),
    ]

    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert "'cache.hdf5'" in done.stdout
    assert "000002" not in done.stdout


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_failure_before_the_file_has_its_name_leaves_a_journal_to_go_on_with(
    place: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
):
    def fail(source: str, target: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with writer(place, compression=compression) as opened:
        opened.append("a", np.arange(3))
        with monkeypatch.context() as patch:
            patch.setattr(publish, "rename_exclusive", fail)
            with pytest.raises(WriteError, match="published"):
                opened.seal()
        left = names(place)
        opened.append("b", np.zeros(1))

        assert left == ["cache.hdf5.main.journal"]
        opened.seal()
        assert holds(opened, {"a": np.arange(3), "b": np.zeros(1)})


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_an_interruption_after_the_file_has_its_name_takes_nothing_from_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
):
    real = publish.rename_exclusive

    def interrupted(source: str, target: str) -> None:
        real(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, "rename_exclusive", interrupted)
    with writer(place, compression=compression) as opened:
        opened.append("a", np.arange(3))
        with pytest.raises(KeyboardInterrupt):
            opened.seal()
    monkeypatch.undo()

    with writer(place) as opened:
        assert holds(opened, {"a": np.arange(3)})
        assert verified(opened).ok
        assert opened.recovery is None
