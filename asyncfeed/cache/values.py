"""What a cache can keep: arrays, and whatever becomes one without loss."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5t
from numpy.typing import NDArray

from asyncfeed.cache.records import dtype_text
from asyncfeed.errors import ItemTypeError

__all__ = ["DIGEST_NBYTES", "digest_of", "to_array", "type_id"]

DIGEST_NBYTES = 16

MAX_NDIM = 32
MAX_TYPE_NBYTES = 64_000
"""Of the description of a structured dtype; HDF5 keeps the length of some messages in 16 bits."""

NUMBERS = (bool, int, float, complex)

WIDER = ("int8", "uint8", "int32", "float32", "complex64")
"""What dtypes that numpy does not have itself are widened to, if it is exact: bfloat16, float8, int4."""


def to_array(value: object) -> NDArray[Any]:
    """A value as an array of native byte order in C order. May copy.

    Arrays of any dtype without objects, numbers and lists of them; torch tensors on any device; whatever offers
    ``__array__`` or DLPack. dtypes that numpy lacks (bfloat16) are widened, exactly (float32).

    Raises:
        ItemTypeError: None, text, ragged lists, mappings, sets, masked arrays, objects.
    """
    array = _as_array(value)
    if isinstance(value, np.ma.MaskedArray):
        raise _refuse(value, "its mask would be lost; fill it first")
    if array.dtype.isbuiltin == 2:
        array = _widened(array)
    if array.ndim > MAX_NDIM:
        raise _refuse(value, f"it has {array.ndim} dimensions, and {MAX_NDIM} is the most that HDF5 has")
    if array.dtype.hasobject or array.dtype.kind in "OSUT":
        raise _refuse(value, f"numpy makes it an array of {_content(array.dtype)}")
    try:
        dtype = _keepable(array.dtype)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise _refuse(value, f"its dtype {array.dtype} cannot be written down: {error}") from error
    array = np.asarray(array, dtype, order="C")
    return array if array.dtype is dtype else array.view(dtype)  # which equals it, and has no metadata


@functools.lru_cache(maxsize=256)
def _keepable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype as it comes back: native, and without metadata.

    Raises:
        TypeError, ValueError, NotImplementedError: HDF5, or the text that describes it in a journal, cannot express it.
    """
    plain: np.dtype[Any] = _plain(dtype)
    dtype_text(plain)
    if len(type_id(plain).encode()) > MAX_TYPE_NBYTES:
        raise ValueError("it has more fields, or longer names of fields, than HDF5 has room for")
    return plain


def _plain(dtype: Any) -> Any:
    """Without metadata, which make another type of it to h5py (an enum), while numpy takes it for the same."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((_plain(base), shape))
    if dtype.fields is None:
        return np.dtype(dtype.str).newbyteorder("=")
    fields = [dtype.fields[name] for name in dtype.names]
    return np.dtype(
        {
            "names": dtype.names,
            "formats": [_plain(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "titles": [field[2] if len(field) > 2 else None for field in fields],
            "itemsize": dtype.itemsize,
        }
    )


@functools.lru_cache(maxsize=256)
def type_id(dtype: np.dtype[Any]) -> h5t.TypeID:
    """The HDF5 datatype whose bytes are those of numpy."""
    return h5t.py_create(h5py.opaque_dtype(dtype) if dtype.kind in "mM" else dtype, logical=True)


def _as_array(value: object) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if value is None or isinstance(value, str | bytes | bytearray | dict | set | frozenset):
        raise _refuse(value, "it is not an array of numbers")
    module = type(value).__module__.partition(".")[0]
    if module == "torch" and hasattr(value, "detach"):
        return _from_torch(value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise _refuse(value, f"numpy cannot take it by DLPack ({error}); move it to the CPU first") from error
    try:
        return np.asarray(value)
    except ValueError as error:
        raise _refuse(value, f"it is ragged ({error}); pad it, or keep an item for each part") from error
    except TypeError as error:
        raise _refuse(value, f"numpy cannot make an array of it ({error})") from error


def _from_torch(tensor: Any) -> NDArray[Any]:
    """A tensor as an array; it is not necessary to import torch in order to have one."""
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        try:
            return np.asarray(tensor.numpy())
        except TypeError:
            if not tensor.dtype.is_floating_point:
                raise
            return np.asarray(tensor.float().numpy())  # bfloat16, float8: float32 holds all of their values
    except (TypeError, RuntimeError) as error:
        raise _refuse(tensor, f"torch cannot give it as an array ({error})") from error


def _widened(array: NDArray[Any]) -> NDArray[Any]:
    for name in WIDER:
        if np.can_cast(array.dtype, name, "safe"):
            return array.astype(name)
    raise _refuse(array, f"numpy has no type of its own that holds {array.dtype}; convert it first")


def _content(dtype: np.dtype[Any]) -> str:
    return "text" if dtype.kind in "SUT" else "objects"


def _refuse(value: object, why: str) -> ItemTypeError:
    return ItemTypeError(
        f"a {type(value).__name__} cannot be kept in a cache: {why}. Kept are arrays of numbers, torch tensors, numbers, "
        f"and what offers __array__ or DLPack"
    )


# -- digests of arguments ----------------------------------------------------------------------------------------


def digest_of(args: tuple[object, ...]) -> bytes:
    """A digest of arguments that is the same in every process and on every Python: XXH3, 16 bytes.

    Raises:
        ItemTypeError: an argument is nothing that can be digested by its value.
    """
    state = xxhash.xxh3_128()  # a tenth of what a cryptographic one costs, with every call
    _update(state.update, args)
    return state.digest()


def _update(add: Callable[[Any], None], value: object) -> None:
    if value is None:
        add(b"None;")
    elif isinstance(value, str):  # its repr() is not the same on every Python
        _add_bytes(add, b"str", value.encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        _add_bytes(add, b"bytes", value)
    elif isinstance(value, bool | int | float | complex):
        kind = next(kind for kind in NUMBERS if isinstance(value, kind))
        add(f"{kind.__name__} {kind.__repr__(value)};".encode())  # not that of a subclass: numpy's says its version
    elif isinstance(value, os.PathLike):
        add(b"path ")
        _update(add, os.fspath(value))
    elif isinstance(value, dict):
        _add_all(add, b"dict", sorted(map(_digest_one, value.items())))
    elif isinstance(value, set | frozenset):
        _add_all(add, b"set", sorted(map(_digest_one, value)))
    elif isinstance(value, list | tuple):
        _add_all(add, b"list", value)
    else:
        try:
            array = to_array(value)
        except ItemTypeError:
            raise ItemTypeError(
                f"check_inputs=True cannot digest an argument of type {type(value).__name__}; pass numbers, text, "
                f"arrays, and lists or dicts of these, or use check_inputs=False"
            ) from None
        add(f"array {array.dtype.descr if array.dtype.names else array.dtype.str} {array.shape}:".encode())
        add(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _add_bytes(add: Callable[[Any], None], kind: bytes, content: bytes | bytearray) -> None:
    add(b"%b %d:" % (kind, len(content)))
    add(content)


def _add_all(add: Callable[[Any], None], kind: bytes, values: Sequence[object]) -> None:
    add(b"%b %d:" % (kind, len(values)))
    for each in values:
        _update(add, each)


def _digest_one(value: object) -> bytes:
    return digest_of((value,))
