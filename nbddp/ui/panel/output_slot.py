"""The place of a panel among the outputs of its cell.

A page does not tell the kernel that it cleared an output, moved a cell or was loaded again. So a
record is shown in both ways that a page can follow: as an output, and in the panel's own widget.
"""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from nbddp.ui.frontend import EMPTY_OUTPUT, new_display_id, publish
from nbddp.ui.html_pieces import escape
from nbddp.ui.panel.plain_widgets import box, close, mime_bundle
from nbddp.wire.messages import JsonDict


class OutputSlot:
    """One slot for all attempts at a cell.

    Attributes:
        root: the widget of the panel, and later of its record; None until a panel opens.
        is_published: an output was published in this slot.
        has_output_below: an output that belongs below stands there, such as a figure of a rank.
    """

    def __init__(self) -> None:
        self.root: widgets.VBox | None = None
        self.is_published = self.has_output_below = False
        self._display_id = new_display_id()
        self._hint_id = ""

    def show_placeholder(self, html: str, text: str) -> None:
        """Show this until a panel or a record replaces it; the style sheet is in ``html``."""
        self._set_content(html)
        self._publish({"text/html": f'<div class="nbddp-soon">{html}</div>', "text/plain": text})

    def open(self, parts: Sequence[widgets.Widget]) -> widgets.VBox:
        """Put the parts of a panel into the root; a page shows them after :meth:`show_panel`."""
        if self.root is None:
            self.root = box(widgets.VBox, (), "nbddp-panel")
            self._record = widgets.HTML()
        self.root.children = parts
        return self.root

    def show_panel(self, text: str, hint: str) -> None:
        """Show the root, and ``hint`` where a page can draw neither a panel nor a record."""
        if self.root is not None:
            self._replace({**mime_bundle(self.root), "text/plain": text})
        if hint:
            data = {"text/html": f'<div class="nbddp-fallback">{escape(hint)}</div>'}
            is_update, self._hint_id = bool(self._hint_id), self._hint_id or new_display_id()
            publish({**data, "text/plain": hint}, self._hint_id, is_update=is_update)

    def show_record(self, html: str, text: str) -> None:
        """Replace the panel."""
        self._replace({"text/html": f'<div class="nbddp-record">{html}</div>', "text/plain": text})
        if self._hint_id:
            publish(EMPTY_OUTPUT, self._hint_id, is_update=True)
        self._set_content(html)

    def remove_output(self) -> None:
        """Remove what was shown."""
        self._publish(EMPTY_OUTPUT)

    def reset(self, html: str) -> None:
        """Start again below ``html``: the outputs of the cell were cleared, but not the root."""
        self.is_published = self.has_output_below = False
        self._display_id, self._hint_id = new_display_id(), ""
        self._set_content(html)

    def close(self) -> None:
        """Remove the root from the page and from the memory of the kernel."""
        if self.root is not None:
            close(self.root)
            close(self._record)

    def _set_content(self, html: str) -> None:
        """Show this in the root, for a page that was loaded again or whose cell was moved."""
        if self.root is not None:
            self._record.value = html
            self.root.children = [self._record]

    def _replace(self, data: JsonDict) -> None:
        """Publish a new output and empty the old one, which the page may have cleared.

        The style sheet hides the new one while the old one is there: both change at once. Below an
        output that belongs to this cell, a new one would be in the wrong order.
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
    """Return how to get the record of a cell; empty without a run."""
    return f"`%ddp show {run} --cell {cell}` draws its record" if run else ""


def delayed_hint_html(run: str, cell: int) -> str:
    """Return the same line for a placeholder; it appears if nothing replaces that for a while.

    A page that is loaded again in the first moments of a cell keeps its placeholder.
    """
    way = record_hint(run, cell)
    return f'<div class="nbddp nbddp-late">{escape(way)}</div>' if way else ""
