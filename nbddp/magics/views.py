"""How cells and the group are shown: as a panel or as text, as the user chose or the page can."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import clear_output, publish_display_data

from nbddp.controller.session import Session
from nbddp.magics.unseen import Unseen
from nbddp.record.finished import RecordedCell, RecordedRun
from nbddp.ui.frontend import shows_widgets
from nbddp.ui.questions import Box, ConsoleBox, NoBox, Questions
from nbddp.ui.screen import PAGE_PACE, IPythonScreen, View, shows_color
from nbddp.ui.text.progress import Progress
from nbddp.ui.text.run import run_text
from nbddp.ui.text.status import status
from nbddp.ui.text.view import TextView

if TYPE_CHECKING:
    from nbddp.magics.again import Again
    from nbddp.ui.panel.aftermath import Aftermath
    from nbddp.ui.panel.view import PanelView


class ViewChoice(Enum):
    """How cells are shown."""

    AUTO = "auto"
    PANEL = "panel"
    TEXT = "text"


class Views:
    """Makes the views of one shell, and knows the one that was made last."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.choice = ViewChoice.AUTO
        self._shell = shell
        self._last: View | None = None
        self._announced: PanelView | None = None
        self._aftermath: Aftermath | None = None
        self._unseen = Unseen(shell, self.say)

    @property
    def has_record(self) -> bool:
        """Whether the last cell's view has told already why it failed."""
        return self._last is not None and self._last.has_record

    def view(self, session: Session, *, quiet: bool) -> View:
        """A new one, for a cell that begins."""
        self._take_back_offer()
        announced, self._announced = self._announced, None
        self._last = view = announced or self._new(session, quiet=quiet)
        return view

    @contextmanager
    def announcing(self, text: str, session: Session, *, quiet: bool) -> Iterator[None]:
        """Say in the place of the next cell's panel what it waits for; nothing, if that fails."""
        if quiet or not self.shows_panels:
            yield
            return
        self._announced = view = self._new_panel(session)
        view.announce(text)
        try:
            yield
        except BaseException:
            if self._announced is view:
                self._announced = None
                view.withdraw()
            raise

    def offer(self, again: Again, *, can_heal: bool) -> None:
        """Show, under a record, buttons for what can be done after a failure."""
        if self.has_record and hasattr(self._shell, "kernel"):
            from nbddp.ui.panel.aftermath import HEAL, RESTART, RUN_AGAIN, Aftermath

            self._take_back_offer()
            offers = {HEAL: again.heal} if can_heal else {}
            offers |= {RESTART: again.restart, RUN_AGAIN: again.run_again}
            self._aftermath = Aftermath(self._shell.kernel, offers)
            self._aftermath.publish()

    def start_over(self) -> None:
        """The last cell runs again: what it has shown goes, as if it were run by hand."""
        clear_output(wait=True)
        if self._last is not None:
            self._last.start_over()

    def _take_back_offer(self) -> None:
        aftermath, self._aftermath = self._aftermath, None
        if aftermath is not None:
            aftermath.withdraw()

    def _new(self, session: Session, *, quiet: bool) -> View:
        if quiet or not self.shows_panels:
            return TextView(
                IPythonScreen(),
                is_quiet=quiet,
                has_color=shows_color(self._shell),
                pace=PAGE_PACE,
                progress=None if quiet else self._progress(session),
                questions=self._questions(session),
            )
        return self._new_panel(session)

    def _progress(self, session: Session) -> Progress:
        is_kernel = hasattr(self._shell, "kernel")
        is_terminal = not is_kernel and sys.stdout.isatty()
        return Progress(session, is_terminal=is_terminal, has_pictures=is_kernel)

    def _new_panel(self, session: Session) -> PanelView:
        from nbddp.ui.buttons.live import LiveComms  # they load widgets, which no terminal needs
        from nbddp.ui.panel.view import PanelView

        return PanelView(
            session,
            LiveComms.of(self._shell),
            IPythonScreen(),
            has_color=shows_color(self._shell),
            tell_later=partial(self._note_unseen, self._unseen.page()),
            questions=self._questions(session),
        )

    def _questions(self, session: Session) -> Questions:
        """Where ranks can ask something: of a cell in the background, nowhere."""
        box: Box = ConsoleBox()
        if threading.current_thread() is not threading.main_thread():
            box = NoBox("its cell runs in the background: leave --no-wait out")
        elif hasattr(self._shell, "kernel"):
            from nbddp.ui.input_box import KernelBox

            box = KernelBox(self._shell.kernel)
        return Questions(box, session.answer)

    def _note_unseen(self, page: str, text: str, surely: bool) -> None:  # noqa: FBT001 - a callback
        self._unseen.note(page, text, surely=surely)

    def note(self, text: str) -> None:
        """Tell the user, in the panel of the attempt that failed, what is done about it."""
        if self._last is not None:
            self._last.note(text)

    @property
    def shows_panels(self) -> bool:
        """Whether the cell that runs now is shown as a panel, unless it is quiet."""
        if self.choice is ViewChoice.AUTO:
            return shows_widgets(self._shell)
        return self.choice is ViewChoice.PANEL and hasattr(self._shell, "kernel")

    def show_status(self, session: Session) -> None:
        """Show the group and the output of the last cell as they are right now."""
        snapshot = session.snapshot()
        text = status(snapshot)
        if not (snapshot.state.is_live and self.shows_panels):
            self.say(text)
            return
        from nbddp.ui.panel.status import display_status
        from nbddp.ui.panel.view import PanelView

        last = self._last if isinstance(self._last, PanelView) else None
        display_status(session, snapshot, last, text=text)

    def show_run(
        self,
        run: RecordedRun,
        cell: RecordedCell | None,
        *,
        ending: str,
        metrics: Collection[str] | None = None,
    ) -> None:
        """Show a run that was opened from its folder, or one of its cells."""
        text = run_text(run, cell, ending=ending)
        if not self.shows_panels:
            self.say(text)
            return
        from nbddp.ui.panel.run import run_html

        html = run_html(run, cell, ending=ending, metrics=metrics)
        publish_display_data({"text/html": html, "text/plain": text})

    def say(self, text: str) -> None:
        """Tell the user something."""
        screen = IPythonScreen()
        screen.write(f"{text}\n")
        screen.flush()
