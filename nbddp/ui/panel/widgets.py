"""The widgets of a panel: they show HTML and charts, and report pressed buttons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets as widgets

from nbddp.record.metrics import MetricsSnapshot
from nbddp.record.snapshot import Snapshot
from nbddp.ui.html_pieces import STYLE_SHEET, event_log, muted
from nbddp.ui.panel.chart_area import ChartArea
from nbddp.ui.panel.controls import ButtonPress, Controls
from nbddp.ui.panel.log_area import LogArea
from nbddp.ui.panel.plain_widgets import box, close, html, toggle
from nbddp.ui.report.rank_table import MAX_DETAILED_RANKS, RankSparklines, rank_blocks
from nbddp.ui.report.render import blocks_html, title_html
from nbddp.ui.report.status import alarm_blocks, state_title, straggler_block

WAITING_BUTTONS = (
    "The buttons wait until this cell ends, because nbddp does not know this kernel. "
    "The notebook's own interrupt works."
)


class PanelWidgets:
    """The widgets of one panel. One thread draws them, another one handles presses.

    ``metrics`` returns the curves of the charts.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        press: Callable[[ButtonPress, int], None],
        metrics: Callable[..., MetricsSnapshot],
    ) -> None:
        self._state, self._notes, self._table, self._events = (html() for _ in range(4))
        self._controls = Controls(ranks, press)
        self.log = LogArea(ranks)
        self.charts = ChartArea(metrics, ranks)
        head = box(widgets.HBox, [self._state, self._controls.row], "nbddp-head")
        self.sparklines = RankSparklines()
        self._grid_toggle = toggle("All ranks", "Show a field for each rank", "th")
        self._grid_toggle.layout.display = "none" if len(ranks) <= MAX_DETAILED_RANKS else ""
        self._grid_toggle.add_class("nbddp-all")
        ranks_area = [self._notes, self._grid_toggle, self._table]
        areas = [self.charts.root, self.log.root, self._events]
        self.parts = [widgets.HTML(STYLE_SHEET), head, *ranks_area, *areas]

    def draw(self, snapshot: Snapshot, *, can_press: bool) -> None:
        """Show a snapshot; only changed parts are sent to the page."""
        self._state.value = f'<div class="nbddp">{title_html(state_title(snapshot))}</div>'
        self._notes.value = _notes(snapshot) + muted("" if can_press else WAITING_BUTTONS)
        if len(snapshot.ranks) <= MAX_DETAILED_RANKS:
            self.sparklines.add_points(snapshot.ranks, snapshot.at)
        is_open, curves = self._grid_toggle.value, self.sparklines.draw
        table = blocks_html(rank_blocks(snapshot.ranks, is_open=is_open, curves=curves))
        self._table.value = (
            f'<div class="nbddp" tabindex="0" role="region" aria-label="ranks">{table}</div>'
        )
        self._events.value = f'<div class="nbddp">{event_log(snapshot)}</div>'
        self._controls.draw(snapshot)

    def close(self) -> None:
        """Remove all widgets from the page and from the memory of the kernel."""
        for part in self.parts:
            close(part)
        self.charts.close()


def _notes(snapshot: Snapshot) -> str:
    """Return the hang card, and the rank that the others wait for."""
    alarm, awaited = blocks_html(alarm_blocks(snapshot)), blocks_html([straggler_block(snapshot)])
    role = ' role="alert"' if snapshot.alarm else ""
    shown = (f"<div{role}>{alarm}</div>" if alarm else "") + awaited
    return f'<div class="nbddp">{shown}</div>' if shown else ""
