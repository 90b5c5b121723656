"""The state of a worker group at one moment: frozen values that only the lifecycle changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from nbddp.formatting import describe_exit
from nbddp.lifecycle.events import Deadline, DeadlinePassed, SetDeadline, StartAsked
from nbddp.wire.group_spec import StartOptions


class GroupState(Enum):
    """The states of a worker group; the values are shown to the user."""

    OFF = "not started"
    STARTING = "starting"
    IDLE = "ready"
    RUNNING = "running a cell"
    INTERRUPTING = "interrupting the cell"
    BROKEN = "a rank is dead"
    HEALING = "healing"
    STOPPING = "stopping"

    @property
    def is_live(self) -> bool:
        """Whether there are processes."""
        return self is not GroupState.OFF

    @property
    def is_ready(self) -> bool:
        """Whether the ranks that are alive are idle."""
        return self in (GroupState.IDLE, GroupState.BROKEN)

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs."""
        return self in (GroupState.RUNNING, GroupState.INTERRUPTING)

    @property
    def is_interruptible(self) -> bool:
        """Whether there is a cell or a heal to interrupt."""
        return self.is_busy or self is GroupState.HEALING


class RankState(Enum):
    """The states of a rank; the values are shown to the user."""

    STARTING = "starting"
    IDLE = "ready"
    RUNNING = "running"
    GONE = "gone"
    ABSENT = "not started"


@dataclass(frozen=True, slots=True)
class RankLife:
    """The state of one rank."""

    rank: int
    state: RankState = RankState.STARTING
    exitcode: int | None = None
    cause: str = ""  # of its death, if it is known; see RankProcesses
    incarnation: int = 0  # 0 for the first process of this rank in the attempt

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return self.state not in (RankState.GONE, RankState.ABSENT)

    @property
    def how_it_ended(self) -> str:
        """How the process of a dead rank ended, in words."""
        return describe_exit(self.exitcode, self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLife:
    """The state of the running cell."""

    number: int
    waiting: frozenset[int]
    is_elastic: bool = False
    is_outgrown: bool = False  # ended because a restart would give more ranks
    has_failed: bool = False
    has_lost_rank: bool = False  # a rank died, which is worse than a failure
    group_broken: bool = False
    sequences: frozenset[int] = frozenset()
    interrupts: int = 0
    step_wait: float = 0.0  # seconds for which ranks may go on to the end of a step
    later_graces: int = 0  # deadlines that this wait has added: only the last one counts
    is_stuck: bool = False
    acknowledged: frozenset[int] = frozenset()
    killed: frozenset[int] = frozenset()  # by the lifecycle, which has told the user


@dataclass(frozen=True, slots=True, kw_only=True)
class HealLife:
    """The state of the running heal.

    Attributes:
        replacements: the ranks that get a new process.
        dead: the state of each of them before the heal.
        donor: the rank whose variables they get.
        checks: whether the donor checks that its variables can replace those of the dead ranks.
        not_loaded: variables that a replacement could not load: the donor leaves them out.
        is_pickled: whether the donor has pickled its variables.
        joining: ranks that were asked to join the new group, and have not answered.
        failures: why ranks did not join, each with whether that is a consequence of another rank.
            After the first one, the ranks in ``joining`` are asked to give up.
        must_repeat: whether the join failed because a name could not be loaded.
        has_failed: whether the heal fails, whatever the other ranks answer.
        is_refused: whether another heal would fail in the same way.
    """

    replacements: tuple[int, ...]
    dead: tuple[RankLife, ...]
    donor: int
    checks: bool
    not_loaded: tuple[str, ...] = ()
    is_pickled: bool = False
    joining: frozenset[int] = frozenset()
    failures: tuple[tuple[bool, str], ...] = ()
    must_repeat: bool = False
    has_failed: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The state of the worker group.

    ``attempt`` counts all starts, so that late events of any earlier start can be told apart.
    ``run_attempt`` counts those of the run: 1 for the first start, as the user sees it.
    """

    state: GroupState = GroupState.OFF
    attempt: int = 0
    attempts_before_run: int = 0
    generation: int = 0
    has_group: bool = False
    ranks: tuple[RankLife, ...] = ()  # ordered by rank
    heal: HealLife | None = None
    cell: CellLife | None = None
    next_start: StartAsked | None = None
    grace: float = StartOptions.grace
    pending_notices: tuple[str, ...] = ()  # about nodes, for the next cell
    is_heal_refused: bool = False  # and another heal would be refused, too
    is_rejoin: bool = False  # of an earlier notebook's ranks: a late rank does not fail the others

    @property
    def run_attempt(self) -> int:
        """The number of the attempt in its run, from 1."""
        return self.attempt - self.attempts_before_run

    def incarnation(self, rank: int) -> int:
        """Return how many processes this rank had before this one; -1 if there is no such rank."""
        return self.ranks[rank].incarnation if 0 <= rank < len(self.ranks) else -1

    def is_alive(self, rank: int) -> bool:
        """Return whether there is such a rank and its process is running."""
        return 0 <= rank < len(self.ranks) and self.ranks[rank].is_alive

    @property
    def alive(self) -> list[int]:
        """The ranks whose process is running."""
        return [each.rank for each in self.ranks if each.is_alive]

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks whose process has exited."""
        return tuple(each.rank for each in self.ranks if each.state is RankState.GONE)

    def ranks_in_state(self, state: RankState) -> tuple[int, ...]:
        """Return the ranks that are in a state."""
        return tuple(each.rank for each in self.ranks if each.state is state)

    def with_rank_state(
        self, rank: int, state: RankState, exitcode: int | None = None, cause: str = ""
    ) -> Life:
        """Return this state with one rank's state changed."""
        changed = replace(self.ranks[rank], state=state, exitcode=exitcode, cause=cause)
        return replace(self, ranks=(*self.ranks[:rank], changed, *self.ranks[rank + 1 :]))

    def set_deadline(self, deadline: Deadline, seconds: float) -> SetDeadline:
        """Return the action that sets a deadline of the current cell and attempt."""
        event = DeadlinePassed(
            deadline=deadline,
            attempt=self.attempt,
            cell=self.cell.number if self.cell else 0,
            generation=self.generation,
        )
        return SetDeadline(seconds=seconds, event=event)

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All ranks, also the dead ones."""
        return tuple(each.rank for each in self.ranks)
