"""As many units on every rank."""

from __future__ import annotations

from typing import Literal

__all__ = ["Even", "even_count"]

Even = Literal["drop", "pad"]


def even_count(num_units: int, even: Even, world_size: int) -> int:
    """The units of each rank: what does not come out even is left out (``"drop"``), or filled up (``"pad"``)."""
    return num_units // world_size if even == "drop" else -(-num_units // world_size)
