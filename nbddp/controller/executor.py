"""Carry out the actions of the lifecycle: start, rejoin, signal and kill ranks, and send to them.

A rank that cannot be reached is killed. A rank that has no process, or cannot be watched or killed,
is abandoned: it counts as exited, so that nothing waits for it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.controller.actor_state import ActorState
from nbddp.controller.heal_requests import HealRequests
from nbddp.controller.message_handler import MessageHandler
from nbddp.controller.rank_processes import (
    FailedRanks,
    RankProcesses,
    short_error,
    start_error,
    try_each,
)
from nbddp.errors import NbddpError, StartError
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.lifecycle import events as ev
from nbddp.record import run_events
from nbddp.record.cell import CellResult
from nbddp.record.log_reader import LogReader, log_name
from nbddp.topology import describe_overload
from nbddp.wire import messages as msg
from nbddp.wire.rank_start import RankStart

if TYPE_CHECKING:
    from nbddp.controller.surviving_group import SurvivingGroup
    from nbddp.controller.threads import Runtime
    from nbddp.wire.group_spec import GroupSpec


logger = logging.getLogger(__name__)


class Executor:
    """Carries out the actions of the lifecycle, as a part of the actor and on its thread.

    Attributes:
        survivors: the ranks of an earlier notebook, for the next rejoin.

    Args:
        state: the state of the actor.
        messages: handles the messages and the exits of the ranks that start.
        colors: the colors of IPython in the ranks.
    """

    def __init__(self, state: ActorState, messages: MessageHandler, colors: str) -> None:
        self._state = state
        self._messages = messages
        self._colors = colors
        self.survivors: SurvivingGroup | None = None
        self._heal: HealRequests | None = None  # the running heal, or the last one

    def carry_out(self, action: ev.Action) -> None:
        """Carry out an action. If it fails on a rank, make sure that nothing waits for it."""
        try:
            failed = self._perform(action)
        except Exception as error:
            if not isinstance(error, NbddpError | OSError):
                logger.exception("nbddp could not carry out %s", type(action).__name__)
            is_start = isinstance(action, ev.StartRanks | ev.RejoinRanks)
            ranks = self._state.life.alive if is_start else getattr(action, "ranks", ())
            failed = dict.fromkeys(ranks, error)
        for rank, why in failed.items():
            self._handle_failed_action(action, rank, why)

    def _handle_failed_action(self, action: ev.Action, rank: int, error: Exception) -> None:
        """Report the cell or the heal as failed on this rank, or else kill the rank."""
        state, submit = self._state, self._state.runtime.event_thread.submit
        attempt, handles = state.life.attempt, state.ranks.handles
        match action:
            case ev.SendCell(cell=cell):
                submit(self._messages.on_cell_not_sent, rank, cell, short_error(error))
                return
            case ev.RequestNamespace(generation=generation):
                text = f"rank {rank} cannot be reached: {short_error(error)}"
                submit(
                    state.step,
                    ev.NamespacePickled(attempt=attempt, generation=generation, reason=text),
                )
                return
            case ev.StartReplacements():
                submit(self._messages.on_launch_failed, attempt, rank, error)
                return
            case ev.StartRanks():
                state.keep_start_error(start_error("the ranks", error))
            case ev.RejoinRanks() if not handles:
                cause = start_error("the ranks", error, verb="rejoined")
                text = f"{cause}; the ranks still run, and `%ddp nodes --rejoin` tries again"
                state.keep_start_error(StartError(text))
            case _ if rank in handles:
                failed = {ev.Kill: "killed: it counts as dead", ev.RejoinRanks: "watched: killed"}
                cannot = failed.get(type(action), "reached: killed")
                text = f"rank {rank} cannot be {cannot} ({short_error(error)})"
                state.router.notify(text)
                if isinstance(action, ev.RejoinRanks):  # it may be the only rank
                    state.keep_start_error(StartError(text))
        self._abandon(rank)

    def _abandon(self, rank: int) -> None:
        """Kill a rank that cannot be reached. If its exit will not be seen, count it as exited."""
        state = self._state
        if not state.ranks.abandon(rank):
            attempt, incarnation = state.life.attempt, state.life.incarnation(rank)
            state.runtime.event_thread.submit(self._report_abandoned, attempt, rank, incarnation)

    def _report_abandoned(self, attempt: int, rank: int, incarnation: int) -> None:
        if self._state.life.incarnation(rank) == incarnation:  # else it was healed meanwhile
            self._messages.on_rank_gone(attempt, rank, None)

    def _perform(self, action: ev.Action) -> FailedRanks:  # noqa: C901 - one or two lines per case
        """Carry out an action. Return the ranks on which it failed, with the errors."""
        state, ranks = self._state, self._state.ranks
        link = state.runtime.link
        match action:
            case ev.StartRanks():
                self._start_ranks()
            case ev.RejoinRanks() if self.survivors is not None:
                return self._rejoin(self.survivors)
            case ev.SetDeadline():
                state.runtime.event_thread.call_later(
                    action.seconds, self._on_deadline, action.event
                )
            case ev.Notify(text=text):
                state.router.notify(text)
            case ev.RecordNode(text=text):
                state.event_log.record(run_events.NodeChanged(what=text))
            case ev.GroupStarted():
                self._on_group_started()
            case ev.GroupStartFailed(reason=reason, details=details):
                self._on_start_failed(reason, details)
            case ev.CellFinished(is_outgrown=is_outgrown):
                self._finish_cell(is_outgrown=is_outgrown)
            case ev.GroupStopped():
                self._on_group_stopped()
            case ev.StartReplacements() if state.life.heal is not None:
                self._heal = HealRequests(
                    state,
                    state.life.heal,
                    lambda dead: self._launch(self._rank_starts(dead)),
                    self._messages.end_waits,
                )
                return self._heal.perform(action)
            case (
                ev.NoteReplacementsReady()
                | ev.RequestNamespace()
                | ev.RequestJoin()
                | ev.CancelJoin()
                | ev.HealFinished()
                | ev.HealFailed()
            ) if self._heal is not None:
                return self._heal.perform(action)
            case ev.Send(ranks=receivers, message=message):
                return try_each(receivers, lambda rank: link.send(rank, message))
            case ev.SendCell(ranks=receivers) if state.cell is not None:
                command = state.cell.run_message()
                for rank in receivers:
                    ranks.logs[rank].mark_cell_start()
                return try_each(receivers, lambda rank: link.send(rank, command))
            case ev.SendInterrupt(cell=number, is_second=True):
                link.end_step_wait(state.life.attempt, number)
            case ev.SendInterrupt():
                return self._interrupt(action)
            case ev.Terminate(ranks=chosen):
                return try_each(chosen, lambda rank: ranks.handles[rank].terminate())
            case ev.Kill(ranks=chosen):
                ranks.killed.update(chosen)
                return try_each(chosen, lambda rank: ranks.handles[rank].kill())
            case _:
                raise RuntimeError(f"not an action: {action}")
        return {}

    def _interrupt(self, action: ev.SendInterrupt) -> FailedRanks:
        """Send a signal before the message: C code that holds the GIL would delay the message.

        The signal is first, so that it cannot hit a cell that already got its interrupt.
        """
        ranks, link = self._state.ranks, self._state.runtime.link
        ranks.working_ranks(action.ranks)  # measure their CPU time from here on
        after_step = [*action.ranks] if action.after_step else []
        command = msg.Interrupt(cell=action.cell, rank_died=action.rank_died, ranks=after_step)

        def interrupt(rank: int) -> None:
            ranks.handles[rank].interrupt()
            link.send(rank, command)

        return try_each(action.ranks, interrupt)

    def _on_deadline(self, event: ev.DeadlinePassed) -> None:
        state = self._state
        stopped, working = state.stopped_ranks(), state.ranks.working_ranks(state.life.alive)
        importing = state.importing_ranks(event.cell)
        state.step(
            replace(
                event,
                stopped=stopped,
                working=working,
                importing=importing,
                overload=describe_overload(),
            )
        )

    def on_link_lost(self, error: Exception) -> None:
        """Kill all ranks, because their messages cannot be read any more."""
        state = self._state
        state.keep_start_error(start_error("the ranks", error))
        state.router.notify(f"killed all ranks: cannot read their messages ({short_error(error)})")
        for rank in state.life.alive:
            self._abandon(rank)

    # ---- start

    def _start_ranks(self) -> None:
        state, world_size = self._state, len(self._state.life.ranks)
        self._forget_earlier_ranks()
        state.replay_log.clear()
        state.launcher.assign(world_size)
        starts = self._rank_starts(state.life.alive)
        attempt = state.life.run_attempt
        state.event_log.record(run_events.RanksStarted(attempt=attempt, world_size=world_size))
        state.runtime.link.open_attempt(state.life.attempt, world_size)
        self._launch(starts)

    def _rejoin(self, survivors: SurvivingGroup) -> FailedRanks:
        """Connect to the running processes of an earlier notebook, and read their logs.

        If this raises an error, they keep running, for another rejoin. Return the ranks that cannot
        be watched, with the errors.
        """
        state, link = self._state, self._state.runtime.link
        self._forget_earlier_ranks()
        ranks = state.ranks
        state.event_log.resume(survivors.folder)
        folder = self._open_folder()
        link.use_secret(survivors.secret)
        link.open_attempt(survivors.attempt, survivors.world_size)
        begins = survivors.cell.logs or {} if survivors.cell else {}
        for rank in range(survivors.world_size):
            log = folder / log_name(rank)
            ranks.logs[rank] = LogReader(log, rank, begin=begins.get(str(rank)))
        for rank, survivor in survivors.ranks.items():
            if survivor.incarnation:
                link.open_incarnation(survivors.attempt, rank, survivor.incarnation)
        survivors.set_store_port(link.port)  # now they connect
        ranks.handles.update({rank: each.handle for rank, each in survivors.ranks.items()})
        failed = try_each(
            [*ranks.handles],
            lambda rank: self._watch(survivors.attempt, rank, ranks.handles[rank]),
        )
        ranks.abandoned.update(failed)
        self._on_rejoined(survivors, failed)
        return failed

    def _forget_earlier_ranks(self) -> None:
        """Forget the ranks of the last start, because others start now."""
        state = self._state
        state.start_error = None
        state.ranks = RankProcesses()
        state.ready = {}
        state.rank_monitor.clear_ranks()
        state.router.pending.drop_rank_output()  # the logs have it

    def _on_rejoined(self, survivors: SurvivingGroup, failed: Collection[int]) -> None:
        """Record that the ranks of an earlier notebook are watched, all but those that failed."""
        state = self._state
        state.replay_log.set_pending((), clears_entries=True)
        state.replay_log.is_rejoined = True
        rejoined = run_events.GroupRejoined(
            attempt=state.life.run_attempt,
            ranks=sorted(set(survivors.ranks) - set(failed)),
            world_size=survivors.world_size,
            pid=os.getpid(),
            at=time.time(),
        )
        state.event_log.record(rejoined)

    @property
    def _started_spec(self) -> GroupSpec:
        if self._state.spec is None:
            raise RuntimeError("a group was started without a spec")
        return self._state.spec

    def _open_folder(self) -> Path:
        spec = self._started_spec
        return self._state.event_log.open(spec.cwd(), spec.name, spec.facts())

    def _rank_starts(self, ranks: Sequence[int]) -> list[RankStart]:
        """Return the start parameters of these ranks."""
        state, spec, link = self._state, self._started_spec, self._state.runtime.link
        launcher, folder = state.launcher, self._open_folder()
        fired = {"NBDDP_STRUCK": ";".join(sorted(state.fired_faults))}
        joins_group = spec.joins_group and state.life.heal is None
        shared = replace(spec, joins_group=joins_group, more={})  # the rest is for the record
        return [
            RankStart(
                topology=place,
                spec=replace(
                    shared,
                    threads=spec.threads or max(1, launcher.cores(place) // place.local_world_size),
                ),
                store_port=link.port,
                store_prefix=link.prefix,
                attempt=state.life.attempt,
                run_attempt=state.life.run_attempt,
                secret=link.secret,
                log_path=str(folder / log_name(place.rank)),
                kernel_pid=os.getpid(),
                env=spec.environment(place.rank, launcher.base_env) | fired,
                sys_path=list(sys.path),
                cwd=str(spec.cwd()),
                incarnation=state.life.incarnation(place.rank),
                run_id=folder.name,
                colors=self._colors,
            )
            for place in launcher.topologies(spec.nproc, master_port=link.reserved_port)
            if place.rank in ranks
        ]

    def _launch(self, starts: Sequence[RankStart]) -> None:
        """Start a process for each rank. The launch thread may have to wait for the forkserver."""
        state, runtime = self._state, self._state.runtime
        for start in starts:
            rank = start.topology.rank
            if start.incarnation:
                runtime.link.open_incarnation(start.attempt, rank, start.incarnation)
            state.ranks.logs[rank] = LogReader(Path(start.log_path), rank)
        for start in starts:
            runtime.launch_thread.submit(self._start_process, start, state.launcher, runtime)

    def _start_process(self, start: RankStart, launcher: Launcher, runtime: Runtime) -> None:
        """Start a process, and pass it to the actor."""
        # On the launch thread.
        if start.topology.rank in self._state.ranks.abandoned or self._is_superseded(start):
            return
        submit = runtime.event_thread.submit
        try:
            handle = launcher.launch(start)
        except Exception as error:  # noqa: BLE001 - any error must end the wait for this rank
            submit(self._report_launch_failure, start, error)
            return
        if not submit(self._add_process, start, handle):  # the session was closed meanwhile
            handle.kill()
            handle.join()

    def _report_launch_failure(self, start: RankStart, error: Exception) -> None:
        if not self._is_superseded(start):
            self._messages.on_launch_failed(start.attempt, start.topology.rank, error)

    def _is_superseded(self, start: RankStart) -> bool:
        """Return whether this process is not the newest one of its rank any more."""
        life = self._state.life
        newest = life.attempt, life.incarnation(start.topology.rank)
        return (start.attempt, start.incarnation) != newest

    def _add_process(self, start: RankStart, handle: RankHandle) -> None:
        rank, ranks = start.topology.rank, self._state.ranks
        is_superseded = self._is_superseded(start)
        if not is_superseded:
            ranks.handles[rank] = handle
        try:
            self._watch(start.attempt, rank, handle)
        except OSError as error:
            self._report_launch_failure(start, error)
            handle.kill()
            return
        if is_superseded or rank in ranks.abandoned:  # nothing expects it any more
            handle.kill()
        if not is_superseded:
            for envelope in ranks.early_envelopes.pop(rank, ()):
                self._messages.handle(envelope)

    def _watch(self, attempt: int, rank: int, handle: RankHandle) -> None:
        on_exit = partial(self._messages.on_exit, attempt, rank, handle)
        self._state.runtime.event_thread.watch(handle, on_exit)

    # ---- results

    def _on_group_started(self) -> None:
        state = self._state
        state.event_log.record(run_events.RanksReady(attempt=state.life.run_attempt))
        state.start_error = None
        state.futures.resolve("start")
        state.write_run_json()

    def _on_start_failed(self, reason: str, details: str) -> None:
        state = self._state
        gone = [rank.rank for rank in state.life.ranks if not rank.is_alive]
        state.keep_start_error(
            StartError(reason, details=details or state.event_log.final_output(gone))
        )
        reason = str(state.start_error)
        state.event_log.record(run_events.StartFailed(reason=reason, interrupted=False))

    def _finish_cell(self, *, is_outgrown: bool) -> None:
        """Give the cell its result, and record it."""
        state = self._state
        if state.cell is not None:
            state.cell.is_outgrown = is_outgrown
            state.rank_monitor.hangs.problem_text = ""  # the cell has ended
            result = state.cell.finish(self._record_result)
            for report in () if result.is_ok else result.reports.values():
                if report.payload:  # the values of a failed cell are not used
                    state.runtime.link.discard_payload(report.payload)
        state.write_run_json()

    def _record_result(self, result: CellResult) -> None:
        state = self._state
        logs = state.event_log.log_sizes(result.ranks)
        state.event_log.record(run_events.CellEnded(**result.facts(), logs=logs))
        if state.cell is not None and result.is_ok and not state.cell.request.once:
            state.replay_log.add(state.cell.replay_entry())

    def _on_group_stopped(self) -> None:
        """Record the end of all ranks, and end all waits for them."""
        state = self._state
        is_over = not state.life.state.is_live  # else a restart follows at once
        if is_over and state.start_error is None and state.futures.is_pending("start"):
            state.start_error = StartError("stopped while it started")
            reason = str(state.start_error)
            state.event_log.record(run_events.StartFailed(reason=reason, interrupted=True))
        attempt = state.life.run_attempt if is_over else state.life.run_attempt - 1
        state.event_log.record(run_events.GroupStopped(attempt=attempt))
        state.write_run_json()
        if is_over:
            if state.start_error is not None:
                state.futures.reject(state.start_error, "start")
            state.event_log.close()
            state.rank_monitor.reset_totals()
        if self._heal is not None:
            self._heal.close()
        state.reject_heal("the group was stopped")
        state.futures.resolve("stop")
