"""The output of a panel in its cell.

A page does not tell the kernel that it cleared an output, moved a cell or was reloaded. So a record
is shown twice: as an output of the cell, and in the widget of the panel.
"""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from nbddp.ui.frontend import EMPTY_OUTPUT, new_display_id, publish
from nbddp.ui.html_pieces import escape
from nbddp.ui.panel.plain_widgets import box, close, mime_bundle
from nbddp.wire.messages import JsonDict


class OutputSlot:
    """The output of one cell, shared by all its attempts.

    Attributes:
        root: the widget of the panel, and later of the record; None until a panel opens.
        is_published: whether an output was published in this slot.
        has_output_below: whether other output follows, such as a figure of a rank.
    """

    def __init__(self) -> None:
        self.root: widgets.VBox | None = None
        self.is_published = self.has_output_below = False
        self._display_id = new_display_id()
        self._hint_id = ""

    def show_placeholder(self, html: str, text: str) -> None:
        """Show ``html``, with its style sheet, until a panel or a record replaces it."""
        self._set_content(html)
        self._publish({"text/html": f'<div class="nbddp-soon">{html}</div>', "text/plain": text})

    def open(self, parts: Sequence[widgets.Widget]) -> widgets.VBox:
        """Put the parts of a panel into the root; :meth:`show_panel` then shows them."""
        if self.root is None:
            self.root = box(widgets.VBox, (), "nbddp-panel")
            self._record = widgets.HTML()
        self.root.children = parts
        return self.root

    def show_panel(self, text: str, hint: str) -> None:
        """Publish the panel as an output of the cell.

        ``text``: shown by pages without widgets. ``hint``: shown by pages that show neither the
        widgets nor, later, the record; "" for none.
        """
        if self.root is not None:
            self._replace({**mime_bundle(self.root), "text/plain": text})
        if hint:
            data = {"text/html": f'<div class="nbddp-fallback">{escape(hint)}</div>'}
            is_update, self._hint_id = bool(self._hint_id), self._hint_id or new_display_id()
            publish({**data, "text/plain": hint}, self._hint_id, is_update=is_update)

    def show_record(self, html: str, text: str) -> None:
        """Replace the panel with a record."""
        self._replace({"text/html": f'<div class="nbddp-record">{html}</div>', "text/plain": text})
        if self._hint_id:
            publish(EMPTY_OUTPUT, self._hint_id, is_update=True)
        self._set_content(html)

    def remove_output(self) -> None:
        """Replace the output with an empty one."""
        self._publish(EMPTY_OUTPUT)

    def reset(self, html: str) -> None:
        """Start again after the cell's outputs were cleared; the root still shows ``html``."""
        self.forget_outputs()
        self._set_content(html)

    def forget_outputs(self) -> None:
        """Publish new outputs from now on, because the page has dropped the earlier ones."""
        self.is_published = self.has_output_below = False
        self._display_id, self._hint_id = new_display_id(), ""

    def close(self) -> None:
        """Remove the root from the page and from the memory of the kernel."""
        if self.root is not None:
            close(self.root)
            close(self._record)

    def _set_content(self, html: str) -> None:
        """Show ``html`` in the root, for a page that was reloaded or whose cell was moved."""
        if self.root is not None:
            self._record.value = html
            self.root.children = [self._record]

    def _replace(self, data: JsonDict) -> None:
        """Publish a new output and empty the old one, which the page may have cleared.

        The style sheet hides the new output until the old one is empty, so both change at once. If
        other output follows, update the old output instead, to keep the order.
        """
        if not self.is_published or self.has_output_below:
            self._publish(data)
            return
        before, self._display_id, self.is_published = self._display_id, new_display_id(), False
        self._publish(data)
        publish(EMPTY_OUTPUT, before, is_update=True)

    def _publish(self, data: JsonDict) -> None:
        is_update, self.is_published = self.is_published, True
        publish(data, self._display_id, is_update=is_update)


def record_hint(run: str, cell: int) -> str:
    """Return the command that shows the record of a cell; empty without a run."""
    return f"`%ddp show {run} --cell {cell}` draws its record" if run else ""


def delayed_hint_html(run: str, cell: int) -> str:
    """Return the same hint for a placeholder; it appears if nothing replaces the placeholder.

    A page that is reloaded in the first second of a cell keeps the placeholder.
    """
    way = record_hint(run, cell)
    return f'<div class="nbddp nbddp-late">{escape(way)}</div>' if way else ""
