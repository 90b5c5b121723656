"""What was traced on all ranks, as plain text: where it is, and where ranks differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.errors import say_ranks
from nbddp.formatting import plural
from nbddp.record.trace import REST, Row, Trace, is_different, rows, why_nothing
from nbddp.ui.words import aligned
from nbddp.wire.trace_messages import say_steps

SHOWN_ROWS = 8
MAX_COLUMNS = 8  # ranks; of more, the least and the most
VIEWERS = "open it in https://ui.perfetto.dev or chrome://tracing"
READERS = "each rank's own file, for HolisticTraceAnalysis or TensorBoard, is in"


def trace_text(trace: Trace) -> str:
    """All that is said of it."""
    if trace.path is None:
        return "\n".join(nothing_lines(trace))
    head, shown = table(trace)
    lines = [
        trace_title(trace),
        f"{trace.path}",
        f"  {VIEWERS}",
        f"  {READERS} {trace.folder}",
        "",
        table_title(trace),
        *aligned([head, *shown]),
        *notes(trace),
    ]
    return "\n".join(lines)


def nothing_lines(trace: Trace) -> Iterator[str]:
    """Why there is no trace."""
    for why, ranks in why_nothing(trace.missing).items():
        is_all = len(ranks) == len(trace.missing)
        yield f"no trace of cell {trace.cell}: {'' if is_all else f'{say_ranks(ranks)}: '}{why}"


def trace_title(trace: Trace) -> str:
    """What it is, in one line."""
    facts = [
        f"trace of cell {trace.cell}",
        say_steps(*trace.steps),
        plural(len(trace.ranks), "rank"),
        plural(trace.events, "event"),
        say_size(trace.size),
    ]
    return " · ".join(facts)


def say_size(size: int) -> str:
    """How large a file is.

    >>> say_size(20_480), say_size(3_500_000)
    ('20 KiB', '3.3 MiB')
    """
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{max(1, size // 2**10)} KiB"


def chosen_rows(trace: Trace) -> tuple[list[Row], bool]:
    """The operators that are shown, and whether ranks differ in them; else the costliest ones."""
    found = rows(trace.ranks)
    different = [row for row in found if is_different(row, trace.ranks)]
    costly = sorted(found, key=lambda row: -max(row.spent.values()))
    return (different or costly)[:SHOWN_ROWS], bool(different)


def table_title(trace: Trace) -> str:
    """What the table has."""
    _, are_different = chosen_rows(trace)
    if len(trace.ranks) == 1:
        return "the costliest operators, in ms of their own:"
    if are_different:
        return "operators that cost some ranks more than others, in ms of their own:"
    return "no operator costs one rank much more than another; the costliest, in ms of their own:"


def table(trace: Trace) -> tuple[list[str], list[list[str]]]:
    """The titles of its columns, and a row for each operator."""
    ranks = list(trace.ranks)
    is_wide = len(ranks) > MAX_COLUMNS
    head = ["operator", *(["least", "most"] if is_wide else [f"rank {rank}" for rank in ranks])]
    shown, _ = chosen_rows(trace)
    return head, [[_name(row), *(_extremes(row) if is_wide else _each(row))] for row in shown]


def _name(row: Row) -> str:
    is_collective = ":" in row.name and "::" not in row.name and row.name != REST
    return f"{row.name}, with the waiting" if is_collective else row.name


def _each(row: Row) -> Sequence[str]:
    calls = set(row.calls.values())
    return [
        f"{spent:.1f}" + (f" ({row.calls[rank]:,} calls)" if len(calls) > 1 else "")
        for rank, spent in row.spent.items()
    ]


def _extremes(row: Row) -> Sequence[str]:
    ordered = sorted(row.spent, key=lambda rank: row.spent[rank])
    return [f"{row.spent[rank]:.1f} (rank {rank})" for rank in (ordered[0], ordered[-1])]


def notes(trace: Trace) -> Iterator[str]:
    """What is not in it, and how far it can be trusted."""
    for why, ranks in why_nothing(trace.missing).items():
        yield f"nothing of {say_ranks(ranks)}: {why}"
    yield from _of_steps(trace)
    left = sum(each.left_out for each in trace.ranks.values())
    if left:
        under = max(each.under for each in trace.ranks.values())
        yield (
            f"{plural(left, 'event')} left out of the merged file, the shortest: none took "
            f"{max(0.1, under):.1f} µs; the ranks' own files have all"
        )
    if trace.error:
        yield f"clocks of the nodes: ± {1000 * trace.error:.1f} ms"


def _of_steps(trace: Trace) -> Iterator[str]:
    steps, asked = trace.steps, trace.asked
    if any(each.is_cut for each in trace.ranks.values()):
        yield f"step {steps[1]} was not traced to its end: the cell ended there"
    if steps[1] < asked.last:
        yield f"{asked} were asked for: after step {steps[1]} the cell ended, or it took too long"
    elif steps[0] > asked.first:
        yield f"{asked} were asked for: step {steps[0]} was the first that was reported"
