"""What a feed has done so far, counted."""

from __future__ import annotations

from dataclasses import dataclass

from asyncfeed.units import format_nbytes

__all__ = ["Statistics"]


@dataclass(slots=True)
class Statistics:
    """Totals over all epochs of a feed since it was opened."""

    nbytes: int = 0
    """Bytes of frames read."""
    partitions: int = 0
    """Partitions read."""
    calls: int = 0
    """System calls that read them directly; datasets read through HDF5 are not counted."""
    read_seconds: float = 0.0
    """Time the reader thread spent reading, decoding and shuffling."""
    wait_seconds: float = 0.0
    """Time the consumer waited for a partition, the first of an epoch included."""
    loop_seconds: float = 0.0
    """Time the consumer spent with the partitions it had."""
    segments: int = 0
    """Segments of shared memory made; prefetch + 1, unless the loop kept frames of more partitions."""
    peak_shared_nbytes: int = 0
    """The most shared memory that there was at one time."""

    @property
    def verdict(self) -> str:
        """One line that says whether the loop or the storage is the bottleneck."""
        total = self.wait_seconds + self.loop_seconds
        if not self.partitions or not total:
            return "nothing was read yet"
        rate = self.nbytes / self.read_seconds if self.read_seconds else 0.0
        share = self.wait_seconds / total
        speed = f"reading runs at {format_nbytes(int(rate))}/s"
        if share > 0.5:
            return f"the storage is the bottleneck: the loop waited {share:.0%} of the time; {speed}"
        if share > 0.1:
            return f"loop and storage are about even: the loop waited {share:.0%} of the time; {speed}"
        return f"the loop is the bottleneck: it waited only {share:.0%} of the time; {speed}"

    def __str__(self) -> str:
        return (
            f"{format_nbytes(self.nbytes)} in {self.partitions} partitions; read {self.read_seconds:.3f} s, "
            f"waited {self.wait_seconds:.3f} s; {self.segments} segments, at most "
            f"{format_nbytes(self.peak_shared_nbytes)} shared; {self.verdict}"
        )
