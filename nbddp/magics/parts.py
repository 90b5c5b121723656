"""A cell that runs several times, on a page that was loaded again meanwhile.

Such a page is sent no output of that cell any more. It has the panel of the time that ran then,
if the notebook was saved with it: that lives on, and what comes after it is shown there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.interactiveshell import InteractiveShell

if TYPE_CHECKING:
    from nbddp.ui.screen import View

NOTE = (
    '<div class="nbddp"><div class="nbddp-muted">The page was loaded again: it has no panels of '
    "later runs, and the table above this one is of before.</div></div>"
)


class Parts:
    """The views of one such cell; those of another one are forgotten when it begins."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._number = 0  # of the cell
        self._views: list[View] = []
        self._shown = ""

    def add(self, view: View) -> None:
        """Another time begins."""
        if self._number != self._shell.execution_count:
            self._number, self._views = self._shell.execution_count, []
        self._views.append(view)

    def begin(self, html: str) -> None:
        """Show this in the place of what was told before."""
        self._shown = NOTE
        self.tell(html)

    def tell(self, html: str) -> None:
        """Show this below it."""
        if self._number != self._shell.execution_count:
            return
        from nbddp.ui.panel.view import PanelView  # loads widgets, which no terminal needs

        self._shown += html
        for each in self._views:
            if isinstance(each, PanelView):
                each.tell_reloaded(self._shown)
