"""The group as it is right now, in the looks of a record."""

from __future__ import annotations

from IPython.display import publish_display_data

from nbddp.controller.session import Session
from nbddp.record.snapshot import Snapshot
from nbddp.ui.panel.charthtml import Drawn
from nbddp.ui.panel.charts import Charts
from nbddp.ui.panel.log_area import log_path
from nbddp.ui.panel.record import Record, record_html
from nbddp.ui.panel.view import SHOWN, PanelView
from nbddp.ui.tails import Line
from nbddp.ui.words import shorten


def display_status(
    session: Session, snapshot: Snapshot, last: PanelView | None, *, text: str
) -> None:
    """Show the group as the snapshot has it, with the output of its last cell, as a record."""
    charts: list[Drawn] = []
    lines: list[Line] = []
    if last is not None and last.attempt == snapshot.attempt:
        charts = Charts(session.metrics, lambda _chart: None).finish()
        lines = last.tails.merged()[-SHOWN:]
    path = log_path(shorten(snapshot.folder), None)
    record = Record(snapshot=snapshot, lines=lines, charts=charts, log_path=path)
    publish_display_data({"text/html": record_html(record), "text/plain": text})
