"""Show cells and the group as a panel or as text, as the user chose or the page supports."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import clear_output, publish_display_data

from nbddp.controller.session import Session
from nbddp.errors import NbddpError
from nbddp.group.display import TextDisplay
from nbddp.record.cell import CellHandle
from nbddp.sigint import import_interruptibly
from nbddp.ui.frontend import NotebookTarget, StreamTarget, View, supports_color, supports_widgets
from nbddp.ui.html_pieces import MAX_CHARTS
from nbddp.ui.input_requests import ConsoleInput, InputBackend, InputQueue, StdinPrompt
from nbddp.ui.report.blocks import Block, Report
from nbddp.ui.report.render import render_html, render_text
from nbddp.ui.report.status import status_report
from nbddp.ui.text_view import ProgressLine, TextView

if TYPE_CHECKING:
    from nbddp.ui.panel.controls import RetryButtons
    from nbddp.ui.panel.output_slot import OutputSlot
    from nbddp.ui.panel.panel_view import PanelView


MATPLOTLIB = "matplotlib.backends.backend_agg"  # takes a second to import


class ViewChoice(Enum):
    """How cells are shown."""

    AUTO = "auto"
    PANEL = "panel"
    TEXT = "text"


class Presenter:
    """Creates the views of one shell.

    Attributes:
        last_view: the view of the last cell or attempt.
        remarks: returns what extensions say below a cell of a session.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.choice = ViewChoice.AUTO
        self._shell = shell
        self.last_view: View | None = None
        self.remarks: Callable[[Session, CellHandle], Sequence[Block]] = lambda *_: ()
        self._last_panel: PanelView | None = None  # the last view, if it is a panel
        self._last_cell = 0  # the number of its cell
        self._next_slot: OutputSlot | None = None
        self._starting_panel: PanelView | None = None
        self._retry_buttons: RetryButtons | None = None

    @property
    def has_record(self) -> bool:
        """Whether the view of the last cell has already shown why the cell failed.

        `%%capture` hides the view, but not the error.
        """
        is_captured = isinstance(self._shell.display_pub, CapturingDisplayPublisher)
        return not is_captured and self.last_view is not None and self.last_view.has_record

    def view(self, session: Session, *, quiet: bool, has_pictures: bool) -> View:
        """Return the view of a new cell.

        Args:
            session: the session of its ranks.
            quiet: show only the values of the last line.
            has_pictures: whether a text view shows the charts of the cell below it.
        """
        self._withdraw_retry_buttons()
        panel, self._starting_panel = self._starting_panel, None
        if panel is None and not quiet and self.shows_panels:
            panel = self._new_panel(session)
        self._last_panel = panel
        view = panel or self._new_text_view(session, is_quiet=quiet, has_pictures=has_pictures)
        self.last_view, self._last_cell = view, self._shell.execution_count
        return view

    @property
    def _panel_in_cell(self) -> PanelView | None:
        """The last view, if it is a panel in the running cell."""
        return self._last_panel if self._last_cell == self._shell.execution_count else None

    @contextmanager
    def showing_start(self, text: str, session: Session, *, quiet: bool) -> Iterator[None]:
        """Show that ranks are starting, where the panel will appear; clear it if they do not."""
        if quiet or not self.shows_panels:
            yield
            return
        self._starting_panel = view = self._new_panel(session)
        with view.showing_start(text):
            try:
                yield
            except BaseException:
                if self._starting_panel is view:
                    self._starting_panel = None
                    view.cancel_start()
                raise

    def show_retry_buttons(
        self, restart: Callable[[], str], heal: Callable[[], str] | None
    ) -> None:
        """Show buttons for a restart and a heal below the record of a failed cell."""
        if not (self.has_record and hasattr(self._shell, "kernel")):
            return
        from nbddp.ui.panel.controls import HEAL, RESTART, RetryButtons

        self._withdraw_retry_buttons()
        offers = ({HEAL: heal} if heal else {}) | {RESTART: restart}
        actions = {name: partial(_try_action, act) for name, act in offers.items()}
        root = self._last_panel.slot.root if self._last_panel else None
        self._retry_buttons = RetryButtons(self._shell.kernel, actions, root)
        self._retry_buttons.publish()

    def hide_heal_button(self) -> None:
        """Hide the button for a heal, because no rank is dead any more."""
        if self._retry_buttons is not None:
            self._retry_buttons.hide_heal()

    def _withdraw_retry_buttons(self) -> None:
        buttons, self._retry_buttons = self._retry_buttons, None
        if buttons is not None:
            from nbddp.ui.comms.dispatcher import CommDispatcher
            from nbddp.ui.panel.panel_view import PANELS_KEPT

            buttons.remove()
            CommDispatcher.for_shell(self._shell).close_later(buttons.close, most=PANELS_KEPT)

    def _new_text_view(self, session: Session, *, is_quiet: bool, has_pictures: bool) -> View:
        is_kernel = hasattr(self._shell, "kernel")
        is_terminal = not is_kernel and sys.stdout.isatty()
        shown = has_pictures and is_kernel
        progress = ProgressLine(session, is_terminal=is_terminal, has_pictures=shown)
        return TextView(
            NotebookTarget(has_color=supports_color(self._shell)),
            is_quiet=is_quiet,
            progress=None if is_quiet else progress,
            remarks=None if is_quiet else partial(self.remarks, session),
            input_queue=self._input_queue(session),
        )

    def _new_panel(self, session: Session) -> PanelView:
        # loads widgets, which a terminal does not need
        from nbddp.ui.comms.dispatcher import CommDispatcher
        from nbddp.ui.panel.panel_view import PanelView

        slot = self._next_slot if self._panel_in_cell is not None else None
        self._next_slot = None
        return PanelView(
            session,
            CommDispatcher.for_shell(self._shell),
            NotebookTarget(has_color=supports_color(self._shell)),
            remarks=partial(self.remarks, session),
            input_queue=self._input_queue(session),
            slot=slot,
        )

    def _input_queue(self, session: Session) -> InputQueue:
        """Return the queue of input requests. Requests of a background cell are refused."""
        box: InputBackend = ConsoleInput()
        if threading.current_thread() is not threading.main_thread():
            box = InputBackend("its cell runs in the background: leave --no-wait out")
        elif hasattr(self._shell, "kernel"):
            box = StdinPrompt(self._shell.kernel)
        return InputQueue(box, session.answer)

    @property
    def shows_panels(self) -> bool:
        """Whether the running cell is shown as a panel, unless it is quiet."""
        if self.choice is ViewChoice.AUTO:
            return supports_widgets(self._shell)
        return self.choice is ViewChoice.PANEL and hasattr(self._shell, "kernel")

    def show(self, report: Report) -> None:
        """Show a report as HTML, as a picture or as text, as the front end supports."""
        text, picture = render_text(report), report.picture
        if self.shows_panels:
            if picture is not None and picture.html is None:
                import_interruptibly(MATPLOTLIB)
            html = render_html(report)
            publish_display_data({"text/html": html, "text/plain": text})
        elif picture is not None and hasattr(self._shell, "kernel"):
            import_interruptibly(MATPLOTLIB)
            NotebookTarget().show_picture(*picture.draw(), text=text)
        else:
            self.print_line(text)

    def show_progress(self, report: Report) -> None:
        """Replace the progress that was shown before; as text, print only the title."""
        if not self.shows_panels:
            self.print_line(f"nbddp: {report.title}")
            return
        clear_output(wait=True)
        html = render_html(report)
        publish_display_data({"text/html": html, "text/plain": str(report.title)})
        panel = self._panel_in_cell
        if panel is not None:  # so that a reloaded page shows the next run too
            panel.slot.reset(html)
            self._next_slot = panel.slot

    def show_status(self, session: Session) -> None:
        """Show the state of the group; a page also shows the output of its last cell."""
        snapshot, last = session.snapshot(), self._last_panel
        is_same_attempt = last and last.session is session and last.attempt == session.life.attempt
        if not (self.shows_panels and last and is_same_attempt):
            self.show(status_report(snapshot))
            return
        from nbddp.ui.panel.panel_view import RECORD_LINES  # loads widgets

        metrics = session.rank_monitor.metrics.snapshot(most=MAX_CHARTS)
        # notices, such as "still busy", describe the moment when they were written
        lines = [line for line in last.log_buffer.lines() if line.ranks][-RECORD_LINES:]
        self.show(status_report(snapshot, metrics=metrics, lines=lines))

    def print_line(self, text: str) -> None:
        """Print a line for the user."""
        NotebookTarget().write_line(text)


class NotebookDisplay(TextDisplay):
    """Shows cells and trials in the output of a notebook cell.

    Args:
        presenter: the presenter of the notebook.
        quiet: show only the values of the last line.
        has_pictures: whether a text view shows charts. Trials show all charts in one picture at the
            end instead.
    """

    target = StreamTarget

    def __init__(self, presenter: Presenter, *, quiet: bool, has_pictures: bool = True) -> None:
        super().__init__(quiet=quiet)
        self._presenter = presenter
        self._has_pictures = has_pictures
        self.has_table = presenter.shows_panels
        self.shows_notices = presenter.shows_panels and not quiet

    def view(self, session: Session) -> View:
        return self._presenter.view(session, quiet=self.quiet, has_pictures=self._has_pictures)

    def show_notice(self, text: str) -> None:
        view = self._presenter.last_view
        if self.shows_notices and view is not None:
            view.show_status(text)
        else:
            self.print_line(text)

    def show_starting(self, text: str, session: Session) -> AbstractContextManager[None]:
        """Show that ranks are starting, where the next panel appears."""
        return self._presenter.showing_start(text, session, quiet=self.quiet)

    def show_progress(self, report: Report) -> None:
        if not self.quiet:
            self._presenter.show_progress(report)

    def show(self, report: Report) -> None:
        self._presenter.show(report)


def _try_action(act: Callable[[], str]) -> str:
    """Run the action of a button. Return its result, or the error as text."""
    try:
        return act()
    except NbddpError as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted"
