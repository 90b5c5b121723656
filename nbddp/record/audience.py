"""Who hears what is said: the cell that runs or, between two cells, the one that comes next.

What ranks say that are gone by then, that one does not hear.
"""

from __future__ import annotations

from collections.abc import Callable

from nbddp.record.cell import CellHandle
from nbddp.record.log_reader import Logged
from nbddp.record.notices import Notice, Notices, Question, Said

MAX_KEPT = 64 << 10  # characters of output kept from between two cells


class Audience:
    """Whoever reads what the last cell says, as long as it runs."""

    def __init__(self, last_cell: Callable[[], CellHandle | None]) -> None:
        self._last_cell = last_cell
        self._kept = Notices(max_text=MAX_KEPT)

    def feed(self, notice: Notice | Logged | None) -> None:
        """Hand on a notice, if there is one, or keep it."""
        if notice is not None:
            cell = self._last_cell()
            if cell is None or cell.is_finished:
                self._kept.feed(notice)
                return
            if isinstance(notice, Question):
                cell.note_question(notice)
            cell.told.feed(notice)

    def feed_now(self, notice: Logged | None) -> None:
        """Hand on the last words of a rank that is gone: no later cell is to hear them.

        Between two cells they are left to its log.
        """
        cell = self._last_cell()
        if cell is not None and not cell.is_finished:
            self.feed(notice)

    def forget_ranks(self) -> None:
        """Other ranks come: what the last ones have said between two cells is left to the logs."""
        self._kept.leave_words()

    @property
    def listens(self) -> bool:
        """Whether somebody reads what the cell that runs says."""
        cell = self._last_cell()
        return cell is not None and not cell.is_finished and cell.told.is_read

    def say(self, text: str) -> None:
        """Hand on a word of our own."""
        if text:
            self.feed(Said(text))

    def catch_up(self, cell: CellHandle) -> None:
        """A cell has begun: it hears what was kept."""
        self._kept.move_to(cell.told)
