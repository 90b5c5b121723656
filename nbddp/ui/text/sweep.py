"""How far a sweep is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.archive.sweeps import Row, State, count_of
from nbddp.formatting import plural
from nbddp.ui.words import say_seconds


def say_head(rows: Sequence[Row], row: Row, *, what: str = "sweep") -> str:
    """Which one it is, and how many are left behind it.

    >>> from nbddp.archive.sweeps import grid
    >>> rows = [Row(trial) for trial in grid([("lr", (0.1, 0.01))])]
    >>> say_head(rows, rows[0])
    'sweep, 1 of 2: lr=0.1; 1 left after it'
    """
    left = count_of(rows, State.WAITING) - (row.state is State.WAITING)
    after = f"{left} left after it" if left else "the last one"
    return f"{what}, {row.trial.number} of {len(rows)}: {row.trial}; {after}"


def say_end(rows: Sequence[Row], *, what: str = "sweep") -> str:
    """What came of all of them.

    >>> from nbddp.archive.sweeps import grid
    >>> rows = [Row(trial, State.OK) for trial in grid([("lr", (0.1, 0.01))])]
    >>> say_end(rows)
    'sweep of 2: 2 ok'
    """
    counts = [(state, count_of(rows, state)) for state in (*_ENDS, State.WAITING)]
    said = [f"{count} {_SAID.get(state, state.value)}" for state, count in counts if count]
    seconds = sum(row.seconds for row in rows)
    took = f", {say_seconds(seconds)}" if seconds else ""
    return f"{what} of {len(rows)}: {', '.join(said)}{took}"


_ENDS = (State.OK, State.BEFORE, State.FAILED, State.ENDED)
_SAID = {
    State.BEFORE: "done before and not run again",
    State.ENDED: "ended by you",
    State.WAITING: "not run",
}


def say_before(rows: Sequence[Row]) -> str:
    """Which are not run again, and the way to do so."""
    done = [row for row in rows if row.state is State.BEFORE]
    if not done:
        return ""
    which = "; ".join(str(row.trial) for row in done[:6]) + ("; ..." if len(done) > 6 else "")
    return (
        f"{plural(len(done), 'combination')} of {len(rows)} done before and not run again "
        f"({which}); --start-over runs them, too"
    )


def say_row(row: Row) -> str:
    """How one is: with its failure, and its run."""
    why = f": {row.why}" if row.why else ""
    took = f", {say_seconds(row.seconds)}" if row.seconds else ""
    return f"{row.state.value}{why}{took}"


def say_troubles(rows: Sequence[Row]) -> list[str]:
    """Those that have not come to their end, a line for each, and where to look."""
    return [
        f"{row.trial}: {say_row(row)}"
        + (f"; `%ddp show {row.path.name}` has more" if row.path is not None else "")
        for row in rows
        if row.state in (State.FAILED, State.ENDED)
    ]
