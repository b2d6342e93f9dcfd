"""What orders, resuming and padded batches reach.

python benchmarks/orders.py                  # all rows; about four minutes
python benchmarks/orders.py resume           # rows whose name begins so
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from figures import Figure, arguments_of, feature_file, in_turn, run, seconds

from asyncfeed import Feed
from asyncfeed.planning.catalog import Catalog, FileStamp, Kind
from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.orders import Order
from asyncfeed.planning.planner import make_plan
from asyncfeed.planning.strings import Strings

MILLION = 1_000_000
ORDERS = ("file", "utterance", "block", "interleave", "own", "weighted")
PARTITION_NBYTES = 512 << 20


def million() -> Corpus:
    """A million utterances of 100 to 1,500 frames of 80 float32."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 1500, MILLION)
    nbytes = lengths * 320
    blob = np.frombuffer(b"".join(b"speaker%03d/utt%06d" % (i % 997, i) for i in range(MILLION)), np.uint8)
    none = np.zeros(MILLION, np.int32)
    catalog = Catalog(
        ids=Strings(blob, np.arange(1, MILLION + 1) * (blob.size // MILLION)),
        file=none,
        offset=np.cumsum(nbytes) - nbytes,
        length=lengths,
        kind=none,
        access=none.astype(np.uint8),
        swapped=none.astype(bool),
        files=(FileStamp("million.h5", 1, 1, 1),),
        kinds=(Kind(np.dtype("f4"), (80,)),),
    )
    return Corpus({"": catalog}, named=False)


def plan_million(kind: str, rank: int, world_size: int) -> tuple[float, float]:
    """Seconds for a plan, and the most memory that it took, MB; in this very process, once.

    Orders of one's own name all of the million, in random order.
    """
    corpus = million()
    ids = tuple(np.random.default_rng(1).permutation(list(corpus.ids)).tolist())
    order = Order(kind, ids=ids, weights=(1.0,) * len(ids)) if kind in ("own", "weighted") else Order(kind)  # type: ignore[arg-type]
    before = resident_nbytes()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    took = seconds(
        lambda: make_plan(corpus, partition_nbytes=PARTITION_NBYTES, shuffle=order, rank=rank, world_size=world_size)
    )
    return took, (peak_nbytes() - before) / 1e6


def resident_nbytes() -> int:
    return _status("VmRSS")


def peak_nbytes() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def planning(_: Path) -> Iterator[Figure]:
    """plan-seconds, plan-memory: a million utterances, every order, alone and as rank 5 of 8, each in its own process."""
    took, memory = [], []
    for kind, ranks in itertools.product(ORDERS, (["0", "1"], ["5", "8"])):
        command = [sys.executable, __file__, "--plan", kind, *ranks]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        one, other = map(float, out.split())
        took.append(one)
        memory.append(other)
    yield Figure("plan-seconds", "plan for 1,000,000 utterances, six orders, s", "< 2", took)
    yield Figure("plan-memory", "memory that takes at most, MB", "< 150", memory)


def resuming(data: Path) -> Iterator[Figure]:
    """resume: 100,000 utterances of 16 KB, at 90 % of the epoch, partitions of 8 MB."""
    path = feature_file(data / "hundred-thousand.h5", 100_000, 100, 40)

    def stream() -> tuple[float, dict]:
        with Feed(path, memory_budget="16m") as feed:
            count = len(feed) * 9 // 10
            items = iter(feed)
            started = time.perf_counter()
            next(itertools.islice(items, count - 1, None))
            took = time.perf_counter() - started
            return took, feed.state_dict()

    def resume(state: dict) -> float:
        with Feed(path, memory_budget="16m") as feed:
            len(feed)  # open, as it was when the clock of the other side began
            started = time.perf_counter()
            feed.load_state_dict(state)
            next(iter(feed))
            return time.perf_counter() - started

    ratios = []
    for attempt in range(6):
        took, state = stream()
        again = resume(state)
        if attempt:
            ratios.append(100 * again / took)
    yield Figure("resume", "time to the next frame over that of streaming 90 % of the epoch, per cent", "<= 2", ratios)


def padding(data: Path) -> Iterator[Figure]:
    """waste: lengths like those of LibriSpeech (lognormal, 2 to 35 s), batches of 60 s."""
    rng = np.random.default_rng(0)
    frames = (100 * np.clip(rng.lognormal(np.log(12), 0.5, 3000), 2, 35)).astype(int)
    path = data / "librispeech-like.h5"
    if not path.exists():
        import h5py  # noqa: PLC0415 - only this row writes

        with h5py.File(path, "w") as file:
            for i, n in enumerate(frames.tolist()):
                file[f"utt{i:05d}"] = np.zeros((n, 4), "f4")
    wastes = []
    with Feed(path) as feed:
        for epoch in range(3):
            feed.set_epoch(epoch)
            real = padded = 0
            for batch in feed.padded(max_frames=6000):
                real += int(batch.lengths.sum())
                padded += batch.data.shape[0] * batch.data.shape[1]
            wastes.append(100 * (1 - real / padded))
    yield Figure("waste", "padding in batches of 60 s, measured in what was delivered, per cent", "<= 5", wastes)


def interleaving(data: Path) -> Iterator[Figure]:
    """mixing, interleave-rate: 2,000 utterances of about 380 KB, partitions of 128 MB."""
    path = feature_file(data / "large.h5", 2000, 1190, 80)

    def numbers(shuffle: object) -> float:
        with Feed(path, shuffle=shuffle, memory_budget="256m") as feed:
            found = []
            for epoch in range(5):
                feed.set_epoch(epoch)
                found.append(feed.plan.mixing().number)
            return float(np.mean(found))

    yield Figure(
        "mixing", "mixing number of 'interleave' over that of True", ">= 0.9", [numbers("interleave") / numbers(True)]
    )

    feeds = {kind: Feed(path, shuffle=kind, memory_budget="256m") for kind in ("interleave", False)}

    def epoch(kind: object) -> float:
        return seconds(lambda: [None for _ in feeds[kind].partitions()])

    pairs = in_turn(lambda: epoch("interleave"), lambda: epoch(False), rounds=7, warm=2)
    yield Figure(
        "interleave-rate", "read rate of 'interleave' over that of file order", ">= 0.8", [o / i for i, o in pairs]
    )
    for feed in feeds.values():
        feed.close()


ROWS = (planning, resuming, padding, interleaving)


def main() -> None:
    parser = arguments_of(__doc__, ROWS)
    parser.add_argument(
        "--plan", nargs=3, metavar=("ORDER", "RANK", "SIZE"), help="plan once, and print seconds and megabytes"
    )
    arguments = parser.parse_args()
    if arguments.plan:
        print(*plan_million(arguments.plan[0], *map(int, arguments.plan[1:])))
        sys.stdout.flush()
        os._exit(0)
    run(ROWS, arguments.rows, arguments.data)


if __name__ == "__main__":
    main()
