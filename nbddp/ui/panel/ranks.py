"""Many ranks at a glance: how they are in one line, and a compact grid; a few have a row each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nbddp.charts.palette import rank_class, rank_color
from nbddp.formatting import format_bytes
from nbddp.record.snapshot import RankSnapshot
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.by_node import NodeOfRanks, by_node
from nbddp.ui.panel.html import Cell, escape, rank_table
from nbddp.ui.panel.nodes import node_table
from nbddp.ui.words import say_lag, say_seconds, say_step

FEW = 8  # ranks with a row each; more are in a grid


def left_of(bars: Sequence[LoopProgress]) -> float | None:
    """Seconds until the outermost loop that knows its total ends, None where that is not known.

    The loops in it say how far its present round is.
    """
    known = [bar for bar in bars if bar.total]
    if not known:
        return None
    outer, *inner = known
    part = inner[0].done / inner[0].total if inner else 0.0
    done = min(float(outer.total), outer.done + part)
    if not done or outer.seconds <= 0:
        return None
    return (outer.total - done) * outer.seconds / done


def seconds_left(ranks: Sequence[RankSnapshot]) -> float | None:
    """Until the last rank is through; a rank that has ended has no time left."""
    known = [left_of(each.bars) for each in ranks if each.goes_on]
    return max((left for left in known if left is not None), default=None)


def stragglers(ranks: Sequence[RankSnapshot]) -> list[int]:
    """The ranks that are marked as slow and go on, the slowest first."""
    slow = [(each.lag.share, each.rank) for each in ranks if each.lag and each.goes_on]
    return [rank for _, rank in sorted(slow, key=lambda each: (-each[0], each[1]))]


def overview(ranks: Sequence[RankSnapshot]) -> str:
    """All ranks in one line.

    >>> overview([RankSnapshot(rank=rank, state="running") for rank in range(64)])
    '64 running'
    """
    counts = Counter(each.state if each.is_well else _trouble(each) for each in ranks)
    said = [f"{count} {state}" for state, count in counts.most_common(4)]
    slow, left = stragglers(ranks), seconds_left(ranks)
    if slow:
        said.append(f"slowest {slow[0]}")
    if left:
        said.append(f"{say_seconds(left)} left")
    return " · ".join(said)


def _trouble(each: RankSnapshot) -> str:
    if each.is_cause:
        return "failed"
    return "interrupted" if each.state.startswith("interrupted") else "ended"


def grid(ranks: Sequence[RankSnapshot], *, of: str = "") -> str:
    """A small field for each rank: its number, how far it is, and whether it is well and slow."""
    fields = "".join(map(_field, ranks))
    label = f"ranks of {escape(of)}" if of else "ranks"
    return f'<div class="nbddp-grid" role="list" aria-label="{label}">{fields}</div>'


def _field(each: RankSnapshot) -> str:
    is_odd = not each.is_well or each.state == "waiting" or each.lag is not None
    kind = "nbddp-wrong" if each.is_cause else "nbddp-waits" if is_odd else ""
    known = [bar for bar in each.bars if bar.total]
    share = min(1.0, known[0].done / known[0].total) if known else 0.0
    step, memory = say_step(each), format_bytes(each.memory) if each.memory else ""
    where = f" on {each.node}" if each.node else ""
    said = [f"rank {each.rank}{where}: {each.state}", f"step {step}" if step else "", memory]
    title = escape(" · ".join(filter(None, [*said, say_lag(each.lag) if each.lag else ""])))
    color = rank_color(each.rank)
    return (
        f'<span class="nbddp-field {kind}" role="listitem" title="{title}">'
        f'{each.rank}{"↓" if each.lag else ""}<span class="nbddp-bar {rank_class(each.rank)}"'
        f' aria-hidden="true"><span style="width:{share:.1%};background:{color}"></span></span>'
        "</span>"
    )


def ranks_html(
    ranks: Sequence[RankSnapshot], *, is_open: bool, curves: Mapping[str, Cell] | None = None
) -> str:
    """A few ranks as rows; many as a line, those with trouble as rows, and all of them if asked.

    Many ranks on several nodes have a row for each node, too.

    ``curves`` draws something for a rank, by the title of the column that it goes to.
    """
    if len(ranks) <= FEW:
        is_telling = bool(stragglers(ranks) or seconds_left(ranks))
        return (_line(ranks) if is_telling else "") + rank_table(ranks, curves=curves)
    nodes = by_node(ranks)
    told = [each for each in ranks if each.is_cause][:FEW]
    rows = node_table(nodes) if nodes else rank_table(told) if told else ""
    return _line(ranks) + rows + (_fields(ranks, nodes) if is_open else "")


def _fields(ranks: Sequence[RankSnapshot], nodes: Sequence[NodeOfRanks]) -> str:
    if not nodes:
        return grid(ranks)
    return "".join(
        f'<div class="nbddp-grid-of"><span class="nbddp-muted">{escape(node.title)}</span>'
        f"{grid(node.ranks, of=node.title)}</div>"
        for node in nodes
    )


def _line(ranks: Sequence[RankSnapshot]) -> str:
    return f'<div class="nbddp-overview">{escape(overview(ranks))}</div>'
