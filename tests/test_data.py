"""Whatever HDF5 can hold is either what h5py gives, to the last byte, or refused by name."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import h5py
import hdf5plugin
import ml_dtypes
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from asyncfeed import (
    ArgumentError,
    BudgetError,
    ChangedFileError,
    ClosedError,
    DamagedFileError,
    Feed,
    LockedFileError,
    NotHDF5Error,
    Source,
    SourceMissingError,
    StorageError,
    UnreadableDatasetError,
)
from asyncfeed.storage.direct import DirectReader

GOOD = np.arange(24, dtype="f4").reshape(8, 3)


def streamed(source, **options):
    """All utterances of a source, copied."""
    with Feed(source, shuffle=False, **options) as feed:
        return utterances_of(feed)


def utterances_of(feed):
    """All utterances of an epoch, copied."""
    return {utt: array.copy() for utt, array in feed.utterances()}


def plain(path):
    """All datasets of a file as h5py gives them, in its order, in native byte order."""
    found = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            array = item[()]
            found[name] = array.astype(array.dtype.newbyteorder("="), copy=False)

    with h5py.File(path) as file:
        file.visititems(add)
    return found


def assert_equal(found, wanted):
    assert list(found) == list(wanted)
    for utt, array in wanted.items():
        assert (found[utt].dtype, found[utt].shape) == (array.dtype, array.shape), utt
        assert found[utt].tobytes() == array.tobytes(), utt


def assert_like_h5py(path, **options):
    """Twice: without an index, then with the one that the first time left."""
    for _ in range(2):
        assert_equal(streamed(path, **options), plain(path))


def access_of(path):
    """How each utterance is read."""
    with Feed(path, index="off") as feed:
        (catalog,) = feed._library.corpus.catalogs
        return {utt: catalog.access[row] for row, utt in enumerate(catalog.ids)}


@contextlib.contextmanager
def refused(path, *patterns, error=UnreadableDatasetError):
    """Opening fails before the first frame; ``skip`` leaves the bad one out, gives the rest, and says why."""
    with pytest.raises(error) as caught, Feed(path):
        pass
    for pattern in (re.escape(str(path)), *patterns):
        assert re.search(pattern, str(caught.value))
    with Feed(path, unreadable="skip", shuffle=False) as feed:
        assert any(all(re.search(pattern, str(each)) for pattern in patterns) for each in feed.skipped)
        yield [utt for utt, _ in feed.utterances()]


class TestLayouts:
    LENGTHS = (0, 1, 7, 100, 3000)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"chunks": True},
            {"chunks": (1, 5)},
            {"chunks": (64, 2)},
            {"compression": "gzip"},
            {"compression": "gzip", "shuffle": True},
            {"compression": "lzf"},
            {"fletcher32": True},
            {"compression": "gzip", "shuffle": True, "fletcher32": True, "chunks": (64, 5)},
            {"maxshape": (None, 5)},
            {"maxshape": (None, None), "chunks": (16, 4)},
            {"track_order": True},
            {"track_times": True},
            hdf5plugin.Zstd(),
            hdf5plugin.Blosc(),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("libver", ["earliest", "latest"])
    def test_are_read_like_h5py(self, tmp_path, options, libver):
        path = tmp_path / "layout.h5"
        rng = np.random.default_rng(0)
        options = dict(options)
        with h5py.File(path, "w", libver=libver) as file:
            for length in self.LENGTHS:
                room = {"maxshape": (None, 5), **options} if options else {}
                file.create_dataset(f"{length:04d}", data=rng.random((length, 5), "f4"), **room)

        assert_like_h5py(path)

    @pytest.mark.parametrize("options", [{"chunks": (50, 3), "compression": "gzip"}, {"chunks": (1, 5)}, {}], ids=str)
    def test_in_pieces(self, make, options):
        """Utterances larger than a partition, read slice by slice."""
        path = make({utt: np.random.default_rng(0).random((2000, 5)) for utt in "ab"}, **options)
        found = {utt: np.empty((2000, 5)) for utt in "ab"}

        with Feed(path, memory_budget=8192) as feed:
            for utt, index, frame in feed:
                found[utt][index] = frame

        assert_equal(found, plain(path))

    def test_scale_and_offset(self, make):
        arrays = {"ints": np.arange(900, dtype="i4").reshape(-1, 3), "floats": np.linspace(0, 9, 900).reshape(-1, 3)}
        path = make(arrays, scaleoffset=3, chunks=(10, 3))

        assert_like_h5py(path)

    def test_compact(self, tmp_path):
        path = tmp_path / "compact.h5"
        with h5py.File(path, "w") as file:
            layout = h5p.create(h5p.DATASET_CREATE)
            layout.set_layout(h5d.COMPACT)
            h5d.create(file.id, b"a", h5t.IEEE_F32LE, h5s.create_simple((8, 3)), layout).write(h5s.ALL, h5s.ALL, GOOD)

        assert_like_h5py(path)

    def test_never_written(self, tmp_path):
        """Fill values, where there is no storage at all, or only some of the chunks."""
        path = tmp_path / "fill.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("a", (50, 3), "f4", fillvalue=7)
            file.create_dataset("b", (50, 3), ">i2", fillvalue=-5)
            file.create_dataset("c", (50, 3), "f8", chunks=(5, 3), fillvalue=np.nan)
            file.create_dataset("d", (50, 3), "f4", chunks=(5, 3), compression="gzip", fillvalue=2)[13:17] = 1
            file.create_dataset("e", (50, 3), "u1")

        assert_like_h5py(path)

    @pytest.mark.parametrize("chunks", [None, (50, 3)], ids=["contiguous", "chunked"])
    def test_never_written_and_without_fill_values_is_zero(self, tmp_path, chunks):
        """HDF5 leaves memory as it was, and ours held another partition before."""
        path = tmp_path / "never.h5"
        with h5py.File(path, "w") as file:
            for i in range(6):
                file.create_dataset(f"{i}", data=np.full((300, 3), 9, "f4"))
                file.create_dataset(f"{i}never", (300, 3), "f4", chunks=chunks, fill_time="never")

        with Feed(path, memory_budget=8192) as feed:
            for _ in range(3):
                assert all(np.all(array == (0 if "never" in utt else 9)) for utt, array in feed.utterances())

    @pytest.mark.parametrize("size", [512, 4096])
    def test_behind_a_user_block(self, tmp_path, size):
        path = tmp_path / "block.h5"
        with h5py.File(path, "w", userblock_size=size) as file:
            file["a"], file["b"] = GOOD, GOOD[:2] + 1
        with open(path, "r+b") as file:
            file.write(b"somebody's own header")

        assert_like_h5py(path)
        assert set(access_of(path).values()) == {0}

    def test_resized(self, tmp_path):
        path = tmp_path / "resized.h5"
        with h5py.File(path, "w") as file:
            grown = file.create_dataset("grown", data=GOOD, maxshape=(None, 3), chunks=(4, 3))
            grown.resize((20, 3))
            shrunk = file.create_dataset("shrunk", data=GOOD, maxshape=(None, 3), chunks=(4, 3))
            shrunk.resize((5, 3))

        assert_like_h5py(path)

    def test_plain_ones_are_read_directly(self, make):
        path = make({"a": GOOD, "b": GOOD.astype(">i2"), "c": np.ones(9, "u8"), "d": np.ones((2, 3), "f2")})

        assert access_of(path) == dict.fromkeys("abcd", 0)

    def test_cut_utterances_do_not_decode_a_chunk_again_for_each_piece(self, make):
        """One chunk, larger than HDF5's own cache, that ends up in many partitions, is fetched once."""
        data = np.random.default_rng(0).integers(0, 99, (200_000, 20), "i4")
        path = make({"a": data}, chunks=data.shape, compression="gzip", compression_opts=1)

        with open(path, "rb") as raw, h5py.File(counted := Counted(raw), "r") as file:
            with Feed(file, shuffle=False, memory_budget="4m") as feed:
                found = np.concatenate([batch.frames for batch in feed.batches(10_000)])
                num_partitions = len(feed.plan)

        assert found.tobytes() == data.tobytes()
        assert num_partitions >= 8
        assert counted.nbytes < 1.5 * path.stat().st_size


class Counted(io.RawIOBase):
    """A file that counts the bytes that are read from it."""

    def __init__(self, raw):
        self.raw, self.nbytes = raw, 0

    def readinto(self, buffer):
        self.nbytes += len(buffer)
        return self.raw.readinto(buffer)

    def seek(self, *place):
        return self.raw.seek(*place)

    def tell(self):
        return self.raw.tell()


class TestElsewhere:
    """Data outside the file, in whose place HDF5 may silently give fill values."""

    @pytest.fixture
    def external(self, tmp_path):
        path, raw = tmp_path / "external.h5", tmp_path / "pay.bin"
        raw.write_bytes(GOOD.tobytes())
        with h5py.File(path, "w") as file:
            file.create_dataset("a", (8, 3), "f4", external=[(str(raw), 0, GOOD.nbytes)])
            file["b"] = GOOD
        return path, raw

    @pytest.fixture
    def virtual(self, tmp_path):
        path = tmp_path / "virtual.h5"
        for i in range(2):
            with h5py.File(tmp_path / f"part{i}.h5", "w") as file:
                file["x"] = GOOD + i
        layout = h5py.VirtualLayout((16, 3), "f4")
        for i in range(2):
            layout[8 * i : 8 * i + 8] = h5py.VirtualSource(f"part{i}.h5", "x", (8, 3))
        with h5py.File(path, "w", libver="latest") as file:
            file.create_virtual_dataset("a", layout, fillvalue=-1)
            file["b"] = GOOD
        return path, tmp_path / "part1.h5"

    @pytest.fixture(params=["external", "virtual"])
    def pair(self, request):
        """A file, and another one that holds the bytes of its utterance ``a``."""
        return request.getfixturevalue(request.param)

    def test_is_read_like_h5py(self, pair):
        assert_like_h5py(pair[0])

    @pytest.mark.parametrize("indexed", [False, True])
    def test_that_is_missing_is_refused(self, pair, indexed):
        path, other = pair
        if indexed:
            streamed(path)
        other.unlink()

        with refused(path, "'a'", re.escape(str(other))) as rest:
            assert rest == ["b"]

    def test_that_goes_missing_later_is_an_error(self, pair):
        path, other = pair
        with Feed(path, shuffle=False) as feed:
            other.unlink()
            with pytest.raises(StorageError, match=re.escape(str(other))):
                list(feed.utterances())

    def test_that_changes_is_an_error(self, pair):
        path, other = pair
        with Feed(path, shuffle=False) as feed:
            os.utime(other, ns=(1, 1))
            with pytest.raises(ChangedFileError, match=re.escape(str(other))):
                list(feed.utterances())

        assert_like_h5py(path)

    @pytest.mark.parametrize("variable", ["HDF5_EXTFILE_PREFIX", "HDF5_VDS_PREFIX"])
    def test_is_looked_for_where_hdf5_does(self, tmp_path, variable):
        """The prefix is read when HDF5 starts, so this needs a process of its own."""
        script = """
            import os, sys
            import h5py, numpy as np, asyncfeed
            os.mkdir("data")
            np.ones((2, 3), "f4").tofile("data/pay.bin")
            with h5py.File("data/src.h5", "w") as file:
                file["x"] = np.ones((2, 3), "f4")
            with h5py.File("data/a.h5", "w", libver="latest") as file:
                if "EXT" in sys.argv[1]:
                    file.create_dataset("a", (2, 3), "f4", external=[("pay.bin", 0, 24)])
                else:
                    layout = h5py.VirtualLayout((2, 3), "f4")
                    layout[:] = h5py.VirtualSource("src.h5", "x", (2, 3))
                    file.create_virtual_dataset("a", layout)
            with asyncfeed.Feed("data/a.h5") as feed:
                print([array.sum() for _, array in feed.utterances()] == [6])
        """
        done = python(script, variable, cwd=tmp_path, env={variable: "${ORIGIN}"})

        assert done.stdout == "True\n", done.stderr


def python(script, *arguments, cwd=None, env=None):
    """Run a script in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )


def array_type(file):
    """h5py turns array types into further axes, so a low-level call has to make one."""
    h5d.create(file.id, b"bad", h5t.array_create(h5t.IEEE_F32LE, (2, 2)), h5s.create_simple((3,)))


def vlen_of_vlen(file):
    h5d.create(file.id, b"bad", h5t.vlen_create(h5t.vlen_create(h5t.IEEE_F32LE)), h5s.create_simple((3,)))


class TestDtypes:
    @pytest.mark.parametrize(
        "code", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
    )
    @pytest.mark.parametrize("order", ["<", ">"])
    @pytest.mark.parametrize("options", [{}, {"chunks": (3, 2), "compression": "gzip"}], ids=["direct", "filtered"])
    def test_of_numbers_come_out_native(self, make, code, order, options):
        data = (np.random.default_rng(0).random((40, 4)) * 3).astype(code).astype(order + code)
        path = make({"a": data, "b": data[:7]}, **options)

        assert_like_h5py(path)
        assert all(array.dtype.isnative and not array.dtype.metadata for array in streamed(path).values())

    def test_that_differ_in_byte_order_only_are_alike(self, make):
        data = np.arange(12, dtype="f4").reshape(4, 3)
        path = make({"a": data, "b": data.astype(">f4"), "c": data})

        assert_like_h5py(path)
        with Feed(path) as feed:
            (batch,) = feed.batches(12)
        assert batch.frames.dtype == np.dtype("f4")
        assert sorted(batch.frames.tolist()) == sorted(np.concatenate([data] * 3).tolist())

    def test_of_enumerations_are_their_integers(self, tmp_path):
        path = tmp_path / "enum.h5"
        with h5py.File(path, "w") as file:
            colours = h5py.enum_dtype({"red": 1, "blue": 2}, "i2")
            file.create_dataset("a", data=np.array([1, 2, 2]), dtype=colours)

        assert_equal(streamed(path), {"a": np.array([1, 2, 2], "i2")})

    def test_that_numpy_lacks_are_converted_as_h5py_does(self, tmp_path):
        """A 16-bit brain float as HDF5 can describe it; a 12-bit integer; and both in big-endian order."""
        path = tmp_path / "custom.h5"
        with h5py.File(path, "w") as file:
            for name, float_type, int_type in (
                (b"be", h5t.IEEE_F32BE, h5t.STD_I16BE),
                (b"le", h5t.IEEE_F32LE, h5t.STD_I16LE),
            ):
                brain = float_type.copy()
                brain.set_fields(15, 7, 8, 0, 7)
                brain.set_size(2)
                brain.set_ebias(127)
                twelve = int_type.copy()
                twelve.set_precision(12)
                space = h5s.create_simple((8, 3))
                h5d.create(file.id, b"brain_" + name, brain, space).write(h5s.ALL, h5s.ALL, GOOD)
                h5d.create(file.id, b"twelve_" + name, twelve, space).write(h5s.ALL, h5s.ALL, GOOD.astype("i2"))

        found = streamed(path)

        assert_like_h5py(path)
        assert found["brain_le"].dtype == "f4"
        assert found["brain_be"].tolist() == found["twelve_be"].tolist() == GOOD.tolist()

    def test_of_long_doubles(self, make):
        path = make({"a": np.arange(6, dtype=np.longdouble).reshape(3, 2) / 7})

        assert_equal(streamed(path), plain(path))

    def test_that_are_named_in_the_file(self, tmp_path):
        path = tmp_path / "named.h5"
        with h5py.File(path, "w") as file:
            file["float"] = np.dtype("<f4")
            file.create_dataset("a", data=GOOD, dtype=file["float"])

        with Feed(path) as feed:
            assert_equal(dict(feed.utterances()), {"a": GOOD})
            assert [(each.utt, each.harmless) for each in feed.skipped] == [("float", True)]

    UNSUITABLE = (
        ("scalar", lambda f: f.create_dataset("bad", data=3.0), "scalar"),
        ("null", lambda f: f.create_dataset("bad", data=h5py.Empty("f4")), "null"),
        ("text", lambda f: f.create_dataset("bad", data=["a", "b"]), "text|variable"),
        ("bytes", lambda f: f.create_dataset("bad", data=np.array([b"ab", b"cd"])), "text"),
        ("vlen", lambda f: f.create_dataset("bad", (3,), h5py.vlen_dtype("f4")), "variable-length"),
        ("compound", lambda f: f.create_dataset("bad", (3,), [("x", "f4"), ("y", "i2")]), "compound"),
        ("reference", lambda f: f.create_dataset("bad", (3,), h5py.ref_dtype), "reference"),
        ("region", lambda f: f.create_dataset("bad", (3,), h5py.regionref_dtype), "reference"),
        ("opaque", lambda f: f.create_dataset("bad", (3,), "V5"), "opaque"),
        ("array", array_type, "array"),
        ("bfloat16", lambda f: f.create_dataset("bad", data=np.ones((3, 2), ml_dtypes.bfloat16)), "opaque"),
        (
            "time",
            lambda f: f.create_dataset("bad", data=np.zeros(3, h5py.opaque_dtype(np.dtype("M8[s]")))),
            "opaque|M8|datetime",
        ),
        ("vlen of vlen", vlen_of_vlen, "variable-length"),
    )

    @pytest.mark.parametrize(("make_bad", "reason"), [u[1:] for u in UNSUITABLE], ids=[u[0] for u in UNSUITABLE])
    def test_without_frames_of_numbers_are_refused_by_name(self, tmp_path, make_bad, reason):
        path = tmp_path / "bad.h5"
        with h5py.File(path, "w") as file:
            file["a"] = GOOD
            make_bad(file)
            file["z"] = GOOD

        with refused(path, "'bad'", reason, "excludes=|store") as rest:
            assert rest == ["a", "z"]
        assert list(streamed(path, excludes=["bad"])) == ["a", "z"]
        assert list(streamed(path, includes=["z"])) == ["z"]

    @pytest.mark.filterwarnings("ignore:a filter")
    def test_behind_an_unknown_filter_are_refused_by_name(self, tmp_path):
        path = tmp_path / "filter.h5"
        with h5py.File(path, "w") as file:
            file["a"] = GOOD
            layout = h5p.create(h5p.DATASET_CREATE)
            layout.set_chunk((4, 3))
            layout.set_filter(500, h5py.h5z.FLAG_OPTIONAL)  # nobody's
            h5d.create(file.id, b"bad", h5t.IEEE_F32LE, h5s.create_simple((8, 3)), layout)

        with refused(path, "'bad'", r"filter 500\b", "hdf5plugin") as rest:
            assert rest == ["a"]

    def test_behind_the_filters_of_hdf5plugin_need_no_import(self, make):
        """Neither at first, nor when an index of the file is there already."""
        path = make({"a": GOOD}, **hdf5plugin.Zstd())
        script = """
            import sys, asyncfeed
            with asyncfeed.Feed(sys.argv[1]) as feed:
                print([array.sum() for _, array in feed.utterances()])
        """

        for _ in range(2):
            done = python(script, path)
            assert done.stdout == f"[np.float32({GOOD.sum()})]\n" or done.stdout == f"[{GOOD.sum()}]\n", done.stderr

    def test_behind_a_filter_that_is_gone_are_refused_despite_an_index(self, make):
        path = make({"a": GOOD}, **hdf5plugin.Zstd())
        streamed(path)
        script = """
            import sys
            sys.modules["hdf5plugin"] = None  # as if it were not installed
            import asyncfeed
            try:
                asyncfeed.Feed(sys.argv[1]).open()
            except asyncfeed.UnreadableDatasetError as error:
                print(error)
        """

        done = python(script, path)

        assert "filter 32015" in done.stdout, done.stderr
        assert "pip install hdf5plugin" in done.stdout


class TestWalk:
    def test_goes_down_into_groups(self, tmp_path):
        path = tmp_path / "deep.h5"
        with h5py.File(path, "w") as file:
            file["spk1/utt1"], file["spk1/chapter/utt2"], file["utt0"] = GOOD, GOOD + 1, GOOD + 2
            file["/".join("abcdefghij" * 5)] = GOOD
            file.create_group("empty/inside")

        assert_like_h5py(path)

    def test_of_a_group_nested_very_deeply(self, tmp_path):
        path = tmp_path / "deep.h5"
        with h5py.File(path, "w") as file:
            group = file
            for _ in range(1500):
                group = group.create_group("g")
            group["x"] = GOOD

        assert list(streamed(path)) == ["g/" * 1500 + "x"]

    @pytest.mark.parametrize("tracked", [True, False])
    def test_is_in_the_order_of_h5py(self, tmp_path, tracked):
        path = tmp_path / "order.h5"
        with h5py.File(path, "w", track_order=tracked) as file:
            for name in ("z", "b/y", "a", "b/c", "b/a", "10", "9"):
                file.create_dataset(name, data=GOOD)
            inner = file.create_group("t", track_order=not tracked)
            inner["y"], inner["x"] = GOOD, GOOD
        with h5py.File(path) as file:
            wanted = []
            for name, item in file.items():
                wanted += [name] if isinstance(item, h5py.Dataset) else [f"{name}/{inside}" for inside in item]

        assert list(streamed(path)) == wanted

    @pytest.mark.parametrize("libver", ["earliest", "latest"])
    def test_of_many_in_one_group(self, tmp_path, libver):
        path = tmp_path / "many.h5"
        with h5py.File(path, "w", libver=libver) as file:
            for i in range(1000):
                file[f"g/{i}"] = np.full((1, 2), i, "i2")

        found = streamed(path)

        assert list(found) == [f"g/{i}" for i in sorted(range(1000), key=str)]
        assert all(array[0, 0] == int(utt[2:]) for utt, array in found.items())

    def test_does_not_end_at_odd_links(self, tmp_path):
        """Aliases are utterances of their own; what leads nowhere is reported; cycles end."""
        path, other = tmp_path / "links.h5", tmp_path / "other.h5"
        with h5py.File(other, "w") as file:
            file["pad"] = np.ones((500, 3), "f4")
            file["far"], file["in/far"] = GOOD + 1, GOOD + 2
        with h5py.File(path, "w") as file:
            file["real"] = GOOD
            file["hard"] = file["real"]
            file["soft"] = h5py.SoftLink("/real")
            file["there"] = h5py.ExternalLink("other.h5", "/far")
            file["group"] = h5py.ExternalLink("other.h5", "/in")
            file["through"] = h5py.SoftLink("/group/far")
            file["nowhere"] = h5py.SoftLink("/missing")
            file["self"] = h5py.SoftLink("/self")
            file["gone"] = h5py.ExternalLink("gone.h5", "/x")
            file["type"] = np.dtype("f4")
            file["loop/again"] = h5py.SoftLink("/loop")
            file["loop/root"] = file["/"]

        for _ in range(2):
            with Feed(path, shuffle=False) as feed:
                found = {utt: array.copy() for utt, array in feed.utterances()}
                skipped = {each.utt: each for each in feed.skipped}
            assert_equal(
                found,
                {
                    "group/far": GOOD + 2,
                    "hard": GOOD,
                    "real": GOOD,
                    "soft": GOOD,
                    "there": GOOD + 1,
                    "through": GOOD + 2,
                },
            )
            assert sorted(skipped) == ["gone", "nowhere", "self", "type"]
            assert all(each.harmless and each.reason and each.remedy for each in skipped.values())
        assert set(access_of(path).values()) == {0}

    def test_to_another_file_notices_when_that_changes(self, tmp_path):
        path, other = tmp_path / "links.h5", tmp_path / "other.h5"
        with h5py.File(other, "w") as file:
            file["x"] = GOOD
        with h5py.File(path, "w") as file:
            file["x"] = h5py.ExternalLink("other.h5", "/x")
        streamed(path)
        with h5py.File(other, "w") as file:
            file["pad"], file["x"] = GOOD, GOOD + 5

        assert_equal(streamed(path), {"x": GOOD + 5})

    def test_to_a_file_that_is_being_written_here_sees_what_is_not_flushed(self, tmp_path):
        path, other = tmp_path / "links.h5", tmp_path / "other.h5"
        with h5py.File(other, "w") as file:
            file["x"] = GOOD
        with h5py.File(path, "w") as file:
            file["x"] = h5py.ExternalLink("other.h5", "/x")
        streamed(path)

        with h5py.File(other, "r+") as file:
            file["x"][:] = GOOD + 5
            assert_equal(streamed(path), {"x": GOOD + 5})

    def test_keeps_ids_that_are_not_utf8(self, tmp_path):
        """As os.fsdecode does: they can be given back, and told apart."""
        path = tmp_path / "bytes.h5"
        with h5py.File(path, "w") as file:
            file[b"caf\xe9"], file["café"], file["日本/語"] = GOOD, GOOD + 1, GOOD + 2
        name = os.fsdecode(b"caf\xe9")

        for options in ({}, {"chunks": (4, 3)}):
            found = streamed(path)
            assert sorted(found) == sorted([name, "café", "日本/語"])
            assert found[name].tolist() == GOOD.tolist()
            assert list(streamed(path, includes=[name])) == [name]
            with h5py.File(path, "w") as file:
                for utt, array in ((b"caf\xe9", GOOD), ("café", GOOD + 1), ("日本/語", GOOD + 2)):
                    file.create_dataset(utt, data=array, **options or {"chunks": (4, 3)})

    def test_of_a_file_with_attributes_scales_and_dimensions(self, tmp_path):
        """As netCDF-4 lays it out: dimension scales are datasets like others, and references live in attributes."""
        path = tmp_path / "like.nc"
        with h5py.File(path, "w", track_order=True, libver="latest") as file:
            file["time"], file["bin"] = np.arange(8.0), np.arange(3.0)
            file["time"].make_scale("time")
            file["bin"].make_scale("bin")
            file.create_dataset("mel", data=GOOD, chunks=(4, 3), compression="gzip", fillvalue=9e36)
            file["mel"].dims[0].attach_scale(file["time"])
            file["mel"].dims[1].attach_scale(file["bin"])
            file["mel"].attrs["units"] = "dB"

        assert streamed(path).keys() == {"time", "bin", "mel"}
        assert_equal(streamed(path, includes=["mel"]), {"mel": GOOD})


class TestDamage:
    def test_of_one_file_among_many_is_found_before_the_first_frame(self, make, tmp_path):
        paths = [make({f"{i}{j}": GOOD + i for j in range(4)}, name=f"{i}.h5") for i in range(5)]
        whole = paths[3].read_bytes()
        paths[3].write_bytes(whole[: len(whole) * 2 // 3])

        with pytest.raises(DamagedFileError, match=re.escape(str(paths[3]))), Feed(paths):
            pass
        with Feed(paths, unreadable="skip") as feed:
            assert sorted(utt for utt, _ in feed.utterances()) == [f"{i}{j}" for i in (0, 1, 2, 4) for j in range(4)]
            assert [(each.path, each.utt) for each in feed.skipped] == [(str(paths[3]), "")]

    def test_of_one_header_is_no_dangling_link(self, tmp_path):
        """A hard link leads to an object that was there: data would go missing without a word."""
        path = tmp_path / "header.h5"
        with h5py.File(path, "w", libver="latest") as file:
            file["a"], file["bad"] = GOOD, GOOD
            place = h5py.h5o.get_info(file["bad"].id).addr
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\xff" * 32)

        with refused(path, "'bad'", "damaged", "copy|again") as rest:
            assert rest == ["a"]

    def test_of_a_group_is_damage_of_the_file(self, make, tmp_path):
        path = make({f"utt{i}": GOOD for i in range(100)})
        damaged = path.read_bytes().replace(b"SNOD", b"XXXX").replace(b"TREE", b"XXXX")
        path.write_bytes(damaged)

        with pytest.raises(DamagedFileError, match=re.escape(str(path))) as caught, Feed(path):
            pass
        assert caught.value.__cause__ is not None

    def test_of_a_chunk_is_an_error_that_names_it(self, tmp_path):
        path = tmp_path / "chunk.h5"
        with h5py.File(path, "w") as file:
            file["a"] = GOOD
            file.create_dataset("b", data=GOOD, chunks=(8, 3), fletcher32=True)
            place = file["b"].id.get_chunk_info(0).byte_offset
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\xff")

        with Feed(path, shuffle=False) as feed, pytest.raises(StorageError, match=r"'b'.*chunk\.h5"):
            list(feed.utterances())

    def test_that_leaves_bytes_out_at_the_end_is_found_from_metadata(self, tmp_path):
        """Contiguous data that would end beyond the file, although HDF5 would open it."""
        path = tmp_path / "short.h5"
        with h5py.File(path, "w") as file:
            file["a"] = GOOD
            file["z"] = np.ones((10_000, 3), "f4")
            end = file["z"].id.get_offset() + 10_000 * 12
        os.truncate(path, end - 4000)

        with pytest.raises(DamagedFileError, match=re.escape(str(path))), Feed(path):
            pass


class TestLocks:
    WRITER = """
        import sys, h5py
        file = h5py.File(sys.argv[1], "r+", **eval(sys.argv[2]))
        if "libver" in sys.argv[2]:
            file.swmr_mode = True
        print("open", flush=True)
        sys.stdin.read()
    """

    @contextlib.contextmanager
    def writer(self, path, **options):
        """Another process that has a file open for writing."""
        command = [sys.executable, "-c", textwrap.dedent(self.WRITER), str(path), repr(options)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "open\n"
            yield process
            if process.poll() is None:
                process.communicate()

    @pytest.mark.parametrize("indexed", [False, True])
    def test_a_writer_in_another_process_is_named(self, path, indexed):
        if indexed:
            streamed(path)

        with self.writer(path), pytest.raises(LockedFileError, match="another process") as caught:
            streamed(path)

        assert str(path) in str(caught.value)
        assert streamed(path)

    def test_a_locked_file_among_others_can_be_skipped(self, make):
        paths = [make({name: GOOD}, name=f"{name}.h5") for name in "ab"]

        with self.writer(paths[0]):
            assert list(streamed(paths, unreadable="skip")) == ["b"]

    def test_a_feed_does_not_keep_writers_out(self, path, corpus):
        """It holds no lock between reads; but then it will not go on with what has changed."""
        with Feed(path, memory_budget=8192, shuffle=False) as feed:
            items = iter(feed.utterances())
            next(items)
            with h5py.File(path, "r+") as file:
                file["new"] = GOOD
            with pytest.raises((ChangedFileError, LockedFileError), match=re.escape(str(path))):
                list(feed.utterances())

    def test_a_swmr_writer_is_named(self, tmp_path):
        path = tmp_path / "swmr.h5"
        with h5py.File(path, "w", libver="latest") as file:
            file["a"] = GOOD

        with self.writer(path, libver="latest"), pytest.raises(LockedFileError, match=re.escape(str(path))):
            streamed(path)

    def test_a_file_whose_swmr_writer_died_says_how_to_mend_it(self, tmp_path):
        path = tmp_path / "swmr.h5"
        with h5py.File(path, "w", libver="latest") as file:
            file["a"] = GOOD
        with self.writer(path, libver="latest") as process:
            process.send_signal(signal.SIGKILL)
            process.wait()

        with pytest.raises(LockedFileError, match=r"swmr\.h5 is marked.*h5clear"):
            streamed(path)

    @pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler to make flock fail")
    @pytest.mark.parametrize("code", ["ENOLCK", "524"])
    def test_a_file_system_without_locks_is_no_obstacle(self, path, tmp_path, code):
        """Some network file systems answer flock with ENOLCK, or with 524, the kernel's ENOTSUPP."""
        (tmp_path / "flock.c").write_text(
            f"#include <errno.h>\nint flock(int fd, int how) {{ (void)fd; (void)how; errno = {code}; return -1; }}\n"
        )
        library = tmp_path / "flock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "flock.c"], check=True)
        script = """
            import sys, asyncfeed
            with asyncfeed.Feed(sys.argv[1]) as feed:
                print(sum(1 for _ in feed) == len(feed))
        """

        done = python(script, path, env={"LD_PRELOAD": str(library)})

        assert done.stdout == "True\n", done.stderr


class TestHandles:
    def test_of_a_file_open_for_reading(self, path):
        with h5py.File(path) as file:
            assert_equal(streamed(file), plain(path))
            assert file["utt00000"][0].size  # still open
            with Feed(file) as feed:
                (catalog,) = feed._library.corpus.catalogs
                assert not catalog.access.any()

    def test_of_a_group(self, tmp_path):
        path = tmp_path / "groups.h5"
        with h5py.File(path, "w") as file:
            file["train/a"], file["train/b/c"], file["test/x"] = GOOD, GOOD + 1, GOOD

        with h5py.File(path) as file:
            assert_equal(streamed(file["train"]), {"a": GOOD, "b/c": GOOD + 1})
            assert_equal(streamed(Source(file["train"], key="b/{utt}")), {"c": GOOD + 1})

    @pytest.mark.parametrize("options", [{}, {"chunks": (4, 3), "compression": "gzip"}], ids=["contiguous", "chunked"])
    def test_see_what_is_not_flushed(self, tmp_path, options):
        with h5py.File(tmp_path / "writing.h5", "w") as file:
            file.create_dataset("a", data=GOOD, **options)
            file.flush()
            file["a"][:] = GOOD + 1
            file.create_dataset("b", data=GOOD + 2, **options)

            assert_equal(streamed(file), {"a": GOOD + 1, "b": GOOD + 2})
            file["a"][:] = GOOD + 3
            assert_equal(streamed(file), {"a": GOOD + 3, "b": GOOD + 2})

    def test_see_what_is_written_between_epochs(self, tmp_path):
        with h5py.File(tmp_path / "writing.h5", "w") as file:
            file["a"] = GOOD
            with Feed(file) as feed:
                for epoch in range(3):
                    file["a"][:] = GOOD + epoch
                    assert [array.tolist() for _, array in feed.utterances()] == [(GOOD + epoch).tolist()]

    @pytest.mark.parametrize("change", ["grown", "shrunk", "retyped", "reshaped", "deleted"])
    def test_refuse_datasets_that_no_longer_fit(self, tmp_path, change):
        """HDF5 would write a grown dataset beyond the memory that was meant for it."""
        with h5py.File(tmp_path / "writing.h5", "w") as file:
            file.create_dataset("a", data=GOOD, maxshape=(None, None))
            with Feed(file) as feed:
                list(feed.utterances())
                if change in ("grown", "shrunk"):
                    file["a"].resize((100_000 if change == "grown" else 2, 3))
                else:
                    del file["a"]
                if change == "retyped":
                    file["a"] = GOOD.astype("f8")
                elif change == "reshaped":
                    file["a"] = GOOD.T.copy()

                with pytest.raises(StorageError, match=r"'a'.*writing\.h5"):
                    list(feed.utterances())

    @staticmethod
    def calls(feed: Feed) -> int:
        """System calls of direct reads so far."""
        return feed.statistics().calls

    @pytest.mark.parametrize("mode", ["r", "r+", "a"])
    def test_are_read_directly_whether_they_may_write_or_not(self, path, mode):
        with h5py.File(path, mode) as file, Feed(file, shuffle=False) as feed:
            assert_equal(utterances_of(feed), plain(path))
            assert self.calls(feed) > 0

    @pytest.mark.parametrize("unflushed", [True, False])
    def test_are_read_directly_with_what_was_written_a_moment_ago(self, tmp_path, unflushed):
        with h5py.File(tmp_path / "writing.h5", "w") as file:
            file["a"] = GOOD
            partly = file.create_dataset("b", (100_000, 3), "f4")
            partly[:2] = 7
            if not unflushed:
                file.flush()

            with Feed(file) as feed:
                found = utterances_of(feed)
                assert self.calls(feed) > 0

            assert_equal(found, {"a": GOOD, "b": partly[:]})

    @pytest.mark.parametrize("change", ["in place", "moved", "swapped"])
    def test_that_are_written_to_are_read_through_hdf5_from_then_on(self, make, change):
        """A dataset that was deleted and made anew may lie elsewhere, where others lay before."""
        arrays = {f"u{i}": np.full((5, 3), i, "f4") for i in range(8)}
        with h5py.File(make(arrays), "r+") as file, Feed(file, shuffle=False) as feed:
            assert_equal(utterances_of(feed), arrays)
            direct = self.calls(feed)

            if change == "in place":
                file["u3"][1] = 9
            elif change == "moved":
                del file["u3"]
                file["new"] = np.ones((50, 3), "f4")
                file["u3"] = np.full((5, 3), 9, "f4")
            else:
                file.move("u3", "aside")
                file.move("u4", "u3")
                file.move("aside", "u4")
            now = {utt: file[utt][:] for utt in arrays}

            assert_equal(utterances_of(feed), now)
            assert self.calls(feed) == direct
            assert any((now[utt] != arrays[utt]).any() for utt in arrays)

    def test_that_are_written_to_while_they_are_read_are_read_again(self, make, monkeypatch):
        """Between the two looks at the file, what was read directly is from before the change."""
        arrays = {f"u{i}": np.full((5, 3), i, "f4") for i in range(8)}
        read, written = DirectReader.read, []

        def read_then_write(self, *args):
            read(self, *args)
            if not written:
                file["u3"][:] = 9
                written.append(True)
                self.descriptors.check(0)

        monkeypatch.setattr(DirectReader, "read", read_then_write)
        with h5py.File(make(arrays), "r+") as file, Feed(file, shuffle=False) as feed:
            found = utterances_of(feed)

            assert written
            assert_equal(found, arrays | {"u3": np.full((5, 3), 9, "f4")})

    def test_that_may_write_are_the_file_that_is_open_and_not_what_has_its_name_by_now(self, make):
        path = make({"a": GOOD})
        with h5py.File(path, "r+") as file:
            os.replace(make({"a": GOOD + 1}, name="other.h5"), path)

            assert_equal(streamed(file), {"a": GOOD})

    def test_that_are_closed_are_refused(self, path):
        with h5py.File(path) as file:
            pass

        with pytest.raises(ArgumentError, match="closed"):
            Feed(file).open()

    def test_that_are_closed_later_are_an_error(self, tmp_path, make):
        for options in ({}, {"chunks": (4, 3)}):
            path = make({"a": GOOD}, **options)
            file = h5py.File(path)
            with Feed(file) as feed:
                file.close()
                with pytest.raises(ClosedError, match=re.escape(str(path))):
                    list(feed)

    def test_of_memory_files(self):
        with (
            h5py.File(io.BytesIO(), "w") as in_python,
            h5py.File("none.h5", "w", driver="core", backing_store=False) as core,
        ):
            for file in (in_python, core):
                file["a"] = GOOD
                file.create_dataset("b", data=GOOD, compression="gzip")

                assert_equal(streamed(file), {"a": GOOD, "b": GOOD})

    @pytest.mark.parametrize("mode", ["w", "r+"])
    def test_are_not_needed_to_read_what_this_process_is_writing(self, tmp_path, mode):
        """A path whose file is open for writing here is read through HDF5, with all that is not flushed."""
        path = tmp_path / "writing.h5"
        with h5py.File(path, "w") as file:
            file["a"] = GOOD
        streamed(path)

        with h5py.File(path, mode) as file:
            file.pop("a", None)
            file["a"], file["b"] = GOOD + 1, GOOD + 2
            assert_equal(streamed(path), {"a": GOOD + 1, "b": GOOD + 2})
            file["a"][:] = GOOD + 3
            assert_equal(streamed(path), {"a": GOOD + 3, "b": GOOD + 2})
        assert_equal(streamed(path), {"a": GOOD + 3, "b": GOOD + 2})

    def test_side_by_side_with_paths(self, make):
        path = make({"u": GOOD}, name="a.h5")
        with h5py.File("memory.h5", "w", driver="core", backing_store=False) as file:
            file["u"] = GOOD[:, 0]
            with Feed({"a": path, "b": file}, shuffle=False) as feed:
                assert [(row["a"].tolist(), row["b"]) for *_, row in feed] == [(r.tolist(), r[0]) for r in GOOD]


class TestSources:
    def test_patterns_name_utterances(self, tmp_path):
        path = tmp_path / "layout.h5"
        with h5py.File(path, "w") as file:
            for utt in ("a", "b/c"):
                file[f"data/{utt}/actions"], file[f"data/{utt}/reward"] = GOOD, 1.0
                file[f"{utt}_mel"] = GOOD + 1
            file["data/actions"], file["other/a/actions"] = GOOD, GOOD

        assert_equal(streamed(Source(path, key="data/{utt}/actions")), {"a": GOOD, "b/c": GOOD})
        assert_equal(streamed(Source(path, key="/data/{utt}/actions")), {"a": GOOD, "b/c": GOOD})
        assert_equal(streamed(Source(path, key="{utt}_mel")), {"a": GOOD + 1, "b/c": GOOD + 1})
        assert_equal(streamed(Source(path, key="other/{utt}")), {"a/actions": GOOD})
        assert streamed(Source(path, key="nothing/{utt}")) == {}

    @pytest.mark.parametrize("key", ["", "mel", "{utt}/{utt}", "{UTT}"])
    def test_patterns_without_one_place_for_the_id_are_refused(self, path, key):
        with pytest.raises(ArgumentError, match=r"\{utt\} exactly once"):
            Source(path, key=key)

    def test_of_another_key_have_another_index(self, tmp_path):
        path = tmp_path / "two.h5"
        with h5py.File(path, "w") as file:
            file["u/a"], file["u/b"] = GOOD, GOOD + 1

        for _ in range(2):
            assert_equal(streamed(Source(path, key="{utt}/a")), {"u": GOOD})
            assert_equal(streamed(Source(path, key="{utt}/b")), {"u": GOOD + 1})

    def test_may_be_many_files(self, make, tmp_path):
        shards = {f"{i}": {f"s{i}u{j}": GOOD + 10 * i + j for j in range(3)} for i in (2, 0, 1)}
        paths = [make(arrays, name=f"shard{name}.h5") for name, arrays in shards.items()]
        everything = {utt: array for arrays in shards.values() for utt, array in arrays.items()}

        assert_equal(streamed(paths), everything)
        assert_equal(streamed(tuple(map(str, paths))), everything)
        assert_equal(streamed(str(tmp_path / "shard*.h5")), dict(sorted(everything.items())))
        assert_equal(streamed(tmp_path / "shard[12].h5"), {u: a for u, a in sorted(everything.items()) if u[1] != "0"})
        assert_equal(
            streamed(Source(tmp_path / "shard?.h5", key="s{utt}")), {u[1:]: a for u, a in sorted(everything.items())}
        )

    def test_may_be_more_files_than_are_held_open(self, make):
        """Eighty files, some of which HDF5 has to read, shuffled into partitions."""
        options = ({}, {"compression": "gzip"})
        paths = [make({f"u{i:03d}": GOOD + i}, name=f"{i:03d}.h5", **options[i % 2]) for i in range(80)]

        with Feed(paths, memory_budget="32k") as feed:
            for _ in range(2):
                found = {utt: array.copy() for utt, array in feed.utterances()}
                assert len(found) == 80
                assert all(array.tolist() == (GOOD + int(utt[1:])).tolist() for utt, array in found.items())

    def test_do_not_take_names_with_brackets_for_patterns(self, make, tmp_path):
        path = make({"a": GOOD}, name="feats[1].h5")

        assert list(streamed(path)) == ["a"]

    @pytest.mark.parametrize("as_glob", [True, False])
    def test_with_an_id_in_two_files_are_refused(self, make, tmp_path, as_glob):
        paths = [make({"same": GOOD, f"own{i}": GOOD}, name=f"{i}.h5") for i in range(2)]

        with pytest.raises(ArgumentError, match=r"'same' is in .*0\.h5 and in .*1\.h5.*unique"):
            streamed(tmp_path / "?.h5" if as_glob else paths)

    def test_that_are_none_are_refused(self, tmp_path):
        with pytest.raises(SourceMissingError, match=r"\*\.h5"):
            streamed(tmp_path / "*.h5")
        with pytest.raises(NotHDF5Error, match=re.escape(str(tmp_path / "*.h5"))):
            streamed(tmp_path)
        for nothing in ([], {}, 5, None, io.BytesIO()):
            with pytest.raises(ArgumentError):
                streamed(nothing)
        for url in ("s3://bucket/feats.h5", "https://host/feats.h5"):
            with pytest.raises(ArgumentError, match="copy it"):
                streamed(url)

    def test_may_be_named_as_bytes(self, path):
        assert_equal(streamed(os.fsencode(path)), plain(path))

    def test_with_no_utterance_at_all_are_empty(self, tmp_path):
        path = tmp_path / "empty.h5"
        h5py.File(path, "w").close()

        with Feed(path) as feed:
            assert (len(feed), feed.num_utterances, list(feed), list(feed.batches(3))) == (0, 0, [], [])


class TestLargeUtterances:
    def test_are_split_for_frames_and_refused_as_wholes(self, make):
        """Three times the budget, in the middle."""
        arrays = {"a": GOOD, "big": np.arange(7500, dtype="f4").reshape(2500, 3), "z": GOOD}
        path = make(arrays)

        with Feed(path, memory_budget=10_000, shuffle=False) as feed:
            assert all(frame.tolist() == arrays[utt][index].tolist() for utt, index, frame in feed)
            assert sum(len(batch.frames) for batch in feed.batches(100)) == len(feed) == 2516
            with pytest.raises(BudgetError, match=r"'big' takes \d+ bytes.*memory_budget=\d+") as caught:
                list(feed.utterances())

        enough = int(re.search(r"memory_budget=(\d+)", str(caught.value))[1])
        assert_equal(streamed(path, memory_budget=enough), arrays)
        with pytest.raises(BudgetError):
            streamed(path, memory_budget=enough - 4096)

    def test_whose_single_frames_do_not_fit_are_refused(self, make):
        path = make({"a": GOOD, "wide": np.ones((2, 5000), "f4")})

        with pytest.raises(BudgetError, match=r"'wide'.*memory_budget=\d+") as caught:
            with Feed(path, memory_budget=8192) as feed:
                list(feed)

        enough = int(re.search(r"memory_budget=(\d+)", str(caught.value))[1])
        with Feed(path, memory_budget=enough) as feed:
            assert sum(1 for _ in feed) == 10


def test_a_relative_path_means_the_same_file_wherever_the_feed_goes(path, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    feed = Feed(path.name)
    fields = Feed({"mel": [path.name], "same": Source("feats.*")})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    monkeypatch.chdir(elsewhere)

    assert pickle.loads(pickle.dumps(feed)).num_utterances == len(corpus)
    assert feed.num_utterances == fields.num_utterances == len(corpus)
