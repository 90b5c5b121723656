"""The executor: feeds the lifecycle and does what it says, all on one thread."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nbddp.controller import events as ev
from nbddp.controller.cell import (
    CellHandle,
    CellRequest,
    CellResult,
    Deed,
)
from nbddp.controller.chronicle import Chronicle
from nbddp.controller.launcher import Launcher, RankHandle
from nbddp.controller.lifecycle import advance
from nbddp.controller.lookout import Lookout
from nbddp.controller.memory import MemoryWatch
from nbddp.controller.notices import Displayed, Notice, Notices, Said
from nbddp.controller.output import Logged
from nbddp.controller.pushes import Pushed
from nbddp.controller.ranks import Ranks
from nbddp.controller.recovery import Comeback
from nbddp.controller.states import GroupState, Life
from nbddp.controller.waiting import Waiting
from nbddp.errors import RequestError, StartError, describe_exit
from nbddp.wire.messages import (
    Answer,
    CellEnded,
    Command,
    Display,
    Happened,
    JsonDict,
    Metrics,
    Noticed,
    Output,
    Progress,
    Pulse,
    Ready,
    StartFailed,
)

if TYPE_CHECKING:
    from nbddp.controller.means import Means
    from nbddp.controller.spec import GroupSpec
    from nbddp.wire.mailbox import Letter

NO_GROUP = "there is no worker group; `%ddp start` or a `%%ddp` cell starts one"
LOOK_PERIOD = 1.0  # seconds between two looks at whether anything moves
MAX_BETWEEN = 64 << 10  # characters of output kept from between two cells


class Executor:
    """All that is known of a worker group; only the session's thread changes it, without locks.

    Attributes:
        life: the lifecycle's own view.
        spec: how the group was started last.
        cell: the cell that runs, or ran last.
        ready: what each rank said of itself when it was ready.
        deeds: what was done to the namespaces of this attempt, and went well, in order.
        comeback: what this attempt came back from, until it has taken up the work.
    """

    def __init__(self, launcher: Launcher, *, colors: str) -> None:
        self.life = Life()
        self.spec: GroupSpec | None = None
        self.cell: CellHandle | None = None
        self.ready: dict[int, Ready] = {}
        self.means: Means | None = None
        self.deeds: list[Deed] = []
        self.comeback: Comeback | None = None
        self._struck: set[str] = set()
        self.chronicle = Chronicle(self._say)
        self.lookout = Lookout(
            lambda rank: self._ranks is not None and self._ranks.is_stopped(rank)
        )
        self._launcher = launcher
        self._colors = colors
        self._numbers = itertools.count(1)
        self._ranks: Ranks | None = None
        self._start_error: StartError | None = None
        self._waiting = Waiting()
        self._memory = MemoryWatch()
        self._between = Notices(max_text=MAX_BETWEEN)

    def process_ids(self) -> dict[int, int]:
        """The process id of every rank that lives."""
        return self._ranks.pids(self.life.alive) if self._ranks else {}

    def forget(self) -> None:
        """All processes are gone, and so is what they were reached by."""
        self.means = self._ranks = self.cell = None

    @property
    def _with(self) -> Means:
        if self.means is None:
            raise RequestError(NO_GROUP)
        return self.means

    def _unpack(self, parcel: JsonDict) -> Any:
        return self._with.link.unpack(parcel)

    # ---- requests

    def _ask(self, event: ev.Event) -> None:
        refusal = self.step(event)
        if refusal:
            raise RequestError(refusal)

    def ask_start(
        self, spec: GroupSpec, event: ev.Event, *, is_recovery: bool = False
    ) -> Future[None]:
        """Start or restart; the future tells when all ranks are ready.

        In a recovery, faults that have struck do not strike again.
        """
        before, self.spec = self.spec, spec
        if not is_recovery:
            self._struck.clear()
        if isinstance(event, ev.RestartAsked):  # a start is refused while a cell runs
            self._mark_end("restart")
        try:
            self._ask(event)
        except RequestError:
            self.spec = before
            raise
        return self._waiting.for_start()

    def ask_kill(self, rank: int) -> Future[None]:
        """Kill a rank; the future tells when it is gone."""
        self._ask(ev.KillAsked(rank=rank))
        self.chronicle.record("kill asked", rank=rank)
        return self._waiting.for_kill(rank)

    def ask_stop(self) -> Future[None]:
        """End all ranks; the future tells when they are gone."""
        stopped = self._waiting.for_stop()
        self._mark_end("stop")
        self.step(ev.StopAsked())
        if not self.life.state.is_live:
            self._waiting.stopped()
        return stopped

    def _mark_end(self, how: str) -> None:
        """The user ends the running cell with its ranks: that is then no failure of theirs."""
        if self.cell is not None and self.life.state.is_busy:
            self.cell.end_by(how)
            self.chronicle.record(f"{how} asked")

    def begun(self) -> Future[None] | None:
        """The start or stop that is under way, if one is."""
        if self.life.state is GroupState.STARTING or self.life.next_start:
            return self._waiting.start
        return self._waiting.for_stop() if self.life.state is GroupState.STOPPING else None

    def run(self, request: CellRequest) -> CellHandle:
        """Hand a cell to the ranks."""
        if not self.life.state.is_live:
            raise RequestError(NO_GROUP)
        ranks = request.ranks or tuple(each.rank for each in self.life.ranks)
        before = self.cell
        self.cell = handle = CellHandle(
            next(self._numbers), request, ranks, self._unpack, attempt=self.life.attempt
        )
        try:
            self._ask(ev.RunAsked(cell=handle.number, ranks=ranks, needs_group=request.needs_group))
        except RequestError:
            self.cell = before
            raise
        self.chronicle.record("cell", number=handle.number, ranks=ranks, source=request.source)
        self.lookout.begin_cell(ranks, time.monotonic())
        self._with.actor.later(LOOK_PERIOD, self._look, handle)
        self._between.move_to(handle.told)
        return handle

    def send(self, rank: int, make: Callable[[int], Command]) -> Future[Answer]:
        """Ask an idle rank something."""
        if self.life.state not in (GroupState.IDLE, GroupState.BROKEN):
            raise RequestError(f"the worker group is {self.life.state.value}")
        if rank not in self.life.alive:
            raise RequestError(f"there is no rank {rank} that could answer")
        number = next(self._numbers)
        answer = self._waiting.for_answer(number, rank)
        self._with.link.send(rank, make(number))
        return answer

    def _look(self, handle: CellHandle) -> None:
        cell = self.life.cell
        if cell is None or cell.number != handle.number:
            return
        text = self.lookout.look(cell.number, cell.waiting, handle.ranks, time.monotonic())
        if text and self.life.state is GroupState.RUNNING:
            self._say(text)
            self.chronicle.record("no progress", text=text)
        self._with.actor.later(LOOK_PERIOD, self._look, handle)

    # ---- news

    def read(self, letter: Letter) -> None:  # noqa: C901 - a table, a line or two a case
        """News of a rank."""
        if self._ranks is None or letter.attempt != self._ranks.attempt:
            return
        rank, attempt = letter.sender, letter.attempt
        match letter.message:
            case Output() as output:
                self._feed(self._ranks.accept(rank, output))
            case Display() as display:
                self._feed(Displayed(rank, display))
            case Answer() as answer:
                self._waiting.answered(answer)
            case Ready() as ready:
                self.ready[rank] = ready
                self.step(ev.RankReady(attempt=attempt, rank=rank))
            case StartFailed(reason=reason, traceback=traceback):
                unable = ev.RankUnable(attempt=attempt, rank=rank, reason=reason, details=traceback)
                self.step(unable)
            case Pulse() | Metrics() | Progress() as sighting:
                self.lookout.note(rank, sighting, time.monotonic())
                self._note_comeback()
            case Happened(kind=kind, facts=facts):
                self.chronicle.note(rank, kind, facts)
                if kind == "fault":
                    self._struck.add(str(facts.get("fault")))
            case Noticed(cell=cell):
                self.step(ev.RankNoticed(attempt=attempt, rank=rank, cell=cell))
            case CellEnded() as report:
                self._read_report(rank, attempt, report)

    def _note_comeback(self) -> None:
        """Say what a failure cost as soon as the first step after it is reported."""
        comeback, step = self.comeback, self.lookout.first_step
        if comeback is None or step is None:
            return
        self.comeback = None
        seconds = round(time.time() - comeback.setback.at, 3)
        self.chronicle.record(
            "resumed", step=step, lost=comeback.lost(step), seconds=seconds, **comeback.facts()
        )

    def _read_report(self, rank: int, attempt: int, report: CellEnded) -> None:
        if self.cell is not None and self.cell.number == report.cell:
            self.cell.note_report(rank, report)
            trouble = self.cell.trouble(rank)
            if trouble is not None and not trouble.is_consequence:
                self.chronicle.record("failure", rank=rank, what=trouble.headline())
        self.step(ev.RankEnded.of(report, attempt=attempt, rank=rank))

    def _note_exit(self, attempt: int, rank: int, handle: RankHandle) -> None:
        handle.join()  # it has ended: multiprocessing keeps its pipes open until asked
        exitcode = handle.exitcode
        if exitcode != 0:
            self._launcher.sweep(handle)
            self.chronicle.record("exit", rank=rank, attempt=attempt, how=describe_exit(exitcode))
        if self._ranks is not None and self._ranks.attempt == attempt:
            self._feed(self._ranks.last_output(rank))
            if self.cell is not None:
                words, hint = self._ranks.last_words(rank), self._hint(rank, exitcode)
                self.cell.note_exit(rank, exitcode, last_words=words, hint=hint)
        self.step(ev.Exited(attempt=attempt, rank=rank, exitcode=exitcode))
        self._waiting.gone(rank)

    def _hint(self, rank: int, exitcode: int | None) -> str:
        """Why a rank may have ended: a SIGKILL that nobody here sent is often for memory."""
        if exitcode != -signal.SIGKILL or self._ranks is None or self._ranks.was_killed(rank):
            return ""
        return self._memory.hint(self.lookout.memory())

    def _feed(self, notice: Notice | Logged | None) -> None:
        if notice is not None:
            cell = self.cell
            told = self._between if cell is None or cell.is_finished else cell.told
            told.feed(notice)

    # ---- the lifecycle, and what it wants done

    def step(self, event: ev.Event) -> str:
        """Advance; returns why not, if the lifecycle refuses."""
        before = self.life.state
        self.life, actions = advance(self.life, event)
        if isinstance(event, ev.InterruptAsked) and before.is_busy:
            self.chronicle.record("interrupt")
        refusal = ""
        for action in actions:
            if isinstance(action, ev.Refuse):
                refusal = action.reason
            else:
                self._act(action)
        return refusal

    def _act(self, action: ev.Action) -> None:  # noqa: C901 - a table, a line or two a case
        match action:
            case ev.Spawn():
                self._spawn(action)
            case ev.SetAlarm(alarm=alarm, attempt=attempt, cell=cell, seconds=seconds):
                rang = ev.Rang(alarm=alarm, attempt=attempt, cell=cell)
                self._with.actor.later(seconds, self.step, rang)
            case ev.Remark(text=text):
                self._feed(Said(text))
            case ev.Started():
                self.chronicle.record("ready", attempt=self.life.attempt)
                self._waiting.started()
            case ev.NotStarted(reason=reason, details=details):
                self._start_error = self._start_failure(reason, details)
            case ev.Finished():
                self._finish()
            case ev.Stopped():
                self._tell_stopped()
            case _ if self._ranks is not None:
                self._ranks.perform(action, cell=self.cell)

    def _spawn(self, action: ev.Spawn) -> None:
        if self.spec is None:
            raise RuntimeError("a group was to be started and nobody said how")
        link, actor, folder = self._with.link, self._with.actor, self.chronicle.open(self.spec)
        self._start_error = None
        self.ready = {}
        self.deeds = []
        self.lookout.forget()
        self.chronicle.record("start", attempt=action.attempt, world_size=action.world_size)
        self._ranks = Ranks(action.attempt, link, self._launcher)
        failed = self._ranks.launch(
            self.spec.starts(
                link,
                attempt=action.attempt,
                folder=folder,
                colors=self._colors,
                struck=self._struck,
            ),
            self._with.watcher,
            lambda *exit_: actor.tell(self._note_exit, *exit_),
        )
        for rank, error in failed.items():
            reason = f"rank {rank} could not be started: {error}"
            self._start_error = self._start_error or StartError(reason)
            actor.tell(self.step, ev.Exited(attempt=action.attempt, rank=rank, exitcode=None))

    def _say(self, text: str) -> None:
        if text:
            self._feed(Said(text))

    def note_push(self, pushed: Pushed) -> None:
        """Values were sent to ranks."""
        self.deeds.append(pushed)
        self._say(pushed.remark)

    # ---- telling those who wait

    def _start_failure(self, reason: str, details: str) -> StartError:
        self.chronicle.record("start failed", reason=reason)
        if self._start_error is not None:
            return self._start_error
        gone = [each.rank for each in self.life.ranks if not each.is_alive]
        return StartError(reason, details=details or self.chronicle.last_words(gone))

    def _finish(self) -> None:
        if self.cell is not None:
            self.lookout.end_cell()
            result = self.cell.finish(self._note_result)
            left = () if result.is_ok else result.reports.values()
            for report in left:  # where it went well: nobody asks for a part of the values
                if report.parcel:
                    self._with.link.discard(report.parcel)

    def _note_result(self, result: CellResult) -> None:
        outcome = result.verdict.summary() if result.verdict else "ok"
        self.chronicle.record("cell ended", number=result.number, outcome=outcome)
        if result.is_ok and self.cell is not None and not self.cell.request.once:
            self.deeds.append(self.cell.request)

    def _tell_stopped(self) -> None:
        self.chronicle.record("stopped", attempt=self.life.attempt)
        if not self.life.state.is_live:  # else it is started again at once
            self._waiting.start_failed(self._start_error or StartError("stopped while it started"))
            self.chronicle.close()
        self._waiting.stopped()
