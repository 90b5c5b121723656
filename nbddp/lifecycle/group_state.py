"""What is known of a worker group at one moment: frozen values, changed only by the lifecycle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from nbddp.lifecycle.events import GRACE, Deadline, DeadlinePassed, SetDeadline, StartAsked


class GroupState(Enum):
    """What the worker group is doing, in words."""

    OFF = "not started"
    STARTING = "starting"
    IDLE = "ready"
    RUNNING = "running a cell"
    INTERRUPTING = "interrupting the cell"
    BROKEN = "a rank is gone"
    HEALING = "healing"
    STOPPING = "stopping"

    @property
    def is_live(self) -> bool:
        """Whether there are processes."""
        return self is not GroupState.OFF

    @property
    def is_ready(self) -> bool:
        """Whether those ranks that live wait for something to do."""
        return self in (GroupState.IDLE, GroupState.BROKEN)

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs."""
        return self in (GroupState.RUNNING, GroupState.INTERRUPTING)

    @property
    def is_interruptible(self) -> bool:
        """Whether an interrupt has something to end: a cell, or a heal."""
        return self.is_busy or self is GroupState.HEALING


class RankState(Enum):
    """What one rank is doing, in words."""

    STARTING = "starting"
    IDLE = "ready"
    RUNNING = "running"
    GONE = "gone"
    ABSENT = "not started"


@dataclass(frozen=True, slots=True)
class RankLife:
    """One rank."""

    rank: int
    state: RankState = RankState.STARTING
    exitcode: int | None = None
    incarnation: int = 0  # which process of this rank in the attempt

    @property
    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self.state not in (RankState.GONE, RankState.ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLife:
    """The cell that runs, and what is known of it."""

    number: int
    waiting: frozenset[int]
    is_elastic: bool = False
    is_outgrown: bool = False  # ended, as a restart would make more ranks
    has_failed: bool = False
    has_lost_rank: bool = False  # for it is dead, which is worse than a failure
    group_broken: bool = False
    sequences: frozenset[int] = frozenset()
    interrupts: int = 0
    is_stuck: bool = False
    acknowledged: frozenset[int] = frozenset()
    killed: frozenset[int] = frozenset()  # by the lifecycle itself, which has said so


@dataclass(frozen=True, slots=True, kw_only=True)
class HealLife:
    """The heal that goes on, and what is known of it.

    Attributes:
        replacements: the ranks that get a new process.
        donor: the rank whose names they get.
        checks: whether the donor sees if its names can be those of the dead ranks.
        not_loaded: names that could not be made on a new rank: the donor leaves them out.
        is_packed: whether the donor has packed its names.
        joining: ranks that were told to meet and are not back.
        failures: why ranks did not meet, each with whether only another rank had left it.
        must_repeat: whether the meeting failed because a name could not be made.
        has_failed: whether the heal fails whatever the other ranks report.
        is_cancelled: whether ``joining`` was told to give up.
    """

    replacements: tuple[int, ...]
    donor: int
    checks: bool
    not_loaded: tuple[str, ...] = ()
    is_packed: bool = False
    joining: frozenset[int] = frozenset()
    failures: tuple[tuple[bool, str], ...] = ()
    must_repeat: bool = False
    has_failed: bool = False
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The worker group at one moment."""

    state: GroupState = GroupState.OFF
    attempt: int = 0
    generation: int = 0
    has_group: bool = False
    ranks: tuple[RankLife, ...] = ()  # each in its place
    heal: HealLife | None = None
    cell: CellLife | None = None
    next_start: StartAsked | None = None
    grace: float = GRACE
    pending_notices: tuple[str, ...] = ()  # of nodes, for the next cell
    is_rejoin: bool = False  # the ranks were another notebook's: who is late costs nobody else

    def incarnation(self, rank: int) -> int:
        """How many processes a rank had before this one; -1 if there is no such rank."""
        return next((each.incarnation for each in self.ranks if each.rank == rank), -1)

    def is_alive(self, rank: int) -> bool:
        """Whether there is such a rank, and its process is there."""
        return 0 <= rank < len(self.ranks) and self.ranks[rank].is_alive

    @property
    def alive(self) -> list[int]:
        """Ranks whose process is there."""
        return [each.rank for each in self.ranks if each.is_alive]

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks whose process has ended."""
        return tuple(each.rank for each in self.ranks if each.state is RankState.GONE)

    def ranks_in_state(self, state: RankState) -> tuple[int, ...]:
        """The ranks that do this now."""
        return tuple(each.rank for each in self.ranks if each.state is state)

    def with_rank_state(self, rank: int, state: RankState, exitcode: int | None = None) -> Life:
        """One rank does something else."""
        changed = replace(self.ranks[rank], state=state, exitcode=exitcode)
        return replace(self, ranks=(*self.ranks[:rank], changed, *self.ranks[rank + 1 :]))

    def set_deadline(self, deadline: Deadline, seconds: float) -> SetDeadline:
        """A deadline of what goes on now."""
        event = DeadlinePassed(
            deadline=deadline,
            attempt=self.attempt,
            cell=self.cell.number if self.cell else 0,
            generation=self.generation,
        )
        return SetDeadline(seconds=seconds, event=event)

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All ranks, those that are gone too."""
        return tuple(each.rank for each in self.ranks)
