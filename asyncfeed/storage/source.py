"""How users name what they want to stream."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import h5py

from asyncfeed.errors import ArgumentError
from asyncfeed.storage.generations import Generations
from asyncfeed.storage.paths import UTT, expand, is_several, stem

__all__ = ["AnySource", "Container", "Key", "Slices", "Source", "anchored", "containers_of", "fields_of"]

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

        Source("tts.h5", key="{utt}/mel")
        Source("dump/*.h5", key="feats")
        Source("all.h5", data="feats", lengths="lengths", ids="ids")

    Args:
        path: a file, a list of files, a glob, or an open ``h5py.File`` or ``h5py.Group``. Where each file holds one
            utterance, ``{utt}`` may stand in the place of its id: ``"dump/{utt}/feats.h5"``.
        key: the path of an utterance's dataset, with ``{utt}`` where its id stands: ``"data/{utt}/actions"``,
            ``"{utt}/mel"``. The id may hold slashes. Without ``{utt}`` it is the path of the one dataset of each of several
            files; the id is then what ``{utt}`` in ``path`` stands for, or else the name of the file without extension
            (of a glob, with the directories that it leaves open).
        data: the path of one dataset that holds all utterances, one after the other, in place of ``key``.
        lengths: the path of the frames of each, beside ``data``.
        offsets: the path of where in ``data`` each begins, or ends, or, with one entry more, both. At least one of
            ``lengths`` and ``offsets`` is needed; with both, frames may be left out or shared.
        ids: the path of their ids: text or integers. Without them they are ``utt00000000`` and so on; over several files
            behind the name of the file.

    Raises:
        ArgumentError: ``key`` does not hold ``{utt}`` exactly once, or arguments exclude each other.
    """

    path: Pathish | Sequence[Pathish] | h5py.Group
    key: str = UTT
    data: str | None = None
    lengths: str | None = None
    offsets: str | None = None
    ids: str | None = None

    def __post_init__(self) -> None:
        if self.data is not None:
            if self.key != UTT:
                raise ArgumentError(f"key={self.key!r} and data={self.data!r} exclude each other; pass one of them")
            if self.lengths is None and self.offsets is None:
                raise ArgumentError(f"data={self.data!r} needs lengths= or offsets=, which say where utterances begin")
            return
        if (self.lengths, self.offsets, self.ids) != (None, None, None):
            raise ArgumentError("lengths=, offsets= and ids= belong to data=, the dataset that holds all utterances")
        if Key(self.key).fixed and (isinstance(self.path, h5py.Group) or not _is_several(self.path)):
            raise _no_place(self.key)

    @property
    def slices(self) -> Slices | None:
        """Where the utterances lie in one dataset, if they do."""
        return None if self.data is None else Slices(self.data, self.lengths, self.offsets, self.ids)


@dataclass(frozen=True, slots=True)
class Slices:
    """The paths of one dataset that holds all utterances, and of what says which frames are whose."""

    data: str
    lengths: str | None = None
    offsets: str | None = None
    ids: str | None = None


def _is_several(path: object) -> bool:
    if isinstance(path, str | bytes | os.PathLike):
        return is_several(os.fsdecode(path))
    return isinstance(path, Sequence)


def _no_place(pattern: str) -> ArgumentError:
    return ArgumentError(
        f"key={pattern!r} must hold {UTT} exactly once, as in '{UTT}' or 'data/{UTT}/mel'; it may do without where "
        f"each of several files (a list, a glob, 'dump/{UTT}.h5') holds one utterance under that path"
    )


class Key:
    """A key pattern taken apart: what stands before and after the id.

    One that is ``fixed`` has no place for it, and matches a single dataset; its id is ``name``.
    """

    __slots__ = ("fixed", "name", "prefix", "suffix")

    def __init__(self, pattern: str, name: str = "") -> None:
        head, found, tail = pattern.strip("/").partition(UTT)
        if not (head or found) or UTT in tail:
            raise _no_place(pattern)
        self.prefix, self.suffix, self.fixed, self.name = head, tail, not found, name

    def utt(self, path: str) -> str | None:
        """The id of the dataset at ``path``; None if the pattern does not match."""
        if self.fixed:
            return self.name if path == self.prefix else None
        if not (path.startswith(self.prefix) and path.endswith(self.suffix)):
            return None
        return path[len(self.prefix) : len(path) - len(self.suffix)] or None

    def path(self, utt: str) -> str:
        """The path of the dataset of an utterance."""
        return self.prefix if self.fixed else f"{self.prefix}{utt}{self.suffix}"

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
    name: str = ""
    """What the file is called in its source: the id of its only utterance, where ``key`` has no place for one, and what
    goes before numbered ids. Empty for a file that was named by itself."""
    slices: Slices | None = None
    """Where all utterances lie in one dataset, whose path is ``key``."""

    @property
    def layout(self) -> str:
        """All that the catalog depends on besides the file: the key, or all that stands in its place."""
        if self.slices is None and not Key(self.key).fixed:
            return self.key
        paths = astuple(self.slices) if self.slices else ()
        name = "" if self.slices and self.slices.ids else self.name  # which goes into ids, where the file has none
        return "\0".join((self.key, name, *(path or "" for path in paths)))


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
        return _containers_of_source(source)
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
        found = [Container(each, key, name=name) for each, name in expand(path)]
        if UTT in path and UTT in key and found[0].name:
            raise ArgumentError(
                f"{UTT} stands in the path {path!r} and in key={key!r}; where each file holds one utterance, name its "
                f"dataset without: Source({path!r}, key='feats')"
            )
        return found
    return _containers_of_list(source, key)


def _containers_of_source(source: Source) -> list[Container]:
    slices = source.slices
    found = containers_of(source.path, source.key if slices is None else slices.data)
    if slices is not None:
        return [replace(each, slices=slices) for each in found]
    if Key(source.key).fixed and not all(each.name for each in found):
        raise _no_place(source.key)
    return found


def _containers_of_list(source: object, key: str) -> list[Container]:
    if isinstance(source, Sequence):
        if not source:
            raise ArgumentError("the list of files is empty; give it at least one")
        found = [container for each in source for container in containers_of(each, key)]
        keys = sorted({container.key for container in found})
        if len(keys) > 1 or len({container.slices for container in found}) > 1:
            raise ArgumentError(f"the files of one list must share one key, but these have {' and '.join(keys)}")
        return [each if each.name else replace(each, name=stem(each.path)) for each in found]
    raise ArgumentError(
        f"a {type(source).__name__} is not a source; pass a path, a list of paths, a glob, an h5py.File or h5py.Group, "
        f"a Source, a CachedItem, or a mapping of field names to these. Python file objects and URLs are not supported: copy first"
    )


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
