"""The actor feeds events to the lifecycle and carries out its actions, all on one thread."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.checks.checker import hang_causes
from nbddp.controller.controller_state import ControllerState
from nbddp.controller.heal_requests import HealRequests
from nbddp.controller.message_handler import MessageHandler
from nbddp.controller.rank_processes import FailedRanks, RankProcesses, short_error, start_error
from nbddp.controller.run_facts import WRITE_INTERVAL, known_facts
from nbddp.controller.threads import Runtime
from nbddp.errors import NbddpError, RequestError, StartError
from nbddp.launch.local_launcher import Launcher
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import refusals
from nbddp.lifecycle.group_state import GroupState
from nbddp.lifecycle.heal_steps import KILLED
from nbddp.lifecycle.transitions import advance
from nbddp.record.cell import CellHandle, CellResult
from nbddp.record.log_reader import log_name
from nbddp.record.notices import HangReport
from nbddp.record.rank_monitor import CHECK_PERIOD, RankMonitor
from nbddp.sigint import import_interruptibly, sigint_deferred
from nbddp.wire import messages as msg
from nbddp.wire.rank_start import RankStart

if TYPE_CHECKING:
    from nbddp.nodes.rejoin import SurvivingGroup
    from nbddp.wire.group_spec import GroupSpec


logger = logging.getLogger(__name__)


class GroupActor(ControllerState):
    """Carries out the actions of the lifecycle; its methods run on the session's thread.

    Attributes:
        messages: handles the messages of the ranks.
    """

    def __init__(self, launcher: Launcher, *, colors: str) -> None:
        rank_monitor = RankMonitor(
            lambda rank: self.ranks.is_stopped(rank), lambda rank: self.ranks.is_working(rank)
        )
        super().__init__(launcher, rank_monitor)
        self._colors = colors
        self._heal: HealRequests | None = None  # the running heal, or the last one
        self._surviving_group: SurvivingGroup | None = None  # of an earlier notebook
        self.messages = MessageHandler(self, self._step)

    @property
    def ranks(self) -> RankProcesses:
        """The processes of the last start; there are none before."""
        return self.messages.ranks

    def _open_runtime(self, make: Callable[[], Runtime]) -> None:
        """Open the connection to the ranks and the threads.

        Raises:
            StartError: that failed.
        """
        import_interruptibly("nbddp.controller.store_link")  # imports torch: only when needed
        with sigint_deferred():
            try:
                runtime = make()
            except (OSError, RuntimeError) as error:  # of the store, a socket or a thread
                raise start_error("the link to the ranks", error) from error
            runtime.start_readers(self.messages.handle, self._on_link_lost)
            self.runtime = runtime

    def _close_runtime(self) -> None:
        """Close the connection and the threads, after all processes have exited."""
        if self.runtime is not None:
            self.runtime.close()
        self.runtime = self.cell = None
        self.messages.ranks = RankProcesses(self, self.messages)

    # ---- while a cell runs

    def _watch_cell(self, handle: CellHandle) -> None:
        """Check the progress of a cell at intervals until it ends."""
        purpose, now = handle.request.purpose, time.monotonic()
        self.rank_monitor.reset_for_cell(handle.ranks, now, cell=handle.number, purpose=purpose)
        request = handle.request
        code = "" if request.script is not None or request.ranks is not None else request.source
        causes = partial(hang_causes, code, first_line=request.first_line)
        self.rank_monitor.hangs.likely_causes = cache(causes)
        self.active_runtime.event_thread.call_later(CHECK_PERIOD, self._check_progress, handle)
        self.router.pending.move_to(handle.notice_queue)

    def _check_progress(self, handle: CellHandle) -> None:
        cell = self.life.cell
        if cell is None or cell.number != handle.number:
            return
        self.active_runtime.event_thread.call_later(CHECK_PERIOD, self._check_progress, handle)
        self._write_run_json(min_interval=WRITE_INTERVAL)
        outside = [rank for rank in self.life.all_ranks if rank not in handle.ranks]
        text = self.rank_monitor.hangs.check(
            cell.number, cell.waiting, handle.ranks, time.monotonic(), outside=outside
        )
        if text and self.life.state is GroupState.RUNNING:
            self.router.publish(HangReport(text))
            self.event_log.record("no progress", text=text)

    def _on_link_lost(self, error: Exception) -> None:
        """Kill all ranks, because their messages cannot be read any more."""
        self.keep_start_error(start_error("the ranks", error))
        self.router.notify(f"killed all ranks: cannot read their messages ({short_error(error)})")
        for rank in self.life.alive:
            self._abandon_rank(rank)

    # ---- lifecycle events and actions

    def _step(self, event: ev.Event) -> str:
        """Feed an event to the lifecycle and carry out its actions.

        Return why the lifecycle refuses the event; empty if it does not.
        """
        before = self.life.cell
        self.life, actions = advance(self.life, event)
        cell = self.life.cell
        if before is not None and cell is not None and cell.interrupts > before.interrupts:
            self.event_log.record("interrupt")
        refusal = ""
        for action in actions:
            if isinstance(action, ev.Refuse):
                refusal = action.reason
            else:
                self._carry_out(action)
        return refusal

    def _carry_out(self, action: ev.Action) -> None:
        """Carry out an action. If it fails on a rank, make sure that nothing waits for it."""
        try:
            failed = self._perform(action)
        except Exception as error:
            if not isinstance(error, NbddpError | OSError):
                logger.exception("nbddp could not carry out %s", type(action).__name__)
            is_start = isinstance(action, ev.StartRanks | ev.RejoinRanks)
            ranks = self.life.alive if is_start else getattr(action, "ranks", ())
            failed = dict.fromkeys(ranks, error)
        for rank, why in failed.items():
            self._handle_failed_action(action, rank, why)

    def _handle_failed_action(self, action: ev.Action, rank: int, error: Exception) -> None:
        """Report the cell or the heal as failed on this rank, or else kill the rank."""
        match action:
            case ev.SendCell(cell=cell):
                text = f"the cell could not be sent: {short_error(error)}"
                why = msg.Failure(name="RequestError", text=text, traceback=text, at=time.time())
                failure = asdict(why)
                report = msg.CellEnded(cell=cell, in_group=True, failure=failure)
                self.active_runtime.event_thread.submit(
                    self.messages.on_cell_ended, rank, self.life.attempt, report
                )
                return
            case ev.RequestNamespace(generation=generation):
                text = f"rank {rank} cannot be reached: {short_error(error)}"
                event = ev.NamespaceSent(
                    attempt=self.life.attempt, generation=generation, reason=text
                )
                self.active_runtime.event_thread.submit(self._step, event)
                return
            case ev.StartReplacements():
                self.active_runtime.event_thread.submit(
                    self.messages.on_launch_failed, self.life.attempt, rank, error
                )
                return
            case ev.StartRanks():
                self.keep_start_error(start_error("the ranks", error))
            case ev.RejoinRanks() if not self.ranks.handles:
                cause = start_error("the ranks", error, verb="rejoined")
                text = f"{cause}; the ranks still run, and `%ddp nodes --rejoin` tries again"
                self.keep_start_error(StartError(text))
            case _ if rank in self.ranks.handles:
                failed = {ev.Kill: "killed: it counts as dead", ev.RejoinRanks: "watched: killed"}
                cannot = failed.get(type(action), "reached: killed")
                text = f"rank {rank} cannot be {cannot} ({short_error(error)})"
                self.router.notify(text)
                if isinstance(action, ev.RejoinRanks):  # it may be the only rank
                    self.keep_start_error(StartError(text))
        self._abandon_rank(rank)

    def _abandon_rank(self, rank: int) -> None:
        if not self.ranks.abandon(rank):
            attempt, incarnation = self.life.attempt, self.life.incarnation(rank)
            self.active_runtime.event_thread.submit(
                self._report_abandoned, attempt, rank, incarnation
            )

    def _report_abandoned(self, attempt: int, rank: int, incarnation: int) -> None:
        if self.life.incarnation(rank) == incarnation:  # else the rank was healed meanwhile
            self.messages.on_rank_gone(attempt, rank, None)

    def _perform(self, action: ev.Action) -> FailedRanks:  # noqa: C901 - one or two lines per case
        match action:
            case ev.StartRanks():
                self._start_ranks()
            case ev.SetDeadline():
                self.active_runtime.event_thread.call_later(
                    action.seconds, self._on_deadline, action.event
                )
            case ev.Notify(text=text):
                self.router.notify(text)
            case ev.RecordNode(text=text):
                self.event_log.record("node", what=text)
            case ev.GroupStarted():
                self.event_log.record("ready", attempt=self.life.run_attempt)
                self.start_error = None
                self.futures.resolve("start")
                self._write_run_json()
            case ev.GroupStartFailed(reason=reason, details=details):
                gone = [each.rank for each in self.life.ranks if not each.is_alive]
                text = details or self.event_log.final_output(gone)
                self.keep_start_error(StartError(reason, details=text))
                self.event_log.record(
                    "start failed", reason=str(self.start_error), interrupted=False
                )
            case ev.RejoinRanks() if self._surviving_group is not None:
                return self._rejoin(self._surviving_group)
            case ev.StartReplacements(ranks=ranks) if self.life.heal is not None:
                self._heal = HealRequests(self, self.life.heal, self._step)
                self.ranks.forget(ranks)  # first: the rest may fail
                self.ranks.launch(self._rank_starts(ranks))
            case ev.HealFailed(reason=reason, is_refused=is_refused):
                self.event_log.record("not healed", reason=reason)
                if self._heal is not None:
                    self._heal.close()
                    for rank in self._heal.ranks:  # they are all dead
                        self.messages.end_waits(rank, KILLED)
                self._reject_heal(reason, is_refused=is_refused)
            case (
                ev.ReplacementsReady()
                | ev.RequestNamespace()
                | ev.RequestJoin()
                | ev.CancelJoin()
                | ev.HealFinished()
            ) if self._heal is not None:
                return self._heal.perform(action)
            case ev.CellFinished(is_outgrown=is_outgrown):
                self._finish_cell(is_outgrown=is_outgrown)
            case ev.GroupStopped():
                self._on_group_stopped()
            case _:
                return self.ranks.perform(action)
        return {}

    def _reject_heal(self, why: str, *, is_refused: bool = False) -> None:
        prefix = refusals.CANNOT_HEAL if is_refused else refusals.NOT_HEALED
        self.futures.reject(RequestError(f"{prefix}: {why}"), "heal")

    def _on_deadline(self, event: ev.DeadlinePassed) -> None:
        working = self.ranks.working_ranks(self.life.alive)
        self._step(replace(event, stopped=self.ranks.stopped_ranks(), working=working))

    def _forget_earlier_ranks(self) -> None:
        self.start_error = None
        self.messages.ranks = RankProcesses(self, self.messages)
        self.ready = {}
        self.rank_monitor.clear_ranks()
        self.router.pending.drop_rank_output()  # the logs have it

    def _start_ranks(self) -> None:
        world_size = len(self.life.ranks)
        self._forget_earlier_ranks()
        self.replay_log.clear()
        self.launcher.assign(world_size)
        starts = self._rank_starts(self.life.alive)
        self.event_log.record("start", attempt=self.life.run_attempt, world_size=world_size)
        self.active_runtime.link.open_attempt(self.life.attempt, world_size)
        self.ranks.launch(starts)

    def _rejoin(self, survivors: SurvivingGroup) -> FailedRanks:
        """Take over ranks. If this raises an error, they keep running, for another rejoin."""
        self._forget_earlier_ranks()
        self.event_log.resume(survivors.folder)
        folder, link = self._open_folder(), self.active_runtime.link
        link.use_secret(survivors.secret)
        link.open_attempt(survivors.attempt, survivors.world_size)
        failed = self.ranks.rejoin(survivors, folder)
        self.replay_log.set_pending((), clears_entries=True)
        self.replay_log.is_rejoined = True
        self.event_log.record(
            "taken back",
            attempt=self.life.run_attempt,
            ranks=sorted(set(survivors.ranks) - set(failed)),
            world_size=survivors.world_size,
            pid=os.getpid(),
            at=time.time(),
        )
        return failed

    @property
    def _started_spec(self) -> GroupSpec:
        if self.spec is None:
            raise RuntimeError("a group was started without a spec")
        return self.spec

    def _open_folder(self) -> Path:
        spec = self._started_spec
        return self.event_log.open(spec.cwd(), spec.name, spec.facts())

    def _rank_starts(self, ranks: Sequence[int]) -> list[RankStart]:
        """Return the start parameters of these ranks."""
        spec, link, folder = self._started_spec, self.active_runtime.link, self._open_folder()
        fired = {"NBDDP_STRUCK": ";".join(sorted(self.fired_faults))}
        return [
            RankStart(
                topology=place,
                store_port=link.port,
                store_prefix=link.prefix,
                attempt=self.life.attempt,
                run_attempt=self.life.run_attempt,
                secret=link.secret,
                log_path=str(folder / log_name(place.rank)),
                kernel_pid=os.getpid(),
                env=spec.environment(place.rank, self.launcher.base_env) | fired,
                sys_path=list(sys.path),
                cwd=str(spec.cwd()),
                backend=spec.backend,
                timeout=spec.timeout,
                threads=spec.threads
                or max(1, self.launcher.cores(place) // place.local_world_size),
                joins_group=spec.joins_group and self.life.heal is None,
                incarnation=self.life.incarnation(place.rank),
                run_id=folder.name,
                colors=self._colors,
            )
            for place in self.launcher.topologies(spec.nproc, master_port=link.reserved_port)
            if place.rank in ranks
        ]

    def _on_node_event(self, event: ev.NodeEvent) -> None:
        """Feed a node's event to the lifecycle. Report free capacity if a new node adds some."""
        if isinstance(event, ev.NodeJoined) and self.launcher.has_free_capacity():
            self._step(replace(event, adds_capacity=True))
            self._step(ev.CapacityChanged())
        else:
            self._step(event)

    # ---- results

    def _finish_cell(self, *, is_outgrown: bool) -> None:
        if self.cell is not None:
            self.cell.is_outgrown = is_outgrown
            self.rank_monitor.hangs.problem_text = ""  # the cell has ended
            result = self.cell.finish(self._record_result)
            for report in () if result.is_ok else result.reports.values():
                if report.payload:  # the values of a failed cell are not used
                    self.active_runtime.link.discard_payload(report.payload)
        self._write_run_json()

    def _write_run_json(self, *, min_interval: float = 0.0) -> None:
        """Write ``run.json``. An error is logged only: a rank must not be lost for a record.

        ``min_interval``: seconds since the last write that must have passed.
        """
        if self.event_log.seconds_since_written() < min_interval:
            return
        try:
            facts = known_facts(self.ready, self.rank_monitor, self.cell)
            self.event_log.add_facts(facts)
        except Exception:
            logger.exception("nbddp could not write the facts of the run")

    def _record_result(self, result: CellResult) -> None:
        logs = self.event_log.log_sizes(result.ranks)
        self.event_log.record("cell ended", **result.facts(), logs=logs)
        if self.cell is not None and result.is_ok and not self.cell.request.once:
            self.replay_log.add(self.cell.replay_entry())

    def _on_group_stopped(self) -> None:
        is_over = not self.life.state.is_live  # else a restart follows at once
        if is_over and self.start_error is None and self.futures.is_pending("start"):
            self.start_error = StartError("stopped while it started")
            self.event_log.record("start failed", reason=str(self.start_error), interrupted=True)
        self.event_log.record("stopped", attempt=self.life.run_attempt)
        self._write_run_json()
        if is_over:
            if self.start_error is not None:
                self.futures.reject(self.start_error, "start")
            self.event_log.close()
            self.rank_monitor.reset_totals()
        self._reject_heal("the group was stopped")
        self.futures.resolve("stop")
