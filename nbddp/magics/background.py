"""A cell that runs while the notebook goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context

from nbddp.interrupts import begin
from nbddp.promise import HEARING, Promise
from nbddp.record.cell import CellResult


class Background:
    """Follows one cell on a thread whose output stays in the notebook cell that began it."""

    def __init__(self, follow: Callable[[], CellResult]) -> None:
        self._outcome: Promise[CellResult] = Promise()
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

    def result(self) -> CellResult:
        """What came of it; raises what following it raised."""
        return self._outcome.result()
