"""The actor: the state of a worker group, and the one thread that changes it.

All methods run on the session's thread, so the state needs no locks. ``Session`` calls them there
for callers on other threads; the parts of the actor (``executor``, ``message_handler``,
``heal_requests``), timers and exits of processes call them too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from nbddp.controller.actor_state import ActorState
from nbddp.controller.cell_hooks import hang_causes
from nbddp.controller.executor import Executor
from nbddp.controller.message_handler import MessageHandler
from nbddp.controller.rank_processes import short_error
from nbddp.controller.run_facts import WRITE_INTERVAL, start_git_query
from nbddp.errors import RequestError, StartError
from nbddp.formatting import BY_USER
from nbddp.launch.local_launcher import Launcher
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import refusals
from nbddp.lifecycle.group_state import GroupState
from nbddp.lifecycle.retries import AttemptFailure
from nbddp.record import run_events
from nbddp.record.cell import CellHandle, CellRequest, ReplayEntry
from nbddp.record.heal.heal_report import Healed
from nbddp.record.notices import HangReport
from nbddp.record.push_store import PushRecord
from nbddp.record.rank_monitor import CHECK_PERIOD
from nbddp.record.verdict import RESTART_WITH_REPLAY
from nbddp.sigint import Future
from nbddp.wire.messages import InputReply
from nbddp.wire.request_messages import Answer, Request

if TYPE_CHECKING:
    from nbddp.controller.surviving_group import SurvivingGroup
    from nbddp.controller.threads import Runtime
    from nbddp.wire.group_spec import GroupSpec


class GroupActor:
    """One worker group: its state, its ranks, and what they report.

    Attributes:
        state: what the parts of the actor share.
        executor: carries out the actions of the lifecycle.
        messages: handles what the ranks report.

    Args:
        launcher: starts the ranks.
        colors: the colors of IPython in the ranks.
        describe_name: says how to get a name that the ranks do not have from the notebook.
    """

    def __init__(
        self, launcher: Launcher, colors: str, describe_name: Callable[[str], str]
    ) -> None:
        self.state = ActorState(launcher)
        self.messages = MessageHandler(self.state)
        self.executor = Executor(self.state, self.messages, colors)
        self.state.carry_out = self.executor.carry_out
        self._describe_name = describe_name

    def open(self, runtime: Runtime) -> None:
        """Use this connection to the ranks, and read their messages."""
        self.state.open(runtime)
        runtime.start_readers(self.messages.handle, self.executor.on_link_lost)

    # ---- the lifecycle

    def _request(self, event: ev.Event) -> None:
        refusal = self.state.step(event)
        if refusal:
            raise RequestError(refusal)

    def use_launcher(self, launcher: Launcher) -> None:
        """Use another launcher from the next start on; no rank may be running."""
        self.state.launcher = launcher

    def on_node_event(self, event: ev.NodeEvent) -> None:
        """Feed a node's event to the lifecycle. Report free capacity if a new node adds some."""
        state = self.state
        if isinstance(event, ev.NodeJoined) and state.launcher.has_free_capacity():
            state.step(replace(event, adds_capacity=True))
            state.step(ev.CapacityChanged())
        else:
            state.step(event)

    # ---- start and stop

    def request_start(
        self,
        spec: GroupSpec,
        event: ev.Event,
        *,
        is_recovery: bool = False,
        survivors: SurvivingGroup | None = None,
    ) -> Future[None]:
        """Start, restart or rejoin the ranks. In a recovery, faults that have fired do not fire."""
        state = self.state
        before, state.spec = state.spec, spec
        self.executor.survivors = survivors
        if not is_recovery:
            state.fired_faults = frozenset()
        if isinstance(event, ev.RestartAsked):  # a start is refused while a cell runs
            how = RESTART_WITH_REPLAY if is_recovery else "restart"
            self._mark_cell_ended(how, run_events.RestartAsked())
        is_new = state.event_log.folder is None
        earlier_cell = state.cell
        handle = survivors.cell_handle(state.runtime.link.load_payload) if survivors else None
        state.cell = handle or earlier_cell
        try:
            self._request(event)
        except RequestError:
            state.spec, state.cell = before, earlier_cell
            raise
        if handle is not None:
            self._watch_cell(handle)
        if is_new:
            submit = state.runtime.event_thread.submit
            add_facts = state.event_log.add_facts
            start_git_query(spec.cwd(), lambda origin: submit(add_facts, {"git": origin}))
        state.futures.reject(StartError("restarted before it was ready"), "start")
        return state.futures.new("start")

    def pending_start_or_stop(self) -> list[Future[None]]:
        """Return a future for the start or stop that is in progress, if there is one."""
        state = self.state
        is_starting = state.life.state is GroupState.STARTING or state.life.next_start
        is_stopping = state.life.state is GroupState.STOPPING
        key = "start" if is_starting else "stop"
        return [state.futures.new(key)] if is_starting or is_stopping else []

    def request_stop(self) -> Future[None]:
        """Stop all ranks, and do not wait."""
        state = self.state
        future = state.futures.new("stop")
        self._mark_cell_ended("stop", run_events.StopAsked())
        state.step(ev.StopAsked())
        if not state.life.state.is_live:
            state.futures.resolve("stop")
        return future

    # ---- cells

    def submit(self, request: CellRequest, *, is_elastic: bool = False) -> CellHandle:
        """Send a cell to the ranks, and do not wait for its end.

        An elastic cell ends when a node joins, if a restart would then give more ranks.

        Raises:
            RequestError: the group cannot run the cell now; nothing has changed.
        """
        state = self.state
        if not state.life.state.is_live:
            raise RequestError(refusals.NO_GROUP)
        ranks = state.life.all_ranks if request.ranks is None else request.ranks
        before = state.cell
        logs = state.event_log.log_sizes(ranks)  # before the ranks write
        state.newest_cell += 1
        killed = {rank: BY_USER for rank, each in state.ranks.causes.items() if each == BY_USER}
        state.ranks.causes = killed
        state.cell = handle = CellHandle(
            state.newest_cell,
            request,
            ranks,
            state.runtime.link.load_payload,
            attempt=state.life.attempt,
            run_attempt=state.life.run_attempt,
            has_other_ranks=not {*state.life.alive} <= {*ranks},
            lost=state.replay_log.lost,
            causes=state.ranks.causes,
            describe_name=lambda name: (
                state.replay_log.describe_not_carried(name) or self._describe_name(name)
            ),
        )
        event = ev.RunAsked(
            cell=handle.number,
            ranks=ranks,
            needs_group=request.needs_group,
            is_elastic=is_elastic,
        )
        try:
            self._request(event)
        except RequestError:
            state.cell = before
            raise
        state.event_log.record(handle.start_event(logs))
        self._watch_cell(handle)
        if is_elastic and state.launcher.has_free_capacity():  # a node joined just now
            state.step(ev.CapacityChanged())
        return handle

    def _watch_cell(self, handle: CellHandle) -> None:
        """Check the progress of a cell at intervals until it ends."""
        state = self.state
        request, now = handle.request, time.monotonic()
        state.rank_monitor.reset_for_cell(
            handle.ranks, now, cell=handle.number, purpose=request.purpose
        )
        causes = partial(hang_causes, state.cell_hooks, request)
        state.rank_monitor.hangs.likely_causes = cache(causes)
        state.runtime.event_thread.call_later(CHECK_PERIOD, self._check_progress, handle)
        state.router.pending.move_to(handle.notice_queue)

    def _check_progress(self, handle: CellHandle) -> None:
        state = self.state
        cell = state.life.cell
        if cell is None or cell.number != handle.number:
            return
        state.runtime.event_thread.call_later(CHECK_PERIOD, self._check_progress, handle)
        state.write_run_json(min_interval=WRITE_INTERVAL)
        outside = [rank for rank in state.life.all_ranks if rank not in handle.ranks]
        text = state.rank_monitor.hangs.check(
            cell.number, cell.waiting, handle.ranks, time.monotonic(), outside=outside
        )
        if text and state.life.state is GroupState.RUNNING:
            state.router.publish(HangReport(text))
            state.event_log.record(run_events.NoProgress(text=text))

    def _mark_cell_ended(self, how: str, request: run_events.RunEvent) -> None:
        """Mark the running cell as ended by the user, so that its ranks do not count as failed."""
        state = self.state
        if state.cell is not None and state.life.state.is_busy:
            state.cell.set_ended_by(how)
            state.event_log.record(request)

    def answer(self, rank: int, answer: InputReply) -> None:
        """Send a rank the answer to its question, and keep it for a replay."""
        state = self.state
        if state.cell is not None:
            state.cell.record_answer(rank, answer)
        state.send_answer(rank, answer)

    # ---- single ranks, and heals

    def request_kill(self, rank: int) -> Future[None]:
        """Kill one rank, and do not wait."""
        state = self.state
        self._request(ev.KillAsked(rank=rank))
        state.event_log.record(run_events.KillAsked(rank=rank))
        state.ranks.causes[rank] = BY_USER
        return state.futures.new("kill", rank)

    def pending_exits(self) -> list[Future[None]]:
        """Return a future for each process that was killed but has not exited yet."""
        state = self.state
        ending = [rank for rank in state.pids() if state.ranks.handles[rank].is_ending()]
        return [state.futures.new("kill", rank) for rank in ending]

    def request_heal(self, ranks: Sequence[int] = (), donor: int | None = None) -> Future[Healed]:
        """Replace dead ranks by new processes, and do not wait."""
        state = self.state
        chosen = tuple(sorted({*ranks})) or state.life.gone
        for rank, pid in state.stopped_ranks():
            raise RequestError(
                f"rank {rank} is stopped (SIGSTOP) and cannot join the others: "
                f"`kill -CONT {pid}` resumes it, `%ddp kill {rank}` ends it"
            )
        state.launcher.reassign(chosen)
        self._request(ev.HealAsked(ranks=chosen, donor=donor))
        return state.futures.new("heal")

    def send_request(self, rank: int, request: Request) -> Future[Answer]:
        """Send a numbered request to an idle rank. Return a future for its answer."""
        state = self.state
        if state.life.state not in (GroupState.IDLE, GroupState.BROKEN, GroupState.HEALING):
            raise RequestError(refusals.not_ready(state.life))
        if not state.life.is_alive(rank):
            raise RequestError(refusals.rank_not_running(state.life, rank))
        try:
            return state.request(rank, request)
        except Exception as error:  # any error of the store
            raise RequestError(f"rank {rank} cannot be reached: {short_error(error)}") from error

    # ---- records

    def set_pending(self, entries: Sequence[ReplayEntry], *, is_all: bool = False) -> None:
        """Set the entries that a replay did not run. ``is_all``: it ran none."""
        self.state.replay_log.set_pending(entries, clears_entries=is_all)

    def record_push(self, pushed: PushRecord) -> None:
        """Add a push to the replay log, and show its notice."""
        self.state.replay_log.add(pushed)
        self.state.router.notify(pushed.notice)

    def record_recovery(self, recovery: AttemptFailure) -> None:
        """Record a recovery; its cost is known at the next step that a rank reports."""
        state = self.state
        state.recovery = recovery
        cost = vars(recovery.cost)
        state.event_log.record(run_events.Recovered(attempt=state.life.run_attempt, **cost))


def start_event(spec: GroupSpec) -> ev.StartAsked:
    """Return the lifecycle's event for a start with these options."""
    return ev.StartAsked(
        world_size=spec.nproc, joins_group=spec.joins_group, grace=spec.grace, ranks=spec.ranks
    )
