"""Real files, and nothing left on the floor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import h5py
import hypothesis
import numpy as np
import pytest
import trio

# No deadline: a busy machine is no fault of the code. The budget of time is that of the whole set of tests.
hypothesis.settings.register_profile("asyncfeed", deadline=None, max_examples=30)
hypothesis.settings.load_profile("asyncfeed")

Arrays = Mapping[str, np.ndarray]

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def features(num: int = 20, *, mean: int = 30, dim: int = 8, dtype: str = "f4", seed: int = 0) -> dict[str, np.ndarray]:
    """Random utterances of random lengths, in the order in which h5py lists them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 2 * mean, num)
    return {f"utt{i:05d}": rng.random((n, dim)).astype(dtype) for i, n in enumerate(lengths.tolist())}


def write(path: Path, arrays: Arrays, **options: object) -> Path:
    """Write arrays as the datasets of a file; ``options`` are those of ``create_dataset``."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)
    return path


@pytest.fixture
def corpus() -> dict[str, np.ndarray]:
    """Twenty utterances of eight float32 features."""
    return features()


@pytest.fixture
def path(tmp_path: Path, corpus: dict[str, np.ndarray]) -> Path:
    """A file that holds ``corpus``."""
    return write(tmp_path / "feats.h5", corpus)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Write further files: ``make(arrays)``, ``make(arrays, name="b.h5", compression="gzip")``."""

    def make(arrays: Arrays, name: str = "made.h5", **options: object) -> Path:
        return write(tmp_path / name, arrays, **options)

    return make


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run an async function on one of the event loops; one that hangs is ended, and says where."""

    async def patiently(function: Callable[..., Any], *args: Any) -> Any:
        with anyio.fail_after(60):
            return await function(*args)

    if request.param == "trio":
        return lambda *args: trio.run(patiently, *args)
    return lambda *args: asyncio.run(patiently(*args))


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Where a test has its cache."""
    return tmp_path / "feats"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Indexes go to a directory of the test's own."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return cache


def pytest_collection_finish() -> None:
    """Let garbage collections between tests look at what tests made: all else is many times as much."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def segments() -> Callable[[], list[str]]:
    """Lists the shared memory of ours that has a name."""
    return named_segments


@pytest.fixture
def open_in() -> Callable[[Path], int]:
    """Counts the descriptors of this process that refer to files in a directory."""
    return lambda directory: sum(target.startswith(f"{directory}/") for target in _open_descriptors())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test there are as many threads, descriptors, mappings and shared segments as before."""
    gc.collect()
    before = _held()
    yield
    deadline = time.monotonic() + 5
    while (left := _surplus(before, _held())) and time.monotonic() < deadline:
        gc.collect()  # what only the collector frees
        threading.Event().wait(0.01)  # threads that were told to end, and are about to
    assert not left, f"left behind: {left}"


def named_segments() -> list[str]:
    """Shared memory of ours that has a name. Other programs have theirs in the same place."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith("asyncfeed"))


def _open_descriptors() -> list[str]:
    """What the descriptors of this process refer to. Another thread may close some while they are looked at."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return targets


def _held() -> dict[str, list[str]]:
    passing = ("/proc/", "anon_inode:", "pipe:", "socket:", "/dev/null")
    descriptors = [target for target in _open_descriptors() if not target.startswith(passing)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        # trio keeps threads for ten seconds, in case that there is more to do.
        "threads": [t.name for t in threading.enumerate() if not t.name.startswith("Trio thread")],
        "descriptors": descriptors,
        "mappings": [
            line.split(maxsplit=5)[-1] for line in maps if "asyncfeed" in line and "/site-packages/" not in line
        ],
        "segments": named_segments(),
    }


def _surplus(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, list[str]]:
    surplus = {}
    for kind, names in after.items():
        rest = list(names)
        for name in before[kind]:
            if name in rest:
                rest.remove(name)
        if len(names) > len(before[kind]):
            surplus[kind] = rest
    return surplus
