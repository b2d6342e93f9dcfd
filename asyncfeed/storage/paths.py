"""Files that a path stands for, and what each of them is called."""

from __future__ import annotations

import glob
import os

from asyncfeed.errors import ArgumentError, NotHDF5Error, SourceMissingError
from asyncfeed.storage.generations import DEFAULT_FILENAME

__all__ = ["SIDECAR", "UTT", "expand", "is_several", "stem"]

UTT = "{utt}"
"""Stands for an utterance id in keys and in paths."""

SIDECAR = ".asyncfeed"
"""What the name of an index that lies beside its file ends with."""


def is_several(path: str) -> bool:
    """Whether a path is meant to stand for any number of files."""
    return UTT in path or glob.has_magic(path)


def stem(path: str) -> str:
    """What a file is called, without its directory and its extension."""
    return os.path.splitext(os.path.basename(path))[0]


def expand(path: str) -> list[tuple[str, str]]:
    """The files that a path, glob or pattern stands for, sorted by name, and the name that each has in it.

    That is what stands in the place of ``{utt}``, which matches within one directory. Of a glob it is the path from the
    first directory on that the glob leaves open, without the extension: for ``dump/*.h5`` the stem. A path without
    either stands for itself, and the name is empty.

    Raises:
        SourceMissingError: there is no such file, or a glob matches none.
        NotHDF5Error: it is a directory.
        ArgumentError: it is a URL, or ``{utt}`` does not stand alone where it stands.
    """
    if "://" in path:
        raise ArgumentError(f"{path!r} is a URL; remote files are not supported: copy it to a local disk first")
    if os.path.isdir(path):
        raise NotHDF5Error(
            f"{path} is a directory, and holds no {DEFAULT_FILENAME} as a cache has it; for the files in it pass a glob: "
            f"{os.path.join(path, '*.h5')!r}"
        )
    if os.path.exists(path):
        return [(path, "")]
    if not is_several(path):
        raise SourceMissingError(f"there is no file {path!r} (looked in {os.getcwd()})")
    found = _by_pattern(path) if UTT in path else _by_glob(path)
    if not found:
        raise SourceMissingError(f"no file matches {path!r} in {os.getcwd()}")
    return found


def _matching(path: str) -> list[str]:
    """What a glob matches, without indexes: ``dump/*`` means the same files before and after ``asyncfeed index``."""
    return sorted(each for each in glob.glob(path, recursive=True) if not each.endswith(SIDECAR))


def _by_glob(path: str) -> list[tuple[str, str]]:
    fixed = os.path.dirname(path)
    while glob.has_magic(fixed):
        fixed = os.path.dirname(fixed)
    found = _matching(path)
    return [(each, os.path.splitext(os.path.relpath(each, fixed or os.curdir))[0]) for each in found]


def _by_pattern(path: str) -> list[tuple[str, str]]:
    parts = path.split(os.sep)
    (place, *others) = [i for i, part in enumerate(parts) if UTT in part]
    head, _, tail = parts[place].partition(UTT)
    if others or UTT in tail or glob.has_magic(head + tail) or "**" in parts[place:]:
        raise ArgumentError(
            f"{path!r} must hold {UTT} once, in a name without wildcards, and no ** after it, as in 'dump/*/{UTT}.h5'"
        )
    found = _matching(path.replace(UTT, "*"))
    from_end = place - len(parts)
    names = (each.split(os.sep)[from_end] for each in found)
    return [(each, name[len(head) : len(name) - len(tail)]) for each, name in zip(found, names, strict=True)]
