"""`%ddp status`: the current state of the worker group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nbddp.charts.axes import AxisScale
from nbddp.formatting import format_seconds
from nbddp.lifecycle.group_state import GroupState
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.record.metrics import MetricsSnapshot
from nbddp.record.snapshot import Snapshot
from nbddp.ui import wording
from nbddp.ui.html_pieces import event_log
from nbddp.ui.log_lines import LogLine, log_html, scroll_box
from nbddp.ui.report.blocks import Block, Card, Cell, Dot, Markup, Mood, Report, Text, note
from nbddp.ui.report.rank_table import rank_blocks

SHOWN_EVENTS = 8
_DOTS = {
    GroupState.OFF: Dot.OFF,
    GroupState.IDLE: Dot.OK,
    GroupState.BROKEN: Dot.BAD,
    GroupState.INTERRUPTING: Dot.WARN,
    GroupState.STOPPING: Dot.WARN,
}


def status_report(
    snapshot: Snapshot, *, metrics: MetricsSnapshot | None = None, lines: Sequence[LogLine] = ()
) -> Report:
    """Report the group; a page also shows the charts and log lines of its last cell."""
    if not snapshot.state.is_live:
        return Report(NO_GROUP)
    return Report(
        state_title(snapshot),
        [
            *alarm_blocks(snapshot),
            *rank_blocks(snapshot.ranks, has_pid=True),
            events_block(snapshot),
            straggler_block(snapshot),
            *([charts_block(metrics)] if metrics else []),
            *([Markup(lambda: scroll_box(log_html(lines)))] if lines else []),
            note(f"logs in {wording.relative_path(snapshot.folder)}" if snapshot.folder else ""),
        ],
    )


def state_title(snapshot: Snapshot) -> Cell:
    """Return a title with the state of the group, its duration, and facts about the group."""
    activity, elapsed = snapshot.state.value, ""
    if snapshot.state.is_busy:
        elapsed = format_seconds(snapshot.seconds)
        if snapshot.script:
            activity = f"{activity.split()[0]} {snapshot.script}"
    facts = [activity, elapsed, *wording.describe_group(snapshot), snapshot.run]
    return Cell(" · ".join(filter(None, facts)), dot=_DOTS.get(snapshot.state, Dot.BUSY))


def alarm_blocks(snapshot: Snapshot) -> list[Block]:
    """Return the hang card, and a note if forged messages were refused."""
    return [
        Card(snapshot.alarm, is_error=False),
        note(wording.describe_refused(snapshot.rejected_messages)),
    ]


def straggler_block(snapshot: Snapshot) -> Text:
    """Return a warning about the rank that the others wait for."""
    return Text(
        wording.describe_straggler(snapshot.straggler) if snapshot.straggler else "", Mood.WARN
    )


def events_block(snapshot: Snapshot) -> Markup:
    """Return the events as an event line; as text, only the newest events."""
    start = f"after the start of {snapshot.start_of}"
    text = [f"{at} {start}: {text}" for _, at, text in wording.describe_events(snapshot)]
    return Markup(partial(event_log, snapshot), "\n".join(text[-SHOWN_EVENTS:]))


def charts_block(
    metrics: MetricsSnapshot, scale: AxisScale = AxisScale.AUTO, text: str = ""
) -> Markup:
    """Return the charts for a page, and ``text`` for other output."""

    def draw() -> str:
        from nbddp.ui.chart_html import metrics_html  # loads numpy

        return metrics_html(metrics, scale)

    return Markup(draw, text)
