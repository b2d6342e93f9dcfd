"""Reading headers without HDF5 is a shortcut: it never says anything else than HDF5 does."""

from __future__ import annotations

import contextlib
import os
import threading

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asyncfeed.errors import AsyncFeedError, ClosedError
from asyncfeed.planning.catalog import Access
from asyncfeed.storage import scan as scan_module
from asyncfeed.storage.blocks import Blocks
from asyncfeed.storage.hdf5file import open_hdf5, stamp
from asyncfeed.storage.headers import Headers
from asyncfeed.storage.scan import FEW, STEP, scan
from asyncfeed.storage.source import Container

NUM = 2 * FEW


def uneven(num):
    """Utterances of one to seven frames."""
    return {f"utt{i:05d}": np.full((i % 7 + 1, 3), i, "f4") for i in range(num)}


def by_headers(path, key="{utt}", **options):
    """Through a path, headers are read directly."""
    return scan(Container(str(path), key), **options)


def by_hdf5(path, key="{utt}"):
    """Through a handle, every dataset is opened in HDF5."""
    with open_hdf5(str(path)) as file:
        return scan(Container(str(path), key, file))


def contents(catalog):
    columns = {n: getattr(catalog, n) for n in ("file", "offset", "length", "kind", "access", "swapped")}
    return (
        list(catalog.ids),
        {name: (column.dtype, column.tolist()) for name, column in columns.items()},
        (catalog.files, catalog.kinds, catalog.key, catalog.filters, catalog.skipped),
    )


def outcome(way, path):
    try:
        return contents(way(path))
    except AsyncFeedError as error:
        return type(error), str(error)


@contextlib.contextmanager
def headers_of(path):
    with open_hdf5(str(path)) as file, contextlib.closing(Blocks(stamp(str(path)), file, lambda: False)) as blocks:
        root = h5py.h5o.open(file.id, b".")
        yield Headers(blocks), h5py.h5o.get_info(root).addr, *scan_module._links(root)


@pytest.fixture
def opened(monkeypatch):
    """The paths of what is opened in HDF5 during a scan."""
    paths, follow = [], scan_module._Scan.follow

    def spy(self, group, name, path, hard):
        paths.append(path)
        return follow(self, group, name, path, hard)

    monkeypatch.setattr(scan_module._Scan, "follow", spy)
    return paths


def assert_same(path, key="{utt}"):
    assert contents(by_headers(path, key)) == contents(by_hdf5(path, key))


# -- what is in a file -------------------------------------------------------------------------------------------------


def varied(file):
    """Something of everything, in an order that mixes it."""
    rng = np.random.default_rng(0)
    for i, dtype in enumerate(("f4", "f8", ">f4", ">i2", "i1", "u8", "c8", "?", "f2", "S5", ">c16") * 5):
        for rank in (1, 2, 3):
            shape = tuple(rng.integers(1, 5, rank).tolist())
            file.create_dataset(f"{i:03d}/rank{rank}" if i % 3 else f"{i:03d}rank{rank}", data=np.ones(shape, dtype))
    for i in range(10):
        name = f"{i:03d}"
        file[f"{name}scalar"] = 1.0
        file[f"{name}nothing"] = h5py.Empty("f4")
        file[f"{name}text"] = "text"
        file[f"{name}soft"] = h5py.SoftLink("/nowhere" if i % 2 else "/000rank1")
        file[f"{name}external"] = h5py.ExternalLink("nowhere.h5", "/x")
        file[f"{name}twice"] = file["000rank1"]
        file.create_dataset(f"{name}empty", shape=(0, 4), dtype="f4")
        file.create_dataset(f"{name}unwritten", shape=(3, 4), dtype="f4")
        file.create_dataset(f"{name}chunked", data=np.ones((4, 4)), chunks=(2, 2))
        file.create_dataset(f"{name}packed", data=np.ones((4, 4)), compression="gzip")
        file.create_dataset(f"{name}growing", data=np.ones((4, 4)), maxshape=(None, 4))
        file.create_dataset(f"{name}timed", data=np.ones((4, i + 1)), track_times=True)
        file.create_dataset(f"{name}filled", data=np.ones((4, 4)), fillvalue=i)
        file.create_dataset(f"{name}ragged", shape=3, dtype=h5py.vlen_dtype("i4"))[0] = [1, 2]
        file.create_dataset(f"{name}structured", data=np.zeros(3, [("a", "f4"), ("b", "i2")]))
        file.create_dataset(f"{name}described", data=np.ones((4, 4))).attrs["text"] = "word " * (i % 7 + 1)
        file.create_dataset(f"{name}annotated", data=np.ones((4, 4))).attrs.update({f"key{k}": k for k in range(9)})
        file.create_group(f"{name}group")["inner"] = np.ones((2, 2))
    file["type"] = np.dtype("f4")
    for i in range(10):
        file.create_dataset(f"{i:03d}committed", data=np.ones((4, 4), "f4"), dtype=file["type"])
    file["cycle"] = file["/"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"libver": "earliest"},
        {"libver": "latest"},
        {"libver": "latest", "track_order": True},
        {"track_order": True},
        {"userblock_size": 1024},
    ],
    ids=str,
)
def test_a_file_with_something_of_everything_is_catalogued_as_hdf5_does(tmp_path, options):
    with h5py.File(tmp_path / "varied.h5", "w", **options) as file:
        varied(file)

    assert_same(tmp_path / "varied.h5")


def test_a_key_that_leads_into_groups_finds_what_hdf5_finds(tmp_path):
    with h5py.File(tmp_path / "varied.h5", "w") as file:
        varied(file)

    assert_same(tmp_path / "varied.h5", "{utt}/rank2")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file with a B-tree of several levels: 3,003 datasets."""
    path = tmp_path_factory.mktemp("large") / "a.h5"
    with h5py.File(path, "w") as file:
        for name, array in uneven(3 * STEP + 3).items():
            file[name] = array
    return path


def test_no_more_than_one_dataset_of_a_template_is_opened(large, opened):
    catalog = by_headers(large)

    assert opened == ["utt00000"]
    assert (catalog.access == Access.DIRECT).all()
    assert contents(catalog) == contents(by_hdf5(large))


def test_utterances_may_carry_attributes_of_their_own(make, opened):
    path = make(uneven(NUM))
    with h5py.File(path, "a") as file:
        for i, dataset in enumerate(file.values()):
            dataset.attrs["speaker"] = i

    catalog = by_headers(path)

    assert opened == ["utt00000"]
    assert contents(catalog) == contents(by_hdf5(path))


def test_types_that_hdf5_converts_are_recognised_too(make, opened):
    path = make({f"{i:03d}": np.arange(i + 1) % 2 == 0 for i in range(NUM)})

    catalog = by_headers(path)

    assert opened == ["000"]
    assert (catalog.access == Access.CONVERTED).all()
    assert contents(catalog) == contents(by_hdf5(path))


def test_datasets_between_others_keep_their_place(tmp_path, opened):
    with h5py.File(tmp_path / "mixed.h5", "w") as file:
        for i in range(NUM):
            file.create_dataset(f"{i:03d}", data=np.ones((i + 1, 2)), chunks=(1, 2) if i % 2 else None)

    catalog = by_headers(tmp_path / "mixed.h5")

    assert opened == [f"{i:03d}" for i in range(NUM) if i % 2 or i == 0]
    assert catalog.length.tolist() == list(range(1, NUM + 1))


@pytest.mark.parametrize("nbytes", [0, 512, 4096])
def test_offsets_count_from_the_start_of_the_file(tmp_path, nbytes):
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=nbytes) as file:
        file["a"] = np.arange(1, 9, dtype="u1")
    content = (tmp_path / "a.h5").read_bytes()

    with headers_of(tmp_path / "a.h5") as (headers, _, _, addresses):
        (header,) = headers.read(addresses)

    assert header.shape == (8,)
    assert content[header.offset : header.offset + 8] == bytes(range(1, 9))


def test_later_formats_get_no_answer(tmp_path):
    with h5py.File(tmp_path / "latest.h5", "w", libver="latest") as file:
        for name, array in uneven(NUM).items():
            file[name] = array

    with headers_of(tmp_path / "latest.h5") as (headers, group, names, addresses):
        assert list(headers.read(addresses)) == [None] * NUM
        assert not headers.finds_all(group, names)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_names_that_hdf5_lists_but_does_not_find_are_noticed(make):
    path = make(uneven(NUM))
    content = bytearray(path.read_bytes())
    tree = content.index(b"TREE")
    key = tree + 24 + 2 * 16  # between the second and the third symbol table node
    content[key : key + 8] = content[key + 16 : key + 24]
    path.write_bytes(content)

    with headers_of(path) as (headers, group, names, _):
        assert len(names) == NUM
        assert not headers.finds_all(group, names)
    assert by_hdf5(path).skipped
    assert_same(path)


def test_a_truncated_file_is_the_error_that_hdf5_makes_of_it(make):
    path = make(uneven(NUM))
    os.truncate(path, path.stat().st_size - 1000)

    assert outcome(by_headers, path) == outcome(by_hdf5, path)


def test_a_file_that_changes_meanwhile_is_left_to_hdf5(tmp_path, opened):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in range(STEP):
            file[f"{i:05d}"] = np.ones(1)
        for i in range(NUM):
            file[f"last/{i:05d}"] = np.ones(1)
    seen = []

    def touch(num):
        seen.append(num)
        os.utime(tmp_path / "a.h5", ns=(1, 1))

    catalog = by_headers(tmp_path / "a.h5", progress=touch)

    assert len(catalog) == STEP + NUM
    assert len(opened) > len(catalog)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small file, and a place for damaged copies of it."""
    path = tmp_path_factory.mktemp("damaged") / "a.h5"
    with h5py.File(path, "w") as file:
        for i in range(FEW + 8):
            file.create_dataset(f"{i:03d}", data=np.ones((i % 5 + 1, 2), "f4" if i % 4 else ">i2"))
            file[f"{i:03d}"].attrs["n"] = i
    return path.read_bytes(), path


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(1, 255)), min_size=1, max_size=3))
@example([(40, 0x80)])  # the superblock's end of the file
@example([(18, 0x08)])  # the superblock's size of B-tree nodes
def test_damage_never_gives_another_catalog_than_hdf5(sound, flips):
    content, path = bytearray(sound[0]), sound[1]
    for place, bits in flips:
        content[place % len(content)] ^= bits
    path.write_bytes(content)

    assert outcome(by_headers, path) == outcome(by_hdf5, path)


# -- while it goes on --------------------------------------------------------------------------------------------------


def test_progress_counts_every_dataset(large):
    seen = []

    by_headers(large, progress=seen.append)

    assert seen == [STEP, STEP, STEP, 3]


def test_a_scan_that_is_told_to_stop_stops(make):
    path = make({f"{i:05d}": np.ones(1) for i in range(NUM)})
    stop = threading.Event()
    stop.set()

    with pytest.raises(ClosedError):
        by_headers(path, stop=stop)


def test_a_scan_stops_where_it_is(large):
    stop, seen = threading.Event(), []

    def halt(num):
        seen.append(num)
        stop.set()

    with pytest.raises(ClosedError):
        by_headers(large, progress=halt, stop=stop)

    assert seen == [STEP]
