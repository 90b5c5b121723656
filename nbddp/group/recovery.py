"""Run a cell again after a failure: heal the group, or restart it and replay earlier cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nbddp.controller.session import Session
from nbddp.errors import CellInterruptedError, RequestError
from nbddp.formatting import list_some
from nbddp.group.display import TextDisplay
from nbddp.group.push_pull import repeat_push
from nbddp.lifecycle.refusals import CANNOT_HEAL, NOT_HEALED
from nbddp.lifecycle.retries import (
    AttemptFailure,
    RecoveryCost,
    RecoveryMethod,
    Retries,
    describe_recoveries,
    next_method,
    why_no_retry,
)
from nbddp.record.cell import CellHandle, CellRequest, CellResult, Purpose, ReplayEntry
from nbddp.record.heal.rerun import cells_to_rerun, entries_to_rerun, trainer_roots
from nbddp.record.notices import HangReport, InputRequest
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import describe_entries, names_set_by
from nbddp.record.verdict import REPLAY_WAY_OUT
from nbddp.ui.frontend import View
from nbddp.wire.messages import DEBUGGER, InputReply

MAX_LISTED = 8  # names
ENDED_BY_USER = "you ended it"
NO_RETRIES = Retries()

REPLAY_FAILED = "a cell that had succeeded failed in the replay"
REPLAY_INCOMPLETE = "the replay is incomplete"
UNKNOWN_CELLS = (
    "not replayed: the cells that another notebook ran before `%ddp nodes --rejoin`; their "
    "variables are lost, so run those cells again"
)
REPLAY_AGAIN = "`%ddp restart --replay` replays everything"


class Recovery:
    """Runs cells on the ranks of a session, and runs them again after a failure.

    Args:
        session: the session of the ranks.
        display: shows each attempt, and prints what happens between attempts.
    """

    def __init__(self, session: Session, display: TextDisplay) -> None:
        self._session = session
        self._display = display
        self._view: View | None = None  # of the last attempt
        self._end_requests = session.end_requests
        self._seconds_lost = 0.0
        self._replayed = -1  # number of entries that were replayed; -1 before the replay starts

    def submit(self, request: CellRequest, retries: Retries) -> CellHandle:
        """Send a cell to the ranks and return its handle at once; :meth:`run` shows the cell."""
        self._end_requests = self._session.end_requests
        with self._session.forward_interrupts():
            return self._submit_cell(request, is_elastic=retries.is_elastic)

    def run(
        self,
        request: CellRequest,
        retries: Retries = NO_RETRIES,
        handle: CellHandle | None = None,
    ) -> CellResult:
        """Run a cell. After a failure, heal the group, or restart and replay; then run it again.

        A cell that the user ended by an interrupt, a restart or a stop is not run again. If
        the user asks for an end between two attempts, the next one is ended as it begins.

        Args:
            request: the cell.
            retries: how many heals and restarts are allowed.
            handle: the handle of the cell, if :meth:`submit` has started it.

        Raises:
            CellInterruptedError: the user interrupted a replay.
            KeyboardInterrupt: the user interrupted a heal or a restart, or pressed Ctrl-C between
                a cell and its retry.
        """
        failures: list[AttemptFailure] = []
        self._seconds_lost = 0.0

        # The session sends the cell to its ranks. Each rank runs it in its own shell, and reports
        # its output, its numbers and its end. If a rank dies, the session sees its process exit.
        # Its neighbours lose their connections, and fail. Shortly after, the session interrupts the
        # others, and each closes its own connections if it waits in a collective. The cell is over
        # when each rank has reported its end or has died. The living ones keep their variables.
        if handle is not None:
            result = self._show(handle)
        else:
            self._end_requests = self._session.end_requests
            # An elastic cell begins with the ranks of all nodes that have joined.
            if retries.is_elastic and self._session.launcher.has_free_capacity():
                failed = self._restart_and_replay()  # the cell of the replay that failed, or None
                if failed is not None:
                    return failed
            result = self._run_and_show(request, retries)

        while (verdict := result.verdict) is not None:
            if verdict.is_interrupt:
                # The user ended the cell; or a node joined, and the cell runs with its ranks too.
                grows = result.is_outgrown and not self._end_requested
                final = self._restart_and_replay() if grows else result
            else:
                # The verdict names the first cause; what other ranks report is its consequence.
                failure = AttemptFailure(
                    what=verdict.summary(),
                    at=verdict.first.at,
                    step=self._session.rank_monitor.last_step,
                    is_death=bool(self._session.life.gone),
                )
                failures.append(failure)
                # If a rank is dead and a heal is allowed, the group is healed; else it is
                # restarted, if that is allowed. A heal replaces only the dead ranks: new ones get
                # the variables of a living rank, and all of them connect their groups. Then cells
                # that make trainers run again, because no heal can copy a trainer. A restart
                # replaces all ranks, and replays the cells that have succeeded. A heal that fails
                # is tried again, unless it would fail in the same way; then a restart follows, if
                # one is allowed. Two failures at the same step end the retries, also two failures
                # without any step. The user gets a line with the cause and the method, or why there
                # is no retry.
                final = self._recover(result, request, failures, retries)
            if final is not None:  # there is no retry
                return final

            # All ranks are alive. After a heal their variables are as the failure left them, and
            # after a restart as the replay made them. The cell runs again from its first line.
            result = self._run_and_show(replace(request, purpose=Purpose.RETRY), retries)

        if failures and not self._display.shows_notices:
            methods = [failure.method for failure in failures]
            self._display.print_line(f"done {describe_recoveries(methods, self._seconds_lost)}")
        return result

    def _run_and_show(self, request: CellRequest, retries: Retries) -> CellResult:
        with self._session.forward_interrupts():
            return self._show(self._submit_cell(request, is_elastic=retries.is_elastic))

    def _show(self, handle: CellHandle) -> CellResult:
        before, self._view = self._view, self._display.view(self._session)
        if before is not None and handle.request.is_again:
            self._view.continue_from(before)
        return show_cell(self._session, handle, self._view)

    def _submit_cell(self, request: CellRequest, *, is_elastic: bool = False) -> CellHandle:
        handle = self._session.submit(request, is_elastic=is_elastic)
        if self._end_requested:  # it may have come before the cell could receive it
            self._session.interrupt_once()
        return handle

    @property
    def _end_requested(self) -> bool:
        """Whether the user has asked for an end since this cell or replay started."""
        return self._session.end_requests > self._end_requests

    def _recover(
        self,
        result: CellResult,
        request: CellRequest,
        failures: list[AttemptFailure],
        retries: Retries,
        failed_heals: int = 0,
    ) -> CellResult | None:
        """Heal or restart the group for the next attempt. Return the last result if there is none.

        Args:
            result: the result of the failed cell.
            request: the cell.
            failures: all failures of the cell; the chosen recovery method is set on the last one.
            retries: how many heals and restarts are allowed.
            failed_heals: how many heals have failed after this failure.
        """
        remaining = replace(retries, heals=retries.heals - failed_heals)
        reason = ENDED_BY_USER if self._end_requested else why_no_retry(failures, remaining)
        method = None if reason else next_method(failures, remaining)
        if method is not None:
            count = sum(each.method is method for each in failures[:-1]) + 1
            if method is RecoveryMethod.HEAL:
                count += failed_heals
            self._display.show_notice(
                f"{failures[-1].what}; {method.value} {count} of {retries.limit(method)}"
            )
            failure = replace(failures[-1], method=method)
            # a script's own ranks have no variables to keep
            if method is RecoveryMethod.RESTART or request.has_own_ranks:
                failures[-1] = failure
                return self._restart_and_replay(failure)
            try:
                self._heal(failure, request.source)
            except RequestError as error:
                may_work = str(error).startswith(NOT_HEALED)  # such as after a death in the heal
                failed_heals = failed_heals + 1 if may_work else retries.heals
                remaining = replace(retries, heals=retries.heals - failed_heals)
                if next_method(failures, remaining) is not None:
                    why = str(error).removeprefix(f"{NOT_HEALED}: ")
                    self._display.show_notice(f"not healed: {why.removeprefix(f'{CANNOT_HEAL}: ')}")
                    return self._recover(result, request, failures, retries, failed_heals)
                reason = str(error)
                if not may_work and result.verdict is not None:
                    result = replace(result, verdict=replace(result.verdict, is_heal_refused=True))
            else:
                failures[-1] = failure
                return self.rerun(request.source)
        if retries != NO_RETRIES:
            self._display.print_line(f"not started again: {reason}")
        return result

    def rerun(self, source: str | None = None) -> CellResult | None:
        """Run the cells that make trainers again, with the cells that they depend on.

        If a cell fails, the others still run, unless they are only for one cell.

        Args:
            source: the cell that needs the trainers; None for all of them.

        Return the result of the first cell that fails, or None.
        """
        log = self._session.replay_log
        trainers = trainer_roots(log.not_carried)
        entries = entries_to_rerun(log.entries, log.not_carried, source)
        done, failed = list[ReplayEntry](), list[CellResult]()
        for number, entry in enumerate(entries):
            if self._end_requested:
                raise _replay_interrupted(number, len(entries))
            if (result := self._replay_entry(entry)) is None:
                done.append(entry)
                continue
            failed.append(result)
            if not self._report_failed_rerun(result) or source is not None:
                break
        if done:
            ran = f"ran again: {describe_entries(done)}"
            names = list_some(sorted(names_set_by(done)), MAX_LISTED)
            self._display.print_line(f"{ran}; this has set {names}")
        if source is None and not trainers:
            self._display.print_line("there is no trainer to make again")
        elif source is None and (unmade := sorted(trainers - names_set_by(log.entries))):
            made = list_some(unmade, MAX_LISTED)
            self._display.print_line(
                f"no cell that succeeded has made {made}: make it again, on all ranks"
            )
        return failed[0] if failed else None

    def _report_failed_rerun(self, result: CellResult) -> bool:
        """Report a cell that failed when it ran again. Return whether other cells can still run."""
        if result.verdict is None or result.verdict.is_interrupt:
            return False
        what = f"cell [{result.prompt}] failed when it ran again ({result.verdict.summary()})"
        way_out = "run the cells again that set the variables it uses, then `%ddp heal --rerun`"
        self._display.print_line(f"{what}: {way_out}")
        return not self._session.life.gone

    def _heal(self, failure: AttemptFailure, source: str) -> None:
        """Replace the dead ranks, and record the recovery.

        ``source``: the cell that failed; the cells that make its trainers run again afterwards.

        Raises:
            RequestError: the group cannot be healed; the message gives the reason.
        """
        detected = time.time() - failure.at
        healed = self._session.heal()
        for line in healed.lines(cells_to_rerun(self._session.replay_log, source))[1:]:
            self._display.print_line(line)
        cost = RecoveryCost(detected=round(detected, 3), healed=round(healed.seconds, 3))
        self._record_recovery(failure, cost)

    def _restart_and_replay(self, failure: AttemptFailure | None = None) -> CellResult | None:
        """Restart with all joined nodes, and replay. Return the result of a failed cell."""
        found = time.time()
        before, entries = len(self._session.life.ranks), self._session.replay_log.all_entries
        began = time.monotonic()
        with self._reporting_unreplayed(entries):
            self._session.restart(is_recovery=True)
            ready, ranks = time.monotonic(), len(self._session.life.ranks)
            if ranks != before:
                self._display.show_notice(f"{ranks} ranks now, {before} before")
            failed = self._replay(entries)
        if failed is None and failure is not None:
            cost = RecoveryCost(
                detected=round(found - failure.at, 3),
                restarted=round(ready - began, 3),
                replayed=round(time.monotonic() - ready, 3),
                cells=sum(isinstance(entry, CellRequest) for entry in entries),
            )
            self._record_recovery(failure, cost)
        return failed

    def _record_recovery(self, failure: AttemptFailure, cost: RecoveryCost) -> None:
        self._session.record_recovery(replace(failure, cost=cost))
        self._seconds_lost += cost.total
        self._display.show_notice(str(cost))

    def replay(
        self, entries: Sequence[ReplayEntry], *, restart: Callable[[], None] = lambda: None
    ) -> CellResult | None:
        """Replay entries in order. Return the result of the first cell that fails, or None.

        Args:
            entries: the cells and pushes.
            restart: starts the ranks before the replay.

        Raises:
            CellInterruptedError: the user asked for an end between two entries.
        """
        with self._reporting_unreplayed(entries):
            restart()
            self._end_requests = self._session.end_requests
            return self._replay(entries)

    @contextmanager
    def _reporting_unreplayed(self, entries: Sequence[ReplayEntry]) -> Iterator[None]:
        """After the block, keep the entries that were not replayed as pending, and report them."""
        attempt, self._replayed = self._session.life.attempt, -1
        is_rejoined = self._session.replay_log.is_rejoined
        try:
            yield
        finally:
            life, done = self._session.life, max(self._replayed, 0)
            has_begun = life.attempt > attempt or self._replayed >= 0
            replayed, remaining = entries[:done], entries[done:]
            if is_rejoined and has_begun:
                self._display.print_line(UNKNOWN_CELLS)
            # otherwise the restart was refused and nothing changed
            if remaining and (has_begun or not life.state.is_ready):
                if not life.state.is_live:
                    self._session.set_pending(entries, is_all=True)
                elif has_begun:
                    self._session.set_pending(remaining)
                message = f"replayed: {describe_entries(replayed)}; "
                message += f"not replayed: {describe_entries(remaining)}"
                self._display.print_line(f"{REPLAY_INCOMPLETE}; {message}; {REPLAY_AGAIN}")

    def _replay(self, entries: Sequence[ReplayEntry]) -> CellResult | None:
        for number, entry in enumerate(entries):
            self._replayed = number
            if self._end_requested:
                raise _replay_interrupted(number, len(entries))
            if (result := self._replay_entry(entry)) is not None:
                if result.verdict is not None and not result.verdict.is_interrupt:
                    self._display.print_line(REPLAY_FAILED)
                return result
        self._replayed = len(entries)
        return None

    def _replay_entry(self, entry: ReplayEntry) -> CellResult | None:
        """Replay an entry. Return its result if it is a cell that fails."""
        if isinstance(entry, PushRecord):
            repeat_push(self._session, entry)
            return None
        result = self._run_hidden(replace(entry, purpose=Purpose.REPLAY, wants_value=False))
        return None if result.is_ok else result

    def _run_hidden(self, request: CellRequest) -> CellResult:
        """Run a cell without a view: its output was shown when it ran first."""
        answers = [*request.recorded_input]
        with self._session.forward_interrupts():
            handle = self._submit_cell(request)
            for notice in handle.notices():
                if isinstance(notice, InputRequest):  # the user does not see the question
                    self._session.answer(notice.rank, _next_recorded_answer(notice, answers))
                elif isinstance(notice, HangReport):
                    self._display.print_line(f"cell [{handle.prompt}], run again: {notice.text}")
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        return handle.result


def _next_recorded_answer(
    question: InputRequest, answers: list[tuple[int, InputReply]]
) -> InputReply:
    """Return the rank's next recorded answer; if there is none, let a debugger continue."""
    request = question.message
    for answer in answers:
        if answer[0] == question.rank:
            answers.remove(answer)
            return replace(answer[1], question=request.question)
    goes_on = request.what == DEBUGGER
    return InputReply(question=request.question, text="c" if goes_on else "", is_end=not goes_on)


def _replay_interrupted(done: int, count: int) -> CellInterruptedError:
    what = f"the replay was interrupted after {done} of {count} cells and pushes"
    return CellInterruptedError(what, rank=0, report=f"{what}\n{REPLAY_WAY_OUT}")


def show_cell(session: Session, handle: CellHandle, view: View) -> CellResult:
    """Show a cell until it ends. Ctrl-C, or Jupyter's interrupt, interrupts the ranks."""
    try:
        with session.forward_interrupts():
            return view.show(handle)
    finally:
        handle.notice_queue.detach_reader()
