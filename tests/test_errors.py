"""What bad input gets: one tree of errors, each naming the file, the utterance and the remedy, as early as can be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import trio

import asyncfeed
from asyncfeed import (
    ArgumentError,
    AsyncFeedError,
    BudgetError,
    ChangedFileError,
    ClosedError,
    ConsumerError,
    DamagedFileError,
    Feed,
    FieldMismatchError,
    ForkError,
    NotHDF5Error,
    ReadError,
    ShapeError,
    SourceAccessError,
    SourceMissingError,
    StorageError,
    UnreadableDatasetError,
    UsageError,
    errors,
)
from asyncfeed.storage import direct

GOOD = np.arange(24, dtype="f4").reshape(8, 3)


class TestTree:
    ERRORS = tuple(getattr(errors, name) for name in errors.__all__)

    @pytest.mark.parametrize("error", ERRORS)
    def test_has_one_root(self, error):
        assert issubclass(error, AsyncFeedError)
        assert getattr(asyncfeed, error.__name__) is error
        assert error.__doc__

    @pytest.mark.parametrize("error", ERRORS)
    def test_is_drawn_in_the_module(self, error):
        assert error.__name__ in errors.__doc__

    def test_keeps_weather_and_caller_apart(self):
        weather = {error for error in self.ERRORS if issubclass(error, StorageError)}
        caller = {error for error in self.ERRORS if issubclass(error, UsageError)}

        assert not weather & caller
        assert set(self.ERRORS) - weather - caller == {AsyncFeedError, BudgetError}

    @pytest.mark.parametrize(
        ("error", "builtin"),
        [
            (SourceMissingError, FileNotFoundError),
            (SourceAccessError, PermissionError),
            (BudgetError, MemoryError),
            (ArgumentError, ValueError),
            (ShapeError, ValueError),
        ],
    )
    def test_fits_the_builtin_one_that_means_the_same(self, error, builtin):
        assert issubclass(error, builtin)
        assert str(error("a sentence")) == "a sentence"


def opening(path, **options):
    """What opening a feed raises: the file is never read, and no frame was handed out."""
    with pytest.raises(AsyncFeedError) as caught:
        Feed(path, **options).open()
    return caught.value


class TestFiles:
    def test_that_are_missing(self, tmp_path):
        error = opening(tmp_path / "nothing.h5")

        assert type(error) is SourceMissingError
        assert str(tmp_path / "nothing.h5") in str(error)
        assert os.getcwd() in str(error)

    def test_that_vanish_while_they_are_being_opened(self, tmp_path):
        """A dangling symbolic link exists for some and not for others."""
        link = tmp_path / "link.h5"
        link.symlink_to(tmp_path / "gone.h5")

        error = opening(link)

        assert type(error) is SourceMissingError
        assert str(link) in str(error)

    def test_that_are_directories(self, tmp_path):
        error = opening(tmp_path)

        assert type(error) is NotHDF5Error
        assert "is a directory" in str(error)
        assert f"{tmp_path}/*.h5" in str(error)

    @pytest.mark.parametrize(
        "content", [b"", b"RIFF....WAVEfmt ", b"\x89HDF", b"x" * 100_000], ids=["empty", "wav", "cut", "long"]
    )
    def test_that_are_not_hdf5(self, tmp_path, content):
        path = tmp_path / "speech.h5"
        path.write_bytes(content)

        error = opening(path)

        assert type(error) is NotHDF5Error
        assert str(path) in str(error)
        assert ("is empty" if not content else "is not an HDF5 file") in str(error)
        assert isinstance(error.__cause__, OSError)

    @pytest.mark.parametrize("share", [0.02, 0.3, 0.67, 0.99])
    def test_that_are_truncated(self, path, share):
        os.truncate(path, int(path.stat().st_size * share))

        error = opening(path)

        assert type(error) is DamagedFileError
        assert str(path) in str(error)
        assert "copy or make it again" in str(error)
        assert isinstance(error.__cause__, OSError)

    def test_that_may_not_be_read(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "secret.h5")
            with h5py.File(path, "w") as file:
                file["a"] = GOOD
            path.chmod(0)
            os.chmod(folder, 0o755)

            with not_root():
                error = opening(path)

        assert type(error) is SourceAccessError
        assert str(path) in str(error)
        assert "permissions" in str(error)
        assert isinstance(error.__cause__, PermissionError)

    def test_that_no_pattern_matches(self, tmp_path):
        error = opening(str(tmp_path / "shard-*.h5"))

        assert type(error) is SourceMissingError
        assert "shard-*.h5" in str(error)

    def test_that_are_all_bad_cannot_be_skipped(self, tmp_path):
        paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
        for path in paths:
            path.write_bytes(b"nothing of use")

        assert isinstance(opening(paths, unreadable="skip"), StorageError)
        assert type(opening(paths[0], unreadable="skip")) is NotHDF5Error

    def test_bad_ones_fail_before_any_thread_or_segment_is_made(self, path, make):
        os.truncate(path, 2000)
        threads = threading.active_count()

        for start in (lambda feed: next(iter(feed)), len, lambda feed: asyncio.run(anext_of(feed)), Feed.open):
            with pytest.raises(DamagedFileError):
                start(Feed([make({"x": GOOD}), path]))

        assert threading.active_count() == threads

    def test_bad_ones_fail_alike_on_every_loop(self, tmp_path):
        async def open_it():
            async with Feed(tmp_path / "nothing.h5"):
                pass

        with pytest.raises(SourceMissingError, match=r"nothing\.h5"):
            asyncio.run(open_it())
        with pytest.raises(SourceMissingError, match=r"nothing\.h5"):
            trio.run(open_it)


async def anext_of(feed):
    return await anext(aiter(feed))


@contextlib.contextmanager
def not_root():
    """Root may read everything, so be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


class TestDatasets:
    def test_that_cannot_be_streamed_are_all_named_at_once(self, tmp_path):
        path = tmp_path / "odd.h5"
        with h5py.File(path, "w") as file:
            file["good"], file["scalar"], file["null"] = GOOD, 1.0, h5py.Empty("f4")
            file["text"] = ["a", "b"]

        error = opening(path)

        assert type(error) is UnreadableDatasetError
        assert str(error).startswith("3 of the datasets cannot be streamed; pass unreadable='skip'")
        for utt in ("scalar", "null", "text"):
            assert re.search(rf"'{utt}' in {re.escape(str(path))}: it.*; .*excludes=", str(error))

    def test_are_counted_where_naming_all_would_be_too_much(self, tmp_path):
        path = tmp_path / "odd.h5"
        with h5py.File(path, "w") as file:
            for i in range(30):
                file[f"u{i:02d}"] = float(i)

        error = opening(path)

        assert "30 of the datasets" in str(error)
        assert len(str(error).splitlines()) < 10
        assert re.search(r"and \d+ more", str(error))

    def test_are_listed_when_they_are_skipped(self, tmp_path):
        path = tmp_path / "odd.h5"
        with h5py.File(path, "w") as file:
            file["good"], file["scalar"] = GOOD, 1.0

        for _ in range(2):  # an index must not forget them
            with Feed(path, unreadable="skip") as feed:
                (skipped,) = feed.skipped
                assert (skipped.utt, skipped.path, skipped.harmless) == ("scalar", str(path), False)
                assert "scalar" in skipped.reason
                assert "excludes=" in skipped.remedy
            assert type(opening(path)) is UnreadableDatasetError


class TestFields:
    def test_that_lack_an_utterance(self, make):
        source = {
            "mel": make({"u": GOOD, "v": GOOD}, name="mel.h5"),
            "pitch": make({"u": GOOD[:, 0]}, name="pitch.h5"),
        }

        error = opening(source)

        assert type(error) is FieldMismatchError
        assert "'v'" in str(error)
        assert "mel.h5" in str(error)
        assert "unreadable='skip'" in str(error)
        with Feed(source, unreadable="skip") as feed:
            assert [utt for utt, _ in feed.utterances()] == ["u"]
            assert [each.utt for each in feed.skipped] == ["v"]

    def test_that_differ_in_length(self, make):
        source = {"a": make({"u": GOOD, "v": GOOD}, name="a.h5"), "b": make({"u": GOOD, "v": GOOD[:5]}, name="b.h5")}

        with Feed(source) as feed:
            for start in (lambda: len(feed), lambda: next(iter(feed)), lambda: next(iter(feed.batches(2)))):
                with pytest.raises(
                    FieldMismatchError, match=r"'v' has 8 frames in field 'a' but 5 in field 'b'.*excludes="
                ):
                    start()
        with Feed(source, excludes=["v"]) as feed:
            assert len(list(feed)) == 8

    def test_frames_that_do_not_fit_one_batch(self, make):
        path = make({"a": GOOD, "b": GOOD[:, :2]})

        with Feed(path, shuffle=False) as feed, pytest.raises(ShapeError, match=r"'b'.*'a'.*excludes="):
            next(iter(feed.batches(2)))


class TestBudgets:
    @pytest.mark.parametrize("budget", [0, "0", "0%", -1, "lots", "", "12 parsecs", "101%"])
    def test_without_meaning(self, path, budget):
        with pytest.raises((ArgumentError, BudgetError), match=re.escape(repr(budget))):
            Feed(path, memory_budget=budget).open()

    @pytest.mark.parametrize("budget", [1.5, None, b"1g"])
    def test_of_another_type(self, path, budget):
        with pytest.raises(ArgumentError, match=re.escape(repr(budget))):
            Feed(path, memory_budget=budget).open()

    def test_larger_than_the_machine(self, path):
        error = opening(path, memory_budget="900t")

        assert type(error) is BudgetError
        assert "900" in str(error)
        assert "ask for less" in str(error)

    def test_smaller_than_a_page_per_partition(self, path):
        error = opening(path, memory_budget=5000)

        assert type(error) is BudgetError
        assert "8192" in str(error)

    def test_too_small_for_an_utterance_name_it_and_the_cure(self, make):
        path = make({"small": GOOD, "large": np.ones((4000, 3), "f4")})

        with Feed(path, memory_budget="32k") as feed, pytest.raises(BudgetError, match="'large' takes") as caught:
            next(iter(feed.utterances()))

        assert re.search(r"the smallest sufficient budget is memory_budget=\d+", str(caught.value))


class TestMidEpoch:
    """An error comes at its turn: after all good frames, and then the end."""

    @pytest.fixture
    def damaged(self, tmp_path):
        """Fifty utterances, of which the checksum of number 40 is wrong."""
        path = tmp_path / "damaged.h5"
        with h5py.File(path, "w") as file:
            for i in range(50):
                file.create_dataset(f"u{i:02d}", data=np.full((100, 8), i, "f4"), chunks=(100, 8), fletcher32=True)
            place = file["u40"].id.get_chunk_info(0).byte_offset
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\xff")  # Fletcher's sums are taken modulo 65,535, so two of them would count as none
        return path

    @staticmethod
    def by_for(items):
        frames, error, iterator = [], None, iter(items)
        try:
            for item in iterator:
                frames.append(item[0])
                del item  # the traceback of the error would keep it
        except ReadError as caught:
            error = caught
        return frames, error, list(iterator)

    @staticmethod
    async def by_async_for(items):
        frames, error, iterator = [], None, aiter(items)
        try:
            async for item in iterator:
                frames.append(item[0])
                del item  # the traceback of the error would keep it
        except ReadError as caught:
            error = caught
        return frames, error, [item async for item in iterator]

    @pytest.mark.parametrize("how", ["for", "asyncio", "trio"])
    def test_all_frames_of_earlier_partitions_arrive_first(self, damaged, how):
        def run(items):
            if how == "for":
                return self.by_for(items)
            return asyncio.run(self.by_async_for(items)) if how == "asyncio" else trio.run(self.by_async_for, items)

        with Feed(damaged, shuffle=False, memory_budget="32k") as feed:
            bad = next(p.number for p in feed.plan if 40 in p.utts)
            good = sum(int(p.lengths.sum()) for p in feed.plan if p.number < bad)
            for _ in range(2):
                frames, error, afterwards = run(feed)
                assert frames == [f"u{i // 100:02d}" for i in range(good)]
                assert afterwards == []
                assert "'u40'" in str(error)
                assert str(damaged) in str(error)
                assert isinstance(error.__cause__, OSError)

    def test_other_utterances_can_still_be_had(self, damaged):
        with Feed(damaged, excludes=["u40"]) as feed:
            assert sum(1 for _ in feed) == len(feed) == 4900

    def test_a_file_that_shrinks_is_named(self, path):
        with Feed(path) as feed:
            os.truncate(path, 3000)

            with pytest.raises(StorageError, match=re.escape(str(path))) as caught:
                list(feed)

        assert isinstance(caught.value, ChangedFileError | DamagedFileError)

    def test_a_file_that_goes_away_is_named(self, path):
        with Feed(path) as feed:
            path.unlink()

            with pytest.raises(SourceMissingError, match=re.escape(str(path))):
                list(feed)


class TestMisuse:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"includes": "utt1"}, r"includes='utt1' is one string.*\['utt1'\]"),
            ({"excludes": b"utt1"}, "excludes=b'utt1' is one string"),
            ({"prefetch": 0}, "prefetch=0"),
            ({"prefetch": 1.5}, "prefetch=1.5"),
            ({"seed": -1}, "seed=-1"),
            ({"seed": None}, "seed=None"),
            ({"shuffle": "yes"}, "shuffle='yes'"),
            ({"rank": 2, "world_size": 2}, "rank=2 is not below world_size=2"),
            ({"rank": 0}, "give both"),
            ({"world_size": 2}, "give both"),
            ({"rank": -1, "world_size": 2}, "rank=-1"),
            ({"unreadable": "ignore"}, "unreadable='ignore' must be one of 'raise', 'skip'"),
            ({"index": "on"}, "index='on' must be one of 'auto', 'off'"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_of_arguments_is_found_at_once(self, tmp_path, options, message):
        """Without looking at any file."""
        with pytest.raises(ArgumentError, match=message):
            Feed(tmp_path / "nothing.h5", **options)

    def test_of_the_environment_is_named(self, path, monkeypatch):
        monkeypatch.setenv("RANK", "first")
        monkeypatch.setenv("WORLD_SIZE", "2")

        with pytest.raises(ArgumentError, match="RANK='first'"):
            Feed(path)

    def test_of_sizes_is_found_before_iterating(self, path):
        with Feed(path) as feed:
            for wrong in (
                lambda: feed.batches(0),
                lambda: feed.windows(0),
                lambda: feed.windows(5, 0),
                lambda: feed.set_epoch(-1),
            ):
                with pytest.raises(ArgumentError):
                    wrong()

    def test_after_close(self, path):
        feed = Feed(path)
        stream = feed.utterances()
        with feed:
            iterator = iter(feed)
            next(iterator)

        for use in (lambda: list(feed), lambda: len(feed), feed.open, lambda: list(stream), lambda: feed.plan):
            with pytest.raises(ClosedError, match="closed"):
                use()
        with pytest.raises(ClosedError, match="closed"):
            list(iterator)
        feed.close()

    def test_by_two_iterations_over_one_feed(self, path):
        with Feed(path, memory_budget="8k") as feed:
            older = iter(feed)
            next(older)
            newer = iter(feed)
            next(newer)

            with pytest.raises(ConsumerError, match="newer iteration"):
                list(older)
            assert sum(1 for _ in newer) == len(feed) - 1

    def test_by_two_tasks_in_one_iterator(self, path, monkeypatch):
        """The second one is refused while the first one waits; the first one is not harmed."""
        refused, read = threading.Event(), direct._preadv
        monkeypatch.setattr(direct, "_preadv", lambda *args: refused.wait(60) and read(*args))

        async def two():
            async with Feed(path) as feed:
                items = aiter(feed)
                first = asyncio.create_task(step(items))
                await asyncio.sleep(0)  # until it waits
                with pytest.raises(ConsumerError):
                    await anext(items)
                refused.set()
                return await first, len([item async for item in items]), len(feed)

        async def step(items):
            return await anext(items)

        first, rest, total = asyncio.run(two())

        assert len(first) == 3
        assert rest == total - 1

    def test_in_a_forked_child(self, path):
        with Feed(path, memory_budget="8k") as feed:
            iterator = iter(feed.utterances())
            next(iterator)
            read, write = os.pipe()
            child = os.fork()
            if not child:
                said = []
                for use in (lambda: next(iterator), lambda: list(feed), lambda: len(feed), feed.open):
                    try:
                        for _ in range(100):
                            use()
                    except StopIteration:
                        said.append("end")
                    except ForkError as error:
                        said.append("fork" if "made in process" in str(error) else str(error))
                    except Exception as error:  # noqa: BLE001 - the parent has to hear of it
                        said.append(repr(error))
                os.write(write, " ".join(said).encode())
                os._exit(0)
            os.close(write)
            os.waitpid(child, 0)

            with open(read) as said:
                assert said.read() == "fork fork fork fork"
            assert sum(1 for _ in iterator) == feed.num_utterances - 1
