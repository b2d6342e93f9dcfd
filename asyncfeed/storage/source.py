"""How users name what they want to stream."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import h5py

from asyncfeed.errors import ArgumentError, NotHDF5Error, SourceMissingError
from asyncfeed.storage.generations import DEFAULT_FILENAME, Generations

__all__ = ["AnySource", "Container", "Key", "Source", "anchored", "containers_of", "fields_of"]

Pathish: TypeAlias = "str | os.PathLike[str]"
OneSource: TypeAlias = "Pathish | Sequence[Pathish] | h5py.Group | Source | Generations | HasSource"
AnySource: TypeAlias = "OneSource | Mapping[str, OneSource]"


@runtime_checkable
class HasSource(Protocol):
    """Something that can be streamed and knows where it lies: a cache."""

    def as_source(self) -> Generations:
        """What to stream. Called when a feed is made, not when it opens."""


@dataclass(frozen=True)
class Source:
    """Where utterances lie, for files that are not simply one dataset per utterance.

    Args:
        path: a file, a list of files, a glob, or an open ``h5py.File`` or ``h5py.Group``.
        key: the path of an utterance's dataset, with ``{utt}`` where its id stands: ``"data/{utt}/actions"``,
            ``"{utt}/mel"``. The id may hold slashes.

    Raises:
        ArgumentError: ``key`` does not hold ``{utt}`` exactly once.
    """

    path: Pathish | Sequence[Pathish] | h5py.Group
    key: str = "{utt}"

    def __post_init__(self) -> None:
        Key(self.key)


class Key:
    """A key pattern taken apart: what stands before and after the id."""

    __slots__ = ("prefix", "suffix")

    def __init__(self, pattern: str) -> None:
        head, found, tail = pattern.strip("/").partition("{utt}")
        if not found or "{utt}" in tail:
            raise ArgumentError(
                f"key={pattern!r} must hold {{utt}} exactly once, as in '{{utt}}' or 'data/{{utt}}/mel'"
            )
        self.prefix, self.suffix = head, tail

    def utt(self, path: str) -> str | None:
        """The id of the dataset at ``path``; None if the pattern does not match."""
        if not (path.startswith(self.prefix) and path.endswith(self.suffix)):
            return None
        return path[len(self.prefix) : len(path) - len(self.suffix)] or None

    def path(self, utt: str) -> str:
        """The path of the dataset of an utterance."""
        return f"{self.prefix}{utt}{self.suffix}"

    def leads_into(self, group: str) -> bool:
        """Whether datasets that match may lie below the group at this path (without a slash at either end)."""
        below = f"{group}/"
        return below.startswith(self.prefix) or self.prefix.startswith(below)


@dataclass(frozen=True, slots=True)
class Container:
    """One HDF5 file, or one open group, and how its utterances are named."""

    path: str
    key: str
    handle: h5py.Group | None = None
    cache: str = ""
    """The cache that this is a generation of; among those, a later one replaces utterances of an earlier one."""


def fields_of(source: AnySource) -> tuple[dict[str, list[Container]], bool]:
    """The containers of each field, and whether the fields have names.

    Raises:
        SourceMissingError: there is no such file, or a glob matches none.
        ArgumentError: the source is nothing that can be streamed.
    """
    if isinstance(source, Mapping) and not isinstance(source, h5py.Group):
        if not source:
            raise ArgumentError("the mapping of fields is empty; give it at least one: {'mel': 'mel.h5'}")
        return {str(name): containers_of(each) for name, each in source.items()}, True
    return {"": containers_of(source)}, False


def containers_of(source: OneSource, key: str = "{utt}") -> list[Container]:
    """The containers of one field, in the order given; files of a glob are sorted by name."""
    if isinstance(source, Source):
        return containers_of(source.path, source.key)
    if isinstance(source, HasSource):
        return containers_of(source.as_source(), key)
    if isinstance(source, Generations):
        return [Container(path, key, cache=source.path) for path in source.existing()]
    if isinstance(source, h5py.Group):
        if not source:
            raise ArgumentError("the h5py handle is closed; open the file again, or pass its path")
        return [Container(source.file.filename, key, source)]
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)
        if os.path.isdir(path) and Generations(path):
            return containers_of(Generations(path), key)
        return [Container(path, key) for path in _expand(path)]
    return _containers_of_list(source, key)


def _containers_of_list(source: object, key: str) -> list[Container]:
    if isinstance(source, Sequence):
        if not source:
            raise ArgumentError("the list of files is empty; give it at least one")
        found = [container for each in source for container in containers_of(each, key)]
        keys = sorted({container.key for container in found})
        if len(keys) > 1:
            raise ArgumentError(f"the files of one list must share one key, but these have {' and '.join(keys)}")
        return found
    raise ArgumentError(
        f"a {type(source).__name__} is not a source; pass a path, a list of paths, a glob, an h5py.File or h5py.Group, "
        f"a Source, a CachedItem, or a mapping of field names to these. Python file objects and URLs are not supported: copy first"
    )


def _expand(path: str) -> list[str]:
    if "://" in path:
        raise ArgumentError(f"{path!r} is a URL; remote files are not supported: copy it to a local disk first")
    if os.path.isdir(path):
        raise NotHDF5Error(
            f"{path} is a directory, and holds no {DEFAULT_FILENAME} as a cache has it; for the files in it pass a glob: "
            f"{os.path.join(path, '*.h5')!r}"
        )
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        found = sorted(glob.glob(path, recursive=True))
        if found:
            return found
        raise SourceMissingError(f"no file matches {path!r} in {os.getcwd()}")
    raise SourceMissingError(f"there is no file {path!r} (looked in {os.getcwd()})")


def anchored(source: Any) -> Any:
    """The same source with absolute paths: it means the same files after ``os.chdir``, and in another process."""
    if isinstance(source, HasSource):
        source = source.as_source()
    if isinstance(source, Source):
        return replace(source, path=anchored(source.path))
    if isinstance(source, Generations):
        return replace(source, directory=os.path.abspath(source.directory))
    if isinstance(source, h5py.Group):
        return source
    if isinstance(source, Mapping):
        return {name: anchored(each) for name, each in source.items()}
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)
        return path if "://" in path else os.path.abspath(path)
    return [anchored(each) for each in source] if isinstance(source, Sequence) else source


def holds_handle(source: AnySource) -> bool:
    """Whether a source refers to an open h5py object, which lives in this process only."""
    if isinstance(source, h5py.Group):
        return True
    if isinstance(source, Source):
        return holds_handle(source.path)
    if isinstance(source, Mapping):
        return any(map(holds_handle, source.values()))
    return isinstance(source, Sequence) and not isinstance(source, str | bytes) and any(map(holds_handle, source))
