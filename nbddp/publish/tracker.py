"""What every tracker is told of a run, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbddp.publish.step_aggregator import Point


class PublishError(Exception):
    """The tracker does not take it; what it says, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which run it is.

    Attributes:
        name: its folder's, with a number behind it if it was published there before.
        place: the project, experiment or folder that was asked for; empty for the usual one.
        began: in ``time.time()``.
        settings: what ``nbddp.config`` has said so far, and facts of the run as ``nbddp.*``.
    """

    name: str
    place: str
    began: float
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        outcome: ``ok``, ``failed``, ``interrupted``, ``killed``, ``running``, ...; ``why`` is in a
            line.
        is_live: whether the run goes on.
        ended: in ``time.time()``.
        sums: steps, restarts, heals, failures, seconds lost.
        record: what happened, line by line, each with when it was, in ``time.time()``.
    """

    outcome: str
    why: str
    is_live: bool
    ended: float
    sums: Mapping[str, float]
    record: Sequence[tuple[float, str]]

    @property
    def is_ok(self) -> bool:
        """Whether its last cell went well, or it goes on."""
        return self.outcome in ("ok", "running", "empty")

    @property
    def text(self) -> str:
        """In a line."""
        return f"{self.outcome}: {self.why}" if self.why else self.outcome


class Tracker(Protocol):
    """Where a run is published: ``begin`` first and ``finish`` last, each once."""

    def begin(self, run: Identity) -> str:
        """Make a run there; returns where it is, for the user."""
        ...

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Some settings are new, or others than before."""
        ...

    def log(self, points: Sequence[Point]) -> None:
        """The next steps, in the order in which they began; steps may fall back."""
        ...

    def happened(self, at: float, text: str) -> None:
        """A restart, a heal, a failure, in words, while the run goes on."""
        ...

    def finish(self, outcome: Outcome) -> None:
        """Nothing more comes; returns when all of it was taken."""
        ...
