"""What ranks have told of their collectives and of their ways, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MAX_SPANS = 5000  # of a rank's waits for data, of its samples, and of its steps

Place = tuple[int, str]  # a line, and the script that it is in; "" for a cell


@dataclass(frozen=True, slots=True)
class Met:
    """A collective that ranks met in.

    Attributes:
        group: the group's ranks, as ``[0, 2]``; empty for the default group.
        number: which one of its group it is.
        name: the function; ``shape`` is the type and sizes of what goes in.
        came: when each rank came, in seconds of ``time.time()`` on this machine.
        waits: seconds that each rank waited for the last one; empty where nobody waits.
        awaited: the rank that came last.
        places: how often the awaited one was seen at which line while others waited.
        loading: seconds of the waiting in which the awaited one waited for data itself.
    """

    group: str
    number: int
    name: str
    shape: str
    came: Mapping[int, float]
    waits: Mapping[int, float]
    awaited: int
    places: Mapping[Place, int]
    loading: float = 0.0

    @property
    def at(self) -> float:
        """When the last one came."""
        return self.came[self.awaited]

    @property
    def waited(self) -> float:
        """Seconds that all ranks waited, together."""
        return sum(self.waits.values())

    @property
    def title(self) -> str:
        """Which kind of collective, as ``all_reduce float [72]``."""
        of = f"of group {self.group}" if self.group else ""
        return " ".join(filter(None, (self.name, self.shape, of)))


@dataclass(frozen=True, slots=True)
class Last:
    """The last collective that a rank has told of; ``turn`` is as in :class:`Arrivals`."""

    at: float
    group: str
    turn: int
    number: int
    name: str
    shape: str
    meets: bool


@dataclass(slots=True)
class Track:
    """What is known of one rank's way, newest last; ``is_over`` is what it says of its cell."""

    samples: deque[tuple[float, Place]] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    loads: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    starved: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=100))
    began: float = 0.0
    told_at: float = 0.0
    error: float = 0.0
    last: Last | None = None
    is_over: bool = False

    def copy(self) -> Track:
        """The same, which does not change any more."""
        return replace(
            self,
            samples=deque(self.samples),
            loads=deque(self.loads),
            steps=deque(self.steps),
            starved=deque(self.starved),
        )

    def note_told(self, at: float, starved: float) -> None:
        """It has told of all until then; since it last did, it had no core for so many seconds."""
        if at > max(self.began, self.told_at):
            self.starved.append((max(self.began, self.told_at), at, max(0.0, starved)))
            self.told_at = at

    def lacked(self, began: float, ended: float) -> float:
        """Of this time, the share in which it would have run and had no core."""
        found = whole = 0.0
        for start, end, seconds in self.starved:
            part = max(0.0, min(end, ended) - max(start, began))
            whole += part
            found += part * seconds / (end - start)
        return found / whole if whole else 0.0
