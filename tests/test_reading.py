"""Readers bring exactly the bytes that h5py gives, in few calls, with bounded means, whatever the kernel does."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from asyncfeed.engine.loader import Loader
from asyncfeed.errors import ChangedFileError, DamagedFileError, ReadError
from asyncfeed.planning.catalog import Access
from asyncfeed.planning.coalesce import Reads, coalesce
from asyncfeed.planning.planner import make_plan
from asyncfeed.storage import direct, files, hdf5, libc
from asyncfeed.storage.direct import DirectReader
from asyncfeed.storage.files import MAX_OPEN, Descriptors
from asyncfeed.storage.hdf5file import stamp
from asyncfeed.storage.library import Library, open_library
from asyncfeed.units import KIB, MIB

pytestmark = pytest.mark.skipif(not direct.available(), reason="this system cannot read directly")


def never() -> bool:
    return False


class Loaded:
    """Everything in a library, loaded partition after partition, and what that took."""

    def __init__(
        self,
        library: Library,
        *,
        partition_nbytes: int = MIB,
        shuffle: bool = False,
        stopped: Callable[[], bool] = never,
        submission: bool = True,
    ) -> None:
        plan = make_plan(library.corpus, partition_nbytes=partition_nbytes, shuffle=shuffle)
        pieces = defaultdict(dict)
        with closing(Loader(library, stopped)) as loader:
            if not submission:
                loader.direct._submission = None
            for partition in plan:
                anchor = np.full(plan.partition_nbytes, 0xAB, np.uint8)
                loaded = loader.load(plan, partition, anchor)
                for utt, start, array in zip(loaded.ids, loaded.starts.tolist(), loaded.arrays, strict=True):
                    pieces[utt][start] = array
            self.num_calls = loader.direct.num_calls
        self.num_partitions = len(plan)
        self.arrays = {utt: np.concatenate([p[start] for start in sorted(p)]) for utt, p in pieces.items()}


def load(path: Path | list[Path], **options) -> Loaded:
    return Loaded(open_library(path), **options)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[utt].dtype == wanted[utt].dtype.newbyteorder("=") and np.array_equal(found[utt], wanted[utt])
        for utt in wanted
    )


class Kernel:
    """Stands before the real ``preadv`` and gives less than asked for, or nothing but an error, as kernels may."""

    def __init__(self, *, limit: int = 1 << 40, errors: list[int] | None = None) -> None:
        self.real, self.limit, self.errors = direct._preadv, limit, errors or []
        self.num_calls = 0

    def __call__(self, fd: int, address: int, number: int, offset: int) -> int:
        self.num_calls += 1
        if self.errors:
            code = self.errors.pop(0)
            if code:
                ctypes.set_errno(code)
                return -1
        asked = (ctypes.c_char * (number * libc.IOVEC.itemsize)).from_address(address)
        pieces = np.frombuffer(asked, libc.IOVEC).copy()
        nbytes = pieces["nbytes"].astype(np.int64)
        pieces["nbytes"] = np.clip(self.limit - (np.cumsum(nbytes) - nbytes), 0, nbytes)
        return self.real(fd, pieces.ctypes.data, number, offset)


@pytest.fixture
def kernel(monkeypatch):
    """Put a `Kernel` before the real one."""

    def put(**options) -> Kernel:
        kernel = Kernel(**options)
        monkeypatch.setattr(direct, "_preadv", kernel)
        return kernel

    return put


# -- whatever the layout -----------------------------------------------------------------------------------------


@pytest.fixture
def zoo(tmp_path):
    """A file with every layout, and its contents."""
    rng = np.random.default_rng(0)
    arrays = {}
    with h5py.File(tmp_path / "zoo.h5", "w") as file:
        for number in range(6):
            for name, dtype, options in [
                ("contiguous", "f4", {}),
                ("swapped", ">i2", {}),
                ("chunked", "f4", {"chunks": (7, 3)}),
                ("gzip", "f4", {"chunks": (50, 8), "compression": "gzip", "shuffle": True}),
                ("swapped_gzip", ">f8", {"chunks": True, "compression": "gzip"}),
            ]:
                array = (rng.random((int(rng.integers(0, 200)), 8)) * 1000).astype(dtype)
                file.create_dataset(f"{name}{number}", data=array, maxshape=(None, 8) if options else None, **options)
                arrays[f"{name}{number}"] = array
        file.create_dataset("never_written", (20, 8), "f4", fillvalue=3)
        arrays["never_written"] = np.full((20, 8), 3, "f4")
    return tmp_path / "zoo.h5", arrays


@pytest.mark.parametrize("partition_nbytes", [4 * KIB, 16 * KIB, MIB])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("submission", [False, True])
def test_every_layout_is_read_as_h5py_reads_it_cut_or_whole(zoo, partition_nbytes, shuffle, submission):
    path, arrays = zoo

    loaded = load(path, partition_nbytes=partition_nbytes, shuffle=shuffle, submission=submission)

    assert same(loaded.arrays, arrays)


def test_contiguous_data_does_not_go_through_hdf5(zoo):
    path, arrays = zoo

    catalog = open_library(path).corpus.catalogs[0]

    access = dict(zip(catalog.ids, catalog.access.tolist(), strict=True))
    assert {access[u] for u in arrays if u.startswith(("contiguous", "swapped")) and "gzip" not in u} == {Access.DIRECT}
    assert {access[u] for u in arrays if "gzip" in u} == {Access.FILTERED}
    assert access["never_written"] == Access.UNALLOCATED


# -- what kernels may do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [7, 1000, 4096, 100_000])
def test_short_reads_are_continued(path, corpus, kernel, limit):
    before = kernel(limit=limit)

    loaded = load(path)

    assert same(loaded.arrays, corpus)
    assert before.num_calls >= sum(a.nbytes for a in corpus.values()) // limit


def test_an_interrupted_call_is_made_again(path, corpus, kernel):
    before = kernel(limit=5000, errors=[errno.EINTR, errno.EINTR, 0, errno.EINTR])

    loaded = load(path)

    assert same(loaded.arrays, corpus)
    assert before.errors == []


def test_an_error_of_the_disk_names_file_and_utterance(path, kernel):
    kernel(errors=[errno.EIO])

    with pytest.raises(ReadError, match=r"could not read utterance 'utt00000' in .*feats\.h5") as caught:
        load(path)

    assert caught.value.__cause__.errno == errno.EIO


@pytest.mark.parametrize("limit", [1 << 40, 777])
def test_a_file_that_ends_within_an_utterance_names_that_utterance(path, kernel, limit):
    library = open_library(path)
    catalog = library.corpus.catalogs[0]
    os.truncate(path, int(catalog.offset[8]) + 10)
    library = replace(library, files=(stamp(str(path)),))  # as if it had been so from the beginning
    kernel(limit=limit)

    with pytest.raises(DamagedFileError, match=r"feats\.h5 ends before the end of utterance 'utt00008'"):
        Loaded(library)


class Refusing:
    """A submission of which the kernel takes nothing, or only some, or cuts short."""

    def __init__(self, real: libc.Submission, taken: str) -> None:
        self.real, self.taken, self.num_requests = real, taken, 0

    def read(self, requests: np.ndarray) -> np.ndarray:
        self.num_requests += requests.size
        if self.taken == "none":
            return np.zeros(requests.size, np.int64)
        if self.taken == "errors":
            return np.full(requests.size, -errno.EINTR, np.int64)
        results = self.real.read(requests)
        results[::2] //= 2
        return results

    def release(self) -> None:
        self.real.close()


@pytest.fixture
def scattered(make):
    """A file of which only every other dataset is wanted, too far apart to be joined."""
    rng = np.random.default_rng(0)
    arrays = {f"utt{i:03d}": rng.random((1000, 10)) for i in range(40)}
    return make(arrays), {utt: arrays[utt] for utt in list(arrays)[::2]}


needs_submission = pytest.mark.skipif(libc.find_submission() is None, reason="no native AIO here")


@needs_submission
@pytest.mark.parametrize("taken", ["none", "errors", "half"])
def test_what_a_submission_does_not_bring_is_read_one_by_one(scattered, monkeypatch, taken):
    path, wanted = scattered
    library = open_library(path, includes=list(wanted))
    made = []

    def find() -> Refusing:
        made.append(Refusing(libc.find_submission(), taken))
        return made[0]

    monkeypatch.setattr(direct, "find_submission", find)

    loaded = Loaded(library, partition_nbytes=4 * MIB)

    assert made[0].num_requests == len(wanted)
    assert same(loaded.arrays, wanted)


@needs_submission
def test_a_submission_that_the_kernel_refuses_altogether_brings_nothing():
    submission = libc.find_submission()
    requests = np.zeros(3, libc.IOCB)
    requests["fd"] = 2**31 - 1  # no such descriptor

    results = submission.read(requests)

    submission.close()
    assert results.tolist() == [0, 0, 0]


@needs_submission
def test_a_submission_that_was_released_is_taken_again_but_not_by_a_fork():
    submission = libc.find_submission()
    submission.release()

    assert libc.find_submission() is submission
    submission.release()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(libc.find_submission() is submission)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert libc.find_submission() is submission
    submission.close()


@needs_submission
def test_readers_one_after_the_other_share_a_submission(scattered, monkeypatch):
    path, wanted = scattered
    library = open_library(path, includes=list(wanted))
    taken = []
    monkeypatch.setattr(direct, "find_submission", lambda: taken.append(libc.find_submission()) or taken[-1])

    for _ in range(3):
        assert same(Loaded(library, partition_nbytes=4 * MIB).arrays, wanted)

    assert taken[0] is taken[1] is taken[2]


# -- how many calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [50, 500])
@pytest.mark.parametrize("shuffle", [False, True])
def test_neighbouring_datasets_take_a_few_calls_however_many_they_are(make, num, shuffle):
    arrays = {f"utt{i:05d}": np.full((20, 13), i, "f4") for i in range(num)}

    loaded = load(make(arrays), partition_nbytes=4 * MIB, shuffle=shuffle)

    assert same(loaded.arrays, arrays)
    assert loaded.num_partitions == 1
    assert loaded.num_calls <= 4


@needs_submission
def test_scattered_datasets_take_two_calls(scattered):
    path, wanted = scattered

    loaded = Loaded(open_library(path, includes=list(wanted)), partition_nbytes=4 * MIB)

    assert same(loaded.arrays, wanted)
    assert loaded.num_calls == 2


def test_a_reader_that_is_stopped_reads_nothing(path, kernel):
    before = kernel()

    Loaded(open_library(path), stopped=lambda: True)

    assert before.num_calls == 0


def test_a_plan_that_does_not_fit_its_memory_is_never_carried_out(path, kernel):
    before = kernel()
    library = open_library(path)
    memory = np.zeros(100, np.uint8)
    too_far = np.array([60], np.int64)
    reads = Reads(np.zeros(1, np.int32), np.zeros(1, np.int64), np.array([41]), too_far, np.zeros(1, np.int64))

    with closing(Descriptors(library.files, {})) as descriptors:
        with closing(DirectReader(descriptors, never)) as reader, pytest.raises(AssertionError, match="does not fit"):
            reader.read(coalesce(reads), memory, str)

    assert before.num_calls == 0
    assert not memory.any()


# -- how much else -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_of_many_files_few_are_open_at_a_time(make, tmp_path, open_in, compression, shuffle):
    arrays = {f"utt{i:03d}": np.full((5, 3), i, "f4") for i in range(200)}
    paths = [
        make({utt: a}, f"{utt}.h5", chunks=compression and (5, 3), compression=compression) for utt, a in arrays.items()
    ]
    library = open_library(paths, index="off")
    seen = []

    def stopped() -> bool:
        """Asked before every read."""
        seen.append(open_in(tmp_path))
        return False

    loaded = Loaded(library, stopped=stopped, shuffle=shuffle, partition_nbytes=8 * KIB)

    assert same(loaded.arrays, arrays)
    assert 1 < max(seen) <= MAX_OPEN + 1
    assert open_in(tmp_path) == 0


@pytest.fixture
def openings(monkeypatch):
    """The paths that are opened through HDF5 for reading data, one after the other."""
    seen, real = [], files.open_hdf5

    def open_hdf5(path: str) -> h5py.File:
        seen.append(path)
        return real(path)

    monkeypatch.setattr(files, "open_hdf5", open_hdf5)
    return seen


def test_a_file_is_opened_anew_after_so_many_datasets(make, openings, monkeypatch):
    monkeypatch.setattr(hdf5, "REOPEN_EVERY", 10)
    arrays = {f"utt{i:03d}": np.full((20, 3), i, "f4") for i in range(35)}
    path = make(arrays, chunks=(20, 3), compression="gzip")

    loaded = load(path)

    assert same(loaded.arrays, arrays)
    assert openings == [str(path)] * 4


def test_pieces_of_one_dataset_count_once(make, openings, monkeypatch):
    monkeypatch.setattr(hdf5, "REOPEN_EVERY", 2)
    arrays = {f"utt{i}": np.full((500, 8), i, "f4") for i in range(4)}
    path = make(arrays, chunks=(100, 8), compression="gzip")

    loaded = load(path, partition_nbytes=4 * KIB)

    assert loaded.num_partitions > 16
    assert same(loaded.arrays, arrays)
    assert len(openings) == 2


def test_a_handle_of_the_users_is_neither_opened_anew_nor_closed(make, openings, monkeypatch):
    monkeypatch.setattr(hdf5, "REOPEN_EVERY", 2)
    arrays = {f"utt{i}": np.full((5, 8), i, "f4") for i in range(9)}
    with h5py.File(make(arrays, chunks=(5, 8)), "r") as handle:
        loaded = load(handle)

        assert same(loaded.arrays, arrays)
        assert openings == []
        assert "utt0" in handle


def read_by_this_process() -> int:
    """Bytes that system calls of this process have read, from the page cache too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the kernel does not count reads")
@pytest.mark.parametrize("chunk", [(2500, 1024), (2500, 100)])
def test_chunks_larger_than_the_cache_of_hdf5_are_read_and_decoded_once_when_cut(make, chunk):
    array = np.random.default_rng(0).integers(0, 255, (2500, 4096), np.uint8).view("f4")  # beyond the 8 MiB of HDF5 2
    path = make({"utt": array}, chunks=chunk, shuffle=True)
    library = open_library(path)
    before = read_by_this_process()

    loaded = Loaded(library, partition_nbytes=512 * KIB)

    assert loaded.num_partitions >= 16
    assert np.array_equal(loaded.arrays["utt"].view("u4"), array.view("u4"))
    assert read_by_this_process() - before < 1.5 * os.path.getsize(path)


@pytest.mark.parametrize("options", [{}, {"chunks": True, "compression": "gzip"}])
def test_a_file_that_was_made_anew_is_not_read(make, corpus, options):
    path = make(corpus, **options)
    library = open_library(path)
    make(corpus, **options)

    with pytest.raises(ChangedFileError, match=rf"{path} changed while the feed was open"):
        Loaded(library)
