"""Runs a cell again after a failure: the group is healed, or started anew and all done again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nbddp.controller.session import Session
from nbddp.errors import CellInterruptedError, RequestError
from nbddp.group.display import TextDisplay
from nbddp.group.push_pull import repeat_push
from nbddp.lifecycle.retries import (
    AttemptFailure,
    RecoveryMethod,
    RecoveryRecord,
    Retries,
    describe_recoveries,
    next_way,
    why_stop,
)
from nbddp.record.cell import CellHandle, CellRequest, CellResult, Purpose, ReplayEntry
from nbddp.record.notices import InputRequest
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import describe_entries
from nbddp.record.verdict import Verdict
from nbddp.ui.frontend import View
from nbddp.wire.messages import DEBUGGER, InputReply

ENDED_BY_USER = "you asked to end it"
NO_RETRIES = Retries()

REPLAY_FAILED = "a cell that had gone well failed when it was replayed"
REPLAY_INCOMPLETE = "the replay did not come to its end"
REPLAY_AGAIN = "`%ddp restart --replay` does all of it again"


class Recovery:
    """Runs cells on the ranks of a session, and runs them again after a failure.

    Args:
        session: whose ranks they are.
        display: shows each attempt, and tells the user what happens between two of them.
    """

    def __init__(self, session: Session, display: TextDisplay) -> None:
        self._session = session
        self._display = display
        self._view: View | None = None  # of the last attempt
        self._times_ended = session.times_ended
        self._seconds_lost = 0.0
        self._done = -1  # deeds that the replay has done; -1 before it begins

    def begin(self, request: CellRequest, retries: Retries) -> CellHandle:
        """Hand a cell to the ranks and return at once; :meth:`run` shows it."""
        self._times_ended = self._session.times_ended
        with self._session.taking_interrupts():
            return self._hand_over(request, is_elastic=retries.is_elastic)

    def run(
        self,
        request: CellRequest,
        retries: Retries = NO_RETRIES,
        begun: CellHandle | None = None,
    ) -> CellResult:
        """Run a cell; after a failure heal the group, or restart it and replay, and run it again.

        What the user ended, by an interrupt, a restart or a stop, is not started again. An
        interrupt counts whenever it comes: it ends the cell, or the replay, that begins next.

        Args:
            request: the cell.
            retries: how often.
            begun: its handle, if :meth:`begin` has begun it.
        """
        if begun is not None:
            return self._recover(self._show(begun), request, retries)
        self._times_ended = self._session.times_ended
        if retries.is_elastic and self._session.launcher.has_room():
            failed = self._restart_and_replay()
            if failed is not None:
                return failed
        return self._recover(self._run_shown(request, retries), request, retries)

    def _run_shown(self, request: CellRequest, retries: Retries) -> CellResult:
        with self._session.taking_interrupts():
            return self._show(self._hand_over(request, is_elastic=retries.is_elastic))

    def _show(self, handle: CellHandle) -> CellResult:
        before, self._view = self._view, self._display.view(self._session)
        if before is not None and handle.request.is_again:
            self._view.take_over(before)
        return show_cell(self._session, handle, self._view)

    def _hand_over(self, request: CellRequest, *, is_elastic: bool = False) -> CellHandle:
        handle = self._session.submit(request, is_elastic=is_elastic)
        if self._is_ended:  # it may have come too early to be heard
            self._session.interrupt_unless_asked()
        return handle

    @property
    def _is_ended(self) -> bool:
        """Whether the user has asked for an end since this began."""
        return self._session.times_ended > self._times_ended

    def _recover(self, result: CellResult, request: CellRequest, retries: Retries) -> CellResult:
        setbacks: list[AttemptFailure] = []
        self._seconds_lost = 0.0
        while (verdict := result.verdict) is not None:
            if verdict.is_interrupt:
                grows = result.is_outgrown and not self._is_ended
                failed = self._restart_and_replay() if grows else result
            else:
                setbacks.append(self._setback(verdict))
                failed = self._come_back(result, request, setbacks, retries)
            if failed is not None:
                return failed
            result = self._run_shown(replace(request, purpose=Purpose.RETRY), retries)
        if setbacks and result.is_ok and not self._display.has_notes:
            ways = [each.way for each in setbacks]
            self._display.say(f"done {describe_recoveries(ways, self._seconds_lost)}")
        return result

    def _setback(self, verdict: Verdict) -> AttemptFailure:
        life = self._session.life
        return AttemptFailure(
            attempt=life.attempt,
            what=verdict.summary(),
            at=verdict.first.at,
            step=self._session.rank_monitor.last_step,
            is_death=bool(life.gone),
        )

    def _come_back(
        self,
        result: CellResult,
        request: CellRequest,
        setbacks: list[AttemptFailure],
        retries: Retries,
    ) -> CellResult | None:
        """Heal or restart the group for another attempt; return the last result if there is none.

        Args:
            result: of the cell that failed.
            request: the cell.
            setbacks: all failures of the cell; the last one gets the way that is taken.
            retries: how often.
        """
        reason = ENDED_BY_USER if self._is_ended else why_stop(setbacks, retries)
        way = None if reason else next_way(setbacks, retries)
        if way is not None:
            count = sum(each.way is way for each in setbacks[:-1]) + 1
            self._display.note(f"{setbacks[-1].what}; {way.value} {count} of {retries.of(way)}")
            setback = replace(setbacks[-1], way=way)
            # ranks of their own have no names to keep
            if way is RecoveryMethod.RESTART or request.has_own_ranks:
                setbacks[-1] = setback
                return self._restart_and_replay(setback)
            try:
                self._heal(setback)
            except RequestError as error:
                if retries.restarts:
                    self._display.note(f"not healed: {error}")
                    return self._come_back(result, request, setbacks, replace(retries, heals=0))
                reason = f"it cannot be healed: {error}"
            else:
                setbacks[-1] = setback
                return None
        if retries != NO_RETRIES:
            self._display.say(f"not started again: {reason}")
        return result

    def _heal(self, setback: AttemptFailure) -> None:
        """Put new ranks in the places of dead ones; the cell takes up what it had reported.

        Raises:
            RequestError: why that cannot be.
        """
        detected = time.time() - setback.at
        healed = self._session.heal()
        for line in healed.lines()[1:]:
            self._display.say(line)
        self._take_up(RecoveryRecord(setback=setback, detected=detected, healed=healed.seconds))

    def _restart_and_replay(self, setback: AttemptFailure | None = None) -> CellResult | None:
        """Restart with all nodes that are here, and replay; return the result of a failed cell."""
        found = time.time()
        before, deeds, began = len(self._session.life.ranks), self._session.deeds, time.monotonic()
        with self._accounting_for(deeds):
            self._session.restart(is_recovery=True)
            ready, ranks = time.monotonic(), len(self._session.life.ranks)
            if ranks != before:
                self._display.note(f"{ranks} ranks now, {before} before")
            failed = self._replay(deeds)
        if failed is None and setback is not None:
            recovery = RecoveryRecord(
                setback=replace(setback, way=RecoveryMethod.RESTART),
                detected=found - setback.at,
                restarted=ready - began,
                replayed=time.monotonic() - ready,
                cells=sum(isinstance(deed, CellRequest) for deed in deeds),
            )
            self._take_up(recovery)
        return failed

    def _take_up(self, recovery: RecoveryRecord) -> None:
        self._session.expect(recovery)
        self._seconds_lost += recovery.seconds
        self._display.note(str(recovery))

    def replay(
        self, deeds: Sequence[ReplayEntry], *, restart: Callable[[], None] = lambda: None
    ) -> CellResult | None:
        """Do again, in order, what was done; what came of the first cell that fails.

        Args:
            deeds: what was done.
            restart: makes the ranks for it, before.

        Raises:
            CellInterruptedError: the user asked for an end between two cells.
        """
        with self._accounting_for(deeds):
            restart()
            self._times_ended = self._session.times_ended
            return self._replay(deeds)

    @contextmanager
    def _accounting_for(self, deeds: Sequence[ReplayEntry]) -> Iterator[None]:
        """However a restart and a replay end: what is not done again is kept, and said."""
        attempt, self._done = self._session.life.attempt, -1
        try:
            yield
        finally:
            life, done = self._session.life, max(self._done, 0)
            has_begun = life.attempt > attempt or self._done >= 0
            again, left = deeds[:done], deeds[done:]
            # else the restart was refused, and all is as it was
            if left and (has_begun or not life.state.is_ready):
                if not life.state.is_live:
                    self._session.leave_undone(deeds, is_all=True)
                elif has_begun:
                    self._session.leave_undone(left)
                said = f"done again: {describe_entries(again)}; "
                said += f"not done again: {describe_entries(left)}"
                self._display.say(f"{REPLAY_INCOMPLETE}; {said}; {REPLAY_AGAIN}")

    def _replay(self, deeds: Sequence[ReplayEntry]) -> CellResult | None:
        for number, deed in enumerate(deeds):
            self._done = number
            if self._is_ended:
                raise _replay_interrupted(number, len(deeds))
            if isinstance(deed, PushRecord):
                repeat_push(self._session, deed)
                continue
            result = self._run_unseen(replace(deed, purpose=Purpose.REPLAY, wants_value=False))
            if result.verdict is not None:
                if not result.verdict.is_interrupt:
                    self._display.say(REPLAY_FAILED)
                return result
        self._done = len(deeds)
        return None

    def _run_unseen(self, request: CellRequest) -> CellResult:
        """It was shown when it ran for the first time."""
        typed = [*request.recorded_input]
        with self._session.taking_interrupts():
            handle = self._hand_over(request)
            for notice in handle.notices():
                if isinstance(notice, InputRequest):  # nobody sees it
                    self._session.answer(notice.rank, _next_recorded_answer(notice, typed))
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        return handle.result


def _next_recorded_answer(
    question: InputRequest, typed: list[tuple[int, InputReply]]
) -> InputReply:
    """Return the rank's next recorded answer; without one, let a debugger continue."""
    asked = question.asked
    for each in typed:
        if each[0] == question.rank:
            typed.remove(each)
            return replace(each[1], question=asked.question)
    goes_on = asked.what == DEBUGGER
    return InputReply(question=asked.question, text="c" if goes_on else "", is_end=not goes_on)


def _replay_interrupted(done: int, count: int) -> CellInterruptedError:
    what = f"the replay was ended when {done} of {count} cells and pushes were done"
    way_out = "Every rank that lives keeps its names; the next cell works."
    return CellInterruptedError(what, rank=0, report=f"{what}\n{way_out}")


def show_cell(session: Session, handle: CellHandle, view: View) -> CellResult:
    """Show a cell until it ends; Ctrl-C, or Jupyter's interrupt, interrupts the ranks."""
    try:
        with session.taking_interrupts():
            return view.show(handle)
    finally:
        handle.detach_reader()
