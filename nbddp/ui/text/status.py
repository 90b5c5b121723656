"""The worker group at one moment, as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui.words import (
    aligned,
    say_bar,
    say_bytes,
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


def status(snapshot: Snapshot) -> str:
    """The state of the group and of every rank."""
    if not snapshot.state.is_live:
        return NO_GROUP
    facts = [snapshot.state.value, *say_facts(snapshot)]
    lines = ["worker group: " + " · ".join(facts)]
    lines += _table([_HEAD, *(_row(each) for each in snapshot.ranks)])
    return "\n".join([*lines, *_footer(snapshot)])


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
    parts = [say_bytes(each.memory)]
    if each.gpu_memory:
        parts.append(f"GPU {say_bytes(each.gpu_memory)}")
    return ", ".join(filter(None, parts))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need be; those that are empty all the way down are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return aligned(list(zip(*columns, strict=True)))


def _footer(snapshot: Snapshot) -> Iterator[str]:
    for each in snapshot.ranks:
        for bar in each.bars:
            yield f"rank {each.rank}: {say_bar(bar)}"
    said = [(event, say_event(event)) for event in snapshot.events]
    for event, text in [pair for pair in said if pair[1]][-SHOWN_EVENTS:]:
        yield f"{say_seconds(max(0.0, event.at - snapshot.began))} after the start: {text}"
    if snapshot.alarm:
        yield snapshot.alarm
    if snapshot.folder:
        yield f"logs in {shorten(snapshot.folder)}"
    if snapshot.refused:
        yield say_refused(snapshot.refused)
