"""The progress of a sweep or a scaling study: which of its runs succeeded, failed or remain."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.extensions.sweeps.grid import SweepEntry, SweepState, count_in
from nbddp.formatting import format_seconds, plural
from nbddp.ui.report.blocks import Block, Cell, Dot, Markup, Report, Table, note
from nbddp.ui.report.render import blocks_html

MAX_ROWS = 40  # in the table, around the running row
_DOTS = {
    SweepState.WAITING: Dot.OFF,
    SweepState.RUNNING: Dot.BUSY,
    SweepState.OK: Dot.OK,
    SweepState.ALREADY_DONE: Dot.OK,
    SweepState.FAILED: Dot.BAD,
    SweepState.ENDED: Dot.WARN,
}
_COUNT_TEXTS = {
    SweepState.OK: "ok",
    SweepState.ALREADY_DONE: "done before and not run again",
    SweepState.FAILED: "failed",
    SweepState.ENDED: "ended by you",
    SweepState.WAITING: "not run",
}


def sweep_report(
    rows: Sequence[SweepEntry], current: SweepEntry | None = None, *, what: str = "sweep"
) -> Report:
    """Report the running row and a table of all rows; after the last row, only counts."""
    if current is None:
        return Report(describe_outcome(rows, what=what))
    # the text has no table: each row was printed at its end
    table = Markup(lambda: blocks_html(_table(rows, rows.index(current))))
    return Report(describe_current(rows, current, what=what), [table])


def describe_current(rows: Sequence[SweepEntry], row: SweepEntry, *, what: str = "sweep") -> str:
    """Say which row is running and how many are left.

    >>> from nbddp.extensions.sweeps.grid import sweep_points
    >>> rows = [SweepEntry(point) for point in sweep_points([("lr", (0.1, 0.01))])]
    >>> describe_current(rows, rows[0])
    'sweep, 1 of 2: lr=0.1; 1 more to run'
    """
    waiting = count_in(rows, SweepState.WAITING) - (row.state is SweepState.WAITING)
    after = f"{waiting} more to run" if waiting else "the last one"
    return f"{what}, {row.trial.number} of {len(rows)}: {row.trial}; {after}"


def describe_outcome(rows: Sequence[SweepEntry], *, what: str = "sweep") -> str:
    """Count the rows by their state.

    >>> from nbddp.extensions.sweeps.grid import sweep_points
    >>> points = sweep_points([("lr", (0.1, 0.01))])
    >>> describe_outcome([SweepEntry(point, SweepState.OK) for point in points])
    'sweep of 2: 2 ok'
    """
    counts = [(count_in(rows, state), text) for state, text in _COUNT_TEXTS.items()]
    parts = [f"{count} {text}" for count, text in counts if count]
    seconds = sum(row.seconds for row in rows)
    duration = f", {format_seconds(seconds)}" if seconds else ""
    return f"{what} of {len(rows)}: {', '.join(parts)}{duration}"


def describe_done(rows: Sequence[SweepEntry]) -> str:
    """Say which combinations are not run again; empty if all are run."""
    done = [row for row in rows if row.state is SweepState.ALREADY_DONE]
    if not done:
        return ""
    which = "; ".join(str(row.trial) for row in done[:6]) + ("; ..." if len(done) > 6 else "")
    return (
        f"{plural(len(done), 'combination')} of {len(rows)} done before and not run again "
        f"({which}); --start-over or start_over=True runs them again"
    )


def describe_row(row: SweepEntry) -> str:
    """Return the state of a row, why it failed, and how long it took."""
    why = f": {row.why}" if row.why else ""
    duration = f", {format_seconds(row.seconds)}" if row.seconds else ""
    return f"{row.state.value}{why}{duration}"


def describe_failures(rows: Sequence[SweepEntry]) -> list[str]:
    """Return a line for each failed or cancelled row, with the command that shows its run."""
    return [
        f"{row.trial}: {describe_row(row)}"
        + (f"; `%ddp show {row.path.name}` has more" if row.path is not None else "")
        for row in rows
        if row.state in (SweepState.FAILED, SweepState.ENDED)
    ]


def _table(rows: Sequence[SweepEntry], at: int) -> list[Block]:
    first = max(0, min(at - MAX_ROWS // 2, len(rows) - MAX_ROWS))
    shown = rows[first : first + MAX_ROWS]
    head = ["", *rows[0].trial.settings, "state", "run"]
    table = Table(head, [_cells(row) for row in shown], "combinations of the sweep")
    more = len(rows) - len(shown)
    return [table, note(f"{more} more" if more else "")]


def _cells(row: SweepEntry) -> list[str | Cell]:
    state = describe_row(row)
    settings = [str(value) for value in row.trial.settings.values()]
    run = row.path.name if row.path is not None else ""
    return [str(row.trial.number), *settings, Cell(state, dot=_DOTS[row.state], title=state), run]
