"""How far a sweep is, as a table above the panel of the one that runs."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.archive.sweeps import Row, State
from nbddp.ui.panel.bare import STRONG, dot
from nbddp.ui.panel.html import escape
from nbddp.ui.panel.style import SHEET
from nbddp.ui.text.sweep import say_end, say_head, say_row

SHOWN = 40  # rows: those before and after the one that runs
DOTS = {
    State.WAITING: "nbddp-off",
    State.RUNNING: "",
    State.OK: "nbddp-ok",
    State.BEFORE: "nbddp-ok",
    State.FAILED: "nbddp-bad",
    State.ENDED: "nbddp-warn",
}


def sweep_html(rows: Sequence[Row], current: Row | None = None, *, what: str = "sweep") -> str:
    """A row for each combination while ``current`` runs; in the end one line."""
    said = _said(rows, current, what)
    title = f'<div><span style="{STRONG}">{escape(said)}</span></div>'
    table = "" if current is None else _table(rows, rows.index(current))
    return f'{SHEET}<div class="nbddp">{title}{table}</div>'


def _said(rows: Sequence[Row], current: Row | None, what: str) -> str:
    return say_end(rows, what=what) if current is None else say_head(rows, current, what=what)


def _table(rows: Sequence[Row], at: int) -> str:
    first = max(0, min(at - SHOWN // 2, len(rows) - SHOWN))
    shown = rows[first : first + SHOWN]
    names = list(rows[0].trial.settings)
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in ("", *names, "state", "run"))
    more = len(rows) - len(shown)
    rest = f'<div class="nbddp-muted">{more} more</div>' if more else ""
    return (
        f'<table class="nbddp-ranks" aria-label="combinations of the sweep"><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(map(_row, shown))}</tbody></table>{rest}"
    )


def _row(row: Row) -> str:
    values = "".join(f"<td>{escape(str(each))}</td>" for each in row.trial.settings.values())
    said = escape(say_row(row))
    run = escape(row.path.name) if row.path is not None else ""
    return (
        f"<tr><td>{row.trial.number}</td>{values}"
        f'<td title="{said}">{dot(DOTS[row.state])}{said}</td><td><code>{run}</code></td></tr>'
    )
