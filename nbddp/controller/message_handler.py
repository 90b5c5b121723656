"""Handle what ranks report and how their processes exit: record it, and feed the lifecycle."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from nbddp.controller.rank_processes import short_error
from nbddp.errors import RequestError
from nbddp.formatting import describe_exit
from nbddp.launch.local_launcher import RankHandle
from nbddp.launch.memory import MemoryWatch
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import refusals
from nbddp.record import run_events
from nbddp.record.notices import InputClosed, InputRequest, RichOutput
from nbddp.sigint import Future
from nbddp.wire import messages as msg
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.wire.envelope import Envelope
from nbddp.wire.request_messages import Answer

if TYPE_CHECKING:
    from nbddp.controller.actor_state import ActorState


class MessageHandler:
    """Handles the messages and exits of the ranks, as a part of the actor and on its thread.

    Args:
        state: the state of the actor, which gets the events for the lifecycle.
    """

    def __init__(self, state: ActorState) -> None:
        self._state = state
        self._memory = MemoryWatch()

    def handle(self, envelope: Envelope) -> None:  # noqa: C901 - one or two lines per case
        """Handle a message of a rank."""
        state = self._state
        if not self._accepts(envelope):
            return
        rank, attempt = envelope.sender, envelope.attempt
        if envelope.missing:
            state.router.notify(msg.missing_messages(envelope.missing, f"of rank {rank}"))
        match envelope.message:
            case msg.Output() as output:
                state.router.publish(state.ranks.unseen_output(rank, output))
            case msg.InputRequested(question=question) if not state.router.has_reader:
                state.send_answer(rank, msg.InputReply(question=question, is_end=True))
            case msg.Display() as display:
                state.router.publish(RichOutput(rank, display))
            case msg.InputRequested() as request:
                state.router.publish(InputRequest(rank, request))
            case msg.InputCancelled(question=question):
                state.router.publish(InputClosed(rank, question))
            case Answer() as answer:
                state.rank_monitor.values.add(rank, state.newest_cell, answer.content.get("values"))
                state.futures.resolve("answer", rank, answer.request, value=answer)
            case msg.Ready() as ready:
                state.ready[rank] = ready
                state.armed_faults.pop(rank, None)
                state.newest_cell = max(state.newest_cell, ready.cell)
                cell = state.life.cell if state.life.is_rejoin else None
                state.step(ev.RankReady(attempt=attempt, rank=rank))
                if cell is not None and ready.cell < cell.number:
                    self.on_cell_not_sent(rank, cell.number, "its notebook ended")
            case msg.StartFailed(reason=reason, traceback=traceback):
                failed = ev.RankStartFailed(
                    attempt=attempt, rank=rank, reason=reason, details=traceback
                )
                state.step(failed)
            case CollectiveArrivals() as arrivals:
                clock = state.launcher.clock_offset(rank)
                state.rank_monitor.add(rank, arrivals, time.monotonic(), clock)
            case msg.RankStatus() | msg.Metrics() | msg.Progress() as status:
                state.rank_monitor.add(rank, status, time.monotonic())
                self._record_recovery()
            case msg.EventReported(kind=kind, facts=facts):
                event = run_events.reported_event(rank, kind, facts)
                state.event_log.record(event)
                if isinstance(event, run_events.FaultFired):
                    state.record_fired({event.fault})
                    state.ranks.causes[rank] = event.fault
            case msg.InterruptAcknowledged(cell=cell):
                state.step(ev.RankAcknowledged(attempt=attempt, rank=rank, cell=cell))
            case msg.StepAwaited(cell=cell, seconds=seconds):
                state.step(ev.StepAwaited(attempt=attempt, rank=rank, cell=cell, seconds=seconds))
            case msg.CellEnded() as report:
                self.on_cell_ended(rank, attempt, report)

    def on_cell_not_sent(self, rank: int, cell: int, reason: str) -> None:
        """Handle a cell that could not be sent to a rank."""
        text = f"the cell could not be sent: {reason}"
        failure = msg.Failure(name="RequestError", text=text, traceback=text, at=time.time())
        report = msg.CellEnded(cell=cell, in_group=True, failure=asdict(failure))
        self.on_cell_ended(rank, self._state.life.attempt, report)

    def _accepts(self, envelope: Envelope) -> bool:
        """Return whether to handle an envelope now. Keep it if its sender is not registered yet."""
        life, ranks, rank = self._state.life, self._state.ranks, envelope.sender
        if (envelope.attempt, envelope.incarnation) != (life.attempt, life.incarnation(rank)):
            return False
        if rank not in ranks.handles:
            ranks.early_envelopes.setdefault(rank, []).append(envelope)
            return False
        return True

    def _record_recovery(self) -> None:
        """Record the cost of a failure when the first step after it is reported."""
        state, step = self._state, self._state.rank_monitor.first_step
        if state.recovery is not None and step is not None:
            seconds = round(time.time() - state.recovery.at, 3)
            lost, cost = state.recovery.repeated_steps(step), vars(state.recovery.cost)
            resumed = run_events.Resumed(step=step, lost=lost, seconds=seconds, **cost)
            state.event_log.record(resumed)
            state.recovery = None

    def on_cell_ended(self, rank: int, attempt: int, report: msg.CellEnded) -> None:
        """Handle the end of a cell on a rank."""
        state = self._state
        state.armed_faults[rank] = report.armed
        try:
            if state.cell is not None and state.cell.number == report.cell:
                state.cell.add_report(rank, report)
                state.rank_monitor.values.add(rank, report.cell, report.values)
                failure = state.cell.failure(rank)
                if failure is not None and not failure.is_consequence:
                    what = failure.headline()
                    state.event_log.record(run_events.RankFailed(rank=rank, what=what))
                if report.is_quit:
                    state.interrupt_once()
        finally:
            ended = ev.RankEndedCell(
                attempt=attempt,
                rank=rank,
                cell=report.cell,
                is_ok=report.is_ok,
                # interrupted ranks may have stopped at different steps: they form a new group
                in_group=report.in_group and not report.is_interrupted,
                # a rank that has failed before a step is behind, although no rank waits for it
                sequence=report.sequence + report.steps,
            )
            state.step(ended)

    def on_launch_failed(self, attempt: int, rank: int, error: Exception) -> None:
        """Handle a rank that could not be started."""
        state = self._state
        if attempt == state.life.attempt and state.life.is_alive(rank):
            reason = short_error(error)
            state.step(ev.RankStartFailed(attempt=attempt, rank=rank, reason=reason))
            self.on_rank_gone(attempt, rank, None)

    def on_exit(self, attempt: int, rank: int, handle: RankHandle) -> None:
        """Handle the exit of a rank's process."""
        state = self._state
        is_current = state.ranks.handles.get(rank) is handle
        try:
            reason = handle.exit_reason
            handle.join()  # returns at once, and frees the pipes of multiprocessing
            if handle.exitcode != 0 or state.life.state.is_busy:  # a cell may call os._exit(0)
                cause = state.ranks.causes.get(rank, "") if is_current else ""
                how = describe_exit(handle.exitcode, cause) + (f" ({reason})" if reason else "")
                number = attempt - state.life.attempts_before_run
                state.event_log.record(run_events.RankExited(rank=rank, attempt=number, how=how))
            self._kill_orphans(handle)
        finally:
            if is_current:
                self.on_rank_gone(attempt, rank, handle.exitcode, reason)

    def _kill_orphans(self, handle: RankHandle) -> None:
        """Kill what the rank left behind, before the next launch.

        That can take 2 s for each rank. Meanwhile this thread handles messages.
        """
        thread, done = self._state.runtime.launch_thread, Future[None]()
        thread.submit(self._state.launcher.kill_orphans, handle)
        if thread.submit(done.complete_with, lambda: None):
            self._state.cleanup = done

    def on_rank_gone(self, attempt: int, rank: int, exitcode: int | None, reason: str = "") -> None:
        """Handle a rank that has no process, or never had one: end all waits for it."""
        state = self._state
        if attempt != state.life.attempt or not state.life.is_alive(rank):
            return  # it was abandoned before
        try:
            self._read_final_output(rank, exitcode, reason)
        finally:
            running = state.life.cell
            if running is not None and state.cell is not None and rank in running.waiting:
                source = state.cell.request.source
                state.rank_monitor.values.add_death(rank, running.number, source)
            exited = ev.ProcessExited(
                attempt=attempt,
                rank=rank,
                exitcode=exitcode,
                cause=state.ranks.causes.get(rank, ""),
                is_reported=bool(reason),  # the user already knows that the node is lost
            )
            state.step(exited)
            self.end_waits(rank, exitcode)

    def end_waits(self, rank: int, exitcode: int | None) -> None:
        """Resolve the kills of a dead rank, and reject its pending answers."""
        self._state.futures.resolve("kill", rank)
        how = describe_exit(exitcode, self._state.ranks.causes.get(rank, ""))
        reason = refusals.exited_before_answer(self._state.life, rank, how)
        self._state.futures.reject(RequestError(reason), "answer", rank)

    def _read_final_output(self, rank: int, exitcode: int | None, reason: str) -> None:
        state, ranks = self._state, self._state.ranks
        final_output, hint = "", reason
        try:
            if rank in ranks.handles:
                state.router.publish_to_running(ranks.logs[rank].remaining())
                final_output = ranks.logs[rank].final_output()
                if not reason and exitcode == -signal.SIGKILL and rank not in ranks.killed:
                    hint = self._memory.hint(state.rank_monitor.hangs.memory_used())
        finally:
            if state.cell is not None:
                state.cell.add_exit(rank, exitcode, final_output=final_output, hint=hint)
