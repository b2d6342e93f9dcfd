"""`CachedItem` and processes: sent to them, forked, several that write, and those that are killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfeed import CachedItem, Feed, LockedFileError, ModeError

PATIENT = 50.0


async def fill(where: Path, items: dict[str, Any], **options: Any) -> None:
    """One writing session that ends sealed."""
    async with CachedItem(where, **options) as item:
        for uid, value in items.items():
            await item.put(uid, value)
        await item.to_reader()


async def outcome_of(function: Callable[..., Any], *args: Any) -> Any:
    """What a call gives, or raises."""
    try:
        return await function(*args)
    except Exception as error:  # noqa: BLE001 - an outcome like any other
        return error


def start(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENT)
    finally:
        process.kill()
    return process.returncode, out, err


ITEMS = {f"u{i}": np.full((i + 1, 4), i, "f4") for i in range(20)}


# -- pickle ----------------------------------------------------------------------------------------------------------

WORKERS = """
import asyncio, multiprocessing, sys
import numpy as np
from asyncfeed import CachedItem, Feed

def work(item):
    async def read():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item.get(f"u{i}")) for i in range(20)]
        values = [task.result() for task in tasks] + await item.get_many(item.keys())
        await item.aclose()
        return values
    plain = [item[f"u{i}"] for i in range(20)]
    values = plain + asyncio.run(read())
    return item.mode, all((value == i % 20).all() for i, value in enumerate(values)), len(values)

async def main(where, method):
    async with CachedItem(where, mode="r") as item:
        await item.get("u3")
        with multiprocessing.get_context(method).Pool(2) as pool:
            results = pool.map(work, [item, item])
            pool.close()
            pool.join()
        print(results == [("closed", True, 60)] * 2, item.mode, (await item.get("u4")).sum())

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_reader_is_sent_to_workers_of_every_start_method_and_the_original_stays_open(where, tmp_path, method):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    asyncio.run(fill(where, ITEMS))

    done = subprocess.run(
        [sys.executable, script, where, method], check=False, capture_output=True, text=True, timeout=PATIENT
    )

    assert (done.returncode, done.stdout) == (0, "True reader 80.0\n"), done.stderr
    assert not [line for line in done.stderr.splitlines() if "DeprecationWarning" not in line and "fork()" not in line]


def test_a_copy_of_a_reader_opens_when_it_is_used_and_the_original_is_untouched(run, where):
    async def main():
        await fill(where, ITEMS)
        async with CachedItem(where, mode="r") as item:
            copy = pickle.loads(pickle.dumps(item))
            states = copy.mode, len(copy), (await copy.get("u5")).sum(), (await copy.compute("u6")).sum()
            await copy.aclose()
            return states, copy.mode, item.mode, (await item.get("u5")).sum()

    assert run(main) == (("reader", 20, 120.0, 168.0), "closed", "reader", 120.0)


def test_a_copy_that_was_never_used_closes_without_having_opened(run, where):
    async def main():
        await fill(where, ITEMS)
        async with CachedItem(where, mode="r") as item:
            copy = pickle.loads(pickle.dumps(item))
        where.joinpath("cache.hdf5").unlink()
        await copy.aclose()
        return copy.mode

    assert run(main) == "closed"


def test_a_copy_of_a_reader_is_one_also_within_async_with_and_opened_again(run, where):
    async def main():
        await fill(where, ITEMS)
        async with CachedItem(where) as item:
            await item.to_reader()
            copy = pickle.loads(pickle.dumps(item))
        modes = []
        for _ in range(2):
            async with copy:
                modes.append((copy.mode, len(copy)))
            modes.append(copy.mode)
        return modes

    assert run(main) == [("reader", 20), "closed"] * 2


def test_a_writer_refuses_to_be_pickled_and_says_what_to_do_and_goes_on(run, where):
    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 1.0)
            with pytest.raises(ModeError) as caught:
                pickle.dumps(item)
            await item.put("b", 2.0)
            return str(caught.value), list(item)

    message, held = run(main)

    assert "to_reader()" in message
    assert "writer=" in message
    assert held == ["a", "b"]


async def squares(uid: str, value: float) -> float:
    return value**2


def test_a_closed_item_is_sent_with_its_function_and_settings(run, where):
    item = CachedItem(
        where, squares, ("id", "value"), ("square",), version="v1", mode="w", compression="gzip", check_inputs=True
    )
    copy = pickle.loads(pickle.dumps(item))

    async def main():
        async with copy:
            value = (await copy.compute("a", 3.0)).item()
            again = (await copy.compute("a", 4.0)).item()
            await copy.to_reader()
        return value, again

    assert copy.func is squares
    assert run(main) == (9.0, 16.0)


def test_a_closed_item_whose_function_has_no_name_to_be_found_by_is_sent_without_it(where):
    copy = pickle.loads(pickle.dumps(CachedItem(where, lambda uid: 1.0)))

    assert copy.func is None
    assert copy.mode == "closed"


DECORATED = """
import asyncio, pickle, sys
import numpy as np
from asyncfeed import CachedItem

@CachedItem.cache(sys.argv[1], version="v1", takes=("id", "length"))
def ones(id, length):
    "Ones."
    return np.ones(length)

async def main():
    async with ones:
        value = await ones("a", 3)
        await ones.populate([("b", 4)])
        await ones.to_reader()
        copy = pickle.loads(pickle.dumps(ones))
        print(value.sum(), copy["b"].sum(), ones.__name__, ones.__doc__, ones.func("x", 2).sum())
    closed = pickle.loads(pickle.dumps(ones))
    async with closed:
        print(sorted(closed))

asyncio.run(main())
"""


def test_a_decorated_function_is_a_cache_that_can_be_pickled(where):
    assert finish(start(DECORATED, where)) == (0, "3.0 4.0 ones Ones. 2.0\n['a', 'b']\n", "")


# -- fork ------------------------------------------------------------------------------------------------------------

FORK = """
import asyncio, gc, os, sys, traceback, warnings
import numpy as np
import asyncfeed
from asyncfeed import CachedItem

warnings.simplefilter("ignore", DeprecationWarning)
where = sys.argv[1]

def in_child(function):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def fork(code: str, where: Path) -> tuple[int, str, str]:
    return finish(start(FORK + code, where))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_the_forked_child_of_a_reader_reads_and_so_does_the_parent(where, compression):
    """P1."""
    asyncio.run(fill(where, ITEMS, compression=compression))

    found = fork(
        """
item = CachedItem(where, mode="r")
asyncio.run(item.__aenter__())
asyncio.run(item.get("u3"))
asyncio.run(item.get_many(["u1", "u2"]))

async def read():
    values = [await item.get(f"u{i}") for i in range(20)] + await item.get_many(list(item))
    return float(sum(value.sum() for value in values)), (await item.verify()).ok, await item.refresh()

def child():
    print(asyncio.run(read()), item["u19"].sum())
    asyncio.run(item.aclose())

for _ in range(3):
    in_child(child)
print(asyncio.run(read()), item["u19"].sum())
asyncio.run(item.aclose())
""",
        where,
    )

    total = 2 * sum(float(value.sum()) for value in ITEMS.values())
    assert found == (0, f"({total}, True, False) 1520.0\n" * 4, "")


def test_the_forked_child_of_a_writer_is_refused_and_the_parent_goes_on(where):
    found = fork(
        """
item = CachedItem(where, lambda uid: 1.0)
asyncio.run(item.__aenter__())
asyncio.run(item.put("a", 1.0))

async def outcome_of(call, *args):
    try:
        return await call(*args)
    except asyncfeed.AsyncFeedError as error:
        return type(error).__name__

async def child():
    print([await outcome_of(*call) for call in [
        (item.put, "b", 2.0), (item.compute, "c"), (item.to_reader,), (item.compact,)]], item.mode)
    await item.aclose()

in_child(lambda: asyncio.run(child()))
in_child(lambda: None)
asyncio.run(item.put("d", 3.0))
asyncio.run(item.to_reader())
print(sorted(item), asyncio.run(item.verify()).ok)
asyncio.run(item.aclose())
""",
        where,
    )

    assert found == (0, f"{['ForkError'] * 4} writer\n['a', 'd'] True\n", "")


def test_a_forked_child_does_not_keep_the_lock_when_its_parent_has_ended(where):
    """Q4: a dead writer's lock needs no manual step, though a child of it lives."""
    code = """
reader, writer = os.pipe()
item = CachedItem(where)
asyncio.run(item.__aenter__())
asyncio.run(item.put("a", 1.0))
if not os.fork():
    os.close(writer)
    print("forked", flush=True)  # by the child: until it runs, it has what its parent had
    os.read(reader, 1)
    os._exit(0)
sys.stdin.read()
"""
    process = start(FORK + code, where)
    assert process.stdout is not None
    assert process.stdout.readline() == "forked\n"
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENT)

    async def main():
        async with CachedItem(where) as item:
            return list(item)

    assert asyncio.run(main()) == ["a"]
    finish(process)


# -- being killed ----------------------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
import numpy as np
from asyncfeed import CachedItem

async def main(where, writer):
    async with CachedItem(where, writer=writer) as item:
        for i in range(10**9):
            await item.put(f"{writer}-{i}", np.full(1000, i))
            print(i, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def killed_after(num: int, where: Path, writer: str = "main") -> int:
    """How many items a writer has acknowledged when it was killed."""
    process = start(WRITER, where, writer)
    assert process.stdout is not None
    for _ in range(num):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")
    finish(process)
    return num + sum(line.isdigit() for line in rest[:-1])


def test_every_acknowledged_item_survives_kill_9_and_the_next_writer_goes_on(where):
    """C1, Q4: without a manual step."""
    acknowledged = killed_after(30, where)

    async def main():
        async with CachedItem(where) as item:
            recovered, keys = item.recovered, item.keys()
            values = await item.get_many(keys)
            await item.put("more", 1.0)
            await item.to_reader()
            return recovered, keys, values, "more" in item, (await item.verify()).ok

    recovered, keys, values, more, good = asyncio.run(main())

    assert keys == [f"main-{i}" for i in range(len(keys))]
    assert acknowledged <= len(keys) <= acknowledged + 1
    assert recovered.kept == len(keys)
    assert all((value == i).all() and value.shape == (1000,) for i, value in enumerate(values))
    assert (more, good) == (True, True)


def test_a_torn_end_is_cut_off_and_the_log_says_so(where, caplog):
    acknowledged = killed_after(3, where)
    journal = where / "cache.hdf5.main.journal"
    os.truncate(journal, journal.stat().st_size - 5000)

    async def main():
        async with CachedItem(where) as item:
            return item.recovered, len(item), repr(item.recovered), str(item.recovered)

    recovered, num, _, text = asyncio.run(main())

    assert acknowledged - 1 <= num == recovered.kept <= acknowledged
    assert recovered.dropped_nbytes > 0
    assert "a torn end of" in text
    assert text in caplog.text


def test_a_journal_that_was_left_on_purpose_is_no_reason_for_a_warning(run, where, caplog):
    async def main():
        async with CachedItem(where) as item:
            first = item.recovered
            await item.put("a", 1.0)
        async with CachedItem(where) as item:
            return first, item.recovered.kept, item.recovered.damaged, item.recovered.dropped_nbytes

    assert run(main) == (None, 1, 0, 0)
    assert caplog.text == ""


def test_a_reader_that_opens_after_the_crash_sees_what_was_sealed_before(where):
    async def main():
        await fill(where, {"sealed": 1.0})

    async def after():
        async with CachedItem(where, mode="r") as item:
            return list(item)

    asyncio.run(main())
    killed_after(3, where)

    assert asyncio.run(after()) == ["sealed"]


# -- several processes -----------------------------------------------------------------------------------------------

RANK = """
import asyncio, os, sys
import numpy as np
from asyncfeed import CachedItem

rank = int(os.environ["RANK"])

async def main(where):
    async with CachedItem(where, lambda uid: np.full(100, int(uid[1:]))) as item:
        sys.stdout.write("open\\n"), sys.stdout.flush()
        sys.stdin.readline()
        await item.populate([(f"u{i}",) for i in range(rank, 60, 3)])
        await item.to_reader()

asyncio.run(main(sys.argv[1]))
"""


def test_three_ranks_fill_one_cache_at_the_same_time_and_one_reader_sees_all(where, monkeypatch):
    """Q3."""
    processes = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        processes.append(start(RANK, where))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"

    ends = [process.communicate("go\n", timeout=PATIENT) for process in processes]

    async def main():
        async with CachedItem(where, mode="r") as item:
            return sorted(item, key=lambda uid: int(uid[1:])), [item[f"u{i}"].tolist() for i in range(60)]

    keys, values = asyncio.run(main())
    monkeypatch.delenv("RANK")
    assert ends == [("", "")] * 3
    assert keys == [f"u{i}" for i in range(60)]
    assert values == [[i] * 100 for i in range(60)]
    with Feed(where) as feed:
        assert len(feed) == 6000


def test_a_second_process_of_one_writer_id_is_refused_with_pid_and_host_of_the_first(where):
    process = start(WRITER, where, "main")
    assert process.stdout is not None
    process.stdout.readline()

    error = asyncio.run(outcome_of(CachedItem(where).__aenter__))
    process.kill()
    finish(process)

    assert isinstance(error, LockedFileError)
    assert f"process {process.pid} on {os.uname().nodename}" in str(error)
    assert "writer='rank1'" in str(error)


READER = """
import asyncio, sys
from asyncfeed import CachedItem, Feed

async def main(where):
    async with CachedItem(where, mode="r") as item:
        async with Feed(item) as feed:
            before = sum([float(frame.sum()) async for _, _, frame in feed])
            await item.get("u3")
            print("open", flush=True)
            sys.stdin.readline()
            values = [(await item.get(f"u{i}")).sum() for i in range(20)]
            after = sum([float(frame.sum()) async for _, _, frame in feed])
            print(before == after == sum(values), "new" in item, (await item.get("new")).item())

asyncio.run(main(sys.argv[1]))
"""


def test_a_reader_elsewhere_does_not_stop_a_writer_nor_is_harmed_by_one(where):
    """K3: a notebook that was left open."""
    asyncio.run(fill(where, ITEMS))
    process = start(READER, where)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"

    async def main():
        async with CachedItem(where, mode="r") as item:
            await item.to_writer()
            await item.put("new", 5.0)
            await item.put("u3", np.zeros(2))
            await item.to_reader()

    asyncio.run(main())
    out, err = process.communicate("go\n", timeout=PATIENT)

    assert err == ""
    assert out == "True False 5.0\n"


def test_a_program_that_ends_without_closing_its_cache_ends(where):
    """With work in flight, in each mode."""
    code = """
import asyncio, sys, threading
from asyncfeed import CachedItem

entered = threading.Event()

def slow(uid):
    entered.set()
    threading.Event().wait(0.2)
    return 1.0

async def main(where):
    item = CachedItem(where, slow)
    await item.__aenter__()
    await item.put("a", 1.0)
    other = CachedItem(where, slow, writer="other")
    await other.__aenter__()
    await other.put("b", 1.0)
    await other.to_reader()
    globals().update(item=item, other=other)
    task = asyncio.create_task(item.compute("x"))
    await asyncio.to_thread(entered.wait)

asyncio.run(main(sys.argv[1]))
print("end")
sys.exit(3)
"""
    assert finish(start(code, where)) == (3, "end\n", "")


def test_ctrl_c_ends_a_program_that_populates_and_what_was_done_is_kept(where):
    code = """
import asyncio, signal, sys, threading
from asyncfeed import CachedItem

signal.signal(signal.SIGINT, signal.default_int_handler)

async def func(uid):
    if uid == "5":
        print("now", flush=True)
        await asyncio.sleep(1000)
    return 1.0

async def main(where):
    async with CachedItem(where, func, concurrency=1) as item:
        try:
            await item.populate([(str(i),) for i in range(10)])
        finally:
            print("left", flush=True)

asyncio.run(main(sys.argv[1]))
"""
    process = start(code, where)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)

    returncode, out, err = finish(process)

    async def main():
        async with CachedItem(where) as item:
            return list(item), item.recovered.dropped_nbytes

    assert out == "left\n"
    assert err.endswith("KeyboardInterrupt\n")
    assert returncode in (-signal.SIGINT, 130, 1)
    assert asyncio.run(main()) == ([*"01234"], 0)


def test_threads_that_fork_while_others_write_do_not_harm_them(where):
    """L9: a DataLoader starts its workers whenever it likes."""
    code = """
import threading
stop = threading.Event()

def forks():
    for _ in range(20):
        in_child(lambda: None)
    stop.set()

async def main():
    async with CachedItem(where) as item:
        thread = threading.Thread(target=forks)
        thread.start()
        num = 0
        while not stop.is_set():
            await item.put(str(num), np.full(100, num))
            num += 1
        thread.join()
        await item.to_reader()
        found = await item.verify()
        print(len(item) == num == found.checked)

asyncio.run(main())
"""
    assert fork(code, where) == (0, "True\n", "")
