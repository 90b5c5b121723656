"""What was traced on all ranks, in the looks of a record: a link to the file, and a table."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator

from nbddp.record.trace import Trace
from nbddp.ui.panel.bare import STRONG
from nbddp.ui.panel.html import escape, table_html
from nbddp.ui.panel.style import SHEET
from nbddp.ui.text.trace import (
    READERS,
    VIEWERS,
    notes,
    nothing_lines,
    table,
    table_title,
    trace_text,
    trace_title,
)

MOST_LINKED = 2 * 2**20  # bytes: so much may lie in the notebook, as what the link stands for


def trace_bundle(trace: Trace) -> dict[str, str]:
    """What is published, by MIME type."""
    return {"text/html": trace_html(trace), "text/plain": trace_text(trace)}


def trace_html(trace: Trace) -> str:
    """The link, the table, and what is not in it."""
    if trace.path is None:
        return _block(f"<div>{escape(each)}</div>" for each in nothing_lines(trace))
    return _block(
        [
            f'<div><span style="{STRONG}">{escape(trace_title(trace))}</span></div>',
            f"<div>{_link(trace)}</div>",
            f'<div class="nbddp-muted">{escape(VIEWERS)}; {escape(READERS)} '
            f"{escape(str(trace.folder))}</div>",
            f'<div style="margin-top:6px">{escape(table_title(trace))}</div>',
            _table(trace),
            *(f'<div class="nbddp-muted">{escape(each)}</div>' for each in notes(trace)),
        ]
    )


def _block(parts: Iterator[str] | list[str]) -> str:
    return "".join([SHEET, '<div class="nbddp">', *parts, "</div>"])


def _link(trace: Trace) -> str:
    """The path; a link to what is there, which the page has with it: servers hide such folders."""
    path = escape(str(trace.path))
    if trace.path is None or trace.size > MOST_LINKED:
        return path
    try:
        data = b64encode(trace.path.read_bytes()).decode()
    except OSError:  # somebody has deleted it
        return path
    kind = "application/gzip" if trace.path.suffix == ".gz" else "application/json"
    name = escape(trace.path.name)
    link = f'<a download="{name}" href="data:{kind};base64,{data}">download {name}</a>'
    return f"{link} · {path}"


def _table(trace: Trace) -> str:
    return table_html(*table(trace), label="milliseconds in operators, by rank")
