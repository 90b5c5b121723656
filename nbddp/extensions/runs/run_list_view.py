"""`%ddp runs`: the runs in the notebook's folder and below."""

from __future__ import annotations

import time
from typing import Any

from nbddp.charts.sparkline import block_characters, sparkline
from nbddp.extensions.runs import SHOWN_RUNS
from nbddp.extensions.runs.find import MAX_SHOWN_NAMES, short_names
from nbddp.extensions.runs.run_list import Listing
from nbddp.extensions.runs.summary import Summary
from nbddp.formatting import cut_text, format_bytes, format_seconds, list_some, plural
from nbddp.record.metrics import Pairs
from nbddp.ui.html_pieces import escape
from nbddp.ui.report.blocks import Cell, Dot, Mood, Report, Table, note
from nbddp.ui.wording import format_rate

MAX_SETTING_LENGTH = 28  # characters of a setting, or of the name of a setting or a metric
MAX_WHOLE_SETTING = 8  # characters of a setting that a page does not cut off
_DOTS = {"ok": Dot.OK, "failed": Dot.BAD, "running": Dot.BUSY, "empty": Dot.OFF}


def run_list_report(listing: Listing, *, most: int = SHOWN_RUNS) -> Report:
    """Report the runs, the newest first unless they are sorted by another column."""
    few = f"{len(listing.runs)} of " if len(listing.runs) < listing.total else ""
    title = f"{few}{plural(listing.total, 'run')}, {format_bytes(listing.size)}"
    if not listing.total:
        title = "no runs here yet: a `%%ddp` cell makes one"
    shown = listing.runs[:most]
    time.tzset()  # after `%env TZ=...`; else strftime() does it, after the first row
    names = short_names([run.name for run in shown])
    rows = [_row(listing, run, name) for run, name in zip(shown, names, strict=True)]
    head = ["run", "when", "started by", "ranks", *map(shorten, listing.titles)]
    head += ["steps", "pace", "outcome", f"curve of {shorten(listing.curve_name)}"]
    table = Table(head, rows, "runs").without_empty_columns()
    more = len(listing.runs) - most
    rest = f"{more} more: `%ddp runs -n {len(listing.runs)}` shows them" if more > 0 else ""
    left_out = list_some(listing.left_out, MAX_SHOWN_NAMES)
    return Report(title, [table, note(rest), note(f"left out: {left_out}" if left_out else "")])


def _row(listing: Listing, run: Summary, name: str) -> list[str | Cell]:
    outcome = describe_outcome(run)
    return [
        Cell(cut_text(run.name, 60), title=run.name, html=f"<code>{escape(name)}</code>"),
        time.strftime("%m-%d %H:%M", time.localtime(run.began)) if run.began else "",
        run.started_by if listing.has_several_programs else "",
        str(run.ranks or ""),
        *(_setting(run.config.get(name)) for name in listing.settings),
        *(_number(run.last.get(name)) for name in listing.metrics),
        "" if run.steps is None else f"{run.steps:,}",
        describe_pace(run),
        Cell(outcome, dot=_DOTS.get(run.outcome, Dot.WARN), title=outcome),
        _curve(listing, run),
    ]


def _setting(value: Any) -> str | Cell:
    """Return a setting; a page makes its column as narrow as the outcome's column needs."""
    text = format_value(value)
    if len(text) <= MAX_WHOLE_SETTING:
        return text
    return Cell(text, title=str(value), html=f'<span class="nbddp-clip">{escape(text)}</span>')


def _number(value: float | None) -> str | Cell:
    text = "" if value is None else f"{value:.4g}"
    return Cell(text, Mood.BAD) if text in ("nan", "inf", "-inf") else text


def _curve(listing: Listing, run: Summary) -> str | Cell:
    """Return a curve of the run, with its name if it differs from the other runs."""
    name, pairs = listing.curve_of(run)
    values = midpoints(pairs)
    if not values:
        return ""
    last = f", at last {run.last[name]:.4g}" if name in run.last else ""
    svg = sparkline(values, escape(f"{name} of {run.name}{last}"))
    other = "" if name == listing.curve_name else f" {shorten(name)}"
    return Cell(f"{block_characters(values)}{other}", html=f"{svg}{escape(other)}")


def shorten(text: str, most: int = MAX_SETTING_LENGTH) -> str:
    """Shorten a long text in its middle.

    >>> shorten("eval/loss"), shorten("eval/a_long_name_of_a_benchmark/accuracy")
    ('eval/loss', 'eval/a_long_na…mark/accuracy')
    """
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def midpoints(pairs: Pairs) -> list[float]:
    """Return the midpoint of each pair of a lowest and a highest value."""
    return [sum(pair) / 2 for pair in pairs]


def format_value(value: Any) -> str:
    """Return a setting as a short text.

    >>> [format_value(each) for each in (0.1, 12345.678, True, None, "x" * 40, float("nan"))]
    ['0.1', '12345.7', 'True', '', 'xxxxxxxxxxxxxxxxxxxxxxxxxxx…', 'nan']
    """
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    return cut_text(text, MAX_SETTING_LENGTH)


def describe_pace(run: Summary) -> str:
    """Return the steps per second, and the samples per second if the batch size is known."""
    steps = format_rate(run.steps_per_second or 0.0)
    samples = run.samples_per_second
    return f"{steps}, {samples:,.0f} samples/s" if steps and samples else steps


def describe_outcome(run: Summary) -> str:
    """Say how a run ended, how much time failures cost, and the user's note on it."""
    has_whole_text = run.outcome == "interrupted"  # "ranks 0-1 interrupted, line 3"
    how = run.why if has_whole_text else ": ".join(filter(None, [run.outcome, run.why]))
    lost = f"{format_seconds(run.seconds_lost)} lost to failures" if run.seconds_lost else ""
    is_idle = run.is_live and run.outcome != "running"
    parts = [cut_text(how, 90), lost, "ranks still running" if is_idle else "", run.note]
    return " · ".join(filter(None, parts))
