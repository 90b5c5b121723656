"""An attempt at a cell that another one followed."""

from __future__ import annotations

from dataclasses import dataclass

from nbddp.lifecycle.comeback import Way
from nbddp.record.cell import CellHandle
from nbddp.ui.panel.record import attempt_html


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that failed; the next one began at ``over_at``, the group healed or all anew."""

    handle: CellHandle
    over_at: float
    is_healed: bool

    @property
    def way(self) -> Way:
        """How it went on."""
        return Way.HEAL if self.is_healed else Way.RESTART

    @property
    def seconds_lost(self) -> float:
        """From the failure until the next attempt."""
        verdict = self.handle.result.verdict if self.handle.result else None
        return self.over_at - verdict.first.at if verdict else 0.0

    def html(self) -> str:
        """The attempt, folded."""
        result = self.handle.result
        return attempt_html(self.handle.attempt, result, self.way) if result else ""
