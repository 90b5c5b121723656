"""Where a cell's time went, in the looks of a record: a picture, and the numbers below it."""

from __future__ import annotations

from base64 import b64encode

from nbddp.charts.figure import draw_timeline, png_of
from nbddp.record.spent import Timeline
from nbddp.ui.panel.bare import STRONG, ink
from nbddp.ui.panel.html import escape, table_html
from nbddp.ui.panel.style import SHEET
from nbddp.ui.rows import shown_ranks
from nbddp.ui.text.spent import (
    OVERLAP_HEAD,
    late,
    line_facts,
    matrix,
    notes,
    overlap_notes,
    overlap_rows,
    spent_text,
    spent_title,
)


def spent_bundle(line: Timeline, *, has_page: bool) -> tuple[dict[str, str], dict[str, object]]:
    """What is published, by MIME type, and its metadata.

    ``has_page``: whether a page shows it, or a notebook is executed without one.
    """
    text = spent_text(line)
    png, width = png_of(draw_timeline(line, shown_ranks(line)))
    picture = b64encode(png).decode()
    if has_page:
        return {"text/html": spent_html(line, picture, width), "text/plain": text}, {}
    return {"image/png": picture, "text/plain": text}, {"image/png": {"width": width}}


def spent_html(line: Timeline, picture: str, width: int) -> str:
    """The picture, and below it what it comes to."""
    said = "<br>".join(map(escape, late(line)))
    parts = [
        SHEET,
        '<div class="nbddp">',
        f'<div><span style="{STRONG}">{escape(spent_title(line))}</span></div>',
        f'<div class="nbddp-waits" style="{ink("warn")}">{said}</div>' if said else "",
        '<div class="nbddp-charts">'
        f'<img src="data:image/png;base64,{picture}" style="max-width:100%;width:{width}px"'
        f' alt="{escape(_alt(line))}"></div>',
        _matrix(line),
        *(f"<div>{escape(each)}</div>" for each in line_facts(line)),
        _overlaps(line) if line.overlaps else "",
        *(f'<div class="nbddp-muted">{escape(each)}</div>' for each in notes(line)),
        "</div>",
    ]
    return "".join(parts)


def _alt(line: Timeline) -> str:
    return f"ranks as rows, time across: {spent_title(line)}; the numbers stand below"


def _matrix(line: Timeline) -> str:
    columns, rows = matrix(line)
    titles = ["waited for", *(f"rank {rank}" for rank in columns), "all"]
    return table_html(titles, rows, label="seconds that ranks waited, by rank waited for")


def _overlaps(line: Timeline) -> str:
    table = table_html(
        OVERLAP_HEAD, overlap_rows(line), label="what DDP has measured of its models"
    )
    said = (f'<div class="nbddp-muted">{escape(each)}</div>' for each in overlap_notes(line))
    return "".join([table, *said])
