"""The executor: feeds the lifecycle on one thread, and does what it says.

Two more threads only bring news: one collects letters from the store, one waits for processes to
end. What the user asks comes in on the caller's thread and is done on the session's.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nbddp.controller import events as ev
from nbddp.controller.actor import Actor
from nbddp.controller.cell import CellHandle, CellRequest, Displayed, Notice, Said, Wrote
from nbddp.controller.launcher import Launcher, LocalLauncher, RankHandle
from nbddp.controller.lifecycle import advance
from nbddp.controller.ranks import Ranks
from nbddp.controller.runs import RunFolder
from nbddp.controller.states import GroupState, Life
from nbddp.controller.waiting import Waiting
from nbddp.controller.watchdog import Watchdog
from nbddp.controller.watcher import ExitWatcher
from nbddp.errors import RequestError, StartError, describe_exit
from nbddp.wire.messages import (
    Answer,
    CellEnded,
    Command,
    Display,
    JsonDict,
    Noticed,
    Output,
    Pulse,
    Ready,
    StartFailed,
)

if TYPE_CHECKING:
    from nbddp.controller.link import Link
    from nbddp.controller.spec import GroupSpec
    from nbddp.wire.mailbox import Letter

NO_GROUP = "there is no worker group; `%ddp start` or a `%%ddp` cell starts one"
LOOK_PERIOD = 1.0  # seconds between two looks at whether anything moves
MAX_BETWEEN = 100  # pieces of output kept from between two cells


class Session:
    """One worker group of a kernel, through all its attempts.

    Methods without an underscore may be called from any thread; the others run on the session's
    own, and so need no locks.
    """

    def __init__(self, launcher: Launcher | None = None, *, colors: str = "") -> None:
        self.launcher: Launcher = launcher or LocalLauncher()
        self.colors = colors
        self.life = Life()
        self.spec: GroupSpec | None = None
        self.folder: RunFolder | None = None
        self.ready: dict[int, Ready] = {}
        self.link: Link | None = None
        self.cell: CellHandle | None = None
        self._numbers = itertools.count(1)
        self._ranks: Ranks | None = None
        self._start_error: StartError | None = None
        self._waiting = Waiting()
        self._watchdog = Watchdog(
            lambda rank: self._ranks is not None and self._ranks.is_stopped(rank)
        )
        self._between: list[Notice] = []
        self._threads: tuple[Actor, ExitWatcher, threading.Thread] | None = None
        self._opening = threading.Lock()

    # ---- what may be asked, from any thread

    def start(self, spec: GroupSpec) -> None:
        """Start a group and wait until every rank is ready.

        Raises:
            RequestError: there is one already, or the spec cannot be met.
            StartError: a rank could not start.
        """
        self._start_with(spec, spec.start_event())

    def restart(self, spec: GroupSpec | None = None) -> None:
        """End the group, whatever it does, and start it anew as the next attempt."""
        spec = spec or self.spec
        if spec is None:
            raise RequestError(NO_GROUP)
        self._start_with(spec, ev.RestartAsked(start=spec.start_event()))

    def _start_with(self, spec: GroupSpec, event: ev.Event) -> None:
        spec.check_gpus()
        self._open()
        started = self._actor().call(self._ask_start, spec, event)
        try:
            started.result()
        except KeyboardInterrupt:
            self.stop()
            raise

    def run(self, request: CellRequest) -> CellHandle:
        """Hand a cell to the ranks and return at once.

        Raises:
            RequestError: the group cannot run it now; nothing was started, nothing lost.
        """
        return self._actor().call(self._run, request)

    def interrupt(self) -> None:
        """End the running cell and keep every name; a second time, kill what does not answer."""
        if self._threads is not None:
            self._actor().tell(self._step, ev.InterruptAsked())

    def kill(self, rank: int) -> None:
        """Kill one rank and wait until it is gone."""
        self._actor().call(self._ask_kill, rank).result()

    def stop(self) -> None:
        """End all ranks and wait until they are gone."""
        if self._threads is not None:
            self._actor().call(self._ask_stop).result()

    def send(self, rank: int, make: Callable[[int], Command]) -> Future[Answer]:
        """Send ``make(number)`` to an idle rank; the future will hold what it answers."""
        return self._actor().call(self._send, rank, make)

    def close(self) -> None:
        """Stop the group and end all threads and helpers; a later start opens it again."""
        with self._opening:
            if self._threads is not None and self.link is not None:
                self.stop()
                actor, watcher, collector = self._threads
                self.link.close()
                collector.join()
                watcher.close()
                actor.close()
                self._threads = self.link = self._ranks = self.cell = None
            self.launcher.close()

    def require_link(self) -> Link:
        """The link, which exists as soon as a group was started."""
        if self.link is None:
            raise RequestError(NO_GROUP)
        return self.link

    def _unpack(self, parcel: JsonDict) -> Any:
        return self.require_link().unpack(parcel)

    def process_ids(self) -> dict[int, int]:
        """The process id of every rank that lives."""
        return self._ranks.pids(self.life.alive) if self._ranks else {}

    def _actor(self) -> Actor:
        if self._threads is None:
            raise RequestError(NO_GROUP)
        return self._threads[0]

    def _open(self) -> None:
        with self._opening:
            if self._threads is None:
                from nbddp.controller.link import Link  # imports torch: not before it is needed

                self.link = Link()
                collector = threading.Thread(target=self._collect, name="nbddp-mail", daemon=True)
                self._threads = (Actor("nbddp-session"), ExitWatcher(), collector)
                collector.start()

    # ---- requests, on the session's thread

    def _ask(self, event: ev.Event) -> None:
        refusal = self._step(event)
        if refusal:
            raise RequestError(refusal)

    def _ask_start(self, spec: GroupSpec, event: ev.Event) -> Future[None]:
        before, self.spec = self.spec, spec
        try:
            self._ask(event)
        except RequestError:
            self.spec = before
            raise
        return self._waiting.for_start()

    def _ask_kill(self, rank: int) -> Future[None]:
        self._ask(ev.KillAsked(rank=rank))
        return self._waiting.for_kill(rank)

    def _ask_stop(self) -> Future[None]:
        stopped = self._waiting.for_stop()
        self._step(ev.StopAsked())
        if not self.life.state.is_live:
            self._waiting.stopped()
        return stopped

    def _run(self, request: CellRequest) -> CellHandle:
        if not self.life.state.is_live:
            raise RequestError(NO_GROUP)
        ranks = request.ranks or tuple(each.rank for each in self.life.ranks)
        before = self.cell
        self.cell = handle = CellHandle(next(self._numbers), request, ranks, self._unpack)
        try:
            self._ask(ev.RunAsked(cell=handle.number, ranks=ranks, needs_group=request.needs_group))
        except RequestError:
            self.cell = before
            raise
        self._record("cell", number=handle.number, ranks=ranks, source=request.source)
        self._watchdog.begin_cell(ranks, time.monotonic())
        self._actor().later(LOOK_PERIOD, self._look, handle)
        while self._between:
            handle.feed(self._between.pop(0))
        return handle

    def _send(self, rank: int, make: Callable[[int], Command]) -> Future[Answer]:
        if self.life.state not in (GroupState.IDLE, GroupState.BROKEN):
            raise RequestError(f"the worker group is {self.life.state.value}")
        if rank not in self.life.alive:
            raise RequestError(f"there is no rank {rank} that could answer")
        number = next(self._numbers)
        answer = self._waiting.for_answer(number, rank)
        self.require_link().send(rank, make(number))
        return answer

    def _look(self, handle: CellHandle) -> None:
        cell = self.life.cell
        if cell is None or cell.number != handle.number:
            return
        text = self._watchdog.look(cell.number, cell.waiting, handle.ranks, time.monotonic())
        if text and self.life.state is GroupState.RUNNING:
            self._say(text)
            self._record("no progress", text=text)
        self._actor().later(LOOK_PERIOD, self._look, handle)

    # ---- news

    def _collect(self) -> None:
        link = self.require_link()
        while (letter := link.collect()) is not None:
            self._actor().tell(self._read, letter)
            if isinstance(letter.message, Output) and self.cell is not None:
                self.cell.await_room()

    def _read(self, letter: Letter) -> None:  # noqa: C901 - a table, a line or two a case
        if self._ranks is None or letter.attempt != self._ranks.attempt:
            return
        rank, attempt = letter.sender, letter.attempt
        match letter.message:
            case Output() as output:
                self._feed_text(rank, self._ranks.accept(rank, output))
            case Display() as display:
                self._feed(Displayed(rank, display))
            case Answer() as answer:
                self._waiting.answered(answer)
            case Ready() as ready:
                self.ready[rank] = ready
                self._step(ev.RankReady(attempt=attempt, rank=rank))
            case StartFailed(reason=reason, traceback=traceback):
                self._start_error = StartError(reason, details=traceback)
                self._step(ev.RankUnable(attempt=attempt, rank=rank, reason=reason))
            case Pulse() as pulse:
                self._watchdog.note(rank, pulse, time.monotonic())
            case Noticed(cell=cell):
                self._step(ev.RankNoticed(attempt=attempt, rank=rank, cell=cell))
            case CellEnded() as report:
                self._read_report(rank, attempt, report)

    def _read_report(self, rank: int, attempt: int, report: CellEnded) -> None:
        if self.cell is not None and self.cell.number == report.cell:
            self.cell.note_report(rank, report)
        self._step(ev.RankEnded.of(report, attempt=attempt, rank=rank))

    def _note_exit(self, attempt: int, rank: int, handle: RankHandle) -> None:
        handle.join()  # it has ended: multiprocessing keeps its pipes open until asked
        exitcode = handle.exitcode
        if exitcode != 0:
            self.launcher.sweep(handle)
            self._record("exit", rank=rank, attempt=attempt, how=describe_exit(exitcode))
        if self._ranks is not None and self._ranks.attempt == attempt:
            for text in self._ranks.last_output(rank):
                self._feed_text(rank, text)
            if self.cell is not None:
                self.cell.note_exit(rank, exitcode)
        self._step(ev.Exited(attempt=attempt, rank=rank, exitcode=exitcode))
        self._waiting.gone(rank)

    def _feed_text(self, rank: int, text: str) -> None:
        if text:
            self._feed(Wrote(rank, text))

    def _feed(self, notice: Notice) -> None:
        if self.cell is not None and not self.cell.is_finished:
            self.cell.feed(notice)
        elif len(self._between) < MAX_BETWEEN:
            self._between.append(notice)

    # ---- the lifecycle, and what it wants done

    def _step(self, event: ev.Event) -> str:
        """Advance; returns why not, if the lifecycle refuses."""
        before = self.life.state
        self.life, actions = advance(self.life, event)
        if isinstance(event, ev.InterruptAsked) and before.is_busy:
            self._record("interrupt")
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
                self._actor().later(seconds, self._step, rang)
            case ev.Remark(text=text):
                self._feed(Said(text))
            case ev.Started():
                self._record("ready", attempt=self.life.attempt)
                self._waiting.started()
            case ev.NotStarted(reason=reason):
                self._start_error = self._start_failure(reason)
            case ev.Finished():
                self._finish()
            case ev.Stopped():
                self._tell_stopped()
            case _ if self._ranks is not None:
                self._ranks.perform(action, alive=self.life.alive, cell=self.cell)

    def _spawn(self, action: ev.Spawn) -> None:
        if self.spec is None or self._threads is None:
            raise RuntimeError("a group was to be started and nobody said how")
        link, folder = self.require_link(), self._run_folder(self.spec)
        self._start_error = None
        self.ready = {}
        self._record("start", attempt=action.attempt, world_size=action.world_size)
        self._ranks = Ranks(action.attempt, link, self.launcher)
        actor, watcher, _ = self._threads
        failed = self._ranks.launch(
            self.spec.starts(link, attempt=action.attempt, folder=folder, colors=self.colors),
            watcher,
            lambda *exit_: actor.tell(self._note_exit, *exit_),
        )
        for rank, error in failed.items():
            reason = f"rank {rank} could not be started: {error}"
            self._start_error = self._start_error or StartError(reason)
            actor.tell(self._step, ev.Exited(attempt=action.attempt, rank=rank, exitcode=None))

    def _run_folder(self, spec: GroupSpec) -> RunFolder:
        if self.folder is not None and not self.folder.path.exists():
            self._close_folder()
        if self.folder is None:
            self.folder = RunFolder(spec.cwd(), spec.name)
            for remark in (self.folder.remark, self.folder.describe(**spec.facts())):
                self._say(remark)
        return self.folder

    def _close_folder(self) -> None:
        if self.folder is not None:
            self.folder.close()
        self.folder = None

    def _record(self, kind: str, **facts: Any) -> None:
        if self.folder is not None:
            self._say(self.folder.event(kind, **facts))

    def _say(self, text: str) -> None:
        if text:
            self._feed(Said(text))

    # ---- telling those who wait

    def _start_failure(self, reason: str) -> StartError:
        self._record("start failed", reason=reason)
        known = self._start_error
        if known is not None:
            return StartError(reason if known.details else str(known), details=known.details)
        gone = [each.rank for each in self.life.ranks if not each.is_alive]
        last_words = [self.folder.last_words(rank) for rank in gone] if self.folder else []
        return StartError(reason, details="\n".join(last_words))

    def _finish(self) -> None:
        if self.cell is not None:
            result = self.cell.finish()
            outcome = result.verdict.summary() if result.verdict else "ok"
            self._record("cell ended", number=result.number, outcome=outcome)

    def _tell_stopped(self) -> None:
        self._record("stopped", attempt=self.life.attempt)
        if not self.life.state.is_live:  # else it is started again at once
            self._waiting.start_failed(self._start_error or StartError("stopped while it started"))
            self._close_folder()
        self._waiting.stopped()
