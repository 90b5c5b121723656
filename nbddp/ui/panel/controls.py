"""The buttons of a panel, and of a failed cell; destructive ones need a second press."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from threading import Lock
from typing import Any

import ipywidgets as widgets

from nbddp.lifecycle.group_state import GroupState
from nbddp.record.snapshot import Snapshot
from nbddp.ui.frontend import EMPTY_OUTPUT, new_display_id, publish
from nbddp.ui.html_pieces import escape
from nbddp.ui.panel.plain_widgets import box, close, mime_bundle

CONFIRM_SECONDS = 5.0  # that a button waits for its second press
DOUBLE_CLICK_SECONDS = 0.5  # two presses within this time are a double click, and count as one


class ButtonPress(Enum):
    """A button of the panel."""

    INTERRUPT = "Interrupt"
    RESTART = "Restart"
    STOP = "Stop"
    KILL = "Kill"


HEAL, RESTART = "Heal", "Restart"
_TOOLTIPS_AND_ICONS = {
    "Interrupt": (
        "End the cell and keep all variables. Press again to kill ranks that do not react",
        "stop",
    ),
    "Restart": ("Restart all ranks; their variables are lost. Press twice", "refresh"),
    "Stop": ("Stop all ranks. Press twice", "power-off"),
    "Kill": ("Kill this rank; its variables are lost until a heal. Press twice", "bolt"),
    "Heal": (
        "Replace the dead ranks with new ones; the other ranks keep all their variables",
        "medkit",
    ),
}
_BUSY_TEXTS = {HEAL: "healing the group ...", RESTART: "restarting the ranks ..."}
ButtonAction = Callable[[], str]


def _button(label: str, **layout: str) -> widgets.Button:
    tooltip, icon = _TOOLTIPS_AND_ICONS[label]
    layout = {"width": "auto", **layout}
    return widgets.Button(description=label, tooltip=tooltip, icon=icon, layout=layout)


def _set_confirming(button: widgets.Button, label: str, *, is_confirming: bool) -> None:
    """Make a button ask for its second press, or reset it."""
    button.description = f"{label}?" if is_confirming else label
    (button.add_class if is_confirming else button.remove_class)("nbddp-asks")


def _is_double_click(pressed_at: float) -> bool:
    """Return whether a press now is the second of a double click; the first was at this time."""
    return time.monotonic() - pressed_at < DOUBLE_CLICK_SECONDS


class Controls:
    """The row of buttons. One thread draws it, another one handles presses.

    Args:
        ranks: the ranks to choose from for "Kill".
        press: called with a pressed button and the chosen rank.
    """

    def __init__(self, ranks: Sequence[int], press: Callable[[ButtonPress, int], None]) -> None:
        self._press = press
        self._unconfirmed: tuple[ButtonPress, float] | None = None
        self.buttons = {each: _button(each.value) for each in ButtonPress}
        for kind, button in self.buttons.items():
            button.on_click(lambda _, press=kind: self._pressed(press))
        self._kill_rank = widgets.Dropdown(
            options=[(str(rank), rank) for rank in ranks],
            description="rank",  # the label for screen readers
            style={"description_width": "initial"},
            layout={"width": "96px"},
        )
        self._kill_rank.observe(lambda _change: self._cancel_confirmation(), "value")
        *others, kill = self.buttons.values()
        self.row = box(widgets.HBox, [*others, self._kill_rank, kill], "nbddp-buttons")

    def draw(self, snapshot: Snapshot) -> None:
        """Enable the buttons that can act now, and reset a button without a second press."""
        state = snapshot.state
        can_act = state.is_live and state is not GroupState.STOPPING
        self.buttons[ButtonPress.INTERRUPT].disabled = not state.is_busy
        self.buttons[ButtonPress.RESTART].disabled = not can_act
        self.buttons[ButtonPress.STOP].disabled = not can_act
        can_kill = can_act and self._kill_rank.value in snapshot.alive
        self.buttons[ButtonPress.KILL].disabled = not can_kill
        unconfirmed = self._unconfirmed
        if unconfirmed is not None and time.monotonic() - unconfirmed[1] > CONFIRM_SECONDS:
            self._cancel_confirmation()

    def _pressed(self, press: ButtonPress) -> None:
        asked, asked_at = self._unconfirmed or (None, 0.0)
        if asked is press and _is_double_click(asked_at):
            return
        self._cancel_confirmation()
        if press is ButtonPress.INTERRUPT or asked is press:
            # until the next drawing, so that it does not act twice
            self.buttons[press].disabled = True
            self._press(press, self._kill_rank.value)
        else:
            self._unconfirmed = press, time.monotonic()
            _set_confirming(self.buttons[press], press.value, is_confirming=True)

    def _cancel_confirmation(self) -> None:
        unconfirmed, self._unconfirmed = self._unconfirmed, None
        if unconfirmed is not None:
            _set_confirming(self.buttons[unconfirmed[0]], unconfirmed[0].value, is_confirming=False)


class RetryButtons:
    """Buttons below the record of a failed cell, created and published in that cell.

    The user presses them between cells. At that time the kernel has no current cell. So an action
    runs in the context of the failed cell, and its output is shown there.

    Args:
        kernel: the kernel that ran the cell.
        actions: a function for each label, which returns the status to show. ``RESTART`` needs a
            second press.
        root: the widget that shows the record on pages that do not follow the cell's outputs.
    """

    def __init__(
        self, kernel: Any, actions: Mapping[str, ButtonAction], root: widgets.Box | None = None
    ) -> None:
        self._kernel = kernel
        self._root = root
        self._cell: dict[str, Any] = kernel.get_parent("shell")
        self._context = contextvars.copy_context()
        self._display_id = new_display_id()
        self._is_published = False
        self._action_lock = Lock()
        self._restart_asked_at: float | None = None
        # not flexible: the status next to a button can be long, and then takes two lines
        self._buttons = {label: _button(label, flex="none") for label in actions}
        for label, action in actions.items():
            self._buttons[label].on_click(lambda _, it=(label, action): self._press(*it))
        self._status = widgets.HTML()
        self._row = box(widgets.HBox, [*self._buttons.values(), self._status], "nbddp-aftermath")

    def publish(self) -> None:
        """Show the buttons; a page without widgets shows nothing."""
        publish({**mime_bundle(self._row), "text/plain": ""}, self._display_id)
        if self._root is not None:
            self._root.children = (*self._root.children, self._row)
        self._is_published = True

    def remove(self) -> None:
        """Remove the buttons from the page, because another cell runs."""
        if self._is_published:
            self._is_published = False
            if self._root is not None:
                self._root.children = [each for each in self._root.children if each != self._row]
            self._context.copy().run(publish, EMPTY_OUTPUT, self._display_id, is_update=True)

    def hide_heal(self) -> None:
        """Hide the button for a heal, because no rank is dead any more."""
        if HEAL in self._buttons:
            self._buttons[HEAL].layout.display = "none"

    def close(self) -> None:
        """Remove the buttons from the memory of the kernel.

        Call this only after other cells have run. With the last widget, JupyterLab ends the second
        shell of the kernel, and the kernel reads nothing until a handler there has returned.
        """
        close(self._row)

    def _press(self, label: str, action: ButtonAction) -> None:
        asked_at = self._restart_asked_at
        if label != RESTART:
            self._run_action(label, action)
        elif asked_at is None:
            self._ask_for_restart(time.monotonic())
        elif not _is_double_click(asked_at):
            self._run_action(label, action)
            self._ask_for_restart(None)

    def _ask_for_restart(self, asked_at: float | None) -> None:
        self._restart_asked_at = asked_at
        _set_confirming(self._buttons[RESTART], RESTART, is_confirming=asked_at is not None)

    def _run_action(self, label: str, action: ButtonAction) -> None:
        # Two threads of the kernel can handle two quick presses. The second press does nothing.
        if not (self._is_published and self._action_lock.acquire(blocking=False)):
            return
        try:
            self._show_status(_BUSY_TEXTS[label], is_busy=True)
            outcome = self._context.copy().run(self._run_in_cell, action)
        finally:
            self._action_lock.release()
        if self._is_published:
            self._show_status(outcome, is_busy=False)

    def _show_status(self, text: str, *, is_busy: bool) -> None:
        lines = escape(text).replace("\n", "<br>")
        self._status.value = f'<div class="nbddp nbddp-muted" role="status">{lines}</div>'
        for button in self._buttons.values():
            button.disabled = is_busy

    def _run_in_cell(self, action: ButtonAction) -> str:
        """Run an action as part of the failed cell: older kernels need more than the context."""
        parent = self._kernel.get_parent("shell")
        self._kernel.set_parent([], self._cell, "shell")
        try:
            return action()
        finally:
            self._kernel.set_parent([], parent, "shell")
