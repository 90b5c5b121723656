"""Runs a cell with restarts: a failed group is started anew, and what was done is done again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nbddp.controller.cell import CellHandle, CellRequest, CellResult, Deed
from nbddp.controller.pushes import Pushed
from nbddp.controller.recovery import Comeback, Setback, why_stop
from nbddp.controller.session import Session
from nbddp.errors import CellInterruptedError

ENDED = "you asked to end it"


class Recoverer:
    """Knows how a cell is shown and values are pushed; the rest it asks of the session.

    Args:
        session: whose ranks they are.
        show: shows a cell from its beginning to its end, and returns what came of it.
        push: sends values to the ranks.
        say: tells the user something between two attempts.
    """

    def __init__(
        self,
        session: Session,
        *,
        show: Callable[[CellHandle], CellResult],
        push: Callable[[Pushed], None],
        say: Callable[[str], None],
    ) -> None:
        self._session = session
        self._show = show
        self._push = push
        self._say = say

    def run(self, request: CellRequest, *, max_restarts: int) -> CellResult:
        """Run a cell; after a failure restart the group, replay, and run it again.

        What the user ended, by an interrupt, a restart or a stop, is not started again.
        """
        before = self._session.times_ended
        handle = self._session.run(request)
        return self.follow(handle, max_restarts=max_restarts, times_ended=before)

    def follow(
        self, handle: CellHandle, *, max_restarts: int, times_ended: int | None = None
    ) -> CellResult:
        """The same for a cell that was handed to the ranks already."""
        before = self._session.times_ended if times_ended is None else times_ended
        setbacks: list[Setback] = []
        result = self._show(handle)
        while (verdict := result.verdict) is not None and not verdict.is_interrupt:
            setbacks.append(
                Setback(
                    attempt=self._session.life.attempt,
                    what=verdict.summary(),
                    at=verdict.first.at,
                    step=self._session.lookout.last_step,
                )
            )
            was_ended = self._session.times_ended > before
            reason = ENDED if was_ended else why_stop(setbacks, max_restarts)
            if reason:
                if max_restarts:
                    self._say(f"not started again: {reason}")
                return result
            self._say(f"{verdict.summary()}; restart {len(setbacks)} of {max_restarts}")
            failed = self._come_back(setbacks[-1], times_ended=before)
            if failed is not None:
                return failed
            with self._session.taking_interrupts():
                result = self._show(self._session.run(replace(handle.request, is_again=True)))
        return result

    def _come_back(self, setback: Setback, *, times_ended: int) -> CellResult | None:
        """Restart and replay; what came of a cell that failed this time, else None."""
        detected = time.time() - setback.at
        deeds, began = self._session.deeds, time.monotonic()
        self._session.restart(is_recovery=True)
        ready = time.monotonic()
        failed = self.replay(deeds, times_ended=times_ended)
        if failed is not None:
            return failed
        comeback = Comeback(
            setback=setback,
            detected=detected,
            restarted=ready - began,
            replayed=time.monotonic() - ready,
            cells=sum(isinstance(deed, CellRequest) for deed in deeds),
        )
        self._session.expect(comeback)
        self._say(
            f"noticed after {comeback.detected:.2f} s, restarted in {comeback.restarted:.2f} s, "
            f"{comeback.cells} cells replayed in {comeback.replayed:.2f} s"
        )
        return None

    def replay(self, deeds: Sequence[Deed], *, times_ended: int | None = None) -> CellResult | None:
        """Do again, in order, what was done; what came of the first cell that fails.

        Args:
            deeds: cells and pushes.
            times_ended: how often the user had asked for an end when this began; None: up to now.

        Raises:
            CellInterruptedError: the user asked for an end between two cells.
        """
        before = self._session.times_ended if times_ended is None else times_ended
        for number, deed in enumerate(deeds):
            if self._session.times_ended > before:
                raise _ended(number, len(deeds))
            if isinstance(deed, Pushed):
                self._push(deed)
                continue
            result = self._run_unseen(replace(deed, is_again=True, wants_value=False))
            if result.verdict is not None:
                if not result.verdict.is_interrupt:
                    self._say("a cell that had gone well failed when it was replayed")
                return result
        return None

    def _run_unseen(self, request: CellRequest) -> CellResult:
        """It was shown when it ran for the first time."""
        with self._session.taking_interrupts():
            handle = self._session.run(request)
            for _ in handle.notices():
                pass
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        return handle.result


def _ended(done: int, count: int) -> CellInterruptedError:
    what = f"the replay was ended when {done} of {count} cells and pushes were done"
    way_out = "Every rank that lives keeps its names; the next cell works."
    return CellInterruptedError(what, rank=0, report=f"{what}\n{way_out}")
