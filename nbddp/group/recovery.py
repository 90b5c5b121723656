"""Runs a cell with restarts: a failed group is started anew, and what was done is done again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nbddp.controller.session import Session
from nbddp.errors import CellInterruptedError
from nbddp.lifecycle.comeback import Comeback, Setback, say_restarts, why_stop
from nbddp.record.cell import CellHandle, CellRequest, CellResult, Deed, Typed
from nbddp.record.deeds import say_deeds
from nbddp.record.notices import Question
from nbddp.record.pushes import Pushed
from nbddp.wire.messages import DEBUGGER, Answered

ENDED = "you asked to end it"

FAILED = "a cell that had gone well failed when it was replayed"
ENDED_EARLY = "the replay did not come to its end"
WAY_OUT = "`%ddp restart --replay` does all of it again"


class Recovery:
    """Knows how a cell is shown and values are pushed; the rest it asks of the session.

    Args:
        session: whose ranks they are.
        show: shows a cell from its beginning to its end, and returns what came of it.
        push: sends values to the ranks.
        say: tells the user something between two attempts.
        note: the same where the view of the next attempt tells all of it; None: ``say`` does.
    """

    def __init__(
        self,
        session: Session,
        *,
        show: Callable[[CellHandle], CellResult],
        push: Callable[[Pushed], None],
        say: Callable[[str], None],
        note: Callable[[str], None] | None = None,
    ) -> None:
        self._session = session
        self._tells_end = note is None
        self._note = note or say
        self._show = show
        self._push = push
        self._say = say
        self._times_ended = session.times_ended
        self._seconds_lost = 0.0
        self._done: int | None = None  # by the replay that goes on, or was the last

    def run_with_restarts(self, request: CellRequest, *, max_restarts: int) -> CellResult:
        """Run a cell; after a failure restart the group, replay, and run it again.

        What the user ended, by an interrupt, a restart or a stop, is not started again. An
        interrupt counts whenever it comes: it ends the cell, or the replay, that begins next.
        """
        self._times_ended = self._session.times_ended
        return self._recover(self._run_shown(request), request, max_restarts=max_restarts)

    def run_again(self, request: CellRequest, *, max_restarts: int) -> CellResult:
        """After a failure, as the user asks: restart, replay, and run the cell in the same view."""
        deeds = (*self._session.deeds, *self._session.undone)
        self._note("restarting the ranks, to run it again ...")
        try:
            with self._keeping_curves():
                failed = self.replay(deeds, restart=lambda: self._session.restart(is_recovery=True))
        except BaseException:
            self._note("not run again: the restart or the replay did not come to its end")
            raise
        self._session.end_recovery(is_taken_up=failed is None)
        if failed is not None:
            self._note(f"not run again: {FAILED}")
            return failed
        return self.run_with_restarts(replace(request, is_again=True), max_restarts=max_restarts)

    def begin(self, request: CellRequest) -> CellHandle:
        """Hand a cell to the ranks and return at once; :meth:`follow` shows it."""
        self._times_ended = self._session.times_ended
        with self._session.taking_interrupts():
            return self._hand_over(request)

    def follow(self, handle: CellHandle, *, max_restarts: int) -> CellResult:
        """The same as :meth:`run_with_restarts` for a cell that was begun."""
        return self._recover(self._show(handle), handle.request, max_restarts=max_restarts)

    def _run_shown(self, request: CellRequest) -> CellResult:
        with self._session.taking_interrupts():
            return self._show(self._hand_over(request))

    def _hand_over(self, request: CellRequest) -> CellHandle:
        handle = self._session.submit(request)
        if self._is_ended:  # it may have come too early to be heard
            self._session.interrupt_unless_asked()
        return handle

    @property
    def _is_ended(self) -> bool:
        """Whether the user has asked for an end since this began."""
        return self._session.times_ended > self._times_ended

    def _recover(
        self, result: CellResult, request: CellRequest, *, max_restarts: int
    ) -> CellResult:
        setbacks: list[Setback] = []
        self._seconds_lost = 0.0
        while (verdict := result.verdict) is not None and not verdict.is_interrupt:
            setbacks.append(
                Setback(
                    attempt=self._session.life.attempt,
                    what=verdict.summary(),
                    at=verdict.first.at,
                    step=self._session.whereabouts.last_step,
                )
            )
            reason = ENDED if self._is_ended else why_stop(setbacks, max_restarts)
            if reason:
                if max_restarts:
                    self._say(f"not started again: {reason}")
                return result
            self._note(f"{verdict.summary()}; restart {len(setbacks)} of {max_restarts}")
            failed = self._come_back(setbacks[-1])
            if failed is not None:
                return failed
            result = self._run_shown(replace(request, is_again=True))
        if setbacks and result.is_ok and self._tells_end:
            self._say(f"done {say_restarts(len(setbacks), self._seconds_lost)}")
        return result

    def _come_back(self, setback: Setback) -> CellResult | None:
        """Restart and replay; what came of a cell that failed this time, else None."""
        detected = time.time() - setback.at
        deeds, began = self._session.deeds, time.monotonic()
        with self._accounting_for(deeds), self._keeping_curves():
            self._session.restart(is_recovery=True)
            ready = time.monotonic()
            failed = self._replay(deeds)
        if failed is not None:
            self._session.end_recovery(is_taken_up=False)
            return failed
        comeback = Comeback(
            setback=setback,
            detected=detected,
            restarted=ready - began,
            replayed=time.monotonic() - ready,
            cells=sum(isinstance(deed, CellRequest) for deed in deeds),
        )
        self._session.expect(comeback)
        self._session.end_recovery(is_taken_up=True)
        self._seconds_lost += comeback.detected + comeback.restarted + comeback.replayed
        self._note(
            f"noticed after {comeback.detected:.2f} s, restarted in {comeback.restarted:.2f} s, "
            f"{_say_cells(comeback.cells)} replayed in {comeback.replayed:.2f} s"
        )
        return None

    def replay(
        self, deeds: Sequence[Deed], *, restart: Callable[[], None] = lambda: None
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
    def _keeping_curves(self) -> Iterator[None]:
        """What the cell had reported stays, whatever the cells report that are replayed."""
        self._session.begin_recovery()
        try:
            yield
        except BaseException:
            self._session.end_recovery(is_taken_up=False)
            raise

    @contextmanager
    def _accounting_for(self, deeds: Sequence[Deed]) -> Iterator[None]:
        """However a restart and a replay end: what is not done again is kept, and said."""
        attempt, self._done = self._session.life.attempt, None
        try:
            yield
        finally:
            self._account(deeds, self._done, is_new=self._session.life.attempt > attempt)

    def _account(self, deeds: Sequence[Deed], done: int | None, *, is_new: bool) -> None:
        if done is None and not is_new and self._session.life.state.is_ready:
            return  # the restart was refused: all is as it was
        again, left = deeds[: done or 0], deeds[done or 0 :]
        if not left:
            return
        if is_new or done is not None:
            self._session.leave_undone(left)
        said = f"done again: {say_deeds(again)}; not done again: {say_deeds(left)}"
        self._say(f"{ENDED_EARLY}; {said}; {WAY_OUT}")

    def _replay(self, deeds: Sequence[Deed]) -> CellResult | None:
        for number, deed in enumerate(deeds):
            self._done = number
            if self._is_ended:
                raise _ended(number, len(deeds))
            if isinstance(deed, Pushed):
                self._push(deed)
                continue
            result = self._run_unseen(replace(deed, is_again=True, wants_value=False))
            if result.verdict is not None:
                if not result.verdict.is_interrupt:
                    self._say(FAILED)
                return result
        self._done = len(deeds)
        return None

    def _run_unseen(self, request: CellRequest) -> CellResult:
        """It was shown when it ran for the first time."""
        typed = [*request.typed]
        with self._session.taking_interrupts():
            handle = self._hand_over(request)
            for notice in handle.notices():
                if isinstance(notice, Question):  # nobody sees it
                    self._session.answer(notice.rank, _type_again(notice, typed))
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        return handle.result


def _type_again(question: Question, typed: list[Typed]) -> Answered:
    """What was typed here before; if this was not asked then, a debugger goes on."""
    asked = question.asked
    for place, (rank, what, answer) in enumerate(typed):
        if (rank, what) == (question.rank, asked.what):
            del typed[place]
            return replace(answer, question=asked.question)
    if asked.what == DEBUGGER:
        return Answered(question=asked.question, text="c")
    return Answered(question=asked.question, is_end=True)


def _say_cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _ended(done: int, count: int) -> CellInterruptedError:
    what = f"the replay was ended when {done} of {count} cells and pushes were done"
    way_out = "Every rank that lives keeps its names; the next cell works."
    return CellInterruptedError(what, rank=0, report=f"{what}\n{way_out}")
