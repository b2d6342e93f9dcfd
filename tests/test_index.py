"""The catalog of a file is kept, and used only while the file is as it was."""

from __future__ import annotations

import io
import os
import shutil
import zipfile

import h5py
import numpy as np
import pytest

from asyncfeed import ChangedFileError, Feed, Source, UnreadableDatasetError
from asyncfeed.storage import library
from asyncfeed.storage.index import beside, in_cache, save_index
from asyncfeed.storage.scan import scan
from asyncfeed.storage.source import Container

GOOD = np.arange(24, dtype="f4").reshape(8, 3)


def streamed(source, **options):
    with Feed(source, shuffle=False, **options) as feed:
        return {utt: array.copy() for utt, array in feed.utterances()}


def plain(path):
    with h5py.File(path) as file:
        return {name: dataset[()] for name, dataset in file.items()}


def assert_like_h5py(path, **options):
    found, wanted = streamed(path, **options), plain(path)
    assert list(found) == list(wanted)
    assert all(found[utt].tobytes() == wanted[utt].tobytes() for utt in wanted)


def kept(path, key="{utt}"):
    """Where the index of a file is kept by default."""
    return in_cache(str(path), key)


def put_beside(path):
    """What ``asyncfeed index FILE`` does."""
    save_index(scan(Container(str(path), "{utt}")), beside(str(path)))
    return beside(str(path))


@pytest.fixture
def scans(monkeypatch):
    """The files that are scanned from now on, each time they are."""
    paths = []

    def counting(container, **options):
        paths.append(os.fspath(container.path))
        return scan(container, **options)

    monkeypatch.setattr(library, "scan", counting)
    return paths


class TestKept:
    def test_under_the_cache_directory(self, path, own_cache, scans):
        for _ in range(3):
            assert_like_h5py(path)

        assert scans == [str(path)]
        assert own_cache in kept(path).parents
        assert kept(path).exists()
        assert os.listdir(path.parent) == [path.name]

    def test_for_every_way_to_write_the_path(self, path, scans, monkeypatch):
        streamed(path)
        monkeypatch.chdir(path.parent)
        link = path.parent / "link.h5"
        link.symlink_to(path)

        for name in (path.name, f"./{path.name}", link):
            streamed(name)

        assert len(scans) == 1

    def test_beside_the_file_when_it_was_put_there(self, path, scans, own_cache):
        put_beside(path)

        assert_like_h5py(path)
        assert scans == []
        assert not kept(path).exists()

    def test_nowhere_when_it_is_off(self, path, scans):
        for _ in range(2):
            assert_like_h5py(path, index="off")

        assert len(scans) == 2
        assert not kept(path).exists()

    def test_and_not_looked_at_when_it_is_off(self, path, scans):
        put_beside(path)
        streamed(path)

        streamed(path, index="off")

        assert len(scans) == 1

    def test_for_each_key(self, tmp_path, scans):
        path = tmp_path / "two.h5"
        with h5py.File(path, "w") as file:
            file["u/a"], file["u/b"] = GOOD, GOOD + 1

        for _ in range(2):
            assert streamed(Source(path, "{utt}/a"))["u"].tolist() == GOOD.tolist()
            assert streamed(Source(path, "{utt}/b"))["u"].tolist() == (GOOD + 1).tolist()

        assert len(scans) == 2

    def test_for_each_file_of_many(self, make, scans):
        paths = [make({f"u{i}": GOOD + i}, name=f"{i}.h5") for i in range(3)]
        streamed(paths)
        with h5py.File(paths[1], "w") as file:
            file["v"] = GOOD

        assert list(streamed(paths)) == ["u0", "v", "u2"]
        assert scans == [*map(str, paths), str(paths[1])]

    def test_without_regard_to_what_was_selected(self, path, corpus):
        streamed(path, includes=["utt00003"])

        assert list(streamed(path)) == list(corpus)
        assert list(streamed(path, excludes=["utt00003"])) == [utt for utt in corpus if utt != "utt00003"]

    def test_not_for_handles(self, path, scans):
        with h5py.File(path) as file:
            for _ in range(2):
                streamed(file)

        assert len(scans) == 2
        assert not kept(path).exists()

    def test_not_for_what_this_process_is_writing(self, path):
        with h5py.File(path, "r+") as file:
            file["new"] = GOOD
            assert "new" in streamed(path)
            assert not kept(path).exists()

    def test_without_leaving_temporary_files(self, path):
        streamed(path)

        assert os.listdir(kept(path).parent) == [kept(path).name]

    @pytest.mark.parametrize("options", [{}, {"chunks": (4, 2), "compression": "gzip"}], ids=str)
    def test_it_says_all_that_a_scan_says(self, make, options):
        arrays = {"ä/b": GOOD, "c": GOOD.astype(">i2"), "d": GOOD[:, :2].copy(), "e": GOOD.astype("f2")}
        path = make(arrays, **options)

        first, second = streamed(path), streamed(path)

        assert list(first) == list(second)
        for utt, array in first.items():
            assert (array.dtype, array.shape, array.tobytes()) == (
                second[utt].dtype,
                second[utt].shape,
                second[utt].tobytes(),
            )


class TestInvalid:
    """Neither kind of index is used for a file in another state than the one it was made of."""

    @pytest.fixture(params=["cache", "beside"])
    def indexed(self, request, path):
        if request.param == "beside":
            put_beside(path)
        else:
            streamed(path)
        return path

    def test_when_the_size_differs(self, indexed, scans):
        stat = indexed.stat()
        with h5py.File(indexed, "r+") as file:
            file["new"] = np.ones((10_000, 3))
        os.utime(indexed, ns=(stat.st_atime_ns, stat.st_mtime_ns))

        assert_like_h5py(indexed)
        assert len(scans) == 1

    def test_when_the_time_differs_by_a_nanosecond(self, indexed, scans):
        stat = indexed.stat()
        os.utime(indexed, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))

        assert_like_h5py(indexed)
        assert len(scans) == 1

    def test_when_the_inode_differs(self, indexed, corpus, make, scans):
        """Another file of the same size and time in its place: here with the datasets the other way round."""
        stat = indexed.stat()
        other = make(dict(reversed(corpus.items())), name="other.h5")
        assert other.stat().st_size <= stat.st_size
        os.truncate(other, stat.st_size)  # HDF5 does not mind what comes after its end
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.replace(other, indexed)

        assert_like_h5py(indexed)
        assert len(scans) == 1

    def test_when_it_is_of_another_file(self, indexed, make):
        """An index that was copied along with a file, or to another one, does not fit."""
        other = make({"other": GOOD}, name="other.h5")
        for place in (beside, kept):
            if place(str(indexed)).exists():
                shutil.copy(place(str(indexed)), place(str(other)))

        assert_like_h5py(other)


class TestMoved:
    def test_together_with_its_index_a_file_needs_no_scan(self, path, tmp_path, scans):
        index = put_beside(path)
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        moved = folder / "renamed.h5"
        os.rename(path, moved)
        os.rename(index, beside(str(moved)))

        assert_like_h5py(moved)
        assert scans == []

    def test_onto_another_indexed_file(self, make, scans):
        a, b = make({"a": GOOD}, name="a.h5"), make({"b": GOOD + 1}, name="b.h5")
        streamed(a), streamed(b)
        os.replace(a, b)

        assert_like_h5py(b)


def flipped(whole, place):
    return whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]


def zipped(members):
    with io.BytesIO() as out:
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return out.getvalue()


def npz(header):
    return zipped({"header.npy": npy(np.frombuffer(header, np.uint8))})


def npy(array):
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


CONTENTS = {
    "empty": lambda whole: b"",
    "cut short": lambda whole: whole[: len(whole) // 2],
    "cut in its header": lambda whole: whole[:20],
    "without its end": lambda whole: whole[:-1],
    "zeros": lambda whole: bytes(len(whole)),
    "with a flipped bit in the middle": lambda whole: flipped(whole, len(whole) // 2),
    "with a flipped bit at the start of an array": lambda whole: flipped(whole, 300),
    "text": lambda whole: b"not an index\n",
    "another zip": lambda whole: zipped({"hello.txt": b"world"}),
    "with a header that is no JSON": lambda whole: npz(header=b"{"),
    "with a header of another shape": lambda whole: npz(header=b"[]"),
    "with a header that says nothing": lambda whole: npz(header=b"{}"),
    "of no file": lambda whole: npz(header=b'{"version": 2, "key": "{utt}", "files": [], "kinds": [], "filters": []}'),
    "an array": lambda whole: npy(np.arange(5)),
    "a pickle": lambda whole: npy(np.array([{"a": 1}], object)),
    "an HDF5 file": lambda whole: b"\x89HDF\r\n\x1a\n" + bytes(500),
}


class TestDamaged:
    """Whatever lies in the place of an index, the file is scanned and streamed."""

    @pytest.mark.parametrize("place", [kept, lambda path: beside(str(path))], ids=["cache", "beside"])
    @pytest.mark.parametrize("damage", CONTENTS.values(), ids=CONTENTS.keys())
    def test_it_is_ignored(self, path, scans, damage, place):
        save_index(scan(Container(str(path), "{utt}")), place(path))
        place(path).write_bytes(damage(place(path).read_bytes()))

        assert_like_h5py(path)
        assert len(scans) == 1

    def test_the_one_in_the_cache_is_made_anew(self, path, scans):
        streamed(path)
        kept(path).write_bytes(b"nothing of use")

        for _ in range(3):
            streamed(path)

        assert len(scans) == 2

    def test_a_directory_in_its_place_is_ignored(self, path):
        kept(path).mkdir(parents=True)
        beside(str(path)).mkdir()

        assert_like_h5py(path)

    def test_one_of_a_newer_version_is_ignored(self, path, scans, monkeypatch):
        from asyncfeed.storage import index

        monkeypatch.setattr(index, "VERSION", index.VERSION + 1)
        streamed(path)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(kept(path).parents[2]))

        assert_like_h5py(path)


class TestUnwritable:
    @pytest.mark.parametrize("cache", ["/dev/null/cache", "/proc/self/cache", ""], ids=["file", "proc", "empty"])
    def test_cache_directories_are_no_reason_to_stop(self, path, monkeypatch, scans, cache):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setenv("HOME", "/dev/null")

        for _ in range(2):
            assert_like_h5py(path)

        assert len(scans) == 2

    def test_nor_is_one_without_space(self, path, monkeypatch, scans):
        """The write itself fails, after the file has been made."""

        def full(file, **arrays):
            file.write(b"half of it")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", full)

        assert_like_h5py(path)
        assert list(kept(path).parent.iterdir()) == []


def rewritten(path, change):
    """The bytes of a file after a change that h5py made to a copy of it."""
    copy = path.with_name("copy.h5")
    shutil.copyfile(path, copy)
    change(copy)
    content = copy.read_bytes()
    copy.unlink()
    return content


def in_place(change):
    """Carry a change out in the file itself; through HDF5 that cannot be done while this process has it open."""

    def carry_out(path):
        path.write_bytes(rewritten(path, change))

    carry_out.__name__ = change.__name__
    return carry_out


@in_place
def overwrite(path):
    with h5py.File(path, "r+") as file:
        for dataset in file.values():
            dataset[:] = -1


@in_place
def grow(path):
    with h5py.File(path, "r+") as file:
        file["new"] = GOOD


@in_place
def rewrite(path):
    """With other utterances at other places."""
    with h5py.File(path, "w") as file:
        for i in range(30):
            file[f"u{i:02d}"] = np.full((45, 3), -1, "f8")


def replace(path):
    other = path.with_name("other.h5")
    with h5py.File(other, "w") as file:
        for i in range(30):
            file[f"u{i:02d}"] = np.full((45, 3), -1, "f8")
    os.replace(other, path)


def touch(path):
    os.utime(path)


CHANGES = (overwrite, grow, rewrite, replace, touch)


class TestChanged:
    """A file that changes while a feed is open is an error that names it, never wrong data."""

    @pytest.fixture(params=[{}, {"chunks": (3, 3), "compression": "gzip"}], ids=["direct", "through_hdf5"])
    def big(self, request, tmp_path):
        """Thirty utterances that need many partitions."""
        path = tmp_path / "big.h5"
        with h5py.File(path, "w") as file:
            for i in range(30):
                file.create_dataset(f"u{i:02d}", data=np.full((90, 3), i, "f4"), **request.param)
        return path

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("indexed", [False, True])
    def test_between_opening_and_the_first_frame(self, big, change, indexed):
        if indexed:
            streamed(big)
        with Feed(big, memory_budget="16k") as feed:
            change(big)

            for _ in range(2):
                with pytest.raises(
                    ChangedFileError, match=rf"{big.name} changed while the feed was open.*close the feed"
                ):
                    next(iter(feed))

    @pytest.mark.parametrize("change", CHANGES)
    def test_in_the_middle_of_an_epoch(self, big, change):
        """Frames that do arrive are those of the file as it was; a reader that has it open may finish a replaced one."""
        with Feed(big, memory_budget="16k", shuffle=False) as feed:
            assert len(feed.plan) > 3
            utterances = iter(feed.utterances())
            found = [(utt, array.copy()) for utt, array in (next(utterances),)]
            change(big)
            try:
                found += [(utt, array.copy()) for utt, array in utterances]
                finished = True
            except ChangedFileError:
                finished = False

            assert all(np.array_equal(array, np.full((90, 3), int(utt[1:]))) for utt, array in found)
            assert not finished or (change is replace and len(found) == 30)
            with pytest.raises(ChangedFileError, match=big.name):
                list(feed.utterances())

    @pytest.mark.parametrize("change", CHANGES)
    def test_between_epochs(self, big, change):
        with Feed(big) as feed:
            assert sum(1 for _ in feed) == 30 * 90
            change(big)

            with pytest.raises(ChangedFileError, match=big.name):
                next(iter(feed))

        with Feed(big) as feed:  # a new feed sees it as it is
            wanted = plain(big)
            assert all(np.array_equal(array, wanted[utt]) for utt, array in feed.utterances())

    def test_the_message_says_what_is_different(self, big):
        with Feed(big) as feed:
            grow(big)
            with pytest.raises(ChangedFileError, match=r"size \d+ -> \d+, mtime_ns \d+ -> \d+"):
                list(feed)

    def test_one_of_many_files_is_named(self, make):
        paths = [make({f"u{i}": GOOD}, name=f"{i}.h5") for i in range(4)]
        with Feed(paths) as feed:
            os.utime(paths[2])

            with pytest.raises(ChangedFileError, match=r"2\.h5"):
                list(feed)


def test_what_cannot_be_streamed_is_remembered_with_the_rest(make, own_cache):
    path = make({"good": np.ones((3, 2), "f4"), "scalar": np.float32(1)})

    with Feed(path, unreadable="skip") as feed:
        found = feed.skipped
    kept = [each for each in own_cache.rglob("*") if each.is_file()]

    assert len(kept) == 1
    with Feed(path, unreadable="skip") as feed:
        assert feed.skipped == found
        assert [each.utt for each in found] == ["scalar"]
    with pytest.raises(UnreadableDatasetError, match="scalar"):
        Feed(path).open()


def test_a_fault_that_lies_outside_of_the_file_is_looked_for_every_time(make, own_cache):
    path = make({"good": np.ones((3, 2), "f4")})
    with h5py.File(path, "a") as file:
        file["away"] = h5py.ExternalLink("away.h5", "there")

    with Feed(path) as feed:
        assert [(each.utt, each.harmless) for each in feed.skipped] == [("away", True)]

    assert not [each for each in own_cache.rglob("*") if each.is_file()]
