"""Files as tools in the wild write them: what to write to stream them, and that it gives what h5py gives.

The writers below make the calls of h5py that those tools make; the tools themselves are not needed.
"""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfeed import ArgumentError, Feed, Source, SourceMissingError, StorageError, UnreadableDatasetError
from asyncfeed.cli import app
from asyncfeed.cli.contents import inspect
from asyncfeed.planning.catalog import Access
from asyncfeed.planning.layouts import Dataset, suggest, suggest_for_many
from asyncfeed.planning.spans import spans
from asyncfeed.storage import library
from asyncfeed.storage.files import MAX_OPEN
from asyncfeed.storage.index import in_cache
from asyncfeed.storage.library import open_library
from asyncfeed.storage.scan import scan

RNG = np.random.default_rng(4)

LENGTHS = [3, 0, 7, 1, 12, 5]
IDS = ["utt-a", "utt-b", "ü/tt-c", "utt-d", "utt-e", "utt-f"]
FRAMES = RNG.random((sum(LENGTHS), 8)).astype("f4")
ARRAYS = dict(zip(IDS, np.split(FRAMES, np.cumsum(LENGTHS)[:-1]), strict=True))


def random(*shape, dtype="f4"):
    return (RNG.random(shape) * 100).astype(dtype)


def streamed(source, **options):
    with Feed(source, shuffle=False, **options) as feed:
        return {utt: array.copy() for utt, array in feed.utterances()}


def frame_by_frame(source, **options):
    """Everything, gathered from shuffled triplets in partitions as small as they get."""
    found: dict[str, dict[int, np.ndarray]] = {}
    with Feed(source, memory_budget="8k", **options) as feed:
        for utt, index, frame in feed:
            found.setdefault(utt, {})[index] = np.array(frame)
    return {utt: np.array([rows[i] for i in range(len(rows))]) for utt, rows in found.items()}


def assert_same(found, wanted):
    assert sorted(found) == sorted(wanted)
    for utt, array in wanted.items():
        assert found[utt].dtype == array.dtype
        assert np.array_equal(found[utt], array)


def assert_streams(source, wanted, **options):
    """All of it, whole and frame by frame, equals what h5py gave."""
    assert_same(streamed(source, **options), wanted)
    assert_same(frame_by_frame(source, **options), {utt: a for utt, a in wanted.items() if len(a)})


def plain(path, key="{utt}"):
    """What h5py finds under a key, by id."""
    found, (head, tail) = {}, key.split("{utt}")

    def note(name, each):
        if isinstance(each, h5py.Dataset) and name.startswith(head) and name.endswith(tail):
            found[name[len(head) : len(name) - len(tail)]] = each[()]

    with h5py.File(path) as file:
        file.visititems(note)
    return found


def access_of(source):
    return {Access(int(a)) for catalog in open_library(source).corpus.catalogs for a in np.unique(catalog.access)}


def suggested(source):
    """The sources that ``asyncfeed inspect`` suggests, as one who copies the lines has them."""
    return [eval(each.line) for each in inspect(Source(str(source))).suggestions]


# -- one dataset per utterance -------------------------------------------------------------------------------------


def audiomate(path):
    """``FeatureContainer.set``."""
    with h5py.File(path, "a") as file:
        for utt in ("utt-1", "utt-2", "utt-10"):
            file.create_dataset(utt, data=random(RNG.integers(2, 30), 20))
        file.attrs["frame-size"], file.attrs["hop-size"], file.attrs["sampling-rate"] = 400, 160, 16000


def speechbrain(path):
    """``CachedHDF5DynamicItem._cache``; ids of some recipes hold slashes."""
    with h5py.File(path, "a") as file:
        for utt in ("1089-134686-0000", "1089-134686-0001", "dev/1221-135766-0002"):
            file.create_dataset(utt, data=random(RNG.integers(2, 30), 80))


def lhotse(path):
    """``NumpyHdf5Writer.write``."""
    with h5py.File(path, "w") as file:
        for number in range(4):
            file.create_dataset(f"lbi-1272-128104-{number:04d}-{number}", data=random(7 + number, 80))


def espnet_feats(path):
    """``HDF5Writer`` with ``compress=True``."""
    with h5py.File(path, "w") as file:
        for number in range(4):
            file.create_dataset(f"F01_050C010{number}_PED_REAL", data=random(7 + number, 83), compression="gzip")


def prott5(path):
    """``save_embeddings`` of ProtT5's script: residues x 1024 in half precision; slashes and dots are replaced."""
    with h5py.File(path, "w") as file:
        for number, utt in enumerate(("sp|P12345|AATM_RABIT", "A0A024R1R8", "Q9_X-ray")):
            file.create_dataset(utt, data=random(20 + number, 1024, dtype="f2"))


def waveforms(path):
    with h5py.File(path, "w") as file:
        for number in range(4):
            file.create_dataset(f"p225_{number:03d}", data=random(1000 + number, dtype="i2"))


def speakers(path):
    with h5py.File(path, "w") as file:
        for number in range(12):
            file[f"spk{number % 3}/{number:04d}"] = random(3 + number, 40)


FLAT = [audiomate, speechbrain, lhotse, espnet_feats, prott5, waveforms, speakers]


@pytest.mark.parametrize("write", FLAT)
def test_one_dataset_per_utterance_needs_no_source(tmp_path, write):
    write(tmp_path / "feats.h5")

    assert_streams(tmp_path / "feats.h5", plain(tmp_path / "feats.h5"))


@pytest.mark.parametrize("write", FLAT)
def test_one_dataset_per_utterance_is_what_inspect_suggests_first(tmp_path, write):
    write(path := tmp_path / "feats.h5")

    assert suggested(path)[0] == Source(str(path))


@pytest.mark.parametrize("write", [each for each in FLAT if each is not espnet_feats])
def test_what_is_not_compressed_is_read_directly(tmp_path, write):
    write(tmp_path / "feats.h5")

    assert access_of(tmp_path / "feats.h5") == {Access.DIRECT}


# -- a group per item ------------------------------------------------------------------------------------------------


def hloc(path):
    """``extract_features.main``: opened anew for every image, in the latest format; descriptors are D x N."""
    for number, name in enumerate(("db/1.jpg", "db/2.jpg", "query/night/1.jpg")):
        with h5py.File(path, "a", libver="latest") as file:
            group, num = file.create_group(name), 30 + number
            group.create_dataset("keypoints", data=random(num, 2, dtype="f2"))
            group.create_dataset("descriptors", data=random(256, num, dtype="f2"))
            group.create_dataset("scores", data=random(num, dtype="f2"))
            group.create_dataset("image_size", data=np.array([640, 480]))
            group["keypoints"].attrs["uncertainty"] = 1.0


def robomimic(path):
    """``run_trained_agent.py`` with ``--dataset_obs``, and the filter keys of ``split_train_val.py``."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for number in range(5):
            demo, num = data.create_group(f"demo_{number}"), 10 + number
            demo.create_dataset("actions", data=random(num, 7, dtype="f8"))
            demo.create_dataset("states", data=random(num, 32, dtype="f8"))
            demo.create_dataset("rewards", data=random(num, dtype="f8"))
            demo.create_dataset("dones", data=np.zeros(num, "i8"))
            for name, size in (("robot0_eef_pos", 3), ("object", 14)):
                demo.create_dataset(f"obs/{name}", data=random(num, size, dtype="f8"))
                demo.create_dataset(f"next_obs/{name}", data=random(num, size, dtype="f8"))
            demo.attrs["num_samples"] = num
        data.attrs["total"] = 60
        file["mask/train"] = np.array([b"demo_0", b"demo_1"])


def tts(path):
    with h5py.File(path, "w") as file:
        for number in range(4):
            group = file.create_group(f"LJ001-{number:04d}")
            group["mel"], group["pitch"] = random(20 + number, 80), random(20 + number)
            group["text"] = "printing, in the only sense"


def espnet_sound(path):
    """A group per utterance, with the rate as a scalar."""
    with h5py.File(path, "w") as file:
        for number in range(4):
            group = file.create_group(f"F01_{number}")
            group["wave"], group["rate"] = random(1600 + number, dtype="i2"), 16000


@pytest.mark.parametrize(
    ("write", "key", "num"),
    [
        (hloc, "{utt}/descriptors", 3),
        (hloc, "{utt}/keypoints", 3),
        (robomimic, "data/{utt}/obs/object", 5),
        (robomimic, "data/{utt}/next_obs/robot0_eef_pos", 5),
        (robomimic, "data/{utt}/actions", 5),
        (tts, "{utt}/mel", 4),
        (tts, "{utt}/pitch", 4),
        (espnet_sound, "{utt}/wave", 4),
    ],
)
def test_a_group_per_item_needs_a_key_which_inspect_suggests(tmp_path, write, key, num):
    write(path := tmp_path / "items.h5")

    assert len(plain(path, key)) == num
    assert_streams(Source(path, key=key), plain(path, key))
    assert access_of(Source(path, key=key)) == {Access.DIRECT}
    assert Source(str(path), key=key) in suggested(path)


@pytest.mark.parametrize("write", [hloc, robomimic, tts])
def test_what_an_item_has_as_many_frames_of_is_suggested_side_by_side(tmp_path, write):
    write(path := tmp_path / "items.h5")

    (fields, *_) = [each for each in suggested(path) if isinstance(each, dict)]

    with Feed(fields, shuffle=False) as feed:
        for utt, arrays in feed.utterances():
            for name, array in arrays.items():
                assert np.array_equal(array, plain(path, fields[name].key)[utt])


def test_encoded_audio_in_one_scalar_is_refused_by_name(tmp_path):
    """What ESPnet's ``SoundHDF5File`` writes: the bytes of a FLAC file, opaque."""
    with h5py.File(tmp_path / "sound.flac.h5", "w") as file:
        file.create_dataset("F01", data=np.void(b"fLaC" + bytes(99)))

    with pytest.raises(UnreadableDatasetError, match=r"'F01'.*opaque"):
        streamed(tmp_path / "sound.flac.h5")

    assert suggested(tmp_path / "sound.flac.h5") == []


def test_a_group_per_field_is_told_from_a_group_per_item(tmp_path):
    path = tmp_path / "fields.h5"
    with h5py.File(path, "w") as file:
        for number in range(5):
            file[f"mel/utt{number}"], file[f"target/utt{number}"] = random(9, 80), random(9, dtype="i4")

    fields = suggested(path)[0]

    assert fields == {name: Source(str(path), key=f"{name}/{{utt}}") for name in ("mel", "target")}
    with Feed(fields) as feed:
        assert len(feed) == 45


# -- one file per utterance ---------------------------------------------------------------------------------------------


def parallel_wavegan(path, feats, wave):
    """``write_hdf5``, once per dataset: made, then opened again and added to."""
    os.makedirs(path.parent, exist_ok=True)
    for name, array in (("wave", wave), ("feats", feats)):
        with h5py.File(path, "r+" if path.exists() else "w") as file:
            file.create_dataset(name, data=np.array(array))
            file.flush()


@pytest.fixture
def dump(tmp_path):
    """Eighty files, more than are held open, and what they hold by utterance."""
    arrays = {f"utt-{i:03d}": (random(3 + i % 5, 8), random(100 + i)) for i in range(80)}
    for i, (utt, pair) in enumerate(arrays.items()):
        parallel_wavegan(tmp_path / "dump" / f"dump.{i % 3}" / f"{utt}.h5", *pair)
    return tmp_path / "dump", {utt: f for utt, (f, _) in arrays.items()}, {utt: w for utt, (_, w) in arrays.items()}


class TestFilePerUtterance:
    def test_an_id_is_what_stands_in_its_place_in_the_path(self, dump):
        directory, feats, waves = dump

        assert_streams(Source(directory / "dump.*" / "{utt}.h5", key="feats"), feats)
        assert_streams(Source(f"{directory}/**/{{utt}}.h5", key="wave"), waves)
        assert_streams(Source(f"{directory}/dump.1/utt-{{utt}}.h5", key="wave"), {
            utt.removeprefix("utt-"): wave for i, (utt, wave) in enumerate(waves.items()) if i % 3 == 1
        })  # fmt: skip

    def test_or_is_the_name_of_the_file_with_the_directories_that_a_glob_leaves_open(self, dump):
        directory, feats, _ = dump

        some = streamed(Source(directory / "dump.0" / "*.h5", key="feats"))
        everything = streamed(Source(directory / "*" / "*.h5", key="feats"))

        assert list(some) == [utt for i, utt in enumerate(feats) if i % 3 == 0]
        assert_same(everything, {f"dump.{i % 3}/{utt}": a for i, (utt, a) in enumerate(feats.items())})

    def test_or_of_a_list_the_stem(self, dump):
        directory, feats, _ = dump
        paths = [directory / "dump.2" / "utt-002.h5", directory / "dump.1" / "utt-001.h5"]

        found = streamed(Source(paths, key="feats"))

        assert list(found) == ["utt-002", "utt-001"]
        assert_same(found, {utt: feats[utt] for utt in found})

    def test_directories_may_be_the_utterances(self, tmp_path):
        for utt in "ab":
            parallel_wavegan(tmp_path / utt / "features.h5", random(4, 3), random(9))

        found = streamed(Source(tmp_path / "{utt}" / "features.h5", key="wave"))

        assert list(found) == ["a", "b"]

    def test_few_of_the_files_are_open_at_a_time(self, dump, open_in):
        """There are more partitions than segments: while one is gone through, the reader is not done yet."""
        directory, feats, _ = dump
        counts = []

        with Feed(Source(f"{directory}/**/{{utt}}.h5", key="feats"), memory_budget="8k") as feed:
            for partition in feed.partitions():
                counts.append(open_in(directory))
                del partition

        assert len(counts) > 3
        assert counts[0] > 0
        assert len(feats) > MAX_OPEN >= max(counts)

    def test_fields_of_an_utterance_may_share_a_file(self, dump):
        directory, feats, waves = dump
        path = f"{directory}/**/{{utt}}.h5"

        with Feed({"feats": Source(path, key="feats"), "wave": Source(path, key="wave")}) as feed:
            for utt, arrays in feed.utterances():
                assert np.array_equal(arrays["feats"], feats[utt])
                assert np.array_equal(arrays["wave"], waves[utt])

    def test_all_share_one_index(self, dump, own_cache, monkeypatch):
        directory, feats, _ = dump
        scanned = []
        monkeypatch.setattr(library, "scan", lambda each, **options: scanned.append(each.path) or scan(each, **options))
        source = Source(f"{directory}/**/{{utt}}.h5", key="feats")

        for _ in range(2):
            assert_same(streamed(source), feats)

        assert len(scanned) == 80
        assert len([path for path in own_cache.rglob("*") if path.is_file()]) == 1

    def test_which_is_made_anew_when_a_file_changes_or_is_added(self, dump):
        directory, feats, _ = dump
        source = Source(f"{directory}/**/{{utt}}.h5", key="feats")
        streamed(source)

        with h5py.File(directory / "dump.0" / "utt-000.h5", "a") as file:
            del file["feats"]
            file["feats"] = feats["utt-000"] + 1
        parallel_wavegan(directory / "dump.0" / "utt-new.h5", feats["utt-001"], random(3))

        assert_same(streamed(source), {**feats, "utt-000": feats["utt-000"] + 1, "utt-new": feats["utt-001"]})

    def test_one_without_the_dataset_is_refused_or_left_out(self, dump):
        directory, feats, _ = dump
        (path,) = directory.rglob("utt-005.h5")
        with h5py.File(path, "a") as file:
            del file["feats"]
        source = Source(f"{directory}/**/{{utt}}.h5", key="feats")

        with pytest.raises(UnreadableDatasetError, match=r"'utt-005'.*'feats'"):
            streamed(source)

        assert_same(streamed(source, unreadable="skip"), {utt: a for utt, a in feats.items() if utt != "utt-005"})

    def test_a_group_in_the_place_of_the_dataset_is_refused_with_the_key_to_try(self, tmp_path):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["mel/x"] = random(3, 2)

        with pytest.raises(UnreadableDatasetError, match=r"key='mel/\{utt\}'"):
            streamed(Source([tmp_path / "a.h5"], key="mel"))

    def test_the_same_name_in_two_directories_is_refused(self, tmp_path):
        for speaker in "ab":
            parallel_wavegan(tmp_path / speaker / "0001.h5", random(4, 3), random(9))

        with pytest.raises(ArgumentError, match="'0001' is in"):
            streamed(Source(tmp_path / "*" / "{utt}.h5", key="wave"))

        assert list(streamed(Source(tmp_path / "*" / "*.h5", key="wave"))) == ["a/0001", "b/0001"]

    def test_it_must_be_clear_where_the_id_stands(self, dump):
        directory, _, _ = dump

        with pytest.raises(ArgumentError, match=r"\{utt\} exactly once"):
            Source(directory / "dump.0" / "utt-000.h5", key="feats")
        with pytest.raises(ArgumentError, match="key='feats'"):
            streamed(f"{directory}/dump.0/{{utt}}.h5")
        with pytest.raises(ArgumentError, match="without wildcards"):
            streamed(Source(f"{directory}/dump.0/u*-{{utt}}.h5", key="feats"))
        with pytest.raises(SourceMissingError, match="no file matches"):
            streamed(Source(f"{directory}/dump.9/{{utt}}.h5", key="feats"))

    @pytest.mark.parametrize("name", ["dump.0", "", "dump.0/*.h5"], ids=["directory", "nested", "glob"])
    def test_inspect_suggests_it_for_a_directory_and_for_a_glob(self, dump, name):
        directory, feats, _ = dump

        sources = suggested(directory / name if name else directory)

        assert [each.key for each in sources[:2]] == ["feats", "wave"]
        found = streamed(sources[0])
        assert_same({utt.rpartition("/")[2]: a for utt, a in found.items()}, {u: feats[u[-7:]] for u in (
            utt.rpartition("/")[2] for utt in found)})  # fmt: skip
        assert len(found) == (27 if name else 80)

    def test_inspect_suggests_it_for_one_of_the_files(self, dump):
        directory, _, _ = dump

        sources = suggested(directory / "dump.0" / "utt-000.h5")

        assert sources[0] == Source(f"{directory}/dump.0/*.h5", key="feats")
        assert len(streamed(sources[0])) == 27


# -- one array with lengths or offsets and ids beside it ------------------------------------------------------------------

STARTS, ENDS = np.cumsum(LENGTHS) - LENGTHS, np.cumsum(LENGTHS)

BESIDE = {
    "lengths": {"lengths": np.array(LENGTHS, "i4")},
    "lengths, unsigned": {"lengths": np.array(LENGTHS, "u8")},
    "lengths, as a column": {"lengths": np.array(LENGTHS)[:, None]},
    "lengths, in another byte order": {"lengths": np.array(LENGTHS, ">i2")},
    "edges": {"offsets": np.append(0, ENDS)},
    "starts": {"offsets": STARTS},
    "ends": {"offsets": ENDS},
    "starts and lengths": {"offsets": STARTS, "lengths": np.array(LENGTHS)},
    "edges and lengths": {"offsets": np.append(0, ENDS), "lengths": np.array(LENGTHS)},
}

AS_IDS = {
    "variable": IDS,
    "fixed": np.array([utt.encode() for utt in IDS]),
    "variable bytes": np.array([utt.encode() for utt in IDS], h5py.special_dtype(vlen=bytes)),
}


def put(path, data=FRAMES, ids=IDS, data_options=None, **beside):
    with h5py.File(path, "w") as file:
        file.create_dataset("feats", data=data, **(data_options or {}))
        for name, array in beside.items():
            file[name] = array
        if ids is not None:
            file["ids"] = ids
    return path


STORED = {
    "contiguous": ({}, Access.DIRECT),
    "chunked": ({"chunks": (4, 3)}, Access.CHUNKED),
    "compressed": ({"chunks": (5, 8), "compression": "gzip", "shuffle": True}, Access.FILTERED),
    "resizable": ({"maxshape": (None, 8)}, Access.CHUNKED),
}


class TestOneArray:
    @pytest.mark.parametrize("ids", AS_IDS)
    @pytest.mark.parametrize("beside", BESIDE)
    def test_is_divided_by_what_lies_beside_it(self, tmp_path, beside, ids):
        path = put(tmp_path / "all.h5", ids=AS_IDS[ids], **BESIDE[beside])
        arguments = {name: name for name in BESIDE[beside]}

        found = streamed(Source(path, data="feats", ids="ids", **arguments))

        assert list(found) == IDS
        assert_same(found, ARRAYS)

    @pytest.mark.parametrize("stored", STORED)
    def test_is_read_directly_or_through_hdf5_as_it_is_stored(self, tmp_path, stored):
        options, access = STORED[stored]
        path = put(tmp_path / "all.h5", lengths=LENGTHS, data_options=options)
        source = Source(path, data="feats", lengths="lengths", ids="ids")

        for _ in range(2):  # scanned, and from the index
            assert_streams(source, ARRAYS)

        assert access_of(source) == {access}

    @pytest.mark.parametrize("dtype", ["f2", ">f4", "i2", "?", "c8", ">c16", "f8"])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
    def test_may_be_of_any_type_and_shape(self, tmp_path, dtype, shape):
        data = random(sum(LENGTHS), *shape, dtype=dtype)
        path = put(tmp_path / "all.h5", data, lengths=LENGTHS)
        wanted = dict(zip(IDS, np.split(data.astype(data.dtype.newbyteorder("=")), ENDS[:-1]), strict=True))

        assert_streams(Source(path, data="feats", lengths="lengths", ids="ids"), wanted)

    def test_may_lie_in_a_group_and_behind_a_handle(self, tmp_path):
        with h5py.File(tmp_path / "all.h5", "w") as file:
            file["train/x"], file["train/n"], file["train/names"] = FRAMES, LENGTHS, IDS

        assert_streams(Source(tmp_path / "all.h5", data="/train/x", lengths="train/n", ids="train/names"), ARRAYS)
        with h5py.File(tmp_path / "all.h5") as file:
            assert_same(streamed(Source(file["train"], data="x", lengths="n", ids="names")), ARRAYS)

    def test_numbers_its_utterances_where_there_are_no_ids(self, tmp_path):
        path = put(tmp_path / "all.h5", ids=None, lengths=LENGTHS)

        found = streamed(Source(path, data="feats", lengths="lengths"))

        assert_same(found, {f"utt{i:08d}": a for i, a in enumerate(ARRAYS.values())})

    def test_of_several_files_numbers_them_behind_the_name_of_each(self, tmp_path):
        for name in ("x", "y"):
            put(tmp_path / f"shard-{name}.h5", ids=None, lengths=LENGTHS)

        found = streamed(Source(tmp_path / "shard-*.h5", data="feats", lengths="lengths"))

        assert len(found) == 2 * len(LENGTHS)
        assert np.array_equal(found["shard-y/utt00000002"], ARRAYS["ü/tt-c"])

    def test_may_have_integers_for_ids(self, tmp_path):
        path = put(tmp_path / "all.h5", ids=[7, 3, 5, 1, 0, 11], lengths=LENGTHS)

        assert list(streamed(Source(path, data="feats", lengths="lengths", ids="ids"))) == [
            "7",
            "3",
            "5",
            "1",
            "0",
            "11",
        ]

    def test_with_starts_and_lengths_may_leave_out_and_share_frames(self, tmp_path):
        path = put(tmp_path / "all.h5", ids=["a", "b"], offsets=[20, 5], lengths=[8, 20])

        found = streamed(Source(path, data="feats", offsets="offsets", lengths="lengths", ids="ids"))

        assert_same(found, {"a": FRAMES[20:28], "b": FRAMES[5:25]})

    @pytest.mark.parametrize(
        ("beside", "reason"),
        [
            ({"lengths": [3, 4]}, "add up to 7 frames, but the array has 28"),
            ({"lengths": [30, -2, 0, 0, 0, 0]}, "length of utterance 1 is -2"),
            ({"lengths": np.array([3.5, 24.5])}, "not whole"),
            ({"lengths": [*LENGTHS[:-1], 2, 3]}, "6 ids for 7 utterances"),
            ({"offsets": [0, 9, 5, 28]}, "do not ascend"),
            ({"offsets": [0, 9, 29]}, "from 0 to 29"),
            ({"offsets": [2, 9, 20]}, "neither where utterances begin"),
            ({"offsets": [0, 3, 3, 10, 11, 28]}, "begin or where they end"),
            ({"offsets": [0, 25], "lengths": [3, 4]}, "utterance 1 has the frames 25:29"),
            ({"offsets": [0, 25, 26], "lengths": [3]}, "3 offsets for 1 lengths"),
            ({"lengths": ["3", "25"]}, "not integers"),
            ({"lengths": [[3, 3], [3, 19]]}, "not one axis"),
        ],
    )
    def test_is_refused_with_what_does_not_fit_it(self, tmp_path, beside, reason):
        path = put(tmp_path / "all.h5", **beside)
        source = Source(path, data="feats", ids="ids", **{name: name for name in beside})

        with pytest.raises(UnreadableDatasetError, match=reason):
            streamed(source)

        assert streamed(source, unreadable="skip") == {}

    def test_is_refused_also_where_utterances_are_chosen(self, tmp_path):
        path = put(tmp_path / "all.h5", lengths=[1])

        with pytest.raises(UnreadableDatasetError, match="add up to 1"):
            streamed(Source(path, data="feats", lengths="lengths", ids="ids"), includes=["utt-a"])

    def test_with_an_id_twice_is_refused(self, tmp_path):
        path = put(tmp_path / "all.h5", ids=["a", "b", "a", "c", "d", "e"], lengths=LENGTHS)

        with pytest.raises(UnreadableDatasetError, match="2 of them have the id 'a'"):
            streamed(Source(path, data="feats", lengths="lengths", ids="ids"))

    @pytest.mark.parametrize("wrong", ["data", "lengths", "ids"])
    def test_a_wrong_name_is_answered_with_those_that_there_are(self, tmp_path, wrong):
        path = put(tmp_path / "all.h5", lengths=LENGTHS)
        names = {"data": "feats", "lengths": "lengths", "ids": "ids", wrong: "nothing"}

        with pytest.raises(ArgumentError, match=r"no dataset 'nothing'.*'feats', 'ids', 'lengths'"):
            streamed(Source(path, **names))

    @pytest.mark.parametrize(
        "arguments",
        [
            {"data": "feats"},
            {"data": "feats", "ids": "ids"},
            {"data": "feats", "lengths": "lengths", "key": "{utt}/x"},
            {"lengths": "lengths"},
            {"ids": "ids"},
        ],
    )
    def test_arguments_that_make_no_sense_together_are_refused(self, path, arguments):
        with pytest.raises(ArgumentError):
            Source(path, **arguments)

    def test_of_another_division_has_another_index(self, tmp_path):
        path = put(tmp_path / "all.h5", lengths=LENGTHS, offsets=[0, 10, 28])

        for _ in range(2):
            assert len(streamed(Source(path, data="feats", lengths="lengths", ids="ids"))) == 6
            assert len(streamed(Source(path, data="feats", lengths="lengths"))) == 6
            assert len(streamed(Source(path, data="feats", offsets="offsets"))) == 2
            assert len(streamed(path, includes=["feats"])) == 1

    def test_keeps_in_its_index_where_utterances_begin(self, tmp_path, monkeypatch):
        path = put(tmp_path / "all.h5", lengths=LENGTHS, data_options={"compression": "gzip"})
        source = Source(path, data="feats", lengths="lengths", ids="ids")
        streamed(source)
        monkeypatch.setattr(library, "scan_slices", None)

        assert_streams(source, ARRAYS)

    def test_may_have_all_utterances_in_one_compressed_chunk(self, tmp_path):
        data = random(4000, 16)
        path = put(
            tmp_path / "all.h5", data, [f"{i}" for i in range(200)], {"chunks": (4000, 16), "compression": "gzip"},
            lengths=[20] * 200,
        )  # fmt: skip

        found = streamed(Source(path, data="feats", lengths="lengths", ids="ids"))

        assert np.array_equal(np.concatenate(list(found.values())), data)

    def test_stops_a_feed_when_it_is_written_meanwhile(self, tmp_path):
        path = put(tmp_path / "all.h5", lengths=LENGTHS)

        with Feed(Source(path, data="feats", lengths="lengths", ids="ids")) as feed:
            feed.num_utterances  # noqa: B018
            put(path, FRAMES + 1, lengths=[28], ids=["a"])
            with pytest.raises(StorageError, match="changed"):
                list(feed)

    @pytest.mark.parametrize("ids", ["ids", None])
    @pytest.mark.parametrize("beside", ["lengths", "edges", "starts", "starts and lengths"])
    def test_is_what_inspect_suggests(self, tmp_path, beside, ids):
        path = put(tmp_path / "all.h5", ids=ids and IDS, **BESIDE[beside])

        source = suggested(path)[0]

        assert (source.data, source.ids) == ("feats", ids)
        assert_same(dict(zip(IDS, streamed(source).values(), strict=True)), ARRAYS)

    def test_and_its_fields_are_suggested_side_by_side(self, tmp_path):
        path = put(tmp_path / "all.h5", lengths=LENGTHS, labels=np.arange(28))

        feats, labels, fields = suggested(path)

        assert (feats.data, labels.data, list(fields)) == ("feats", "labels", ["feats", "labels"])
        with Feed(fields, shuffle=False) as feed:
            assert [int(frame["labels"]) for _, _, frame in feed] == list(range(28))


def test_a_catalog_of_slices_has_no_python_object_per_utterance(tmp_path):
    num = 20_000
    path = put(tmp_path / "all.h5", np.zeros((num, 1), "f4"), ids=None, lengths=np.ones(num, "i4"))

    catalog = open_library(Source(path, data="feats", lengths="lengths")).corpus.catalogs[0]

    assert catalog.start.tolist() == list(range(num))
    assert np.all(np.diff(catalog.offset) == 4)


# -- spans, by themselves -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.sampled_from(["lengths", "edges", "starts", "ends", "both"]),
)
def test_spans_are_found_whichever_way_they_are_told(lengths, way):
    lengths = np.array(lengths)
    ends, total = np.cumsum(lengths), int(lengths.sum())
    told = {
        "lengths": {"lengths": lengths},
        "edges": {"offsets": np.append(0, ends)},
        "starts": {"offsets": ends - lengths},
        "ends": {"offsets": ends},
        "both": {"lengths": lengths, "offsets": ends - lengths},
    }[way]

    empty = {"starts": lengths[-1] == 0, "ends": lengths[0] == 0}.get(way, False)
    if empty and total and told["offsets"][0] == 0 and told["offsets"][-1] == total:
        with pytest.raises(ValueError, match="begin or where they end"):
            spans(total, num_utts=lengths.size, **told)
    else:
        starts, found = spans(total, num_utts=lengths.size, **told)
        assert found.tolist() == lengths.tolist()
        assert starts.tolist() == (ends - lengths).tolist()


# -- suggestions, by themselves -------------------------------------------------------------------------------------------


def frames(*paths, shape=(9, 80), dtype="float32"):
    return [Dataset(path, shape, dtype) for path in paths]


def lines(found):
    return [each.line for each in found]


def test_speakers_with_the_same_names_may_be_utterances_or_items():
    """Ambiguous: all alike, so that names with numbers decide what comes first."""
    numbered = frames(*(f"{spk}/{utt:04d}" for spk in ("anna", "bert", "cleo") for utt in range(4)))
    named = frames(*(f"{spk}/{name}" for spk in ("anna", "bert", "cleo") for name in ("mel", "mfcc")))

    assert lines(suggest("f.h5", numbered))[:2] == ["Source('f.h5')", "Source('f.h5', key='{utt}/0000')"]
    assert lines(suggest("f.h5", named))[0] == "Source('f.h5', key='{utt}/mel')"
    assert "Source('f.h5')" in lines(suggest("f.h5", named))


def test_code_may_be_written_over_several_lines():
    fields = suggest("some/where/f.h5", frames(*(f"{utt}/{name}" for utt in "abc" for name in ("mel", "f0"))))[2]

    for width in (1, 30, 50, 1000):
        assert eval(fields.code(width)) == eval(fields.line)
    assert max(map(len, fields.code(50).splitlines())) <= 50


def test_nothing_is_suggested_where_there_is_nothing():
    assert suggest("f.h5", []) == []
    assert suggest("f.h5", [Dataset("names", (3,), "text"), Dataset("rate", (), "int64")]) == []


def test_small_files_with_the_same_ids_are_fields():
    one = frames(*(f"utt{i}" for i in range(20)))

    (found,) = suggest_for_many("d/*.h5", {"d/mel.h5": one, "d/f0.h5": one})

    assert found.line == "{'mel': Source('d/mel.h5'), 'f0': Source('d/f0.h5')}"


def test_files_with_other_ids_each_are_shards():
    shards = {f"d/{s}.h5": frames(*(f"{s}{i}" for i in range(20))) for s in "ab"}
    items = {f"d/{s}.h5": frames(*(f"{s}{i}/{n}" for i in range(9) for n in ("mel", "f0"))) for s in "ab"}
    array = [*frames("feats"), Dataset("lengths", (2,), "int64", np.array([4, 5]))]

    assert lines(suggest_for_many("d/*.h5", shards)) == ["Source('d/*.h5')"]
    assert lines(suggest_for_many("d/*.h5", items))[0] == "Source('d/*.h5', key='{utt}/mel')"
    assert lines(suggest_for_many("d/*.h5", {"d/a.h5": array, "d/b.h5": array}))[0] == (
        "Source('d/*.h5', data='feats', lengths='lengths')"
    )


def test_numbers_that_happen_to_ascend_divide_nothing():
    """A label per frame is no offset, nor is one per utterance."""
    datasets = [*frames("feats"), Dataset("label", (9,), "int64", np.arange(9))]

    assert all("data=" not in line for line in lines(suggest("f.h5", datasets)))


@pytest.mark.parametrize("write", [*FLAT, hloc, robomimic, tts, espnet_sound])
def test_whatever_is_suggested_streams(tmp_path, write):
    write(path := tmp_path / "any.h5")

    sources = suggested(path)

    assert sources
    for source in sources:
        with Feed(source) as feed:
            assert feed.num_utterances > 0
            assert sum(1 for _ in feed.utterances()) == feed.num_utterances


def run(*arguments: str) -> int:
    return app.run(arguments)


@pytest.mark.parametrize("columns", ["40", "400"])
def test_inspect_prints_what_can_be_copied(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    path = put(tmp_path / ("a-long-name-" * 10 + ".h5"), lengths=LENGTHS)

    assert run("inspect", str(path)) == 0

    code = capsys.readouterr().out.partition("Streams as")[2].partition("one array")[0]
    assert len(code.strip().splitlines()) == (6 if columns == "40" else 1)
    assert_same(streamed(eval(code.strip())), ARRAYS)


def test_inspect_shows_what_small_files_hold_instead_of_refusing_them(dump, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    directory, _, _ = dump

    assert run("inspect", str(directory / "dump.0")) == 0

    out = capsys.readouterr().out
    assert "utterances" in out
    assert "27" in out
    assert f"Source('{directory}/dump.0/*.h5', key='feats')" in out


def test_a_directory_without_hdf5_files_is_an_error(tmp_path, capsys):
    assert run("inspect", str(tmp_path)) == 1

    assert "directory without HDF5 files" in capsys.readouterr().err


def test_an_index_beside_the_file_is_used_for_its_own_layout_only(tmp_path):
    path = put(tmp_path / "all.h5", lengths=LENGTHS)
    source = Source(path, data="feats", lengths="lengths", ids="ids")
    streamed(source)

    assert in_cache(str(path), "feats\0\0feats\0lengths\0\0ids").exists()
    assert len(streamed(path, unreadable="skip")) == 2


def test_files_that_only_lie_beside_each_other_are_not_taken_for_one_utterance_each(tmp_path):
    for name in "abc":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[f"{name}1"], file[f"{name}2"] = random(3, 4), random(3)

    assert suggested(tmp_path / "a.h5") == [Source(str(tmp_path / "a.h5"))]
