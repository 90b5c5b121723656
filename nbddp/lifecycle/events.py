"""The events and actions of the lifecycle: events go in, actions come out; all are frozen values.

An event is a request of the user (``...Asked``) or a fact. An action is a command.
"""

from __future__ import annotations

from enum import Enum

from nbddp.wire.frozen import Frozen
from nbddp.wire.group_spec import StartOptions
from nbddp.wire.messages import Regroup, Shutdown


class Deadline(Enum):
    """The purpose of a deadline."""

    START = "start"
    PEERS = "peers"
    STUCK = "stuck"
    GRACE = "grace"
    CLEANUP = "cleanup"
    CANCEL = "cancel"
    STOP = "stop"


# ---- events


class Event(Frozen):
    """A request of the user, or a fact."""


class AttemptEvent(Event):
    """An event of one attempt; ignored after that attempt has ended."""

    attempt: int


class RankEvent(AttemptEvent):
    """An event of one rank."""

    rank: int


class StartAsked(Event):
    """Start ``world_size`` ranks, or only those in ``ranks``.

    They form a process group if ``joins_group``.
    """

    world_size: int
    joins_group: bool = True
    grace: float = StartOptions.grace
    ranks: tuple[int, ...] | None = None


class RejoinAsked(Event):
    """Rejoin the ranks of an earlier notebook.

    ``survivors``: rank and incarnation of each process that is alive. ``cell``: a cell whose end
    the earlier notebook did not record; 0 for none. ``cell_ranks``: its ranks.
    """

    attempt: int
    world_size: int
    survivors: tuple[tuple[int, int], ...]
    attempts_before_run: int = 0
    cell: int = 0
    cell_ranks: tuple[int, ...] = ()


class RestartAsked(Event):
    """Stop the group, then start it again."""

    start: StartAsked


class HealAsked(Event):
    """Replace dead ranks by new processes, which get the variables of the donor, a living rank.

    ``donor``: None for the lowest living rank. That one first checks whether its variables can
    replace those of the dead ranks; a donor that the user chose does not.
    """

    ranks: tuple[int, ...]
    donor: int | None = None


class NamespacePickled(AttemptEvent):
    """The donor has pickled its variables for the replacements; ``reason``: why it could not."""

    generation: int
    reason: str = ""


class GroupJoined(RankEvent):
    """A rank has joined a heal's new group, or it could not.

    Replacements get their variables in this group.

    Attributes:
        reason: why it failed; empty if it joined.
        is_consequence: whether it failed only because another rank did.
        is_refused: whether another heal would fail in the same way.
        not_loaded: variables that could not be loaded on this rank; then ``reason`` is not empty.
    """

    generation: int
    reason: str = ""
    is_consequence: bool = False
    is_refused: bool = False
    not_loaded: tuple[str, ...] = ()


class RunAsked(Event):
    """Run a cell on these ranks."""

    cell: int
    ranks: tuple[int, ...]
    needs_group: bool | None = True
    is_elastic: bool = False  # end it when a restart would give more ranks


class InterruptAsked(Event):
    """Interrupt the cell, and keep variables. The second time, kill unresponsive ranks."""


class KillAsked(Event):
    """Kill one rank."""

    rank: int


class StopAsked(Event):
    """Stop all ranks."""


class RankReady(RankEvent):
    """A rank is ready: it has its shell and, if asked for, its process group."""


class RankStartFailed(RankEvent):
    """A rank could not start; ``details`` is its traceback."""

    reason: str
    details: str = ""


class RankEndedCell(RankEvent):
    """A rank has ended a cell.

    ``sequence``: number of collectives of the default group, and of optimizer steps in the cell.
    """

    cell: int
    is_ok: bool
    in_group: bool
    sequence: int


class RankAcknowledged(RankEvent):
    """The cell of a rank got its KeyboardInterrupt; it may still be cleaning up."""

    cell: int


class StepAwaited(RankEvent):
    """The interrupted cell goes on to the end of a step, for at most some seconds."""

    cell: int
    seconds: float


class ProcessExited(RankEvent):
    """A rank's process has exited.

    ``cause``: see RankProcesses. ``is_reported``: the user knows it already.
    """

    exitcode: int | None
    cause: str = ""
    is_reported: bool = False


class DeadlinePassed(AttemptEvent):
    """A deadline has passed. The event has the state of the ranks' processes at that moment.

    ``stopped`` are ranks that are stopped by SIGSTOP, with their process ids. ``working`` are ranks
    that use the CPU. ``importing`` are ranks that import a module, with its name. ``overload`` says
    that the machine is busy.
    """

    deadline: Deadline
    cell: int
    generation: int = 0
    stopped: tuple[tuple[int, int], ...] = ()
    working: tuple[int, ...] = ()
    importing: tuple[tuple[int, str], ...] = ()
    overload: str = ""


class NodeJoined(Event):
    """A node has joined; ``adds_capacity``: a restart would give more ranks."""

    name: str
    nproc: int
    adds_capacity: bool = False


class NodeLost(Event):
    """A node was lost, with these ranks."""

    name: str
    address: str
    reason: str
    ranks: tuple[int, ...]


class LogCopyFailed(Event):
    """Logs of the nodes could not be copied into this folder."""

    folder: str
    reason: str


NodeEvent = NodeJoined | NodeLost | LogCopyFailed


class CapacityChanged(Event):
    """A restart would give more ranks than there are."""


# ---- actions


class Action(Frozen):
    """A command to the actor."""


class RankAction(Action):
    """A command to the actor for some ranks."""

    ranks: tuple[int, ...]


class StartRanks(Action):
    """Start a process for each rank of the new attempt."""


class RejoinRanks(Action):
    """Connect to the processes of an earlier notebook."""


class StartReplacements(RankAction):
    """Start new processes for dead ranks."""


class NoteReplacementsReady(Action):
    """Record that all replacements are ready for the donor's variables."""


class RequestNamespace(Action):
    """Ask the donor to pickle its variables, except those in ``exclude``.

    ``checks`` is false if the user chose the donor.
    """

    generation: int
    exclude: tuple[str, ...]
    replacements: tuple[int, ...]
    checks: bool = True


class RequestJoin(RankAction):
    """Ask ranks to form a new process group, in which replacements get the donor's variables."""

    generation: int


class CancelJoin(RankAction):
    """Ask ranks to give up the new process group: the join has failed."""


class HealFinished(Action):
    """Report the heal: all ranks are in the new group, and the replacements have variables."""


class HealFailed(Action):
    """Report that the heal failed: the dead ranks stay dead, and the others keep running.

    Attributes:
        is_refused: whether another heal from the same rank would fail in the same way.
    """

    reason: str
    is_refused: bool = False


class Send(RankAction):
    """Send a message to ranks."""

    message: Regroup | Shutdown


class SendCell(RankAction):
    """Send the cell to ranks."""

    cell: int


class SendInterrupt(RankAction):
    """Interrupt the cell on ranks.

    Attributes:
        rank_died: whether another rank died.
        after_step: whether all ranks try to stop after the same step,
        is_second: or the user does not want to wait for it.
    """

    cell: int
    rank_died: bool = False
    after_step: bool = False
    is_second: bool = False


class Terminate(RankAction):
    """Send SIGTERM."""


class Kill(RankAction):
    """Send SIGKILL."""


class SetDeadline(Action):
    """Feed ``event`` to the lifecycle after this many seconds."""

    seconds: float
    event: DeadlinePassed


class Refuse(Action):
    """Refuse the user's request, with the reason."""

    reason: str


class Notify(Action):
    """Show a notice to the user while the cell runs."""

    text: str


class RecordNode(Action):
    """Record in the event log that a node joined or was lost."""

    text: str


class GroupStarted(Action):
    """Report that all ranks are ready."""


class GroupStartFailed(Action):
    """Report that the start failed; the other ranks are stopped."""

    reason: str
    details: str = ""


class CellFinished(Action):
    """Report that all ranks have ended the cell, or are dead.

    ``is_outgrown``: it was ended because a restart would give more ranks.
    """

    cell: int
    is_outgrown: bool = False


class GroupStopped(Action):
    """Report that all processes have exited."""
