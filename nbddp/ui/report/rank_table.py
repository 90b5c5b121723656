"""The ranks as a table; many ranks as a summary, a grid, and rows for ranks with trouble."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nbddp.charts.palette import rank_class, rank_color
from nbddp.charts.sparkline import sparkline
from nbddp.formatting import format_bytes, format_line, format_number_ranges, format_seconds, plural
from nbddp.record.rank_monitor import LoopProgress
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui import wording
from nbddp.ui.html_pieces import escape, text_color
from nbddp.ui.report.blocks import Block, Cell, Markup, Mood, Table, Text, note
from nbddp.ui.report.render import blocks_html, text_lines

MAX_DETAILED_RANKS = 8  # with a row for each rank; more ranks get a summary and a grid
MAX_ROWS = 32  # in a table
OLD_AFTER = 1.5  # seconds between the reports of two ranks; a rank reports each second
STALL_AFTER = 5.0  # seconds at one line, after which a rank of many gets a row
_COLLECTIVE_TITLE = re.compile(r"\S+ #\d+(?: of group (?:\[[^]]*\]|'[^']*'|\S+))?")

# returns a rank's sparkline for a column title, or an empty text
DrawCurve = Callable[[RankSnapshot, str], str]


def rank_blocks(
    ranks: Sequence[RankSnapshot],
    *,
    is_open: bool = True,
    has_pid: bool = False,
    curves: DrawCurve | None = None,
) -> list[Block]:
    """Return blocks that show the ranks.

    Args:
        ranks: the ranks of the group or of the cell.
        is_open: whether to show a grid if there are many ranks.
        has_pid: whether the table has process ids.
        curves: draws a sparkline before the text of a column.
    """
    if len(ranks) <= MAX_DETAILED_RANKS:
        return rank_table(ranks, has_pid=has_pid, curves=curves)
    nodes: dict[str, list[RankSnapshot]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    if len(nodes) > 1:
        rows = _node_table(nodes)
    else:  # a text, which has no grid, gets rows for more ranks
        causes = [rank for rank in ranks if rank.is_first_cause][:MAX_DETAILED_RANKS]
        text = "\n".join(text_lines(rank_table(ranks, has_pid=has_pid)))
        rows = [Markup(lambda: blocks_html(rank_table(causes)), text)]
    return [Text(overview(ranks)), *rows, Markup(lambda: _grids(nodes) if is_open else "")]


# ---- a row for each rank


def rank_table(
    ranks: Sequence[RankSnapshot], *, has_pid: bool = False, curves: DrawCurve | None = None
) -> list[Block]:
    """Return a table with a row for each rank; of too many, ranks with trouble come first."""
    shown = sorted(sorted(ranks, key=_urgency)[:MAX_ROWS], key=lambda rank: rank.rank)
    columns = {**COLUMNS, **({"pid": _pid} if has_pid else {})}
    newest = min((rank.age for rank in ranks if rank.is_active), default=0.0)
    rows = [_row(rank, columns, curves, newest=newest) for rank in shown]
    table = Table(list(columns), rows, "ranks").without_empty_columns()
    return [table, _note_more(len(ranks) - len(shown), "rank")]


def _note_more(count: int, what: str) -> Text:
    return note(f"and {plural(count, f'more {what}')}" if count else "")


def _urgency(rank: RankSnapshot) -> tuple[bool, bool, bool, bool, int]:
    """Return a sort key: failed ranks first, then ranks that others may wait for."""
    is_on_time, waits = rank.lag is None, rank.state == "waiting"
    return not rank.is_first_cause, rank.is_healthy, is_on_time, waits, rank.rank


def _row(
    rank: RankSnapshot, columns: _Columns, curves: DrawCurve | None = None, *, newest: float = 0.0
) -> list[Cell]:
    """Return the cells of a rank. They are dimmed if the report of another rank is newer.

    Else a rank whose report is older would look slow. ``newest`` is the age of the newest report.
    """
    is_old = rank.is_active and rank.age - newest > OLD_AFTER
    cells = []
    for title, make_cell in columns.items():
        cell, curve = make_cell(rank), curves(rank, title) if curves else ""
        html = f"{curve} {cell.html or escape(cell.text)}" if curve else cell.html
        cell = replace(cell, html=html)
        if is_old and cell.mood is Mood.PLAIN:
            age = f"reported {format_seconds(rank.age)} ago"
            cell = replace(cell, mood=Mood.DIM, title=" · ".join(filter(None, [cell.title, age])))
        cells.append(cell)
    return cells


def _rank(rank: RankSnapshot) -> Cell:
    if rank.lag is None:
        return Cell(str(rank.rank), rank=rank.rank)
    why = escape(wording.describe_lag(rank.lag))
    slow = (
        f'<span class="nbddp-waits" style="{text_color("warn")}" role="img" title="{why}"'
        f' aria-label="{why}">↓ slow</span>'
    )
    return Cell(f"{rank.rank} ↓ slow", rank=rank.rank, html=f"{rank.rank} {slow}")


def _state(rank: RankSnapshot) -> Cell:
    mood = Mood.PLAIN
    if not rank.is_healthy:
        mood = Mood.BAD if rank.is_first_cause else Mood.WARN
    elif rank.state.startswith("waiting"):
        mood = Mood.WARN
    return Cell(rank.state, mood, title="" if rank.is_healthy else rank.state)


def _line(rank: RankSnapshot) -> Cell:
    if not rank.line:
        return Cell("")
    duration = format_seconds(rank.seconds) if rank.seconds else ""
    muted = f'<span class="nbddp-muted">{duration}</span> ' if duration else ""
    code = f"<code>{escape(rank.code)}</code>" if rank.code else ""
    style = ' style="max-width:12em"' if rank.progress_bars else ""
    html = f'<span class="nbddp-clip"{style}>{escape(rank.position)} {muted}{code}</span>'
    title = f"{format_line(rank.line, rank.file)}: {rank.code}"
    return Cell(rank.position + (f" for {duration}" if duration else ""), title=title, html=html)


def _collective(rank: RankSnapshot) -> Cell:
    """Return the newest collective, with its shape only while the rank waits in it."""
    title = _COLLECTIVE_TITLE.match(rank.collective)
    short = title.group() if title and rank.state != "waiting" else rank.collective
    html = f'<span class="nbddp-clip">{escape(short)}</span>' if short else ""
    return Cell(short, title=rank.collective, html=html)


def _progress(rank: RankSnapshot) -> Cell:
    texts, html = [], ""
    for bar in rank.progress_bars:
        texts.append(wording.format_progress_bar(bar, is_short=True, is_active=rank.is_active))
        text = escape(texts[-1])
        if rank.is_active and bar.seconds_left:
            text, _, rest = text.rpartition(" · ")
            text = f'<span>{text}</span><span class="nbddp-left"> · {rest}</span>'
        title = escape(wording.format_progress_bar(bar, is_active=rank.is_active))
        filled = _filled(bar, rank) if bar.total else ""
        html += f'<div class="nbddp-clip" title="{title}">{filled}{text}</div>'
    return Cell(", ".join(texts), html=html)


def _filled(bar: LoopProgress | None, rank: RankSnapshot) -> str:
    """Return a bar that shows the progress of a loop."""
    share = min(1.0, bar.done / bar.total) if bar else 0.0
    filled = f'<span style="width:{share:.1%};background:{rank_color(rank.rank)}"></span>'
    return f'<span class="nbddp-bar {rank_class(rank.rank)}" aria-hidden="true">{filled}</span>'


def _memory(count: int) -> str:
    return format_bytes(count) if count else ""


def _pid(rank: RankSnapshot) -> Cell:
    return Cell(str(rank.pid) if rank.pid and rank.is_alive else "")


_Columns = Mapping[str, Callable[[RankSnapshot], Cell]]
COLUMNS: _Columns = {
    "rank": _rank,
    "node": lambda rank: Cell(rank.node),
    "state": _state,
    "line": _line,
    "collective": _collective,
    "step": lambda rank: Cell(wording.format_step(rank)),
    "progress": _progress,
    "CPU": lambda rank: Cell(f"{rank.cpu:.0f} %" if rank.memory and rank.cpu >= 0 else ""),
    "memory": lambda rank: Cell(_memory(rank.memory)),
    "GPU": lambda rank: Cell(
        " · ".join(wording.gpu_facts(rank)), title=wording.format_gpu_facts(rank)
    ),
}


# ---- ranks of several nodes

_Nodes = Mapping[str, Sequence[RankSnapshot]]


def _node_table(nodes: _Nodes) -> list[Block]:
    """Return a row for each node, each followed by rows for its ranks with trouble."""
    ranks = [rank for of_node in nodes.values() for rank in of_node]
    with_trouble = sorted(filter(_needs_attention, ranks), key=_urgency)
    node_names = [*dict.fromkeys([*(rank.node for rank in with_trouble), *nodes])]
    shown = set(node_names[: MAX_ROWS - min(len(with_trouble), MAX_ROWS // 2)])
    listed = [rank for rank in with_trouble if rank.node in shown][: MAX_ROWS - len(shown)]
    below_node = {**COLUMNS, "node": lambda _: Cell("")}
    rows = []
    for number, (name, of_node) in enumerate(nodes.items()):
        if name in shown:
            rows.append(_node_row(f"node {number} ({name})", of_node))
            rows += [_row(rank, below_node) for rank in of_node if rank in listed]
    return [
        Table(list(COLUMNS), rows, "nodes").without_empty_columns(),
        _note_more(len(nodes) - len(shown), "node"),
        _note_more(len(with_trouble) - len(listed), "rank"),
    ]


def _needs_attention(rank: RankSnapshot) -> bool:
    return (
        not rank.is_healthy
        or rank.lag is not None
        or (rank.is_active and rank.seconds >= STALL_AFTER)
    )


def _node_row(title: str, ranks: Sequence[RankSnapshot]) -> list[Cell]:
    steps = [rank.step for rank in ranks if rank.step is not None]
    span = f"{min(steps):.0f}-{max(steps):.0f}" if steps else ""
    cells = {
        "rank": Cell(format_number_ranges([rank.rank for rank in ranks])),
        "node": Cell(title, Mood.STRONG),
        "state": Cell(", ".join(_states(ranks))),
        "step": Cell(span),
        "memory": Cell(_memory(sum(rank.memory for rank in ranks if rank.is_alive))),
    }
    return [cells.get(column, Cell("")) for column in COLUMNS]


# ---- a summary and a grid of many ranks


def _seconds_left(bars: Sequence[LoopProgress]) -> float | None:
    """Return the seconds until the end of the outermost loop with a known total.

    The next inner loop gives the progress within the current iteration.
    """
    with_total = [bar for bar in bars if bar.total]
    if not with_total:
        return None
    outer, *inner = with_total
    inner_share = inner[0].done / inner[0].total if inner else 0.0
    done = min(float(outer.total), outer.done + inner_share)
    if not done or outer.seconds <= 0:
        return None
    return (outer.total - done) * outer.seconds / done


def seconds_left(ranks: Sequence[RankSnapshot]) -> float | None:
    """Return the seconds until the last rank finishes its loop; None if unknown."""
    estimates = [_seconds_left(rank.progress_bars) for rank in ranks if rank.is_active]
    return max((left for left in estimates if left is not None), default=None)


def _outermost_loop(ranks: Sequence[RankSnapshot]) -> str:
    """Return the name of the loop with a known total; the cell may have more loops after it."""
    bars = [bar for rank in ranks if rank.is_active for bar in rank.progress_bars if bar.total]
    return bars[0].label if bars and bars[0].label else "this loop"


def slowest(ranks: Sequence[RankSnapshot]) -> int | None:
    """Return the slowest of the ranks that are slow and still run."""
    slow_ranks = [(-rank.lag.share, rank.rank) for rank in ranks if rank.lag and rank.is_active]
    return min(slow_ranks)[1] if slow_ranks else None


def overview(ranks: Sequence[RankSnapshot]) -> str:
    """Summarize the states of all ranks in one line.

    >>> overview([RankSnapshot(rank=rank, state="running") for rank in range(64)])
    '64 running'
    """
    parts = _states(ranks)
    slow, seconds = slowest(ranks), seconds_left(ranks)
    if slow is not None:
        parts.append(f"rank {slow} is the slowest")
    if seconds:
        parts.append(f"{format_seconds(seconds)} left in {_outermost_loop(ranks)}")
    return " · ".join(parts)


def _states(ranks: Sequence[RankSnapshot]) -> list[str]:
    counts = Counter(rank.state if rank.is_healthy else _trouble(rank) for rank in ranks)
    return [f"{count} {state}" for state, count in counts.most_common(4)]


def _trouble(rank: RankSnapshot) -> str:
    if rank.is_first_cause:
        return "failed"
    return "interrupted" if rank.state.startswith("interrupted") else "ended"


def _grids(nodes: _Nodes) -> str:
    if len(nodes) == 1:
        return "".join(map(grid, nodes.values()))
    grids = ""
    for number, (name, of_node) in enumerate(nodes.items()):
        title = escape(f"node {number} ({name})")
        head = f'<span class="nbddp-muted">{title}</span>'
        grids += f'<div class="nbddp-grid-of">{head}{grid(of_node, f"ranks of {title}")}</div>'
    return grids


def grid(ranks: Sequence[RankSnapshot], label: str = "ranks") -> str:
    """Return a grid with a field for each rank: its number, progress and trouble."""
    fields = "".join(map(_grid_field, ranks))
    return f'<div class="nbddp-grid" role="list" aria-label="{label}">{fields}</div>'


def _grid_field(rank: RankSnapshot) -> str:
    is_odd = not rank.is_healthy or rank.state == "waiting" or rank.lag is not None
    kind = "nbddp-wrong" if rank.is_first_cause else "nbddp-waits" if is_odd else ""
    bar = next((bar for bar in rank.progress_bars if bar.total), None)
    step, on_node = wording.format_step(rank), f" on {rank.node}" if rank.node else ""
    facts = [f"rank {rank.rank}{on_node}: {rank.state}", f"step {step}" if step else ""]
    facts += [_memory(rank.memory), wording.describe_lag(rank.lag) if rank.lag else ""]
    title = escape(" · ".join(filter(None, facts)))
    return (
        f'<span class="nbddp-field {kind}" role="listitem" title="{title}">'
        f"{rank.rank}{'↓' if rank.lag else ''}{_filled(bar, rank)}</span>"
    )


MAX_POINTS = 60
SAMPLE_PERIOD = 1.0  # seconds between two points
SPARKLINE_WIDTH = 32  # CSS pixels


class RankSparklines:
    """Sparklines of the step rate and the memory of a few ranks."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[int, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=MAX_POINTS)
        )
        self._next_at = 0.0

    def add_points(self, ranks: Sequence[RankSnapshot], now: float) -> None:
        """Add a point for each rank, at most once a second."""
        if now < self._next_at:
            return
        self._next_at = now + SAMPLE_PERIOD
        for rank in ranks:
            if rank.is_alive and rank.step is not None:
                self._values[rank.rank, "step"].append(rank.steps_per_second)
            if rank.is_alive and rank.memory:
                self._values[rank.rank, "memory"].append(rank.memory)

    def draw(self, rank: RankSnapshot, title: str, *, is_static: bool = False) -> str:
        """Return the sparkline of a rank for a column of the rank table, or an empty text.

        ``is_static`` is for a record, which may be shown on pages without SVG.
        """
        values = list(self._values.get((rank.rank, title), ()))
        if len(values) < 2:
            return ""
        name, now, top = "steps per second", f"{values[-1]:.3g}", f"{max(values):.3g}"
        if title == "memory":
            name, now, top = "memory", format_bytes(values[-1]), format_bytes(max(values))
        label = escape(f"{name}: now {now}, axis 0 to {top}, last {len(values)} s")
        return sparkline(
            values, label, color=rank.rank, low=0.0, width=SPARKLINE_WIDTH, is_static=is_static
        )
