"""Whole processes: how they end, how they fork, and what they send each other."""

from __future__ import annotations

import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import asyncfeed

NUM, LENGTH, DIM = 60, 50, 16
PARTITION = 4096
"""One of the utterances below fits, two do not."""

PATIENT = 50.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same utterances twice: read directly, and through HDF5. Every value in them is unique."""
    values = np.arange(NUM * LENGTH * DIM, dtype="f4").reshape(NUM, LENGTH, DIM)
    paths = {}
    for name, options in {"direct": {}, "gzip": {"compression": "gzip"}}.items():
        paths[name] = tmp_path_factory.mktemp("files") / f"{name}.h5"
        with h5py.File(paths[name], "w") as file:
            for i, array in enumerate(values):
                file.create_dataset(f"utt{i:03d}", data=array, **options)
    return paths


BEGIN = f"""
import asyncio, atexit, gc, os, pickle, signal, sys, threading
import h5py, numpy as np
import asyncfeed
from asyncfeed.engine import prefetch, session
from asyncfeed.storage import direct

path = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit that it is ignored

def small(prefetch=1, **options):
    return asyncfeed.Feed(path, memory_budget={PARTITION} * (prefetch + 1), prefetch=prefetch, **options)

def expected():
    with h5py.File(path) as file:
        return {{utt: file[utt][:] for utt in file}}

def right(triplets, corpus):
    got = [(utt, index, frame.copy()) for utt, index, frame in triplets]
    keys = sorted((utt, index) for utt, index, _ in got)
    assert keys == [(utt, index) for utt, array in corpus.items() for index in range(len(array))]
    assert all(np.array_equal(frame, corpus[utt][index]) for utt, index, frame in got)
    return True
"""


def start(code: str, *args: object) -> subprocess.Popen[str]:
    """Start a script; its lines come after `BEGIN`."""
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, output and error output."""
    try:
        out, err = process.communicate(timeout=PATIENT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"it hung; output {out!r}, error output {err!r}")
    return process.returncode, out, err


def run(code: str, *args: object) -> tuple[int, str, str]:
    return finish(start(code, *args))


# -- ending without closing --------------------------------------------------------------------------------------------

ENDS = {"the end": ("", 0), "an exception": ("raise ValueError('mine')", 1), "sys.exit": ("sys.exit(3)", 3)}

LOOPS = {
    "plain": """
        iterator = iter(feed)
        next(iterator)
        {end}
        """,
    "asyncio": """
        async def main():
            global iterator
            iterator = aiter(feed)
            await anext(iterator)
            {end}
        asyncio.run(main())
        """,
    "trio": """
        async def main():
            async for _ in feed:
                {end}
                break
        import trio; trio.run(main)
        """,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_forgets_to_close_ends_as_it_wants(files, loop, end):
    statement, code = ENDS[end]
    script = "feed = small()\n" + textwrap.dedent(LOOPS[loop].format(end=statement))

    processes = [start(script, path) for path in files.values()]
    results = [finish(process) for process in processes]

    for returned, out, err in results:
        assert returned == code
        assert out == ""
        if end == "an exception":
            assert err.startswith("Traceback")
            assert err.endswith("ValueError: mine\n")
            assert err.count("Traceback") == 1
        else:
            assert err == ""


@pytest.mark.parametrize("access", ["direct", "gzip"])
def test_a_program_ends_in_the_middle_of_reading(files, access):
    code = """
    feed = asyncfeed.Feed(path, memory_budget="64m", prefetch=3)
    iterator = iter(feed.open().utterances())
    def consume():
        try:
            next(iterator)
        except asyncfeed.ClosedError:  # the program ends
            pass
    threading.Thread(target=consume, daemon=True).start()
    """
    for _ in range(2):
        assert run(code, files[access]) == (0, "", "")


def test_a_stuck_read_does_not_keep_the_program_from_ending(files):
    code = """
    feed = small().open()
    direct._preadv = lambda *args: threading.Event().wait()
    prefetch.PATIENCE_AT_EXIT = 0.1
    iterator = iter(feed)
    def consume():
        try:
            next(iterator)
        except asyncfeed.ClosedError:  # the program ends
            pass
    threading.Thread(target=consume, daemon=True).start()
    """
    assert run(code, files["direct"]) == (0, "", "")


@pytest.mark.parametrize("access", ["direct", "gzip"])
def test_a_feed_used_in_an_exit_handler_works_or_says_why_not(files, access):
    code = """
    def late():
        try:
            feed = small()
            print(next(iter(feed))[2].shape, sum(1 for _ in feed))
            kept.append(iter(feed))
            next(kept[0])
        except asyncfeed.ClosedError as error:
            print(error)
    kept = []
    atexit.register(late)
    """
    returned, out, err = run(code, files[access])

    assert (returned, err) == (0, "")
    assert out == f"({DIM},) {NUM * LENGTH}\n" or out.startswith("no reader thread can be started")


@pytest.mark.parametrize("access", ["direct", "gzip"])
def test_a_feed_used_while_the_interpreter_goes_away_does_not_hang(files, access):
    code = """
    class Last:
        def __init__(self):
            self.feed, self.kept, self.error, self.out = small().open(), [], asyncfeed.AsyncFeedError, sys.stdout
        def __del__(self):
            try:
                self.kept.append(iter(self.feed))
                next(self.kept[0])
                self.out.write("worked\\n")
            except self.error:
                self.out.write("refused\\n")
            self.out.flush()
    sys.modules["last"] = last = Last()
    """
    returned, out, err = run(code, files[access])

    assert returned == 0
    assert err == ""
    assert out in ("worked\n", "refused\n")


# -- signals -----------------------------------------------------------------------------------------------------------

INTERRUPTED = {
    "plain": """
        for item in feed:
            ready()
        """,
    "asyncio": """
        async def main():
            async with feed:
                async for item in feed:
                    ready()
        asyncio.run(main())
        """,
    "trio": """
        async def main():
            async with feed:
                async for item in feed:
                    ready()
        import trio; trio.run(main)
        """,
}


@pytest.mark.parametrize("loop", INTERRUPTED)
@pytest.mark.parametrize("when", ["waiting", "iterating"])
def test_ctrl_c_ends_the_program(files, loop, when):
    slow = """
        prefetch.PATIENCE = prefetch.PATIENCE_AT_EXIT = 0.1
        def stuck(*args):
            print("ready", flush=True)
            threading.Event().wait()
        feed = small().open()
        if sys.argv[2] == "waiting":
            direct._preadv = stuck
        said = []
        def ready():
            if not said:
                said.append(print("ready", flush=True))
            threading.Event().wait(0.001)  # a step of training
        """
    body = textwrap.dedent(INTERRUPTED[loop])
    if when == "iterating":
        body = body.replace("for item in feed", "for item in endless_of(feed)")
        slow += """
        class endless_of:
            def __init__(self, feed):
                self.feed = feed
            def __iter__(self):
                while True:
                    yield from self.feed
            async def __aiter__(self):
                while True:
                    async for item in self.feed:
                        yield item
        """
    process = start(textwrap.dedent(slow) + body, files["direct"], when)
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.SIGINT)
    returned, _out, err = finish(process)

    assert returned == -signal.SIGINT
    assert err.startswith("Traceback")
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_killed_processes_leave_nothing_and_do_not_stand_in_the_way(files, segments):
    """Named segments, several processes at once on one file, half of them killed; then again."""
    before = segments()
    code = """
    session.pick_maker = lambda: "named"
    feed = small()
    iterator = iter(feed)
    next(iterator)
    print("ready", flush=True)
    sys.stdin.readline()
    assert sum(1 for _ in iterator) + 1 == len(feed)
    """
    for _round in range(2):
        processes = [start(code, files["direct"]) for _ in range(4)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes[::2]:
            process.kill()
        results = [finish(process)[::2] for process in processes]

        assert results == [(-signal.SIGKILL, ""), (0, "")] * 2
        assert segments() == before


# -- fork --------------------------------------------------------------------------------------------------------------

FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forking beside threads, which is the point

def child(function):
    "Run a function in a forked child; whether it returned true in time."
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        code = 1
        try:
            code = 0 if function() else 2
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0

def refused(function):
    try:
        function()
    except asyncfeed.ForkError as error:
        return "made in process" in str(error)
    return False
"""


@pytest.mark.parametrize("access", ["direct", "gzip"])
def test_a_child_forked_beside_a_running_feed_reads_for_itself(files, access):
    code = FORK + textwrap.dedent("""
    corpus = expected()
    feed = small(prefetch=2)
    def work():
        with h5py.File(path) as file:
            assert np.array_equal(file["utt003"][:], corpus["utt003"])
        return right(small(), corpus)
    got, forks = [], 0
    for utt, index, frame in feed:
        got.append((utt, index, frame.copy()))
        if len(got) % 400 == 1:
            assert child(work)
            forks += 1
    print(right(got, corpus), forks)
    """)
    assert run(code, files[access]) == (0, "True 8\n", "")


def test_an_inherited_feed_and_its_iterators_refuse_and_the_parent_goes_on(files):
    code = FORK + textwrap.dedent("""
    corpus = expected()
    feed = small(prefetch=2)
    iterator = iter(feed)
    got = [next(iterator)]
    got[0] = (*got[0][:2], got[0][2].copy())
    def touch():
        async def step(iterator):
            return await anext(iterator)
        uses = [
            lambda: next(iterator), lambda: next(iter(feed)), lambda: len(feed), lambda: feed.plan, lambda: feed.open(),
            lambda: next(iter(feed.batches(3))), lambda: asyncio.run(step(aiter(feed))), lambda: feed.statistics(),
        ]
        outcome = [refused(use) for use in uses]
        iterator.close()
        feed.close()
        asyncio.run(feed.aclose())
        return all(outcome)
    assert child(touch)
    got.extend((u, i, f.copy()) for u, i, f in iterator)
    assert right(got, corpus)

    async def main():
        iterator = aiter(feed)
        got = [await anext(iterator)]
        got[0] = (*got[0][:2], got[0][2].copy())
        def touch():
            async def step():
                return await anext(iterator)
            import trio
            return refused(lambda: trio.run(step))
        assert child(touch)
        async for u, i, f in iterator:
            got.append((u, i, f.copy()))
        return right(got, corpus)
    print(asyncio.run(main()))
    """)
    assert run(code, files["direct"]) == (0, "True\n", "")


def test_a_frame_that_a_child_keeps_is_not_overwritten_by_the_parent(files):
    code = FORK + textwrap.dedent("""
    corpus = expected()
    feed = small(prefetch=2)
    (utt, array), (go, gone) = next(iter(feed.utterances())), os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        os.read(go, 1)
        os._exit(0 if np.array_equal(array, corpus[utt]) else 1)
    del array
    for _ in range(2):
        for _, array in feed.utterances():
            array[:] = -1
    os.write(gone, b"!")
    print(os.waitpid(pid, 0)[1], feed.statistics().segments <= 6)
    """)
    assert run(code, files["direct"]) == (0, "0 True\n", "")


def test_a_child_that_exits_by_itself_does_not_end_the_parents_reader(files):
    code = FORK + textwrap.dedent("""
    corpus = expected()
    feed = small()
    iterator = iter(feed)
    got = [next(iterator)]
    got[0] = (*got[0][:2], got[0][2].copy())
    pid = os.fork()
    if not pid:
        del iterator, feed
        gc.collect()
        sys.exit(5)  # through all exit handlers
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    got.extend((u, i, f.copy()) for u, i, f in iterator)
    print(right(got, corpus))
    """)
    assert run(code, files["direct"]) == (0, "True\n", "")


# -- other processes ---------------------------------------------------------------------------------------------------

WORKERS = """
import multiprocessing, sys, warnings
import asyncfeed

warnings.simplefilter("ignore", DeprecationWarning)

def work(feed):
    with feed:
        return feed.epoch, sum(float(frame.sum()) for _utt, _index, frame in feed)

if __name__ == "__main__":
    feed = asyncfeed.Feed(sys.argv[1], memory_budget=8192)
    iterator = iter(feed)
    total = float(next(iterator)[2].sum())
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        results = pool.map(work, [feed, feed])
        pool.close()
        pool.join()
    total += sum(float(frame.sum()) for _utt, _index, frame in iterator)
    print(results == [(0, total)] * 2)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_of_every_start_method_get_a_feed_by_pickle(files, tmp_path, method):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)

    done = subprocess.run(
        [sys.executable, script, files["direct"], method], check=False, capture_output=True, text=True, timeout=PATIENT
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def small(path: Path, **options: Any) -> asyncfeed.Feed:
    return asyncfeed.Feed(path, memory_budget=2 * PARTITION, **options)


def copied(feed: asyncfeed.Feed) -> list[tuple[str, int, bytes]]:
    return [(utt, index, frame.tobytes()) for utt, index, frame in feed]


def test_pickling_carries_settings_and_epoch_and_leaves_the_original_working(files):
    feed = small(files["direct"], seed=5)
    before = pickle.dumps(feed)
    iterator = iter(feed)
    got = [next(iterator)]
    got = [(*item[:2], item[2].tobytes()) for item in got]
    during = pickle.dumps(feed)
    got += [(utt, index, frame.tobytes()) for utt, index, frame in iterator]
    after = pickle.dumps(feed)
    second = copied(feed)
    feed.close()
    closed = pickle.dumps(feed)

    twins = [pickle.loads(data) for data in (before, during, after, closed)]
    assert [twin.epoch for twin in twins] == [0, 0, 1, 2]
    assert copied(twins[0]) == copied(twins[1]) == got
    assert copied(twins[2]) == second
    assert len(copied(twins[3])) == len(got)
    for twin in twins:
        twin.close()


def test_a_feed_over_a_handle_is_not_pickled_and_goes_on(files):
    with h5py.File(files["direct"]) as file, asyncfeed.Feed(file) as feed:
        iterator = iter(feed)
        next(iterator)

        with pytest.raises(asyncfeed.UsageError, match="path"):
            pickle.dumps(feed)

        assert sum(1 for _ in iterator) == NUM * LENGTH - 1


# -- a small /dev/shm --------------------------------------------------------------------------------------------------


def may_mount() -> str:
    """Why no file system can be mounted here; empty if it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    tried = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"],
        check=False,
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip() and f"mounting is not permitted: {tried.stderr.strip()}"


def test_a_named_segment_larger_than_its_mount_is_an_error_and_not_a_signal(files):
    if reason := may_mount():
        pytest.skip(reason)
    code = """
    from asyncfeed.memory.segment import make_named
    try:
        make_named(8 << 20)
    except asyncfeed.BudgetError as error:
        print(error)
    session.pick_maker = lambda: "named"
    try:
        asyncfeed.Feed(path, memory_budget="8m").open()
    except asyncfeed.BudgetError as error:
        print(error)
    print(sum(1 for _ in asyncfeed.Feed(path, memory_budget="1m")))
    """
    script = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", BEGIN + textwrap.dedent(code)]
    done = subprocess.run([*command, files["direct"]], check=False, capture_output=True, text=True, timeout=PATIENT)

    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].startswith("/dev/shm has 2 MiB free of 2 MiB, but a segment of 8 MiB is wanted; enlarge it")
    assert "free space of /dev/shm" in lines[1]
    assert lines[2] == str(NUM * LENGTH)
