"""The sealed files of a cache, which readers see as one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from asyncfeed.errors import SourceMissingError

__all__ = ["COMPACTING", "DEFAULT_FILENAME", "Generations"]

DEFAULT_FILENAME = "cache.hdf5"

COMPACTING = "compact"
"""What stands in the place of a writer id in the name of a file in which generations are being merged."""


@dataclass(frozen=True, slots=True)
class Generations:
    """A cache, as a source: every sealed file of it, the oldest first; an item of a later one replaces an earlier one.

    The first is called like the cache, ``cache.hdf5``; what later writing sessions seal is numbered:
    ``cache.000002.hdf5``.
    """

    directory: str
    filename: str = DEFAULT_FILENAME

    @property
    def path(self) -> str:
        """Of the first generation, and of what compacting leaves."""
        return os.path.join(self.directory, self.filename)

    def beside(self, suffix: str) -> str:
        """The path of something that belongs to the cache: a journal, a lock."""
        return f"{self.path}.{suffix}"

    def numbers(self) -> list[int]:
        """Which generations there are, in order."""
        stem, extension = os.path.splitext(self.filename)
        pattern = re.compile(rf"{re.escape(stem)}\.(\d{{6,}}){re.escape(extension)}")
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
        return sorted(found + [1] * (self.filename in names))

    def numbered(self, number: int) -> str:
        """The path of a generation; 1 is the first."""
        stem, extension = os.path.splitext(self.path)
        return self.path if number == 1 else f"{stem}.{number:06d}{extension}"

    def paths(self) -> list[str]:
        """The sealed files there are, the oldest first."""
        return [self.numbered(number) for number in self.numbers()]

    def existing(self) -> list[str]:
        """Like `paths`, for a reader who wants some.

        Raises:
            SourceMissingError: nothing has been sealed yet.
        """
        found = self.paths()
        if not found:
            journals = self.journals()
            waiting = f"; {', '.join(journals)} waits to be sealed: open it in writer mode, then call to_reader()"
            raise SourceMissingError(
                f"there is no sealed cache {self.path!r}"
                + (waiting if journals else "; fill it in writer mode (mode='w'), then call to_reader()")
            )
        return found

    def journals(self) -> list[str]:
        """Paths of what was written and not sealed, by whichever writer."""
        start, end = f"{self.filename}.", ".journal"
        try:
            names = sorted(os.listdir(self.directory))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            os.path.join(self.directory, name)
            for name in names
            if name.startswith(start) and name.endswith(end)
            if "." not in (writer := name[len(start) : -len(end)]) and writer != COMPACTING
        ]

    def __bool__(self) -> bool:
        return bool(self.numbers())
