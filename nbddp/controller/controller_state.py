"""The state of a worker group, which the parts of the controller share."""

from __future__ import annotations

import itertools
from collections.abc import Set

from nbddp.controller.pending_futures import PendingFutures
from nbddp.controller.threads import Runtime
from nbddp.errors import RequestError, StartError
from nbddp.launch.local_launcher import Launcher
from nbddp.lifecycle.events import StartAsked
from nbddp.lifecycle.group_state import Life
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.lifecycle.retries import AttemptFailure
from nbddp.record.cell import CellHandle, NoticeRouter
from nbddp.record.event_log import EventLog
from nbddp.record.rank_monitor import RankMonitor
from nbddp.record.replay_log import ReplayLog
from nbddp.sigint import Future
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.messages import InputReply, Ready
from nbddp.wire.request_messages import Answer, Request


class ControllerState:
    """The state of a worker group. Only the session's thread changes it, so it needs no locks.

    Attributes:
        life: the state of the lifecycle.
        launcher: starts the ranks of the next start.
        spec, cell: the spec of the last start; the cell that runs, or the last one.
        replay_log: the cells and pushes of this attempt.
        ready: the ``Ready`` message of each rank.
        recovery: the recovery that this attempt began with, until its first step is reported.
        fired_faults: the faults that have fired since the last start that was not a recovery.
        armed_faults: the faults that are armed in each rank.
        newest_cell: the highest number of a cell that these ranks have had.
        numbers: the numbers of requests to ranks.
        cleanup: done when all that dead ranks left behind is killed; None if no rank has died.
    """

    def __init__(self, launcher: Launcher, rank_monitor: RankMonitor) -> None:
        self.life = Life()
        self.launcher = launcher
        self.spec: GroupSpec | None = None
        self.cell: CellHandle | None = None
        self.runtime: Runtime | None = None
        self.ready: dict[int, Ready] = {}
        self.recovery: AttemptFailure | None = None
        self.fired_faults: set[str] = set()
        self.armed_faults: dict[int, list[str]] = {}
        self.newest_cell = 0
        self.replay_log = ReplayLog()
        self.router = NoticeRouter(lambda: self.cell)
        self.event_log = EventLog(self.router.notify)
        self.rank_monitor = rank_monitor
        self.futures = PendingFutures()
        self.numbers = itertools.count(1)
        self.cleanup: Future[None] | None = None
        self.start_error: StartError | None = None

    @property
    def armed_now(self) -> tuple[str, ...]:
        """The faults that are armed in living ranks."""
        of_ranks = (self.armed_faults.get(rank, ()) for rank in self.life.alive)
        return tuple(fault for armed in of_ranks for fault in armed)

    def record_fired(self, faults: Set[str]) -> None:
        """Record that faults have fired, so that they are not armed any more."""
        self.fired_faults |= faults
        for rank, armed in self.armed_faults.items():
            self.armed_faults[rank] = [each for each in armed if each not in faults]

    @property
    def active_runtime(self) -> Runtime:
        """Return the connection to the ranks and the threads.

        Raises:
            RequestError: no group is running.
        """
        if self.runtime is None:
            raise RequestError(NO_GROUP)
        return self.runtime

    def request(self, rank: int, request: Request) -> Future[Answer]:
        """Send a numbered request to a rank. Return a future for its answer."""
        self.active_runtime.link.send(rank, request)
        return self.futures.new("answer", rank, request.request)

    def send_answer(self, rank: int, answer: InputReply) -> None:
        """Send a rank the answer to its question, if the rank is still alive."""
        if self.life.is_alive(rank):
            self.active_runtime.link.send(rank, answer)

    def keep_start_error(self, error: StartError) -> None:
        """Keep the first error of a start that failed."""
        self.start_error = self.start_error or error


def start_event(spec: GroupSpec) -> StartAsked:
    """Return the lifecycle's event for a start with these options."""
    return StartAsked(
        world_size=spec.nproc, joins_group=spec.joins_group, grace=spec.grace, ranks=spec.ranks
    )
