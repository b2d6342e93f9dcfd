"""Whenever a process is killed: nothing that was acknowledged is lost, and nobody has to lift a finger."""

from __future__ import annotations

import itertools
import os
import random
import select
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from asyncfeed.cache import publish
from asyncfeed.cache.settings import checked_settings
from asyncfeed.cache.store import Store
from asyncfeed.storage.generations import Generations


def opened(directory: Path, *, writing: bool = True, compression: Any = None) -> Store:
    settings = checked_settings(
        str(directory),
        takes=("id",),
        provides=("feats",),
        version=1,
        filename="cache.hdf5",
        compression=compression,
        writer="main",
        durability="process",
        on_stale="error",
        locking=True,
    )
    return Store(settings, writing=writing)


def uid_of(number: int) -> str:
    return f"spk{number % 7}/utt{number}"


def value_of(number: int) -> np.ndarray:
    """What is kept as item ``number``: it can be checked without knowing more."""
    return np.random.default_rng(number).random((1 + number % 50, 20), dtype="f4")


Acknowledge = Callable[[int], object]


def put(store: Store, numbers: range, acknowledge: Acknowledge) -> None:
    for number in numbers:
        store.append(uid_of(number), value_of(number))
        acknowledge(number)


def in_child(
    work: Callable[[Acknowledge], object], wait: Callable[[int, int], object] = lambda pid, heard: None
) -> tuple[int, set[int]]:
    """Do something in a forked process; how it ended, and the numbers that it acknowledged.

    ``wait`` is called with its process id, and the end of a pipe that it acknowledges through.
    """
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        ended = 1
        try:
            work(lambda number: os.write(said, struct.pack("<q", number)))
            ended = 0
        finally:
            os._exit(ended)
    os.close(said)
    wait(pid, heard)
    with open(heard, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    return status, {number for (number,) in struct.iter_unpack("<q", told[: len(told) // 8 * 8])}


def check(directory: Path, acknowledged: set[int], *, compression: Any = None) -> None:
    """A new process would open, find all, seal, and leave a cache that every tool can read."""
    store = opened(directory, compression=compression)
    for step in ("writer", "reader"):
        if step == "reader":
            store.seal()
        assert acknowledged <= {int(uid.partition("utt")[2]) for uid in list(store.keys())}
        for number in acknowledged:
            found = store.read(uid_of(number))
            assert np.array_equal(found, value_of(number)), f"item {number} as {step}"
    store.close()
    found_by_others: dict[str, np.ndarray] = {}
    for path in Generations(str(directory)).paths():
        with h5py.File(path) as file:
            for number in acknowledged:
                if uid_of(number) in file:
                    found_by_others[uid_of(number)] = file[uid_of(number)][:]
    assert all(np.array_equal(found_by_others[uid_of(number)], value_of(number)) for number in acknowledged)
    assert not [name for name in os.listdir(directory) if name.endswith((".journal", ".copy", ".scratch"))]


# -- at any moment -------------------------------------------------------------------------------------------------


def write_for_ever(directory: Path, first: int, acknowledge: Acknowledge) -> None:
    """Write, seal, compact now and then, write on."""
    dice = random.Random(first)
    for start in itertools.count(first, 40):
        store = opened(directory)
        put(store, range(start, start + dice.randrange(1, 40)), acknowledge)
        store.seal()
        if dice.random() < 0.5:
            store.compact()
        store.close()


def test_killed_at_random_moments_a_cache_loses_nothing(tmp_path: Path):
    """One cache goes through all of it: what one process left, the next goes on with."""
    dice, acknowledged = random.Random(0), set[int]()

    def kill(pid: int, heard: int) -> None:
        select.select([heard], [], [], 30)  # until it has begun
        time.sleep(dice.uniform(0, 0.15))  # no synchronisation: the moment is the random thing
        os.kill(pid, signal.SIGKILL)

    for run in range(10):
        status, told = in_child(lambda said, run=run: write_for_ever(tmp_path, 100_000 * run, said), kill)
        acknowledged |= told

        assert os.WTERMSIG(status) == signal.SIGKILL
        check(tmp_path, acknowledged)
    assert len(acknowledged) > 100


def write_only(directory: Path, acknowledge: Acknowledge) -> None:
    put(opened(directory), range(10**6), acknowledge)


def test_killed_while_it_writes_a_cache_has_every_acknowledged_item(tmp_path: Path):
    dice = random.Random(1)

    def kill(pid: int, heard: int) -> None:
        select.select([heard], [], [], 30)
        time.sleep(dice.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)

    for run in range(6):
        directory = tmp_path / str(run)
        status, told = in_child(lambda said, directory=directory: write_only(directory, said), kill)

        assert os.WTERMSIG(status) == signal.SIGKILL
        assert told
        check(directory, told)


# -- between any two steps -----------------------------------------------------------------------------------------

STEPS = ("replace", "unlink", "fsync", "ftruncate", "pwrite", "pwritev", "rename")


class Killer:
    """Ends this process just before the n-th call that changes something on disk: just after the one before it."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    def arm(self) -> None:
        for name in STEPS:
            setattr(os, name, self(getattr(os, name)))
        publish.rename_exclusive = self(publish.rename_exclusive)
        publish.save_index = self(publish.save_index)


def prepare_sealing(directory: Path, compression: Any) -> set[int]:
    """One sealed generation, and a journal with more, and other values of what is sealed."""
    store = opened(directory, compression=compression)
    put(store, range(4), lambda number: None)
    store.seal()
    store.close()
    store = opened(directory, compression=compression)
    put(store, range(2, 6), lambda number: None)
    store.close()
    return set(range(6))


def seal_all(directory: Path, compression: Any) -> None:
    opened(directory, compression=compression).seal()


def prepare_merging(directory: Path, compression: Any) -> set[int]:
    """Three generations; the later ones replace some items of the earlier ones."""
    for start in (0, 2, 4):
        store = opened(directory, compression=compression)
        for number in range(start, start + 4):  # until a later generation replaces it, the value is another one
            store.append(uid_of(number), value_of(number + (number - start >= 2 and start < 4)))
        store.seal()
        store.close()
    return set(range(8))


def merge_all(directory: Path, compression: Any) -> None:
    opened(directory, writing=False, compression=compression).compact()


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize(
    ("prepare", "work"), [(prepare_sealing, seal_all), (prepare_merging, merge_all)], ids=["sealing", "merging"]
)
def test_killed_between_any_two_steps_a_cache_loses_nothing(
    tmp_path: Path,
    prepare: Callable[[Path, Any], set[int]],
    work: Callable[[Path, Any], None],
    compression: str | None,
):
    wanted = prepare(tmp_path / "start", compression)
    steps = 0

    for number in itertools.count(1):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "start", directory)

        def die(said: Acknowledge, number: int = number, directory: Path = directory) -> None:
            Killer(number).arm()
            work(directory, compression)

        status, _ = in_child(die)

        check(directory, wanted, compression=compression)
        shutil.rmtree(directory)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        steps += 1
    assert steps > 8
