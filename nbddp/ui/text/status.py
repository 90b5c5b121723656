"""The worker group at one moment, as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.errors import say_ranks
from nbddp.formatting import format_bytes
from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui.by_node import NodeOfRanks, by_node
from nbddp.ui.words import (
    aligned,
    say_awaited,
    say_bar,
    say_cpu,
    say_event,
    say_facts,
    say_refused,
    say_seconds,
    say_step,
    shorten,
)

_HEAD = ("rank", "node", "state", "line", "collective", "step", "cpu", "memory", "pid")
SHOWN_EVENTS = 8
FEW = 8  # ranks with a row each; more are put together by node, where there are several


def status(snapshot: Snapshot) -> str:
    """The state of the group and of every rank; of many, what is alike is said once for a node."""
    if not snapshot.state.is_live:
        return NO_GROUP
    facts = [snapshot.state.value, *say_facts(snapshot)]
    lines = ["worker group: " + " · ".join(facts)]
    nodes = by_node(snapshot.ranks) if len(snapshot.ranks) > FEW else []
    lines += _table([_HEAD, *_rows(snapshot, nodes)])
    return "\n".join([*lines, *_footer(snapshot, _with_bars(snapshot, nodes))])


def _rows(snapshot: Snapshot, nodes: Sequence[NodeOfRanks]) -> Iterator[tuple[str, ...]]:
    if not nodes:
        yield from map(_row, snapshot.ranks)
    for node in nodes:
        yield _row_of_node(node)
        yield from map(_row, node.others)


def _row_of_node(node: NodeOfRanks) -> tuple[str, ...]:
    said = say_ranks([each.rank for each in node.ranks])
    for_seconds = f" for {say_seconds(node.seconds)}" if node.place and node.seconds else ""
    return (
        said.removeprefix("ranks ").removeprefix("rank "),
        node.title,
        f"{len(node.usual)} of {len(node.ranks)} {node.state}" if node.others else node.state,
        f"{node.place}{for_seconds}",
        node.collective,
        node.step,
        node.cpu,
        format_bytes(node.memory) if node.memory else "",
        "",
    )


def _with_bars(snapshot: Snapshot, nodes: Sequence[NodeOfRanks]) -> Sequence[RankSnapshot]:
    """Whose loops are shown: of many ranks only the one that is furthest behind."""
    if not nodes:
        return snapshot.ranks
    known = [each for each in snapshot.ranks if each.bars and each.bars[0].total]
    return sorted(known, key=lambda each: each.bars[0].done / each.bars[0].total)[:1]


def _row(each: RankSnapshot) -> tuple[str, ...]:
    if not each.is_alive:
        return (str(each.rank), each.node, each.state, *[""] * (len(_HEAD) - 3))
    return (
        str(each.rank),
        each.node,
        each.state,
        say_line(each),
        each.collective,
        say_step(each),
        say_cpu(each),
        say_memory(each),
        str(each.pid or ""),
    )


def say_line(each: RankSnapshot) -> str:
    """The cell's line that a rank is on, and for how long."""
    if not each.line:
        return ""
    return f"{each.place} for {say_seconds(each.seconds)}" if each.seconds else each.place


def say_memory(each: RankSnapshot) -> str:
    """A rank's memory, and that of its GPU."""
    parts = [format_bytes(each.memory) if each.memory else ""]
    if each.gpu_memory:
        parts.append(f"GPU {format_bytes(each.gpu_memory)}")
    return ", ".join(filter(None, parts))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need be; those that are empty all the way down are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return aligned(list(zip(*columns, strict=True)))


def _footer(snapshot: Snapshot, shown: Sequence[RankSnapshot]) -> Iterator[str]:
    for each in shown:
        for bar in each.bars:
            yield f"rank {each.rank}: {say_bar(bar)}"
    said = [(event, say_event(event)) for event in snapshot.events]
    for event, text in [pair for pair in said if pair[1]][-SHOWN_EVENTS:]:
        yield f"{say_seconds(max(0.0, event.at - snapshot.began))} after the start: {text}"
    if snapshot.alarm:
        yield snapshot.alarm
    if snapshot.awaited:
        yield say_awaited(snapshot.awaited)
    if snapshot.folder:
        yield f"logs in {shorten(snapshot.folder)}"
    if snapshot.refused:
        yield say_refused(snapshot.refused)
