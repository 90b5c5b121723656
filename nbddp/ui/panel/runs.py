"""A list of runs as a table that stays in the notebook."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.archive.find import short_names
from nbddp.archive.run_list import Listing
from nbddp.archive.summary import Summary
from nbddp.charts.sparkline import sparkline
from nbddp.ui.panel.bare import dot
from nbddp.ui.panel.html import escape
from nbddp.ui.panel.style import SHEET
from nbddp.ui.text.runs import SHOWN, cells_of, curve_of, head_of, notes

LOST = "#dd4444"  # where numbers were not finite
DOTS = {"ok": "nbddp-ok", "failed": "nbddp-bad", "running": "", "empty": "nbddp-off"}


def runs_html(listing: Listing, *, most: int = SHOWN) -> str:
    """The list, and below it what has to be said of it."""
    shown = listing.runs[:most]
    said = "".join(
        f'<div class="nbddp-muted">{escape(each)}</div>'
        for each in notes(listing, most=most, is_page=True)
    )
    return f'{SHEET}<div class="nbddp">{_table(listing, shown) if shown else ""}{said}</div>'


def _table(listing: Listing, shown: Sequence[Summary]) -> str:
    titles = [*head_of(listing), listing.metrics[0] if listing.metrics else ""]
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in titles)
    names = short_names([run.name for run in shown])
    body = "".join(_row(listing, run, name) for run, name in zip(shown, names, strict=True))
    return (
        f'<table class="nbddp-ranks" aria-label="runs"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def run_name(whole: str, short: str) -> str:
    """A run's name in a table; all of it where one points.

    >>> run_name("20260102-030405-a", "a")
    '<code title="20260102-030405-a">a</code>'
    """
    return f'<code title="{escape(whole)}">{escape(short)}</code>'


def _row(listing: Listing, run: Summary, name: str) -> str:
    _, *middle, outcome = cells_of(listing, run)
    cells = "".join(map(_cell, middle))
    mark = dot(DOTS.get(run.outcome, "nbddp-warn"))
    said = escape(outcome)
    return (
        f"<tr><td>{run_name(run.name, name)}</td>{cells}"
        f'<td title="{said}">{mark}{said}</td>'
        f"<td>{sparkline(curve_of(listing, run), escape(_alt(listing, run)))}</td></tr>"
    )


def _cell(text: str) -> str:
    is_lost = text in ("nan", "inf", "-inf")
    said = (
        f'<strong class="nbddp-wrong" style="color:{LOST}">{text}</strong>'
        if is_lost
        else escape(text)
    )
    return f"<td>{said}</td>"


def _alt(listing: Listing, run: Summary) -> str:
    name = listing.metrics[0] if listing.metrics else ""
    return f"{name} of {run.name}, at last {run.last[name]:.4g}" if name in run.last else name
