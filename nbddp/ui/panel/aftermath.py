"""Buttons under the record of a cell that failed: what can be done about it while the kernel lives.

They are pressed between cells and answered by the kernel itself, which knows then of no cell. So
all that comes of a press is shown as if the cell that failed went on.
"""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from IPython.display import publish_display_data

from nbddp.ui.panel.html import escape
from nbddp.ui.panel.pieces import box, bundle, button, close, show_question

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAL, RESTART, RUN_AGAIN = "Heal", "Restart", "Restart and run again"
_TIPS = {
    HEAL: "Replace the dead ranks with new ones; the other ranks keep all their names",
    RESTART: "Restart all ranks; their names are lost. Press twice",
    RUN_AGAIN: "Restart all ranks, run the cells that succeeded again, and then this one",
}
_ICONS = {HEAL: "medkit", RESTART: "refresh", RUN_AGAIN: "step-forward"}
_MEANWHILE = {HEAL: "healing the group ..."}
Deed = Callable[[], str]


class Aftermath:
    """A row of buttons; to be made and published in the cell that failed.

    Args:
        kernel: in which the cell ran.
        offers: what each button does, by its label; it returns what to say of it. It may show the
            cell again, which takes this row away. ``RESTART`` asks first.
    """

    def __init__(self, kernel: Any, offers: Mapping[str, Deed]) -> None:
        self._kernel = kernel
        self._cell: dict[str, Any] = kernel.get_parent("shell")
        self._context = contextvars.copy_context()
        self._display_id = f"nbddp-{uuid.uuid4().hex}"
        self._is_there = False
        self._doing = Lock()
        self._asks = False
        self._buttons = {label: _button(label) for label in offers}
        self._said = widgets.HTML()
        row = [*self._buttons.values(), self._said]
        self._row = box(widgets.HBox, row, "nbddp-aftermath")
        for label, deed in offers.items():
            self._buttons[label].on_click(lambda _, it=(label, deed): self._press(*it))

    def publish(self) -> None:
        """Show it; a page without widgets shows nothing."""
        shown = {**bundle(self._row), "text/plain": ""}
        publish_display_data(shown, transient={"display_id": self._display_id})
        self._is_there = True

    def withdraw(self) -> None:
        """Take it away: another cell runs."""
        if self._is_there:
            self._is_there = False
            empty = {"text/html": "", "text/plain": ""}
            self._context.copy().run(
                publish_display_data, empty, transient={"display_id": self._display_id}, update=True
            )
            self._close_if_done()

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
            self._say(_MEANWHILE.get(label, "restarting the ranks ..."))
            said = self._context.copy().run(self._as_cell, deed)
        finally:
            self._doing.release()
            self._close_if_done()
        if self._is_there:
            self._say(said)
            self._set_disabled(value=False)

    def _set_disabled(self, *, value: bool) -> None:
        for each in self._buttons.values():
            each.disabled = value

    def _close_if_done(self) -> None:
        """Take the buttons out of memory, unless what one of them began still goes on.

        When its last widget is closed, JupyterLab ends the kernel's second shell, upon which the
        kernel reads nothing at all until the handler that runs there has returned.
        """
        if not self._is_there and not self._doing.locked():
            close(self._row)

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


def _button(label: str) -> widgets.Button:
    made = button(label, tooltip=_TIPS[label], icon=_ICONS[label])
    made.layout.flex = "none"  # what is said beside it may be long, and takes two lines
    return made
