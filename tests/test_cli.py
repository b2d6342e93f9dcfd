"""The command line, as people type it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest

import asyncfeed
from asyncfeed.cli.app import run
from asyncfeed.cli.bench import HDF5Loops, bench
from asyncfeed.cli.contents import WHY, inspect
from asyncfeed.cli.demo import demonstrate
from asyncfeed.cli.epoch import stream, take
from asyncfeed.cli.outline import outline
from asyncfeed.cli.sidecar import write_indexes
from asyncfeed.cli.tables import visible
from asyncfeed.planning.catalog import Access
from asyncfeed.storage.index import beside, in_cache, load_index

SCRIPT = Path(sys.executable).with_name("asyncfeed")


@pytest.fixture
def ask(capsys, monkeypatch):
    """Type a command line: ``code, out, err = ask("inspect", path)``; terminals are 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")

    def ask(*arguments):
        code = run([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return ask


@pytest.fixture
def odd(tmp_path):
    """A file with something of everything."""
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        file["plain"] = np.ones((10, 4), "f4")
        file["also"] = np.ones((30, 4), "f4")
        file["wide"] = np.ones((5, 9), "f8")
        file.create_dataset("squeezed", data=np.ones((20, 4), "f4"), compression="gzip")
        file["sample_rate"] = 16000
        file["texts/a"], file["texts/b"] = "hello", "[bold]world"
        file["gone"] = h5py.SoftLink("/nowhere")
    return path


def script(*arguments, env=None):
    """Run the installed script."""
    command = [SCRIPT, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | (env or {}), check=False
    )


def features(num):
    """Utterances of 1, 2, 3 ... frames, all frames different."""
    return {f"utt{i:05d}": np.arange(i * 1000, i * 1000 + 8 * (i + 1), dtype="f4").reshape(-1, 8) for i in range(num)}


def one_line(text):
    return re.fullmatch(r"asyncfeed: [^\n]+\n", text) is not None


# -- the installed script ----------------------------------------------------------------------------------------------


def test_the_script_tells_what_it_can_do():
    asked = script()

    assert asked.returncode == 0
    assert all(
        re.search(rf"^\W*{name} +[A-Z]", asked.stdout, re.MULTILINE)
        for name in ("inspect", "plan", "index", "stream", "bench", "demo")
    )


def test_the_script_streams_a_file(path, corpus):
    asked = script("stream", path)

    assert (asked.returncode, asked.stderr) == (0, "")
    assert f"{sum(map(len, corpus.values()))} frames" in asked.stdout
    assert "bottleneck" in asked.stdout or "about even" in asked.stdout


def test_the_script_ends_with_one_line_and_code_1_where_there_is_no_file(tmp_path):
    asked = script("stream", tmp_path / "missing.h5")

    assert (asked.returncode, asked.stdout) == (1, "")
    assert one_line(asked.stderr)
    assert "missing.h5" in asked.stderr


def test_the_script_shows_progress_on_a_terminal(path, corpus):
    ours, theirs = pty.openpty()

    subprocess.run([SCRIPT, "stream", path], stdout=subprocess.DEVNULL, stderr=theirs, timeout=60, check=True)

    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    frames = sum(map(len, corpus.values()))
    assert f"{frames}/{frames}" in shown


def test_ctrl_c_ends_the_script_with_130_and_without_a_traceback(tmp_path):
    path, frames = tmp_path / "long.h5", 50_000_000  # never written, and so a small file; some ten seconds of triplets
    with h5py.File(path, "w") as file:
        file.create_dataset("long", (frames,), "i1")
    ours, theirs = pty.openpty()  # progress is shown on terminals only, and tells us when to press Ctrl-C
    with subprocess.Popen([SCRIPT, "stream", path], stdout=subprocess.DEVNULL, stderr=theirs) as process:
        try:
            os.close(theirs)
            shown = b""
            while f"/{frames}".encode() not in shown:
                shown += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # how Linux tells that the other end of a terminal is closed
                while more := os.read(ours, 4096):
                    shown += more
            code = process.wait(timeout=30)
        finally:
            process.kill()
            os.close(ours)

    assert code == 130
    assert b"Traceback" not in shown


def test_a_reader_that_leaves_early_is_no_reason_to_complain(path):
    with subprocess.Popen([SCRIPT, "inspect", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        complaint = process.stderr.read()

    assert complaint == b""


def test_without_the_extra_the_script_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer here', name='typer')")

    asked = script("demo", env={"PYTHONPATH": str(tmp_path)})

    assert (asked.returncode, asked.stdout) == (1, "")
    assert one_line(asked.stderr)
    assert 'pip install "asyncfeed[cli]"' in asked.stderr


def test_asyncfeed_itself_does_not_need_the_extra():
    code = "import sys, asyncfeed; print(sorted({'typer', 'rich'} & set(sys.modules)))"

    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert asked.stdout == "[]\n"


def test_version(ask):
    assert ask("--version") == (0, "asyncfeed 0.1.0\n", "")


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(tmp_path, path):
    """Files that no command can do anything with."""
    (tmp_path / "text.h5").write_text("not a feature in sight")
    (tmp_path / "empty.h5").touch()
    (tmp_path / "truncated.h5").write_bytes(path.read_bytes()[:4000])
    (tmp_path / "directory.h5").mkdir()
    return tmp_path


@pytest.mark.parametrize("command", ["inspect", "plan", "index", "stream", "bench"])
@pytest.mark.parametrize("name", ["missing.h5", "text.h5", "empty.h5", "truncated.h5", "directory.h5", "none*.h5"])
def test_every_command_refuses_a_bad_file_in_one_line_that_names_it(ask, bad, command, name):
    code, out, err = ask(command, bad / name)

    assert (code, out) == (1, "")
    assert one_line(err)
    assert name in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory-budget", "100"], "8192"),
        (["--memory-budget", "0"], "no memory at all"),
        (["--memory-budget", "999999g"], "may use"),
        (["--memory-budget", "plenty"], "'plenty' is not a size"),
        (["--key", "mel"], "{utt}"),
        (["--prefetch", "0"], "prefetch=0"),
        (["--seed", "x"], "--seed"),
        (["--unreadable", "perhaps"], "--unreadable"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "stream"])
def test_bad_options_are_one_line_too(ask, path, command, arguments, said):
    code, out, err = ask(command, path, *arguments)

    assert (code, out) == (1, "")
    assert one_line(err)
    assert said in err


@pytest.mark.parametrize("arguments", [["frobnicate"], ["stream"], ["index", "a", "b"]])
def test_bad_command_lines_are_one_line_too(ask, arguments):
    code, out, err = ask(*arguments)

    assert (code, out) == (1, "")
    assert one_line(err)


def test_a_budget_that_is_too_small_for_one_frame_is_told_with_the_one_that_suffices(ask, make):
    path = make({"wide": np.zeros((2, 100_000), "f4")})

    code, _, err = ask("plan", path, "--memory-budget", "64k")

    assert code == 1
    sufficient = re.search(r"memory_budget=(\d+)", err)[1]
    assert ask("plan", path, "--memory-budget", sufficient)[0] == 0


def test_of_several_unreadable_datasets_the_line_tells_the_first_and_where_to_see_all(ask, odd):
    code, _, err = ask("stream", odd)

    assert code == 1
    assert one_line(err)
    assert "sample_rate" in err
    assert "inspect" in err


def test_batches_of_frames_that_differ_are_refused_by_name(ask, odd):
    code, _, err = ask("stream", odd, "--batches", "4", "--unreadable", "skip")

    assert code == 1
    assert "'wide'" in err


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_counts_what_is_in_a_file(path, corpus):
    contents = inspect(asyncfeed.Source(path))

    lengths = [len(array) for array in corpus.values()]
    assert contents.total.utterances == len(corpus)
    assert contents.total.frames == sum(lengths)
    assert contents.total.nbytes == sum(array.nbytes for array in corpus.values())
    assert (contents.lengths.least, contents.lengths.most) == (min(lengths), max(lengths))
    assert contents.lengths.median == np.median(lengths)
    assert contents.direct == 1.0


def test_inspect_says_what_is_not_read_directly_and_why(ask, odd):
    code, out, _ = ask("inspect", odd)

    assert code == 0
    assert re.search(r"DIRECT +3 .* directly", out)
    assert re.search(r"FILTERED +1 .* by HDF5: compressed", out)
    assert re.search(r"float32 x 4 +3 +60 ", out)
    assert re.search(r"float64 x 9 +1 +5 ", out)


def test_inspect_lists_what_cannot_be_streamed_with_reason_and_cure(ask, odd):
    _, out, _ = ask("inspect", odd)

    assert "Cannot be streamed: 3" in out
    assert "it is a scalar" in out
    assert "texts/a, texts/b" in out
    assert out.count("cure: ") == 3
    assert "Passed over: 1" in out


def test_inspect_names_only_some_of_many_unless_asked(ask, make):
    path = make({f"scalar{i}": np.float32(i) for i in range(20)})

    assert "scalar19" not in ask("inspect", path)[1]
    assert "scalar19" in ask("inspect", path, "--all")[1]


def test_inspect_is_not_taken_in_by_an_index_that_knows_less(ask, odd, path):
    list(write_indexes(asyncfeed.Source(path)))
    with h5py.File(path, "a") as file:
        file["late"] = 1.0

    _, out, _ = ask("inspect", path)

    assert "late" in out


def test_inspect_looks_where_the_key_says(ask, make):
    path = make({"data/a/mel": np.zeros((3, 4)), "data/b/mel": np.zeros((4, 4)), "data/a/text": np.int64(3)})

    _, out, _ = ask("inspect", path, "--key", "data/{utt}/mel")

    assert re.search(r"utterances +2\b", out)
    assert "Cannot be streamed" not in out


def test_inspect_of_an_empty_file_says_so(ask, make):
    code, out, _ = ask("inspect", make({}))

    assert code == 0
    assert re.search(r"utterances +0\b", out)


def test_inspect_shows_good_and_bad_files_of_a_glob(ask, bad):
    code, out, _ = ask("inspect", bad / "[ft]e*.h5")

    assert code == 0
    assert "text.h5 is not an HDF5 file" in " ".join(out.split())
    assert re.search(r"utterances +20\b", out)


def test_every_way_of_reading_has_an_explanation():
    assert set(WHY) == set(Access)


@pytest.mark.parametrize("name", ["[bold]brackets[/bold]", "esc\x1b[31m", "new\nline", "caf\udce9"])
def test_names_come_out_as_they_are_and_move_no_cursor(ask, make, name):
    path = make({name.encode("utf-8", "surrogateescape"): np.zeros((3, 4), "f4")}, name="plain.h5")

    code, out, _ = ask("plan", path)

    assert code == 0
    assert visible(name) in out
    assert "\x1b" not in out


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_shows_what_a_feed_would_do(ask, path):
    with asyncfeed.Feed(path, memory_budget="16k", seed=3) as feed:
        feed.set_epoch(2)
        expected = feed.plan

    code, out, _ = ask("plan", path, "--memory-budget", "16k", "--seed", "3", "--epoch", "2")

    assert code == 0
    assert f"{len(expected)}, each at most 8 KiB" in out
    assert "shuffled, seed 3" in out
    assert "16 KiB shared: 2 x 8 KiB" in out


def test_streaming_takes_no_more_than_the_promised_peak(path):
    with asyncfeed.Feed(path, memory_budget="16k") as feed:
        promised = outline(feed).peak_nbytes
        done = stream(feed)

    assert 0 < done.statistics.peak_shared_nbytes <= promised


def test_all_ranks_together_plan_every_utterance(path, corpus):
    feeds = [asyncfeed.Feed(path, rank=rank, world_size=3) for rank in range(3)]

    with feeds[0], feeds[1], feeds[2]:
        counts = [outline(feed).plan.num_utterances for feed in feeds]

    assert sum(counts) == len(corpus)


def test_plan_tells_the_rank_and_the_order(ask, path):
    _, out, _ = ask("plan", path, "--rank", "1", "--world-size", "3", "--no-shuffle", "--prefetch", "2")

    assert "1 of 3" in out
    assert "as in the file" in out


def test_a_long_plan_is_shown_in_part(ask, make):
    path = make(features(200))

    _, out, _ = ask("plan", path, "--memory-budget", "8k", "--no-shuffle")

    assert re.search(r"\.\.\. +\d+ more", out)
    assert "utt00000" in out
    assert len(out.splitlines()) < 30


def test_plan_counts_utterances_that_are_cut(ask, make):
    path = make({"long": np.zeros((4000, 8), "f4"), "short": np.zeros((4, 8), "f4")})

    _, out, _ = ask("plan", path, "--memory-budget", "32k")

    assert "1 are cut" in " ".join(out.split())


# -- index -------------------------------------------------------------------------------------------------------------


def test_index_is_written_beside_the_file_and_found_there(ask, path, corpus, own_cache):
    code, out, _ = ask("index", path)

    assert code == 0
    assert path.name + ".asyncfeed" in "".join(out.split())
    assert beside(path).exists()
    assert list(load_index(str(path), "{utt}").ids) == list(corpus)
    with asyncfeed.Feed(path) as feed:
        assert len(feed) == sum(map(len, corpus.values()))
    assert not in_cache(str(path), "{utt}").exists()  # nothing was scanned, so nothing was kept


def test_index_of_a_key_serves_that_key(ask, make):
    path = make({"a/mel": np.zeros((3, 4)), "b/mel": np.zeros((3, 4))})

    code, _, _ = ask("index", path, "--key", "{utt}/mel")

    assert code == 0
    assert list(load_index(str(path), "{utt}/mel").ids) == ["a", "b"]
    assert load_index(str(path), "{utt}") is None


def test_index_takes_every_file_of_a_glob(ask, make, tmp_path):
    paths = [make(features(3), name=f"shard{i}.h5") for i in range(3)]

    code, out, _ = ask("index", tmp_path / "shard*.h5")

    assert code == 0
    assert all(beside(path).exists() for path in paths)
    assert out.count("wrote") == 3


def test_index_does_not_hide_what_cannot_be_streamed(ask, odd):
    code, _, err = ask("index", odd)

    assert code == 1
    assert one_line(err)
    assert not beside(odd).exists()


def test_index_says_when_its_place_is_taken(ask, path):
    beside(path).mkdir()

    code, _, err = ask("index", path)

    assert code == 1
    assert one_line(err)
    assert [p.name for p in path.parent.iterdir() if p.is_file()] == [path.name]  # no temporary file either


# -- stream ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_takes_every_frame_once(path, corpus, shuffle):
    told = []

    with asyncfeed.Feed(path, memory_budget="16k", shuffle=shuffle) as feed:
        done = stream(feed, advance=told.append)

    assert done.items == sum(told) == sum(map(len, corpus.values()))
    assert done.statistics.nbytes == sum(array.nbytes for array in corpus.values())
    assert done.seconds > 0


def test_stream_counts_batches(ask, path, corpus):
    code, out, _ = ask("stream", path, "--batches", "7")

    frames = sum(map(len, corpus.values()))
    assert code == 0
    assert f"{-(-frames // 7)} batches of 7 frames" in out
    assert "verdict" in out


def test_stream_of_nothing_is_nothing(ask, make):
    code, out, _ = ask("stream", make({}))

    assert code == 0
    assert "0 frames" in out


def test_stream_says_when_a_file_breaks_off_midway(ask, make):
    path = make({"a": np.random.default_rng(0).random((500, 8))}, compression="gzip", chunks=(500, 8))
    with h5py.File(path) as file:
        chunk = file["a"].id.get_chunk_info(0)
    with open(path, "r+b") as raw:
        raw.seek(chunk.byte_offset + chunk.size // 2)
        raw.write(b"\0" * 64)

    code, out, err = ask("stream", path)

    assert (code, out) == (1, "")
    assert one_line(err)
    assert "'a'" in err


def test_take_counts_and_keeps_nothing():
    items = iter(range(10))

    assert [take(items, 4), take(items, 4), take(items, 4), take(items, 4)] == [4, 4, 2, 0]


# -- bench -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_what_bench_compares_with_gives_the_same_frames(make, shuffle, mixed):
    arrays = features(12) | ({"zz": np.ones((4, 3), "f8")} if mixed else {})
    path = make({f"data/{utt}/mel": array for utt, array in arrays.items()})
    feed = asyncfeed.Feed(asyncfeed.Source(path, "data/{utt}/mel"), memory_budget="8k", shuffle=shuffle)

    with feed, h5py.File(path) as file:
        loops = HDF5Loops(file, "data/{utt}/mel", feed)
        whole = dict(loops.utterances())
        triplets = [(utt, index, frame.tolist()) for utt, index, frame in loops.triplets()]
        ours = [(utt, index, frame.tolist()) for utt, index, frame in feed]

    assert whole.keys() == arrays.keys()
    assert all(np.array_equal(whole[utt], arrays[utt]) for utt in arrays)
    assert sorted(triplets) == sorted(ours)
    assert shuffle or triplets == ours


def test_the_batches_that_bench_compares_with_hold_every_frame_once(path, corpus):
    with asyncfeed.Feed(path, memory_budget="16k") as feed, h5py.File(path) as file:
        batches = list(HDF5Loops(file, "{utt}", feed).batches())

    frames = [
        (utt, index, row)
        for utts, indices, rows in batches
        for utt, index, row in zip(utts, indices.tolist(), rows, strict=True)
    ]
    assert sorted(f[:2] for f in frames) == [(utt, i) for utt, array in corpus.items() for i in range(len(array))]
    assert all(np.array_equal(row, corpus[utt][index]) for utt, index, row in frames)


def test_bench_measures_three_kinds_of_work_both_ways(path, corpus):
    told = []

    result = bench(asyncfeed.Source(path), rounds=2, report=told.append)

    frames = sum(map(len, corpus.values()))
    assert [(c.work, c.items) for c in result.contests] == [
        ("whole utterances", len(corpus)),
        ("triplets", frames),
        ("batches of 256", frames),
    ]
    assert all(len(c.hdf5_seconds) == len(c.feed_seconds) == 2 and c.ratio > 0 for c in result.contests)
    assert result.nbytes == sum(array.nbytes for array in corpus.values())
    assert "triplets: round 2 of 2" in told


def test_bench_reads_as_much_as_there_is_time_for(path, corpus):
    result = bench(asyncfeed.Source(path), seconds=0, rounds=1)

    assert (result.utterances, result.all_utterances) == (1, len(corpus))
    assert result.contests[0].items == 1


def test_bench_measures_the_whole_file_also_within_a_distributed_run(path, corpus, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")

    result = bench(asyncfeed.Source(path), rounds=1)

    assert result.contests[0].items == len(corpus)


def test_bench_prints_rates_and_ratios(ask, path):
    code, out, _ = ask("bench", path, "--rounds", "1")

    assert code == 0
    assert "plain h5py" in out
    assert len(re.findall(r"\d[.\d]*x\b", out)) == 3


def test_bench_does_the_rest_where_one_kind_of_work_is_impossible(ask, odd):
    code, out, _ = ask("bench", odd, "--rounds", "1", "--unreadable", "skip")

    assert code == 0
    assert "batches of 256: utterance" in out
    assert len(re.findall(r"\d[.\d]*x\b", out)) == 2


def test_bench_wants_one_file_with_something_in_it(ask, make, tmp_path):
    make({"a": np.zeros((0, 4))}, name="shard0.h5")
    make(features(3), name="shard1.h5")

    for name, said in (("shard0.h5", "no frames"), ("shard*.h5", "2 files")):
        code, _, err = ask("bench", tmp_path / name)
        assert code == 1
        assert said in err


# -- demo --------------------------------------------------------------------------------------------------------------


def test_demo_streams_two_different_epochs_of_the_same_frames():
    first, second = demonstrate().epochs

    assert (first.epoch, second.epoch) == (0, 1)
    assert first.frames == first.distinct == second.frames == second.distinct == first.plan.num_frames
    assert first.wrong == second.wrong == 0
    assert len(first.plan) > 2
    assert first.first != second.first


def test_demo_tells_its_story_and_cleans_up(ask, tmp_path, monkeypatch, own_cache):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    code, out, _ = ask("demo")

    assert code == 0
    assert out.count(" yes") == 4
    assert "async for utt, index, frame in feed" in out
    assert list(tmp_path.iterdir()) == []
    assert list(own_cache.iterdir()) == []


@pytest.mark.parametrize("command", [["inspect"], ["plan", "--unreadable", "skip"], ["bench", "--unreadable", "skip"]])
def test_no_line_is_longer_than_80_columns(ask, odd, command):
    _, out, _ = ask(*command, odd)

    assert max(map(len, out.splitlines())) <= 80
