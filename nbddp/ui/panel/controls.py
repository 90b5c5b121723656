"""The buttons of a panel, and those after a failure; some ask first, and act on a second press."""

from __future__ import annotations

import contextvars
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from IPython.display import publish_display_data

from nbddp.lifecycle.states import GroupState
from nbddp.record.snapshot import Snapshot
from nbddp.ui.html_pieces import escape
from nbddp.ui.panel.pieces import box, bundle, button, close, show_question
from nbddp.ui.screen import EMPTY

if TYPE_CHECKING:
    from collections.abc import Iterator

ASKING = 5.0  # seconds that a button waits for its second press


class Press(Enum):
    """A button."""

    INTERRUPT = "Interrupt"
    RESTART = "Restart"
    STOP = "Stop"
    KILL = "Kill"


_TIPS = {
    Press.INTERRUPT: "End the cell and keep every name; once more: kill what does not obey",
    Press.RESTART: "Restart all ranks; their names are lost. Press twice",
    Press.STOP: "End the ranks. Press twice",
    Press.KILL: "Kill this rank with SIGKILL, to see what happens. Press twice",
}
_ICONS = {
    Press.INTERRUPT: "stop",
    Press.RESTART: "refresh",
    Press.STOP: "power-off",
    Press.KILL: "bolt",
}


class Controls:
    """The row of buttons; drawn from one thread, pressed on another.

    Args:
        ranks: those that may be killed.
        press: told what is to be done, and to which rank.
        clock: tells the time.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        press: Callable[[Press, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._press = press
        self._clock = clock
        self._asked: tuple[Press, float] | None = None
        self.buttons = {each: self._button(each) for each in Press}
        self._victim = widgets.Dropdown(
            options=[(str(rank), rank) for rank in ranks],
            description="rank",  # who hears the page hears what is chosen there
            style={"description_width": "initial"},
            layout=widgets.Layout(width="96px"),
        )
        self._victim.observe(lambda _change: self._ask_no_more(), "value")
        self.row = widgets.HBox([*self._steering(), self._victim, self.buttons[Press.KILL]])
        self.row.add_class("nbddp-buttons")

    def draw(self, snapshot: Snapshot) -> None:
        """Allow what can be done now; a question that was not answered is taken back."""
        state = snapshot.state
        may = state.is_live and state is not GroupState.STOPPING
        self.buttons[Press.INTERRUPT].disabled = not state.is_busy
        self.buttons[Press.RESTART].disabled = not may
        self.buttons[Press.STOP].disabled = not may
        self.buttons[Press.KILL].disabled = not (may and self._victim.value in snapshot.alive)
        asked = self._asked
        if asked is not None and self._clock() - asked[1] > ASKING:
            self._ask_no_more()

    def _steering(self) -> list[widgets.Button]:
        return [self.buttons[each] for each in (Press.INTERRUPT, Press.RESTART, Press.STOP)]

    def _button(self, press: Press) -> widgets.Button:
        made = button(press.value, tooltip=_TIPS[press], icon=_ICONS[press])
        made.on_click(lambda _: self._pressed(press))
        return made

    def _pressed(self, press: Press) -> None:
        is_answer = self._asked is not None and self._asked[0] is press
        self._ask_no_more()
        if press is Press.INTERRUPT or is_answer:
            self.buttons[press].disabled = True  # until it is drawn again: nothing is done twice
            self._press(press, self._victim.value)
        else:
            self._ask(press)

    def _ask(self, press: Press) -> None:
        self._asked = press, self._clock()
        show_question(self.buttons[press], press.value, asks=True)

    def _ask_no_more(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            show_question(self.buttons[asked[0]], asked[0].value, asks=False)


HEAL, RESTART = "Heal", "Restart"
_DEED_TIPS = {
    HEAL: "Replace the dead ranks with new ones; the other ranks keep all their names",
    RESTART: "Restart all ranks; their names are lost. Press twice",
}
_DEED_ICONS = {HEAL: "medkit", RESTART: "refresh"}
_MEANWHILE = {HEAL: "healing the group ...", RESTART: "restarting the ranks ..."}
Deed = Callable[[], str]


class Aftermath:
    """Buttons under the record of a cell that failed; made and published in that cell.

    They are pressed between cells and answered by the kernel itself, which knows then of no cell.
    So what comes of a press is shown as if the cell that failed went on.

    Args:
        kernel: in which the cell ran.
        offers: what each button does, by its label; it returns what to say of it. ``RESTART`` asks
            first.
        root: the widget that a page shows which does not follow the outputs of the cell.
    """

    def __init__(
        self, kernel: Any, offers: Mapping[str, Deed], root: widgets.Box | None = None
    ) -> None:
        self._kernel = kernel
        self._root = root
        self._cell: dict[str, Any] = kernel.get_parent("shell")
        self._context = contextvars.copy_context()
        self._display_id = f"nbddp-{uuid.uuid4().hex}"
        self._is_there = False
        self._doing = Lock()
        self._asks = False
        self._buttons = {label: _deed_button(label) for label in offers}
        self._said = widgets.HTML()
        row = [*self._buttons.values(), self._said]
        self._row = box(widgets.HBox, row, "nbddp-aftermath")
        for label, deed in offers.items():
            self._buttons[label].on_click(lambda _, it=(label, deed): self._press(*it))

    def publish(self) -> None:
        """Show it; a page without widgets shows nothing."""
        shown = {**bundle(self._row), "text/plain": ""}
        publish_display_data(shown, transient={"display_id": self._display_id})
        if self._root is not None:
            self._root.children = (*self._root.children, self._row)
        self._is_there = True

    def withdraw(self) -> None:
        """Take it away: another cell runs."""
        if self._is_there:
            self._is_there = False
            if self._root is not None:
                self._root.children = [each for each in self._root.children if each != self._row]
            self._context.copy().run(
                publish_display_data, EMPTY, transient={"display_id": self._display_id}, update=True
            )

    def close(self) -> None:
        """Remove the buttons from the memory of the kernel.

        JupyterLab ends the second shell of a kernel with the last widget, and then the kernel reads
        nothing until a handler that runs there has returned. So wait until other cells have run.
        """
        close(self._row)

    def _press(self, label: str, deed: Deed) -> None:
        if label != RESTART:
            self._do(label, deed)
            return
        if self._asks:
            self._do(label, deed)
        self._show_question(not self._asks)

    def _show_question(self, asks: bool) -> None:  # noqa: FBT001 - the one thing it is told
        self._asks = asks
        show_question(self._buttons[RESTART], RESTART, asks=asks)

    def _do(self, label: str, deed: Deed) -> None:
        # Two quick presses may be answered on two threads of the kernel. The second says nothing.
        if not (self._is_there and self._doing.acquire(blocking=False)):
            return
        try:
            self._set_disabled(value=True)
            self._say(_MEANWHILE[label])
            said = self._context.copy().run(self._as_cell, deed)
        finally:
            self._doing.release()
        if self._is_there:
            self._say(said)
            self._set_disabled(value=False)

    def _set_disabled(self, *, value: bool) -> None:
        for each in self._buttons.values():
            each.disabled = value

    def _as_cell(self, deed: Deed) -> str:
        with self._cell_goes_on():
            return deed()

    @contextmanager
    def _cell_goes_on(self) -> Iterator[None]:
        """What is shown belongs to the cell: in older kernels a context does not say so."""
        pressed = self._kernel.get_parent("shell")
        self._kernel.set_parent([], self._cell, "shell")
        try:
            yield
        finally:
            self._kernel.set_parent([], pressed, "shell")

    def _say(self, text: str) -> None:
        lines = escape(text).replace("\n", "<br>")
        self._said.value = f'<div class="nbddp nbddp-muted" role="status">{lines}</div>'


def _deed_button(label: str) -> widgets.Button:
    made = button(label, tooltip=_DEED_TIPS[label], icon=_DEED_ICONS[label])
    made.layout.flex = "none"  # what is said beside it may be long, and takes two lines
    return made
