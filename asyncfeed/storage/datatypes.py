"""What the datatypes of HDF5 mean to numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from h5py import h5t

__all__ = ["Stored", "examine"]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a datatype means to us; made once for every distinct type of a file."""

    dtype: np.dtype[np.generic] | None
    """In native byte order; None if it is not a number."""
    plain: bool = False
    """Whether the bytes in the file are what numpy would hold."""
    swapped: bool = False
    """Whether the byte order in the file is the other one."""
    reason: str = ""


def examine(datatype: h5t.TypeID) -> Stored:
    """What a datatype is to numpy, and whether numpy would hold it as the file does."""
    try:
        dtype = datatype.dtype
    except (TypeError, ValueError, NotImplementedError) as error:
        return Stored(None, reason=f"its type has no equivalent in numpy ({error})")
    kind = datatype.get_class()
    if dtype.kind not in "biufc" or dtype.subdtype is not None or kind in (h5t.VLEN, h5t.REFERENCE):
        return Stored(None, reason=f"its type is {_describe(datatype, dtype)}, not a number")
    plain = kind in (h5t.INTEGER, h5t.FLOAT) and bool(datatype.equal(h5t.py_create(dtype)))
    return Stored(np.dtype(dtype.str).newbyteorder("="), plain, not dtype.isnative)


def _describe(datatype: h5t.TypeID, dtype: np.dtype[np.generic]) -> str:
    names = {
        h5t.VLEN: "variable-length",
        h5t.STRING: "text",
        h5t.COMPOUND: "compound",
        h5t.REFERENCE: "a reference",
        h5t.OPAQUE: "opaque",
        h5t.ARRAY: "an array type",
    }
    return f"{names.get(datatype.get_class(), 'unsuitable')} ({dtype})"
