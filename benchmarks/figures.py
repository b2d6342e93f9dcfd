"""What every benchmark here does: measure two things in turn, and print the ratio.

Both sides of a ratio are warmed up first. Machines are noisy: the figure is the median of the ratios of single rounds,
and the smallest and the largest stand beside it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

ROUNDS = 7


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    what: str
    wanted: str
    ratios: list[float]
    note: str = ""

    def __str__(self) -> str:
        low, high = min(self.ratios), max(self.ratios)
        spread = f"{statistics.median(self.ratios):8.2f}  ({low:.2f} .. {high:.2f})"
        return (
            f"{self.name:<18} {spread:<28} wanted {self.wanted:<9} {self.what}{'; ' + self.note if self.note else ''}"
        )


Clock = Callable[[], float]


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turn(ours: Clock, other: Clock, *, rounds: int = ROUNDS, warm: int = 2) -> list[tuple[float, float]]:
    """Measure two things in turn, after warming both up."""
    for _ in range(warm):
        ours(), other()
    return [(ours(), other()) for _ in range(rounds)]


def warm_up(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 24)
        while file.readinto(buffer):
            pass


def feature_file(path: Path, num: int, mean: int, dim: int, **options: object) -> Path:
    """``num`` utterances of about ``mean`` frames of ``dim`` float32; made once."""
    if not path.exists():
        rng = np.random.default_rng(0)
        lengths = np.maximum(rng.normal(mean, mean / 6, num).astype(int), 1)
        noise = rng.random((int(lengths.max()), dim), dtype="f4")
        temporary = path.with_suffix(".part")
        with h5py.File(temporary, "w") as file:
            for i, length in enumerate(lengths.tolist()):
                noise[0] = i
                file.create_dataset(f"utt{i:06d}", data=noise[:length], **options)
        temporary.rename(path)
    warm_up(path)
    return path


Row = Callable[[Path], Iterator[Figure]]


def arguments_of(doc: str | None, rows: Sequence[Row]) -> argparse.ArgumentParser:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"beginnings of: {', '.join(row.__name__ for row in rows)}")
    parser.add_argument("--data", type=Path, help="where the files are kept")
    return parser


def run(rows: Sequence[Row], wanted: Sequence[str], kept: Path | None) -> None:
    """Print the figures of the rows whose name begins like one of those wanted; of all, if there is none."""
    with tempfile.TemporaryDirectory() as temporary:
        data = kept or Path(temporary)
        data.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = temporary
        for row in rows:
            if not wanted or row.__name__.startswith(tuple(wanted)):
                for figure in row(data):
                    print(figure, flush=True)
