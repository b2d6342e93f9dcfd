"""Tell from names and shapes how a file is laid out, and what to write to stream it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfeed.planning.spans import spans

__all__ = ["Dataset", "Suggestion", "may_be_one_utterance", "suggest", "suggest_for_many"]

FEW = 16
"""Datasets that one item may have, or fields that a file may be divided into."""

MAX_CLASSES = 8
"""Groups of an item that datasets of the same name may lie in, as in ``obs`` and ``next_obs``."""

BESIDE = (
    "len",
    "num",
    "size",
    "offset",
    "start",
    "end",
    "begin",
    "stop",
    "ptr",
    "index",
    "split",
    "bound",
    "cu_",
    "pos",
)
"""In the names of what says where utterances begin."""

NAMES = ("id", "key", "name", "utt")
"""In the names of what says what they are called."""

Arguments = Mapping[str, str]


class Dataset(NamedTuple):
    """What is known about a dataset."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """As numpy calls it; ``"text"`` for strings, and empty for what is neither text nor a number."""
    values: NDArray[np.int64] | None = None
    """What is in it, if it is one axis of integers and there are few datasets beside it."""

    @property
    def is_frames(self) -> bool:
        return self.dtype not in ("", "text") and bool(self.shape)

    @property
    def look(self) -> tuple[str, tuple[int, ...]]:
        """What its frames look like."""
        return self.dtype, self.shape[1:]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One way to stream a source."""

    fields: tuple[tuple[str, str, Arguments], ...]
    """Name, path and the arguments of `Source` of every field; a lone one may have no name."""
    reason: str

    @property
    def is_per_file(self) -> bool:
        """Whether every file is taken for one utterance."""
        return all("key" in given and "{utt}" not in given["key"] for _, _, given in self.fields)

    @property
    def line(self) -> str:
        """What to write in Python."""
        return self.code(10**9)

    def code(self, width: int) -> str:
        """The same, over several lines where it is longer than that."""
        if len(self.fields) == 1:
            return _call(*self.fields[0][1:], width)
        calls = [f"{name!r}: {_call(path, given, width - len(repr(name)) - 5)}" for name, path, given in self.fields]
        return _enclosed("{", calls, "}", width)


def _call(path: str, given: Arguments, width: int) -> str:
    return _enclosed("Source(", [repr(path), *(f"{name}={value!r}" for name, value in given.items())], ")", width)


def _enclosed(head: str, parts: list[str], tail: str, width: int) -> str:
    one = f"{head}{', '.join(parts)}{tail}"
    if len(one) <= width and "\n" not in one:
        return one
    lines = [f"  {line}" for part in parts for line in f"{part},".splitlines()]
    return "\n".join([head, *lines, tail])


# -- one file ----------------------------------------------------------------------------------------------------------


def suggest(path: str, datasets: Sequence[Dataset]) -> list[Suggestion]:
    """How a file may be laid out, the likeliest first; empty if nothing in it can be streamed."""
    frames = [each for each in datasets if each.is_frames]
    if not frames:
        return []
    found = [*_arrays(path, datasets), *_top_groups(path, frames)]
    items = _items(path, frames)
    flat = [] if found else _flat(path, frames, strangers=len(datasets) > len(frames))
    if _looks_numbered(frames):
        return [*found, *flat, *items]
    return [*found, *items, *flat]


def _flat(path: str, frames: list[Dataset], strangers: bool) -> list[Suggestion]:
    looks = {each.look for each in frames}
    depth = max(each.path.count("/") for each in frames)
    if len(looks) > FEW or (strangers and depth):
        return []
    what = "1-D, so that every sample is a frame" if looks == {(frames[0].dtype, ())} else ""
    alike = "all alike" if len(looks) == 1 else f"of {len(looks)} shapes or dtypes"
    ids = "ids are paths, as in 'spk/utt'" if depth else "ids are their names"
    detail = ", ".join(filter(None, (alike, what, ids)))
    return [Suggestion((("", path, {}),), f"one dataset per utterance: {len(frames):,}, {detail}")]


def _looks_numbered(frames: list[Dataset]) -> bool:
    """Whether datasets are all alike and called like utterances, not like features: ``spk1/0001``."""
    numbered = all(any(map(str.isdigit, each.path.rpartition("/")[2])) for each in frames)
    return numbered and len({each.look for each in frames}) == 1


# -- several datasets per item -----------------------------------------------------------------------------------------


def _items(path: str, frames: list[Dataset]) -> list[Suggestion]:
    """Keys such as ``{utt}/mel``, where the same names appear in group after group."""
    groups = {suffix: found for suffix, found in _by_suffix(frames).items() if len(found) > 1}
    if not groups or len(groups) > FEW or 2 * sum(map(len, groups.values())) < len(frames):
        return []
    prefix = _common([head for found in groups.values() for head in found])
    keys = {suffix: "/".join((*prefix, "{utt}", suffix)) for suffix in groups}
    if not all(len(head) > len(prefix) for found in groups.values() for head in found):
        return []
    beside = f" beside {len(groups) - 1} more" if len(groups) > 1 else ""
    alone = [
        Suggestion(
            (("", path, {"key": keys[suffix]}),),
            f"a group per item: {len(found):,} hold {suffix!r}{beside}, {_frames_of(found.values())}",
        )
        for suffix, found in groups.items()
    ]
    return [*alone, *_together(path, groups, keys)]


def _together(
    path: str, groups: Mapping[str, Mapping[tuple[str, ...], Dataset]], keys: Mapping[str, str]
) -> list[Suggestion]:
    """All that agree in their items and in the frames of each, side by side; where there are several."""
    by_lengths = defaultdict(list)
    for suffix, found in groups.items():
        lengths = frozenset((head, each.shape[0]) for head, each in found.items())
        by_lengths[lengths].append(suffix)
    return [
        Suggestion(
            tuple((suffix, path, {"key": keys[suffix]}) for suffix in suffixes),
            f"{len(suffixes)} datasets of an item side by side; they have as many frames",
        )
        for suffixes in by_lengths.values()
        if len(suffixes) > 1
    ]


def _by_suffix(frames: list[Dataset]) -> dict[str, dict[tuple[str, ...], Dataset]]:
    """Datasets by what their paths end with, and by what stands before that."""
    by_name: dict[tuple[str, ...], dict[tuple[str, ...], Dataset]] = defaultdict(dict)
    for each in frames:
        *head, name = each.path.split("/")
        by_name[(name,)][tuple(head)] = each
    if len(by_name) > FEW * MAX_CLASSES:
        return {}
    return {"/".join(suffix): found for each in by_name.items() for suffix, found in _extended(*each)}


def _extended(
    suffix: tuple[str, ...], found: dict[tuple[str, ...], Dataset]
) -> Iterator[tuple[tuple[str, ...], dict[tuple[str, ...], Dataset]]]:
    """Take the names of groups into the suffix for as long as they belong to it: ``x``, ``obs/x``, not ``demo_0/obs/x``."""
    sizes = Counter(head[-1] if head else "" for head in found)
    if "" in sizes or len(sizes) > MAX_CLASSES or min(sizes.values()) < 2:
        yield suffix, found
        return
    for name in sizes:
        yield from _extended((name, *suffix), {head[:-1]: each for head, each in found.items() if head[-1] == name})


def _common(heads: list[tuple[str, ...]]) -> tuple[str, ...]:
    """What all of them begin with."""
    first, last = min(heads), max(heads)
    same = [a == b for a, b in zip(first, last, strict=False)]
    return first[: same.index(False)] if False in same else first[: len(same)]


def _frames_of(datasets: Iterable[Dataset]) -> str:
    looks = Counter(each.look for each in datasets)
    (dtype, shape), _ = looks.most_common(1)[0]
    frame = f"{dtype} x {'x'.join(map(str, shape)) or '1'}"
    return f"frames of {frame}" if len(looks) == 1 else f"frames of {len(looks)} shapes or dtypes"


# -- a group per field -------------------------------------------------------------------------------------------------


def _top_groups(path: str, frames: list[Dataset]) -> list[Suggestion]:
    """Keys such as ``mel/{utt}``, where a few groups hold the same names, and each its own sort of frames."""
    groups: dict[str, dict[str, Dataset]] = defaultdict(dict)
    for each in frames:
        head, _, name = each.path.partition("/")
        groups[head][name] = each
    looks = [{each.look for each in found.values()} for found in groups.values()]
    names = [set(found) for found in groups.values()]
    if not 2 <= len(groups) <= FEW or "" in names[0] or len(names[0]) < 2 or any(n != names[0] for n in names):
        return []
    if any(len(look) > 1 for look in looks) or len(set.union(*looks)) < len(looks):
        return []
    fields = tuple((name, path, {"key": f"{name}/{{utt}}"}) for name in groups)
    reason = f"a group per field: {len(groups)} with the same {len(names[0]):,} names, each with its own sort of frames"
    return [Suggestion(fields, reason), *(Suggestion((("", *field[1:]),), f"{field[0]!r} alone") for field in fields)]


# -- one array with lengths beside it ----------------------------------------------------------------------------------


def _arrays(path: str, datasets: Sequence[Dataset]) -> list[Suggestion]:
    """One array with lengths or offsets, and perhaps ids, beside it; several that are divided alike side by side, too."""
    found = [(data, best) for data in datasets if data.is_frames and (best := _best_way(data, datasets))]
    found.sort(key=lambda each: (each[1][0], -len(each[0].shape)))
    alone, alike = [], defaultdict(list)
    for data, (_, beside, num_utts) in found:
        field = (data.path.rpartition("/")[2], path, {"data": data.path, **beside})
        divided = " and ".join(repr(each) for name, each in beside.items() if name != "ids")
        named = f"their ids are {beside['ids']!r}" if "ids" in beside else "they are numbered"
        reason = f"one array of {data.shape[0]:,} frames, divided by {divided} into {num_utts:,} utterances; {named}"
        alone.append(Suggestion((("", *field[1:]),), reason))
        alike[tuple(beside.items())].append(field)
    together = [
        Suggestion(tuple(fields), f"{len(fields)} arrays side by side, divided alike")
        for fields in alike.values()
        if len(fields) > 1
    ]
    return [*alone, *together]


def _best_way(data: Dataset, datasets: Sequence[Dataset]) -> tuple[int, dict[str, str], int] | None:
    """The likeliest way to divide an array by what lies beside it: its rank, its arguments, and how many it gives."""
    near = [each for each in datasets if each is not data and _parent(each) == _parent(data)]
    numbers = [each for each in near if each.values is not None and each.shape[0] < max(data.shape[0], 2)]
    names = [None, *(each for each in near if _may_be_ids(each))]
    ways = [*((each, None) for each in numbers), *((None, each) for each in numbers), *permutations(numbers, 2)]
    found = []
    for rank, (lengths, offsets) in enumerate(ways):
        for ids in names:
            num_utts = _divided(data, lengths, offsets, ids)
            if num_utts is not None:
                given = {"lengths": lengths, "offsets": offsets, "ids": ids}
                arguments = {name: each.path for name, each in given.items() if each is not None}
                found.append((rank + len(ways) * (ids is None), arguments, num_utts))
    return min(found, key=lambda way: way[0], default=None)


def _divided(data: Dataset, lengths: Dataset | None, offsets: Dataset | None, ids: Dataset | None) -> int | None:
    """How many utterances an array would have; None if these do not divide it, or only by chance."""
    certain = lengths is not None and ids is not None and ids.dtype == "text"
    if not certain and not all(_is_called(each, BESIDE) for each in (lengths, offsets) if each is not None):
        return None
    try:
        starts, _ = spans(
            data.shape[0],
            lengths=None if lengths is None else lengths.values,
            offsets=None if offsets is None else offsets.values,
            num_utts=None if ids is None else ids.shape[0],
        )
    except ValueError:
        return None
    return starts.size or None


def _may_be_ids(dataset: Dataset) -> bool:
    if len(dataset.shape) != 1:
        return False
    return dataset.dtype == "text" or (dataset.values is not None and _is_called(dataset, NAMES))


def _is_called(dataset: Dataset, words: tuple[str, ...]) -> bool:
    return any(word in dataset.path.rpartition("/")[2].lower() for word in words)


def _parent(dataset: Dataset) -> str:
    return dataset.path.rpartition("/")[0]


# -- many files --------------------------------------------------------------------------------------------------------


def may_be_one_utterance(datasets: Sequence[Dataset]) -> bool:
    """Whether a file holds a few datasets none of which is like another, and files beside it should be looked at."""
    frames = [each for each in datasets if each.is_frames]
    return 2 <= len(frames) <= FEW and len({each.look for each in frames}) == len(frames)


def _per_file(glob: str, files: Sequence[Sequence[Dataset]]) -> list[Suggestion]:
    """One utterance per file: each dataset alone, and those that agree in their frames side by side."""
    groups: dict[str, dict[tuple[str, ...], Dataset]] = {
        each.path: {(str(number),): frames[k] for number, frames in enumerate(files)} for k, each in enumerate(files[0])
    }
    keys = {name: name for name in groups}
    reason = "one utterance per file, whose name is the id: every file holds"
    alone = [
        Suggestion((("", glob, {"key": name}),), f"{reason} {name!r}, {_frames_of(found.values())}")
        for name, found in groups.items()
    ]
    return [*alone, *_together(glob, groups, keys)]


def suggest_for_many(glob: str, files: Mapping[str, Sequence[Dataset]]) -> list[Suggestion]:
    """How files may be laid out of which these are some, by their paths; the likeliest first.

    Files are taken for one utterance each if all hold the same few names, perhaps among others; for fields if a few files share all of
    many names; and otherwise for shards, laid out like the first.
    """
    held = [{each.path: each for each in datasets if each.is_frames} for datasets in files.values()]
    common = sorted(set(held[0]).intersection(*held[1:]))
    frames = [[each[name] for name in common] for each in held]
    if arrays := _arrays(glob, next(iter(files.values()))):
        return arrays
    if (
        common
        and len(common) <= FEW
        and len(files) > 1
        and not _items(glob, frames[0])
        and not _looks_numbered(frames[0])
    ):
        return _per_file(glob, frames)
    if common and 1 < len(files) <= FEW and all(len(each) == len(common) for each in held):
        return [_fields(files)]
    return suggest(glob, [each for datasets in files.values() for each in datasets])


def _fields(files: Mapping[str, Sequence[Dataset]]) -> Suggestion:
    names = [path.rpartition("/")[2].rpartition(".")[0] or path for path in files]
    fields: tuple[tuple[str, str, Arguments], ...] = tuple(
        (name, path, {}) for name, path in zip(names, files, strict=True)
    )
    return Suggestion(fields, f"{len(fields)} files with the same ids, which are fields of the same utterances")
