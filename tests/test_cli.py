"""The command line, as people type it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
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
from asyncfeed.cli.bench import HDF5Loops, bench, by_hand
from asyncfeed.cli.contents import WHY, inspect
from asyncfeed.cli.demo import demonstrate
from asyncfeed.cli.epoch import stream, take
from asyncfeed.cli.outline import outline
from asyncfeed.cli.sidecar import write_indexes
from asyncfeed.cli.tables import visible
from asyncfeed.planning.catalog import Access
from asyncfeed.storage import library
from asyncfeed.storage.index import beside, in_cache, load_index
from asyncfeed.storage.source import containers_of

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


def test_what_two_ranks_share_is_not_said_to_be_too_large(ask, make):
    path = make({"a": np.zeros((101, 8), "f4")})

    for rank in range(2):
        _, out, _ = ask("plan", path, "--rank", rank, "--world-size", 2)

        assert f"frames       {50 + rank}" in out
        assert "larger than" not in out


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
    source = asyncfeed.Source(path, "data/{utt}/mel")
    feed = asyncfeed.Feed(source, memory_budget="8k", shuffle=shuffle)

    with feed, by_hand(containers_of(source)) as read:
        loops = HDF5Loops(read, feed)
        whole = dict(loops.utterances())
        triplets = [(utt, index, frame.tolist()) for utt, index, frame in loops.triplets()]
        ours = [(utt, index, frame.tolist()) for utt, index, frame in feed]

    assert whole.keys() == arrays.keys()
    assert all(np.array_equal(whole[utt], arrays[utt]) for utt in arrays)
    assert sorted(triplets) == sorted(ours)
    assert shuffle or triplets == ours


def test_the_batches_that_bench_compares_with_hold_every_frame_once(path, corpus):
    with asyncfeed.Feed(path, memory_budget="16k") as feed, by_hand(containers_of(path)) as read:
        batches = list(HDF5Loops(read, feed).batches())

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


# -- one big array, and one file per utterance -------------------------------------------------------------------------

LENGTHS = [300, 0, 7, 1, 15, 2]
EDGES = np.append(0, np.cumsum(LENGTHS))
IDS = ["utt-b", "utt-a", "ü/tt-c", "d", "e", "-f"]

DIVIDED = {
    "lengths and ids": {"lengths": LENGTHS, "ids": IDS},
    "lengths": {"lengths": LENGTHS},
    "offsets": {"offsets": EDGES},
    "offsets, lengths and ids": {"offsets": EDGES[:-1], "lengths": LENGTHS, "ids": IDS},
}

SAID = {
    "inspect": "min 0, median 4.5, max 300",
    "plan": "utterances 6 frames 325",
    "index": "utterances 6 under feats",
    "stream": "streamed 325 frames",
    "bench": "all 6 utterances",
}
"""What each command says of an array that is divided so."""


@pytest.fixture
def put(tmp_path):
    """Write one big array, of so many features or a waveform, and what lies beside it; give the source."""

    def put(shape=(8,), name="all.h5", **beside):
        data = np.random.default_rng(0).random((sum(LENGTHS), *shape)).astype("f4")
        with h5py.File(tmp_path / name, "w") as file:
            for each, array in {"feats": data, **beside}.items():
                file[each] = array
        return asyncfeed.Source(str(tmp_path / name), data="feats", **{each: each for each in beside})

    return put


@pytest.fixture
def dump(tmp_path):
    """Twenty files of one utterance each, more than have an index of their own, in two directories."""
    arrays = {f"{i:03d}": np.full((i + 1, 8), i, "f4") for i in range(20)}
    for i, (utt, array) in enumerate(arrays.items()):
        path = tmp_path / "dump" / f"part {i % 2}" / f"{utt}.h5"
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            file["feats"], file["wave"] = array, np.zeros(100 * (i + 1), "f4")
    return asyncfeed.Source(f"{tmp_path}/dump/**/{{utt}}.h5", key="feats"), arrays


@pytest.fixture
def scans(monkeypatch):
    """The files that feeds scan from now on, each time they do."""
    paths = []
    for name in ("scan", "scan_slices"):
        real = getattr(library, name)
        monkeypatch.setattr(
            library, name, lambda each, real=real, **options: paths.append(each.path) or real(each, **options)
        )
    return paths


def options(source):
    """How the command line is told what a source says."""
    names = ("data", "lengths", "offsets", "ids") if source.data else ("key",)
    return [word for name in names if (value := getattr(source, name)) for word in (f"--{name}", value)]


def whole(source):
    with asyncfeed.Feed(source, shuffle=False) as feed:
        return {utt: array.copy() for utt, array in feed.utterances()}


def equal(found, wanted):
    return list(found) == list(wanted) and all(np.array_equal(found[utt], wanted[utt]) for utt in wanted)


@pytest.mark.parametrize("shape", [(8,), ()], ids=["features", "waveform"])
@pytest.mark.parametrize("division", DIVIDED)
@pytest.mark.parametrize("command", SAID)
def test_every_command_takes_an_array_apart(ask, put, command, division, shape):
    source = put(shape, **DIVIDED[division])

    code, out, err = ask(command, source.path, *options(source))

    assert (code, err) == (0, "")
    assert SAID[command] in " ".join(out.split())


@pytest.mark.parametrize("command", SAID)
@pytest.mark.parametrize(
    "arguments",
    [
        {"data": "feats"},
        {"data": "feats", "ids": "ids"},
        {"data": "feats", "lengths": "lengths", "key": "{utt}/x"},
        {"lengths": "lengths"},
        {"offsets": "offsets"},
        {"ids": "ids"},
    ],
)
def test_options_that_make_no_sense_together_are_told_as_by_a_source(ask, put, command, arguments):
    path = put(**DIVIDED["lengths and ids"]).path
    with pytest.raises(asyncfeed.ArgumentError) as told:
        asyncfeed.Source(path, **arguments)

    asked = ask(command, path, *(word for name, value in arguments.items() for word in (f"--{name}", value)))

    assert asked == (1, "", f"asyncfeed: {told.value}\n")


@pytest.mark.parametrize("command", SAID)
def test_a_dataset_that_is_not_there_is_answered_with_those_that_are(ask, put, command):
    path = put(lengths=LENGTHS).path

    code, out, err = ask(command, path, "--data", "feats", "--lengths", "length")

    assert (code, out) == (1, "")
    assert one_line(err)
    assert "'length'" in err
    assert "'feats', 'lengths'" in err


@pytest.mark.parametrize("command", ["plan", "index", "stream", "bench"])
def test_lengths_that_do_not_fit_are_refused_with_the_reason(ask, put, command):
    source = put(lengths=LENGTHS[1:])

    code, out, err = ask(command, source.path, *options(source))

    assert (code, out) == (1, "")
    assert one_line(err)
    assert "add up to 25 frames, but the array has 325" in err
    assert not beside(source.path).exists()


@pytest.mark.parametrize("division", DIVIDED)
def test_an_index_of_an_array_is_found_by_a_feed_of_the_same_source(ask, put, scans, own_cache, division):
    source = put(**DIVIDED[division])
    wanted = whole(source)
    in_cache(source.path, containers_of(source)[0].layout).unlink()
    scans.clear()

    code, _, _ = ask("index", source.path, *options(source))

    assert code == 0
    assert equal(whole(source), wanted)
    assert scans == []
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_an_index_of_an_array_does_not_serve_another_division(ask, put, scans):
    source = put(**DIVIDED["offsets, lengths and ids"])
    ask("index", source.path, *options(source))

    whole(asyncfeed.Source(source.path, data="feats", lengths="lengths"))

    assert scans == [source.path]


def test_shards_of_one_array_each_have_an_index_each(ask, put, scans, tmp_path):
    sources = [put(name=f"shard-{letter}.h5", lengths=LENGTHS) for letter in "xy"]
    shards = asyncfeed.Source(f"{tmp_path}/shard-*.h5", data="feats", lengths="lengths")

    code, _, _ = ask("index", shards.path, *options(shards))

    assert code == 0
    assert all(beside(source.path).exists() for source in sources)
    assert list(whole(shards))[::6] == ["shard-x/utt00000000", "shard-y/utt00000000"]
    assert scans == []


def test_an_index_of_a_shard_serves_the_shard_alone_where_the_file_has_ids(ask, put, scans, tmp_path):
    source = put(name="shard-x.h5", **DIVIDED["lengths and ids"])
    ask("index", f"{tmp_path}/shard-*.h5", *options(source))
    scans.clear()

    found = whole(source)

    assert scans == []
    beside(source.path).unlink()
    assert equal(found, whole(source))


@pytest.mark.parametrize("name", ["*", "{utt}"])
def test_an_index_is_none_of_the_files_that_a_glob_matches(ask, path, tmp_path, name):
    everything = f"{tmp_path}/{name}"
    key = "utt00000" if name == "{utt}" else "{utt}"
    before = list(whole(asyncfeed.Source(everything, key)))

    code, _, _ = ask("index", everything, "--key", key)

    assert code == 0
    assert beside(path).exists()
    assert list(whole(asyncfeed.Source(everything, key))) == before


@pytest.mark.parametrize("command", SAID)
@pytest.mark.parametrize("named", ["{utt}.h5", "*.h5"])
def test_every_command_takes_one_file_per_utterance(ask, dump, command, named):
    path = dump[0].path.replace("{utt}.h5", named)

    code, out, err = ask(command, path, "--key", "feats")

    assert (code, err) == (0, "")
    said = {
        "inspect": "utterances 20 frames 210",
        "plan": "utterances 20 frames 210",
        "index": "utterances 1 under feats",
        "stream": "streamed 210 frames",
        "bench": "all 20 utterances",
    }
    assert said[command] in " ".join(out.split())
    assert out.count("wrote") == (20 if command == "index" else 0)


def test_indexes_of_one_file_per_utterance_are_found_by_a_feed(ask, dump, scans):
    source, arrays = dump
    ask("index", source.path, *options(source))

    found = whole(source)

    assert scans == []
    assert equal(dict(sorted(found.items())), arrays)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("division", DIVIDED)
def test_bench_reads_the_slices_of_an_array_by_hand(put, shuffle, division):
    source = put(**DIVIDED[division])
    wanted = whole(source)
    feed = asyncfeed.Feed(source, memory_budget="8k", shuffle=shuffle)

    with feed, by_hand(containers_of(source)) as read:
        loops = HDF5Loops(read, feed)
        arrays = dict(loops.utterances())
        triplets = [(utt, index, frame.tolist()) for utt, index, frame in loops.triplets()]
        ours = [(utt, index, frame.tolist()) for utt, index, frame in feed]
        num_cut = outline(feed).num_cut

    assert num_cut == 1  # the longest, whose parts are slices of a slice
    assert {utt: a.tolist() for utt, a in arrays.items()} == {utt: a.tolist() for utt, a in wanted.items()}
    assert sorted(triplets) == sorted(ours)
    assert shuffle or triplets == ours


def test_bench_opens_a_file_per_utterance_by_hand(dump):
    source, wanted = dump

    with asyncfeed.Feed(source) as feed, by_hand(containers_of(source)) as read:
        arrays = dict(HDF5Loops(read, feed).utterances())

    assert equal(dict(sorted(arrays.items())), wanted)


def test_bench_measures_the_first_utterances_of_an_array(put):
    source = put(**DIVIDED["lengths and ids"])

    result = bench(source, seconds=0, rounds=1)

    assert (result.utterances, result.all_utterances) == (1, 6)
    assert [c.items for c in result.contests] == [1, 300, 300]


def test_bench_wants_one_of_several_arrays_with_something_in_it(ask, put, tmp_path):
    for name in ("shard-x.h5", "shard-y.h5"):
        put((0,), name, lengths=LENGTHS)

    for name, said in (("shard-x.h5", "no frames under data='feats'"), ("shard-*.h5", "2 files")):
        code, _, err = ask("bench", tmp_path / name, "--data", "feats", "--lengths", "lengths")
        assert code == 1
        assert said in err


def command_lines(out):
    return [line.strip() for line in out.splitlines() if line.strip().startswith("asyncfeed stream ")]


@pytest.mark.parametrize("division", DIVIDED)
def test_inspect_says_what_to_type_to_stream_an_array(ask, put, division):
    source = put(name="it's all; of it.h5", **DIVIDED[division])

    _, out, _ = ask("inspect", source.path)

    (line,) = command_lines(out)
    asked = ask(*shlex.split(line)[1:])
    assert asked[0] == 0
    assert SAID["stream"] in " ".join(asked[1].split())


def test_inspect_says_what_to_type_to_stream_a_directory(ask, dump, tmp_path):
    _, out, _ = ask("inspect", tmp_path / "dump")

    feats, wave = (ask(*shlex.split(line)[1:])[1] for line in command_lines(out))
    assert "210 frames" in feats
    assert "21000 frames" in wave.replace(",", "")


def test_inspect_says_nothing_that_cannot_be_typed_or_goes_without_saying(ask, put, path):
    unprintable = put(name="new\nline.h5", lengths=LENGTHS).path

    outs = [ask("inspect", each)[1] for each in (path, unprintable)]

    assert all("Streams as" in out for out in outs)
    assert not any(command_lines(out) for out in outs)


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
