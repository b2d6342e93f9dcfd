"""The journal of a writer: what was appended is there again, whatever became of the end of the file; and its lock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncfeed import DamagedFileError, LockedFileError, WriteError
from asyncfeed.cache import records
from asyncfeed.cache.fingerprint import Fingerprint
from asyncfeed.cache.ids import check_id
from asyncfeed.cache.journal import Journal, Recovery, read_header
from asyncfeed.cache.lock import Lock
from asyncfeed.cache.records import ALIGNMENT, DATA_START, HEADER_START, Header, Kind, Pointer, checksum_of
from asyncfeed.cache.values import to_array
from asyncfeed.cache.view import read_item

MADE = Fingerprint("v1", ("id",), ("feats",))
NONCE = bytes(range(16))
ITEMS = {
    "first": np.arange(30, dtype="f4").reshape(10, 3),
    "spk/second": np.arange(5, dtype="i8"),
    "empty": np.empty((0, 4), "f4"),
    "scalar": np.array(7, "f8"),
    "last é": np.arange(40, dtype="f2").reshape(4, 10),
}


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@contextlib.contextmanager
def opened(path: Path | str, **options: Any) -> Iterator[Journal]:
    with contextlib.closing(Journal(str(path), MADE, **options)) as journal:
        yield journal


def content(journal: Journal) -> dict[str, np.ndarray]:
    """What a journal gives back."""
    return {uid: read_item(journal.fd, entry, uid, journal.path) for uid, entry in journal.entries.items()}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A journal that holds `ITEMS`, closed."""
    path = tmp_path / "journal"
    with opened(path) as journal:
        for uid, array in ITEMS.items():
            journal.append(uid, array, b"\1" * 16)
    return path


def places(path: Path) -> dict[str, records.Record]:
    """The records of a journal, by id."""
    data = path.read_bytes()
    header = read_header(str(path))
    assert header is not None
    found, position = {}, DATA_START
    while (record := records.decode(data, position, header.nonce)) is not None:
        found[record.uid] = record
        position = record.stop
    return found


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


# -- the bytes of a record -----------------------------------------------------------------------------------------

ids = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.array_dtypes(st.one_of(hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.complex_number_dtypes())),
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


@settings(max_examples=30)
@given(ids, arrays, st.sampled_from([b"", bytes(range(1, 17))]), st.integers(0, 3))
def test_whatever_its_id_dtype_and_shape_a_record_comes_back(uid: str, value: np.ndarray, digest: bytes, before: int):
    array = to_array(value)
    pieces = records.encode(NONCE, Kind.ITEM, uid, array, digest, checksum_of(records.raw(array)))
    block = bytes(before * ALIGNMENT) + b"".join(pieces)

    record = records.decode(block, before * ALIGNMENT, NONCE)

    assert record is not None
    entry = record.entry
    data = block[entry.offset : entry.offset + entry.nbytes]
    assert (record.kind, record.uid, record.stop) == (Kind.ITEM, uid, len(block))
    assert (entry.dtype, entry.shape, entry.digest) == (array.dtype, array.shape, digest)
    assert data == array.tobytes()
    assert entry.checksum == checksum_of(memoryview(data))
    assert entry.offset % ALIGNMENT == record.stop % ALIGNMENT == 0


@given(st.data())
def test_a_record_with_a_flipped_bit_in_its_head_is_none(data: st.DataObject):
    array = np.arange(3, dtype="f4")
    pieces = records.encode(NONCE, Kind.ITEM, "utt1", array, b"", 0)
    block = bytearray(b"".join(pieces))
    size = len(pieces[0].rstrip(b"\0"))
    where, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    if 5 <= where < 8:  # of these nothing depends
        where = 8

    block[where] ^= 1 << bit

    assert records.decode(bytes(block), 0, NONCE) is None


def test_a_record_of_another_journal_is_none():
    block = b"".join(records.encode(NONCE, Kind.ITEM, "utt1", np.zeros(3), b"", 0))

    assert records.decode(block, 0, bytes(16)) is None


@given(st.text(max_size=50), st.integers(0, 60))
def test_a_header_comes_back_and_no_part_of_it_does(version: str, missing: int):
    header = Header(NONCE, Fingerprint(version, ("id",), None))
    block = header.encode()

    assert Header.decode(block + bytes(100)) == header
    assert Header.decode(block[: len(block) - 1 - missing]) is None


def test_a_pointer_comes_back_and_zeros_are_none():
    pointer = Pointer(DATA_START, 300, 70_000)

    assert Pointer.decode(pointer.encode() + bytes(20)) == pointer
    assert Pointer.decode(bytes(64)) is None
    assert Pointer.decode(pointer.encode()[:-1]) is None


# -- what was appended is there again ------------------------------------------------------------------------------


def test_items_are_there_at_once_and_again_when_it_is_opened(written: Path):
    with opened(written) as journal:
        found = content(journal)

        assert list(found) == list(ITEMS)
        assert all(same(found[uid], ITEMS[uid]) for uid in ITEMS)
        assert {entry.digest for entry in journal.entries.values()} == {b"\1" * 16}
        assert journal.recovery == Recovery(str(written), len(ITEMS), 0, 0)
        assert journal.header.fingerprint == MADE


def test_a_later_item_of_an_id_replaces_an_earlier_one_now_and_later(written: Path):
    with opened(written) as journal:
        journal.append("first", np.zeros(2))
        now = content(journal)["first"]

    with opened(written) as journal:
        assert same(now, np.zeros(2))
        assert same(content(journal)["first"], np.zeros(2))
        assert len(journal.entries) == len(ITEMS)


def test_nobody_can_tell_a_new_journal_from_one_whose_session_ended_at_once(tmp_path: Path):
    path = tmp_path / "journal"
    for size in (0, 1, HEADER_START, HEADER_START + 10, DATA_START - 1, DATA_START):
        path.write_bytes(bytes(size))

        with opened(path) as journal:
            assert journal.recovery is None
            journal.append("a", np.arange(3))

        with opened(path) as journal:
            assert same(content(journal)["a"], np.arange(3))


def test_something_else_than_a_journal_is_left_alone(tmp_path: Path):
    path = tmp_path / "journal"
    path.write_bytes(b"somebody's work " * 10_000)

    with pytest.raises(DamagedFileError, match=str(path)):
        Journal(str(path), MADE)

    assert path.read_bytes() == b"somebody's work " * 10_000


# -- torn and damaged ----------------------------------------------------------------------------------------------


def test_wherever_the_last_record_is_torn_all_before_it_are_kept(written: Path, tmp_path: Path):
    last = places(written)["last é"]
    start, whole = places(written)["scalar"].stop, written.read_bytes()
    torn = tmp_path / "torn"
    needed = last.entry.offset + last.entry.nbytes

    for size in range(start, len(whole)):
        torn.write_bytes(whole[:size])
        with opened(torn) as journal:
            found, recovery = content(journal), journal.recovery
            journal.append("next", np.arange(size))

        complete = size >= needed  # only padding is missing
        assert list(found) == list(ITEMS)[: None if complete else -1]
        assert all(same(found[uid], ITEMS[uid]) for uid in found)
        assert recovery == Recovery(str(torn), len(found), 0, 0 if complete else size - start)
        with opened(torn) as journal:
            assert same(content(journal)["next"], np.arange(size))
            assert journal.recovery == Recovery(str(torn), len(found) + 1, 0, 0)


def test_wherever_a_bit_of_a_record_in_the_middle_flips_the_others_are_kept(written: Path, tmp_path: Path):
    victim = places(written)["spk/second"]
    before, whole = places(written)["first"].stop, bytearray(written.read_bytes())
    broken = tmp_path / "broken"
    harmless = 0

    for offset in range(before, victim.stop):
        whole[offset] ^= 0x10
        broken.write_bytes(whole)
        whole[offset] ^= 0x10
        with opened(broken) as journal:
            found, recovery = content(journal), journal.recovery

        assert recovery is not None
        assert recovery.dropped_nbytes == 0
        if "spk/second" in found:  # padding
            harmless += 1
            assert same(found["spk/second"], ITEMS["spk/second"])
        assert recovery.damaged == ("spk/second" not in found)
        others = {uid: array for uid, array in found.items() if uid != "spk/second"}
        assert len(others) == len(ITEMS) - 1
        assert all(same(others[uid], ITEMS[uid]) for uid in others)
    assert harmless < 2 * ALIGNMENT


def test_what_was_damaged_can_be_appended_again(written: Path):
    flip(written, places(written)["first"].entry.offset)

    with opened(written) as journal:
        missing = set(ITEMS) - set(journal.entries)
        journal.append("first", ITEMS["first"])

    with opened(written) as journal:
        assert missing == {"first"}
        assert all(same(found, ITEMS[uid]) for uid, found in content(journal).items())
        assert len(journal.entries) == len(ITEMS)


def test_an_end_of_zeros_is_cut_off(written: Path):
    """As a file system leaves it, where the size of a file came to disk before its data."""
    size = written.stat().st_size
    os.truncate(written, size + 5000)

    with opened(written) as journal:
        assert journal.recovery == Recovery(str(written), len(ITEMS), 0, 5000)

    assert written.stat().st_size == size


def test_recovery_says_what_was_kept_and_what_was_not():
    said = str(Recovery("exp/journal", 12, 3, 4096))

    assert re.search("exp/journal.* 12 items.* 3 damaged.* 4.* cut off", said)
    assert "damaged" not in str(Recovery("exp/journal", 12, 0, 0))


def test_bytes_of_another_journal_within_an_item_are_not_taken_for_records(written: Path, tmp_path: Path):
    inner = np.frombuffer(written.read_bytes(), np.uint8)
    outer = tmp_path / "outer"
    with opened(outer) as journal:
        journal.append("victim", inner)
        journal.append("after", np.arange(3))
    flip(outer, places(outer)["victim"].entry.offset - ALIGNMENT)

    with opened(outer) as journal:
        assert list(journal.entries) == ["after"]


# -- several threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "fsync"])
def test_threads_that_append_at_the_same_time_do_not_mix_their_items(tmp_path: Path, durability: str):
    path, together = tmp_path / "journal", threading.Barrier(4)

    def append(journal: Journal, number: int) -> None:
        together.wait()
        for i in range(50):
            journal.append(f"{number}/{i}", np.full(i % 7, number * 100 + i, ["f4", "i8", "f2", "u2"][number]))
            journal.commit()

    with opened(path, durability=durability) as journal:
        threads = [threading.Thread(target=append, args=(journal, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        now = content(journal)
    with opened(path) as journal:
        later = content(journal)

    assert len(now) == len(later) == 200
    for uid, array in later.items():
        number, i = map(int, uid.split("/"))
        assert same(array, np.full(i % 7, number * 100 + i, ["f4", "i8", "f2", "u2"][number]))
        assert same(array, now[uid])


def test_with_fsync_an_item_is_on_disk_when_it_is_committed_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (real(fd), synced.append(os.fstat(fd).st_size)))

    with opened(tmp_path / "journal", durability="fsync") as journal:
        journal.append("a", np.zeros(100))
        before = list(synced)
        journal.commit()
        journal.commit()
        end = journal.end
    with opened(tmp_path / "other") as journal:
        journal.append("a", np.zeros(100))
        journal.commit()

    assert before == []
    assert synced == [end]


def test_after_a_failed_fsync_nothing_is_acknowledged_until_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Linux reports a failure once; the next call succeeds although the bytes are lost."""
    failures = iter([OSError(errno.EIO, os.strerror(errno.EIO))])

    def fdatasync(fd: int) -> None:
        for failure in failures:
            raise failure

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    path = tmp_path / "journal"
    with opened(path, durability="fsync") as journal:
        journal.append("a", np.zeros(3))
        with pytest.raises(WriteError, match="brought to disk"):
            journal.commit()
        journal.append("b", np.zeros(3))
        with pytest.raises(WriteError, match="open it again"):
            journal.commit()

    with opened(path, durability="fsync") as journal:
        journal.append("c", np.zeros(3))
        journal.commit()


# -- a full disk ---------------------------------------------------------------------------------------------------


def run(code: str, *args: object, disk: str = "") -> list[str]:
    """Run a script and return the lines that it prints; with ``disk``, on a disk of that size, its last argument."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    if disk:
        script = f'mount -t tmpfs -o size={disk} tmpfs "$0" && exec "$@" "$0"'
        command = ["unshare", "-m", "sh", "-c", script, str(args[-1]), *command[:-1]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


may_mount = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs the right to mount",
)

APPEND_UNTIL_FULL = """
    import os, resource, sys
    import numpy as np
    from asyncfeed import WriteError
    from asyncfeed.cache.fingerprint import Fingerprint
    from asyncfeed.cache.journal import Journal
    from asyncfeed.cache.view import read_item

    def fill(journal, first):
        for number in range(first, 10**6):
            before = journal.end, os.fstat(journal.fd).st_size
            try:
                journal.append(str(number), np.full(1000, number))
            except WriteError as error:
                assert (journal.end, os.fstat(journal.fd).st_size) == before, "the journal is as it was"
                assert str(error).startswith(journal.path), error
                print(error.__cause__.errno, isinstance(error, OSError))
                return number

    def check(path, num):
        journal = Journal(path, Fingerprint())
        assert journal.recovery.kept == len(journal.entries) == num and not journal.recovery.dropped_nbytes
        for uid, entry in journal.entries.items():
            assert (read_item(journal.fd, entry, uid, path) == int(uid)).all()
"""


def test_over_a_limit_of_the_size_of_files_an_append_is_refused_and_later_ones_succeed(tmp_path: Path):
    code = (
        APPEND_UNTIL_FULL
        + """
    path = sys.argv[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    journal = Journal(path, Fingerprint())
    first = fill(journal, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    second = fill(journal, first)
    check(path, second)
    print(first, second)
    """
    )

    *errors, numbers = run(code, tmp_path / "journal")

    first, second = map(int, numbers.split())
    assert errors == [f"{errno.EFBIG} True"] * 2
    assert 5 < first < second


@may_mount
def test_on_a_full_disk_an_append_is_refused_and_later_ones_succeed_when_there_is_room(tmp_path: Path):
    code = (
        APPEND_UNTIL_FULL
        + """
    path, other = f"{sys.argv[1]}/journal", f"{sys.argv[1]}/other"
    with open(other, "wb") as file:
        file.write(bytes(100_000))
    journal = Journal(path, Fingerprint())
    first = fill(journal, 0)
    os.unlink(other)
    second = fill(journal, first)
    check(path, second)
    print(first, second)
    """
    )

    *errors, numbers = run(code, tmp_path, disk="400k")

    first, second = map(int, numbers.split())
    assert errors == [f"{errno.ENOSPC} True"] * 2
    assert 5 < first < second


@may_mount
def test_where_there_is_no_room_at_all_a_journal_cannot_be_begun(tmp_path: Path):
    code = """
    import os, sys
    from asyncfeed import WriteError
    from asyncfeed.cache.fingerprint import Fingerprint
    from asyncfeed.cache.journal import Journal

    path, other = f"{sys.argv[1]}/journal", f"{sys.argv[1]}/other"
    with open(other, "wb") as file:
        file.write(bytes(16384))
    try:
        Journal(path, Fingerprint())
    except WriteError as error:
        print(error.__cause__.errno)
    os.unlink(other)
    print(Journal(path, Fingerprint()).recovery)
    """

    assert run(code, tmp_path, disk="16k") == [str(errno.ENOSPC), "None"]


# -- locks ---------------------------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from asyncfeed.cache.lock import Lock

lock = Lock(sys.argv[1], "the thing", advice="wait")
begun, begins = os.pipe()
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        os.write(begins, b".")
        os.read(0, 1)  # until the parent of all closes the pipe
        os._exit(0)
    os.read(begun, 1)
print("held", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holder(path: Path, children: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock, and so many forked children of it that hold nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(children)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
        assert process.stdin is not None
        process.stdin.close()


def lock(path: Path, patience: float = 0.0) -> Lock:
    return Lock(str(path), "the thing", advice="wait", patience=patience)


def test_who_is_refused_learns_who_holds_the_lock(tmp_path: Path):
    path = tmp_path / "lock"
    with holder(path) as process:
        with pytest.raises(LockedFileError) as caught:
            lock(path)

        assert f"the thing is held by process {process.pid} on {socket.gethostname()}; wait" in str(caught.value)
        assert Lock.was_here(str(path))


@pytest.mark.parametrize(
    ("note", "here"),
    [
        ({"pid": 1, "host": socket.gethostname(), "boot": "another"}, True),
        (
            {
                "pid": 1,
                "host": "container-of-yesterday",
                "boot": Path("/proc/sys/kernel/random/boot_id").read_text()[:-1],
            },
            True,
        ),
        ({"pid": 1, "host": "elsewhere", "boot": "another"}, False),
        ({"pid": 1, "host": "elsewhere"}, False),
        ({}, False),
    ],
)
def test_a_machine_knows_its_own_locks_by_name_or_by_boot(tmp_path: Path, note: dict, here: bool):
    path = tmp_path / "lock"
    path.write_text(json.dumps(note))

    assert Lock.was_here(str(path)) is here


@pytest.mark.parametrize("children", [0, 2])
def test_a_killed_holder_lets_go_even_while_its_children_live_on(tmp_path: Path, children: int):
    path = tmp_path / "lock"
    with holder(path, children) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()

        with lock(path):
            pass


def test_within_one_process_there_is_one_holder_too(tmp_path: Path):
    path = tmp_path / "lock"
    with lock(path):
        with pytest.raises(LockedFileError, match=f"process {os.getpid()} "):
            lock(path)

    with lock(path):
        pass


def test_who_has_patience_gets_the_lock_when_it_is_free(tmp_path: Path):
    path = tmp_path / "lock"
    first = lock(path)
    threading.Timer(0.05, first.close).start()

    with lock(path, patience=30.0):
        pass


def test_where_nothing_can_be_locked_the_error_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(LockedFileError, match="locking=False"):
        lock(tmp_path / "lock")

    with Lock(str(tmp_path / "lock"), "the thing", advice="wait", locking=False):
        pass


def test_a_lock_that_cannot_be_made_says_so(tmp_path: Path):
    with pytest.raises(WriteError, match="lock file"):
        lock(tmp_path / "nowhere" / "lock")


def test_every_id_that_is_allowed_has_a_place_in_a_journal(tmp_path: Path):
    uids = ["é", "e\u0301", "x" * 60_000, "a/b/c", "\n", "rec\x8f"]

    with opened(tmp_path / "journal") as journal:
        for number, uid in enumerate(uids):
            journal.append(check_id(uid), np.full(3, number))

    with opened(tmp_path / "journal") as journal:
        assert [array[0] for array in content(journal).values()] == list(range(len(uids)))
        assert list(journal.entries) == uids
