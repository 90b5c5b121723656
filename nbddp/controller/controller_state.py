"""The state of a worker group, which the parts of the controller share."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from nbddp.controller.pending_futures import PendingFutures
from nbddp.controller.rank_processes import RankProcesses
from nbddp.controller.threads import Runtime
from nbddp.errors import RequestError, StartError
from nbddp.launch.local_launcher import Launcher
from nbddp.lifecycle.group_state import Life
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.record.cell import CellHandle, NoticeRouter
from nbddp.record.event_log import EventLog
from nbddp.record.rank_monitor import RankMonitor
from nbddp.record.replay_log import ReplayLog
from nbddp.wire.messages import InputReply

if TYPE_CHECKING:
    from nbddp.controller.group_spec import GroupSpec


class ControllerState:
    """The state of a worker group. Only the session's thread changes it, so it needs no locks.

    Attributes:
        life: the state of the lifecycle.
        launcher: starts the ranks of the next start.
        spec, cell: the spec of the last start; the cell that runs, or the last one.
        replay_log: the cells and pushes of this attempt.
        numbers: the numbers of requests to ranks.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.life = Life()
        self.launcher = launcher
        self.spec: GroupSpec | None = None
        self.cell: CellHandle | None = None
        self.runtime: Runtime | None = None
        self.ranks: RankProcesses | None = None
        self.replay_log = ReplayLog()
        self.router = NoticeRouter(lambda: self.cell)
        self.event_log = EventLog(self.router.notify)
        self.rank_monitor = RankMonitor(
            lambda rank: self.ranks is not None and self.ranks.is_stopped(rank),
            lambda rank: self.ranks is not None and self.ranks.is_working(rank),
        )
        self.futures = PendingFutures()
        self.numbers = itertools.count(1)
        self.start_error: StartError | None = None

    @property
    def active_runtime(self) -> Runtime:
        """Return the connection to the ranks and the threads.

        Raises:
            RequestError: no group is running.
        """
        if self.runtime is None:
            raise RequestError(NO_GROUP)
        return self.runtime

    def drop_runtime(self) -> None:
        """Drop the connection and the threads after all processes have exited."""
        self.runtime = self.ranks = self.cell = None

    def process_ids(self) -> dict[int, int]:
        """Return the process id of each rank that is alive."""
        return self.ranks.pids(self.life.alive) if self.ranks else {}

    def stopped_ranks(self) -> tuple[tuple[int, int], ...]:
        """Return the ranks that are stopped by SIGSTOP, with their process ids."""
        return self.ranks.stopped_ranks(self.life.alive) if self.ranks else ()

    def exiting_ranks(self) -> list[int]:
        """Return the ranks whose process was killed but has not exited yet."""
        return self.ranks.exiting_ranks(self.life.alive) if self.ranks else []

    def answer(self, rank: int, answer: InputReply) -> None:
        """Send a rank the answer to its question, if the rank is still alive."""
        if self.life.is_alive(rank):
            self.active_runtime.link.send(rank, answer)

    def keep_start_error(self, error: StartError) -> None:
        """Keep the first error of a start that failed."""
        self.start_error = self.start_error or error
