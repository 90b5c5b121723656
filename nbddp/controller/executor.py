"""The executor: feeds the lifecycle and does what it says, all on one thread."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Set
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from nbddp.controller.heal_requests import HealRequests
from nbddp.controller.promises import Promises
from nbddp.controller.rank_processes import RankProcesses, Told, plain, unable
from nbddp.controller.run_recorder import PAUSE, describe
from nbddp.controller.threads import Runtime
from nbddp.errors import RequestError, StartError, describe_exit
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.launch.memory import MemoryWatch
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import refusals
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.heal_steps import KILLED
from nbddp.lifecycle.retries import RecoveryRecord
from nbddp.lifecycle.transitions import advance
from nbddp.record.cell import CellHandle, CellResult, NoticeRouter
from nbddp.record.event_log import EventLog
from nbddp.record.notices import notice_of
from nbddp.record.push_store import PushRecord
from nbddp.record.rank_monitor import LOOK_PERIOD, RankMonitor
from nbddp.record.replay_log import ReplayLog
from nbddp.wire import messages as msg
from nbddp.wire.timing_messages import CollectiveArrivals

if TYPE_CHECKING:
    from nbddp.controller.group_spec import GroupSpec
    from nbddp.nodes.rejoin import SurvivingGroup
    from nbddp.record.run_folder import RunFolder
    from nbddp.wire.envelope import Envelope
    from nbddp.wire.start import RankStart


logger = logging.getLogger(__name__)


class Executor:
    """All that is known of a worker group; only the session's thread changes it, without locks.

    Attributes:
        life: the lifecycle's own view.
        launcher: where ranks come from at the next start.
        spec, cell: how the group was started last; the cell that runs, or ran last.
        ready: what each rank said of itself when it was ready.
        deeds, recovery: what this attempt has done; how it began after a failure, if it did.
        struck, armed: faults that struck; those that each rank has in mind.
        handed_over: faults to arm in the ranks as they start.
    """

    def __init__(self, launcher: Launcher, *, colors: str) -> None:
        self.life = Life()
        self.spec: GroupSpec | None = None
        self.cell: CellHandle | None = None
        self.ready: dict[int, msg.Ready] = {}
        self.runtime: Runtime | None = None
        self.deeds = ReplayLog()
        self.recovery: RecoveryRecord | None = None
        self.struck: set[str] = set()
        self.armed: dict[int, list[str]] = {}
        self.handed_over: tuple[str, ...] = ()
        self._audience = NoticeRouter(lambda: self.cell)
        self.event_log = EventLog(self._audience.say)
        self.rank_monitor = RankMonitor(
            lambda rank: self._ranks is not None and self._ranks.is_stopped(rank),
            lambda rank: self._ranks is not None and self._ranks.is_working(rank),
        )
        self.launcher = launcher
        self.colors = colors
        self._ranks: RankProcesses | None = None
        self.returned: SurvivingGroup | None = None  # what another notebook has left
        self._newest_cell = 0
        self._start_error: StartError | None = None
        self.promises = Promises()
        self.numbers = itertools.count(1)  # of requests
        self._heal: HealRequests | None = None
        self._memory = MemoryWatch()

    def process_ids(self) -> dict[int, int]:
        """The process id of every rank that lives."""
        return self._ranks.pids(self.life.alive) if self._ranks else {}

    def forget(self) -> None:
        """All processes are gone, and so is what they were reached by."""
        self.runtime = self._ranks = self.cell = None

    @property
    def runtime_now(self) -> Runtime:
        """What the ranks are reached by.

        Raises:
            RequestError: there are none.
        """
        if self.runtime is None:
            raise RequestError(refusals.NO_GROUP)
        return self.runtime

    # ---- while a cell runs

    def answer(self, rank: int, answer: msg.InputReply) -> None:
        """Hand a rank what it has asked for; if it is gone, nobody waits for it."""
        if self.life.lives(rank):
            self.runtime_now.link.send(rank, answer)

    def interrupt_unless_asked(self) -> None:
        """See to it that the running cell has its first interrupt, and no second one."""
        cell = self.life.cell
        if cell is not None and not cell.interrupts:
            self.step(ev.InterruptAsked())

    def follow(self, handle: CellHandle) -> None:
        """A cell runs: see whether it goes on."""
        purpose, now = handle.request.purpose, time.monotonic()
        self.rank_monitor.begin_cell(handle.ranks, now, cell=handle.number, purpose=purpose)
        self.runtime_now.actor.later(LOOK_PERIOD, self._look, handle)
        self._audience.catch_up(handle)

    def _look(self, handle: CellHandle) -> None:
        cell = self.life.cell
        if cell is None or cell.number != handle.number:
            return
        self.runtime_now.actor.later(LOOK_PERIOD, self._look, handle)
        self._describe(pause=PAUSE)
        text = self.rank_monitor.hangs.look(
            cell.number, cell.waiting, handle.ranks, time.monotonic()
        )
        if text and self.life.state is GroupState.RUNNING:
            self._audience.say(text)
            self.event_log.record("no progress", text=text)

    # ---- news

    def read(self, envelope: Envelope) -> None:  # noqa: C901 - a table, a line or two a case
        """News of a rank."""
        if self._ranks is None or not self._ranks.takes(envelope):
            return
        rank, attempt = envelope.sender, envelope.attempt
        match envelope.message:
            case msg.Output() as output:
                self._audience.feed(self._ranks.accept(rank, output))
            case msg.InputRequested(question=question) if not self._audience.listens:
                self.answer(rank, msg.InputReply(question=question, is_end=True))
            case msg.Display() | msg.InputRequested() | msg.InputCancelled() as said:
                self._audience.feed(notice_of(rank, said))
            case msg.Answer() as answer:
                self.rank_monitor.values.note(rank, self._newest_cell, answer.payload.get("values"))
                event = self._heal.event_of(answer) if self._heal else None
                if event is None:
                    self.promises.keep("answer", rank, answer.request, value=answer)
                else:
                    self.step(event)
            case msg.Ready() as ready:
                self.ready[rank] = ready
                self.armed.pop(rank, None)
                self._newest_cell = max(self._newest_cell, ready.cell)
                self.step(ev.RankReady(attempt=attempt, rank=rank))
            case msg.StartFailed(reason=reason, traceback=traceback):
                unable = ev.RankStartFailed(
                    attempt=attempt, rank=rank, reason=reason, details=traceback
                )
                self.step(unable)
            case CollectiveArrivals() as came:
                clock = self.launcher.clock(rank)
                self.rank_monitor.note(rank, came, time.monotonic(), clock)
            case msg.RankStatus() | msg.Metrics() | msg.Progress() as sighting:
                self.rank_monitor.note(rank, sighting, time.monotonic())
                self._note_comeback()
            case msg.EventReported(kind=kind, facts=facts):
                self.event_log.note(rank, kind, facts)
                if kind == "fault":
                    self.struck.add(str(facts.get("fault")))
            case msg.InterruptAcknowledged(cell=cell):
                self.step(ev.RankAcknowledged(attempt=attempt, rank=rank, cell=cell))
            case msg.CellEnded() as report:
                self._read_report(rank, attempt, report)

    def _note_comeback(self) -> None:
        """Say what a failure cost as soon as the first step after it is reported."""
        recovery, step = self.recovery, self.rank_monitor.first_step
        if recovery is not None and step is not None:
            self.recovery = None
            self.event_log.record("resumed", **recovery.resumed(step, time.time()))

    def _read_report(self, rank: int, attempt: int, report: msg.CellEnded) -> None:
        self.armed[rank] = report.armed
        try:
            if self.cell is not None and self.cell.number == report.cell:
                self.cell.note_report(rank, report)
                self.rank_monitor.values.note(rank, report.cell, report.values)
                trouble = self.cell.trouble(rank)
                if trouble is not None and not trouble.is_consequence:
                    self.event_log.record("failure", rank=rank, what=trouble.headline())
                if report.is_quit:
                    self.interrupt_unless_asked()
        finally:
            ended = ev.RankEndedCell(
                attempt=attempt,
                rank=rank,
                cell=report.cell,
                is_ok=report.is_ok,
                # interrupted ranks may have stopped on either side of a step: they meet anew
                in_group=report.in_group and not report.is_interrupted,
                sequence=report.sequence,
            )
            self.step(ended)

    def note_unlaunched(self, attempt: int, rank: int, error: Exception) -> None:
        """A rank could not be started."""
        if attempt == self.life.attempt and self.life.lives(rank):
            self._start_error = self._start_error or unable(f"rank {rank}", error)
            self._note_gone(attempt, rank, None)

    def note_exit(self, attempt: int, rank: int, handle: RankHandle) -> None:
        """A rank's process has ended."""
        is_current = self._ranks is not None and self._ranks.is_current(rank, handle)
        try:
            why = handle.why_gone
            handle.join()  # it has ended: multiprocessing keeps its pipes open until asked
            if handle.exitcode != 0 or self.life.state.is_busy:  # a cell may call os._exit(0)
                how = describe_exit(handle.exitcode) + (f" ({why})" if why else "")
                self.event_log.record("exit", rank=rank, attempt=attempt, how=how)
            self.launcher.sweep(handle)
        finally:
            if is_current:
                self._note_gone(attempt, rank, handle.exitcode, why)

    def _note_gone(self, attempt: int, rank: int, exitcode: int | None, why: str = "") -> None:
        """A rank has no process any more, or never had one: nobody shall wait for it."""
        if attempt != self.life.attempt or not self.life.lives(rank):
            return  # it was given up before
        try:
            self._read_last(rank, exitcode, why)
        finally:
            self.rank_monitor.values.note_exit(rank, self.life.cell, self.cell)
            exited = ev.ProcessExited(
                attempt=attempt, rank=rank, exitcode=exitcode, is_told=bool(why)
            )
            self.step(exited)  # is_told: the loss of its whole node was reported
            self._tell_gone(rank, exitcode)

    def _tell_gone(self, rank: int, exitcode: int | None) -> None:
        self.promises.keep("kill", rank)
        why = refusals.unanswered(self.life, rank, exitcode)
        self.promises.reject(RequestError(why), "answer", rank)

    def _read_last(self, rank: int, exitcode: int | None, why: str) -> None:
        words, hint = "", why
        try:
            if self._ranks is not None and self._ranks.has_process(rank):
                self._audience.feed_now(self._ranks.last_output(rank))
                words, is_ours = self._ranks.last_words(rank), self._ranks.was_killed(rank)
                used = self.rank_monitor.hangs.memory()
                hint = why or ("" if is_ours else self._memory.hint_at(exitcode, used))
        finally:
            if self.cell is not None:
                self.cell.note_exit(rank, exitcode, last_words=words, hint=hint)

    def lose_link(self, error: Exception) -> None:
        """Nothing that a rank says can be read any more: nobody can work with them."""
        self._start_error = self._start_error or unable("the ranks", error)
        self._audience.say(f"the ranks cannot be heard any more: killed ({plain(error)})")
        for rank in self.life.alive:
            self._give_up(rank)

    # ---- the lifecycle, and what it wants done

    def step(self, event: ev.Event) -> str:
        """Advance; returns why not, if the lifecycle refuses."""
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
        """Do it; if that fails, see to it that nobody waits for what will not happen."""
        try:
            failed = self._act(action)
        except Exception as error:
            if not isinstance(error, StartError | OSError):
                logger.exception("nbddp could not do %s", type(action).__name__)
            is_start = isinstance(action, ev.StartRanks)
            ranks = self.life.alive if is_start else getattr(action, "ranks", ())
            failed = dict.fromkeys(ranks, error)
        for rank, why in failed.items():
            self._make_up_for(action, rank, why)

    def _make_up_for(self, action: ev.Action, rank: int, error: Exception) -> None:
        """A rank was not told: its cell has failed then, or else it is killed, or given up."""
        match action:
            case ev.SendCell(cell=cell):
                text = f"the cell could not be sent: {plain(error)}"
                why = msg.Failure(name="RequestError", text=text, traceback=text, at=time.time())
                failure = asdict(why)
                report = msg.CellEnded(cell=cell, seconds=0.0, in_group=True, failure=failure)
                self.runtime_now.actor.tell(self._read_report, rank, self.life.attempt, report)
                return
            case ev.RequestNamespace(generation=generation):
                said = f"rank {rank} cannot be asked: {plain(error)}"
                event = ev.NamespaceSent(
                    attempt=self.life.attempt, generation=generation, reason=said
                )
                self.runtime_now.actor.tell(self.step, event)
                return
            case ev.StartRanks():
                self._start_error = self._start_error or unable("the ranks", error)
            case _ if self._ranks is not None and self._ranks.has_process(rank):
                is_kill = isinstance(action, ev.Kill)
                cannot = "killed: given up" if is_kill else "told anything: killed"
                self._audience.say(f"rank {rank} cannot be {cannot} ({plain(error)})")
        self._give_up(rank)

    def _give_up(self, rank: int) -> None:
        if self._ranks is None or not self._ranks.give_up(rank):
            attempt, incarnation = self.life.attempt, self.life.incarnation(rank)
            self.runtime_now.actor.tell(self._note_given_up, attempt, rank, incarnation)

    def _note_given_up(self, attempt: int, rank: int, incarnation: int) -> None:
        if self.life.incarnation(rank) == incarnation:  # and not healed meanwhile
            self._note_gone(attempt, rank, None)

    def _act(self, action: ev.Action) -> Told:  # noqa: C901 - a table, a line or two a case
        match action:
            case ev.StartRanks():
                self._spawn(action)
            case ev.SetDeadline():
                self.runtime_now.actor.later(action.seconds, self._ring, action.rang)
            case ev.Notify(text=text):
                self._audience.say(text)
            case ev.RecordNode(text=text):
                self.event_log.record("node", what=text)
            case ev.GroupStarted():
                self.event_log.record("ready", attempt=self.life.attempt)
                self.promises.keep("start")
                self._describe()
            case ev.GroupStartFailed(reason=reason, details=details):
                gone = [each.rank for each in self.life.ranks if not each.is_alive]
                said = details or self.event_log.last_words(gone)
                self._start_error = self._start_error or StartError(reason, details=said)
                self.event_log.record("start failed", reason=str(self._start_error))
            case ev.RejoinRanks() if self.returned is not None:
                self._take_back(self.returned)
            case ev.StartReplacements(ranks=ranks) if (
                self._ranks is not None and self.life.heal is not None
            ):
                self._heal = HealRequests(self, self.life.heal)
                starts = self._starts()
                incarnations = {rank: self.life.incarnation(rank) for rank in ranks}
                self._ranks.revive(
                    replace(starts[rank], incarnation=number, joins_group=False)
                    for rank, number in incarnations.items()
                )
            case ev.HealFailed(reason=reason):
                self.event_log.record("not healed", reason=reason)
                if self._heal is not None:
                    self._heal.close()
                    for rank in self._heal.ranks:  # none of them lives any more
                        self._tell_gone(rank, KILLED)
                self._reject_heal(reason)
            case (
                ev.ReplacementsReady()
                | ev.RequestNamespace()
                | ev.RequestJoin()
                | ev.CancelJoin()
                | ev.HealFinished()
            ) if self._heal is not None:
                return self._heal.perform(action)
            case ev.CellFinished(is_outgrown=is_outgrown):
                self._finish(is_outgrown=is_outgrown)
            case ev.GroupStopped():
                self._tell_stopped()
            case _ if self._ranks is not None:
                return self._ranks.perform(action, cell=self.cell)
        return {}

    def _reject_heal(self, why: str) -> None:
        self.promises.reject(RequestError(f"{refusals.NOT_HEALED}: {why}"), "heal")

    def _ring(self, rang: ev.DeadlinePassed) -> None:
        working = self._ranks.working(self.life.alive) if self._ranks else ()
        self.step(replace(rang, stopped=self.stopped(), working=working))

    def stopped(self) -> tuple[tuple[int, int], ...]:
        """Ranks that somebody sent a SIGSTOP, with their process ids."""
        return self._ranks.stopped(self.life.alive) if self._ranks else ()

    def ending(self) -> list[int]:
        """Return the ranks whose process was killed and is not gone yet."""
        return self._ranks.ending(self.life.alive) if self._ranks else []

    def _spawn(self, action: ev.StartRanks) -> None:
        self._start_error = None
        self.ready = {}
        self.deeds.forget()
        self.rank_monitor.forget()
        self._audience.forget_ranks()
        self._ranks = RankProcesses(action.attempt, self.runtime_now, self.launcher, self)
        self.launcher.settle(action.world_size)
        starts = [each for each in self._starts() if self.life.lives(each.topology.rank)]
        self.event_log.record("start", attempt=action.attempt, world_size=action.world_size)
        self._ranks.launch(starts, action.world_size)

    def _take_back(self, returned: SurvivingGroup) -> None:
        self._start_error = None
        self.deeds.leave((), is_all=True)
        self.runtime_now.link.take_secret(returned.secret)
        folder = self.event_log.go_on(returned.folder, self._open_folder)
        ranks, size = sorted(returned.ranks), returned.world_size
        self.event_log.record("taken back", attempt=returned.attempt, ranks=ranks, world_size=size)
        self._ranks = RankProcesses(returned.attempt, self.runtime_now, self.launcher, self)
        self._ranks.take_back(returned, folder)

    def next_cell(self) -> int:
        """A number that no cell of these ranks has had."""
        self._newest_cell += 1
        return self._newest_cell

    def _open_folder(self) -> RunFolder:
        if self.spec is None:
            raise RuntimeError("a group was to be started and nobody said how")
        return self.spec.open(self.event_log)

    def _starts(self) -> list[RankStart]:
        if self.spec is None:
            raise RuntimeError("a group was to be started and nobody said how")
        return self.spec.starts(
            self.runtime_now.link,
            attempt=self.life.attempt,
            folder=self._open_folder(),
            colors=self.colors,
            launcher=self.launcher,
            struck=self.struck,
            handed_over=self.handed_over,
        )

    def note_node(self, event: ev.NodeNews) -> None:
        """Note what has become of a node; with one that has come a restart may make more ranks."""
        if isinstance(event, ev.NodeJoined) and self.launcher.has_room():
            self.step(replace(event, has_room=True))
            self.step(ev.CapacityChanged())
        else:
            self.step(event)

    def note_struck(self, faults: Set[str]) -> None:
        """Faults struck other ranks, those of a script: they do not strike these."""
        self.struck |= faults
        for rank, armed in self.armed.items():
            self.armed[rank] = [each for each in armed if each not in faults]

    def note_push(self, pushed: PushRecord) -> None:
        """Values were sent to ranks."""
        self.deeds.note(pushed)
        self._audience.say(pushed.remark)

    # ---- telling those who wait

    def _finish(self, *, is_outgrown: bool) -> None:
        if self.cell is not None:
            self.cell.is_outgrown = is_outgrown
            self.rank_monitor.hangs.alarm = ""  # nobody waits any more
            result = self.cell.finish(self._note_result)
            for report in () if result.is_ok else result.reports.values():
                if report.parcel:  # the values of a failed cell are not used
                    self.runtime_now.link.discard(report.parcel)
        self._describe()

    def _describe(self, *, pause: float = 0.0) -> None:
        describe(self.event_log, self.ready, self.rank_monitor, self.cell, pause=pause)

    def _note_result(self, result: CellResult) -> None:
        logs = self.event_log.sizes_of_logs(result.ranks)
        self.event_log.record("cell ended", **result.facts(), logs=logs)
        if self.cell is not None:
            self.deeds.note_cell(self.cell, result.verdict)

    def _tell_stopped(self) -> None:
        self.event_log.record("stopped", attempt=self.life.attempt)
        self._describe()
        if not self.life.state.is_live:  # else it is started again at once
            error = self._start_error or StartError("stopped while it started")
            self.promises.reject(error, "start")
            self.event_log.close()
            self.rank_monitor.begin_run()
        self._reject_heal("the group was stopped")
        self.promises.keep("stop")
