"""What stays of a panel when its cell is over: HTML that needs no kernel, and the same as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nbddp.checks.registry import Finding
from nbddp.errors import say_ranks
from nbddp.lifecycle.comeback import Way, say_comebacks
from nbddp.record.cell import CellResult
from nbddp.record.snapshot import Snapshot
from nbddp.ui.ansi import strip, to_html
from nbddp.ui.chart_html import RenderedChart, charts_html
from nbddp.ui.panel.bare import STRONG, dot
from nbddp.ui.panel.html import alarm, card, escape, late, state_line, time_line
from nbddp.ui.panel.loghtml import log_html, log_text, scrolled
from nbddp.ui.panel.style import SHEET
from nbddp.ui.report.findings import findings_below_cell, findings_text
from nbddp.ui.report.rank_table import FEW, Curves, ranks_html
from nbddp.ui.report.render import html_of
from nbddp.ui.tails import Line
from nbddp.ui.words import say_facts, say_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All that a record shows.

    Attributes:
        result: what came of the cell; None for a group that is only looked at.
        lines: the tail of the logs, and values that are text.
        earlier: a word on the lines before those; ``log_path`` is where all are.
        rank_lines: the tail of each rank whose lines are not all among ``lines``.
        charts: those of the metrics.
        attempts: those before this one, as HTML each; ``ways`` from each to the next, and
            ``seconds_lost`` between them.
        curves: what draws the small ones of a rank, by their column in the table.
        notes: what else should be said, such as metrics that are not drawn.
        findings: what checks have found in the cell.
        is_brief: the ranks are folded, as they are in the record of a cell that went well.
    """

    snapshot: Snapshot
    result: CellResult | None = None
    lines: Sequence[Line] = ()
    earlier: str = ""
    log_path: str = ""
    rank_lines: Sequence[tuple[int, Sequence[Line], str]] = ()
    charts: Sequence[RenderedChart] = ()
    attempts: Sequence[str] = ()
    ways: Sequence[Way] = ()
    seconds_lost: float = 0.0
    curves: Curves = field(default_factory=dict)
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    is_brief: bool = False


def record_html(record: Record) -> str:
    """The record as HTML: the first cause on top, then charts, output, and the ranks."""
    is_open = not record.is_brief and (record.result is None or not record.result.is_ok)
    ranks = ranks_html(record.snapshot.ranks, is_open=True, curves=record.curves)
    parts = [
        SHEET,
        '<div class="nbddp">',
        f"<details{' open' if is_open else ''}><summary>{_title(record)}</summary>",
        _error(record),
        alarm(record.snapshot),
        ranks,
        time_line(record.snapshot),
        "</details>",
        late(record.snapshot),
        *record.attempts,
        html_of(findings_below_cell(record.findings)),
        charts_html(record.charts),
        *(f'<div class="nbddp-muted">{escape(note)}</div>' for note in record.notes),
        _log(record),
        _rank_logs(record.rank_lines),
        "</div>",
    ]
    return "".join(parts)


def record_text(record: Record) -> str:
    """The record as plain text, for a front end that shows no HTML."""
    parts = [log_text(record.lines, earlier=record.earlier)] if record.lines else []
    if record.result is not None and record.result.verdict is not None:
        parts.append(strip(record.result.verdict.summary()))
    said = [each.text for each in record.charts]
    checks = filter(None, [findings_text(record.findings)])
    return "\n".join([*parts, *map(strip, [*said, *record.notes, *checks])])


def attempt_html(number: int, result: CellResult, way: Way) -> str:
    """An attempt that failed and was followed by another, folded: its failure, and no advice."""
    verdict = result.verdict
    if verdict is None:
        return ""
    healed = ", healed" if way is Way.HEAL else ""
    said = f"attempt {number}{healed}: {verdict.summary()} ({say_seconds(result.seconds)})"
    report = card(to_html(verdict.report(advises=False)), is_error=True)
    return f"<details><summary>{dot('nbddp-bad')}{escape(said)}</summary>{report}</details>"


def going_on_html(text: str) -> str:
    """A word in the panel's place between two attempts."""
    said = f"{dot('nbddp-warn')}<span>{escape(text)}</span>"
    return f'{SHEET}<div class="nbddp nbddp-running">{said}</div>'


def _title(record: Record) -> str:
    result, snapshot = record.result, record.snapshot
    if result is None:
        return state_line(snapshot)
    facts = " · ".join(map(escape, [*say_facts(snapshot)[1:], *filter(None, [snapshot.run])]))
    kind, said = _outcome(result)
    seconds = result.seconds
    if record.attempts:
        said += f" {say_comebacks(record.ways, record.seconds_lost)}"
        seconds = snapshot.seconds
    return (
        f'{dot(kind)}<span class="nbddp-state" role="status" style="{STRONG}">'
        f"{escape(said)}</span> "
        f'<span class="nbddp-muted">· {say_seconds(seconds)} · {facts}</span>'
    )


def _outcome(result: CellResult) -> tuple[str, str]:
    verdict = result.verdict
    if verdict is None:
        return "nbddp-ok", f"done on {say_ranks(result.ranks)}"
    if verdict.ended_by:
        return "nbddp-warn", f"ended by a {verdict.ended_by}"
    if verdict.is_interrupt:
        return "nbddp-warn", "interrupted"
    return "nbddp-bad", f"failed on {say_ranks(verdict.causes)}"


def _error(record: Record) -> str:
    verdict = record.result.verdict if record.result else None
    if verdict is None:
        return ""
    return card(to_html(verdict.report()), is_error=not verdict.is_interrupt)


def _log(record: Record) -> str:
    if not record.lines:
        return ""
    path = f'<div class="nbddp-muted">{escape(record.log_path)}</div>' if record.log_path else ""
    return scrolled(log_html(record.lines, earlier=record.earlier)) + path


def _rank_logs(logs: Sequence[tuple[int, Sequence[Line], str]]) -> str:
    """A line for each rank that unfolds; of many ranks all lines are folded, too."""
    html = "".join(_rank_log(*each) for each in logs)
    if len(logs) <= FEW:
        return html
    return f"<details><summary>each rank's lines</summary>{html}</details>"


def _rank_log(rank: int, lines: Sequence[Line], earlier: str) -> str:
    log = scrolled(log_html(lines, earlier=earlier))
    return f"<details><summary>only rank {rank}</summary>{log}</details>"
