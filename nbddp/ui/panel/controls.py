"""The buttons of a panel: what ends more than a cell asks first, and is done by a second press."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

import ipywidgets as widgets

from nbddp.lifecycle.states import GroupState
from nbddp.record.snapshot import Snapshot
from nbddp.ui.panel.pieces import button, show_question

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
