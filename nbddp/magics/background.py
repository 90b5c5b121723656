"""A cell that runs while the notebook goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context

from nbddp.interrupts import begin
from nbddp.promise import HEARING, Promise
from nbddp.record.cell import CellResult
from nbddp.record.trace import Trace

Outcome = tuple[CellResult, Trace | None]


class Background:
    """Follows one cell on a thread whose output stays in the notebook cell that began it."""

    def __init__(self, follow: Callable[[], Outcome]) -> None:
        self._outcome: Promise[Outcome] = Promise()
        self._follow = follow
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._follow_to_end,), name="nbddp-view", daemon=True
        )
        begin(self._thread)

    def _follow_to_end(self) -> None:
        try:
            self._outcome.set_result(self._follow())
        except BaseException as error:  # noqa: BLE001 - it is raised for whoever waits
            self._outcome.set_exception(error)

    def wait(self) -> None:
        """Until it is over."""
        while self._thread.is_alive():
            self._thread.join(HEARING)

    def result(self) -> Outcome:
        """Return what came of it, and its trace if it has one; raise what following it raised."""
        return self._outcome.result()
