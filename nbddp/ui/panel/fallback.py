"""A line beside the panel, for a notebook that was saved with the panel and never saw its record.

A page that is loaded again while the cell runs, or whose cell is moved, takes in nothing that
replaces an output. What it saves then is the panel, which needs the kernel to be drawn.
"""

from __future__ import annotations

import uuid

from IPython.display import publish_display_data

from nbddp.ui.panel.html import escape
from nbddp.ui.panel.place import EMPTY
from nbddp.wire.messages import JsonDict


class Fallback:
    """Says how the record of a cell is got; hidden where the panel or its record is drawn.

    Attributes:
        text: the line; empty as long as it was not published.
    """

    def __init__(self) -> None:
        self.text = ""
        self._is_there = False
        self._display_id = f"nbddp-{uuid.uuid4().hex}"

    def publish(self, run: str, cell: int) -> None:
        """Put it under the panel, which has just been shown."""
        if run:
            self.text = way_to_record(run, cell)
            html = f'<div class="nbddp-fallback">{escape(self.text)}</div>'
            self._publish({"text/html": html, "text/plain": self.text}, is_update=self._is_there)
            self._is_there = True

    def withdraw(self) -> None:
        """The record is in its place."""
        if self.text:
            self._publish(EMPTY, is_update=True)

    def _publish(self, bundle: JsonDict, *, is_update: bool) -> None:
        publish_display_data(bundle, transient={"display_id": self._display_id}, update=is_update)


def way_to_record(run: str, cell: int) -> str:
    """How the record of a cell is got."""
    return f"`%ddp show {run} --cell {cell}` draws its record"


def late_html(run: str, cell: int) -> str:
    """The same line under what is replaced within a second; it comes into sight if that is not.

    A cell that is moved, or a page that is loaded again, in the first moments keeps what it has.
    """
    return f'<div class="nbddp nbddp-late">{escape(way_to_record(run, cell))}</div>' if run else ""
