"""Keep the catalog of a file, so that it is scanned only once.

An index is a numpy ``.npz`` archive, uncompressed: the arrays of the catalog and a JSON header. It is valid for one
state of each file involved: size, modification time in nanoseconds, and inode. zip checksums guard the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import platformdirs

from asyncfeed.planning.catalog import Catalog, FileStamp, Kind, Skipped
from asyncfeed.planning.strings import Strings
from asyncfeed.storage.hdf5file import can_decode, stamp
from asyncfeed.storage.paths import SIDECAR
from asyncfeed.storage.source import Container

__all__ = ["beside", "in_cache", "load_index", "load_joint_index", "save_index", "save_joint_index"]

VERSION = 4
COLUMNS = ("file", "offset", "length", "kind", "access", "swapped")
OPTIONAL = ("start",)


def beside(path: str) -> Path:
    """Where ``asyncfeed index`` puts the index of a file: next to it."""
    return Path(f"{path}{SIDECAR}")


def in_cache(path: str, layout: str) -> Path:
    """Where an index is kept by default: under the user's cache directory."""
    return _named(f"{os.path.realpath(path)}\0{layout}")


def _named(name: str) -> Path:
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return Path(platformdirs.user_cache_dir("asyncfeed")) / "index" / digest


def load_index(path: str, layout: str) -> Catalog | None:
    """The kept catalog of a file; None if there is none that fits the file as it is now.

    ``layout`` is all that the catalog depends on besides the file, as in `Container`: usually the key.
    """
    for place in (beside(path), in_cache(path, layout)):
        catalog = _load(place, path, layout)
        if catalog is not None:
            return catalog
    return None


def load_joint_index(containers: Sequence[Container]) -> Catalog | None:
    """The kept catalog of many files together; None if there is none, or one of them is not what it was."""
    layout = _joint_layout(containers)
    return _load(_named(layout), containers[0].path, layout)


def save_joint_index(catalog: Catalog, containers: Sequence[Container]) -> None:
    """Keep one catalog for many files, under the user's cache directory.

    Raises:
        OSError: the directory cannot be written.
    """
    layout = _joint_layout(containers)
    save_index(catalog, _named(layout), layout)


def _joint_layout(containers: Sequence[Container]) -> str:
    return "\0\0".join(f"{container.path}\0{container.layout}" for container in containers)


def save_index(catalog: Catalog, place: Path, layout: str | None = None) -> None:
    """Write an index under a temporary name, then move it into place, so that nobody sees half of one.

    Raises:
        OSError: the directory cannot be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    number = {file.path: n for n, file in enumerate(catalog.files)}
    columns = [*COLUMNS, *(name for name in OPTIONAL if getattr(catalog, name) is not None)]
    header = {
        "version": VERSION,
        "layout": catalog.key if layout is None else layout,
        "key": catalog.key,
        "files": [[f.path, f.size, f.mtime_ns, f.inode] for f in catalog.files],
        "filters": catalog.filters,
        "kinds": [[k.dtype.str, k.shape] for k in catalog.kinds],
        "skipped": [[s.utt, number[s.path], s.reason, s.remedy, s.harmless] for s in catalog.skipped],
    }
    temporary = place.with_name(f"{place.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "wb") as file:
            np.savez(
                file,
                header=np.frombuffer(json.dumps(header).encode(), np.uint8),
                blob=catalog.ids.blob,
                ends=catalog.ids.ends,
                **{f"column_{name}": getattr(catalog, name) for name in columns},
            )
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _load(place: Path, path: str, layout: str) -> Catalog | None:
    """What is at ``place``, unless it is absent, damaged, of another version, or about another state of the files."""
    # Any exception: what numpy and zipfile raise over foreign bytes is no closed list, and a scan is always right.
    # The file is opened here, because numpy leaves open what turns out to be no archive.
    with contextlib.suppress(Exception), open(place, "rb") as file, np.load(file) as arrays:
        header = json.loads(arrays["header"].tobytes())
        if header["version"] != VERSION or header["layout"] != layout:
            return None
        # The first file is the one asked for, whatever it was called when the index was made.
        files = [FileStamp(path, *header["files"][0][1:])] + [FileStamp(*f) for f in header["files"][1:]]
        if any(stamp(f.path) != f for f in files) or not all(map(can_decode, header["filters"])):
            return None
        return Catalog(
            ids=Strings(arrays["blob"], arrays["ends"]),
            files=tuple(files),
            kinds=tuple(Kind(np.dtype(d).newbyteorder("="), tuple(s)) for d, s in header["kinds"]),
            key=header["key"],
            filters=tuple(header["filters"]),
            skipped=tuple(Skipped(utt, files[number].path, *rest) for utt, number, *rest in header["skipped"]),
            **{name: arrays[column] for name in (*COLUMNS, *OPTIONAL) if (column := f"column_{name}") in arrays},
        )
    return None
