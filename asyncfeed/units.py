"""Sizes as people write them."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import SupportsIndex

from asyncfeed.errors import ArgumentError

__all__ = ["GIB", "KIB", "MIB", "PAGE_NBYTES", "format_nbytes", "parse_nbytes", "parse_share"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

PAGE_NBYTES = 4 * KIB
"""What shared memory is given out in. A constant, so that a plan does not depend on the machine."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_nbytes(size: SupportsIndex | str) -> int:
    """Turn ``"2g"``, ``"512MiB"``, ``"1.5 GB"`` or a number of bytes into bytes.

    Every unit is a power of 1024, with or without the ``i``, in either case: ``"2g"`` means what it means to audiomate.

    Raises:
        ArgumentError: the text is no size, or the size is not positive.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match:
        nbytes = int(Decimal(match[1]) * 1024 ** _POWER[match[2].lower()])
    elif isinstance(size, SupportsIndex) and not isinstance(size, bool):  # numpy's integers too
        nbytes = operator.index(size)
    else:
        raise ArgumentError(f"{size!r} is not a size; write it like '2g', '512MiB' or a number of bytes")
    if nbytes <= 0:
        raise ArgumentError(f"a size of {size!r} leaves no memory at all; give at least a few frames, like '64m'")
    return nbytes


def parse_share(text: str) -> float | None:
    """Turn ``"25%"`` into 0.25; None if the text is not a percentage."""
    if not text.strip().endswith("%"):
        return None
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        raise ArgumentError(f"{text!r} is not a share; write it like '25%'") from None
    if not 0 < share <= 1:
        raise ArgumentError(f"{text!r} is not between 0% and 100%")
    return share


def format_nbytes(nbytes: int) -> str:
    """``1536`` as ``"1.5 KiB"``: three significant digits, powers of 1024."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
