"""The state of a worker group, and how an event changes it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from nbddp.controller.cell_hooks import CellHooks, run_facts
from nbddp.controller.pending_futures import PendingFutures
from nbddp.controller.rank_processes import RankProcesses
from nbddp.controller.run_facts import known_facts
from nbddp.errors import RequestError, StartError
from nbddp.extension.guard import Guard, Hooks
from nbddp.launch.local_launcher import Launcher
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import refusals
from nbddp.lifecycle.group_state import Life
from nbddp.lifecycle.retries import AttemptFailure
from nbddp.lifecycle.transitions import advance
from nbddp.record.cell import CellHandle, NoticeRouter
from nbddp.record.event_log import EventLog
from nbddp.record.rank_monitor import RankMonitor
from nbddp.record.replay_log import ReplayLog
from nbddp.record.run_events import InterruptAsked
from nbddp.sigint import Future
from nbddp.wire.messages import InputReply, Ready
from nbddp.wire.request_messages import Answer, Request

if TYPE_CHECKING:
    from nbddp.controller.threads import Runtime
    from nbddp.wire.group_spec import GroupSpec

logger = logging.getLogger(__name__)


class ActorState:
    """The state of one worker group, which the parts of its actor share.

    Only the session's thread changes it, so it needs no locks.

    Attributes:
        life: the state of the lifecycle.
        launcher: starts the ranks of the next start.
        spec: the spec of the last start.
        cell: the cell that runs, or the last one.
        cell_hooks: what extensions know of cells.
        ranks: the processes of the last start; there are none before.
        ready: the ``Ready`` message of each rank.
        recovery: the recovery that this attempt began with, until its first step is reported.
        fired_faults: the faults that have fired since the last start that was not a recovery.
        armed_faults: the faults that are armed in each rank.
        newest_cell: the highest number of a cell that these ranks have had.
        replay_log: the cells and pushes of this attempt.
        start_error: the first error of a start that failed.
        carry_out: carries out an action of the lifecycle.
        numbers: the numbers of requests to ranks. Any thread may take the next one.
        cleanup: done when all that dead ranks left behind is killed; None if no rank has died.

    Args:
        launcher: starts the ranks of the first start.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.life = Life()
        self.launcher = launcher
        self.spec: GroupSpec | None = None
        self.cell: CellHandle | None = None
        self.ranks = RankProcesses()
        self.ready: dict[int, Ready] = {}
        self.recovery: AttemptFailure | None = None
        self.fired_faults: frozenset[str] = frozenset()
        self.armed_faults: dict[int, list[str]] = {}
        self.newest_cell = 0
        self.replay_log = ReplayLog()
        self.router = NoticeRouter(lambda: self.cell)
        guard = Guard(self.router.notify, lambda: self.life.attempt)
        self.cell_hooks: Hooks[CellHooks] = Hooks("cells", guard)
        self.event_log = EventLog(self.router.notify)
        self.rank_monitor = RankMonitor(
            lambda rank: self.ranks.is_stopped(rank), lambda rank: self.ranks.is_working(rank)
        )
        self.futures = PendingFutures()
        self.numbers = itertools.count(1)
        self.cleanup: Future[None] | None = None
        self.start_error: StartError | None = None
        self.carry_out: Callable[[ev.Action], None] = lambda _action: None
        self._runtime: Runtime | None = None

    def open(self, runtime: Runtime | None) -> None:
        """Use this connection to the ranks; None after all processes have exited."""
        self._runtime = runtime
        if runtime is None:
            self.cell = None
            self.ranks = RankProcesses()

    @property
    def runtime(self) -> Runtime:
        """The connection to the ranks and the threads.

        Raises:
            RequestError: no group is running.
        """
        if self._runtime is None:
            raise RequestError(refusals.NO_GROUP)
        return self._runtime

    def step(self, event: ev.Event) -> str:
        """Feed an event to the lifecycle and carry out its actions.

        Return why the lifecycle refuses the event; empty if it does not.
        """
        before = self.life.cell
        self.life, actions = advance(self.life, event)
        cell = self.life.cell
        if before is not None and cell is not None and cell.interrupts > before.interrupts:
            self.event_log.record(InterruptAsked())
        refusal = ""
        for action in actions:
            if isinstance(action, ev.Refuse):
                refusal = action.reason
            else:
                self.carry_out(action)
        return refusal

    def interrupt_once(self) -> None:
        """Interrupt the running cell, unless it was interrupted before."""
        if self.life.cell is not None and not self.life.cell.interrupts:
            self.step(ev.InterruptAsked())

    def request(self, rank: int, request: Request) -> Future[Answer]:
        """Send a numbered request to a rank. Return a future for its answer."""
        self.runtime.link.send(rank, request)
        return self.futures.new("answer", rank, request.request)

    def send_answer(self, rank: int, answer: InputReply) -> None:
        """Send a rank the answer to its question, if the rank is still alive."""
        if self.life.is_alive(rank):
            self.runtime.link.send(rank, answer)

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that is alive."""
        handles = self.ranks.handles
        return {rank: handles[rank].pid or 0 for rank in self.life.alive if rank in handles}

    def stopped_ranks(self) -> tuple[tuple[int, int], ...]:
        """Return the ranks that are stopped by SIGSTOP, with their process ids."""
        stopped = self.ranks.is_stopped
        return tuple((rank, pid) for rank, pid in self.pids().items() if stopped(rank))

    def importing_ranks(self, cell: int) -> tuple[tuple[int, str], ...]:
        """Return the ranks that import a module in a cell, with its name."""
        beats = self.rank_monitor.hangs.heartbeats.items()
        statuses = [(rank, each.status) for rank, each in beats if each.status.cell == cell]
        return tuple((rank, each.importing) for rank, each in statuses if each.importing)

    @property
    def armed_now(self) -> tuple[str, ...]:
        """The faults that are armed in living ranks."""
        of_ranks = (self.armed_faults.get(rank, ()) for rank in self.life.alive)
        return tuple(fault for armed in of_ranks for fault in armed)

    def record_fired(self, faults: Set[str]) -> None:
        """Record that faults have fired, so that no recovery or replay arms them again."""
        self.fired_faults |= faults
        for rank, armed in self.armed_faults.items():
            self.armed_faults[rank] = [fault for fault in armed if fault not in faults]

    def keep_start_error(self, error: StartError) -> None:
        """Keep the first error of a start that failed."""
        self.start_error = self.start_error or error

    def reject_heal(self, why: str, *, is_refused: bool = False) -> None:
        """End the waits for a heal with an error."""
        prefix = refusals.CANNOT_HEAL if is_refused else refusals.NOT_HEALED
        self.futures.reject(RequestError(f"{prefix}: {why}"), "heal")

    def write_run_json(self, *, min_interval: float = 0.0) -> None:
        """Write ``run.json``. An error is logged only: a rank must not be lost for a record.

        ``min_interval``: seconds since the last write that must have passed.
        """
        if self.event_log.seconds_since_written() < min_interval:
            return
        try:
            facts = known_facts(self.ready, self.rank_monitor)
            result = self.cell.result if self.cell is not None else None
            if result is not None and self.rank_monitor.first_step is not None:
                facts |= run_facts(self.cell_hooks, result)  # an evaluation has no steps
            self.event_log.add_facts(facts)
        except Exception:
            logger.exception("nbddp could not write the facts of the run")
