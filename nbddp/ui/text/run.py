"""A run that was opened from its folder, or one of its cells, as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from nbddp.errors import say_ranks
from nbddp.formatting import plural
from nbddp.record.finished import RecordedCell, RecordedRun
from nbddp.ui.words import say_event, say_facts, say_left_out, say_seconds, say_tag, shorten

SHOWN_CELLS = 20  # the newest
SHOWN_REPORTS = 3  # of the cells that failed last
SHOWN_EVENTS = 8
SHOWN_METRICS = 20  # unless others are chosen
NAMED_METRICS = 20  # of the others
TAIL = 10  # lines of each rank


def run_text(
    run: RecordedRun,
    cell: RecordedCell | None = None,
    *,
    ending: str = "",
    metrics: Collection[str] | None = None,
) -> str:
    """The run, or a cell of it; ``ending`` says how the run ended.

    ``metrics`` are those whose numbers are said; None for the first few.
    """
    lines = [run_title(run, ending) if cell is None else cell_title(run, cell)]
    if cell is None:
        lines += _table(run.cells)
    for each in failed_cells(run, cell):
        lines += ["", f"cell {each.number}:" if cell is None else "", each.report or each.outcome]
    lines += ["", *_numbers(run, cell, metrics), *_events(run, cell), *_tails(run, cell)]
    lines.append(f"all of it is in {shorten(str(run.path))}")
    return "\n".join(lines)


def run_title(run: RecordedRun, ending: str) -> str:
    """What kind of run it was, and how it ended, in one line."""
    snapshot = run.snapshot()
    cells = plural(len(run.cells), "cell")
    facts = [cells, *say_facts(snapshot), say_seconds(snapshot.seconds), ending]
    return " · ".join([f"run {run.name}", *filter(None, facts)])


def cell_title(run: RecordedRun, cell: RecordedCell) -> str:
    """What came of a cell, in one line."""
    return " · ".join([f"cell {cell.number} of run {run.name}", *cell_facts(cell)])


def cell_facts(cell: RecordedCell) -> list[str]:
    """What came of it, where, and in what time."""
    took = "" if cell.seconds is None else say_seconds(cell.seconds)
    return [*filter(None, [say_outcome(cell), say_ranks(cell.ranks), took])]


def say_outcome(cell: RecordedCell) -> str:
    """How it ended, in a line."""
    if not cell.is_over:
        return "its end is not recorded"
    said = "done" if cell.outcome == "ok" else cell.outcome
    return f"{said} (done again)" if cell.is_again else said


def failed_cells(run: RecordedRun, cell: RecordedCell | None) -> list[RecordedCell]:
    """Those whose report is shown: of the run's the last few, or this one if it failed."""
    among = run.cells if cell is None else (cell,)
    return [each for each in among if each.is_over and each.outcome != "ok"][-SHOWN_REPORTS:]


def first_line(source: str) -> str:
    """The first line of a cell that is no comment and not empty."""
    lines = [line for line in map(str.strip, source.splitlines()) if line]
    return next((line for line in lines if not line.startswith("#")), "")[:80]


def _table(cells: Sequence[RecordedCell]) -> Iterator[str]:
    if len(cells) > SHOWN_CELLS:
        yield f"  {len(cells) - SHOWN_CELLS} earlier cells"
    for each in cells[-SHOWN_CELLS:]:
        yield "  " + " · ".join([f"cell {each.number}", *cell_facts(each), first_line(each.source)])


def _numbers(
    run: RecordedRun, cell: RecordedCell | None, metrics: Collection[str] | None
) -> Iterator[str]:
    curves = run.metrics(cell)
    names = curves.names()
    shown = names[:SHOWN_METRICS] if metrics is None else [n for n in names if n in metrics]
    for name in shown:
        last = curves.last(name)
        values = ", ".join(f"{value:.6g}" for value in last.values())
        yield f"{name}: {values} at last ({say_ranks(list(last))})"
    others = [name for name in names if name not in shown]
    if left_out := len(others) + curves.dropped_names:
        named, is_at_least = others[:NAMED_METRICS], curves.drops_more
        its = "its" if left_out == 1 else "their"
        yield say_left_out(named, left_out, is_at_least=is_at_least, does=f"has {its} numbers")


def _events(run: RecordedRun, cell: RecordedCell | None) -> Iterator[str]:
    snapshot = run.snapshot(cell)
    said = [(event, say_event(event)) for event in snapshot.events]
    for event, text in [pair for pair in said if pair[1]][-SHOWN_EVENTS:]:
        yield f"{say_seconds(max(0.0, event.at - snapshot.began))} after the start: {text}"


def _tails(run: RecordedRun, cell: RecordedCell | None) -> Iterator[str]:
    for rank in run.ranks if cell is None else cell.ranks:
        for line in run.tail(rank, TAIL, cell).splitlines():
            yield f"{say_tag([rank])} {line}"
