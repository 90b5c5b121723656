"""What happens to a worker group (events) and what it makes the session do (actions).

Events are asked or past, actions are commands; all are frozen values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GRACE = 5.0  # seconds between asking a process to end and killing it


class Deadline(Enum):
    """What a deadline is for."""

    START = "start"
    PEERS = "peers"
    STUCK = "stuck"
    GRACE = "grace"
    CLEANUP = "cleanup"
    CANCEL = "cancel"
    STOP = "stop"


# ---- events: what happened, or was asked


class Event:
    """Something that happened, or was asked."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent(Event):
    """What a rank or a clock of an attempt reports."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAsked(Event):
    """Start this many ranks, or those of ``ranks`` alone.

    Without ``joins_group`` they form no process group.
    """

    world_size: int
    joins_group: bool = True
    grace: float = GRACE
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinAsked(Event):
    """Take back ranks that another notebook has left: of all, the incarnations of the living."""

    attempt: int
    world_size: int
    survivors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAsked(Event):
    """Stop what there is, then start."""

    start: StartAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class HealAsked(Event):
    """Put new processes in the places of dead ranks, with the names of a living one, the donor.

    ``checks``: the donor first checks whether its names can replace those of the dead ranks.
    """

    ranks: tuple[int, ...]
    donor: int
    checks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSent(AttemptEvent):
    """The donor has packed its names for the new ranks, or ``reason`` says why not."""

    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJoined(AttemptEvent):
    """A rank is back from the meeting in which the new ranks get their names.

    Attributes:
        reason: why it did not meet the others; empty if it did.
        is_consequence: whether that was only because another rank left the meeting.
        not_loaded: names that could not be made on this rank, which are a reason too.
    """

    generation: int
    rank: int
    reason: str = ""
    is_consequence: bool = False
    not_loaded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAsked(Event):
    """Run a cell on these ranks."""

    cell: int
    ranks: tuple[int, ...]
    needs_group: bool | None = True
    is_elastic: bool = False  # end it when a restart would make more ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptAsked(Event):
    """End the running cell and keep every name; a second time: kill what does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAsked(Event):
    """Kill one rank."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """End all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady(AttemptEvent):
    """A rank has its shell and its process group."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStartFailed(AttemptEvent):
    """A rank could not get ready; ``details`` is its traceback."""

    rank: int
    reason: str
    details: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEndedCell(AttemptEvent):
    """A rank is through with a cell."""

    rank: int
    cell: int
    is_ok: bool
    in_group: bool
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAcknowledged(AttemptEvent):
    """The cell of a rank got its KeyboardInterrupt, and may be cleaning up."""

    rank: int
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(AttemptEvent):
    """A rank's process is gone; ``is_reported``: the user knows already."""

    rank: int
    exitcode: int | None
    is_reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed(AttemptEvent):
    """A deadline passed. The event has the state of the ranks' processes at that moment.

    ``stopped`` are ranks that got a SIGSTOP, with their process ids. ``working`` are ranks whose
    processes use the CPU.
    """

    deadline: Deadline
    cell: int
    generation: int = 0
    stopped: tuple[tuple[int, int], ...] = ()
    working: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(Event):
    """A node has come; ``adds_capacity``: a restart would make more ranks."""

    name: str
    nproc: int
    adds_capacity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Event):
    """A node is gone, and these ranks with it."""

    name: str
    address: str
    reason: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCopyFailed(Event):
    """Copies of the nodes' logs cannot be written into this folder."""

    folder: str
    reason: str


NodeEvent = NodeJoined | NodeLost | LogCopyFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChanged(Event):
    """A restart would make more ranks than there are."""


# ---- actions: what the session shall do


class Action:
    """Something that the session shall do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAction(Action):
    """Something that it shall do to ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks(Action):
    """Start processes for all ranks."""

    attempt: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinRanks(Action):
    """Listen to the processes that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReplacements(RankAction):
    """Start new processes in the places of dead ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementsReady(Action):
    """All of them are ready to be given names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNamespace(Action):
    """Tell the donor to pack its names, except those in ``exclude``.

    ``replacements`` is empty if the user chose the donor.
    """

    donor: int
    generation: int
    exclude: tuple[str, ...]
    replacements: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestJoin(RankAction):
    """Tell ranks to form a new process group, in which new ranks get the donor's names."""

    generation: int
    donor: int
    replacements: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJoin(RankAction):
    """Tell ranks to leave the meeting: it has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealFinished(Action):
    """The new ranks have their names, and all ranks have met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealFailed(Action):
    """The dead ranks stay dead, for a reason; the others live on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRegroup(RankAction):
    """Tell ranks to form a new process group, or to leave theirs."""

    generation: int
    form: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCell(RankAction):
    """Hand the cell to ranks."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendInterrupt(RankAction):
    """Tell ranks to interrupt the cell; with ``is_for_death`` because one of them has died."""

    cell: int
    is_for_death: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SendShutdown(RankAction):
    """Tell idle ranks to end in good order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(RankAction):
    """Send SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(RankAction):
    """Send SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeadline(Action):
    """Ring in this many seconds, unless it no longer matters then."""

    seconds: float
    event: DeadlinePassed


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Action):
    """What was asked cannot be done now, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify(Action):
    """Something the user should be told while the cell runs."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordNode(Action):
    """Write into the record of the run what has become of a node."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStarted(Action):
    """All ranks are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStartFailed(Action):
    """The start failed; the ranks are being ended."""

    reason: str
    details: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFinished(Action):
    """All ranks are through with the cell, or gone.

    ``is_outgrown``: it was ended because a restart would make more ranks.
    """

    cell: int
    is_outgrown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStopped(Action):
    """All processes are gone."""
