"""The record of a cell, which replaces its panel, as HTML and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nbddp.charts.axes import AxisScale
from nbddp.formatting import format_ranks, format_seconds
from nbddp.lifecycle.retries import RecoveryMethod, describe_recoveries
from nbddp.record.cell import CellHandle, CellResult
from nbddp.record.metrics import MetricsSnapshot
from nbddp.record.snapshot import Snapshot
from nbddp.ui.ansi import strip
from nbddp.ui.chart_html import metrics_text
from nbddp.ui.log_lines import LogLine, log_html, log_text, scroll_box
from nbddp.ui.report import status
from nbddp.ui.report.blocks import Block, Card, Cell, Details, Dot, Markup, Report, Text, note
from nbddp.ui.report.rank_table import MAX_DETAILED_RANKS, DrawCurve, rank_blocks
from nbddp.ui.report.render import render_html, text_lines, title_html
from nbddp.ui.wording import describe_group


@dataclass(frozen=True, slots=True)
class EarlierAttempt:
    """A failed attempt; the next attempt began at ``over_at``, on healed or on new ranks."""

    handle: CellHandle
    over_at: float
    is_healed: bool

    @property
    def seconds_lost(self) -> float:
        """The seconds from the failure until the next attempt."""
        verdict = self.handle.result.verdict if self.handle.result else None
        return self.over_at - verdict.first.at if verdict else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """The content of a record.

    Attributes:
        snapshot: the state of the group.
        result: the outcome of the cell; None while it runs.
        lines: the last log lines, and text values.
        earlier: a note on the lines before these; ``log_path`` is the file with all lines.
        rank_lines: for a log that is longer than ``lines``: each rank, its last lines, and a note
            on its earlier lines.
        metrics: the metrics to draw, on this ``scale``.
        attempts: the failed attempts before this one.
        curves: draws the sparklines of a rank in the table.
        notes: other notes for the user.
        remarks: what extensions say about the cell.
    """

    snapshot: Snapshot
    result: CellResult | None = None
    lines: Sequence[LogLine] = ()
    earlier: str = ""
    log_path: str = ""
    rank_lines: Sequence[tuple[int, Sequence[LogLine], str]] = ()
    metrics: MetricsSnapshot | None = None
    scale: AxisScale = AxisScale.AUTO
    attempts: Sequence[EarlierAttempt] = ()
    curves: DrawCurve | None = None
    notes: Sequence[str] = ()
    remarks: Sequence[Block] = ()


def record_html(record: CellReport) -> str:
    """Return the record as HTML: ranks, failure, charts and output. It needs no kernel."""
    snapshot, title = record.snapshot, _title(record)
    verdict = record.result.verdict if record.result else None
    state = [
        *([Card(verdict.report(), is_error=not verdict.is_interrupt)] if verdict else []),
        *status.alarm_blocks(snapshot),
        *rank_blocks(snapshot.ranks, curves=record.curves),
        status.events_block(snapshot),
    ]
    is_open = record.result is not None and not record.result.is_ok
    blocks = [
        Details(replace(title, html=title_html(title, role="status")), state, is_open=is_open),
        status.straggler_block(snapshot),
        *_attempts(record.attempts),
        *record.remarks,
        *_numbers(record),
        *_log(record.lines, record.earlier),
        note(record.log_path if record.lines else ""),
        *_rank_logs(record.rank_lines),
    ]
    return render_html(Report("", blocks))


def record_text(record: CellReport) -> str:
    """Return output, failure and metrics as text, for a front end without HTML."""
    verdict = record.result.verdict if record.result else None
    blocks = [
        *_log(record.lines, record.earlier),
        *([Text(verdict.summary())] if verdict else []),
        *_numbers(record),
        *record.remarks,
    ]
    return strip("\n".join(text_lines(blocks)))


def _numbers(record: CellReport) -> list[Block]:
    notes: list[Block] = [*map(note, record.notes)]
    if record.metrics is None:
        return notes
    text = "\n".join(metrics_text(record.metrics))
    return [status.charts_block(record.metrics, record.scale, text), *notes]


def _title(record: CellReport) -> Cell:
    result, snapshot = record.result, record.snapshot
    if result is None:
        return status.state_title(snapshot)
    dot, outcome = _outcome(result)
    seconds = result.seconds
    if record.attempts:
        lost = sum(each.seconds_lost for each in record.attempts)
        ways = [
            RecoveryMethod.HEAL if attempt.is_healed else RecoveryMethod.RESTART
            for attempt in record.attempts
        ]
        outcome += f" {describe_recoveries(ways, lost)}"
        seconds = snapshot.seconds
    facts = [outcome, format_seconds(seconds), *describe_group(snapshot)[1:], snapshot.run]
    return Cell(" · ".join(filter(None, facts)), dot=dot)


def _outcome(result: CellResult) -> tuple[Dot, str]:
    verdict = result.verdict
    if verdict is None:
        return Dot.OK, f"done on {format_ranks(result.ranks)}"
    if verdict.ended_by:
        return Dot.WARN, f"ended by a {verdict.ended_by}"
    if verdict.is_interrupt:
        return Dot.WARN, "interrupted"
    return Dot.BAD, f"failed on {format_ranks(verdict.causes)}"


def _attempts(attempts: Sequence[EarlierAttempt]) -> Iterator[Details]:
    """Yield the failure of each attempt, folded and without advice."""
    for attempt in attempts:
        result = attempt.handle.result
        if result is not None and result.verdict is not None:
            healed = ", healed" if attempt.is_healed else ""
            what = f"{result.verdict.summary()} ({format_seconds(result.seconds)})"
            title = Cell(f"attempt {attempt.handle.run_attempt}{healed}: {what}", dot=Dot.BAD)
            yield Details(title, [Card(result.verdict.report(advises=False))])


def _log(lines: Sequence[LogLine], earlier: str) -> list[Block]:
    text = log_text(lines, earlier=earlier)
    return [Markup(lambda: scroll_box(log_html(lines, earlier=earlier)), text)] if lines else []


def _rank_logs(logs: Sequence[tuple[int, Sequence[LogLine], str]]) -> Sequence[Details]:
    """Return the lines of each rank, folded; of many ranks, all folded once more."""
    folds = [Details(f"only rank {rank}", _log(lines, earlier)) for rank, lines, earlier in logs]
    return folds if len(folds) <= MAX_DETAILED_RANKS else [Details("each rank's lines", folds)]
