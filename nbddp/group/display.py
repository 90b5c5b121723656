"""Show cells and trials as text, for a script that uses a ``WorkerGroup``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from nbddp.controller.session import Session
from nbddp.group.method_names import name_methods
from nbddp.ui.frontend import StreamTarget, View
from nbddp.ui.input_requests import ConsoleInput, InputQueue
from nbddp.ui.report.blocks import Report
from nbddp.ui.report.render import render_text
from nbddp.ui.text_view import TextView


class ScriptTarget(StreamTarget):
    """Prints, and names the methods of a worker group in nbddp's own lines."""

    def write(self, text: str) -> None:
        """Print a text."""
        super().write(name_methods(text) if "nbddp: " in text else text)


class TextDisplay:
    """Shows cells and trials as text. Notebooks use a display of their own.

    Args:
        quiet: show only the values of the last line of a cell, and nothing about trials.
    """

    target: type[StreamTarget] = ScriptTarget  # where lines are printed
    has_table = False  # whether a table shows the trials; otherwise each trial gets a line
    shows_notices = False  # whether the view of a cell shows notices

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    # ---- a cell and its attempts

    def view(self, session: Session) -> View:
        """Return the view of the next attempt."""
        input_queue = InputQueue(ConsoleInput(), session.answer)
        return TextView(self.target(), is_quiet=self.quiet, input_queue=input_queue)

    def show_notice(self, text: str) -> None:
        """Show how nbddp handles a failure, in the view of the failed attempt if possible."""
        self.print_line(text)

    def print_line(self, text: str) -> None:
        """Print a line for the user."""
        self._write(f"nbddp: {text}")

    # ---- trials

    def show_starting(self, text: str, session: Session) -> AbstractContextManager[None]:
        """Return a context that shows the user that ranks are starting."""
        del text, session  # a script gets the line of `show_progress`
        return nullcontext()

    def show_progress(self, report: Report) -> None:
        """Show which trial starts, or at the end how many trials succeeded."""
        self.print_unless_quiet(str(report.title))

    def show(self, report: Report) -> None:
        """Show the results of the trials."""
        if not self.quiet:
            self._write(render_text(report))

    def print_unless_quiet(self, text: str) -> None:
        """Print a line, unless the display is quiet."""
        if not self.quiet:
            self.print_line(text)

    def _write(self, text: str) -> None:
        self.target().write_line(text)
