"""A cache for plain code: modes of h5py, one process and many, and every way to end. Needs no SpeechBrain."""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from asyncfeed import (
    CacheExistsError,
    CacheMissError,
    ClosedError,
    ItemIdError,
    LockedFileError,
    ModeError,
    StaleCacheError,
    WriteError,
)
from asyncfeed.cache.settings import checked_settings
from asyncfeed.compat import shelf as shelves
from asyncfeed.compat.itemfile import ItemFile
from asyncfeed.compat.shelf import Shelf

PATIENT = 50.0

WRITING = ["a", "r+", "w"]


def settings_for(directory: Path, **options: Any) -> Any:
    stated = {
        "takes": ("id",),
        "provides": ("feats",),
        "version": None,
        "filename": "cache.hdf5",
        "compression": None,
        "writer": None,
        "durability": "process",
        "on_stale": "error",
        "locking": True,
    }
    return checked_settings(directory, **stated | options)


def array_of(uid: str) -> np.ndarray:
    """What is kept under an id."""
    return np.frombuffer(uid.encode(), np.uint8).astype("f4")


def fill(shelf: Shelf, *uids: str) -> Shelf:
    for uid in uids:
        shelf.write(uid, array_of(uid))
    return shelf


def contents(shelf: Shelf) -> list[str]:
    """The ids that are there; the arrays are what was written."""
    for uid in (uids := sorted(shelf.keys())):
        np.testing.assert_array_equal(shelf.read(uid), array_of(uid))
    return uids


def in_hdf5(path: Path) -> list[str]:
    """What h5py finds in a file."""
    with h5py.File(path) as file:
        return sorted(file)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "feats"


@pytest.fixture
def make(place: Path) -> Callable[..., Shelf]:
    def make(mode: str = "a", **options: Any) -> Shelf:
        return Shelf(settings_for(place, **options), mode)

    return make


@pytest.fixture
def sealed(place: Path, make: Callable[..., Shelf]) -> Path:
    """A cache that holds "a" and "b"; the path of its file."""
    fill(make(), "a", "b").close()
    return place / "cache.hdf5"


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what is soon merged, in bytes."""
    return lambda nbytes: monkeypatch.setattr(shelves, "SOON_MERGED", nbytes)


# -- modes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_what_has_to_be_there_and_is_not_is_no_such_file(make, mode):
    with pytest.raises(FileNotFoundError, match="fill it with file_mode='a'"):
        make(mode)


@pytest.mark.parametrize("mode", ["a", "w", "w-", "x"])
def test_a_new_cache_is_empty_and_leaves_no_file_until_something_is_written(place, make, mode):
    shelf = make(mode)

    assert (len(shelf), shelf.keys(), shelf.writing, place.exists()) == (0, [], True, False)
    shelf.close()


@pytest.mark.parametrize("mode", ["w-", "x"])
def test_what_must_not_be_there_and_is_is_refused_and_stays(sealed, make, mode):
    with pytest.raises(FileExistsError, match="wants a new one") as caught:
        make(mode)

    assert isinstance(caught.value, CacheExistsError)
    assert in_hdf5(sealed) == ["a", "b"]


@pytest.mark.parametrize("mode", ["a", "r+"])
def test_a_writer_keeps_what_is_there(sealed, make, mode):
    shelf = fill(make(mode), "c")

    assert contents(shelf) == ["a", "b", "c"]
    shelf.close()


def test_beginning_anew_deletes_what_is_there(sealed, make):
    shelf = make("w")

    assert (len(shelf), sealed.exists()) == (0, False)
    fill(shelf, "c").close()
    assert in_hdf5(sealed) == ["c"]


def test_beginning_anew_is_refused_while_somebody_writes_and_deletes_nothing(sealed, make):
    writer = fill(make(), "c")

    with pytest.raises(LockedFileError):
        make("w")

    assert in_hdf5(sealed) == ["a", "b"]
    assert contents(writer) == ["a", "b", "c"]
    writer.close()


def test_a_reader_reads_and_writes_nothing(sealed, make):
    shelf = make("r")

    with pytest.raises(ModeError, match="change_file_mode"):
        fill(shelf, "c")
    assert contents(shelf) == ["a", "b"]
    shelf.close()


@pytest.mark.parametrize("mode", ["q", "", "rw", None])
def test_a_mode_that_h5py_does_not_have_is_a_value_error_and_changes_nothing(sealed, make, mode):
    shelf = make("r")

    with pytest.raises(ValueError, match="must be one of 'r', 'a'"):
        shelf.open(mode)
    assert contents(shelf) == ["a", "b"]
    shelf.close()


def test_going_to_another_mode_seals_and_goes_on(place, make):
    shelf = fill(make(), "a")
    shelf.open("r")
    read = contents(shelf)
    shelf.open("a")
    fill(shelf, "b")
    shelf.open("r")

    assert (read, contents(shelf)) == (["a"], ["a", "b"])
    assert in_hdf5(place / "cache.hdf5") == ["a", "b"]
    shelf.close()


def test_a_writer_that_wrote_nothing_becomes_a_reader_of_nothing(make):
    shelf = make()
    shelf.open("r")

    with pytest.raises(CacheMissError, match=r"change_file_mode\('a'\)"):
        shelf.read("a")
    assert len(shelf) == 0
    shelf.close()


def test_what_is_closed_says_so_until_it_is_opened_again(sealed, make):
    shelf = make("r")
    shelf.close()
    shelf.close()

    for use in (lambda: "a" in shelf, lambda: len(shelf), lambda: shelf.read("a"), shelf.keys, shelf.compact):
        with pytest.raises(ClosedError, match=r"change_file_mode\(\) opens it again"):
            use()
    shelf.open("r")
    assert contents(shelf) == ["a", "b"]
    shelf.close()


def test_when_it_cannot_be_opened_it_is_closed_and_what_was_written_is_sealed(place, make):
    shelf = fill(make(), "a")

    with pytest.raises(CacheExistsError):
        shelf.open("x")

    assert shelf.closed
    assert in_hdf5(place / "cache.hdf5") == ["a"]


@pytest.mark.parametrize("mode", WRITING[:2])
def test_a_stale_cache_is_found_when_it_is_opened_and_not_with_the_first_item(sealed, make, mode):
    with pytest.raises(StaleCacheError, match="version='v2'"):
        make(mode, version="v2")

    assert in_hdf5(sealed) == ["a", "b"]


def test_a_writer_that_states_less_than_the_file_would_mix_and_is_refused(place, make):
    fill(make(version="v1"), "a").close()

    with pytest.raises(StaleCacheError, match="version='v1'"):
        make("a")


def test_a_stale_cache_is_discarded_where_that_is_wanted(sealed, make):
    shelf = make("a", version="v2", on_stale="discard")

    assert "a" not in shelf
    fill(shelf, "c").close()
    assert in_hdf5(sealed) == ["c"]


# -- a file to look at -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["written", "sealed", "compressed"])
def file(request: pytest.FixtureRequest, make: Callable[..., Shelf]) -> Any:
    """Items of several forms, from a journal, from a sealed file, and from one that only HDF5 can read."""
    shelf = make(compression="gzip" if request.param == "compressed" else None)
    shelf.write("matrix", np.arange(12, dtype="i2").reshape(4, 3))
    shelf.write("number", np.array(2.5))
    shelf.write("none", np.empty((0, 3), "f4"))
    shelf.write("spk/utt", np.ones(2, bool))
    if request.param != "written":
        shelf.open("r")
    yield ItemFile(shelf)
    shelf.close()


def test_items_look_like_datasets(file):
    matrix = file["matrix"]

    np.testing.assert_array_equal(matrix[:], np.arange(12).reshape(4, 3))
    np.testing.assert_array_equal(matrix[1:3, 0], [3, 6])
    assert (matrix.shape, matrix.dtype, matrix.ndim, matrix.size, len(matrix)) == ((4, 3), np.int16, 2, 12, 4)
    assert np.asarray(matrix).dtype == np.int16
    assert np.asarray(matrix, "f8").dtype == np.float64
    assert (file["number"][()], file["number"].shape, file["number"].size) == (2.5, (), 1)
    assert (file["none"][:].shape, file["none"].dtype, file["none"].size) == ((0, 3), np.float32, 0)
    assert file["spk/utt"][:].tolist() == [True, True]
    assert (matrix.name, repr(matrix)) == ("/matrix", "<item 'matrix': shape (4, 3), type '<i2'>")


def test_a_file_is_a_mapping_of_whole_ids(file):
    assert sorted(file) == sorted(file.keys()) == ["matrix", "none", "number", "spk/utt"]
    assert (len(file), "matrix" in file, "spk" in file, "mat" in file, 0 in file) == (4, True, False, False, False)
    assert {uid: item.shape for uid, item in file.items()}["matrix"] == (4, 3)
    assert file.get("spk") is None
    with pytest.raises(KeyError, match="'spk' is not in the cache"):
        file["spk"]


def test_a_file_is_true_until_it_is_closed(file):
    with file as same:
        assert same
        assert same == file != ItemFile(file._shelf)

    assert not file
    assert repr(file).startswith("<closed cache ")


def test_a_file_says_its_mode_and_name_as_h5py_does(place, make):
    file = ItemFile(fill(make(), "a"))

    assert (file.mode, file.filename) == ("r+", str(place / "cache.hdf5"))
    file._shelf.open("r")
    assert file.mode == "r"
    file.close()


def test_what_is_read_is_the_callers_own(file):
    file["matrix"][:][:] = -1
    np.asarray(file["matrix"])[:] = -1

    assert file["matrix"][:].max() == 11


# -- copies in this process ----------------------------------------------------------------------------------------------


def test_copies_share_one_shelf_and_go_to_another_mode_together(make):
    shelf = fill(make(), "a")
    twin = copy.deepcopy({"shelf": shelf})["shelf"]
    fill(twin, "b")
    twin.open("r")

    assert shelf.mode == "r"
    assert contents(shelf) == contents(copy.copy(shelf)) == ["a", "b"]
    shelf.close()


def test_a_pickled_copy_finds_what_was_written_before_and_the_original_goes_on(place, make):
    shelf = fill(make(), "a")
    twin = pickle.loads(pickle.dumps(shelf))
    fill(shelf, "b")
    fill(twin, "c")

    assert contents(twin) == ["a", "c"]
    assert contents(shelf) == ["a", "b"]
    assert len(list(place.glob("*.journal"))) == 2
    twin.close()
    assert contents(shelf) == ["a", "b", "c"]
    shelf.close()
    assert in_hdf5(place / "cache.hdf5") == ["a", "b", "c"]


@pytest.mark.parametrize("mode", ["w", "x"])
def test_a_copy_of_one_that_began_anew_does_not_begin_anew(make, mode):
    shelf = fill(make(mode), "a")
    twin = pickle.loads(pickle.dumps(shelf))

    assert contents(fill(twin, "b")) == ["a", "b"]
    twin.close()
    shelf.close()


def test_a_reader_pickles_and_stays_open(sealed, make):
    shelf = make("r")
    twin = pickle.loads(pickle.dumps(shelf))

    assert contents(twin) == contents(shelf) == ["a", "b"]
    with pytest.raises(ModeError):
        fill(twin, "c")
    twin.close()
    shelf.close()


def test_when_sealing_fails_a_copy_is_made_all_the_same(place, make, caplog, monkeypatch):
    shelf = fill(make(), "a")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        twin = pickle.loads(pickle.dumps(shelf))

    assert "will not see what was written last" in caplog.text
    assert (contents(shelf), contents(twin)) == (["a"], [])
    twin.close()
    shelf.close()
    assert in_hdf5(place / "cache.hdf5") == ["a"]


# -- several writers ---------------------------------------------------------------------------------------------------


def test_two_that_write_at_a_time_have_a_journal_each_and_see_each_other_once_sealed(place, make):
    first, second = fill(make(), "a"), fill(make(), "b")

    assert (contents(first), contents(second)) == (["a"], ["b"])
    first.close()
    assert contents(second) == ["a", "b"]
    second.close()
    assert in_hdf5(place / "cache.hdf5") == ["a", "b"]


def test_ids_of_writers_are_used_again_so_that_lock_files_stay_few(place, make):
    for uid in "abcd":
        fill(make(), uid).close()

    host_locks = [path.name for path in place.glob("*-*.lock")]
    assert len(host_locks) == 1
    assert in_hdf5(place / "cache.hdf5") == list("abcd")


def test_any_thread_may_write_and_read(make):
    shelf = make()

    def work(thread: int) -> None:
        for number in range(25):
            uid = f"{thread}-{number}"
            assert uid not in shelf
            fill(shelf, uid)
            np.testing.assert_array_equal(shelf.read(uid), array_of(uid))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))

    assert len(contents(shelf)) == 200
    shelf.open("r")
    assert len(contents(shelf)) == 200
    shelf.close()


def test_a_second_result_replaces_the_first(place, make):
    shelf = make()
    for value in (1, 2):
        shelf.write("a", np.array([value]))
    shelf.open("a")
    shelf.write("a", np.array([3]))

    assert shelf.read("a") == [3]
    shelf.open("r")
    assert (shelf.read("a"), len(shelf)) == ([3], 1)
    shelf.close()
    with h5py.File(place / "cache.hdf5") as file:
        assert file["a"][:] == [3]


def test_what_prevents_writing_is_said_before_the_work(make):
    shelf = fill(make(), "spk/utt")

    for uid in ("", "spk", "spk/utt/1", 7):
        with pytest.raises(ItemIdError):
            shelf.expect(uid)
    shelf.close()


# -- locks -------------------------------------------------------------------------------------------------------------


def refuse_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_on_a_file_system_without_locks_reading_works_and_writing_says_what_to_do(sealed, make, monkeypatch):
    refuse_locks(monkeypatch)
    reader = make("r")
    writer = make("a")

    assert contents(reader) == ["a", "b"]
    with pytest.raises(LockedFileError, match="locking=False"):
        fill(writer, "c")
    assert contents(writer) == ["a", "b"]
    writer.close()
    reader.close()


def test_on_a_file_system_without_locks_one_can_do_without(sealed, make, monkeypatch):
    refuse_locks(monkeypatch)
    shelf = fill(make("a", locking=False), "c")
    shelf.open("r")

    assert contents(shelf) == ["a", "b", "c"]
    shelf.close()


# -- one file, or several ------------------------------------------------------------------------------------------------


def test_what_is_small_is_one_file_whenever_something_was_added(place, make):
    for uid in "abc":
        fill(make(), uid).close()

    assert [path.name for path in place.glob("*.hdf5")] == ["cache.hdf5"]
    assert in_hdf5(place / "cache.hdf5") == ["a", "b", "c"]


def test_a_little_beside_much_stays_beside_it_until_it_is_compacted(place, make, bounds):
    bounds(0)
    shelf = make()
    shelf.write("much", np.zeros(100_000))
    shelf.open("a")
    fill(shelf, "little")
    shelf.open("r")

    assert sorted(path.name for path in place.glob("*.hdf5")) == ["cache.000002.hdf5", "cache.hdf5"]
    assert (sorted(shelf.keys()), shelf.read("little").tolist()) == (["little", "much"], array_of("little").tolist())
    shelf.compact()
    assert [path.name for path in place.glob("*.hdf5")] == ["cache.hdf5"]
    assert in_hdf5(place / "cache.hdf5") == ["little", "much"]
    shelf.close()


def test_much_beside_a_little_is_merged_with_it(place, make, bounds):
    bounds(0)
    fill(make(), "little").close()
    shelf = make()
    shelf.write("much", np.zeros(100_000))
    shelf.close()

    assert [path.name for path in place.glob("*.hdf5")] == ["cache.hdf5"]
    assert in_hdf5(place / "cache.hdf5") == ["little", "much"]


def test_opening_a_reader_merges_nothing(place, make):
    writers = [fill(make(), uid) for uid in "ab"]
    for writer in writers:
        writer.seal()
    before = sorted(place.glob("*.hdf5"))

    reader = make("r")
    assert (contents(reader), sorted(place.glob("*.hdf5"))) == (["a", "b"], before)
    assert len(before) == 2
    reader.close()
    for writer in writers:
        writer.close()


def test_a_file_of_another_tool_is_left_as_it_is(place, make):
    place.mkdir()
    theirs = place / "cache.hdf5"
    with h5py.File(theirs, "w") as file:
        file["old"] = array_of("old")
    before = theirs.read_bytes()

    shelf = Shelf(settings_with_unmarked(place), "a")
    fill(shelf, "new")
    shelf.open("r")

    assert contents(shelf) == ["new", "old"]
    assert theirs.read_bytes() == before
    shelf.compact()
    assert in_hdf5(theirs) == ["new", "old"]
    shelf.close()


def settings_with_unmarked(place: Path) -> Any:
    return replace(settings_for(place), unmarked=True)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_what_is_collected_is_sealed_first(place, make):
    shelf = fill(make(), "a")
    del shelf
    gc.collect()

    assert in_hdf5(place / "cache.hdf5") == ["a"]
    assert not list(place.glob("*.journal"))


BEGIN = """
import gc, multiprocessing, os, sys
import numpy as np
from pathlib import Path
from asyncfeed.cache.settings import checked_settings
from asyncfeed.compat.shelf import Shelf

place = Path(sys.argv[1])

def settings_for(compression=None):
    return checked_settings(
        place, takes=("id",), provides=("feats",), version=None, filename="cache.hdf5", compression=compression,
        writer=None, durability="process", on_stale="error", locking=True,
    )

def fill(shelf, *uids):
    for uid in uids:
        shelf.write(uid, np.frombuffer(uid.encode(), np.uint8).astype("f4"))
    return shelf

"""


def start(tmp_path: Path, place: Path, code: str, *args: object) -> subprocess.Popen[str]:
    """Run a script, from a file, where spawned processes find it."""
    script = tmp_path / "script.py"
    script.write_text(BEGIN + textwrap.dedent(code))
    command = [sys.executable, script, place, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(tmp_path: Path, place: Path, code: str, *args: object) -> tuple[int, str]:
    """Its exit code and its last lines."""
    with start(tmp_path, place, code, *args) as process:
        out, err = process.communicate(timeout=PATIENT)
    return process.returncode, "\n".join((out + err).splitlines()[-3:])


ENDS = {
    "the end": ("", 0),
    "an exception": ("raise ValueError('mine')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "a cycle": ("shelf.me = shelf; del shelf", 0),
}


@pytest.mark.parametrize(("end", "compression"), [(name, None) for name in ENDS] + [("the end", "gzip")])
def test_a_process_that_ends_leaves_a_complete_file(tmp_path, place, end, compression):
    last_line, code = ENDS[end]

    returned, said = run(
        tmp_path, place, f"shelf = fill(Shelf(settings_for({compression!r}), 'a'), 'a', 'b')\n{last_line}"
    )

    assert returned == code, said
    assert in_hdf5(place / "cache.hdf5") == ["a", "b"]
    assert not list(place.glob("*.journal"))


CHILDREN = """
def work(shelf, uid):
    assert "parent" in shelf, shelf.keys()
    fill(shelf, uid)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    shelf = fill(Shelf(settings_for(), "a"), "parent")
    children = [context.Process(target=work, args=(shelf, uid), daemon=uid == "b") for uid in "ab"]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    fill(shelf, "later")
    print(sorted(shelf.keys()))
    shelf.open("r")
    print(sorted(shelf.keys()), sorted(path.name for path in place.glob("*.hdf5")))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes_see_what_was_written_and_write_files_of_their_own(tmp_path, place, method):
    code, said = run(tmp_path, place, CHILDREN, method)

    assert code == 0, said
    assert said.splitlines() == [
        "['a', 'b', 'later', 'parent']",
        "['a', 'b', 'later', 'parent'] ['cache.hdf5']",
    ]
    assert in_hdf5(place / "cache.hdf5") == ["a", "b", "later", "parent"]


def test_a_forked_child_that_just_goes_away_takes_nothing_from_its_parent(place, make):
    shelf = fill(make(), "a")

    pid = os.fork()
    if pid == 0:
        os._exit(0 if contents(fill(shelf, "child")) == ["a", "child"] else 1)
    assert os.waitpid(pid, 0)[1] == 0

    assert contents(fill(shelf, "b")) == ["a", "b"]
    shelf.open("r")  # seals what the child has left, too
    assert contents(shelf) == ["a", "b", "child"]
    shelf.close()


def test_a_grandchild_is_a_writer_too(place, make):
    shelf = fill(make(), "a")

    pid = os.fork()
    if pid == 0:
        fill(shelf, "child")
        grandchild = os.fork()
        if grandchild == 0:
            fill(shelf, "grandchild")
            os._exit(0)
        os._exit(os.waitpid(grandchild, 0)[1])
    assert os.waitpid(pid, 0)[1] == 0

    shelf.open("r")
    assert contents(shelf) == ["a", "child", "grandchild"]
    shelf.close()


def test_a_fork_while_another_thread_is_within_hangs_nobody(make):
    shelf = fill(make(), "a")
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with shelf._lock:
            entered.set()
            leave.wait(PATIENT)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(PATIENT)
    pid = fork_in_a_thread_of_many()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if "a" in shelf else 1)
    leave.set()
    thread.join()

    assert os.waitpid(pid, 0)[1] == 0
    shelf.close()


def fork_in_a_thread_of_many() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that is what is tried here
        return os.fork()


KILLED = """
shelf = Shelf(settings_for(), "a")
for number in range(10_000):
    fill(shelf, f"utt{number}")
    print(f"utt{number}", flush=True)
"""


@pytest.mark.parametrize("mode", ["r", "a", "r+"])
def test_what_a_killed_process_had_written_is_there_for_the_next_one(tmp_path, place, make, mode):
    with start(tmp_path, place, KILLED) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(50)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().split("\n")[:-1]

    shelf = make(mode)

    assert len(acknowledged) >= 50
    assert set(acknowledged) <= set(contents(shelf))
    assert in_hdf5(place / "cache.hdf5") == contents(shelf)
    assert not list(place.glob("*.journal"))
    shelf.close()


def abandoned(place: Path, *uids: str) -> None:
    """Leave a journal as a killed process does."""
    pid = os.fork()
    if pid == 0:
        shelf = Shelf(settings_for(place), "a")
        fill(shelf, *uids)
        os._exit(0)
    os.waitpid(pid, 0)
    assert list(place.glob("*.journal"))


def test_many_that_come_at_a_time_all_find_what_was_left(sealed, place, make):
    abandoned(place, *(f"left{number}" for number in range(50)))
    barrier = threading.Barrier(6)

    def read(_: int) -> int:
        barrier.wait()
        shelf = make("r")
        found = len(contents(shelf))
        shelf.close()
        return found

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(read, range(6))) == [52] * 6


def test_beginning_anew_deletes_what_a_killed_process_left(place, make):
    abandoned(place, "left")

    shelf = make("w")

    assert (contents(shelf), list(place.glob("*.journal"))) == ([], [])
    shelf.close()


def test_what_a_killed_process_left_is_there_already_for_one_that_wants_a_new_cache(place, make):
    abandoned(place, "left")

    with pytest.raises(CacheExistsError):
        make("x")


def test_a_reader_that_may_not_write_there_reads_what_is_sealed(sealed, place, make, caplog):
    abandoned(place, "left")
    (place / "cache.hdf5.leftovers.all.lock").mkdir()  # the file cannot be made

    shelf = make("r")

    assert contents(shelf) == ["a", "b"]
    assert "cannot be sealed" in caplog.text
    shelf.close()


def test_a_miss_looks_whether_the_item_was_left_by_somebody_meanwhile(sealed, place, make):
    shelf = make("r")
    before = "late" in shelf
    abandoned(place, "late")

    assert (before, shelf.came("late"), shelf.came("never")) == (False, True, False)
    shelf.close()


def test_a_full_disk_loses_nothing_and_leaves_it_open(place, make, monkeypatch):
    shelf = fill(make(), "a")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteError):
            shelf.close()

    assert contents(fill(shelf, "b")) == ["a", "b"]
    shelf.close()
    assert in_hdf5(place / "cache.hdf5") == ["a", "b"]
