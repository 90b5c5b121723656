"""`%ddp status`: the worker group at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.record.snapshot import Snapshot
from nbddp.ui.panel.html import DOTS, time_line
from nbddp.ui.panel.loghtml import log_html, scrolled
from nbddp.ui.report.blocks import Block, Card, Cell, Dot, Markup, Mood, Report, Text, note
from nbddp.ui.report.rank_table import rank_blocks
from nbddp.ui.tails import Line
from nbddp.ui.words import (
    say_awaited,
    say_event,
    say_facts,
    say_refused,
    say_seconds,
    shorten,
)

if TYPE_CHECKING:
    from nbddp.ui.chart_html import RenderedChart

SHOWN_EVENTS = 8


def status_report(
    snapshot: Snapshot, *, charts: Sequence[RenderedChart] = (), lines: Sequence[Line] = ()
) -> Report:
    """Report the group; a page also gets the charts and the last lines of its last cell."""
    if not snapshot.state.is_live:
        return Report(NO_GROUP)
    state = snapshot.state.value
    elapsed = say_seconds(snapshot.seconds) if snapshot.state.is_busy else ""
    facts = filter(None, [elapsed, *say_facts(snapshot), snapshot.run])
    title = Cell(
        " · ".join([f"worker group: {state}", *facts]), dot=DOTS.get(snapshot.state, Dot.BUSY)
    )
    return Report(title, [*_state_of(snapshot), *_output(charts, lines), *_notes(snapshot)])


def events_block(snapshot: Snapshot) -> Markup:
    """Show the events on a line; as text only the newest."""
    said = [(event, say_event(event)) for event in snapshot.events]
    text = [
        f"{say_seconds(max(0.0, event.at - snapshot.began))} after the start: {text}"
        for event, text in said
        if text
    ]
    return Markup(partial(time_line, snapshot), "\n".join(text[-SHOWN_EVENTS:]))


def _state_of(snapshot: Snapshot) -> list[Block]:
    alarm = [Card(snapshot.alarm, is_error=False)] if snapshot.alarm else []
    awaited = [Text(say_awaited(snapshot.awaited), Mood.WARN)] if snapshot.awaited else []
    ranks = rank_blocks(snapshot.ranks, has_pid=True)
    return [*alarm, *ranks, events_block(snapshot), *awaited]


def _output(charts: Sequence[RenderedChart], lines: Sequence[Line]) -> list[Block]:
    log = [Markup(lambda: scrolled(log_html(lines)))] if lines else []
    return [*([Markup(partial(_charts, charts))] if charts else []), *log]


def _notes(snapshot: Snapshot) -> list[Block]:
    logs = [note(f"logs in {shorten(snapshot.folder)}")] if snapshot.folder else []
    return [*logs, *([note(say_refused(snapshot.refused))] if snapshot.refused else [])]


def _charts(charts: Sequence[RenderedChart]) -> str:
    from nbddp.ui.chart_html import charts_html  # loads numpy

    return charts_html(charts)
