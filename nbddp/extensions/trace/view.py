"""The trace of torch's profiler on all ranks: its file, and the operators that differ."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence

from nbddp.extensions.trace import format_steps
from nbddp.extensions.trace.merge import (
    OUTSIDE_OPERATORS,
    Trace,
    TraceRow,
    is_different,
    trace_rows,
)
from nbddp.formatting import format_bytes, format_ranks, plural, ranks_by_text
from nbddp.ui.html_pieces import escape
from nbddp.ui.report.blocks import Block, Markup, Report, Table, Text, note

SHOWN_ROWS = 8
MAX_COLUMNS = 8  # ranks; of more ranks, only the least and the most are shown
MAX_EMBEDDED = 2 * 2**20  # bytes of a file that can be embedded in its download link


def trace_report(trace: Trace) -> Report:
    """Report the trace of a cell."""
    missing = [
        f"no trace of {format_ranks(ranks)}: {why}"
        for why, ranks in ranks_by_text(dict(sorted(trace.missing.items()))).items()
    ]
    if trace.path is None:
        return Report(f"no trace of cell {trace.cell}", [*map(Text, missing)])
    return Report(
        _title(trace),
        [
            Markup(lambda: f"<div>{_link(trace)}</div>", str(trace.path)),
            note("open it in https://ui.perfetto.dev or chrome://tracing"),
            note(f"files of each rank, for HolisticTraceAnalysis or TensorBoard: {trace.folder}"),
            *_operators(trace),
            *map(note, [*missing, *_limits(trace)]),
        ],
    )


def _title(trace: Trace) -> str:
    first, last = trace.steps
    is_whole = (first, last) == (trace.asked.first, trace.asked.last)
    steps = format_steps(first, last) + ("" if is_whole else f" ({trace.asked} were asked for)")
    counts = [plural(len(trace.ranks), "rank"), plural(trace.events, "event")]
    return " · ".join([f"trace of cell {trace.cell}", steps, *counts, format_bytes(trace.size)])


def _limits(trace: Trace) -> Iterator[str]:
    left_out = sum(each.left_out for each in trace.ranks.values())
    if left_out:
        events = f"the shortest {plural(left_out, 'event')}"
        yield f"{events} are only in the files of the ranks"
    if trace.error:
        yield f"clocks of the nodes: ± {1000 * trace.error:.1f} ms"


def _link(trace: Trace) -> str:
    """Return the path with a link to an embedded copy: Jupyter does not serve hidden folders."""
    path = escape(str(trace.path))
    if trace.path is None or trace.size > MAX_EMBEDDED:
        return path
    try:
        data = b64encode(trace.path.read_bytes()).decode()
    except OSError:  # the user deleted it
        return path
    kind = "application/gzip" if trace.path.suffix == ".gz" else "application/json"
    name = escape(trace.path.name)
    link = f'<a download="{name}" href="data:{kind};base64,{data}">download {name}</a>'
    return f"{link} · {path}"


# ---- operators


def _operators(trace: Trace) -> list[Block]:
    """Return the operators whose cost differs between ranks, else the costliest operators."""
    all_rows = trace_rows(trace.ranks)
    different = [row for row in all_rows if is_different(row, trace.ranks)]
    costly = sorted(all_rows, key=lambda row: -max(row.self_ms.values()))
    title = "operators that cost some ranks more than others, self time in ms:"
    if not different:
        title = "the costliest operators, self time in ms:"
        if len(trace.ranks) > 1:
            title = f"no operator costs one rank much more than another; {title}"
    return [Text(title), _table(trace, (different or costly)[:SHOWN_ROWS])]


def _table(trace: Trace, shown: Sequence[TraceRow]) -> Table:
    is_wide = len(trace.ranks) > MAX_COLUMNS
    columns = ["least", "most"] if is_wide else [f"rank {rank}" for rank in trace.ranks]
    cells = [[_name(row), *(_extremes(row) if is_wide else _time_by_rank(row))] for row in shown]
    return Table(["operator", *columns], cells, "milliseconds in operators, by rank")


def _name(row: TraceRow) -> str:
    is_collective = ":" in row.name and "::" not in row.name and row.name != OUTSIDE_OPERATORS
    return f"{row.name}, with the waiting" if is_collective else row.name


def _time_by_rank(row: TraceRow) -> list[str]:
    differ = len(set(row.calls.values())) > 1
    return [
        f"{spent:.1f}" + (f" ({row.calls[rank]:,} calls)" if differ else "")
        for rank, spent in row.self_ms.items()
    ]


def _extremes(row: TraceRow) -> list[str]:
    ordered = sorted(row.self_ms, key=lambda rank: row.self_ms[rank])
    return [f"{row.self_ms[rank]:.1f} (rank {rank})" for rank in (ordered[0], ordered[-1])]
