"""Where in which epoch a feed is: what ``state_dict`` gives and ``load_state_dict`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncfeed.errors import StateError
from asyncfeed.planning.passage import UNKNOWN, Stage

__all__ = ["State"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    """A position, and all that has to be the same for it to be the same position."""

    corpus: str
    """Fingerprint of what there is to stream."""
    order: Any
    seed: int
    even: str | None
    partition_nbytes: int
    epoch: int
    form: Mapping[str, Any]
    """How the epoch is iterated over; empty before it begins."""
    stages: tuple[Stage, ...] = ()
    """What was handed out, and on how many ranks; nothing before the epoch begins."""
    items: int = 0
    """What this rank has handed out of the epoch, in the last of the stages."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON takes."""
        return {"version": VERSION, **asdict(self), "stages": [[s.world_size, s.units] for s in self.stages]}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> State:
        """Raises `StateError` if this is no state."""
        try:
            values = dict(found)
            if values.pop("version") != VERSION:
                raise StateError(
                    f"this state has version {found['version']}, and this asyncfeed reads version {VERSION}; load it with the "
                    f"asyncfeed that saved it"
                )
            values["stages"] = tuple(Stage(int(n), int(units)) for n, units in values["stages"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{found!r} is not a state of a feed ({error}); pass what state_dict() gave") from error

    def on(self, world_size: int) -> tuple[tuple[Stage, ...], int]:
        """For going on with it on so many ranks: the stages that are over, and the items handed out in the one that is not."""
        if self.stages and self.stages[-1].world_size == world_size:
            return self.stages[:-1], self.items
        if any(stage.units == UNKNOWN for stage in self.stages):
            raise StateError(
                f"the state was saved while iterating over whole partitions on {self.stages[-1].world_size} ranks, and "
                f"{world_size} ranks cannot divide what is left; use as many, or begin the epoch anew with "
                f"set_epoch({self.epoch})"
            )
        return self.stages, 0

    def check(self, other: State) -> None:
        """Raise `StateError` if a position in ``other`` means something else here."""
        names = {"corpus": "the data (ids, lengths or frames)", "order": "shuffle", "seed": "seed", "even": "even"}
        different = [
            f"{what}: {getattr(other, name)!r} in the state, {getattr(self, name)!r} here"
            for name, what in names.items()
            if getattr(self, name) != getattr(other, name)
        ]
        if different:
            raise StateError(
                f"the state does not fit this feed; it differs in {'; '.join(different)}. Make the feed as it was, or begin "
                f"the epoch anew with set_epoch({other.epoch})"
            )

    def check_form(self, form: Mapping[str, Any]) -> None:
        """Raise `StateError` if the epoch goes on in another form than it began in."""
        if self.stages and form != self.form:
            raise StateError(
                f"the state was saved while iterating over {_show(self.form)}, and the epoch cannot go on with "
                f"{_show(form)}; iterate as before, or begin the epoch anew with set_epoch({self.epoch})"
            )


def _show(form: Mapping[str, Any]) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in form.items() if name != "form")
    return f"{form.get('form', 'nothing')}({options})"
